// Tensor maps (TMA descriptors) of a launch, encoded for the addresses that XLA hands over in each call.

#ifndef JAX_QLA_FFI_TENSOR_MAP_H_
#define JAX_QLA_FFI_TENSOR_MAP_H_

#include <cstddef>

#include "driver.h"
#include "plan.h"

namespace jax_qla {

// An operand or result of the call.
struct Buffer {
  void* data;  // device address
  size_t bytes;
};

// Encodes the map of `argument` over `buffer` into `map`. Throws Failure where the buffer is misaligned or smaller than
// what the map can reach, or the driver refuses the geometry; `kernel` is named in the sentence.
void EncodeTensorMap(const Driver& driver, const TensorMapArgument& argument, const Buffer& buffer,
                     const KernelLaunch& kernel, CUtensorMap* map);

}  // namespace jax_qla

#endif  // JAX_QLA_FFI_TENSOR_MAP_H_
