// SPDX-License-Identifier: Apache-2.0
//
// Device: where segments come from. The one seam between the project and GPU memory.
//
// The daemon owns segments through it (allocate, free, export, zero); a client process opens the handles that the
// daemon exported. Implementations: `host` (host_device.h) and `cuda` (cuda_device.h). Every implementation passes
// the same contract suite, tests/unit/allocator/device/device_test.cc.
#ifndef VRAMBROKER_ALLOCATOR_DEVICE_DEVICE_H_
#define VRAMBROKER_ALLOCATOR_DEVICE_DEVICE_H_

#include <sys/types.h>

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "allocator/base/unique_fd.h"
#include "allocator/device/events.h"

namespace vrambroker {

enum class DeviceKind { kHost, kCuda };

const char* DeviceKindName(DeviceKind kind);  // "host", "cuda"

struct DeviceProperties {
  DeviceKind kind = DeviceKind::kHost;
  int ordinal = 0;           // place among the daemon's devices
  std::string uuid;          // the same in every process, whatever its ordinals are
  std::string name;          // for people
  uint64_t total_bytes = 0;  // physical memory
  // AllocateSegment() may give what this process has freed, as it was then. Elsewhere all of it has been cleared.
  bool keeps_freed_bytes = false;
  // Segments can be opened only by processes of the daemon's pid namespace: legacy CUDA IPC.
  bool needs_one_pid_namespace = false;
};

// What another process needs to open a segment: a cudaIpcMemHandle_t, or a file descriptor.
using CudaIpcHandle = std::array<char, 64>;
using SegmentHandle = std::variant<UniqueFd, CudaIpcHandle>;

// One contiguous region obtained from a device. A record; the device that made it frees it.
struct DeviceSegment {
  uint64_t bytes = 0;
  uint64_t address = 0;  // device address in the owning process; 0 where the owner does not map it (host)
  int fd = -1;           // memory file of a host segment
};

// A process. Its pid alone is somebody else's once it has ended.
struct ProcessId {
  pid_t pid = 0;
  uint64_t started = 0;  // clock ticks after the machine did; 0: not known

  friend auto operator<=>(const ProcessId&, const ProcessId&) = default;
};

// Who still has segments open or mapped, besides this process.
struct SegmentHolders {
  struct Holder {
    size_t segment = 0;  // index of the segment asked for
    pid_t pid = 0;
  };
  std::vector<Holder> holders;  // by segment, then process
  size_t unread_processes = 0;  // that may not be looked into: they may hold any of the segments
};

// What a process uses of a device in the driver's words: its context and what it has allocated. Memory that several
// have open is its owner's.
struct GpuProcess {
  pid_t pid = 0;
  uint64_t bytes = 0;
};

// The sensors of a GPU; none: not known.
struct GpuSensors {
  std::optional<double> use_percent;  // the share of the last moments in which a kernel ran
  std::optional<double> temperature_celsius;
  std::optional<double> power_watts;
};

// A segment of an earlier owner of the device, who has gone, that other processes still hold.
struct LeftSegment {
  uint64_t file_device = 0;  // which file it is, as fstat() says
  uint64_t file_inode = 0;
  uint64_t bytes = 0;
  std::vector<ProcessId> holders;  // in ascending order
  uid_t holder_uid = 0;            // of the first that was found
};

struct LeftSegments {
  std::vector<LeftSegment> segments;
  size_t unread_processes = 0;  // that may not be looked into, and may hold more
};

// Safe to call from any thread. Calls may take milliseconds: hold no lock that a hot path needs.
// Errors name the failing system or CUDA call.
class Device : public EventSource {
 public:
  ~Device() override = default;

  virtual const DeviceProperties& properties() const = 0;

  // Bytes that AllocateSegment could hand out now, as the driver reports them; other programs may take them first.
  virtual absl::StatusOr<uint64_t> FreeBytes() = 0;

  // OK, or the error after which this process can do nothing more with the device. Asks the driver; waits for nothing
  // on the device.
  virtual absl::Status Health() { return absl::OkStatus(); }

  // A new segment of exactly `bytes`. It has no bytes of other processes, and, unless the device keeps_freed_bytes,
  // none of segments of this process. InvalidArgument when `bytes` is 0 or no multiple of 2 MiB; ResourceExhausted when
  // the device has no room.
  virtual absl::StatusOr<DeviceSegment> AllocateSegment(uint64_t bytes) = 0;
  virtual absl::Status FreeSegment(const DeviceSegment& segment) = 0;
  // This process is about to end, and others may still hold what it frees from here on: the device of the next process
  // finds that (FindLeftSegments).
  virtual void LeaveSegments() {}

  // A handle with which other processes open the segment. May be called again.
  virtual absl::StatusOr<SegmentHandle> ExportSegment(const DeviceSegment& segment) = 0;

  // Maps an exported segment of `bytes` into this process; returns its address here. InvalidArgument when the
  // handle is of another kind of device or, where the device can tell (host), not of a segment of this size.
  virtual absl::StatusOr<void*> OpenHandle(const SegmentHandle& handle, uint64_t bytes) = 0;
  // Waits for nothing. REQUIRES: no work on the device uses the segment any more; RecordEvent() tells of one stream.
  virtual absl::Status CloseHandle(void* address, uint64_t bytes) = 0;

  // Blocks until all work that this process has queued on the device is done. Makes every capture of a CUDA graph on
  // the device invalid, and fails while there is one: for what no stream is known of.
  virtual absl::Status WaitForAllStreams() { return absl::OkStatus(); }

  // Copies between ordinary memory of this process and an opened segment; done when it returns. For tools,
  // tests and small data: programs that compute use the address directly.
  virtual absl::Status CopyIn(void* segment_address, const void* from, uint64_t bytes) = 0;
  virtual absl::Status CopyOut(void* to, const void* segment_address, uint64_t bytes) = 0;

  // Fills [offset, offset + bytes) with zeros; done when it returns. OutOfRange when outside of the segment.
  virtual absl::Status Zero(const DeviceSegment& segment, uint64_t offset, uint64_t bytes) = 0;

  // Other processes that have these segments open or mapped, in one search for all of them. To name those that keep
  // memory, not to prove that nobody does: a process can hide what it holds. Unimplemented where the driver does not
  // tell (cuda).
  virtual absl::StatusOr<SegmentHolders> FindHolders(absl::Span<const DeviceSegment> segments);

  // What is left of earlier owners, as far as other processes can be looked into. Unimplemented where the driver does
  // not tell (cuda).
  virtual absl::StatusOr<LeftSegments> FindLeftSegments();

  // All processes that use the device, by pid, this one among them. Unimplemented where nobody tells: host, and GPUs
  // whose driver does not, or does so by pids of another namespace.
  virtual absl::StatusOr<std::vector<GpuProcess>> FindProcesses();

  // A host device has no sensors.
  virtual GpuSensors ReadSensors() { return {}; }
};

// InvalidArgument unless `bytes` is a valid segment size. For implementations.
absl::Status CheckSegmentBytes(uint64_t bytes);
// OutOfRange unless [offset, offset + bytes) lies within `segment`. For implementations.
absl::Status CheckRange(const DeviceSegment& segment, uint64_t offset, uint64_t bytes);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_DEVICE_DEVICE_H_
