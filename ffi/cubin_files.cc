#include "cubin_files.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "failure.h"
#include "sha256.h"

namespace jax_qla {
namespace {

struct Directories {
  std::mutex mutex;
  std::vector<std::string> paths;
};

// Never destroyed: XLA may still load a kernel while the process exits.
Directories& GlobalDirectories() {
  static auto* const directories = new Directories;
  return *directories;
}

std::vector<std::string> CubinDirectories() {
  Directories& directories = GlobalDirectories();
  const std::lock_guard<std::mutex> lock(directories.mutex);
  return directories.paths;
}

// The bytes of a file, or nothing where there is none. By <cstdio>, for the reason in failure.h.
std::optional<std::string> Read(const std::string& path) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"), std::fclose);
  if (file == nullptr && (errno == ENOENT || errno == ENOTDIR)) {
    return std::nullopt;
  }
  std::string bytes;
  if (file != nullptr) {
    char chunk[1 << 14];
    while (const size_t count = std::fread(chunk, 1, sizeof(chunk), file.get())) {
      bytes.append(chunk, count);
    }
  }
  if (file == nullptr || std::ferror(file.get())) {
    throw Failure(FailureCode::kNotFound, Concat("The cubin ", path, " cannot be read: ", std::strerror(errno), "."));
  }
  return bytes;
}

}  // namespace

std::vector<std::string> SetCubinDirectories(std::vector<std::string> paths) {
  Directories& directories = GlobalDirectories();
  const std::lock_guard<std::mutex> lock(directories.mutex);
  return std::exchange(directories.paths, std::move(paths));
}

std::string ReadCubin(const std::string& sha256) {
  std::string searched;
  for (const std::string& directory : CubinDirectories()) {
    const std::string path = Concat(directory, "/", sha256, ".cubin");
    if (std::optional<std::string> bytes = Read(path)) {
      if (const std::string digest = Sha256Hex(*bytes); digest != sha256) {
        throw Failure(FailureCode::kDataLoss, Concat("The cubin ", path, " is corrupted: its content has sha256 ",
                                                     digest, ", expected that of its name; it was not loaded."));
      }
      return *std::move(bytes);
    }
    searched += Concat(searched.empty() ? "" : ", ", directory);
  }
  throw Failure(FailureCode::kNotFound,
                Concat("The cubin ", sha256, ".cubin was not found in ",
                       searched.empty() ? "any directory (none is set)" : searched.c_str(), "."));
}

}  // namespace jax_qla
