#include "kernel_cache.h"

#include "cubin_files.h"
#include "failure.h"

namespace jax_qla {
namespace {

// The largest cluster that every device of an architecture can run; above it a kernel must opt in.
constexpr uint64_t kPortableClusterBlocks = 8;

// Dynamic shared memory that a kernel has without asking.
constexpr uint32_t kUnaskedSharedBytes = 48 * 1024;

size_t ParameterBytes(const Argument& argument) {
  if (const auto* scalar = std::get_if<ScalarArgument>(&argument)) {
    return scalar->bytes;
  }
  return std::holds_alternative<TensorMapArgument>(argument) ? sizeof(CUtensorMap) : sizeof(void*);
}

// Holds the plan's arguments against the kernel's own parameter list: the driver would read beyond a short one.
void CheckParameters(const Driver& driver, CUfunction function, const KernelLaunch& kernel) {
  if (driver.FuncGetParamInfo == nullptr) {
    return;
  }
  const size_t arguments = kernel.arguments.size();
  for (size_t i = 0; i <= arguments; ++i) {
    size_t offset = 0;
    size_t bytes = 0;
    const CUresult error = driver.FuncGetParamInfo(function, i, &offset, &bytes);
    const bool exists = error == kCudaSuccess;
    if (!exists && error != kCudaErrorInvalidValue) {
      throw driver.Failed(error, Concat("The parameters of kernel ", kernel.function, " cannot be read"));
    }
    if (exists != (i < arguments)) {
      throw Failure(FailureCode::kInvalidArgument,
                    Concat("The launch plan has ", arguments, " arguments for kernel ", kernel.function,
                           ", the kernel in ", kernel.cubin, ".cubin has ", exists ? "more" : "fewer", "."));
    }
    if (exists && bytes != ParameterBytes(kernel.arguments[i])) {
      throw Failure(FailureCode::kInvalidArgument,
                    Concat("Argument ", i, " of the launch plan for kernel ", kernel.function, " has ",
                           ParameterBytes(kernel.arguments[i]), " bytes, the kernel in ", kernel.cubin, ".cubin takes ",
                           bytes, "."));
    }
  }
}

}  // namespace

CUfunction KernelCache::Load(CUcontext context, const KernelLaunch& kernel) {
  Context& entry = Entry(context);
  const std::lock_guard<std::mutex> lock(entry.mutex);
  CheckDevice(entry);
  Function& function = LoadFunction(LoadModule(entry, kernel), kernel);
  CheckParameters(driver_, function.handle, kernel);
  Allow(function, kernel);
  return function.handle;
}

KernelCache::Context& KernelCache::Entry(CUcontext context) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::unique_ptr<Context>& entry = contexts_[context];
  if (entry == nullptr) {
    entry = std::make_unique<Context>();
  }
  return *entry;
}

void KernelCache::CheckDevice(Context& entry) const {
  if (entry.is_hopper) {
    return;
  }
  CUdevice device = 0;
  int major = 0;
  int minor = 0;
  CUresult error = driver_.CtxGetDevice(&device);
  if (error == kCudaSuccess) {
    error = driver_.DeviceGetAttribute(&major, kDeviceComputeCapabilityMajor, device);
  }
  if (error == kCudaSuccess) {
    error = driver_.DeviceGetAttribute(&minor, kDeviceComputeCapabilityMinor, device);
  }
  if (error != kCudaSuccess) {
    throw driver_.Failed(error, "The compute capability of XLA's device cannot be read");
  }
  // Code for sm_90a runs on 9.0 and on nothing newer.
  if (major != 9 || minor != 0) {
    throw Failure(FailureCode::kFailedPrecondition,
                  Concat("jax_qla's CUDA kernels are built for compute capability 9.0 (Hopper), CUDA device ", device,
                         " has ", major, ".", minor, "; use implementation=\"xla\" on it."));
  }
  entry.is_hopper = true;
}

KernelCache::Module& KernelCache::LoadModule(Context& entry, const KernelLaunch& kernel) const {
  if (const auto found = entry.modules.find(kernel.cubin); found != entry.modules.end()) {
    return found->second;
  }
  const std::string image = ReadCubin(kernel.cubin);
  Module module;
  if (CUresult error = driver_.ModuleLoadData(&module.handle, image.c_str()); error != kCudaSuccess) {
    throw driver_.Failed(error, Concat("The CUDA driver cannot load ", kernel.cubin,
                                       ".cubin (`python -m jax_qla` says which driver the kernels need)"));
  }
  return entry.modules.emplace(kernel.cubin, std::move(module)).first->second;
}

KernelCache::Function& KernelCache::LoadFunction(Module& module, const KernelLaunch& kernel) const {
  if (const auto found = module.functions.find(kernel.function); found != module.functions.end()) {
    return found->second;
  }
  Function function;
  if (CUresult error = driver_.ModuleGetFunction(&function.handle, module.handle, kernel.function.c_str());
      error != kCudaSuccess) {
    throw driver_.Failed(error,
                         Concat("The CUDA driver finds no kernel ", kernel.function, " in ", kernel.cubin, ".cubin"));
  }
  return module.functions.emplace(kernel.function, function).first->second;
}

void KernelCache::Allow(Function& function, const KernelLaunch& kernel) const {
  const auto set = [&](int attribute, int value, const auto&... what) {
    if (CUresult error = driver_.FuncSetAttribute(function.handle, attribute, value); error != kCudaSuccess) {
      throw driver_.Failed(error, Concat("Kernel ", kernel.function, " cannot have ", what...));
    }
  };
  // Only ever raised: another call of the same kernel may have asked for more.
  if (kernel.shared_bytes > function.shared_bytes) {
    set(kFunctionMaxDynamicSharedBytes, static_cast<int>(kernel.shared_bytes), kernel.shared_bytes,
        " bytes of dynamic shared memory");
    // How a multiprocessor's memory is divided between shared memory and first-level cache changes only where nothing
    // runs: were it divided differently for two kernels that need much, the second could not begin beside the end of
    // the first.
    if (kernel.shared_bytes > kUnaskedSharedBytes && function.shared_bytes <= kUnaskedSharedBytes) {
      set(kFunctionPreferredSharedCarveout, kMostShared, "its multiprocessors' memory as shared memory");
    }
    function.shared_bytes = kernel.shared_bytes;
  }
  if (kernel.cluster.volume() > kPortableClusterBlocks && !function.non_portable_cluster) {
    set(kFunctionNonPortableClusterSizeAllowed, 1, "clusters of ", kernel.cluster.volume(), " blocks");
    function.non_portable_cluster = true;
  }
}

}  // namespace jax_qla
