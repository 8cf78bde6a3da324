// SPDX-License-Identifier: Apache-2.0
//
// CachingAllocator: hands out blocks of segments and keeps freed ones for reuse.
//
// It decides as PyTorch's CUDA caching allocator does (which segment, which block, when to split, merge, flush, collect
// and give up), with its options, and counts the same figures. It never touches the memory itself, and calls nobody to
// get or to release it: it says what it needs (block_request.h) and what it has let go of (owner_segments.h), and its
// owner acts.
//
// Deliberate difference: after a flush the free blocks are searched once more before the request is refused
// (the original may refuse although a fitting block has just become free: pytorch/pytorch issue 189504).
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
  uint64_t wanted_bytes = std::numeric_limits<uint64_t>::max();  // stop once segments of so many bytes are taken
  uint64_t min_idle_ticks = 0;  // take only what is wholly free since so many ticks, see CachingAllocator::Tick()
};

// Safe to call from any thread. Hits and frees take a lock for a search. With the lock held nothing is waited for, and
// of what the owner gave only Event::Query() is called, so a slow device does not delay other threads' hits.
class CachingAllocator {
 public:
  static constexpr uint64_t kNoLimit = AllocatorOptions::kNoLimit;

  // `events` outlives the allocator. Without it, blocks that RecordStream() named are reusable as soon as they are
  // freed. `capacity_bytes`: what fractions are fractions of.
  explicit CachingAllocator(EventSource* events = nullptr, const AllocatorOptions& options = {},
                            uint64_t capacity_bytes = kNoLimit);
  // Blocks and segments are forgotten, not given back: their owner (a session, a process) is ending as a whole.
  ~CachingAllocator();
  CachingAllocator(const CachingAllocator&) = delete;
  CachingAllocator& operator=(const CachingAllocator&) = delete;

  const AllocatorOptions& options() const { return options_; }

  // A block of at least `requested` bytes for use on `stream`, from the cache, or nullptr: then a BlockRequest can have
  // one. `scope`: what the block is for, in the owner's list of scopes; it decides nothing.
  Block* TryAllocate(uint64_t requested, Stream stream = 0, ScopeId scope = 0) ABSL_LOCKS_EXCLUDED(mu_);

  // Notes that `stream` uses `block`, too: once freed, the block stays as it is until the work queued on `stream`
  // before the free is done. No effect for the stream that the block was allocated for. REQUIRES: as Free().
  void RecordStream(Block* block, Stream stream) ABSL_LOCKS_EXCLUDED(mu_);

  // Makes `block` free, at once or when the streams that it was recorded on are done with it, and joins it with free
  // neighbours. REQUIRES: `block` came from this object and was not freed since.
  void Free(Block* block) ABSL_LOCKS_EXCLUDED(mu_);

  // Completes the frees whose streams are done, as every allocation does. Never blocks.
  void PollEvents() ABSL_LOCKS_EXCLUDED(mu_);

  // Waits for the streams of pending frees, and completes these. Counts as a synchronization of all streams.
  void WaitForStreams() ABSL_LOCKS_EXCLUDED(mu_) { WaitForStreams(/*only_lost=*/false); }
  // Completes the frees that polling cannot: those whose stream does not exist any more. Waits for all work that the
  // process has on the device; does nothing, and costs next to nothing, when there are none. For a thread that has
  // time.
  void WaitForLostStreams() ABSL_LOCKS_EXCLUDED(mu_) { WaitForStreams(/*only_lost=*/true); }

  // Lets go of every wholly free segment, after WaitForStreams(): the owner empties the cache.
  SegmentsToRelease TakeFreeSegments() ABSL_LOCKS_EXCLUDED(mu_);
  // Lets go of some wholly free segments, those that are free for longest first, and takes their bytes from
  // `options->wanted_bytes`. Call it until it returns none; other threads' hits and frees get the lock in between, and
  // what becomes free meanwhile may stay.
  SegmentsToRelease TakeIdleSegments(TrimOptions* options) ABSL_LOCKS_EXCLUDED(mu_);
  // Lets go of `segment` if it is wholly free, else of none. REQUIRES: the heap holds it.
  SegmentsToRelease TakeSegment(Segment* segment) ABSL_LOCKS_EXCLUDED(mu_);
  // The clock of min_idle_ticks: a caller that trims by age calls this once a period.
  void Tick() ABSL_LOCKS_EXCLUDED(mu_);

  // The most bytes of segments that the owner will let the heap hold; kNoLimit: no limit. The owner enforces it, when
  // it is asked for a segment (BlockRequest::passed_limit()); garbage collection goes by it. What is held stays.
  void SetLimit(uint64_t bytes) ABSL_LOCKS_EXCLUDED(mu_);
  // SetLimit() to a share of capacity, rounded down; 1 removes the limit. REQUIRES: 0 <= fraction <= 1.
  void SetMemoryFraction(double fraction) ABSL_LOCKS_EXCLUDED(mu_);

  MemoryStats GetMemoryStats() const ABSL_LOCKS_EXCLUDED(mu_);
  uint64_t num_alloc_retries() const ABSL_LOCKS_EXCLUDED(mu_);  // of GetMemoryStats()
  void ResetPeakStats() ABSL_LOCKS_EXCLUDED(mu_);
  // Totals (allocated, freed, and the plain counters) start again at 0.
  void ResetAccumulatedStats() ABSL_LOCKS_EXCLUDED(mu_);

  // Counts an out-of-memory event for a request that was refused and that no BlockRequest has counted: of a size that
  // no block can have, or for a segment that is not the heap's.
  void CountOutOfMemory() ABSL_LOCKS_EXCLUDED(mu_);

  // Makes the heap one that was elsewhere: these segments, in this order, with these blocks at their offsets; `id` is
  // what the owner calls a segment, `address` is not used. Returns them; pending blocks are allocated
  // there, for the caller to free again: what they wait for, only it knows. Figures begin here: peaks are what is held,
  // totals are 0. FailedPrecondition when the heap has had segments before; else the errors of CheckSegments().
  absl::StatusOr<std::vector<Segment*>> StartWith(absl::Span<const SegmentSnapshot> segments) ABSL_LOCKS_EXCLUDED(mu_);
  // InvalidArgument names the segment whose blocks do not tile it, are of no possible size, or are free neighbours.
  static absl::Status CheckSegments(absl::Span<const SegmentSnapshot> segments);

  // Keeps the last `max_events` events for snapshots, of those that there are, too; 0 (the beginning) keeps none. A
  // free that completes at once counts as one. Without `exact_times` events of hits and frees have the time of
  // the last NoteTime(), or of the last allocation after NoteEachTime().
  void SetRecording(size_t max_events, bool exact_times = true) ABSL_LOCKS_EXCLUDED(mu_);
  // Keeps at least `events`, with exact times, whatever SetRecording() says; 0: no longer.
  void HoldRecording(size_t events) ABSL_LOCKS_EXCLUDED(mu_);

  // The segment that a request would take which no cached block can serve.
  uint64_t NeededSegmentBytes(uint64_t requested) const;
  // What the heap's ids of scopes are, by id, as of the call.
  using ScopeList = absl::FunctionRef<std::vector<Scope>()>;
  // How a request of any size that was refused stands against this heap. Walks everything. Calls `scopes` without the
  // lock and after it has looked at the heap: by then the list has every scope that it met.
  FitReport ExplainFit(
      uint64_t requested, Stream stream = 0, ScopeId scope = 0, ScopeList scopes = [] { return std::vector<Scope>(); })
      ABSL_LOCKS_EXCLUDED(mu_);
  // Reads the clock by which blocks are said to be held since some time. Their times are those of the last call, of the
  // last segment obtained, or of at most 64 allocations before: no hit pays for a clock, unless
  // NoteEachTime() was called.
  void NoteTime() ABSL_LOCKS_EXCLUDED(mu_);
  // From now on each allocation reads the clock: for heaps whose hits take longer than that anyway.
  void NoteEachTime() ABSL_LOCKS_EXCLUDED(mu_);
  // While recording, the snapshot is an event of its own; not without history, for those who look again and again.
  HeapSnapshot Snapshot(bool with_history = true) ABSL_LOCKS_EXCLUDED(mu_);

  // OK, or Internal naming the first invariant (see caching_allocator.cc) that does not hold. Walks everything. Needs
  // quiet: a Free() or a wait in another thread may have taken a block's events into its hands.
  absl::Status CheckInvariants() const ABSL_LOCKS_EXCLUDED(mu_);

  // Bytes of memory that the records of blocks and segments and the indexes of free blocks take.
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
    std::unique_ptr<Event> event;  // nullptr: it could not be recorded yet
    Block* block = nullptr;
    uint64_t number = 0;  // of the heap's
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
  // Counts all blocks in `tally`, if there is one. `pinning`: the scopes of the blocks that it names, in their order.
  Holes FindHoles(ScopeTally* tally, std::vector<ScopeId>* pinning) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // `kept`: History::Kept(), after an event of the snapshot.
  void CopyHeap(std::vector<HistoryEvent>* kept, HeapSnapshot* copied) ABSL_LOCKS_EXCLUDED(mu_);
  void CopySegments(HeapSnapshot* copied) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // HeapSnapshot::scope_bytes_at_peak. REQUIRES: scopes are used.
  std::vector<uint64_t> ScopeBytesAtPeak() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // `block_bytes`: of a block that the event is about.
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
  // Those of other threads that have begun; not those that begin meanwhile, or it might never end.
  void WaitForSlowCalls() ABSL_LOCKS_EXCLUDED(mu_);

  Block* Absorb(Block* lower, Block* upper) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void CompleteFree(Block* block) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void PutInCache(Block* block) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void TakeFromCache(Block* block) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void AddFreeSegment(Segment* segment) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void RemoveFreeSegment(Segment* segment) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool StreamIsDone(Block* block) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Poll() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Of frees that Poll() has met without an event.
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
  const uint64_t capacity_bytes_;

  // Never held while an event is recorded or waited for.
  mutable Mutex mu_ ABSL_ACQUIRED_AFTER(lock_level::kHeap) ABSL_ACQUIRED_BEFORE(lock_level::kPool){lock_level::kHeap};
  std::map<Stream, std::unique_ptr<StreamPools>> pools_ ABSL_GUARDED_BY(mu_);  // of streams that hold a segment
  mutable StreamPools* recent_pools_ ABSL_GUARDED_BY(mu_) = nullptr;           // found last
  Segment* first_segment_ ABSL_GUARDED_BY(mu_) = nullptr;                      // by order
  Segment* last_segment_ ABSL_GUARDED_BY(mu_) = nullptr;
  Segment* first_free_segment_ ABSL_GUARDED_BY(mu_) = nullptr;  // wholly free, in the order in which they became so
  Segment* last_free_segment_ ABSL_GUARDED_BY(mu_) = nullptr;
  uint64_t next_segment_order_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t next_address_ ABSL_GUARDED_BY(mu_);
  uint64_t limit_ ABSL_GUARDED_BY(mu_);
  uint64_t growing_bytes_ ABSL_GUARDED_BY(mu_) = 0;     // of segments that requests ask for at this moment
  std::set<uint64_t> slow_calls_ ABSL_GUARDED_BY(mu_);  // under way, by number
  uint64_t next_slow_call_ ABSL_GUARDED_BY(mu_) = 0;
  CondVar slow_call_ended_;
  std::array<uint64_t, 2> searches_ ABSL_GUARDED_BY(mu_) = {};  // by PoolKind; the clock of garbage collection
  uint64_t ticks_ ABSL_GUARDED_BY(mu_) = 0;
  HeapClock clock_ ABSL_GUARDED_BY(mu_);
  PendingFrees pending_ ABSL_GUARDED_BY(mu_);
  uint64_t next_pending_ ABSL_GUARDED_BY(mu_) = 0;
  bool events_missing_ ABSL_GUARDED_BY(mu_) = false;  // Poll() has met some
  PendingFrees lost_ ABSL_GUARDED_BY(mu_);            // pending too; their streams do not exist any more: not polled
  HeapCounters counters_ ABSL_GUARDED_BY(mu_);
  ScopeCounters scope_counters_ ABSL_GUARDED_BY(mu_);
  History history_ ABSL_GUARDED_BY(mu_);
  std::vector<std::unique_ptr<BlockSlab>> slabs_ ABSL_GUARDED_BY(mu_);  // storage of all blocks
  Block* spare_blocks_ ABSL_GUARDED_BY(mu_) = nullptr;                  // linked by `next`
};

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_HEAP_CACHING_ALLOCATOR_H_
