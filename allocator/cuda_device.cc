// SPDX-License-Identifier: Apache-2.0
//
// The only file of the project that calls CUDA, with cuda_status.cc. The runtime is linked statically: it looks for the
// driver when it is first used, so that a binary with this file runs, and says so, on a machine without one.
#include "allocator/cuda_device.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "allocator/cuda_status.h"
#include "allocator/mutex.h"

namespace vrambroker {
namespace {

static_assert(sizeof(cudaIpcMemHandle_t) == sizeof(CudaIpcHandle));

// Driver functions that the runtime has no counterpart for. int stands for CUresult, where 0 is success, and for
// CUdevice, void* for CUcontext: driver_types.h has none of them. Null where they cannot be had.
struct Driver {
  int (*primary_context_state)(int device, unsigned int* flags, int* active) = nullptr;
  int (*retain_primary_context)(void** context, int device) = nullptr;
  int (*push_context)(void* context) = nullptr;
  int (*pop_context)(void** context) = nullptr;
  int (*address_range)(uint64_t* base, size_t* bytes, uint64_t address) = nullptr;

  bool has_contexts() const {
    return primary_context_state != nullptr && retain_primary_context != nullptr && push_context != nullptr &&
           pop_context != nullptr;
  }
};

#if CUDART_VERSION >= 12000
template <typename Function>
void FindInDriver(const char* name, Function* function) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
  (void)cudaGetLastError();
  if (error == cudaSuccess && result == cudaDriverEntryPointSuccess) *function = reinterpret_cast<Function>(found);
}
#endif

const Driver& GetDriver() {
  static const Driver driver = [] {
    Driver found;
#if CUDART_VERSION >= 12000  // before, choosing a device made no context
    FindInDriver("cuDevicePrimaryCtxGetState", &found.primary_context_state);
    FindInDriver("cuDevicePrimaryCtxRetain", &found.retain_primary_context);
    FindInDriver("cuCtxPushCurrent", &found.push_context);
    FindInDriver("cuCtxPopCurrent", &found.pop_context);
    FindInDriver("cuMemGetAddressRange", &found.address_range);
#endif
    return found;
  }();
  return driver;
}

// Whether this process uses a device already: whether it has made a context, of some hundred MiB, on it. True where
// that cannot be known.
bool HasContext(int ordinal) {
  unsigned int flags = 0;
  int active = 0;
  const auto state = GetDriver().primary_context_state;
  return state == nullptr || state(ordinal, &flags, &active) != 0 || active != 0;
}

// The context of a device that all runtimes of this process use; made when there is none. It is never released: the
// application may use it by then, without knowing that it is ours.
absl::StatusOr<void*> PrimaryContext(int ordinal) {
  static std::array<std::atomic<void*>, 64> contexts = {};
  const auto index = static_cast<size_t>(ordinal);
  void* const known = index < contexts.size() ? contexts[index].load(std::memory_order_acquire) : nullptr;
  if (known != nullptr && HasContext(ordinal)) return known;  // not reset by the application meanwhile
  void* context = nullptr;
  const int error = GetDriver().retain_primary_context(&context, ordinal);
  // The numbers of the two interfaces' errors are the same.
  if (error != 0) return CudaStatus("cuDevicePrimaryCtxRetain", static_cast<cudaError_t>(error));
  if (index < contexts.size()) contexts[index].store(context, std::memory_order_release);
  return context;
}

// CUDA's current device belongs to the thread, which is the application's: what it was before comes back. A thread that
// never chose one has device 0, without a context. Choosing it would make one (since CUDA 12), and would leave such a
// thread on a device that it did not choose. So the thread's stack of contexts, which the runtime follows, gets another
// one on top for the time of our calls. Where that cannot be had, the device is chosen, and chosen back.
class CurrentDevice {
 public:
  explicit CurrentDevice(int ordinal) {
    status_ = CudaStatus("cudaGetDevice", cudaGetDevice(&before_));
    if (!status_.ok() || before_ == ordinal) return;
    if (!GetDriver().has_contexts()) {
      status_ = CudaStatus("cudaSetDevice", cudaSetDevice(ordinal));
      is_chosen_ = status_.ok();
      return;
    }
    const absl::StatusOr<void*> context = PrimaryContext(ordinal);
    status_ = context.ok()
                  ? CudaStatus("cuCtxPushCurrent", static_cast<cudaError_t>(GetDriver().push_context(*context)))
                  : context.status();
    is_pushed_ = status_.ok();
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  ~CurrentDevice() {
    void* context = nullptr;
    if (is_pushed_) (void)GetDriver().pop_context(&context);
    if (is_chosen_ && HasContext(before_) && cudaSetDevice(before_) != cudaSuccess) (void)cudaGetLastError();
  }

  const absl::Status& status() const { return status_; }

 private:
  int before_ = 0;
  bool is_pushed_ = false;
  bool is_chosen_ = false;
  absl::Status status_;
};

// While another thread captures a CUDA graph, calls that could disturb it are refused on all threads that have not
// declared that theirs are none of its business, and make the capture invalid. Ours are: no work of ours goes to a
// stream that is captured. Waiting for the whole device makes captures on it invalid all the same. To be made when the
// thread has its device: it makes a context on the one that it finds.
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
  CudaEvent(int ordinal, cudaEvent_t event) : ordinal_(ordinal), event_(event) {}
  ~CudaEvent() override {
    const CurrentDevice current(ordinal_);
    if (!current.status().ok()) return;
    const OutsideOfCapture outside;
    (void)cudaEventDestroy(event_);
  }

  absl::StatusOr<bool> Query() override {
    const CurrentDevice current(ordinal_);
    if (!current.status().ok()) return current.status();
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
    const CurrentDevice current(ordinal_);
    if (!current.status().ok()) return current.status();
    const OutsideOfCapture outside;
    return CudaStatus("cudaEventSynchronize", cudaEventSynchronize(event_));
  }

 private:
  const int ordinal_;
  const cudaEvent_t event_;
};

// What a call that names a stream of the application says when that has been destroyed, or is another device's.
// NVIDIA leaves undefined what happens then. The second error is about the stream's context, not about the device's.
bool IsNoStream(cudaError_t error) {
  return error == cudaErrorInvalidResourceHandle || error == cudaErrorContextIsDestroyed;
}

// Waits for everything that this process has queued on its devices. Makes captures on them invalid.
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
    const cudaStream_t stream = stream_;
    if (stream != nullptr) (void)OnDevice("cudaStreamDestroy", [&] { return cudaStreamDestroy(stream); });
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
    // A handle opens the driver's whole allocation.
    uint64_t base = segment.address;
    size_t bytes = segment.bytes;
    if (absl::Status status = OnDevice("cuMemGetAddressRange",
                                       [&] {
                                         const auto range = GetDriver().address_range;
                                         if (range == nullptr) return cudaSuccess;
                                         return static_cast<cudaError_t>(range(&base, &bytes, segment.address));
                                       });
        !status.ok()) {
      return status;
    }
    if (base != segment.address || bytes != segment.bytes) {
      return absl::InternalError(absl::StrCat("the driver has put a segment of ", segment.bytes, " bytes, at offset ",
                                              segment.address - base, ", into an allocation of ", bytes,
                                              ": a handle would show other processes all of it"));
    }
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
    return OnDevice("cudaIpcCloseMemHandle", [&] { return cudaIpcCloseMemHandle(address); });
  }

  absl::Status WaitForAllStreams() override {
    return OnDevice("cudaDeviceSynchronize", [] { return cudaDeviceSynchronize(); });
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

  absl::StatusOr<std::unique_ptr<Event>> RecordEvent(Stream number) override {
    // By this name each thread has a stream of its own, and this thread is not always the one that meant its own. The
    // default stream waits for all of these.
    const cudaStream_t stream = AsStream(number) == cudaStreamPerThread ? cudaStreamLegacy : AsStream(number);
    bool exists = true;
    const auto unless_lost = [&exists](cudaError_t error) {
      if (!IsNoStream(error)) return error;
      (void)cudaGetLastError();
      exists = false;
      return cudaSuccess;
    };
    // In a stream that is captured the event would become part of the graph, and never complete. Whoever waits for
    // the stream tries again later. The default stream is as good as captured while a stream is that waits for it.
    const auto check_capture = [&]() -> absl::Status {
      cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
      if (absl::Status status =
              OnDevice("cudaStreamIsCapturing", [&] { return unless_lost(cudaStreamIsCapturing(stream, &capture)); });
          !status.ok()) {
        return status;
      }
      if (capture == cudaStreamCaptureStatusNone) return absl::OkStatus();
      return CudaStatus("cudaEventRecord", cudaErrorStreamCaptureUnsupported);
    };
    if (absl::Status status = check_capture(); !status.ok()) return status;
    if (!exists) return std::make_unique<LostStreamEvent>(&lost_streams_);
    cudaEvent_t event = nullptr;
    if (absl::Status status = OnDevice("cudaEventCreateWithFlags",
                                       [&] { return cudaEventCreateWithFlags(&event, cudaEventDisableTiming); });
        !status.ok()) {
      return status;
    }
    auto owner = std::make_unique<CudaEvent>(properties_.ordinal, event);
    if (absl::Status status = OnDevice("cudaEventRecord", [&] { return unless_lost(cudaEventRecord(event, stream)); });
        !status.ok()) {
      return status;
    }
    // A capture that has begun meanwhile may have got the event, and asking for it would make that invalid.
    if (absl::Status status = check_capture(); !status.ok()) return status;
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

absl::Status CheckComputeMode(int ordinal) {
  int mode = cudaComputeModeDefault;
  if (absl::Status status =
          CudaStatus("cudaDeviceGetAttribute", cudaDeviceGetAttribute(&mode, cudaDevAttrComputeMode, ordinal));
      !status.ok()) {
    return status;
  }
  if (mode == cudaComputeModeDefault) return absl::OkStatus();
  // By its UUID: nvidia-smi's numbers may be others.
  cudaDeviceProp cuda = {};
  if (absl::Status status = CudaStatus("cudaGetDeviceProperties", cudaGetDeviceProperties(&cuda, ordinal));
      !status.ok()) {
    return status;
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "GPU ", ordinal, " is in the compute mode ",
      mode == cudaComputeModeProhibited ? "PROHIBITED, which admits no process"
                                        : "EXCLUSIVE_PROCESS, which admits one process only: the daemon, and no client",
      "; nvidia-smi -i ", FormatUuid(cuda.uuid), " -c DEFAULT, as root, changes it, also where MPS is used"));
}

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
