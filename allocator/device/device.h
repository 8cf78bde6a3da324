// SPDX-License-Identifier: Apache-2.0
//
// Device: the source of segments. The only seam between the project and GPU memory.
//
// A Device has two halves. The daemon owns segments through a SegmentOwner (allocate, free, export, zero); a client
// process opens handles exported by the daemon through a SegmentOpener. Implementations: `host` (host_device.h) and
// `cuda` (cuda_device.h). Every implementation passes the contract suite, tests/unit/allocator/device/device_test.cc.
//
// The daemon and the heaps of clients ask for a device's properties, never for its kind.
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

// Handles of a device for other processes.
enum class HandleKind {
  kDescriptor,  // a file descriptor, exported for each process
  kCudaIpc,     // a CudaIpcHandle: plain bytes, exported once
};

struct DeviceProperties {
  std::string kind;          // "host", "cuda": in logs, metrics and messages; see v1::DeviceKind
  int ordinal = 0;           // place among the daemon's devices
  std::string uuid;          // equal in all processes, whatever their ordinals
  std::string name;          // for people
  uint64_t total_bytes = 0;  // physical memory
  // True if AllocateSegment() may return bytes freed by the process, uncleared. All other bytes have been cleared.
  bool keeps_freed_bytes = false;
  // Only processes of the daemon's pid namespace can open segments: legacy CUDA IPC.
  bool needs_one_pid_namespace = false;
  // Processes of another user than the daemon's may be unable to open segments: CUDA IPC.
  bool needs_one_user = false;
  // Other programs allocate the device's memory, too: the capacity is chosen by free memory, and free memory changes.
  bool has_other_programs = false;
  // Each process has a context, which takes memory of the device; FindProcesses() lists the processes.
  bool has_contexts = false;
  // FindHolders() and FindLeftSegments() work. Without them, memory of an ended process is in quarantine for a settle
  // time.
  bool tells_holders = false;
  HandleKind handles = HandleKind::kDescriptor;
};

// Handle for another process to open a segment: a cudaIpcMemHandle_t, or a file descriptor.
using CudaIpcHandle = std::array<char, 64>;
using SegmentHandle = std::variant<UniqueFd, CudaIpcHandle>;

// A contiguous region obtained from a device. A record only; the device frees the region.
struct DeviceSegment {
  uint64_t bytes = 0;
  uint64_t address = 0;                     // device address in the owning process; 0 if not mapped there (host)
  int fd = -1;                              // memory file of a host segment
  std::optional<CudaIpcHandle> cuda_ipc{};  // the handle, once exported, of a device with HandleKind::kCudaIpc
};

// Identifies a process. A pid alone may belong to a new process later.
struct ProcessId {
  pid_t pid = 0;
  uint64_t started = 0;  // in clock ticks since the machine's start; 0: not known

  friend auto operator<=>(const ProcessId&, const ProcessId&) = default;
};

// Processes with segments open or mapped, besides the calling process.
struct SegmentHolders {
  struct Holder {
    size_t segment = 0;  // index of the segment asked for
    pid_t pid = 0;
  };
  std::vector<Holder> holders;  // by segment, then process
  size_t unread_processes = 0;  // processes closed to inspection; each may hold any of the segments
};

// A process's use of a device in the driver's words: context and allocations. Memory open in several processes counts
// for its owner.
struct GpuProcess {
  pid_t pid = 0;
  uint64_t bytes = 0;
};

// Sensors of a GPU; nullopt: not known.
struct GpuSensors {
  std::optional<double> use_percent;  // share of the last moments with a kernel running
  std::optional<double> temperature_celsius;
  std::optional<double> power_watts;
};

// A segment of an earlier, ended owner of the device, still held by other processes.
struct LeftSegment {
  uint64_t file_device = 0;  // identity of the file, as from fstat()
  uint64_t file_inode = 0;
  uint64_t bytes = 0;
  std::vector<ProcessId> holders;  // in ascending order
  uid_t holder_uid = 0;            // of the first holder found
};

struct LeftSegments {
  std::vector<LeftSegment> segments;
  size_t unread_processes = 0;  // closed to inspection; each may hold more
};

// The daemon's half of a device. Thread-safe. Calls may take milliseconds: hold no lock needed by a hot path. Errors
// name the failing system or CUDA call.
class SegmentOwner {
 public:
  virtual ~SegmentOwner() = default;

  virtual const DeviceProperties& properties() const = 0;

  // Bytes available to AllocateSegment() now, as the driver reports; other programs may take them first.
  virtual absl::StatusOr<uint64_t> FreeBytes() = 0;

  // OK, or the error after which the process can do nothing more with the device. Asks the driver, without waiting for
  // the device.
  virtual absl::Status Health() { return absl::OkStatus(); }

  // Returns a new segment of exactly `bytes`. The segment has no bytes of other processes, and, unless the device
  // keeps_freed_bytes, none of earlier segments of the process. InvalidArgument when `bytes` is 0 or no multiple of 2
  // MiB; ResourceExhausted when the device has no room.
  virtual absl::StatusOr<DeviceSegment> AllocateSegment(uint64_t bytes) = 0;
  virtual absl::Status FreeSegment(const DeviceSegment& segment) = 0;
  // Prepares for the end of the process. Other processes may still hold segments freed from here on, for the device of
  // the next process to find (FindLeftSegments).
  virtual void LeaveSegments() {}

  // Returns a handle for other processes to open the segment. May be called again.
  virtual absl::StatusOr<SegmentHandle> ExportSegment(const DeviceSegment& segment) = 0;

  // Fills [offset, offset + bytes) with zeros; done on return. OutOfRange when outside of the segment.
  virtual absl::Status Zero(const DeviceSegment& segment, uint64_t offset, uint64_t bytes) = 0;

  // Finds other processes with the segments open or mapped, in one search for all segments. Names processes that keep
  // memory, but does not prove that none does: a process can hide its holdings. Unimplemented unless the device
  // tells_holders.
  virtual absl::StatusOr<SegmentHolders> FindHolders(absl::Span<const DeviceSegment> segments);

  // Finds segments left by earlier owners, as far as other processes can be inspected. Unimplemented unless the device
  // tells_holders.
  virtual absl::StatusOr<LeftSegments> FindLeftSegments();

  // Finds all processes using the device, by pid, including the calling process. Unimplemented without a source: for
  // host, and for GPUs whose driver reports no processes, or reports pids of another namespace.
  virtual absl::StatusOr<std::vector<GpuProcess>> FindProcesses();

  // A host device has no sensors.
  virtual GpuSensors ReadSensors() { return {}; }
};

// A client's half of a device. Thread-safe. Calls may take milliseconds: hold no lock needed by a hot path. Errors name
// the failing system or CUDA call.
class SegmentOpener : public EventSource {
 public:
  virtual const DeviceProperties& properties() const = 0;

  // Maps an exported segment of `bytes` into the process; returns its address there. InvalidArgument when the handle is
  // of another kind of device or, where the device can tell (host), not of a segment of `bytes`.
  virtual absl::StatusOr<void*> OpenHandle(const SegmentHandle& handle, uint64_t bytes) = 0;
  // Unmaps without waiting. REQUIRES: no work on the device uses the segment any more; RecordEvent() tells for one
  // stream.
  virtual absl::Status CloseHandle(void* address, uint64_t bytes) = 0;

  // Blocks until all work queued on the device by the process is done. Invalidates every capture of a CUDA graph on the
  // device, and fails during a capture. For work on unknown streams.
  virtual absl::Status WaitForAllStreams() { return absl::OkStatus(); }

  // Copy between ordinary memory of the process and an opened segment; done on return. For tools, tests and small data:
  // programs that compute use the address directly.
  virtual absl::Status CopyIn(void* segment_address, const void* from, uint64_t bytes) = 0;
  virtual absl::Status CopyOut(void* to, const void* segment_address, uint64_t bytes) = 0;
};

// An implementation: both halves.
class Device : public SegmentOwner, public SegmentOpener {
 public:
  const DeviceProperties& properties() const override = 0;
};

// InvalidArgument unless `bytes` is a valid segment size. For implementations.
absl::Status CheckSegmentBytes(uint64_t bytes);
// OutOfRange unless [offset, offset + bytes) lies within `segment`. For implementations.
absl::Status CheckRange(const DeviceSegment& segment, uint64_t offset, uint64_t bytes);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_DEVICE_DEVICE_H_
