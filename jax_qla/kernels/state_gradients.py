"""The backward recurrence: gradients of the states after every chunk, and of X.

Per chunk, value head and sequence, last chunk first, with dS the gradient of the state after the chunk and
P = scale Q K^T o G (notation of kernels/forward.py):

    dh  = dS                                                                        [K, V] stored transposed
    dVd = P^T dO + diag(exp(gamma_C - gamma)) K dS                                  [64, V]
    dX  = a^T dVd                                                                   [64, V]
    dS' = exp(gamma_C) dS + Q^T diag(scale exp(gamma)) dO - K^T diag(exp(gamma) beta) dX   [K, V]

Plan, one block per (sequence, value head, tile of `value_tile` value columns), three stages of chunk tiles (two of P); dS^T,
dVd^T and dX^T stay in registers as the A operands of the next wgmma, dO^T is read from shared memory as a transposed A operand:

    warpgroup       registers  work
    0 (and 1)       200        64 value columns each: dS^T in float32; dh leaves through a tile of its own while K dS runs, dX
                               through dO's tile
    last            104        warp 0 loads Q, K, dO, a with TMA, two chunks ahead of what all prepare: gates, P into shared
                               memory, Q scaled in place, a without its diagonal of ones
    (barriers as in kernels/forward.py; rows beyond the sequence are zero in Q, K, a and dO)

The diagonal of a^T dVd is dVd itself, which stays in the accumulator in float32.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jax_qla.kernels.common import CHUNK, PASS_CONFIGS, TILE_PRELUDE, macros
from jax_qla.kernels.specification import decay, gather_chunks, inverse_length, last_row, scan_slots, scatter_chunks

__all__ = ["PASS_CONFIGS", "Config", "program", "specification"]


PRELUDE = (
    TILE_PRELUDE
    + r"""
// tile_ij = scale (query_i, if normed) x_ij exp(gamma_i - gamma_j) for i >= j, else 0, of x, a wgmma accumulator [64, 64]; gamma in units of log2.
template <typename T, bool normed>
__device__ __forceinline__ void jax_qla_store_decayed(void* registers, const float* gamma, float scale, const float* query, T* tile) {
  float* x = static_cast<float*>(registers);
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, top = warp * 16 + lane / 4;
  const float at_row[2] = {gamma[top], gamma[top + 8]}, of_row[2] = {normed ? scale * query[top] : scale, normed ? scale * query[top + 8] : scale};
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float2 at_column = *reinterpret_cast<const float2*>(gamma + n * 8 + lane % 4 * 2);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& value = x[4 * n + 2 * h + e];
        const float decay = jax_qla_exp2(fminf(at_row[h] - (e ? at_column.y : at_column.x), 0.f));
        value = top + h * 8 >= n * 8 + lane % 4 * 2 + e ? value * of_row[h] * decay : 0.f;
      }
    }
  }
  jax_qla_store_tile(x, tile);
}
// Row i of a tile [64, columns] in shared memory (halves of 64 columns, 128-byte swizzled) becomes scale factor_i times itself.
template <typename T, int columns>
__device__ __forceinline__ void jax_qla_scale_rows(T* tile, const float* factor, float scale) {
  const int thread = threadIdx.x & 127;
  uint4* vectors = reinterpret_cast<uint4*>(tile) + thread;
#pragma unroll
  for (int base = 0; base < columns / 16; base += 4) {
    uint4 x[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) x[n] = vectors[(base + n) * 128];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float f = factor[((base + n) * 16 + thread / 8) & 63] * scale;
      T pairs[8];
      memcpy(pairs, &x[n], 16);
      unsigned out[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        out[e] = jax_qla_pack<T>(static_cast<float>(pairs[2 * e]) * f, static_cast<float>(pairs[2 * e + 1]) * f);
      }
      vectors[(base + n) * 128] = make_uint4(out[0], out[1], out[2], out[3]);
    }
  }
}
"""
)


@dataclass(frozen=True)
class Config:
    """Sizes this program is specialised for: `key_dim`, `value_dim` 64 or 128, `dtype` "bfloat16" or "float16", and
    `value_tile`, the value columns of a block: 64, or 128 where V is; `l2norm`: whether q and k
    are to be normalised."""

    key_dim: int = 128
    value_dim: int = 128
    dtype: str = "bfloat16"
    value_tile: int = 128
    l2norm: bool = False


def program(config: Config):
    """The TileLang program. Numbers of tokens, heads, sequences and chunk slots are run-time values."""
    import tilelang.language as T

    C, K, V, W, dtype = CHUNK, config.key_dim, config.value_dim, config.value_tile, config.dtype
    tiles = V // W  # blocks a head
    ctype = {"bfloat16": "bfloat16_t", "float16": "half_t"}[dtype]
    l2norm, normed = config.l2norm, "true" if config.l2norm else "false"
    stages = 3
    S = 2 * W  # threads that hold the gradient: one warpgroup for every 64 value columns
    m = macros()
    tokens, key_heads, value_heads, sequences, slots = T.dynamic("tokens, key_heads, value_heads, sequences, slots")
    initial_states, final_states = T.dynamic("initial_states, final_states")  # sequences, or 0: not wanted, not given

    @T.prim_func
    def state_gradients(
        q: T.Tensor((tokens, key_heads, K), dtype),
        k: T.Tensor((tokens, key_heads, K), dtype),
        do: T.Tensor((tokens, value_heads, V), dtype),
        a: T.Tensor((tokens, value_heads, C), dtype),
        gamma: T.Tensor((tokens, value_heads), "float32"),
        beta: T.Tensor((tokens, value_heads), "float32"),
        d_final_state: T.Tensor((final_states, value_heads, K, V), "float32"),
        segments: T.Tensor((sequences, 2), "int32"),
        dh: T.Tensor((slots, value_heads, V, K), dtype),
        dx: T.Tensor((tokens, value_heads, V), dtype),
        d_initial_state: T.Tensor((initial_states, value_heads, K, V), "float32"),
        ratio: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(sequences * tiles, value_heads, threads=S + 128, prelude=PRELUDE) as (block, head):
            T.annotate_min_blocks_per_sm(1)
            T.pdl_trigger()  # `gradients` waits by itself
            n = T.alloc_var("int32")
            start = T.alloc_var("int32")
            end = T.alloc_var("int32")
            count = T.alloc_var("int32")
            key_head = T.alloc_var("int32")
            n = block // tiles
            start = segments[n, 0]
            end = segments[n, 1]
            count = (end - start + C - 1) // C
            key_head = T.truncdiv(head, ratio)
            first = (block % tiles) * W  # first value column of this block
            tx = T.get_thread_binding()

            q_s = T.alloc_shared((stages, C, K), dtype)  # Q, then scale exp(gamma) Q
            k_s = T.alloc_shared((stages, C, K), dtype)
            do_s = T.alloc_shared((stages, C, W), dtype)  # dO, then dX on its way out
            a_s = T.alloc_shared((stages, C, C), dtype)  # without its diagonal
            p_s = T.alloc_shared((2, C, C), dtype)  # a third would not fit
            dh_s = T.alloc_shared((W // 64, 64, K), dtype)
            gamma_s = T.alloc_shared((stages, C), "float32")
            rise_s = T.alloc_shared((stages, C), "float32")
            fall_s = T.alloc_shared((stages, C), "float32")
            beta_s = T.alloc_shared((stages, C), "float32")
            drop_s = T.alloc_shared((stages, C), "float32")  # -exp(gamma) beta, over |k|^2 if keys are normalised
            key_s = T.alloc_shared((C,), "float32")  # 1 / |k|
            query_s = T.alloc_shared((C,), "float32")  # 1 / |q|
            lift_s = T.alloc_shared((stages, C), "float32") if l2norm else rise_s  # exp(gamma) / |q|
            loaded = T.alloc_barrier([32] * stages)
            ready = T.alloc_barrier([128] * stages)
            free = T.alloc_barrier([S] * stages)

            if tx >= S:
                T.set_max_nreg(104, 0)
                fetched = T.alloc_local((3,), "float32")  # gates of the chunk after
                gates = T.alloc_local((3,), "float32")
                p = T.alloc_fragment((C, C), "float32")
                T.clear(gates)
                for step in T.serial(count + 1):
                    # The state leaves a stage when it has begun with the next, and then P's other tile is free too.
                    if step >= stages:
                        T.barrier_wait(free[step % stages], (step // stages + 1) % 2)
                    if step < count:
                        if tx < S + 32:
                            m.load_rows(k, start + (count - 1 - step) * C, key_head, 0, K, k_s, step % stages, loaded)
                            m.load_rows(q, start + (count - 1 - step) * C, key_head, 0, K, q_s, step % stages, loaded)
                            m.load_rows(a, start + (count - 1 - step) * C, head, 0, C, a_s, step % stages, loaded)
                            m.load_rows(do, start + (count - 1 - step) * C, head, first, W, do_s, step % stages, loaded)
                            T.barrier_arrive(loaded[step % stages])
                        m.fetch_gates(
                            gamma,
                            beta,
                            start + (count - 1 - step) * C,
                            T.min(end - (start + (count - 1 - step) * C), C),
                            head,
                            tx - S,
                            fetched,
                        )
                    if step > 0:
                        # prepare the chunk before, which has arrived
                        stage = (step + stages - 1) % stages
                        rows = T.min(end - (start + (count - 1 - (step - 1)) * C), C)
                        m.store_gates(gates, rows, tx - S, stage, gamma_s, rise_s, fall_s, beta_s)
                        if tx < S + C:
                            drop_s[stage, tx - S] = -(rise_s[stage, tx - S] * beta_s[stage, tx - S])
                        T.barrier_wait(loaded[stage], (step - 1) // stages % 2)
                        if rows < C:
                            m.zero_tail(q_s, stage, rows, K, tx - S, 128)
                            m.zero_tail(k_s, stage, rows, K, tx - S, 128)
                            m.zero_tail(a_s, stage, rows, C, tx - S, 128)
                            m.zero_tail(do_s, stage, rows, W, tx - S, 128)
                            T.fence_proxy_async()
                        if tx < S + C:
                            a_s[stage, tx - S, tx - S] = T.cast(0, dtype)
                        T.sync_threads(3, 128)
                        if l2norm:
                            m.inverse_lengths(k_s, stage, key_s)
                            m.inverse_lengths(q_s, stage, query_s)
                        T.gemm(q_s[stage, :, :], k_s[stage, :, :], p, transpose_B=True, clear_accum=True)
                        if l2norm:
                            T.sync_threads(3, 128)
                            if tx < S + C:
                                lift_s[stage, tx - S] = rise_s[stage, tx - S] * query_s[tx - S]
                                drop_s[stage, tx - S] = drop_s[stage, tx - S] * (key_s[tx - S] * key_s[tx - S])
                        T.call_extern(
                            "handle",
                            f"jax_qla_store_decayed<{ctype}, {normed}>",
                            p.data,
                            T.address_of(gamma_s[stage, 0]),
                            scale,
                            T.address_of(query_s[0]),
                            T.address_of(p_s[(step + 1) % 2, 0, 0]),
                        )
                        T.sync_threads(3, 128)  # every warp has read Q
                        T.call_extern(
                            "handle",
                            f"jax_qla_scale_rows<{ctype}, {K}>",
                            T.address_of(q_s[stage, 0, 0]),
                            T.address_of(lift_s[stage, 0]),
                            scale,
                        )
                        T.fence_proxy_async()
                        T.barrier_arrive(ready[stage])
                    for x in T.unroll(3):
                        gates[x] = fetched[x]
            else:
                for wg in tuple(range(W // 64)):
                    part = wg * 64  # first of this warpgroup's columns
                    if tx < 128 if wg == 0 else tx >= 128:
                        T.set_max_nreg(200, 1)
                        d = T.alloc_fragment((64, K), "float32")
                        d_b = T.alloc_fragment((64, K), dtype)
                        u = T.alloc_fragment((64, C), "float32")
                        dvd_b = T.alloc_fragment((64, C), dtype)
                        dw_b = T.alloc_fragment((64, C), dtype)
                        of_column = T.alloc_fragment(
                            (C,), "float32"
                        )  # factors of u's columns, read while a product runs
                        whole = T.alloc_var("float32")
                        line = T.alloc_var("int32")
                        lines = T.alloc_var("int32")
                        slot = T.alloc_var("int32")
                        if final_states > 0:
                            for i, j in T.Parallel(64, K):
                                d[i, j] = d_final_state[n, head, j, first + part + i]
                        else:
                            T.clear(d)
                        for c in T.serial(count):
                            at = c % stages
                            line = start + (count - 1 - c) * C
                            lines = T.min(end - line, C)
                            slot = start // C + n + 1 + (count - 1 - c)
                            T.copy(d, d_b)
                            T.barrier_wait(ready[at], (c // stages) % 2)
                            T.barrier_wait(loaded[at], (c // stages) % 2)
                            # dVd = exp(gamma_C - gamma) K dS + P^T dO
                            T.wgmma_gemm(d_b, k_s[at, :, :], u, transpose_B=True, clear_accum=True)
                            # the gradient of the state after the chunk leaves while the product runs; the one before has left
                            T.tma_store_wait(1)
                            T.sync_threads(4 + wg, 128)
                            T.copy(d_b, dh_s[wg, :, :])
                            T.fence_proxy_async()
                            T.sync_threads(4 + wg, 128)
                            T.tma_copy(
                                dh_s[wg, :, :],
                                dh[slot, head, first + part : first + part + 64, 0:K],
                                leader_scope_threads=128,
                            )
                            # by now the previous chunk's dX has left too, and its stage may be overwritten
                            T.tma_store_wait(1)
                            if c > 0:
                                T.barrier_arrive(free[(c - 1) % stages])
                            for j in T.Parallel(C):
                                of_column[j] = fall_s[at, j]
                            T.wait_wgmma(0)
                            for i, j in T.Parallel(64, C):
                                u[i, j] = u[i, j] * of_column[j]
                            T.wgmma_gemm(do_s[at, :, part : part + 64], p_s[c % 2, :, :], u, transpose_A=True)
                            whole = rise_s[at, lines - 1]
                            for i, j in T.Parallel(64, K):
                                d[i, j] = d[i, j] * whole
                            for j in T.Parallel(C):
                                of_column[j] = drop_s[at, j]
                            T.wait_wgmma(0)
                            T.copy(u, dvd_b)
                            # dX = A^T dVd, on the diagonal (of ones), which a_s lacks, without the rounding of dVd
                            T.wgmma_gemm(dvd_b, a_s[at, :, :], u)
                            # dS = exp(gamma_C) dS + Q^T scale exp(gamma) dO - K^T exp(gamma) beta dX
                            T.wgmma_gemm(do_s[at, :, part : part + 64], q_s[at, :, :], d, transpose_A=True)
                            T.wait_wgmma(1)
                            for i, j in T.Parallel(64, C):
                                dw_b[i, j] = T.cast(u[i, j] * of_column[j], dtype)
                            T.wgmma_gemm(dw_b, k_s[at, :, :], d)
                            T.wait_wgmma(1)  # dO is no longer needed
                            T.sync_threads(4 + wg, 128)
                            T.call_extern(
                                "handle",
                                "jax_qla_store_transposed",
                                u.data,
                                T.address_of(do_s[at, 0, part]),
                            )
                            T.fence_proxy_async()
                            T.sync_threads(4 + wg, 128)
                            if lines == C:
                                T.tma_copy(
                                    do_s[at, :, part : part + 64],
                                    dx[line : line + C, head, first + part : first + part + 64],
                                    leader_scope_threads=128,
                                )
                            else:
                                m.store_rows(do_s, at, dx, line, lines, head, first, part, tx - wg * 128)
                                T.tma_store_wait(0)  # one group less than the waits above count on
                            T.wait_wgmma(0)
                        T.tma_store_wait(0)
                        if initial_states > 0:
                            for i, j in T.Parallel(64, K):
                                d_initial_state[n, head, j, first + part + i] = d[i, j]
            T.pdl_sync()  # ends after `states`, for `gradients` waits for this kernel alone

    return state_gradients


def specification(
    q: jax.Array,
    k: jax.Array,
    do: jax.Array,
    a: jax.Array,
    gamma: jax.Array,
    beta: jax.Array,
    d_final_state: jax.Array,
    segments: jax.Array,
    chunks: jax.Array,
    *,
    ratio: int,
    scale: float,
    l2norm: int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(dh [slots, Hv, V, K] in do's dtype, dx [tokens, Hv, V] in do's dtype, d_initial_state [N, Hv, K, V]).

    dh of a slot without rows is not defined.
    """
    keys, queries = (jnp.repeat(gather_chunks(x, chunks), ratio, axis=2) for x in (k, q))
    output, inverse, gates, strength = (gather_chunks(x, chunks) for x in (do, a, gamma, beta))
    strength = strength * inverse_length(keys, l2norm) ** 2
    scales = scale * inverse_length(queries, l2norm)
    p = scales[:, :, None] * jnp.einsum("sihk,sjhk->sijh", queries, keys) * decay(gates)

    def step(ds, xs):
        queries, keys, output, inverse, p, gates, strength, scales, end = xs
        fall, rise = jnp.exp(end - gates)[..., None], jnp.exp(gates)[..., None]
        dvd = jnp.einsum("ijh,ihv->jhv", p, output) + fall * jnp.einsum("ihk,hkv->ihv", keys, ds)
        dx = jnp.einsum("ihj,ihv->jhv", inverse, dvd)
        update = jnp.einsum("ihk,ihv->hkv", queries, scales[..., None] * rise * output)
        update -= jnp.einsum("ihk,ihv->hkv", keys, rise * strength[..., None] * dx)
        return jnp.exp(end)[:, None, None] * ds + update, (jnp.swapaxes(ds, 1, 2), dx)

    xs = (queries, keys, output, inverse, p, gates, strength, scales, last_row(gates, chunks))
    d_initial_state, (dh, dx) = scan_slots(step, d_final_state, segments, chunks, xs, reverse=True)
    return dh.astype(do.dtype), scatter_chunks(dx, chunks, do.shape[0], do.dtype), d_initial_state
