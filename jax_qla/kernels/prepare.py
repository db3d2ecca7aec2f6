"""Chunk-local preparation: in-chunk decay and the inverse that turns the delta rule into matrix products.

For every chunk of 64 tokens and every value head h (key head h // r, r = Hv / Hk), in the notation of ALGORITHM.md:

    gamma_i = sum_{j <= i} max(g_j, -110)                                       [64]       float32
    L_ij    = beta_i <k_i, k_j> exp(gamma_i - gamma_j)   for i > j, else 0      [64, 64]   float32
    a       = (I + L)^{-1}                                                      [64, 64]   stored in the dtype of k, packed

A token maps the state by exp(g) (I - beta k k^T). Unless some beta <k, k> exceeds 2, exp(gamma_C) therefore bounds the spectral norm
of what a chunk does to the state before it, which tells kernels/summaries.py what a run of tokens forgets. Chunks where one does exceed
it are marked in the lowest bit of their last gamma (kernels/common.py: STRETCHES), which costs gamma 6e-8 of itself and no memory.

With `l2norm`, beta is divided by |k|^2 first, which K K^T has on its diagonal, and 1 / |k| is written for
`summaries` and `forward` (kernels/common.py). 1 / |q| is written too, by blocks of their own beside those of their rows.

The *gated* matrix is inverted: the gate-free one can overflow where the recurrence itself is stable (long keys, strong decay).

Plan, one block per (chunk slot, four value heads side by side), 128 threads, a warp a value head. Within a block this is a chain
of waits, which other blocks fill: 128 registers let 4 share a multiprocessor (5, of 96, took longer), and what their 35 KiB each leave of
its memory is first-level cache, which the gates' loads need (docs/performance.md). The four heads have at most two key heads, or, by `keys`, one, with
19 KiB, or one each, which are taken two after two, with 55. Blocks of fewer heads, whose other warps only help with K K^T, are for calls
of few chunks (policy.prepared_together). Before the rows of a chunk, the rows of `o` that belong to no sequence become zero.

    each two warps    gates of their heads; meanwhile TMA loads the key tiles
    all               K K^T of the key heads by wgmma; meanwhile gamma by a scan over lanes. The products go to the warps of their heads
                      by where the key tiles were (PRELUDE: jax_qla_put_products)
    each              the inverse (PRELUDE: jax_qla_invert), from registers to memory, packed (kernels/inverse.py)

The inverse X, in blocks of 16x16: X_ii = (I + L_ii)^{-1} by forward substitution, two columns a lane, and below the diagonal

    X_ij = -(X_ii L_ij + X_i,i-1 L_i-1,j + .. + X_i,j+1 L_j+1,j) X_jj

from left to right, so that no operand needs to be transposed: K K^T is symmetric, so its upper blocks, scaled, are L^T in the layout
of an accumulator, which is L in that of a right operand of mma; sums and X_ij are accumulators and become left operands where they
are. Only the X_ii go through shared memory. Operands are split into two bf16 numbers each, products of which are three (16 bits of mantissa), if L
is large: 96 mma, 148 FMA. If it is small (SMALL) they are single numbers of fp16 (11 bits), 32 mma, and of the X_ii only the blocks of 8x8 on the
diagonal are substituted, one column of each half a lane, 56 FMA in half as long a chain; the block below these is such a product too, 8 mma of half
the depth.

Why that is enough: the error of a is then some 3e-5 |L| (|L|^2 the sum of squares), at most 1.4e-4, and that of rounding it to bf16 4 to 9e-4, in
products with random numbers; so Vd, for which X is rounded as well and Vd itself, is less accurate by less than a percent (results in the mean of 320
draws of a batch by 0.0 to 0.2 %, docs/performance.md). Where keys are much alike and little decays, |L|^2 is some hundreds up to 2016, results
cancel, and 16 bits are needed. A row of L that is faint, since its beta is, has not got 11 bits in fp16, and the backward pass needs those. And
nothing overflows: an element of the inverse is at most some 2e4 where |L|^2 is SMALL (the worst of all L, found by ascent), fp16 ends at 6.5e4. In
float16, and with `split`, where the low parts, which are there, are stored too, always by splits.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jax_qla.kernels.common import (
    CHUNK,
    CHUNK_PRELUDE,
    FAINT,
    L2NORM_EPSILON,
    LOG2_E,
    LONG,
    MATRIX_PRELUDE,
    MIN_LOG_DECAY,
    PASS_CONFIGS,
    STRETCHES,
)
from jax_qla.kernels.inverse import INVERSE_PRELUDE, KEPT
from jax_qla.kernels.specification import (
    decay,
    gather_chunks,
    inverse_length,
    mark,
    pack_inverses,
    part_columns,
    scatter_chunks,
)

__all__ = ["PASS_CONFIGS", "Config", "program", "specification"]


@dataclass(frozen=True)
class Config:
    """Sizes this program is specialised for: `key_dim` 64 or 128, `dtype` "bfloat16" or "float16"; `l2norm`: whether q and k
    are to be normalised; `split` (kernels/common.py): with bfloat16 only; `keys`: how many key heads
    a block's value heads have: 1; 2, at most; or 4, one each."""

    key_dim: int = 128
    dtype: str = "bfloat16"
    l2norm: bool = False
    split: bool = False
    keys: int = 2


SMALL = 24.0
"""The sum of squares of L up to which its inverse is found by products of fp16, if no beta <k, k> is less than FAINT."""

UPPER_HALF = 10 * 16 * 16
"""Elements of K K^T that are exchanged."""

SLOTS = 32768
"""Slots along one dimension of the grid, which ends at 65535: so a block need not divide to find its own."""

LENGTHS_PRELUDE = (
    f"constexpr float kL2NormEpsilon = {L2NORM_EPSILON}f;"
    r"""
// sums_0 becomes the sum, over as many lanes side by side as there are sums, of the one of this lane's number among them: of two halves of the
// sums the lanes of either keep one and give the other.
template <int half>
__device__ __forceinline__ void jax_qla_sum_rows(float* sums) {
  if constexpr (half > 0) {
    const bool upper = threadIdx.x & half;
#pragma unroll
    for (int n = 0; n < half; ++n) {
      const float kept = upper ? sums[n + half] : sums[n], given = upper ? sums[n] : sums[n + half];
      sums[n] = kept + __shfl_xor_sync(0xffffffffu, given, half);
    }
    jax_qla_sum_rows<half / 2>(sums);
  }
}
// lengths [tokens, heads], 1 / |x| of 16 tokens from `token` on and of heads `head` and `head` + 1, as far as there are such, of x [tokens, heads,
// columns] of bf16; one warp, whose lanes have 16 bytes of a row each.
template <int columns, typename T>
__device__ __forceinline__ void jax_qla_measure(const T* x, float* lengths, int tokens, int heads, int token, int head) {
  constexpr int kLanes = columns / 8, kRows = 32 / kLanes;  // of a row; rows of a load, of which a warp takes as many as a row has lanes
  const int lane = threadIdx.x & 31, part = lane % kLanes, within = lane / kLanes;
  const auto at = [=](int load, bool& there) {  // the row of a load
    const int row = load * kRows + within, of_token = token + row / 2, of_head = head + row % 2;
    there = of_token < tokens && of_head < heads;
    return static_cast<long long>(of_token) * heads + of_head;
  };
  uint4 vectors[kLanes];
#pragma unroll
  for (int n = 0; n < kLanes; ++n) {
    bool there;
    const long long row = at(n, there);
    vectors[n] = there ? reinterpret_cast<const uint4*>(x + row * columns)[part] : uint4{0, 0, 0, 0};
  }
  float sums[kLanes];
#pragma unroll
  for (int n = 0; n < kLanes; ++n) {
    const unsigned pairs[4] = {vectors[n].x, vectors[n].y, vectors[n].z, vectors[n].w};
    float sum[2] = {};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float low = jax_qla_low_half(pairs[e]), high = jax_qla_high_half(pairs[e]);
      sum[0] += low * low;
      sum[1] += high * high;
    }
    sums[n] = sum[0] + sum[1];
  }
  jax_qla_sum_rows<kLanes / 2>(sums);
  bool there;
  const long long row = at(part, there);
  if (there) lengths[row] = rsqrtf(sums[0] + kL2NormEpsilon);
}
"""
)


PRELUDE = (
    MATRIX_PRELUDE
    + INVERSE_PRELUDE
    + LENGTHS_PRELUDE
    + CHUNK_PRELUDE
    + f"constexpr int kStretches = {STRETCHES};\nconstexpr float kMinLogDecay = {MIN_LOG_DECAY}f, kLog2e = {LOG2_E}f;"
    f"constexpr float kSmall = {SMALL}f, kFaint = {FAINT}f;"
    r"""
constexpr int kBlock = 1024;  // bytes of a block on the diagonal in a head's scratch, of which there are four
constexpr int kLow = 512;     // bytes from the high parts of an inverted block to its low parts
constexpr float kLimit = 2.001f;

// What is made of them. A 16x16 block is held by a warp as an accumulator, two 16x8 tiles: element 4 n + 2 h + e of lane l is that
// of row 8 h + l / 4, column 8 n + 2 (l % 4) + e.

// A 16x16 block as high + low, both pairs of bf16; as a left operand `high` is a0, .., a3, as a right one b0, b1 of each 8 columns ...
struct Split {
  unsigned high[4], low[4];
};
// ... and as pairs of fp16, where L is small.
struct Single {
  unsigned pairs[4];
};
__device__ __forceinline__ void jax_qla_set(Split& s, int i, float x, float y) { jax_qla_split(s.high[i], s.low[i], x, y); }
__device__ __forceinline__ void jax_qla_set(Single& s, int i, float x, float y) { s.pairs[i] = jax_qla_round<false>(x, y); }
// An accumulator as a left operand, ...
template <typename Operand>
__device__ __forceinline__ void jax_qla_left(Operand& s, const float* c) {
#pragma unroll
  for (int i = 0; i < 4; ++i) jax_qla_set(s, i, c[i * 2], c[i * 2 + 1]);
}
// ... and its transpose as a right one.
template <typename Operand>
__device__ __forceinline__ void jax_qla_right(Operand& s, const float* c) {
#pragma unroll
  for (int i = 0; i < 4; ++i) jax_qla_set(s, i, c[i % 2 * 4 + i / 2 * 2], c[i % 2 * 4 + i / 2 * 2 + 1]);
}
template <bool bf16>
__device__ __forceinline__ void jax_qla_multiply_pairs(float* c, const unsigned* a, const unsigned* b) {
#pragma unroll
  for (int n = 0; n < 2; ++n) jax_qla_mma<bf16>(c + n * 4, a, b[n * 2], b[n * 2 + 1]);
}
__device__ __forceinline__ void jax_qla_multiply(float* c, const Split& a, const Split& b) {
  jax_qla_multiply_pairs<true>(c, a.low, b.high);
  jax_qla_multiply_pairs<true>(c, a.high, b.low);
  jax_qla_multiply_pairs<true>(c, a.high, b.high);
}
__device__ __forceinline__ void jax_qla_multiply(float* c, const Single& a, const Single& b) { jax_qla_multiply_pairs<false>(c, a.pairs, b.pairs); }
// An inverted block from scratch memory; transposed: as a left operand, else as a right one.
template <bool transposed>
__device__ __forceinline__ void jax_qla_load_inverse(Split& s, unsigned address) {
  jax_qla_load_matrices<transposed>(s.high, address);
  jax_qla_load_matrices<transposed>(s.low, address + kLow);
}

// Number of block (i, k), i <= k, of the upper half, and of block (i, k), i < k, without the diagonal.
__host__ __device__ constexpr int jax_qla_upper(int i, int k) { return i * (7 - i) / 2 + k; }
__host__ __device__ constexpr int jax_qla_above(int i, int k) { return i * (5 - i) / 2 + k - 1; }

// Gates of heads `head` .. `head` + min(heads, 2), by two warps, two threads a row, which asks for half as many lines of memory as a warp
// a head would; g clamped to kMinLogDecay; zeros beyond the chunk's rows. g and beta: the chunk's first rows of `pitch` elements.
__device__ __forceinline__ void jax_qla_fetch(float* gamma_s, float* beta_s, const float* g, const float* beta, int pitch, int head,
                                              int heads, int rows) {
  const int h = threadIdx.x & 1;
#pragma unroll
  for (int x = 0; x < 2; ++x) {
    const int row = x * 32 + (threadIdx.x >> 1 & 31);
    const bool wanted = h < heads && row < rows;
    gamma_s[h * 64 + row] = wanted ? fmaxf(g[row * pitch + head + h], kMinLogDecay) : 0.f;
    beta_s[h * 64 + row] = wanted ? beta[row * pitch + head + h] : 0.f;
  }
}
// The other way: gamma of all rows but the last, which is to be marked.
__device__ __forceinline__ void jax_qla_store_gamma(float* gamma, const float* gamma_s, int pitch, int head, int heads, int rows) {
  const int h = threadIdx.x & 1;
#pragma unroll
  for (int x = 0; x < 2; ++x) {
    const int row = x * 32 + (threadIdx.x >> 1 & 31);
    if (h < heads && row < rows - 1) gamma[row * pitch + head + h] = gamma_s[h * 64 + row];
  }
}
// Inclusive sums over the rows of a head, in place and in units of log2; one warp.
__device__ __forceinline__ void jax_qla_scan(float* gamma, float* log2_gamma) {
  const int lane = threadIdx.x & 31;
  float x = gamma[lane], y = gamma[32 + lane];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float first = __shfl_up_sync(0xffffffffu, x, step), second = __shfl_up_sync(0xffffffffu, y, step);
    if (lane >= step) {
      x += first;
      y += second;
    }
  }
  y += __shfl_sync(0xffffffffu, x, 31);
  gamma[lane] = x;
  gamma[32 + lane] = y;
  log2_gamma[lane] = x * kLog2e;
  log2_gamma[32 + lane] = y * kLog2e;
}

// Rows `rows`.. of the key tile of each warp of the block become zero.
__device__ __forceinline__ void jax_qla_zero_rows(void* tile, int rows) {
  for (int i = rows * 8 + (threadIdx.x & 31); i < 512; i += 32) static_cast<uint4*>(tile)[i] = uint4{0, 0, 0, 0};
}

// The upper half of K K^T in 10 blocks, from a wgmma accumulator [64, 64], of which a warp has 16 rows, to shared memory, a lane's
// elements of a block by 16 bytes side by side with its neighbours' ...
__device__ __forceinline__ void jax_qla_put_products(const void* accumulator, void* exchanged) {
  const float4* c = static_cast<const float4*>(accumulator);
  const int lane = threadIdx.x & 31, i = (threadIdx.x >> 5) & 3;
  float4* to = static_cast<float4*>(exchanged) + jax_qla_upper(i, 0) * 64 + lane;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (k < i) continue;
    to[k * 64] = c[k * 2];
    to[k * 64 + 32] = c[k * 2 + 1];
  }
}
// ... and from there all of it to a warp.
__device__ __forceinline__ void jax_qla_get_products(void* kk, const void* exchanged) {
  const float4* from = static_cast<const float4*>(exchanged) + (threadIdx.x & 31);
#pragma unroll
  for (int n = 0; n < 20; ++n) static_cast<float4*>(kk)[n] = from[n * 32];
}

// beta_i / (|k_i|^2 + epsilon), in place, |k_i|^2 from the diagonal of K K^T, which eight lanes have and all share by way of `shared` memory, and
// lengths_i = 1 / |k_i| of the first `rows` rows, which are `pitch` elements apart; one warp.
__device__ __forceinline__ void jax_qla_normalise(const void* products, float* beta, void* shared, float* lengths, int pitch, int rows) {
  const float* kk = static_cast<const float*>(products);
  float* scratch = static_cast<float*>(shared);
  const int lane = threadIdx.x & 31, row = lane / 4;
  if (row / 2 == lane % 4) {
#pragma unroll
    for (int half = 0; half < 8; ++half) {
      const float* c = kk + jax_qla_upper(half / 2, half / 2) * 8 + half % 2 * 6;
      scratch[half * 8 + row] = row & 1 ? c[1] : c[0];
    }
  }
  __syncwarp();
#pragma unroll
  for (int x = 0; x < 2; ++x) {
    const int i = x * 32 + lane;
    const float length = rsqrtf(scratch[i] + kL2NormEpsilon);
    beta[i] *= length * length;
    if (i < rows) lengths[i * pitch] = length;
  }
  __syncwarp();
}

// L^T from the upper half of K K^T; gamma in units of log2. Its blocks on the diagonal go to scratch memory as rows of 16 floats, the
// four quarters of which change places by row and block; what lies below the diagonal there is not L. Those above it become -L^T in place, and the upper
// right quarters of those on it L^T.
// Finds the sum of squares of this lane's elements of L, and of the rows whose beta <k, k> this lane has, whether that of one exceeds kLimit, and is less than
// kFaint but not 0.
__device__ __forceinline__ void jax_qla_gate(float* kk, float& norm, bool& stretches, bool& faint, const float* gamma, const float* beta, float* scratch) {
  const int lane = threadIdx.x & 31, row = lane / 4, column = lane % 4 * 2;
  const int within = row * 16 + (((column >> 2) ^ (row & 2)) << 2) + (column & 3);
  float rows[8], longest = 0.f, squares[4] = {};
  unsigned least = ~0u;  // of what is not 0, less 1, as a number of bits
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    rows[k * 2] = gamma[k * 16 + row];
    rows[k * 2 + 1] = gamma[k * 16 + 8 + row];
    const float2 g0 = *reinterpret_cast<const float2*>(gamma + k * 16 + column);
    const float2 g1 = *reinterpret_cast<const float2*>(gamma + k * 16 + 8 + column);
    const float2 b0 = *reinterpret_cast<const float2*>(beta + k * 16 + column);
    const float2 b1 = *reinterpret_cast<const float2*>(beta + k * 16 + 8 + column);
    const float gammas[4] = {g0.x, g0.y, g1.x, g1.y}, betas[4] = {b0.x, b0.y, b1.x, b1.y};
    float* c = kk + jax_qla_upper(k, k) * 8;
    const float top[4] = {betas[0] * c[0], betas[1] * c[1], betas[2] * c[4], betas[3] * c[5]};
    const float bottom[2] = {betas[2] * c[6], betas[3] * c[7]};
    const float of_near = row & 1 ? top[1] : top[0], of_far = row & 1 ? bottom[1] : bottom[0];  // beta <k, k>, in lanes that have the diagonal
    longest = fmaxf(longest, fmaxf(of_near, of_far));
    least = min(least, min((__float_as_uint(of_near) & 0x7fffffffu) - 1, (__float_as_uint(of_far) & 0x7fffffffu) - 1));
    float* near = scratch + k * (kBlock / 4) + (within ^ (k << 2));
    float* far = scratch + k * (kBlock / 4) + (within ^ (k << 2) ^ 8);
    const float2 first = {top[0] * exp2f(gammas[0] - rows[k * 2]), top[1] * exp2f(gammas[1] - rows[k * 2])};
    const float2 second = {top[2] * exp2f(gammas[2] - rows[k * 2]), top[3] * exp2f(gammas[3] - rows[k * 2])};
    const float2 third = {bottom[0] * exp2f(gammas[2] - rows[k * 2 + 1]), bottom[1] * exp2f(gammas[3] - rows[k * 2 + 1])};
    c[4] = second.x;
    c[5] = second.y;
    *reinterpret_cast<float2*>(near) = first;
    *reinterpret_cast<float2*>(far) = second;
    *reinterpret_cast<float2*>(far + 128) = third;
    squares[0] += second.x * second.x;
    squares[1] += second.y * second.y;
    if (column > row) {
      squares[0] += first.x * first.x;
      squares[2] += third.x * third.x;
    }
    if (column + 1 > row) {
      squares[1] += first.y * first.y;
      squares[3] += third.y * third.y;
    }
    if (k == 0) continue;
    // The decay of a block above the diagonal is one up to the end of the block before its columns times one from there: neither
    // exceeds 1, and 24 exponentials do instead of 48.
    const float end = gamma[k * 16 - 1];
    float factor[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) factor[e] = -betas[e] * exp2f(gammas[e] - end);
#pragma unroll
    for (int i = 0; i < k; ++i) {
      float* c = kk + jax_qla_upper(i, k) * 8;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float rest = exp2f(end - rows[i * 2 + h]);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = c[e / 2 * 4 + h * 2 + e % 2];
          x *= factor[e] * rest;
          squares[e] += x * x;
        }
      }
    }
  }
  const bool diagonal = row / 2 == lane % 4;
  norm = (squares[0] + squares[1]) + (squares[2] + squares[3]);
  stretches = diagonal && longest > kLimit;
  faint = diagonal && least < __float_as_uint(kFaint) - 1;
}

// The inverses of the four blocks I + L on the diagonal, in place, as sums of two numbers, the second ones behind the first. A lane substitutes forward in
// columns c and c + 8 of one block. Halves of columns change places so that ldmatrix meets no bank twice.
__device__ __forceinline__ void jax_qla_substitute(float* scratch) {
  const int lane = threadIdx.x & 31, column = lane & 7;
  const int number = lane >> 3;
  float* block = scratch + number * (kBlock / 4);
  float x[16], y[8];
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = i == column ? 1.f : 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = x[i];
#pragma unroll
  for (int j = 0; j < 15; ++j) {
#pragma unroll
    for (int q = (j + 1) / 4; q < 4; ++q) {
      const float4 l = *reinterpret_cast<const float4*>(block + j * 16 + (q ^ (j & 2) ^ number) * 4);
      const float values[4] = {l.x, l.y, l.z, l.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = q * 4 + e;
        if (i > j) {
          x[i] -= values[e] * x[j];
          if (j >= 8) y[i - 8] -= values[e] * y[j - 8];
        }
      }
    }
  }
  __syncwarp();
  unsigned high[12], low[12];
#pragma unroll
  for (int i = 0; i < 12; ++i) {
    const float* pair = i < 8 ? x + i * 2 : y + (i - 8) * 2;
    jax_qla_split(high[i], low[i], pair[0], pair[1]);
  }
  uint4* to = reinterpret_cast<uint4*>(block) + column * 2;
  const int near = column >> 2, far = near ^ 1;
  to[near] = uint4{high[0], high[1], high[2], high[3]};
  to[far] = uint4{high[4], high[5], high[6], high[7]};
  to[16 + near] = uint4{0, 0, 0, 0};
  to[16 + far] = uint4{high[8], high[9], high[10], high[11]};
  to[32 + near] = uint4{low[0], low[1], low[2], low[3]};
  to[32 + far] = uint4{low[4], low[5], low[6], low[7]};
  to[48 + near] = uint4{0, 0, 0, 0};
  to[48 + far] = uint4{low[8], low[9], low[10], low[11]};
  __syncwarp();
}

// The inverses of the eight blocks of 8x8 on the diagonal, two of each of those, to the beginning of scratch memory: four times in fp16, then four times in
// bf16, four matrices of 8x8 by columns, upper left, lower left (not written), upper right (0, in fp16), lower right. A lane has a column of two blocks.
__device__ __forceinline__ void jax_qla_substitute_by_eight(float* scratch) {
  const int lane = threadIdx.x & 31, column = lane & 7, number = lane >> 3;
  const float* block = scratch + number * (kBlock / 4);
  float x[2][8];
#pragma unroll
  for (int i = 0; i < 8; ++i) x[0][i] = x[1][i] = i == column ? 1.f : 0.f;
#pragma unroll
  for (int j = 0; j < 7; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int q = (j + 1) / 4; q < 2; ++q) {
        const float4 l = *reinterpret_cast<const float4*>(block + (half * 8 + j) * 16 + ((half * 2 + q) ^ (j & 2) ^ number) * 4);
        const float values[4] = {l.x, l.y, l.z, l.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int i = q * 4 + e;
          if (i > j) x[half][i] -= values[e] * x[half][j];
        }
      }
    }
  }
  __syncwarp();
  uint4* to = reinterpret_cast<uint4*>(scratch) + number * 32 + column;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float* y = x[half];
    to[half * 24] = uint4{jax_qla_round<false>(y[0], y[1]), jax_qla_round<false>(y[2], y[3]), jax_qla_round<false>(y[4], y[5]),
                          jax_qla_round<false>(y[6], y[7])};
    to[128 + half * 24] = uint4{jax_qla_round<true>(y[0], y[1]), jax_qla_round<true>(y[2], y[3]), jax_qla_round<true>(y[4], y[5]),
                                jax_qla_round<true>(y[6], y[7])};
  }
  to[16] = uint4{0, 0, 0, 0};
  __syncwarp();
}
// c += a b, a [16, 8] and b [8, 8] of fp16.
__device__ __forceinline__ void jax_qla_mma_eight(float* c, const unsigned* a, unsigned b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(b));
}
// The transpose of a matrix [8, 8] of 16 bits, a row of which four lanes have.
__device__ __forceinline__ unsigned jax_qla_transposed(unsigned x) {
  unsigned y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// An accumulator in the dtype of a.
template <bool bf16>
__device__ __forceinline__ void jax_qla_pack(unsigned* r, const float* c) {
#pragma unroll
  for (int i = 0; i < 4; ++i) r[i] = jax_qla_round<bf16>(c[i * 2], c[i * 2 + 1]);
}
// Block (i, j) of `a`, of 16x16, to memory, where it is four of 8x8 (kernels/inverse.py). An accumulator lies in the lanes so that a warp stores each of these,
// 128 bytes, at once: to[0] is this lane's word of the first block of all. What is above the diagonal is left out, and what is beyond `rows`.
template <unsigned long long kept>
__device__ __forceinline__ void jax_qla_put(unsigned* to, int i, int j, const unsigned* r, int rows) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int lower = n & 1, right = n >> 1, row = 2 * i + lower, column = 2 * j + right;
    if (column <= row && row * 8 < rows) jax_qla_store_word<kept>(to + (row * (row + 1) / 2 + column) * 32, r[n]);
  }
}
// The same of an inverted block, a left operand, which `from` points to in scratch memory.
template <bool bf16, unsigned long long kept>
__device__ __forceinline__ void jax_qla_put_diagonal(unsigned* to, int i, const Split& s, int rows) {
  unsigned r[4];
  float c[8];
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    c[p * 2] = jax_qla_low_half(s.high[p]) + jax_qla_low_half(s.low[p]);
    c[p * 2 + 1] = jax_qla_high_half(s.high[p]) + jax_qla_high_half(s.low[p]);
  }
  jax_qla_pack<bf16>(r, c);
  jax_qla_put<kept>(to, i, i, bf16 ? s.high : r, rows);  // the high part is what rounding to bf16 gives
}
// The inverted blocks on the diagonal as left and, but for the last, as right operands, and to memory ...
template <bool bf16, bool split, unsigned long long kept>
__device__ __forceinline__ void jax_qla_invert_diagonal(Split* left, Split* right, const float*, float* scratch, unsigned* to, unsigned* to_low, int rows) {
  jax_qla_substitute(scratch);
  const int lane = threadIdx.x & 31;
  const unsigned from =
      jax_qla_address(scratch) + ((lane >> 4) * 8 + (lane & 7)) * 32 + ((((lane >> 3) ^ (lane >> 2)) & 1) << 4);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    jax_qla_load_inverse<true>(left[i], from + i * kBlock);
    jax_qla_put_diagonal<bf16, kept>(to, i, left[i], rows);
    if constexpr (split) jax_qla_put<kept>(to_low, i, i, left[i].low, rows);
  }
#pragma unroll
  for (int j = 0; j < 3; ++j) jax_qla_load_inverse<false>(right[j], from + j * kBlock);
}
// ... where L is small. With U, D its inverted blocks of 8x8 and B that of L below U, I + L_ii has the inverse (U, 0; -D B U, D).
template <bool bf16, bool split, unsigned long long kept>
__device__ __forceinline__ void jax_qla_invert_diagonal(Single* left, Single* right, const float* kk, float* scratch, unsigned* to, unsigned*, int rows) {
  jax_qla_substitute_by_eight(scratch);
  const unsigned from = jax_qla_address(scratch) + (threadIdx.x & 31) * 16;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    unsigned across[4], rounded[4];  // the block as a right operand, and in the dtype of a
    jax_qla_load_matrices<true>(left[i].pairs, from + i * 512);
    jax_qla_load_matrices<false>(across, from + i * 512);
    jax_qla_load_matrices<true>(rounded, from + 2048 + i * 512);
    const float* c = kk + jax_qla_upper(i, i) * 8;
    float product[4] = {}, block[4] = {};  // D B and -D B U, in the lower half of the accumulator
    jax_qla_mma_eight(product, left[i].pairs + 2, jax_qla_round<false>(c[4], c[5]));
    const unsigned of_product[2] = {0, jax_qla_round<false>(product[2], product[3]) ^ 0x80008000u};
    jax_qla_mma_eight(block, of_product, across[0]);
    left[i].pairs[1] = jax_qla_round<false>(block[2], block[3]);
    rounded[1] = jax_qla_round<true>(block[2], block[3]);
    jax_qla_put<kept>(to, i, i, rounded, rows);
    if (i < 3) {
      across[1] = jax_qla_transposed(left[i].pairs[1]);
#pragma unroll
      for (int n = 0; n < 4; ++n) right[i].pairs[n] = across[n];
    }
  }
}

// The inverse of I + L by products of operands of this kind, from L's blocks (jax_qla_gate) to memory; one warp.
template <typename Operand, bool bf16, bool split, unsigned long long kept, typename T>
__device__ __forceinline__ void jax_qla_invert_blocks(const float* kk, float* scratch, T* a, long long element, int rows) {
  const int lane = threadIdx.x & 31;
  Operand lower[6];
#pragma unroll
  for (int k = 1; k < 4; ++k) {
#pragma unroll
    for (int i = 0; i < k; ++i) jax_qla_right(lower[jax_qla_above(i, k)], kk + jax_qla_upper(i, k) * 8);
  }
  unsigned* to = reinterpret_cast<unsigned*>(a + element) + lane;
  asm volatile("" : "+l"(to));  // else the lane is added to each block's place, and that to the address: 70 instructions
  unsigned* to_low = to + rows * 32;
  if constexpr (split) asm volatile("" : "+l"(to_low));
  Operand left[4], right[3];  // inverted blocks as operands
  Operand x[6];               // blocks of a below the diagonal as left operands, numbered as those of L^T
  jax_qla_invert_diagonal<bf16, split, kept>(left, right, kk, scratch, to, to_low, rows);
#pragma unroll
  for (int distance = 1; distance < 4; ++distance) {
    float sum[3][8] = {};  // a step at a time for all blocks, which do not wait for one another
#pragma unroll
    for (int j = 0; j + distance < 4; ++j) {
      const int i = j + distance;
      jax_qla_multiply(sum[j], left[i], lower[jax_qla_above(j, i)]);
#pragma unroll
      for (int k = j + 1; k < i; ++k) jax_qla_multiply(sum[j], x[jax_qla_above(k, i)], lower[jax_qla_above(j, k)]);
    }
#pragma unroll
    for (int j = 3 - distance; j >= 0; --j) {
      float block[8] = {};
      Operand of_sum;
      const int n = jax_qla_above(j, j + distance);
      jax_qla_left(of_sum, sum[j]);
      jax_qla_multiply(block, of_sum, right[j]);
      jax_qla_left(x[n], block);
      unsigned rounded[4];
      jax_qla_pack<bf16>(rounded, block);
      jax_qla_put<kept>(to, j + distance, j, rounded, rows);
      if constexpr (split) jax_qla_put<kept>(to_low, j + distance, j, x[n].low, rows);
    }
  }
}
// kk (jax_qla_get_products) -> a, from `element` on, if `split` its low part behind 64 elements a row, and `last_gamma` with its mark -> marked[at]; one
// warp. gamma in units of log2. `tile` is scratch memory, for the blocks on the diagonal. kk is not needed any more.
template <bool bf16, bool split, unsigned long long kept, typename T>
__device__ __forceinline__ void jax_qla_invert(void* products, const float* gamma, const float* beta, void* tile, T* a, long long element,
                                               int rows, float* marked, int at, float last_gamma) {
  float* kk = static_cast<float*>(products);
  float* scratch = static_cast<float*>(tile);
  const int lane = threadIdx.x & 31;
  float norm;
  bool stretches, faint;
  jax_qla_gate(kk, norm, stretches, faint, gamma, beta, scratch);
  stretches = __any_sync(0xffffffffu, stretches);
  if (lane == 0) marked[at] = __int_as_float((__float_as_int(last_gamma) & ~kStretches) | (stretches ? kStretches : 0));
  __syncwarp();
  if constexpr (bf16 && !split) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) norm += __shfl_xor_sync(0xffffffffu, norm, step);
    if (!__any_sync(0xffffffffu, faint || !(norm <= kSmall))) {
      jax_qla_invert_blocks<Single, bf16, split, kept>(kk, scratch, a, element, rows);
      return;
    }
  }
  jax_qla_invert_blocks<Split, bf16, split, kept>(kk, scratch, a, element, rows);
}
"""
)


def program(config: Config):
    """The TileLang program. Numbers of tokens, heads, value columns and sequences are run-time values."""
    import tilelang.language as T
    from tilelang.layout import make_full_bank_swizzled_layout

    C, K, dtype = CHUNK, config.key_dim, config.dtype
    bf16 = "true" if dtype == "bfloat16" else "false"
    l2norm, split = config.l2norm, config.split
    keys = config.keys
    own_keys = keys == 4
    phases = 2 if own_keys else 1  # of two key heads each, or one
    tokens, key_heads, value_heads, value_dim, sequences = T.dynamic(
        "tokens, key_heads, value_heads, value_dim, sequences"
    )
    slots = tokens // C + sequences + 1  # jax_qla/segments.py: slot_count
    measuring = (key_heads + 1) // 2 if l2norm else 0  # blocks that measure queries, of a slot

    @T.macro
    def load_keys(k, row, key_head, two, unit, half, tiles, loaded):
        """The first warp has TMA load the key tile of a key head, and, unless there is but one, the third that of the next one, if it is wanted:
        `two` is 1, else 0."""
        if half == 0 and unit < min(keys, 2):
            if unit <= two:
                for x in T.unroll(K // 64):
                    T.tma_copy(
                        k[row : row + C, key_head + unit, x * 64 : x * 64 + 64],
                        tiles[unit * 2 + x, :, :],
                        barrier=loaded[unit],
                        leader_scope_threads=32,
                    )
            T.barrier_arrive(loaded[unit])

    def exchanged(phase, which, kept, tiles):
        """Where the products of a key head, the first or second of its phase, are exchanged: where the key tiles were, unless others come there."""
        if phase < phases - 1:
            return T.address_of(kept[which * UPPER_HALF])
        return T.access_ptr(tiles[which, which * 16, 0], "r")

    def scratch(warp, tiles):
        """Where a warp has its blocks on the diagonal, 4 KiB."""
        return T.access_ptr(tiles[warp // 2, warp % 2 * 32, 0] if keys == 1 else tiles[warp, 0, 0], "r")

    @T.prim_func
    def prepare(
        q: T.Tensor((tokens, key_heads, K), dtype),  # with `l2norm` only
        k: T.Tensor((tokens, key_heads, K), dtype),
        g: T.Tensor((tokens, value_heads), "float32"),
        beta: T.Tensor((tokens, value_heads), "float32"),
        bounds: T.Tensor((sequences, 2), "int32"),
        a: T.Tensor((value_heads, tokens, C * (1 + split)), "int16"),
        gamma: T.Tensor((tokens, value_heads), "float32"),
        lengths: T.Tensor((tokens, key_heads), "float32"),  # 1 / |k|, with `l2norm` only, and so
        query_lengths: T.Tensor((tokens, key_heads), "float32"),  # 1 / |q|
        o: T.Tensor((tokens, value_heads, value_dim), dtype),
        ratio: T.int32,
        together: T.int32,  # value heads of a block: 4, with 4 `keys` always, or fewer (policy.prepared_together)
    ):
        with T.Kernel(
            (value_heads + together - 1) // together + measuring,
            T.min(slots, SLOTS),
            (slots + SLOTS - 1) // SLOTS,
            threads=128,
            prelude=PRELUDE,
        ) as (number, low_slot, high_slot):
            T.annotate_min_blocks_per_sm(4)
            # Neighbours work on the same rows: what they read and write together is contiguous. The first rows come last, for
            # `forward` begins with them, and finds in the second-level cache what has been read and written of late.
            slot = T.alloc_var("int32")
            first_key_head = T.alloc_var("int32")
            place = T.alloc_var("int32")
            which = T.alloc_var("int32")
            two = T.alloc_var("int32")
            heads = T.alloc_var("int32")
            pair = (together + 1) // 2  # value heads of two warps
            blocks = T.truncdiv(value_heads + together - 1, together) if l2norm else None  # of a slot
            tx = T.get_thread_binding()
            warp = tx // 32
            unit = warp // 2
            half = warp % 2
            lane = tx % 32
            slot = slots - 1 - (high_slot * SLOTS + low_slot)
            of_block = number * together  # value heads from this one on
            first = of_block + unit * pair  # and from this one on of two warps
            head = first + half
            heads = T.Select(unit * pair < together, T.min(value_heads - first, pair), 0)
            if own_keys:
                first_key_head = of_block
                which = half
            else:
                first_key_head = T.truncdiv(of_block, ratio)
                place = head - first_key_head * ratio  # among those of the block's two key heads
                which = T.Select(place >= ratio, 1, 0) if keys == 2 else 0  # of these
            key_head = head if own_keys else first_key_head + which
            # whether the block has heads of two key heads
            if keys == 1:
                two = 0
            else:
                two = T.Select((first_key_head + 1) * ratio < T.min(value_heads, of_block + together), 1, 0)
            T.pdl_trigger()  # what follows waits by itself
            if l2norm:
                if number >= blocks:  # which is none of the heads above, nor of the rows below
                    T.call_extern(
                        "handle",
                        f"jax_qla_measure<{K}>",
                        T.address_of(q[0, 0, 0]),
                        T.address_of(query_lengths[0, 0]),
                        tokens,
                        key_heads,
                        slot * C + warp * 16,
                        (number - blocks) * 2,
                    )
            chunk = T.alloc_local((3,), "int32")
            T.call_extern(
                "handle", "jax_qla_find_chunk", chunk.data, T.address_of(bounds[0, 0]), sequences, tokens, slot
            )
            row = T.alloc_var("int32")
            rows = T.alloc_var("int32")
            fill = T.alloc_var("int32")
            row = chunk[0]
            rows = T.Select(number < blocks, chunk[1], 0) if l2norm else chunk[1]
            fill = chunk[2]
            if slot < 0:  # there are more blocks than slots
                rows = 0
                fill = 0

            # K of the key heads, 64 columns each; then K K^T of both; then what each value head's warp inverts
            tiles_s = T.alloc_shared((2 if keys == 1 else 4, C, 64), dtype)
            # K K^T of the first two key heads of four
            kept_s = T.alloc_shared((2 * UPPER_HALF,), "float32") if own_keys else None
            gamma_s = T.alloc_shared((4, C), "float32")
            log2_gamma_s = T.alloc_shared((4, C), "float32")  # gamma in units of log2
            beta_s = T.alloc_shared((4, C), "float32")
            loaded = T.alloc_barrier([32] * min(keys, 2))
            T.annotate_layout({tiles_s: make_full_bank_swizzled_layout(tiles_s)})

            if half < heads:
                for i in T.serial(fill):
                    for x in T.serial(value_dim // 32):
                        o[row + rows + i, head, x * 32 + lane] = T.cast(0, dtype)
            if rows > 0:
                near = T.alloc_fragment((C, C), "float32")  # K K^T of the first key head, of the second
                if keys > 1:
                    far = T.alloc_fragment((C, C), "float32")
                kk = T.alloc_local((80,), "float32")
                load_keys(k, row, first_key_head, two, unit, half, tiles_s, loaded)
                T.call_extern(
                    "handle",
                    "jax_qla_fetch",
                    T.access_ptr(gamma_s[unit * 2, 0], "r"),  # which it writes, but nothing needs a proxy fence for it
                    T.access_ptr(beta_s[unit * 2, 0], "r"),
                    T.address_of(g[row, 0]),
                    T.address_of(beta[row, 0]),
                    value_heads,
                    first,
                    heads,
                    rows,
                )
                for phase in tuple(range(phases)):
                    for x in tuple(range(min(keys, 2))):
                        T.barrier_wait(loaded[x], phase)
                    if rows < C:
                        if (warp if keys == 1 else half) < K // 64:
                            T.call_extern("handle", "jax_qla_zero_rows", T.access_ptr(tiles_s[warp, 0, 0], "r"), rows)
                        T.fence_proxy_async()
                        T.sync_threads(1, 128)
                    for x in tuple(range(K // 64)):
                        T.wgmma_gemm(tiles_s[x, :, :], tiles_s[x, :, :], near, transpose_B=True, clear_accum=x == 0)
                    for x in tuple(range(K // 64 if keys > 1 else 0)):
                        T.wgmma_gemm(
                            tiles_s[2 + x, :, :], tiles_s[2 + x, :, :], far, transpose_B=True, clear_accum=x == 0
                        )
                    if phase == 0:
                        T.sync_threads(1, 128)
                        T.call_extern(
                            "handle",
                            "jax_qla_scan",
                            T.address_of(gamma_s[warp, 0]),
                            T.address_of(log2_gamma_s[warp, 0]),
                        )
                        T.sync_threads(1, 128)
                        T.call_extern(
                            "handle",
                            "jax_qla_store_gamma",
                            T.address_of(gamma[row, 0]),
                            T.address_of(gamma_s[unit * 2, 0]),
                            value_heads,
                            first,
                            heads,
                            rows,
                        )
                    T.wait_wgmma(0)
                    if phase == phases - 1:
                        T.sync_threads(1, 128)  # the key tiles become what is exchanged
                    T.call_extern("handle", "jax_qla_put_products", near.data, exchanged(phase, 0, kept_s, tiles_s))
                    if keys > 1:
                        if own_keys or two > 0:
                            T.call_extern(
                                "handle", "jax_qla_put_products", far.data, exchanged(phase, 1, kept_s, tiles_s)
                            )
                    T.sync_threads(1, 128)  # the key tiles become those of the next key heads; or all is exchanged
                    if phase + 1 < phases:
                        load_keys(
                            k,
                            row,
                            first_key_head + 2 * phase + 2,
                            T.min(value_heads - first_key_head - 2 * phase - 3, 1),
                            unit,
                            half,
                            tiles_s,
                            loaded,
                        )
                for phase in tuple(range(phases)):
                    if phases == 1 or unit == phase:
                        T.call_extern(
                            "handle",
                            "jax_qla_get_products",
                            T.address_of(kk[0]),
                            exchanged(phase, which, kept_s, tiles_s),
                        )
                T.sync_threads(1, 128)  # what is exchanged becomes scratch
                if half < heads:
                    if l2norm:
                        T.call_extern(
                            "handle",
                            "jax_qla_normalise",
                            T.address_of(kk[0]),
                            T.address_of(beta_s[warp, 0]),
                            scratch(warp, tiles_s),
                            T.address_of(lengths[row, key_head]),
                            key_heads,
                            rows if own_keys else T.if_then_else(place == which * ratio, rows, 0),
                        )
                    T.call_extern(
                        "handle",
                        f"jax_qla_invert<{bf16}, {'true' if split else 'false'}, {KEPT[LONG]}>",
                        T.address_of(kk[0]),
                        T.address_of(log2_gamma_s[warp, 0]),
                        T.address_of(beta_s[warp, 0]),
                        scratch(warp, tiles_s),
                        T.address_of(a[0, 0, 0]),
                        (T.cast(head, "int64") * tokens + row) * (C * (1 + split)),
                        rows,
                        T.address_of(gamma[row, 0]),
                        (rows - 1) * value_heads + head,
                        gamma_s[warp, rows - 1],
                    )
            T.pdl_sync()  # ends after what came before, for what follows waits for this kernel alone

    return prepare


def specification(
    q: jax.Array,
    k: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    bounds: jax.Array,
    *,
    ratio: int,
    l2norm: int = 0,
    split: int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(a [Hv, tokens, 64], or with `split` [Hv, tokens, 128], of bits of k's dtype, gamma [tokens, Hv], lengths and query_lengths [tokens, Hk]) of sequences
    `bounds` [N, 2], query_lengths of all rows; `o` is not a result, only its unused rows are zeroed."""
    from jax_qla.segments import chunk_table  # which takes the constants of kernels/common.py

    chunks = jnp.asarray(chunk_table(bounds, k.shape[0]))
    keys = gather_chunks(k, chunks)
    lengths = inverse_length(keys, l2norm)
    keys, of_key = (jnp.repeat(x, ratio, axis=2) for x in (keys, lengths))
    strength = gather_chunks(beta, chunks) * of_key**2
    gamma = jnp.cumsum(jnp.maximum(gather_chunks(g, chunks), MIN_LOG_DECAY), axis=1)
    product = jnp.einsum("sihk,sjhk->sijh", keys, keys) * strength[:, :, None]
    lower = jnp.moveaxis(product * decay(gamma, strict=True), 3, 1)
    identity = jnp.broadcast_to(jnp.eye(CHUNK, dtype=lower.dtype), lower.shape)
    inverse = jax.lax.linalg.triangular_solve(
        lower + identity, identity, left_side=True, lower=True, unit_diagonal=True
    )
    inverse = jnp.moveaxis(inverse, 1, 2)
    if split:
        inverse = part_columns(inverse)
    a = pack_inverses(inverse, chunks, k.shape[0], k.dtype)
    stretches = jnp.any(strength * jnp.einsum("sihk,sihk->sih", keys, keys) > 2.001, axis=1)
    is_last = jnp.arange(CHUNK) == chunks[:, 2, None] - 1
    gamma = jnp.where(is_last[..., None], mark(gamma, stretches[:, None]), gamma)
    gamma, lengths = (scatter_chunks(x, chunks, k.shape[0], g.dtype) for x in (gamma, lengths))
    return a, gamma, lengths, inverse_length(q, l2norm) if l2norm else lengths
