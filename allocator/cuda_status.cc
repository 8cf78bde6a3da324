// SPDX-License-Identifier: Apache-2.0
#include "allocator/cuda_status.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"

namespace vrambroker {
namespace {

struct KnownError {
  cudaError_t error;
  absl::StatusCode code;
  bool sticky;
  const char* advice;
};

constexpr char kNewProcess[] = "this process can no longer use the GPU: restart it";
// NVIDIA does not say that it stays. Where it does, the daemon's health check says so.
constexpr char kUnknown[] =
    "the driver does not say why; the kernel log may (dmesg, 'Xid' or 'NVRM'); if it stays, restart this process, and "
    "if "
    "that does not help, the driver or the machine";
constexpr char kSeeXid[] =
    "this process can no longer use the GPU: restart it; the kernel log (dmesg, 'Xid') says what the GPU reported";

// A program that was built with an older toolkit gets these from a newer driver, too.
constexpr auto kTensorMemoryLeak = static_cast<cudaError_t>(721);
constexpr auto kContained = static_cast<cudaError_t>(226);
#if CUDART_VERSION >= 12080
static_assert(kTensorMemoryLeak == cudaErrorTensorMemoryLeak && kContained == cudaErrorContained);
#endif

// Which errors are sticky is NVIDIA's statement: the description of cudaError_t in the CUDA runtime API reference says
// of each of them that the process must be terminated.
constexpr KnownError kKnownErrors[] = {
    {cudaErrorMemoryAllocation, absl::StatusCode::kResourceExhausted, false,
     "the GPU has no room for it; other programs may use it: nvidia-smi lists them"},
    {cudaErrorInvalidValue, absl::StatusCode::kInvalidArgument, false, "the CUDA runtime refused an argument"},
    {cudaErrorInvalidDevice, absl::StatusCode::kInvalidArgument, false, "no such GPU; see CUDA_VISIBLE_DEVICES"},
    {cudaErrorInvalidResourceHandle, absl::StatusCode::kInvalidArgument, false,
     "the handle or stream belongs to another process, or its owner is gone"},
    {cudaErrorMapBufferObjectFailed, absl::StatusCode::kUnavailable, false,
     "the segment's owner, the daemon, may have gone; containers must share its PID namespace"},
    {cudaErrorDeviceUninitialized, absl::StatusCode::kFailedPrecondition, false,
     "a CUDA IPC handle opens only outside its owner's process, and only in the owner's PID namespace: run containers "
     "in the daemon's (docker: --pid=host or --pid=container:NAME, Kubernetes: shareProcessNamespace)"},
    {cudaErrorNotSupported, absl::StatusCode::kUnimplemented, false,
     "the GPU or the driver cannot share memory between processes (WSL2, MIG and some virtual GPUs cannot)"},
    {cudaErrorNoDevice, absl::StatusCode::kUnavailable, false,
     "the driver sees no GPU; see nvidia-smi, and CUDA_VISIBLE_DEVICES"},
    {cudaErrorInsufficientDriver, absl::StatusCode::kUnavailable, false,
     "there is no NVIDIA driver, or it is older than this build's CUDA runtime; a container needs the driver of its "
     "host (docker: --gpus)"},
    {cudaErrorInitializationError, absl::StatusCode::kFailedPrecondition, false,
     "the driver could not be started here; a child made by fork() cannot use CUDA after its parent did"},
    {cudaErrorDevicesUnavailable, absl::StatusCode::kUnavailable, false,
     "another process has exclusive use of the GPU; its compute mode must be DEFAULT (nvidia-smi "
     "--query-gpu=compute_mode)"},
    {cudaErrorSystemNotReady, absl::StatusCode::kUnavailable, false,
     "the machine's GPUs are still being set up; is nvidia-fabricmanager running?"},
    {cudaErrorSystemDriverMismatch, absl::StatusCode::kUnavailable, false,
     "the kernel driver and the user-mode driver have different versions: restart the machine or reload the driver"},
    {cudaErrorUnknown, absl::StatusCode::kInternal, false, kUnknown},
    {cudaErrorStreamCaptureUnsupported, absl::StatusCode::kFailedPrecondition, false,
     "not possible while a CUDA graph is being captured; it will be tried again later"},
    {cudaErrorStreamCaptureInvalidated, absl::StatusCode::kFailedPrecondition, false,
     "not possible while a CUDA graph is being captured; it will be tried again later"},
    {cudaErrorStreamCaptureImplicit, absl::StatusCode::kFailedPrecondition, false,
     "not possible while a CUDA graph is being captured; it will be tried again later"},
    {cudaErrorECCUncorrectable, absl::StatusCode::kInternal, true, kSeeXid},
    {cudaErrorNvlinkUncorrectable, absl::StatusCode::kInternal, true, kSeeXid},
    {cudaErrorIllegalAddress, absl::StatusCode::kInternal, true, kNewProcess},
    {cudaErrorLaunchTimeout, absl::StatusCode::kInternal, true, kNewProcess},
    {cudaErrorContextIsDestroyed, absl::StatusCode::kInternal, true, kNewProcess},
    {cudaErrorAssert, absl::StatusCode::kInternal, true, kNewProcess},
    {cudaErrorHardwareStackError, absl::StatusCode::kInternal, true, kNewProcess},
    {cudaErrorIllegalInstruction, absl::StatusCode::kInternal, true, kNewProcess},
    {cudaErrorMisalignedAddress, absl::StatusCode::kInternal, true, kNewProcess},
    {cudaErrorInvalidAddressSpace, absl::StatusCode::kInternal, true, kNewProcess},
    {cudaErrorInvalidPc, absl::StatusCode::kInternal, true, kNewProcess},
    {cudaErrorLaunchFailure, absl::StatusCode::kInternal, true, kNewProcess},
    {kTensorMemoryLeak, absl::StatusCode::kInternal, true, kNewProcess},
    {cudaErrorMpsClientTerminated, absl::StatusCode::kInternal, true, kNewProcess},
    {kContained, absl::StatusCode::kInternal, true, kSeeXid},
    {cudaErrorExternalDevice, absl::StatusCode::kInternal, true, kSeeXid},
};

const KnownError* Find(cudaError_t error) {
  const auto* const it = std::find_if(std::begin(kKnownErrors), std::end(kKnownErrors),
                                      [&](const KnownError& known) { return known.error == error; });
  return it == std::end(kKnownErrors) ? nullptr : it;
}

}  // namespace

absl::Status CudaStatus(const char* call, cudaError_t error) {
  if (error == cudaSuccess) return absl::OkStatus();
  (void)cudaGetLastError();
  const std::string text = absl::StrCat(call, " failed: ", cudaGetErrorName(error), " (", static_cast<int>(error),
                                        "), ", cudaGetErrorString(error));
  const KnownError* const known = Find(error);
  if (known == nullptr) return absl::InternalError(text);
  return absl::Status(known->code, absl::StrCat(text, "; ", known->advice));
}

bool IsSticky(cudaError_t error) {
  const KnownError* const known = Find(error);
  return known != nullptr && known->sticky;
}

}  // namespace vrambroker
