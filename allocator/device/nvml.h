// SPDX-License-Identifier: Apache-2.0
//
// Nvml: NVIDIA's management library, libnvidia-ml.so.1. Comes with the driver, and is loaded at run time, too. Names,
// numbers and layouts are from NVIDIA's "NVML API Reference Guide". No header of NVML is needed.
#ifndef VRAMBROKER_ALLOCATOR_DEVICE_NVML_H_
#define VRAMBROKER_ALLOCATOR_DEVICE_NVML_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace vrambroker {

// nvmlReturn_t
inline constexpr int kNvmlSuccess = 0;
inline constexpr int kNvmlNotSupported = 3;
inline constexpr int kNvmlNotFound = 6;
inline constexpr int kNvmlInsufficientSize = 7;

using NvmlHandle = void*;  // nvmlDevice_t
struct NvmlUtilization {   // nvmlUtilization_t: percent of the last moments
  unsigned int gpu = 0;
  unsigned int memory = 0;
};

struct Nvml {
  using ListProcesses = int (*)(NvmlHandle device, unsigned int* count, void* records);

  int (*init)() = nullptr;
  const char* (*error_string)(int error) = nullptr;
  int (*get_handle)(const char* uuid, NvmlHandle* device) = nullptr;
  // Lists of processes that compute, that draw, and that compute by way of an MPS server.
  std::vector<std::pair<const char*, ListProcesses>> lists;

  // Null where the library lacks the function.
  int (*get_gpu_of_instance)(NvmlHandle instance, NvmlHandle* gpu) = nullptr;
  int (*get_utilization)(NvmlHandle device, NvmlUtilization* utilization) = nullptr;
  int (*get_temperature)(NvmlHandle device, int sensor, unsigned int* celsius) = nullptr;
  int (*get_power)(NvmlHandle device, unsigned int* milliwatts) = nullptr;
};

// Loads the library once per process. Unimplemented for a missing or old library. May take seconds. Thread-safe.
absl::StatusOr<const Nvml*> LoadedNvml();

// Unimplemented: the GPU or its driver does not support the call.
absl::Status NvmlError(const Nvml& nvml, const char* call, int error);

struct NvmlDevice {
  NvmlHandle handle = nullptr;
  bool is_instance = false;  // part of a GPU (MIG)
};
// `uuid`: of a GPU or of an instance, as nvidia-smi or CUDA prints it.
absl::StatusOr<NvmlDevice> FindNvmlDevice(const Nvml& nvml, const std::string& uuid);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_DEVICE_NVML_H_
