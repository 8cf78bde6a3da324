// SPDX-License-Identifier: Apache-2.0
//
// BlockRequest: one request for a block, up to the block or the refusal. It says what it needs next; its owner does it,
// in its own time: a client calls its daemon, a daemon lets the request wait in a queue, a replay answers at once.
//
//   search the cache --found--> kDone
//     | not found; with a garbage collection threshold, segments that are unused for long: kRelease
//   kSegment --Supply()--> kDone
//     | Deny(); segments larger than max_split_size: kRelease, and kSegment once more if they are enough
//   kWait: for the streams of pending frees; every wholly free segment: kRelease; kWait: for other threads' slow calls
//   kSegment, has_flushed() --Supply()--> kDone
//     | Deny()
//   search the cache once more --found--> kDone
//     | not found
//   kDone, an out-of-memory event
//
// The order is that of PyTorch's CUDA caching allocator (c10/cuda/CUDACachingAllocator.cpp). A heap whose segments grow
// in place would ask for that by one more Next, which owners answer as they do kSegment.
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

// Used by one thread at a time; requests of other threads go on beside it. It may be destroyed at any step, and is not
// counted as refused then; what it has let go of (kRelease) is the owner's to release all the same.
class BlockRequest {
 public:
  enum class Next {
    kRelease,  // release segments_to_release(), then call Released()
    kWait,     // call Wait(), which may take long
    kSegment,  // get a segment, then call Supply() or Deny(); meanwhile SearchAgain(), when something was freed
    kDone,     // result() has the block, or the refusal
  };

  // Searches the cache of `heap`, which outlives the request. Sizes from kMaxRequestBytes on are refused at once, with
  // ResourceExhausted, and not counted.
  explicit BlockRequest(CachingAllocator* heap, uint64_t requested, Stream stream = 0, ScopeId scope = 0);
  ~BlockRequest();
  BlockRequest(const BlockRequest&) = delete;
  BlockRequest& operator=(const BlockRequest&) = delete;

  Next next() const { return next_; }

  // Performs the steps kRelease and kWait up to one of another kind, which it returns. For owners that can release at
  // once. May take long.
  using ReleaseFunction = absl::FunctionRef<void(absl::Span<const ReleasedSegment>)>;
  Next Advance(ReleaseFunction release);

  // ---- kRelease ----

  absl::Span<const ReleasedSegment> segments_to_release() const { return to_release_.segments(); }
  void Released();

  // ---- kWait ----

  void Wait();

  // ---- kSegment ----

  uint64_t segment_bytes() const { return request_.segment_bytes; }
  // The heap has given back all that it could: the owner may now ask others for theirs, and wait for them.
  bool has_flushed() const { return stage_ == Stage::kFlushed; }
  // The request waits for others, maybe for long, and does not count as growth until it is supplied. Until then
  // SetLimit() and throw_on_cudamalloc_oom are judged without it.
  void Park();
  // Gives back what has become free since the flush, too, before it asks once more. REQUIRES: has_flushed().
  void FlushAgain();
  // CachingAllocator::SetLimit(), if the segment would lead beyond it.
  std::optional<uint64_t> passed_limit() const { return passed_limit_; }
  // A segment of segment_bytes(), which the heap holds from now on.
  void Supply(const AcquiredSegment& segment);
  // ResourceExhausted: there is no such segment for the heap now. Any other error ends the request and is its result.
  // `available_bytes`: what the owner could still supply, for the record of an out-of-memory event.
  void Deny(absl::Status why, uint64_t available_bytes = 0);
  // The request is done if the cache can serve it by now.
  bool SearchAgain();
  // Whether SearchAgain() would find a block now.
  bool IsInCache();
  // Why the last segment was denied, or OK.
  const absl::Status& refusal() const { return refusal_; }

  // ---- kDone ----

  // The block is the caller's, who frees it; or the last error. REQUIRES: next() is kDone.
  absl::StatusOr<Block*> result() const;

 private:
  enum class Stage { kNew, kOversizeReleased, kFlushing, kFlushed };

  void AskForSegment() ABSL_EXCLUSIVE_LOCKS_REQUIRED(heap_.mu_);
  void EndAsking() ABSL_EXCLUSIVE_LOCKS_REQUIRED(heap_.mu_);
  // For want of memory, at the stage that the request is in.
  void Refused() ABSL_EXCLUSIVE_LOCKS_REQUIRED(heap_.mu_);
  bool Search() ABSL_EXCLUSIVE_LOCKS_REQUIRED(heap_.mu_);
  // Returns false when there are none.
  bool Release(std::vector<ReleasedSegment> segments) ABSL_EXCLUSIVE_LOCKS_REQUIRED(heap_.mu_);
  bool Finish(Block* block);

  CachingAllocator& heap_;
  CachingAllocator::Request request_{};
  Next next_ = Next::kDone;
  Stage stage_ = Stage::kNew;
  bool oversize_is_enough_ = false;
  std::optional<uint64_t> passed_limit_;
  uint64_t growing_bytes_ = 0;    // of the heap's, this request's
  uint64_t available_bytes_ = 0;  // as of the last Deny()
  SegmentsToRelease to_release_;
  SlowCall asking_;
  Block* block_ = nullptr;
  absl::Status refusal_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_HEAP_BLOCK_REQUEST_H_
