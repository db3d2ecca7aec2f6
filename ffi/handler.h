// The XLA FFI handler "jax_qla.launch.v1": launches the kernels of a plan, in order, on XLA's stream.

#ifndef JAX_QLA_FFI_HANDLER_H_
#define JAX_QLA_FFI_HANDLER_H_

#include "xla/ffi/api/ffi.h"

namespace jax_qla {

// The name carries the version of the attributes and of what they mean.
inline constexpr char kLaunchTarget[] = "jax_qla.launch.v1";
// Each platform has a type registry of its own, so each gets a type of its own.
inline constexpr char kLaunchStateType[] = "jax_qla.launch_state.v1";

// What XLA is told of the handler on one platform. The state type must be registered before the stages.
struct Registration {
  XLA_FFI_Handler* instantiate;
  XLA_FFI_Handler* initialize;  // null where XLA has no such stage
  XLA_FFI_Handler* execute;
  XLA_FFI_TypeId* state_type_id;
  const XLA_FFI_TypeInfo* state_type_info;
};

Registration CudaRegistration();  // platform "CUDA"
Registration HostRegistration();  // platform "cpu": for tests, see Runtime::Host

}  // namespace jax_qla

#endif  // JAX_QLA_FFI_HANDLER_H_
