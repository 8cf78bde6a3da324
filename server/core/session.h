// SPDX-License-Identifier: Apache-2.0
//
// Session: one connected client process and all that it holds.
#ifndef VRAMBROKER_SERVER_CORE_SESSION_H_
#define VRAMBROKER_SERVER_CORE_SESSION_H_

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "allocator/base/ids.h"
#include "allocator/base/mutex.h"
#include "allocator/heap/block_request.h"
#include "allocator/heap/caching_allocator.h"
#include "allocator/heap/owner_segments.h"
#include "allocator/heap/scopes.h"
#include "server/base/worker_pool.h"
#include "server/core/client_questions.h"
#include "server/core/growth_queue.h"
#include "server/core/out_of_memory.h"
#include "server/core/recording_holds.h"
#include "server/identity/caller.h"
#include "server/identity/policy.h"
#include "server/pool/segment_pool.h"

namespace vrambroker {

// What a session tells its client. Implementations are thread-safe and never block.
class SessionEvents {
 public:
  virtual ~SessionEvents() = default;
  virtual void CloseSegments(absl::Span<const SegmentId> segments) = 0;
  virtual void LimitChanged(int device, uint64_t limit_bytes) = 0;
  // `reason`: for people; empty when the daemon was told to stop.
  virtual void Draining(const std::string& reason) = 0;
  virtual void Ended(const std::string& reason) = 0;
  virtual void Ask(uint64_t question_id, const ClientQuestion& question) = 0;
};

enum class SessionState {
  kActive,
  kDisconnected,  // the stream broke, the process lives: memory stays charged; the client may resume the session
  kEnded,         // by an operator; the client has not closed its memory yet
  kClosed,        // holds nothing any more
};

const char* SessionStateName(SessionState state);  // "active", "disconnected", "ended", "closed"

// A block as its holder sees it.
struct Allocation {
  BlockId block{};
  SegmentId segment{};
  uint64_t segment_bytes = 0;
  uint64_t offset = 0;
  uint64_t block_bytes = 0;
  WireHandle handle;
};

// A whole segment as its holder sees it.
struct Lease {
  SegmentId segment{};
  uint64_t bytes = 0;
  WireHandle handle;
};

// What one session may cost the daemon.
struct SessionBounds {
  std::chrono::milliseconds client_timeout{2000};  // how long its client may be silent when it is asked something
  size_t max_blocks = 1 << 20;                     // through Allocate
  size_t max_segments = 1 << 16;                   // leased, over all devices
};

// A session is remote (its allocators are here) or leases segments (its allocators are in the client).
// Safe to call from any thread. Calls marked (slow) may wait for the driver or for the client; they belong on
// slow_calls().
class Session : public std::enable_shared_from_this<Session> {
 public:
  // The session has an account with each of `pools`, which outlive it, as `events` does. With a `resume_token` it
  // leases. `terms` are what the policy gave it.
  Session(
      SessionId id, std::string name, Caller caller, const std::vector<SegmentPool*>& pools, Executor* workers,
      const SessionBounds& bounds, std::shared_ptr<SessionEvents> events, const AllocatorOptions& options = {},
      const std::optional<Ticket>& resume_token = {}, SessionTerms terms = {},
      std::function<SteadyTime()> clock = [] { return std::chrono::steady_clock::now(); });
  ~Session();

  SessionId id() const { return id_; }
  const std::string& name() const { return name_; }
  const Caller& caller() const { return caller_; }
  const SessionTerms& terms() const { return terms_; }  // as they were when it was opened
  std::chrono::system_clock::time_point started() const { return started_; }
  bool leases() const { return resume_token_.has_value(); }
  const std::optional<Ticket>& resume_token() const { return resume_token_; }  // what the client may resume it by
  std::shared_ptr<SessionEvents> events() const ABSL_LOCKS_EXCLUDED(mu_);
  SerialQueue& slow_calls() { return *slow_calls_; }
  SerialQueue& slow_questions() { return *slow_questions_; }  // of their own: a client may lease while it is asked
  // What the broker watches the process with, -1 for nothing; for the broker alone. Taken once.
  void set_process_watch(int watch) { process_watch_ = watch; }
  int TakeProcessWatch() { return process_watch_.exchange(-1); }
  SessionState state() const ABSL_LOCKS_EXCLUDED(mu_);

  // Moves to `state`; never back towards kActive, but by Resume(). Returns false when that changed nothing. kClosed
  // wakes every slow call.
  bool Advance(SessionState state) ABSL_LOCKS_EXCLUDED(mu_);

  // From kDisconnected back to kActive, with a new stream. False in any other state.
  bool Resume(std::shared_ptr<SessionEvents> events) ABSL_LOCKS_EXCLUDED(mu_);

  // ---- Leased ----

  // A segment of each of `sizes`, or none. FailedPrecondition for a remote session, Aborted when it is not active,
  // ResourceExhausted when it holds too many segments.
  // NotFound when the pool has no idle segment that fits, and LeaseSlowly() has to ask the driver; SegmentRefused().
  absl::StatusOr<std::vector<Lease>> LeaseIdle(int device, absl::Span<const uint64_t> sizes);
  // (slow) The same with new segments where needed. `granted`: out of a SegmentPool::Grant() of all of them, of which
  // nothing is left then.
  absl::StatusOr<std::vector<Lease>> LeaseSlowly(int device, absl::Span<const uint64_t> sizes, bool granted = false);
  void ReleaseGrant(int device, uint64_t bytes) { heaps_[device]->pool.ReleaseGrant(id_, bytes); }
  // All of `segments`, or none. InvalidArgument: duplicates. NotFound: not leased to this session.
  absl::Status ReturnLeased(int device, absl::Span<const SegmentId> segments);
  // Takes back all segments but these, which the client says it holds.
  void KeepOnly(const absl::flat_hash_set<SegmentId>& segments);
  // What the client counts.
  void Report(int device, const MemoryStats& stats) ABSL_LOCKS_EXCLUDED(mu_);
  ClientQuestions& questions() { return questions_; }

  // ---- Remote ----

  // FailedPrecondition when the session leases, Aborted when it is not active, ResourceExhausted when it holds too many
  // blocks.
  absl::Status CheckMayAllocate() const ABSL_LOCKS_EXCLUDED(mu_);

  // Block from the cache; NotFound when there is none, and a BlockRequest has to try. Errors as CheckMayAllocate().
  absl::StatusOr<Allocation> AllocateFromCache(int device, uint64_t requested, Stream stream = 0, ScopeId scope = 0);
  // What the cache does not serve is a BlockRequest of the session's heap. The session performs its steps.
  CachingAllocator& allocator(int device) { return heaps_[device]->allocator; }
  // (slow) Goes on with `request` until it is done (OK), or only the memory of others can help: it needs a segment, has
  // given back what it could, and this is how the pool refuses it.
  absl::Status RunUntilRefused(int device, BlockRequest& request);
  // (slow) Supplies the segment that `request` needs from a SegmentPool::Grant() of its size, and consumes the whole
  // grant. Errors as RunUntilRefused(): the driver may not have the memory after all.
  absl::Status SupplyGranted(int device, BlockRequest& request);
  // What came of `request`, which is done. SegmentRefused() when there is no memory; errors as CheckMayAllocate().
  absl::StatusOr<Allocation> FinishAllocation(int device, const BlockRequest& request);

  // All of `blocks`, or none. InvalidArgument: duplicates. NotFound: not blocks of this session, or freed before.
  absl::Status Free(absl::Span<const BlockId> blocks) ABSL_LOCKS_EXCLUDED(mu_);

  // The client has closed these segments.
  void SegmentsClosed(absl::Span<const SegmentId> segments) ABSL_LOCKS_EXCLUDED(mu_);

  // A scope as a request names it, with its texts where they are: every request of a remote session may bring some.
  struct NamedScope {
    absl::string_view name;
    absl::string_view file;
    uint32_t line = 0;
  };
  // Returns the id of the innermost scope. `scopes` is a path, outermost first. Adds scopes that are new.
  ScopeId FindScope(absl::Span<const NamedScope> scopes) ABSL_LOCKS_EXCLUDED(scopes_mu_);
  // CachingAllocator::ExplainFit().
  FitReport ExplainFit(int device, uint64_t requested, Stream stream, ScopeId scope) ABSL_LOCKS_EXCLUDED(scopes_mu_);

  // ---- Both: asks the client when its allocators are there ----

  // (slow) Gives `bytes` of wholly free segments back, or what there is (0: all), as far as the client closes them.
  // Returns the bytes given back. A remote session always gives all.
  absl::StatusOr<uint64_t> Trim(uint64_t bytes);
  // Asks for `bytes` of wholly free segments of the device back, for others; calls `answered` when they are there, or
  // nobody answers any more. Asks once at a time: who comes meanwhile is asked for next, together. `time`: how long an
  // answer is waited for.
  void Reclaim(int device, uint64_t bytes, std::chrono::milliseconds time, std::function<void()> answered)
      ABSL_LOCKS_EXCLUDED(reclaims_mu_);
  // Since when the client owes the answer to a question, the one that is under way; nullopt when it owes none.
  std::optional<SteadyTime> ReclaimAskedSince(int device) const ABSL_LOCKS_EXCLUDED(reclaims_mu_);
  // A request that may come to wait, for CancelGrowth(); what is returned becomes true then. Key 0: none.
  std::shared_ptr<std::atomic<bool>> StartGrowth(uint64_t cancel_key) ABSL_LOCKS_EXCLUDED(mu_);
  void CancelGrowth(uint64_t cancel_key) ABSL_LOCKS_EXCLUDED(mu_);
  // What was done in vain for the last request that others were asked for; for explaining its refusal.
  void SetLastOutcome(int device, GrowthOutcome outcome) ABSL_LOCKS_EXCLUDED(mu_);
  GrowthOutcome GetLastOutcome(int device) const ABSL_LOCKS_EXCLUDED(mu_);
  // (slow) Asks a client that leases for its figures: GetMemoryStats() returns them from then on.
  absl::Status RefreshStats();
  // (slow)
  absl::StatusOr<HeapSnapshot> Snapshot(int device, bool with_history = true);
  // (slow) Snapshot() of a session that has just been refused, whose client is not waited for as long: at most for
  // client_timeout. ResourceExhausted: there is more than kMaxRecordedItems.
  absl::StatusOr<HeapSnapshot> RecordingOfRefusal(int device);
  static constexpr size_t kMaxRecordedItems = 2'500'000;  // blocks and events
  // Whether a recording of a refusal may be taken now: one at a time, about ten in a row (a program that catches a
  // refusal tries again at once), and a twentieth of the time in the long run. If so, EndRefusalRecording() is to
  // follow; `took`: 0 if none was taken.
  bool StartRefusalRecording(SteadyTime now);
  void EndRefusalRecording(SteadyTime now, SteadyTime::duration took);
  // (slow) See CachingAllocator::SetRecording(). A client decides for itself whether times are exact.
  absl::Status SetRecording(uint64_t max_events, bool exact_times);
  // What it was told to keep last, or when it was opened.
  uint64_t recorded_events() const { return recorded_events_; }
  // More than that is kept for as long as somebody needs it. After a change: ApplyRecordingHolds(), which returns at
  // once, or ApplyRecordingHoldsSlowly() (slow), which waits until the client has done it.
  RecordingHolds& recording_holds() { return recording_holds_; }
  void ApplyRecordingHolds();
  absl::Status ApplyRecordingHoldsSlowly();
  bool records() const { return recorded_events_ > 0 || recording_holds_.Most() > 0; }
  void set_recorded_events(uint64_t events) { recorded_events_ = events; }

  // Of a session that leases: as last reported, at most about a second ago while its client runs.
  MemoryStats GetMemoryStats(int device) const ABSL_LOCKS_EXCLUDED(mu_);

  // Its requests that were refused so far.
  using OomCounts = std::array<uint64_t, kOomCauses.size()>;  // by OomCause
  void CountOom(int device, OomCause cause) {
    ooms_[device][static_cast<size_t>(cause)].fetch_add(1, std::memory_order_relaxed);
  }
  OomCounts GetOoms(int device) const;
  // When a request on `device` was refused last. Taken once.
  void set_last_refusal(int device, SteadyTime time) { last_refusals_[device] = time; }
  std::optional<SteadyTime> TakeLastRefusal(int device);
  // Its requests so far that flushed the cache first. Never falls, although the client may reset what it counts; final
  // when the session is closed.
  uint64_t CountAllocRetries(int device) ABSL_LOCKS_EXCLUDED(mu_);
  // Peaks become the current values; with `accumulated`, totals start again. FailedPrecondition for a session that
  // leases.
  absl::Status ResetStats(int device, bool accumulated) ABSL_LOCKS_EXCLUDED(mu_);

  // The pool holds the session to `limit_bytes` from now on; garbage collection goes by it, too.
  void LimitIs(int device, uint64_t limit_bytes);

 private:
  // The session's memory on one device: an allocator, and the account with the pool that it grows from.
  struct Heap {
    Heap(SegmentPool* segment_pool, const AllocatorOptions& options)
        : pool(*segment_pool), allocator(/*events=*/nullptr, options, segment_pool->capacity_bytes()) {}

    SegmentPool& pool;
    CachingAllocator allocator;
  };
  // Who waits for Reclaim() on one device.
  struct Reclaims {
    bool asked = false;
    SteadyTime asked_since;                   // the question that is under way
    std::chrono::milliseconds time{0};        // that an answer is waited for
    std::vector<std::function<void()>> now;   // for the answer that is under way
    std::vector<std::function<void()>> next;  // for the one after that
    uint64_t next_bytes = 0;
    uint64_t now_bytes = 0;
    uint64_t reserved_before = 0;
  };
  struct Retries {
    uint64_t total = 0;
    uint64_t counted = 0;  // what the allocator had counted then
  };
  struct HeldBlock {
    int device = 0;
    Block* block = nullptr;
  };

  // (slow) Asks the client to close `segments` and waits until it has, or for half of client_timeout, or not at all
  // when too many others wait. Returns the bytes closed.
  uint64_t ReturnSegments(SegmentPool& pool, absl::Span<const ReleasedSegment> segments) ABSL_LOCKS_EXCLUDED(mu_);
  // Supplies what `request` needs, or denies it (OK), unless only the memory of others can help: as RunUntilRefused().
  absl::Status SupplyFromPool(int device, BlockRequest& request, bool granted);
  // (slow) ReturnSegments() of all that is wholly free, or of `bytes` of it.
  uint64_t EmptyCache(Heap& heap);
  uint64_t TrimHeap(Heap& heap, uint64_t bytes);
  absl::StatusOr<Allocation> Record(int device, Block* block) ABSL_LOCKS_EXCLUDED(mu_);
  std::vector<Scope> Scopes() ABSL_LOCKS_EXCLUDED(scopes_mu_);
  HeapSnapshot SnapshotOf(int device, bool with_history);
  absl::Status CheckMayLease() const ABSL_LOCKS_EXCLUDED(mu_);
  // All of what `lease` gets of them, with its handles.
  using LeaseFunction = std::function<absl::StatusOr<std::vector<SegmentId>>(SegmentPool& pool)>;
  absl::StatusOr<std::vector<Lease>> LeaseEach(int device, absl::Span<const uint64_t> sizes,
                                               const LeaseFunction& lease);
  // ResourceExhausted unless the session may hold `more` segments than it does.
  absl::Status CheckSegmentCount(size_t more) const;
  absl::StatusOr<std::vector<Lease>> LeaseAll(SegmentPool& pool, absl::Span<const uint64_t> sizes,
                                              const LeaseFunction& lease);
  void UpdateRetries(int device) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Sends the question.
  void HoldRecording(uint64_t id, uint64_t held_events);
  void AskForReclaim(int device) ABSL_LOCKS_EXCLUDED(reclaims_mu_);
  void Reclaimed(int device) ABSL_LOCKS_EXCLUDED(reclaims_mu_);
  absl::StatusOr<ClientAnswer> Ask(const ClientQuestion& question,
                                   size_t max_items = ClientQuestions::kMaxSnapshotItems,
                                   int most_patience = ClientQuestions::kMostPatience);

  // Constant after construction.
  const SessionId id_;
  const std::string name_;
  const Caller caller_;
  const SessionTerms terms_;
  const std::chrono::system_clock::time_point started_ = std::chrono::system_clock::now();
  const SessionBounds bounds_;
  const std::function<SteadyTime()> clock_;
  Executor& workers_;
  const std::optional<Ticket> resume_token_;
  const std::shared_ptr<SerialQueue> slow_calls_;
  const std::shared_ptr<SerialQueue> slow_questions_;
  std::vector<std::unique_ptr<Heap>> heaps_;  // by device; each synchronises itself
  std::atomic<int> process_watch_{-1};
  std::atomic<size_t> leases_under_way_{0};  // segments
  std::atomic<uint64_t> recorded_events_{0};
  RecordingHolds recording_holds_;
  std::atomic<bool> records_refusal_{false};
  std::atomic<SteadyTime> refusal_recordings_paid_{};  // when what was spent on them is a twentieth of the time again
  ClientQuestions questions_;
  std::vector<std::array<std::atomic<uint64_t>, kOomCauses.size()>> ooms_;  // by device, then cause
  std::vector<std::atomic<SteadyTime>> last_refusals_;                      // by device; 0: none, or taken

  Mutex scopes_mu_;  // held for nothing but this; no other lock is taken
  ScopeTable scopes_ ABSL_GUARDED_BY(scopes_mu_);

  mutable Mutex reclaims_mu_;                                     // held for nothing but this; no other lock is taken
  std::vector<Reclaims> reclaims_ ABSL_GUARDED_BY(reclaims_mu_);  // by device

  // Held for map operations only; an allocator's or a pool's lock may be taken while it is held.
  mutable Mutex mu_;
  CondVar changed_;  // state_ or closing_ has changed
  SessionState state_ ABSL_GUARDED_BY(mu_) = SessionState::kActive;
  std::shared_ptr<SessionEvents> events_ ABSL_GUARDED_BY(mu_);
  std::vector<MemoryStats> reported_ ABSL_GUARDED_BY(mu_);                                        // by device
  std::vector<Retries> retries_ ABSL_GUARDED_BY(mu_);                                             // by device
  absl::flat_hash_map<uint64_t, std::weak_ptr<std::atomic<bool>>> growths_ ABSL_GUARDED_BY(mu_);  // by cancel key
  std::vector<GrowthOutcome> last_outcomes_ ABSL_GUARDED_BY(mu_);                                 // by device
  uint64_t next_block_ ABSL_GUARDED_BY(mu_) = 1;
  absl::flat_hash_map<BlockId, HeldBlock> blocks_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<SegmentId, SegmentPool*> closing_ ABSL_GUARDED_BY(mu_);  // asked back, not yet closed
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CORE_SESSION_H_
