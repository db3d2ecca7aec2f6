// Compiled, never run: holds the declarations of ffi/driver.h against those of CUDA's own header.

#include <cuda.h>

#include <cstddef>

#include "driver.h"

#define SAME_PLACE(type, ours, theirs) static_assert(offsetof(jax_qla::type, ours) == offsetof(::type, theirs))

static_assert(jax_qla::kCudaSuccess == CUDA_SUCCESS);
static_assert(jax_qla::kCudaErrorInvalidValue == CUDA_ERROR_INVALID_VALUE);
static_assert(jax_qla::kDeviceComputeCapabilityMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(jax_qla::kDeviceComputeCapabilityMinor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
static_assert(jax_qla::kFunctionMaxDynamicSharedBytes == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
static_assert(jax_qla::kFunctionPreferredSharedCarveout == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT);
static_assert(jax_qla::kMostShared == CU_SHAREDMEM_CARVEOUT_MAX_SHARED);
static_assert(jax_qla::kFunctionNonPortableClusterSizeAllowed == CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED);
static_assert(jax_qla::kLaunchClusterDimension == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
static_assert(jax_qla::kLaunchProgrammaticStreamSerialization == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);

static_assert(sizeof(jax_qla::CUresult) == sizeof(::CUresult));
static_assert(sizeof(jax_qla::CUdevice) == sizeof(::CUdevice));
static_assert(sizeof(CUtensorMapDataType) == sizeof(int));

static_assert(sizeof(jax_qla::CUtensorMap) == sizeof(::CUtensorMap));
static_assert(alignof(jax_qla::CUtensorMap) >= 64);

static_assert(sizeof(jax_qla::CUlaunchConfig) == sizeof(::CUlaunchConfig));
SAME_PLACE(CUlaunchConfig, grid_x, gridDimX);
SAME_PLACE(CUlaunchConfig, grid_y, gridDimY);
SAME_PLACE(CUlaunchConfig, grid_z, gridDimZ);
SAME_PLACE(CUlaunchConfig, block_x, blockDimX);
SAME_PLACE(CUlaunchConfig, block_y, blockDimY);
SAME_PLACE(CUlaunchConfig, block_z, blockDimZ);
SAME_PLACE(CUlaunchConfig, shared_bytes, sharedMemBytes);
SAME_PLACE(CUlaunchConfig, stream, hStream);
SAME_PLACE(CUlaunchConfig, attributes, attrs);
SAME_PLACE(CUlaunchConfig, attribute_count, numAttrs);

static_assert(sizeof(jax_qla::CUlaunchAttribute) == sizeof(::CUlaunchAttribute));
SAME_PLACE(CUlaunchAttribute, id, id);
SAME_PLACE(CUlaunchAttribute, value.cluster_dimension.x, value.clusterDim.x);
SAME_PLACE(CUlaunchAttribute, value.cluster_dimension.y, value.clusterDim.y);
SAME_PLACE(CUlaunchAttribute, value.cluster_dimension.z, value.clusterDim.z);
SAME_PLACE(CUlaunchAttribute, value.programmatic_stream_serialization, value.programmaticStreamSerializationAllowed);
