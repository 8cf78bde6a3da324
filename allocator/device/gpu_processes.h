// SPDX-License-Identifier: Apache-2.0
//
// FindGpuProcesses: memory of a GPU used by each process, as NVIDIA's management library (NVML) reports.
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

// Finds all processes with a context on the GPU or drawing with it, by pid. `uuid`: of the GPU or of an instance (MIG),
// as nvidia-smi prints it. Unimplemented without NVML, or if NVML does not report the use of each process. Other errors
// name the call. May take milliseconds, and seconds for the first time. Thread-safe.
absl::StatusOr<std::vector<GpuProcess>> FindGpuProcesses(const std::string& uuid);

// For FindGpuProcesses() and tests: reads `count` records written by a function of NVML over bytes of kUnwritten. The
// length of a record depends on the driver, not on the function's name alone: driver 535 at first wrote a field more.
inline constexpr char kUnwritten = '\xA5';
absl::StatusOr<std::vector<GpuProcess>> ReadProcessRecords(absl::Span<const char> records, size_t count);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_DEVICE_GPU_PROCESSES_H_
