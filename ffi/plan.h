// The launch plan: what the int64 attribute "plan" of a call says, parsed and checked once, before anything runs.
//
//   [version = 1, number of kernels, then per kernel:
//     grid x 3, block x 3, cluster x 3 (1, 1, 1 = none), dynamic shared bytes, programmatic dependent launch (0 | 1),
//     number of arguments, then per argument:
//       0 = pointer:    [0, buffer]
//       1 = scalar:     [1, bytes (4 | 8), value bits]
//       2 = tensor map: [2, buffer, CUtensorMapDataType, rank, dims x rank, strides in bytes x (rank - 1),
//                        box x rank, element strides x rank, interleave, swizzle, L2 promotion, out-of-bounds fill]]
//
// A buffer is an index into the call's operands followed by its results. jax_qla/launch.py writes it.

#ifndef JAX_QLA_FFI_PLAN_H_
#define JAX_QLA_FFI_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace jax_qla {

// Limits that let a launch live on the stack. A kernel's parameters are 4 KiB at most, so these bind nobody.
inline constexpr size_t kMaxArguments = 64;
inline constexpr size_t kMaxTensorMaps = 24;
inline constexpr size_t kMaxBuffers = 128;

inline constexpr size_t kMaxTensorMapRank = 5;

struct PointerArgument {
  size_t buffer;
};

struct ScalarArgument {
  size_t bytes;   // 4 or 8
  uint64_t bits;  // little-endian: the first `bytes` bytes are the value
};

// The arguments of cuTensorMapEncodeTiled, in the types it takes, innermost dimension first.
struct TensorMapArgument {
  size_t buffer;
  int data_type;
  uint32_t rank;
  uint64_t dims[kMaxTensorMapRank];
  uint64_t strides[kMaxTensorMapRank - 1];  // bytes; strides[i] is that of dims[i + 1]
  uint32_t box[kMaxTensorMapRank];
  uint32_t element_strides[kMaxTensorMapRank];
  int interleave;
  int swizzle;
  int l2_promotion;
  int out_of_bounds_fill;

  size_t alignment;  // of the buffer's address, in bytes
  uint64_t extent;   // bytes from the buffer's start that the map can reach
};

using Argument = std::variant<PointerArgument, ScalarArgument, TensorMapArgument>;

struct Dim3 {
  uint32_t x, y, z;

  uint64_t volume() const { return uint64_t{x} * y * z; }
};

// One kernel of the sequence, with numbers for everything.
struct KernelLaunch {
  std::string cubin;     // sha256 of the cubin, which is also its file's name
  std::string function;  // the kernel's name in it
  Dim3 grid;
  Dim3 block;
  Dim3 cluster;
  uint32_t shared_bytes;
  bool dependent_launch;  // may start before its predecessor in the stream has ended
  std::vector<Argument> arguments;

  // A grid without blocks computes nothing and the driver refuses it: it is skipped.
  bool empty() const { return grid.volume() == 0; }
};

struct Plan {
  std::vector<KernelLaunch> kernels;
  size_t buffers;  // the call must have at least this many operands and results
};

// Parses the three attributes of a call; `cubins` and `functions` are comma-separated, one entry a kernel. Throws
// Failure with a sentence that names the place, the value and what is expected.
Plan ParsePlan(std::string_view cubins, std::string_view functions, const int64_t* values, size_t count);

}  // namespace jax_qla

#endif  // JAX_QLA_FFI_PLAN_H_
