// SPDX-License-Identifier: Apache-2.0
//
// FakeDevice: a Device without memory, for tests of the layers above devices. The device counts the segments that
// callers get, fails on request, and holds callers at a gate.
#ifndef VRAMBROKER_TESTS_SUPPORT_FAKE_DEVICE_H_
#define VRAMBROKER_TESTS_SUPPORT_FAKE_DEVICE_H_

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "allocator/base/mutex.h"
#include "allocator/device/device.h"

namespace vrambroker {

// A gate holds arriving threads until the test opens the gate.
class Gate {
 public:
  // Pass() is for the code under test.
  void Pass() {
    MutexLock lock(mu_);
    const int place = ++arrived_;
    changed_.NotifyAll();
    while (!open_ && place > let_through_) changed_.Wait(mu_);
  }

  // Returns when `count` threads have come to the gate since its creation.
  void AwaitArrivals(int count) {
    MutexLock lock(mu_);
    while (arrived_ < count) changed_.Wait(mu_);
  }

  // Lets the first `count` arrivals since the gate's creation through, and holds later arrivals.
  void LetThrough(int count) {
    MutexLock lock(mu_);
    let_through_ = count;
    changed_.NotifyAll();
  }

  void Open() {
    MutexLock lock(mu_);
    open_ = true;
    changed_.NotifyAll();
  }

 private:
  Mutex mu_;
  CondVar changed_;
  int arrived_ ABSL_GUARDED_BY(mu_) = 0;
  int let_through_ ABSL_GUARDED_BY(mu_) = 0;
  bool open_ ABSL_GUARDED_BY(mu_) = false;
};

// Kinds of devices that a FakeDevice plays, by their properties.
enum class DeviceKind { kHost, kCuda };

inline DeviceProperties PropertiesOf(DeviceKind kind, uint64_t total_bytes) {
  const bool is_cuda = kind == DeviceKind::kCuda;
  return {.kind = is_cuda ? "cuda" : "host",
          .uuid = "FAKE-0",
          .name = "fake",
          .total_bytes = total_bytes,
          .keeps_freed_bytes = is_cuda,
          .needs_one_user = is_cuda,
          .has_other_programs = is_cuda,
          .has_contexts = is_cuda,
          .tells_holders = !is_cuda,
          .handles = is_cuda ? HandleKind::kCudaIpc : HandleKind::kDescriptor};
}

class FakeDevice : public SegmentOwner {
 public:
  enum class Call { kAllocate, kFree, kFreed, kExport, kZero };  // kFreed: a free that is done, before the caller knows

  // Control is the test's end of the device, and outlives the device.
  class Control {
   public:
    uint64_t live_bytes() const { return Read(&Control::live_bytes_); }
    uint64_t peak_bytes() const { return Read(&Control::peak_bytes_); }
    int allocations() const { return Read(&Control::allocations_); }
    int frees() const { return Read(&Control::frees_); }
    uint64_t zeroed_bytes() const { return Read(&Control::zeroed_bytes_); }
    int faults_fired() const { return Read(&Control::faults_fired_); }
    // Describes frees of segments that are not live, and other misuse. The text must be empty at the end of every test.
    std::string misuse() const { return Read(&Control::misuse_); }

    // Makes `count` calls of this kind fail with `status`, from call number `nth` on. The next call has number 1.
    void Fail(Call call, int nth, int count, absl::Status status) {
      MutexLock lock(mu_);
      fault_ = {.call = call, .skip = nth - 1, .count = count, .status = std::move(status)};
      faults_fired_ = 0;
    }

    // Makes every later call of this kind pass the gate first.
    Gate& Hold(Call call) {
      MutexLock lock(mu_);
      gates_[call] = std::make_unique<Gate>();
      return *gates_[call];
    }

    // Returns when the device has refused `count` allocations for lack of room.
    void AwaitRefusals(int count) {
      MutexLock lock(mu_);
      while (refusals_ < count) changed_.Wait(mu_);
    }

    // Returns when `count` segments have been freed since the device's creation.
    void AwaitFrees(int count) {
      MutexLock lock(mu_);
      while (frees_ < count) changed_.Wait(mu_);
    }

    // Plays another program that takes device memory, or gives memory back.
    void set_foreign_bytes(uint64_t bytes) {
      MutexLock lock(mu_);
      foreign_bytes_ = bytes;
    }

    // Makes FreeBytes() return this error from now on; an OK status ends the failures.
    void set_free_bytes_error(absl::Status status) {
      MutexLock lock(mu_);
      free_bytes_error_ = std::move(status);
    }

    // Sets the answer of FindProcesses() from now on. FindProcesses() calls `meanwhile` before each answer.
    void set_processes(
        absl::StatusOr<std::vector<GpuProcess>> processes, std::function<void()> meanwhile = [] {}) {
      MutexLock lock(mu_);
      processes_ = std::move(processes);
      meanwhile_ = std::move(meanwhile);
    }

    // Sets the readings of ReadSensors() from now on.
    void set_sensors(const GpuSensors& sensors) {
      MutexLock lock(mu_);
      sensors_ = sensors;
    }

    // Sets the answer of FindHolders() from now on.
    void set_holders(absl::StatusOr<SegmentHolders> holders) {
      MutexLock lock(mu_);
      holders_ = std::move(holders);
    }

    // Sets the segments that an earlier owner of the device has left with other processes.
    void Leave(std::vector<LeftSegment> segments, size_t unread_processes = 0) {
      MutexLock lock(mu_);
      left_.segments = std::move(segments);
      left_.unread_processes = unread_processes;
    }

   private:
    friend class FakeDevice;
    struct Fault {
      Call call = Call::kAllocate;
      int skip = 0;
      int count = 0;
      absl::Status status;
    };

    template <typename T>
    T Read(T Control::*field) const {
      MutexLock lock(mu_);
      return this->*field;
    }

    absl::Status Enter(Call call) {
      Gate* gate = nullptr;
      {
        MutexLock lock(mu_);
        gate = gates_[call].get();
      }
      if (gate != nullptr) gate->Pass();
      MutexLock lock(mu_);
      if (fault_.call != call || fault_.count == 0) return absl::OkStatus();
      if (fault_.skip > 0) {
        --fault_.skip;
        return absl::OkStatus();
      }
      --fault_.count;
      ++faults_fired_;
      return fault_.status;
    }

    mutable Mutex mu_;
    CondVar changed_;
    Fault fault_;
    std::map<Call, std::unique_ptr<Gate>> gates_;
    std::map<uint64_t, uint64_t> live_;  // address to bytes
    uint64_t next_address_ = 1;
    uint64_t live_bytes_ = 0;
    uint64_t peak_bytes_ = 0;
    uint64_t foreign_bytes_ = 0;
    int allocations_ = 0;
    int frees_ = 0;
    uint64_t zeroed_bytes_ = 0;
    int refusals_ = 0;
    int faults_fired_ = 0;
    std::string misuse_;
    absl::Status free_bytes_error_;
    LeftSegments left_;
    absl::StatusOr<SegmentHolders> holders_ = absl::UnimplementedError("fake device: the driver does not tell");
    absl::StatusOr<std::vector<GpuProcess>> processes_ = absl::UnimplementedError("fake device: nobody tells");
    std::function<void()> meanwhile_ = [] {};
    GpuSensors sensors_;
  };

  explicit FakeDevice(uint64_t total_bytes, DeviceKind kind = DeviceKind::kHost)
      : properties_(PropertiesOf(kind, total_bytes)) {}

  std::shared_ptr<Control> control() const { return control_; }

  const DeviceProperties& properties() const override { return properties_; }

  absl::StatusOr<uint64_t> FreeBytes() override {
    MutexLock lock(control_->mu_);
    if (!control_->free_bytes_error_.ok()) return control_->free_bytes_error_;
    return properties_.total_bytes - control_->live_bytes_ - control_->foreign_bytes_;
  }

  absl::StatusOr<DeviceSegment> AllocateSegment(uint64_t bytes) override {
    if (absl::Status status = control_->Enter(Call::kAllocate); !status.ok()) return status;
    Control& c = *control_;
    MutexLock lock(c.mu_);
    if (bytes > properties_.total_bytes - c.live_bytes_ - c.foreign_bytes_) {
      ++c.refusals_;
      c.changed_.NotifyAll();
      return absl::ResourceExhaustedError("fake device: full");
    }
    const DeviceSegment segment{.bytes = bytes, .address = c.next_address_++};
    c.live_[segment.address] = bytes;
    c.live_bytes_ += bytes;
    c.peak_bytes_ = std::max(c.peak_bytes_, c.live_bytes_);
    ++c.allocations_;
    return segment;
  }

  absl::Status FreeSegment(const DeviceSegment& segment) override {
    if (absl::Status status = control_->Enter(Call::kFree); !status.ok()) return status;
    {
      Control& c = *control_;
      MutexLock lock(c.mu_);
      const auto it = c.live_.find(segment.address);
      if (it == c.live_.end() || it->second != segment.bytes) {
        c.misuse_ += "a segment was freed that is not live; ";
        return absl::InternalError("fake device: not a live segment");
      }
      c.live_bytes_ -= segment.bytes;
      c.live_.erase(it);
      ++c.frees_;
      c.changed_.NotifyAll();
    }
    return control_->Enter(Call::kFreed);
  }

  absl::StatusOr<SegmentHandle> ExportSegment(const DeviceSegment& segment) override {
    if (absl::Status status = control_->Enter(Call::kExport); !status.ok()) return status;
    {
      MutexLock lock(control_->mu_);
      if (!control_->live_.contains(segment.address)) control_->misuse_ += "a segment was exported that is not live; ";
    }
    if (properties_.handles == HandleKind::kCudaIpc) {
      CudaIpcHandle handle = {};
      std::memcpy(handle.data(), &segment.address, sizeof(segment.address));
      return SegmentHandle(handle);
    }
    UniqueFd fd(memfd_create("fake-segment", MFD_CLOEXEC));
    if (!fd.valid()) return absl::ErrnoToStatus(errno, "memfd_create");
    return SegmentHandle(std::move(fd));
  }

  absl::Status Zero(const DeviceSegment& segment, uint64_t offset, uint64_t bytes) override {
    if (absl::Status status = control_->Enter(Call::kZero); !status.ok()) return status;
    MutexLock lock(control_->mu_);
    control_->zeroed_bytes_ += bytes;
    return CheckRange(segment, offset, bytes);
  }
  absl::StatusOr<std::vector<GpuProcess>> FindProcesses() override {
    control_->Read (&Control::meanwhile_)();
    return control_->Read(&Control::processes_);
  }
  GpuSensors ReadSensors() override { return control_->Read(&Control::sensors_); }
  absl::StatusOr<SegmentHolders> FindHolders(absl::Span<const DeviceSegment>) override {
    return control_->Read(&Control::holders_);
  }
  absl::StatusOr<LeftSegments> FindLeftSegments() override {
    if (!properties_.tells_holders) return absl::UnimplementedError("fake device: the driver does not tell");
    MutexLock lock(control_->mu_);
    return control_->left_;
  }

 private:
  const DeviceProperties properties_;
  const std::shared_ptr<Control> control_ = std::make_shared<Control>();
};

}  // namespace vrambroker

#endif  // VRAMBROKER_TESTS_SUPPORT_FAKE_DEVICE_H_
