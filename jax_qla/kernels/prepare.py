"""Chunk-local preparation: in-chunk decay and the inverse that turns the delta rule into matrix products.

For every chunk of 64 tokens and every value head h (key head h // r, r = Hv / Hk), in the notation of ALGORITHM.md:

    gamma_i = sum_{j <= i} max(g_j, -110)                                       [64]       float32
    L_ij    = beta_i <k_i, k_j> exp(gamma_i - gamma_j)   for i > j, else 0      [64, 64]   float32
    a       = (I + L)^{-1}                                                      [64, 64]   stored in the dtype of k

The *gated* matrix is inverted: the gate-free one can overflow where the recurrence itself is stable (long keys, strong decay).

Plan, one block per (chunk slot, key head), 160 threads:

    warp 4            loads the key tile with TMA and zeroes the rows of `o` which belong to no sequence
    warpgroup 0       K K^T once per key head (wgmma, kept in registers), then for two value heads at a time:
                        all 128 threads   gates and L^T to shared memory (rows of 68 floats: no bank conflicts)
                        64 threads a head forward substitution in float32: thread c owns column c of the inverse in 64 registers,
                                          L is read as broadcasts, the updates of one step are independent of each other;
                                          columns 32.. start at row 32, their rows above are zero

The substitution costs 2016 + 496 FMA a warp and head, and no barrier.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jax_qla.kernels.common import CHUNK, LOG2_E, MIN_LOG_DECAY, PASS_CONFIGS
from jax_qla.kernels.specification import decay, gather_chunks, scatter_chunks

__all__ = ["PASS_CONFIGS", "Config", "program", "specification"]


@dataclass(frozen=True)
class Config:
    """Sizes this program is specialised for: `key_dim` 64 or 128, `dtype` "bfloat16" or "float16"."""

    key_dim: int = 128
    dtype: str = "bfloat16"


def program(config: Config):
    """The TileLang program. Numbers of tokens, heads, value columns and chunk slots are run-time values."""
    import tilelang.language as T

    C, K, dtype = CHUNK, config.key_dim, config.dtype
    tokens, key_heads, value_heads, value_dim, slots = T.dynamic("tokens, key_heads, value_heads, value_dim, slots")

    @T.prim_func
    def prepare(
        k: T.Tensor((tokens, key_heads, K), dtype),
        g: T.Tensor((tokens, value_heads), "float32"),
        beta: T.Tensor((tokens, value_heads), "float32"),
        chunks: T.Tensor((slots, 4), "int32"),
        a: T.Tensor((tokens, value_heads, C), dtype),
        gamma: T.Tensor((tokens, value_heads), "float32"),
        o: T.Tensor((tokens, value_heads, value_dim), dtype),
        ratio: T.int32,
    ):
        with T.Kernel(slots, key_heads, threads=160) as (slot, key_head):
            T.annotate_min_blocks_per_sm(3)
            row = chunks[slot, 1]
            rows = chunks[slot, 2]
            fill = chunks[slot, 3]
            tx = T.get_thread_binding()

            k_s = T.alloc_shared((C, K), dtype)
            lower_s = T.alloc_shared((2, C, C + 4), "float32")  # transposed: [head, column, row]
            g_s = T.alloc_shared((2, C), "float32")
            gamma_s = T.alloc_shared((2, C), "float32")  # in units of log2
            beta_s = T.alloc_shared((2, C), "float32")
            loaded = T.alloc_barrier(32)

            if tx >= 128:
                if rows > 0:
                    T.tma_copy(k[row : row + C, key_head, 0:K], k_s, barrier=loaded, leader_scope_threads=32)
                    T.barrier_arrive(loaded)
                for i in T.serial(fill):
                    for h in T.serial(ratio):
                        for x in T.serial(value_dim // 32):
                            o[row + rows + i, key_head * ratio + h, x * 32 + tx - 128] = T.cast(0, dtype)
            else:
                if rows > 0:
                    kk = T.alloc_fragment((C, C), "float32")
                    column = T.alloc_local((C,), "float32")
                    total = T.alloc_var("float32")
                    half = tx // 64
                    c = tx % 64
                    T.barrier_wait(loaded, 0)
                    T.gemm(k_s, k_s, kk, transpose_B=True, clear_accum=True)
                    for pair in T.serial((ratio + 1) // 2):
                        own = pair * 2 + half < ratio
                        head = key_head * ratio + pair * 2 + half
                        if own and c < rows:
                            g_s[half, c] = T.max(g[row + c, head], T.float32(MIN_LOG_DECAY))
                            beta_s[half, c] = beta[row + c, head]
                        else:
                            g_s[half, c] = 0.0
                            beta_s[half, c] = 0.0
                        T.sync_threads(1, 128)
                        total = 0.0
                        for j in T.unroll(C):
                            total = total + T.if_then_else(j <= c, g_s[half, j], T.float32(0))
                        gamma_s[half, c] = total * LOG2_E
                        if own and c < rows:
                            gamma[row + c, head] = total
                        T.sync_threads(1, 128)
                        for s in T.unroll(2):
                            for i, j in T.Parallel(C, C):
                                lower_s[s, j, i] = T.if_then_else(
                                    i > j,
                                    beta_s[s, i]
                                    * kk[i, j]
                                    * T.exp2(T.min(gamma_s[s, i] - gamma_s[s, j], T.float32(0))),
                                    T.float32(0),
                                )
                        T.sync_threads(1, 128)
                        for i in T.unroll(C):
                            column[i] = T.if_then_else(c == i, T.float32(1), T.float32(0))
                        if c >= 32:
                            for j in T.unroll(32, C):
                                for i in T.unroll(C - 1 - j):
                                    column[i + j + 1] = column[i + j + 1] - lower_s[half, j, i + j + 1] * column[j]
                        else:
                            for j in T.unroll(C):
                                for i in T.unroll(C - 1 - j):
                                    column[i + j + 1] = column[i + j + 1] - lower_s[half, j, i + j + 1] * column[j]
                        if own:
                            for i in T.unroll(C):
                                if i < rows:
                                    a[row + i, head, c] = T.cast(column[i], dtype)
                        T.sync_threads(1, 128)  # the next heads' gates overwrite what slower warps may still read

    return prepare


def specification(
    k: jax.Array, g: jax.Array, beta: jax.Array, chunks: jax.Array, *, ratio: int
) -> tuple[jax.Array, jax.Array]:
    """(a [tokens, Hv, 64] in k's dtype, gamma [tokens, Hv]); `o` is not a result, only its unused rows are zeroed."""
    keys = jnp.repeat(gather_chunks(k, chunks), ratio, axis=2)
    gamma = jnp.cumsum(jnp.maximum(gather_chunks(g, chunks), MIN_LOG_DECAY), axis=1)
    product = jnp.einsum("sihk,sjhk->sijh", keys, keys) * gather_chunks(beta, chunks)[:, :, None]
    lower = jnp.moveaxis(product * decay(gamma, strict=True), 3, 1)
    identity = jnp.broadcast_to(jnp.eye(CHUNK, dtype=lower.dtype), lower.shape)
    inverse = jax.lax.linalg.triangular_solve(
        lower + identity, identity, left_side=True, lower=True, unit_diagonal=True
    )
    a = scatter_chunks(jnp.moveaxis(inverse, 1, 2), chunks, k.shape[0], k.dtype)
    return a, scatter_chunks(gamma, chunks, k.shape[0], g.dtype)
