// SPDX-License-Identifier: Apache-2.0
//
// The functions of NVIDIA's driver that vrambroker calls, over a Machine. README.md says which rules of the real one
// they keep.
#include "tests/cuda_substitute/driver.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cuda_substitute/driver_state.h"
#include "tests/cuda_substitute/machine.h"

namespace vrambroker::cuda_substitute {
namespace {

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
  driver.Start();
  if (driver.devices().empty()) return CUDA_ERROR_NO_DEVICE;
  driver.initialized() = true;
  return driver.faults().Count("cuInit");
}

CUresult cuDriverGetVersion(int* version) {
  *version = Driver::Get().version();
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
  return DeviceCall("cuDeviceGet", ordinal, [&](Driver&) {
    *device = ordinal;
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetName(char* name, int bytes, CUdevice device) {
  return DeviceCall("cuDeviceGetName", device, [&](Driver& driver) {
    std::snprintf(name, static_cast<size_t>(bytes), "Substitute GPU %d", driver.Physical(device));
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  return DeviceCall("cuDeviceGetUuid", device, [&](Driver& driver) {
    *uuid = UuidOf(driver.Physical(device));
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
  return DeviceCall("cuDeviceTotalMem", device, [&](Driver& driver) {
    *bytes = driver.machine()->options().device_bytes;
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return DeviceCall("cuDeviceGetAttribute", device, [&](Driver& driver) {
    if (attribute != CU_DEVICE_ATTRIBUTE_COMPUTE_MODE) return CUDA_ERROR_INVALID_VALUE;
    *value = driver.machine()->options().compute_mode;
    return CUDA_SUCCESS;
  });
}

// ---- Contexts ----

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int* flags, int* active) {
  return DeviceCall("cuDevicePrimaryCtxGetState", device, [&](Driver& driver) {
    *flags = 0;
    *active = driver.has_context(device) ? 1 : 0;
    return CUDA_SUCCESS;
  });
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return DeviceCall("cuDevicePrimaryCtxRetain", device, [&](Driver& driver) {
    if (!driver.machine()->UseDevice(driver.Physical(device))) return CUDA_ERROR_OUT_OF_MEMORY;
    driver.has_context(device) = true;
    *context = ContextOf(device);
    return CUDA_SUCCESS;
  });
}

// Ends what this process has on the device. Threads keep the context on their stacks.
CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
  return DeviceCall("cuDevicePrimaryCtxReset", device, [&](Driver& driver) {
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
