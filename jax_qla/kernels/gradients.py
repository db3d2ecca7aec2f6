"""All gradients of one chunk from the states around it: no recurrence, every chunk for itself.

With h, Vd of kernels/states.py, dh, dX of kernels/state_gradients.py, P = Q K^T, G as in kernels/forward.py (i >= j),
E = scale (dO Vd^T o G), F = -(dX Vd^T o G) strictly lower, M = diag(beta) F, Z = dX h^T, Y = diag(exp(gamma_C - gamma)) Vd dh^T:

    dq     = sum over the value heads of the key head of  scale diag(exp(gamma)) dO h^T + E K
    dk     = sum over the value heads of the key head of  E^T Q + (M + M^T) K - diag(exp(gamma) beta) Z + Y
    dv     = diag(beta) dX
    dbeta  = <dX_i, Vd_i> / beta_i, which for beta_i = 0 is the limit
             rowsum(F o K K^T) + <dX_i, V_i> - exp(gamma_i) <Z_i, K_i>, a difference of larger numbers elsewhere
    dgamma = rowsum(R) - colsum(R) + scale exp(gamma_i) <(dO h^T)_i, Q_i> - beta_i exp(gamma_i) <Z_i, K_i> - <Y_i, K_i>,
             R = E o P + diag(beta) F o K K^T;   to the last row also exp(gamma_C) decay_dot + sum_i <Y_i, K_i>
    dg_i   = sum_{j >= i} dgamma_j, and 0 where g < -110 (the clamp)

R is summed over rows and columns in float32 and never rounded: its two sums cancel where the decay is strong.

Plan, one block per (chunk slot, key head), 384 threads, a loop over the key head's value heads, one stage of tiles:

    warpgroup   registers   work
    0           192         E, P; dq in registers over all value heads
    1           224         F, K K^T, Z and Y (64 key columns at a time); dk in registers over all value heads
    2           88          warp 0 loads with TMA; gates, dv, <dX, Vd>, <dX, V>; puts dbeta and dg together; zero rows of gaps

    barrier       arrives        waits         says
    keys_loaded   TMA            2             Q and K are there
    keys_ready    2              0, 1          their rows beyond the sequence are zero
    loaded        TMA            all           this value head's tiles are there
    gates_ready   2              0, 1          and its gates
    e_ready       0              1             E is in shared memory
    parts_ready   0, 1           2             they have handed in their parts of dbeta and dgamma; tiles may be overwritten
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jax_qla.kernels.common import CHUNK, MIN_LOG_DECAY, PASS_CONFIGS, macros
from jax_qla.kernels.specification import decay, gather_chunks, last_row, scatter_chunks

__all__ = ["PASS_CONFIGS", "Config", "program", "specification"]


@dataclass(frozen=True)
class Config:
    """Sizes this program is specialised for: `key_dim`, `value_dim` 64 or 128, `dtype` "bfloat16" or "float16"."""

    key_dim: int = 128
    value_dim: int = 128
    dtype: str = "bfloat16"


def program(config: Config):
    """The TileLang program. Numbers of tokens, heads and chunk slots are run-time values."""
    import tilelang.language as T

    C, K, V, dtype = CHUNK, config.key_dim, config.value_dim, config.dtype
    m = macros()
    tokens, key_heads, value_heads, slots = T.dynamic("tokens, key_heads, value_heads, slots")

    @T.prim_func
    def gradients(
        q: T.Tensor((tokens, key_heads, K), dtype),
        k: T.Tensor((tokens, key_heads, K), dtype),
        v: T.Tensor((tokens, value_heads, V), dtype),
        g: T.Tensor((tokens, value_heads), "float32"),
        gamma: T.Tensor((tokens, value_heads), "float32"),
        beta: T.Tensor((tokens, value_heads), "float32"),
        do: T.Tensor((tokens, value_heads, V), dtype),
        vd: T.Tensor((tokens, value_heads, V), dtype),
        dx: T.Tensor((tokens, value_heads, V), dtype),
        h: T.Tensor((slots, value_heads, V, K), dtype),
        dh: T.Tensor((slots, value_heads, V, K), dtype),
        decay_dot: T.Tensor((slots, value_heads, V // 64), "float32"),
        chunks: T.Tensor((slots, 4), "int32"),
        dq: T.Tensor((tokens, key_heads, K), dtype),
        dk: T.Tensor((tokens, key_heads, K), dtype),
        dv: T.Tensor((tokens, value_heads, V), dtype),
        dg: T.Tensor((tokens, value_heads), "float32"),
        dbeta: T.Tensor((tokens, value_heads), "float32"),
        ratio: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(slots, key_heads, threads=384) as (slot, key_head):
            T.annotate_min_blocks_per_sm(1)
            row = T.alloc_var("int32")
            rows = T.alloc_var("int32")
            fill = T.alloc_var("int32")
            row = chunks[slot, 1]
            rows = chunks[slot, 2]
            fill = chunks[slot, 3]
            tx = T.get_thread_binding()

            q_s = T.alloc_shared((1, C, K), dtype)  # Q, then dQ on its way out
            k_s = T.alloc_shared((1, C, K), dtype)  # K, then dK on its way out
            do_s = T.alloc_shared((C, V), dtype)
            v_s = T.alloc_shared((C, V), dtype)
            vd_s = T.alloc_shared((C, V), dtype)
            dx_s = T.alloc_shared((C, V), dtype)
            h_s = T.alloc_shared((V, K), dtype)
            dh_s = T.alloc_shared((V, K), dtype)
            e_s = T.alloc_shared((C, C), dtype)  # scale (dO Vd^T o G)
            f_s = T.alloc_shared((C, C), dtype)  # M = -beta (dX Vd^T o G), strictly lower
            gamma_s = T.alloc_shared((1, C), "float32")
            rise_s = T.alloc_shared((1, C), "float32")
            fall_s = T.alloc_shared((1, C), "float32")
            beta_s = T.alloc_shared((1, C), "float32")
            dgamma_q_s = T.alloc_shared((C,), "float32")
            dgamma_k_s = T.alloc_shared((C,), "float32")
            dgamma_end_s = T.alloc_shared((C,), "float32")
            dbeta_k_s = T.alloc_shared((C,), "float32")
            dgamma_s = T.alloc_shared((C,), "float32")
            dot_s = T.alloc_shared((C,), "float32")
            r_q_s = T.alloc_shared((C, C + 1), "float32")
            r_k_s = T.alloc_shared((C, C + 1), "float32")
            columns_q_s = T.alloc_shared((2, C), "float32")
            columns_k_s = T.alloc_shared((2, C), "float32")
            dot_v_s = T.alloc_shared((C,), "float32")
            keys_loaded = T.alloc_barrier([32])
            keys_ready = T.alloc_barrier([128])
            loaded = T.alloc_barrier([32])
            gates_ready = T.alloc_barrier([128])
            e_ready = T.alloc_barrier([128])
            parts_ready = T.alloc_barrier([256])

            if tx >= 256:
                T.set_max_nreg(88, 0)
                i = tx - 256
                head = T.alloc_var("int32")
                product = T.alloc_var("float32")
                total = T.alloc_var("float32")
                gates = T.alloc_local((3,), "float32")
                x_f = T.alloc_fragment((C, 32), "float32")
                y_f = T.alloc_fragment((C, 32), "float32")
                dot = T.alloc_fragment((C,), "float32")
                dot_v = T.alloc_fragment((C,), "float32")
                if rows > 0:
                    if i < 32:
                        T.tma_copy(
                            q[row : row + C, key_head, 0:K],
                            q_s[0, :, :],
                            barrier=keys_loaded[0],
                            leader_scope_threads=32,
                        )
                        T.tma_copy(
                            k[row : row + C, key_head, 0:K],
                            k_s[0, :, :],
                            barrier=keys_loaded[0],
                            leader_scope_threads=32,
                        )
                        T.barrier_arrive(keys_loaded[0])
                    T.barrier_wait(keys_loaded[0], 0)
                    if rows < C:
                        m.zero_tail(q_s, 0, rows, K, i, 128)
                        m.zero_tail(k_s, 0, rows, K, i, 128)
                        T.fence_proxy_async()
                    T.barrier_arrive(keys_ready[0])
                    for r in T.serial(ratio):
                        head = key_head * ratio + r
                        # here every other warp has handed in its part of the previous head, and this warpgroup is done with it
                        T.sync_threads(3, 128)
                        if i < 32:
                            T.tma_copy(do[row : row + C, head, 0:V], do_s, barrier=loaded[0], leader_scope_threads=32)
                            T.tma_copy(vd[row : row + C, head, 0:V], vd_s, barrier=loaded[0], leader_scope_threads=32)
                            T.tma_copy(dx[row : row + C, head, 0:V], dx_s, barrier=loaded[0], leader_scope_threads=32)
                            T.tma_copy(h[slot, head, 0:V, 0:K], h_s, barrier=loaded[0], leader_scope_threads=32)
                            T.tma_copy(dh[slot, head, 0:V, 0:K], dh_s, barrier=loaded[0], leader_scope_threads=32)
                            T.tma_copy(v[row : row + C, head, 0:V], v_s, barrier=loaded[0], leader_scope_threads=32)
                            T.barrier_arrive(loaded[0])
                        m.fetch_gates(gamma, beta, row, rows, head, i, gates)
                        m.store_gates(gates, rows, i, 0, gamma_s, rise_s, fall_s, beta_s)
                        T.barrier_arrive(gates_ready[0])
                        T.barrier_wait(loaded[0], r % 2)
                        T.sync_threads(3, 128)
                        # dV = beta dX; <dX_i, Vd_i> and <dX_i, V_i> for dbeta
                        T.clear(dot)
                        T.clear(dot_v)
                        for x in T.serial(V // 32):
                            for y, z in T.Parallel(C, 32):
                                x_f[y, z] = T.cast(dx_s[y, x * 32 + z], "float32")
                            for y, z in T.Parallel(C, 32):
                                if y < rows:
                                    dv[row + y, head, x * 32 + z] = T.cast(beta_s[0, y] * x_f[y, z], dtype)
                            for y, z in T.Parallel(C, 32):
                                y_f[y, z] = x_f[y, z] * T.cast(vd_s[y, x * 32 + z], "float32")
                            T.reduce_sum(y_f, dot, dim=1, clear=False)
                            for y, z in T.Parallel(C, 32):
                                y_f[y, z] = x_f[y, z] * T.cast(v_s[y, x * 32 + z], "float32")
                            T.reduce_sum(y_f, dot_v, dim=1, clear=False)
                        for y in T.Parallel(C):
                            dot_s[y] = dot[y]
                            dot_v_s[y] = dot_v[y]
                        T.barrier_wait(parts_ready[0], r % 2)
                        T.sync_threads(3, 128)
                        if i < C:
                            product = 0.0
                            if i < rows:
                                product = (dgamma_q_s[i] - columns_q_s[0, i] - columns_q_s[1, i]) + (
                                    dgamma_k_s[i] - columns_k_s[0, i] - columns_k_s[1, i]
                                )
                                if beta_s[0, i] != 0:
                                    dbeta[row + i, head] = dot_s[i] / beta_s[0, i]
                                else:
                                    dbeta[row + i, head] = dbeta_k_s[i] + dot_v_s[i]
                            if i == rows - 1:
                                total = 0.0
                                for x in T.serial(rows):
                                    total = total + dgamma_end_s[x]
                                product = product + total
                                for x in T.serial(V // 64):
                                    product = product + rise_s[0, rows - 1] * decay_dot[slot, head, x]
                            dgamma_s[i] = product
                        T.sync_threads(3, 128)
                        if i < rows:
                            total = 0.0
                            for x in T.serial(C):
                                total = total + T.Select(x >= i, dgamma_s[x], T.float32(0))
                            dg[row + i, head] = T.Select(
                                g[row + i, head] >= T.float32(MIN_LOG_DECAY), total, T.float32(0)
                            )
                for x in T.serial(fill):
                    for y in T.serial(K // 32):
                        if i // 32 == 0:
                            dq[row + rows + x, key_head, y * 32 + i % 32] = T.cast(0, dtype)
                        if i // 32 == 1:
                            dk[row + rows + x, key_head, y * 32 + i % 32] = T.cast(0, dtype)
                    for r in T.serial(ratio):
                        if i < V // 2:
                            dv[row + rows + x, key_head * ratio + r, i * 2] = T.cast(0, dtype)
                            dv[row + rows + x, key_head * ratio + r, i * 2 + 1] = T.cast(0, dtype)
                        if i == 126:
                            dg[row + rows + x, key_head * ratio + r] = 0.0
                        if i == 127:
                            dbeta[row + rows + x, key_head * ratio + r] = 0.0
            elif tx >= 128:
                T.set_max_nreg(208, 1)
                if rows > 0:
                    s_k = T.alloc_fragment((C, C), "float32")
                    dk_f = T.alloc_fragment((C, K), "float32")
                    t_k = T.alloc_fragment((C, 64), "float32")  # K K^T, then half of Vd dS^T
                    row_k = T.alloc_fragment((C,), "float32")
                    column_k = T.alloc_var("float32")
                    z_dot = T.alloc_fragment((C,), "float32")
                    y_dot = T.alloc_fragment((C,), "float32")
                    T.clear(dk_f)
                    T.barrier_wait(keys_ready[0], 0)
                    for r_k in T.serial(ratio):
                        T.barrier_wait(gates_ready[0], r_k % 2)
                        T.barrier_wait(loaded[0], r_k % 2)
                        T.wgmma_gemm(dx_s, vd_s, s_k, transpose_B=True, clear_accum=True)
                        T.wgmma_gemm(k_s[0, :, :], k_s[0, :, :], t_k, transpose_B=True, clear_accum=True)
                        T.wait_wgmma(0)
                        # -dX Vd^T o G, strictly lower: the gradient of K K^T diag(beta) there
                        for i, j in T.Parallel(C, C):
                            s_k[i, j] = -s_k[i, j] * T.exp2(T.min(gamma_s[0, i] - gamma_s[0, j], T.float32(0)))
                        for i, j in T.Parallel(C, C):
                            s_k[i, j] = T.Select(i > j and i < rows, s_k[i, j], T.float32(0))
                        for i, j in T.Parallel(C, C):
                            f_s[i, j] = T.cast(s_k[i, j] * beta_s[0, i], dtype)
                        for i, j in T.Parallel(C, C):
                            s_k[i, j] = s_k[i, j] * t_k[i, j]
                        for i, j in T.Parallel(C, C):
                            r_k_s[i, j] = s_k[i, j] * beta_s[0, i]
                        T.reduce_sum(s_k, row_k, dim=1)
                        T.fence_proxy_async()
                        T.sync_threads(2, 128)
                        column_k = 0.0
                        for x in T.serial(32):
                            column_k = column_k + r_k_s[(tx - 128) // 64 * 32 + x, tx % 64]
                        columns_k_s[(tx - 128) // 64, tx % 64] = column_k
                        T.clear(z_dot)
                        T.clear(y_dot)
                        for part in tuple(range(K // 64)):
                            T.wgmma_gemm(dx_s, h_s[:, part * 64 : part * 64 + 64], s_k, clear_accum=True)
                            T.wgmma_gemm(vd_s, dh_s[:, part * 64 : part * 64 + 64], t_k, clear_accum=True)
                            T.wait_wgmma(1)
                            for i, j in T.Parallel(C, 64):
                                dk_f[i, part * 64 + j] = dk_f[i, part * 64 + j] - s_k[i, j] * (
                                    rise_s[0, i] * beta_s[0, i]
                                )
                            for i, j in T.Parallel(C, 64):
                                s_k[i, j] = s_k[i, j] * T.cast(k_s[0, i, part * 64 + j], "float32")
                            T.reduce_sum(s_k, z_dot, dim=1, clear=False)
                            T.wait_wgmma(0)
                            for i, j in T.Parallel(C, 64):
                                t_k[i, j] = t_k[i, j] * fall_s[0, i]
                            for i, j in T.Parallel(C, 64):
                                dk_f[i, part * 64 + j] = dk_f[i, part * 64 + j] + t_k[i, j]
                            for i, j in T.Parallel(C, 64):
                                t_k[i, j] = t_k[i, j] * T.cast(k_s[0, i, part * 64 + j], "float32")
                            T.reduce_sum(t_k, y_dot, dim=1, clear=False)
                        for i in T.Parallel(C):
                            dgamma_k_s[i] = beta_s[0, i] * (row_k[i] - rise_s[0, i] * z_dot[i]) - y_dot[i]
                            dbeta_k_s[i] = row_k[i] - rise_s[0, i] * z_dot[i]
                            dgamma_end_s[i] = y_dot[i]
                        T.barrier_wait(e_ready[0], r_k % 2)
                        T.wgmma_gemm(f_s, k_s[0, :, :], dk_f)
                        T.wgmma_gemm(f_s, k_s[0, :, :], dk_f, transpose_A=True)
                        T.wgmma_gemm(e_s, q_s[0, :, :], dk_f, transpose_A=True)
                        T.wait_wgmma(0)
                        T.barrier_arrive(parts_ready[0])
                    T.sync_threads(4, 256)  # nobody reads Q or K any more
                    for i, j in T.Parallel(C, K):
                        k_s[0, i, j] = T.cast(dk_f[i, j], dtype)
                    T.fence_proxy_async()
                    T.sync_threads(2, 128)
                    if rows == C:
                        T.tma_copy(k_s[0, :, :], dk[row : row + C, key_head, 0:K], leader_scope_threads=128)
                        T.tma_store_wait(0)
                    else:
                        for part in T.serial(K // 64):
                            m.store_rows(k_s, 0, dk, row, rows, key_head, 0, part * 64, tx - 128)
            else:
                T.set_max_nreg(208, 1)
                if rows > 0:
                    p = T.alloc_fragment((C, C), "float32")
                    s_q = T.alloc_fragment((C, C), "float32")
                    dq_f = T.alloc_fragment((C, K), "float32")
                    t_q = T.alloc_fragment((C, K), "float32")
                    row_q = T.alloc_fragment((C,), "float32")
                    column_q = T.alloc_var("float32")
                    q_dot = T.alloc_fragment((C,), "float32")
                    T.clear(dq_f)
                    T.barrier_wait(keys_ready[0], 0)
                    for r_q in T.serial(ratio):
                        T.barrier_wait(gates_ready[0], r_q % 2)
                        T.barrier_wait(loaded[0], r_q % 2)
                        T.wgmma_gemm(do_s, vd_s, s_q, transpose_B=True, clear_accum=True)
                        T.wgmma_gemm(q_s[0, :, :], k_s[0, :, :], p, transpose_B=True, clear_accum=True)
                        T.wait_wgmma(0)
                        # scale (dO Vd^T o G)
                        for i, j in T.Parallel(C, C):
                            s_q[i, j] = s_q[i, j] * scale * T.exp2(T.min(gamma_s[0, i] - gamma_s[0, j], T.float32(0)))
                        for i, j in T.Parallel(C, C):
                            s_q[i, j] = T.Select(i >= j and i < rows, s_q[i, j], T.float32(0))
                        for i, j in T.Parallel(C, C):
                            e_s[i, j] = T.cast(s_q[i, j], dtype)
                        for i, j in T.Parallel(C, C):
                            s_q[i, j] = s_q[i, j] * p[i, j]
                        for i, j in T.Parallel(C, C):
                            r_q_s[i, j] = s_q[i, j]
                        T.reduce_sum(s_q, row_q, dim=1)
                        T.fence_proxy_async()
                        T.sync_threads(1, 128)
                        T.barrier_arrive(e_ready[0])
                        T.wgmma_gemm(e_s, k_s[0, :, :], dq_f)
                        T.wgmma_gemm(do_s, h_s, t_q, clear_accum=True)
                        column_q = 0.0
                        for x in T.serial(32):
                            column_q = column_q + r_q_s[tx // 64 * 32 + x, tx % 64]
                        columns_q_s[tx // 64, tx % 64] = column_q
                        T.wait_wgmma(0)
                        for i, j in T.Parallel(C, K):
                            t_q[i, j] = t_q[i, j] * (rise_s[0, i] * scale)
                        for i, j in T.Parallel(C, K):
                            dq_f[i, j] = dq_f[i, j] + t_q[i, j]
                        for i, j in T.Parallel(C, K):
                            t_q[i, j] = t_q[i, j] * T.cast(q_s[0, i, j], "float32")
                        T.reduce_sum(t_q, q_dot, dim=1)
                        for i in T.Parallel(C):
                            dgamma_q_s[i] = row_q[i] + q_dot[i]
                        T.barrier_arrive(parts_ready[0])
                    T.sync_threads(4, 256)  # nobody reads Q or K any more
                    for i, j in T.Parallel(C, K):
                        q_s[0, i, j] = T.cast(dq_f[i, j], dtype)
                    T.fence_proxy_async()
                    T.sync_threads(1, 128)
                    if rows == C:
                        T.tma_copy(q_s[0, :, :], dq[row : row + C, key_head, 0:K], leader_scope_threads=128)
                        T.tma_store_wait(0)
                    else:
                        for part in T.serial(K // 64):
                            m.store_rows(q_s, 0, dq, row, rows, key_head, 0, part * 64, tx)

    return gradients


def specification(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    gamma: jax.Array,
    beta: jax.Array,
    do: jax.Array,
    vd: jax.Array,
    dx: jax.Array,
    h: jax.Array,
    dh: jax.Array,
    decay_dot: jax.Array,
    chunks: jax.Array,
    *,
    ratio: int,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """(dq, dk [tokens, Hk, K], dv [tokens, Hv, V], dg, dbeta [tokens, Hv]); rows of no sequence are zero."""
    tokens, key_heads = q.shape[:2]
    keys, queries = (jnp.repeat(gather_chunks(x, chunks), ratio, axis=2) for x in (k, q))
    values, gates, strength, output, corrected, dx = (gather_chunks(x, chunks) for x in (v, gamma, beta, do, vd, dx))
    used = chunks[:, 2, None, None, None] > 0
    h, dh = (jnp.where(used, x, 0).astype(keys.dtype) for x in (h, dh))
    decay_dot = jnp.where(used[..., 0], decay_dot, 0).astype(keys.dtype)
    end = last_row(gates, chunks)
    rise, fall = jnp.exp(gates), jnp.exp(end[:, None] - gates)

    e = scale * jnp.einsum("sihv,sjhv->sijh", output, corrected) * decay(gates)
    f = -jnp.einsum("sihv,sjhv->sijh", dx, corrected) * decay(gates, strict=True)
    kk = jnp.einsum("sihk,sjhk->sijh", keys, keys)
    m = f * strength[:, :, None]
    r = e * jnp.einsum("sihk,sjhk->sijh", queries, keys) + m * kk
    dq_state = scale * rise[..., None] * jnp.einsum("sihv,shvk->sihk", output, h)
    z = jnp.einsum("sihv,shvk->sihk", dx, h)
    y = fall[..., None] * jnp.einsum("sihv,shvk->sihk", corrected, dh)

    dq = dq_state + jnp.einsum("sijh,sjhk->sihk", e, keys)
    dk = jnp.einsum("sijh,sihk->sjhk", e, queries) + jnp.einsum("sijh,sjhk->sihk", m, keys)
    dk += jnp.einsum("sijh,sihk->sjhk", m, keys) - (rise * strength)[..., None] * z + y
    z_dot, y_dot = (jnp.sum(x * keys, axis=-1) for x in (z, y))
    at_zero = jnp.sum(f * kk, axis=2) + jnp.sum(dx * values, axis=-1) - rise * z_dot
    dbeta = jnp.where(strength == 0, at_zero, jnp.sum(dx * corrected, axis=-1) / jnp.where(strength == 0, 1, strength))
    dgamma = jnp.sum(r, axis=2) - jnp.sum(r, axis=1) + jnp.sum(dq_state * queries, axis=-1)
    dgamma += -strength * rise * z_dot - y_dot
    at_end = jnp.exp(end) * jnp.sum(decay_dot, axis=2) + jnp.sum(y_dot, axis=1)
    # every row is at or before the last one, so the last row's share reaches the dg of all
    dg = jnp.flip(jnp.cumsum(jnp.flip(dgamma, 1), axis=1), 1) + at_end[:, None]
    dg = jnp.where(gather_chunks(g, chunks) >= MIN_LOG_DECAY, dg, 0)

    def to_tokens(x, dtype):
        return scatter_chunks(x, chunks, tokens, dtype)

    def over_value_heads(x):
        return x.reshape(*x.shape[:2], key_heads, ratio, -1).sum(3)

    return (
        to_tokens(over_value_heads(dq), q.dtype),
        to_tokens(over_value_heads(dk), k.dtype),
        to_tokens(strength[..., None] * dx, v.dtype),
        to_tokens(dg, g.dtype),
        to_tokens(dbeta, g.dtype),
    )
