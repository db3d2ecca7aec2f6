// The one way in which code below the FFI stages refuses or fails: an exception that carries a sentence.

#ifndef JAX_QLA_FFI_FAILURE_H_
#define JAX_QLA_FFI_FAILURE_H_

#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace jax_qla {

// The status codes in use, numbered as in absl and in XLA's FFI.
enum class FailureCode : int {
  kInvalidArgument = 3,
  kNotFound = 5,
  kFailedPrecondition = 9,
  kInternal = 13,
  kDataLoss = 15,
};

// Thrown anywhere below a stage, caught by the stage (handler.cc), which hands code and sentence to XLA.
class Failure : public std::runtime_error {
 public:
  Failure(FailureCode code, const std::string& sentence) : std::runtime_error(sentence), code_(code) {}

  FailureCode code() const { return code_; }

 private:
  FailureCode code_;
};

// The parts, strings and integers, one after another. Not through an iostream: where the process holds two C++ runtimes
// (one linked into another extension, say), their locales mix and a stream crashes.
template <typename... Parts>
std::string Concat(const Parts&... parts) {
  std::string text;
  const auto append = [&text](const auto& part) {
    if constexpr (std::is_integral_v<std::decay_t<decltype(part)>>) {
      text += std::to_string(part);
    } else {
      text += std::string_view(part);
    }
  };
  (append(parts), ...);
  return text;
}

}  // namespace jax_qla

#endif  // JAX_QLA_FFI_FAILURE_H_
