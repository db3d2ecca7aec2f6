#include "launch.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <variant>

#include "failure.h"

namespace jax_qla {
namespace {

// The argument values of one launch, and the addresses of those values as the driver takes them.
class Parameters {
 public:
  Parameters(const Driver& driver, const KernelLaunch& kernel, const Buffer* buffers) {
    for (const Argument& argument : kernel.arguments) {
      addresses_[count_] = Store(driver, kernel, argument, buffers);
      ++count_;
    }
  }

  void** addresses() { return addresses_.data(); }

 private:
  void* Store(const Driver& driver, const KernelLaunch& kernel, const Argument& argument, const Buffer* buffers) {
    if (const auto* map = std::get_if<TensorMapArgument>(&argument)) {
      CUtensorMap* slot = &maps_[map_count_++];
      EncodeTensorMap(driver, *map, buffers[map->buffer], kernel, slot);
      return slot;
    }
    uint64_t* slot = &words_[count_];
    if (const auto* pointer = std::get_if<PointerArgument>(&argument)) {
      *slot = reinterpret_cast<uintptr_t>(buffers[pointer->buffer].data);
    } else {
      *slot = std::get<ScalarArgument>(argument).bits;
    }
    return slot;
  }

  // Left uninitialised: what is used is written first, and the rest is most of it. Sizes are kept by ParsePlan.
  std::array<CUtensorMap, kMaxTensorMaps> maps_;
  std::array<uint64_t, kMaxArguments> words_;
  std::array<void*, kMaxArguments> addresses_;
  size_t count_ = 0;
  size_t map_count_ = 0;
};

}  // namespace

void Launch(const Driver& driver, const KernelLaunch& kernel, CUfunction function, CUstream stream,
            const Buffer* buffers) {
  Parameters parameters(driver, kernel, buffers);

  std::array<CUlaunchAttribute, 2> attributes = {};
  unsigned attribute_count = 0;
  if (kernel.cluster.volume() > 1) {
    CUlaunchAttribute& attribute = attributes[attribute_count++];
    attribute.id = kLaunchClusterDimension;
    attribute.value.cluster_dimension = {kernel.cluster.x, kernel.cluster.y, kernel.cluster.z};
  }
  if (kernel.dependent_launch) {
    CUlaunchAttribute& attribute = attributes[attribute_count++];
    attribute.id = kLaunchProgrammaticStreamSerialization;
    attribute.value.programmatic_stream_serialization = 1;
  }

  CUlaunchConfig config = {};
  config.grid_x = kernel.grid.x;
  config.grid_y = kernel.grid.y;
  config.grid_z = kernel.grid.z;
  config.block_x = kernel.block.x;
  config.block_y = kernel.block.y;
  config.block_z = kernel.block.z;
  config.shared_bytes = kernel.shared_bytes;
  config.stream = stream;
  config.attributes = attributes.data();
  config.attribute_count = attribute_count;
  if (CUresult error = driver.LaunchKernelEx(&config, function, parameters.addresses(), nullptr);
      error != kCudaSuccess) {
    throw driver.Failed(
        error, Concat("The CUDA driver refused to launch kernel ", kernel.function, " with grid (", kernel.grid.x, ", ",
                      kernel.grid.y, ", ", kernel.grid.z, "), block (", kernel.block.x, ", ", kernel.block.y, ", ",
                      kernel.block.z, "), cluster (", kernel.cluster.x, ", ", kernel.cluster.y, ", ", kernel.cluster.z,
                      ") and ", kernel.shared_bytes, " bytes of dynamic shared memory"));
  }
}

}  // namespace jax_qla
