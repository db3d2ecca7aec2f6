// A CUDA driver that launches nothing and records what it is asked: the functions of libcuda that ffi/driver.h names,
// on eight imaginary devices. Stream number n (as a pointer) belongs to device n - 1.
//
// A cubin for it is text: the line "stub cubin", then for each kernel a line with its name and the sizes of its
// parameters in bytes, then a remark that starts with #.
//
// The declarations come from ffi/driver.h; check_driver_types.cc holds those against cuda.h.

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "driver.h"

#define STUB_EXPORT extern "C" __attribute__((visibility("default")))

namespace jax_qla {

struct CUctx_st {
  int device;
};

struct CUfunc_st {
  CUcontext context;
  std::string name;
  std::vector<size_t> parameters;  // bytes
};

struct CUmod_st {
  std::map<std::string, CUfunc_st> functions;
};

namespace {

constexpr int kDevices = 8;
constexpr CUresult kErrorInvalidContext = 201;
constexpr CUresult kErrorInvalidImage = 200;
constexpr CUresult kErrorNotFound = 500;

struct Stub {
  std::mutex mutex;
  std::vector<std::string> log;  // JSON objects
  std::string log_text;          // what stub_log returned last
  std::map<std::string, CUresult> failures;
  std::vector<std::string> tensor_maps;  // JSON objects, by CUtensorMap::opaque[0]
  int major = 9;
  int minor = 0;
  std::atomic<int> launch_milliseconds = 0;
  CUctx_st contexts[kDevices];
  std::vector<std::unique_ptr<CUmod_st>> modules;

  Stub() {
    for (int i = 0; i < kDevices; ++i) {
      contexts[i].device = i;
    }
  }

  // What the test wants this function (and attribute) to return; called with the mutex held.
  CUresult Result(const std::string& function) {
    const auto found = failures.find(function);
    return found == failures.end() ? kCudaSuccess : found->second;
  }
};

Stub& Get() {
  static auto* const stub = new Stub;
  return *stub;
}

thread_local std::vector<CUcontext> current_contexts;

CUcontext Current() { return current_contexts.empty() ? nullptr : current_contexts.back(); }

template <typename T>
std::string List(const T* values, size_t count) {
  std::string text = "[";
  for (size_t i = 0; i < count; ++i) {
    text += Concat(i == 0 ? "" : ", ", values[i]);
  }
  return text + "]";
}

std::string List(const std::vector<unsigned>& values) { return List(values.data(), values.size()); }

std::vector<std::string> Split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (char letter : text) {
    if (letter == separator) {
      parts.emplace_back();
    } else {
      parts.back().push_back(letter);
    }
  }
  return parts;
}

CUcontext StreamContext(CUstream stream) {
  const auto number = reinterpret_cast<intptr_t>(stream);
  return number >= 1 && number <= kDevices ? &Get().contexts[number - 1] : nullptr;
}

// Reads the first and the last byte that a tensor map reaches, which must be the buffer's (memory of the host here).
void Touch(const char* address, int data_type, uint32_t rank, const uint64_t* dims, const uint64_t* strides) {
  constexpr uint64_t kElementBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
  uint64_t last = dims[0] * kElementBytes[data_type] - 1;
  for (uint32_t i = 1; i < rank; ++i) {
    uint64_t offset = 0;
    if (__builtin_mul_overflow(dims[i] - 1, strides[i - 1], &offset) || __builtin_add_overflow(last, offset, &last)) {
      std::abort();
    }
  }
  const volatile char* const bytes = address;
  static_cast<void>(bytes[0]);
  static_cast<void>(bytes[last]);
}

// The parameter's value as JSON: a number, or the geometry of the tensor map that it holds.
std::string Value(const void* parameter, size_t bytes) {
  uint64_t word = 0;
  std::memcpy(&word, parameter, bytes == 4 ? 4 : 8);
  return bytes == sizeof(CUtensorMap) ? Get().tensor_maps.at(word) : std::to_string(word);
}

}  // namespace

STUB_EXPORT CUresult cuInit(unsigned) {
  const std::lock_guard<std::mutex> lock(Get().mutex);
  return Get().Result("cuInit");
}

STUB_EXPORT CUresult cuGetErrorName(CUresult error, const char** name) {
  *name = error == kErrorNotFound ? "CUDA_ERROR_NOT_FOUND" : "CUDA_ERROR_OF_THE_STUB";
  return kCudaSuccess;
}

STUB_EXPORT CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "the stub was told to fail";
  return kCudaSuccess;
}

STUB_EXPORT CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice) {
  const std::lock_guard<std::mutex> lock(Get().mutex);
  // Whatever else a device is, how many multiprocessors it has above all, is nothing that a launch may depend on.
  if (attribute != kDeviceComputeCapabilityMajor && attribute != kDeviceComputeCapabilityMinor) {
    return kCudaErrorInvalidValue;
  }
  *value = attribute == kDeviceComputeCapabilityMajor ? Get().major : Get().minor;
  return Get().Result("cuDeviceGetAttribute");
}

STUB_EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = Current();
  return kCudaSuccess;
}

STUB_EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context) {
  current_contexts.push_back(context);
  return kCudaSuccess;
}

STUB_EXPORT CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  *context = Current();
  current_contexts.pop_back();
  return kCudaSuccess;
}

STUB_EXPORT CUresult cuCtxGetDevice(CUdevice* device) {
  if (Current() == nullptr) {
    return kErrorInvalidContext;
  }
  *device = Current()->device;
  return kCudaSuccess;
}

STUB_EXPORT CUresult cuStreamGetCtx(CUstream stream, CUcontext* context) {
  *context = StreamContext(stream);
  return *context == nullptr ? kErrorInvalidContext : kCudaSuccess;
}

STUB_EXPORT CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  // Long enough that threads which do not exclude each other would meet here.
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  Stub& stub = Get();
  const std::lock_guard<std::mutex> lock(stub.mutex);
  if (CUresult error = stub.Result("cuModuleLoadData"); error != kCudaSuccess) {
    return error;
  }
  if (Current() == nullptr) {
    return kErrorInvalidContext;
  }
  const std::vector<std::string> lines = Split(static_cast<const char*>(image), '\n');
  if (lines[0] != "stub cubin") {
    return kErrorInvalidImage;
  }
  auto loaded = std::make_unique<CUmod_st>();
  for (size_t i = 1; i < lines.size() && lines[i][0] != '#'; ++i) {
    const std::vector<std::string> words = Split(lines[i], ' ');
    CUfunc_st& function = loaded->functions[words[0]];
    function.context = Current();
    function.name = words[0];
    for (size_t k = 1; k < words.size(); ++k) {
      function.parameters.push_back(std::stoul(words[k]));
    }
  }
  *module = loaded.get();
  stub.modules.push_back(std::move(loaded));
  stub.log.push_back(Concat("{\"call\": \"cuModuleLoadData\", \"device\": ", Current()->device, "}"));
  return kCudaSuccess;
}

STUB_EXPORT CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  const std::lock_guard<std::mutex> lock(Get().mutex);
  const auto found = module->functions.find(name);
  if (found == module->functions.end()) {
    return kErrorNotFound;
  }
  *function = &found->second;
  return kCudaSuccess;
}

STUB_EXPORT CUresult cuFuncGetParamInfo(CUfunction function, size_t index, size_t* offset, size_t* bytes) {
  if (index >= function->parameters.size()) {
    return kCudaErrorInvalidValue;
  }
  *offset = 0;  // not asked for
  *bytes = function->parameters[index];
  return kCudaSuccess;
}

STUB_EXPORT CUresult cuFuncSetAttribute(CUfunction function, int attribute, int value) {
  Stub& stub = Get();
  const std::lock_guard<std::mutex> lock(stub.mutex);
  stub.log.push_back(Concat("{\"call\": \"cuFuncSetAttribute\", \"device\": ", function->context->device,
                            ", \"kernel\": \"", function->name, "\", \"attribute\": ", attribute,
                            ", \"value\": ", value, "}"));
  return stub.Result(Concat("cuFuncSetAttribute ", attribute));
}

STUB_EXPORT CUresult cuTensorMapEncodeTiled(CUtensorMap* map, int data_type, uint32_t rank, void* address,
                                            const uint64_t* dims, const uint64_t* strides, const uint32_t* box,
                                            const uint32_t* element_strides, int interleave, int swizzle,
                                            int l2_promotion, int out_of_bounds_fill) {
  Stub& stub = Get();
  const std::lock_guard<std::mutex> lock(stub.mutex);
  if (CUresult error = stub.Result("cuTensorMapEncodeTiled"); error != kCudaSuccess) {
    return error;
  }
  if (reinterpret_cast<uintptr_t>(map) % 64 != 0) {
    return kCudaErrorInvalidValue;
  }
  Touch(static_cast<const char*>(address), data_type, rank, dims, strides);
  map->opaque[0] = stub.tensor_maps.size();
  stub.tensor_maps.push_back(Concat(
      "{\"address\": ", reinterpret_cast<uintptr_t>(address), ", \"data_type\": ", data_type,
      ", \"dims\": ", List(dims, rank), ", \"strides\": ", List(strides, rank - 1), ", \"box\": ", List(box, rank),
      ", \"element_strides\": ", List(element_strides, rank), ", \"interleave\": ", interleave, ", \"swizzle\": ",
      swizzle, ", \"l2_promotion\": ", l2_promotion, ", \"out_of_bounds_fill\": ", out_of_bounds_fill, "}"));
  return kCudaSuccess;
}

STUB_EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters,
                                      void** extra) {
  Stub& stub = Get();
  std::this_thread::sleep_for(std::chrono::milliseconds(stub.launch_milliseconds.load()));
  const std::lock_guard<std::mutex> lock(stub.mutex);
  if (CUresult error = stub.Result("cuLaunchKernelEx"); error != kCudaSuccess) {
    return error;
  }
  if (function->context != Current() || StreamContext(config->stream) != Current() || extra != nullptr) {
    return kErrorInvalidContext;
  }
  std::string cluster = "null";
  std::string dependent_launch = "false";
  for (unsigned i = 0; i < config->attribute_count; ++i) {
    const auto& value = config->attributes[i].value;
    if (config->attributes[i].id == kLaunchClusterDimension) {
      cluster = List({value.cluster_dimension.x, value.cluster_dimension.y, value.cluster_dimension.z});
    } else if (config->attributes[i].id == kLaunchProgrammaticStreamSerialization) {
      dependent_launch = value.programmatic_stream_serialization == 1 ? "true" : "false";
    } else {
      return kCudaErrorInvalidValue;
    }
  }
  std::string arguments;
  for (size_t i = 0; i < function->parameters.size(); ++i) {
    arguments += Concat(i == 0 ? "" : ", ", Value(parameters[i], function->parameters[i]));
  }
  stub.log.push_back(Concat("{\"call\": \"cuLaunchKernelEx\", \"device\": ", function->context->device,
                            ", \"kernel\": \"", function->name,
                            "\", \"grid\": ", List({config->grid_x, config->grid_y, config->grid_z}),
                            ", \"block\": ", List({config->block_x, config->block_y, config->block_z}),
                            ", \"cluster\": ", cluster, ", \"shared_bytes\": ", config->shared_bytes,
                            ", \"dependent_launch\": ", dependent_launch, ", \"arguments\": [", arguments, "]}"));
  return kCudaSuccess;
}

// What the tests steer and read it by.

STUB_EXPORT void stub_reset() {
  Stub& stub = Get();
  const std::lock_guard<std::mutex> lock(stub.mutex);
  stub.log.clear();
  stub.failures.clear();
  stub.major = 9;
  stub.minor = 0;
}

// Nobody has a tensor map any more.
STUB_EXPORT void stub_forget_tensor_maps() {
  Stub& stub = Get();
  const std::lock_guard<std::mutex> lock(stub.mutex);
  stub.tensor_maps.clear();
}

STUB_EXPORT void stub_set_compute_capability(int major, int minor) {
  Stub& stub = Get();
  const std::lock_guard<std::mutex> lock(stub.mutex);
  stub.major = major;
  stub.minor = minor;
}

// From now on a launch takes this long, until the process ends.
STUB_EXPORT void stub_set_launch_milliseconds(int milliseconds) { Get().launch_milliseconds = milliseconds; }

// From now on `function` returns `error`, until stub_reset.
STUB_EXPORT void stub_fail(const char* function, CUresult error) {
  Stub& stub = Get();
  const std::lock_guard<std::mutex> lock(stub.mutex);
  stub.failures[function] = error;
}

// The calls since stub_reset, as a JSON list; valid until the next call.
STUB_EXPORT const char* stub_log() {
  Stub& stub = Get();
  const std::lock_guard<std::mutex> lock(stub.mutex);
  stub.log_text = "[";
  for (size_t i = 0; i < stub.log.size(); ++i) {
    stub.log_text += Concat(i == 0 ? "" : ", ", stub.log[i]);
  }
  stub.log_text += "]";
  return stub.log_text.c_str();
}

}  // namespace jax_qla
