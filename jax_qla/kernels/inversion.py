"""The inverse of a chunk's gated matrix, by one warp: the C++ of kernels/prepare.py that is about it.

    L_ij = beta_i <k_i, k_j> exp(gamma_i - gamma_j)   for i > j, else 0      [64, 64]   float32
    a    = (I + L)^{-1}                                                      [64, 64]   stored as kernels/inverse.py says

jax_qla_gate makes L of K K^T, of which a warp has the upper half in registers, and finds how large it is and whether a token may lengthen a state
(STRETCHES of kernels/common.py); jax_qla_invert inverts.

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
draws of a batch by 0.0 to 0.2 %, docs/performance_versions.md). Where keys are much alike and little decays, |L|^2 is some hundreds up to 2016, results
cancel, and 16 bits are needed. A row of L that is faint, since its beta is, has not got 11 bits in fp16, and the backward pass needs those. And
nothing overflows: an element of the inverse is at most some 2e4 where |L|^2 is SMALL (the worst of all L, found by ascent), fp16 ends at 6.5e4. In
float16 always by splits.

With `split`, where a has 16 bits, a product is of float32 numbers, each the sum of two of tf32 (21 bits), always: 192 mma of half the depth. By splits, the
errors of the six blocks' products were ten times those of storing a, and most of what was left of identical keys with beta 2 (docs/performance_versions.md, "Accuracy and soaks").
"""

from jax_qla.kernels.common import FAINT, STRETCHES
from jax_qla.kernels.inverse import INVERSE_PRELUDE
from jax_qla.kernels.preludes import MATRIX_PRELUDE

SMALL = 24.0
"""The sum of squares of L up to which its inverse is found by products of fp16, if no beta <k, k> is less than FAINT."""

INVERSION_PRELUDE = (
    MATRIX_PRELUDE
    + INVERSE_PRELUDE
    + f"constexpr int kStretches = {STRETCHES};\nconstexpr float kSmall = {SMALL}f, kFaint = {FAINT}f;"
    r"""
constexpr int kBlock = 1024;  // bytes of a block on the diagonal in a head's scratch, of which there are four
constexpr int kLow = 512;     // bytes from the high parts of an inverted block to its low parts
constexpr float kLimit = 2.001f;

// A 16x16 block is held by a warp as an accumulator, two 16x8 tiles: element 4 n + 2 h + e of lane l is that
// of row 8 h + l / 4, column 8 n + 2 (l % 4) + e.

// A 16x16 block as high + low, both pairs of bf16; as a left operand `high` is a0, .., a3, as a right one b0, b1 of each 8 columns ...
struct Split {
  unsigned high[4], low[4];
};
// ... and as pairs of fp16, where L is small.
struct Single {
  unsigned pairs[4];
};
// With `split`, as it is: as a left operand an accumulator, as a right one the transpose of one, columns 0 to 7 of the operand first.
struct Fine {
  float x[8];
};
__device__ __forceinline__ void jax_qla_set(Fine& s, int i, float x, float y) {
  s.x[i * 2] = x;
  s.x[i * 2 + 1] = y;
}
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
// c [16, 8] += a [16, 8] b [8, 8] of tf32; lane l has of a rows l / 4 and that + 8 of column l % 4, then of that + 4, of b these rows of column l / 4.
__device__ __forceinline__ void jax_qla_mma_tf32(float* c, const float* a, const float* b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}
// What of x tf32 has, and what that leaves.
template <int n>
__device__ __forceinline__ void jax_qla_split_tf32(float* high, float* low, const float* x) {
#pragma unroll
  for (int i = 0; i < n; ++i) {
    high[i] = __uint_as_float(__float_as_uint(x[i]) & 0xffffe000u);
    low[i] = x[i] - high[i];
  }
}
// Columns 2 l and 2 l + 1 of a, and rows of b, stand where tf32 has l and l + 4: a product does not depend on their order.
__device__ __forceinline__ void jax_qla_multiply(float* c, const Fine& a, const Fine& b) {
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const float left[4] = {a.x[k * 4], a.x[k * 4 + 2], a.x[k * 4 + 1], a.x[k * 4 + 3]};
    float high[4], low[4];
    jax_qla_split_tf32<4>(high, low, left);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float of_high[2], of_low[2];
      jax_qla_split_tf32<2>(of_high, of_low, b.x + n * 4 + k * 2);
      jax_qla_mma_tf32(c + n * 4, low, of_high);
      jax_qla_mma_tf32(c + n * 4, high, of_low);
      jax_qla_mma_tf32(c + n * 4, high, of_high);
    }
  }
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

// L^T from the upper half of K K^T; gamma in units of log2. Its blocks on the diagonal go to scratch memory as rows of 16 floats, the
// four quarters of which change places by row and block; what lies below the diagonal there is not L. Those above it become -L^T in place, and the upper
// right quarters of those on it L^T.
// Finds the sum of squares of this lane's elements of L, and of the rows whose beta <k, k> this lane has, whether that of one exceeds kLimit or is
// negative, and is less than kFaint but not 0.
__device__ __forceinline__ void jax_qla_gate(float* kk, float& norm, bool& stretches, bool& faint, const float* gamma, const float* beta, float* scratch) {
  const int lane = threadIdx.x & 31, row = lane / 4, column = lane % 4 * 2;
  const int within = row * 16 + (((column >> 2) ^ (row & 2)) << 2) + (column & 3);
  float rows[8], squares[4] = {};
  unsigned longest = 0, least = ~0u;  // as numbers of bits, of which what is negative has the highest; least of what is not 0, less 1
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
    longest = max(longest, max(__float_as_uint(of_near), __float_as_uint(of_far)));
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
  stretches = diagonal && longest > __float_as_uint(kLimit);
  faint = diagonal && least < __float_as_uint(kFaint) - 1;
}

// The inverses of the four blocks I + L on the diagonal, in place, as sums of two numbers, the second ones behind the first; if `fine` by columns, as they
// are. A lane substitutes forward in columns c and c + 8 of one block. Halves of columns change places so that ldmatrix meets no bank twice.
template <bool fine>
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
  if constexpr (fine) {
    float4* to = reinterpret_cast<float4*>(block);
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      to[column * 4 + q] = float4{x[q * 4], x[q * 4 + 1], x[q * 4 + 2], x[q * 4 + 3]};
      const float* of_far = y + (q - 2) * 4;
      to[(column + 8) * 4 + q] = q < 2 ? float4{0.f, 0.f, 0.f, 0.f} : float4{of_far[0], of_far[1], of_far[2], of_far[3]};
    }
    __syncwarp();
    return;
  }
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
// The same of an inverted block on the diagonal, a left operand.
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
// Block (i, j), an accumulator, as the sum of two numbers.
template <unsigned long long kept>
__device__ __forceinline__ void jax_qla_put_split(unsigned* to, unsigned* to_low, int i, int j, const float* block, int rows) {
  unsigned high[4], low[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) jax_qla_split(high[n], low[n], block[n * 2], block[n * 2 + 1]);
  jax_qla_put<kept>(to, i, j, high, rows);
  jax_qla_put<kept>(to_low, i, j, low, rows);
}
// An inverted block on the diagonal as a left, or a right, operand: those that are kept, or from where jax_qla_substitute<true> has put it.
template <typename Operand>
__device__ __forceinline__ const Operand& jax_qla_on_left(const Operand* kept, int i, const float*) { return kept[i]; }
template <typename Operand>
__device__ __forceinline__ const Operand& jax_qla_on_right(const Operand* kept, int i, const float*) { return kept[i]; }
__device__ __forceinline__ Fine jax_qla_on_left(const Fine*, int i, const float* scratch) {
  const int lane = threadIdx.x & 31, row = lane / 4, column = lane % 4 * 2;
  Fine s;
#pragma unroll
  for (int n = 0; n < 8; ++n) s.x[n] = scratch[i * (kBlock / 4) + (n / 4 * 8 + column + n % 2) * 16 + n / 2 % 2 * 8 + row];
  return s;
}
__device__ __forceinline__ Fine jax_qla_on_right(const Fine*, int i, const float* scratch) {
  const int lane = threadIdx.x & 31, row = lane / 4, column = lane % 4 * 2;
  Fine s;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const float2 pair = *reinterpret_cast<const float2*>(scratch + i * (kBlock / 4) + (n / 2 * 8 + row) * 16 + n % 2 * 8 + column);
    jax_qla_set(s, n, pair.x, pair.y);
  }
  return s;
}
// The inverted blocks on the diagonal as left and, but for the last, as right operands, and to memory ...
template <bool bf16, bool split, unsigned long long kept>
__device__ __forceinline__ void jax_qla_invert_diagonal(Split* left, Split* right, const float*, float* scratch, unsigned* to, unsigned* to_low, int rows) {
  jax_qla_substitute<false>(scratch);
  const int lane = threadIdx.x & 31;
  const unsigned from =
      jax_qla_address(scratch) + ((lane >> 4) * 8 + (lane & 7)) * 32 + ((((lane >> 3) ^ (lane >> 2)) & 1) << 4);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    jax_qla_load_inverse<true>(left[i], from + i * kBlock);
    jax_qla_put_diagonal<bf16, kept>(to, i, left[i], rows);
  }
#pragma unroll
  for (int j = 0; j < 3; ++j) jax_qla_load_inverse<false>(right[j], from + j * kBlock);
}
// ... as they are, to memory alone: registers are few ...
template <bool bf16, bool split, unsigned long long kept>
__device__ __forceinline__ void jax_qla_invert_diagonal(Fine* left, Fine*, const float*, float* scratch, unsigned* to, unsigned* to_low, int rows) {
  jax_qla_substitute<true>(scratch);
#pragma unroll
  for (int i = 0; i < 4; ++i) jax_qla_put_split<kept>(to, to_low, i, i, jax_qla_on_left(left, i, scratch).x, rows);
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
      jax_qla_multiply(sum[j], jax_qla_on_left(left, i, scratch), lower[jax_qla_above(j, i)]);
#pragma unroll
      for (int k = j + 1; k < i; ++k) jax_qla_multiply(sum[j], x[jax_qla_above(k, i)], lower[jax_qla_above(j, k)]);
    }
#pragma unroll
    for (int j = 3 - distance; j >= 0; --j) {
      float block[8] = {};
      Operand of_sum;
      const int n = jax_qla_above(j, j + distance);
      jax_qla_left(of_sum, sum[j]);
      jax_qla_multiply(block, of_sum, jax_qla_on_right(right, j, scratch));
      jax_qla_left(x[n], block);
      if constexpr (split) {
        jax_qla_put_split<kept>(to, to_low, j + distance, j, block, rows);
      } else {
        unsigned rounded[4];
        jax_qla_pack<bf16>(rounded, block);
        jax_qla_put<kept>(to, j + distance, j, rounded, rows);
      }
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
  jax_qla_invert_blocks<std::conditional_t<split, Fine, Split>, bf16, split, kept>(kk, scratch, a, element, rows);
}
"""
)
