#include "tensor_map.h"

#include <cstdint>
#include <string>

#include "failure.h"

namespace jax_qla {
namespace {

template <typename T>
std::string List(const T* values, size_t count) {
  std::string list = "(";
  for (size_t i = 0; i < count; ++i) {
    list += Concat(i == 0 ? "" : ", ", values[i]);
  }
  return list + ")";
}

std::string Describe(const TensorMapArgument& argument, const KernelLaunch& kernel) {
  return Concat("The tensor map of kernel ", kernel.function, " over buffer ", argument.buffer);
}

}  // namespace

void EncodeTensorMap(const Driver& driver, const TensorMapArgument& argument, const Buffer& buffer,
                     const KernelLaunch& kernel, CUtensorMap* map) {
  if (const auto address = reinterpret_cast<uintptr_t>(buffer.data); address % argument.alignment != 0) {
    throw Failure(FailureCode::kInvalidArgument, Concat(Describe(argument, kernel), " needs an address aligned to ",
                                                        argument.alignment, " bytes, XLA gave address ", address, "."));
  }
  if (argument.extent > buffer.bytes) {
    throw Failure(FailureCode::kInvalidArgument, Concat(Describe(argument, kernel), " reaches ", argument.extent,
                                                        " bytes, the buffer has ", buffer.bytes, "."));
  }
  const CUresult error =
      driver.TensorMapEncodeTiled(map, argument.data_type, argument.rank, buffer.data, argument.dims, argument.strides,
                                  argument.box, argument.element_strides, argument.interleave, argument.swizzle,
                                  argument.l2_promotion, argument.out_of_bounds_fill);
  if (error != kCudaSuccess) {
    throw driver.Failed(
        error,
        Concat(Describe(argument, kernel), ", data type ", argument.data_type, ", dimensions ",
               List(argument.dims, argument.rank), ", strides ", List(argument.strides, argument.rank - 1), ", box ",
               List(argument.box, argument.rank), ", swizzle ", argument.swizzle, ", was refused by the CUDA driver"));
  }
}

}  // namespace jax_qla
