// SPDX-License-Identifier: Apache-2.0
#include "allocator/device/gpu_sensors.h"

#include "allocator/device/nvml.h"

namespace vrambroker {

GpuSensors ReadGpuSensors(const std::string& uuid) {
  constexpr int kChip = 0;  // NVML_TEMPERATURE_GPU
  GpuSensors sensors;
  const absl::StatusOr<const Nvml*> loaded = LoadedNvml();
  if (!loaded.ok()) return sensors;
  const Nvml& nvml = **loaded;
  const absl::StatusOr<NvmlDevice> device = FindNvmlDevice(nvml, uuid);
  if (!device.ok()) return sensors;
  NvmlHandle gpu = device->handle;
  if (device->is_instance) {
    const auto get_gpu = nvml.get_gpu_of_instance;
    if (get_gpu == nullptr || get_gpu(device->handle, &gpu) != kNvmlSuccess) return sensors;
  }
  NvmlUtilization utilization;
  unsigned int celsius = 0;
  unsigned int milliwatts = 0;
  if (!device->is_instance && nvml.get_utilization != nullptr &&
      nvml.get_utilization(gpu, &utilization) == kNvmlSuccess) {
    sensors.use_percent = utilization.gpu;
  }
  if (nvml.get_temperature != nullptr && nvml.get_temperature(gpu, kChip, &celsius) == kNvmlSuccess) {
    sensors.temperature_celsius = celsius;
  }
  if (nvml.get_power != nullptr && nvml.get_power(gpu, &milliwatts) == kNvmlSuccess) {
    sensors.power_watts = milliwatts / 1000.0;
  }
  return sensors;
}

}  // namespace vrambroker
