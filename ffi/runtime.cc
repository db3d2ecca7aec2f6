#include "runtime.h"

#include <cstdlib>

#include "failure.h"

namespace jax_qla {
namespace {

constexpr char kLibraryVariable[] = "JAX_QLA_LIBCUDA";

std::string LibraryFromEnvironment() {
  const char* library = std::getenv(kLibraryVariable);
  return library == nullptr ? "" : library;
}

}  // namespace

// Neither is ever destroyed: XLA may still launch from another thread while the process exits.

Runtime& Runtime::Cuda() {
  static auto* const runtime = [] {
    const std::string library = LibraryFromEnvironment();
    return new Runtime(library.empty() ? "libcuda.so.1" : library);
  }();
  return *runtime;
}

Runtime& Runtime::Host() {
  static auto* const runtime = [] {
    const std::string library = LibraryFromEnvironment();
    if (library.empty()) {
      throw Failure(FailureCode::kFailedPrecondition,
                    Concat("jax_qla's CUDA kernels run on CUDA devices; on the platform \"cpu\" their handler only "
                           "talks to a recording driver that $",
                           kLibraryVariable, " names, and that is not set."));
    }
    return new Runtime(library);
  }();
  return *runtime;
}

}  // namespace jax_qla
