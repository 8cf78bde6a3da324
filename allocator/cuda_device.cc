// SPDX-License-Identifier: Apache-2.0
//
// The only file of the project that calls CUDA, with cuda_status.cc. The runtime is linked statically: it looks for the
// driver when it is first used, so that a binary with this file runs, and says so, on a machine without one.
#include "allocator/cuda_device.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "allocator/cuda_status.h"
#include "allocator/mutex.h"

namespace vrambroker {
namespace {

static_assert(sizeof(cudaIpcMemHandle_t) == sizeof(CudaIpcHandle));

// Whether this process uses a device already: whether it has made a context, of some hundred MiB, on it.
bool HasContext(int ordinal) {
#if CUDART_VERSION >= 12000  // before, choosing a device made no context
  // int is CUresult, and CUdevice: driver_types.h has neither. 0 is CUDA_SUCCESS.
  using GetState = int (*)(int device, unsigned int* flags, int* active);
  static const GetState get_state = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    constexpr char kName[] = "cuDevicePrimaryCtxGetState";
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion(kName, &function, 12000, cudaEnableDefault, &found);
#else
    const cudaError_t error = cudaGetDriverEntryPoint(kName, &function, cudaEnableDefault, &found);
#endif
    (void)cudaGetLastError();
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<GetState>(function)
                                                                        : nullptr;
  }();
  unsigned int flags = 0;
  int active = 0;
  return get_state == nullptr || get_state(ordinal, &flags, &active) != 0 || active != 0;
#else
  (void)ordinal;
  return true;
#endif
}

// CUDA's current device belongs to the thread, which is the application's: what it was before comes back. But not where
// that device is 0 only because the thread never chose one: choosing it would make a context on it (since CUDA 12).
class CurrentDevice {
 public:
  explicit CurrentDevice(int ordinal) : ordinal_(ordinal) {
    status_ = CudaStatus("cudaGetDevice", cudaGetDevice(&before_));
    if (status_.ok() && before_ != ordinal_) status_ = CudaStatus("cudaSetDevice", cudaSetDevice(ordinal_));
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  ~CurrentDevice() {
    if (!status_.ok() || before_ == ordinal_ || !HasContext(before_)) return;
    if (cudaSetDevice(before_) != cudaSuccess) (void)cudaGetLastError();
  }

  const absl::Status& status() const { return status_; }

 private:
  const int ordinal_;
  int before_ = 0;
  absl::Status status_;
};

// While another thread captures a CUDA graph, calls that could disturb it are refused on all threads that have not
// declared that theirs are none of its business, and some of them make the capture invalid. Ours are: no work of ours
// goes to a stream that is captured.
class OutsideOfCapture {
 public:
  OutsideOfCapture() { exchanged_ = cudaThreadExchangeStreamCaptureMode(&mode_) == cudaSuccess; }
  OutsideOfCapture(const OutsideOfCapture&) = delete;
  OutsideOfCapture& operator=(const OutsideOfCapture&) = delete;
  ~OutsideOfCapture() {
    if (exchanged_) (void)cudaThreadExchangeStreamCaptureMode(&mode_);
  }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
  bool exchanged_ = false;
};

// Both were pointers before they were numbers.
cudaStream_t AsStream(Stream stream) {
  return reinterpret_cast<cudaStream_t>(stream);  // NOLINT(performance-no-int-to-ptr)
}
void* AsPointer(uint64_t address) {
  return reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
}

class CudaEvent : public Event {
 public:
  explicit CudaEvent(cudaEvent_t event) : event_(event) {}
  ~CudaEvent() override {
    const OutsideOfCapture outside;
    (void)cudaEventDestroy(event_);
  }

  absl::StatusOr<bool> Query() override {
    const OutsideOfCapture outside;
    const cudaError_t error = cudaEventQuery(event_);
    if (error == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return false;
    }
    if (error != cudaSuccess) return CudaStatus("cudaEventQuery", error);
    return true;
  }

  absl::Status Wait() override {
    const OutsideOfCapture outside;
    return CudaStatus("cudaEventSynchronize", cudaEventSynchronize(event_));
  }

 private:
  const cudaEvent_t event_;
};

// What a call that names a stream of the application says when that has been destroyed, or is another device's.
// NVIDIA leaves undefined what happens then. The second error is about the stream's context, not about the device's.
bool IsNoStream(cudaError_t error) {
  return error == cudaErrorInvalidResourceHandle || error == cudaErrorContextIsDestroyed;
}

// Waits for everything that this process has queued on its devices.
absl::Status WaitForAllDevices() {
  int count = 0;
  if (absl::Status status = CudaStatus("cudaGetDeviceCount", cudaGetDeviceCount(&count)); !status.ok()) return status;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    if (!HasContext(ordinal)) continue;
    const CurrentDevice current(ordinal);
    if (!current.status().ok()) return current.status();
    const OutsideOfCapture outside;
    if (absl::Status status = CudaStatus("cudaDeviceSynchronize", cudaDeviceSynchronize()); !status.ok()) return status;
  }
  return absl::OkStatus();
}

// Waits, once for all of them, for streams that cannot be asked any more: what was queued on a stream goes on when the
// stream is destroyed. Thread-safe.
class LostStreams {
 public:
  // The number of one that has just been found to be lost.
  uint64_t Add() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(mu_);
    return ++found_;
  }
  // Until the work of this one, and of all before it, is done.
  absl::Status Wait(uint64_t number) ABSL_LOCKS_EXCLUDED(mu_) {
    uint64_t found = 0;
    {
      MutexLock lock(mu_);
      if (done_ >= number) return absl::OkStatus();
      found = found_;
    }
    if (absl::Status status = WaitForAllDevices(); !status.ok()) return status;
    MutexLock lock(mu_);
    done_ = std::max(done_, found);
    return absl::OkStatus();
  }

 private:
  Mutex mu_;
  uint64_t found_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t done_ ABSL_GUARDED_BY(mu_) = 0;
};

class LostStreamEvent : public Event {
 public:
  explicit LostStreamEvent(LostStreams* streams) : streams_(*streams), number_(streams->Add()) {}
  absl::StatusOr<bool> Query() override { return absl::NotFoundError("the stream does not exist any more"); }
  absl::Status Wait() override { return streams_.Wait(number_); }

 private:
  LostStreams& streams_;
  const uint64_t number_;
};

class CudaDevice : public Device {
 public:
  explicit CudaDevice(DeviceProperties properties) : properties_(std::move(properties)) {}
  ~CudaDevice() override {
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  }

  const DeviceProperties& properties() const override { return properties_; }

  absl::StatusOr<uint64_t> FreeBytes() override {
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    if (absl::Status status = OnDevice("cudaMemGetInfo", [&] { return cudaMemGetInfo(&free_bytes, &total_bytes); });
        !status.ok()) {
      return status;
    }
    return free_bytes;
  }

  absl::Status Health() override {
    {
      MutexLock lock(mu_);
      if (!health_.ok()) return health_;
    }
    // Any call tells that the context is gone; this one waits for nothing.
    const absl::StatusOr<cudaStream_t> stream = OwnStream();
    if (!stream.ok()) return stream.status();
    return OnDevice("cudaStreamQuery", [&] {
      const cudaError_t error = cudaStreamQuery(*stream);
      return error == cudaErrorNotReady ? cudaSuccess : error;
    });
  }

  absl::StatusOr<DeviceSegment> AllocateSegment(uint64_t bytes) override {
    // In multiples of 2 MiB the driver gives each allocation memory of its own; a smaller one could share a driver
    // block with another segment, and an IPC handle opens the whole block. It clears what another process had, not what
    // this one has freed.
    if (absl::Status status = CheckSegmentBytes(bytes); !status.ok()) return status;
    void* address = nullptr;
    if (absl::Status status = OnDevice("cudaMalloc", [&] { return cudaMalloc(&address, bytes); }); !status.ok()) {
      return status;
    }
    return DeviceSegment{.bytes = bytes, .address = reinterpret_cast<uint64_t>(address)};
  }

  absl::Status FreeSegment(const DeviceSegment& segment) override {
    return OnDevice("cudaFree", [&] { return cudaFree(AsPointer(segment.address)); });
  }

  absl::StatusOr<SegmentHandle> ExportSegment(const DeviceSegment& segment) override {
    cudaIpcMemHandle_t handle;
    if (absl::Status status =
            OnDevice("cudaIpcGetMemHandle", [&] { return cudaIpcGetMemHandle(&handle, AsPointer(segment.address)); });
        !status.ok()) {
      return status;
    }
    CudaIpcHandle copy;
    std::memcpy(copy.data(), &handle, copy.size());
    return SegmentHandle(copy);
  }

  absl::StatusOr<void*> OpenHandle(const SegmentHandle& handle, uint64_t /*bytes*/) override {
    const auto* ipc = std::get_if<CudaIpcHandle>(&handle);
    if (ipc == nullptr) return absl::InvalidArgumentError("cuda device: the handle is not a CUDA IPC handle");
    cudaIpcMemHandle_t copy;
    std::memcpy(&copy, ipc->data(), ipc->size());
    void* address = nullptr;
    if (absl::Status status =
            OnDevice("cudaIpcOpenMemHandle",
                     [&] { return cudaIpcOpenMemHandle(&address, copy, cudaIpcMemLazyEnablePeerAccess); });
        !status.ok()) {
      return status;
    }
    return address;
  }

  absl::Status CloseHandle(void* address, uint64_t /*bytes*/) override {
    // Blocks may be freed while their stream still works on them; who gets the memory next knows nothing of that
    // stream.
    if (absl::Status status = OnDevice("cudaDeviceSynchronize", [] { return cudaDeviceSynchronize(); }); !status.ok()) {
      return status;
    }
    return OnDevice("cudaIpcCloseMemHandle", [&] { return cudaIpcCloseMemHandle(address); });
  }

  absl::Status CopyIn(void* segment_address, const void* from, uint64_t bytes) override {
    return OnDevice("cudaMemcpy", [&] { return cudaMemcpy(segment_address, from, bytes, cudaMemcpyHostToDevice); });
  }

  absl::Status CopyOut(void* to, const void* segment_address, uint64_t bytes) override {
    return OnDevice("cudaMemcpy", [&] { return cudaMemcpy(to, segment_address, bytes, cudaMemcpyDeviceToHost); });
  }

  absl::Status Zero(const DeviceSegment& segment, uint64_t offset, uint64_t bytes) override {
    if (absl::Status status = CheckRange(segment, offset, bytes); !status.ok()) return status;
    const absl::StatusOr<cudaStream_t> stream = OwnStream();
    if (!stream.ok()) return stream.status();
    if (absl::Status status = OnDevice(
            "cudaMemsetAsync", [&] { return cudaMemsetAsync(AsPointer(segment.address + offset), 0, bytes, *stream); });
        !status.ok()) {
      return status;
    }
    return OnDevice("cudaStreamSynchronize", [&] { return cudaStreamSynchronize(*stream); });
  }

  absl::StatusOr<std::unique_ptr<Event>> RecordEvent(Stream stream) override {
    bool exists = true;
    const auto unless_lost = [&exists](cudaError_t error) {
      if (!IsNoStream(error)) return error;
      (void)cudaGetLastError();
      exists = false;
      return cudaSuccess;
    };
    // In a stream that is captured the event would become part of the graph, and never complete. Whoever waits for
    // the stream tries again later.
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    if (absl::Status status = OnDevice("cudaStreamIsCapturing",
                                       [&] { return unless_lost(cudaStreamIsCapturing(AsStream(stream), &capture)); });
        !status.ok()) {
      return status;
    }
    if (!exists) return std::make_unique<LostStreamEvent>(&lost_streams_);
    if (capture != cudaStreamCaptureStatusNone) {
      return CudaStatus("cudaEventRecord", cudaErrorStreamCaptureUnsupported);
    }
    cudaEvent_t event = nullptr;
    if (absl::Status status = OnDevice("cudaEventCreateWithFlags",
                                       [&] { return cudaEventCreateWithFlags(&event, cudaEventDisableTiming); });
        !status.ok()) {
      return status;
    }
    auto owner = std::make_unique<CudaEvent>(event);
    if (absl::Status status =
            OnDevice("cudaEventRecord", [&] { return unless_lost(cudaEventRecord(event, AsStream(stream))); });
        !status.ok()) {
      return status;
    }
    if (!exists) return std::make_unique<LostStreamEvent>(&lost_streams_);
    return owner;
  }

 private:
  // Makes one call with this device as the thread's, and keeps in mind what ends all use of it.
  template <typename Call>
  absl::Status OnDevice(const char* name, const Call& call) {
    const CurrentDevice current(properties_.ordinal);
    if (!current.status().ok()) return current.status();
    const OutsideOfCapture outside;
    const cudaError_t error = call();
    absl::Status status = CudaStatus(name, error);
    if (IsSticky(error)) {
      MutexLock lock(mu_);
      if (health_.ok()) health_ = status;
    }
    return status;
  }

  // For work of ours: it neither waits for the default stream nor holds it up. Made when first needed, which in a
  // client is never.
  absl::StatusOr<cudaStream_t> OwnStream() {
    MutexLock lock(stream_mu_);
    if (stream_ == nullptr) {
      if (absl::Status status = OnDevice("cudaStreamCreateWithFlags",
                                         [&] { return cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking); });
          !status.ok()) {
        return status;
      }
    }
    return stream_;
  }

  const DeviceProperties properties_;
  LostStreams lost_streams_;

  Mutex mu_;
  absl::Status health_ ABSL_GUARDED_BY(mu_);
  Mutex stream_mu_;
  cudaStream_t stream_ ABSL_GUARDED_BY(stream_mu_) = nullptr;
};

std::string FormatVersion(int version) {
  return absl::StrCat(version / 1000, ".", version % 1000 / 10);
}

// Why the GPUs of this machine cannot be used, as far as versions tell.
absl::Status CheckVersions() {
  int driver = 0;
  int runtime = 0;
  if (absl::Status status = CudaStatus("cudaDriverGetVersion", cudaDriverGetVersion(&driver)); !status.ok()) {
    return status;
  }
  if (absl::Status status = CudaStatus("cudaRuntimeGetVersion", cudaRuntimeGetVersion(&runtime)); !status.ok()) {
    return status;
  }
  if (driver == 0) {
    return absl::UnavailableError(
        "no NVIDIA driver is installed (libcuda.so.1 not found); a container needs the host's driver (docker: --gpus)");
  }
  // Within a major version, older drivers serve newer runtimes (NVIDIA's minor version compatibility).
  if (driver / 1000 < runtime / 1000) {
    return absl::UnavailableError(absl::StrCat("the NVIDIA driver is for CUDA ", FormatVersion(driver),
                                               ", this build needs one for CUDA ", runtime / 1000,
                                               ".0 or later: install a newer driver"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckComputeMode(int ordinal) {
  int mode = cudaComputeModeDefault;
  if (absl::Status status =
          CudaStatus("cudaDeviceGetAttribute", cudaDeviceGetAttribute(&mode, cudaDevAttrComputeMode, ordinal));
      !status.ok()) {
    return status;
  }
  if (mode == cudaComputeModeDefault) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("GPU ", ordinal, " is in a compute mode that ",
                   mode == cudaComputeModeProhibited ? "admits no process" : "admits one process only",
                   "; nvidia-smi -i ", ordinal, " -c DEFAULT changes it"));
}

namespace {

// As nvidia-smi prints it.
std::string FormatUuid(const cudaUUID_t& uuid) {
  std::string text = "GPU-";
  for (size_t i = 0; i < sizeof(uuid.bytes); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    absl::StrAppendFormat(&text, "%02x", static_cast<unsigned char>(uuid.bytes[i]));
  }
  return text;
}

}  // namespace

std::string CudaVersions() {
  int driver = 0;
  int runtime = 0;
  (void)cudaDriverGetVersion(&driver);
  (void)cudaRuntimeGetVersion(&runtime);
  return absl::StrCat("driver for CUDA ", FormatVersion(driver), ", runtime ", FormatVersion(runtime));
}

absl::StatusOr<std::vector<std::unique_ptr<Device>>> MakeCudaDevices() {
  if (absl::Status status = CheckVersions(); !status.ok()) {
    return absl::UnavailableError(absl::StrCat("no usable GPU: ", status.message()));
  }
  int count = 0;
  if (absl::Status status = CudaStatus("cudaGetDeviceCount", cudaGetDeviceCount(&count)); !status.ok()) {
    return absl::UnavailableError(absl::StrCat("no usable GPU: ", status.message()));
  }
  if (count == 0) return absl::UnavailableError("no usable GPU: CUDA sees no device");
  std::vector<std::unique_ptr<Device>> devices;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    cudaDeviceProp cuda = {};
    if (absl::Status status = CudaStatus("cudaGetDeviceProperties", cudaGetDeviceProperties(&cuda, ordinal));
        !status.ok()) {
      return status;
    }
    devices.push_back(std::make_unique<CudaDevice>(DeviceProperties{.kind = DeviceKind::kCuda,
                                                                    .ordinal = ordinal,
                                                                    .uuid = FormatUuid(cuda.uuid),
                                                                    .name = cuda.name,
                                                                    .total_bytes = cuda.totalGlobalMem,
                                                                    .keeps_freed_bytes = true}));
  }
  return devices;
}

}  // namespace vrambroker
