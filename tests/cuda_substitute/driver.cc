// SPDX-License-Identifier: Apache-2.0
//
// The driver as such, devices, streams and events. README.md lists the rules of the real driver that these functions
// keep.
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
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
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

// ---- Functions for tests of this process ----

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

using namespace vrambroker::cuda_substitute;  // NOLINT(google-build-using-namespace): the driver has C functions
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

CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  return cuDeviceGetUuid_v2(uuid, device);
}

CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  return DeviceCall("cuDeviceGetUuid", device, [&](Driver& driver) {
    *uuid = UuidOf(driver.Physical(device));
    return CUDA_SUCCESS;
  });
}

// Writes zero beside an error.
CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
  *bytes = 0;
  return DeviceCall("cuDeviceTotalMem", device, [&](Driver& driver) {
    *bytes = driver.machine()->options().device_bytes;
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceTotalMem(unsigned int* bytes, CUdevice device) {
  size_t all = 0;
  const CUresult error = cuDeviceTotalMem_v2(&all, device);
  *bytes = In32Bits(all);
  return error;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return DeviceCall("cuDeviceGetAttribute", device, [&](Driver& driver) {
    switch (attribute) {
      case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE:
        *value = driver.machine()->options().compute_mode;
        return CUDA_SUCCESS;
      case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
      case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
      case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
      case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
      case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
      case CU_DEVICE_ATTRIBUTE_DEFERRED_MAPPING_CUDA_ARRAY_SUPPORTED:
        *value = 1;
        return CUDA_SUCCESS;
      case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        *value = 9;
        return CUDA_SUCCESS;
      // Managed memory stays on the device, and processes do not share pools.
      case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
      case CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES:
        *value = 0;
        return CUDA_SUCCESS;
      default:
        return CUDA_ERROR_INVALID_VALUE;
    }
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
    AfterSynchronize(driver);
    return CUDA_SUCCESS;
  });
}

// Returns the context of a stream. Names of default streams give the thread's context.
CUresult cuStreamGetCtx(CUstream stream, CUcontext* context) {
  return ContextCall("cuStreamGetCtx", [&](Driver& driver) {
    const Lock lock(driver.mu());
    const StreamState* const state = driver.Stream(stream);
    if (state == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    *context = ContextOf(state->context);
    return CUDA_SUCCESS;
  });
}

// Green contexts do not exist in the substitute: `green` becomes null.
CUresult cuStreamGetCtx_v2(CUstream stream, CUcontext* context, CUgreenCtx* green) {
  if (green != nullptr) *green = nullptr;
  return cuStreamGetCtx(stream, context);
}

// Runs the function in a new thread. The stream waits until the function has returned.
CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* data) {
  return ContextCall("cuLaunchHostFunc", [&](Driver& driver) {
    const Lock lock(driver.mu());
    StreamState* const state = driver.Stream(stream);
    if (state == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (state->capturing()) return CUDA_ERROR_NOT_SUPPORTED;
    if (driver.Runs(state->host_function)) std::abort();  // no test queues two functions
    const Clock::time_point begins = driver.DoneAt(*state);
    const uint64_t number = state->host_function = driver.AddHostFunction();
    std::thread([&driver, function, data, begins, number] {
      std::this_thread::sleep_until(begins);
      function(data);
      const Lock end_lock(driver.mu());
      driver.EndHostFunction(number);
    }).detach();
    return CUDA_SUCCESS;
  });
}

// ---- Events ----

CUresult cuEventCreate(CUevent* event, unsigned int /*flags*/) {
  return ContextCall("cuEventCreate", [&](Driver& driver) {
    auto* const state =
        new EventState{.context = CurrentContext(), .captured = false, .captured_on = nullptr, .done_at = {}};
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
    if (recorded->context != state->context) return CUDA_ERROR_INVALID_HANDLE;
    if (const CUresult error = driver.CheckImplicit(*recorded, /*disturbs=*/true); error != CUDA_SUCCESS) return error;
    if (recorded->capture == CU_STREAM_CAPTURE_STATUS_INVALIDATED) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    state->captured = recorded->capturing();
    state->captured_on = stream;
    state->done_at = driver.DoneAt(*recorded);
    return CUDA_SUCCESS;
  });
}

// Checks a call that asks or waits for an event. REQUIRES: the lock is held.
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
    AfterSynchronize(driver);
    return CUDA_SUCCESS;
  });
}
