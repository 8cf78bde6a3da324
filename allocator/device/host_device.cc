// SPDX-License-Identifier: Apache-2.0
#include "allocator/device/host_device.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "allocator/base/descriptor_reserve.h"
#include "allocator/base/mutex.h"
#include "allocator/base/segment_bytes.h"
#include "allocator/device/file_holders.h"

namespace vrambroker {
namespace {

// Name shown by lsof. The daemon's files continue with ":OWNER:ORDINAL:RUN:BYTES".
constexpr char kFileName[] = "vrambroker-segment";

absl::Status SystemError(const char* call) {
  return absl::ErrnoToStatus(errno, absl::StrCat(call, " failed"));
}

// Host work is done when the call returns, so every event is complete from the start.
class CompleteEvent : public Event {
 public:
  absl::StatusOr<bool> Query() override { return true; }
  absl::Status Wait() override { return absl::OkStatus(); }
};

class HostDevice : public Device {
 public:
  HostDevice(int ordinal, uint64_t total_bytes, std::chrono::nanoseconds driver_latency, const std::string& owner,
             std::unique_ptr<SegmentRecord> record)
      : properties_{.kind = "host",
                    .ordinal = ordinal,
                    .uuid = absl::StrCat("HOST-", ordinal),
                    .name = "host memory",
                    .total_bytes = total_bytes,
                    .tells_holders = true},
        driver_latency_(driver_latency),
        owned_prefix_(owner.empty() ? "" : absl::StrCat(kFileName, ":", owner, ":", ordinal, ":")),
        run_(owner.empty() ? "" : RandomName()),
        record_(std::move(record)) {}

  const DeviceProperties& properties() const override { return properties_; }

  absl::StatusOr<uint64_t> FreeBytes() override {
    MutexLock lock(mu_);
    return properties_.total_bytes - used_bytes_;
  }

  absl::StatusOr<DeviceSegment> AllocateSegment(uint64_t bytes) override {
    if (absl::Status status = CheckSegmentBytes(bytes); !status.ok()) return status;
    {
      MutexLock lock(mu_);
      if (bytes > properties_.total_bytes - used_bytes_) {
        return absl::ResourceExhaustedError(absl::StrCat("host device: ", bytes, " bytes asked for, ",
                                                         properties_.total_bytes - used_bytes_, " bytes left"));
      }
      used_bytes_ += bytes;
    }
    SimulateDriver();
    absl::StatusOr<DeviceSegment> segment =
        CreateFile(bytes, owned_prefix_.empty() ? kFileName : absl::StrCat(owned_prefix_, run_, ":", bytes));
    if (!segment.ok()) {
      GiveBack(bytes);
    } else if (record_ != nullptr) {
      record_->Add(InodeOf(*segment), bytes);
    }
    return segment;
  }

  absl::Status FreeSegment(const DeviceSegment& segment) override {
    if (record_ != nullptr && !leaves_segments_) record_->Remove(InodeOf(segment));
    SimulateDriver();
    if (close(segment.fd) != 0) return SystemError("close of a host segment");
    GiveBack(segment.bytes);
    return absl::OkStatus();
  }

  void LeaveSegments() override { leaves_segments_ = true; }

  absl::StatusOr<SegmentHandle> ExportSegment(const DeviceSegment& segment) override {
    UniqueFd copy(fcntl(segment.fd, F_DUPFD_CLOEXEC, 0));
    if (!copy.valid()) return DescriptorError(errno, "fcntl(F_DUPFD_CLOEXEC)");
    if (absl::Status status = CheckNotReserved(copy.get()); !status.ok()) return status;
    return SegmentHandle(std::move(copy));
  }

  absl::StatusOr<void*> OpenHandle(const SegmentHandle& handle, uint64_t bytes) override {
    const auto* fd = std::get_if<UniqueFd>(&handle);
    if (fd == nullptr) return absl::InvalidArgumentError("host device: the handle is not a file descriptor");
    struct stat file = {};
    if (fstat(fd->get(), &file) != 0) return SystemError("fstat");
    // Checks the size first: a mapping beyond the end of the file would raise SIGBUS in the application.
    if (static_cast<uint64_t>(file.st_size) != bytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("host device: the handle has ", file.st_size, " bytes, not ", bytes));
    }
    void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd->get(), 0);
    if (address == MAP_FAILED) return SystemError("mmap");
    return address;
  }

  absl::Status CloseHandle(void* address, uint64_t bytes) override {
    if (munmap(address, bytes) != 0) return SystemError("munmap");
    return absl::OkStatus();
  }

  absl::Status CopyIn(void* segment_address, const void* from, uint64_t bytes) override {
    std::memcpy(segment_address, from, bytes);
    return absl::OkStatus();
  }

  absl::Status CopyOut(void* to, const void* segment_address, uint64_t bytes) override {
    std::memcpy(to, segment_address, bytes);
    return absl::OkStatus();
  }

  absl::Status Zero(const DeviceSegment& segment, uint64_t offset, uint64_t bytes) override {
    if (absl::Status status = CheckRange(segment, offset, bytes); !status.ok()) return status;
    if (bytes == 0) return absl::OkStatus();
    SimulateDriver();
    // Punches a hole: holes read as zeros, and the pages go back to the machine.
    if (fallocate(segment.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                  static_cast<off_t>(bytes)) != 0) {
      return SystemError("fallocate(FALLOC_FL_PUNCH_HOLE)");
    }
    return absl::OkStatus();
  }

  absl::StatusOr<SegmentHolders> FindHolders(absl::Span<const DeviceSegment> segments) override {
    std::vector<int> fds;
    fds.reserve(segments.size());
    for (const DeviceSegment& segment : segments) fds.push_back(segment.fd);
    return FindFileHolders(fds, kFileName);
  }

  absl::StatusOr<LeftSegments> FindLeftSegments() override {
    if (owned_prefix_.empty()) return LeftSegments();
    const auto bytes_of = [this](absl::string_view rest) -> uint64_t {
      const std::pair<absl::string_view, absl::string_view> run_and_bytes =
          absl::StrSplit(rest, absl::MaxSplits(':', 1));
      uint64_t bytes = 0;
      const bool is_left = run_and_bytes.first != run_ && absl::SimpleAtoi(run_and_bytes.second, &bytes) &&
                           CheckSegmentBytes(bytes).ok() && bytes < kMaxRequestBytes;
      return is_left ? bytes : 0;
    };
    if (record_ == nullptr) return FindLeftFiles(owned_prefix_, bytes_of, RecordedFiles());
    const RecordedFiles recorded = record_->Left();
    absl::StatusOr<LeftSegments> left = FindLeftFiles(owned_prefix_, bytes_of, recorded);
    if (!left.ok()) return left;
    absl::flat_hash_set<uint64_t> found;
    for (const LeftSegment& segment : left->segments) found.insert(segment.file_inode);
    const bool is_all_found = std::all_of(recorded.begin(), recorded.end(),
                                          [&found](const auto& file) { return found.contains(file.first); });
    if (is_all_found && record_->IsWhole()) left->unread_processes = 0;  // the processes cannot hold more
    record_->KeepFound(found);
    return left;
  }

  absl::StatusOr<std::unique_ptr<Event>> RecordEvent(Stream) override { return std::make_unique<CompleteEvent>(); }

 private:
  static std::string RandomName() {
    std::random_device random;
    return absl::StrCat(absl::Hex(random(), absl::kZeroPad8), absl::Hex(random(), absl::kZeroPad8));
  }

  static absl::StatusOr<DeviceSegment> CreateFile(uint64_t bytes, const std::string& name) {
    UniqueFd fd(memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!fd.valid()) return DescriptorError(errno, "memfd_create");
    if (absl::Status status = CheckNotReserved(fd.get()); !status.ok()) return status;
    if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) return SystemError("ftruncate");
    // Seals the size: otherwise every holder of the descriptor could resize the file and kill the rest with SIGBUS.
    if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
      return SystemError("fcntl(F_ADD_SEALS)");
    }
    return DeviceSegment{.bytes = bytes, .fd = fd.Release()};
  }

  // Returns 0, no file's inode, on failure.
  static uint64_t InodeOf(const DeviceSegment& segment) {
    struct stat file = {};
    return fstat(segment.fd, &file) == 0 ? file.st_ino : 0;
  }

  void SimulateDriver() const {
    if (driver_latency_.count() > 0) std::this_thread::sleep_for(driver_latency_);
  }

  void GiveBack(uint64_t bytes) {
    MutexLock lock(mu_);
    used_bytes_ -= bytes;
  }

  const DeviceProperties properties_;
  const std::chrono::nanoseconds driver_latency_;
  const std::string owned_prefix_;  // beginning of the file names of the owner and ordinal; empty without an owner
  const std::string run_;           // part of the names for the device's own run
  const std::unique_ptr<SegmentRecord> record_;  // may be null
  std::atomic<bool> leaves_segments_{false};
  Mutex mu_;
  uint64_t used_bytes_ ABSL_GUARDED_BY(mu_) = 0;
};

uint64_t ReadNumber(const char* path) {
  std::ifstream file(path);
  std::string word;
  uint64_t value = 0;
  return file >> word && absl::SimpleAtoi(word, &value) ? value : 0;
}

}  // namespace

uint64_t HostMemoryBytes() {
  uint64_t memory = static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  if (const uint64_t cgroup = ReadNumber("/sys/fs/cgroup/memory.max"); cgroup > 0) memory = std::min(memory, cgroup);
  return memory;
}

uint64_t DefaultHostBytes() {
  return HostMemoryBytes() / 2 / kSegmentGranuleBytes * kSegmentGranuleBytes;
}

std::unique_ptr<Device> MakeHostDevice(int ordinal, uint64_t total_bytes, std::chrono::nanoseconds driver_latency,
                                       const std::string& owner, std::unique_ptr<SegmentRecord> record) {
  return std::make_unique<HostDevice>(ordinal, total_bytes, driver_latency, owner, std::move(record));
}

}  // namespace vrambroker
