// SPDX-License-Identifier: Apache-2.0
#include "allocator/device/cuda_status.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "absl/strings/str_cat.h"
#include "allocator/device/cuda_driver.h"

namespace vrambroker {
namespace {

struct KnownError {
  CUresult error;
  absl::StatusCode code;
  bool sticky;
  const char* advice;
};

constexpr char kNewProcess[] = "this process can no longer use the GPU: restart it";
// NVIDIA does not say whether an unknown error stays. A lasting error shows in the daemon's health check.
constexpr char kUnknown[] =
    "the driver does not say why; the kernel log may (dmesg, 'Xid' or 'NVRM'); if it stays, restart this process, and "
    "if that does not help, the driver or the machine";
constexpr char kSeeXid[] =
    "this process can no longer use the GPU: restart it; the kernel log (dmesg, 'Xid') says what the GPU reported";

// Errors of drivers for CUDA 12.8 and later; older toolkits do not know the names.
constexpr auto kTensorMemoryLeak = static_cast<CUresult>(721);
constexpr auto kContained = static_cast<CUresult>(226);
#if defined(CUDA_VERSION) && CUDA_VERSION >= 12080
static_assert(kTensorMemoryLeak == CUDA_ERROR_TENSOR_MEMORY_LEAK && kContained == CUDA_ERROR_CONTAINED);
#endif

// Sticky errors follow NVIDIA: for each of them, the description of CUresult in the CUDA driver API reference says that
// the process must be terminated.
constexpr KnownError kKnownErrors[] = {
    {CUDA_ERROR_OUT_OF_MEMORY, absl::StatusCode::kResourceExhausted, false,
     "the GPU has no room for it; other programs may use it: nvidia-smi lists them"},
    {CUDA_ERROR_INVALID_VALUE, absl::StatusCode::kInvalidArgument, false, "the NVIDIA driver refused an argument"},
    {CUDA_ERROR_INVALID_DEVICE, absl::StatusCode::kInvalidArgument, false, "no such GPU; see CUDA_VISIBLE_DEVICES"},
    {CUDA_ERROR_INVALID_HANDLE, absl::StatusCode::kInvalidArgument, false,
     "the handle or stream belongs to another process, or its owner is gone"},
    {CUDA_ERROR_MAP_FAILED, absl::StatusCode::kUnavailable, false,
     "the segment's owner, the daemon, may have gone; containers must share its pid namespace"},
    {CUDA_ERROR_INVALID_CONTEXT, absl::StatusCode::kFailedPrecondition, false,
     "a CUDA IPC handle opens only outside its owner's process, and only in the owner's pid namespace: start the "
     "container with --pid=host (in Kubernetes: hostPID: true)"},
    {CUDA_ERROR_NOT_SUPPORTED, absl::StatusCode::kUnimplemented, false,
     "the GPU or the driver cannot share memory between processes (WSL2, MIG and some virtual GPUs cannot)"},
    {CUDA_ERROR_NO_DEVICE, absl::StatusCode::kUnavailable, false,
     "the driver sees no GPU; see nvidia-smi, and CUDA_VISIBLE_DEVICES"},
    {CUDA_ERROR_STUB_LIBRARY, absl::StatusCode::kUnavailable, false,
     "the libcuda.so.1 that was found is the CUDA Toolkit's stub, for linking: the driver's own must come before it "
     "(see LD_LIBRARY_PATH)"},
    {CUDA_ERROR_NOT_INITIALIZED, absl::StatusCode::kFailedPrecondition, false,
     "the driver could not be started here; a child made by fork() cannot use CUDA after its parent did"},
    {CUDA_ERROR_DEVICE_UNAVAILABLE, absl::StatusCode::kUnavailable, false,
     "another process has exclusive use of the GPU; its compute mode must be DEFAULT (nvidia-smi "
     "--query-gpu=compute_mode)"},
    {CUDA_ERROR_SYSTEM_NOT_READY, absl::StatusCode::kUnavailable, false,
     "the machine's GPUs are still being set up; is nvidia-fabricmanager running?"},
    {CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, absl::StatusCode::kUnavailable, false,
     "the kernel driver and the user-mode driver have different versions: restart the machine or reload the driver"},
    {CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE, absl::StatusCode::kUnavailable, false,
     "a forward-compatible driver library (cuda-compat) was found, which this GPU or this kernel driver does not "
     "support: leave it out of LD_LIBRARY_PATH"},
    {CUDA_ERROR_UNKNOWN, absl::StatusCode::kInternal, false, kUnknown},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, absl::StatusCode::kFailedPrecondition, false,
     "not possible while a CUDA graph is being captured; it will be tried again later"},
    {CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, absl::StatusCode::kFailedPrecondition, false,
     "not possible while a CUDA graph is being captured; it will be tried again later"},
    {CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, absl::StatusCode::kFailedPrecondition, false,
     "not possible while a CUDA graph is being captured; it will be tried again later"},
    {CUDA_ERROR_ECC_UNCORRECTABLE, absl::StatusCode::kInternal, true, kSeeXid},
    {CUDA_ERROR_NVLINK_UNCORRECTABLE, absl::StatusCode::kInternal, true, kSeeXid},
    {CUDA_ERROR_ILLEGAL_ADDRESS, absl::StatusCode::kInternal, true, kNewProcess},
    {CUDA_ERROR_LAUNCH_TIMEOUT, absl::StatusCode::kInternal, true, kNewProcess},
    {CUDA_ERROR_CONTEXT_IS_DESTROYED, absl::StatusCode::kInternal, true, kNewProcess},
    {CUDA_ERROR_ASSERT, absl::StatusCode::kInternal, true, kNewProcess},
    {CUDA_ERROR_HARDWARE_STACK_ERROR, absl::StatusCode::kInternal, true, kNewProcess},
    {CUDA_ERROR_ILLEGAL_INSTRUCTION, absl::StatusCode::kInternal, true, kNewProcess},
    {CUDA_ERROR_MISALIGNED_ADDRESS, absl::StatusCode::kInternal, true, kNewProcess},
    {CUDA_ERROR_INVALID_ADDRESS_SPACE, absl::StatusCode::kInternal, true, kNewProcess},
    {CUDA_ERROR_INVALID_PC, absl::StatusCode::kInternal, true, kNewProcess},
    {CUDA_ERROR_LAUNCH_FAILED, absl::StatusCode::kInternal, true, kNewProcess},
    {kTensorMemoryLeak, absl::StatusCode::kInternal, true, kNewProcess},
    {CUDA_ERROR_MPS_CLIENT_TERMINATED, absl::StatusCode::kInternal, true, kNewProcess},
    {kContained, absl::StatusCode::kInternal, true, kSeeXid},
    {CUDA_ERROR_EXTERNAL_DEVICE, absl::StatusCode::kInternal, true, kSeeXid},
};

const KnownError* Find(CUresult error) {
  const auto* const it = std::find_if(std::begin(kKnownErrors), std::end(kKnownErrors),
                                      [&](const KnownError& known) { return known.error == error; });
  return it == std::end(kKnownErrors) ? nullptr : it;
}

}  // namespace

absl::Status CudaStatus(const char* call, CUresult error) {
  if (error == CUDA_SUCCESS) return absl::OkStatus();
  const char* name = nullptr;  // stays null when the driver does not know the error
  const char* description = nullptr;
  (void)Driver().cuGetErrorName(error, &name);
  (void)Driver().cuGetErrorString(error, &description);
  const std::string text =
      absl::StrCat(call, " failed: ", name == nullptr ? "error" : name, " (", static_cast<int>(error), ")",
                   description == nullptr ? "" : absl::StrCat(", ", description));
  const KnownError* const known = Find(error);
  if (known == nullptr) return absl::InternalError(text);
  return absl::Status(known->code, absl::StrCat(text, "; ", known->advice));
}

bool IsSticky(CUresult error) {
  const KnownError* const known = Find(error);
  return known != nullptr && known->sticky;
}

}  // namespace vrambroker
