// Calls the FFI handler as XLA would, with attributes and buffers that are random, most of them wrong, under
// AddressSanitizer and UndefinedBehaviorSanitizer, against the recording driver.
//
//   fuzz_handler FOLDER SHA256 CALLS SEED      with $JAX_QLA_LIBCUDA
//
// <FOLDER>/<SHA256>.cubin holds the kernels of kKernels. Every buffer is a heap block of exactly its size, and the
// driver touches both ends of what a tensor map reaches: a map beyond its buffer is a heap overflow. Every plan that
// is right must run, every other one may run or be refused with one of the codes in failure.h and a sentence. Prints
// how many calls ended how; whatever else happens ends the process.

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cubin_files.h"
#include "handler.h"

// XLA's side of the interface, of which version 0.4 (JAX 0.11) renamed two things.
#define JAX_QLA_BEFORE_0_4 (XLA_FFI_API_MAJOR == 0 && XLA_FFI_API_MINOR < 4)

struct XLA_FFI_Error {
  XLA_FFI_Error_Code code;
  std::string message;
};

#if JAX_QLA_BEFORE_0_4
struct XLA_FFI_ExecutionContext {
#else
struct XLA_FFI_InvokeContext {
#endif
  int32_t ordinal = 0;
  void* state = nullptr;
  int64_t state_type = 0;
};

namespace {

constexpr int64_t kStateType = 7;

XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) { return new XLA_FFI_Error{args->errc, args->message}; }
#if JAX_QLA_BEFORE_0_4
void GetMessage(XLA_FFI_Error_GetMessage_Args* args) { args->message = args->error->message.c_str(); }
#else
void GetDetails(XLA_FFI_Error_GetDetails_Args* args) {
  args->message = args->error->message.c_str();
  args->errc = args->error->code;
}
#endif
void DestroyError(XLA_FFI_Error_Destroy_Args* args) { delete args->error; }

XLA_FFI_Error* SetState(XLA_FFI_State_Set_Args* args) {
  args->ctx->state = args->state;
  args->ctx->state_type = args->type_id->type_id;
  return nullptr;
}

XLA_FFI_Error* GetState(XLA_FFI_State_Get_Args* args) {
  if (args->ctx->state == nullptr || args->ctx->state_type != args->type_id->type_id) {
    return new XLA_FFI_Error{XLA_FFI_Error_Code_NOT_FOUND, "no state"};
  }
  args->state = args->ctx->state;
  return nullptr;
}

XLA_FFI_Error* GetOrdinal(XLA_FFI_DeviceOrdinal_Get_Args* args) {
  args->device_ordinal = args->ctx->ordinal;
  return nullptr;
}

XLA_FFI_Api MakeApi() {
  XLA_FFI_Api api = {};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = CreateError;
#if JAX_QLA_BEFORE_0_4
  api.XLA_FFI_Error_GetMessage = GetMessage;
#else
  api.XLA_FFI_Error_GetDetails = GetDetails;
#endif
  api.XLA_FFI_Error_Destroy = DestroyError;
  api.XLA_FFI_State_Set = SetState;
  api.XLA_FFI_State_Get = GetState;
  api.XLA_FFI_DeviceOrdinal_Get = GetOrdinal;
  return api;
}

[[noreturn]] void Die(const std::string& why) {
  std::fprintf(stderr, "%s\n", why.c_str());
  std::exit(1);
}

// What is random.

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  int64_t Number(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(engine_); }
  bool OneIn(int64_t n) { return Number(1, n) == 1; }

  template <typename T>
  const T& Pick(const std::vector<T>& from) {
    return from[static_cast<size_t>(Number(0, static_cast<int64_t>(from.size()) - 1))];
  }

  // A number at which something may break.
  int64_t Evil() {
    static const std::vector<int64_t> kEdges = {std::numeric_limits<int64_t>::min(),
                                                std::numeric_limits<int64_t>::max(),
                                                std::numeric_limits<int32_t>::min(),
                                                std::numeric_limits<int32_t>::max(),
                                                -1,
                                                0,
                                                1,
                                                2,
                                                3,
                                                4,
                                                5,
                                                6,
                                                8,
                                                12,
                                                13,
                                                15,
                                                16,
                                                17,
                                                24,
                                                25,
                                                31,
                                                32,
                                                63,
                                                64,
                                                65,
                                                127,
                                                128,
                                                255,
                                                256,
                                                257,
                                                1024,
                                                1025,
                                                65535,
                                                65536,
                                                232448,
                                                232449,
                                                int64_t{1} << 31,
                                                int64_t{1} << 32,
                                                (int64_t{1} << 32) + 1,
                                                (int64_t{1} << 40) - 16,
                                                int64_t{1} << 40,
                                                int64_t{1} << 62};
    return OneIn(4) ? static_cast<int64_t>(engine_()) : Pick(kEdges);
  }

  std::string Text() {
    std::string text(static_cast<size_t>(Number(0, OneIn(50) ? 100'000 : 80)), '\0');
    for (char& letter : text) {
      letter = static_cast<char>(Number(0, 255));
    }
    return text;
  }

 private:
  std::mt19937_64 engine_;
};

using Numbers = std::vector<int64_t>;

// The kernels in the cubin: parameters of 8 bytes (pointer or 64-bit scalar), 4 and 128 (tensor map).
const std::map<std::string, std::vector<int>> kKernels = {
    {"none", {}}, {"pointers", {8, 8}}, {"numbers", {4, 8, 4}}, {"maps", {128, 128}}, {"all", {128, 8, 4, 128, 8, 4}}};

struct Block {
  std::unique_ptr<char[]> memory;
  std::vector<int64_t> dims;
  size_t offset;  // of the data in the memory, which is aligned to 16 bytes
  size_t bytes;
};

struct Call {
  std::vector<Block> buffers;
  size_t operands;
  std::string cubins, functions;
  Numbers plan;
};

Block MakeBlock(Random& random, bool right) {
  Block block;
  int64_t count = 1;
  for (int64_t rank = random.Number(0, 4); rank > 0; --rank) {
    block.dims.push_back(random.Number(random.OneIn(10) ? 0 : 1, 12));
    count *= block.dims.back();
  }
  block.offset = right || random.OneIn(2) ? 0 : static_cast<size_t>(random.Number(0, 31));
  block.bytes = static_cast<size_t>(count) * 4;
  block.memory.reset(new char[block.offset + block.bytes]);
  return block;
}

// A tensor map over the buffer, in float32; within it, and with strides of 16 bytes, unless `right` is false.
void AppendMap(Random& random, const Call& call, size_t buffer, bool right, Numbers* plan) {
  const int64_t elements = static_cast<int64_t>(call.buffers[buffer].bytes) / 4;
  const int64_t rank = right ? random.Number(1, elements >= 12 ? 2 : 1) : random.Number(1, 5);
  Numbers dims = {rank == 1 ? std::max<int64_t>(1, elements) : random.Number(1, 8)};
  Numbers strides;
  for (int64_t i = 1; i < rank; ++i) {
    if (!right && random.OneIn(4)) {  // The offset of its last row is 2^64, which is 0 where nobody looks.
      const int64_t power = random.Number(25, 31);
      dims.push_back((int64_t{1} << power) + 1);
      strides.push_back(int64_t{1} << (64 - power));
      continue;
    }
    const int64_t stride = 16 * random.Number(1, 4);
    const int64_t most = right ? (elements - dims[0]) * 4 / stride + 1 : 9;
    dims.push_back(random.Number(1, std::max<int64_t>(1, most)));
    strides.push_back(stride);
  }
  plan->insert(plan->end(), {2, static_cast<int64_t>(buffer), 7, rank});
  plan->insert(plan->end(), dims.begin(), dims.end());
  plan->insert(plan->end(), strides.begin(), strides.end());
  for (int64_t i = 0; i < rank; ++i) {
    plan->push_back(i == 0 ? 4 * random.Number(1, 64) : random.Number(1, 256));
  }
  for (int64_t i = 0; i < rank; ++i) {
    plan->push_back(random.Number(1, 8));
  }
  plan->insert(plan->end(), {0, random.Number(0, 6), random.Number(0, 3), random.Number(0, 1)});
}

// A call that must run.
Call RightCall(Random& random, const std::string& sha256) {
  Call call;
  const int64_t buffers = random.Number(1, 6);
  while (call.buffers.size() < static_cast<size_t>(buffers)) {
    Block block = MakeBlock(random, true);
    if (block.bytes > 0) {
      call.buffers.push_back(std::move(block));
    }
  }
  call.operands = static_cast<size_t>(random.Number(0, buffers));
  const int64_t kernels = random.Number(1, 3);
  call.plan = {1, kernels};
  for (int64_t i = 0; i < kernels; ++i) {
    auto kernel = kKernels.begin();
    std::advance(kernel, random.Number(0, static_cast<int64_t>(kKernels.size()) - 1));
    call.cubins += (i == 0 ? "" : ",") + sha256;
    call.functions += (i == 0 ? "" : ",") + kernel->first;
    const int64_t cluster = random.OneIn(4) ? 2 : 1;
    const int64_t grid = cluster * random.Number(random.OneIn(8) ? 0 : 1, 1000);
    call.plan.insert(call.plan.end(), {grid, 1, 1, 32 * random.Number(1, 32), 1, 1, cluster, 1, 1});
    call.plan.insert(call.plan.end(), {random.Number(0, 232448), random.Number(0, 1)});
    call.plan.push_back(static_cast<int64_t>(kernel->second.size()));
    for (const int bytes : kernel->second) {
      const int64_t buffer = random.Number(0, buffers - 1);
      if (bytes == 128) {
        AppendMap(random, call, static_cast<size_t>(buffer), true, &call.plan);
      } else if (bytes == 8 && random.OneIn(2)) {
        call.plan.insert(call.plan.end(), {0, buffer});
      } else {
        call.plan.insert(call.plan.end(), {1, bytes, random.Number(-1000, 1000)});
      }
    }
  }
  return call;
}

void Spoil(Random& random, Call* call) {
  const auto place = [&](const Numbers& numbers) {
    return numbers.begin() + random.Number(0, static_cast<int64_t>(numbers.size()));
  };
  for (int64_t i = random.Number(1, 3); i > 0; --i) {
    Numbers& plan = call->plan;
    switch (random.Number(0, 9)) {
      case 0:
        plan.erase(place(plan), plan.end());
        break;
      case 1:
        plan.insert(place(plan), random.Evil());
        break;
      case 2: {
        call->buffers.clear();
        for (int64_t n = random.OneIn(20) ? 130 : random.Number(0, 6); n > 0; --n) {
          call->buffers.push_back(MakeBlock(random, false));
        }
        call->operands = static_cast<size_t>(random.Number(0, static_cast<int64_t>(call->buffers.size())));
        break;
      }
      case 3: {
        // Well-formed, but with maps that need not fit their buffers.
        if (!call->buffers.empty()) {
          call->functions = "maps";
          call->cubins = call->cubins.substr(0, 64);
          plan = {1, 1, 1, 1, 1, 32, 1, 1, 1, 1, 1, 0, 0, 2};
          AppendMap(random, *call, call->buffers.size() - 1, false, &plan);
          AppendMap(random, *call, 0, random.OneIn(2), &plan);
        }
        break;
      }
      case 4: {
        std::string& text = random.OneIn(2) ? call->cubins : call->functions;
        if (text.empty() || random.OneIn(2)) {
          text = random.Text();
        } else {
          text[static_cast<size_t>(random.Number(0, static_cast<int64_t>(text.size()) - 1))] =
              static_cast<char>(random.Number(0, 255));
        }
        break;
      }
      default:
        if (!plan.empty()) {
          plan[static_cast<size_t>(random.Number(0, static_cast<int64_t>(plan.size()) - 1))] = random.Evil();
        }
    }
  }
}

// One call, from compilation to the end of the executable.

class Attributes {
 public:
  Attributes(Random& random, const Call& call, bool right) : plan_(call.plan) {
    cubins_ = {call.cubins.data(), call.cubins.size()};
    functions_ = {call.functions.data(), call.functions.size()};
    array_ = {XLA_FFI_DataType_S64, plan_.size(), plan_.data()};
    Add("cubins", XLA_FFI_AttrType_STRING, &cubins_);
    Add("functions", XLA_FFI_AttrType_STRING, &functions_);
    Add("plan", XLA_FFI_AttrType_ARRAY, &array_);
    if (right || !random.OneIn(20)) {
      return;
    }
    // Not of the types that the handler expects, or not there.
    switch (random.Number(0, 3)) {
      case 0:
        array_.dtype = random.OneIn(2) ? XLA_FFI_DataType_S32 : XLA_FFI_DataType_F64;
        break;
      case 1:
        std::swap(types_[1], types_[2]);
        std::swap(values_[1], values_[2]);
        break;
      case 2:
        types_[2] = XLA_FFI_AttrType_SCALAR;
        scalar_ = {XLA_FFI_DataType_S64, plan_.data()};
        values_[2] = &scalar_;
        break;
      default: {
        const size_t gone = static_cast<size_t>(random.Number(0, 2));
        types_.erase(types_.begin() + static_cast<int64_t>(gone));
        values_.erase(values_.begin() + static_cast<int64_t>(gone));
        names_.erase(names_.begin() + static_cast<int64_t>(gone));
      }
    }
  }

  XLA_FFI_Attrs View() {
    pointers_.clear();
    for (XLA_FFI_ByteSpan& name : names_) {
      pointers_.push_back(&name);
    }
    return {XLA_FFI_Attrs_STRUCT_SIZE, nullptr,       static_cast<int64_t>(names_.size()), types_.data(),
            pointers_.data(),          values_.data()};
  }

 private:
  void Add(const char* name, XLA_FFI_AttrType type, void* value) {
    names_.push_back({name, std::strlen(name)});
    types_.push_back(type);
    values_.push_back(value);
  }

  Numbers plan_;  // of exactly its size: a copy has no spare room
  XLA_FFI_ByteSpan cubins_, functions_;
  XLA_FFI_Array array_;
  XLA_FFI_Scalar scalar_;
  std::vector<XLA_FFI_ByteSpan> names_;
  std::vector<XLA_FFI_AttrType> types_;
  std::vector<void*> values_;
  std::vector<XLA_FFI_ByteSpan*> pointers_;
};

// "ran", or the stage and the code of the refusal.
std::string Outcome(const char* stage, XLA_FFI_Error* error) {
  const std::unique_ptr<XLA_FFI_Error> owned(error);
  switch (error->code) {
    case XLA_FFI_Error_Code_INVALID_ARGUMENT:
    case XLA_FFI_Error_Code_NOT_FOUND:
    case XLA_FFI_Error_Code_FAILED_PRECONDITION:
    case XLA_FFI_Error_Code_INTERNAL:
    case XLA_FFI_Error_Code_DATA_LOSS:
      break;
    default:
      Die("refused with code " + std::to_string(error->code) + ": " + error->message);
  }
  if (error->message.empty() || error->message.find("Unexpected error") != std::string::npos) {
    Die("not a refusal of ours: '" + error->message + "'");
  }
  return std::string(stage) + " " + std::to_string(error->code);
}

std::string Run(const XLA_FFI_Api& api, const jax_qla::Registration& handler, Random& random, Call& call, bool right) {
  XLA_FFI_ExecutionContext context;
  context.ordinal = right || !random.OneIn(50) ? static_cast<int32_t>(random.Number(0, 7)) : 100;
  Attributes attributes(random, call, right);

  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.ctx = &context;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, 0, nullptr, nullptr};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, 0, nullptr, nullptr};
  frame.stage = XLA_FFI_ExecutionStage_INSTANTIATE;
  frame.attrs = attributes.View();
  if (XLA_FFI_Error* error = handler.instantiate(&frame)) {
    return Outcome("instantiate", error);
  }
  const std::unique_ptr<void, void (*)(void*)> state(context.state, handler.state_type_info->deleter);

  std::vector<XLA_FFI_Buffer> buffers;
  std::vector<void*> pointers;
  for (Block& block : call.buffers) {
    buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, XLA_FFI_DataType_F32, block.memory.get() + block.offset,
                       static_cast<int64_t>(block.dims.size()), block.dims.data()});
  }
  for (XLA_FFI_Buffer& buffer : buffers) {
    pointers.push_back(&buffer);
  }
  std::vector<XLA_FFI_ArgType> operand_types(call.operands, XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> result_types(buffers.size() - call.operands, XLA_FFI_RetType_BUFFER);
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(operand_types.size()), operand_types.data(),
                pointers.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(result_types.size()), result_types.data(),
                pointers.data() + call.operands};
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  for (int repetition = 0; repetition < 2; ++repetition) {
    if (XLA_FFI_Error* error = handler.execute(&frame)) {
      return Outcome("execute", error);
    }
  }
  return "ran";
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 5) {
    Die("fuzz_handler FOLDER SHA256 CALLS SEED");
  }
  jax_qla::SetCubinDirectories({arguments[1]});
  const std::string sha256 = arguments[2];
  Random random(std::strtoull(arguments[4], nullptr, 10));
  void* const driver = dlopen(std::getenv("JAX_QLA_LIBCUDA"), RTLD_NOW);
  const auto reset = reinterpret_cast<void (*)()>(dlsym(driver, "stub_reset"));
  const auto forget_tensor_maps = reinterpret_cast<void (*)()>(dlsym(driver, "stub_forget_tensor_maps"));

  const XLA_FFI_Api api = MakeApi();
  const jax_qla::Registration handler = jax_qla::HostRegistration();
  handler.state_type_id->type_id = kStateType;
  std::map<std::string, int> outcomes;
  for (int64_t i = std::strtoll(arguments[3], nullptr, 10); i > 0; --i) {
    if (i % 256 == 0) {
      reset();
      forget_tensor_maps();  // of states that are gone
    }
    Call call = RightCall(random, sha256);
    const bool right = random.OneIn(4);
    if (!right) {
      Spoil(random, &call);
    }
    const std::string outcome = Run(api, handler, random, call, right);
    if (right && outcome != "ran") {
      Die("a right call was refused: " + outcome);
    }
    ++outcomes[right ? "right" : outcome];
  }
  for (const auto& [outcome, calls] : outcomes) {
    std::printf("%s: %d\n", outcome.c_str(), calls);
  }
  return 0;
}
