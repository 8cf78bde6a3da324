// SPDX-License-Identifier: Apache-2.0
//
// Heap: memory held by a session on a device. Leased (leased_heap.h) or remote (remote_heap.h).
#ifndef VRAMBROKER_CLIENT_HEAP_HEAP_H_
#define VRAMBROKER_CLIENT_HEAP_HEAP_H_

#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "allocator/device/device.h"
#include "allocator/device/events.h"
#include "allocator/heap/heap_snapshot.h"
#include "allocator/heap/memory_stats.h"
#include "client/vrambroker/client.h"

namespace vrambroker::client_internal {

// Thread-safe. `block` is a Buffer's block id.
class Heap {
 public:
  explicit Heap(int ordinal) : ordinal_(ordinal) {}
  virtual ~Heap() = default;
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  virtual absl::StatusOr<Buffer> Allocate(uint64_t bytes, Stream stream) = 0;
  // Never waits, never fails: for destructors. The heap may be gone when Free() returns.
  virtual void Free(uint64_t block) = 0;
  virtual absl::Status FreeAndWait(uint64_t block) = 0;
  virtual absl::Status RecordStream(uint64_t block, Stream stream) = 0;
  // The device as opened by this process. REQUIRES: the heap has handed out a block.
  virtual SegmentOpener* device() const = 0;
  virtual uint64_t SegmentOf(uint64_t block) const = 0;
  virtual uint64_t OffsetOf(uint64_t block) const = 0;

  // See Client for these functions.
  virtual absl::StatusOr<void*> Malloc(uint64_t bytes, Stream stream) = 0;
  // `now`: only free memory, without asking other sessions.
  virtual absl::StatusOr<void*> LeaseSegment(uint64_t bytes, bool now) = 0;
  // Bytes of the segment from LeaseSegment(), or of the remote block from Malloc(), beginning at `pointer`; nullopt
  // when neither begins there. Leased blocks are in the address map.
  virtual std::optional<uint64_t> SizeOf(const void* pointer) const = 0;
  virtual absl::StatusOr<uint64_t> EmptyCache() = 0;
  virtual absl::StatusOr<MemoryStats> GetMemoryStats() = 0;
  virtual absl::Status ResetPeakStats(bool accumulated) = 0;
  virtual absl::Status ResetTotals() = 0;
  virtual absl::Status SetMemoryFraction(double fraction) = 0;
  virtual absl::StatusOr<HeapSnapshot> TakeSnapshot(bool with_history) = 0;

  // Whether a Buffer or a pointer is in use.
  virtual bool InUse() = 0;

  int ordinal() const { return ordinal_; }

 protected:
  // Filled in place: moving freshly written memory stalls the processor.
  absl::StatusOr<Buffer> MakeBuffer(uint64_t block, void* data, uint64_t size, uint64_t block_bytes) {
    absl::StatusOr<Buffer> result(absl::in_place);
    Buffer& buffer = *result;
    buffer.heap_ = this;
    buffer.block_ = block;
    buffer.data_ = data;
    buffer.size_ = size;
    buffer.block_bytes_ = block_bytes;
    buffer.device_ = ordinal_;
    return result;
  }

 private:
  const int ordinal_;
};

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_HEAP_HEAP_H_
