"""The states before every chunk and the corrected values Vd, recomputed for the backward pass.

The recurrence of kernels/forward.py without its outputs:

    h  = S                                                  [K, V] before the chunk, stored as transposed tiles of 64 rows of K
    X  = diag(beta) (V - diag(exp(gamma)) K S)              [64, V]
    Vd = a X                                                [64, V]
    S' = exp(gamma_C) S + K^T diag(exp(gamma_C - gamma)) Vd [K, V]

Plan, one block per (sequence, value head, tile of `value_tile` value columns), long sequences first, three stages of chunk tiles; S^T, X^T and
Vd^T stay in registers as the A operands of the next wgmma:

    warpgroup       registers  work
    0 (and 1)       216        64 value columns each: S^T in float32; h leaves through a tile of its own while K S runs. 240 with `split`, where there is one
    then            56         warp 0 loads K and V, 1 the inverses, each by itself; 2 and 3: gates, a thread a row
    last            40         beside one warpgroup of state: warp 0 sends h and Vd, which has tiles of its own (macros().send_results)
    (barriers as in kernels/forward.py, but that `ready`, at which the gates' warps arrive, says what `gated` does there; only they wait for `loaded`;
    and beside two warpgroups of state, which send their results themselves, Vd by way of V's tile, `left`: V's tile may be overwritten)

The two halves of a head, which load the same K and a, are neighbours on the card (policy.neighbours).

A launch computes as many value heads as h and Vd have room for, from `first_head` on (policy.head_groups).

With `split` h and Vd leave in two parts, and of h both meet K.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp

from jax_qla.kernels import first_state
from jax_qla.kernels.common import CHUNK, LONG, PASS_CONFIGS, ROUND, SHORT
from jax_qla.kernels.inverse import INVERSE_PRELUDE
from jax_qla.kernels.macros import call, leave_first, macros, over, place_of, rest_is_empty, unfenced
from jax_qla.kernels.preludes import LENGTH_PRELUDE, TILE_PRELUDE
from jax_qla.kernels.specification import (
    gather_chunks,
    gather_lengths,
    last_row,
    of_chunk_slots,
    of_heads,
    part_columns,
    part_tiles,
    scan_slots,
    scatter_chunks,
    state_tiles,
    states_given,
    unpack_inverses,
)

__all__ = ["EVERYTHING", "NOTHING", "PASS_CONFIGS", "Config", "program", "specification"]

EVERYTHING, NOTHING = range(2)
"""What a block awaits of the kernel launched before: that it has ended, before anything else. Or nothing: it is `adjoint_summaries`, blocks of this
begin where blocks of that end, and the next kernel is `compose`, which needs that one's results. So each block waits for it half-way, and then
lets `compose` begin."""


PRELUDE = TILE_PRELUDE + INVERSE_PRELUDE + LENGTH_PRELUDE


@dataclass(frozen=True)
class Config:
    """Sizes this program is specialised for: `key_dim`, `value_dim` 64 or 128, `dtype` "bfloat16" or "float16", and
    `value_tile`, the value columns of a block: 64, or 128 where V is; `l2norm`: whether q and k
    are to be normalised; `split` (kernels/common.py): with bfloat16 and blocks of 64 columns only."""

    key_dim: int = 128
    value_dim: int = 128
    dtype: str = "bfloat16"
    value_tile: int = 128
    l2norm: bool = False
    split: bool = False


def program(config: Config):
    """The TileLang program. Numbers of tokens, heads, sequences and chunk slots are run-time values."""
    import tilelang.language as T
    from tilelang.layout import make_full_bank_swizzled_layout

    C, K, V, W, dtype = CHUNK, config.key_dim, config.value_dim, config.value_tile, config.dtype
    tiles = V // W  # blocks a head
    l2norm, split = config.l2norm, config.split
    stages = 3
    sends = W == 64  # a warp of its own sends h and Vd
    S = 2 * W  # threads that hold the state: one warpgroup for every 64 value columns
    m, begin_with = macros(), first_state.macros().begin_with
    by_rows = T.GemmWarpPolicy.FullRow  # a warpgroup has 64 rows, not columns, of a product
    tokens, key_heads, value_heads, sequences, state_slots = T.dynamic(
        "tokens, key_heads, value_heads, sequences, state_slots"
    )
    heads = T.dynamic("heads")  # of this launch, from first_head on
    initial_states = T.dynamic("initial_states")  # sequences, or 0: not given
    cut_pieces = T.dynamic("cut_pieces")  # or 0: each of `segments` has an initial state
    cuts = T.dynamic("cuts")  # places for them, or 0

    @T.prim_func
    def states(
        k: T.Tensor((tokens, key_heads, K), dtype),
        v: T.Tensor((tokens, value_heads, V), dtype),
        a: T.Tensor((value_heads, tokens, C * (1 + split)), "int16"),
        gamma: T.Tensor((tokens, value_heads), "float32"),
        beta: T.Tensor((tokens, value_heads), "float32"),
        lengths: T.Tensor((tokens, key_heads), "float32"),  # 1 / |k|, with `l2norm` only
        initial_state: T.Tensor((initial_states, value_heads, K, V), "float32"),
        segments: T.Tensor((sequences, 2), "int32"),  # sequences, or their pieces
        pieces: T.Tensor((cut_pieces, 4), "int32"),
        entering: T.Tensor((cuts, value_heads, K, V), "float32"),  # the states between pieces
        h: T.Tensor((state_slots, heads, K // 64 * (1 + split), V, 64), dtype),
        vd: T.Tensor((tokens, heads, V * (1 + split)), dtype),
        ratio: T.int32,
        first_head: T.int32,
        awaits: T.int32,
    ):
        with T.Kernel(
            heads * tiles,
            *over(sequences),
            threads=S + 128 + 128 * sends,
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
            key_head = T.alloc_var("int32")
            n = T.alloc_var("int32")
            start = T.alloc_var("int32")
            end = T.alloc_var("int32")
            count = T.alloc_var("int32")
            m.find_sequence(n, start, end, count, segments, sequences, tokens, place)
            m.leave_if(count == 0, place * (heads * tiles) + of_place < ROUND)
            key_head = T.truncdiv(head, ratio)
            first = (of_place % tiles) * W  # first value column of this block
            tx = T.get_thread_binding()

            shared = m.tiles_in_order(K, W, stages, dtype, split, loaders=64, readers=S)
            # V, then, unless it `sends`, Vd on its way out; with `split` nothing else here asks for this layout
            T.annotate_layout({shared.v_s: make_full_bank_swizzled_layout(shared.v_s)})
            h_s = T.alloc_shared((W // 64 * (1 + split), 64, K), dtype)
            if not sends:
                left = T.alloc_barrier([S] * stages)  # V's tile

            if sends:
                h_full = T.alloc_barrier([128])
                h_free = T.alloc_barrier([32])
                vd_s = T.alloc_shared((2, C, 64), dtype)  # Vd on its way out
                vd_full = T.alloc_barrier([128] * 2)
                if split:
                    vd_low_s = T.alloc_shared((2, C, 64), dtype)
                sent = SimpleNamespace(
                    state_s=h_s,
                    state_full=h_full,
                    state_free=h_free,
                    rows_s=vd_s,
                    low_s=vd_low_s if split else None,
                    rows_full=vd_full,
                )

            if tx >= S + 128:
                T.set_max_nreg(40, 0)
                if sends:
                    if tx < S + 160:
                        m.send_results(
                            *(h, vd, V if split else None, start, end, count, start // C + n, number, number, first),
                            *(False, tx - (S + 128), sent),
                        )
            elif tx >= S:
                T.set_max_nreg(56, 0)
                if tx < S + 32:
                    for step in T.serial(count):
                        if step >= stages:
                            T.barrier_wait(shared.free[step % stages], (step // stages + 1) % 2)
                        m.load_rows(k, start + step * C, key_head, 0, K, shared.k_s, step % stages, shared.loaded, LONG)
                        if not sends:
                            if step >= stages:
                                T.barrier_wait(left[step % stages], (step // stages + 1) % 2)
                        m.load_rows(v, start + step * C, head, first, W, shared.v_s, step % stages, shared.loaded, LONG)
                        T.barrier_arrive(shared.loaded[step % stages])
                elif tx < S + 64:
                    m.load_inverses(a, start, end, count, head, False, stages, shared)
                else:
                    m.prepare_in_order(
                        gamma,
                        beta,
                        lengths,
                        start,
                        end,
                        count,
                        head,
                        key_head,
                        tx - (S + 64),
                        stages,
                        l2norm,
                        awaits == NOTHING,
                        shared,
                    )
            else:
                # One program for the warpgroups of the state, whose fragments have 64 rows each: a loop over them TileLang would write out.
                wg = tx // 128 if W > 64 else 0
                part = wg * 64  # first of this warpgroup's columns
                T.set_max_nreg(240 if split else 216, 1)
                state = T.alloc_fragment((W, K), "float32")
                state_b = T.alloc_fragment((W, K), dtype)
                u = T.alloc_fragment((W, C), "float32")
                x_b = T.alloc_fragment((W, C), dtype)
                vk_b = T.alloc_fragment((W, C), dtype)
                v_t = T.alloc_fragment((W, C), dtype)
                if split:
                    low = T.alloc_fragment((W, C), dtype)  # of X, then of Vd
                v_beta = T.alloc_fragment((W, C), "float32")
                of_column = T.alloc_fragment((C,), "float32")  # factors of u's columns, read while a product runs
                whole = T.alloc_var("float32")
                line = T.alloc_var("int32")
                lines = T.alloc_var("int32")
                slot = T.alloc_var("int32")
                begin_with(
                    *(state, initial_state, entering, pieces, initial_states, cut_pieces),
                    *(n, head, first, None),
                )
                for c in T.serial(count):
                    at = c % stages
                    line = start + c * C
                    lines = T.min(end - line, C)
                    slot = start // C + n + c
                    if not split:
                        T.copy(state, state_b)
                    T.barrier_wait(shared.ready[at], (c // stages) % 2)
                    # U = S^T K^T
                    if split:
                        if c > 0:
                            T.barrier_wait(sent.state_free[0], (c - 1) % 2)
                        m.multiply_state_split(state, state_b, shared.k_s, at, u, h_s)
                    else:
                        m.forget(u)
                        T.wgmma_gemm(
                            state_b, shared.k_s[at, :, :], u, transpose_B=True, clear_accum=True, policy=by_rows
                        )
                    call("jax_qla_load_transposed", v_t.data, unfenced(shared.v_s[at, 0, part]))
                    # the state before the chunk leaves while the product runs; the one before has left
                    if sends:
                        if not split:
                            if c > 0:
                                T.barrier_wait(sent.state_free[0], (c - 1) % 2)
                        m.put_state(state_b, h_s, wg)
                        T.barrier_arrive(sent.state_full[0])
                    else:
                        T.tma_store_wait(1)
                        T.sync_threads(4 + wg, 128)
                        m.put_state(state_b, h_s, wg)
                        T.fence_proxy_async()
                        T.sync_threads(4 + wg, 128)
                        for x in T.unroll(K // 64):
                            m.send_state(h_s, wg, x * 64, h, slot, number, x, first + part)
                        # by now the previous chunk's Vd has left too, and its stage may be overwritten
                        T.tma_store_wait(K // 64)
                        if c > 0:
                            T.barrier_arrive(left[(c - 1) % stages])
                    for i, j in T.Parallel(W, C):
                        v_beta[i, j] = T.cast(v_t[i, j], "float32") * shared.beta_s[at, j]
                    for j in T.Parallel(C):
                        of_column[j] = shared.drop_s[at, j]
                    whole = shared.rise_s[at, lines - 1]
                    for i, j in T.Parallel(W, K):
                        state[i, j] = state[i, j] * whole
                    T.wait_wgmma(0)
                    # X = beta V^T - beta exp(gamma) U, Vd = X A^T
                    m.begin_correction(u, v_beta, of_column, x_b, shared.a_s, at, low if split else None, shared.low_s)
                    for j in T.Parallel(C):
                        of_column[j] = shared.fall_s[at, j]
                    T.wait_wgmma(0)
                    # S = exp(gamma_C) S + (exp(gamma_C - gamma) Vd) K
                    m.begin_update(state, u, of_column, vk_b, shared.k_s, at, low if split else None)
                    if sends:
                        m.put_rows(u, sent.rows_s, c % 2, 0)
                        if split:
                            for i, j in T.Parallel(W, C):
                                u[i, j] = u[i, j] - T.cast(T.cast(u[i, j], dtype), "float32")
                            m.put_rows(u, sent.low_s, c % 2, 0)
                        T.barrier_arrive(sent.rows_full[c % 2])
                    else:
                        T.sync_warp()  # V was read by other lanes
                        m.put_rows(u, shared.v_s, at, part)
                        T.fence_proxy_async()
                        T.sync_threads(4 + wg, 128)
                        m.send_rows(shared.v_s, at, part, vd, line, lines, number, first + part, tx - wg * 128, SHORT)
                    T.wait_wgmma(0)
                    T.barrier_arrive(shared.free[at])
                T.tma_store_wait(0)
            T.pdl_sync()  # ends after what came before, for what follows waits for this kernel alone

    return states


def specification(
    k: jax.Array,
    v: jax.Array,
    a: jax.Array,
    gamma: jax.Array,
    beta: jax.Array,
    lengths: jax.Array,
    initial_state: jax.Array,
    segments: jax.Array,
    pieces: jax.Array,
    entering: jax.Array,
    chunks: jax.Array,
    *,
    ratio: int,
    l2norm: int = 0,
    first_head: int = 0,
    heads: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(h [slots - 1, heads, K / 64, V, 64], vd [tokens, heads, V] or, where `a` has two parts, these of [.., 2 K / 64, V, 64] and [.., 2 V], in v's dtype) of
    so many value heads from `first_head` on, or of all; h of a slot without rows is not defined."""
    heads = v.shape[1] if heads is None else heads
    k = of_heads(k, first_head // ratio, heads // ratio)
    inverse = unpack_inverses(a, chunks, k.dtype)[:, :, first_head : first_head + heads]
    v, gamma, beta = (of_heads(x, first_head, heads) for x in (v, gamma, beta))
    begin = of_heads(states_given(initial_state, entering, pieces), first_head, heads)
    keys = jnp.repeat(gather_chunks(k, chunks), ratio, axis=2)
    values, gates, strength = (gather_chunks(x, chunks) for x in (v, gamma, beta))
    if l2norm:
        of_key = gather_lengths(of_heads(lengths, first_head // ratio, heads // ratio), chunks, ratio)
        strength, values = strength * of_key**2, values / of_key[..., None]

    def step(state, xs):
        keys, values, inverse, gates, strength, end = xs
        x = strength[..., None] * (values - jnp.exp(gates)[..., None] * jnp.einsum("ihk,hkv->ihv", keys, state))
        vd = jnp.einsum("ihj,jhv->ihv", inverse, x)
        update = jnp.einsum("ihk,ihv->hkv", keys, jnp.exp(end - gates)[..., None] * vd)
        return jnp.exp(end)[:, None, None] * state + update, (state_tiles(state), vd)

    xs = (keys, values, inverse, gates, strength, last_row(gates, chunks))
    _, (h, vd) = scan_slots(step, begin, segments, chunks, xs)
    if a.shape[-1] > CHUNK:
        h, vd = part_tiles(h), part_columns(vd)
    h = of_chunk_slots(h).astype(v.dtype)
    return h, scatter_chunks(vd, chunks, v.shape[0], v.dtype)
