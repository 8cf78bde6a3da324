// SPDX-License-Identifier: Apache-2.0
//
// RemoteSession: a session with allocators in the daemon. Its client gets blocks, and maps the segments around them.
#ifndef VRAMBROKER_SERVER_SESSIONS_REMOTE_SESSION_H_
#define VRAMBROKER_SERVER_SESSIONS_REMOTE_SESSION_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "allocator/heap/block_request.h"
#include "allocator/heap/caching_allocator.h"
#include "allocator/heap/fit_report.h"
#include "allocator/heap/owner_segments.h"
#include "allocator/heap/scopes.h"
#include "server/pool/reservation.h"
#include "server/sessions/session.h"

namespace vrambroker {

// A block as seen by its holder.
struct Allocation {
  BlockId block{};
  SegmentId segment{};
  uint64_t segment_bytes = 0;
  uint64_t offset = 0;
  uint64_t block_bytes = 0;
  WireHandle handle;
};

class RemoteSession : public Session {
 public:
  explicit RemoteSession(const SessionSetup& setup);

  Placement placement() const override { return Placement::kRemote; }
  RemoteSession* remote() override { return this; }

  // ---- Allocate and free ----

  // Aborted when the session is not active, ResourceExhausted when it holds too many blocks.
  absl::Status CheckMayAllocate() const ABSL_LOCKS_EXCLUDED(mu_);
  // A block from the cache; NotFound when none fits, so a BlockRequest must try. Errors as CheckMayAllocate().
  absl::StatusOr<Allocation> AllocateFromCache(int device, uint64_t requested, Stream stream = 0, ScopeId scope = 0);
  // Cache misses use a BlockRequest of the session's heap. The session performs the request's steps.
  CachingAllocator& allocator(int device) { return *allocators_[device]; }
  // (slow) Runs `request` until done (OK), or until only other sessions' memory can help. Then returns the pool's
  // refusal; the session's own cache is flushed by then.
  absl::Status RunUntilRefused(int device, BlockRequest& request);
  // (slow) Supplies the segment needed by `request`, using its `reservation`. Errors as RunUntilRefused(): the driver
  // may lack the memory after all.
  absl::Status SupplyReserved(int device, BlockRequest& request, Reservation reservation);
  // Result of the finished `request`. SegmentRefused() without memory; errors as CheckMayAllocate().
  absl::StatusOr<Allocation> FinishAllocation(int device, const BlockRequest& request);
  // Frees all of `blocks`, or none. InvalidArgument: duplicates. NotFound: not blocks of this session, or freed before.
  absl::Status Free(absl::Span<const BlockId> blocks) ABSL_LOCKS_EXCLUDED(mu_);
  // The client has closed these segments.
  void SegmentsClosed(absl::Span<const SegmentId> segments) ABSL_LOCKS_EXCLUDED(mu_);

  // ---- Scopes ----

  // A scope of a request. Its strings point into the message: requests are too frequent for copies.
  struct NamedScope {
    absl::string_view name;
    absl::string_view file;
    uint32_t line = 0;
  };
  // Returns the id of the innermost scope. `scopes` is a path, outermost first. Adds unknown scopes.
  ScopeId FindScope(absl::Span<const NamedScope> scopes) ABSL_LOCKS_EXCLUDED(scopes_mu_);
  // CachingAllocator::ExplainFit().
  FitReport ExplainFit(int device, uint64_t requested, Stream stream, ScopeId scope) ABSL_LOCKS_EXCLUDED(scopes_mu_);

  absl::StatusOr<uint64_t> TrimSlowly(uint64_t bytes) override;
  // Sets the limit also for garbage collection.
  void SetLimit(int device, uint64_t limit_bytes) override;
  MemoryStats GetMemoryStats(int device) const override { return allocators_[device]->GetMemoryStats(); }
  absl::Status ResetStats(int device, bool accumulated) override ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<HeapSnapshot> SnapshotSlowly(int device, bool with_history) override ABSL_LOCKS_EXCLUDED(scopes_mu_);
  absl::StatusOr<HeapSnapshot> RecordingOfRefusal(int device) override;
  absl::Status SetRecording(uint64_t max_events, bool exact_times) override;
  void ApplyRecordingHolds() override;
  absl::Status ApplyRecordingHoldsSlowly() override;

 private:
  struct HeldBlock {
    int device = 0;
    Block* block = nullptr;
  };

  void SendReclaim(int device, uint64_t bytes, std::chrono::milliseconds time,
                   const std::function<void()>& answered) override;
  uint64_t NumAllocRetries(int device) const override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return allocators_[device]->num_alloc_retries();
  }
  SerialQueue& TrimQueue() override { return slow_calls(); }  // after earlier allocations
  absl::Status RefreshStats() override { return absl::OkStatus(); }

  // Supplies `request`, or denies it (OK), unless only other sessions' memory can help: as RunUntilRefused().
  absl::Status SupplyFromPool(int device, BlockRequest& request, bool granted);
  // Errors as CheckMayAllocate().
  absl::Status CheckRoomForBlock() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Aborted, after freeing the block, when the session has ended.
  absl::StatusOr<Allocation> Record(int device, Block* block) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // (slow) Asks the client to close `segments`. Waits for the client, at most half of client_timeout; does not wait
  // when too many calls wait already. Returns the bytes closed.
  uint64_t ReturnSegments(int device, absl::Span<const ReleasedSegment> segments) ABSL_LOCKS_EXCLUDED(mu_);
  // (slow) ReturnSegments() of all wholly free segments, or of `bytes` of them.
  uint64_t EmptyCache(int device);
  uint64_t TrimHeap(int device, uint64_t bytes);
  std::vector<Scope> Scopes() ABSL_LOCKS_EXCLUDED(scopes_mu_);

  std::vector<std::unique_ptr<CachingAllocator>> allocators_;  // by device; internally synchronised

  Mutex scopes_mu_;  // guards only scopes_; no other lock is taken under it
  ScopeTable scopes_ ABSL_GUARDED_BY(scopes_mu_);

  uint64_t next_block_ ABSL_GUARDED_BY(mu_) = 1;
  absl::flat_hash_map<BlockId, HeldBlock> blocks_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<SegmentId, SegmentPool*> closing_ ABSL_GUARDED_BY(mu_);  // asked back, not yet closed
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_SESSIONS_REMOTE_SESSION_H_
