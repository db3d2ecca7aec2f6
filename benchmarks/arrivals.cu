// Whether what a warp does to shared memory before it arrives at an mbarrier is done when another, which waited there,
// goes on: what the kernels' fences are for, and which of them are needed. On a Hopper GPU:
//
//   nvcc -gencode arch=compute_90a,code=sm_90a -std=c++17 -O3 -o arrivals benchmarks/arrivals.cu && ./arrivals
//
// On every multiprocessor one warpgroup, or two, stores a tile or loads one and arrives; another warpgroup, or block,
// waits, and reads or overwrites the tile at once, 100 000 or 300 000 turns each. Prints in how many turns of all
// threads that look what is found is not what the tile should hold then. `clog` stores before have all lanes in one
// bank, so that the queue of shared memory is long when the warp arrives.

#include <cuda_bf16.h>

#include <cstdint>
#include <cstdio>
#include <initializer_list>

namespace {

using Count = unsigned long long;

constexpr int kBlocks = 132, kThreads = 384, kWriters = 256, kTile = 16384, kShared = 100 * 1024;

enum class Reader { kLoad, kWgmma, kBulk };      // ld.shared, wgmma, cp.async.bulk to global memory
enum class Fence { kNone, kWaits, kArrives };    // of whoever waits, before it reads; of whoever arrives, before that
enum class Loads { kUnderWay, kFenced, kUsed };  // when their warp arrives
enum class Order { kNone, kBlock, kProxy, kCluster };  // fence before an arrival at another block's mbarrier

__device__ unsigned Address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }
__device__ void Init(void* barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(Address(barrier)), "r"(count));
}
__device__ void Arrive(void* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(Address(barrier)) : "memory");
}
// Once x, which has been loaded and is not -1, is in its register: what follows a load does not wait for it by itself.
__device__ void ArriveAfter(unsigned x, unsigned barrier) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %0, 0xffffffff;\n@p mbarrier.arrive.shared::cluster.b64 _, [%1];\n}" ::"r"(x),
      "r"(barrier)
      : "memory");
}
__device__ void Wait(void* barrier, int parity) {
  asm volatile(
      "{\n.reg .pred p;\nL: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@!p bra L;\n}" ::"r"(Address(barrier)),
      "r"(parity)
      : "memory");
}
__device__ void ProxyFence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ unsigned OfBlock(unsigned address, unsigned rank) {
  unsigned mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}
__device__ void ArriveAt(void* barrier, unsigned rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(OfBlock(Address(barrier), rank)) : "memory");
}
__device__ void Meet() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// What all elements of the tile are in a turn: two bf16, exact and never 0.
__device__ float Number(int turn) { return static_cast<float>(turn % 127 + 1); }
__device__ unsigned Pair(int turn) {
  const __nv_bfloat162 x = __floats2bfloat162_rn(Number(turn), Number(turn));
  return *reinterpret_cast<const unsigned*>(&x);
}
__device__ void Clog(unsigned scratch, int clog) {
  for (int i = 0; i < clog; ++i) {
    asm volatile(
        "st.shared.u32 [%0], %1;" ::"r"(scratch + threadIdx.x % 32 * 1024 + threadIdx.x / 32 * 128 + i % 32 * 4), "r"(i)
        : "memory");
  }
}
// Eight warps fill the tile by stmatrix.
__device__ void Store(unsigned tile, unsigned pair) {
  const unsigned to = tile + threadIdx.x / 32 * 2048 + threadIdx.x % 32 * 16;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %1, %1, %1};" ::"r"(to + i * 512), "r"(pair)
                 : "memory");
  }
}
// Of a matrix in shared memory whose core matrices lie one behind the other; all of its elements are alike.
__device__ uint64_t Descriptor(unsigned address) {
  return (address & 0x3FFFF) >> 4 | static_cast<uint64_t>(128 >> 4) << 16 | static_cast<uint64_t>(256 >> 4) << 32;
}

template <Reader reader, Fence fence>
__global__ void __launch_bounds__(kThreads, 1) Stores(int turns, int clog, Count* wrong, unsigned* out) {
  extern __shared__ __align__(1024) unsigned char memory[];
  unsigned char *tile = memory, *ones = memory + kTile, *scratch = memory + 2 * kTile;
  uint64_t *full = reinterpret_cast<uint64_t*>(memory + kTile + 1024), *empty = full + 1;
  const int thread = threadIdx.x;
  if (thread == 0) {
    Init(full, kWriters), Init(empty, reader == Reader::kBulk ? 1 : kThreads - kWriters);
  }
  if (thread < 128) {
    reinterpret_cast<unsigned*>(ones)[thread] = Pair(0);
  }
  ProxyFence();
  __syncthreads();
  unsigned found = 0;
  if (thread < kWriters) {
    for (int turn = 0; turn < turns; ++turn) {
      if (turn > 0) {
        Wait(empty, (turn + 1) % 2);
      }
      Clog(Address(scratch), clog);
      Store(Address(tile), Pair(turn));
      if (fence == Fence::kArrives) {
        ProxyFence();
      }
      Arrive(full);
    }
  } else {
    for (int turn = 0; turn < turns; ++turn) {
      bool different = false;
      Wait(full, turn % 2);
      if (fence == Fence::kWaits) {
        ProxyFence();
      }
      if (reader == Reader::kLoad) {
        for (int i = 0; i < 8; ++i) {
          unsigned x;
          asm volatile("ld.shared.u32 %0, [%1];"
                       : "=r"(x)
                       : "r"(Address(tile) + i * 2048 + (thread - kWriters) * 16)
                       : "memory");
          different |= x != Pair(turn);
        }
        Arrive(empty);                        // what it loads may still be under way
      } else if (reader == Reader::kWgmma) {  // sums of the tile's rows, the last written first
        float d[4] = {};
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int i = 7; i >= 0; --i) {
          asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
                       : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                       : "l"(Descriptor(Address(tile) + i * 2048)), "l"(Descriptor(Address(ones))));
        }
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])::"memory");
        for (int i = 0; i < 4; ++i) {
          different |= d[i] != 128.f * Number(turn);
        }
        Arrive(empty);
      } else if (thread == kWriters) {
        unsigned* to = out + blockIdx.x * (kTile / 4);
        unsigned seen = 0;
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(Address(tile)),
                     "r"(kTile)
                     : "memory");
        asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory");
        for (int i = 0; i < kTile / 4; i += 61) {
          unsigned x;
          asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(x) : "l"(to + i) : "memory");
          different |= x != Pair(turn);
          seen |= x;
        }
        ArriveAfter(seen, Address(empty));
      }
      found += different;
    }
  }
  if (found > 0) {
    atomicAdd(wrong, static_cast<Count>(found));
  }
}

// One warpgroup loads the tile and arrives; a thread that waits has a bulk copy overwrite it. `images`: the tile of
// every turn modulo 2.
template <Loads loads>
__global__ void __launch_bounds__(160, 1) Overwritten(int turns, int clog, Count* wrong, const unsigned* images) {
  extern __shared__ __align__(1024) unsigned char memory[];
  unsigned char *tile = memory, *scratch = memory + 2 * kTile;
  uint64_t *full = reinterpret_cast<uint64_t*>(memory + kTile), *empty = full + 1;
  const int thread = threadIdx.x;
  if (thread == 0) {
    Init(full, 1), Init(empty, 128);
  }
  ProxyFence();
  __syncthreads();
  unsigned found = 0;
  if (thread < 128) {
    for (int turn = 0; turn < turns; ++turn) {
      uint4 x[8];
      unsigned seen = 0, different = 0;
      Wait(full, turn % 2);
      Clog(Address(scratch), clog);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[i].x), "=r"(x[i].y), "=r"(x[i].z), "=r"(x[i].w)
                     : "r"(Address(tile) + i * 2048 + thread * 16)
                     : "memory");
      }
      if (loads == Loads::kFenced) {
        ProxyFence();
      }
      if (loads != Loads::kUsed) {
        Arrive(empty);
      }
      for (int i = 0; i < 8; ++i) {
        seen |= x[i].x | x[i].y | x[i].z | x[i].w;
        different |= (x[i].x | x[i].y | x[i].z | x[i].w) ^ (turn % 2);
      }
      if (loads == Loads::kUsed) {
        ArriveAfter(seen, Address(empty));
      }
      found += different != 0;
    }
  } else if (thread == 128) {
    for (int turn = 0; turn < turns; ++turn) {
      if (turn > 0) {
        Wait(empty, (turn + 1) % 2);
      }
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(Address(full)), "r"(kTile) : "memory");
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                       Address(tile)),
                   "l"(images + turn % 2 * (kTile / 4)), "r"(kTile), "r"(Address(full))
                   : "memory");
    }
  }
  if (found > 0) {
    atomicAdd(wrong, static_cast<Count>(found));
  }
}

// The second block of a cluster reads the tile of the first, whose warps arrive at its mbarrier.
template <Order order, bool used>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kWriters, 1) Remote(int turns, int clog, Count* wrong) {
  extern __shared__ __align__(1024) unsigned char memory[];
  unsigned char *tile = memory, *scratch = memory + 2 * kTile;
  uint64_t *full = reinterpret_cast<uint64_t*>(memory + kTile), *empty = full + 1;
  const int thread = threadIdx.x;
  if (thread == 0) {
    Init(full, kWriters), Init(empty, kWriters);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  Meet();
  unsigned found = 0;
  if (blockIdx.x % 2 == 0) {
    for (int turn = 0; turn < turns; ++turn) {
      if (turn > 0) {
        Wait(empty, (turn + 1) % 2);
      }
      Clog(Address(scratch), clog);
      Store(Address(tile), Pair(turn));
      if (order == Order::kBlock) {
        asm volatile("fence.acq_rel.cta;" ::: "memory");
      }
      if (order == Order::kProxy) {
        ProxyFence();
      }
      if (order == Order::kCluster) {
        asm volatile("fence.acq_rel.cluster;" ::: "memory");
      }
      ArriveAt(full, 1);
    }
  } else {
    for (int turn = 0; turn < turns; ++turn) {
      bool different = false;
      unsigned seen = 0;
      Wait(full, turn % 2);
      for (int i = 3; i >= 0; --i) {
        unsigned x;
        asm volatile("ld.shared::cluster.u32 %0, [%1];"
                     : "=r"(x)
                     : "r"(OfBlock(Address(tile), 0) + i * 4096 + thread * 16)
                     : "memory");
        different |= x != Pair(turn);
        seen |= x;
      }
      if (used) {
        ArriveAfter(seen, OfBlock(Address(empty), 0));
      }
      if (!used) {
        ArriveAt(empty, 0);
      }
      found += different;
    }
  }
  Meet();
  if (found > 0) {
    atomicAdd(wrong, static_cast<Count>(found));
  }
}

template <typename Kernel, typename... Arguments>
void Report(const char* what, Kernel kernel, int blocks, int threads, int turns, int clog, Arguments... arguments) {
  Count *wrong, found;
  cudaEvent_t begin, end;
  float milliseconds;
  cudaMalloc(&wrong, sizeof(found));
  cudaMemset(wrong, 0, sizeof(found));
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  cudaEventRecord(begin);
  kernel<<<blocks, threads, kShared>>>(turns, clog, wrong, arguments...);
  cudaEventRecord(end);
  const cudaError_t error = cudaDeviceSynchronize();
  cudaEventElapsedTime(&milliseconds, begin, end);
  cudaMemcpy(&found, wrong, sizeof(found), cudaMemcpyDeviceToHost);
  std::printf("%-62s clog %2d: %10llu wrong, %5.0f ns a turn%s%s\n", what, clog, found, milliseconds * 1e6 / turns,
              error == cudaSuccess ? "" : ", ", error == cudaSuccess ? "" : cudaGetErrorString(error));
  cudaFree(wrong);
}

}  // namespace

int main() {
  unsigned *out, *images;
  cudaMalloc(&out, kBlocks * kTile);
  cudaMalloc(&images, 2 * kTile);
  static unsigned host[2 * kTile / 4];
  for (int i = kTile / 4; i < 2 * kTile / 4; ++i) {
    host[i] = 1;
  }
  cudaMemcpy(images, host, sizeof(host), cudaMemcpyHostToDevice);
  for (const int clog : {0, 1, 2, 4, 16}) {
    const auto stores = [&](const char* what, auto kernel, int turns) {
      Report(what, kernel, kBlocks, kThreads, turns, clog, out);
    };
    stores("stores, ld.shared, stores over them, no fence", Stores<Reader::kLoad, Fence::kNone>, 300000);
    stores("stores, wgmma, no fence", Stores<Reader::kWgmma, Fence::kNone>, 300000);
    stores("stores, wgmma, proxy fence of who waits", Stores<Reader::kWgmma, Fence::kWaits>, 300000);
    stores("stores, wgmma, proxy fence of who arrives", Stores<Reader::kWgmma, Fence::kArrives>, 300000);
    stores("stores, bulk copy, no fence", Stores<Reader::kBulk, Fence::kNone>, 100000);
    stores("stores, bulk copy, proxy fence of who waits", Stores<Reader::kBulk, Fence::kWaits>, 100000);
    stores("stores, bulk copy, proxy fence of who arrives", Stores<Reader::kBulk, Fence::kArrives>, 100000);
    const auto loads = [&](const char* what, auto kernel) { Report(what, kernel, kBlocks, 160, 300000, clog, images); };
    loads("loads, bulk copy over them, under way at the arrival", Overwritten<Loads::kUnderWay>);
    loads("loads, bulk copy over them, proxy fence of who arrives", Overwritten<Loads::kFenced>);
    loads("loads, bulk copy over them, used before the arrival", Overwritten<Loads::kUsed>);
    const auto remote = [&](const char* what, auto kernel) { Report(what, kernel, kBlocks, kWriters, 300000, clog); };
    remote("stores, read by the cluster's other block, no fence", Remote<Order::kNone, true>);
    remote("stores, read by the cluster's other block, fence.acq_rel.cta", Remote<Order::kBlock, true>);
    remote("stores, read by the cluster's other block, proxy fence", Remote<Order::kProxy, true>);
    remote("stores, read by the cluster's other block, fence.acq_rel.cluster", Remote<Order::kCluster, true>);
    remote("... fence.acq_rel.cta, what it reads under way at its arrival", Remote<Order::kBlock, false>);
  }
  return 0;
}
