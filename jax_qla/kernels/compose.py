"""The states between the pieces of a sequence, from what each piece does to the state before it (kernels/summaries.py).

    forward    entering[p + 1] = response[p] + M[p] entering[p],   entering[first] = initial_state
    reverse    entering[p - 1] = response[p] + M[p]^T entering[p], entering[last]  = d_final_state

A piece is entered from the side that the recurrence comes from: reversed, entering[p] is the gradient of the state after piece p.
Pieces that are `forgotten` take no product: those that decay, and a sequence's first (reversed, its last), whose response has been
computed from its own state.

Plan, one block per (sequence, value head, tile of 64 value columns), 160 threads, two stages:

    warp 4         loads response and M with TMA
    warpgroup 0    the state, transposed, in float32; it leaves through a tile of its own. A product with M is three wgmma of bf16
                   parts (high high, low high, high low: 16 bits of mantissa), whose accumulator begins with the response

    barrier         arrives  waits   says
    loaded[stage]   TMA      state   response and M of a piece are there
    free[stage]     state    warp 4  the stage may be overwritten

The chain of pieces is serial: 1.4 us a piece are the goal, of which the products take 0.9.
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
    """The TileLang program. Numbers of heads, pieces and sequences are run-time values."""
    import tilelang.language as T
    from tilelang.layout import make_full_bank_swizzled_layout

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
        spans: T.Tensor((sequences, 2), "int32"),
        entering: T.Tensor((parts, value_heads, K, V), "float32"),
    ):
        with T.Kernel(sequences * tiles, value_heads, threads=160) as (block, head):
            T.annotate_min_blocks_per_sm(1)
            if not reverse:
                T.pdl_sync()
            # After the wait: what follows begins with what the kernels before this one wrote (kernels/forward.py: STATE).
            T.pdl_trigger()
            n = T.alloc_var("int32")
            first = T.alloc_var("int32")  # piece that is entered first
            count = T.alloc_var("int32")
            n = block // tiles
            first = spans[n, 0]
            count = spans[n, 1]
            part = (block % tiles) * 64
            tx = T.get_thread_binding()

            m_s = T.alloc_shared((2, 2, K, K), "bfloat16")  # M transposed, high and low
            # [K, 64] in two halves of 128 bytes a row, swizzled: no bank conflict between the lanes of a fragment
            r_s = T.alloc_shared((4, K, 32), "float32")
            e_s = T.alloc_shared((2, K, 32), "float32")
            T.annotate_layout({x: make_full_bank_swizzled_layout(x) for x in (r_s, e_s)})
            loaded = T.alloc_barrier([32] * 2)
            free = T.alloc_barrier([128] * 2)

            if tx >= 128:
                for step in T.serial(count - 1):
                    if step >= 2:
                        T.barrier_wait(free[step % 2], (step // 2 + 1) % 2)
                    for half in T.unroll(2):
                        T.tma_copy(
                            response[
                                first + (count - 1 - step if reverse else step),
                                head,
                                0:K,
                                part + half * 32 : part + half * 32 + 32,
                            ],
                            r_s[step % 2 * 2 + half, :, :],
                            barrier=loaded[step % 2],
                            leader_scope_threads=32,
                        )
                    if forgotten[first + (count - 1 - step if reverse else step), head] == 0:
                        for half in T.unroll(2):
                            T.tma_copy(
                                transition[first + (count - 1 - step if reverse else step), head, half, 0:K, 0:K],
                                m_s[step % 2, half, :, :],
                                barrier=loaded[step % 2],
                                leader_scope_threads=32,
                            )
                    T.barrier_arrive(loaded[step % 2])
            else:
                state = T.alloc_fragment((64, K), "float32")
                high = T.alloc_fragment((64, K), "bfloat16")
                low = T.alloc_fragment((64, K), "bfloat16")
                piece = T.alloc_var("int32")
                if initial_states > 0:
                    for i, j in T.Parallel(64, K):
                        state[i, j] = initial_state[n, head, j, part + i]
                else:
                    T.clear(state)
                for step in T.serial(count):
                    piece = first + (count - 1 - step if reverse else step)
                    T.tma_store_wait(0)
                    T.sync_threads(1, 128)  # the state before has left
                    for i, j in T.Parallel(64, K):
                        e_s[i // 32, j, i % 32] = state[i, j]
                    T.fence_proxy_async()
                    T.sync_threads(1, 128)
                    for half in T.unroll(2):
                        T.tma_copy(
                            e_s[half, :, :],
                            entering[piece, head, 0:K, part + half * 32 : part + half * 32 + 32],
                            leader_scope_threads=128,
                        )
                    if step < count - 1:
                        T.copy(state, high)
                        for i, j in T.Parallel(64, K):
                            low[i, j] = T.cast(state[i, j] - T.cast(high[i, j], "float32"), "bfloat16")
                        T.barrier_wait(loaded[step % 2], step // 2 % 2)
                        for i, j in T.Parallel(64, K):
                            state[i, j] = r_s[step % 2 * 2 + i // 32, j, i % 32]
                        # A vote, and the wait inside: ptxas serialises wgmma in a branch that it takes for divergent.
                        if T.call_extern("int32", "__any_sync", T.uint32(0xFFFFFFFF), forgotten[piece, head] == 0) != 0:
                            T.wgmma_gemm(high, m_s[step % 2, 0, :, :], state, transpose_B=reverse)
                            T.wgmma_gemm(low, m_s[step % 2, 0, :, :], state, transpose_B=reverse)
                            T.wgmma_gemm(high, m_s[step % 2, 1, :, :], state, transpose_B=reverse)
                            T.wait_wgmma(0)
                        T.barrier_arrive(free[step % 2])
                T.tma_store_wait(0)
            if reverse:
                T.pdl_sync()  # ends after the forward one, for what follows waits for this kernel alone

    return compose


def specification(
    transition: jax.Array,
    response: jax.Array,
    forgotten: jax.Array,
    initial_state: jax.Array,
    spans: jax.Array,
    *,
    reverse: bool = False,
) -> jax.Array:
    """entering [P, Hv, K, V]; that of a piece which no sequence has is not a number here."""
    parts = response.shape[0]
    first, counts = spans[:, 0], spans[:, 1]
    maps = jnp.swapaxes(jnp.sum(transition.astype(response.dtype), axis=2), -1, -2)
    if reverse:
        maps = jnp.swapaxes(maps, -1, -2)
    begin = jnp.zeros((spans.shape[0], *response.shape[1:]), response.dtype)
    if initial_state.shape[0]:
        begin = initial_state

    def step(carry, i):
        state, entering = carry
        inside = i < counts
        piece = first + (counts - 1 - i if reverse else i)
        entering = entering.at[jnp.where(inside, piece, parts)].set(state, mode="drop")
        alone = (forgotten[piece] != 0)[..., None, None]
        product = jnp.einsum("nhij,nhjv->nhiv", jnp.where(alone, 0, maps[piece]), state)
        return (jnp.where((i < counts - 1)[:, None, None, None], response[piece] + product, state), entering), None

    entering = jnp.full_like(response, jnp.nan)
    (_, entering), _ = jax.lax.scan(step, (begin, entering), jnp.arange(parts))
    return entering
