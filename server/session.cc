// SPDX-License-Identifier: Apache-2.0
//
//   kActive --stream breaks--> kDisconnected --+
//      |  \--operator ends it--> kEnded -------+--process gone--> kClosed
//      +------------goodbye, process gone------+
//
// In every state but kClosed what the session holds stays charged to it: nobody can take mapped memory away.
#include "server/session.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/out_of_memory.h"

namespace vrambroker {
namespace {

// How long a request waits for the client to close segments that were asked back. What it closes later still counts.
constexpr std::chrono::seconds kCloseTimeout(1);

}  // namespace

const char* SessionStateName(SessionState state) {
  switch (state) {
    case SessionState::kActive:
      return "active";
    case SessionState::kDisconnected:
      return "disconnected";
    case SessionState::kEnded:
      return "ended";
    case SessionState::kClosed:
      return "closed";
  }
  return "unknown";
}

Session::Session(SessionId id, std::string name, Caller caller, const std::vector<SegmentPool*>& pools,
                 WorkerPool* workers, size_t max_blocks, std::shared_ptr<SessionEvents> events,
                 const AllocatorOptions& options)
    : id_(id),
      name_(std::move(name)),
      caller_(std::move(caller)),
      max_blocks_(max_blocks),
      workers_(*workers),
      events_(std::move(events)),
      slow_calls_(std::make_shared<SerialQueue>(workers)) {
  for (SegmentPool* pool : pools) {
    heaps_.push_back(std::make_unique<Heap>(this, pool, options));
    // per_process_memory_fraction is a limit of the account like others, and the pool is where limits are enforced.
    heaps_.back()->allocator.SetSourceLimit(CachingAllocator::kNoLimit);
  }
}

Session::~Session() = default;

SessionState Session::state() const {
  MutexLock lock(mu_);
  return state_;
}

bool Session::Advance(SessionState state) {
  MutexLock lock(mu_);
  if (state <= state_) return false;
  state_ = state;
  changed_.NotifyAll();
  return true;
}

absl::Status Session::CheckMayAllocate() const {
  MutexLock lock(mu_);
  if (state_ != SessionState::kActive) {
    return absl::AbortedError(absl::StrCat("session ", Raw(id_), " is ", SessionStateName(state_), "; open a new one"));
  }
  if (blocks_.size() >= max_blocks_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("session ", Raw(id_), " holds ", blocks_.size(),
                     " blocks, the most that max_blocks_per_session allows; free some, or allocate larger ones"));
  }
  return absl::OkStatus();
}

absl::StatusOr<Allocation> Session::AllocateFromCache(int device, uint64_t requested, Stream stream) {
  if (absl::Status status = CheckMayAllocate(); !status.ok()) return status;
  Block* block = heaps_[device]->allocator.TryAllocate(requested, stream);
  if (block == nullptr) return absl::NotFoundError("no cached block fits");
  return Record(device, block);
}

absl::StatusOr<Allocation> Session::AllocateSlowly(int device, uint64_t requested, Stream stream) {
  if (absl::Status status = CheckMayAllocate(); !status.ok()) return status;
  Heap& heap = *heaps_[device];
  const absl::StatusOr<Block*> block = heap.allocator.Allocate(requested, stream);
  if (block.ok()) return Record(device, *block);
  if (absl::IsResourceExhausted(block.status()) && !SegmentRefusalCause(block.status()).has_value()) {
    // The heap's own refusal, by throw_on_cudamalloc_oom.
    const bool ever_fits = heap.allocator.ExplainFit(requested).segment_bytes <= heap.pool.capacity_bytes();
    return SegmentRefused(ever_fits ? OomCause::kLimit : OomCause::kLargerThanDevice, block.status().message());
  }
  return block.status();
}

absl::StatusOr<Allocation> Session::Record(int device, Block* block) {
  Heap& heap = *heaps_[device];
  absl::StatusOr<WireHandle> handle = heap.pool.HandleFor(id_, block->segment_id());
  if (!handle.ok()) {
    heap.allocator.Free(block);
    return absl::IsNotFound(handle.status()) ? absl::AbortedError("the session has ended") : handle.status();
  }
  Allocation allocation{.segment = block->segment_id(),
                        .segment_bytes = block->segment_bytes(),
                        .offset = block->offset(),
                        .block_bytes = block->bytes,
                        .handle = *handle};
  MutexLock lock(mu_);
  allocation.block = BlockId{next_block_++};
  blocks_.emplace(allocation.block, HeldBlock{.device = device, .block = block});
  return allocation;
}

absl::Status Session::Free(absl::Span<const BlockId> blocks) {
  std::vector<HeldBlock> freed;
  freed.reserve(blocks.size());
  {
    MutexLock lock(mu_);
    for (size_t i = 0; i < blocks.size(); ++i) {
      const auto it = blocks_.find(blocks[i]);
      if (it == blocks_.end()) {
        // Undo: all or nothing.
        for (size_t k = 0; k < i; ++k) blocks_.emplace(blocks[k], freed[k]);
        for (size_t k = 0; k < i; ++k) {
          if (blocks[k] == blocks[i]) {
            return absl::InvalidArgumentError(absl::StrCat("block_ids: ", Raw(blocks[i]), " is named twice"));
          }
        }
        return absl::NotFoundError(absl::StrCat("block_ids: session ", Raw(id_), " holds no block ", Raw(blocks[i]),
                                                "; it may have been freed before"));
      }
      freed.push_back(it->second);
      blocks_.erase(it);
    }
  }
  for (const HeldBlock& held : freed) heaps_[held.device]->allocator.Free(held.block);
  return absl::OkStatus();
}

uint64_t Session::EmptyCache() {
  uint64_t bytes = 0;
  for (const std::unique_ptr<Heap>& heap : heaps_) bytes += heap->allocator.EmptyCache();
  return bytes;
}

uint64_t Session::ReturnSegments(SegmentPool& pool, absl::Span<const ReleasedSegment> segments) {
  std::vector<SegmentId> ids;
  ids.reserve(segments.size());
  for (const ReleasedSegment& segment : segments) ids.push_back(segment.id);
  pool.MarkReturning(id_, ids);
  {
    MutexLock lock(mu_);
    for (const SegmentId id : ids) closing_.emplace(id, &pool);
  }
  events_->CloseSegments(ids);

  const bool may_wait = workers_.TryStartWaiting();
  const auto deadline = std::chrono::steady_clock::now() + kCloseTimeout;
  uint64_t closed_bytes = 0;
  MutexLock lock(mu_);
  while (true) {
    closed_bytes = 0;
    bool all_closed = true;
    for (const ReleasedSegment& segment : segments) {
      if (closing_.contains(segment.id)) {
        all_closed = false;
      } else {
        closed_bytes += segment.bytes;
      }
    }
    if (all_closed || !may_wait || state_ != SessionState::kActive || !changed_.WaitUntil(mu_, deadline)) break;
  }
  if (may_wait) workers_.StopWaiting();
  return closed_bytes;
}

void Session::LimitIs(int device, uint64_t limit_bytes) {
  Heap& heap = *heaps_[device];
  heap.allocator.SetSourceLimit(limit_bytes < heap.pool.capacity_bytes() ? limit_bytes : CachingAllocator::kNoLimit);
}

void Session::SegmentsClosed(absl::Span<const SegmentId> segments) {
  MutexLock lock(mu_);
  for (const SegmentId id : segments) {
    const auto it = closing_.find(id);
    if (it == closing_.end()) continue;
    it->second->Return(id_, {id});
    closing_.erase(it);
  }
  changed_.NotifyAll();
}

}  // namespace vrambroker
