/* SPDX-License-Identifier: Apache-2.0
 *
 * What this library knows of NVIDIA's driver API and of NVML: types in plain C, since neither's headers need be there,
 * and the functions. CUDA_HOOKS and NVML_HOOKS are those that it stands before; CUDA_CALLS and NVML_CALLS those that it
 * only calls. An older driver lacks some. Names, types and numbers are those of the references of CUDA 13.0 and NVML.
 */
#ifndef VRAMBROKER_CLIENT_PRELOAD_DRIVER_API_H_
#define VRAMBROKER_CLIENT_PRELOAD_DRIVER_API_H_

#include <stddef.h>
#include <stdint.h>

typedef int cu_device;
typedef unsigned long long cu_address;
typedef unsigned int cu_address32; /* of the functions without _v2 */
typedef struct CUctx_st* cu_context;
typedef struct CUstream_st* cu_stream;
typedef struct nvmlDevice_st* nvml_device;

typedef struct {
  unsigned char bytes[16];
} cu_uuid;

typedef struct {
  unsigned long long total, free, used;
} nvml_memory;

typedef struct {
  unsigned int version;
  unsigned long long total, reserved, free, used;
} nvml_memory_v2;

enum {
  CU_OK = 0,
  CU_INVALID_VALUE = 1,
  CU_OUT_OF_MEMORY = 2,
  CU_NOT_FOUND = 500, /* "named symbol not found": the driver lacks the function */
};

#define CUDA_HOOKS(X)                                                                                              \
  X(cuGetProcAddress, (const char* symbol, void** function, int version, uint64_t flags))                          \
  X(cuGetProcAddress_v2, (const char* symbol, void** function, int version, uint64_t flags, int* status))          \
  X(cuMemAlloc, (cu_address32 * address, unsigned int bytes))                                                      \
  X(cuMemAlloc_v2, (cu_address * address, size_t bytes))                                                           \
  X(cuMemAllocPitch,                                                                                               \
    (cu_address32 * address, unsigned int* pitch, unsigned int width, unsigned int height, unsigned int element))  \
  X(cuMemAllocPitch_v2, (cu_address * address, size_t * pitch, size_t width, size_t height, unsigned int element)) \
  X(cuMemAllocManaged, (cu_address * address, size_t bytes, unsigned int flags))                                   \
  X(cuMemFree, (cu_address32 address))                                                                             \
  X(cuMemFree_v2, (cu_address address))                                                                            \
  X(cuMemGetInfo, (unsigned int* free_bytes, unsigned int* total_bytes))                                           \
  X(cuMemGetInfo_v2, (size_t * free_bytes, size_t * total_bytes))                                                  \
  X(cuDeviceTotalMem, (unsigned int* bytes, cu_device device))                                                     \
  X(cuDeviceTotalMem_v2, (size_t * bytes, cu_device device))

#define CUDA_CALLS(X)                                    \
  X(cuCtxGetCurrent, (cu_context * context))             \
  X(cuCtxGetDevice, (cu_device * device))                \
  X(cuDeviceGetUuid, (cu_uuid * uuid, cu_device device)) \
  X(cuDeviceGetUuid_v2, (cu_uuid * uuid, cu_device device))

#define NVML_HOOKS(X)                                                    \
  X(nvmlDeviceGetMemoryInfo, (nvml_device device, nvml_memory * memory)) \
  X(nvmlDeviceGetMemoryInfo_v2, (nvml_device device, nvml_memory_v2 * memory))

#define NVML_CALLS(X) X(nvmlDeviceGetUUID, (nvml_device device, char* uuid, unsigned int bytes))

/* A function that a program calls in place of the driver's of the same name. */
#define HOOK __attribute__((visibility("default")))
#define DECLARE_HOOK(name, arguments) HOOK int name arguments;
CUDA_HOOKS(DECLARE_HOOK)
NVML_HOOKS(DECLARE_HOOK)
#undef DECLARE_HOOK

#endif /* VRAMBROKER_CLIENT_PRELOAD_DRIVER_API_H_ */
