// SPDX-License-Identifier: Apache-2.0
//
// For programs that link the substitute: the driver's functions, and what tests do to the driver of this process.
// Programs that also run on real GPUs must not link it: they would never load NVIDIA's driver.
#ifndef VRAMBROKER_TESTS_CUDA_SUBSTITUTE_DRIVER_H_
#define VRAMBROKER_TESTS_CUDA_SUBSTITUTE_DRIVER_H_

#include <cuda.h>

#include <chrono>
#include <cstdint>
#include <string>

#include "allocator/device/cuda_driver.h"

// As the driver exports them. Where cuda.h is the CUDA Toolkit's, the compiler compares the declarations.
extern "C" {
#define VRAMBROKER_DECLARE(name, parameters) __attribute__((visibility("default"))) CUresult name parameters;
VRAMBROKER_CUDA_DRIVER_FUNCTIONS(VRAMBROKER_DECLARE)
// What applications call besides.
VRAMBROKER_DECLARE(cuCtxSetCurrent, (CUcontext context))
VRAMBROKER_DECLARE(cuDevicePrimaryCtxReset_v2, (CUdevice device))
VRAMBROKER_DECLARE(cuStreamBeginCapture_v2, (CUstream stream, CUstreamCaptureMode mode))
VRAMBROKER_DECLARE(cuStreamEndCapture, (CUstream stream, CUgraph* graph))
VRAMBROKER_DECLARE(cuGraphDestroy, (CUgraph graph))
#undef VRAMBROKER_DECLARE
}

namespace vrambroker::cuda_substitute {

// Replaces the faults of kFaultsVariable, and counts calls from here on.
[[gnu::visibility("default")]] void SetFaults(const std::string& faults);
// Calls of a function so far, refused ones too. By its documented name: "cuMemAlloc", not "cuMemAlloc_v2".
[[gnu::visibility("default")]] uint64_t Calls(const std::string& function);
// Work on `stream` that takes this long, after what is queued there already. For a real GPU: a kernel.
[[gnu::visibility("default")]] void Launch(CUstream stream, std::chrono::nanoseconds duration);
// What cudaSetDevice() does for a program with a CUDA runtime: the thread's context is the device's primary one, which
// is made when there is none. -1: the thread has no context, as one that never chose a device.
[[gnu::visibility("default")]] CUresult UseGpu(int device);
// The device of the thread's context; -1 when it has none.
[[gnu::visibility("default")]] int ThreadsGpu();

}  // namespace vrambroker::cuda_substitute

#endif  // VRAMBROKER_TESTS_CUDA_SUBSTITUTE_DRIVER_H_
