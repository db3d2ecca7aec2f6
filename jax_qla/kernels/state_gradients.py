"""The backward recurrence: gradients of the states after every chunk, and of X.

Per chunk, value head and sequence, last chunk first, with dS the gradient of the state after the chunk and
P = scale Q K^T o G (notation of kernels/forward.py):

    dh  = dS                                                                        [K, V] stored as h is
    dVd = P^T dO + diag(exp(gamma_C - gamma)) K dS                                  [64, V]
    dX  = a^T dVd                                                                   [64, V]
    dv  = diag(beta) dX, but dX in rows where |beta| < FAINT                        [64, V]
    dS' = exp(gamma_C) dS + Q^T diag(scale exp(gamma)) dO - K^T diag(exp(gamma) beta) dX   [K, V]

Plan, one block per (sequence, value head, tile of `value_tile` value columns), long sequences first, three stages of chunk tiles (two of P); dS^T,
dVd^T, dX^T, dO^T and dO^T diag(scale exp(gamma)) are, in registers, the A operands of the next wgmma, and of the triangular P and a no product
reads what is zero (kernels/products.py):

    warpgroup       registers  work
    0 (and 1)       208        "state": 64 value columns each: dS^T in float32; dh leaves through a tile of its own while P^T dO and K dS
                               run. 240 where there is one
    then            72         "P": P into shared memory, a without its diagonal of ones. 152 where the state has one warpgroup
    then            24         "loads": warp 0 loads Q, K, dO with TMA, 3 the inverses, 1 and 2 fetch the gates, a row a lane
    last            40         beside one warpgroup of state: warp 0 sends dh and dv, which has tiles of its own (macros().send_results)

    barrier         arrives  waits  says
    loaded[stage]   TMA      P      the tiles are there
    gated[stage]    loads    P      gates are there
    ready[stage]    P        state  tiles, gates and P are there, a has lost its diagonal, rows beyond the sequence are zero in Q, K, a and dO
    taken[tile]     state    P      P^T dO is done: P's tile may be overwritten
    free[stage]     state    loads  the stage may be overwritten; beside two warpgroups of state, which send their results themselves, dv by way of
                                    dO's tile: dv has left

The loads have a warp to themselves, and P's tile is free before its chunk's stage: when the warpgroup of P issued the loads, it
waited for a stage, then issued, then prepared the next chunk, and the state waited for it. The two halves of a head, which load the same Q, K and a,
are neighbours on the card (policy.neighbours).

dX is not needed as such outside: kernels/gradients.py takes dv, and writes the rows that are dX once more. With `l2norm` dX is that of
|k| V, so that dv = diag(beta / |k|) dX.

A launch computes as many value heads as dh has room for, from `first_head` on (policy.head_groups). Where the sequences are pieces of
longer ones, only the gradient before a sequence's first piece is one of an initial state, and pieces begin with what kernels/compose.py has found, but
for those that are whole sequences; blocks begin, but for the state's warpgroups of other pieces, while that still runs (STATE).

Where dh is to take half of the memory, a launch goes through a `window` of every sequence: the later half of its chunks, which leaves the gradient
where it began with one between pieces, or else at `carried`, and, once kernels/gradients.py has used that half, the earlier one, which begins with it. No
sequence waits for another so, as heads do that are computed one group after the other.

The diagonal of a^T dVd is dVd itself, which stays in the accumulator in float32.

With `split` dh leaves in two parts, both of which meet K, and behind them, in a chunk's last tile of dh, what dv leaves of its float32 numbers, transposed,
for kernels/gradients.py. Three stages of tiles then do not fit where K is 128.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp

from jax_qla.kernels import first_state
from jax_qla.kernels.common import ALL, CHUNK, EARLIER, FAINT, LATER, PASS_CONFIGS, ROUND, SHORT
from jax_qla.kernels.inverse import INVERSE_PRELUDE
from jax_qla.kernels.macros import call, leave_first, macros, over, place_of, rest_is_empty, unfenced
from jax_qla.kernels.preludes import BALANCE_PRELUDE, LENGTH_PRELUDE, P_PRELUDE
from jax_qla.kernels.specification import (
    among_heads,
    decay,
    gather_chunks,
    gather_lengths,
    last_row,
    of_chunk_slots,
    of_heads,
    part_tiles,
    rows_as_tiles,
    rows_of,
    scan_slots,
    scatter_chunks,
    state_tiles,
    states_given,
    states_kept,
    unpack_inverses,
    window_slots,
)
from jax_qla.segments import chunk_table, of_window

__all__ = ["NOTHING", "PASS_CONFIGS", "STATE", "Config", "program", "specification"]


STATE, NOTHING = range(2)
"""What a block awaits of the kernel launched before. It is `compose`, and has the gradient that the state's warpgroups of a piece begin with, if it is not its
sequence's last: all else was there before that kernel let this one begin. So sequences that are not cut wait neither for it nor for the states before it.
Or it is `gradients` of the later window, which reads what this kernel will write. Or all is there."""


PRELUDE = P_PRELUDE + INVERSE_PRELUDE + LENGTH_PRELUDE + BALANCE_PRELUDE


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
    stages = 2 if split and K > 64 else 3
    sends = W == 64  # a warp of its own sends dh and dv
    S = 2 * W  # threads that hold the gradient: one warpgroup for every 64 value columns
    m, begin = macros(), first_state.macros()
    by_rows = T.GemmWarpPolicy.FullRow  # a warpgroup has 64 rows, not columns, of a product
    tokens, key_heads, value_heads, sequences, state_slots = T.dynamic(
        "tokens, key_heads, value_heads, sequences, state_slots"
    )
    heads = T.dynamic("heads")  # of this launch, from first_head on
    initial_states, final_states = T.dynamic("initial_states, final_states")  # sequences, or 0: not wanted, not given
    cut_sequences, cut_pieces = T.dynamic("cut_sequences, cut_pieces")  # or 0: each of `segments` has an initial state
    cuts = T.dynamic("cuts")  # places for them, or 0
    carried_states = T.dynamic("carried_states")  # as sequences, or 0 where a launch goes through all of each

    @T.prim_func
    def state_gradients(
        q: T.Tensor((tokens, key_heads, K), dtype),
        k: T.Tensor((tokens, key_heads, K), dtype),
        do: T.Tensor((tokens, value_heads, V), dtype),
        a: T.Tensor((value_heads, tokens, C * (1 + split)), "int16"),
        gamma: T.Tensor((tokens, value_heads), "float32"),
        beta: T.Tensor((tokens, value_heads), "float32"),
        lengths: T.Tensor((tokens, key_heads), "float32"),  # 1 / |k|, with `l2norm` only, and so
        query_lengths: T.Tensor((tokens, key_heads), "float32"),  # 1 / |q|
        d_final_state: T.Tensor((final_states, value_heads, K, V), "float32"),
        segments: T.Tensor((sequences, 2), "int32"),  # sequences, or their pieces
        balanced: T.Tensor((1,), "int32"),  # needed unless ALWAYS
        pieces: T.Tensor((cut_pieces, 4), "int32"),
        spans: T.Tensor((cut_sequences, 2), "int32"),
        leaving: T.Tensor((cuts, value_heads, K, V), "float32"),  # gradients of the states between pieces
        carried: T.Tensor(
            (carried_states, value_heads, K, V), "float32"
        ),  # from the later half of a sequence to the earlier one
        dh: T.Tensor((state_slots, heads, K // 64 * (1 + split) + split, V, 64), dtype),
        dv: T.Tensor((tokens, value_heads, V), dtype),
        d_initial_state: T.Tensor((initial_states, value_heads, K, V), "float32"),
        ratio: T.int32,
        scale: T.float32,
        first_head: T.int32,
        awaits: T.int32,
        window: T.int32,  # ALL, LATER or EARLIER chunks of a sequence, dh having slots for these
        only: T.int32,  # ALWAYS, or sequences for which it computes anything, BALANCED or UNBALANCED
        in_place: T.int32,  # 1: gradients of initial states take the place of those of final ones, where those of empty sequences lie already
        firsts: T.int32,  # row of `leaving` from which on it has gradients of final states of sequences that are cut (kernels/compose.py), or -1
    ):
        with T.Kernel(
            heads * tiles,
            *over(sequences),
            threads=S + 256 + 128 * sends,
            prelude=PRELUDE,
        ) as (of_place, low_place, high_place):
            T.annotate_min_blocks_per_sm(1)
            leave_first((initial_states == 0 or in_place != 0) and rest_is_empty(segments, sequences))
            place = T.alloc_var("int32")  # among the sequences
            place = place_of(low_place, high_place)
            block = place * (heads * tiles) + of_place
            number = of_place // tiles
            head = first_head + number
            T.pdl_trigger()  # `gradients` waits by itself
            m.leave_unless(only, balanced, block == 0)
            key_head = T.alloc_var("int32")
            target = T.alloc_var("int32")  # where the gradient of the initial state goes, if anywhere
            n = T.alloc_var("int32")
            start = T.alloc_var("int32")
            end = T.alloc_var("int32")
            count = T.alloc_var("int32")
            m.find_sequence(n, start, end, count, segments, sequences, tokens, place)
            m.leave_if(count == 0 and (initial_states == 0 or in_place != 0), block < ROUND)
            key_head = T.truncdiv(head, ratio)
            first = (of_place % tiles) * W  # first value column of this block
            m.find_target(target, n, pieces, spans, cut_pieces)
            m.leave_if(count == 0 and target < 0, block < ROUND)
            held = T.alloc_var("int32")  # slot of the first chunk in dh
            m.take_window(start, end, count, held, n, window)
            tx = T.get_thread_binding()

            shared = m.tiles_last_first(K, W, stages, dtype, split, l2norm, gives_dv=True, readers=S)
            # dO, then, unless it `sends`, dv on its way out; nothing else here asks for this layout
            T.annotate_layout({shared.do_s: make_full_bank_swizzled_layout(shared.do_s)})
            dh_s = T.alloc_shared((W // 64 * (1 + split), 64, K), dtype)

            if sends:
                dh_full = T.alloc_barrier([128])
                dh_free = T.alloc_barrier([32])
                dv_s = T.alloc_shared((2, C, 64), dtype)  # dv on its way out
                dv_full = T.alloc_barrier([128] * 2)
                if split:
                    d_low_s = T.alloc_shared((2, 64, C), dtype)  # and what dv leaves, transposed
                    T.annotate_layout({d_low_s: make_full_bank_swizzled_layout(d_low_s)})
                sent = SimpleNamespace(
                    state_s=dh_s, state_full=dh_full, state_free=dh_free, rows_s=dv_s, rows_full=dv_full
                )

            if tx >= S + 256:
                T.set_max_nreg(40, 0)
                if sends:
                    if tx < S + 288:
                        m.send_results(
                            *(dh, dv, None, start, end, count, held, number, head, first),
                            *(True, tx - (S + 256), sent, d_low_s if split else None),
                        )
            elif tx >= S + 128:
                T.set_max_nreg(24, 0)
                if tx < S + 160:
                    m.load_last_first(q, k, do, start, count, key_head, head, first, stages, shared)
                elif tx < S + 224:
                    m.gates_last_first(
                        gamma,
                        beta,
                        lengths,
                        query_lengths,
                        start,
                        end,
                        count,
                        head,
                        key_head,
                        scale,
                        tx - (S + 160),
                        stages,
                        l2norm,
                        shared,
                    )
                else:
                    m.load_inverses(a, start, end, count, head, True, stages, shared)
            elif tx >= S:
                T.set_max_nreg(152 if sends else 72, int(sends))  # of 128
                m.prepare_last_first(start, end, count, scale, tx - S, stages, l2norm, shared)
            else:
                # One program for the warpgroups of the state, whose fragments have 64 rows each: a loop over them TileLang would write out.
                wg = tx // 128 if W > 64 else 0
                part = wg * 64  # first of this warpgroup's columns
                T.set_max_nreg(240 if sends else 208, 1)
                d = T.alloc_fragment((W, K), "float32")
                d_b = T.alloc_fragment((W, K), dtype)
                u = T.alloc_fragment((W, C), "float32")
                from_output = T.alloc_fragment((W, C), "float32")  # P^T dO
                dvd_b = T.alloc_fragment((W, C), dtype)
                dw_b = T.alloc_fragment((W, C), dtype)
                if split:
                    low = T.alloc_fragment((W, C), dtype)  # of dVd, then of exp(gamma) beta dX
                do_t = T.alloc_fragment((W, C), dtype)
                do_b = T.alloc_fragment((W, C), dtype)  # dO^T diag(scale exp(gamma))
                of_column = T.alloc_fragment((C,), "float32")  # factors of u's columns, read while a product runs
                whole = T.alloc_var("float32")
                line = T.alloc_var("int32")
                lines = T.alloc_var("int32")
                slot = T.alloc_var("int32")
                source = T.alloc_var("int32")
                of_piece = T.alloc_var("int32")
                begin.find_source(source, of_piece, pieces, cut_pieces, n, (spans, cut_sequences, firsts))
                if awaits == STATE and (window == EARLIER or of_piece != 0):
                    T.pdl_sync()
                if window == EARLIER:
                    begin.begin_from(d, carried, leaving, 1, source, of_piece, head, first)
                else:
                    begin.begin_from(d, d_final_state, leaving, final_states, source, of_piece, head, first)
                    if window == LATER:
                        # Where it came from: from 0 on in `carried`, and below between pieces. One variable, for registers are few.
                        target = T.Select(of_piece != 0, -1 - source, source)
                for c in T.serial(count):
                    at = c % stages
                    line = start + (count - 1 - c) * C
                    lines = T.min(end - line, C)
                    slot = held + (count - 1 - c)
                    T.barrier_wait(shared.ready[at], (c // stages) % 2)
                    # dVd = exp(gamma_C - gamma) K dS + P^T dO
                    if not split:
                        T.copy(d, d_b)
                    call("jax_qla_load_transposed", do_t.data, unfenced(shared.do_s[at, 0, part]))
                    m.multiply_lower(do_t, shared.p_s, c % 2, from_output)
                    if split:
                        if c > 0:
                            T.barrier_wait(sent.state_free[0], (c - 1) % 2)
                        m.multiply_state_split(d, d_b, shared.k_s, at, u, dh_s)
                    else:
                        m.forget(u)
                        T.wgmma_gemm(d_b, shared.k_s[at, :, :], u, transpose_B=True, clear_accum=True, policy=by_rows)
                    # the gradient of the state after the chunk leaves while the product runs; the one before has left
                    if sends:
                        if not split:
                            if c > 0:
                                T.barrier_wait(sent.state_free[0], (c - 1) % 2)
                        m.put_state(d_b, dh_s, wg)
                        T.barrier_arrive(sent.state_full[0])
                    else:
                        T.tma_store_wait(1)
                        T.sync_threads(4 + wg, 128)
                        m.put_state(d_b, dh_s, wg)
                        T.fence_proxy_async()
                        T.sync_threads(4 + wg, 128)
                        for x in T.unroll(K // 64):
                            m.send_state(dh_s, wg, x * 64, dh, slot, number, x, first + part)
                        # by now the previous chunk's dv has left too, and its stage may be overwritten
                        T.tma_store_wait(K // 64)
                        if c > 0:
                            T.barrier_arrive(shared.free[(c - 1) % stages])
                    for i, j in T.Parallel(W, C):
                        do_b[i, j] = T.cast(do_t[i, j], "float32") * shared.lift_s[at, j]
                    whole = shared.rise_s[at, lines - 1]
                    for i, j in T.Parallel(W, K):
                        d[i, j] = d[i, j] * whole
                    T.wait_wgmma(0)
                    T.barrier_arrive(shared.taken[c % 2])
                    for i, j in T.Parallel(W, C):
                        u[i, j] = u[i, j] * shared.fall_s[at, j] + from_output[i, j]
                    T.copy(u, dvd_b)
                    # dX = A^T dVd, on the diagonal (of ones), which a_s lacks, without the rounding of dVd
                    if split:
                        m.keep_low(u, dvd_b, low)
                    m.multiply_inverse(dvd_b, shared.a_s, at, u, True, False)
                    if split:
                        m.multiply_inverse(low, shared.a_s, at, u, True, False)
                        m.multiply_inverse(dvd_b, shared.low_s, at, u, True, False)
                    for j in T.Parallel(C):
                        of_column[j] = shared.drop_s[at, j]
                    # dS = exp(gamma_C) dS + Q^T scale exp(gamma) dO - K^T exp(gamma) beta dX
                    T.wgmma_gemm(do_b, shared.q_s[at, :, :], d, policy=by_rows)
                    T.wait_wgmma(1)
                    m.begin_update(d, u, of_column, dw_b, shared.k_s, at, low if split else None)
                    if sends:
                        for i, j in T.Parallel(W, C):
                            u[i, j] = u[i, j] * shared.out_s[at, j]
                        m.put_rows(u, sent.rows_s, c % 2, 0)
                        if split:
                            T.wait_wgmma(0)  # no product reads `low` any more
                            for i, j in T.Parallel(W, C):
                                low[i, j] = T.cast(u[i, j] - T.cast(T.cast(u[i, j], dtype), "float32"), dtype)
                            m.put_state(low, d_low_s, c % 2)
                        T.barrier_arrive(sent.rows_full[c % 2])
                        T.wait_wgmma(0)
                        T.barrier_arrive(shared.free[at])
                    else:
                        T.wait_wgmma(1)  # dO is no longer needed
                        for i, j in T.Parallel(W, C):
                            u[i, j] = u[i, j] * shared.out_s[at, j]
                        T.sync_threads(4 + wg, 128)
                        m.put_rows(u, shared.do_s, at, part)
                        T.fence_proxy_async()
                        T.sync_threads(4 + wg, 128)
                        m.send_rows(shared.do_s, at, part, dv, line, lines, head, first + part, tx - wg * 128, SHORT)
                        if lines < C:
                            T.tma_store_wait(0)  # one group less than the waits above count on
                        T.wait_wgmma(0)
                T.tma_store_wait(0)
                if window == LATER:
                    if target < 0:
                        for i, j in T.Parallel(W, K):
                            leaving[-1 - target, head, j, first + i] = d[i, j]
                    else:
                        for i, j in T.Parallel(W, K):
                            carried[target, head, j, first + i] = d[i, j]
                elif initial_states > 0 and target >= 0:
                    for i, j in T.Parallel(W, K):
                        d_initial_state[target, head, j, first + i] = d[i, j]
            T.pdl_sync()  # ends after `states`, for `gradients` waits for this kernel alone

    return state_gradients


def specification(
    q: jax.Array,
    k: jax.Array,
    do: jax.Array,
    a: jax.Array,
    gamma: jax.Array,
    beta: jax.Array,
    lengths: jax.Array,
    query_lengths: jax.Array,
    d_final_state: jax.Array,
    segments: jax.Array,
    pieces: jax.Array,
    spans: jax.Array,
    leaving: jax.Array,
    carried: jax.Array,
    chunks: jax.Array,
    *,
    ratio: int,
    scale: float,
    l2norm: int = 0,
    first_head: int = 0,
    heads: int | None = None,
    only: int = 0,
    firsts: int = -1,
    window: int = ALL,
) -> tuple[jax.Array, ...]:
    """(dh [slots - 1, heads, K / 64, V, 64], or where `a` has two parts [.., 2 K / 64 + 1, V, 64], in do's dtype, dv [tokens, Hv, V] in do's dtype, d_initial_state [N, Hv, K, V],
    carried [N, Hv, K, V], leaving), of so many value heads from `first_head` on, or of all; all but dh are not a number in others. Of a `window` dh has the
    slots, and dv is not a number in rows of none of its chunks; nor are, but of LATER, which leaves them for EARLIER, carried and leaving, nor of LATER
    d_initial_state.

    `segments` are sequences or, with `pieces`, `spans` and `leaving`, their pieces; without, these are empty. dh of a slot without rows is not defined.
    """
    del only  # results do not go by it
    of_all, tokens = segments, do.shape[0]
    if window != ALL:
        segments = of_window(segments, later=window == LATER)
        chunks = jnp.asarray(chunk_table(segments, tokens))
    all_heads = do.shape[1]
    heads = all_heads if heads is None else heads
    q, k = (of_heads(x, first_head // ratio, heads // ratio) for x in (q, k))
    inverse = unpack_inverses(a, chunks, k.dtype)[:, :, first_head : first_head + heads]
    do, gamma, beta = (of_heads(x, first_head, heads) for x in (do, gamma, beta))
    given = carried if window == EARLIER else d_final_state
    begin = of_heads(states_given(given, leaving, pieces, spans, firsts, reverse=True), first_head, heads)
    keys, queries = (jnp.repeat(gather_chunks(x, chunks), ratio, axis=2) for x in (k, q))
    output, gates, strength = (gather_chunks(x, chunks) for x in (do, gamma, beta))
    factor, scales = jnp.where(jnp.abs(strength) < FAINT, 1, strength), jnp.full_like(strength, scale)
    if l2norm:
        of_key, of_query = (
            gather_lengths(of_heads(x, first_head // ratio, heads // ratio), chunks, ratio)
            for x in (lengths, query_lengths)
        )
        factor, strength, scales = of_key * factor, strength * of_key**2, scales * of_query
    p = scales[:, :, None] * jnp.einsum("sihk,sjhk->sijh", queries, keys) * decay(gates)

    def step(ds, xs):
        queries, keys, output, inverse, p, gates, strength, factor, scales, end = xs
        fall, rise = jnp.exp(end - gates)[..., None], jnp.exp(gates)[..., None]
        dvd = jnp.einsum("ijh,ihv->jhv", p, output) + fall * jnp.einsum("ihk,hkv->ihv", keys, ds)
        dx = jnp.einsum("ihj,ihv->jhv", inverse, dvd)
        update = jnp.einsum("ihk,ihv->hkv", queries, scales[..., None] * rise * output)
        update -= jnp.einsum("ihk,ihv->hkv", keys, rise * strength[..., None] * dx)
        return jnp.exp(end)[:, None, None] * ds + update, (state_tiles(ds), factor[..., None] * dx)

    xs = (queries, keys, output, inverse, p, gates, strength, factor, scales, last_row(gates, chunks))
    last, (dh, dv) = scan_slots(step, begin, segments, chunks, xs, reverse=True)
    d_initial_state = last[spans[:, 0]] if pieces.shape[0] > 0 else last
    carried, between = states_kept(last, leaving.shape[0], pieces, spans, firsts)
    if window == LATER:
        d_initial_state = jnp.full_like(d_initial_state, jnp.nan)
    else:
        carried, between = (jnp.full_like(x, jnp.nan) for x in (carried, between))
    if a.shape[-1] > CHUNK:
        left = dv - dv.astype(do.dtype).astype(dv.dtype)
        dh = jnp.concatenate([part_tiles(dh), rows_as_tiles(left, k.shape[2])], axis=2)
    dh = of_chunk_slots(dh).astype(do.dtype)
    dv = scatter_chunks(dv, chunks, tokens, do.dtype)
    if window != ALL:
        dh = window_slots(dh, of_all, chunks, tokens, later=window == LATER)
        dv = jnp.where(rows_of(segments, tokens)[:, None, None], dv, jnp.nan)
    return dh, *(among_heads(x, first_head, all_heads) for x in (dv, d_initial_state, carried, between))
