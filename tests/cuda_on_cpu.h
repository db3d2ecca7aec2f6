// What a kernel's CUDA source calls, on a CPU. tests/emulator.py puts this in place of CUDA's and TileLang's headers and of jax_qla's functions
// of one PTX instruction, and compiles the rest as it is. The machine behind it is tests/cuda_on_cpu.cc.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <type_traits>
#include <utility>
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

// An mbarrier, 8 bytes.
struct Barrier {
  int16_t count, left;
  int32_t bytes : 31;
  uint32_t phase : 1;
  void init(int n);
  void arrive(int n = 1);
  void expect_transaction(int n);
  void wait(int parity);
  void complete();  // one thing that it waits for is done
};
static_assert(sizeof(Barrier) == 8);

// A tensor map, as the launch plan has it.
struct CUtensorMap {
  uchar* base;
  int64_t rank, size, swizzle, dims[5], strides[5], box[5];  // strides[0] is that of the second dimension, in bytes
};

namespace emulator {

constexpr int kBlocks = 2;       // of a cluster, at most
constexpr int kBlock = 1 << 18;  // bytes from the shared memory of a block of the cluster to that of the next
extern uchar shared[];
extern int current, threads;  // thread that runs, numbered on from block to block of the cluster; threads of a block
inline int thread() { return current % threads; }  // in its block
inline int rank() { return current / threads; }    // of its block
#define buf_dyn_shmem (emulator::shared + emulator::rank() * emulator::kBlock)
[[noreturn]] void fail(const char* what);  // gives the block up
// All clusters of so many blocks one after the other; what is wrong, if anything. A load takes at most `late` turns of the scheduler.
const char* run(int x, int y, int z, int threads, int blocks, int seed, int late, void (*kernel)(const void*), const void* context);
void meet(int barrier, int threads);
void meet_cluster();
void proxy_fence();
void block_fence();
void still_reading();  // what the thread has read of shared memory may not have been read yet: so much it is
unsigned address_of(const void* p);  // in the shared memory of all blocks of the cluster
unsigned of_block(unsigned address, int rank);
void read(void* to, unsigned address, int bytes);
void arrive_at(Barrier& barrier, int rank, int n);

// By all lanes of a warp together.
void meet_warp();
uint32_t shuffle(uint32_t x, int from);
unsigned ballot(bool x);
void load_matrices(unsigned* r, unsigned address, bool transposed);
void store_matrices(unsigned address, const unsigned* r, bool transposed);
unsigned transpose(unsigned x);
void mma(float* c, const unsigned* a, unsigned b0, unsigned b1, bool bf16);
void mma_tf32(float* c, const float* a, const float* b);

// wgmma of a warp: 16 of the 64 rows.
struct Product {
  int columns;
  bool registers, a_transposed, b_transposed, bf16, scale;
  uint64_t a_descriptor, b_descriptor;
};
void issue(const Product& product, const uint32_t* a, void* c);
void commit_products();
void wait_products(int groups);

void tma_load(const CUtensorMap& map, Barrier& barrier, void* tile, const int64_t* at, int rank);
void load(Barrier& barrier, const void* tile, const void* from, int bytes);
void tma_store(const CUtensorMap& map, const void* tile, const int64_t* at, int rank);
void commit_stores();
void wait_stores(int groups);

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
inline unsigned __pack_nv_bfloat162(bfloat16_t x, bfloat16_t y) { return x.bits | static_cast<unsigned>(y.bits) << 16; }
inline unsigned __pack_half2(half_t x, half_t y) { return x.bits | static_cast<unsigned>(y.bits) << 16; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 x) { return {bfloat16_t(x.x), bfloat16_t(x.y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 x) { return {x.x, x.y}; }
inline __half2 __float22half2_rn(float2 x) { return {half_t(x.x), half_t(x.y)}; }
inline float2 __half22float2(__half2 x) { return {x.x, x.y}; }

struct Index { int x, y, z; };
extern Index blockIdx, gridDim;
struct ThreadIndex {
  struct { operator unsigned() const { return static_cast<unsigned>(emulator::thread()); } } x;
};
inline ThreadIndex threadIdx;
struct BlockSize {
  struct { operator unsigned() const { return static_cast<unsigned>(emulator::threads); } } x;
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
  static_assert(sizeof(T) % 4 == 0);
  uint32_t bits[sizeof(T) / 4];
  std::memcpy(bits, &x, sizeof(T));
  for (uint32_t& part : bits) part = emulator::shuffle(part, from);
  std::memcpy(&x, bits, sizeof(T));
  return x;
}
template <class T> inline T __shfl_sync(unsigned, T x, int lane, int = 32) { return shuffled(x, lane & 31); }
template <class T> inline T __shfl_xor_sync(unsigned, T x, int mask, int = 32) { return shuffled(x, (emulator::current & 31) ^ mask); }
template <class T> inline T __shfl_up_sync(unsigned, T x, int by, int = 32) { return shuffled(x, (emulator::current & 31) - by); }
template <class T> inline T __shfl_down_sync(unsigned, T x, int by, int = 32) { return shuffled(x, (emulator::current & 31) + by); }
inline unsigned __ballot_sync(unsigned, bool x) { return emulator::ballot(x); }
inline int __any_sync(unsigned, bool x) { return emulator::ballot(x) != 0; }
inline void __syncwarp(unsigned = 0) { emulator::meet_warp(); }
inline void __syncthreads() { emulator::meet(0, emulator::threads); }
inline int __syncthreads_or(int x) {
  static int of_blocks[emulator::kBlocks][2], turns[emulator::kBlocks];
  int *any = of_blocks[emulator::rank()], &turn = turns[emulator::rank()];
  const int mine = turn;  // the same for all, until they have met
  __syncthreads();
  if (emulator::thread() == 0) any[1 - mine] = 0, turn = 1 - mine;
  if (x) any[mine] = 1;
  __syncthreads();
  return any[mine];
}
inline void cudaGridDependencySynchronize() {}
inline void cudaTriggerProgrammaticLaunchCompletion() {}

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
  emulator::issue({N, false, ta, tb, A == DataType::kBFloat16, scale != 0, a, b}, nullptr, c);
}
template <DataType A, DataType B, DataType C, int M, int N, int K, bool ta, bool tb, int sa, int sb>
inline void wgmma_rs(const uint32_t* a, uint64_t b, uint32_t* c, int scale) {
  static_assert(M == 64 && K == 16 && !ta && sa == 1 && sb == 1 && C == DataType::kFloat32);
  emulator::issue({N, true, false, tb, A == DataType::kBFloat16, scale != 0, 0, b}, a, c);
}
inline void warpgroup_commit_batch() { emulator::commit_products(); }
template <int groups> inline void wait_wgmma() { emulator::wait_products(groups); }
template <int groups> inline void warpgroup_wait() { emulator::wait_products(groups); }
template <class T> inline void warpgroup_fence_operand(T*, int) {}
inline void warpgroup_arrive() {}
template <int n> inline void warpgroup_reg_alloc() {}
template <int n> inline void warpgroup_reg_dealloc() {}
inline void prefetch_tma_descriptor(const CUtensorMap&) {}
inline void fence_barrier_init() {}
template <bool = false> inline void fence_proxy_async() { emulator::proxy_fence(); }
template <int threads> inline bool tl_shuffle_elect() { return threads == 0 ? emulator::thread() == 0 : emulator::current % (threads == 0 ? 1 : threads) == 0; }
inline void __sync_thread_partial(int id, int threads) { emulator::meet(id, threads); }
enum class CacheHintSm90 { EVICT_NORMAL, EVICT_FIRST, EVICT_LAST };  // nothing but time depends on it
template <CacheHintSm90 = CacheHintSm90::EVICT_NORMAL, class... At>
inline void tma_load(const CUtensorMap& map, Barrier& barrier, void* tile, At... coordinates) {
  const int64_t at[] = {static_cast<int64_t>(coordinates)...};
  emulator::tma_load(map, barrier, tile, at, sizeof...(coordinates));
}
template <CacheHintSm90 = CacheHintSm90::EVICT_NORMAL, class... At>
inline void tma_store(const CUtensorMap& map, const void* tile, At... coordinates) {
  const int64_t at[] = {static_cast<int64_t>(coordinates)...};
  emulator::tma_store(map, tile, at, sizeof...(coordinates));
}
inline void tma_store_arrive() { emulator::commit_stores(); }
template <int groups, bool = true> inline void tma_store_wait() { emulator::wait_stores(groups); }

}  // namespace tl

// jax_qla's functions of one PTX instruction (jax_qla/kernels/preludes.py and others).
inline unsigned jax_qla_address(const void* p) { return emulator::address_of(p); }
inline float jax_qla_exp2(float x) {
  const float y = std::exp2(x);
  return y < 1.17549435e-38f ? 0.f : y;
}
template <bool bf16>
inline unsigned jax_qla_round(float x, float y) { return emulator::rounded(x, bf16) | static_cast<unsigned>(emulator::rounded(y, bf16)) << 16; }
inline unsigned jax_qla_with_squares(unsigned sums, unsigned pair) {
  const auto of_half = [](uint16_t sum, uint16_t x) {
    const float number = emulator::number(x, true);
    return emulator::rounded(number * number + emulator::number(sum, true), true);
  };
  return of_half(sums & 0xffff, pair & 0xffff) | static_cast<unsigned>(of_half(sums >> 16, pair >> 16)) << 16;
}
template <bool transposed>
inline void jax_qla_load_matrices(unsigned* r, unsigned address) { emulator::load_matrices(r, address, transposed); }
template <bool transposed>
inline void jax_qla_store_matrices(unsigned address, unsigned r0, unsigned r1, unsigned r2, unsigned r3) {
  const unsigned r[] = {r0, r1, r2, r3};
  emulator::store_matrices(address, r, transposed);
}
inline unsigned jax_qla_transposed(unsigned x) { return emulator::transpose(x); }
template <unsigned long long, class T>
inline void jax_qla_load_bytes(void* to, T& barrier, const void* from, int bytes) { emulator::load(barrier, to, from, bytes); }
template <unsigned long long>
inline void jax_qla_store_word(unsigned* to, unsigned word) { *to = word; }
inline void jax_qla_mma_eight(float* c, const unsigned* a, unsigned b) {
  const unsigned whole[4] = {a[0], a[1], 0, 0};
  emulator::mma(c, whole, b, 0, false);
}
inline void jax_qla_mma_tf32(float* c, const float* a, const float* b) { emulator::mma_tf32(c, a, b); }
template <bool bf16>
inline void jax_qla_mma(float* c, const unsigned* a, unsigned b0, unsigned b1) { emulator::mma(c, a, b0, b1, bf16); }

// kernels/forward.py: a state [key_dim, 128] by way of shared memory.
static Barrier jax_qla_state_arrives;
template <int key_dim>
inline void jax_qla_begin_state(const float* initial, const float* entering, long long corner, bool between, const void* near, const void* far) {
  const float* state = (between ? entering : initial) + corner;
  jax_qla_state_arrives.init(1);
  jax_qla_state_arrives.expect_transaction(key_dim * 512);
  emulator::load(jax_qla_state_arrives, near, state, key_dim * 256);
  emulator::load(jax_qla_state_arrives, far, state + key_dim * 64, key_dim * 256);
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
  emulator::still_reading();
}

// kernels/backward.py: blocks of a cluster.
inline void jax_qla_meet() { emulator::meet_cluster(); }
inline unsigned jax_qla_of_block(unsigned address, int rank) { return emulator::of_block(address, rank); }
inline uint4 jax_qla_read_of_block(unsigned address) {
  uint4 x;
  emulator::read(&x, address, 16);
  return x;
}
inline uint4 jax_qla_read_16(unsigned address) {
  if (address != emulator::of_block(address, emulator::rank())) emulator::fail("an address in another block's shared memory");
  return jax_qla_read_of_block(address);
}
inline void jax_qla_forget(void* accumulator) {
  for (int i = 0; i < 32; ++i) static_cast<float*>(accumulator)[i] = NAN;
}
inline void jax_qla_write_16(void* to, unsigned a, unsigned b, unsigned c, unsigned d) { *static_cast<uint4*>(to) = {a, b, c, d}; }
template <typename T> inline void jax_qla_add_16(void* to, unsigned a, unsigned b, unsigned c, unsigned d) {
  const unsigned words[4] = {a, b, c, d};
  T more[8], *sum = static_cast<T*>(to);
  std::memcpy(more, words, sizeof more);
  for (int i = 0; i < 8; ++i) sum[i] = T(float(sum[i]) + float(more[i]));
}
// Clusters run one after the other.
inline void jax_qla_publish(int* progress, int place, int count) {
  if ((emulator::thread() & 127) == 0) progress[place] = count;
}
inline void jax_qla_await(const int* progress, int place, int count) {
  if (progress[place] < count) emulator::fail("a cluster waits for one behind it");
}
template <bool written> inline void jax_qla_tell(Barrier& barrier, int blocks) {
  const int lane = emulator::current & 31;
  if (written) emulator::block_fence();
  __syncwarp();
  if (lane < blocks) emulator::arrive_at(barrier, lane, 8 / blocks);
}

// kernels/convolution.py: copies of a thread to shared memory, some of which arrive at once and some when they are waited for.
struct JaxQlaCopies {
  struct Copy { void* to; const void* from; int bytes; };
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};
static std::map<int, JaxQlaCopies> jax_qla_copies;
static unsigned jax_qla_copies_so_far = 0;
template <int bytes>
inline void jax_qla_copy(void* to, const void* from) {
  if ((++jax_qla_copies_so_far * 2654435761u >> 16) % 2) std::memcpy(to, from, bytes);
  else jax_qla_copies[emulator::current].open.push_back({to, from, bytes});
}
inline void jax_qla_end_copies() {
  JaxQlaCopies& mine = jax_qla_copies[emulator::current];
  mine.groups.push_back(std::move(mine.open));
  mine.open.clear();
}
template <int but>
inline void jax_qla_await_copies() {
  auto& groups = jax_qla_copies[emulator::current].groups;
  for (; groups.size() > but; groups.pop_front())
    for (const auto& copy : groups.front()) std::memcpy(copy.to, copy.from, copy.bytes);
}
