#include "plan.h"

#include <algorithm>
#include <array>
#include <limits>

#include "failure.h"

namespace jax_qla {
namespace {

constexpr int64_t kVersion = 1;
constexpr int64_t kMaxKernels = 1024;

// Limits of a launch on compute capability 9.0 (CUDA C++ Programming Guide, "Compute Capabilities").
constexpr int64_t kMaxGridX = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxGridYZ = 65535;
constexpr int64_t kMaxBlockXY = 1024;
constexpr int64_t kMaxBlockZ = 64;
constexpr uint64_t kMaxBlockThreads = 1024;
constexpr int64_t kMaxCluster = 16;
constexpr int64_t kMaxSharedBytes = 227 * 1024;

// Limits of a tensor map (CUDA driver API, cuTensorMapEncodeTiled).
constexpr int64_t kMaxDim = int64_t{1} << 32;
constexpr int64_t kMaxStride = (int64_t{1} << 40) - 1;
constexpr int64_t kMaxBox = 256;
constexpr int64_t kMaxElementStride = 8;
constexpr int64_t kInterleave32B = 2;

// Bytes of an element of CUtensorMapDataType 0 (UINT8) to 12 (TFLOAT32_FTZ); the packed 4 and 6 bit types are not used.
constexpr std::array<uint64_t, 13> kElementBytes = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};

Failure Malformed(const std::string& sentence) {
  return Failure(FailureCode::kInvalidArgument, Concat("Malformed launch plan: ", sentence));
}

// Reads the attribute's numbers one after another, each with its meaning and range.
class Reader {
 public:
  Reader(const int64_t* values, size_t count) : values_(values), count_(count) {}

  // Names the part that is being read, for the sentence of a refusal ("" for the whole).
  void Enter(std::string part) { part_ = std::move(part); }

  int64_t Take(const char* what, int64_t low, int64_t high) {
    if (position_ == count_) {
      throw Malformed(Concat("it ends after ", count_, " numbers, where ", part_, what, " is expected."));
    }
    const int64_t value = values_[position_++];
    if (value < low || value > high) {
      throw Malformed(
          Concat("number ", position_ - 1, ", ", part_, what, ", is ", value, ", expected ", low, " to ", high, "."));
    }
    return value;
  }

  template <typename T>
  T Take(const char* what, int64_t low, int64_t high) {
    return static_cast<T>(Take(what, low, high));
  }

  Failure Refuse(const std::string& sentence) const { return Malformed(Concat(part_, sentence)); }

  void Finish() const {
    if (position_ != count_) {
      throw Malformed(
          Concat("it has ", count_, " numbers, but the last kernel's last argument ends after ", position_, "."));
    }
  }

 private:
  const int64_t* values_;
  size_t count_;
  size_t position_ = 0;
  std::string part_;
};

size_t TakeBuffer(Reader& reader, Plan& plan) {
  const auto buffer = reader.Take<size_t>("buffer", 0, kMaxBuffers - 1);
  plan.buffers = std::max(plan.buffers, buffer + 1);
  return buffer;
}

ScalarArgument TakeScalar(Reader& reader) {
  const auto bytes = reader.Take<size_t>("scalar size", 4, 8);
  if (bytes != 4 && bytes != 8) {
    throw reader.Refuse(Concat("scalar size is ", bytes, " bytes, expected 4 or 8."));
  }
  // Four bytes may be written signed or unsigned; either way the low half is the value.
  const bool wide = bytes == 8;
  const int64_t low = wide ? std::numeric_limits<int64_t>::min() : std::numeric_limits<int32_t>::min();
  const int64_t high = wide ? std::numeric_limits<int64_t>::max() : std::numeric_limits<uint32_t>::max();
  return {bytes, static_cast<uint64_t>(reader.Take("scalar value", low, high))};
}

// Bytes from the first element's start to the last one's end; saturates instead of wrapping.
uint64_t Extent(const TensorMapArgument& map, uint64_t element_bytes) {
  uint64_t extent = map.dims[0] * element_bytes;
  for (uint32_t i = 1; i < map.rank; ++i) {
    uint64_t offset = 0;
    if (__builtin_mul_overflow(map.dims[i] - 1, map.strides[i - 1], &offset) ||
        __builtin_add_overflow(extent, offset, &extent)) {
      return std::numeric_limits<uint64_t>::max();
    }
  }
  return extent;
}

TensorMapArgument TakeTensorMap(Reader& reader, Plan& plan, bool launched) {
  TensorMapArgument map = {};
  map.buffer = TakeBuffer(reader, plan);
  map.data_type = reader.Take<int>("tensor-map data type", 0, kElementBytes.size() - 1);
  map.rank = reader.Take<uint32_t>("tensor-map rank", 1, kMaxTensorMapRank);
  // A kernel that is skipped may have empty operands.
  const int64_t least_dim = launched ? 1 : 0;
  for (uint32_t i = 0; i < map.rank; ++i) {
    map.dims[i] = reader.Take<uint64_t>("tensor-map dimension", least_dim, kMaxDim);
  }
  for (uint32_t i = 0; i + 1 < map.rank; ++i) {
    map.strides[i] = reader.Take<uint64_t>("tensor-map stride", least_dim, kMaxStride);
  }
  for (uint32_t i = 0; i < map.rank; ++i) {
    map.box[i] = reader.Take<uint32_t>("tensor-map box", 1, kMaxBox);
  }
  for (uint32_t i = 0; i < map.rank; ++i) {
    map.element_strides[i] = reader.Take<uint32_t>("tensor-map element stride", 1, kMaxElementStride);
  }
  map.interleave = reader.Take<int>("tensor-map interleave", 0, kInterleave32B);
  map.swizzle = reader.Take<int>("tensor-map swizzle", 0, 6);
  map.l2_promotion = reader.Take<int>("tensor-map L2 promotion", 0, 3);
  map.out_of_bounds_fill = reader.Take<int>("tensor-map out-of-bounds fill", 0, 1);

  map.alignment = map.interleave == kInterleave32B ? 32 : 16;
  for (uint32_t i = 0; i + 1 < map.rank; ++i) {
    if (map.strides[i] % map.alignment != 0) {
      throw reader.Refuse(Concat("tensor-map stride ", i, " is ", map.strides[i], " bytes, expected a multiple of ",
                                 map.alignment, "."));
    }
  }
  const uint64_t element_bytes = kElementBytes[static_cast<size_t>(map.data_type)];
  if (map.interleave == 0 && map.box[0] * element_bytes % 16 != 0) {
    throw reader.Refuse(
        Concat("tensor-map box 0 is ", map.box[0] * element_bytes, " bytes, expected a multiple of 16."));
  }
  if (map.interleave != 0 && map.rank < 3) {
    throw reader.Refuse(Concat("an interleaved tensor map has rank ", map.rank, ", expected 3 to 5."));
  }
  map.extent = launched ? Extent(map, element_bytes) : 0;
  return map;
}

Argument TakeArgument(Reader& reader, Plan& plan, bool launched) {
  switch (reader.Take("kind", 0, 2)) {
    case 0:
      return PointerArgument{TakeBuffer(reader, plan)};
    case 1:
      return TakeScalar(reader);
    default:
      return TakeTensorMap(reader, plan, launched);
  }
}

void CheckGeometry(const KernelLaunch& kernel, const Reader& reader) {
  if (kernel.block.volume() > kMaxBlockThreads) {
    throw reader.Refuse(
        Concat("a block has ", kernel.block.volume(), " threads, expected 1 to ", kMaxBlockThreads, "."));
  }
  if (kernel.cluster.volume() > kMaxCluster) {
    throw reader.Refuse(Concat("a cluster has ", kernel.cluster.volume(), " blocks, expected 1 to ", kMaxCluster, "."));
  }
  if (kernel.grid.x % kernel.cluster.x != 0 || kernel.grid.y % kernel.cluster.y != 0 ||
      kernel.grid.z % kernel.cluster.z != 0) {
    throw reader.Refuse(Concat("the grid (", kernel.grid.x, ", ", kernel.grid.y, ", ", kernel.grid.z,
                               ") is not a multiple of the cluster (", kernel.cluster.x, ", ", kernel.cluster.y, ", ",
                               kernel.cluster.z, ")."));
  }
}

KernelLaunch TakeKernel(Reader& reader, Plan& plan, const std::string& part) {
  reader.Enter(Concat(part, ": "));
  KernelLaunch kernel = {};
  kernel.grid.x = reader.Take<uint32_t>("grid x", 0, kMaxGridX);
  kernel.grid.y = reader.Take<uint32_t>("grid y", 0, kMaxGridYZ);
  kernel.grid.z = reader.Take<uint32_t>("grid z", 0, kMaxGridYZ);
  kernel.block.x = reader.Take<uint32_t>("block x", 1, kMaxBlockXY);
  kernel.block.y = reader.Take<uint32_t>("block y", 1, kMaxBlockXY);
  kernel.block.z = reader.Take<uint32_t>("block z", 1, kMaxBlockZ);
  kernel.cluster.x = reader.Take<uint32_t>("cluster x", 1, kMaxCluster);
  kernel.cluster.y = reader.Take<uint32_t>("cluster y", 1, kMaxCluster);
  kernel.cluster.z = reader.Take<uint32_t>("cluster z", 1, kMaxCluster);
  CheckGeometry(kernel, reader);
  kernel.shared_bytes = reader.Take<uint32_t>("dynamic shared bytes", 0, kMaxSharedBytes);
  kernel.dependent_launch = reader.Take("programmatic dependent launch flag", 0, 1) == 1;

  const auto arguments = reader.Take<size_t>("number of arguments", 0, kMaxArguments);
  size_t tensor_maps = 0;
  for (size_t i = 0; i < arguments; ++i) {
    reader.Enter(Concat(part, ", argument ", i, ": "));
    kernel.arguments.push_back(TakeArgument(reader, plan, !kernel.empty()));
    if (std::holds_alternative<TensorMapArgument>(kernel.arguments.back()) && ++tensor_maps > kMaxTensorMaps) {
      throw reader.Refuse(Concat("more tensor maps than the ", kMaxTensorMaps, " that a kernel may have."));
    }
  }
  reader.Enter("");
  return kernel;
}

std::vector<std::string> Split(std::string_view text) {
  std::vector<std::string> parts;
  for (size_t begin = 0;;) {
    const size_t end = text.find(',', begin);
    parts.emplace_back(text.substr(begin, end - begin));
    if (end == std::string_view::npos) {
      return parts;
    }
    begin = end + 1;
  }
}

bool IsSha256(const std::string& text) {
  return text.size() == 64 && text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

}  // namespace

Plan ParsePlan(std::string_view cubins, std::string_view functions, const int64_t* values, size_t count) {
  const std::vector<std::string> digests = Split(cubins);
  const std::vector<std::string> names = Split(functions);

  Plan plan = {};
  Reader reader(values, count);
  reader.Take("version", kVersion, kVersion);
  const auto kernels = reader.Take<size_t>("number of kernels", 1, kMaxKernels);
  if (digests.size() != kernels || names.size() != kernels) {
    throw Malformed(Concat("it has ", kernels, " kernels, \"cubins\" names ", digests.size(), " and \"functions\" ",
                           names.size(), "; expected one entry a kernel in each."));
  }
  for (size_t i = 0; i < kernels; ++i) {
    if (!IsSha256(digests[i])) {
      throw Malformed(Concat("entry ", i, " of \"cubins\" is \"", digests[i],
                             "\", expected a sha256 of 64 lower-case hexadecimal digits."));
    }
    if (names[i].empty()) {
      throw Malformed(Concat("entry ", i, " of \"functions\" is empty, expected a kernel's name."));
    }
    KernelLaunch kernel = TakeKernel(reader, plan, Concat("kernel ", i, " (", names[i], ")"));
    if (i > 0 && plan.kernels.back().empty()) {
      kernel.dependent_launch = false;  // It relies on what the one before it, which is skipped, would have waited for.
    }
    kernel.cubin = digests[i];
    kernel.function = names[i];
    plan.kernels.push_back(std::move(kernel));
  }
  reader.Finish();
  return plan;
}

}  // namespace jax_qla
