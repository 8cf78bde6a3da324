// SPDX-License-Identifier: Apache-2.0
//
// Contexts: a device's primary context, and further contexts beside the primary context.
#include <cstdlib>
#include <mutex>
#include <optional>
#include <vector>

#include "tests/cuda_substitute/driver.h"
#include "tests/cuda_substitute/driver_state.h"
#include "tests/cuda_substitute/machine.h"

using namespace vrambroker::cuda_substitute;  // NOLINT(google-build-using-namespace): the driver has C functions
using Lock = std::lock_guard<std::mutex>;

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int* flags, int* active) {
  return DeviceCall("cuDevicePrimaryCtxGetState", device, [&](Driver& driver) {
    *flags = 0;
    *active = driver.has_context(device) ? 1 : 0;
    return CUDA_SUCCESS;
  });
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return DeviceCall("cuDevicePrimaryCtxRetain", device, [&](Driver& driver) {
    const Lock lock(driver.mu());
    if (!driver.has_context(device) && !driver.machine()->AddContext(driver.Physical(device))) {
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    driver.has_context(device) = true;
    ++driver.retains(device);
    *context = ContextOf(device);
    return CUDA_SUCCESS;
  });
}

// The last release ends the context, unless a reset has ended the context.
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  return DeviceCall("cuDevicePrimaryCtxRelease", device, [&](Driver& driver) {
    const Lock lock(driver.mu());
    if (driver.retains(device) == 0) return CUDA_ERROR_INVALID_CONTEXT;
    if (--driver.retains(device) == 0 && driver.has_context(device)) driver.EndContext(device);
    return CUDA_SUCCESS;
  });
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  return cuDevicePrimaryCtxRelease_v2(device);
}

// Ends the primary context, which stays retained.
CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
  return DeviceCall("cuDevicePrimaryCtxReset", device, [&](Driver& driver) {
    const Lock lock(driver.mu());
    if (driver.has_context(device)) driver.EndContext(device);
    return CUDA_SUCCESS;
  });
}

CUresult cuDevicePrimaryCtxReset(CUdevice device) {
  return cuDevicePrimaryCtxReset_v2(device);
}

CUresult cuCtxCreate_v2(CUcontext* context, unsigned int /*flags*/, CUdevice device) {
  return DeviceCall("cuCtxCreate", device, [&](Driver& driver) {
    const Lock lock(driver.mu());
    if (!driver.machine()->AddContext(driver.Physical(device))) return CUDA_ERROR_OUT_OF_MEMORY;
    const std::optional<int> number = driver.NewContext(device);
    if (!number.has_value()) std::abort();  // no test makes so many contexts
    driver.has_context(*number) = true;
    Thread().contexts.push_back(*number);
    *context = ContextOf(*number);
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxCreate(CUcontext* context, unsigned int flags, CUdevice device) {
  return cuCtxCreate_v2(context, flags, device);
}

// Contexts for a part of the device are like other contexts.
CUresult cuCtxCreate_v3(CUcontext* context, CUexecAffinityParam* /*affinity*/, int /*count*/, unsigned int flags,
                        CUdevice device) {
  return cuCtxCreate_v2(context, flags, device);
}

CUresult cuCtxCreate_v4(CUcontext* context, CUctxCreateParams* /*parameters*/, unsigned int flags, CUdevice device) {
  return cuCtxCreate_v2(context, flags, device);
}

CUresult cuCtxDestroy_v2(CUcontext context) {
  return Call("cuCtxDestroy", [&](Driver& driver) {
    const int number = NumberOf(context);
    const Lock lock(driver.mu());
    if (!driver.IsContext(number) || IsPrimary(number)) return CUDA_ERROR_INVALID_CONTEXT;
    driver.EndContext(number);
    std::vector<int>& stack = Thread().contexts;
    if (!stack.empty() && stack.back() == number) stack.pop_back();
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxDestroy(CUcontext context) {
  return cuCtxDestroy_v2(context);
}

// REQUIRES: cuDevicePrimaryCtxRetain() or cuCtxCreate() gave the context.
CUresult cuCtxPushCurrent_v2(CUcontext context) {
  return Call("cuCtxPushCurrent", [&](Driver& driver) {
    if (!driver.IsContext(NumberOf(context))) return CUDA_ERROR_INVALID_CONTEXT;
    Thread().contexts.push_back(NumberOf(context));
    return CUDA_SUCCESS;
  });
}

// Changes only the thread: no fault of a device prevents the call.
CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  if (!Driver::Get().initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (Thread().contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (context != nullptr) *context = ContextOf(CurrentContext());
  Thread().contexts.pop_back();
  return CUDA_SUCCESS;
}

// Replaces the top of the stack; null removes the top.
CUresult cuCtxSetCurrent(CUcontext context) {
  return Call("cuCtxSetCurrent", [&](Driver& driver) {
    if (context != nullptr && !driver.IsContext(NumberOf(context))) return CUDA_ERROR_INVALID_CONTEXT;
    std::vector<int>& stack = Thread().contexts;
    if (!stack.empty()) stack.pop_back();
    if (context != nullptr) stack.push_back(NumberOf(context));
    return CUDA_SUCCESS;
  });
}

// Returns null when the thread has no context.
CUresult cuCtxGetCurrent(CUcontext* context) {
  return Call("cuCtxGetCurrent", [&](Driver&) {
    *context = Thread().contexts.empty() ? nullptr : ContextOf(CurrentContext());
    return CUDA_SUCCESS;
  });
}

// Returns the device of a destroyed context, too.
CUresult cuCtxGetDevice(CUdevice* device) {
  return Call("cuCtxGetDevice", [&](Driver&) {
    if (Thread().contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
    *device = CurrentDevice();
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxGetDevice_v2(CUdevice* device, CUcontext context) {
  if (context == nullptr) return cuCtxGetDevice(device);
  return Call("cuCtxGetDevice", [&](Driver& driver) {
    if (!driver.IsContext(NumberOf(context))) return CUDA_ERROR_INVALID_CONTEXT;
    *device = DeviceOf(NumberOf(context));
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxSynchronize() {
  return ContextCall("cuCtxSynchronize", [](Driver& driver) {
    {
      const Lock lock(driver.mu());
      if (const CUresult error = driver.CheckWhole(CurrentContext()); error != CUDA_SUCCESS) return error;
    }
    WaitForContext(driver);
    AfterSynchronize(driver);
    return CUDA_SUCCESS;
  });
}
