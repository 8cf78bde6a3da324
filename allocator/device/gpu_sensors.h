// SPDX-License-Identifier: Apache-2.0
//
// Sensors of a GPU, as read by NVIDIA's management library.
#ifndef VRAMBROKER_ALLOCATOR_DEVICE_GPU_SENSORS_H_
#define VRAMBROKER_ALLOCATOR_DEVICE_GPU_SENSORS_H_

#include <string>

#include "allocator/device/device.h"

namespace vrambroker {

// Reads the sensors. `uuid`: of the GPU or of an instance (MIG), as nvidia-smi prints it. An instance has the
// temperature and the power of its GPU. May take milliseconds, and seconds for the first time. Thread-safe.
GpuSensors ReadGpuSensors(const std::string& uuid);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_DEVICE_GPU_SENSORS_H_
