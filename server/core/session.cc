// SPDX-License-Identifier: Apache-2.0
//
//   kActive --stream breaks--> kDisconnected --+
//      |  \--operator ends it--> kEnded -------+--process gone--> kClosed
//      +------------goodbye, process gone------+
//
// A client that leases may go from kDisconnected back to kActive: Resume().
// In every state but kClosed what the session holds stays charged to it: nobody can take mapped memory away.
#include "server/core/session.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/client_log.h"
#include "server/core/out_of_memory.h"

namespace vrambroker {
namespace {

constexpr uint64_t kMostRetriesAtOnce = 1 << 20;

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
                 Executor* workers, const SessionBounds& bounds, std::shared_ptr<SessionEvents> events,
                 const AllocatorOptions& options, const std::optional<Ticket>& resume_token, SessionTerms terms,
                 std::function<SteadyTime()> clock)
    : id_(id),
      name_(std::move(name)),
      caller_(std::move(caller)),
      terms_(std::move(terms)),
      bounds_(bounds),
      clock_(std::move(clock)),
      workers_(*workers),
      resume_token_(resume_token),
      slow_calls_(std::make_shared<SerialQueue>(workers)),
      slow_questions_(std::make_shared<SerialQueue>(workers)),
      ooms_(pools.size()),
      last_refusals_(pools.size()),
      reclaims_(pools.size()),
      events_(std::move(events)),
      reported_(pools.size()),
      retries_(pools.size()),
      last_outcomes_(pools.size()) {
  for (SegmentPool* pool : pools) {
    heaps_.push_back(std::make_unique<Heap>(pool, options));
    // per_process_memory_fraction is a limit of the account like others: LimitIs() tells it.
    heaps_.back()->allocator.SetLimit(CachingAllocator::kNoLimit);
  }
}

Session::~Session() = default;

SessionState Session::state() const {
  MutexLock lock(mu_);
  return state_;
}

bool Session::Advance(SessionState state) {
  std::vector<std::function<void()>> unanswered;
  {
    MutexLock lock(mu_);
    if (state <= state_) return false;
    for (size_t device = 0; state == SessionState::kClosed && device < heaps_.size(); ++device) {
      UpdateRetries(static_cast<int>(device));
    }
    state_ = state;
    changed_.NotifyAll();
    unanswered = questions_.Close();
  }
  for (const auto& call : unanswered) call();
  return true;
}

bool Session::Resume(std::shared_ptr<SessionEvents> events) {
  MutexLock lock(mu_);
  if (state_ != SessionState::kDisconnected) return false;
  state_ = SessionState::kActive;
  events_ = std::move(events);
  questions_.Open();
  return true;
}

std::shared_ptr<SessionEvents> Session::events() const {
  MutexLock lock(mu_);
  return events_;
}

// ---- Leased ----

absl::Status Session::CheckMayLease() const {
  if (!leases()) return absl::FailedPreconditionError("the session is remote: use Allocate and Free");
  if (const SessionState now = state(); now != SessionState::kActive) {
    return absl::AbortedError(absl::StrCat("session ", Raw(id_), " is ", SessionStateName(now), "; open a new one"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Lease>> Session::LeaseIdle(int device, absl::Span<const uint64_t> sizes) {
  return LeaseEach(device, sizes, [&](SegmentPool& pool) { return pool.LeaseIdle(id_, sizes); });
}

absl::StatusOr<std::vector<Lease>> Session::LeaseSlowly(int device, absl::Span<const uint64_t> sizes, bool granted) {
  bool is_used = false;  // the grant
  absl::StatusOr<std::vector<Lease>> leases = LeaseEach(device, sizes, [&](SegmentPool& pool) {
    is_used = true;
    return pool.LeaseAll(id_, sizes, granted);
  });
  if (granted && !is_used) {
    heaps_[device]->pool.ReleaseGrant(id_, std::accumulate(sizes.begin(), sizes.end(), uint64_t{0}));
  }
  return leases;
}

absl::StatusOr<std::vector<Lease>> Session::LeaseEach(int device, absl::Span<const uint64_t> sizes,
                                                      const LeaseFunction& lease) {
  if (absl::Status status = CheckMayLease(); !status.ok()) return status;
  // Leases that are under way count as held, also once the pool has them: the bound is never exceeded.
  const size_t under_way = leases_under_way_.fetch_add(sizes.size()) + sizes.size();
  absl::Status bound = CheckSegmentCount(under_way);
  absl::StatusOr<std::vector<Lease>> leases =
      bound.ok() ? LeaseAll(heaps_[device]->pool, sizes, lease) : std::move(bound);
  leases_under_way_.fetch_sub(sizes.size());
  return leases;
}

absl::Status Session::CheckSegmentCount(size_t more) const {
  size_t held = 0;
  for (const std::unique_ptr<Heap>& heap : heaps_) {
    held += heap->pool.GetAccount(id_).value_or(AccountFigures()).segments;
  }
  if (held + more <= bounds_.max_segments) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "segment_bytes: session ", Raw(id_), " holds ", held, held == 1 ? " segment" : " segments",
      ", and max_segments_per_session allows ", bounds_.max_segments, "; return some, or lease larger ones"));
}

absl::StatusOr<std::vector<Lease>> Session::LeaseAll(SegmentPool& pool, absl::Span<const uint64_t> sizes,
                                                     const LeaseFunction& lease) {
  const absl::StatusOr<std::vector<SegmentId>> segments = lease(pool);
  if (!segments.ok()) return segments.status();
  std::vector<Lease> leases;
  leases.reserve(sizes.size());
  for (size_t i = 0; i < sizes.size(); ++i) {
    absl::StatusOr<WireHandle> handle = pool.HandleFor(id_, (*segments)[i]);
    if (!handle.ok()) {
      (void)pool.TakeBack(id_, *segments);
      return handle.status();
    }
    leases.push_back({.segment = (*segments)[i], .bytes = sizes[i], .handle = *std::move(handle)});
  }
  return leases;
}

absl::Status Session::ReturnLeased(int device, absl::Span<const SegmentId> segments) {
  if (!leases()) return absl::FailedPreconditionError("the session is remote: the daemon manages its segments");
  return heaps_[device]->pool.TakeBack(id_, segments);
}

void Session::KeepOnly(const absl::flat_hash_set<SegmentId>& segments) {
  for (const std::unique_ptr<Heap>& heap : heaps_) heap->pool.TakeBackAllBut(id_, segments);
}

void Session::Report(int device, const MemoryStats& stats) {
  MutexLock lock(mu_);
  reported_[device] = stats;
  UpdateRetries(device);
}

void Session::UpdateRetries(int device) {
  if (state_ == SessionState::kClosed) return;
  Retries& retries = retries_[device];
  const uint64_t now = leases() ? reported_[device].num_alloc_retries : heaps_[device]->allocator.num_alloc_retries();
  // What is less than before was reset in between. A client that says more in a second than it can do is not believed.
  retries.total += std::min(now < retries.counted ? now : now - retries.counted, kMostRetriesAtOnce);
  retries.counted = now;
}

uint64_t Session::CountAllocRetries(int device) {
  MutexLock lock(mu_);
  UpdateRetries(device);
  return retries_[device].total;
}

Session::OomCounts Session::GetOoms(int device) const {
  OomCounts counts;
  for (size_t i = 0; i < counts.size(); ++i) counts[i] = ooms_[device][i].load(std::memory_order_relaxed);
  return counts;
}

std::optional<SteadyTime> Session::TakeLastRefusal(int device) {
  const SteadyTime time = last_refusals_[device].exchange({});
  return time == SteadyTime() ? std::nullopt : std::optional<SteadyTime>(time);
}

absl::Status Session::ResetStats(int device, bool accumulated) {
  if (leases()) return absl::FailedPreconditionError("the session leases segments: its client keeps the statistics");
  CachingAllocator& allocator = heaps_[device]->allocator;
  allocator.ResetPeakStats();
  if (!accumulated) return absl::OkStatus();
  MutexLock lock(mu_);
  UpdateRetries(device);
  allocator.ResetAccumulatedStats();
  retries_[device].counted = 0;
  return absl::OkStatus();
}

MemoryStats Session::GetMemoryStats(int device) const {
  if (!leases()) return heaps_[device]->allocator.GetMemoryStats();
  MutexLock lock(mu_);
  return reported_[device];
}

absl::StatusOr<ClientAnswer> Session::Ask(const ClientQuestion& question, size_t max_items, int most_patience) {
  const absl::StatusOr<UserSlots::Slot> waiting = workers_.StartWaiting(caller_.uid);
  if (!waiting.ok()) return waiting.status();
  if (question.kind != ClientQuestion::Kind::kSnapshot) {
    max_items = 0;
  } else if (!question.with_history) {
    max_items = ClientQuestions::kMaxItemsWithoutHistory;
  }
  return questions_.Ask([&](uint64_t id) { events()->Ask(id, question); }, bounds_.client_timeout, max_items,
                        most_patience);
}

// ---- Remote ----

absl::Status Session::CheckMayAllocate() const {
  if (leases()) return absl::FailedPreconditionError("the session leases segments: use LeaseSegments");
  MutexLock lock(mu_);
  if (state_ != SessionState::kActive) {
    return absl::AbortedError(absl::StrCat("session ", Raw(id_), " is ", SessionStateName(state_), "; open a new one"));
  }
  if (blocks_.size() >= bounds_.max_blocks) {
    return absl::ResourceExhaustedError(
        absl::StrCat("session ", Raw(id_), " holds ", blocks_.size(),
                     " blocks, the most that max_blocks_per_session allows; free some, or allocate larger ones"));
  }
  return absl::OkStatus();
}

absl::StatusOr<Allocation> Session::AllocateFromCache(int device, uint64_t requested, Stream stream, ScopeId scope) {
  if (absl::Status status = CheckMayAllocate(); !status.ok()) return status;
  heaps_[device]->allocator.NoteTime();
  Block* block = heaps_[device]->allocator.TryAllocate(requested, stream, scope);
  if (block == nullptr) return absl::NotFoundError("no cached block fits");
  return Record(device, block);
}

absl::Status Session::RunUntilRefused(int device, BlockRequest& request) {
  SegmentPool& pool = heaps_[device]->pool;
  const auto release = [&](absl::Span<const ReleasedSegment> segments) { ReturnSegments(pool, segments); };
  while (request.Advance(release) == BlockRequest::Next::kSegment) {
    const absl::Status refusal = SupplyFromPool(device, request, /*granted=*/false);
    if (!refusal.ok()) return refusal;
  }
  return absl::OkStatus();
}

absl::Status Session::SupplyGranted(int device, BlockRequest& request) {
  return SupplyFromPool(device, request, /*granted=*/true);
}

absl::Status Session::SupplyFromPool(int device, BlockRequest& request, bool granted) {
  SegmentPool& pool = heaps_[device]->pool;
  const absl::StatusOr<SegmentId> segment = pool.Lease(id_, request.segment_bytes(), granted);
  if (segment.ok()) {
    request.Supply({.id = *segment});
  } else if (request.has_flushed() && SegmentRefusalCause(segment.status()) == OomCause::kCapacity) {
    return segment.status();
  } else {
    request.Deny(segment.status(), pool.AvailableBytes(id_));
  }
  return absl::OkStatus();
}

absl::StatusOr<Allocation> Session::FinishAllocation(int device, const BlockRequest& request) {
  Heap& heap = *heaps_[device];
  const absl::StatusOr<Block*> block = request.result();
  if (block.ok()) {
    if (absl::Status status = CheckMayAllocate(); !status.ok()) {
      heap.allocator.Free(*block);
      return status;
    }
    return Record(device, *block);
  }
  if (absl::IsResourceExhausted(block.status()) && !SegmentRefusalCause(block.status()).has_value()) {
    // The heap's own refusal, by throw_on_cudamalloc_oom.
    const bool ever_fits = request.segment_bytes() <= heap.pool.capacity_bytes();
    return SegmentRefused(ever_fits ? OomCause::kLimit : OomCause::kLargerThanDevice, block.status().message());
  }
  return block.status();
}

uint64_t Session::EmptyCache(Heap& heap) {
  heap.allocator.WaitForStreams();
  const SegmentsToRelease free = heap.allocator.TakeFreeSegments();
  return free.empty() ? 0 : ReturnSegments(heap.pool, free.segments());
}

uint64_t Session::TrimHeap(Heap& heap, uint64_t bytes) {
  TrimOptions options{.wanted_bytes = bytes};
  uint64_t closed = 0;
  while (true) {
    const SegmentsToRelease idle = heap.allocator.TakeIdleSegments(&options);
    if (idle.empty()) return closed;
    closed += ReturnSegments(heap.pool, idle.segments());
  }
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

ScopeId Session::FindScope(absl::Span<const NamedScope> scopes) {
  if (scopes.empty()) return 0;
  ScopeId found = 0;
  MutexLock lock(scopes_mu_);
  for (const NamedScope& scope : scopes) found = scopes_.Find(found, scope.name, scope.file, scope.line);
  return found;
}

std::vector<Scope> Session::Scopes() {
  MutexLock lock(scopes_mu_);
  return scopes_.scopes();
}

FitReport Session::ExplainFit(int device, uint64_t requested, Stream stream, ScopeId scope) {
  return heaps_[device]->allocator.ExplainFit(requested, stream, scope, [this] { return Scopes(); });
}

HeapSnapshot Session::SnapshotOf(int device, bool with_history) {
  HeapSnapshot snapshot = heaps_[device]->allocator.Snapshot(with_history);
  snapshot.scopes = Scopes();  // after the heap, whose ids are all in it then
  return snapshot;
}

// ---- Both ----

absl::StatusOr<uint64_t> Session::Trim(uint64_t bytes) {
  if (leases()) {
    const absl::StatusOr<ClientAnswer> answer =
        Ask({.kind = ClientQuestion::Kind::kTrim, .bytes = bytes, .device = -1, .time = bounds_.client_timeout});
    if (!answer.ok()) return answer.status();
    return answer->released_bytes;
  }
  uint64_t released = 0;
  for (const std::unique_ptr<Heap>& heap : heaps_) released += EmptyCache(*heap);
  return released;
}

std::shared_ptr<std::atomic<bool>> Session::StartGrowth(uint64_t cancel_key) {
  auto cancelled = std::make_shared<std::atomic<bool>>(false);
  if (cancel_key == 0) return cancelled;
  MutexLock lock(mu_);
  // Those that have ended have left their entries behind.
  if (growths_.size() > 2 * SerialQueue::kMaxTasks) {
    absl::erase_if(growths_, [](const auto& entry) { return entry.second.expired(); });
  }
  growths_[cancel_key] = cancelled;
  return cancelled;
}

void Session::CancelGrowth(uint64_t cancel_key) {
  MutexLock lock(mu_);
  const auto it = growths_.find(cancel_key);
  if (it == growths_.end()) return;
  if (const auto cancelled = it->second.lock()) *cancelled = true;
  growths_.erase(it);
}

void Session::SetLastOutcome(int device, GrowthOutcome outcome) {
  MutexLock lock(mu_);
  last_outcomes_[device] = std::move(outcome);
}

GrowthOutcome Session::GetLastOutcome(int device) const {
  MutexLock lock(mu_);
  return last_outcomes_[device];
}

void Session::Reclaim(int device, uint64_t bytes, std::chrono::milliseconds time, std::function<void()> answered) {
  {
    MutexLock lock(reclaims_mu_);
    Reclaims& reclaims = reclaims_[device];
    reclaims.time = time;
    reclaims.next_bytes += bytes;
    reclaims.next.push_back(std::move(answered));
    if (std::exchange(reclaims.asked, true)) return;
    reclaims.asked_since = clock_();
  }
  AskForReclaim(device);
}

std::optional<SteadyTime> Session::ReclaimAskedSince(int device) const {
  MutexLock lock(reclaims_mu_);
  const Reclaims& reclaims = reclaims_[device];
  return reclaims.asked ? std::optional(reclaims.asked_since) : std::nullopt;
}

void Session::AskForReclaim(int device) {
  uint64_t bytes = 0;
  std::chrono::milliseconds time{0};
  const uint64_t reserved = heaps_[device]->pool.GetAccount(id_).value_or(AccountFigures()).reserved_bytes;
  {
    MutexLock lock(reclaims_mu_);
    Reclaims& reclaims = reclaims_[device];
    reclaims.now = std::exchange(reclaims.next, {});
    bytes = std::exchange(reclaims.next_bytes, 0);
    time = reclaims.time;
    reclaims.now_bytes = bytes;
    reclaims.reserved_before = reserved;
  }
  if (leases()) {
    const ClientQuestion question{.kind = ClientQuestion::Kind::kTrim, .bytes = bytes, .device = device, .time = time};
    // The questions are a part of this object.
    questions_.AskLater([&](uint64_t id) { events()->Ask(id, question); },
                        [this, device](const absl::StatusOr<ClientAnswer>&) { Reclaimed(device); });
    return;
  }
  const bool queued = slow_calls_->Submit([self = shared_from_this(), device, bytes] {
    if (self->state() == SessionState::kActive) self->TrimHeap(*self->heaps_[device], bytes);
    self->Reclaimed(device);
  });
  if (!queued) Reclaimed(device);
}

void Session::Reclaimed(int device) {
  std::vector<std::function<void()>> answered;
  bool again = false;
  SegmentPool& pool = heaps_[device]->pool;
  const std::optional<AccountFigures> account = pool.GetAccount(id_);
  uint64_t asked_bytes = 0;
  uint64_t returned_bytes = 0;
  std::chrono::nanoseconds duration{0};
  {
    MutexLock lock(reclaims_mu_);
    Reclaims& reclaims = reclaims_[device];
    asked_bytes = reclaims.now_bytes;
    const SteadyTime now = clock_();
    duration = now - reclaims.asked_since;
    // By the pool's books, not by the client's word. What a session that has ended left is no answer to the question.
    if (account.has_value())
      returned_bytes = reclaims.reserved_before - std::min(reclaims.reserved_before, account->reserved_bytes);
    answered = std::exchange(reclaims.now, {});
    again = !reclaims.next.empty();
    reclaims.asked = again;
    reclaims.asked_since = now;  // whoever answers each question is not silent, however many there are in a row
  }
  pool.CountReclaim(asked_bytes, returned_bytes, duration);
  LogClientEvent(spdlog::level::info,
                 SessionLine("reclaimed", id_, name_)
                     .Add("device", device)
                     .Add("asked", asked_bytes)
                     .Add("returned", returned_bytes)
                     .Add("duration_ms", std::chrono::duration_cast<std::chrono::milliseconds>(duration).count()));
  for (const auto& call : answered) call();
  if (again) AskForReclaim(device);
}

absl::Status Session::RefreshStats() {
  return leases() ? Ask({.kind = ClientQuestion::Kind::kStats}).status() : absl::OkStatus();
}

absl::StatusOr<HeapSnapshot> Session::Snapshot(int device, bool with_history) {
  if (!leases()) return SnapshotOf(device, with_history);
  absl::StatusOr<ClientAnswer> answer =
      Ask({.kind = ClientQuestion::Kind::kSnapshot, .device = device, .with_history = with_history});
  if (!answer.ok()) return answer.status();
  return std::move(answer->snapshot);
}

absl::StatusOr<HeapSnapshot> Session::RecordingOfRefusal(int device) {
  if (!leases()) return SnapshotOf(device, /*with_history=*/true);
  absl::StatusOr<ClientAnswer> answer =
      Ask({.kind = ClientQuestion::Kind::kSnapshot, .device = device}, kMaxRecordedItems, /*most_patience=*/1);
  if (!answer.ok()) return answer.status();
  return std::move(answer->snapshot);
}

bool Session::StartRefusalRecording(SteadyTime now) {
  constexpr std::chrono::seconds kAhead{10};
  if (records_refusal_.exchange(true)) return false;
  if (refusal_recordings_paid_.load() - now < kAhead) return true;
  records_refusal_ = false;
  return false;
}

void Session::EndRefusalRecording(SteadyTime now, SteadyTime::duration took) {
  constexpr int kShare = 20;
  constexpr SteadyTime::duration kLeast =
      std::chrono::milliseconds(50);  // so that there are ten in a row, not hundreds
  if (took > SteadyTime::duration(0)) {
    refusal_recordings_paid_ = std::max(refusal_recordings_paid_.load(), now) + kShare * std::max(kLeast, took);
  }
  records_refusal_ = false;
}

absl::Status Session::SetRecording(uint64_t max_events, bool exact_times) {
  absl::Status status;
  if (leases()) {
    status = Ask({.kind = ClientQuestion::Kind::kRecord, .max_events = max_events}).status();
  } else {
    for (const std::unique_ptr<Heap>& heap : heaps_) heap->allocator.SetRecording(max_events, exact_times);
  }
  if (status.ok()) recorded_events_ = max_events;
  return status;
}

void Session::HoldRecording(uint64_t id, uint64_t held_events) {
  events()->Ask(id, {.kind = ClientQuestion::Kind::kHoldRecording,
                     .max_events = std::max<uint64_t>(recorded_events_, held_events),
                     .held_events = held_events});
}

void Session::ApplyRecordingHolds() {
  recording_holds_.Apply([this](uint64_t most) {
    if (leases()) {
      questions_.AskLater([&](uint64_t id) { HoldRecording(id, most); }, [](const absl::StatusOr<ClientAnswer>&) {});
    } else {
      for (const std::unique_ptr<Heap>& heap : heaps_) heap->allocator.HoldRecording(most);
    }
  });
}

absl::Status Session::ApplyRecordingHoldsSlowly() {
  if (!leases()) {
    ApplyRecordingHolds();
    return absl::OkStatus();
  }
  const absl::StatusOr<UserSlots::Slot> waiting = workers_.StartWaiting(caller_.uid);
  if (!waiting.ok()) return waiting.status();
  return questions_
      .Ask([this](uint64_t id) { recording_holds_.Apply([&](uint64_t most) { HoldRecording(id, most); }); },
           bounds_.client_timeout, /*max_items=*/0)
      .status();
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
  events()->CloseSegments(ids);

  const absl::StatusOr<UserSlots::Slot> waiting = workers_.StartWaiting(caller_.uid);
  const bool may_wait = waiting.ok();
  // What it closes later still counts.
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

void Session::LimitIs(int device, uint64_t limit_bytes) {
  Heap& heap = *heaps_[device];
  heap.allocator.SetLimit(limit_bytes < heap.pool.capacity_bytes() ? limit_bytes : CachingAllocator::kNoLimit);
}

void Session::SegmentsClosed(absl::Span<const SegmentId> segments) {
  std::vector<std::pair<SegmentPool*, SegmentId>> closed;
  {
    MutexLock lock(mu_);
    for (const SegmentId id : segments) {
      if (const auto it = closing_.find(id); it != closing_.end()) closed.emplace_back(it->second, id);
    }
  }
  // Without the lock: what comes back may let requests through, of this session too.
  for (const auto& [pool, id] : closed) pool->Return(id_, {id});
  MutexLock lock(mu_);
  for (const auto& [pool, id] : closed) closing_.erase(id);
  changed_.NotifyAll();
}

}  // namespace vrambroker
