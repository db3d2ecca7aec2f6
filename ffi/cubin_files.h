// Finds cubin files and vouches for their bytes. A cubin's file is named <sha256 of its content>.cubin.

#ifndef JAX_QLA_FFI_CUBIN_FILES_H_
#define JAX_QLA_FFI_CUBIN_FILES_H_

#include <string>
#include <vector>

namespace jax_qla {

// Sets the directories that ReadCubin searches, in order, and returns what they were. Any thread may call it.
std::vector<std::string> SetCubinDirectories(std::vector<std::string> directories);

// The bytes of the cubin with this digest, from the first directory that has its file. Throws Failure where no
// directory has it, it cannot be read, or its content has another digest.
std::string ReadCubin(const std::string& sha256);

}  // namespace jax_qla

#endif  // JAX_QLA_FFI_CUBIN_FILES_H_
