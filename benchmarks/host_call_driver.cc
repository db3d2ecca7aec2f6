// A CUDA driver for benchmarks/host_call.py that counts and times what the FFI handler asks of it, and hands it on to
// the driver that $JAX_QLA_TIMED_LIBCUDA names. Where that is not set it does nothing and reports success, so that what
// is left is the handler's own time; no GPU is needed then.
//
//   c++ -std=c++17 -O2 -fPIC -shared -Iffi benchmarks/host_call_driver.cc -o FILE -ldl       with $JAX_QLA_LIBCUDA=FILE

#include <dlfcn.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "driver.h"

#define TIMED_EXPORT extern "C" __attribute__((visibility("default")))

namespace jax_qla {
namespace {

enum Function { kLookUp, kEncode, kLaunch, kOther, kFunctions };

int64_t Now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Of one thread, as the benchmark measures one call at a time.
int64_t calls[kFunctions];
int64_t nanoseconds[kFunctions];
int64_t executions;
int64_t span;   // nanoseconds from an execution's first call of the driver to the end of its last launch
int64_t begun;  // the execution's first call of the driver
int64_t ended;  // the end of its last launch so far

class Timer {
 public:
  explicit Timer(Function function) : function_(function), begin_(Now()) {}
  ~Timer() {
    const int64_t end = Now();
    ++calls[function_];
    nanoseconds[function_] += end - begin_;
    if (function_ == kLaunch) {
      ended = end;
    }
  }
  int64_t begin() const { return begin_; }

 private:
  const Function function_;
  const int64_t begin_;
};

void EndExecution() {
  if (ended > begun) {
    ++executions;
    span += ended - begun;
  }
}

void* Real(const char* symbol) {
  static void* const library = [] {
    const char* name = std::getenv("JAX_QLA_TIMED_LIBCUDA");
    void* const handle = name == nullptr ? nullptr : dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (name != nullptr && handle == nullptr) {
      std::fprintf(stderr, "%s\n", dlerror());
      std::abort();
    }
    return handle;
  }();
  return library == nullptr ? nullptr : dlsym(library, symbol);
}

}  // namespace

// X(symbol, what it counts as, parameters, arguments, what is done instead without a driver)
#define TIMED(symbol, function, parameters, arguments, instead)                       \
  TIMED_EXPORT CUresult symbol parameters {                                           \
    static const auto real = reinterpret_cast<CUresult(*) parameters>(Real(#symbol)); \
    const Timer timer(function);                                                      \
    if (real != nullptr) {                                                            \
      return real arguments;                                                          \
    }                                                                                 \
    instead;                                                                          \
    return kCudaSuccess;                                                              \
  }

TIMED(cuInit, kOther, (unsigned flags), (flags), static_cast<void>(flags))
TIMED(cuGetErrorName, kOther, (CUresult error, const char** name), (error, name), *name = "")
TIMED(cuGetErrorString, kOther, (CUresult error, const char** text), (error, text), *text = "")
TIMED(cuDeviceGetAttribute, kOther, (int* value, int attribute, CUdevice device), (value, attribute, device),
      *value = attribute == kDeviceComputeCapabilityMajor ? 9 : 0)
TIMED(cuCtxGetCurrent, kLookUp, (CUcontext * context), (context), *context = reinterpret_cast<CUcontext>(64))
TIMED(cuCtxPushCurrent_v2, kLookUp, (CUcontext context), (context), static_cast<void>(context))
TIMED(cuCtxPopCurrent_v2, kLookUp, (CUcontext * context), (context), static_cast<void>(context))
TIMED(cuCtxGetDevice, kOther, (CUdevice * device), (device), *device = 0)
TIMED(cuModuleLoadData, kOther, (CUmodule * module, const void* image), (module, image),
      *module = reinterpret_cast<CUmodule>(64))
TIMED(cuModuleGetFunction, kOther, (CUfunction * function, CUmodule module, const char* name),
      (function, module, name), *function = reinterpret_cast<CUfunction>(64))
TIMED(cuFuncSetAttribute, kOther, (CUfunction function, int attribute, int value), (function, attribute, value),
      static_cast<void>(value))
TIMED(cuTensorMapEncodeTiled, kEncode,
      (CUtensorMap * map, int data_type, uint32_t rank, void* address, const uint64_t* dims, const uint64_t* strides,
       const uint32_t* box, const uint32_t* element_strides, int interleave, int swizzle, int l2_promotion, int fill),
      (map, data_type, rank, address, dims, strides, box, element_strides, interleave, swizzle, l2_promotion, fill),
      *map = {})
TIMED(cuLaunchKernelEx, kLaunch,
      (const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra),
      (config, function, parameters, extra), static_cast<void>(config))

// An execution begins with it (and on the platform "cpu" asks it twice).
TIMED_EXPORT CUresult cuStreamGetCtx(CUstream stream, CUcontext* context) {
  static const auto real = reinterpret_cast<CUresult (*)(CUstream, CUcontext*)>(Real("cuStreamGetCtx"));
  EndExecution();
  const Timer timer(kLookUp);
  begun = timer.begin();
  ended = 0;
  if (real != nullptr) {
    return real(stream, context);
  }
  *context = reinterpret_cast<CUcontext>(64);
  return kCudaSuccess;
}

// What was counted since the last time, as [executions, their nanoseconds from first call of the driver to end of the
// last launch, then calls and nanoseconds of look-ups of contexts, of tensor maps encoded, of launches, of all others].
TIMED_EXPORT void driver_times_take(int64_t* values) {
  EndExecution();
  begun = ended = 0;
  *values++ = executions;
  *values++ = span;
  executions = span = 0;
  for (int i = 0; i < kFunctions; ++i) {
    *values++ = calls[i];
    *values++ = nanoseconds[i];
    calls[i] = nanoseconds[i] = 0;
  }
}

// Nanoseconds that timing adds to one call.
TIMED_EXPORT int64_t driver_times_overhead() {
  constexpr int kRepetitions = 10000;
  const int64_t begin = Now();
  for (int i = 0; i < kRepetitions; ++i) {
    const Timer timer(kOther);
  }
  const int64_t each = (Now() - begin) / kRepetitions;
  calls[kOther] = nanoseconds[kOther] = 0;
  return each;
}

}  // namespace jax_qla
