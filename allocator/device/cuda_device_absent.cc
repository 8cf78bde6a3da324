// SPDX-License-Identifier: Apache-2.0
//
// Stands in for cuda_device.cc in builds with VRAMBROKER_CUDA=OFF.
#include "allocator/device/cuda_device.h"

namespace vrambroker {

bool HasCudaDriver() {
  return false;
}

absl::Status CheckComputeMode(int /*ordinal*/) {
  return absl::OkStatus();
}

std::string CudaVersions() {
  return "none";
}

absl::StatusOr<std::vector<std::unique_ptr<Device>>> MakeCudaDevices() {
  return absl::UnavailableError("this build has no CUDA support: build again with -DVRAMBROKER_CUDA=ON");
}

}  // namespace vrambroker
