// SPDX-License-Identifier: Apache-2.0
//
// The functions of the CUDA runtime that vrambroker calls, over a Machine. README.md says which rules of the real one
// they keep.
#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cuda_substitute/faults.h"
#include "tests/cuda_substitute/machine.h"
#include "tests/cuda_substitute/substitute.h"

namespace vrambroker::cuda_substitute {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kGranule = size_t{2} << 20;  // of memory that can be shared
constexpr uint64_t kHandleMark = 0x76726d6275696463;

struct StreamState {
  int device = 0;
  bool blocking = true;  // waits for the default stream, and it for this one
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
  std::thread::id capture_thread;  // that began it
  Clock::time_point busy_until;

  bool capturing() const { return capture != cudaStreamCaptureStatusNone; }
  void Invalidate() { capture = cudaStreamCaptureStatusInvalidated; }
};

struct EventState {
  int device = 0;
  bool captured = false;
  cudaStream_t captured_on = nullptr;
  Clock::time_point done_at;
};

// What a cudaIpcMemHandle_t holds.
struct Handle {
  uint64_t mark;
  uint64_t id;
  uint32_t allocation;
  pid_t exporter;
  uid_t user;
};
static_assert(sizeof(Handle) <= sizeof(cudaIpcMemHandle_t));

// Device memory as this process sees it: addresses that the CPU may not touch.
struct Mapping {
  Hold hold;
  bool own = false;
  uint32_t opens = 0;  // of another process's memory
};

std::string FormatUuid(const cudaUUID_t& uuid) {
  std::string text = "GPU-";
  for (size_t i = 0; i < sizeof uuid.bytes; ++i) {
    std::array<char, 4> hex{};
    std::snprintf(hex.data(), hex.size(), "%02x", static_cast<unsigned char>(uuid.bytes[i]));
    text += std::string(i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "") + hex.data();
  }
  return text;
}

cudaUUID_t UuidOf(int physical) {
  cudaUUID_t uuid = {};
  std::memcpy(uuid.bytes, "substitute GPU ", 15);
  uuid.bytes[15] = static_cast<char>('0' + physical);
  return uuid;
}

// The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order: numbers or UUIDs, up to the first that is neither.
std::vector<int> VisibleDevices(int count) {
  std::vector<int> all;
  for (int i = 0; i < count; ++i) all.push_back(i);
  const char* const variable = std::getenv("CUDA_VISIBLE_DEVICES");
  if (variable == nullptr) return all;
  std::vector<int> visible;
  std::istringstream stream(variable);
  for (std::string entry; std::getline(stream, entry, ',');) {
    const auto it = std::find_if(all.begin(), all.end(), [&](int physical) {
      return entry == std::to_string(physical) ||
             (entry.size() > 4 && FormatUuid(UuidOf(physical)).rfind(entry, 0) == 0);
    });
    if (it == all.end()) break;
    visible.push_back(*it);
  }
  return visible;
}

struct ThreadState {
  std::vector<int> contexts;  // the thread's context stack, as devices; empty until one is chosen or used
  cudaError_t last_error = cudaSuccess;
  cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

  int device() const { return contexts.empty() ? 0 : contexts.back(); }  // CUDA's current device
  // Takes the place of the current one.
  void Choose(int device) { contexts.empty() ? contexts.push_back(device) : void(contexts.back() = device); }
};

ThreadState& Thread() {
  thread_local ThreadState state;
  return state;
}

class Runtime {
 public:
  // Never destroyed: threads of the process may call until its very end.
  static Runtime& Get() {
    static auto* const runtime = new Runtime;
    return *runtime;
  }

  Faults& faults() { return faults_; }
  std::mutex& mu() { return mu_; }
  Machine* machine() { return machine_.get(); }  // null: no driver
  bool forked() const { return getpid() != pid_; }
  const std::vector<int>& devices() const { return devices_; }

  // The current GPU, with a context on it. An error when it cannot be had.
  cudaError_t Context(int* physical) {
    if (devices_.empty()) return cudaErrorNoDevice;
    const int device = Thread().device();
    *physical = devices_[static_cast<size_t>(device)];
    if (!machine_->UseDevice(*physical)) return cudaErrorMemoryAllocation;
    Thread().Choose(device);
    return cudaSuccess;
  }

  // ---- REQUIRES for all that follows: mu() is held ----

  void* Map(const Hold& hold, bool own) {
    // Aligned as the real ones are.
    char* const all = static_cast<char*>(
        mmap(nullptr, hold.bytes + kGranule, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (all == MAP_FAILED) std::abort();
    const uintptr_t first = reinterpret_cast<uintptr_t>(all);
    const uintptr_t base = (first + kGranule - 1) / kGranule * kGranule;
    if (base > first) munmap(all, base - first);
    if (base - first < kGranule) munmap(all + (base - first) + hold.bytes, kGranule - (base - first));
    char* const address = all + (base - first);
    mappings_[address] = {.hold = hold, .own = own, .opens = own ? 0u : 1u};
    return address;
  }
  void Unmap(char* address) {
    const auto it = mappings_.find(address);
    munmap(address, it->second.hold.bytes);
    mappings_.erase(it);
  }
  Mapping* MappingAt(const void* address) {
    const auto it = mappings_.find(const_cast<char*>(static_cast<const char*>(address)));
    return it == mappings_.end() ? nullptr : &it->second;
  }
  char* AddressOf(uint64_t id) {
    for (auto& [address, mapping] : mappings_) {
      if (mapping.hold.id == id) return address;
    }
    return nullptr;
  }
  // The memory that [address, address + bytes) lies in, and where.
  std::optional<std::pair<Hold, uint64_t>> Range(const void* address, size_t bytes) {
    auto* const wanted = const_cast<char*>(static_cast<const char*>(address));
    auto it = mappings_.upper_bound(wanted);
    if (it == mappings_.begin()) return std::nullopt;
    --it;
    const auto offset = static_cast<uint64_t>(wanted - it->first);
    const Hold& hold = it->second.hold;
    if (offset > hold.bytes || bytes > hold.bytes - offset) return std::nullopt;
    return std::make_pair(hold, offset);
  }

  // Null for what is no stream.
  StreamState* Stream(cudaStream_t stream) {
    const auto number = reinterpret_cast<uintptr_t>(stream);
    if (stream == cudaStreamPerThread) {
      cudaStream_t& own = thread_streams_[{Thread().device(), std::this_thread::get_id()}];
      if (own == nullptr) own = AddStream(/*blocking=*/true);
      return streams_.at(own).get();
    }
    if (number <= 1) {  // the default stream, also by its name cudaStreamLegacy
      StreamState& state = default_streams_[Thread().device()];
      state.device = Thread().device();
      return &state;
    }
    const auto it = streams_.find(stream);
    return it == streams_.end() ? nullptr : it->second.get();
  }
  cudaStream_t AddStream(bool blocking) {
    auto state = std::make_unique<StreamState>(
        StreamState{.device = Thread().device(), .blocking = blocking, .capture_thread = {}, .busy_until = {}});
    auto* const stream = reinterpret_cast<cudaStream_t>(state.get());
    streams_[stream] = std::move(state);
    return stream;
  }
  // What is queued on it goes on.
  bool RemoveStream(cudaStream_t stream) {
    const auto it = streams_.find(stream);
    if (it == streams_.end()) return false;
    const StreamState& state = *it->second;
    destroyed_busy_until_[state.device] = std::max(destroyed_busy_until_[state.device], DoneAt(state));
    streams_.erase(it);
    return true;
  }

  std::set<EventState*>& events() { return events_; }

  // When what is queued on `stream` now is done. The default stream and blocking streams wait for each other.
  Clock::time_point DoneAt(const StreamState& stream) {
    Clock::time_point time = stream.busy_until;
    const bool is_default = &stream == &default_streams_[stream.device];
    if (is_default) {
      for (const auto& [handle, other] : streams_) {
        if (other->device == stream.device && other->blocking) time = std::max(time, other->busy_until);
      }
    } else if (stream.blocking) {
      time = std::max(time, default_streams_[stream.device].busy_until);
    }
    return time;
  }
  Clock::time_point AllDoneAt(int device) {
    Clock::time_point time = std::max(default_streams_[device].busy_until, destroyed_busy_until_[device]);
    for (const auto& [handle, stream] : streams_) {
      if (stream->device == device) time = std::max(time, stream->busy_until);
    }
    return time;
  }

  // Of calls that must not be made during a capture, unless the thread says that it knows, or the capture that it does
  // not mind. Those that they disturb are invalid from then on.
  cudaError_t CheckUnsafe() {
    const cudaStreamCaptureMode mode = Thread().capture_mode;
    return Disturb([mode](const StreamState& stream) {
      if (mode == cudaStreamCaptureModeRelaxed || stream.capture_mode == cudaStreamCaptureModeRelaxed) return false;
      return stream.capture_thread == std::this_thread::get_id() ||
             (mode == cudaStreamCaptureModeGlobal && stream.capture_mode == cudaStreamCaptureModeGlobal);
    });
  }
  // Of calls that wait for all of a device, whatever the modes.
  cudaError_t CheckWhole(int device) {
    return Disturb([device](const StreamState& stream) { return stream.device == device; });
  }
  // Of calls that ask or wait for a stream.
  cudaError_t CheckStream(StreamState* stream) {
    const cudaError_t error = CheckImplicit(*stream, /*disturbs=*/true);
    return error != cudaSuccess ? error : Disturb([stream](const StreamState& other) { return &other == stream; });
  }
  // The default stream includes all that it waits for.
  cudaError_t CheckImplicit(const StreamState& stream, bool disturbs) {
    if (&stream != &default_streams_[stream.device]) return cudaSuccess;
    const auto is_part = [&stream](const StreamState& other) {
      return other.device == stream.device && other.blocking;
    };
    const bool captured = std::any_of(streams_.begin(), streams_.end(), [&is_part](const auto& entry) {
      return entry.second->capturing() && is_part(*entry.second);
    });
    if (captured && disturbs) (void)Disturb(is_part);
    return captured ? cudaErrorStreamCaptureImplicit : cudaSuccess;
  }

 private:
  template <typename IsDisturbed>
  cudaError_t Disturb(const IsDisturbed& is_disturbed) {
    bool any = false;
    for (auto& [handle, stream] : streams_) {
      if (!stream->capturing() || !is_disturbed(*stream)) continue;
      stream->Invalidate();
      any = true;
    }
    return any ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
  }

  Runtime() : pid_(getpid()) {
    const char* const folder = std::getenv(kMachineVariable);
    if (folder == nullptr || *folder == '\0') return;
    machine_ = std::make_unique<Machine>(folder);
    devices_ = VisibleDevices(machine_->options().devices);
  }

  const pid_t pid_;
  Faults faults_;
  std::unique_ptr<Machine> machine_;
  std::vector<int> devices_;  // physical, by ordinal

  std::mutex mu_;
  std::map<char*, Mapping> mappings_;
  std::map<int, StreamState> default_streams_;
  std::map<cudaStream_t, std::unique_ptr<StreamState>> streams_;
  std::map<std::pair<int, std::thread::id>, cudaStream_t> thread_streams_;  // by device and thread
  std::map<int, Clock::time_point> destroyed_busy_until_;                   // by device: streams that are gone
  std::set<EventState*> events_;
};

cudaError_t Remember(cudaError_t error) {
  if (error != cudaSuccess) Thread().last_error = error;
  return error;
}

// Every function goes through here: who may call, and what is to fail.
template <typename Body>
cudaError_t Call(const char* function, const Body& body) {
  Runtime& runtime = Runtime::Get();
  if (runtime.forked()) return Remember(cudaErrorInitializationError);
  if (runtime.machine() == nullptr) return Remember(cudaErrorInsufficientDriver);
  if (const cudaError_t error = runtime.faults().Count(function); error != cudaSuccess) return Remember(error);
  return Remember(body(runtime));
}

// The same for what uses the current device, and so makes a context on it.
template <typename Body>
cudaError_t ContextCall(const char* function, const Body& body) {
  return Call(function, [&](Runtime& runtime) {
    int physical = 0;
    const cudaError_t error = runtime.Context(&physical);
    return error == cudaSuccess ? body(runtime, physical) : error;
  });
}

// The same for what must not happen while a stream of the process is captured.
template <typename Body>
cudaError_t UnsafeCall(const char* function, const Body& body) {
  return ContextCall(function, [&](Runtime& runtime, int physical) {
    {
      const std::lock_guard<std::mutex> lock(runtime.mu());
      if (const cudaError_t error = runtime.CheckUnsafe(); error != cudaSuccess) return error;
    }
    return body(runtime, physical);
  });
}

void WaitForDevice(Runtime& runtime) {
  Clock::time_point until;
  {
    const std::lock_guard<std::mutex> lock(runtime.mu());
    until = runtime.AllDoneAt(Thread().device());
  }
  std::this_thread::sleep_until(until);
}

void WaitForStream(Runtime& runtime, StreamState* stream) {
  Clock::time_point until;
  {
    const std::lock_guard<std::mutex> lock(runtime.mu());
    until = runtime.DoneAt(*stream);
  }
  std::this_thread::sleep_until(until);
}

struct ErrorName {
  cudaError_t error;
  const char* name;
  const char* text;
};

constexpr ErrorName kErrorNames[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver", "CUDA driver version is insufficient"},
    {cudaErrorDevicesUnavailable, "cudaErrorDevicesUnavailable", "CUDA-capable device(s) is/are busy or unavailable"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorDeviceUninitialized, "cudaErrorDeviceUninitialized", "invalid device context"},
    {cudaErrorMapBufferObjectFailed, "cudaErrorMapBufferObjectFailed", "mapping of buffer object failed"},
    {cudaErrorECCUncorrectable, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

const ErrorName* FindName(cudaError_t error) {
  for (const ErrorName& known : kErrorNames) {
    if (known.error == error) return &known;
  }
  return nullptr;
}

}  // namespace

// ---- Of this process, for tests ----

void SetFaults(const std::string& faults) {
  Runtime::Get().faults().Set(faults);
}

uint64_t Calls(const std::string& function) {
  return Runtime::Get().faults().calls(function);
}

void Launch(cudaStream_t stream, std::chrono::nanoseconds duration) {
  Runtime& runtime = Runtime::Get();
  const std::lock_guard<std::mutex> lock(runtime.mu());
  StreamState* const state = runtime.Stream(stream);
  if (state == nullptr) std::abort();
  state->busy_until = std::max(Clock::now(), runtime.DoneAt(*state)) + duration;
}

}  // namespace vrambroker::cuda_substitute

using vrambroker::cuda_substitute::Call;
using vrambroker::cuda_substitute::Clock;
using vrambroker::cuda_substitute::ContextCall;
using vrambroker::cuda_substitute::EventState;
using vrambroker::cuda_substitute::FindName;
using vrambroker::cuda_substitute::Handle;
using vrambroker::cuda_substitute::Hold;
using vrambroker::cuda_substitute::Mapping;
using vrambroker::cuda_substitute::Runtime;
using vrambroker::cuda_substitute::StreamState;
using vrambroker::cuda_substitute::Thread;
using vrambroker::cuda_substitute::UnsafeCall;
using Lock = std::lock_guard<std::mutex>;

// ---- Versions and errors ----

cudaError_t cudaDriverGetVersion(int* version) {
  Runtime& runtime = Runtime::Get();
  *version = runtime.machine() == nullptr ? 0 : runtime.machine()->options().driver_version;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

const char* cudaGetErrorName(cudaError_t error) {
  const auto* const known = FindName(error);
  return known == nullptr ? "unrecognized error code" : known->name;
}

const char* cudaGetErrorString(cudaError_t error) {
  const auto* const known = FindName(error);
  return known == nullptr ? "unrecognized error code" : known->text;
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = Thread().last_error;
  Thread().last_error = Runtime::Get().faults().sticky();
  return error;
}

// ---- Of the driver ----

static bool IsDevice(Runtime& runtime, int device) {
  return device >= 0 && static_cast<size_t>(device) < runtime.devices().size();
}

// Those of the runtime have the same numbers.
static int PrimaryContextState(int device, unsigned int* flags, int* active) {
  Runtime& runtime = Runtime::Get();
  if (!IsDevice(runtime, device)) return cudaErrorInvalidDevice;
  *flags = 0;
  *active = runtime.machine()->UsesDevice(runtime.devices()[static_cast<size_t>(device)]) ? 1 : 0;
  return cudaSuccess;
}

static int RetainPrimaryContext(void** context, int device) {
  Runtime& runtime = Runtime::Get();
  if (!IsDevice(runtime, device)) return cudaErrorInvalidDevice;
  if (const cudaError_t error = runtime.faults().Count("cuDevicePrimaryCtxRetain"); error != cudaSuccess) return error;
  if (!runtime.machine()->UseDevice(runtime.devices()[static_cast<size_t>(device)])) return cudaErrorMemoryAllocation;
  *context = reinterpret_cast<void*>(static_cast<uintptr_t>(device) + 1);
  return cudaSuccess;
}

static int PushContext(void* context) {
  const auto number = reinterpret_cast<uintptr_t>(context);
  if (number == 0 || number > Runtime::Get().devices().size()) return cudaErrorDeviceUninitialized;
  Thread().contexts.push_back(static_cast<int>(number) - 1);
  return cudaSuccess;
}

static int PopContext(void** context) {
  if (Thread().contexts.empty()) return cudaErrorDeviceUninitialized;
  *context = reinterpret_cast<void*>(static_cast<uintptr_t>(Thread().contexts.back()) + 1);
  Thread().contexts.pop_back();
  return cudaSuccess;
}

static int AddressRange(uint64_t* base, size_t* bytes, uint64_t address) {
  Runtime& runtime = Runtime::Get();
  const Lock lock(runtime.mu());
  auto* const pointer = reinterpret_cast<char*>(address);
  const std::optional<std::pair<Hold, uint64_t>> range = runtime.Range(pointer, 1);
  if (!range.has_value()) return cudaErrorInvalidValue;
  *base = address - range->second;
  *bytes = range->first.bytes;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned int /*version*/,
                                             unsigned long long /*flags*/,
                                             enum cudaDriverEntryPointQueryResult* result) {
  const std::map<std::string, void*> known = {
      {"cuDevicePrimaryCtxGetState", reinterpret_cast<void*>(&PrimaryContextState)},
      {"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(&RetainPrimaryContext)},
      {"cuCtxPushCurrent", reinterpret_cast<void*>(&PushContext)},
      {"cuCtxPopCurrent", reinterpret_cast<void*>(&PopContext)},
      {"cuMemGetAddressRange", reinterpret_cast<void*>(&AddressRange)}};
  return Call("cudaGetDriverEntryPointByVersion", [&](Runtime&) {
    const auto it = known.find(symbol);
    *function = it == known.end() ? nullptr : it->second;
    *result = it == known.end() ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
    return cudaSuccess;
  });
}

// ---- Devices ----

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  return Call("cudaGetDeviceCount", [&](Runtime& runtime) {
    *count = static_cast<int>(runtime.devices().size());
    return *count == 0 ? cudaErrorNoDevice : cudaSuccess;
  });
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* properties, int device) {
  return Call("cudaGetDeviceProperties", [&](Runtime& runtime) {
    if (!IsDevice(runtime, device)) return cudaErrorInvalidDevice;
    const int physical = runtime.devices()[static_cast<size_t>(device)];
    *properties = {};
    std::snprintf(properties->name, sizeof properties->name, "Substitute GPU %d", physical);
    properties->uuid = vrambroker::cuda_substitute::UuidOf(physical);
    properties->totalGlobalMem = runtime.machine()->options().device_bytes;
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attribute, int device) {
  return Call("cudaDeviceGetAttribute", [&](Runtime& runtime) {
    if (!IsDevice(runtime, device)) return cudaErrorInvalidDevice;
    if (attribute != cudaDevAttrComputeMode) return cudaErrorInvalidValue;
    *value = runtime.machine()->options().compute_mode;
    return cudaSuccess;
  });
}

cudaError_t cudaSetDevice(int device) {
  return Call("cudaSetDevice", [&](Runtime& runtime) {
    if (!IsDevice(runtime, device)) return cudaErrorInvalidDevice;
    Thread().Choose(device);
    int physical = 0;
    return runtime.Context(&physical);  // made at once since CUDA 12
  });
}

cudaError_t cudaGetDevice(int* device) {
  return Call("cudaGetDevice", [&](Runtime&) {
    *device = Thread().device();
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceSynchronize() {
  return ContextCall("cudaDeviceSynchronize", [](Runtime& runtime, int) {
    {
      const Lock lock(runtime.mu());
      if (const cudaError_t error = runtime.CheckWhole(Thread().device()); error != cudaSuccess) return error;
    }
    WaitForDevice(runtime);
    return cudaSuccess;
  });
}

// ---- Memory ----

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  return UnsafeCall("cudaMalloc", [&](Runtime& runtime, int physical) {
    *pointer = nullptr;
    if (bytes == 0) return cudaSuccess;
    using vrambroker::cuda_substitute::kGranule;
    const size_t rounded = (bytes + kGranule - 1) / kGranule * kGranule;
    const std::optional<Hold> hold = runtime.machine()->Allocate(physical, rounded);
    if (!hold.has_value()) return cudaErrorMemoryAllocation;
    const Lock lock(runtime.mu());
    *pointer = runtime.Map(*hold, /*own=*/true);
    return cudaSuccess;
  });
}

cudaError_t cudaFree(void* pointer) {
  return UnsafeCall("cudaFree", [&](Runtime& runtime, int) {
    if (pointer == nullptr) return cudaSuccess;
    Hold hold;
    {
      const Lock lock(runtime.mu());
      const Mapping* const mapping = runtime.MappingAt(pointer);
      if (mapping == nullptr || !mapping->own) return cudaErrorInvalidValue;
      hold = mapping->hold;
    }
    WaitForDevice(runtime);
    {
      const Lock lock(runtime.mu());
      runtime.Unmap(static_cast<char*>(pointer));
    }
    runtime.machine()->Release(hold, /*freed=*/true);
    return cudaSuccess;
  });
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  return Call("cudaMemGetInfo", [&](Runtime& runtime) {
    int physical = 0;
    if (const cudaError_t error = runtime.Context(&physical); error != cudaSuccess) return error;
    *total_bytes = runtime.machine()->options().device_bytes;
    *free_bytes = *total_bytes - runtime.machine()->UsedBytes(physical);
    return cudaSuccess;
  });
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, enum cudaMemcpyKind kind) {
  return UnsafeCall("cudaMemcpy", [&](Runtime& runtime, int) {
    const bool in = kind == cudaMemcpyHostToDevice;
    if (!in && kind != cudaMemcpyDeviceToHost) return cudaErrorInvalidValue;
    std::optional<std::pair<Hold, uint64_t>> range;
    StreamState* stream = nullptr;
    {
      const Lock lock(runtime.mu());
      range = runtime.Range(in ? to : from, bytes);
      stream = runtime.Stream(nullptr);
      if (const cudaError_t error = runtime.CheckStream(stream); error != cudaSuccess) return error;
    }
    if (!range.has_value()) return cudaErrorInvalidValue;
    WaitForStream(runtime, stream);
    if (in) {
      runtime.machine()->Write(range->first, range->second, from, bytes);
    } else {
      runtime.machine()->Read(range->first, range->second, to, bytes);
    }
    return cudaSuccess;
  });
}

cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t stream) {
  return ContextCall("cudaMemsetAsync", [&](Runtime& runtime, int) {
    std::optional<std::pair<Hold, uint64_t>> range;
    {
      const Lock lock(runtime.mu());
      if (runtime.Stream(stream) == nullptr) return cudaErrorInvalidResourceHandle;
      range = runtime.Range(pointer, bytes);
    }
    if (!range.has_value()) return cudaErrorInvalidValue;
    runtime.machine()->Fill(range->first, range->second, static_cast<char>(value), bytes);
    return cudaSuccess;
  });
}

// ---- Sharing memory ----

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* pointer) {
  return ContextCall("cudaIpcGetMemHandle", [&](Runtime& runtime, int) {
    const Lock lock(runtime.mu());
    const Mapping* const mapping = runtime.MappingAt(pointer);
    if (mapping == nullptr || !mapping->own) return cudaErrorInvalidValue;
    const Handle content{.mark = vrambroker::cuda_substitute::kHandleMark,
                         .id = mapping->hold.id,
                         .allocation = mapping->hold.allocation,
                         .exporter = getpid(),
                         .user = geteuid()};
    std::memset(handle, 0, sizeof *handle);
    std::memcpy(handle, &content, sizeof content);
    return cudaSuccess;
  });
}

cudaError_t cudaIpcOpenMemHandle(void** pointer, cudaIpcMemHandle_t handle, unsigned int flags) {
  return UnsafeCall("cudaIpcOpenMemHandle", [&](Runtime& runtime, int) {
    Handle content;
    std::memcpy(&content, &handle, sizeof content);
    if (flags != cudaIpcMemLazyEnablePeerAccess) return cudaErrorInvalidValue;
    if (content.mark != vrambroker::cuda_substitute::kHandleMark) return cudaErrorInvalidResourceHandle;
    if (content.exporter == getpid()) return cudaErrorDeviceUninitialized;
    if (runtime.machine()->options().one_user && content.user != geteuid()) return cudaErrorInvalidValue;
    const Lock lock(runtime.mu());
    if (char* const address = runtime.AddressOf(content.id); address != nullptr) {
      ++runtime.MappingAt(address)->opens;
      *pointer = address;
      return cudaSuccess;
    }
    const std::optional<Hold> hold = runtime.machine()->Open(content.allocation, content.id);
    if (!hold.has_value()) return cudaErrorMapBufferObjectFailed;
    *pointer = runtime.Map(*hold, /*own=*/false);
    return cudaSuccess;
  });
}

cudaError_t cudaIpcCloseMemHandle(void* pointer) {
  return UnsafeCall("cudaIpcCloseMemHandle", [&](Runtime& runtime, int) {
    Hold hold;
    {
      const Lock lock(runtime.mu());
      Mapping* const mapping = runtime.MappingAt(pointer);
      if (mapping == nullptr || mapping->own) return cudaErrorInvalidValue;
      if (--mapping->opens > 0) return cudaSuccess;
      hold = mapping->hold;
      runtime.Unmap(static_cast<char*>(pointer));
    }
    runtime.machine()->Release(hold, /*freed=*/false);
    return cudaSuccess;
  });
}

// ---- Streams ----

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags) {
  return UnsafeCall("cudaStreamCreateWithFlags", [&](Runtime& runtime, int) {
    const Lock lock(runtime.mu());
    *stream = runtime.AddStream(/*blocking=*/(flags & cudaStreamNonBlocking) == 0);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return ContextCall("cudaStreamDestroy", [&](Runtime& runtime, int) {
    const Lock lock(runtime.mu());
    return runtime.RemoveStream(stream) ? cudaSuccess : cudaErrorInvalidResourceHandle;
  });
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return ContextCall("cudaStreamQuery", [&](Runtime& runtime, int) {
    const Lock lock(runtime.mu());
    StreamState* const state = runtime.Stream(stream);
    if (state == nullptr) return cudaErrorInvalidResourceHandle;
    if (const cudaError_t error = runtime.CheckStream(state); error != cudaSuccess) return error;
    return runtime.DoneAt(*state) <= Clock::now() ? cudaSuccess : cudaErrorNotReady;
  });
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return ContextCall("cudaStreamSynchronize", [&](Runtime& runtime, int) {
    StreamState* state = nullptr;
    {
      const Lock lock(runtime.mu());
      state = runtime.Stream(stream);
      if (state == nullptr) return cudaErrorInvalidResourceHandle;
      if (const cudaError_t error = runtime.CheckStream(state); error != cudaSuccess) return error;
    }
    WaitForStream(runtime, state);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus* status) {
  return ContextCall("cudaStreamIsCapturing", [&](Runtime& runtime, int) {
    const Lock lock(runtime.mu());
    const StreamState* const state = runtime.Stream(stream);
    if (state == nullptr) return cudaErrorInvalidResourceHandle;
    *status = state->capture;
    return runtime.CheckImplicit(*state, /*disturbs=*/false);
  });
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  return ContextCall("cudaStreamBeginCapture", [&](Runtime& runtime, int) {
    const Lock lock(runtime.mu());
    StreamState* const state = runtime.Stream(stream);
    if (state == nullptr) return cudaErrorInvalidResourceHandle;
    if (reinterpret_cast<uintptr_t>(stream) <= 1) return cudaErrorStreamCaptureUnsupported;
    if (state->capturing()) return cudaErrorIllegalState;
    state->capture = cudaStreamCaptureStatusActive;
    state->capture_mode = mode;
    state->capture_thread = std::this_thread::get_id();
    return cudaSuccess;
  });
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  return ContextCall("cudaStreamEndCapture", [&](Runtime& runtime, int) {
    *graph = nullptr;
    const Lock lock(runtime.mu());
    StreamState* const state = runtime.Stream(stream);
    if (state == nullptr) return cudaErrorInvalidResourceHandle;
    if (!state->capturing()) return cudaErrorIllegalState;
    if (state->capture_mode != cudaStreamCaptureModeRelaxed && state->capture_thread != std::this_thread::get_id()) {
      return cudaErrorStreamCaptureWrongThread;
    }
    const bool valid = state->capture == cudaStreamCaptureStatusActive;
    state->capture = cudaStreamCaptureStatusNone;
    if (!valid) return cudaErrorStreamCaptureInvalidated;
    *graph = reinterpret_cast<cudaGraph_t>(new char);  // which nobody can launch
    return cudaSuccess;
  });
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return Call("cudaGraphDestroy", [&](Runtime&) {
    delete reinterpret_cast<char*>(graph);
    return cudaSuccess;
  });
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode* mode) {
  return ContextCall("cudaThreadExchangeStreamCaptureMode", [&](Runtime&, int) {
    std::swap(*mode, Thread().capture_mode);
    return cudaSuccess;
  });
}

// ---- Events ----

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int /*flags*/) {
  return ContextCall("cudaEventCreateWithFlags", [&](Runtime& runtime, int) {
    auto* const state =
        new EventState{.device = Thread().device(), .captured = false, .captured_on = nullptr, .done_at = {}};
    const Lock lock(runtime.mu());
    runtime.events().insert(state);
    *event = reinterpret_cast<cudaEvent_t>(state);
    return cudaSuccess;
  });
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return ContextCall("cudaEventDestroy", [&](Runtime& runtime, int) {
    auto* const state = reinterpret_cast<EventState*>(event);
    const Lock lock(runtime.mu());
    if (runtime.events().erase(state) == 0) return cudaErrorInvalidResourceHandle;
    delete state;
    return cudaSuccess;
  });
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return ContextCall("cudaEventRecord", [&](Runtime& runtime, int) {
    auto* const state = reinterpret_cast<EventState*>(event);
    const Lock lock(runtime.mu());
    StreamState* const recorded = runtime.Stream(stream);
    if (recorded == nullptr || runtime.events().count(state) == 0) return cudaErrorInvalidResourceHandle;
    if (recorded->device != state->device) return cudaErrorInvalidResourceHandle;
    if (const cudaError_t error = runtime.CheckImplicit(*recorded, /*disturbs=*/true); error != cudaSuccess)
      return error;
    if (recorded->capture == cudaStreamCaptureStatusInvalidated) return cudaErrorStreamCaptureInvalidated;
    state->captured = recorded->capturing();
    state->captured_on = stream;
    state->done_at = runtime.DoneAt(*recorded);
    return cudaSuccess;
  });
}

// Of calls that ask or wait for an event. REQUIRES: the lock is held.
static cudaError_t CheckEvent(Runtime& runtime, const EventState* event) {
  if (const cudaError_t error = runtime.CheckUnsafe(); error != cudaSuccess) return error;
  if (runtime.events().count(const_cast<EventState*>(event)) == 0) return cudaErrorInvalidResourceHandle;
  if (!event->captured) return cudaSuccess;
  if (StreamState* const stream = runtime.Stream(event->captured_on); stream != nullptr) {
    (void)runtime.CheckStream(stream);
  }
  return cudaErrorStreamCaptureUnsupported;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  return ContextCall("cudaEventQuery", [&](Runtime& runtime, int) {
    auto* const state = reinterpret_cast<EventState*>(event);
    const Lock lock(runtime.mu());
    if (const cudaError_t error = CheckEvent(runtime, state); error != cudaSuccess) return error;
    return state->done_at <= Clock::now() ? cudaSuccess : cudaErrorNotReady;
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return ContextCall("cudaEventSynchronize", [&](Runtime& runtime, int) {
    auto* const state = reinterpret_cast<EventState*>(event);
    Clock::time_point until;
    {
      const Lock lock(runtime.mu());
      if (const cudaError_t error = CheckEvent(runtime, state); error != cudaSuccess) return error;
      until = state->done_at;
    }
    std::this_thread::sleep_until(until);
    return cudaSuccess;
  });
}
