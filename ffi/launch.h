// Puts one kernel of a plan on a stream.

#ifndef JAX_QLA_FFI_LAUNCH_H_
#define JAX_QLA_FFI_LAUNCH_H_

#include "driver.h"
#include "plan.h"
#include "tensor_map.h"

namespace jax_qla {

// Encodes the kernel's tensor maps and launches it on `stream`, whose context must be current. `buffers` holds at least
// Plan::buffers entries. Allocates nothing, waits for nothing, reads no device memory. Throws Failure.
void Launch(const Driver& driver, const KernelLaunch& kernel, CUfunction function, CUstream stream,
            const Buffer* buffers);

}  // namespace jax_qla

#endif  // JAX_QLA_FFI_LAUNCH_H_
