// Kernels loaded into CUDA contexts, each cubin once a context, whoever asks and from whichever thread.

#ifndef JAX_QLA_FFI_KERNEL_CACHE_H_
#define JAX_QLA_FFI_KERNEL_CACHE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "driver.h"
#include "plan.h"

namespace jax_qla {

// Loaded modules stay for the life of the process, as the primary contexts that XLA uses do.
class KernelCache {
 public:
  explicit KernelCache(const Driver& driver) : driver_(driver) {}

  // The function that `kernel` names, loaded into `context` (which must be current) and allowed the shared memory and
  // cluster that it asks for. Throws Failure where the device is not of compute capability 9.0, the cubin is missing or
  // corrupted, or it does not hold this kernel with these arguments.
  CUfunction Load(CUcontext context, const KernelLaunch& kernel);

 private:
  struct Function {
    CUfunction handle = nullptr;
    uint32_t shared_bytes = 0;
    bool non_portable_cluster = false;
  };
  struct Module {
    CUmodule handle = nullptr;
    std::map<std::string, Function> functions;
  };
  struct Context {
    std::mutex mutex;  // held while loading, so that devices load side by side and threads of one device do not
    bool is_hopper = false;
    std::map<std::string, Module> modules;  // by sha256
  };

  Context& Entry(CUcontext context);
  void CheckDevice(Context& entry) const;
  Module& LoadModule(Context& entry, const KernelLaunch& kernel) const;
  Function& LoadFunction(Module& module, const KernelLaunch& kernel) const;
  void Allow(Function& function, const KernelLaunch& kernel) const;

  const Driver& driver_;
  std::mutex mutex_;
  std::map<CUcontext, std::unique_ptr<Context>> contexts_;
};

}  // namespace jax_qla

#endif  // JAX_QLA_FFI_KERNEL_CACHE_H_
