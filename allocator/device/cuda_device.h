// SPDX-License-Identifier: Apache-2.0
//
// The `cuda` device: segments from the NVIDIA driver, shared by CUDA IPC handles.
#ifndef VRAMBROKER_ALLOCATOR_DEVICE_CUDA_DEVICE_H_
#define VRAMBROKER_ALLOCATOR_DEVICE_CUDA_DEVICE_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "allocator/device/device.h"

namespace vrambroker {

// The GPUs that this process can use, in the order of CUDA's ordinals (CUDA_VISIBLE_DEVICES applies).
// Unavailable, with the reason, when there is none: built without CUDA, no driver or too old a one, no GPU.
// Makes no CUDA context: a device does when it is first used.
absl::StatusOr<std::vector<std::unique_ptr<Device>>> MakeCudaDevices();

// Whether this process finds NVIDIA's driver. Does not start it.
bool HasCudaDriver();

// FailedPrecondition when a GPU admits one process only, or none: then memory that the daemon owns cannot be used by
// others. For the daemon, of the GPUs that it serves. REQUIRES: MakeCudaDevices() has succeeded.
absl::Status CheckComputeMode(int ordinal);

// For logs: "driver for CUDA 13.0". REQUIRES: MakeCudaDevices() has succeeded.
std::string CudaVersions();

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_DEVICE_CUDA_DEVICE_H_
