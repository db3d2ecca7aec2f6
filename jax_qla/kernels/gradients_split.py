"""The program of kernels/gradients.py with `split`: Vd, D, h and dh are sums of two bf16 numbers, and so is E where K multiplies it.

These are all that dg consists of, which is an inner product of h and dh at either end of a chunk and as far off as they are. E, F, Z and Y take
the products of high and low parts too, three each (two of E, for dO is one number); <D, Vd> is on the diagonal of what F is computed from.

Of a chunk and value head twice as many bytes come, 208 KiB at K = V = 128: what a block waits for is loads. So they come in an order in which they are
soon used up, value columns by 64: of these the rows of Vd, D (two parts each, D's low one transposed) and dO, and then of 64 rows of K at a time h and dh.
E and F add up over the value columns in registers, Z, Y and dO h^T go to dK and dQ as they come. Two stages of each; while what follows is computed, E
and F and what they give, the next head's come. (docs/performance_versions.md: a whole head's at a time, in one stage of Vd and D, took up to 1.3 times
as long, and still this waits for something else.)

Warpgroups, registers and barriers as in kernels/gradients.py, but that

    barrier                              phases      says
    rows_loaded[], rows_free[]           V / 64 a    64 columns of Vd and D are there; may be overwritten
    do_loaded[], do_free[]               head        the same of dO
    h_loaded[], h_free[], dh_...[]       V / 64      64 columns and rows of K of h, of dh
                                         times K / 64

Operations a chunk and head at K = V = 128: 28 MFLOP, 4.7 us of an SM's share of 790 TFLOP/s; with two value heads a key head 240 KiB, 7.5 us of its share
of 4.3 TB/s.
"""

from types import SimpleNamespace
from typing import TYPE_CHECKING

from jax_qla.kernels.common import CHUNK, SHORT
from jax_qla.kernels.gradient_parts import (
    PRELUDE,
    chunk_of_block,
    gap_rows,
    gate_parts,
    gate_vectors,
    gate_warps,
    key_head_writer,
    operations,
)
from jax_qla.kernels.macros import accumulator_layout, call, macros, unfenced

if TYPE_CHECKING:
    from jax_qla.kernels.gradients import Config

SPLIT_PRELUDE = (
    PRELUDE
    + r"""
// The diagonal of a wgmma accumulator [64, 64], to out [64].
__device__ __forceinline__ void jax_qla_write_diagonal(const void* registers, float* out) {
  const float* x = static_cast<const float*>(registers);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, row = lane / 4;
  if (lane % 4 != row / 2) return;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float even = x[(2 * w + h) * 4 + h * 2], odd = x[(2 * w + h) * 4 + h * 2 + 1];
      if (w == warp) out[w * 16 + h * 8 + row] = row % 2 ? odd : even;
    }
  }
}
"""
)


def program(config: "Config"):
    """The TileLang program. Numbers of tokens, heads, sequences and chunk slots are run-time values."""
    import tilelang.language as T

    C, K, V, dtype = CHUNK, config.key_dim, config.value_dim, config.dtype
    ctype = {"bfloat16": "bfloat16_t"}[dtype]
    l2norm = config.l2norm
    m, ops = macros(), operations(ctype, l2norm)
    of_k, of_v = K // 64, V // 64  # parts of 64
    compute_gates, allocate_parts = gate_warps(dtype, l2norm, of_v), gate_parts(of_v, 12 * of_k * of_v)
    find_chunk, allocate_vectors = chunk_of_block(), gate_vectors(l2norm)
    zero_gaps, write_key_head = gap_rows(config), key_head_writer(config)
    tokens, key_heads, value_heads, sequences, state_slots = T.dynamic(
        "tokens, key_heads, value_heads, sequences, state_slots"
    )
    of_launch = T.dynamic("heads")  # value heads, from first_head on
    kept_heads, vd_heads = T.dynamic("kept_heads, vd_heads")  # these, or all, of h and of Vd
    window_slots = T.dynamic("window_slots")  # of dh

    @T.macro
    def load_tile(source, slot, head, tile, column, target, stage, loaded, turn):
        """One warp has 64 value columns, from `column` on, of a chunk's tile loaded; the barrier loaded[turn] counts the bytes."""
        T.tma_copy(
            source[slot - 1, head, tile, column : column + 64, 0:64],
            target[stage, :, :],
            barrier=loaded[turn],
            leader_scope_threads=32,
            eviction_policy=SHORT,
        )

    @T.macro
    def add_columns(total, part, x, factors, stage, lengths, of_lengths, scale, pairs, dots, number, by_lengths):
        """To columns from 64 `part` on, of a number known when it runs: `add_rows` of x, by the `factors` of a stage and, if `by_lengths`, `lengths`; dots
        from that `number` on."""
        for known in tuple(range(of_k)):
            if part == known:
                ops.add_rows(
                    total[0, known * 64],
                    x[0, 0],
                    factors[stage, 0],
                    lengths[of_lengths, 0],
                    scale,
                    pairs,
                    dots[number],
                    by_lengths=by_lengths,
                )

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
        vd: T.Tensor((tokens, vd_heads, V * 2), dtype),
        d: T.Tensor((tokens, value_heads, V), dtype),  # D's high part; may be dv itself
        h: T.Tensor((state_slots, kept_heads, of_k * 2, V, 64), dtype),
        dh: T.Tensor((window_slots, of_launch, of_k * 2 + 1, V, 64), dtype),
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
            window_slots + 1, T.ceildiv(T.truncdiv(of_launch, ratio), group), threads=512, prelude=SPLIT_PRELUDE
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
            do_s = T.alloc_shared((2, C, 64), dtype)
            vd_s = T.alloc_shared((2, C, 64), dtype)
            vd_low_s = T.alloc_shared((2, C, 64), dtype)
            d_s = T.alloc_shared((2, C, 64), dtype)
            d_low_s = T.alloc_shared((2, 64, C), dtype)  # transposed
            h_s = T.alloc_shared((4, 64, 64), dtype)  # of each stage the high part and the low one
            dh_s = T.alloc_shared((4, 64, 64), dtype)
            e_s = T.alloc_shared((C, C), dtype)  # scale (dO Vd^T o G)
            f_s = T.alloc_shared((C, C), dtype)  # M + M^T, M = -w (D Vd^T o G) strictly lower
            vectors = allocate_vectors()
            parts = allocate_parts()  # <dh, h> by warp, tile and product of parts
            k_loaded = T.alloc_barrier([32] * 2)
            k_ready = T.alloc_barrier([128] * 2)
            k_free = T.alloc_barrier([256] * 2)
            q_loaded = T.alloc_barrier([32])
            q_ready = T.alloc_barrier([128])
            q_free = T.alloc_barrier([256])
            do_loaded = T.alloc_barrier([32] * 2)
            do_free = T.alloc_barrier([128] * 2)
            rows_loaded = T.alloc_barrier([32] * 2)
            rows_free = T.alloc_barrier([384] * 2)
            h_loaded = T.alloc_barrier([32] * 2)
            h_free = T.alloc_barrier([384] * 2)
            dh_loaded = T.alloc_barrier([32] * 2)
            dh_free = T.alloc_barrier([256] * 2)
            gates_ready = T.alloc_barrier([64] * 2)
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
                        for key_l in T.serial(keys):
                            for r_l in T.serial(ratio):
                                for v_l in T.serial(of_v):
                                    n = key_l * ratio + r_l
                                    at_l = (n * of_v + v_l) % 2
                                    if n * of_v + v_l >= 2:
                                        T.barrier_wait(rows_free[at_l], ((n * of_v + v_l) // 2 + 1) % 2)
                                    m.load_rows(vd, row, of_vd + n, v_l * 64, 64, vd_s, at_l, rows_loaded)
                                    m.load_rows(vd, row, of_vd + n, V + v_l * 64, 64, vd_low_s, at_l, rows_loaded)
                                    m.load_rows(d, row, first * ratio + n, v_l * 64, 64, d_s, at_l, rows_loaded)
                                    load_tile(dh, place, held + n, 2 * of_k, v_l * 64, d_low_s, at_l, rows_loaded, at_l)
                                    T.barrier_arrive(rows_loaded[at_l])
                                    if n * of_v + v_l >= 2:
                                        T.barrier_wait(do_free[at_l], ((n * of_v + v_l) // 2 + 1) % 2)
                                    m.load_rows(do, row, first * ratio + n, v_l * 64, 64, do_s, at_l, do_loaded)
                                    T.barrier_arrive(do_loaded[at_l])
                                    # Before what is loaded once this head has begun, for which its queries are needed.
                                    if r_l == 0 and v_l == 0:
                                        if key_l > 0:
                                            T.barrier_wait(q_free[0], (key_l + 1) % 2)
                                        m.load_rows(q, row, first + key_l, 0, K, q_s, 0, q_loaded)
                                        T.barrier_arrive(q_loaded[0])
                                        if key_l + 1 < keys:
                                            if key_l > 0:
                                                T.barrier_wait(k_free[(key_l + 1) % 2], ((key_l + 1) // 2 + 1) % 2)
                                            m.load_rows(k, row, first + key_l + 1, 0, K, k_s, (key_l + 1) % 2, k_loaded)
                                            T.barrier_arrive(k_loaded[(key_l + 1) % 2])
                                    for k_l in T.serial(of_k):
                                        turn = (n * of_v + v_l) * of_k + k_l
                                        if turn >= 2:
                                            T.barrier_wait(h_free[turn % 2], (turn // 2 + 1) % 2)
                                        for x in T.unroll(2):
                                            load_tile(
                                                *(h, slot, kept + n, x * of_k + k_l, v_l * 64),
                                                *(h_s, turn % 2 * 2 + x, h_loaded, turn % 2),
                                            )
                                        T.barrier_arrive(h_loaded[turn % 2])
                                        if turn >= 2:
                                            T.barrier_wait(dh_free[turn % 2], (turn // 2 + 1) % 2)
                                        for x in T.unroll(2):
                                            load_tile(
                                                *(dh, place, held + n, x * of_k + k_l, v_l * 64),
                                                *(dh_s, turn % 2 * 2 + x, dh_loaded, turn % 2),
                                            )
                                        T.barrier_arrive(dh_loaded[turn % 2])
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
                            for v_i in T.serial(of_v):
                                turn_of_v = (key * ratio + r) * of_v + v_i
                                for k_i in T.serial(of_k):
                                    turn_i = turn_of_v * of_k + k_i
                                    T.barrier_wait(h_loaded[turn_i % 2], turn_i // 2 % 2)
                                    T.barrier_wait(dh_loaded[turn_i % 2], turn_i // 2 % 2)
                                    for product, (of_h, of_dh) in enumerate(((0, 0), (0, 1), (1, 0))):
                                        call(
                                            f"jax_qla_inner<{ctype}, 64, 64>",
                                            T.address_of(h_s[turn_i % 2 * 2 + of_h, 0, 0]),
                                            T.address_of(dh_s[turn_i % 2 * 2 + of_dh, 0, 0]),
                                            T.address_of(parts.states_dot_s[at, 12 * (v_i * of_k + k_i) + 4 * product]),
                                        )
                                    T.barrier_arrive(h_free[turn_i % 2])
                                    T.barrier_arrive(dh_free[turn_i % 2])
                                T.barrier_wait(rows_loaded[turn_of_v % 2], turn_of_v // 2 % 2)
                                if vectors.faint_s[at, 0] + vectors.faint_s[at, 1] > 0:
                                    call(
                                        f"jax_qla_scale_faint_rows<{ctype}, 64>",
                                        T.address_of(d_s[turn_of_v % 2, 0, 0]),
                                        T.address_of(vectors.beta_s[at, 0]),
                                        rows,
                                        value_heads * of_v,
                                        T.address_of(dv[row, head, v_i * 64]),
                                    )
                                    call(
                                        f"jax_qla_dots<{ctype}, 64>",
                                        T.address_of(d_s[turn_of_v % 2, 0, 0]),
                                        T.address_of(v[row, head, v_i * 64]),
                                        rows,
                                        value_heads * of_v,
                                        T.address_of(parts.dot_v_s[at, v_i * C]),
                                    )
                                T.barrier_arrive(rows_free[turn_of_v % 2])
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
                            T.clear(s_k)
                            for x in T.unroll(4):
                                dots[x] = 0.0
                            for v_k in T.serial(of_v):
                                of_rows_k = (key_k * ratio + r_k) * of_v + v_k
                                stage_k = of_rows_k % 2
                                T.barrier_wait(rows_loaded[stage_k], of_rows_k // 2 % 2)
                                T.wgmma_gemm(d_s[stage_k, :, :], vd_s[stage_k, :, :], s_k, transpose_B=True)
                                T.wgmma_gemm(d_s[stage_k, :, :], vd_low_s[stage_k, :, :], s_k, transpose_B=True)
                                T.wgmma_gemm(
                                    d_low_s[stage_k, :, :], vd_s[stage_k, :, :], s_k, transpose_A=True, transpose_B=True
                                )
                                for k_k in T.serial(of_k):
                                    turn_k = of_rows_k * of_k + k_k
                                    high_k = turn_k % 2 * 2
                                    T.barrier_wait(h_loaded[turn_k % 2], turn_k // 2 % 2)
                                    T.wgmma_gemm(d_s[stage_k, :, :], h_s[high_k, :, :], z_k, clear_accum=True)
                                    T.wgmma_gemm(d_s[stage_k, :, :], h_s[high_k + 1, :, :], z_k)
                                    T.wgmma_gemm(d_low_s[stage_k, :, :], h_s[high_k, :, :], z_k, transpose_A=True)
                                    T.barrier_wait(dh_loaded[turn_k % 2], turn_k // 2 % 2)
                                    T.wgmma_gemm(vd_s[stage_k, :, :], dh_s[high_k, :, :], y_k, clear_accum=True)
                                    T.wgmma_gemm(vd_s[stage_k, :, :], dh_s[high_k + 1, :, :], y_k)
                                    T.wgmma_gemm(vd_low_s[stage_k, :, :], dh_s[high_k, :, :], y_k)
                                    ops.load_tile(key_pairs, k_s[key_k % 2, 0, k_k * 64])
                                    T.wait_wgmma(3)
                                    T.barrier_arrive(h_free[turn_k % 2])
                                    add_columns(
                                        *(dk_f, k_k, z_k, vectors.drop_s, at_k, vectors.key_s, key_k % 4, T.float32(1)),
                                        *(key_pairs, dots, 0, True),
                                    )
                                    T.wait_wgmma(0)
                                    T.barrier_arrive(dh_free[turn_k % 2])
                                    add_columns(
                                        *(dk_f, k_k, y_k, vectors.fall_s, at_k, vectors.key_s, key_k % 4, T.float32(1)),
                                        *(key_pairs, dots, 2, False),
                                    )
                                T.barrier_arrive(rows_free[stage_k])
                            T.wgmma_gemm(
                                k_s[key_k % 2, :, :], k_s[key_k % 2, :, :], kk, transpose_B=True, clear_accum=True
                            )
                            call("jax_qla_write_diagonal", T.address_of(s_k[0, 0]), unfenced(parts.dot_s[at_k, 0]))
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
                            T.wgmma_gemm(f_s, k_s[key_k % 2, :, :], dk_f)
                            ops.write_sums(sums_k, parts.rows_k_s[at_k, 0], parts.columns_k_s[at_k, 0, 0])
                            ops.write_rows(dots[0], parts.z_dots_s[at_k, 0])
                            ops.write_rows(dots[2], parts.y_dots_s[at_k, 0])
                            T.barrier_arrive(parts_ready[at_k])
                            T.barrier_wait(e_ready[0], at_k)
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
                    t_q = T.alloc_fragment((C, 64), "float32")
                    e_low = T.alloc_fragment((C, C), dtype)
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
                            T.clear(s_q)
                            for x in T.unroll(2):
                                dots_q[x] = 0.0
                            for v_q in T.serial(of_v):
                                of_rows_q = (key_q * ratio + r_q) * of_v + v_q
                                stage_q = of_rows_q % 2
                                T.barrier_wait(rows_loaded[stage_q], of_rows_q // 2 % 2)
                                T.barrier_wait(do_loaded[stage_q], of_rows_q // 2 % 2)
                                T.wgmma_gemm(do_s[stage_q, :, :], vd_s[stage_q, :, :], s_q, transpose_B=True)
                                T.wgmma_gemm(do_s[stage_q, :, :], vd_low_s[stage_q, :, :], s_q, transpose_B=True)
                                for k_q in T.serial(of_k):
                                    turn_q = of_rows_q * of_k + k_q
                                    T.barrier_wait(h_loaded[turn_q % 2], turn_q // 2 % 2)
                                    T.wgmma_gemm(do_s[stage_q, :, :], h_s[turn_q % 2 * 2, :, :], t_q, clear_accum=True)
                                    T.wgmma_gemm(do_s[stage_q, :, :], h_s[turn_q % 2 * 2 + 1, :, :], t_q)
                                    ops.load_tile(queries, q_s[0, 0, k_q * 64])
                                    T.wait_wgmma(0)
                                    T.barrier_arrive(h_free[turn_q % 2])
                                    add_columns(
                                        *(dq_f, k_q, t_q, vectors.rise_s, at_q, vectors.query_s, key_q % 4, scale),
                                        *(queries, dots_q, 0, True),
                                    )
                                T.barrier_arrive(rows_free[stage_q])
                                T.barrier_arrive(do_free[stage_q])
                            T.wgmma_gemm(q_s[0, :, :], k_s[key_q % 2, :, :], p, transpose_B=True, clear_accum=True)
                            T.wait_wgmma(0)
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
                            for i_q, j_q in T.Parallel(C, C):
                                e_low[i_q, j_q] = T.cast(
                                    s_q[i_q, j_q] - T.cast(T.cast(s_q[i_q, j_q], dtype), "float32"), dtype
                                )
                            T.fence_proxy_async()
                            T.sync_threads(1, 128)
                            T.barrier_arrive(e_ready[0])
                            T.wgmma_gemm(e_s, k_s[key_q % 2, :, :], dq_f)
                            T.wgmma_gemm(e_low, k_s[key_q % 2, :, :], dq_f)
                            ops.write_sums(sums_q, parts.rows_q_s[at_q, 0], parts.columns_q_s[at_q, 0, 0])
                            ops.write_rows(dots_q[0], parts.q_dots_s[at_q, 0])
                            T.barrier_arrive(parts_ready[at_q])
                            T.wait_wgmma(0)
                        T.barrier_arrive(k_free[key_q % 2])
                        write_key_head(dq_f, q_s, 0, vectors.query_s, q_free, dq, row, rows, first, key_q, key_heads)

    return gradients
