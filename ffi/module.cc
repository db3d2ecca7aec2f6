// Python module jax_qla._ffi: registers what the other files do, and does nothing itself. Typed in jax_qla/_ffi.pyi.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "cubin_files.h"
#include "handler.h"

namespace nb = nanobind;

namespace jax_qla {
namespace {

Registration RegistrationFor(const std::string& platform) {
  if (platform == "CUDA") {
    return CudaRegistration();
  }
  if (platform == "cpu") {
    return HostRegistration();
  }
  throw nb::value_error(("platform must be \"CUDA\" or \"cpu\", got \"" + platform + "\"").c_str());
}

nb::capsule Capsule(XLA_FFI_Handler* handler) { return nb::capsule(reinterpret_cast<void*>(handler)); }

nb::dict Registrations(const std::string& platform) {
  const Registration registration = RegistrationFor(platform);
  nb::dict stages;
  stages["instantiate"] = Capsule(registration.instantiate);
  if (registration.initialize != nullptr) {
    stages["initialize"] = Capsule(registration.initialize);
  }
  stages["execute"] = Capsule(registration.execute);
  nb::dict targets;
  targets[kLaunchTarget] = stages;
  return targets;
}

nb::dict Types(const std::string& platform) {
  const Registration registration = RegistrationFor(platform);
  nb::dict type;
  type["type_id"] = nb::capsule(static_cast<void*>(registration.state_type_id));
  type["type_info"] = nb::capsule(static_cast<const void*>(registration.state_type_info));
  nb::dict types;
  types[kLaunchStateType] = type;
  return types;
}

nb::dict BuildInfo() {
  nb::dict info;
  info["ffi_api"] = std::to_string(XLA_FFI_API_MAJOR) + "." + std::to_string(XLA_FFI_API_MINOR);
  info["compiler"] = JAX_QLA_COMPILER;
  info["jaxlib"] = JAX_QLA_JAXLIB_VERSION;
  info["manifest_sha256"] = JAX_QLA_MANIFEST_SHA256;
  return info;
}

}  // namespace

NB_MODULE(_ffi, module) {
  module.doc() = "The XLA FFI handler that launches jax_qla's cubins.";
  module.def("set_cubin_directories", SetCubinDirectories, nb::arg("directories"));
  module.def("registrations", Registrations, nb::arg("platform") = "CUDA");
  module.def("types", Types, nb::arg("platform") = "CUDA");
  module.def("build_info", BuildInfo);
}

}  // namespace jax_qla
