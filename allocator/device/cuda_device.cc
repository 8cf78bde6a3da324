// SPDX-License-Identifier: Apache-2.0
//
// The only file of the project to call CUDA, with cuda_driver.cc and cuda_status.cc.
#include "allocator/device/cuda_device.h"

#include <cuda.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "allocator/base/mutex.h"
#include "allocator/device/cuda_driver.h"
#include "allocator/device/cuda_status.h"
#include "allocator/device/gpu_processes.h"
#include "allocator/device/gpu_sensors.h"

namespace vrambroker {
namespace {

static_assert(sizeof(CUipcMemHandle) == sizeof(CudaIpcHandle));

// Whether the process already uses a device: whether it has made a context, of some hundred MiB, there. True if
// unknown.
bool HasContext(CUdevice device) {
  unsigned int flags = 0;
  int active = 0;
  return Driver().cuDevicePrimaryCtxGetState(device, &flags, &active) != CUDA_SUCCESS || active != 0;
}

// Returns the context of a device shared by all CUDA runtimes of the process; makes a context if necessary. Never
// released: the application may use the context by then, without knowing that it is ours.
absl::StatusOr<CUcontext> PrimaryContext(CUdevice device) {
  static std::array<std::atomic<CUcontext>, 64> contexts = {};
  const auto index = static_cast<size_t>(device);
  const CUcontext known = index < contexts.size() ? contexts[index].load(std::memory_order_acquire) : nullptr;
  if (known != nullptr && HasContext(device)) return known;  // not reset by the application meanwhile
  CUcontext context = nullptr;
  if (absl::Status status = CudaStatus("cuDevicePrimaryCtxRetain", Driver().cuDevicePrimaryCtxRetain(&context, device));
      !status.ok()) {
    return status;
  }
  if (index < contexts.size()) contexts[index].store(context, std::memory_order_release);
  return context;
}

// CUDA's current context belongs to the thread, and the thread to the application. With no current context, or with
// another device's, the thread's stack of contexts gets a context of our device on top during our calls. The CUDA
// runtime follows the stack: a thread that never chose a device has not chosen a device afterwards, either.
class CurrentDevice {
 public:
  // `anew`: pushes a context even if the current context is of the device.
  explicit CurrentDevice(CUdevice device, bool anew = false) {
    CUdevice before = 0;
    if (!anew && Driver().cuCtxGetDevice(&before) == CUDA_SUCCESS && before == device) return;
    const absl::StatusOr<CUcontext> context = PrimaryContext(device);
    status_ = context.ok() ? CudaStatus("cuCtxPushCurrent", Driver().cuCtxPushCurrent_v2(*context)) : context.status();
    is_pushed_ = status_.ok();
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  ~CurrentDevice() {
    CUcontext context = nullptr;
    if (is_pushed_) (void)Driver().cuCtxPopCurrent_v2(&context);
  }

  const absl::Status& status() const { return status_; }

 private:
  bool is_pushed_ = false;
  absl::Status status_;
};

// While a thread captures a CUDA graph, calls that could disturb the capture are refused, and invalidate the capture,
// on all threads that have not declared their calls unrelated. Ours are unrelated: no work of ours goes to a captured
// stream. Waiting for the whole device still invalidates captures there.
class OutsideOfCapture {
 public:
  OutsideOfCapture() { exchanged_ = Driver().cuThreadExchangeStreamCaptureMode(&mode_) == CUDA_SUCCESS; }
  OutsideOfCapture(const OutsideOfCapture&) = delete;
  OutsideOfCapture& operator=(const OutsideOfCapture&) = delete;
  ~OutsideOfCapture() {
    if (exchanged_) (void)Driver().cuThreadExchangeStreamCaptureMode(&mode_);
  }

 private:
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
  bool exchanged_ = false;
};

// Stream handles were pointers before they were numbers.
CUstream AsStream(Stream stream) {
  return reinterpret_cast<CUstream>(stream);  // NOLINT(performance-no-int-to-ptr)
}
// The driver takes addresses as numbers.
CUdeviceptr AsAddress(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer);
}
void* AsPointer(CUdeviceptr address) {
  return reinterpret_cast<void*>(static_cast<uintptr_t>(address));  // NOLINT(performance-no-int-to-ptr)
}

class CudaEvent : public Event {
 public:
  CudaEvent(CUdevice device, CUevent event) : device_(device), event_(event) {}
  ~CudaEvent() override {
    const CurrentDevice current(device_);
    if (!current.status().ok()) return;
    const OutsideOfCapture outside;
    (void)Driver().cuEventDestroy_v2(event_);
  }

  absl::StatusOr<bool> Query() override {
    const CurrentDevice current(device_);
    if (!current.status().ok()) return current.status();
    const OutsideOfCapture outside;
    const CUresult error = Driver().cuEventQuery(event_);
    if (error == CUDA_ERROR_NOT_READY) return false;
    if (error != CUDA_SUCCESS) return CudaStatus("cuEventQuery", error);
    return true;
  }

  absl::Status Wait() override {
    const CurrentDevice current(device_);
    if (!current.status().ok()) return current.status();
    const OutsideOfCapture outside;
    return CudaStatus("cuEventSynchronize", Driver().cuEventSynchronize(event_));
  }

 private:
  const CUdevice device_;
  const CUevent event_;
};

// Whether a call on a stream of the application reports the stream destroyed, or another device's. NVIDIA leaves the
// result undefined. The second error is about the stream's context, not about the device's.
bool IsNoStream(CUresult error) {
  return error == CUDA_ERROR_INVALID_HANDLE || error == CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

// Waits for everything queued by the process on its devices. Invalidates captures there.
absl::Status WaitForAllDevices() {
  int count = 0;
  if (absl::Status status = CudaStatus("cuDeviceGetCount", Driver().cuDeviceGetCount(&count)); !status.ok()) {
    return status;
  }
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    CUdevice device = 0;
    if (absl::Status status = CudaStatus("cuDeviceGet", Driver().cuDeviceGet(&device, ordinal)); !status.ok()) {
      return status;
    }
    if (!HasContext(device)) continue;
    const CurrentDevice current(device);
    if (!current.status().ok()) return current.status();
    const OutsideOfCapture outside;
    if (absl::Status status = CudaStatus("cuCtxSynchronize", Driver().cuCtxSynchronize()); !status.ok()) return status;
  }
  return absl::OkStatus();
}

// Waits, once for all, for streams that can no longer be asked: work queued on a stream goes on after the stream is
// destroyed. Thread-safe.
class LostStreams {
 public:
  // Numbers a stream just found to be lost.
  uint64_t Add() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(mu_);
    return ++found_;
  }
  // Waits until the work of stream `number`, and of all lost before, is done.
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
  CudaDevice(CUdevice device, DeviceProperties properties) : device_(device), properties_(std::move(properties)) {}
  ~CudaDevice() override {
    const CUstream stream = stream_;
    if (stream != nullptr) (void)OnDevice("cuStreamDestroy", [&] { return Driver().cuStreamDestroy_v2(stream); });
  }

  const DeviceProperties& properties() const override { return properties_; }

  absl::StatusOr<uint64_t> FreeBytes() override {
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    if (absl::Status status =
            OnDevice("cuMemGetInfo", [&] { return Driver().cuMemGetInfo_v2(&free_bytes, &total_bytes); });
        !status.ok()) {
      return status;
    }
    return free_bytes;
  }

  absl::StatusOr<std::vector<GpuProcess>> FindProcesses() override {
    absl::StatusOr<std::vector<GpuProcess>> processes = FindGpuProcesses(properties_.uuid);
    if (!processes.ok()) return processes;
    // The calling process has a context.
    const bool knows_this = std::any_of(processes->begin(), processes->end(),
                                        [](const GpuProcess& process) { return process.pid == getpid(); });
    if (!knows_this) {
      return absl::UnimplementedError(
          absl::StrCat("NVML does not name this process (", getpid(),
                       ") among those on the GPU: it sees the machine's process ids; a container needs --pid=host"));
    }
    return processes;
  }

  GpuSensors ReadSensors() override { return ReadGpuSensors(properties_.uuid); }

  absl::Status Health() override {
    {
      MutexLock lock(mu_);
      if (!health_.ok()) return health_;
    }
    // Any call tells that the context is gone; cuStreamQuery() waits for nothing.
    const absl::StatusOr<CUstream> stream = OwnStream();
    if (!stream.ok()) return stream.status();
    return OnDevice("cuStreamQuery", [&] {
      const CUresult error = Driver().cuStreamQuery(*stream);
      return error == CUDA_ERROR_NOT_READY ? CUDA_SUCCESS : error;
    });
  }

  absl::StatusOr<DeviceSegment> AllocateSegment(uint64_t bytes) override {
    // For multiples of 2 MiB the driver gives each allocation memory of its own. A smaller segment could share a driver
    // block with another segment, and an IPC handle opens the whole block. The driver clears memory of other processes,
    // not memory freed by the calling process.
    if (absl::Status status = CheckSegmentBytes(bytes); !status.ok()) return status;
    CUdeviceptr address = 0;
    if (absl::Status status = OnDevice("cuMemAlloc", [&] { return Driver().cuMemAlloc_v2(&address, bytes); });
        !status.ok()) {
      return status;
    }
    return DeviceSegment{.bytes = bytes, .address = address};
  }

  absl::Status FreeSegment(const DeviceSegment& segment) override {
    return OnDevice("cuMemFree", [&] { return Driver().cuMemFree_v2(segment.address); });
  }

  absl::StatusOr<SegmentHandle> ExportSegment(const DeviceSegment& segment) override {
    // A handle opens the driver's whole allocation.
    CUdeviceptr base = 0;
    size_t bytes = 0;
    if (absl::Status status = OnDevice(
            "cuMemGetAddressRange", [&] { return Driver().cuMemGetAddressRange_v2(&base, &bytes, segment.address); });
        !status.ok()) {
      return status;
    }
    if (base != segment.address || bytes != segment.bytes) {
      return absl::InternalError(absl::StrCat("the driver has put a segment of ", segment.bytes, " bytes, at offset ",
                                              segment.address - base, ", into an allocation of ", bytes,
                                              ": a handle would show other processes all of it"));
    }
    CUipcMemHandle handle;
    if (absl::Status status =
            OnDevice("cuIpcGetMemHandle", [&] { return Driver().cuIpcGetMemHandle(&handle, segment.address); });
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
    CUipcMemHandle copy;
    std::memcpy(&copy, ipc->data(), ipc->size());
    CUdeviceptr address = 0;
    if (absl::Status status = OnDevice(
            "cuIpcOpenMemHandle",
            [&] { return Driver().cuIpcOpenMemHandle_v2(&address, copy, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS); });
        !status.ok()) {
      return status;
    }
    return AsPointer(address);
  }

  absl::Status CloseHandle(void* address, uint64_t /*bytes*/) override {
    return OnDevice("cuIpcCloseMemHandle", [&] { return Driver().cuIpcCloseMemHandle(AsAddress(address)); });
  }

  absl::Status WaitForAllStreams() override {
    return OnDevice("cuCtxSynchronize", [] { return Driver().cuCtxSynchronize(); });
  }

  absl::Status CopyIn(void* segment_address, const void* from, uint64_t bytes) override {
    return OnDevice("cuMemcpyHtoD", [&] { return Driver().cuMemcpyHtoD_v2(AsAddress(segment_address), from, bytes); });
  }

  absl::Status CopyOut(void* to, const void* segment_address, uint64_t bytes) override {
    return OnDevice("cuMemcpyDtoH", [&] { return Driver().cuMemcpyDtoH_v2(to, AsAddress(segment_address), bytes); });
  }

  absl::Status Zero(const DeviceSegment& segment, uint64_t offset, uint64_t bytes) override {
    if (absl::Status status = CheckRange(segment, offset, bytes); !status.ok()) return status;
    const absl::StatusOr<CUstream> stream = OwnStream();
    if (!stream.ok()) return stream.status();
    if (absl::Status status = OnDevice(
            "cuMemsetD8Async", [&] { return Driver().cuMemsetD8Async(segment.address + offset, 0, bytes, *stream); });
        !status.ok()) {
      return status;
    }
    return OnDevice("cuStreamSynchronize", [&] { return Driver().cuStreamSynchronize(*stream); });
  }

  absl::StatusOr<std::unique_ptr<Event>> RecordEvent(Stream number) override {
    // CU_STREAM_PER_THREAD names a different stream in each thread, and the calling thread is not always the thread
    // that meant its own. The default stream waits for all per-thread streams.
    const CUstream stream = AsStream(number) == CU_STREAM_PER_THREAD ? CU_STREAM_LEGACY : AsStream(number);
    bool exists = true;
    const auto unless_lost = [&exists](CUresult error) {
      if (!IsNoStream(error)) return error;
      exists = false;
      return CUDA_SUCCESS;
    };
    // In a captured stream the event would become part of the graph, and never complete. A thread waiting for the
    // stream tries again later. The default stream counts as captured during the capture of a stream that waits for it.
    const auto check_capture = [&]() -> absl::Status {
      CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
      if (absl::Status status = OnDevice("cuStreamIsCapturing",
                                         [&] { return unless_lost(Driver().cuStreamIsCapturing(stream, &capture)); });
          !status.ok()) {
        return status;
      }
      if (capture == CU_STREAM_CAPTURE_STATUS_NONE) return absl::OkStatus();
      return CudaStatus("cuEventRecord", CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    };
    if (absl::Status status = check_capture(); !status.ok()) return status;
    if (!exists) return std::make_unique<LostStreamEvent>(&lost_streams_);
    CUevent event = nullptr;
    if (absl::Status status =
            OnDevice("cuEventCreate", [&] { return Driver().cuEventCreate(&event, CU_EVENT_DISABLE_TIMING); });
        !status.ok()) {
      return status;
    }
    auto owner = std::make_unique<CudaEvent>(device_, event);
    if (absl::Status status =
            OnDevice("cuEventRecord", [&] { return unless_lost(Driver().cuEventRecord(event, stream)); });
        !status.ok()) {
      return status;
    }
    // A capture begun meanwhile may have got the event, and querying the event would invalidate the capture.
    if (absl::Status status = check_capture(); !status.ok()) return status;
    if (!exists) return std::make_unique<LostStreamEvent>(&lost_streams_);
    return owner;
  }

 private:
  // Makes a call with the device as the thread's, and remembers errors that end all use of the device.
  template <typename Call>
  absl::Status OnDevice(const char* name, const Call& call) {
    CUresult error = CUDA_SUCCESS;
    for (const bool anew : {false, true}) {
      const CurrentDevice current(device_, anew);
      if (!current.status().ok()) return current.status();
      const OutsideOfCapture outside;
      error = call();
      // Else the application has reset the device, and the thread still has the destroyed context.
      if (error != CUDA_ERROR_CONTEXT_IS_DESTROYED || HasContext(device_)) break;
    }
    absl::Status status = CudaStatus(name, error);
    if (IsSticky(error)) {
      MutexLock lock(mu_);
      if (health_.ok()) health_ = status;
    }
    return status;
  }

  // Stream for work of ours: neither waits for the default stream nor holds it up. Made at first use, in a client
  // never.
  absl::StatusOr<CUstream> OwnStream() {
    MutexLock lock(stream_mu_);
    if (stream_ == nullptr) {
      if (absl::Status status =
              OnDevice("cuStreamCreate", [&] { return Driver().cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING); });
          !status.ok()) {
        return status;
      }
    }
    return stream_;
  }

  const CUdevice device_;
  const DeviceProperties properties_;
  LostStreams lost_streams_;

  Mutex mu_;
  absl::Status health_ ABSL_GUARDED_BY(mu_);
  Mutex stream_mu_ ABSL_ACQUIRED_AFTER(lock_level::kDevice)
      ABSL_ACQUIRED_BEFORE(lock_level::kLeaf){lock_level::kDevice};
  CUstream stream_ ABSL_GUARDED_BY(stream_mu_) = nullptr;
};

// Formats as nvidia-smi does.
std::string FormatUuid(const CUuuid& uuid) {
  std::string text = "GPU-";
  for (size_t i = 0; i < sizeof(uuid.bytes); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    absl::StrAppendFormat(&text, "%02x", static_cast<unsigned char>(uuid.bytes[i]));
  }
  return text;
}

absl::StatusOr<std::unique_ptr<Device>> MakeCudaDevice(int ordinal) {
  CUdevice device = 0;
  if (absl::Status status = CudaStatus("cuDeviceGet", Driver().cuDeviceGet(&device, ordinal)); !status.ok()) {
    return status;
  }
  CUuuid uuid = {};
  if (absl::Status status = CudaStatus("cuDeviceGetUuid", Driver().cuDeviceGetUuid_v2(&uuid, device)); !status.ok()) {
    return status;
  }
  std::array<char, 256> name = {};
  if (absl::Status status =
          CudaStatus("cuDeviceGetName", Driver().cuDeviceGetName(name.data(), static_cast<int>(name.size()), device));
      !status.ok()) {
    return status;
  }
  size_t total_bytes = 0;
  if (absl::Status status = CudaStatus("cuDeviceTotalMem", Driver().cuDeviceTotalMem_v2(&total_bytes, device));
      !status.ok()) {
    return status;
  }
  return std::make_unique<CudaDevice>(device, DeviceProperties{.kind = "cuda",
                                                               .ordinal = ordinal,
                                                               .uuid = FormatUuid(uuid),
                                                               .name = name.data(),
                                                               .total_bytes = total_bytes,
                                                               .keeps_freed_bytes = true,
                                                               .needs_one_pid_namespace = true,
                                                               .needs_one_user = true,
                                                               .has_other_programs = true,
                                                               .has_contexts = true,
                                                               .handles = HandleKind::kCudaIpc});
}

}  // namespace

bool HasCudaDriver() {
  return FindCudaDriver().ok();
}

absl::Status CheckComputeMode(int ordinal) {
  CUdevice device = 0;
  if (absl::Status status = CudaStatus("cuDeviceGet", Driver().cuDeviceGet(&device, ordinal)); !status.ok()) {
    return status;
  }
  int mode = CU_COMPUTEMODE_DEFAULT;
  if (absl::Status status = CudaStatus("cuDeviceGetAttribute",
                                       Driver().cuDeviceGetAttribute(&mode, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, device));
      !status.ok()) {
    return status;
  }
  if (mode == CU_COMPUTEMODE_DEFAULT) return absl::OkStatus();
  // Names the GPU by UUID: nvidia-smi's numbers may differ.
  CUuuid uuid = {};
  if (absl::Status status = CudaStatus("cuDeviceGetUuid", Driver().cuDeviceGetUuid_v2(&uuid, device)); !status.ok()) {
    return status;
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "GPU ", ordinal, " is in the compute mode ",
      mode == CU_COMPUTEMODE_PROHIBITED ? "PROHIBITED, which admits no process"
                                        : "EXCLUSIVE_PROCESS, which admits one process only: the daemon, and no client",
      "; nvidia-smi -i ", FormatUuid(uuid), " -c DEFAULT, as root, changes it, also where MPS is used"));
}

std::string CudaVersions() {
  int version = 0;
  (void)Driver().cuDriverGetVersion(&version);
  return absl::StrCat("driver for CUDA ", FormatCudaVersion(version));
}

absl::StatusOr<std::vector<std::unique_ptr<Device>>> MakeCudaDevices() {
  absl::Status status = LoadCudaDriver();
  int count = 0;
  if (status.ok()) status = CudaStatus("cuDeviceGetCount", Driver().cuDeviceGetCount(&count));
  if (!status.ok()) return absl::UnavailableError(absl::StrCat("no usable GPU: ", status.message()));
  if (count == 0) return absl::UnavailableError("no usable GPU: CUDA sees no device");
  std::vector<std::unique_ptr<Device>> devices;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    absl::StatusOr<std::unique_ptr<Device>> device = MakeCudaDevice(ordinal);
    if (!device.ok()) return device.status();
    devices.push_back(*std::move(device));
  }
  return devices;
}

}  // namespace vrambroker
