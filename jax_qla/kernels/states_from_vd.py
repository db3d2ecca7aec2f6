"""The states before every chunk, recomputed for the backward pass from the corrected values Vd that the forward pass has kept.

Of the recurrence of kernels/states.py what is left where Vd is known:

    h  = S                                                  [K, V] before the chunk, stored as transposed tiles of 64 rows of K
    S' = exp(gamma_C) S + K^T diag(exp(gamma_C - gamma)) Vd [K, V]

One product a chunk instead of three, and nothing of V, `a`, beta and the lengths: a chunk and head moves 56 KB (K = V = 128, two value heads a key head,
whose keys are loaded once) instead of 80, and memory binds by far.

Plan, one block per (sequence, value head, tile of `value_tile` value columns), long sequences first; S^T and Vd^T stay in registers:

    warpgroup       registers  work
    0 (and 1)       216        64 value columns each: S^T in float32, its rounding, h, to a tile, two of which take turns
    last            56         warp 0 loads K and Vd, 1 sends h; 2 and 3: gates, a thread a row

    barrier         arrives      waits         says
    loaded[stage]   TMA, gates   state         K, Vd and the factors of their rows are there
    free[stage]     state        loads, gates  the product is done: the stage may be overwritten
    full[turn]      state        sends         h is there
    sent[turn]      sends        state         and has left

Nobody asks for the state after the last chunk, the only one that may have less than 64 rows: of that nothing is loaded.
A launch computes as many value heads as h has room for, from `first_head` on (policy.head_groups). The two halves of a head are neighbours on the card
(policy.neighbours). Vd is rounded, and so the update here differs from that of the forward pass by a rounding more.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jax_qla.kernels import first_state
from jax_qla.kernels.common import CHUNK, LOG2_E, LONG, PASS_CONFIGS, ROUND
from jax_qla.kernels.macros import call, leave_first, macros, over, place_of, rest_is_empty, unfenced
from jax_qla.kernels.preludes import LENGTH_PRELUDE, TILE_PRELUDE
from jax_qla.kernels.specification import (
    gather_chunks,
    last_row,
    of_chunk_slots,
    of_heads,
    scan_slots,
    state_tiles,
    states_given,
)
from jax_qla.kernels.states import EVERYTHING, NOTHING
from jax_qla.kernels.uncut import UNCUT_PRELUDE

__all__ = ["EVERYTHING", "NOTHING", "PASS_CONFIGS", "Config", "program", "specification"]


PRELUDE = TILE_PRELUDE + LENGTH_PRELUDE + UNCUT_PRELUDE


@dataclass(frozen=True)
class Config:
    """Sizes this program is specialised for: `key_dim`, `value_dim` 64 or 128, `dtype` "bfloat16" or "float16", and `value_tile`, the value columns of
    a block: 64, or 128 where V is."""

    key_dim: int = 128
    value_dim: int = 128
    dtype: str = "bfloat16"
    value_tile: int = 128


def program(config: Config):
    """The TileLang program. Numbers of tokens, heads, sequences and chunk slots are run-time values."""
    import tilelang.language as T
    from tilelang.layout import make_full_bank_swizzled_layout

    C, K, V, W, dtype = CHUNK, config.key_dim, config.value_dim, config.value_tile, config.dtype
    tiles = V // W  # blocks a head
    parts = W // 64  # warpgroups that hold the state
    stages = 4
    S = 128 * parts  # their threads
    m, begin_with = macros(), first_state.macros().begin_with
    by_rows = T.GemmWarpPolicy.FullRow  # a warpgroup has 64 rows, not columns, of a product
    tokens, key_heads, value_heads, sequences, state_slots = T.dynamic(
        "tokens, key_heads, value_heads, sequences, state_slots"
    )
    heads = T.dynamic("heads")  # of this launch, from first_head on
    initial_states = T.dynamic("initial_states")  # sequences, or 0: not given
    cut_pieces = T.dynamic("cut_pieces")  # or 0: each of `segments` has an initial state
    cuts = T.dynamic("cuts")  # places for them, or 0
    whole_sequences = T.dynamic("whole_sequences")  # or 0

    @T.prim_func
    def states_from_vd(
        k: T.Tensor((tokens, key_heads, K), dtype),
        vd: T.Tensor((tokens, value_heads, V), dtype),
        gamma: T.Tensor((tokens, value_heads), "float32"),
        initial_state: T.Tensor((initial_states, value_heads, K, V), "float32"),
        segments: T.Tensor((sequences, 2), "int32"),  # sequences, or their pieces
        pieces: T.Tensor((cut_pieces, 4), "int32"),
        entering: T.Tensor((cuts, value_heads, K, V), "float32"),  # the states between pieces
        h: T.Tensor((state_slots, heads, K // 64, V, 64), dtype),
        bounds: T.Tensor((whole_sequences, 2), "int32"),
        ratio: T.int32,
        first_head: T.int32,
        awaits: T.int32,
        cut_beyond: T.int32,  # rows, or -1 (kernels/uncut.py)
    ):
        with T.Kernel(
            heads * tiles,
            *over(sequences),
            threads=S + 128,
            prelude=PRELUDE,
        ) as (of_place, low_place, high_place):
            T.annotate_min_blocks_per_sm(1)
            leave_first(rest_is_empty(segments, sequences))
            if awaits == EVERYTHING:
                T.pdl_sync()
                T.pdl_trigger()  # `state_gradients` reads nothing of this and may run beside it
            place = T.alloc_var("int32")  # among the sequences
            place = place_of(low_place, high_place)
            number = of_place // tiles
            head = first_head + number
            n = T.alloc_var("int32")
            start = T.alloc_var("int32")
            end = T.alloc_var("int32")
            count = T.alloc_var("int32")
            m.find_sequence(n, start, end, count, segments, sequences, tokens, place)
            m.leave_if(count == 0, place * (heads * tiles) + of_place < ROUND)
            first = (of_place % tiles) * W  # first value column of this block
            tx = T.get_thread_binding()

            k_s = T.alloc_shared((stages, C, K), dtype)
            vd_s = T.alloc_shared((stages, C, W), dtype)
            T.annotate_layout({vd_s: make_full_bank_swizzled_layout(vd_s)})  # nothing else here asks for it
            h_s = T.alloc_shared((2 * parts, 64, K), dtype)
            fall_s = T.alloc_shared((stages, C), "float32")  # exp(gamma_C - gamma)
            whole_s = T.alloc_shared((stages,), "float32")  # exp(gamma_C)
            loaded = T.alloc_barrier([32 + 64] * stages)
            free = T.alloc_barrier([S] * stages)
            full = T.alloc_barrier([S] * 2)
            sent = T.alloc_barrier([32] * 2)

            if tx >= S:
                T.set_max_nreg(56, 0)
                if tx < S + 32:
                    key_head = T.truncdiv(head, ratio)
                    for c in T.serial(count - 1):
                        at = c % stages
                        if c >= stages:
                            T.barrier_wait(free[at], (c // stages + 1) % 2)
                        m.load_rows(k, start + c * C, key_head, 0, K, k_s, at, loaded, LONG)
                        m.load_rows(vd, start + c * C, head, first, W, vd_s, at, loaded)
                        T.barrier_arrive(loaded[at])
                elif tx < S + 64:
                    for c in T.serial(count):
                        T.barrier_wait(full[c % 2], c // 2 % 2)
                        T.fence_proxy_async()
                        for wg in T.unroll(parts):
                            for x in T.unroll(K // 64):
                                m.send_state(
                                    *(h_s, c % 2 * parts + wg, x * 64, h, start // C + n + c),
                                    *(number, x, first + wg * 64, 32),
                                )
                        T.tma_store_wait(0)
                        T.barrier_arrive(sent[c % 2])
                else:
                    row = tx - (S + 64)
                    fetched = T.alloc_local((2,), "float32")  # gamma of the chunk to come, of this row and of the last
                    if count > 1:
                        fetched[0] = gamma[start + row, head]
                        fetched[1] = gamma[start + C - 1, head]
                    # Where no sequence is cut nothing is waited for either way, and `state_gradients` is to run where blocks of this end.
                    uncut = T.alloc_var("int32")
                    uncut = 0
                    if awaits == NOTHING:
                        uncut = T.call_extern(
                            *("int32", "jax_qla_uncut", T.address_of(bounds[0, 0]), whole_sequences, cut_beyond)
                        )
                    for c in T.serial(count - 1):
                        at = c % stages
                        if awaits == NOTHING:
                            if c == T.Select(uncut != 0, 0, count // 2):
                                T.pdl_sync()
                                T.pdl_trigger()
                        if c >= stages:
                            T.barrier_wait(free[at], (c // stages + 1) % 2)
                        fall_s[at, row] = T.exp2(fetched[1] * T.float32(LOG2_E) - fetched[0] * T.float32(LOG2_E))
                        if row == 0:
                            whole_s[at] = T.exp2(fetched[1] * T.float32(LOG2_E))
                        T.barrier_arrive(loaded[at])
                        if c + 2 < count:
                            fetched[0] = gamma[start + (c + 1) * C + row, head]
                            fetched[1] = gamma[start + (c + 1) * C + C - 1, head]
            else:
                # One program for the warpgroups of the state, whose fragments have 64 rows each: a loop over them TileLang would write out.
                wg = tx // 128 if parts > 1 else 0
                part = wg * 64  # first of this warpgroup's columns
                T.set_max_nreg(216, 1)
                state = T.alloc_fragment((W, K), "float32")
                state_b = T.alloc_fragment((W, K), dtype)
                v_t = T.alloc_fragment((W, C), dtype)
                vk_b = T.alloc_fragment((W, C), dtype)
                whole = T.alloc_var("float32")
                begin_with(
                    *(state, initial_state, entering, pieces, initial_states, cut_pieces),
                    *(n, head, first, None),
                )
                for c in T.serial(count):
                    at = c % stages
                    T.copy(state, state_b)
                    if c >= 2:
                        T.barrier_wait(sent[c % 2], (c // 2 + 1) % 2)
                    m.put_state(state_b, h_s, c % 2 * parts + wg)
                    T.barrier_arrive(full[c % 2])
                    if c + 1 < count:
                        T.barrier_wait(loaded[at], (c // stages) % 2)
                        call("jax_qla_load_transposed", v_t.data, unfenced(vd_s[at, 0, part]))
                        whole = whole_s[at]
                        for i, j in T.Parallel(W, C):
                            vk_b[i, j] = T.cast(v_t[i, j], "float32") * fall_s[at, j]
                        for i, j in T.Parallel(W, K):
                            state[i, j] = state[i, j] * whole
                        T.wgmma_gemm(vk_b, k_s[at, :, :], state, policy=by_rows)
                        T.wait_wgmma(0)
                        T.barrier_arrive(free[at])
            T.pdl_sync()  # ends after what came before, for what follows waits for this kernel alone

    return states_from_vd


def specification(
    k: jax.Array,
    vd: jax.Array,
    gamma: jax.Array,
    initial_state: jax.Array,
    segments: jax.Array,
    pieces: jax.Array,
    entering: jax.Array,
    chunks: jax.Array,
    *,
    ratio: int,
    first_head: int = 0,
    heads: int | None = None,
) -> jax.Array:
    """h [slots - 1, heads, K / 64, V, 64] in Vd's dtype, of so many value heads from `first_head` on, or of all; of a slot without rows it is not
    defined. vd: [tokens, Hv, V]."""
    heads = vd.shape[1] if heads is None else heads
    k = of_heads(k, first_head // ratio, heads // ratio)
    vd, gamma = (of_heads(x, first_head, heads) for x in (vd, gamma))
    begin = of_heads(states_given(initial_state, entering, pieces), first_head, heads)
    keys = jnp.repeat(gather_chunks(k, chunks), ratio, axis=2)
    values, gates = (gather_chunks(x, chunks) for x in (vd, gamma))

    def step(state, xs):
        keys, values, gates, end = xs
        update = jnp.einsum("ihk,ihv->hkv", keys, jnp.exp(end - gates)[..., None] * values)
        return jnp.exp(end)[:, None, None] * state + update, state_tiles(state)

    _, h = scan_slots(step, begin, segments, chunks, (keys, values, gates, last_row(gates, chunks)))
    return of_chunk_slots(h).astype(vd.dtype)
