// SPDX-License-Identifier: Apache-2.0
//
// The functions of NVIDIA's driver that vrambroker calls, over a Machine. README.md says which rules of the real one
// they keep.
#include "tests/cuda_substitute/driver.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
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
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::thread::id capture_thread;  // that began it
  Clock::time_point busy_until;

  bool capturing() const { return capture != CU_STREAM_CAPTURE_STATUS_NONE; }
  void Invalidate() { capture = CU_STREAM_CAPTURE_STATUS_INVALIDATED; }
};

struct EventState {
  int device = 0;
  bool captured = false;
  CUstream captured_on = nullptr;
  Clock::time_point done_at;
};

// What a CUipcMemHandle holds.
struct Handle {
  uint64_t mark;
  uint64_t id;
  uint32_t allocation;
  pid_t exporter;
  uid_t user;
};
static_assert(sizeof(Handle) <= sizeof(CUipcMemHandle));

char* PointerTo(CUdeviceptr address) {
  return reinterpret_cast<char*>(static_cast<uintptr_t>(address));
}
CUdeviceptr AddressOf(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer);
}

// Device memory as this process sees it: addresses that the CPU may not touch.
struct Mapping {
  Hold hold;
  bool own = false;
  uint32_t opens = 0;  // of another process's memory
};

std::string FormatUuid(const CUuuid& uuid) {
  std::string text = "GPU-";
  for (size_t i = 0; i < sizeof uuid.bytes; ++i) {
    std::array<char, 4> hex{};
    std::snprintf(hex.data(), hex.size(), "%02x", static_cast<unsigned char>(uuid.bytes[i]));
    text += std::string(i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "") + hex.data();
  }
  return text;
}

CUuuid UuidOf(int physical) {
  CUuuid uuid = {};
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
  std::vector<int> contexts;  // the thread's stack, as devices: each has its primary context, and no other
  CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
};

ThreadState& Thread() {
  thread_local ThreadState state;
  return state;
}

// The current device. REQUIRES: the thread has a context.
int CurrentDevice() {
  return Thread().contexts.back();
}

// A context is named by its device, and never null.
CUcontext ContextOf(int device) {
  return reinterpret_cast<CUcontext>(static_cast<intptr_t>(device + 1));
}
int DeviceOf(CUcontext context) {
  return static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1;
}

class Driver {
 public:
  // Never destroyed: threads of the process may call until its very end.
  static Driver& Get() {
    static auto* const driver = new Driver;
    return *driver;
  }

  Faults& faults() { return faults_; }
  std::mutex& mu() { return mu_; }
  Machine* machine() { return machine_.get(); }  // null: no GPU
  bool forked() const { return getpid() != pid_; }
  std::atomic<bool>& initialized() { return initialized_; }  // cuInit() was called
  std::atomic<bool>& has_context(int device) { return has_context_.at(static_cast<size_t>(device)); }
  const std::vector<int>& devices() const { return devices_; }
  int Physical(int device) const { return devices_[static_cast<size_t>(device)]; }
  bool IsDevice(int device) const { return device >= 0 && static_cast<size_t>(device) < devices_.size(); }

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
  char* PointerOf(uint64_t id) {
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
  StreamState* Stream(CUstream stream) {
    const auto number = reinterpret_cast<uintptr_t>(stream);
    if (stream == CU_STREAM_PER_THREAD) {
      CUstream& own = thread_streams_[{CurrentDevice(), std::this_thread::get_id()}];
      if (own == nullptr) own = AddStream(/*blocking=*/true);
      return streams_.at(own).get();
    }
    if (number <= 1) {  // the default stream, also by its name CU_STREAM_LEGACY
      StreamState& state = default_streams_[CurrentDevice()];
      state.device = CurrentDevice();
      return &state;
    }
    const auto it = streams_.find(stream);
    return it == streams_.end() ? nullptr : it->second.get();
  }
  CUstream AddStream(bool blocking) {
    auto state = std::make_unique<StreamState>(
        StreamState{.device = CurrentDevice(), .blocking = blocking, .capture_thread = {}, .busy_until = {}});
    auto* const stream = reinterpret_cast<CUstream>(state.get());
    streams_[stream] = std::move(state);
    return stream;
  }
  // What is queued on it goes on.
  bool RemoveStream(CUstream stream) {
    const auto it = streams_.find(stream);
    if (it == streams_.end()) return false;
    const StreamState& state = *it->second;
    destroyed_busy_until_[state.device] = std::max(destroyed_busy_until_[state.device], DoneAt(state));
    streams_.erase(it);
    return true;
  }

  // What this process has on a device.
  void EndAllOf(int device) {
    for (auto it = mappings_.begin(); it != mappings_.end();) {
      const auto [address, mapping] = *it++;
      if (mapping.hold.device != Physical(device)) continue;
      Unmap(address);
      machine_->Release(mapping.hold, /*freed=*/mapping.own);
    }
    for (auto it = streams_.begin(); it != streams_.end();) {
      it = it->second->device == device ? streams_.erase(it) : std::next(it);
    }
    default_streams_.erase(device);
    thread_streams_.clear();
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
  CUresult CheckUnsafe() {
    const CUstreamCaptureMode mode = Thread().capture_mode;
    return Disturb([mode](const StreamState& stream) {
      if (mode == CU_STREAM_CAPTURE_MODE_RELAXED || stream.capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return false;
      return stream.capture_thread == std::this_thread::get_id() ||
             (mode == CU_STREAM_CAPTURE_MODE_GLOBAL && stream.capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL);
    });
  }
  // Of calls that wait for all of a device, whatever the modes.
  CUresult CheckWhole(int device) {
    return Disturb([device](const StreamState& stream) { return stream.device == device; });
  }
  // Of calls that ask or wait for a stream.
  CUresult CheckStream(StreamState* stream) {
    const CUresult error = CheckImplicit(*stream, /*disturbs=*/true);
    return error != CUDA_SUCCESS ? error : Disturb([stream](const StreamState& other) { return &other == stream; });
  }
  // The default stream includes all that it waits for.
  CUresult CheckImplicit(const StreamState& stream, bool disturbs) {
    if (&stream != &default_streams_[stream.device]) return CUDA_SUCCESS;
    const auto is_part = [&stream](const StreamState& other) {
      return other.device == stream.device && other.blocking;
    };
    const bool captured = std::any_of(streams_.begin(), streams_.end(), [&is_part](const auto& entry) {
      return entry.second->capturing() && is_part(*entry.second);
    });
    if (captured && disturbs) (void)Disturb(is_part);
    return captured ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : CUDA_SUCCESS;
  }

 private:
  template <typename IsDisturbed>
  CUresult Disturb(const IsDisturbed& is_disturbed) {
    bool any = false;
    for (auto& [handle, stream] : streams_) {
      if (!stream->capturing() || !is_disturbed(*stream)) continue;
      stream->Invalidate();
      any = true;
    }
    return any ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
  }

  Driver() : pid_(getpid()) {
    const char* const folder = std::getenv(kMachineVariable);
    if (folder == nullptr || *folder == '\0') return;
    machine_ = std::make_unique<Machine>(folder);
    devices_ = VisibleDevices(machine_->options().devices);
  }

  const pid_t pid_;
  std::atomic<bool> initialized_{false};
  std::array<std::atomic<bool>, kMaxDevices> has_context_{};
  Faults faults_;
  std::unique_ptr<Machine> machine_;
  std::vector<int> devices_;  // physical, by ordinal

  std::mutex mu_;
  std::map<char*, Mapping> mappings_;
  std::map<int, StreamState> default_streams_;
  std::map<CUstream, std::unique_ptr<StreamState>> streams_;
  std::map<std::pair<int, std::thread::id>, CUstream> thread_streams_;  // by device and thread
  std::map<int, Clock::time_point> destroyed_busy_until_;               // by device: streams that are gone
  std::set<EventState*> events_;
};

// Every function goes through here: who may call, and what is to fail.
template <typename Body>
CUresult Call(const char* function, const Body& body) {
  Driver& driver = Driver::Get();
  if (driver.forked() || !driver.initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (const CUresult error = driver.faults().Count(function); error != CUDA_SUCCESS) return error;
  return body(driver);
}

// The same for what needs a context.
template <typename Body>
CUresult ContextCall(const char* function, const Body& body) {
  return Call(function, [&](Driver& driver) {
    if (Thread().contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
    if (!driver.has_context(CurrentDevice())) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    return body(driver);
  });
}

// The same for what must not happen while a stream of the process is captured.
template <typename Body>
CUresult UnsafeCall(const char* function, const Body& body) {
  return ContextCall(function, [&](Driver& driver) {
    {
      const std::lock_guard<std::mutex> lock(driver.mu());
      if (const CUresult error = driver.CheckUnsafe(); error != CUDA_SUCCESS) return error;
    }
    return body(driver);
  });
}

void WaitForDevice(Driver& driver) {
  Clock::time_point until;
  {
    const std::lock_guard<std::mutex> lock(driver.mu());
    until = driver.AllDoneAt(CurrentDevice());
  }
  std::this_thread::sleep_until(until);
}

void WaitForStream(Driver& driver, StreamState* stream) {
  Clock::time_point until;
  {
    const std::lock_guard<std::mutex> lock(driver.mu());
    until = driver.DoneAt(*stream);
  }
  std::this_thread::sleep_until(until);
}

struct ErrorName {
  CUresult error;
  const char* name;
  const char* text;
};

constexpr ErrorName kErrorNames[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_DEVICE_UNAVAILABLE, "CUDA_ERROR_DEVICE_UNAVAILABLE",
     "CUDA-capable device(s) is/are busy or unavailable"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_MAP_FAILED, "CUDA_ERROR_MAP_FAILED", "mapping of buffer object failed"},
    {CUDA_ERROR_ECC_UNCORRECTABLE, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

const ErrorName* FindName(CUresult error) {
  for (const ErrorName& known : kErrorNames) {
    if (known.error == error) return &known;
  }
  return nullptr;
}

}  // namespace

// ---- Of this process, for tests ----

void SetFaults(const std::string& faults) {
  Driver::Get().faults().Set(faults);
}

uint64_t Calls(const std::string& function) {
  return Driver::Get().faults().calls(function);
}

void Launch(CUstream stream, std::chrono::nanoseconds duration) {
  Driver& driver = Driver::Get();
  const std::lock_guard<std::mutex> lock(driver.mu());
  StreamState* const state = driver.Stream(stream);
  if (state == nullptr) std::abort();
  state->busy_until = std::max(Clock::now(), driver.DoneAt(*state)) + duration;
}

CUresult UseGpu(int device) {
  CUcontext context = nullptr;
  if (const CUresult error = cuInit(0); error != CUDA_SUCCESS) return error;
  if (device >= 0) {
    if (const CUresult error = cuDevicePrimaryCtxRetain(&context, device); error != CUDA_SUCCESS) return error;
  }
  return cuCtxSetCurrent(context);
}

int ThreadsGpu() {
  return Thread().contexts.empty() ? -1 : CurrentDevice();
}

}  // namespace vrambroker::cuda_substitute

using namespace vrambroker::cuda_substitute;  // NOLINT(google-build-using-namespace): the driver's functions have none
using Lock = std::lock_guard<std::mutex>;

// ---- The driver, versions, errors ----

CUresult cuInit(unsigned int flags) {
  Driver& driver = Driver::Get();
  if (driver.forked()) return CUDA_ERROR_NOT_INITIALIZED;
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (driver.devices().empty()) return CUDA_ERROR_NO_DEVICE;
  driver.initialized() = true;
  return driver.faults().Count("cuInit");
}

CUresult cuDriverGetVersion(int* version) {
  const Machine* const machine = Driver::Get().machine();
  *version = machine == nullptr ? MachineOptions().driver_version : machine->options().driver_version;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char** name) {
  const auto* const known = FindName(error);
  *name = known == nullptr ? nullptr : known->name;
  return known == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
  const auto* const known = FindName(error);
  *text = known == nullptr ? nullptr : known->text;
  return known == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

// ---- Devices ----

CUresult cuDeviceGetCount(int* count) {
  return Call("cuDeviceGetCount", [&](Driver& driver) {
    *count = static_cast<int>(driver.devices().size());
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  return Call("cuDeviceGet", [&](Driver& driver) {
    if (!driver.IsDevice(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetName(char* name, int bytes, CUdevice device) {
  return Call("cuDeviceGetName", [&](Driver& driver) {
    if (!driver.IsDevice(device)) return CUDA_ERROR_INVALID_DEVICE;
    std::snprintf(name, static_cast<size_t>(bytes), "Substitute GPU %d", driver.Physical(device));
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  return Call("cuDeviceGetUuid", [&](Driver& driver) {
    if (!driver.IsDevice(device)) return CUDA_ERROR_INVALID_DEVICE;
    *uuid = UuidOf(driver.Physical(device));
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
  return Call("cuDeviceTotalMem", [&](Driver& driver) {
    if (!driver.IsDevice(device)) return CUDA_ERROR_INVALID_DEVICE;
    *bytes = driver.machine()->options().device_bytes;
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return Call("cuDeviceGetAttribute", [&](Driver& driver) {
    if (!driver.IsDevice(device)) return CUDA_ERROR_INVALID_DEVICE;
    if (attribute != CU_DEVICE_ATTRIBUTE_COMPUTE_MODE) return CUDA_ERROR_INVALID_VALUE;
    *value = driver.machine()->options().compute_mode;
    return CUDA_SUCCESS;
  });
}

// ---- Contexts ----

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int* flags, int* active) {
  return Call("cuDevicePrimaryCtxGetState", [&](Driver& driver) {
    if (!driver.IsDevice(device)) return CUDA_ERROR_INVALID_DEVICE;
    *flags = 0;
    *active = driver.has_context(device) ? 1 : 0;
    return CUDA_SUCCESS;
  });
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return Call("cuDevicePrimaryCtxRetain", [&](Driver& driver) {
    if (!driver.IsDevice(device)) return CUDA_ERROR_INVALID_DEVICE;
    if (!driver.machine()->UseDevice(driver.Physical(device))) return CUDA_ERROR_OUT_OF_MEMORY;
    driver.has_context(device) = true;
    *context = ContextOf(device);
    return CUDA_SUCCESS;
  });
}

// Ends what this process has on the device. Threads keep the context on their stacks.
CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
  return Call("cuDevicePrimaryCtxReset", [&](Driver& driver) {
    if (!driver.IsDevice(device)) return CUDA_ERROR_INVALID_DEVICE;
    const Lock lock(driver.mu());
    driver.EndAllOf(device);
    driver.has_context(device) = false;
    driver.machine()->LeaveDevice(driver.Physical(device));
    return CUDA_SUCCESS;
  });
}

// REQUIRES: cuDevicePrimaryCtxRetain() gave the context.
CUresult cuCtxPushCurrent_v2(CUcontext context) {
  return Call("cuCtxPushCurrent", [&](Driver& driver) {
    if (!driver.IsDevice(DeviceOf(context))) return CUDA_ERROR_INVALID_CONTEXT;
    Thread().contexts.push_back(DeviceOf(context));
    return CUDA_SUCCESS;
  });
}

// Of the thread alone: no fault of a device prevents it.
CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  if (Thread().contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *context = ContextOf(CurrentDevice());
  Thread().contexts.pop_back();
  return CUDA_SUCCESS;
}

// Takes the place of the top of the stack; null takes it away.
CUresult cuCtxSetCurrent(CUcontext context) {
  return Call("cuCtxSetCurrent", [&](Driver& driver) {
    if (context != nullptr && !driver.IsDevice(DeviceOf(context))) return CUDA_ERROR_INVALID_CONTEXT;
    std::vector<int>& stack = Thread().contexts;
    if (!stack.empty()) stack.pop_back();
    if (context != nullptr) stack.push_back(DeviceOf(context));
    return CUDA_SUCCESS;
  });
}

// Also of a context that was destroyed.
CUresult cuCtxGetDevice(CUdevice* device) {
  return Call("cuCtxGetDevice", [&](Driver&) {
    if (Thread().contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
    *device = CurrentDevice();
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxSynchronize() {
  return ContextCall("cuCtxSynchronize", [](Driver& driver) {
    {
      const Lock lock(driver.mu());
      if (const CUresult error = driver.CheckWhole(CurrentDevice()); error != CUDA_SUCCESS) return error;
    }
    WaitForDevice(driver);
    return CUDA_SUCCESS;
  });
}

// ---- Memory ----

CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) {
  return UnsafeCall("cuMemAlloc", [&](Driver& driver) {
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    const size_t rounded = (bytes + kGranule - 1) / kGranule * kGranule;
    const std::optional<Hold> hold = driver.machine()->Allocate(driver.Physical(CurrentDevice()), rounded);
    if (!hold.has_value()) return CUDA_ERROR_OUT_OF_MEMORY;
    const Lock lock(driver.mu());
    *address = AddressOf(driver.Map(*hold, /*own=*/true));
    return CUDA_SUCCESS;
  });
}

CUresult cuMemFree_v2(CUdeviceptr address) {
  return UnsafeCall("cuMemFree", [&](Driver& driver) {
    char* const pointer = PointerTo(address);
    Hold hold;
    {
      const Lock lock(driver.mu());
      const Mapping* const mapping = driver.MappingAt(pointer);
      if (mapping == nullptr || !mapping->own) return CUDA_ERROR_INVALID_VALUE;
      hold = mapping->hold;
    }
    WaitForDevice(driver);
    {
      const Lock lock(driver.mu());
      driver.Unmap(pointer);
    }
    driver.machine()->Release(hold, /*freed=*/true);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* bytes, CUdeviceptr address) {
  return ContextCall("cuMemGetAddressRange", [&](Driver& driver) {
    const Lock lock(driver.mu());
    const std::optional<std::pair<Hold, uint64_t>> range = driver.Range(PointerTo(address), 1);
    if (!range.has_value()) return CUDA_ERROR_INVALID_VALUE;
    *base = address - range->second;
    *bytes = range->first.bytes;
    return CUDA_SUCCESS;
  });
}

CUresult cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
  return ContextCall("cuMemGetInfo", [&](Driver& driver) {
    *total_bytes = driver.machine()->options().device_bytes;
    *free_bytes = *total_bytes - driver.machine()->UsedBytes(driver.Physical(CurrentDevice()));
    return CUDA_SUCCESS;
  });
}

// Waits for the default stream, as both directions do. Nothing when [address, address + bytes) is no device memory.
static CUresult Copy(const char* function, CUdeviceptr address, size_t bytes,
                     const std::function<void(Machine& machine, const Hold& hold, uint64_t offset)>& copy) {
  return UnsafeCall(function, [&](Driver& driver) {
    std::optional<std::pair<Hold, uint64_t>> range;
    StreamState* stream = nullptr;
    {
      const Lock lock(driver.mu());
      range = driver.Range(PointerTo(address), bytes);
      stream = driver.Stream(nullptr);
      if (const CUresult error = driver.CheckStream(stream); error != CUDA_SUCCESS) return error;
    }
    if (!range.has_value()) return CUDA_ERROR_INVALID_VALUE;
    WaitForStream(driver, stream);
    copy(*driver.machine(), range->first, range->second);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
  return Copy("cuMemcpyHtoD", to, bytes,
              [&](Machine& machine, const Hold& hold, uint64_t offset) { machine.Write(hold, offset, from, bytes); });
}

CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
  return Copy("cuMemcpyDtoH", from, bytes,
              [&](Machine& machine, const Hold& hold, uint64_t offset) { machine.Read(hold, offset, to, bytes); });
}

CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t bytes, CUstream stream) {
  return ContextCall("cuMemsetD8Async", [&](Driver& driver) {
    std::optional<std::pair<Hold, uint64_t>> range;
    {
      const Lock lock(driver.mu());
      if (driver.Stream(stream) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
      range = driver.Range(PointerTo(address), bytes);
    }
    if (!range.has_value()) return CUDA_ERROR_INVALID_VALUE;
    driver.machine()->Fill(range->first, range->second, static_cast<char>(value), bytes);
    return CUDA_SUCCESS;
  });
}

// ---- Sharing memory ----

CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr address) {
  return ContextCall("cuIpcGetMemHandle", [&](Driver& driver) {
    const Lock lock(driver.mu());
    const Mapping* const mapping = driver.MappingAt(PointerTo(address));
    if (mapping == nullptr || !mapping->own) return CUDA_ERROR_INVALID_VALUE;
    const Handle content{.mark = vrambroker::cuda_substitute::kHandleMark,
                         .id = mapping->hold.id,
                         .allocation = mapping->hold.allocation,
                         .exporter = getpid(),
                         .user = geteuid()};
    std::memset(handle, 0, sizeof *handle);
    std::memcpy(handle, &content, sizeof content);
    return CUDA_SUCCESS;
  });
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* address, CUipcMemHandle handle, unsigned int flags) {
  return UnsafeCall("cuIpcOpenMemHandle", [&](Driver& driver) {
    Handle content;
    std::memcpy(&content, &handle, sizeof content);
    if (flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) return CUDA_ERROR_INVALID_VALUE;
    if (content.mark != vrambroker::cuda_substitute::kHandleMark) return CUDA_ERROR_INVALID_HANDLE;
    if (content.exporter == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
    if (driver.machine()->options().one_user && content.user != geteuid()) return CUDA_ERROR_INVALID_VALUE;
    const Lock lock(driver.mu());
    if (char* const pointer = driver.PointerOf(content.id); pointer != nullptr) {
      ++driver.MappingAt(pointer)->opens;
      *address = AddressOf(pointer);
      return CUDA_SUCCESS;
    }
    const std::optional<Hold> hold = driver.machine()->Open(content.allocation, content.id);
    if (!hold.has_value()) return CUDA_ERROR_MAP_FAILED;
    *address = AddressOf(driver.Map(*hold, /*own=*/false));
    return CUDA_SUCCESS;
  });
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
  return UnsafeCall("cuIpcCloseMemHandle", [&](Driver& driver) {
    char* const pointer = PointerTo(address);
    Hold hold;
    {
      const Lock lock(driver.mu());
      Mapping* const mapping = driver.MappingAt(pointer);
      if (mapping == nullptr || mapping->own) return CUDA_ERROR_INVALID_VALUE;
      if (--mapping->opens > 0) return CUDA_SUCCESS;
      hold = mapping->hold;
      driver.Unmap(pointer);
    }
    driver.machine()->Release(hold, /*freed=*/false);
    return CUDA_SUCCESS;
  });
}

// ---- Streams ----

CUresult cuStreamCreate(CUstream* stream, unsigned int flags) {
  return UnsafeCall("cuStreamCreate", [&](Driver& driver) {
    const Lock lock(driver.mu());
    *stream = driver.AddStream(/*blocking=*/(flags & CU_STREAM_NON_BLOCKING) == 0);
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamDestroy_v2(CUstream stream) {
  return ContextCall("cuStreamDestroy", [&](Driver& driver) {
    const Lock lock(driver.mu());
    return driver.RemoveStream(stream) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
  });
}

CUresult cuStreamQuery(CUstream stream) {
  return ContextCall("cuStreamQuery", [&](Driver& driver) {
    const Lock lock(driver.mu());
    StreamState* const state = driver.Stream(stream);
    if (state == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (const CUresult error = driver.CheckStream(state); error != CUDA_SUCCESS) return error;
    return driver.DoneAt(*state) <= Clock::now() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
  });
}

CUresult cuStreamSynchronize(CUstream stream) {
  return ContextCall("cuStreamSynchronize", [&](Driver& driver) {
    StreamState* state = nullptr;
    {
      const Lock lock(driver.mu());
      state = driver.Stream(stream);
      if (state == nullptr) return CUDA_ERROR_INVALID_HANDLE;
      if (const CUresult error = driver.CheckStream(state); error != CUDA_SUCCESS) return error;
    }
    WaitForStream(driver, state);
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  return ContextCall("cuStreamIsCapturing", [&](Driver& driver) {
    const Lock lock(driver.mu());
    const StreamState* const state = driver.Stream(stream);
    if (state == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    *status = state->capture;
    return driver.CheckImplicit(*state, /*disturbs=*/false);
  });
}

CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
  return ContextCall("cuStreamBeginCapture", [&](Driver& driver) {
    const Lock lock(driver.mu());
    StreamState* const state = driver.Stream(stream);
    if (state == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (reinterpret_cast<uintptr_t>(stream) <= 1) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (state->capturing()) return CUDA_ERROR_ILLEGAL_STATE;
    state->capture = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    state->capture_mode = mode;
    state->capture_thread = std::this_thread::get_id();
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  return ContextCall("cuStreamEndCapture", [&](Driver& driver) {
    *graph = nullptr;
    const Lock lock(driver.mu());
    StreamState* const state = driver.Stream(stream);
    if (state == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (!state->capturing()) return CUDA_ERROR_ILLEGAL_STATE;
    if (state->capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED && state->capture_thread != std::this_thread::get_id()) {
      return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    }
    const bool valid = state->capture == CU_STREAM_CAPTURE_STATUS_ACTIVE;
    state->capture = CU_STREAM_CAPTURE_STATUS_NONE;
    if (!valid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    *graph = reinterpret_cast<CUgraph>(new char);  // which nobody can launch
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphDestroy(CUgraph graph) {
  return Call("cuGraphDestroy", [&](Driver&) {
    delete reinterpret_cast<char*>(graph);
    return CUDA_SUCCESS;
  });
}

// Of the thread alone: no fault of a device prevents it.
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  std::swap(*mode, Thread().capture_mode);
  return CUDA_SUCCESS;
}

// ---- Events ----

CUresult cuEventCreate(CUevent* event, unsigned int /*flags*/) {
  return ContextCall("cuEventCreate", [&](Driver& driver) {
    auto* const state =
        new EventState{.device = CurrentDevice(), .captured = false, .captured_on = nullptr, .done_at = {}};
    const Lock lock(driver.mu());
    driver.events().insert(state);
    *event = reinterpret_cast<CUevent>(state);
    return CUDA_SUCCESS;
  });
}

CUresult cuEventDestroy_v2(CUevent event) {
  return ContextCall("cuEventDestroy", [&](Driver& driver) {
    auto* const state = reinterpret_cast<EventState*>(event);
    const Lock lock(driver.mu());
    if (driver.events().erase(state) == 0) return CUDA_ERROR_INVALID_HANDLE;
    delete state;
    return CUDA_SUCCESS;
  });
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
  return ContextCall("cuEventRecord", [&](Driver& driver) {
    auto* const state = reinterpret_cast<EventState*>(event);
    const Lock lock(driver.mu());
    StreamState* const recorded = driver.Stream(stream);
    if (recorded == nullptr || driver.events().count(state) == 0) return CUDA_ERROR_INVALID_HANDLE;
    if (recorded->device != state->device) return CUDA_ERROR_INVALID_HANDLE;
    if (const CUresult error = driver.CheckImplicit(*recorded, /*disturbs=*/true); error != CUDA_SUCCESS) return error;
    if (recorded->capture == CU_STREAM_CAPTURE_STATUS_INVALIDATED) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    state->captured = recorded->capturing();
    state->captured_on = stream;
    state->done_at = driver.DoneAt(*recorded);
    return CUDA_SUCCESS;
  });
}

// Of calls that ask or wait for an event. REQUIRES: the lock is held.
static CUresult CheckEvent(Driver& driver, const EventState* event) {
  if (const CUresult error = driver.CheckUnsafe(); error != CUDA_SUCCESS) return error;
  if (driver.events().count(const_cast<EventState*>(event)) == 0) return CUDA_ERROR_INVALID_HANDLE;
  if (!event->captured) return CUDA_SUCCESS;
  if (StreamState* const stream = driver.Stream(event->captured_on); stream != nullptr) {
    (void)driver.CheckStream(stream);
  }
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult cuEventQuery(CUevent event) {
  return ContextCall("cuEventQuery", [&](Driver& driver) {
    auto* const state = reinterpret_cast<EventState*>(event);
    const Lock lock(driver.mu());
    if (const CUresult error = CheckEvent(driver, state); error != CUDA_SUCCESS) return error;
    return state->done_at <= Clock::now() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
  });
}

CUresult cuEventSynchronize(CUevent event) {
  return ContextCall("cuEventSynchronize", [&](Driver& driver) {
    auto* const state = reinterpret_cast<EventState*>(event);
    Clock::time_point until;
    {
      const Lock lock(driver.mu());
      if (const CUresult error = CheckEvent(driver, state); error != CUDA_SUCCESS) return error;
      until = state->done_at;
    }
    std::this_thread::sleep_until(until);
    return CUDA_SUCCESS;
  });
}
