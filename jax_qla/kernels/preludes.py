"""CUDA functions that several kernels call, by topic; a kernel names the topics that it needs as the `prelude` of its program.

Those of the inverse are in kernels/inverse.py and kernels/products.py, those of one kernel in its file.
"""

from jax_qla.kernels.common import (
    ALL,
    ALWAYS,
    BALANCED,
    CHUNK,
    EARLIER,
    L2NORM_EPSILON,
    LATER,
    PLACES,
    ROUND,
    SLOW,
    STRETCHES,
)

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
// A matrix [8, 8] of 16-bit elements, of which lane l has two of row l / 4, transposed.
__device__ __forceinline__ unsigned jax_qla_transposed(unsigned x) {
  unsigned y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
// Whether any lane's x is not 0. To be called by whole warps.
__device__ __forceinline__ int jax_qla_any(int x) { return __any_sync(0xffffffffu, x); }
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


NORM_PRELUDE = f"""
// 1 / |x| of a row with this sum of squares.
__device__ __forceinline__ float jax_qla_over_norm(float squares) {{ return rsqrtf(squares + {L2NORM_EPSILON}f); }}
"""


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
    f"constexpr int kChunk = {CHUNK}, kAll = {ALL}, kLater = {LATER}, kEarlier = {EARLIER};"
    r"""
// What a launch that goes through a `window` of every sequence (kernels/common.py) does at a slot of it (jax_qla/segments.py: chunk_table, window_count):
// {first row, rows, rows of no sequence that follow, slot among all chunks}, from the `count` sequences' [start, end). Rows of no sequence are of the later
// window, which has half of the slots, and so twice the rows in each.
// To be called by whole warps, whose lanes look for the slot's sequence together; up to 30 sequences take one load, which goes by no number of the
// block, so that it is under way while these are computed.
__device__ __forceinline__ int4 jax_qla_chunk_at(const int* segments, int count, int tokens, int slot, int window) {
  const int2* bounds = reinterpret_cast<const int2*>(segments);
  const int lane = threadIdx.x & 31;
  const auto at = [=](int i) { return i < 0 ? make_int2(0, 0) : i < count ? bounds[i] : make_int2(tokens, tokens); };
  const auto first = [=](int start, int i) { return (window == kAll ? start / kChunk + i : (start / kChunk + 2 * i) / 2) + 1; };  // of a sequence's slots
  int n = -1, beyond = count;  // a sequence that begins at the slot or before, -1 being the rows before them all; one that does not
  int2 mine = at(n + lane);
  if (beyond - n > 31) {
    do {
      const int step = (beyond - n + 30) / 32, candidate = n + 1 + lane * step;
      const bool begun = candidate < beyond && first(bounds[candidate].x, candidate) <= slot;
      const int steps = __popc(__ballot_sync(0xffffffffu, begun));
      beyond = min(beyond, n + 1 + steps * step);
      if (steps > 0) n += 1 + (steps - 1) * step;
    } while (beyond - n > 31);
    mine = at(n + lane);
  }
  const int candidate = n + lane;
  const bool begun = lane == 0 || (candidate < beyond && first(mine.x, candidate) <= slot);
  const int last_begun = __popc(__ballot_sync(0xffffffffu, begun)) - 1;
  n += last_begun;
  const int start = __shfl_sync(0xffffffffu, mine.x, last_begun), end = __shfl_sync(0xffffffffu, mine.y, last_begun);
  const int gap_end = __shfl_sync(0xffffffffu, mine.x, last_begun + 1);
  const int chunks = (end - start + kChunk - 1) / kChunk, earlier = window == kAll ? 0 : chunks / 2, rows_apart = window == kAll ? kChunk : 2 * kChunk;
  const int before = window == kLater ? earlier : 0, those = window == kEarlier ? earlier : chunks - earlier, last = max(those, 1) - 1;
  const int number = slot - (n < 0 ? 0 : first(start, n)), chunk = before + number;
  const int fill = min(end + max(number - last, 0) * rows_apart, gap_end);
  return make_int4(number <= last ? start + chunk * kChunk : fill, number < those ? min(end - start - chunk * kChunk, kChunk) : 0,
                   number >= last && window != kEarlier ? min(max(gap_end - fill, 0), rows_apart) : 0, start / kChunk + n + 1 + chunk);
}
// All but the last of these, of all chunks; and all of them.
__device__ __forceinline__ void jax_qla_find_chunk(void* found, const int* segments, int count, int tokens, int slot) {
  const int4 chunk = jax_qla_chunk_at(segments, count, tokens, slot, kAll);
  int* x = static_cast<int*>(found);
  x[0] = chunk.x;
  x[1] = chunk.y;
  x[2] = chunk.z;
}
__device__ __forceinline__ void jax_qla_find_chunk_in_window(void* found, const int* segments, int count, int tokens, int slot, int window) {
  const int4 chunk = jax_qla_chunk_at(segments, count, tokens, slot, window);
  int* x = static_cast<int*>(found);
  x[0] = chunk.x;
  x[1] = chunk.y;
  x[2] = chunk.z;
  x[3] = chunk.w;
}
// Whether the slot is one of empty sequences at the end, with no rows behind it, to be asked before all else (macros.py: leave_first). Only where 32
// sequences and all rows come before: others have rows, as a rule, and would wait for the answer.
__device__ __forceinline__ bool jax_qla_slot_is_empty(const int* segments, int count, int tokens, int slot) {
  if (slot <= tokens / kChunk + 32) return false;
  const int end = segments[2 * count - 1], n = slot - end / kChunk - 1;
  return n < count - 1 && segments[2 * n] == end;
}
"""
)


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
    NTH_PRELUDE + f"constexpr int kPlaces = {PLACES}, kRound = {ROUND};"
    r"""
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
  int ranks[8];  // 0 of the longest, 4 of none; all loads are under way at once
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float length_of_n = static_cast<float>(length(window + 32 * i + lane)) * count, mean = tokens;
    ranks[i] = window + 32 * i + lane >= end ? 4 : length_of_n > 2.f * mean ? 0 : length_of_n > mean ? 1 : length_of_n > .5f * mean ? 2 : 3;
  }
  int before = place - window, wanted = 3;
  for (int rank = 0; rank < 3; ++rank) {
    int size = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) size += __popc(__ballot_sync(0xffffffffu, ranks[i] == rank));
    if (before < size) {
      wanted = rank;
      break;
    }
    before -= size;
  }
  int found = place;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const unsigned alike = __ballot_sync(0xffffffffu, ranks[i] == wanted);
    const unsigned mine = __ballot_sync(0xffffffffu, ranks[i] == wanted && __popc(alike & ((1u << lane) - 1)) == before);
    if (mine != 0) found = window + 32 * i + __ffs(mine) - 1;
    before -= __popc(alike);
  }
  return found;
}
// Whether nothing is at the place of this block, of a grid `over` places, among `count` sequences, to be asked before all else (macros.py: leave_first): the
// one of this number and all that follow it among the same 256 are empty, with no rows between them, so that all others are at places before. Not asked of
// the first 32, whose order is found otherwise, of the last of 256, which rows of no sequence may follow, nor of blocks that run at once with the first
// one: some of these must wait. Of pieces, of sequences with room for so many `cuts`, or of these if none is cut: what is at a place is of the sequence so
// many before, or of a later one, and all later ones are empty, too.
__device__ __forceinline__ bool jax_qla_rest_is_empty(const int* segments, int count, int cuts) {
  const int place = blockIdx.z * kPlaces + blockIdx.y, n = place - cuts, last = cuts > 0 ? count - 1 : min(place | 255, count - 1);
  if (place < 32 || n < 0 || n >= last || place * gridDim.x + blockIdx.x < kRound) return false;
  return segments[2 * n] == segments[2 * last + 1];
}
"""
)


BALANCE_PRELUDE = (
    f"constexpr int kAlways = {ALWAYS}, kBalanced = {BALANCED};"
    r"""
// Whether other kernels compute the batch, by what kernels/balance.py found, to be asked before all else (macros.py: leave_first); not of the first block,
// which must wait.
__device__ __forceinline__ bool jax_qla_others_compute(int only, const int* balanced) {
  return only != kAlways && blockIdx.x + blockIdx.y + blockIdx.z > 0 && balanced[0] != (only == kBalanced);
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
