"""Lengths of keys and queries, for kernels that are to normalise them, in calls without kernels/prepare.py, which finds them too.

    lengths = 1 / |k|, query_lengths = 1 / |q|, |x| = sqrt(<x, x> + 1e-6)    [tokens, Hk]    float32

Plan, one block of four warps per (64 tokens, two key heads, k or q): a warp takes 16 tokens of both heads, and each lane has 16 bytes of a row in
every load (kernels/common.py: jax_qla_measure). It reads 512 bytes a token and key head at K = 128 and waits for memory alone.
"""

from dataclasses import dataclass

import jax

from jax_qla.kernels.common import CHUNK, LENGTHS_PRELUDE, MATRIX_PRELUDE, PASS_CONFIGS
from jax_qla.kernels.specification import inverse_length

__all__ = ["PASS_CONFIGS", "Config", "program", "specification"]


@dataclass(frozen=True)
class Config:
    """Sizes this program is specialised for: `key_dim` 64 or 128, `dtype` "bfloat16"."""

    key_dim: int = 128
    dtype: str = "bfloat16"


def program(config: Config):
    """The TileLang program. Numbers of tokens and heads are run-time values."""
    import tilelang.language as T

    K, dtype = config.key_dim, config.dtype
    tokens, key_heads = T.dynamic("tokens, key_heads")

    @T.prim_func
    def lengths(
        q: T.Tensor((tokens, key_heads, K), dtype),
        k: T.Tensor((tokens, key_heads, K), dtype),
        lengths: T.Tensor((tokens, key_heads), "float32"),
        query_lengths: T.Tensor((tokens, key_heads), "float32"),
    ):
        with T.Kernel(
            T.ceildiv(tokens, CHUNK) * T.ceildiv(key_heads, 2), 2, threads=128, prelude=MATRIX_PRELUDE + LENGTHS_PRELUDE
        ) as (block, of_queries):
            pairs = T.ceildiv(key_heads, 2)
            first = T.truncdiv(block, pairs) * CHUNK + T.get_thread_binding() // 32 * 16
            head = T.truncmod(block, pairs) * 2
            if of_queries == 0:
                T.call_extern(
                    "handle",
                    f"jax_qla_measure<{K}>",
                    T.address_of(k[0, 0, 0]),
                    T.address_of(lengths[0, 0]),
                    tokens,
                    key_heads,
                    first,
                    head,
                )
            else:
                T.call_extern(
                    "handle",
                    f"jax_qla_measure<{K}>",
                    T.address_of(q[0, 0, 0]),
                    T.address_of(query_lengths[0, 0]),
                    tokens,
                    key_heads,
                    first,
                    head,
                )
            T.pdl_sync()  # ends after what came before, for what follows waits for this kernel alone

    return lengths


def specification(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(lengths, query_lengths), [tokens, Hk]."""
    return inverse_length(k, 1), inverse_length(q, 1)
