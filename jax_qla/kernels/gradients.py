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

Plan, of the value heads that dh has, from `first_head` on (policy.head_groups), h and Vd each having these or all: one block per (chunk slot, `group` key heads:
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
    k_ready[], q_ready   2         0, 1               their rows beyond the sequence are zero: waited for where there are such
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
64 KiB read and written: with two value heads 144 KiB, 4.5 us of its share of 4.3 TB/s. docs/performance.md says what binds.
"""

import functools
import operator
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp

from jax_qla.kernels.common import CHUNK, FAINT, MIN_LOG_DECAY, PASS_CONFIGS, SHORT
from jax_qla.kernels.macros import accumulator_layout, macros
from jax_qla.kernels.preludes import CHUNK_PRELUDE, TILE_PRELUDE
from jax_qla.kernels.specification import (
    among_heads,
    decay,
    gather_chunks,
    gather_lengths,
    gather_parts,
    last_row,
    of_all_slots,
    of_heads,
    of_part_tiles,
    scatter_chunks,
    states_of_tiles,
    tiles_as_rows,
)

__all__ = ["PASS_CONFIGS", "Config", "program", "specification"]


PRELUDE = (
    TILE_PRELUDE
    + CHUNK_PRELUDE
    + f"constexpr float kFaint = {FAINT}f;"
    + r"""
__device__ __forceinline__ int jax_qla_any(int x) { return __any_sync(0xffffffffu, x); }

// Lanes that differ in bit 2 * left exchange halves of their 2 * left sums.
template <int left>
__device__ __forceinline__ void jax_qla_exchange(float* sum) {
  const bool upper = threadIdx.x & (2 * left);
#pragma unroll
  for (int n = 0; n < left; ++n) {
    const float low = sum[n], high = sum[n + left];
    sum[n] = (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, 2 * left);
  }
}
// Adds to `sums` [4] of the lanes for which jax_qla_has_dot says so the inner products of a warp's rows l / 4 and l / 4 + 8, of 16 columns: the
// diagonal of x y^T by mma.sync, a fifth of the instructions that products by element take. `x`, `y`: addresses for ldmatrix.
template <typename T>
__device__ __forceinline__ void jax_qla_add_dots(unsigned x, unsigned y, float (*sums)[4]) {
  unsigned a[4], b[4];
  jax_qla_load_matrices<false>(a, x);
  jax_qla_load_matrices<false>(b, y);
  jax_qla_mma<!std::is_same_v<T, half_t>>(sums[0], a, b[0], b[2]);
  jax_qla_mma<!std::is_same_v<T, half_t>>(sums[1], a, b[1], b[3]);
}
// Of these, this lane's for row l / 4 + 8 h; only lanes with (l / 4) / 2 = l % 4 have one.
__device__ __forceinline__ float jax_qla_dot(const float (*sums)[4], int h) {
  const bool odd = threadIdx.x & 4;
  return odd ? sums[h][2 * h + 1] : sums[h][2 * h];
}
__device__ __forceinline__ bool jax_qla_has_dot() { return (threadIdx.x >> 3 & 3) == (threadIdx.x & 3); }
// Where this lane points ldmatrix at, in rows first .. first + 15 of a tile of 128-byte swizzled rows.
__device__ __forceinline__ unsigned jax_qla_dot_rows(const void* tile, int first) {
  const int lane = threadIdx.x & 31;
  return jax_qla_address(tile) + (first + (lane & 15)) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
}
// The inner product of two tiles [rows, columns] in shared memory (halves of 64 columns, 128-byte swizzled), each warp's part in out [4].
template <typename T, int rows, int columns>
__device__ __forceinline__ void jax_qla_inner(const void* x, const void* y, float* out) {
  const int warp = threadIdx.x >> 5 & 3;
  const unsigned of_x = jax_qla_dot_rows(x, warp * 16), of_y = jax_qla_dot_rows(y, warp * 16);
  float sums[2][4] = {};
#pragma unroll 1
  for (int part = 0; part < rows / 64 * (columns / 64); ++part) {  // 64 rows of a half
#pragma unroll
    for (int n = 0; n < 4; ++n) jax_qla_add_dots<T>((of_x ^ (n << 5)) + part * 8192, (of_y ^ (n << 5)) + part * 8192, sums);
  }
  float total = jax_qla_has_dot() ? jax_qla_dot(sums, 0) + jax_qla_dot(sums, 1) : 0.f;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(0xffffffffu, total, step);
  if (threadIdx.x % 32 == 0) out[warp] = total;
}
// A matrix [8, 8] of 16-bit elements, of which lane l has two of row l / 4, transposed.
__device__ __forceinline__ unsigned jax_qla_transposed(unsigned x) {
  unsigned y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
// Sum n of `count` over 2 count lanes, to the two lanes l with l / 2 = n mod count.
template <int count>
__device__ __forceinline__ float jax_qla_gather(float* sum) {
  if constexpr (count == 1) {
    return sum[0] + __shfl_xor_sync(0xffffffffu, sum[0], 1);
  } else {
    const bool upper = threadIdx.x & count;
#pragma unroll
    for (int n = 0; n < count / 2; ++n) {
      const float low = sum[n], high = sum[n + count / 2];
      sum[n] = (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, count);
    }
    return jax_qla_gather<count / 2>(sum);
  }
}
// How 128 threads share a tile [64, columns] (halves of 64 columns, 128-byte swizzled): a thread has 16-byte vector `vector` of rows
// first + step n, n < passes. step is a multiple of 8, so that all these are swizzled alike.
template <int columns>
struct jax_qla_share {
  static constexpr int vectors = columns / 8, step = 128 / vectors, passes = 64 / step;
  int vector, first, offset;
  __device__ __forceinline__ jax_qla_share() {
    const int thread = threadIdx.x & 127;
    vector = thread % vectors;
    first = thread / vectors;
    offset = vector / 8 * 8192 + first * 128 + (vector % 8 ^ (first & 7)) * 16;
  }
  __device__ __forceinline__ uint4 of(const void* tile, int n) const {
    return *reinterpret_cast<const uint4*>(static_cast<const char*>(tile) + offset + n * (step * 128));
  }
  // Sums by row, sum[n] this thread's part of row first + step n, to out [64].
  __device__ __forceinline__ void write(float* sum, float* out) const {
    const float total = jax_qla_gather<passes>(sum);
    if (vector % 2 == 0) out[first + step * (vector / 2)] = total;
  }
};
// dots_i = <x_i, y_i> of tiles x and y [64, columns] in shared memory (halves of 64 columns, 128-byte swizzled), by a warpgroup.
template <typename T, int columns>
__device__ __forceinline__ void jax_qla_row_dots(const void* x, const void* y, float* dots) {
  const int lane = threadIdx.x & 31, top = (threadIdx.x >> 5 & 3) * 16;
  const unsigned of_x = jax_qla_dot_rows(x, top), of_y = jax_qla_dot_rows(y, top);
  float sums[2][4] = {};
#pragma unroll 1
  for (int half = 0; half < columns / 64; ++half) {
#pragma unroll
    for (int n = 0; n < 4; ++n) jax_qla_add_dots<T>((of_x ^ (n << 5)) + half * 8192, (of_y ^ (n << 5)) + half * 8192, sums);
  }
  if (jax_qla_has_dot()) {
#pragma unroll
    for (int h = 0; h < 2; ++h) dots[top + lane / 4 + h * 8] = jax_qla_dot(sums, h);
  }
}
// Rows i < rows of out [.., heads, columns], where |factor_i| < kFaint, become factor_i x_i of a tile x in shared memory.
template <typename T, int columns>
__device__ __forceinline__ void jax_qla_scale_faint_rows(const void* x, const float* factor, int rows, int heads, T* out) {
  using Share = jax_qla_share<columns>;
  const Share share;
#pragma unroll 1
  for (int n = 0; n < Share::passes; ++n) {
    const int row = share.first + Share::step * n;
    const float f = factor[row];
    if (row >= rows || !(fabsf(f) < kFaint)) continue;
    const uint4 a = share.of(x, n);
    T p[8];
    memcpy(p, &a, 16);
    unsigned scaled[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) scaled[e] = jax_qla_pack<T>(f * static_cast<float>(p[2 * e]), f * static_cast<float>(p[2 * e + 1]));
    *reinterpret_cast<uint4*>(out + static_cast<long long>(row) * (heads * columns) + share.vector * 8) =
        make_uint4(scaled[0], scaled[1], scaled[2], scaled[3]);
  }
}
// dots_i = <x_i, y_i> for i < rows of a tile x in shared memory and y [.., heads, columns] in global memory.
template <typename T, int columns>
__device__ __forceinline__ void jax_qla_dots(const void* x, const T* y, int rows, int heads, float* dots) {
  using Share = jax_qla_share<columns>;
  const Share share;
  float sum[Share::passes];
#pragma unroll
  for (int n = 0; n < Share::passes; ++n) {
    const int row = min(share.first + Share::step * n, rows - 1);
    const uint4 a = share.of(x, n);
    const uint4 b = *reinterpret_cast<const uint4*>(y + static_cast<long long>(row) * (heads * columns) + share.vector * 8);
    T p[8], q[8];
    memcpy(p, &a, 16);
    memcpy(q, &b, 16);
    sum[n] = 0.f;
#pragma unroll
    for (int e = 0; e < 8; ++e) sum[n] += static_cast<float>(p[e]) * static_cast<float>(q[e]);
  }
  share.write(sum, dots);
}
// The sum over this lane and those above it; the sum over the lanes below it.
__device__ __forceinline__ float jax_qla_from(float x) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float other = __shfl_down_sync(0xffffffffu, x, step);
    if (threadIdx.x % 32 + step < 32) x += other;
  }
  return x;
}
__device__ __forceinline__ float jax_qla_below(float x) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float other = __shfl_up_sync(0xffffffffu, x, step);
    if (threadIdx.x % 32 >= step) x += other;
  }
  const float below = __shfl_up_sync(0xffffffffu, x, 1);
  return threadIdx.x % 32 > 0 ? below : 0.f;
}
// Writes the sums over the four lanes of each row to out [64].
__device__ __forceinline__ void jax_qla_write_rows(const float* sums, float* out) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sum = sums[h] + __shfl_xor_sync(0xffffffffu, sums[h], 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (lane % 4 == 0) out[warp * 16 + lane / 4 + h * 8] = sum;
  }
}
// From x = A B^T and y = C D^T, wgmma accumulators [64, 64], y being 0 in rows from `rows` on, in place:
//   x_ij = factor (norm_i, if normed and not strict) x_ij exp(gamma_i - gamma_j) for j <= i < rows (j < i if strict), else 0    gamma in units of log2
// and, over j < i, this lane's parts of the row sums of x_ij y_ij in sums [2], of the column sums of (weight_i norm_i, if strict and normed) x_ij y_ij
// in the next [16], for jax_qla_write_sums.
// All warps do the same, above the diagonal too: when each skipped the blocks it does not need, it waited for instructions two thirds of the time.
template <bool strict, bool normed>
__device__ __forceinline__ void jax_qla_decayed(void* x_registers, const void* y_registers, const float* gamma, const float* weight,
                                                const float* norm, float factor, int rows, float* sums) {
  float* x = static_cast<float*>(x_registers);
  const float* y = static_cast<const float*>(y_registers);
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, top = warp * 16 + lane / 4, left = lane % 4 * 2;
  float at_row[2], factors[2], of_sum[2];
  int limit[2];  // columns before limit + left are below the diagonal
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = top + h * 8;
    const float of_key = normed ? norm[row] : 1.f;
    at_row[h] = gamma[row];
    factors[h] = strict ? factor : factor * of_key;
    of_sum[h] = strict ? weight[row] * of_key : 1.f;
    limit[h] = row < rows ? row - left : -1;
  }
  float *of_row = sums, *of_column = sums + 2;
  of_row[0] = of_row[1] = 0.f;
#pragma unroll
  for (int part = 0; part < 8; ++part) {  // of 8 columns
    const float2 columns = *reinterpret_cast<const float2*>(gamma + part * 8 + left);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int n = part * 4 + h * 2;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float decayed = x[n + e] * (factors[h] * jax_qla_exp2(at_row[h] - (e ? columns.y : columns.x)));
        const bool below = part * 8 + e < limit[h];
        x[n + e] = below || (!strict && part * 8 + e == limit[h]) ? decayed : 0.f;
        const float product = below ? x[n + e] * y[n + e] : 0.f;
        of_row[h] += product;
        of_column[part * 2 + e] = h ? of_column[part * 2 + e] + of_sum[h] * product : of_sum[h] * product;
      }
    }
  }
}
// What jax_qla_decayed has summed: by rows to row_sums [64], by columns, over the 16 rows of each warp, to row `warp` of column_sums [4, 64]. Each
// exchange halves the columns that a lane still sums: in the end lane l has 2 l and 2 l + 1.
__device__ __forceinline__ void jax_qla_write_sums(float* sums, float* row_sums, float* column_sums) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  float* of_column = sums + 2;
  jax_qla_write_rows(sums, row_sums);
  jax_qla_exchange<8>(of_column);
  jax_qla_exchange<4>(of_column);
  jax_qla_exchange<2>(of_column);
  *reinterpret_cast<float2*>(column_sums + warp * 64 + 2 * lane) = make_float2(of_column[0], of_column[1]);
}
// A warpgroup's part of a 16-bit tile [64, 64] in shared memory, 128-byte swizzled, in the layout of an accumulator: register 2 n + h of
// lane l in warp w has row 16 w + 8 h + l / 4, columns 8 n + 2 (l % 4) and the next.
__device__ __forceinline__ void jax_qla_load_tile(unsigned* registers, const void* tile) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, matrix = lane >> 3;
  unsigned row = jax_qla_address(tile) + (warp * 16 + (matrix & 1) * 8 + (lane & 7)) * 128;
  const unsigned first = (matrix >> 1) ^ (lane & 7);
  asm volatile("" : "+r"(row));  // not to be known in the loop around: addresses kept from head to head would cost registers
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    jax_qla_load_matrices<false>(registers + 4 * n, row + ((first ^ (2 * n)) << 4));
  }
}
// Two numbers as floats.
template <typename T>
__device__ __forceinline__ float2 jax_qla_unpack(unsigned x) {
  if constexpr (std::is_same_v<T, half_t>) {
    T pair[2];
    memcpy(pair, &x, 4);
    return make_float2(static_cast<float>(pair[0]), static_cast<float>(pair[1]));
  } else {
    return make_float2(jax_qla_low_half(x), jax_qla_high_half(x));
  }
}
// Of x, a wgmma accumulator [64, 64], and t, a tile as above: sum_ij += scale factor_i (norm_i, if normed) x_ij, and this lane's part of
// <x_i, t_i> for its two rows i is added to dots [2].
template <typename T, bool normed>
__device__ __forceinline__ void jax_qla_add_rows(void* sum_registers, const void* registers, const float* factor, const float* norm,
                                                 float scale, const unsigned* t, float* dots) {
  float* sum = static_cast<float*>(sum_registers);
  const float* x = static_cast<const float*>(registers);
  const int row = (threadIdx.x >> 5 & 3) * 16 + threadIdx.x % 32 / 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float f = factor[row + h * 8] * (normed ? norm[row + h * 8] : 1.f) * scale;
    float dot[2] = {0.f, 0.f};
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 pair = jax_qla_unpack<T>(t[2 * n + h]);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        sum[4 * n + 2 * h + e] += f * x[4 * n + 2 * h + e];
        dot[e] += x[4 * n + 2 * h + e] * (e ? pair.y : pair.x);
      }
    }
    dots[h] += dot[0] + dot[1];
  }
}
// Rows i < `rows` of x, a wgmma accumulator [64, columns], rounded to T, to rows of `out` that are `stride` elements apart. Two lanes exchange
// their parts of a row, so that four write 32 bytes of it.
template <typename T, int columns>
__device__ __forceinline__ void jax_qla_write_tile(const void* registers, T* out, int rows, int stride) {
  const float* x = static_cast<const float*>(registers);
  const int lane = threadIdx.x & 31, row = (threadIdx.x >> 5 & 3) * 16 + lane / 4;
  const bool odd = lane & 1;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    T* line = out + static_cast<long long>(row + h * 8) * stride + (lane & 1) * 8 + (lane & 2) * 2;
#pragma unroll
    for (int n = 0; n < columns / 8; n += 2) {
      const unsigned near = jax_qla_pack<T>(x[4 * n + 2 * h], x[4 * n + 2 * h + 1]);
      const unsigned far = jax_qla_pack<T>(x[4 * n + 4 + 2 * h], x[4 * n + 5 + 2 * h]);
      const unsigned got = __shfl_xor_sync(0xffffffffu, odd ? near : far, 1);
      if (row + h * 8 < rows) *reinterpret_cast<uint2*>(line + n * 8) = odd ? make_uint2(got, far) : make_uint2(near, got);
    }
  }
}
// tile_ij = tile_ji = factor_i (norm_i, if normed) x_ij for i > j, 0 for i = j, of x, a wgmma accumulator [64, 64], which is 0 for i <= j.
template <typename T, bool normed>
__device__ __forceinline__ void jax_qla_store_symmetric(const void* registers, const float* factor, const float* norm, T* tile) {
  const float* x = static_cast<const float*>(registers);
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, matrix = lane >> 3, row = warp * 16 + lane / 4;
  const unsigned base = jax_qla_address(tile) + (lane & 7) * 128;
  const unsigned lines = base + (warp * 16 + (matrix & 1) * 8) * 128;  // of this warp's rows
  const unsigned columns = base + (matrix >> 1) * 1024 + (((warp * 2 + (matrix & 1)) ^ (lane & 7)) << 4);  // of this warp's columns
  float f[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) f[h] = factor[row + h * 8] * (normed ? norm[row + h * 8] : 1.f);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    if (n > warp) continue;  // these are the mirror of another warp's
    unsigned r[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const float* pair = x + 8 * n + 2 * m;
      r[m] = jax_qla_pack<T>(fmaf(pair[0], f[m % 2], 0.f), fmaf(pair[1], f[m % 2], 0.f));  // + 0: no zero has a sign
    }
    if (n == warp) {
      r[0] |= jax_qla_transposed(r[0]);
      r[2] = jax_qla_transposed(r[1]);
      r[3] |= jax_qla_transposed(r[3]);
    } else {
      jax_qla_store_matrices<true>(columns + n * 2048, r[0], r[1], r[2], r[3]);
    }
    jax_qla_store_matrices<false>(lines + (((2 * n + (matrix >> 1)) ^ (lane & 7)) << 4), r[0], r[1], r[2], r[3]);
  }
}
// Rows i of x, wgmma accumulators [64, 64] side by side, lose norm_i^2 <x_i, t_i> t_i, of t in shared memory, `parts` tiles as above: the
// gradient by t of what was computed from norm_i t_i, norm_i = 1 / |t_i|, with norm_i held constant, becomes the whole one.
template <typename T, int parts>
__device__ __forceinline__ void jax_qla_project(void* registers, const void* tiles, const float* norm) {
  float* x = static_cast<float*>(registers);
  const int row = (threadIdx.x >> 5 & 3) * 16 + threadIdx.x % 32 / 4;
  float dots[2] = {0.f, 0.f};
#pragma unroll
  for (int subtract = 0; subtract < 2; ++subtract) {
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      unsigned t[16];
      jax_qla_load_tile(t, static_cast<const char*>(tiles) + part * 8192);
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        const float2 pair = jax_qla_unpack<T>(t[n]);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& value = x[part * 32 + 2 * n + e];
          if (subtract) {
            value -= dots[n % 2] * (e ? pair.y : pair.x);
          } else {
            dots[n % 2] += value * (e ? pair.y : pair.x);
          }
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2 && !subtract; ++h) {
      dots[h] += __shfl_xor_sync(0xffffffffu, dots[h], 1);
      dots[h] += __shfl_xor_sync(0xffffffffu, dots[h], 2);
      dots[h] *= norm[row + h * 8] * norm[row + h * 8];
    }
  }
}
"""
)


SCANTY = {"bfloat16": 0.0, "float16": 2.0**-14}
"""Where |beta_i| is less, Vd_i, which is beta_i times numbers of v's size, has not the dtype's precision, or is 0, and dbeta_i is the limit."""


@dataclass(frozen=True)
class Config:
    """Sizes this program is specialised for: `key_dim`, `value_dim` 64 or 128, `dtype` "bfloat16" or "float16"; `l2norm`: whether q and k
    are to be normalised; `split` (kernels/common.py): with bfloat16 only."""

    key_dim: int = 128
    value_dim: int = 128
    dtype: str = "bfloat16"
    l2norm: bool = False
    split: bool = False


def chunk_of_block():
    """A macro of both: which rows a block computes."""
    import tilelang.language as T

    @T.macro
    def find_chunk(segments, sequences, tokens, slot):
        """First row, rows (0: none) and, behind them, rows of no sequence of chunk slot `slot`, once what the kernel awaits has ended."""
        # One warp for all, and by way of shared memory: registers are few.
        chunk_s = T.alloc_shared((4,), "int32")
        if T.get_thread_binding() < 32:
            T.call_extern(
                "handle",
                "jax_qla_find_chunk",
                T.access_ptr(chunk_s[0], "r"),
                T.address_of(segments[0, 0]),
                sequences,
                tokens,
                slot,
            )
        T.pdl_sync()  # `state_gradients` has ended, and with it `states`
        T.sync_threads()
        return chunk_s[0], chunk_s[1], chunk_s[2]

    return find_chunk


def gate_vectors(l2norm: bool):
    """A macro of both: tiles for what the rows of a chunk are multiplied by, two stages of each."""
    import tilelang.language as T

    C = CHUNK

    @T.macro
    def allocate_vectors():
        gamma_s = T.alloc_shared((2, C), "float32")
        rise_s = T.alloc_shared((2, C), "float32")
        fall_s = T.alloc_shared((2, C), "float32")
        beta_s = T.alloc_shared((2, C), "float32")
        weight_s = T.alloc_shared((2, C), "float32")  # w: 1, or beta of faint rows
        drop_s = T.alloc_shared((2, C), "float32")  # -exp(gamma) w
        # Of a key head; gates of the head after the next may be those of the key head after the next, and those of the last be needed still.
        query_s = T.alloc_shared((4, C), "float32") if l2norm else gamma_s  # 1 / |q|, else not needed
        key_s = T.alloc_shared((4, C), "float32") if l2norm else gamma_s  # 1 / |k|
        faint_s = T.alloc_shared((2, 2), "int32")  # whether a row of a warp's is
        return SimpleNamespace(
            gamma_s=gamma_s,
            rise_s=rise_s,
            fall_s=fall_s,
            beta_s=beta_s,
            weight_s=weight_s,
            drop_s=drop_s,
            query_s=query_s,
            key_s=key_s,
            faint_s=faint_s,
        )

    return allocate_vectors


def gate_parts(dots_of_v: int = 1, dots_of_states: int = 4):
    """A macro of this kernel, of kernels/gradients_split.py and of kernels/backward.py: tiles for what the gradients of a head's gates and beta are summed
    from, two stages of each. <D_i, V_i> and <dh, h> are sums of so many."""
    import tilelang.language as T

    C = CHUNK

    @T.macro
    def allocate_parts():
        # inner products of rows, row sums and column sums
        q_dots_s = T.alloc_shared((2, C), "float32")
        z_dots_s = T.alloc_shared((2, C), "float32")
        y_dots_s = T.alloc_shared((2, C), "float32")
        rows_q_s = T.alloc_shared((2, C), "float32")
        rows_k_s = T.alloc_shared((2, C), "float32")
        columns_q_s = T.alloc_shared((2, 4, C), "float32")  # column sums over the 16 rows of each warp
        columns_k_s = T.alloc_shared((2, 4, C), "float32")
        halves_s = T.alloc_shared((2,), "float32")  # sums over rows: of <Y, K> of 0..31, of dgamma of 32..63
        states_dot_s = T.alloc_shared((2, dots_of_states), "float32")  # <dh, h>
        dot_s = T.alloc_shared((2, C), "float32")  # <D_i, Vd_i>
        dot_v_s = T.alloc_shared((2, dots_of_v * C), "float32")  # <D_i, V_i>
        return SimpleNamespace(
            q_dots_s=q_dots_s,
            z_dots_s=z_dots_s,
            y_dots_s=y_dots_s,
            rows_q_s=rows_q_s,
            rows_k_s=rows_k_s,
            columns_q_s=columns_q_s,
            columns_k_s=columns_k_s,
            halves_s=halves_s,
            states_dot_s=states_dot_s,
            dot_s=dot_s,
            dot_v_s=dot_v_s,
        )

    return allocate_parts


def gate_gradients(dtype: str, l2norm: bool, dots_of_v: int = 1):
    """A macro of this kernel, of kernels/gradients_split.py and of kernels/backward.py, for q and k of `dtype`, to be normalised or not; <D_i, V_i> is the
    sum of so many."""
    import tilelang.language as T

    def dot_v(parts, at, i):
        return functools.reduce(operator.add, (parts.dot_v_s[at, n * CHUNK + i] for n in range(dots_of_v)))

    def ample(beta):
        return T.abs(beta) >= T.float32(SCANTY[dtype]) if SCANTY[dtype] > 0 else beta != 0

    @T.macro
    def write_gates(vectors, parts, at, length, row, rows, head, i, scale, decay, dg, dbeta):
        """Thread i, of 64, whose row's g is `decay`: dg and dbeta of a chunk's rows, from what others have summed (stage `at` of `parts`, by their names) and the
        `vectors` of the chunk, those of lengths at `length`."""
        total = T.alloc_var("float32")
        inner = T.alloc_var("float32")
        later = T.alloc_var("float32")
        earlier = T.alloc_var("float32")
        total = 0.0
        earlier = 0.0
        if i < rows:
            inner = parts.rows_k_s[at, i] - vectors.rise_s[at, i] * parts.z_dots_s[at, i]
            total = (
                parts.rows_q_s[at, i]
                + (scale * vectors.query_s[length, i] if l2norm else scale)
                * vectors.rise_s[at, i]
                * parts.q_dots_s[at, i]
                + (vectors.weight_s[at, i] * vectors.key_s[length, i] if l2norm else vectors.weight_s[at, i]) * inner
            )
            for x in T.unroll(4):
                total = total - (parts.columns_q_s[at, x, i] + parts.columns_k_s[at, x, i])
            if ample(vectors.beta_s[at, i]):
                divisor = (
                    vectors.beta_s[at, i]
                    * T.Select(T.abs(vectors.beta_s[at, i]) < T.float32(FAINT), T.float32(1), vectors.beta_s[at, i])
                    * (vectors.key_s[length, i] if l2norm else T.float32(1))
                )
                dbeta[row + i, head] = parts.dot_s[at, i] / divisor
            else:
                dbeta[row + i, head] = (vectors.key_s[length, i] * inner if l2norm else inner) + dot_v(parts, at, i)
            earlier = vectors.fall_s[at, i] * parts.y_dots_s[at, i]
        later = T.call_extern("float32", "jax_qla_from", total)
        total = earlier
        earlier = T.call_extern("float32", "jax_qla_below", total)
        if i == 31:
            parts.halves_s[0] = earlier + total
        if i == 32:
            parts.halves_s[1] = later
        T.sync_threads(5, 64)
        if i < rows:
            total = later + earlier + parts.halves_s[1 - i // 32]
            for x in T.unroll(parts.states_dot_s.shape[1]):
                total = total + vectors.rise_s[at, rows - 1] * parts.states_dot_s[at, x]
            dg[row + i, head] = T.Select(decay >= T.float32(MIN_LOG_DECAY), total, T.float32(0))

    return write_gates


def gate_warps(dtype: str, l2norm: bool, dots_of_v: int = 1):
    """A macro of this kernel and of kernels/gradients_split.py: what its warps "gates" do. The arguments as of `gate_gradients`."""
    import tilelang.language as T

    m = macros()
    write_gates = gate_gradients(dtype, l2norm, dots_of_v)

    @T.macro
    def publish_gates(gates, of_rows, number, ratio, rows, i, stage, vectors, ready):
        """Thread i, of 64, has fetched the `gates` of its row for the block's head `number` and, with a key head's first one, its lengths: these,
        and what follows from them, are there, in `vectors` by their names."""
        if l2norm:
            if number % ratio == 0:
                vectors.key_s[number // ratio % 4, i] = T.Select(i < rows, of_rows[0], T.float32(0))
                vectors.query_s[number // ratio % 4, i] = T.Select(i < rows, of_rows[1], T.float32(0))
        m.store_gates(gates, rows, i, stage, vectors.gamma_s, vectors.rise_s, vectors.fall_s, vectors.beta_s)
        vectors.weight_s[stage, i] = T.Select(
            T.abs(vectors.beta_s[stage, i]) < T.float32(FAINT), vectors.beta_s[stage, i], T.float32(1)
        )
        vectors.drop_s[stage, i] = -(vectors.rise_s[stage, i] * vectors.weight_s[stage, i])
        vectors.faint_s[stage, i // 32] = T.call_extern(
            "int32", "jax_qla_any", T.cast(i < rows and T.abs(gates[2]) < T.float32(FAINT), "int32")
        )
        T.barrier_arrive(ready[stage])

    @T.macro
    def compute_gates(
        g,
        gamma,
        beta,
        lengths,
        query_lengths,
        dg,
        dbeta,
        row,
        rows,
        of_block,
        ratio,
        scale,
        i,
        vectors,
        parts,
        gates_ready,
        dots_ready,
        parts_ready,
    ):
        """Thread i, of 64, for its row of a block's `keys` key heads from `first` on and their `heads` value heads, numbers that `of_block` holds by these
        names, as `vectors` and `parts` do the kernel's."""
        gates = T.alloc_local((3,), "float32")
        second = T.alloc_local((3,), "float32")
        of_rows = T.alloc_local((2,), "float32")  # 1 / |k|, 1 / |q|
        decay = T.alloc_var("float32")
        if rows > 0:
            m.fetch_gates(gamma, beta, row, rows, of_block.first * ratio, i, gates)
            if of_block.heads > 1:
                m.fetch_gates(gamma, beta, row, rows, of_block.first * ratio + 1, i, second)
            for r in T.serial(T.min(of_block.heads, 2)):
                if r == 1:
                    for x in T.unroll(3):
                        gates[x] = second[x]
                if l2norm:
                    if r % ratio == 0:
                        m.fetch_lengths(lengths, query_lengths, row, rows, of_block.first + r // ratio, i, of_rows)
                publish_gates(gates, of_rows, r, ratio, rows, i, r, vectors, gates_ready)
            for key in T.serial(of_block.keys):
                for r in T.serial(ratio):
                    at = (key * ratio + r) % 2
                    head = (of_block.first + key) * ratio + r
                    if i < rows:
                        decay = g[row + i, head]
                    if key * ratio + r + 2 < of_block.heads:
                        m.fetch_gates(gamma, beta, row, rows, head + 2, i, gates)
                        if l2norm:
                            if (r + 2) % ratio == 0:
                                m.fetch_lengths(
                                    *(lengths, query_lengths, row, rows),
                                    of_block.first + key + (r + 2) // ratio,
                                    *(i, of_rows),
                                )
                    T.barrier_wait(dots_ready[at], (key * ratio + r) // 2 % 2)
                    T.barrier_wait(parts_ready[at], (key * ratio + r) // 2 % 2)
                    write_gates(vectors, parts, at, key % 4, row, rows, head, i, scale, decay, dg, dbeta)
                    T.sync_threads(5, 64)
                    if key * ratio + r + 2 < of_block.heads:
                        number = key * ratio + r + 2
                        publish_gates(gates, of_rows, number, ratio, rows, i, at, vectors, gates_ready)

    return compute_gates


def key_head_writer(config: "Config"):
    """A macro of both: dQ or dK of a key head is complete."""
    import tilelang.language as T

    K, ctype = config.key_dim, {"bfloat16": "bfloat16_t", "float16": "half_t"}[config.dtype]

    @T.macro
    def write_key_head(total, tiles, stage, lengths, free, target, row, rows, first, key, key_heads):
        """One warpgroup writes its `total`, of key head `first + key`, the `key`-th of the block, to `target`, and frees the tile of Q or K, which it may
        still have to be projected by."""
        if config.l2norm:
            T.call_extern(
                "handle",
                f"jax_qla_project<{ctype}, {K // 64}>",
                T.address_of(total[0, 0]),
                T.access_ptr(tiles[stage, 0, 0], "r"),
                T.access_ptr(lengths[key % 4, 0], "r"),
            )
        T.barrier_arrive(free[stage])
        T.call_extern(
            "handle",
            f"jax_qla_write_tile<{ctype}, {K}>",
            T.address_of(total[0, 0]),
            T.access_ptr(target[row, first + key, 0], "r"),
            rows,
            key_heads * K,
        )

    return write_key_head


def gap_rows(config: "Config"):
    """A macro of both: rows of no sequence become zero in all results."""
    import tilelang.language as T

    K, V, dtype = config.key_dim, config.value_dim, config.dtype

    @T.macro
    def zero_gaps(dq, dk, dv, dg, dbeta, row, count, first, keys, heads, ratio, i):
        """128 threads, of which this is number i: `count` rows from `row` on, of a block's heads."""
        for x in T.serial(count):
            for key in T.serial(keys):
                for y in T.serial(K // 32):
                    if i // 32 == 0:
                        dq[row + x, first + key, y * 32 + i % 32] = T.cast(0, dtype)
                    if i // 32 == 1:
                        dk[row + x, first + key, y * 32 + i % 32] = T.cast(0, dtype)
            for r in T.serial(heads):
                if i < V // 2:
                    dv[row + x, first * ratio + r, i * 2] = T.cast(0, dtype)
                    dv[row + x, first * ratio + r, i * 2 + 1] = T.cast(0, dtype)
                if i == 126:
                    dg[row + x, first * ratio + r] = 0.0
                if i == 127:
                    dbeta[row + x, first * ratio + r] = 0.0

    return zero_gaps


def program(config: Config):
    """The TileLang program. Numbers of tokens, heads, sequences and chunk slots are run-time values."""
    if config.split:
        from jax_qla.kernels import gradients_split  # which takes what both share

        return gradients_split.program(config)
    import tilelang.language as T

    C, K, V, dtype = CHUNK, config.key_dim, config.value_dim, config.dtype
    ctype = {"bfloat16": "bfloat16_t", "float16": "half_t"}[dtype]
    m = macros()
    l2norm, normed = config.l2norm, "true" if config.l2norm else "false"
    compute_gates, allocate_parts = gate_warps(dtype, l2norm), gate_parts()
    find_chunk, allocate_vectors = chunk_of_block(), gate_vectors(l2norm)
    zero_gaps, write_key_head = gap_rows(config), key_head_writer(config)
    tokens, key_heads, value_heads, sequences, state_slots = T.dynamic(
        "tokens, key_heads, value_heads, sequences, state_slots"
    )
    of_launch = T.dynamic("heads")  # value heads, from first_head on
    kept_heads, vd_heads = T.dynamic("kept_heads, vd_heads")  # these, or all, of h and of Vd

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
        dh: T.Tensor((state_slots, of_launch, K // 64, V, 64), dtype),
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
        only: T.int32,  # ALWAYS, or sequences for which it computes anything, BALANCED or UNBALANCED
    ):
        with T.Kernel(
            state_slots + 1, T.ceildiv(T.truncdiv(of_launch, ratio), group), threads=512, prelude=PRELUDE
        ) as (
            slot,
            part_of_heads,
        ):
            T.annotate_min_blocks_per_sm(1)
            m.leave_unless(only, balanced)
            row, rows, fill = find_chunk(segments, sequences, tokens, slot)
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
                        load_states(dh, dh_s, slot, held, dh_loaded)
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
                                    load_states(dh, dh_s, slot, held + n + 1, dh_loaded)
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
                            T.call_extern(
                                "handle",
                                f"jax_qla_inner<{ctype}, {V}, {K}>",
                                T.address_of(h_s[0, 0]),
                                T.address_of(dh_s[0, 0]),
                                T.address_of(parts.states_dot_s[at, 0]),
                            )
                            T.barrier_arrive(h_free[0])
                            T.barrier_arrive(dh_free[0])
                            T.barrier_wait(rows_loaded[at], (key * ratio + r) // 2 % 2)
                            T.call_extern(
                                "handle",
                                f"jax_qla_row_dots<{ctype}, {V}>",
                                T.address_of(dv_s[at, 0, 0]),
                                T.address_of(vd_s[at, 0, 0]),
                                T.address_of(parts.dot_s[at, 0]),
                            )
                            if vectors.faint_s[at, 0] + vectors.faint_s[at, 1] > 0:
                                T.call_extern(
                                    "handle",
                                    f"jax_qla_scale_faint_rows<{ctype}, {V}>",
                                    T.address_of(dv_s[at, 0, 0]),
                                    T.address_of(vectors.beta_s[at, 0]),
                                    rows,
                                    value_heads,
                                    T.address_of(dv[row, head, 0]),
                                )
                                T.call_extern(
                                    "handle",
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
                            T.wgmma_gemm(
                                dv_s[at_k, :, :],
                                vd_s[at_k, :, :],
                                s_k,
                                transpose_B=True,
                                clear_accum=True,
                            )
                            T.wgmma_gemm(
                                k_s[key_k % 2, :, :], k_s[key_k % 2, :, :], kk, transpose_B=True, clear_accum=True
                            )
                            T.wait_wgmma(0)
                            # A warp writes rows of M + M^T that another reads: none may be at work on the last head's any more.
                            T.sync_threads(2, 128)
                            # F = -(D Vd^T o G), strictly lower
                            T.call_extern(
                                "handle",
                                f"jax_qla_decayed<true, {normed}>",
                                T.address_of(s_k[0, 0]),
                                T.address_of(kk[0, 0]),
                                T.address_of(vectors.gamma_s[at_k, 0]),
                                T.address_of(vectors.weight_s[at_k, 0]),
                                T.address_of(vectors.key_s[key_k % 4, 0]),
                                T.float32(-1),
                                rows,
                                T.address_of(sums_k[0]),
                            )
                            T.call_extern(
                                "handle",
                                f"jax_qla_store_symmetric<{ctype}, {normed}>",
                                T.address_of(s_k[0, 0]),
                                T.address_of(vectors.weight_s[at_k, 0]),
                                T.address_of(vectors.key_s[key_k % 4, 0]),
                                T.address_of(f_s[0, 0]),
                            )
                            T.fence_proxy_async()
                            T.sync_threads(2, 128)
                            for x in T.unroll(4):
                                dots[x] = 0.0
                            T.barrier_wait(h_loaded[0], at_k)
                            T.barrier_wait(dh_loaded[0], at_k)
                            # Z and Y by turns: one is computed while the other is used
                            # "r": behind pointers that may be written to TileLang puts a fence (0.1 us) before the next wgmma. No
                            # wgmma and no TMA reads what is written here.
                            T.wgmma_gemm(dv_s[at_k, :, :], h_s[:, 0:64], z_k, clear_accum=True)
                            T.wgmma_gemm(vd_s[at_k, :, :], dh_s[:, 0:64], y_k, clear_accum=True)
                            T.call_extern(
                                "handle",
                                "jax_qla_write_sums",
                                T.address_of(sums_k[0]),
                                T.access_ptr(parts.rows_k_s[at_k, 0], "r"),
                                T.access_ptr(parts.columns_k_s[at_k, 0, 0], "r"),
                            )
                            for part in tuple(range(K // 64)):
                                T.call_extern(
                                    "handle",
                                    "jax_qla_load_tile",
                                    T.address_of(key_pairs[0]),
                                    T.access_ptr(k_s[key_k % 2, 0, part * 64], "r"),
                                )
                                T.wait_wgmma(1)
                                T.call_extern(
                                    "handle",
                                    f"jax_qla_add_rows<{ctype}, {normed}>",
                                    T.address_of(dk_f[0, part * 64]),
                                    T.address_of(z_k[0, 0]),
                                    T.access_ptr(vectors.drop_s[at_k, 0], "r"),
                                    T.access_ptr(vectors.key_s[key_k % 4, 0], "r"),
                                    T.float32(1),
                                    T.address_of(key_pairs[0]),
                                    T.address_of(dots[0]),
                                )
                                if part + 1 < K // 64:
                                    T.wgmma_gemm(dv_s[at_k, :, :], h_s[:, 64:128], z_k, clear_accum=True)
                                    T.wait_wgmma(1)
                                else:
                                    T.wait_wgmma(0)
                                T.call_extern(
                                    "handle",
                                    f"jax_qla_add_rows<{ctype}, false>",
                                    T.address_of(dk_f[0, part * 64]),
                                    T.address_of(y_k[0, 0]),
                                    T.access_ptr(vectors.fall_s[at_k, 0], "r"),
                                    T.access_ptr(vectors.key_s[key_k % 4, 0], "r"),
                                    T.float32(1),
                                    T.address_of(key_pairs[0]),
                                    T.address_of(dots[2]),
                                )
                                if part + 1 < K // 64:
                                    T.wgmma_gemm(vd_s[at_k, :, :], dh_s[:, 64:128], y_k, clear_accum=True)
                            T.barrier_arrive(h_free[0])
                            T.barrier_arrive(dh_free[0])
                            T.call_extern(
                                "handle",
                                "jax_qla_write_rows",
                                T.address_of(dots[0]),
                                T.access_ptr(parts.z_dots_s[at_k, 0], "r"),
                            )
                            T.call_extern(
                                "handle",
                                "jax_qla_write_rows",
                                T.address_of(dots[2]),
                                T.access_ptr(parts.y_dots_s[at_k, 0], "r"),
                            )
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
                            T.call_extern(
                                "handle",
                                f"jax_qla_decayed<false, {normed}>",
                                T.address_of(s_q[0, 0]),
                                T.address_of(p[0, 0]),
                                T.address_of(vectors.gamma_s[at_q, 0]),
                                T.address_of(vectors.beta_s[at_q, 0]),
                                T.address_of(vectors.query_s[key_q % 4, 0]),
                                scale,
                                rows,
                                T.address_of(sums_q[0]),
                            )
                            if key_q * ratio + r_q > 0:
                                T.barrier_wait(e_free[0], (key_q * ratio + r_q + 1) % 2)
                            T.call_extern(
                                "handle", "jax_qla_store_tile", T.address_of(s_q[0, 0]), T.address_of(e_s[0, 0])
                            )
                            T.fence_proxy_async()
                            T.sync_threads(1, 128)
                            T.barrier_arrive(e_ready[0])
                            T.wgmma_gemm(e_s, k_s[key_q % 2, :, :], dq_f)
                            T.call_extern(
                                "handle",
                                "jax_qla_write_sums",
                                T.address_of(sums_q[0]),
                                T.access_ptr(parts.rows_q_s[at_q, 0], "r"),
                                T.access_ptr(parts.columns_q_s[at_q, 0, 0], "r"),
                            )
                            T.barrier_wait(h_loaded[0], at_q)
                            T.wgmma_gemm(do_s[0, :, :], h_s, t_q, clear_accum=True)
                            T.wait_wgmma(0)
                            T.barrier_arrive(do_free[0])
                            T.barrier_arrive(h_free[0])
                            for x in T.unroll(2):
                                dots_q[x] = 0.0
                            for part_q in tuple(range(K // 64)):
                                T.call_extern(
                                    "handle",
                                    "jax_qla_load_tile",
                                    T.address_of(queries[0]),
                                    T.access_ptr(q_s[0, 0, part_q * 64], "r"),
                                )
                                T.call_extern(
                                    "handle",
                                    f"jax_qla_add_rows<{ctype}, {normed}>",
                                    T.address_of(dq_f[0, part_q * 64]),
                                    T.address_of(t_q[0, part_q * 64]),
                                    T.access_ptr(vectors.rise_s[at_q, 0], "r"),
                                    T.access_ptr(vectors.query_s[key_q % 4, 0], "r"),
                                    scale,
                                    T.address_of(queries[0]),
                                    T.address_of(dots_q[0]),
                                )
                            T.call_extern(
                                "handle",
                                "jax_qla_write_rows",
                                T.address_of(dots_q[0]),
                                T.access_ptr(parts.q_dots_s[at_q, 0], "r"),
                            )
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
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """(dq, dk [tokens, Hk, K], dv [tokens, Hv, V], dg, dbeta [tokens, Hv]); rows of no sequence are zero; not a number in other heads than those
    of dh, from `first_head` on. h and vd each have these heads, or all."""
    from jax_qla.segments import chunk_table  # which takes the constants of kernels/common.py

    heads, all_key_heads, all_heads = dh.shape[1], q.shape[1], v.shape[1]
    h, vd = (of_heads(x, first_head, heads) if x.shape[1] == all_heads else x for x in (h, vd))
    q, k = (of_heads(x, first_head // ratio, heads // ratio) for x in (q, k))
    v, g, gamma, beta, do, d = (of_heads(x, first_head, heads) for x in (v, g, gamma, beta, do, d))
    tokens, key_heads = q.shape[:2]
    chunks = jnp.asarray(chunk_table(segments, tokens))
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
        return scatter_chunks(x, chunks, tokens, dtype)

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
