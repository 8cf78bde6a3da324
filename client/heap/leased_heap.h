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

// A caching allocator in this process, over segments leased from the daemon. A request that finds a cached block
// touches nothing but the allocator.
class LeasedHeap final : public Heap, private EventSource {
 public:
  // `session` and `addresses` outlive it.
  LeasedHeap(HeapHost* session, AddressMap* addresses, int ordinal, const AllocatorOptions& options,
             uint64_t capacity_bytes);
  // REQUIRES: CloseAll() was called.
  ~LeasedHeap() override = default;

  absl::StatusOr<Buffer> Allocate(uint64_t bytes, Stream stream) override;
  void Free(uint64_t block) override;
  absl::Status FreeAndWait(uint64_t block) override;
  absl::Status RecordStream(uint64_t block, Stream stream) override;
  Device* device() const override { return device_.load(std::memory_order_acquire); }
  uint64_t SegmentOf(uint64_t block) const override { return Raw(BlockAt(block)->segment_id()); }
  uint64_t OffsetOf(uint64_t block) const override { return BlockAt(block)->offset(); }

  absl::StatusOr<void*> Malloc(uint64_t bytes, Stream stream) override;
  // Of what the address map gave for a pointer of Malloc().
  void FreeBlock(Block* block);
  void RecordStream(Block* block, Stream stream);

  absl::StatusOr<void*> LeaseSegment(uint64_t bytes, bool now) override ABSL_LOCKS_EXCLUDED(mu_);
  // Waits for the work on `stream`; without one, for all work on the device. NotFound: `pointer` is not from
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

  // Of this daemon: fractions are of it from now on.
  void SetCapacity(uint64_t capacity_bytes) ABSL_LOCKS_EXCLUDED(limits_mu_);
  // The daemon holds the session to `limit_bytes` from now on.
  void SetLimit(uint64_t limit_bytes) ABSL_LOCKS_EXCLUDED(limits_mu_);
  // What this process holds itself to: see SetMemoryFraction(). The largest number: to nothing.
  uint64_t own_limit_bytes() const { return own_limit_bytes_.load(std::memory_order_relaxed); }
  // What has to be tried again: closes and returns what the device has refused to close, as it does while a CUDA graph
  // is captured, and completes frees whose stream does not exist any more.
  void RetryClosing() ABSL_LOCKS_EXCLUDED(mu_);
  // Gives up to about `wanted_bytes` of wholly free segments back that have been so for `min_idle_ticks`. Returns the
  // bytes.
  uint64_t Trim(uint64_t wanted_bytes, uint64_t min_idle_ticks);
  void Tick() { allocator_.Tick(); }
  void NoteTime() { allocator_.NoteTime(); }
  void SetRecording(size_t max_events, bool exact_times = true) { allocator_.SetRecording(max_events, exact_times); }
  void HoldRecording(size_t events) { allocator_.HoldRecording(events); }
  HeapSnapshot Snapshot(bool with_history = true) ABSL_LOCKS_EXCLUDED(mu_);
  // Closes all that is mapped, without returning it. False when the device refused, and may still use some of it.
  // REQUIRES: nothing is in use.
  bool CloseAll() ABSL_LOCKS_EXCLUDED(mu_);
  // The daemon's ids of what is held of its session number `session`.
  std::vector<uint64_t> HeldSegments(uint64_t session) const ABSL_LOCKS_EXCLUDED(mu_);
  // What is held of sessions before number `session`: the daemon that leased it is gone.
  std::vector<v1::CarriedOver::Segment> CarriedOver(uint64_t session) const ABSL_LOCKS_EXCLUDED(mu_);
  // What that is called in `CarriedOver()`.
  static uint64_t CarriedId(uint64_t session, uint64_t daemon_id);

 private:
  // A segment that is held here, and mapped when it has a base.
  struct Mapped {
    uint64_t session = 0;  // number of the session that leased it; see Link
    uint64_t daemon_id = 0;
    uint64_t bytes = 0;
    void* base = nullptr;
    uint64_t file_device = 0;  // which file it is on a host device, for a daemon that did not lease it
    uint64_t file_inode = 0;
    std::optional<Stream> stream;  // once it is given back: as in ReleasedSegment
  };
  struct WholeSegment {
    SegmentId id{};
    uint64_t requested = 0;
    uint64_t bytes = 0;
    uint64_t address = 0;  // a label, as in SegmentSnapshot
  };

  static Block* BlockAt(uint64_t block) {
    return reinterpret_cast<Block*>(block);  // NOLINT(performance-no-int-to-ptr): it was one
  }

  // A cached block, or nullptr.
  Block* TryAllocate(uint64_t bytes, Stream stream) {
    return bytes > 0 ? allocator_.TryAllocate(bytes, stream, CurrentScope()) : nullptr;
  }
  absl::StatusOr<Block*> AllocateSlowly(uint64_t bytes, Stream stream);
  // Supplies what `request` asks for, or denies it. It may ask again afterwards. `until`: for how long it may wait.
  void AnswerRequest(BlockRequest& request, Deadline until);
  // The limit is the session's, whichever daemon leased what is held: one that does not count what is carried over must
  // not lead beyond it.
  absl::Status CheckCarriedOver(uint64_t session, uint64_t bytes) const ABSL_LOCKS_EXCLUDED(mu_);
  void ApplyLimits() ABSL_EXCLUSIVE_LOCKS_REQUIRED(limits_mu_);
  // Notes that a segment is on its way, which counts as held from then on, unless that would be more than the process
  // holds itself to.
  absl::Status BeginGrowth(uint64_t bytes) ABSL_LOCKS_EXCLUDED(mu_);
  uint64_t HeldBytes() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // CachingAllocator::ExplainFit() for this thread's scope.
  FitReport ExplainFit(uint64_t bytes, Stream stream);
  // Explain(), or what BeginGrowth() has refused.
  absl::Status ExplainRefusal(const absl::Status& refusal, uint64_t requested, const FitReport& fit);
  // What to tell the application when `refusal` has left a request without memory.
  absl::Status Explain(const absl::Status& refusal, uint64_t requested, const FitReport& fit);
  absl::StatusOr<Device*> OpenDevice();

  // How far the daemon goes for a segment.
  struct LeaseTerms {
    bool may_reclaim = false;       // it may ask others for memory
    uint32_t wait_ms = 0;           // with may_reclaim: and wait for it
    std::function<bool()> give_up;  // polled while it waits; true ends the waiting. None: it waits in any case.
  };
  // ResourceExhausted: there is no memory for it. Cancelled: `give_up` has ended the waiting.
  absl::StatusOr<AcquiredSegment> GetSegment(uint64_t bytes, const LeaseTerms& terms) ABSL_LOCKS_EXCLUDED(mu_);
  // What remains of it once BeginGrowth() has let it begin. `arrived`: the bytes are counted among what is held.
  absl::StatusOr<AcquiredSegment> LeaseAndMap(uint64_t bytes, const LeaseTerms& terms, bool* arrived)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Gives every wholly free segment back. Returns the bytes that the daemon has back.
  uint64_t Flush() ABSL_LOCKS_EXCLUDED(mu_);
  uint64_t ReleaseSegments(absl::Span<const ReleasedSegment> segments) ABSL_LOCKS_EXCLUDED(mu_);
  // Waits for the streams of the segments first. Returns the bytes that the daemon has back. What the device does not
  // let go of stays held, and charged, for later.
  uint64_t CloseAndReturn(absl::Span<const SegmentId> segments) ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<std::unique_ptr<Event>> RecordEvent(Stream stream) override;
  // whole_stats_ with what the application makes of it.
  MemoryStats WholeStats() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  HeapHost& session_;
  AddressMap& addresses_;
  std::atomic<uint64_t> capacity_bytes_;  // set with limits_mu_
  std::atomic<Device*> device_{nullptr};
  CachingAllocator allocator_;

  Mutex limits_mu_ ABSL_ACQUIRED_AFTER(lock_level::kLimits)
      ABSL_ACQUIRED_BEFORE(lock_level::kTimer){lock_level::kLimits};
  uint64_t session_limit_bytes_ ABSL_GUARDED_BY(limits_mu_);
  double own_fraction_ ABSL_GUARDED_BY(limits_mu_) = 1;
  std::atomic<uint64_t> own_limit_bytes_{CachingAllocator::kNoLimit};  // set with limits_mu_

  // Held for map operations only.
  mutable Mutex mu_;
  absl::flat_hash_map<SegmentId, Mapped> mapped_ ABSL_GUARDED_BY(mu_);
  uint64_t growing_bytes_ ABSL_GUARDED_BY(mu_) = 0;      // of segments that are on their way, and not in mapped_ yet
  std::vector<SegmentId> refused_ ABSL_GUARDED_BY(mu_);  // of mapped_; the device has not closed them, so far
  absl::flat_hash_map<void*, WholeSegment> whole_ ABSL_GUARDED_BY(mu_);
  MemoryStats whole_stats_ ABSL_GUARDED_BY(mu_);  // as if all that is leased were in use
  // What the application said last, and what has been leased and returned since then.
  std::optional<SegmentUse> use_ ABSL_GUARDED_BY(mu_);
  // The most that the application has reported since the last reset of peaks, and its own peak, as it last told that.
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
