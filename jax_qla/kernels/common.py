"""What the kernels share: constants, pass configuration, and TileLang macros for gates, tails and tiles.

Every kernel works on flat token arrays [tokens, heads, dim] and a table, `segments` [N, 2] = (start, end) of each sequence (jax_qla/segments.py);
those that go by chunks and not along sequences find the rows of a chunk slot in it (CHUNK_PRELUDE). A chunk tile is always loaded whole (64 rows)
with TMA; the rows beyond its sequence hold another sequence's data or nothing at all and must never reach a result, not even as 0 * NaN:
they are replaced by zeros in shared memory wherever a matrix product sums over rows.

With `l2norm`, q and k count as divided by their lengths |x| = sqrt(<x, x> + 1e-6). No kernel divides a tile: the matrix products are
of the rows as they are, and the lengths are those of the gates' vectors beside them,

    beta / |k|^2  for  beta  and  |k| V  for  V  (so that beta V becomes beta / |k| V),     scale / |q_i|  for  scale  in row i,

for beta |k|^-2 k k^T = beta k^ k^^T and k (beta |k|^-2) (|k| v) = beta k^ v with k^ = k / |k|. `a` and all states are those of normalised
keys; Vd and dX between kernels are |k| times less and more. What gradients kernels/gradients.py finds by q and k with the lengths held
constant become the whole ones by dk - k <k, dk> / |k|^2. `prepare` writes the lengths, which are kept for the backward pass, and all others
read them with the gates. (Where kernels measured the rows of their own tiles, both passes took 11 to 18 % longer than without
`l2norm`: docs/performance.md.) In bfloat16 only: lengths far from 1 would leave float16's range. (By a run-time flag, calls without it took
6 to 15 % longer where a block's latency is all that counts.)

With `split`, what meets the inverse of a chunk enters products as the sum of two bf16 numbers, high and low: `a`, X and Vd, of the
backward pass dVd and exp(gamma) beta dX; so do the states and their gradients where X, dVd or a gradient is computed from them, and dX where
dg is. Between kernels `a` and Vd then have twice their columns, the low parts behind the high ones, h and dh twice their tiles, and dh one more a chunk:
the low part of D, transposed (kernels/state_gradients.py). Of a product of two such sums that of the low parts is left out. Where beta
comes near 2 or keys are much alike, the inverse is large and what it is multiplied by cancels: the rounding of these operands is then most of
a result's error. And dg is the inner product of a state and its gradient: where one chunk has nearly all of it, it is as far off as these are.
What enters once and is rounded by itself, P and dO, is little (docs/accuracy.md).
"""

from jax_qla.kernels.inverse import KEPT

CHUNK = 64
"""Rows of a chunk. Chunks restart at every segment's first row."""

FIRST, LAST = 1, 2
"""Bits of a piece's position in its sequence."""


def state_tile_rows(key_dim: int) -> int:
    """Rows of K of a tile in `h` and `dh`, the states before all chunks and their gradients: such tiles lie one behind the other, so that what TMA
    stores at a time is contiguous."""
    return 64 if key_dim % 64 == 0 else key_dim


def map_block(key_dim: int) -> int:
    """Rows and columns of a block of a map [K, K] as kernels/compose.py takes it."""
    return 16 if key_dim % 16 == 0 else key_dim


def map_blocks_shape(key_dim: int) -> tuple[int, int]:
    """Of such a map (kernels/specification.py: map_blocks)."""
    block = map_block(key_dim)
    return 2 * (key_dim // block) ** 2, block**2


MIN_LOG_DECAY = -110.0  # exp of it is 0 in float32; clamping keeps the cumulative sums of gates exact
# A kernel of three warpgroups is launched with 168 registers a thread, so what `set_max_nreg` gives its warpgroups may add up
# to 504: an increase beyond that waits forever.
LOG2_E = 1.4426950408889634

FAINT = 2.0**-10
"""Where |beta| is less, dv = beta dX in 16 bits has not dX's precision, or is 0: such rows stay dX until kernels/gradients.py
has used them."""

LONG, SHORT = "evict_last", "evict_first"
"""How long the second-level cache is to keep what a kernel reads, and what it writes or nobody reads again, where it waits for memory. Memory that is
read and written at once is slower than either alone, and a little less so like this (docs/performance.md)."""

L2NORM_EPSILON = 1e-6
"""q and k are divided by sqrt(|x|^2 + this) where a call asks for it."""

ALWAYS, BALANCED, UNBALANCED = 0, 1, 2
"""When a kernel computes anything: always, only where sequences keep a card busy to the end (kernels/balance.py), only where they do not."""

PASS_CONFIGS: dict[str, object] = {
    "tl.disable_warp_specialized": True,  # roles are written by hand
    "tl.disable_thread_storage_sync": True,  # and so are barriers
    "tl.disable_safe_memory_legalize": True,  # the tables are in bounds by construction
}


MATRIX_PRELUDE = r"""
// Instructions, one a function.

__device__ __forceinline__ unsigned jax_qla_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }
// Four 8x8 matrices of 16-bit elements, the lanes' addresses being those of their rows.
template <bool transposed>
__device__ __forceinline__ void jax_qla_load_matrices(unsigned* r, unsigned address) {
  if constexpr (transposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
  }
}
template <bool transposed>
__device__ __forceinline__ void jax_qla_store_matrices(unsigned address, unsigned r0, unsigned r1, unsigned r2, unsigned r3) {
  if constexpr (transposed) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%4], {%0, %1, %2, %3};"
                 ::"r"(r0), "r"(r1), "r"(r2), "r"(r3), "r"(address) : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%4], {%0, %1, %2, %3};"
                 ::"r"(r0), "r"(r1), "r"(r2), "r"(r3), "r"(address) : "memory");
  }
}
// Two numbers rounded to 16 bits, the first in the lower half.
template <bool bf16>
__device__ __forceinline__ unsigned jax_qla_round(float x, float y) {
  unsigned pair;
  if constexpr (bf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
  }
  return pair;
}
__device__ __forceinline__ float jax_qla_low_half(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float jax_qla_high_half(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }
// x and y as the sum high + low of pairs of bf16.
__device__ __forceinline__ void jax_qla_split(unsigned& high, unsigned& low, float x, float y) {
  high = jax_qla_round<true>(x, y);
  low = jax_qla_round<true>(x - jax_qla_low_half(high), y - jax_qla_high_half(high));
}
// c [16, 8] += a [16, 16] b [16, 8]
template <bool bf16>
__device__ __forceinline__ void jax_qla_mma(float* c, const unsigned* a, unsigned b0, unsigned b1) {
  if constexpr (bf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}
"""


PRELUDE = (
    MATRIX_PRELUDE
    + r"""
// A warpgroup's part of a transposed tile. The tile is [64 tokens][64 columns] of 16-bit elements in shared memory, 128-byte
// swizzled; the fragment is its transpose, [64 columns][64 tokens] in the layout of a wgmma accumulator: register 4 n + 2 h + e of
// lane l in warp w holds column 16 w + 8 h + l / 4, token 8 n + 2 (l % 4) + e.
__device__ __forceinline__ unsigned jax_qla_matrix_row(const void* tile, int n) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, matrix = lane >> 3;
  const int token = n * 16 + (matrix >> 1) * 8 + (lane & 7), column = warp * 16 + (matrix & 1) * 8;
  return jax_qla_address(tile) + token * 128 + (((column >> 3) ^ (token & 7)) << 4);
}
__device__ __forceinline__ void jax_qla_load_transposed(void* registers, const void* tile) {
  unsigned* r = static_cast<unsigned*>(registers);
#pragma unroll
  for (int n = 0; n < 4; ++n) jax_qla_load_matrices<true>(r + 4 * n, jax_qla_matrix_row(tile, n));
}
// Rows from `rows` on of a tile [64][64 parts] in shared memory, whose parts of 64 columns lie one behind the other, become zero; by `threads` threads.
template <int parts>
__device__ __forceinline__ void jax_qla_zero_tail(void* tile, int rows, int thread, int threads) {
#pragma unroll
  for (int part = 0; part < parts; ++part) {
    uint4* vectors = static_cast<uint4*>(tile) + part * 512;
#pragma unroll 1
    for (int n = rows * 8 + thread; n < 512; n += threads) vectors[n] = make_uint4(0u, 0u, 0u, 0u);
  }
}
// The first `rows` rows of a tile as above, [64][64], become rows of `out`, `stride` elements apart; by `threads` threads.
template <typename T>
__device__ __forceinline__ void jax_qla_copy_rows(const void* tile, T* out, int rows, int stride, int thread, int threads) {
#pragma unroll 1
  for (int n = thread; n < rows * 8; n += threads) {
    const int row = n >> 3, vector = n & 7;
    const char* from = static_cast<const char*>(tile) + row * 128 + ((vector ^ (row & 7)) << 4);
    *reinterpret_cast<uint4*>(out + static_cast<long long>(row) * stride + vector * 8) = *reinterpret_cast<const uint4*>(from);
  }
}
"""
)


TILE_PRELUDE = (
    PRELUDE
    + r"""
#include <tl_templates/cuda/common.h>  // half_t
// What follows works on wgmma accumulators [64, 64] of a warpgroup: register 4 n + 2 h + e of lane l in warp w is at row 16 w + 8 h + l / 4,
// column 8 n + 2 (l % 4) + e. Tiles in shared memory are [64][64] of 16-bit elements, 128-byte swizzled.
__device__ __forceinline__ float jax_qla_exp2(float x) {  // exp2f without its care for results below 2^-126, which are 0 here
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
template <typename T>
__device__ __forceinline__ unsigned jax_qla_pack(float low, float high) {
  return jax_qla_round<!std::is_same_v<T, half_t>>(low, high);
}
// tile_ij = x_ij or, if transposed, tile_ji = x_ij, rounded: pair(i) are elements 2 i and 2 i + 1 of this lane's part of x.
template <bool transposed, typename Pair>
__device__ __forceinline__ void jax_qla_store_pairs(const void* tile, Pair pair) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, matrix = lane >> 3;
  const int row = (transposed ? (matrix >> 1) * 8 : warp * 16 + (matrix & 1) * 8) + (lane & 7);
  const unsigned rows = jax_qla_address(tile) + row * 128;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int column = transposed ? warp * 2 + (matrix & 1) : 2 * n + (matrix >> 1);  // of 8
    jax_qla_store_matrices<transposed>(rows + (transposed ? n * 2048 : 0) + ((column ^ (lane & 7)) << 4), pair(4 * n), pair(4 * n + 1),
                                       pair(4 * n + 2), pair(4 * n + 3));
  }
}
template <typename T>
__device__ __forceinline__ void jax_qla_store_tile(const void* registers, T* tile) {
  const float* x = static_cast<const float*>(registers);
  jax_qla_store_pairs<false>(tile, [x](int i) { return jax_qla_pack<T>(x[2 * i], x[2 * i + 1]); });
}
template <typename T>
__device__ __forceinline__ void jax_qla_store_transposed(const void* registers, T* tile) {
  const float* x = static_cast<const float*>(registers);
  jax_qla_store_pairs<true>(tile, [x](int i) { return jax_qla_pack<T>(x[2 * i], x[2 * i + 1]); });
}
// The same of what is rounded already: columns 64 `part` to 64 `part` + 63 of the left operand of a wgmma in registers.
template <bool transposed>
__device__ __forceinline__ void jax_qla_store_operand(const void* registers, int part, void* tile) {
  const unsigned* pairs = static_cast<const unsigned*>(registers) + part * 16;
  jax_qla_store_pairs<transposed>(tile, [pairs](int i) { return pairs[i]; });
}
"""
)


P_PRELUDE = (
    TILE_PRELUDE
    + r"""
// P_ij = scale (query_i, if normed) product_ij exp(gamma_i - gamma_j) of one chunk, for i >= j, else 0. `product`: this thread's part of Q K^T, a
// wgmma accumulator [64, 64]; gamma in units of log2; `tile` [64][64] in shared memory, 128-byte swizzled, in the layout that wgmma reads. Rows
// beyond the sequence, where the product and gamma are 0, are not numbers where the decay is strong, unless `padded`: then they are 0. P^T reads them.
template <bool normed, bool padded, typename T>
__device__ __forceinline__ void jax_qla_store_decayed(const void* product, const float* gamma, float scale, const float* query, T* tile) {
  const float* p = static_cast<const float*>(product);
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, top = warp * 16 + lane / 4;
  const float near = gamma[top], far = gamma[top + 8];
  const float of_near = normed ? scale * query[top] : scale, of_far = normed ? scale * query[top + 8] : scale;
  const auto decay = [](float x) { return jax_qla_exp2(padded ? fminf(x, 0.f) : x); };
  const int to = warp * 16 + (lane >> 3 & 1) * 8 + (lane & 7);  // the row that this lane points stmatrix at
  const unsigned row = jax_qla_address(tile) + to * 128;
#pragma unroll
  for (int n = 0; n < 8; n += 2) {
    unsigned r[4] = {0, 0, 0, 0};
    if (n <= warp * 2) {  // tiles above the diagonal are zero
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const int column = (n + m) * 8 + lane % 4 * 2;
        const float2 from = *reinterpret_cast<const float2*>(gamma + column);
        const float* x = p + (n + m) * 4;
        const float a = top >= column ? x[0] * of_near * decay(near - from.x) : 0.f;
        const float b = top > column ? x[1] * of_near * decay(near - from.y) : 0.f;
        const float c = top + 8 >= column ? x[2] * of_far * decay(far - from.x) : 0.f;
        const float d = top + 8 > column ? x[3] * of_far * decay(far - from.y) : 0.f;
        r[m * 2] = jax_qla_pack<T>(a, b);
        r[m * 2 + 1] = jax_qla_pack<T>(c, d);
      }
    }
    jax_qla_store_matrices<false>(row + (((n + (lane >> 4)) ^ (to & 7)) << 4), r[0], r[1], r[2], r[3]);
  }
}
"""
)


CHUNK_PRELUDE = (
    f"constexpr int kChunk = {CHUNK};"
    r"""
// A chunk slot's {first row, rows, rows of no sequence that follow} (jax_qla/segments.py: chunk_table), from the `count` sequences' [start, end).
// To be called by whole warps, whose lanes look for the slot's sequence together; up to 30 sequences take one load, which goes by no number of the
// block, so that it is under way while these are computed.
__device__ __forceinline__ void jax_qla_find_chunk(void* found, const int* segments, int count, int tokens, int slot) {
  const int2* bounds = reinterpret_cast<const int2*>(segments);
  const int lane = threadIdx.x & 31;
  const auto at = [=](int i) { return i < 0 ? make_int2(0, 0) : i < count ? bounds[i] : make_int2(tokens, tokens); };
  int n = -1, beyond = count;  // a sequence that begins at the slot or before, -1 being the rows before them all; one that does not
  int2 mine = at(n + lane);
  if (beyond - n > 31) {
    do {
      const int step = (beyond - n + 30) / 32, candidate = n + 1 + lane * step;
      const bool begun = candidate < beyond && bounds[candidate].x / kChunk + candidate + 1 <= slot;
      const int steps = __popc(__ballot_sync(0xffffffffu, begun));
      beyond = min(beyond, n + 1 + steps * step);
      if (steps > 0) n += 1 + (steps - 1) * step;
    } while (beyond - n > 31);
    mine = at(n + lane);
  }
  const int candidate = n + lane;
  const bool begun = lane == 0 || (candidate < beyond && mine.x / kChunk + candidate + 1 <= slot);
  const int last_begun = __popc(__ballot_sync(0xffffffffu, begun)) - 1;
  n += last_begun;
  const int start = __shfl_sync(0xffffffffu, mine.x, last_begun), end = __shfl_sync(0xffffffffu, mine.y, last_begun);
  const int gap_end = __shfl_sync(0xffffffffu, mine.x, last_begun + 1);
  const int chunk = slot - (n < 0 ? 0 : start / kChunk + n + 1), last = max((end - start + kChunk - 1) / kChunk, 1) - 1;
  const int fill = min(end + max(chunk - last, 0) * kChunk, gap_end);
  int* x = static_cast<int*>(found);
  x[0] = chunk <= last ? start + chunk * kChunk : fill;
  x[1] = min(max(end - start - chunk * kChunk, 0), kChunk);
  x[2] = chunk >= last ? min(max(gap_end - fill, 0), kChunk) : 0;
}
"""
)


STRETCHES = 1
"""The lowest bit of the gamma of a chunk's last row: some token of the chunk may lengthen a state, beta <k, k> being above 2 or negative."""

FORGOTTEN = -17.0
"""Log of the factor below which what a state contributes to a later one is left out: 4e-8, and float32 rounds by 6e-8."""

SLOW = FORGOTTEN / 16
"""A head whose gates up to the batch's 64th row, from where their sums begin, add up to more may be one of which many chunks matter:
kernels that go by pieces begin with the blocks of such heads. Nothing but time depends on it."""

NTH_PRELUDE = r"""
// The `index`-th (from 0) of first .. end - 1 for which `is` holds; there are so many. To be called by whole warps, whose lanes ask for one each.
template <typename F>
__device__ __forceinline__ int jax_qla_nth(int first, int end, int index, const F& is) {
  const int lane = threadIdx.x & 31;
  int n = first;
  for (int base = first; base < end; base += 32) {
    const bool mine = base + lane < end && is(base + lane);
    const unsigned alike = __ballot_sync(0xffffffffu, mine);
    const unsigned found = __ballot_sync(0xffffffffu, mine && __popc(alike & ((1u << lane) - 1)) == index);
    if (found != 0) n = base + __ffs(found) - 1;
    index -= __popc(alike);
  }
  return n;
}
// How many of 0 .. count - 1 `is` holds for. To be called by whole warps.
template <typename F>
__device__ __forceinline__ int jax_qla_count(int count, const F& is) {
  const int lane = threadIdx.x & 31;
  int those = 0;
  for (int base = 0; base < count; base += 32) those += __popc(__ballot_sync(0xffffffffu, base + lane < count && is(base + lane)));
  return those;
}
// Which of them comes at `index` in an order that has those first for which `is` holds. To be called by whole warps.
template <typename F>
__device__ __forceinline__ int jax_qla_those_first(int count, int index, const F& is) {
  const int those = jax_qla_count(count, is);
  const bool wanted = index < those;
  return jax_qla_nth(0, count, wanted ? index : index - those, [&](int n) { return is(n) == wanted; });
}
"""


ORDER_PRELUDE = (
    NTH_PRELUDE + f"constexpr float kSlow = {SLOW}f;"
    r"""
// Which of `heads` heads comes at `index` in an order that has those first whose element of `sums` exceeds kSlow. To be called by whole warps.
__device__ __forceinline__ int jax_qla_slow_first(const float* sums, int heads, int index) {
  return jax_qla_those_first(heads, index, [&](int head) { return sums[head] > kSlow; });
}
"""
)


LENGTH_PRELUDE = (
    NTH_PRELUDE
    + r"""
// Which of `count` sequences (first row and end of each) comes at `place`, the longest first. Of more than 32 sequences those come first that are
// longer than twice the mean of `tokens`, then those longer than it, then than half of it, among every 256 that follow one another. As they are where
// the mean is less than a chunk. To be called by whole warps. Blocks begin as they are numbered, and take as long as their sequences: so the card need
// not wait for a long one that began last. Nothing but time depends on it.
__device__ __forceinline__ int jax_qla_long_first(const int* segments, int count, int tokens, int place) {
  const int lane = threadIdx.x & 31;
  const auto length = [=](int n) { return n < count ? segments[2 * n + 1] - segments[2 * n] : 0; };
  const int early = length(lane);  // which goes by no number of the block, so that it is under way while these are computed
  if (tokens / 64 < count) return place;
  if (count <= 32) {
    int before = 0;  // as many come before this lane's
    for (int base = 0; base < count; base += 8) {
#pragma unroll
      for (int n = base; n < base + 8; ++n) {
        const int other = __shfl_sync(0xffffffffu, early, n);
        before += other > early || (other == early && n < lane);
      }
    }
    return __ffs(__ballot_sync(0xffffffffu, before == place)) - 1;
  }
  const int window = place & ~255, end = min(window + 256, count);
  const auto rank = [&](int n, int length_of_n) {  // 0 of the longest, 4 of none
    if (n >= end) return 4;
    const float length = static_cast<float>(length_of_n) * count, mean = tokens;
    return length > 2.f * mean ? 0 : length > mean ? 1 : length > .5f * mean ? 2 : 3;
  };
  const int first = rank(window + lane, window == 0 ? early : length(window + lane));
  int sizes[3];
#pragma unroll
  for (int i = 0; i < 3; ++i) sizes[i] = __popc(__ballot_sync(0xffffffffu, first == i));
  for (int base = window + 32; base < end; base += 32) {
    const int found = rank(base + lane, length(base + lane));
#pragma unroll
    for (int i = 0; i < 3; ++i) sizes[i] += __popc(__ballot_sync(0xffffffffu, found == i));
  }
  int before = place - window, wanted = 0;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    if (sizes[i] == end - window) return place;  // all are alike
    if (wanted == i && before >= sizes[i]) {
      before -= sizes[i];
      ++wanted;
    }
  }
  return jax_qla_nth(window, end, before, [&](int n) { return (n < window + 32 ? first : rank(n, length(n))) == wanted; });
}
"""
)


REACH_PRELUDE = (
    ORDER_PRELUDE + f"constexpr int kStretches = {STRETCHES};"
    r"""
// Over how many of the `count` chunks of the piece of rows [start, end) of a head, from its end or its beginning, what bounds their
// effect on the state (kernels/prepare.py) adds up to less than `limit`; -1 if all together do not. `gamma` is the head's first
// element, `heads` the distance of rows. To be called by whole warps.
template <bool from_end>
__device__ __forceinline__ int jax_qla_reach(const float* gamma, int heads, int start, int end, int count, float limit) {
  const int lane = threadIdx.x & 31;
  float total = 0.f;
  int reach = -1;
  for (int base = 0; base < count; base += 32) {
    const bool inside = base + lane < count;
    const int chunk = from_end ? count - 1 - (base + lane) : base + lane;
    float x = inside ? gamma[static_cast<long long>(min(start + chunk * 64 + 64, end) - 1) * heads] : 0.f;
    if (__float_as_int(x) & kStretches) x = __int_as_float(0x7f800000);  // marked: no bound
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float before = __shfl_up_sync(0xffffffffu, x, step);
      if (lane >= step) x += before;
    }
    x += total;
    const unsigned below = __ballot_sync(0xffffffffu, inside && x < limit);
    if (reach < 0 && below != 0) reach = base + __ffs(below);
    total = __shfl_sync(0xffffffffu, x, 31);
  }
  return total < limit ? reach : -1;
}
"""
)


def accumulator_layout(columns: int, first_thread: int = 0, rows: int = 64):
    """The fragment layout of a wgmma accumulator [rows, columns] of the warpgroups, one for every 64 rows, that begin at `first_thread`, for a
    fragment whose registers C++ functions take.

    TileLang drops, without a word, a loop that writes or reads such a fragment alone when `first_thread` is wrong, and a loop over
    a part of one's columns beside another: look at the CUDA source (`build --keep-sources`).
    """
    from tilelang.layout import Fragment

    return Fragment(
        (rows, columns),
        forward_thread_fn=lambda i, j: first_thread + i // 16 * 32 + i % 8 * 4 + j % 8 // 2,
        forward_index_fn=lambda i, j: j // 8 * 4 + i % 16 // 8 * 2 + j % 2,
    )


def macros():
    """TileLang macros, built on demand so that importing a kernel module needs no TileLang."""
    from types import SimpleNamespace

    import tilelang.language as T

    C = CHUNK

    @T.macro
    def leave_unless(only, balanced):
        """All threads return, after what the kernel waits for, unless the sequences are as `only` says: balanced, or not."""
        if only != ALWAYS:
            found = T.alloc_var("int32")
            # A vote: ptxas knows that all of a warp leave, or none.
            found = T.call_extern("int32", "__any_sync", T.uint32(0xFFFFFFFF), balanced[0])
            if found != T.Select(only == BALANCED, 1, 0):
                T.pdl_sync()
                T.thread_return()

    def chunks_that_matter(gamma, heads, head, start, end, chunks, from_end):
        """Of a piece's `chunks`, how many at its end, or its beginning, may matter to the state after it, or the gradient before it: -1, all of them."""
        name = f"jax_qla_reach<{'true' if from_end else 'false'}>"
        return T.call_extern(
            "int32", name, T.address_of(gamma[0, head]), heads, start, end, chunks, T.float32(FORGOTTEN)
        )

    @T.macro
    def fetch_gates(gamma, beta, row, rows, head, thread, fetched):
        """Threads 0..63 read gamma of their row and of the last, and beta, into `fetched` [3] (registers): nothing here waits for them."""
        if thread < rows:
            fetched[0] = gamma[row + thread, head]
            fetched[1] = gamma[row + rows - 1, head]
            fetched[2] = beta[row + thread, head]

    @T.macro
    def store_gates(fetched, rows, thread, stage, gamma_s, rise_s, fall_s, beta_s):
        """Threads 0..63 write gamma (in units of log2), exp(gamma), exp(gamma_C - gamma) and beta of one chunk; 0 beyond `rows`."""
        if thread < C:
            if thread < rows:
                gamma_s[stage, thread] = fetched[0] * T.float32(LOG2_E)
                rise_s[stage, thread] = T.exp2(fetched[0] * T.float32(LOG2_E))
                fall_s[stage, thread] = T.exp2(fetched[1] * T.float32(LOG2_E) - fetched[0] * T.float32(LOG2_E))
                beta_s[stage, thread] = fetched[2]
            else:
                gamma_s[stage, thread] = 0.0
                rise_s[stage, thread] = 0.0
                fall_s[stage, thread] = 0.0
                beta_s[stage, thread] = 0.0

    @T.macro
    def load_rows(source, row, head, first, width, tiles, stage, loaded, kept=None):
        """One warp has TMA load rows row..row + 64, columns first..first + `width` of `source` into tile `stage` of `tiles`; the barrier
        loaded[stage] counts the bytes. How long the second-level cache should keep them is `kept`."""
        T.tma_copy(
            source[row : row + C, head, first : first + width],
            tiles[stage, :, :],
            barrier=loaded[stage],
            leader_scope_threads=32,
            eviction_policy=kept,
        )

    @T.macro
    def load_inverse(a, head, row, rows, part, tiles, stage, loaded, kept=None):
        """One warp has the inverse of a chunk of `rows` rows loaded, or its low `part` (1), which begins at row `row` of `a`, into tile
        `stage` of `tiles`; as `load_rows`."""
        T.call_extern(
            "handle",
            f"jax_qla_fetch_inverse<{KEPT[kept]}>",
            T.access_ptr(tiles[stage, 0, 0], "r"),  # else TileLang puts a fence before each load that follows
            loaded[stage],
            T.address_of(a[0, 0, 0]),
            (T.cast(head, "int64") * a.shape[1] + row) * a.shape[2] + part * rows * C,
            rows,
        )

    @T.macro
    def load_inverses(a, start, end, count, head, last_first, stages, shared):
        """One warp, which does nothing else, has the inverses of a sequence's chunks loaded, in their order or the last one first. `shared`
        holds a kernel's tiles and barriers by their names; `low_s`, unless it is None, is for the low parts."""
        for c in T.serial(count):
            at = c % stages
            row = start + (count - 1 - c) * C if last_first else start + c * C
            rows = T.min(end - row, C)
            if c >= stages:
                T.barrier_wait(shared.free[at], (c // stages + 1) % 2)
            load_inverse(a, head, row, rows, 0, shared.a_s, at, shared.loaded, LONG)
            if shared.low_s is not None:
                load_inverse(a, head, row, rows, 1, shared.low_s, at, shared.loaded, LONG)
            T.barrier_arrive(shared.loaded[at])

    @T.macro
    def multiply_inverse(x, tiles, stage, u, transposed, clear):
        """Begins u += x a^T, with `transposed` u += x a, with `clear` u = ..., of an inverse in tile `stage` of `tiles`. The fragments must have
        `accumulator_layout`."""
        T.call_extern(
            "handle",
            f"jax_qla_multiply_inverse<{'true' if transposed else 'false'}, {'true' if clear else 'false'}>",
            u.data,
            x.data,
            T.access_ptr(tiles[0, 0, 0], "r"),
            stage,
        )

    @T.macro
    def multiply_lower(x, tiles, stage, u):
        """Begins u = x t, of a lower triangular tile t [64, 64], `stage` of `tiles` (kernels/products.py). As for `multiply_inverse`."""
        T.call_extern("handle", "jax_qla_multiply_lower", u.data, x.data, T.access_ptr(tiles[0, 0, 0], "r"), stage)

    @T.macro
    def forget(u):
        """What an accumulator [64, 64] of a warpgroup holds is not needed any more, and a product of 64 columns follows one with a triangular
        matrix, or may (kernels/products.py)."""
        T.call_extern("handle", "jax_qla_forget", u.data)

    @T.macro
    def zero_above(tiles, low, stages, thread, threads):
        """What of tiles of inverses, and of those of their low parts unless `low` is None, no load writes becomes zero."""
        for x in T.unroll(stages):
            T.call_extern("handle", "jax_qla_zero_above", T.address_of(tiles[x, 0, 0]), thread, threads)
            if low is not None:
                T.call_extern("handle", "jax_qla_zero_above", T.address_of(low[x, 0, 0]), thread, threads)

    @T.macro
    def zero_beyond(tiles, low, stage, rows, thread, threads):
        """`zero_tail` of an inverse, and of its low part unless `low` is None."""
        T.call_extern("handle", "jax_qla_zero_beyond", T.address_of(tiles[stage, 0, 0]), rows, thread, threads)
        if low is not None:
            T.call_extern("handle", "jax_qla_zero_beyond", T.address_of(low[stage, 0, 0]), rows, thread, threads)

    @T.macro
    def zero_tail(tiles, stage, rows, width, thread, threads):
        """Rows `rows`.. of tile `stage` of tiles [stages, 64, width] in shared memory become zero."""
        T.call_extern(
            "handle",
            f"jax_qla_zero_tail<{width // 64}>",
            T.access_ptr(tiles[stage, 0, 0], "r"),  # else TileLang puts a fence before what follows, which has one
            rows,
            thread,
            threads,
        )

    @T.macro
    def keep_low(x, high, low):
        """low = x - high, elements of a fragment [.., 64] in float32 and of its rounding."""
        for i, j in T.Parallel(x.shape[0], C):
            low[i, j] = T.cast(x[i, j] - T.cast(high[i, j], "float32"), low.dtype)

    @T.macro
    def begin_correction(u, of_values, factors, x, a, at, low, of_low):
        """Begins Vd^T = X^T a^T, to `u`, which holds U^T: X^T = of_values + factors U^T, rounded to `x`, a the tile a[at]. Where operands are
        split, `low` becomes X^T's low part and of_low[at] is a's; else both are None."""
        if low is None:
            for i, j in T.Parallel(u.shape[0], C):
                x[i, j] = of_values[i, j] + factors[j] * u[i, j]
            multiply_inverse(x, a, at, u, False, True)
        else:
            for i, j in T.Parallel(u.shape[0], C):
                u[i, j] = of_values[i, j] + factors[j] * u[i, j]
            T.copy(u, x)
            keep_low(u, x, low)
            multiply_inverse(x, a, at, u, False, True)
            multiply_inverse(low, a, at, u, False, False)
            multiply_inverse(x, of_low, at, u, False, False)

    @T.macro
    def begin_update(state, u, factors, rounded, k, at, low):
        """Begins state += (factors u) k, of the tile k[at], by way of `rounded` and, unless it is None, its low part."""
        for i, j in T.Parallel(u.shape[0], C):
            rounded[i, j] = u[i, j] * factors[j]
        T.wgmma_gemm(rounded, k[at, :, :], state, policy=T.GemmWarpPolicy.FullRow)
        if low is not None:
            for i, j in T.Parallel(u.shape[0], C):
                low[i, j] = T.cast(u[i, j] * factors[j] - T.cast(rounded[i, j], "float32"), low.dtype)
            T.wgmma_gemm(low, k[at, :, :], state, policy=T.GemmWarpPolicy.FullRow)

    @T.macro
    def send_rows(tiles, stage, column, target, row, rows, head, first, thread, kept=None, threads=128):
        """`threads` threads write columns column..column + 64 of tile `stage` of tiles [stages, 64, width] in shared memory to `target[row.., head, first..]`:
        the whole tile by TMA, with `kept` as in `load_rows`, or if there are less than 64 `rows`, these, by ordinary stores of 16 bytes."""
        if rows >= C:
            T.tma_copy(
                tiles[stage, :, column : column + 64],
                target[row : row + C, head, first : first + 64],
                leader_scope_threads=threads,
                eviction_policy=kept,
            )
        else:
            T.call_extern(
                "handle",
                "jax_qla_copy_rows",
                T.access_ptr(tiles[stage, 0, column], "r"),
                T.access_ptr(target[row, head, first], "w"),
                rows,
                target.shape[1] * target.shape[2],
                thread,
                threads,
            )

    @T.macro
    def put_state(rounded, tiles, stage):
        """A warpgroup's `rounded` [64, K], the left operand of a wgmma in registers, becomes tile `stage` of tiles [stages, 64, K] in shared memory. ("r":
        else TileLang puts a fence, 0.1 us, before the next wgmma. Who sends the tile has one.)"""
        for x in T.unroll(rounded.shape[1] // 64):
            T.call_extern(
                "handle", "jax_qla_store_operand<false>", rounded.data, x, T.access_ptr(tiles[stage, 0, x * 64], "r")
            )

    @T.macro
    def multiply_state_split(state, rounded, k, at, u, tiles):
        """Begins U^T = S^T k^T of the tile k[at], of a state that is the sum of two numbers: with the low part in `rounded`, which is awaited, as is
        all that was begun before, and then with the high part, with which `rounded` is left. Unless `tiles` is None, the low part becomes tile 1
        of it (`put_state`)."""
        for i, j in T.Parallel(state.shape[0], state.shape[1]):
            rounded[i, j] = T.cast(state[i, j] - T.cast(T.cast(state[i, j], rounded.dtype), "float32"), rounded.dtype)
        forget(u)
        T.wgmma_gemm(rounded, k[at, :, :], u, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
        if tiles is not None:
            put_state(rounded, tiles, 1)
        T.wait_wgmma(0)
        T.copy(state, rounded)
        T.wgmma_gemm(rounded, k[at, :, :], u, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)

    @T.macro
    def put_rows(x, tiles, stage, column):
        """A warpgroup's x, a wgmma accumulator [64 columns, 64 rows], becomes columns column..column + 64 of tile `stage` of tiles [stages, 64, width] in shared
        memory. As `put_state`."""
        T.call_extern("handle", "jax_qla_store_transposed", x.data, T.access_ptr(tiles[stage, 0, column], "r"))

    @T.macro
    def send_state(tiles, stage, column, target, slot, head, part, first, threads=128):
        """`threads` threads have TMA write columns column..column + 64, rows of K, of tile `stage` of tiles [stages, 64, width] in shared memory, whose
        rows are value columns, to tile `part` of a slot's state in `target`, h or dh, from value column `first` on."""
        T.tma_copy(
            tiles[stage, :, column : column + 64],
            target[slot, head, part, first : first + 64, 0:64],
            leader_scope_threads=threads,
            eviction_policy=SHORT,
        )

    @T.macro
    def send_results(states, rows, low, start, end, count, slot, held, head, first, last_first, lane, sent, last=None):
        """One warp, which does nothing else, sends what a recurrence leaves of a sequence's chunks, in their order or the last one first: the state, unless
        `states` is None, to that, h or dh, of which `slot` is the first chunk's, for its head `held`, and O, Vd or dv to `rows`, for its head `head`, from
        value column `first` on. The low part's columns, unless `low` is None, begin there. `sent` holds by their names the tiles by which these leave,
        [1, 64, K], of two parts [2, 64, K], and [2, 64, 64], and their barriers, of 128 arrivals when they are there, and of 32 when they have left: when a
        state has left, so have the rows of the chunk before. Unless it is None, `last` [2, 64, 64] comes with the rows, a slot's last tile. So the state's warpgroup neither waits for what it sends nor for all its warps."""
        for c in T.serial(count):
            chunk = count - 1 - c if last_first else c
            row = start + chunk * C
            if states is not None:
                T.barrier_wait(sent.state_full[0], c % 2)
                T.fence_proxy_async()
                for part in T.unroll(sent.state_s.shape[0]):  # high, low
                    for x in T.unroll(sent.state_s.shape[2] // 64):
                        send_state(
                            *(sent.state_s, part, x * 64, states, slot + chunk, held),
                            *(part * (sent.state_s.shape[2] // 64) + x, first, 32),
                        )
                T.tma_store_wait(0)
                T.barrier_arrive(sent.state_free[0])
            T.barrier_wait(sent.rows_full[c % 2], c // 2 % 2)
            T.fence_proxy_async()
            send_rows(sent.rows_s, c % 2, 0, rows, row, T.min(end - row, C), head, first, lane, SHORT, 32)
            if low is not None:
                send_rows(sent.low_s, c % 2, 0, rows, row, T.min(end - row, C), head, low + first, lane, SHORT, 32)
            if last is not None:
                send_state(last, c % 2, 0, states, slot + chunk, held, states.shape[2] - 1, first, 32)
            T.tma_store_wait(0)
            if states is None:
                T.barrier_arrive(sent.rows_free[c % 2])

    @T.macro
    def tiles_in_order(key_dim, value_columns, stages, dtype, split, loaders, readers):
        """A kernel's tiles, vectors and barriers for `prepare_in_order`: so many threads arrive when tiles are `loaded`, and free them."""
        k_s = T.alloc_shared((stages, C, key_dim), dtype)
        v_s = T.alloc_shared((stages, C, value_columns), dtype)
        a_s = T.alloc_shared((stages, C, C), dtype)
        if split:
            low_s = T.alloc_shared((stages, C, C), dtype)  # the low part of a
        gamma_s = T.alloc_shared((stages, C), "float32")
        rise_s = T.alloc_shared((stages, C), "float32")
        fall_s = T.alloc_shared((stages, C), "float32")
        beta_s = T.alloc_shared((stages, C), "float32")  # over |k| if keys are normalised
        drop_s = T.alloc_shared((stages, C), "float32")  # -exp(gamma) beta, over |k|^2 if they are
        loaded = T.alloc_barrier([loaders] * stages)
        ready = T.alloc_barrier([64] * stages)
        free = T.alloc_barrier([readers] * stages)
        return SimpleNamespace(
            k_s=k_s,
            v_s=v_s,
            a_s=a_s,
            low_s=low_s if split else None,
            gamma_s=gamma_s,
            rise_s=rise_s,
            fall_s=fall_s,
            beta_s=beta_s,
            drop_s=drop_s,
            loaded=loaded,
            ready=ready,
            free=free,
        )

    @T.macro
    def prepare_in_order(
        gamma, beta, lengths, start, end, count, head, key_head, thread, stages, normed, halfway, shared
    ):
        """64 threads, a row each, fetch the gates of a sequence's chunks and make ready for the state what is `loaded`: rows beyond the sequence become
        0. `shared` holds a kernel's tiles, vectors and barriers by their names: of the gates drop = -exp(gamma) beta, over |k|^2 if keys are
        `normed`, and beta, over |k| if they are. All of it is there when `ready`, so that who waits for that need not wait for `loaded`. `low_s`,
        unless it is None, holds the low part of `a`. Where `halfway`, unless it is None, is true, half of the chunks come before the kernel launched
        before has ended, and the next one may begin behind them."""
        zero_above(shared.a_s, shared.low_s, stages, thread, 64)
        T.fence_proxy_async()
        fetched = T.alloc_local((3,), "float32")  # gates of the chunk to come
        of_key = T.alloc_local((1,), "float32")  # and 1 / |k|
        # Variables, for TileLang would write these out wherever they are used, for which there are no registers.
        rows = T.alloc_var("int32")  # of the chunk
        after = T.alloc_var("int32")  # and of the one to come
        fetch_gates(gamma, beta, start, T.min(end - start, C), head, thread, fetched)
        if normed:
            if thread < T.min(end - start, C):
                of_key[0] = lengths[start + thread, key_head]
        for c in T.serial(count):
            at = c % stages
            rows = T.min(end - (start + c * C), C)
            after = T.min(end - (start + (c + 1) * C), C)
            if halfway is not None:
                if c == count // 2:
                    if halfway:
                        T.pdl_sync()
                        T.pdl_trigger()
            if c >= stages:
                T.barrier_wait(shared.free[at], (c // stages + 1) % 2)
            store_gates(fetched, rows, thread, at, shared.gamma_s, shared.rise_s, shared.fall_s, shared.beta_s)
            shared.drop_s[at, thread] = -(shared.rise_s[at, thread] * shared.beta_s[at, thread])
            if normed:
                # X = beta / |k| V - exp(gamma) beta / |k|^2 K S
                if thread < rows:
                    shared.beta_s[at, thread] = shared.beta_s[at, thread] * of_key[0]
                    shared.drop_s[at, thread] = shared.drop_s[at, thread] * (of_key[0] * of_key[0])
                if thread < after:
                    of_key[0] = lengths[start + (c + 1) * C + thread, key_head]
            fetch_gates(gamma, beta, start + (c + 1) * C, after, head, thread, fetched)
            T.barrier_wait(shared.loaded[at], c // stages % 2)
            if rows < C:
                zero_tail(shared.k_s, at, rows, shared.k_s.shape[2], thread, 64)
                zero_tail(shared.v_s, at, rows, shared.v_s.shape[2], thread, 64)
                zero_beyond(shared.a_s, shared.low_s, at, rows, thread, 64)
                T.fence_proxy_async()
            T.barrier_arrive(shared.ready[at])

    @T.macro
    def tiles_last_first(key_dim, value_columns, stages, dtype, split, l2norm, gives_dv, readers):
        """A kernel's tiles, vectors and barriers for `load_last_first`, `load_inverses`, `gates_last_first` and `prepare_last_first`: so many threads free
        them."""
        q_s = T.alloc_shared((stages, C, key_dim), dtype)
        k_s = T.alloc_shared((stages, C, key_dim), dtype)
        do_s = T.alloc_shared((stages, C, value_columns), dtype)
        a_s = T.alloc_shared((stages, C, C), dtype)  # without its diagonal
        if split:
            low_s = T.alloc_shared((stages, C, C), dtype)  # its low part
        p_s = T.alloc_shared((2, C, C), dtype)  # a third would not fit
        gamma_s = T.alloc_shared((stages, C), "float32")
        rise_s = T.alloc_shared((stages, C), "float32")
        fall_s = T.alloc_shared((stages, C), "float32")
        beta_s = T.alloc_shared((stages, C), "float32")
        drop_s = T.alloc_shared((stages, C), "float32")  # -exp(gamma) beta, over |k|^2 if keys are normalised
        query_s = T.alloc_shared((stages, C), "float32") if l2norm else gamma_s  # 1 / |q|, else not needed
        lift_s = T.alloc_shared((stages, C), "float32")  # scale exp(gamma), over |q| if queries are normalised
        if gives_dv:
            out_s = T.alloc_shared((stages, C), "float32")  # factor of dX in dv
        loaded = T.alloc_barrier([64] * stages)
        gated = T.alloc_barrier([64] * stages)
        ready = T.alloc_barrier([128] * stages)
        free = T.alloc_barrier([readers] * stages)
        taken = T.alloc_barrier([readers] * 2)
        return SimpleNamespace(
            q_s=q_s,
            k_s=k_s,
            a_s=a_s,
            low_s=low_s if split else None,
            do_s=do_s,
            p_s=p_s,
            gamma_s=gamma_s,
            rise_s=rise_s,
            fall_s=fall_s,
            beta_s=beta_s,
            drop_s=drop_s,
            lift_s=lift_s,
            out_s=out_s if gives_dv else None,
            query_s=query_s,
            loaded=loaded,
            taken=taken,
            gated=gated,
            ready=ready,
            free=free,
        )

    @T.macro
    def load_last_first(q, k, do, start, count, key_head, head, first, stages, shared):
        """One warp has TMA load the tiles of a sequence's chunks but the inverse, the last chunk first, of dO the columns from `first` on."""
        for c in T.serial(count):
            if c >= stages:
                T.barrier_wait(shared.free[c % stages], (c // stages + 1) % 2)
            # Not by a loop: TileLang would call these operands what the loop calls them.
            load_rows(
                k,
                start + (count - 1 - c) * C,
                key_head,
                0,
                shared.k_s.shape[2],
                shared.k_s,
                c % stages,
                shared.loaded,
                LONG,
            )
            load_rows(
                q,
                start + (count - 1 - c) * C,
                key_head,
                0,
                shared.q_s.shape[2],
                shared.q_s,
                c % stages,
                shared.loaded,
                LONG,
            )
            load_rows(
                do,
                start + (count - 1 - c) * C,
                head,
                first,
                shared.do_s.shape[2],
                shared.do_s,
                c % stages,
                shared.loaded,
                LONG,
            )
            T.barrier_arrive(shared.loaded[c % stages])

    @T.macro
    def fetch_lengths(lengths, query_lengths, row, rows, key_head, thread, of_rows):
        """Threads 0..63 read 1 / |k| and 1 / |q| of their row into `of_rows` [2] (registers): nothing here waits for them."""
        if thread < rows:
            of_rows[0] = lengths[row + thread, key_head]
            of_rows[1] = query_lengths[row + thread, key_head]

    @T.macro
    def gates_last_first(
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
        thread,
        stages,
        normed,
        shared,
    ):
        """64 threads, a row each, fetch the gates of the chunks that `load_last_first` loads. `shared` holds a kernel's tiles, vectors and barriers
        by their names: of the gates drop = -exp(gamma) beta, over |k|^2 if keys are `normed`, lift = scale exp(gamma), over |q| if queries
        are, and, unless it is None, `out_s`: the factor of dX in dv. They are there when `gated`."""
        fetched = T.alloc_local((3,), "float32")  # gates of the chunk to come
        of_rows = T.alloc_local((2,), "float32")  # and 1 / |k|, 1 / |q|
        if count > 0:
            last = start + (count - 1) * C
            fetch_gates(gamma, beta, last, T.min(end - last, C), head, thread, fetched)
            if normed:
                fetch_lengths(lengths, query_lengths, last, T.min(end - last, C), key_head, thread, of_rows)
        for c in T.serial(count):
            at = c % stages
            rows = T.min(end - (start + (count - 1 - c) * C), C)
            if c >= stages:
                T.barrier_wait(shared.free[at], (c // stages + 1) % 2)
            store_gates(fetched, rows, thread, at, shared.gamma_s, shared.rise_s, shared.fall_s, shared.beta_s)
            shared.drop_s[at, thread] = -(shared.rise_s[at, thread] * shared.beta_s[at, thread])
            shared.lift_s[at, thread] = scale * shared.rise_s[at, thread]
            if shared.out_s is not None:
                shared.out_s[at, thread] = T.Select(
                    T.abs(shared.beta_s[at, thread]) < T.float32(FAINT), T.float32(1), shared.beta_s[at, thread]
                )
            if normed:
                if thread < rows:
                    shared.lift_s[at, thread] = shared.lift_s[at, thread] * of_rows[1]
                    shared.drop_s[at, thread] = shared.drop_s[at, thread] * (of_rows[0] * of_rows[0])
                    if shared.out_s is not None:
                        shared.out_s[at, thread] = shared.out_s[at, thread] * of_rows[0]
                    shared.query_s[at, thread] = of_rows[1]
                else:
                    shared.query_s[at, thread] = 0.0
            T.barrier_arrive(shared.gated[at])
            if c + 1 < count:  # those are whole
                fetch_gates(gamma, beta, start + (count - 2 - c) * C, C, head, thread, fetched)
                if normed:
                    fetch_lengths(lengths, query_lengths, start + (count - 2 - c) * C, C, key_head, thread, of_rows)

    @T.macro
    def prepare_last_first(start, end, count, scale, thread, stages, normed, shared):
        """A warpgroup makes ready for the gradient of the state what `load_last_first` loads: `a` loses its diagonal, rows beyond the sequence become
        0, and P, of the gates that `gates_last_first` fetches. P has two stages, free when `taken`. All of it is there when `ready`, so that
        who waits for that need not wait for `loaded` or `gated`. `low_s`, unless it is None, holds the low part of `a`, whose diagonal is 0."""
        p = T.alloc_fragment((C, C), "float32")
        zero_above(shared.a_s, shared.low_s, stages, thread, 128)
        for c in T.serial(count):
            at = c % stages
            rows = T.min(end - (start + (count - 1 - c) * C), C)
            if c >= 2:
                T.barrier_wait(shared.taken[c % 2], (c // 2 + 1) % 2)
            T.barrier_wait(shared.loaded[at], (c // stages) % 2)
            if thread < C:
                # "r": else TileLang puts a fence, 0.1 us, before the next wgmma. There is one before all is `ready`.
                T.call_extern("handle", "jax_qla_zero_diagonal", T.access_ptr(shared.a_s[at, 0, 0], "r"), thread)
            if rows < C:
                zero_tail(shared.q_s, at, rows, shared.q_s.shape[2], thread, 128)
                zero_tail(shared.k_s, at, rows, shared.k_s.shape[2], thread, 128)
                zero_beyond(shared.a_s, shared.low_s, at, rows, thread, 128)
                zero_tail(shared.do_s, at, rows, shared.do_s.shape[2], thread, 128)
                T.fence_proxy_async()
                T.sync_threads(3, 128)
            T.barrier_wait(shared.gated[at], (c // stages) % 2)
            T.gemm(shared.q_s[at, :, :], shared.k_s[at, :, :], p, transpose_B=True, clear_accum=True)
            T.call_extern(
                "handle",
                f"jax_qla_store_decayed<{'true' if normed else 'false'}, true>",
                p.data,
                T.address_of(shared.gamma_s[at, 0]),
                scale,
                T.address_of(shared.query_s[at, 0]),
                T.address_of(shared.p_s[c % 2, 0, 0]),
            )
            T.fence_proxy_async()
            T.barrier_arrive(shared.ready[at])

    return SimpleNamespace(
        leave_unless=leave_unless,
        chunks_that_matter=chunks_that_matter,
        fetch_gates=fetch_gates,
        fetch_lengths=fetch_lengths,
        store_gates=store_gates,
        load_rows=load_rows,
        load_inverse=load_inverse,
        load_inverses=load_inverses,
        multiply_inverse=multiply_inverse,
        multiply_lower=multiply_lower,
        forget=forget,
        zero_above=zero_above,
        zero_beyond=zero_beyond,
        zero_tail=zero_tail,
        keep_low=keep_low,
        begin_correction=begin_correction,
        begin_update=begin_update,
        send_rows=send_rows,
        put_state=put_state,
        multiply_state_split=multiply_state_split,
        put_rows=put_rows,
        send_state=send_state,
        send_results=send_results,
        tiles_in_order=tiles_in_order,
        prepare_in_order=prepare_in_order,
        tiles_last_first=tiles_last_first,
        load_last_first=load_last_first,
        gates_last_first=gates_last_first,
        prepare_last_first=prepare_last_first,
    )
