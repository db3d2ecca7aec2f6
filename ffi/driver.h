// The part of the CUDA driver API that launching needs, opened with dlopen so that the extension imports on a machine
// without a GPU and builds without a CUDA toolkit.
//
// Types and numbers are those of cuda.h (CUDA 12 and 13 agree on them); they are part of the driver's stable ABI.

#ifndef JAX_QLA_FFI_DRIVER_H_
#define JAX_QLA_FFI_DRIVER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "failure.h"

namespace jax_qla {

using CUresult = int;
using CUdevice = int;
using CUcontext = struct CUctx_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
using CUstream = struct CUstream_st*;

inline constexpr CUresult kCudaSuccess = 0;
inline constexpr CUresult kCudaErrorInvalidValue = 1;

// CUdevice_attribute
inline constexpr int kDeviceComputeCapabilityMajor = 75;
inline constexpr int kDeviceComputeCapabilityMinor = 76;

// CUfunction_attribute
inline constexpr int kFunctionMaxDynamicSharedBytes = 8;
inline constexpr int kFunctionPreferredSharedCarveout = 9;
inline constexpr int kFunctionNonPortableClusterSizeAllowed = 14;

// CUshared_carveout
inline constexpr int kMostShared = 100;

// CUlaunchAttributeID
inline constexpr int kLaunchClusterDimension = 4;
inline constexpr int kLaunchProgrammaticStreamSerialization = 6;

// A launch attribute: its id, and a value whose meaning the id decides.
struct CUlaunchAttribute {
  int id;
  alignas(8) union {
    char pad[64];
    struct {
      unsigned x, y, z;
    } cluster_dimension;
    int programmatic_stream_serialization;
  } value;
};
static_assert(sizeof(CUlaunchAttribute) == 72 && offsetof(CUlaunchAttribute, value) == 8);

struct CUlaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  CUstream stream;
  CUlaunchAttribute* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(CUlaunchConfig) == 56);

// An opaque tensor-map descriptor, passed to kernels by value.
struct alignas(128) CUtensorMap {
  uint64_t opaque[16];
};
static_assert(sizeof(CUtensorMap) == 128);

// X(member, exported symbol, parameters): the functions without which nothing can be launched.
#define JAX_QLA_DRIVER_FUNCTIONS(X)                                                                                 \
  X(Init, "cuInit", (unsigned flags))                                                                               \
  X(GetErrorName, "cuGetErrorName", (CUresult error, const char** name))                                            \
  X(GetErrorString, "cuGetErrorString", (CUresult error, const char** text))                                        \
  X(DeviceGetAttribute, "cuDeviceGetAttribute", (int* value, int attribute, CUdevice device))                       \
  X(CtxGetCurrent, "cuCtxGetCurrent", (CUcontext * context))                                                        \
  X(CtxPushCurrent, "cuCtxPushCurrent_v2", (CUcontext context))                                                     \
  X(CtxPopCurrent, "cuCtxPopCurrent_v2", (CUcontext * context))                                                     \
  X(CtxGetDevice, "cuCtxGetDevice", (CUdevice * device))                                                            \
  X(StreamGetCtx, "cuStreamGetCtx", (CUstream stream, CUcontext * context))                                         \
  X(ModuleLoadData, "cuModuleLoadData", (CUmodule * module, const void* image))                                     \
  X(ModuleGetFunction, "cuModuleGetFunction", (CUfunction * function, CUmodule module, const char* name))           \
  X(FuncSetAttribute, "cuFuncSetAttribute", (CUfunction function, int attribute, int value))                        \
  X(TensorMapEncodeTiled, "cuTensorMapEncodeTiled",                                                                 \
    (CUtensorMap * map, int data_type, uint32_t rank, void* address, const uint64_t* dims, const uint64_t* strides, \
     const uint32_t* box, const uint32_t* element_strides, int interleave, int swizzle, int l2_promotion,           \
     int out_of_bounds_fill))                                                                                       \
  X(LaunchKernelEx, "cuLaunchKernelEx",                                                                             \
    (const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra))

// The functions of one driver library. The library stays open for the life of the process.
class Driver {
 public:
  // Opens `library` (a name or path for dlopen) and initialises it; throws Failure where there is no usable driver.
  explicit Driver(const std::string& library);

#define JAX_QLA_DECLARE(member, symbol, parameters) CUresult(*member) parameters;
  JAX_QLA_DRIVER_FUNCTIONS(JAX_QLA_DECLARE)
#undef JAX_QLA_DECLARE

  // Size of a kernel's parameter; absent (null) before CUDA 12.4.
  CUresult (*FuncGetParamInfo)(CUfunction function, size_t index, size_t* offset, size_t* size);

  // The failure of a driver call: "<what>: CUDA_ERROR_... (<the driver's words>)".
  Failure Failed(CUresult error, std::string_view what) const;
};

// Makes `context` current for a scope, and puts back what was current. Costs one look-up where it is current already.
class CurrentContext {
 public:
  CurrentContext(const Driver& driver, CUcontext context);
  ~CurrentContext();

  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  const Driver& driver_;
  bool pushed_ = false;
};

}  // namespace jax_qla

#endif  // JAX_QLA_FFI_DRIVER_H_
