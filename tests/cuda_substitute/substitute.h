// SPDX-License-Identifier: Apache-2.0
//
// A substitute for NVIDIA's driver, for testing the CUDA code path where there is no GPU: a library with the driver's
// name, libcuda.so.1, which programs load in its place. See README.md for what it promises and where it differs.
//
// A "machine" is a folder of shared memory with some GPUs in it; processes that name the same folder share the GPUs.
#ifndef VRAMBROKER_TESTS_CUDA_SUBSTITUTE_SUBSTITUTE_H_
#define VRAMBROKER_TESTS_CUDA_SUBSTITUTE_SUBSTITUTE_H_

#include <cstdint>
#include <string>

namespace vrambroker::cuda_substitute {

// Environment variables, read at a process's first call.
// The machine's folder. Not set: a driver without a GPU.
inline constexpr char kMachineVariable[] = "VRAMBROKER_CUDA_SUBSTITUTE";
// Calls that fail: "cuMemAlloc:3=2" - the third cuMemAlloc of the process returns error 2; "cuMemFree:2+=999" - all
// from the second on; "cuMemGetInfo:1=700!" - and from then on every call does (a sticky error). Several: with commas.
inline constexpr char kFaultsVariable[] = "VRAMBROKER_CUDA_SUBSTITUTE_FAULTS";
// Of the management library: nvmlInit fails with this number.
inline constexpr char kNvmlErrorVariable[] = "VRAMBROKER_CUDA_SUBSTITUTE_NVML_ERROR";
// GPUs of the management library: "none": they have no sensors; "mig": each GPU has one instance, which the driver
// serves.
inline constexpr char kNvmlGpusVariable[] = "VRAMBROKER_CUDA_SUBSTITUTE_NVML_GPUS";
// How long calls take: "cuMemAlloc=5ms,cuMemFree=1ms"; "cuGraphLaunch=until:/tmp/go": until there is such a
// file; while one waits there is /tmp/go.waits.
inline constexpr char kDelaysVariable[] = "VRAMBROKER_CUDA_SUBSTITUTE_DELAYS";

// The sensors of each GPU.
inline constexpr unsigned int kSensorUsePercent = 37;
inline constexpr unsigned int kSensorCelsius = 61;
inline constexpr unsigned int kSensorMilliwatts = 412'500;

struct MachineOptions {
  int devices = 1;
  bool one_user = false;  // a handle does not open in a process of another user than its exporter's
  uint64_t device_bytes = uint64_t{1} << 30;
  uint64_t context_bytes = 0;  // taken by each process that uses a GPU
  int driver_version = 13000;
  int compute_mode = 0;  // a CUcomputemode
};

// Makes the machine in `folder`, which exists and is empty. Aborts when it cannot.
void MakeMachine(const std::string& folder, const MachineOptions& options);

// Bytes of a GPU that are in use, contexts included, as all processes of the machine see them.
uint64_t UsedBytes(const std::string& folder, int device);

}  // namespace vrambroker::cuda_substitute

#endif  // VRAMBROKER_TESTS_CUDA_SUBSTITUTE_SUBSTITUTE_H_
