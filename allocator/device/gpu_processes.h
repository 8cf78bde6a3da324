// SPDX-License-Identifier: Apache-2.0
//
// FindGpuProcesses: the memory that each process uses of a GPU, in the words of NVIDIA's management library (NVML).
#ifndef VRAMBROKER_ALLOCATOR_DEVICE_GPU_PROCESSES_H_
#define VRAMBROKER_ALLOCATOR_DEVICE_GPU_PROCESSES_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "allocator/device/device.h"

namespace vrambroker {

// All processes that have a context on the GPU or draw with it, by pid. `uuid`: of the GPU or of an instance of it
// (MIG), as nvidia-smi prints it. Unimplemented where there is no NVML, or where it does not tell how much each process
// uses. Other errors name the call. May take milliseconds, and seconds for the first time. Thread-safe.
absl::StatusOr<std::vector<GpuProcess>> FindGpuProcesses(const std::string& uuid);

// For this, and for tests: reads `count` records that a function of NVML has written over bytes of kUnwritten. How long
// they are depends on the driver and not on the function's name alone: those of driver 535 have a field more at first.
inline constexpr char kUnwritten = '\xA5';
absl::StatusOr<std::vector<GpuProcess>> ReadProcessRecords(absl::Span<const char> records, size_t count);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_DEVICE_GPU_PROCESSES_H_
