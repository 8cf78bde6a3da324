// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_HEAP_REMOTE_HEAP_H_
#define VRAMBROKER_CLIENT_HEAP_REMOTE_HEAP_H_

#include <atomic>
#include <cstdint>
#include <optional>

#include "absl/container/flat_hash_map.h"
#include "allocator/base/mutex.h"
#include "client/heap/heap.h"
#include "client/heap/heap_host.h"
#include "client/heap/mappings.h"

namespace vrambroker::client_internal {

// Blocks cut by the daemon: every request is a call. A lost session stays lost.
class RemoteHeap : public Heap {
 public:
  // `session` and `mappings` outlive the heap.
  RemoteHeap(HeapHost* session, Mappings* mappings, int ordinal)
      : Heap(ordinal), session_(*session), mappings_(*mappings) {}

  absl::StatusOr<Buffer> Allocate(uint64_t bytes, Stream stream) override;
  void Free(uint64_t block) override ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status FreeAndWait(uint64_t block) override ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status RecordStream(uint64_t block, Stream stream) override;
  SegmentOpener* device() const override { return device_.load(std::memory_order_acquire); }
  uint64_t SegmentOf(uint64_t block) const override ABSL_LOCKS_EXCLUDED(mu_);
  uint64_t OffsetOf(uint64_t block) const override ABSL_LOCKS_EXCLUDED(mu_);

  absl::StatusOr<void*> Malloc(uint64_t bytes, Stream stream) override ABSL_LOCKS_EXCLUDED(mu_);
  // Waits for work on `stream` first, unless the block was allocated for `stream`: the daemon reuses the memory at
  // once. NotFound: `pointer` is not from Malloc(). FailedPrecondition: cannot wait; nothing was freed.
  absl::Status FreePointer(void* pointer, std::optional<Stream> stream) ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<void*> LeaseSegment(uint64_t bytes, bool now) override;
  std::optional<uint64_t> SizeOf(const void* pointer) const override ABSL_LOCKS_EXCLUDED(mu_);

  absl::StatusOr<uint64_t> EmptyCache() override;
  absl::StatusOr<MemoryStats> GetMemoryStats() override;
  absl::Status ResetPeakStats(bool accumulated) override;
  absl::Status ResetTotals() override;
  absl::Status SetMemoryFraction(double fraction) override;
  absl::StatusOr<HeapSnapshot> TakeSnapshot(bool with_history) override;
  bool InUse() override ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Place {
    uint64_t segment = 0;
    uint64_t offset = 0;
  };

  struct Owned {
    Buffer buffer;
    Stream stream = 0;  // the stream of the allocation
  };

  HeapHost& session_;
  Mappings& mappings_;
  std::atomic<SegmentOpener*> device_{nullptr};

  mutable Mutex mu_;
  absl::flat_hash_map<uint64_t, Place> blocks_ ABSL_GUARDED_BY(mu_);  // in use, by id
  absl::flat_hash_map<void*, Owned> pointers_ ABSL_GUARDED_BY(mu_);   // from Malloc()
};

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_HEAP_REMOTE_HEAP_H_
