// SPDX-License-Identifier: Apache-2.0
//
// A substitute for NVIDIA's driver, for testing the CUDA code path without a GPU: a library with the driver's name,
// libcuda.so.1, which programs load in place of the driver. README.md lists the substitute's promises and differences.
//
// A "machine" is a folder of shared memory with some GPUs; processes that name the same folder share the GPUs.
#ifndef VRAMBROKER_TESTS_CUDA_SUBSTITUTE_SUBSTITUTE_H_
#define VRAMBROKER_TESTS_CUDA_SUBSTITUTE_SUBSTITUTE_H_

#include <cstdint>
#include <string>

namespace vrambroker::cuda_substitute {

// Tests set the environment variables before a process's first call. The management library reads its variables at
// every call.
// The machine's folder. Without the variable the driver has no GPU.
inline constexpr char kMachineVariable[] = "VRAMBROKER_CUDA_SUBSTITUTE";
// Calls that fail, separated by commas. "cuMemAlloc:3=2": the third cuMemAlloc of the process returns error 2.
// "cuMemFree:2+=999": all calls from the second on. "cuMemGetInfo:1=700!": every later call of any function fails, too
// (a sticky error).
inline constexpr char kFaultsVariable[] = "VRAMBROKER_CUDA_SUBSTITUTE_FAULTS";
// nvmlInit of the management library fails with this number.
inline constexpr char kNvmlErrorVariable[] = "VRAMBROKER_CUDA_SUBSTITUTE_NVML_ERROR";
// GPUs of the management library. "none": the GPUs have no sensors. "mig": each GPU has an instance, which the driver
// serves.
inline constexpr char kNvmlGpusVariable[] = "VRAMBROKER_CUDA_SUBSTITUTE_NVML_GPUS";
// Delays of calls: "cuMemAlloc=5ms,cuMemFree=1ms". "cuGraphLaunch=until:/tmp/go" waits until the file /tmp/go exists.
// Each such call first makes the file /tmp/go.waits.
inline constexpr char kDelaysVariable[] = "VRAMBROKER_CUDA_SUBSTITUTE_DELAYS";

// The sensors of each GPU.
inline constexpr unsigned int kSensorUsePercent = 37;
inline constexpr unsigned int kSensorCelsius = 61;
inline constexpr unsigned int kSensorMilliwatts = 412'500;

struct MachineOptions {
  int devices = 1;
  bool one_user = false;  // a handle opens only in processes of its exporter's user
  uint64_t device_bytes = uint64_t{1} << 30;
  uint64_t context_bytes = 0;  // memory of each context
  int driver_version = 13000;
  int compute_mode = 0;  // a CUcomputemode
};

// Makes the machine in `folder`, which exists and is empty. Aborts on failure.
void MakeMachine(const std::string& folder, const MachineOptions& options);

// Returns the used bytes of a GPU, contexts included, for all processes of the machine.
uint64_t UsedBytes(const std::string& folder, int device);

}  // namespace vrambroker::cuda_substitute

#endif  // VRAMBROKER_TESTS_CUDA_SUBSTITUTE_SUBSTITUTE_H_
