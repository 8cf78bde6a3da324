// SPDX-License-Identifier: Apache-2.0
//
// CachingAllocator: hands out blocks of segments and keeps freed blocks for reuse.
//
// Decisions (choice of segment and block, splitting, merging, flushing, garbage collection, giving up), options and
// figures follow PyTorch's CUDA caching allocator. CachingAllocator never touches device memory, and makes no calls to
// get or release memory. BlockRequest (block_request.h) names memory needed, SegmentsToRelease (owner_segments.h)
// memory let go of, and the owner acts.
//
// Deliberate difference: after a flush the free blocks are searched once more before the request is refused. The
// original may refuse although a fitting block has just become free (pytorch/pytorch issue 189504).
#ifndef VRAMBROKER_ALLOCATOR_HEAP_CACHING_ALLOCATOR_H_
#define VRAMBROKER_ALLOCATOR_HEAP_CACHING_ALLOCATOR_H_

#include <array>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "allocator/base/ids.h"
#include "allocator/base/mutex.h"
#include "allocator/device/events.h"
#include "allocator/heap/allocator_options.h"
#include "allocator/heap/block.h"
#include "allocator/heap/fit_report.h"
#include "allocator/heap/heap_clock.h"
#include "allocator/heap/heap_counters.h"
#include "allocator/heap/heap_snapshot.h"
#include "allocator/heap/history.h"
#include "allocator/heap/memory_stats.h"
#include "allocator/heap/owner_segments.h"
#include "allocator/heap/scope_use.h"
#include "allocator/heap/scopes.h"
#include "allocator/heap/size_class.h"

namespace vrambroker {

struct TrimOptions {
  uint64_t wanted_bytes = std::numeric_limits<uint64_t>::max();  // stop after taking segments of so many bytes
  uint64_t min_idle_ticks = 0;  // take only segments wholly free for so many ticks, see CachingAllocator::Tick()
};

// Thread-safe. Hits and frees take a lock for a search. Under the lock nothing is waited for, and Event::Query() is the
// only call of the owner's code, so a slow device does not delay other threads' hits.
class CachingAllocator {
 public:
  static constexpr uint64_t kNoLimit = AllocatorOptions::kNoLimit;

  // REQUIRES: `events` outlives the allocator. Without `events`, blocks named in RecordStream() are reusable as soon as
  // freed. `capacity_bytes`: the whole for memory fractions.
  explicit CachingAllocator(EventSource* events = nullptr, const AllocatorOptions& options = {},
                            uint64_t capacity_bytes = kNoLimit);
  // Forgets blocks and segments, and gives nothing back: their owner (a session, a process) is ending as a whole.
  ~CachingAllocator();
  CachingAllocator(const CachingAllocator&) = delete;
  CachingAllocator& operator=(const CachingAllocator&) = delete;

  const AllocatorOptions& options() const { return options_; }

  // Returns a cached block of at least `requested` bytes for use on `stream`, or nullptr: then a BlockRequest can get a
  // block. `scope`: purpose of the block, an id in the owner's list of scopes; has no effect on decisions.
  Block* TryAllocate(uint64_t requested, Stream stream = 0, ScopeId scope = 0) ABSL_LOCKS_EXCLUDED(mu_);

  // Notes a use of `block` by `stream`. The block, once freed, stays as is until the work queued on `stream` before the
  // free is done. No effect for the stream of the block's allocation. REQUIRES: as Free().
  void RecordStream(Block* block, Stream stream) ABSL_LOCKS_EXCLUDED(mu_);

  // Makes `block` free, at once or when the recorded streams are done, and merges it with free neighbours. REQUIRES:
  // `block` came from the same heap and was not freed since.
  void Free(Block* block) ABSL_LOCKS_EXCLUDED(mu_);

  // Completes frees of finished streams, as every allocation does. Never blocks.
  void PollEvents() ABSL_LOCKS_EXCLUDED(mu_);

  // Waits for the streams of pending frees, and completes the frees. Counts as a synchronization of all streams.
  void WaitForStreams() ABSL_LOCKS_EXCLUDED(mu_) { WaitForStreams(/*only_lost=*/false); }
  // Completes frees out of reach of polling: frees of streams destroyed since. Waits for all work of the process on the
  // device. Does nothing, and costs next to nothing, when there are none. For a thread with time to spare.
  void WaitForLostStreams() ABSL_LOCKS_EXCLUDED(mu_) { WaitForStreams(/*only_lost=*/true); }

  // Lets go of every wholly free segment. For owners emptying the cache, after WaitForStreams().
  SegmentsToRelease TakeFreeSegments() ABSL_LOCKS_EXCLUDED(mu_);
  // Lets go of some wholly free segments, longest free first, and subtracts their bytes from `options->wanted_bytes`.
  // Call until the result is empty: other threads' hits and frees get the lock in between, and segments freed meanwhile
  // may stay.
  SegmentsToRelease TakeIdleSegments(TrimOptions* options) ABSL_LOCKS_EXCLUDED(mu_);
  // Lets go of `segment` if wholly free, else returns nothing. REQUIRES: the heap holds `segment`.
  SegmentsToRelease TakeSegment(Segment* segment) ABSL_LOCKS_EXCLUDED(mu_);
  // Advances the clock of min_idle_ticks: a caller trimming by age calls Tick() once a period.
  void Tick() ABSL_LOCKS_EXCLUDED(mu_);

  // Limits the bytes of segments held by the heap; kNoLimit: no limit. The owner enforces the limit when asked for a
  // segment (BlockRequest::passed_limit()). Garbage collection goes by the limit. Segments held already stay.
  void SetLimit(uint64_t bytes) ABSL_LOCKS_EXCLUDED(mu_);
  // Changes the whole for memory fractions set from now on, and for per_process_memory_fraction.
  void SetCapacity(uint64_t bytes) ABSL_LOCKS_EXCLUDED(mu_);
  // SetLimit() to a share of capacity, rounded down; 1 removes the limit. REQUIRES: 0 <= fraction <= 1.
  void SetMemoryFraction(double fraction) ABSL_LOCKS_EXCLUDED(mu_);

  MemoryStats GetMemoryStats() const ABSL_LOCKS_EXCLUDED(mu_);
  uint64_t num_alloc_retries() const ABSL_LOCKS_EXCLUDED(mu_);  // as in GetMemoryStats()
  void ResetPeakStats() ABSL_LOCKS_EXCLUDED(mu_);
  // Restarts totals (allocated, freed, and the plain counters) at 0.
  void ResetAccumulatedStats() ABSL_LOCKS_EXCLUDED(mu_);

  // Counts an out-of-memory event for a refused request not counted by any BlockRequest: for a size impossible for a
  // block, or for a segment outside the heap.
  void CountOutOfMemory() ABSL_LOCKS_EXCLUDED(mu_);

  // Takes over a heap from elsewhere: `segments` in the order given, with all blocks at their offsets. `id` is the
  // owner's id of a segment; `address` is not used. Returns the segments. Pending blocks become allocated blocks, for
  // the caller to free again: only the caller knows the work to wait for. Figures begin here: peaks are the amounts
  // held, totals are 0. FailedPrecondition when the heap has had segments before; else the errors of CheckSegments().
  absl::StatusOr<std::vector<Segment*>> StartWith(absl::Span<const SegmentSnapshot> segments) ABSL_LOCKS_EXCLUDED(mu_);
  // InvalidArgument names a segment whose blocks leave gaps or overlap, have an impossible size, or are free
  // neighbours.
  static absl::Status CheckSegments(absl::Span<const SegmentSnapshot> segments);

  // Keeps the last `max_events` events for snapshots, including events kept before; 0 (the default) keeps none. A free
  // completed at once counts as one event. Without `exact_times`, events of hits and frees have the time of the last
  // clock read: see NoteTime() and NoteEachTime().
  void SetRecording(size_t max_events, bool exact_times = true) ABSL_LOCKS_EXCLUDED(mu_);
  // Keeps at least `events` events, with exact times, regardless of SetRecording(); 0 ends this.
  void HoldRecording(size_t events) ABSL_LOCKS_EXCLUDED(mu_);

  // Size of the segment for a request without a fitting cached block.
  uint64_t NeededSegmentBytes(uint64_t requested) const;
  // Returns the heap's scopes by id, as of the call.
  using ScopeList = absl::FunctionRef<std::vector<Scope>()>;
  // Reports on a refused request of any size against the heap. Walks everything. Calls `scopes` without the lock and
  // after the walk: by then the list has every scope met.
  FitReport ExplainFit(
      uint64_t requested, Stream stream = 0, ScopeId scope = 0, ScopeList scopes = [] { return std::vector<Scope>(); })
      ABSL_LOCKS_EXCLUDED(mu_);
  // Reads the clock for the age of held blocks. A block has the time of the last call, of the last segment obtained, or
  // of at most 64 allocations before: no hit pays for a clock, unless NoteEachTime() was called.
  void NoteTime() ABSL_LOCKS_EXCLUDED(mu_);
  // Makes each allocation read the clock from now on: for heaps with hits slower than a clock anyway.
  void NoteEachTime() ABSL_LOCKS_EXCLUDED(mu_);
  // Copies the heap. With history, while recording, the snapshot is an event, too; frequent callers leave history out.
  HeapSnapshot Snapshot(bool with_history = true) ABSL_LOCKS_EXCLUDED(mu_);

  // OK, or Internal naming the first violated invariant (see caching_allocator.cc). Walks everything. Needs quiet: a
  // Free() or a wait in another thread may hold the events of a block.
  absl::Status CheckInvariants() const ABSL_LOCKS_EXCLUDED(mu_);

  // Memory used by records of blocks and segments and by indexes of free blocks, in bytes.
  uint64_t MetadataBytes() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  friend class BlockRequest;
  friend class SlowCall;

  struct Request {
    uint64_t requested;
    Stream stream;
    ScopeId scope;
    uint64_t block_bytes;
    uint64_t segment_bytes;
    PoolKind pool;
  };
  struct PendingFree {
    std::unique_ptr<Event> event;  // nullptr: not recorded yet
    Block* block = nullptr;
    uint64_t number = 0;  // counts the heap's pending frees
  };
  using PendingFrees = std::map<Stream, std::deque<PendingFree>>;  // in the order of the frees
  struct BlockSlab;

  Request Describe(uint64_t requested, Stream stream, ScopeId scope = 0) const;
  StreamPools* FindPools(Stream stream) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  StreamPools* MakePools(Stream stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool CollectsGarbage() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return options_.garbage_collection_threshold > 0 && limit_ != kNoLimit;
  }

  Block* FindInCache(const Request& request) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Block* AllocateFromCache(const Request& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Block* HandOut(Block* candidate, const Request& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Block* AddSegment(const AcquiredSegment& acquired, const Request& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Segment* NewSegment(const AcquiredSegment& acquired, uint64_t bytes, PoolKind pool, Stream stream)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Counts all blocks in `tally`, unless nullptr. `pinning`: scopes of the blocks in the result, in the result's order.
  Holes FindHoles(ScopeTally* tally, std::vector<ScopeId>* pinning) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // `kept`: receives History::Kept(), after adding an event for the snapshot; may be nullptr.
  void CopyHeap(std::vector<HistoryEvent>* kept, HeapSnapshot* copied) ABSL_LOCKS_EXCLUDED(mu_);
  void CopySegments(HeapSnapshot* copied) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // HeapSnapshot::scope_bytes_at_peak. REQUIRES: scopes are used.
  std::vector<uint64_t> ScopeBytesAtPeak() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // `block_bytes`: size of the event's block, if any.
  void Record(HistoryAction action, uint64_t address, uint64_t bytes, Stream stream, uint64_t block_bytes = 0,
              ScopeId scope = 0) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    HistoryEvent* const event = history_.Next();
    if (event == nullptr) return;
    if (history_.exact_times()) clock_.Update();
    event->action = action;
    event->scope = scope;
    event->set_block_bytes(block_bytes);
    event->address = address;
    event->bytes = bytes;
    event->stream = stream;
    event->time_us = clock_.time_us();
  }

  SlowCall BeginSlowCall() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void EndSlowCall(SlowCall& call) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Waits for slow calls begun before by other threads. Later calls are left out, or the wait might never end.
  void WaitForSlowCalls() ABSL_LOCKS_EXCLUDED(mu_);

  Block* Absorb(Block* lower, Block* upper) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void CompleteFree(Block* block) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void PutInCache(Block* block) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void TakeFromCache(Block* block) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void AddFreeSegment(Segment* segment) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void RemoveFreeSegment(Segment* segment) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool StreamIsDone(Block* block) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Poll() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Records events for frees met by Poll() without an event.
  void RecordMissingEvents() ABSL_LOCKS_EXCLUDED(mu_);
  void WaitForStreams(bool only_lost) ABSL_LOCKS_EXCLUDED(mu_);

  ReleasedSegment Unlink(Block* whole_segment) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::vector<ReleasedSegment> UnlinkFreeSegments() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::vector<ReleasedSegment> UnlinkGarbage() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::vector<ReleasedSegment> UnlinkOversize(const Request& request, bool* enough) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  SegmentsToRelease ToRelease(std::vector<ReleasedSegment> segments) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  Block* NewBlock() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void RecycleBlock(Block* block) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  EventSource* const events_;
  const AllocatorOptions options_;
  // Never held while an event is recorded or waited for.
  mutable Mutex mu_ ABSL_ACQUIRED_AFTER(lock_level::kHeap) ABSL_ACQUIRED_BEFORE(lock_level::kPool){lock_level::kHeap};
  std::map<Stream, std::unique_ptr<StreamPools>> pools_ ABSL_GUARDED_BY(mu_);  // of streams with a segment
  mutable StreamPools* recent_pools_ ABSL_GUARDED_BY(mu_) = nullptr;           // result of the last search
  Segment* first_segment_ ABSL_GUARDED_BY(mu_) = nullptr;                      // by order
  Segment* last_segment_ ABSL_GUARDED_BY(mu_) = nullptr;
  Segment* first_free_segment_ ABSL_GUARDED_BY(mu_) = nullptr;  // wholly free, longest free first
  Segment* last_free_segment_ ABSL_GUARDED_BY(mu_) = nullptr;
  uint64_t next_segment_order_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t next_address_ ABSL_GUARDED_BY(mu_);
  uint64_t limit_ ABSL_GUARDED_BY(mu_);
  uint64_t capacity_bytes_ ABSL_GUARDED_BY(mu_);
  uint64_t growing_bytes_ ABSL_GUARDED_BY(mu_) = 0;     // of segments being requested now
  std::set<uint64_t> slow_calls_ ABSL_GUARDED_BY(mu_);  // under way, by number
  uint64_t next_slow_call_ ABSL_GUARDED_BY(mu_) = 0;
  CondVar slow_call_ended_;
  std::array<uint64_t, 2> searches_ ABSL_GUARDED_BY(mu_) = {};  // by PoolKind; the clock of garbage collection
  uint64_t ticks_ ABSL_GUARDED_BY(mu_) = 0;
  HeapClock clock_ ABSL_GUARDED_BY(mu_);
  PendingFrees pending_ ABSL_GUARDED_BY(mu_);
  uint64_t next_pending_ ABSL_GUARDED_BY(mu_) = 0;
  bool events_missing_ ABSL_GUARDED_BY(mu_) = false;  // Poll() has met frees without an event
  PendingFrees lost_ ABSL_GUARDED_BY(mu_);            // pending frees of destroyed streams: not polled
  HeapCounters counters_ ABSL_GUARDED_BY(mu_);
  ScopeCounters scope_counters_ ABSL_GUARDED_BY(mu_);
  History history_ ABSL_GUARDED_BY(mu_);
  std::vector<std::unique_ptr<BlockSlab>> slabs_ ABSL_GUARDED_BY(mu_);  // storage of all blocks
  Block* spare_blocks_ ABSL_GUARDED_BY(mu_) = nullptr;                  // linked by `next`
};

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_HEAP_CACHING_ALLOCATOR_H_
