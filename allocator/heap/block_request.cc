// SPDX-License-Identifier: Apache-2.0
#include "allocator/heap/block_request.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "allocator/base/mutex.h"
#include "allocator/heap/history.h"
#include "allocator/heap/size_class.h"

namespace vrambroker {

BlockRequest::BlockRequest(CachingAllocator* heap, uint64_t requested, Stream stream, ScopeId scope) : heap_(*heap) {
  if (requested >= kMaxRequestBytes) {
    refusal_ = absl::ResourceExhaustedError(absl::StrCat(requested, " bytes are more than any device has"));
    return;
  }
  request_ = heap_.Describe(requested, stream, scope);
  MutexLock lock(heap_.mu_);
  if (!heap_.pending_.empty()) heap_.Poll();
  if (heap_.CollectsGarbage()) ++heap_.searches_[static_cast<int>(request_.pool)];
  if (Finish(heap_.AllocateFromCache(request_))) return;
  if (heap_.CollectsGarbage() && Release(heap_.UnlinkGarbage())) return;
  AskForSegment();
}

BlockRequest::~BlockRequest() {
  if (next_ != Next::kSegment) return;
  MutexLock lock(heap_.mu_);
  EndAsking();
}

BlockRequest::Next BlockRequest::Advance(ReleaseFunction release) {
  while (next_ == Next::kRelease || next_ == Next::kWait) {
    if (next_ == Next::kWait) {
      Wait();
    } else {
      release(segments_to_release());
      Released();
    }
  }
  return next_;
}

void BlockRequest::Released() {
  to_release_ = SegmentsToRelease();
  if (stage_ == Stage::kFlushed) {
    next_ = Next::kWait;
  } else if (stage_ == Stage::kOversizeReleased && !oversize_is_enough_) {
    stage_ = Stage::kFlushing;
    next_ = Next::kWait;
  } else {
    MutexLock lock(heap_.mu_);
    AskForSegment();
  }
}

void BlockRequest::Wait() {
  if (stage_ == Stage::kFlushing) {
    heap_.WaitForStreams();
    stage_ = Stage::kFlushed;
    MutexLock lock(heap_.mu_);
    if (Release(heap_.UnlinkFreeSegments())) return;
  }
  heap_.WaitForSlowCalls();
  MutexLock lock(heap_.mu_);
  AskForSegment();
}

bool BlockRequest::Release(std::vector<ReleasedSegment> segments) {
  if (segments.empty()) return false;
  to_release_ = heap_.ToRelease(std::move(segments));
  next_ = Next::kRelease;
  return true;
}

void BlockRequest::AskForSegment() {
  if (has_flushed()) ++heap_.counters_.num_alloc_retries;
  const uint64_t grown = heap_.counters_.reserved_bytes.current() + heap_.growing_bytes_ + request_.segment_bytes;
  passed_limit_.reset();
  if (heap_.limit_ != CachingAllocator::kNoLimit && grown > heap_.limit_) {
    passed_limit_ = heap_.limit_;
  } else {
    if (heap_.options_.reject_without_retry &&
        static_cast<double>(grown) >
            heap_.options_.per_process_memory_fraction * static_cast<double>(heap_.capacity_bytes_)) {
      ++heap_.counters_.num_oom_rejections;
      refusal_ = absl::ResourceExhaustedError(
          absl::StrCat("a segment of ", FormatBytes(request_.segment_bytes),
                       " would exceed per_process_memory_fraction, and throw_on_cudamalloc_oom is set"));
      if (stage_ == Stage::kNew) {
        next_ = Next::kDone;
      } else {
        Refused();
      }
      return;
    }
    growing_bytes_ = request_.segment_bytes;
    heap_.growing_bytes_ += growing_bytes_;
  }
  // After the flush the request gives back no memory for others to wait for, and may itself wait for long.
  if (!has_flushed()) asking_ = heap_.BeginSlowCall();
  next_ = Next::kSegment;
}

void BlockRequest::EndAsking() {
  heap_.growing_bytes_ -= std::exchange(growing_bytes_, 0);
  heap_.EndSlowCall(asking_);
}

bool BlockRequest::Finish(Block* block) {
  if (block == nullptr) return false;
  block_ = block;
  next_ = Next::kDone;
  return true;
}

void BlockRequest::Supply(const AcquiredSegment& segment) {
  MutexLock lock(heap_.mu_);
  EndAsking();
  heap_.clock_.Update();
  Finish(heap_.HandOut(heap_.AddSegment(segment, request_), request_));
}

void BlockRequest::Deny(absl::Status why, uint64_t available_bytes) {
  MutexLock lock(heap_.mu_);
  EndAsking();
  refusal_ = std::move(why);
  available_bytes_ = available_bytes;
  if (absl::IsResourceExhausted(refusal_)) {
    Refused();
  } else {
    next_ = Next::kDone;
  }
}

void BlockRequest::Refused() {
  switch (stage_) {
    case Stage::kNew:
      stage_ = Stage::kOversizeReleased;
      if (Release(heap_.UnlinkOversize(request_, &oversize_is_enough_))) return;
      [[fallthrough]];
    case Stage::kOversizeReleased:
    case Stage::kFlushing:
      stage_ = Stage::kFlushing;
      next_ = Next::kWait;
      return;
    case Stage::kFlushed:
      if (Search()) return;  // freed by another thread, or by a stream
      ++heap_.counters_.num_ooms;
      heap_.Record(HistoryAction::kOutOfMemory, available_bytes_, request_.block_bytes, request_.stream,
                   /*block_bytes=*/0, request_.scope);
      next_ = Next::kDone;
      return;
  }
}

// Updates the clock, since this search may come long after the first. The first search does not: a clock costs as much
// as a hit.
bool BlockRequest::Search() {
  heap_.clock_.Update();
  heap_.Poll();
  return Finish(heap_.AllocateFromCache(request_));
}

bool BlockRequest::SearchAgain() {
  heap_.PollEvents();
  MutexLock lock(heap_.mu_);
  if (!Search()) return false;
  EndAsking();
  return true;
}

void BlockRequest::Park() {
  MutexLock lock(heap_.mu_);
  EndAsking();
}

void BlockRequest::FlushAgain() {
  MutexLock lock(heap_.mu_);
  EndAsking();
  stage_ = Stage::kFlushing;
  next_ = Next::kWait;
}

bool BlockRequest::IsInCache() {
  heap_.PollEvents();
  MutexLock lock(heap_.mu_);
  return heap_.FindInCache(request_) != nullptr;
}

absl::StatusOr<Block*> BlockRequest::result() const {
  if (block_ != nullptr) return block_;
  return refusal_;
}

}  // namespace vrambroker
