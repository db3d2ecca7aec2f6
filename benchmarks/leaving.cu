// What a block costs that finds nothing to do, by what it does before it leaves: of batches with many places for
// sequences, of which few are taken, most blocks do. On a Hopper GPU:
//
//   nvcc -gencode arch=compute_90a,code=sm_90a -std=c++17 -O3 -o leaving benchmarks/leaving.cu && ./leaving
//
// Prints nanoseconds of the card a block, of 16384 blocks of 512 threads and 200 KB of shared memory, so that a
// multiprocessor has one at a time, and of clusters of two such blocks; of kernels launched one after the other, the
// median of 15 times ten.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

constexpr int kHeads = 32, kPlaces = 512, kThreads = 512, kShared = 200 * 1024, kBarriers = 13, kLaunches = 10;

enum class Before {
  kNothing,
  kLoad,        // of the table of sequences by all warps, from the first-level cache where it is there
  kTwoLoads,    // the second by what the first found
  kThreeLoads,
  kPastCache,   // a load that the first-level cache has no part in
  kOneWarp,     // loads, and tells the others
  kBarriers,    // mbarriers initialised by one warp, all meet, then kLoad: what TileLang has kernels begin with
};

void Check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  std::exit(1);
}

__device__ int Load(const int* p) {
  int x;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}

// `table` is of zeros, so that all leave, which the compiler cannot know.
template <Before before>
__global__ void __launch_bounds__(kThreads, 1) Leave(const int* table, float* out) {
  extern __shared__ float shared[];
  int found = 0;
  if (before == Before::kBarriers) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kBarriers; ++i) {
        const unsigned barrier = static_cast<unsigned>(__cvta_generic_to_shared(shared)) + 8 * i;
        asm volatile("mbarrier.init.shared.b64 [%0], 128;" ::"r"(barrier) : "memory");
      }
      asm volatile("fence.proxy.async;" ::: "memory");
    }
    __syncthreads();
  }
  if (before == Before::kPastCache) {
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(table + blockIdx.y) : "memory");
  } else if (before == Before::kOneWarp) {
    if (threadIdx.x < 32) {
      found = Load(table + blockIdx.y);
      if (threadIdx.x == 0) shared[0] = static_cast<float>(found);
    }
    __syncthreads();
    found = static_cast<int>(shared[0]);
  } else if (before != Before::kNothing) {
    const int loads = before == Before::kTwoLoads ? 2 : before == Before::kThreeLoads ? 3 : 1;
    found = static_cast<int>(blockIdx.y);
    for (int i = 0; i < loads; ++i) found = Load(table + found);
  } else {
    found = -static_cast<int>(gridDim.z / 2);  // 0, for there is one
  }
  if (__any_sync(0xffffffffu, found == 0)) return;
  for (int n = 0; n < found; ++n) out[threadIdx.x] += shared[threadIdx.x + n];
}

template <Before before>
void Time(const char* name, const int* table, float* out) {
  Check(cudaFuncSetAttribute(Leave<before>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  std::printf("%-58s", name);
  for (unsigned blocks = 1; blocks <= 2; ++blocks) {
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {blocks, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(kHeads, kPlaces), config.blockDim = dim3(kThreads), config.dynamicSmemBytes = kShared;
    config.attrs = &cluster, config.numAttrs = blocks > 1;
    cudaEvent_t begin, end;
    Check(cudaEventCreate(&begin)), Check(cudaEventCreate(&end));
    std::vector<float> times;
    for (int turn = 0; turn < 16; ++turn) {
      Check(cudaEventRecord(begin));
      for (int i = 0; i < kLaunches; ++i) Check(cudaLaunchKernelEx(&config, Leave<before>, table, out));
      Check(cudaEventRecord(end)), Check(cudaEventSynchronize(end));
      float milliseconds;
      Check(cudaEventElapsedTime(&milliseconds, begin, end));
      if (turn > 0) times.push_back(milliseconds * 1e6f / kLaunches / kHeads / kPlaces);
    }
    std::nth_element(times.begin(), times.begin() + 7, times.end());
    std::printf("  %5.2f ns", times[7]);
  }
  std::printf("\n");
}

}  // namespace

int main() {
  int* table;
  float* out;
  Check(cudaMalloc(&table, kPlaces * sizeof(int))), Check(cudaMalloc(&out, kThreads * sizeof(float)));
  Check(cudaMemset(table, 0, kPlaces * sizeof(int)));
  std::printf("%-58s  %8s  %8s\n", "before it leaves", "a block", "of two");
  Time<Before::kNothing>("nothing", table, out);
  Time<Before::kLoad>("a load", table, out);
  Time<Before::kTwoLoads>("two, one after the other", table, out);
  Time<Before::kThreeLoads>("three", table, out);
  Time<Before::kPastCache>("a load past the first-level cache", table, out);
  Time<Before::kOneWarp>("a load by one warp, all meet", table, out);
  Time<Before::kBarriers>("barriers initialised, all meet, a load", table, out);
}
