"""All gradients of one chunk from the states around it: no recurrence, every chunk for itself.

With h, Vd of kernels/states.py, dh, D of kernels/state_gradients.py (there dv: diag(c) dX with c = beta, or 1 where |beta| < FAINT),
w = beta / c, P = Q K^T, G as in kernels/forward.py (i >= j), E = scale (dO Vd^T o G), F = -(D Vd^T o G) strictly lower, M = diag(w) F,
Z = D h^T, Y = diag(exp(gamma_C - gamma)) Vd dh^T:

    dq     = sum over the value heads of the key head of  scale diag(exp(gamma)) dO h^T + E K
    dk     = sum over the value heads of the key head of  E^T Q + (M + M^T) K - diag(exp(gamma) w) Z + Y
    dv     = diag(w) D
    dbeta  = <D_i, Vd_i> / (c_i beta_i), which for beta_i = 0 (or SCANTY) is the limit
             rowsum(F o K K^T) + <D_i, V_i> - exp(gamma_i) <Z_i, K_i>, a difference of larger numbers elsewhere
    dgamma = rowsum(R) - colsum(R) + scale exp(gamma_i) <(dO h^T)_i, Q_i> - w_i exp(gamma_i) <Z_i, K_i>,
             R = E o P + diag(w) F o K K^T, strictly lower
    dg_i   = sum_{j >= i} dgamma_j + sum_{j < i} <Y_j, K_j> + exp(gamma_C) <dh, h>, and 0 where g < -110 (the clamp)

With `l2norm` dX is that of beta / |k|^2 for beta and |k| V for V, scale / |q_i| is for scale (kernels/common.py), D has c / |k| for c, M and dk have
w / |k| for w, and dbeta is <D_i, Vd_i> |k_i| / (c_i beta_i), or 1 / |k_i| times the limit's terms with K; the tiles of dq and dk are projected
before they leave.

What dg would add and subtract again (the diagonal of R, <Y_j, K_j> of the rows from i on) is left out: where the decay is
strong, dg is smaller than the rounding of these. R is summed in float32 and never rounded.

Plan, of the value heads that dh has, from `first_head` on (policy.head_groups), h and Vd each having these or all, and of chunks of one `window` of every
sequence, for which dh has slots, or of all: one block per (chunk slot, `group` key heads:
policy.key_heads_together), 512 threads, a loop over the key heads and their value heads. K, Vd and D have two
stages of tiles, Q, dO, h and dh one each, loaded for the next head as soon as their last reader is done. Warpgroup 1 has most to do: what
it needs first of a head, K, Vd and D, is there before, and what must wait for a free tile it needs last or not at all.

    warpgroup     registers   work
    0             184         E, P; dq in registers over all value heads
    1             208         F, K K^T, Z and Y (64 key columns at a time); dk in registers over all value heads
    2             72          <dh, h>, <D, Vd>; dv in faint rows, which elsewhere is there; zero rows of gaps
    3, warps 0, 1 48          "gates": a thread a row, gates of the head after the next, with a key head's first one its lengths; puts
                              dbeta and dg together
    3, warp 2     48          "loads": TMA

    barrier              arrives   waits              says
    k_loaded[stage]      TMA       0, 1, 2            K of this key head is there
    q_loaded             TMA       0, 1, 2            and Q
    k_ready[], q_ready   2         0, 1 (q: 0)        their rows beyond the sequence are zero: waited for where there are such
    k_free[], q_free     0, 1      loads              their tiles may be overwritten
    rows_loaded[stage]   TMA       0, 1, 2            this value head's Vd and D are there
    rows_free[stage]     0, 1, 2   loads              and may be overwritten
    do_loaded            TMA       0                  dO is there
    do_free              0         loads              and may be overwritten
    h_loaded, dh_loaded  TMA       0, 1, 2 (dh: 1, 2) the states are there
    h_free, dh_free      the same  loads              and may be overwritten
    gates_ready[stage]   gates     0, 1, 2            gates are there; what is gathered of a head may be overwritten
    e_ready              0         1                  E is in shared memory
    e_free               1         0                  and may be overwritten
    parts_ready[stage]   0, 1      gates              their parts of dbeta and dgamma are there, gates may be overwritten
    dots_ready[stage]    2         gates              the inner products are there, gates may be overwritten

A barrier is waited for by everybody who must not be two phases behind it, or only by those who let its next phase begin: a warp that is late
by two phases waits for ever (tests/test_barriers.py).

With `split` kernels/gradients_split.py has the program.

M + M^T goes through shared memory as one symmetric tile, so that one product with K gives both. dQ and dK go from registers to memory.

Operations a chunk and head at K = V = 128: 13.6 MFLOP, 2.3 us of an SM's share of 790 TFLOP/s. Bytes: 112 KiB read, and of a key head
64 KiB read and written: with two value heads 144 KiB, 4.5 us of its share of 4.3 TB/s. docs/performance_kernels.md says what binds.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp

from jax_qla.kernels.common import ALL, CHUNK, FAINT, LATER, MIN_LOG_DECAY, PASS_CONFIGS, SHORT
from jax_qla.kernels.gradient_parts import (
    PRELUDE,
    SCANTY,
    chunk_of_block,
    gap_rows,
    gate_parts,
    gate_vectors,
    gate_warps,
    key_head_writer,
    operations,
)
from jax_qla.kernels.macros import accumulator_layout, call, macros
from jax_qla.kernels.specification import (
    among_heads,
    decay,
    from_window_slots,
    gather_chunks,
    gather_lengths,
    gather_parts,
    last_row,
    of_all_slots,
    of_heads,
    of_part_tiles,
    rows_of,
    scatter_chunks,
    states_of_tiles,
    tiles_as_rows,
)
from jax_qla.segments import chunk_table, of_window

__all__ = ["PASS_CONFIGS", "Config", "program", "specification"]


@dataclass(frozen=True)
class Config:
    """Sizes this program is specialised for: `key_dim`, `value_dim` 64 or 128, `dtype` "bfloat16" or "float16"; `l2norm`: whether q and k
    are to be normalised; `split` (kernels/common.py): with bfloat16 only."""

    key_dim: int = 128
    value_dim: int = 128
    dtype: str = "bfloat16"
    l2norm: bool = False
    split: bool = False


def program(config: Config):
    """The TileLang program. Numbers of tokens, heads, sequences and chunk slots are run-time values."""
    if config.split:
        from jax_qla.kernels import gradients_split  # which takes what both share

        return gradients_split.program(config)
    import tilelang.language as T

    C, K, V, dtype = CHUNK, config.key_dim, config.value_dim, config.dtype
    ctype = {"bfloat16": "bfloat16_t", "float16": "half_t"}[dtype]
    l2norm = config.l2norm
    m, ops = macros(), operations(ctype, l2norm)
    compute_gates, allocate_parts = gate_warps(dtype, l2norm), gate_parts()
    find_chunk, allocate_vectors = chunk_of_block(), gate_vectors(l2norm)
    zero_gaps, write_key_head = gap_rows(config), key_head_writer(config)
    tokens, key_heads, value_heads, sequences, state_slots = T.dynamic(
        "tokens, key_heads, value_heads, sequences, state_slots"
    )
    of_launch = T.dynamic("heads")  # value heads, from first_head on
    kept_heads, vd_heads = T.dynamic("kept_heads, vd_heads")  # these, or all, of h and of Vd
    window_slots = T.dynamic("window_slots")  # of dh

    @T.macro
    def load_states(states, tile, slot, head, loaded):
        for x in T.unroll(K // 64):
            T.tma_copy(
                states[slot - 1, head, x, 0:V, 0:64],
                tile[:, x * 64 : x * 64 + 64],
                barrier=loaded[0],
                leader_scope_threads=32,
                eviction_policy=SHORT,
            )
        T.barrier_arrive(loaded[0])

    @T.prim_func
    def gradients(
        q: T.Tensor((tokens, key_heads, K), dtype),
        k: T.Tensor((tokens, key_heads, K), dtype),
        v: T.Tensor((tokens, value_heads, V), dtype),
        g: T.Tensor((tokens, value_heads), "float32"),
        gamma: T.Tensor((tokens, value_heads), "float32"),
        beta: T.Tensor((tokens, value_heads), "float32"),
        lengths: T.Tensor((tokens, key_heads), "float32"),  # 1 / |k|, with `l2norm` only, and so
        query_lengths: T.Tensor((tokens, key_heads), "float32"),  # 1 / |q|
        do: T.Tensor((tokens, value_heads, V), dtype),
        vd: T.Tensor((tokens, vd_heads, V), dtype),
        d: T.Tensor((tokens, value_heads, V), dtype),  # D; may be dv itself
        h: T.Tensor((state_slots, kept_heads, K // 64, V, 64), dtype),
        dh: T.Tensor((window_slots, of_launch, K // 64, V, 64), dtype),
        segments: T.Tensor((sequences, 2), "int32"),
        balanced: T.Tensor((1,), "int32"),  # needed unless ALWAYS
        dq: T.Tensor((tokens, key_heads, K), dtype),
        dk: T.Tensor((tokens, key_heads, K), dtype),
        dv: T.Tensor((tokens, value_heads, V), dtype),
        dg: T.Tensor((tokens, value_heads), "float32"),
        dbeta: T.Tensor((tokens, value_heads), "float32"),
        ratio: T.int32,
        scale: T.float32,
        group: T.int32,  # key heads of a block
        first_head: T.int32,
        window: T.int32,  # ALL, LATER or EARLIER chunks of a sequence, for which dh has slots
        only: T.int32,  # ALWAYS, or sequences for which it computes anything, BALANCED or UNBALANCED
    ):
        with T.Kernel(
            window_slots + 1, T.ceildiv(T.truncdiv(of_launch, ratio), group), threads=512, prelude=PRELUDE
        ) as (place, part_of_heads):
            T.annotate_min_blocks_per_sm(1)
            m.leave_unless(only, balanced, place + part_of_heads == 0)
            row, rows, fill, slot = find_chunk(segments, sequences, tokens, place, window)
            first = T.alloc_var("int32")  # first key head of this block
            keys = T.alloc_var("int32")  # their number
            heads = T.alloc_var("int32")  # and that of their value heads
            held = T.alloc_var("int32")  # number of the first of these in dh
            kept = T.alloc_var("int32")  # in h
            of_vd = T.alloc_var("int32")  # and in Vd
            first = T.truncdiv(first_head, ratio) + part_of_heads * group
            keys = T.min(group, T.truncdiv(of_launch, ratio) - part_of_heads * group)
            heads = keys * ratio
            held = part_of_heads * group * ratio
            kept = T.Select(kept_heads == value_heads, first * ratio, held)
            of_vd = T.Select(vd_heads == value_heads, first * ratio, held)
            tx = T.get_thread_binding()

            q_s = T.alloc_shared((1, C, K), dtype)
            k_s = T.alloc_shared((2, C, K), dtype)
            do_s = T.alloc_shared((1, C, V), dtype)
            vd_s = T.alloc_shared((2, C, V), dtype)
            dv_s = T.alloc_shared((2, C, V), dtype)
            h_s = T.alloc_shared((V, K), dtype)
            dh_s = T.alloc_shared((V, K), dtype)
            e_s = T.alloc_shared((C, C), dtype)  # scale (dO Vd^T o G)
            f_s = T.alloc_shared((C, C), dtype)  # M + M^T, M = -w (D Vd^T o G) strictly lower
            vectors = allocate_vectors()
            parts = allocate_parts()  # <dh, h> by warp
            k_loaded = T.alloc_barrier([32] * 2)
            k_ready = T.alloc_barrier([128] * 2)
            k_free = T.alloc_barrier([256] * 2)
            q_loaded = T.alloc_barrier([32])
            q_ready = T.alloc_barrier([128])
            q_free = T.alloc_barrier([256])
            do_loaded = T.alloc_barrier([32])
            do_free = T.alloc_barrier([128])
            rows_loaded = T.alloc_barrier([32] * 2)
            rows_free = T.alloc_barrier([384] * 2)
            gates_ready = T.alloc_barrier([64] * 2)
            h_loaded = T.alloc_barrier([32])
            dh_loaded = T.alloc_barrier([32])
            h_free = T.alloc_barrier([384])
            dh_free = T.alloc_barrier([256])
            e_ready = T.alloc_barrier([128])
            e_free = T.alloc_barrier([128])
            parts_ready = T.alloc_barrier([256] * 2)
            dots_ready = T.alloc_barrier([128] * 2)

            if tx >= 384:
                T.set_max_nreg(48, 0)
                if tx < 448:
                    i = tx - 384
                    compute_gates(
                        *(g, gamma, beta, lengths, query_lengths, dg, dbeta),
                        *(row, rows, SimpleNamespace(first=first, keys=keys, heads=heads), ratio, scale, i),
                        *(vectors, parts, gates_ready, dots_ready, parts_ready),
                    )
                elif tx < 480:
                    if rows > 0:
                        m.load_rows(k, row, first, 0, K, k_s, 0, k_loaded)
                        T.barrier_arrive(k_loaded[0])
                        m.load_rows(vd, row, of_vd, 0, V, vd_s, 0, rows_loaded)
                        m.load_rows(d, row, first * ratio, 0, V, dv_s, 0, rows_loaded)
                        T.barrier_arrive(rows_loaded[0])
                        m.load_rows(do, row, first * ratio, 0, V, do_s, 0, do_loaded)
                        T.barrier_arrive(do_loaded[0])
                        m.load_rows(q, row, first, 0, K, q_s, 0, q_loaded)
                        T.barrier_arrive(q_loaded[0])
                        load_states(h, h_s, slot, kept, h_loaded)
                        load_states(dh, dh_s, place, held, dh_loaded)
                        if heads > 1:
                            m.load_rows(vd, row, of_vd + 1, 0, V, vd_s, 1, rows_loaded)
                            m.load_rows(d, row, first * ratio + 1, 0, V, dv_s, 1, rows_loaded)
                            T.barrier_arrive(rows_loaded[1])
                        if keys > 1:
                            m.load_rows(k, row, first + 1, 0, K, k_s, 1, k_loaded)
                            T.barrier_arrive(k_loaded[1])
                        for key_l in T.serial(keys):
                            for r_l in T.serial(ratio):
                                n = key_l * ratio + r_l
                                if n + 1 < heads:
                                    T.barrier_wait(do_free[0], n % 2)
                                    m.load_rows(do, row, first * ratio + n + 1, 0, V, do_s, 0, do_loaded)
                                    T.barrier_arrive(do_loaded[0])
                                    T.barrier_wait(h_free[0], n % 2)
                                    load_states(h, h_s, slot, kept + n + 1, h_loaded)
                                    T.barrier_wait(dh_free[0], n % 2)
                                    load_states(dh, dh_s, place, held + n + 1, dh_loaded)
                                if r_l + 1 == ratio and key_l + 1 < keys:
                                    T.barrier_wait(q_free[0], key_l % 2)
                                    m.load_rows(q, row, first + key_l + 1, 0, K, q_s, 0, q_loaded)
                                    T.barrier_arrive(q_loaded[0])
                                if n + 2 < heads:
                                    T.barrier_wait(rows_free[n % 2], n // 2 % 2)
                                    m.load_rows(vd, row, of_vd + n + 2, 0, V, vd_s, n % 2, rows_loaded)
                                    m.load_rows(d, row, first * ratio + n + 2, 0, V, dv_s, n % 2, rows_loaded)
                                    T.barrier_arrive(rows_loaded[n % 2])
                            if key_l + 2 < keys:
                                T.barrier_wait(k_free[key_l % 2], key_l // 2 % 2)
                                m.load_rows(k, row, first + key_l + 2, 0, K, k_s, key_l % 2, k_loaded)
                                T.barrier_arrive(k_loaded[key_l % 2])
            elif tx >= 256:
                T.set_max_nreg(72, 0)
                i = tx - 256
                if rows > 0:
                    for key in T.serial(keys):
                        for r in T.serial(ratio):
                            at = (key * ratio + r) % 2
                            head = (first + key) * ratio + r
                            T.barrier_wait(gates_ready[at], (key * ratio + r) // 2 % 2)
                            if r == 0 and rows < C:
                                T.barrier_wait(k_loaded[key % 2], key // 2 % 2)
                                m.zero_tail(k_s, key % 2, rows, K, i, 128)
                                T.fence_proxy_async()
                                T.barrier_arrive(k_ready[key % 2])
                                T.barrier_wait(q_loaded[0], key % 2)
                                m.zero_tail(q_s, 0, rows, K, i, 128)
                                T.fence_proxy_async()
                                T.barrier_arrive(q_ready[0])
                            T.barrier_wait(h_loaded[0], (key * ratio + r) % 2)
                            T.barrier_wait(dh_loaded[0], (key * ratio + r) % 2)
                            call(
                                f"jax_qla_inner<{ctype}, {V}, {K}>",
                                T.address_of(h_s[0, 0]),
                                T.address_of(dh_s[0, 0]),
                                T.address_of(parts.states_dot_s[at, 0]),
                            )
                            T.barrier_arrive(h_free[0])
                            T.barrier_arrive(dh_free[0])
                            T.barrier_wait(rows_loaded[at], (key * ratio + r) // 2 % 2)
                            call(
                                f"jax_qla_row_dots<{ctype}, {V}>",
                                T.address_of(dv_s[at, 0, 0]),
                                T.address_of(vd_s[at, 0, 0]),
                                T.address_of(parts.dot_s[at, 0]),
                            )
                            if vectors.faint_s[at, 0] + vectors.faint_s[at, 1] > 0:
                                call(
                                    f"jax_qla_scale_faint_rows<{ctype}, {V}>",
                                    T.address_of(dv_s[at, 0, 0]),
                                    T.address_of(vectors.beta_s[at, 0]),
                                    rows,
                                    value_heads,
                                    T.address_of(dv[row, head, 0]),
                                )
                                call(
                                    f"jax_qla_dots<{ctype}, {V}>",
                                    T.address_of(dv_s[at, 0, 0]),
                                    T.address_of(v[row, head, 0]),
                                    rows,
                                    value_heads,
                                    T.address_of(parts.dot_v_s[at, 0]),
                                )
                            T.barrier_arrive(rows_free[at])
                            T.barrier_arrive(dots_ready[at])
                zero_gaps(dq, dk, dv, dg, dbeta, row + rows, fill, first, keys, heads, ratio, i)
            elif tx >= 128:
                T.set_max_nreg(208, 1)
                if rows > 0:
                    s_k = T.alloc_fragment((C, C), "float32")
                    kk = T.alloc_fragment((C, C), "float32")
                    dk_f = T.alloc_fragment((C, K), "float32")
                    z_k = T.alloc_fragment((C, 64), "float32")
                    y_k = T.alloc_fragment((C, 64), "float32")
                    dots = T.alloc_local((4,), "float32")
                    sums_k = T.alloc_local((18,), "float32")
                    key_pairs = T.alloc_local((16,), "uint32")
                    T.annotate_layout({x: accumulator_layout(x.shape[1], 128) for x in (s_k, kk, z_k, y_k, dk_f)})
                    for key_k in T.serial(keys):
                        T.clear(dk_f)
                        T.barrier_wait(k_loaded[key_k % 2], key_k // 2 % 2)
                        if rows < C:
                            T.barrier_wait(k_ready[key_k % 2], key_k // 2 % 2)
                        for r_k in T.serial(ratio):
                            at_k = (key_k * ratio + r_k) % 2
                            T.barrier_wait(gates_ready[at_k], (key_k * ratio + r_k) // 2 % 2)
                            T.barrier_wait(rows_loaded[at_k], (key_k * ratio + r_k) // 2 % 2)
                            T.wgmma_gemm(dv_s[at_k, :, :], vd_s[at_k, :, :], s_k, transpose_B=True, clear_accum=True)
                            T.wgmma_gemm(
                                k_s[key_k % 2, :, :], k_s[key_k % 2, :, :], kk, transpose_B=True, clear_accum=True
                            )
                            T.wait_wgmma(0)
                            # A warp writes rows of M + M^T that another reads: none may be at work on the last head's any more.
                            T.sync_threads(2, 128)
                            # F = -(D Vd^T o G), strictly lower
                            ops.decay(
                                s_k[0, 0],
                                kk[0, 0],
                                vectors.gamma_s[at_k, 0],
                                vectors.weight_s[at_k, 0],
                                vectors.key_s[key_k % 4, 0],
                                T.float32(-1),
                                rows,
                                sums_k,
                                strict=True,
                            )
                            ops.store_symmetric(
                                s_k[0, 0], vectors.weight_s[at_k, 0], vectors.key_s[key_k % 4, 0], f_s[0, 0]
                            )
                            T.fence_proxy_async()
                            T.sync_threads(2, 128)
                            for x in T.unroll(4):
                                dots[x] = 0.0
                            T.barrier_wait(h_loaded[0], at_k)
                            T.barrier_wait(dh_loaded[0], at_k)
                            # Z and Y by turns: one is computed while the other is used
                            T.wgmma_gemm(dv_s[at_k, :, :], h_s[:, 0:64], z_k, clear_accum=True)
                            T.wgmma_gemm(vd_s[at_k, :, :], dh_s[:, 0:64], y_k, clear_accum=True)
                            ops.write_sums(sums_k, parts.rows_k_s[at_k, 0], parts.columns_k_s[at_k, 0, 0])
                            for part in tuple(range(K // 64)):
                                ops.load_tile(key_pairs, k_s[key_k % 2, 0, part * 64])
                                T.wait_wgmma(1)
                                ops.add_rows(
                                    dk_f[0, part * 64],
                                    z_k[0, 0],
                                    vectors.drop_s[at_k, 0],
                                    vectors.key_s[key_k % 4, 0],
                                    T.float32(1),
                                    key_pairs,
                                    dots[0],
                                    by_lengths=True,
                                )
                                if part + 1 < K // 64:
                                    T.wgmma_gemm(dv_s[at_k, :, :], h_s[:, 64:128], z_k, clear_accum=True)
                                    T.wait_wgmma(1)
                                else:
                                    T.wait_wgmma(0)
                                ops.add_rows(
                                    dk_f[0, part * 64],
                                    y_k[0, 0],
                                    vectors.fall_s[at_k, 0],
                                    vectors.key_s[key_k % 4, 0],
                                    T.float32(1),
                                    key_pairs,
                                    dots[2],
                                    by_lengths=False,
                                )
                                if part + 1 < K // 64:
                                    T.wgmma_gemm(vd_s[at_k, :, :], dh_s[:, 64:128], y_k, clear_accum=True)
                            T.barrier_arrive(h_free[0])
                            T.barrier_arrive(dh_free[0])
                            ops.write_rows(dots[0], parts.z_dots_s[at_k, 0])
                            ops.write_rows(dots[2], parts.y_dots_s[at_k, 0])
                            T.barrier_arrive(parts_ready[at_k])
                            T.barrier_arrive(rows_free[at_k])  # what follows reads neither rows nor gates
                            T.barrier_wait(e_ready[0], at_k)
                            T.wgmma_gemm(f_s, k_s[key_k % 2, :, :], dk_f)
                            if r_k == 0:
                                T.barrier_wait(q_loaded[0], key_k % 2)
                            T.wgmma_gemm(e_s, q_s[0, :, :], dk_f, transpose_A=True)
                            T.wait_wgmma(0)
                            T.barrier_arrive(e_free[0])
                        T.barrier_arrive(q_free[0])
                        write_key_head(
                            dk_f, k_s, key_k % 2, vectors.key_s, k_free, dk, row, rows, first, key_k, key_heads
                        )
            else:
                T.set_max_nreg(184, 1)
                if rows > 0:
                    p = T.alloc_fragment((C, C), "float32")
                    s_q = T.alloc_fragment((C, C), "float32")
                    dq_f = T.alloc_fragment((C, K), "float32")
                    t_q = T.alloc_fragment((C, K), "float32")
                    dots_q = T.alloc_local((2,), "float32")
                    sums_q = T.alloc_local((18,), "float32")
                    queries = T.alloc_local((16,), "uint32")
                    T.annotate_layout({x: accumulator_layout(x.shape[1]) for x in (s_q, p, dq_f, t_q)})
                    for key_q in T.serial(keys):
                        T.clear(dq_f)
                        T.barrier_wait(k_loaded[key_q % 2], key_q // 2 % 2)
                        T.barrier_wait(q_loaded[0], key_q % 2)
                        if rows < C:
                            T.barrier_wait(k_ready[key_q % 2], key_q // 2 % 2)
                            T.barrier_wait(q_ready[0], key_q % 2)
                        for r_q in T.serial(ratio):
                            at_q = (key_q * ratio + r_q) % 2
                            T.barrier_wait(gates_ready[at_q], (key_q * ratio + r_q) // 2 % 2)
                            T.barrier_wait(rows_loaded[at_q], (key_q * ratio + r_q) // 2 % 2)
                            T.barrier_wait(do_loaded[0], (key_q * ratio + r_q) % 2)
                            T.wgmma_gemm(do_s[0, :, :], vd_s[at_q, :, :], s_q, transpose_B=True, clear_accum=True)
                            T.wgmma_gemm(q_s[0, :, :], k_s[key_q % 2, :, :], p, transpose_B=True, clear_accum=True)
                            T.wait_wgmma(0)
                            T.barrier_arrive(rows_free[at_q])
                            # E = scale (dO Vd^T o G)
                            ops.decay(
                                s_q[0, 0],
                                p[0, 0],
                                vectors.gamma_s[at_q, 0],
                                vectors.beta_s[at_q, 0],
                                vectors.query_s[key_q % 4, 0],
                                scale,
                                rows,
                                sums_q,
                                strict=False,
                            )
                            if key_q * ratio + r_q > 0:
                                T.barrier_wait(e_free[0], (key_q * ratio + r_q + 1) % 2)
                            ops.store_tile(s_q[0, 0], e_s[0, 0])
                            T.fence_proxy_async()
                            T.sync_threads(1, 128)
                            T.barrier_arrive(e_ready[0])
                            T.wgmma_gemm(e_s, k_s[key_q % 2, :, :], dq_f)
                            ops.write_sums(sums_q, parts.rows_q_s[at_q, 0], parts.columns_q_s[at_q, 0, 0])
                            T.barrier_wait(h_loaded[0], at_q)
                            T.wgmma_gemm(do_s[0, :, :], h_s, t_q, clear_accum=True)
                            T.wait_wgmma(0)
                            T.barrier_arrive(do_free[0])
                            T.barrier_arrive(h_free[0])
                            for x in T.unroll(2):
                                dots_q[x] = 0.0
                            for part_q in tuple(range(K // 64)):
                                ops.load_tile(queries, q_s[0, 0, part_q * 64])
                                ops.add_rows(
                                    dq_f[0, part_q * 64],
                                    t_q[0, part_q * 64],
                                    vectors.rise_s[at_q, 0],
                                    vectors.query_s[key_q % 4, 0],
                                    scale,
                                    queries,
                                    dots_q[0],
                                    by_lengths=True,
                                )
                            ops.write_rows(dots_q[0], parts.q_dots_s[at_q, 0])
                            T.barrier_arrive(parts_ready[at_q])
                        T.barrier_arrive(k_free[key_q % 2])
                        write_key_head(dq_f, q_s, 0, vectors.query_s, q_free, dq, row, rows, first, key_q, key_heads)

    return gradients


def specification(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    gamma: jax.Array,
    beta: jax.Array,
    lengths: jax.Array,
    query_lengths: jax.Array,
    do: jax.Array,
    vd: jax.Array,
    d: jax.Array,
    h: jax.Array,
    dh: jax.Array,
    segments: jax.Array,
    *,
    ratio: int,
    scale: float,
    group: int = 1,
    l2norm: int = 0,
    first_head: int = 0,
    only: int = 0,
    window: int = ALL,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """(dq, dk [tokens, Hk, K], dv [tokens, Hv, V], dg, dbeta [tokens, Hv]); rows of no sequence are zero; not a number in other heads than those
    of dh, from `first_head` on, and in rows of the other `window`. h and vd each have these heads, or all."""
    del group, only  # results do not go by them
    heads, all_key_heads, all_heads = dh.shape[1], q.shape[1], v.shape[1]
    h, vd = (of_heads(x, first_head, heads) if x.shape[1] == all_heads else x for x in (h, vd))
    q, k = (of_heads(x, first_head // ratio, heads // ratio) for x in (q, k))
    v, g, gamma, beta, do, d = (of_heads(x, first_head, heads) for x in (v, g, gamma, beta, do, d))
    tokens, key_heads = q.shape[:2]
    of_all = segments
    if window != ALL:
        segments = of_window(segments, later=window == LATER)
    chunks = jnp.asarray(chunk_table(segments, tokens))
    if window != ALL:
        dh = from_window_slots(dh, of_all, chunks, later=window == LATER)
    keys, queries = (jnp.repeat(gather_chunks(x, chunks), ratio, axis=2) for x in (k, q))
    values, gates, strength, output, d = (gather_chunks(x, chunks) for x in (v, gamma, beta, do, d))
    corrected = gather_parts(vd, chunks, v.shape[-1])
    used = chunks[:, 2, None, None, None] > 0
    all_h, all_dh = h, dh
    h, dh = (states_of_tiles(of_part_tiles(x, k.shape[2])) for x in (all_h, all_dh))
    h, dh = (jnp.where(used, of_all_slots(x), 0).astype(keys.dtype) for x in (h, dh))
    if (tiles := all_h.shape[2]) < all_dh.shape[2]:  # the low part of D is there
        left = tiles_as_rows(of_all_slots(all_dh[:, :, tiles:]))
        d += jnp.where(used, left, 0)
    end = last_row(gates, chunks)
    rise, fall = jnp.exp(gates), jnp.exp(end[:, None] - gates)
    of_key, scales = jnp.ones_like(strength), jnp.full_like(strength, scale)
    if l2norm:
        lengths, query_lengths = (of_heads(x, first_head // ratio, heads // ratio) for x in (lengths, query_lengths))
        of_key = gather_lengths(lengths, chunks, ratio)
        scales = scales * gather_lengths(query_lengths, chunks, ratio)
    faint = jnp.abs(strength) < FAINT
    weight, factor = of_key * jnp.where(faint, strength, 1), of_key * jnp.where(faint, 1, strength)

    e = scales[:, :, None] * jnp.einsum("sihv,sjhv->sijh", output, corrected) * decay(gates)
    f = -jnp.einsum("sihv,sjhv->sijh", d, corrected) * decay(gates, strict=True)
    kk = jnp.einsum("sihk,sjhk->sijh", keys, keys)
    m = f * weight[:, :, None]
    # without its diagonal, which the row and the column sums share
    r = e * jnp.einsum("sihk,sjhk->sijh", queries, keys) * decay(jnp.zeros_like(gates), strict=True) + m * kk
    dq_state = (scales * rise)[..., None] * jnp.einsum("sihv,shkv->sihk", output, h)
    z = jnp.einsum("sihv,shkv->sihk", d, h)
    y = fall[..., None] * jnp.einsum("sihv,shkv->sihk", corrected, dh)

    dq = dq_state + jnp.einsum("sijh,sjhk->sihk", e, keys)
    dk = jnp.einsum("sijh,sihk->sjhk", e, queries) + jnp.einsum("sijh,sjhk->sihk", m, keys)
    dk += jnp.einsum("sijh,sihk->sjhk", m, keys) - (rise * weight)[..., None] * z + y
    z_dot, y_dot = (jnp.sum(x * keys, axis=-1) for x in (z, y))
    at_zero = of_key * (jnp.sum(f * kk, axis=2) - rise * z_dot) + jnp.sum(d * values, axis=-1)
    elsewhere = jnp.sum(d * corrected, axis=-1) / (factor * jnp.where(strength == 0, 1, strength))
    scanty = jnp.abs(strength) < SCANTY.get(v.dtype.name, 0.0)
    dbeta = jnp.where(scanty | (strength == 0), at_zero, elsewhere)
    dgamma = jnp.sum(r, axis=2) - jnp.sum(r, axis=1) + jnp.sum(dq_state * queries, axis=-1)
    dgamma += -weight * rise * z_dot
    before = jnp.cumsum(y_dot, axis=1) - y_dot
    at_end = jnp.exp(end) * jnp.sum(h * dh, axis=(2, 3))
    dg = jnp.flip(jnp.cumsum(jnp.flip(dgamma, 1), axis=1), 1) + before + at_end[:, None]
    dg = jnp.where(gather_chunks(g, chunks) >= MIN_LOG_DECAY, dg, 0)

    def to_tokens(x, dtype):
        found = scatter_chunks(x, chunks, tokens, dtype)
        if window == ALL:
            return found
        others = rows_of(of_window(of_all, later=window != LATER), tokens)
        here = ~others if window == LATER else rows_of(segments, tokens)
        return jnp.where(here.reshape(-1, *(1,) * (found.ndim - 1)), found, jnp.nan)

    def over_value_heads(x, given, lengths):
        """The sum; where r `given` counts, without what the change of r takes away."""
        total, given = x.reshape(*x.shape[:2], key_heads, ratio, -1).sum(3), gather_chunks(given, chunks)
        if not l2norm:
            return total
        along = gather_lengths(lengths, chunks, 1) ** 2 * jnp.sum(given * total, axis=-1)
        return total - along[..., None] * given

    def of_keys(x, given, lengths):
        sums = over_value_heads(x, given, lengths)
        return among_heads(to_tokens(sums, given.dtype), first_head // ratio, all_key_heads)

    def of_values(x, dtype):
        return among_heads(to_tokens(x, dtype), first_head, all_heads)

    return (
        of_keys(dq, q, query_lengths),
        of_keys(dk, k, lengths),
        of_values(jnp.where(faint, strength, 1)[..., None] * d, v.dtype),
        of_values(dg, g.dtype),
        of_values(dbeta, g.dtype),
    )
