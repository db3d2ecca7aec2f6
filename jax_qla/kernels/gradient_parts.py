"""What the programs of kernels/gradients.py, gradients_split.py and backward.py have alike: CUDA functions of tiles and of sums, and macros, of
the gradients of gates, of the rows and heads of a block, and of what is written in the end. kernels/gradients.py has the formulas.
"""

import functools
import operator
from types import SimpleNamespace
from typing import TYPE_CHECKING

from jax_qla.kernels.common import CHUNK, FAINT, MIN_LOG_DECAY
from jax_qla.kernels.macros import call, macros, unfenced
from jax_qla.kernels.preludes import BALANCE_PRELUDE, CHUNK_PRELUDE, TILE_PRELUDE

if TYPE_CHECKING:
    from jax_qla.kernels.gradients import Config

PRELUDE = (
    TILE_PRELUDE
    + CHUNK_PRELUDE
    + BALANCE_PRELUDE
    + f"constexpr float kFaint = {FAINT}f;"
    + r"""
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


def operations(ctype: str, l2norm: bool) -> SimpleNamespace:
    """Functions of PRELUDE as statements, for q and k of the CUDA type `ctype`, to be normalised or not. What they take is named by its first element, but
    arrays of single registers: `columns`, `sums`."""
    import tilelang.language as T

    normed = "true" if l2norm else "false"

    def addresses(*elements):
        return (T.address_of(x) for x in elements)

    def load_tile(columns, tile):
        return call("jax_qla_load_tile", T.address_of(columns[0]), unfenced(tile))

    def store_tile(pairs, tile):
        return call("jax_qla_store_tile", *addresses(pairs, tile))

    def store_symmetric(pairs, weight, lengths, tile):
        return call(f"jax_qla_store_symmetric<{ctype}, {normed}>", *addresses(pairs, weight, lengths, tile))

    def decay(pairs, product, gamma, weight, lengths, scale, rows, sums, *, strict):
        name = f"jax_qla_decayed<{'true' if strict else 'false'}, {normed}>"
        return call(name, *addresses(pairs, product, gamma, weight, lengths), scale, rows, *addresses(sums[0]))

    def add_rows(total, x, factors, lengths, scale, columns, dots, *, by_lengths):
        name = f"jax_qla_add_rows<{ctype}, {normed if by_lengths else 'false'}>"
        by = (unfenced(factors), unfenced(lengths), scale)
        return call(name, *addresses(total, x), *by, *addresses(columns[0], dots))

    def write_sums(sums, of_rows, of_columns):
        return call("jax_qla_write_sums", T.address_of(sums[0]), unfenced(of_rows), unfenced(of_columns))

    def write_rows(dots, to):
        return call("jax_qla_write_rows", T.address_of(dots), unfenced(to))

    return SimpleNamespace(
        load_tile=load_tile,
        store_tile=store_tile,
        store_symmetric=store_symmetric,
        decay=decay,
        add_rows=add_rows,
        write_sums=write_sums,
        write_rows=write_rows,
    )


def chunk_of_block():
    """A macro of kernels/gradients.py and gradients_split.py: which rows a block computes."""
    import tilelang.language as T

    @T.macro
    def find_chunk(segments, sequences, tokens, slot, window):
        """First row, rows (0: none) and, behind them, rows of no sequence, of what `slot` of the `window` is, and the chunk's slot among all, once what the
        kernel awaits has ended."""
        # One warp for all, and by way of shared memory: registers are few.
        chunk_s = T.alloc_shared((4,), "int32")
        if T.get_thread_binding() < 32:
            call(
                "jax_qla_find_chunk_in_window",
                *(unfenced(chunk_s[0]), T.address_of(segments[0, 0]), sequences, tokens, slot, window),
            )
        T.pdl_sync()  # `state_gradients` has ended, and with it `states`
        T.pdl_trigger()  # that of the earlier window waits by itself before it writes what this one reads
        T.sync_threads()
        return chunk_s[0], chunk_s[1], chunk_s[2], chunk_s[3]

    return find_chunk


def gate_vectors(l2norm: bool):
    """A macro of kernels/gradients.py and gradients_split.py: tiles for what the rows of a chunk are multiplied by, two stages of each."""
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
    """A macro of all three: tiles for what the gradients of a head's gates and beta are summed
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
    """A macro of all three, for q and k of `dtype`, to be normalised or not; <D_i, V_i> is the
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
            dg[row + i, head] = T.Select(decay < T.float32(MIN_LOG_DECAY), T.float32(0), total)

    return write_gates


def gate_warps(dtype: str, l2norm: bool, dots_of_v: int = 1):
    """A macro of kernels/gradients.py and gradients_split.py: what its warps "gates" do. The arguments as of `gate_gradients`."""
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
    """A macro of kernels/gradients.py and gradients_split.py: dQ or dK of a key head is complete."""
    import tilelang.language as T

    K, ctype = config.key_dim, {"bfloat16": "bfloat16_t", "float16": "half_t"}[config.dtype]

    @T.macro
    def write_key_head(total, tiles, stage, lengths, free, target, row, rows, first, key, key_heads):
        """One warpgroup writes its `total`, of key head `first + key`, the `key`-th of the block, to `target`, and frees the tile of Q or K, which it may
        still have to be projected by."""
        if config.l2norm:
            call(
                f"jax_qla_project<{ctype}, {K // 64}>",
                T.address_of(total[0, 0]),
                unfenced(tiles[stage, 0, 0]),
                unfenced(lengths[key % 4, 0]),
            )
        T.barrier_arrive(free[stage])
        call(
            f"jax_qla_write_tile<{ctype}, {K}>",
            T.address_of(total[0, 0]),
            unfenced(target[row, first + key, 0]),
            rows,
            key_heads * K,
        )

    return write_key_head


def gap_rows(config: "Config"):
    """A macro of kernels/gradients.py and gradients_split.py: rows of no sequence become zero in all results."""
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
