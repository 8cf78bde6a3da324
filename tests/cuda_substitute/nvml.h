// SPDX-License-Identifier: Apache-2.0
//
// Declares the functions of NVIDIA's management library (NVML) that the substitute libnvidia-ml.so.1 has. No NVML
// header is at hand: names, types and numbers come from NVIDIA's "NVML API Reference Guide".
#ifndef VRAMBROKER_TESTS_CUDA_SUBSTITUTE_NVML_H_
#define VRAMBROKER_TESTS_CUDA_SUBSTITUTE_NVML_H_

extern "C" {

typedef enum nvmlReturn_enum {
  NVML_SUCCESS = 0,
  NVML_ERROR_UNINITIALIZED = 1,
  NVML_ERROR_INVALID_ARGUMENT = 2,
  NVML_ERROR_NOT_SUPPORTED = 3,
  NVML_ERROR_NOT_FOUND = 6,
  NVML_ERROR_INSUFFICIENT_SIZE = 7,
  NVML_ERROR_DRIVER_NOT_LOADED = 9,
  NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
  NVML_ERROR_UNKNOWN = 999
} nvmlReturn_t;

typedef struct nvmlDevice_st* nvmlDevice_t;

typedef struct nvmlMemory_st {
  unsigned long long total;
  unsigned long long free;
  unsigned long long used;
} nvmlMemory_t;

typedef struct nvmlMemory_v2_st {
  unsigned int version;  // nvmlMemory_v2
  unsigned long long total;
  unsigned long long reserved;
  unsigned long long free;
  unsigned long long used;
} nvmlMemory_v2_t;
#define nvmlMemory_v2 ((unsigned int)(sizeof(nvmlMemory_v2_t) | (2u << 24)))

typedef struct nvmlProcessInfo_v2_st {
  unsigned int pid;
  unsigned long long usedGpuMemory;
  unsigned int gpuInstanceId;
  unsigned int computeInstanceId;
} nvmlProcessInfo_t;

typedef struct nvmlUtilization_st {
  unsigned int gpu;
  unsigned int memory;
} nvmlUtilization_t;

typedef enum nvmlTemperatureSensors_enum { NVML_TEMPERATURE_GPU = 0 } nvmlTemperatureSensors_t;

#define VRAMBROKER_NVML_FUNCTIONS(F)                                                                               \
  F(nvmlInit_v2, ())                                                                                               \
  F(nvmlInitWithFlags, (unsigned int flags))                                                                       \
  F(nvmlShutdown, ())                                                                                              \
  F(nvmlSystemGetDriverVersion, (char* version, unsigned int bytes))                                               \
  F(nvmlDeviceGetCount_v2, (unsigned int* count))                                                                  \
  F(nvmlDeviceGetHandleByIndex_v2, (unsigned int index, nvmlDevice_t* device))                                     \
  F(nvmlDeviceGetHandleByUUID, (const char* uuid, nvmlDevice_t* device))                                           \
  F(nvmlDeviceGetIndex, (nvmlDevice_t device, unsigned int* index))                                                \
  F(nvmlDeviceGetName, (nvmlDevice_t device, char* name, unsigned int bytes))                                      \
  F(nvmlDeviceGetUUID, (nvmlDevice_t device, char* uuid, unsigned int bytes))                                      \
  F(nvmlDeviceGetMemoryInfo, (nvmlDevice_t device, nvmlMemory_t * memory))                                         \
  F(nvmlDeviceGetMemoryInfo_v2, (nvmlDevice_t device, nvmlMemory_v2_t * memory))                                   \
  F(nvmlDeviceGetComputeRunningProcesses_v3, (nvmlDevice_t device, unsigned int* count, nvmlProcessInfo_t* infos)) \
  F(nvmlDeviceGetDeviceHandleFromMigDeviceHandle, (nvmlDevice_t instance, nvmlDevice_t * device))                  \
  F(nvmlDeviceGetUtilizationRates, (nvmlDevice_t device, nvmlUtilization_t * utilization))                         \
  F(nvmlDeviceGetTemperature, (nvmlDevice_t device, nvmlTemperatureSensors_t sensor, unsigned int* celsius))       \
  F(nvmlDeviceGetPowerUsage, (nvmlDevice_t device, unsigned int* milliwatts))

#define VRAMBROKER_DECLARE(name, parameters) __attribute__((visibility("default"))) nvmlReturn_t name parameters;
VRAMBROKER_NVML_FUNCTIONS(VRAMBROKER_DECLARE)
#undef VRAMBROKER_DECLARE
__attribute__((visibility("default"))) const char* nvmlErrorString(nvmlReturn_t error);
}

#endif  // VRAMBROKER_TESTS_CUDA_SUBSTITUTE_NVML_H_
