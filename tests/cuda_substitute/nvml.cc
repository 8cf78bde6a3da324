// SPDX-License-Identifier: Apache-2.0
//
// A substitute for NVIDIA's management library, over a machine. The library knows all GPUs and processes of the
// machine. The library ignores CUDA_VISIBLE_DEVICES, and does not count as a process of the machine.
#include "tests/cuda_substitute/nvml.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "tests/cuda_substitute/devices.h"
#include "tests/cuda_substitute/machine.h"

namespace vrambroker::cuda_substitute {
namespace {

constexpr uint64_t kReservedBytes = uint64_t{8} << 20;  // the driver's own memory, in the second form's figures

std::atomic<int> users{0};  // initialisations that no shutdown has ended

std::string Folder() {
  const char* const folder = std::getenv(kMachineVariable);
  return folder == nullptr ? "" : folder;
}

bool GpusAre(const char* kind) {
  const char* const said = std::getenv(kNvmlGpusVariable);
  return said != nullptr && std::strcmp(said, kind) == 0;
}

// Every function goes through Call().
template <typename Body>
nvmlReturn_t Call(const Body& body) {
  if (users == 0) return NVML_ERROR_UNINITIALIZED;
  const std::string folder = Folder();
  return folder.empty() ? NVML_ERROR_UNKNOWN : body(folder);
}

nvmlDevice_t HandleOf(int device) {
  return reinterpret_cast<nvmlDevice_t>(static_cast<intptr_t>(device + 1));
}
// Returns the only instance of a GPU.
nvmlDevice_t InstanceOf(int device) {
  return HandleOf(device + kMaxDevices);
}
bool IsInstance(nvmlDevice_t handle) {
  return reinterpret_cast<intptr_t>(handle) > kMaxDevices;
}

// Does the same for functions about a device.
template <typename Body>
nvmlReturn_t DeviceCall(nvmlDevice_t handle, const Body& body) {
  return Call([&](const std::string& folder) {
    const auto number = reinterpret_cast<intptr_t>(handle) - (IsInstance(handle) ? kMaxDevices : 0);
    if (number < 1 || number > OptionsOf(folder).devices) return NVML_ERROR_INVALID_ARGUMENT;
    return body(folder, static_cast<int>(number) - 1);
  });
}

// Reads a sensor. An instance has no sensors.
template <typename Value>
nvmlReturn_t Show(nvmlDevice_t handle, Value value, Value* to) {
  return DeviceCall(handle, [&](const std::string&, int) {
    if (to == nullptr) return NVML_ERROR_INVALID_ARGUMENT;
    if (IsInstance(handle) || GpusAre("none")) return NVML_ERROR_NOT_SUPPORTED;
    *to = value;
    return NVML_SUCCESS;
  });
}

nvmlReturn_t Give(const std::string& text, char* to, unsigned int bytes) {
  if (to == nullptr) return NVML_ERROR_INVALID_ARGUMENT;
  if (text.size() >= bytes) return NVML_ERROR_INSUFFICIENT_SIZE;
  std::memcpy(to, text.c_str(), text.size() + 1);
  return NVML_SUCCESS;
}

}  // namespace
}  // namespace vrambroker::cuda_substitute

using namespace vrambroker::cuda_substitute;  // NOLINT(google-build-using-namespace): the library has C functions

nvmlReturn_t nvmlInit_v2() {
  if (const char* const error = std::getenv(kNvmlErrorVariable)) return static_cast<nvmlReturn_t>(std::atoi(error));
  if (Folder().empty()) return NVML_ERROR_DRIVER_NOT_LOADED;
  ++users;
  return NVML_SUCCESS;
}

nvmlReturn_t nvmlInitWithFlags(unsigned int /*flags*/) {
  return nvmlInit_v2();
}

nvmlReturn_t nvmlShutdown() {
  return Call([](const std::string&) {
    --users;
    return NVML_SUCCESS;
  });
}

const char* nvmlErrorString(nvmlReturn_t error) {
  switch (error) {
    case NVML_SUCCESS:
      return "Success";
    case NVML_ERROR_UNINITIALIZED:
      return "Uninitialized";
    case NVML_ERROR_INVALID_ARGUMENT:
      return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED:
      return "Not Supported";
    case NVML_ERROR_NOT_FOUND:
      return "Not Found";
    case NVML_ERROR_INSUFFICIENT_SIZE:
      return "Insufficient Size";
    case NVML_ERROR_DRIVER_NOT_LOADED:
      return "Driver Not Loaded";
    case NVML_ERROR_ARGUMENT_VERSION_MISMATCH:
      return "Argument Version Mismatch";
    default:
      return "Unknown Error";
  }
}

nvmlReturn_t nvmlSystemGetDriverVersion(char* version, unsigned int bytes) {
  return Call([&](const std::string&) { return Give("580.0-substitute", version, bytes); });
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int* count) {
  return Call([&](const std::string& folder) {
    *count = static_cast<unsigned int>(OptionsOf(folder).devices);
    return NVML_SUCCESS;
  });
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t* device) {
  return Call([&](const std::string& folder) {
    if (index >= static_cast<unsigned int>(OptionsOf(folder).devices)) return NVML_ERROR_INVALID_ARGUMENT;
    *device = HandleOf(static_cast<int>(index));
    return NVML_SUCCESS;
  });
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char* uuid, nvmlDevice_t* device) {
  return Call([&](const std::string& folder) {
    for (int i = 0; i < OptionsOf(folder).devices; ++i) {
      const std::string gpu = FormatUuid(UuidOf(i));  // the text begins with GPU-
      if ((GpusAre("mig") ? "MIG" + gpu.substr(3) : gpu) != uuid) continue;
      *device = GpusAre("mig") ? InstanceOf(i) : HandleOf(i);
      return NVML_SUCCESS;
    }
    return NVML_ERROR_NOT_FOUND;
  });
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int* index) {
  return DeviceCall(device, [&](const std::string&, int number) {
    *index = static_cast<unsigned int>(number);
    return NVML_SUCCESS;
  });
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char* name, unsigned int bytes) {
  return DeviceCall(device, [&](const std::string&, int number) {
    return Give("Substitute GPU " + std::to_string(number), name, bytes);
  });
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char* uuid, unsigned int bytes) {
  return DeviceCall(device,
                    [&](const std::string&, int number) { return Give(FormatUuid(UuidOf(number)), uuid, bytes); });
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t* memory) {
  return DeviceCall(device, [&](const std::string& folder, int number) {
    memory->total = OptionsOf(folder).device_bytes;
    memory->used = UsedBytes(folder, number);
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
  });
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t* memory) {
  return DeviceCall(device, [&](const std::string& folder, int number) {
    if (memory->version != nvmlMemory_v2) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    memory->total = OptionsOf(folder).device_bytes;
    memory->used = UsedBytes(folder, number);
    memory->reserved = std::min<uint64_t>(kReservedBytes, memory->total - memory->used);
    memory->free = memory->total - memory->used - memory->reserved;
    return NVML_SUCCESS;
  });
}

// Sets `count` to the number of processes.
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int* count,
                                                     nvmlProcessInfo_t* infos) {
  return DeviceCall(device, [&](const std::string& folder, int number) {
    constexpr unsigned int kNoInstance = 0xFFFFFFFF;  // the process uses no part of a GPU
    const std::vector<ProcessUse> processes = ProcessesOf(folder, number);
    const unsigned int room = *count;
    *count = static_cast<unsigned int>(processes.size());
    if (room < processes.size()) return NVML_ERROR_INSUFFICIENT_SIZE;
    if (infos == nullptr && !processes.empty()) return NVML_ERROR_INVALID_ARGUMENT;
    for (size_t i = 0; i < processes.size(); ++i) {
      infos[i] = {.pid = static_cast<unsigned int>(processes[i].pid),
                  .usedGpuMemory = processes[i].bytes,
                  .gpuInstanceId = kNoInstance,
                  .computeInstanceId = kNoInstance};
    }
    return NVML_SUCCESS;
  });
}

nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t instance, nvmlDevice_t* device) {
  return DeviceCall(instance, [&](const std::string&, int number) {
    if (!IsInstance(instance)) return NVML_ERROR_INVALID_ARGUMENT;
    *device = HandleOf(number);
    return NVML_SUCCESS;
  });
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t* utilization) {
  if (GpusAre("mig")) return NVML_ERROR_NOT_SUPPORTED;
  return Show(device, {.gpu = kSensorUsePercent, .memory = 5}, utilization);
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor, unsigned int* celsius) {
  if (sensor != NVML_TEMPERATURE_GPU) return NVML_ERROR_INVALID_ARGUMENT;
  return Show(device, kSensorCelsius, celsius);
}

nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int* milliwatts) {
  return Show(device, kSensorMilliwatts, milliwatts);
}
