"""The states between the pieces of a sequence, from what each piece does to the state before it (kernels/summaries.py).

    forward    entering[p + 1] = response[p] + M[p] entering[p],   entering[first] = initial_state
    reverse    entering[p - 1] = response[p] + M[p]^T entering[p], entering[last]  = d_final_state

A piece is entered from the side that the recurrence comes from: reversed, entering[p] is the gradient of the state after piece p.
The first response (reversed, the last) has been computed from its own state and takes no product; nor do forgotten pieces.

Plan, one block per (sequence, value head, tile of 64 value columns), 160 threads:

    warp 4         loads M with TMA, two stages
    warpgroup 0    the state, transposed, in float32; a product with M is three wgmma of bf16 parts (high high, low high, high low: 16
                   bits of mantissa), whose accumulator begins with the response, fetched one piece ahead
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jax_qla.kernels.common import PASS_CONFIGS

__all__ = ["PASS_CONFIGS", "Config", "program", "specification"]


@dataclass(frozen=True)
class Config:
    """Sizes this program is specialised for: `key_dim`, `value_dim` 64 or 128, and whether it runs in `reverse`."""

    key_dim: int = 128
    value_dim: int = 128
    reverse: bool = False


def program(config: Config):
    """The TileLang program. Numbers of heads, pieces and sequences, and a piece's length, are run-time values."""
    import tilelang.language as T

    K, V, reverse = config.key_dim, config.value_dim, config.reverse
    tiles = V // 64
    value_heads, parts, sequences = T.dynamic("value_heads, parts, sequences")
    initial_states = T.dynamic("initial_states")  # sequences, or 0: not given

    @T.prim_func
    def compose(
        transition: T.Tensor((parts, value_heads, 2, K, K), "bfloat16"),
        response: T.Tensor((parts, value_heads, K, V), "float32"),
        forgotten: T.Tensor((parts, value_heads), "int32"),
        initial_state: T.Tensor((initial_states, value_heads, K, V), "float32"),
        segments: T.Tensor((sequences, 2), "int32"),
        entering: T.Tensor((parts, value_heads, K, V), "float32"),
        piece_rows: T.int32,
    ):
        with T.Kernel(sequences * tiles, value_heads, threads=160) as (block, head):
            T.annotate_min_blocks_per_sm(1)
            if not reverse:
                T.pdl_sync()
            T.pdl_trigger()
            n = T.alloc_var("int32")
            first = T.alloc_var("int32")  # piece that is entered first
            count = T.alloc_var("int32")
            used = T.alloc_var("int32")
            n = block // tiles
            first = T.truncdiv(segments[n, 0], piece_rows) + n
            count = T.max(T.truncdiv(segments[n, 1] - segments[n, 0] + piece_rows - 1, piece_rows), 1)
            part = (block % tiles) * 64
            tx = T.get_thread_binding()
            used = 0

            m_s = T.alloc_shared((2, 2, K, K), "bfloat16")  # M transposed, high and low
            loaded = T.alloc_barrier([32] * 2)
            free = T.alloc_barrier([128] * 2)

            if tx >= 128:
                for step in T.serial(1, count - 1):
                    if forgotten[first + (count - 1 - step if reverse else step), head] == 0:
                        if used >= 2:
                            T.barrier_wait(free[used % 2], (used // 2 + 1) % 2)
                        for half in T.unroll(2):
                            T.tma_copy(
                                transition[first + (count - 1 - step if reverse else step), head, half, 0:K, 0:K],
                                m_s[used % 2, half, :, :],
                                barrier=loaded[used % 2],
                                leader_scope_threads=32,
                            )
                        T.barrier_arrive(loaded[used % 2])
                        used = used + 1
            else:
                state = T.alloc_fragment((64, K), "float32")
                ahead = T.alloc_fragment((64, K), "float32")
                high = T.alloc_fragment((64, K), "bfloat16")
                low = T.alloc_fragment((64, K), "bfloat16")
                piece = T.alloc_var("int32")
                if initial_states > 0:
                    for i, j in T.Parallel(64, K):
                        state[i, j] = initial_state[n, head, j, part + i]
                else:
                    T.clear(state)
                piece = first + (count - 1 if reverse else 0)
                if count > 1:
                    for i, j in T.Parallel(64, K):
                        ahead[i, j] = response[piece, head, j, part + i]
                for step in T.serial(count):
                    piece = first + (count - 1 - step if reverse else step)
                    for i, j in T.Parallel(64, K):
                        entering[piece, head, j, part + i] = state[i, j]
                    if step < count - 1:
                        T.copy(state, high)
                        for i, j in T.Parallel(64, K):
                            low[i, j] = T.cast(state[i, j] - T.cast(high[i, j], "float32"), "bfloat16")
                        T.copy(ahead, state)
                        if step < count - 2:
                            for i, j in T.Parallel(64, K):
                                ahead[i, j] = response[piece + (-1 if reverse else 1), head, j, part + i]
                        if step > 0 and forgotten[piece, head] == 0:
                            T.barrier_wait(loaded[used % 2], (used // 2) % 2)
                            T.wgmma_gemm(high, m_s[used % 2, 0, :, :], state, transpose_B=reverse)
                            T.wgmma_gemm(low, m_s[used % 2, 0, :, :], state, transpose_B=reverse)
                            T.wgmma_gemm(high, m_s[used % 2, 1, :, :], state, transpose_B=reverse)
                            T.wait_wgmma(0)
                            T.barrier_arrive(free[used % 2])
                            used = used + 1
            if reverse:
                T.pdl_sync()  # ends after the forward one, for what follows waits for this kernel alone

    return compose


def specification(
    transition: jax.Array,
    response: jax.Array,
    forgotten: jax.Array,
    initial_state: jax.Array,
    segments: jax.Array,
    *,
    piece_rows: int,
    reverse: bool = False,
) -> jax.Array:
    """entering [P, Hv, K, V]; that of a piece which no sequence has is not a number here."""
    parts = response.shape[0]
    n = jnp.arange(segments.shape[0])
    first = segments[:, 0] // piece_rows + n
    counts = jnp.maximum((segments[:, 1] - segments[:, 0] + piece_rows - 1) // piece_rows, 1)
    maps = jnp.swapaxes(jnp.sum(transition.astype(response.dtype), axis=2), -1, -2)
    if reverse:
        maps = jnp.swapaxes(maps, -1, -2)
    begin = jnp.zeros((segments.shape[0], *response.shape[1:]), response.dtype)
    if initial_state.shape[0]:
        begin = initial_state

    def step(carry, i):
        state, entering = carry
        inside = i < counts
        piece = first + (counts - 1 - i if reverse else i)
        entering = entering.at[jnp.where(inside, piece, parts)].set(state, mode="drop")
        alone = ((i == 0) | (forgotten[piece] != 0))[..., None, None]
        product = jnp.einsum("nhij,nhjv->nhiv", jnp.where(alone, 0, maps[piece]), state)
        return (jnp.where((i < counts - 1)[:, None, None, None], response[piece] + product, state), entering), None

    entering = jnp.full_like(response, jnp.nan)
    (_, entering), _ = jax.lax.scan(step, (begin, entering), jnp.arange(parts))
    return entering
