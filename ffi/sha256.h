// SHA-256 (FIPS 180-4), with which every cubin is verified before it is loaded.

#ifndef JAX_QLA_FFI_SHA256_H_
#define JAX_QLA_FFI_SHA256_H_

#include <string>
#include <string_view>

namespace jax_qla {

// The digest of `bytes` as 64 lower-case hexadecimal digits.
std::string Sha256Hex(std::string_view bytes);

}  // namespace jax_qla

#endif  // JAX_QLA_FFI_SHA256_H_
