#include "handler.h"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "driver.h"
#include "failure.h"
#include "launch.h"
#include "plan.h"
#include "runtime.h"
#include "tensor_map.h"

namespace jax_qla {
namespace {

namespace ffi = ::xla::ffi;

// The platform "CUDA".
struct CudaPlatform {
  using StreamSource = ffi::PlatformStream<CUstream>;

  static Runtime& GetRuntime() { return Runtime::Cuda(); }
  static CUstream Stream(CUstream stream) { return stream; }
};

// The platform "cpu" of the tests. XLA has no stream there; the recording driver numbers its streams, 1 for the first
// device, 2 for the second, and so on.
struct HostPlatform {
  using StreamSource = ffi::DeviceOrdinal;

  static Runtime& GetRuntime() { return Runtime::Host(); }
  static CUstream Stream(int32_t ordinal) { return reinterpret_cast<CUstream>(static_cast<intptr_t>(ordinal) + 1); }
};

template <typename Platform>
using StreamHandle = typename ffi::CtxDecoding<typename Platform::StreamSource>::Type;

CUcontext ContextOf(const Driver& driver, CUstream stream) {
  CUcontext context = nullptr;
  if (CUresult error = driver.StreamGetCtx(stream, &context); error != kCudaSuccess) {
    throw driver.Failed(error, "The CUDA context of XLA's stream cannot be read");
  }
  return context;
}

// What one call site keeps from compilation to its last run: the parsed plan, and the plan's functions in each context
// that the executable has been initialised for. Shared by all devices and threads that run the executable.
template <typename Platform>
class LaunchState {
 public:
  static inline ffi::TypeId id = XLA_FFI_UNKNOWN_TYPE_ID;

  explicit LaunchState(Plan plan) : plan_(std::move(plan)) {}

  ~LaunchState() {
    for (const Loaded* loaded = loaded_.load(); loaded != nullptr;) {
      delete std::exchange(loaded, loaded->next);
    }
  }

  const Plan& plan() const { return plan_; }

  // The plan's functions in `context`, loaded if they are not yet; `context` must be current.
  void Load(Runtime& runtime, CUcontext context) {
    if (Find(context) != nullptr) {
      return;
    }
    auto loaded = std::make_unique<Loaded>();
    loaded->context = context;
    for (const KernelLaunch& kernel : plan_.kernels) {
      loaded->functions.push_back(runtime.kernels.Load(context, kernel));
    }
    // Devices load side by side. Of two threads of one device, which may have had the same functions, one counts.
    const std::lock_guard<std::mutex> lock(mutex_);
    if (Find(context) != nullptr) {
      return;
    }
    loaded->next = loaded_.load();
    loaded_.store(loaded.release());
  }

  // The plan's functions in `context`, or null before Load. Takes no lock: entries are only ever added.
  const CUfunction* Find(CUcontext context) const {
    for (const Loaded* loaded = loaded_.load(); loaded != nullptr; loaded = loaded->next) {
      if (loaded->context == context) {
        return loaded->functions.data();
      }
    }
    return nullptr;
  }

 private:
  struct Loaded {
    CUcontext context;
    std::vector<CUfunction> functions;
    const Loaded* next;
  };

  const Plan plan_;
  std::mutex mutex_;
  std::atomic<const Loaded*> loaded_ = nullptr;
};

// Runs the body of a stage and turns what it throws into XLA's error. XLA is built without exceptions: none may pass.
template <typename Body>
ffi::Error Guarded(Body body) {
  try {
    body();
    return ffi::Error::Success();
  } catch (const Failure& failure) {
    return ffi::Error(static_cast<ffi::ErrorCode>(failure.code()), failure.what());
  } catch (const std::exception& exception) {
    return ffi::Error::Internal(Concat("Unexpected error in ", kLaunchTarget, ": ", exception.what()));
  }
}

template <typename Platform>
ffi::ErrorOr<std::unique_ptr<LaunchState<Platform>>> Instantiate(std::string_view cubins, std::string_view functions,
                                                                 ffi::Span<const int64_t> plan) {
  std::unique_ptr<LaunchState<Platform>> state;
  ffi::Error error = Guarded([&] {
    state = std::make_unique<LaunchState<Platform>>(ParsePlan(cubins, functions, plan.begin(), plan.size()));
  });
  if (error.failure()) {
    return ffi::Unexpected<ffi::Error>(std::move(error));
  }
  return state;
}

template <typename Platform>
ffi::Error Initialize(StreamHandle<Platform> handle, LaunchState<Platform>* state) {
  return Guarded([&] {
    Runtime& runtime = Platform::GetRuntime();
    const CUcontext context = ContextOf(runtime.driver, Platform::Stream(handle));
    if (state->Find(context) != nullptr) {
      return;
    }
    const CurrentContext current(runtime.driver, context);
    state->Load(runtime, context);
  });
}

// Writes the call's operands, then its results, to `buffers`.
void Collect(const ffi::RemainingArgs& operands, const ffi::RemainingRets& results, size_t needed,
             std::array<Buffer, kMaxBuffers>& buffers) {
  const size_t count = operands.size() + results.size();
  if (count < needed || count > kMaxBuffers) {
    throw Failure(FailureCode::kInvalidArgument, Concat("The call has ", count, " operands and results, expected ",
                                                        needed, " (from its plan) to ", kMaxBuffers, "."));
  }
  for (size_t i = 0; i < operands.size(); ++i) {
    const auto operand = operands.get<ffi::AnyBuffer>(i);
    if (operand.has_error()) {
      throw Failure(FailureCode::kInvalidArgument, Concat("Operand ", i, ": ", operand.error().message()));
    }
    buffers[i] = {operand->untyped_data(), operand->size_bytes()};
  }
  for (size_t i = 0; i < results.size(); ++i) {
    auto result = results.get<ffi::AnyBuffer>(i);
    if (result.has_error()) {
      throw Failure(FailureCode::kInvalidArgument, Concat("Result ", i, ": ", result.error().message()));
    }
    const ffi::AnyBuffer buffer = **result;
    buffers[operands.size() + i] = {buffer.untyped_data(), buffer.size_bytes()};
  }
}

template <typename Platform>
ffi::Error Execute(StreamHandle<Platform> handle, LaunchState<Platform>* state, ffi::RemainingArgs operands,
                   ffi::RemainingRets results) {
  return Guarded([&] {
    const Driver& driver = Platform::GetRuntime().driver;
    const Plan& plan = state->plan();
    std::array<Buffer, kMaxBuffers> buffers;
    Collect(operands, results, plan.buffers, buffers);

    const CUstream stream = Platform::Stream(handle);
    const CUcontext context = ContextOf(driver, stream);
    const CUfunction* functions = state->Find(context);
    if (functions == nullptr) {
      throw Failure(FailureCode::kInternal,
                    Concat(kLaunchTarget, " was executed on a device for which XLA had not initialised it."));
    }
    const CurrentContext current(driver, context);
    for (size_t i = 0; i < plan.kernels.size(); ++i) {
      if (!plan.kernels[i].empty()) {
        Launch(driver, plan.kernels[i], functions[i], stream, buffers.data());
      }
    }
  });
}

// On the platform "cpu" XLA has no initialize stage: loading comes before the first execution.
template <typename Platform>
ffi::Error InitializeAndExecute(StreamHandle<Platform> handle, LaunchState<Platform>* state,
                                ffi::RemainingArgs operands, ffi::RemainingRets results) {
  ffi::Error error = Initialize<Platform>(handle, state);
  return error.failure() ? error : Execute<Platform>(handle, state, operands, results);
}

// The stages as XLA calls them.
template <typename Platform>
struct Stages {
  using State = LaunchState<Platform>;

  static XLA_FFI_Error* Instantiate(XLA_FFI_CallFrame* frame) {
    static const auto* const handler = ffi::Ffi::BindInstantiate()
                                           .Attr<std::string_view>("cubins")
                                           .Attr<std::string_view>("functions")
                                           .Attr<ffi::Span<const int64_t>>("plan")
                                           .To(jax_qla::Instantiate<Platform>)
                                           .release();
    return handler->Call(frame);
  }

  static XLA_FFI_Error* Initialize(XLA_FFI_CallFrame* frame) {
    static const auto* const handler = ffi::Ffi::BindInitialize()
                                           .Ctx<typename Platform::StreamSource>()
                                           .template Ctx<ffi::State<State>>()
                                           .To(jax_qla::Initialize<Platform>)
                                           .release();
    return handler->Call(frame);
  }

  // `Body` is Execute, or InitializeAndExecute.
  template <auto Body>
  static XLA_FFI_Error* Execute(XLA_FFI_CallFrame* frame) {
    static const auto* const handler = ffi::Ffi::BindExecute()
                                           .Ctx<typename Platform::StreamSource>()
                                           .template Ctx<ffi::State<State>>()
                                           .RemainingArgs()
                                           .RemainingRets()
                                           .To(Body, {ffi::Traits::kCmdBufferCompatible})
                                           .release();
    return handler->Call(frame);
  }
};

template <typename Platform>
const XLA_FFI_TypeInfo* StateTypeInfo() {
  static const XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<LaunchState<Platform>>();
  return &info;
}

}  // namespace

Registration CudaRegistration() {
  using Cuda = Stages<CudaPlatform>;
  return {Cuda::Instantiate, Cuda::Initialize, Cuda::Execute<Execute<CudaPlatform>>, &Cuda::State::id,
          StateTypeInfo<CudaPlatform>()};
}

Registration HostRegistration() {
  using Host = Stages<HostPlatform>;
  return {Host::Instantiate, nullptr, Host::Execute<InitializeAndExecute<HostPlatform>>, &Host::State::id,
          StateTypeInfo<HostPlatform>()};
}

}  // namespace jax_qla
