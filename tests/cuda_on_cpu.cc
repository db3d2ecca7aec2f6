// The machine that runs a block, or a cluster of them, of tests/cuda_on_cpu.h: every thread is a fiber, and warps run in a random order.
//
// What is modelled: shared memory with its swizzles, that of a cluster's other blocks, mbarriers and their phases, named barriers, warp votes and
// shuffles, matrix instructions with their register layouts, wgmma with its descriptors, TMA with its tensor maps. What may come late comes as
// late as it may: a load at some time after it was asked for, until when its tile is not a number; the products of wgmma, and what a store reads,
// when somebody waits for them. And whatever the order was, accesses to shared memory that nothing orders, or that lack a proxy fence or, of what
// another block wrote, that block's fence, end it (tests/happens_before.h), and so does a block that may end before another comes to its memory.
// What is not: global memory among blocks and kernels, wgmma.fence, scopes of mbarriers' releases and waits, time.
#undef _FORTIFY_SOURCE  // whose longjmp takes another stack for an error
#include "cuda_on_cpu.h"
#include "happens_before.h"

#include <csetjmp>
#include <deque>
#include <functional>
#include <random>
#include <ucontext.h>
#include <vector>

Index blockIdx, gridDim;

namespace emulator {

alignas(1024) uchar shared[kBlocks * kBlock];
int current, threads;
static int blocks, first_block;  // of the cluster

static std::mt19937 random_;
static int late;  // turns of the scheduler that a load takes at most

struct Fiber {
  ucontext_t context;  // with which it begins; after that a jump will do, which spares two calls of the system
  jmp_buf here;
  std::vector<char> stack;
  bool begun, done;
};
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static jmp_buf scheduler_here;
static int alive;
static long long progress;
static void yield() {
  if (_setjmp(fibers[static_cast<size_t>(current)].here) == 0) _longjmp(scheduler_here, 1);
}
static void go_on(Fiber& fiber) {
  if (_setjmp(scheduler_here) != 0) return;
  if (fiber.begun) _longjmp(fiber.here, 1);
  fiber.begun = true;
  swapcontext(&scheduler, &fiber.context);
}
static const char* failure;
static bool scheduling;
void fail(const char* what) {
  if (failure == nullptr) failure = what;
  if (scheduling) throw 0;
  while (true) yield();
}
static void right(const char* wrong) {
  if (wrong != nullptr) fail(wrong);
}

// All lanes of a warp meet; the last one computes what all get.
struct Warp {
  int arrived = 0;
  long long turn = 0;
  uint64_t in[32][6], out[32][6];
};
static Warp warps[32];
template <class F>
static void together(uint64_t* values, int count, F compute) {
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
void meet_warp() {
  uint64_t none = 0;
  together(&none, 0, [](Warp&) { happens_before::meet_warp(current / 32); });
}

struct Named {
  int arrived = 0;
  long long turn = 0;
};
static Named named[16 * kBlocks + 1];  // the last is the cluster's
static void meet_at(int id, int count) {
  Named& barrier = named[id];
  const long long turn = barrier.turn;
  happens_before::arrive_named(id, current);
  if (++barrier.arrived == count) {
    happens_before::complete_named(id);
    barrier.arrived = 0, ++barrier.turn, ++progress;
  } else {
    while (barrier.turn == turn) yield();
  }
  happens_before::leave_named(id, current);
}
void meet(int id, int count) { meet_at(rank() * 16 + id, count); }
void block_fence() { happens_before::block_fence(current); }
void meet_cluster() {
  block_fence();
  meet_at(16 * blocks, blocks * threads);
}
void proxy_fence() { happens_before::proxy_fence(current); }
void still_reading() { happens_before::loading[static_cast<size_t>(current)] = true; }

static void own_access(const void* p, size_t bytes, bool write) {
  const auto offset = static_cast<size_t>(static_cast<const uchar*>(p) - shared);
  if (offset < static_cast<size_t>(blocks) * kBlock) right(happens_before::access(static_cast<unsigned>(offset), static_cast<int>(bytes), write, current));
}
static uint16_t element(unsigned address) {
  uint16_t x;
  std::memcpy(&x, shared + address, 2);
  return x;
}
unsigned address_of(const void* p) {
  const auto offset = static_cast<const uchar*>(p) - shared;
  if (offset < 0 || offset >= blocks * kBlock) fail("an address outside of shared memory");
  return static_cast<unsigned>(offset);
}
unsigned of_block(unsigned address, int rank) {
  if (rank < 0 || rank >= blocks) fail("a block that the cluster does not have");
  return address % kBlock + static_cast<unsigned>(rank) * kBlock;
}
// From any block of the cluster.
static void visit(unsigned address, int bytes) {
  right(happens_before::access(address, bytes, false, current));
  right(happens_before::reach(address, bytes, current));
  happens_before::visit(address / kBlock, current);
}
void read(void* to, unsigned address, int bytes) {
  visit(address, bytes);
  std::memcpy(to, shared + address, static_cast<size_t>(bytes));
}
void arrive_at(Barrier& barrier, int rank, int n) {
  const unsigned address = of_block(address_of(&barrier), rank);
  visit(address, sizeof barrier);
  Barrier& there = *reinterpret_cast<Barrier*>(shared + address);
  if (there.count < 0) fail("an arrival at a barrier that is not initialized");
  there.arrive(n);
}
static unsigned swizzled(unsigned address, int mode) {  // mode: a tensor map's; 3 is 128 bytes
  const unsigned bits = (1u << mode) - 1;
  return address ^ ((address >> 7 & bits) << 4);
}

uint32_t shuffle(uint32_t x, int from) {
  uint64_t value = x | static_cast<uint64_t>(static_cast<uint32_t>(from)) << 32;
  together(&value, 1, [](Warp& warp) {
    for (int lane = 0; lane < 32; ++lane) {
      const int from = static_cast<int>(warp.in[lane][0] >> 32);
      warp.out[lane][0] = static_cast<uint32_t>(warp.in[from < 0 || from > 31 ? lane : from][0]);
    }
  });
  return static_cast<uint32_t>(value);
}
unsigned ballot(bool x) {
  uint64_t value = x;
  together(&value, 1, [](Warp& warp) {
    uint64_t all = 0;
    for (int lane = 0; lane < 32; ++lane) all |= warp.in[lane][0] << lane;
    for (int lane = 0; lane < 32; ++lane) warp.out[lane][0] = all;
  });
  return static_cast<unsigned>(value);
}
static void access_matrices(const Warp& warp, bool write) {
  for (int lane = 0; lane < 32; ++lane) {
    right(happens_before::access(static_cast<unsigned>(warp.in[lane][0]), 16, write, current / 32 * 32 + lane));
  }
}
void load_matrices(unsigned* r, unsigned address, bool transposed) {
  uint64_t values[4] = {address, 0, 0, 0};
  together(values, 4, [=](Warp& warp) {
    access_matrices(warp, false);
    for (int m = 0; m < 4; ++m) {
      for (int lane = 0; lane < 32; ++lane) {
        const auto at = [&](int row, int column) { return static_cast<uint64_t>(element(static_cast<unsigned>(warp.in[m * 8 + row][0]) + column * 2)); };
        const int i = lane / 4, j = lane % 4 * 2;
        warp.out[lane][m] = transposed ? at(j, i) | at(j + 1, i) << 16 : at(i, j) | at(i, j + 1) << 16;
      }
    }
  });
  for (int m = 0; m < 4; ++m) r[m] = static_cast<unsigned>(values[m]);
}
void store_matrices(unsigned address, const unsigned* r, bool transposed) {
  uint64_t values[5] = {address, r[0], r[1], r[2], r[3]};
  together(values, 5, [=](Warp& warp) {
    access_matrices(warp, true);
    for (int m = 0; m < 4; ++m) {
      for (int lane = 0; lane < 32; ++lane) {
        for (int e = 0; e < 2; ++e) {
          const int i = transposed ? lane % 4 * 2 + e : lane / 4, j = transposed ? lane / 4 : lane % 4 * 2 + e;
          const uint16_t x = static_cast<uint16_t>(warp.in[lane][1 + m] >> (e * 16));
          std::memcpy(shared + warp.in[m * 8 + i][0] + j * 2, &x, 2);
        }
      }
    }
  });
}
// The transpose of an 8x8 matrix of 16-bit elements.
unsigned transpose(unsigned x) {
  uint64_t value = x;
  together(&value, 1, [](Warp& warp) {
    for (int lane = 0; lane < 32; ++lane) {
      const auto at = [&](int row, int column) { return warp.in[row * 4 + column / 2][0] >> (column % 2 * 16) & 0xffff; };
      warp.out[lane][0] = at(lane % 4 * 2, lane / 4) | at(lane % 4 * 2 + 1, lane / 4) << 16;
    }
  });
  return static_cast<unsigned>(value);
}
void mma(float* c, const unsigned* a, unsigned b0, unsigned b1, bool bf16) {
  uint64_t values[6] = {a[0] | static_cast<uint64_t>(a[1]) << 32, a[2] | static_cast<uint64_t>(a[3]) << 32, b0 | static_cast<uint64_t>(b1) << 32,
                        to_bits(c[0]) | static_cast<uint64_t>(to_bits(c[1])) << 32, to_bits(c[2]) | static_cast<uint64_t>(to_bits(c[3])) << 32, 0};
  together(values, 5, [=](Warp& warp) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      for (int e = 0; e < 2; ++e) {
        for (int i = 0; i < 4; ++i) {
          a[lane / 4 + i % 2 * 8][lane % 4 * 2 + e + i / 2 * 8] = number(static_cast<uint16_t>(warp.in[lane][i / 2] >> (i % 2 * 32 + e * 16)), bf16);
        }
        for (int i = 0; i < 2; ++i) b[lane % 4 * 2 + e + i * 8][lane / 4] = number(static_cast<uint16_t>(warp.in[lane][2] >> (i * 32 + e * 16)), bf16);
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        float sum = from_bits(static_cast<uint32_t>(warp.in[lane][3 + i / 2] >> (i % 2 * 32)));
        for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
        uint64_t& out = warp.out[lane][3 + i / 2];
        out = i % 2 == 0 ? to_bits(sum) : out | static_cast<uint64_t>(to_bits(sum)) << 32;
      }
    }
  });
  for (int i = 0; i < 4; ++i) c[i] = from_bits(static_cast<uint32_t>(values[3 + i / 2] >> (i % 2 * 32)));
}
// Of tf32, [16, 8] by [8, 8]: the lower 13 bits of a float do not count.
void mma_tf32(float* c, const float* a, const float* b) {
  uint64_t values[5];
  const auto both = [](float x, float y) { return to_bits(x) | static_cast<uint64_t>(to_bits(y)) << 32; };
  values[0] = both(a[0], a[1]);
  values[1] = both(a[2], a[3]);
  values[2] = both(b[0], b[1]);
  values[3] = both(c[0], c[1]);
  values[4] = both(c[2], c[3]);
  together(values, 5, [](Warp& warp) {
    const auto part = [](uint64_t pair, int i) { return static_cast<uint32_t>(pair >> (i * 32)); };
    const auto number = [&](uint64_t pair, int i) { return from_bits(part(pair, i) & 0xffffe000u); };
    float a[16][8], b[8][8];
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) a[lane / 4 + i % 2 * 8][lane % 4 + i / 2 * 4] = number(warp.in[lane][i / 2], i % 2);
      for (int i = 0; i < 2; ++i) b[lane % 4 + i * 4][lane / 4] = number(warp.in[lane][2], i);
    }
    for (int lane = 0; lane < 32; ++lane) {
      float found[4];
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        found[i] = from_bits(part(warp.in[lane][3 + i / 2], i % 2));
        for (int k = 0; k < 8; ++k) found[i] += a[row][k] * b[k][column];
      }
      for (int i = 0; i < 2; ++i) warp.out[lane][3 + i] = to_bits(found[i * 2]) | static_cast<uint64_t>(to_bits(found[i * 2 + 1])) << 32;
    }
  });
  for (int i = 0; i < 4; ++i) c[i] = from_bits(static_cast<uint32_t>(values[3 + i / 2] >> (i % 2 * 32)));
}

// f(address in shared memory, pointer into the array or null beyond it) for every element of a box.
template <class F>
static void for_box(const CUtensorMap& map, const void* tile, const int64_t* at, F f) {
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
static int box_bytes(const CUtensorMap& map, int rank) {
  if (rank != map.rank) fail("a tensor map of another rank");
  int64_t bytes = map.size;
  for (int d = 0; d < rank; ++d) bytes *= map.box[d];
  return static_cast<int>(bytes);
}

struct Load {
  Barrier* barrier;
  int bytes, turns;
  std::function<void()> land;
};
static std::vector<Load> loads;

static void begin_load(Barrier& barrier, const void* tile, int bytes, std::function<void()> land) {
  const unsigned address = address_of(tile);
  right(happens_before::load(address, bytes, &barrier, current));
  std::memset(shared + address, 0xff, static_cast<size_t>(bytes));  // not a number until it is there
  loads.push_back({&barrier, bytes, static_cast<int>(random_() % static_cast<unsigned>(late + 1)), std::move(land)});
}
static void land_loads() {
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
void tma_load(const CUtensorMap& map, Barrier& barrier, void* tile, const int64_t* at, int rank) {
  struct Place { int64_t at[5]; } place;
  const int bytes = box_bytes(map, rank);
  std::copy(at, at + rank, place.at);
  begin_load(barrier, tile, bytes, [=, &map] {
    for_box(map, tile, place.at, [&](unsigned address, uchar* p) {
      if (p != nullptr) std::memcpy(shared + address, p, static_cast<size_t>(map.size));
      else std::memset(shared + address, 0, static_cast<size_t>(map.size));
    });
  });
}
void load(Barrier& barrier, const void* tile, const void* from, int bytes) {
  begin_load(barrier, tile, bytes, [=] { std::memcpy(shared + address_of(tile), from, static_cast<size_t>(bytes)); });
}

struct Stores {  // of a thread
  std::vector<std::function<void()>> open;
  std::deque<std::vector<std::function<void()>>> groups;
  uint32_t committed = 0;
};
static std::vector<Stores> stores;
static int storing[32];  // lane of a warp, the only one that stores
void tma_store(const CUtensorMap& map, const void* tile, const int64_t* at, int rank) {
  struct Place { int64_t at[5]; } place;
  const int bytes = box_bytes(map, rank);
  std::copy(at, at + rank, place.at);
  Stores& of = stores[static_cast<size_t>(current)];
  int& lane = storing[current / 32];
  if (lane >= 0 && lane != current % 32) fail("bulk stores by two lanes of a warp");
  lane = current % 32;
  right(happens_before::access(address_of(tile), bytes, false, happens_before::stores(current / 32), of.committed + 1, current));
  of.open.push_back([=, &map] {
    for_box(map, tile, place.at, [&](unsigned address, uchar* p) {
      if (p != nullptr) std::memcpy(p, shared + address, static_cast<size_t>(map.size));
    });
  });
}
void commit_stores() {
  Stores& of = stores[static_cast<size_t>(current)];
  of.groups.push_back(std::move(of.open));
  of.open.clear();
  ++of.committed;
}
static void finish_stores(int thread, size_t left) {
  Stores& of = stores[static_cast<size_t>(thread)];
  while (of.groups.size() > left) {
    for (auto& leave : of.groups.front()) leave();
    of.groups.pop_front();
  }
}
void wait_stores(int groups) {
  finish_stores(current, static_cast<size_t>(groups));
  const Stores& of = stores[static_cast<size_t>(current)];
  if (storing[current / 32] == current % 32) happens_before::waited(happens_before::stores(current / 32), of.committed - static_cast<uint32_t>(of.groups.size()), current);
}

struct Issued {
  Product product;
  uint32_t a[32][4];
  float* c[32];
};
struct Products {
  std::deque<Issued> queue;
  long long first = 0;  // number of the queue's first
  long long issued[32] = {};
  std::deque<long long> ends[32];  // of committed groups
  uint32_t committed = 0;          // by lane 0
};
static Products products[32];

static unsigned operand_address(uint64_t descriptor, bool transposed, int row, int k) {
  const unsigned start = static_cast<unsigned>(descriptor & 0xffff) << 4;  // with the number of the block
  const unsigned leading = static_cast<unsigned>(descriptor >> 16 & 0x3fff) << 4, stride = static_cast<unsigned>(descriptor >> 32 & 0x3fff) << 4;
  const unsigned mode = static_cast<unsigned>(descriptor >> 62);
  if (mode == 0) {  // blocks of 8x8
    return transposed ? start + row / 8 * stride + k / 8 * leading + k % 8 * 16 + row % 8 * 2
                      : start + row / 8 * stride + k / 8 * leading + row % 8 * 16 + k % 8 * 2;
  }
  if (mode != 1) fail("a swizzle of wgmma other than 128 bytes, or none");
  const unsigned plain = transposed ? start + row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * 2
                                    : start + row / 8 * stride + row % 8 * 128 + k * 2;
  return (swizzled(plain & ~15u, 3)) | (plain & 15u);
}
// Reads `rows` rows of an operand, 16 bytes at a time.
static void access_operand(uint64_t descriptor, bool transposed, int first, int rows) {
  const int warp = current / 32;
  for (int outer = 0; outer < (transposed ? 16 : rows); ++outer) {
    for (int inner = 0; inner < (transposed ? rows : 16); inner += 8) {
      const unsigned address = transposed ? operand_address(descriptor, true, first + inner, outer) : operand_address(descriptor, false, first + outer, inner);
      right(happens_before::access(address, 16, false, happens_before::wgmma(warp), products[warp].committed + 1, current));
    }
  }
}
static void multiply(const Issued& issued, int warp) {
  const Product& product = issued.product;
  float a[16][16];
  for (int i = 0; i < 16; ++i) {
    for (int k = 0; k < 16; ++k) {
      uint16_t bits;
      if (product.registers) {
        const int lane = i % 8 * 4 + k % 8 / 2, word = i / 8 + k / 8 * 2;
        bits = static_cast<uint16_t>(issued.a[lane][word] >> (k % 2 * 16));
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
      float& c = issued.c[i % 8 * 4 + j % 8 / 2][j / 8 * 4 + i / 8 * 2 + j % 2];
      float sum = product.scale ? c : 0.f;
      for (int k = 0; k < 16; ++k) sum += a[i][k] * b[k];
      c = sum;
    }
  }
}
void issue(const Product& product, const uint32_t* a, void* c) {
  Products& of = products[current / 32];
  const int lane = current % 32;
  const auto place = static_cast<size_t>(of.issued[lane]++ - of.first);
  if (place == of.queue.size()) of.queue.push_back({product, {}, {}});
  Issued& mine = of.queue[place];
  if (mine.product.columns != product.columns || mine.product.b_descriptor != product.b_descriptor || mine.product.a_descriptor != product.a_descriptor) {
    fail("lanes of a warp do not agree on a product");
  }
  if (a != nullptr) std::memcpy(mine.a[lane], a, 16);
  mine.c[lane] = static_cast<float*>(c);
  if (lane != 0) return;
  if (!product.registers) access_operand(product.a_descriptor, product.a_transposed, current / 32 % 4 * 16, 16);
  access_operand(product.b_descriptor, product.b_transposed, 0, product.columns);
}
void commit_products() {
  Products& of = products[current / 32];
  of.ends[current % 32].push_back(of.issued[current % 32]);
  if (current % 32 == 0) ++of.committed;
}
void wait_products(int groups) {
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
    for (int lane = 0; lane < 32; ++lane) {
      happens_before::waited(happens_before::wgmma(warp), of.committed - static_cast<uint32_t>(of.ends[0].size()), warp * 32 + lane);
    }
  });
}

}  // namespace emulator

void Barrier::init(int n) {
  count = left = static_cast<int16_t>(n), bytes = 0, phase = 0;
  emulator::right(happens_before::initialize_barrier(this));
  emulator::own_access(this, sizeof *this, true);
}
void Barrier::expect_transaction(int n) { bytes += n; }
void Barrier::complete() {
  if (left < 0) emulator::fail("more arrivals at a barrier than its count");
  ++emulator::progress;
  if (left == 0 && bytes == 0) {
    happens_before::complete_phase(this);
    phase ^= 1, left = count;
  }
}
void Barrier::arrive(int n) {
  emulator::right(happens_before::arrive(this, emulator::current));
  left = static_cast<int16_t>(left - n), complete();
}
void Barrier::wait(int parity) {
  while (static_cast<int>(phase) == parity) emulator::yield();
  happens_before::wait(this, emulator::current);
}

namespace emulator {

static void run_cluster(void (*kernel)(const void*), const void* context) {
  static void (*body)(const void*);
  static const void* with;
  body = kernel, with = context;
  const int count = blocks * threads;
  scheduling = true;
  std::memset(shared, 0xff, static_cast<size_t>(blocks) * kBlock);
  happens_before::begin(threads, blocks, shared, kBlock);
  for (auto& x : named) x = Named();
  for (auto& x : warps) x = Warp();
  for (auto& x : products) x = Products();
  for (auto& x : storing) x = -1;
  loads.clear();
  stores.assign(static_cast<size_t>(count), {});
  fibers.resize(static_cast<size_t>(count));
  alive = count;
  for (auto& fiber : fibers) {
    fiber.stack.resize(48 << 10);
    fiber.begun = fiber.done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, +[] {
      body(with);
      fibers[static_cast<size_t>(current)].done = true;
      --alive, ++progress;
      yield();
    }, 0);
  }
  for (int idle = 0; alive > 0;) {
    const long long before = progress;
    const int warp = static_cast<int>(random_() % static_cast<unsigned>(count / 32));
    for (unsigned turns = 1 + random_() % 32; turns > 0; --turns) {
      const unsigned first = random_();
      for (unsigned lane = first; lane != first + 32; ++lane) {
        current = warp * 32 + static_cast<int>(lane % 32);
        Fiber& fiber = fibers[static_cast<size_t>(current)];
        if (fiber.done) continue;
        blockIdx.x = first_block + rank();
        scheduling = false;
        go_on(fiber);
        scheduling = true;
        if (failure != nullptr) return;
      }
    }
    land_loads();
    idle = progress == before ? idle + 1 : 0;
    if (idle > 20000) fail("nothing goes on any more");
  }
  right(happens_before::settle());
  right(happens_before::end());
  if (!loads.empty()) fail("a load is under way when the block ends");
  for (int thread = 0; thread < count; ++thread) {
    if (!stores[static_cast<size_t>(thread)].open.empty()) fail("a store that belongs to no group");
    finish_stores(thread, 0);
  }
  for (auto& x : products) {
    if (!x.queue.empty()) fail("a product that nobody waited for");
  }
}

const char* run(int x, int y, int z, int threads_, int blocks_, int seed, int late_, void (*kernel)(const void*), const void* context) {
  random_.seed(static_cast<unsigned>(seed));
  late = late_, threads = threads_, blocks = blocks_;
  failure = nullptr;
  gridDim = {x, y, z};
  try {
    for (blockIdx.z = 0; blockIdx.z < z; ++blockIdx.z) {
      for (blockIdx.y = 0; blockIdx.y < y; ++blockIdx.y) {
        for (first_block = 0; first_block < x && failure == nullptr; first_block += blocks) run_cluster(kernel, context);
      }
    }
  } catch (int) {
  }
  return failure;
}

}  // namespace emulator

// What the compiler calls with -fsanitize=thread, before every access to memory.
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
#define ACCESSES(bytes)                                                                    \
  void __tsan_read##bytes(void* p) { emulator::own_access(p, bytes, false); }              \
  void __tsan_write##bytes(void* p) { emulator::own_access(p, bytes, true); }              \
  void __tsan_unaligned_read##bytes(void* p) { emulator::own_access(p, bytes, false); }    \
  void __tsan_unaligned_write##bytes(void* p) { emulator::own_access(p, bytes, true); }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void* p, size_t bytes) { emulator::own_access(p, bytes, false); }
void __tsan_write_range(void* p, size_t bytes) { emulator::own_access(p, bytes, true); }
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  emulator::own_access(from, bytes, false), emulator::own_access(to, bytes, true);
  return std::memcpy(to, from, bytes);
}
void* __tsan_memset(void* to, int x, size_t bytes) {
  emulator::own_access(to, bytes, true);
  return std::memset(to, x, bytes);
}
}
