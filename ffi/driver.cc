#include "driver.h"

#include <dlfcn.h>

namespace jax_qla {
namespace {

void* Symbol(void* handle, const std::string& library, const char* symbol) {
  void* address = dlsym(handle, symbol);
  if (address == nullptr) {
    throw Failure(FailureCode::kFailedPrecondition, Concat("The CUDA driver library ", library, " has no ", symbol,
                                                           "; jax_qla needs the driver of CUDA 12.0 or newer."));
  }
  return address;
}

}  // namespace

Driver::Driver(const std::string& library) {
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    throw Failure(FailureCode::kFailedPrecondition,
                  Concat("jax_qla cannot open the CUDA driver library ", library, " (", dlerror(),
                         "); its CUDA kernels need an NVIDIA driver, elsewhere use implementation=\"xla\"."));
  }
#define JAX_QLA_RESOLVE(member, symbol, parameters) \
  member = reinterpret_cast<decltype(member)>(Symbol(handle, library, symbol));
  JAX_QLA_DRIVER_FUNCTIONS(JAX_QLA_RESOLVE)
#undef JAX_QLA_RESOLVE
  FuncGetParamInfo = reinterpret_cast<decltype(FuncGetParamInfo)>(dlsym(handle, "cuFuncGetParamInfo"));

  if (CUresult error = Init(0); error != kCudaSuccess) {
    throw Failed(error, Concat("jax_qla cannot initialise the CUDA driver of ", library));
  }
}

Failure Driver::Failed(CUresult error, std::string_view what) const {
  const char* name = nullptr;
  const char* text = nullptr;
  GetErrorName(error, &name);
  GetErrorString(error, &text);
  return Failure(FailureCode::kInternal, Concat(what, ": ", name != nullptr ? name : Concat("CUDA error ", error), " (",
                                                text != nullptr ? text : "no description", ")."));
}

CurrentContext::CurrentContext(const Driver& driver, CUcontext context) : driver_(driver) {
  CUcontext current = nullptr;
  if (CUresult error = driver_.CtxGetCurrent(&current); error != kCudaSuccess) {
    throw driver_.Failed(error, "jax_qla cannot read the current CUDA context");
  }
  if (current == context) {
    return;
  }
  if (CUresult error = driver_.CtxPushCurrent(context); error != kCudaSuccess) {
    throw driver_.Failed(error, "jax_qla cannot make the CUDA context of XLA's stream current");
  }
  pushed_ = true;
}

CurrentContext::~CurrentContext() {
  if (pushed_) {
    CUcontext popped = nullptr;
    driver_.CtxPopCurrent(&popped);
  }
}

}  // namespace jax_qla
