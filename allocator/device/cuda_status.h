// SPDX-License-Identifier: Apache-2.0
//
// CUDA's errors as statuses with advice.
#ifndef VRAMBROKER_ALLOCATOR_DEVICE_CUDA_STATUS_H_
#define VRAMBROKER_ALLOCATOR_DEVICE_CUDA_STATUS_H_

#include <cuda.h>

#include "absl/status/status.h"

namespace vrambroker {

// OK, or a status with the call, the error and advice. REQUIRES: the driver is loaded.
absl::Status CudaStatus(const char* call, CUresult error);

// After a sticky error every CUDA call of the process on the device fails alike; only a new process helps.
bool IsSticky(CUresult error);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_DEVICE_CUDA_STATUS_H_
