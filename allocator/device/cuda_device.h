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

// Returns the GPUs usable by the process, in the order of CUDA's ordinals (CUDA_VISIBLE_DEVICES applies). Unavailable,
// with the reason, when there is none: built without CUDA, no driver or too old a driver, no GPU. Makes no CUDA
// context: a device does at first use.
absl::StatusOr<std::vector<std::unique_ptr<Device>>> MakeCudaDevices();

// Returns whether this process finds NVIDIA's driver. Does not start the driver.
bool HasCudaDriver();

// FailedPrecondition when a GPU admits a single process, or no process: then other processes cannot use memory owned by
// the daemon. For the daemon, about the GPUs it serves. REQUIRES: MakeCudaDevices() has succeeded.
absl::Status CheckComputeMode(int ordinal);

// For logs: "driver for CUDA 13.0". REQUIRES: MakeCudaDevices() has succeeded.
std::string CudaVersions();

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_DEVICE_CUDA_DEVICE_H_
