// SPDX-License-Identifier: Apache-2.0
//
// The functions of NVIDIA's driver called by vrambroker, looked up in libcuda.so.1 at run time. Our programs have no
// CUDA runtime: a runtime of toolkit 13 would need driver 580, and every version would have to be distributed under
// NVIDIA's licence. Driver 525 (CUDA 12.0) and later is promised, as for programs of CUDA 12. Older drivers with the
// functions are not refused; 470 (CUDA 11.4) has all.
#ifndef VRAMBROKER_ALLOCATOR_DEVICE_CUDA_DRIVER_H_
#define VRAMBROKER_ALLOCATOR_DEVICE_CUDA_DRIVER_H_

#include <cuda.h>

#include <string>

#include "absl/status/status.h"

namespace vrambroker {

// F(name, parameters): as libcuda.so.1 exports the function. A suffix is part of the name: the driver keeps older
// versions of a function under the name without a suffix.
#define VRAMBROKER_CUDA_DRIVER_FUNCTIONS(F)                                                     \
  F(cuInit, (unsigned int flags))                                                               \
  F(cuDriverGetVersion, (int* version))                                                         \
  F(cuGetErrorName, (CUresult error, const char** name))                                        \
  F(cuGetErrorString, (CUresult error, const char** text))                                      \
  F(cuDeviceGetCount, (int* count))                                                             \
  F(cuDeviceGet, (CUdevice * device, int ordinal))                                              \
  F(cuDeviceGetName, (char* name, int bytes, CUdevice device))                                  \
  F(cuDeviceGetUuid_v2, (CUuuid * uuid, CUdevice device))                                       \
  F(cuDeviceTotalMem_v2, (size_t * bytes, CUdevice device))                                     \
  F(cuDeviceGetAttribute, (int* value, CUdevice_attribute attribute, CUdevice device))          \
  F(cuDevicePrimaryCtxGetState, (CUdevice device, unsigned int* flags, int* active))            \
  F(cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device))                           \
  F(cuCtxPushCurrent_v2, (CUcontext context))                                                   \
  F(cuCtxPopCurrent_v2, (CUcontext * context))                                                  \
  F(cuCtxGetDevice, (CUdevice * device))                                                        \
  F(cuCtxSynchronize, ())                                                                       \
  F(cuMemGetInfo_v2, (size_t * free_bytes, size_t * total_bytes))                               \
  F(cuMemAlloc_v2, (CUdeviceptr * address, size_t bytes))                                       \
  F(cuMemFree_v2, (CUdeviceptr address))                                                        \
  F(cuMemGetAddressRange_v2, (CUdeviceptr * base, size_t * bytes, CUdeviceptr address))         \
  F(cuMemcpyHtoD_v2, (CUdeviceptr to, const void* from, size_t bytes))                          \
  F(cuMemcpyDtoH_v2, (void* to, CUdeviceptr from, size_t bytes))                                \
  F(cuMemsetD8Async, (CUdeviceptr address, unsigned char value, size_t bytes, CUstream stream)) \
  F(cuIpcGetMemHandle, (CUipcMemHandle * handle, CUdeviceptr address))                          \
  F(cuIpcOpenMemHandle_v2, (CUdeviceptr * address, CUipcMemHandle handle, unsigned int flags))  \
  F(cuIpcCloseMemHandle, (CUdeviceptr address))                                                 \
  F(cuStreamCreate, (CUstream * stream, unsigned int flags))                                    \
  F(cuStreamDestroy_v2, (CUstream stream))                                                      \
  F(cuStreamQuery, (CUstream stream))                                                           \
  F(cuStreamSynchronize, (CUstream stream))                                                     \
  F(cuStreamIsCapturing, (CUstream stream, CUstreamCaptureStatus * status))                     \
  F(cuThreadExchangeStreamCaptureMode, (CUstreamCaptureMode * mode))                            \
  F(cuEventCreate, (CUevent * event, unsigned int flags))                                       \
  F(cuEventDestroy_v2, (CUevent event))                                                         \
  F(cuEventQuery, (CUevent event))                                                              \
  F(cuEventRecord, (CUevent event, CUstream stream))                                            \
  F(cuEventSynchronize, (CUevent event))

struct CudaDriver {
  // NOLINTNEXTLINE(bugprone-macro-parentheses): a declaration has none
#define VRAMBROKER_MEMBER(name, parameters) CUresult(*name) parameters = nullptr;
  VRAMBROKER_CUDA_DRIVER_FUNCTIONS(VRAMBROKER_MEMBER)
#undef VRAMBROKER_MEMBER
};

// Loads the driver, unless it is loaded. Unavailable, with what to do, without a driver, or with too old a driver. May
// be called again, also after an error. Thread-safe.
absl::Status FindCudaDriver();
// FindCudaDriver(), then starts the driver: Unavailable also for a driver that does not start.
absl::Status LoadCudaDriver();

// Formats 12040 as "12.4".
std::string FormatCudaVersion(int version);

// All functions of the driver. REQUIRES: LoadCudaDriver() has succeeded.
const CudaDriver& Driver();

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_DEVICE_CUDA_DRIVER_H_
