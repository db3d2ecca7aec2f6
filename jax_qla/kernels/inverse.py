"""How `a`, the inverse of every chunk (kernels/prepare.py), lies in memory, and the C++ that writes, loads and multiplies by it.

A chunk's inverse is lower triangular. It is kept in blocks of 8x8 elements of 16 bits, rows side by side: 128 bytes that wgmma takes as they are,
without swizzling. In memory the blocks above the diagonal are not there, and block (i, j) is number i (i + 1) / 2 + j of its chunk: 4.5 KB instead
of 8, one piece, written a block at a time by a warp, whose lanes have it in registers in that order, and read by bulk copies of rows of blocks. The inverse of a chunk of fewer rows is the beginning
of this. It has no more blocks than the chunk has rows, n (n + 1) / 2 for the first 8 n, so that it fits where a row of 64 elements for each of its tokens would be:
`a` is [heads, tokens, 64], and what a chunk's blocks leave of its tokens' rows is neither written nor read. To JAX its elements are integers, lest somebody
look for numbers there. Of an inverse in two parts, high and low, [heads, tokens, 128], the low one follows where 64 elements a row end.

In shared memory a tile has room for all blocks, (i, j) at 8 i + j. Those above the diagonal are made zero once, for no load writes there. To a product
with the inverse its rows of blocks are 1024 bytes apart and its columns 128, and to one with the transpose the other way round.

kernels/specification.py has the same in plain JAX (pack_inverses). Why: where all multiprocessors are busy, memory and the card's power bound what they do, and
`a` was a fifth of what both kernels of a forward pass move (docs/performance_versions.md, "The forward kernel").
"""

from jax_qla.kernels.products import PRODUCTS_PRELUDE

INVERSE_PRELUDE = (
    PRODUCTS_PRELUDE
    + r"""
// How many blocks the inverse of so many rows has.
__host__ __device__ constexpr int jax_qla_blocks(int rows) { return (rows + 7) / 8 * ((rows + 7) / 8 + 1) / 2; }
// Bytes, a multiple of 16, from global to shared memory by a bulk copy, which `barrier` counts. `kept` says for how long the second-level cache is to keep
// them.
template <unsigned long long kept, typename Barrier>
__device__ __forceinline__ void jax_qla_load_bytes(void* to, Barrier& barrier, const void* from, int bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
               ::"r"(jax_qla_address(to)), "l"(from), "r"(bytes), "r"(jax_qla_address(&barrier)), "l"(kept) : "memory");
}
// A word to global memory.
template <unsigned long long kept>
__device__ __forceinline__ void jax_qla_store_word(unsigned* to, unsigned word) {
  asm volatile("st.global.L2::cache_hint.b32 [%0], %1, %2;" ::"l"(to), "r"(word), "l"(kept) : "memory");
}
// A warp loads the inverse of a chunk of `rows` rows, which begins at `element` of `a`, into a tile. `barrier` counts the bytes.
template <unsigned long long kept, typename Barrier, typename T>
__device__ __forceinline__ void jax_qla_fetch_inverse(void* tile, Barrier& barrier, const T* a, long long element, int rows) {
  if (tl::tl_shuffle_elect<32>()) {
    barrier.expect_transaction(jax_qla_blocks(rows) * 128);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i * 8 < rows) {
        jax_qla_load_bytes<kept>(static_cast<char*>(tile) + i * 1024, barrier, a + element + i * (i + 1) * 32, (i + 1) * 128);
      }
    }
  }
}
// The blocks above the diagonal, which no load writes, become zero, by `threads` threads.
__device__ __forceinline__ void jax_qla_zero_above(void* tile, int thread, int threads) {
  for (int x = thread; x < 512; x += threads) {
    if ((x >> 3 & 7) > x >> 6) static_cast<uint4*>(tile)[x] = uint4{0, 0, 0, 0};
  }
}
// Rows `rows`.. of a tile become zero.
__device__ __forceinline__ void jax_qla_zero_beyond(void* tile, int rows, int thread, int threads) {
  for (int x = rows * 8 + thread; x < 512; x += threads) {
    const int row = x >> 3, block = x & 7;
    static_cast<uint4*>(tile)[(row >> 3) * 64 + block * 8 + (row & 7)] = uint4{0, 0, 0, 0};
  }
}
// The element on the diagonal of this thread's row, of 64, becomes zero.
template <typename T>
__device__ __forceinline__ void jax_qla_zero_diagonal(T* tile, int row) {
  tile[(row >> 3) * 576 + (row & 7) * 9] = T(0.f);
}
// Begins c += x a^T, where `transposed` c += x a, with `clear` c = ..., a being tile `stage` of `tiles`. x is a left operand of wgmma [64, 64] in registers, c an
// accumulator [64, 64] (kernels/products.py).
template <bool transposed, bool clear, typename T>
__device__ __forceinline__ void jax_qla_multiply_inverse(void* accumulator, void* operand, const T* tiles, int stage) {
  tl::GmmaDescriptor b;
  tl::initialize_wgmma_descriptor<0, transposed ? 64 : 8, transposed ? 8 : 64>(b, tiles);  // from block to block along x's columns, and across
  tl::increase_descriptor_offset<int>(b, stage * 8192);
  jax_qla_multiply_triangle<kTypeOf<T>, transposed, clear>(
      accumulator, operand, b, [](int k, int half) { return transposed ? k * 128 + half * 32 : k * 16 + half * 256; });
}
"""
)

KEPT = {None: "0x1000000000000000ull", "evict_first": "0x12F0000000000000ull", "evict_last": "0x14F0000000000000ull"}
"""Cache hints, of the loads (jax_qla_load_bytes) and stores (jax_qla_store_word) of inverses: how long the second-level cache is to keep them."""
