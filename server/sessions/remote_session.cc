// SPDX-License-Identifier: Apache-2.0
#include "server/sessions/remote_session.h"

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/pool/segment_refusal.h"

namespace vrambroker {

RemoteSession::RemoteSession(const SessionSetup& setup) : Session(setup) {
  for (const SegmentPool* pool : setup.pools) {
    allocators_.push_back(
        std::make_unique<CachingAllocator>(/*events=*/nullptr, setup.allocator, pool->capacity_bytes()));
    // per_process_memory_fraction is part of the account's limit, set by SetLimit().
    allocators_.back()->SetLimit(CachingAllocator::kNoLimit);
    allocators_.back()->SetRecording(setup.record_events, /*exact_times=*/false);
    allocators_.back()->NoteEachTime();
  }
}

// ---- Allocate and free ----

absl::Status RemoteSession::CheckMayAllocate() const {
  MutexLock lock(mu_);
  return CheckRoomForBlock();
}

absl::Status RemoteSession::CheckRoomForBlock() const {
  if (absl::Status status = CheckActive(); !status.ok()) return status;
  if (blocks_.size() < bounds_.max_blocks) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("session ", Raw(id_), " holds ", blocks_.size(),
                   " blocks, the most that max_blocks_per_session allows; free some, or allocate larger ones"));
}

absl::StatusOr<Allocation> RemoteSession::AllocateFromCache(int device, uint64_t requested, Stream stream,
                                                            ScopeId scope) {
  // Holds mu_ from the check to the record: a hit takes mu_, the heap's lock and the pool's lock only once each.
  MutexLock lock(mu_);
  if (absl::Status status = CheckRoomForBlock(); !status.ok()) return status;
  Block* block = allocator(device).TryAllocate(requested, stream, scope);
  if (block == nullptr) return absl::NotFoundError("no cached block fits");
  return Record(device, block);
}

absl::Status RemoteSession::RunUntilRefused(int device, BlockRequest& request) {
  const auto release = [&](absl::Span<const ReleasedSegment> segments) { ReturnSegments(device, segments); };
  while (request.Advance(release) == BlockRequest::Next::kSegment) {
    const absl::Status refusal = SupplyFromPool(device, request, /*granted=*/false);
    if (!refusal.ok()) return refusal;
  }
  return absl::OkStatus();
}

absl::Status RemoteSession::SupplyReserved(int device, BlockRequest& request, Reservation reservation) {
  return SupplyFromPool(device, request, /*granted=*/reservation.Consume());
}

absl::Status RemoteSession::SupplyFromPool(int device, BlockRequest& request, bool granted) {
  const absl::StatusOr<SegmentId> segment = pool(device).Lease(id_, request.segment_bytes(), granted);
  if (segment.ok()) {
    request.Supply({.id = *segment});
  } else if (request.has_flushed() && SegmentRefusalCause(segment.status()) == OomCause::kCapacity) {
    return segment.status();
  } else {
    request.Deny(segment.status(), pool(device).AvailableBytes(id_));
  }
  return absl::OkStatus();
}

absl::StatusOr<Allocation> RemoteSession::FinishAllocation(int device, const BlockRequest& request) {
  const absl::StatusOr<Block*> block = request.result();
  if (block.ok()) {
    MutexLock lock(mu_);
    if (absl::Status status = CheckRoomForBlock(); !status.ok()) {
      allocator(device).Free(*block);
      return status;
    }
    return Record(device, *block);
  }
  if (absl::IsResourceExhausted(block.status()) && !SegmentRefusalCause(block.status()).has_value()) {
    // Refused by the heap itself, due to throw_on_cudamalloc_oom.
    const bool ever_fits = request.segment_bytes() <= pool(device).capacity_bytes();
    return SegmentRefused(ever_fits ? OomCause::kLimit : OomCause::kLargerThanDevice, block.status().message());
  }
  return block.status();
}

absl::StatusOr<Allocation> RemoteSession::Record(int device, Block* block) {
  absl::StatusOr<WireHandle> handle = pool(device).HandleFor(id_, block->segment_id());
  if (!handle.ok()) {
    allocator(device).Free(block);
    return absl::IsNotFound(handle.status()) ? absl::AbortedError("the session has ended") : handle.status();
  }
  Allocation allocation{.segment = block->segment_id(),
                        .segment_bytes = block->segment_bytes(),
                        .offset = block->offset(),
                        .block_bytes = block->bytes,
                        .handle = *handle};
  allocation.block = BlockId{next_block_++};
  blocks_.emplace(allocation.block, HeldBlock{.device = device, .block = block});
  return allocation;
}

absl::Status RemoteSession::Free(absl::Span<const BlockId> blocks) {
  std::vector<HeldBlock> freed;
  freed.reserve(blocks.size());
  {
    MutexLock lock(mu_);
    for (size_t i = 0; i < blocks.size(); ++i) {
      const auto it = blocks_.find(blocks[i]);
      if (it == blocks_.end()) {
        // Undoes earlier iterations: all or nothing.
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
  for (const HeldBlock& held : freed) allocator(held.device).Free(held.block);
  return absl::OkStatus();
}

// ---- Returning segments ----

uint64_t RemoteSession::EmptyCache(int device) {
  allocator(device).WaitForStreams();
  const SegmentsToRelease free = allocator(device).TakeFreeSegments();
  return free.empty() ? 0 : ReturnSegments(device, free.segments());
}

uint64_t RemoteSession::TrimHeap(int device, uint64_t bytes) {
  TrimOptions options{.wanted_bytes = bytes};
  uint64_t closed = 0;
  while (true) {
    const SegmentsToRelease idle = allocator(device).TakeIdleSegments(&options);
    if (idle.empty()) return closed;
    closed += ReturnSegments(device, idle.segments());
  }
}

absl::StatusOr<uint64_t> RemoteSession::TrimSlowly(uint64_t /*bytes*/) {
  uint64_t released = 0;
  for (size_t device = 0; device < device_count(); ++device) released += EmptyCache(static_cast<int>(device));
  return released;
}

void RemoteSession::SendReclaim(int device, uint64_t bytes, std::chrono::milliseconds /*time*/,
                                const std::function<void()>& answered) {
  const bool queued = slow_calls().Submit([this, self = shared_from_this(), device, bytes, answered] {
    if (state() == SessionState::kActive) TrimHeap(device, bytes);
    answered();
  });
  if (!queued) answered();
}

uint64_t RemoteSession::ReturnSegments(int device, absl::Span<const ReleasedSegment> segments) {
  std::vector<SegmentId> ids;
  ids.reserve(segments.size());
  for (const ReleasedSegment& segment : segments) ids.push_back(segment.id);
  pool(device).MarkReturning(id_, ids);
  {
    MutexLock lock(mu_);
    for (const SegmentId id : ids) closing_.emplace(id, &pool(device));
  }
  events()->CloseSegments(ids);

  const absl::StatusOr<UserSlots::Slot> waiting = workers_.StartWaiting(caller_.user());
  const bool may_wait = waiting.ok();
  // Segments closed later still count.
  const auto deadline = std::chrono::steady_clock::now() + bounds_.client_timeout / 2;
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
  return closed_bytes;
}

void RemoteSession::SegmentsClosed(absl::Span<const SegmentId> segments) {
  std::vector<std::pair<SegmentPool*, SegmentId>> closed;
  {
    MutexLock lock(mu_);
    for (const SegmentId id : segments) {
      if (const auto it = closing_.find(id); it != closing_.end()) closed.emplace_back(it->second, id);
    }
  }
  // Without the lock: returned memory may let requests proceed, even of this session.
  for (const auto& [pool, id] : closed) pool->FinishReturning(id_, {id});
  MutexLock lock(mu_);
  for (const auto& [pool, id] : closed) closing_.erase(id);
  changed_.NotifyAll();
}

void RemoteSession::SetLimit(int device, uint64_t limit_bytes) {
  allocator(device).SetLimit(limit_bytes < pool(device).capacity_bytes() ? limit_bytes : CachingAllocator::kNoLimit);
}

// ---- Scopes, figures, recordings ----

ScopeId RemoteSession::FindScope(absl::Span<const NamedScope> scopes) {
  if (scopes.empty()) return 0;
  ScopeId found = 0;
  MutexLock lock(scopes_mu_);
  for (const NamedScope& scope : scopes) found = scopes_.Find(found, scope.name, scope.file, scope.line);
  return found;
}

std::vector<Scope> RemoteSession::Scopes() {
  MutexLock lock(scopes_mu_);
  return scopes_.scopes();
}

FitReport RemoteSession::ExplainFit(int device, uint64_t requested, Stream stream, ScopeId scope) {
  return allocator(device).ExplainFit(requested, stream, scope, [this] { return Scopes(); });
}

absl::Status RemoteSession::ResetStats(int device, bool accumulated) {
  allocator(device).ResetPeakStats();
  if (!accumulated) return absl::OkStatus();
  MutexLock lock(mu_);
  UpdateRetries(device);
  allocator(device).ResetAccumulatedStats();
  CountRetriesFrom(device, 0);
  return absl::OkStatus();
}

absl::StatusOr<HeapSnapshot> RemoteSession::SnapshotSlowly(int device, bool with_history) {
  HeapSnapshot snapshot = allocator(device).Snapshot(with_history);
  snapshot.scopes = Scopes();  // after the heap, so the scopes include all ids of the heap
  return snapshot;
}

absl::StatusOr<HeapSnapshot> RemoteSession::RecordingOfRefusal(int device) {
  return SnapshotSlowly(device, /*with_history=*/true);
}

absl::Status RemoteSession::SetRecording(uint64_t max_events, bool exact_times) {
  for (const auto& allocator : allocators_) allocator->SetRecording(max_events, exact_times);
  recorded_events_ = max_events;
  return absl::OkStatus();
}

void RemoteSession::ApplyRecordingHolds() {
  recording_holds_.Apply([this](uint64_t most) {
    for (const auto& allocator : allocators_) allocator->HoldRecording(most);
  });
}

absl::Status RemoteSession::ApplyRecordingHoldsSlowly() {
  ApplyRecordingHolds();
  return absl::OkStatus();
}

}  // namespace vrambroker
