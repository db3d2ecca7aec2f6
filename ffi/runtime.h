// A driver and what is loaded through it.

#ifndef JAX_QLA_FFI_RUNTIME_H_
#define JAX_QLA_FFI_RUNTIME_H_

#include <string>

#include "driver.h"
#include "kernel_cache.h"

namespace jax_qla {

struct Runtime {
  explicit Runtime(const std::string& library) : driver(library), kernels(driver) {}

  // For the platform "CUDA": libcuda.so.1, or the library that $JAX_QLA_LIBCUDA names. Opened by the first call, which
  // throws Failure where there is no driver; later calls try again.
  static Runtime& Cuda();

  // For the platform "cpu", where tests run the handler against a driver that records what it is asked: the library
  // that $JAX_QLA_LIBCUDA names, and nothing else, because a real driver must never get host addresses.
  static Runtime& Host();

  Driver driver;
  KernelCache kernels;
};

}  // namespace jax_qla

#endif  // JAX_QLA_FFI_RUNTIME_H_
