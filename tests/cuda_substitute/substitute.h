// SPDX-License-Identifier: Apache-2.0
//
// A substitute for the CUDA runtime, for testing the CUDA code path where there is no GPU. Linked in place of cudart in
// builds with -DVRAMBROKER_CUDART=substitute. See README.md for what it promises and where it differs.
//
// A "machine" is a folder of shared memory with some GPUs in it; processes that name the same folder share the GPUs.
#ifndef VRAMBROKER_TESTS_CUDA_SUBSTITUTE_SUBSTITUTE_H_
#define VRAMBROKER_TESTS_CUDA_SUBSTITUTE_SUBSTITUTE_H_

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <string>

namespace vrambroker::cuda_substitute {

// Environment variables, read at a process's first call.
// The machine's folder. Not set: no driver, as on a machine without a GPU.
inline constexpr char kMachineVariable[] = "VRAMBROKER_CUDA_SUBSTITUTE";
// Calls that fail: "cudaMalloc:3=2" - the third cudaMalloc of the process returns error 2; "cudaFree:2+=999" - all from
// the second on; "cudaMemGetInfo:1=700!" - and from then on every call does (a sticky error). Several: with commas.
inline constexpr char kFaultsVariable[] = "VRAMBROKER_CUDA_SUBSTITUTE_FAULTS";
// How long calls take: "cudaMalloc=5ms,cudaFree=1ms".
inline constexpr char kDelaysVariable[] = "VRAMBROKER_CUDA_SUBSTITUTE_DELAYS";

struct MachineOptions {
  int devices = 1;
  bool one_user = false;  // a handle does not open in a process of another user than its exporter's
  uint64_t device_bytes = uint64_t{1} << 30;
  uint64_t context_bytes = 0;  // taken by each process that uses a GPU
  int driver_version = CUDART_VERSION;
  int compute_mode = cudaComputeModeDefault;
};

// Makes the machine in `folder`, which exists and is empty. Aborts when it cannot.
void MakeMachine(const std::string& folder, const MachineOptions& options);

// Bytes of a GPU that are in use, contexts included, as all processes of the machine see them.
uint64_t UsedBytes(const std::string& folder, int device);

// ---- This process ----

// Replaces the faults of kFaultsVariable, and counts calls from here on.
void SetFaults(const std::string& faults);
// Calls of a function so far, refused ones too.
uint64_t Calls(const std::string& function);
// Work on `stream` that takes this long, after what is queued there already. For a real GPU: a kernel.
void Launch(cudaStream_t stream, std::chrono::nanoseconds duration);

}  // namespace vrambroker::cuda_substitute

#endif  // VRAMBROKER_TESTS_CUDA_SUBSTITUTE_SUBSTITUTE_H_
