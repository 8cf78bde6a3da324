// SPDX-License-Identifier: Apache-2.0
//
// The `cuda` device: segments from cudaMalloc, shared by CUDA IPC handles.
#ifndef VRAMBROKER_ALLOCATOR_CUDA_DEVICE_H_
#define VRAMBROKER_ALLOCATOR_CUDA_DEVICE_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "allocator/device.h"

namespace vrambroker {

// The GPUs that this process can use, in the order of CUDA's ordinals (CUDA_VISIBLE_DEVICES applies).
// Unavailable, with the reason, when there is none: built without CUDA, no driver, no GPU.
absl::StatusOr<std::vector<std::unique_ptr<Device>>> MakeCudaDevices();

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_CUDA_DEVICE_H_
