// SPDX-License-Identifier: Apache-2.0
//
// BlockRequest: a request for a block, up to the block or the refusal. next() names the next step. The owner performs
// the step in its own time: a client calls the daemon, a daemon queues the request, a replay answers at once.
//
//   search the cache --found--> kDone
//     | not found; with a garbage collection threshold, long-unused segments: kRelease
//   kSegment --Supply()--> kDone
//     | Deny(); segments larger than max_split_size: kRelease, and if enough, kSegment once more
//   kWait: for the streams of pending frees; every wholly free segment: kRelease; kWait: for other threads' slow calls
//   kSegment, has_flushed() --Supply()--> kDone
//     | Deny()
//   search the cache once more --found--> kDone
//     | not found
//   kDone, an out-of-memory event
//
// The order follows PyTorch's CUDA caching allocator (c10/cuda/CUDACachingAllocator.cpp). A heap of segments growing in
// place would add a Next for growth, answered by owners like kSegment.
#ifndef VRAMBROKER_ALLOCATOR_HEAP_BLOCK_REQUEST_H_
#define VRAMBROKER_ALLOCATOR_HEAP_BLOCK_REQUEST_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "allocator/device/events.h"
#include "allocator/heap/block.h"
#include "allocator/heap/caching_allocator.h"
#include "allocator/heap/owner_segments.h"
#include "allocator/heap/scopes.h"

namespace vrambroker {

// Used by one thread at a time; requests of other threads proceed in parallel. May be destroyed at any step, and does
// not count as refused then. The owner must then still release the segments of a kRelease step.
class BlockRequest {
 public:
  enum class Next {
    kRelease,  // release segments_to_release(), then call Released()
    kWait,     // call Wait(); may take long
    kSegment,  // get a segment, then call Supply() or Deny(); meanwhile, after a free, call SearchAgain()
    kDone,     // result() has the block, or the refusal
  };

  // Searches the cache of `heap`. REQUIRES: `heap` outlives the request. Sizes from kMaxRequestBytes on are refused at
  // once with ResourceExhausted, and not counted.
  explicit BlockRequest(CachingAllocator* heap, uint64_t requested, Stream stream = 0, ScopeId scope = 0);
  ~BlockRequest();
  BlockRequest(const BlockRequest&) = delete;
  BlockRequest& operator=(const BlockRequest&) = delete;

  Next next() const { return next_; }

  // Performs kRelease and kWait steps, and returns the first step of another kind. For owners able to release at once.
  // May take long.
  using ReleaseFunction = absl::FunctionRef<void(absl::Span<const ReleasedSegment>)>;
  Next Advance(ReleaseFunction release);

  // ---- kRelease ----

  absl::Span<const ReleasedSegment> segments_to_release() const { return to_release_.segments(); }
  void Released();

  // ---- kWait ----

  void Wait();

  // ---- kSegment ----

  uint64_t segment_bytes() const { return request_.segment_bytes; }
  // The heap has nothing left to give back: the owner may now ask others for memory, and wait.
  bool has_flushed() const { return stage_ == Stage::kFlushed; }
  // Stops counting the request as growth until Supply(), for a wait of unknown length. Until then SetLimit() and
  // throw_on_cudamalloc_oom are judged without the request.
  void Park();
  // Flushes again, to give back segments freed since the first flush, before asking once more. REQUIRES: has_flushed().
  void FlushAgain();
  // The limit set by CachingAllocator::SetLimit(), if too low for the segment.
  std::optional<uint64_t> passed_limit() const { return passed_limit_; }
  // Adds a segment of segment_bytes() to the heap.
  void Supply(const AcquiredSegment& segment);
  // Denies the segment. ResourceExhausted: the heap cannot get the segment now. Any other error ends the request and is
  // the result. `available_bytes`: bytes left with the owner, for the record of an out-of-memory event.
  void Deny(absl::Status why, uint64_t available_bytes = 0);
  // Completes the request and returns true if the cache can serve the request by now.
  bool SearchAgain();
  // Returns whether SearchAgain() would find a block now.
  bool IsInCache();
  // Reason for the last denial of a segment, or OK.
  const absl::Status& refusal() const { return refusal_; }

  // ---- kDone ----

  // The block, freed later by the caller; or the last error. REQUIRES: next() is kDone.
  absl::StatusOr<Block*> result() const;

 private:
  enum class Stage { kNew, kOversizeReleased, kFlushing, kFlushed };

  void AskForSegment() ABSL_EXCLUSIVE_LOCKS_REQUIRED(heap_.mu_);
  void EndAsking() ABSL_EXCLUSIVE_LOCKS_REQUIRED(heap_.mu_);
  // Handles a lack of memory, according to the request's stage.
  void Refused() ABSL_EXCLUSIVE_LOCKS_REQUIRED(heap_.mu_);
  bool Search() ABSL_EXCLUSIVE_LOCKS_REQUIRED(heap_.mu_);
  // Returns false when `segments` is empty.
  bool Release(std::vector<ReleasedSegment> segments) ABSL_EXCLUSIVE_LOCKS_REQUIRED(heap_.mu_);
  bool Finish(Block* block);

  CachingAllocator& heap_;
  CachingAllocator::Request request_{};
  Next next_ = Next::kDone;
  Stage stage_ = Stage::kNew;
  bool oversize_is_enough_ = false;
  std::optional<uint64_t> passed_limit_;
  uint64_t growing_bytes_ = 0;    // the request's part of the heap's growing_bytes_
  uint64_t available_bytes_ = 0;  // as of the last Deny()
  SegmentsToRelease to_release_;
  SlowCall asking_;
  Block* block_ = nullptr;
  absl::Status refusal_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_HEAP_BLOCK_REQUEST_H_
