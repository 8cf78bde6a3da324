// SPDX-License-Identifier: Apache-2.0
//
// CUDA's errors as statuses that say what to do.
#ifndef VRAMBROKER_ALLOCATOR_DEVICE_CUDA_STATUS_H_
#define VRAMBROKER_ALLOCATOR_DEVICE_CUDA_STATUS_H_

#include <cuda.h>

#include "absl/status/status.h"

namespace vrambroker {

// OK, or a status that names the call, the error and what to do about it. REQUIRES: the driver is loaded.
absl::Status CudaStatus(const char* call, CUresult error);

// After such an error every CUDA call of the process on this device fails the same way; only a new process helps.
bool IsSticky(CUresult error);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_DEVICE_CUDA_STATUS_H_
