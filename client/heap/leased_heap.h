// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_HEAP_LEASED_HEAP_H_
#define VRAMBROKER_CLIENT_HEAP_LEASED_HEAP_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "allocator/base/mutex.h"
#include "allocator/heap/block_request.h"
#include "allocator/heap/caching_allocator.h"
#include "allocator/heap/heap_snapshot.h"
#include "allocator/heap/owner_segments.h"
#include "client/connection/deadline.h"
#include "client/heap/address_map.h"
#include "client/heap/heap.h"
#include "client/heap/heap_host.h"
#include "client/heap/scope_stack.h"
#include "vrambroker/v1/broker.pb.h"

namespace vrambroker::client_internal {

// A caching allocator in this process, over segments leased from the daemon. A request served from the cache touches
// only the allocator.
class LeasedHeap final : public Heap, private EventSource {
 public:
  // `session` and `addresses` outlive the heap.
  LeasedHeap(HeapHost* session, AddressMap* addresses, int ordinal, const AllocatorOptions& options,
             uint64_t capacity_bytes);
  // REQUIRES: CloseAll() was called.
  ~LeasedHeap() override = default;

  absl::StatusOr<Buffer> Allocate(uint64_t bytes, Stream stream) override;
  void Free(uint64_t block) override;
  absl::Status FreeAndWait(uint64_t block) override;
  absl::Status RecordStream(uint64_t block, Stream stream) override;
  SegmentOpener* device() const override { return device_.load(std::memory_order_acquire); }
  uint64_t SegmentOf(uint64_t block) const override { return Raw(BlockAt(block)->segment_id()); }
  uint64_t OffsetOf(uint64_t block) const override { return BlockAt(block)->offset(); }

  absl::StatusOr<void*> Malloc(uint64_t bytes, Stream stream) override;
  // For a block that the address map returned for a Malloc() pointer.
  void FreeBlock(Block* block);
  void RecordStream(Block* block, Stream stream);

  absl::StatusOr<void*> LeaseSegment(uint64_t bytes, bool now) override ABSL_LOCKS_EXCLUDED(mu_);
  // Waits for work on `stream`; without a stream, for all work on the device. NotFound: `pointer` is not from
  // LeaseSegment().
  absl::Status ReturnSegment(void* pointer, std::optional<Stream> stream) ABSL_LOCKS_EXCLUDED(mu_);
  std::optional<uint64_t> SizeOf(const void* pointer) const override ABSL_LOCKS_EXCLUDED(mu_);
  void ReportUse(const SegmentUse& use) ABSL_LOCKS_EXCLUDED(mu_);

  absl::StatusOr<uint64_t> EmptyCache() override;
  absl::StatusOr<MemoryStats> GetMemoryStats() override ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status ResetPeakStats(bool accumulated) override ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status ResetTotals() override ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status SetMemoryFraction(double fraction) override ABSL_LOCKS_EXCLUDED(limits_mu_);
  absl::StatusOr<HeapSnapshot> TakeSnapshot(bool with_history) override { return Snapshot(with_history); }
  bool InUse() override ABSL_LOCKS_EXCLUDED(mu_);

  // ---- For the session ----

  // Sets this daemon's capacity, the base of fractions from now on.
  void SetCapacity(uint64_t capacity_bytes) ABSL_LOCKS_EXCLUDED(limits_mu_);
  // From now on the daemon limits the session to `limit_bytes`.
  void SetLimit(uint64_t limit_bytes) ABSL_LOCKS_EXCLUDED(limits_mu_);
  // The process's own limit: see SetMemoryFraction(). The largest number: no limit.
  uint64_t own_limit_bytes() const { return own_limit_bytes_.load(std::memory_order_relaxed); }
  // Retries: closes and returns segments when the device refused to close them, as during a CUDA graph capture, and
  // completes frees on streams since destroyed.
  void RetryClosing() ABSL_LOCKS_EXCLUDED(mu_);
  // Gives back up to about `wanted_bytes` of segments wholly free for `min_idle_ticks`. Returns the bytes given back.
  uint64_t Trim(uint64_t wanted_bytes, uint64_t min_idle_ticks);
  void Tick() { allocator_.Tick(); }
  void NoteTime() { allocator_.NoteTime(); }
  void SetRecording(size_t max_events, bool exact_times = true) { allocator_.SetRecording(max_events, exact_times); }
  void HoldRecording(size_t events) { allocator_.HoldRecording(events); }
  HeapSnapshot Snapshot(bool with_history = true) ABSL_LOCKS_EXCLUDED(mu_);
  // Closes all mappings, without returning segments. False when the device refused, and may still use memory. REQUIRES:
  // nothing is in use.
  bool CloseAll() ABSL_LOCKS_EXCLUDED(mu_);
  // The daemon's ids of segments held for session number `session`.
  std::vector<uint64_t> HeldSegments(uint64_t session) const ABSL_LOCKS_EXCLUDED(mu_);
  // Segments held from sessions before number `session`; the leasing daemon is gone.
  std::vector<v1::CarriedOver::Segment> CarriedOver(uint64_t session) const ABSL_LOCKS_EXCLUDED(mu_);
  // The id of a segment in `CarriedOver()`.
  static uint64_t CarriedId(uint64_t session, uint64_t daemon_id);

 private:
  // A segment held here; mapped when it has a base.
  struct Mapped {
    uint64_t session = 0;  // number of the leasing session; see Link
    uint64_t daemon_id = 0;
    uint64_t bytes = 0;
    void* base = nullptr;
    uint64_t file_device = 0;  // identify the file on a host device, for a daemon that did not lease the segment
    uint64_t file_inode = 0;
    std::optional<Stream> stream;  // set when given back: as in ReleasedSegment
  };
  struct WholeSegment {
    SegmentId id{};
    uint64_t requested = 0;
    uint64_t bytes = 0;
    uint64_t address = 0;  // a label, as in SegmentSnapshot
  };

  static Block* BlockAt(uint64_t block) {
    return reinterpret_cast<Block*>(block);  // NOLINT(performance-no-int-to-ptr): made from a pointer
  }

  // A cached block, or nullptr.
  Block* TryAllocate(uint64_t bytes, Stream stream) {
    return bytes > 0 ? allocator_.TryAllocate(bytes, stream, CurrentScope()) : nullptr;
  }
  absl::StatusOr<Block*> AllocateSlowly(uint64_t bytes, Stream stream);
  // Supplies or denies the segment wanted by `request`; the request may ask again afterwards. `until`: deadline for
  // waits.
  void AnswerRequest(BlockRequest& request, Deadline until);
  // The session's limit covers memory leased by any daemon: a daemon that does not count carried-over memory must not
  // lead beyond the limit.
  absl::Status CheckCarriedOver(uint64_t session, uint64_t bytes) const ABSL_LOCKS_EXCLUDED(mu_);
  void ApplyLimits() ABSL_EXCLUSIVE_LOCKS_REQUIRED(limits_mu_);
  // Counts a segment to come as held, unless the process's own limit would be exceeded.
  absl::Status BeginGrowth(uint64_t bytes) ABSL_LOCKS_EXCLUDED(mu_);
  uint64_t HeldBytes() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // CachingAllocator::ExplainFit() for this thread's scope.
  FitReport ExplainFit(uint64_t bytes, Stream stream);
  // Explain(), or a report on a refusal of BeginGrowth().
  absl::Status ExplainRefusal(const absl::Status& refusal, uint64_t requested, const FitReport& fit);
  // The error for the application when `refusal` has left a request without memory.
  absl::Status Explain(const absl::Status& refusal, uint64_t requested, const FitReport& fit);
  absl::StatusOr<SegmentOpener*> OpenDevice();

  // How far the daemon goes for a segment.
  struct LeaseTerms {
    bool may_reclaim = false;       // may ask other sessions for memory
    uint32_t wait_ms = 0;           // with may_reclaim: wait for the memory
    std::function<bool()> give_up;  // polled while waiting; true ends the wait. None: always wait.
  };
  // ResourceExhausted: no memory. Cancelled: `give_up` has ended the wait.
  absl::StatusOr<AcquiredSegment> GetSegment(uint64_t bytes, const LeaseTerms& terms) ABSL_LOCKS_EXCLUDED(mu_);
  // GetSegment() after BeginGrowth(). `arrived`: the bytes count as held.
  absl::StatusOr<AcquiredSegment> LeaseAndMap(uint64_t bytes, const LeaseTerms& terms, bool* arrived)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Gives every wholly free segment back. Returns the bytes received by the daemon.
  uint64_t Flush() ABSL_LOCKS_EXCLUDED(mu_);
  uint64_t ReleaseSegments(absl::Span<const ReleasedSegment> segments) ABSL_LOCKS_EXCLUDED(mu_);
  // Waits for the segments' streams first. Returns the bytes received by the daemon. Segments kept open by the device
  // stay held and charged, for later.
  uint64_t CloseAndReturn(absl::Span<const SegmentId> segments) ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<std::unique_ptr<Event>> RecordEvent(Stream stream) override;
  // whole_stats_ adjusted by the application's figures.
  MemoryStats WholeStats() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  HeapHost& session_;
  AddressMap& addresses_;
  std::atomic<uint64_t> capacity_bytes_;  // set with limits_mu_
  std::atomic<SegmentOpener*> device_{nullptr};
  CachingAllocator allocator_;

  Mutex limits_mu_ ABSL_ACQUIRED_AFTER(lock_level::kLimits)
      ABSL_ACQUIRED_BEFORE(lock_level::kTimer){lock_level::kLimits};
  uint64_t session_limit_bytes_ ABSL_GUARDED_BY(limits_mu_);
  double own_fraction_ ABSL_GUARDED_BY(limits_mu_) = 1;
  std::atomic<uint64_t> own_limit_bytes_{CachingAllocator::kNoLimit};  // set with limits_mu_

  // Held for map operations only.
  mutable Mutex mu_;
  absl::flat_hash_map<SegmentId, Mapped> mapped_ ABSL_GUARDED_BY(mu_);
  uint64_t growing_bytes_ ABSL_GUARDED_BY(mu_) = 0;      // of segments being leased, not yet in mapped_
  std::vector<SegmentId> refused_ ABSL_GUARDED_BY(mu_);  // in mapped_; the device has refused to close them so far
  absl::flat_hash_map<void*, WholeSegment> whole_ ABSL_GUARDED_BY(mu_);
  MemoryStats whole_stats_ ABSL_GUARDED_BY(mu_);  // counts all leased memory as in use
  // The application's last figures, adjusted by later leases and returns.
  std::optional<SegmentUse> use_ ABSL_GUARDED_BY(mu_);
  // The maximum reported by the application since the last reset of peaks, and the application's own peak as last
  // reported.
  struct UsePeaks {
    uint64_t allocated_bytes = 0;
    uint64_t requested_bytes = 0;
    uint64_t active_bytes = 0;
    uint64_t inactive_split_bytes = 0;
  };
  UsePeaks use_peaks_ ABSL_GUARDED_BY(mu_);
  uint64_t told_peak_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t next_whole_address_ ABSL_GUARDED_BY(mu_);
};

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_HEAP_LEASED_HEAP_H_
