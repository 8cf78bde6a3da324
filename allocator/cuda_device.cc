// SPDX-License-Identifier: Apache-2.0
//
// The only file of the project that calls CUDA. The runtime is linked statically: it looks for the driver when it is
// first used, so that a binary with this file runs, and says so, on a machine without one.
#include "allocator/cuda_device.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace vrambroker {
namespace {

static_assert(sizeof(cudaIpcMemHandle_t) == sizeof(CudaIpcHandle));

absl::Status CudaStatus(const char* call, cudaError_t error) {
  if (error == cudaSuccess) return absl::OkStatus();
  (void)cudaGetLastError();  // a reported error must not surface again in a later call
  const std::string text = absl::StrCat(call, " failed: ", cudaGetErrorName(error), " (", static_cast<int>(error),
                                        "), ", cudaGetErrorString(error));
  switch (error) {
    case cudaErrorMemoryAllocation:
      return absl::ResourceExhaustedError(text);
    case cudaErrorInvalidValue:
    case cudaErrorInvalidResourceHandle:
      return absl::InvalidArgumentError(text);
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
      return absl::UnavailableError(text);
    default:
      return absl::InternalError(text);
  }
}

cudaStream_t AsStream(Stream stream) {
  return reinterpret_cast<cudaStream_t>(stream);
}

class CudaEvent : public Event {
 public:
  CudaEvent(int device, cudaEvent_t event) : device_(device), event_(event) {}
  ~CudaEvent() override {
    (void)cudaSetDevice(device_);
    (void)cudaEventDestroy(event_);
  }

  absl::StatusOr<bool> Query() override {
    const cudaError_t error = cudaEventQuery(event_);
    if (error == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return false;
    }
    if (error != cudaSuccess) return CudaStatus("cudaEventQuery", error);
    return true;
  }

  absl::Status Wait() override { return CudaStatus("cudaEventSynchronize", cudaEventSynchronize(event_)); }

 private:
  const int device_;
  const cudaEvent_t event_;
};

class CudaDevice : public Device {
 public:
  explicit CudaDevice(DeviceProperties properties) : properties_(std::move(properties)) {}

  const DeviceProperties& properties() const override { return properties_; }

  absl::StatusOr<uint64_t> FreeBytes() override {
    if (absl::Status status = Select(); !status.ok()) return status;
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    if (absl::Status status = CudaStatus("cudaMemGetInfo", cudaMemGetInfo(&free_bytes, &total_bytes)); !status.ok()) {
      return status;
    }
    return free_bytes;
  }

  absl::StatusOr<DeviceSegment> AllocateSegment(uint64_t bytes) override {
    // In multiples of 2 MiB the driver gives each allocation memory of its own; a smaller one could share a driver
    // block with another segment, and an IPC handle opens the whole block.
    if (absl::Status status = CheckSegmentBytes(bytes); !status.ok()) return status;
    if (absl::Status status = Select(); !status.ok()) return status;
    void* address = nullptr;
    if (absl::Status status = CudaStatus("cudaMalloc", cudaMalloc(&address, bytes)); !status.ok()) return status;
    return DeviceSegment{.bytes = bytes, .address = reinterpret_cast<uint64_t>(address)};
  }

  absl::Status FreeSegment(const DeviceSegment& segment) override {
    if (absl::Status status = Select(); !status.ok()) return status;
    return CudaStatus("cudaFree", cudaFree(reinterpret_cast<void*>(segment.address)));
  }

  absl::StatusOr<SegmentHandle> ExportSegment(const DeviceSegment& segment) override {
    if (absl::Status status = Select(); !status.ok()) return status;
    cudaIpcMemHandle_t handle;
    if (absl::Status status =
            CudaStatus("cudaIpcGetMemHandle", cudaIpcGetMemHandle(&handle, reinterpret_cast<void*>(segment.address)));
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
    if (absl::Status status = Select(); !status.ok()) return status;
    cudaIpcMemHandle_t copy;
    std::memcpy(&copy, ipc->data(), ipc->size());
    void* address = nullptr;
    if (absl::Status status =
            CudaStatus("cudaIpcOpenMemHandle", cudaIpcOpenMemHandle(&address, copy, cudaIpcMemLazyEnablePeerAccess));
        !status.ok()) {
      return status;
    }
    return address;
  }

  absl::Status CloseHandle(void* address, uint64_t /*bytes*/) override {
    if (absl::Status status = Select(); !status.ok()) return status;
    // Blocks may be freed while their stream still works on them; who gets the memory next knows nothing of that
    // stream.
    const absl::Status done = CudaStatus("cudaDeviceSynchronize", cudaDeviceSynchronize());
    const absl::Status closed = CudaStatus("cudaIpcCloseMemHandle", cudaIpcCloseMemHandle(address));
    return done.ok() ? closed : done;
  }

  absl::Status CopyIn(void* segment_address, const void* from, uint64_t bytes) override {
    if (absl::Status status = Select(); !status.ok()) return status;
    return CudaStatus("cudaMemcpy", cudaMemcpy(segment_address, from, bytes, cudaMemcpyHostToDevice));
  }

  absl::Status CopyOut(void* to, const void* segment_address, uint64_t bytes) override {
    if (absl::Status status = Select(); !status.ok()) return status;
    return CudaStatus("cudaMemcpy", cudaMemcpy(to, segment_address, bytes, cudaMemcpyDeviceToHost));
  }

  absl::Status Zero(const DeviceSegment& segment, uint64_t offset, uint64_t bytes) override {
    if (absl::Status status = CheckRange(segment, offset, bytes); !status.ok()) return status;
    if (absl::Status status = Select(); !status.ok()) return status;
    if (absl::Status status =
            CudaStatus("cudaMemset", cudaMemset(reinterpret_cast<void*>(segment.address + offset), 0, bytes));
        !status.ok()) {
      return status;
    }
    return CudaStatus("cudaStreamSynchronize", cudaStreamSynchronize(nullptr));
  }

  absl::StatusOr<std::unique_ptr<Event>> RecordEvent(Stream stream) override {
    if (absl::Status status = Select(); !status.ok()) return status;
    cudaEvent_t event = nullptr;
    if (absl::Status status =
            CudaStatus("cudaEventCreateWithFlags", cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
        !status.ok()) {
      return status;
    }
    auto owner = std::make_unique<CudaEvent>(properties_.ordinal, event);
    if (absl::Status status = CudaStatus("cudaEventRecord", cudaEventRecord(event, AsStream(stream))); !status.ok()) {
      return status;
    }
    return owner;
  }

 private:
  // CUDA's current device belongs to the thread, and any thread may call.
  absl::Status Select() { return CudaStatus("cudaSetDevice", cudaSetDevice(properties_.ordinal)); }

  const DeviceProperties properties_;
};

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

absl::StatusOr<std::vector<std::unique_ptr<Device>>> MakeCudaDevices() {
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
                                                                    .total_bytes = cuda.totalGlobalMem}));
  }
  return devices;
}

}  // namespace vrambroker
