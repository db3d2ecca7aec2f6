// What a kernel's CUDA source calls, on a CPU: every thread of a block is a fiber, and warps run in a random order. tests/emulator.py puts this in
// place of CUDA's and TileLang's headers and of jax_qla's functions of one PTX instruction, and compiles the rest as it is.
//
// What is modelled: shared memory with its swizzles, mbarriers and their phases, named barriers, warp votes and shuffles, matrix instructions
// with their register layouts, wgmma with its descriptors, TMA with its tensor maps. What may come late comes as late as it may: a load at some
// time after it was asked for, until when its tile is not a number; the products of wgmma, and what a store reads, when somebody waits for them.
// What is not: proxy fences, the memory model, time.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <type_traits>
#include <ucontext.h>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __shared__ static
#define __align__(x) __attribute__((aligned(x)))
#define __launch_bounds__(...)
using uchar = unsigned char;
using uint = unsigned int;

namespace emulator {

constexpr int kShared = 232448;
alignas(1024) inline uchar shared[kShared + 1024];
inline std::mt19937 random_;
inline int late;  // turns of the scheduler that a load takes at most

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  bool done;
};
inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline int current, alive;
inline long long progress;
inline void yield() { swapcontext(&fibers[static_cast<size_t>(current)].context, &scheduler); }
inline const char* failure;
inline bool scheduling;
// Gives the block up.
[[noreturn]] inline void fail(const char* what) {
  if (failure == nullptr) failure = what;
  if (scheduling) throw 0;
  while (true) yield();
}

// All lanes of a warp meet; the last one computes what all get.
struct Warp {
  int arrived = 0;
  long long turn = 0;
  uint64_t in[32][6], out[32][6];
};
inline Warp warps[32];
template <class F>
inline void together(uint64_t* values, int count, F compute) {
  Warp& warp = warps[current / 32];
  const int lane = current % 32;
  for (int i = 0; i < count; ++i) warp.in[lane][i] = values[i];
  const auto meet = [&](auto last) {
    const long long turn = warp.turn;
    if (++warp.arrived == 32) {
      last();
      warp.arrived = 0, ++warp.turn, ++progress;
    } else {
      while (warp.turn == turn) yield();
    }
  };
  meet([&] { compute(warp); });
  for (int i = 0; i < count; ++i) values[i] = warp.out[lane][i];
  meet([] {});
}

struct Named {
  int arrived = 0;
  long long turn = 0;
};
inline Named named[16];
inline void meet(int id, int threads) {
  Named& barrier = named[id];
  const long long turn = barrier.turn;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0, ++barrier.turn, ++progress;
  } else {
    while (barrier.turn == turn) yield();
  }
}

inline float from_bits(uint32_t x) {
  float y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline uint32_t to_bits(float x) {
  uint32_t y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline uint16_t round_bf16(float x) {
  if (x != x) return 0x7fff;
  const uint32_t bits = to_bits(x);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float number(uint16_t bits, bool bf16) {
  if (bf16) return from_bits(static_cast<uint32_t>(bits) << 16);
  _Float16 x;
  std::memcpy(&x, &bits, 2);
  return static_cast<float>(x);
}
inline uint16_t rounded(float x, bool bf16) {
  if (bf16) return round_bf16(x);
  const _Float16 y = static_cast<_Float16>(x);
  uint16_t bits;
  std::memcpy(&bits, &y, 2);
  return bits;
}
inline uint16_t element(unsigned address) {
  uint16_t x;
  std::memcpy(&x, shared + address, 2);
  return x;
}
inline unsigned address_of(const void* p) {
  const auto offset = static_cast<const uchar*>(p) - shared;
  if (offset < 0 || offset >= kShared) fail("an address outside of shared memory");
  return static_cast<unsigned>(offset);
}
inline unsigned swizzled(unsigned address, int mode) {  // mode: a tensor map's; 3 is 128 bytes
  const unsigned bits = (1u << mode) - 1;
  return address ^ ((address >> 7 & bits) << 4);
}

}  // namespace emulator

struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct uint1 { unsigned x; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <bool bf16>
struct Half {
  uint16_t bits;
  Half() = default;
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
  Half(T x) : bits(emulator::rounded(static_cast<float>(x), bf16)) {}
  operator float() const { return emulator::number(bits, bf16); }
};
using bfloat16_t = Half<true>;
using half_t = Half<false>;
struct __nv_bfloat162 { bfloat16_t x, y; };
struct __half2 { half_t x, y; };
using half2 = __half2;
inline __nv_bfloat162 __float22bfloat162_rn(float2 x) { return {bfloat16_t(x.x), bfloat16_t(x.y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 x) { return {x.x, x.y}; }
inline __half2 __float22half2_rn(float2 x) { return {half_t(x.x), half_t(x.y)}; }
inline float2 __half22float2(__half2 x) { return {x.x, x.y}; }

struct Index { int x, y, z; };
inline Index blockIdx;
struct ThreadIndex {
  struct { operator unsigned() const { return static_cast<unsigned>(emulator::current); } } x;
};
inline ThreadIndex threadIdx;
struct BlockSize {
  struct { operator unsigned() const { return static_cast<unsigned>(emulator::fibers.size()); } } x;
};
inline BlockSize blockDim;

inline float __uint_as_float(unsigned x) { return emulator::from_bits(x); }
inline unsigned __float_as_uint(float x) { return emulator::to_bits(x); }
inline float __int_as_float(int x) { return emulator::from_bits(static_cast<uint32_t>(x)); }
inline int __float_as_int(float x) { return static_cast<int>(emulator::to_bits(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __expf(float x) { return std::exp(x); }
template <class A, class B>
inline auto min(A a, B b) { using T = std::common_type_t<A, B>; return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a); }
template <class A, class B>
inline auto max(A a, B b) { using T = std::common_type_t<A, B>; return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a); }

template <class T>
inline T shuffled(T x, int from) {
  static_assert(sizeof(T) == 4);
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  uint64_t value = bits | static_cast<uint64_t>(static_cast<uint32_t>(from)) << 32;
  emulator::together(&value, 1, [](emulator::Warp& warp) {
    for (int lane = 0; lane < 32; ++lane) {
      const int from = static_cast<int>(warp.in[lane][0] >> 32);
      warp.out[lane][0] = static_cast<uint32_t>(warp.in[from < 0 || from > 31 ? lane : from][0]);
    }
  });
  bits = static_cast<uint32_t>(value);
  std::memcpy(&x, &bits, 4);
  return x;
}
template <class T> inline T __shfl_sync(unsigned, T x, int lane) { return shuffled(x, lane & 31); }
template <class T> inline T __shfl_xor_sync(unsigned, T x, int mask) { return shuffled(x, (emulator::current & 31) ^ mask); }
template <class T> inline T __shfl_up_sync(unsigned, T x, int by) { return shuffled(x, (emulator::current & 31) - by); }
template <class T> inline T __shfl_down_sync(unsigned, T x, int by) { return shuffled(x, (emulator::current & 31) + by); }
inline unsigned __ballot_sync(unsigned, bool x) {
  uint64_t value = x;
  emulator::together(&value, 1, [](emulator::Warp& warp) {
    uint64_t all = 0;
    for (int lane = 0; lane < 32; ++lane) all |= warp.in[lane][0] << lane;
    for (int lane = 0; lane < 32; ++lane) warp.out[lane][0] = all;
  });
  return static_cast<unsigned>(value);
}
inline int __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline void __syncwarp(unsigned = 0) { uint64_t none = 0; emulator::together(&none, 0, [](emulator::Warp&) {}); }
inline void __syncthreads() { emulator::meet(0, static_cast<int>(emulator::fibers.size())); }
inline int __syncthreads_or(int x) {
  static int any[2], turn;
  const int mine = turn;  // the same for all, until they have met
  __syncthreads();
  if (emulator::current == 0) any[1 - mine] = 0, turn = 1 - mine;
  if (x) any[mine] = 1;
  __syncthreads();
  return any[mine];
}
inline void cudaGridDependencySynchronize() {}
inline void cudaTriggerProgrammaticLaunchCompletion() {}

// An mbarrier, 8 bytes.
struct Barrier {
  int16_t count, left;
  int32_t bytes : 31;
  uint32_t phase : 1;
  void init(int n) { count = left = static_cast<int16_t>(n), bytes = 0, phase = 0; }
  void complete() {
    if (left < 0) emulator::fail("more arrivals at a barrier than its count");
    ++emulator::progress;
    if (left == 0 && bytes == 0) phase ^= 1, left = count;
  }
  void arrive() { --left, complete(); }
  void expect_transaction(int n) { bytes += n; }
  void wait(int parity) { while (static_cast<int>(phase) == parity) emulator::yield(); }
};
static_assert(sizeof(Barrier) == 8);

// A tensor map, as the launch plan has it.
struct CUtensorMap {
  uchar* base;
  int64_t rank, size, swizzle, dims[5], strides[5], box[5];  // strides[0] is that of the second dimension, in bytes
};

namespace emulator {

// f(address in shared memory, pointer into the array or null beyond it) for every innermost row of a box.
template <class F>
inline void for_box(const CUtensorMap& map, const void* tile, const int64_t* at, F f) {
  unsigned line = address_of(tile);
  int64_t index[5] = {0, 0, 0, 0, 0};
  while (true) {
    const uchar* p = map.base;
    bool inside = true;
    for (int d = 0; d < map.rank; ++d) {
      const int64_t place = at[d] + index[d];
      inside = inside && place >= 0 && place < map.dims[d];
      p += place * (d == 0 ? map.size : map.strides[d - 1]);
    }
    for (int64_t x = 0; x < map.box[0]; ++x) {
      const bool there = inside && at[0] + x < map.dims[0];
      const unsigned address = line + static_cast<unsigned>(x * map.size);
      f((swizzled(address & ~15u, static_cast<int>(map.swizzle))) | (address & 15u), there ? const_cast<uchar*>(p + x * map.size) : nullptr);
    }
    line += static_cast<unsigned>(map.box[0] * map.size);
    int d = 1;
    while (d < map.rank && ++index[d] == map.box[d]) index[d++] = 0;
    if (d >= map.rank) return;
  }
}

struct Load {
  Barrier* barrier;
  int bytes, turns;
  std::function<void()> land;
};
inline std::vector<Load> loads;
inline std::vector<std::vector<std::function<void()>>> open_stores;  // of a thread, not committed
inline std::vector<std::deque<std::vector<std::function<void()>>>> stores;  // and committed, in groups

inline void begin_load(Barrier& barrier, int bytes, std::function<void()> land) {
  loads.push_back({&barrier, bytes, static_cast<int>(random_() % static_cast<unsigned>(late + 1)), std::move(land)});
}
inline void land_loads() {
  for (size_t i = 0; i < loads.size();) {
    ++progress;
    if (loads[i].turns-- > 0) {
      ++i;
      continue;
    }
    Load load = std::move(loads[i]);
    loads.erase(loads.begin() + static_cast<std::ptrdiff_t>(i));
    load.land();
    load.barrier->bytes -= load.bytes;
    load.barrier->complete();
  }
}
inline void finish_stores(int thread, size_t left) {
  auto& groups = stores[static_cast<size_t>(thread)];
  while (groups.size() > left) {
    for (auto& leave : groups.front()) leave();
    groups.pop_front();
  }
}

// wgmma of a warp: 16 of the 64 rows.
struct Product {
  int columns;
  bool registers, a_transposed, b_transposed, bf16, scale;
  uint64_t a_descriptor, b_descriptor;
  uint32_t a[32][4];
  float* c[32];
};
struct Products {
  std::deque<Product> queue;
  long long first = 0;  // number of the queue's first
  long long issued[32] = {};
  std::deque<long long> ends[32];  // of committed groups
};
inline Products products[32];

inline unsigned operand_address(uint64_t descriptor, bool transposed, int row, int k) {
  const unsigned start = static_cast<unsigned>(descriptor & 0x3fff) << 4;
  const unsigned leading = static_cast<unsigned>(descriptor >> 16 & 0x3fff) << 4, stride = static_cast<unsigned>(descriptor >> 32 & 0x3fff) << 4;
  const unsigned mode = static_cast<unsigned>(descriptor >> 62);
  if (mode != 1) fail("a swizzle of wgmma other than 128 bytes");
  const unsigned plain = transposed ? start + row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * 2
                                    : start + row / 8 * stride + row % 8 * 128 + k * 2;
  return (swizzled(plain & ~15u, 3)) | (plain & 15u);
}
inline void multiply(const Product& product, int warp) {
  float a[16][16];
  for (int i = 0; i < 16; ++i) {
    for (int k = 0; k < 16; ++k) {
      uint16_t bits;
      if (product.registers) {
        const int lane = i % 8 * 4 + k % 8 / 2, word = i / 8 + k / 8 * 2;
        bits = static_cast<uint16_t>(product.a[lane][word] >> (k % 2 * 16));
      } else {
        bits = element(operand_address(product.a_descriptor, product.a_transposed, warp % 4 * 16 + i, k));
      }
      a[i][k] = number(bits, product.bf16);
    }
  }
  for (int j = 0; j < product.columns; ++j) {
    float b[16];
    for (int k = 0; k < 16; ++k) b[k] = number(element(operand_address(product.b_descriptor, product.b_transposed, j, k)), product.bf16);
    for (int i = 0; i < 16; ++i) {
      float& c = product.c[i % 8 * 4 + j % 8 / 2][j / 8 * 4 + i / 8 * 2 + j % 2];
      float sum = product.scale ? c : 0.f;
      for (int k = 0; k < 16; ++k) sum += a[i][k] * b[k];
      c = sum;
    }
  }
}
inline void issue(Product&& product, const uint32_t* a, void* c) {
  Products& of = products[current / 32];
  const int lane = current % 32;
  const auto place = static_cast<size_t>(of.issued[lane]++ - of.first);
  if (place == of.queue.size()) of.queue.push_back(product);
  Product& mine = of.queue[place];
  if (mine.columns != product.columns || mine.b_descriptor != product.b_descriptor || mine.a_descriptor != product.a_descriptor) {
    fail("lanes of a warp do not agree on a product");
  }
  if (a != nullptr) std::memcpy(mine.a[lane], a, 16);
  mine.c[lane] = static_cast<float*>(c);
}
inline void wait_products(int groups) {
  uint64_t none = 0;
  together(&none, 0, [=](Warp&) {
    const int warp = current / 32;
    Products& of = products[warp];
    while (of.ends[0].size() > static_cast<size_t>(groups)) {
      const long long end = of.ends[0].front();
      for (auto& ends : of.ends) {
        if (ends.empty() || ends.front() != end) fail("lanes of a warp do not agree on a group of products");
        ends.pop_front();
      }
      for (; of.first < end; ++of.first) {
        multiply(of.queue.front(), warp);
        of.queue.pop_front();
      }
    }
  });
}

}  // namespace emulator

namespace tl {

enum class DataType { kBFloat16, kFloat16, kFloat32 };

struct GmmaDescriptor {
  uint64_t bits = 0;
  uint64_t operator+(uint64_t x) const { return bits + x; }
};
template <int mode, int leading, int stride>
inline void initialize_wgmma_descriptor(GmmaDescriptor& descriptor, const void* tile) {
  descriptor.bits = emulator::address_of(tile) >> 4 | static_cast<uint64_t>(leading) << 16 | static_cast<uint64_t>(stride) << 32 | static_cast<uint64_t>(mode) << 62;
}
template <class T>
inline void increase_descriptor_offset(GmmaDescriptor& descriptor, T bytes) { descriptor.bits += static_cast<uint64_t>(static_cast<int64_t>(bytes) >> 4); }
template <DataType A, DataType B, DataType C, int M, int N, int K, bool ta, bool tb, int sa, int sb>
inline void wgmma_ss(uint64_t a, uint64_t b, uint32_t* c, int scale) {
  static_assert(M == 64 && K == 16 && sa == 1 && sb == 1 && C == DataType::kFloat32);
  emulator::issue({N, false, ta, tb, A == DataType::kBFloat16, scale != 0, a, b, {}, {}}, nullptr, c);
}
template <DataType A, DataType B, DataType C, int M, int N, int K, bool ta, bool tb, int sa, int sb>
inline void wgmma_rs(const uint32_t* a, uint64_t b, uint32_t* c, int scale) {
  static_assert(M == 64 && K == 16 && !ta && sa == 1 && sb == 1 && C == DataType::kFloat32);
  emulator::issue({N, true, false, tb, A == DataType::kBFloat16, scale != 0, 0, b, {}, {}}, a, c);
}
inline void warpgroup_commit_batch() {
  auto& of = emulator::products[emulator::current / 32];
  of.ends[emulator::current % 32].push_back(of.issued[emulator::current % 32]);
}
template <int groups> inline void wait_wgmma() { emulator::wait_products(groups); }
template <int groups> inline void warpgroup_wait() { emulator::wait_products(groups); }
template <class T> inline void warpgroup_fence_operand(T*, int) {}
inline void warpgroup_arrive() {}
template <int n> inline void warpgroup_reg_alloc() {}
template <int n> inline void warpgroup_reg_dealloc() {}
inline void prefetch_tma_descriptor(const CUtensorMap&) {}
inline void fence_barrier_init() {}
template <bool = false> inline void fence_proxy_async() {}
template <int threads> inline bool tl_shuffle_elect() { return threads == 0 ? emulator::current == 0 : emulator::current % (threads == 0 ? 1 : threads) == 0; }
inline void __sync_thread_partial(int id, int threads) { emulator::meet(id, threads); }
template <class... At>
inline void tma_load(const CUtensorMap& map, Barrier& barrier, void* tile, At... coordinates) {
  struct Place { int64_t at[5]; } place{{static_cast<int64_t>(coordinates)...}};
  if (sizeof...(coordinates) != static_cast<size_t>(map.rank)) emulator::fail("a tensor map of another rank");
  int bytes = static_cast<int>(map.size);
  for (int d = 0; d < map.rank; ++d) bytes *= static_cast<int>(map.box[d]);
  std::memset(tile, 0xff, static_cast<size_t>(bytes));  // not a number until it is there
  emulator::begin_load(barrier, bytes, [=, &map] {
    emulator::for_box(map, tile, place.at, [&](unsigned address, uchar* p) {
      if (p != nullptr) std::memcpy(emulator::shared + address, p, static_cast<size_t>(map.size));
      else std::memset(emulator::shared + address, 0, static_cast<size_t>(map.size));
    });
  });
}
template <class... At>
inline void tma_store(const CUtensorMap& map, const void* tile, At... coordinates) {
  struct Place { int64_t at[5]; } place{{static_cast<int64_t>(coordinates)...}};
  if (sizeof...(coordinates) != static_cast<size_t>(map.rank)) emulator::fail("a tensor map of another rank");
  emulator::open_stores[static_cast<size_t>(emulator::current)].push_back([=, &map] {
    emulator::for_box(map, tile, place.at, [&](unsigned address, uchar* p) {
      if (p != nullptr) std::memcpy(p, emulator::shared + address, static_cast<size_t>(map.size));
    });
  });
}
inline void tma_store_arrive() {
  auto& open = emulator::open_stores[static_cast<size_t>(emulator::current)];
  emulator::stores[static_cast<size_t>(emulator::current)].push_back(std::move(open));
  open.clear();
}
template <int groups, bool = true> inline void tma_store_wait() { emulator::finish_stores(emulator::current, groups); }

}  // namespace tl

// jax_qla's functions of one PTX instruction (jax_qla/kernels/common.py and others).
inline unsigned jax_qla_address(const void* p) { return emulator::address_of(p); }
inline float jax_qla_exp2(float x) {
  const float y = std::exp2(x);
  return y < 1.17549435e-38f ? 0.f : y;
}
template <bool bf16>
inline unsigned jax_qla_round(float x, float y) { return emulator::rounded(x, bf16) | static_cast<unsigned>(emulator::rounded(y, bf16)) << 16; }
template <bool transposed>
inline void jax_qla_load_matrices(unsigned* r, unsigned address) {
  uint64_t values[4] = {address, 0, 0, 0};
  emulator::together(values, 4, [](emulator::Warp& warp) {
    for (int m = 0; m < 4; ++m) {
      for (int lane = 0; lane < 32; ++lane) {
        const auto at = [&](int row, int column) { return static_cast<uint64_t>(emulator::element(static_cast<unsigned>(warp.in[m * 8 + row][0]) + column * 2)); };
        const int i = lane / 4, j = lane % 4 * 2;
        warp.out[lane][m] = transposed ? at(j, i) | at(j + 1, i) << 16 : at(i, j) | at(i, j + 1) << 16;
      }
    }
  });
  for (int m = 0; m < 4; ++m) r[m] = static_cast<unsigned>(values[m]);
}
template <bool transposed>
inline void jax_qla_store_matrices(unsigned address, unsigned r0, unsigned r1, unsigned r2, unsigned r3) {
  uint64_t values[5] = {address, r0, r1, r2, r3};
  emulator::together(values, 5, [](emulator::Warp& warp) {
    for (int m = 0; m < 4; ++m) {
      for (int lane = 0; lane < 32; ++lane) {
        for (int e = 0; e < 2; ++e) {
          const int i = transposed ? lane % 4 * 2 + e : lane / 4, j = transposed ? lane / 4 : lane % 4 * 2 + e;
          const uint16_t x = static_cast<uint16_t>(warp.in[lane][1 + m] >> (e * 16));
          std::memcpy(emulator::shared + warp.in[m * 8 + i][0] + j * 2, &x, 2);
        }
      }
    }
  });
}
// The transpose of an 8x8 matrix of 16-bit elements.
inline unsigned jax_qla_transposed(unsigned x) {
  uint64_t value = x;
  emulator::together(&value, 1, [](emulator::Warp& warp) {
    for (int lane = 0; lane < 32; ++lane) {
      const auto at = [&](int row, int column) { return warp.in[row * 4 + column / 2][0] >> (column % 2 * 16) & 0xffff; };
      warp.out[lane][0] = at(lane % 4 * 2, lane / 4) | at(lane % 4 * 2 + 1, lane / 4) << 16;
    }
  });
  return static_cast<unsigned>(value);
}
template <bool bf16>
inline void jax_qla_mma(float* c, const unsigned* a, unsigned b0, unsigned b1) {
  uint64_t values[6] = {a[0] | static_cast<uint64_t>(a[1]) << 32, a[2] | static_cast<uint64_t>(a[3]) << 32, b0 | static_cast<uint64_t>(b1) << 32,
                        emulator::to_bits(c[0]) | static_cast<uint64_t>(emulator::to_bits(c[1])) << 32,
                        emulator::to_bits(c[2]) | static_cast<uint64_t>(emulator::to_bits(c[3])) << 32, 0};
  emulator::together(values, 5, [](emulator::Warp& warp) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      for (int e = 0; e < 2; ++e) {
        for (int i = 0; i < 4; ++i) {
          a[lane / 4 + i % 2 * 8][lane % 4 * 2 + e + i / 2 * 8] =
              emulator::number(static_cast<uint16_t>(warp.in[lane][i / 2] >> (i % 2 * 32 + e * 16)), bf16);
        }
        for (int i = 0; i < 2; ++i) b[lane % 4 * 2 + e + i * 8][lane / 4] = emulator::number(static_cast<uint16_t>(warp.in[lane][2] >> (i * 32 + e * 16)), bf16);
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        float sum = emulator::from_bits(static_cast<uint32_t>(warp.in[lane][3 + i / 2] >> (i % 2 * 32)));
        for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
        uint64_t& out = warp.out[lane][3 + i / 2];
        out = i % 2 == 0 ? emulator::to_bits(sum) : out | static_cast<uint64_t>(emulator::to_bits(sum)) << 32;
      }
    }
  });
  for (int i = 0; i < 4; ++i) c[i] = emulator::from_bits(static_cast<uint32_t>(values[3 + i / 2] >> (i % 2 * 32)));
}

// kernels/forward.py: a state [key_dim, 128] by way of shared memory.
inline Barrier jax_qla_state_arrives;
template <int key_dim>
inline void jax_qla_begin_state(const float* state, const void* near, const void* far) {
  jax_qla_state_arrives.init(1);
  jax_qla_state_arrives.expect_transaction(key_dim * 512);
  for (int half = 0; half < 2; ++half) {
    uchar* to = emulator::shared + emulator::address_of(half == 0 ? near : far);
    emulator::begin_load(jax_qla_state_arrives, key_dim * 256, [=] { std::memcpy(to, state + half * key_dim * 64, key_dim * 256); });
  }
  jax_qla_state_arrives.arrive();
}
template <int key_dim>
inline void jax_qla_take_state(void* registers, const void* near, const void* far, int first) {
  jax_qla_state_arrives.wait(0);
  float* state = static_cast<float*>(registers);
  const int lane = emulator::current & 31, column = first + (emulator::current >> 5 & 3) * 16 + lane / 4;
  for (int n = 0; n < key_dim / 8; ++n) {
    const float* rows = static_cast<const float*>(n < key_dim / 16 ? near : far) + n % (key_dim / 16) * 1024 + lane % 4 * 256 + column;
    for (int h = 0; h < 2; ++h) {
      state[4 * n + 2 * h] = rows[8 * h];
      state[4 * n + 2 * h + 1] = rows[8 * h + 128];
    }
  }
}

namespace emulator {

template <class F>
inline void run_block(int threads, F kernel) {
  static F* body;
  body = &kernel;
  scheduling = true;
  std::memset(shared, 0xff, sizeof shared);
  for (auto& x : named) x = Named();
  for (auto& x : warps) x = Warp();
  for (auto& x : products) x = Products();
  loads.clear();
  open_stores.assign(static_cast<size_t>(threads), {});
  stores.assign(static_cast<size_t>(threads), {});
  fibers.resize(static_cast<size_t>(threads));
  alive = threads;
  for (auto& fiber : fibers) {
    fiber.stack.resize(48 << 10);
    fiber.done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, +[] {
      (*body)();
      fibers[static_cast<size_t>(current)].done = true;
      --alive, ++progress;
    }, 0);
  }
  for (int idle = 0; alive > 0;) {
    const long long before = progress;
    const int warp = static_cast<int>(random_() % static_cast<unsigned>(threads / 32));
    for (unsigned turns = 1 + random_() % 32; turns > 0; --turns) {
      for (int thread = warp * 32; thread < warp * 32 + 32; ++thread) {
        if (!fibers[static_cast<size_t>(thread)].done) {
          current = thread;
          scheduling = false;
          swapcontext(&scheduler, &fibers[static_cast<size_t>(thread)].context);
          scheduling = true;
          if (failure != nullptr) return;
        }
      }
    }
    land_loads();
    idle = progress == before ? idle + 1 : 0;
    if (idle > 20000) fail("nothing goes on any more");
  }
  if (!loads.empty()) fail("a load is under way when the block ends");
  for (int thread = 0; thread < threads; ++thread) {
    if (!open_stores[static_cast<size_t>(thread)].empty()) fail("a store that belongs to no group");
    finish_stores(thread, 0);
  }
  for (auto& x : products) {
    if (!x.queue.empty()) fail("a product that nobody waited for");
  }
}

// All blocks one after the other; what is wrong, if anything.
template <class F>
inline const char* run(int x, int y, int z, int threads, int seed, int late_, F kernel) {
  random_.seed(static_cast<unsigned>(seed));
  late = late_;
  failure = nullptr;
  try {
    for (blockIdx.z = 0; blockIdx.z < z; ++blockIdx.z) {
      for (blockIdx.y = 0; blockIdx.y < y; ++blockIdx.y) {
        for (blockIdx.x = 0; blockIdx.x < x && failure == nullptr; ++blockIdx.x) run_block(threads, kernel);
      }
    }
  } catch (int) {
  }
  return failure;
}

}  // namespace emulator
