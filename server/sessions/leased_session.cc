// SPDX-License-Identifier: Apache-2.0
#include "server/sessions/leased_session.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/saturating.h"

namespace vrambroker {
namespace {

// Whether no memory was allocated or freed between two reports.
bool TellOfNoUse(const MemoryStats& before, const MemoryStats& now) {
  return before.allocation.all.allocated == now.allocation.all.allocated &&
         before.allocation.all.freed == now.allocation.all.freed &&
         before.reserved_bytes.all.current == now.reserved_bytes.all.current;
}

}  // namespace

LeasedSession::LeasedSession(const SessionSetup& setup, const ResumeToken& resume_token)
    : Session(setup),
      resume_token_(resume_token),
      allocator_options_(setup.allocator),
      reported_(setup.pools.size()),
      counts_before_(setup.pools.size(), setup.goes_on) {}

bool LeasedSession::Resume(std::shared_ptr<SessionEvents> events) {
  MutexLock lock(mu_);
  if (state_ != SessionState::kDisconnected) return false;
  state_ = SessionState::kActive;
  events_ = std::move(events);
  questions_.Open();
  return true;
}

// ---- Segments ----

absl::StatusOr<std::vector<Lease>> LeasedSession::LeaseIdle(int device, absl::Span<const uint64_t> sizes) {
  return LeaseEach(device, sizes, [&](SegmentPool& pool) { return pool.LeaseIdle(id_, sizes); });
}

absl::StatusOr<std::vector<Lease>> LeasedSession::LeaseSlowly(int device, absl::Span<const uint64_t> sizes,
                                                              Reservation reservation) {
  return LeaseEach(device, sizes,
                   [&](SegmentPool& pool) { return pool.LeaseAll(id_, sizes, /*granted=*/reservation.Consume()); });
}

absl::StatusOr<std::vector<Lease>> LeasedSession::LeaseEach(int device, absl::Span<const uint64_t> sizes,
                                                            const LeaseFunction& lease) {
  {
    MutexLock lock(mu_);
    if (absl::Status status = CheckActive(); !status.ok()) return status;
  }
  // Running leases count as held, even once in the pool's books, so the bound is never exceeded.
  const size_t under_way = leases_under_way_.fetch_add(sizes.size()) + sizes.size();
  absl::Status bound = CheckSegmentCount(under_way);
  absl::StatusOr<std::vector<Lease>> leases = bound.ok() ? LeaseAll(pool(device), sizes, lease) : std::move(bound);
  leases_under_way_.fetch_sub(sizes.size());
  return leases;
}

absl::Status LeasedSession::CheckSegmentCount(size_t more) const {
  size_t held = 0;
  for (const SegmentPool* pool : pools_) {
    if (const std::optional<AccountState> account = pool->GetAccount(id_)) held += account->segments;
  }
  if (held + more <= bounds_.max_segments) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "segment_bytes: session ", Raw(id_), " holds ", held, held == 1 ? " segment" : " segments",
      ", and max_segments_per_session allows ", bounds_.max_segments, "; return some, or lease larger ones"));
}

absl::StatusOr<std::vector<Lease>> LeasedSession::LeaseAll(SegmentPool& pool, absl::Span<const uint64_t> sizes,
                                                           const LeaseFunction& lease) {
  const absl::StatusOr<std::vector<SegmentId>> segments = lease(pool);
  if (!segments.ok()) return segments.status();
  std::vector<Lease> leases;
  leases.reserve(sizes.size());
  for (size_t i = 0; i < sizes.size(); ++i) {
    absl::StatusOr<WireHandle> handle = pool.HandleFor(id_, (*segments)[i]);
    if (!handle.ok()) {
      (void)pool.Return(id_, *segments);
      return handle.status();
    }
    leases.push_back({.segment = (*segments)[i], .bytes = sizes[i], .handle = *std::move(handle)});
  }
  return leases;
}

absl::Status LeasedSession::ReturnSegments(int device, absl::Span<const SegmentId> segments) {
  return pool(device).Return(id_, segments);
}

void LeasedSession::ReturnAllBut(const absl::flat_hash_set<SegmentId>& segments) {
  for (SegmentPool* pool : pools_) pool->ReturnAllBut(id_, segments);
}

void LeasedSession::SendReclaim(int device, uint64_t bytes, std::chrono::milliseconds time,
                                const std::function<void()>& answered) {
  const ClientQuestion question{.kind = ClientQuestion::Kind::kTrim, .bytes = bytes, .device = device, .time = time};
  questions_.AskLater([&](uint64_t id) { events()->Ask(id, question); },
                      [answered](const absl::StatusOr<ClientAnswer>&) { answered(); });
}

// ---- Questions and reports ----

absl::StatusOr<ClientAnswer> LeasedSession::Ask(const ClientQuestion& question, size_t max_items, int most_patience) {
  if (absl::Status status = CheckNotEnded(); !status.ok()) return status;
  const absl::StatusOr<UserSlots::Slot> waiting = workers_.StartWaiting(caller_.user());
  if (!waiting.ok()) return waiting.status();
  if (question.kind != ClientQuestion::Kind::kSnapshot) {
    max_items = 0;
  } else if (!question.with_history) {
    max_items = ClientQuestions::kMaxItemsWithoutHistory;
  }
  return questions_.Ask([&](uint64_t id) { events()->Ask(id, question); }, bounds_.client_timeout, max_items,
                        most_patience);
}

uint64_t LeasedSession::CameBackBytes() const {
  uint64_t bytes = 0;
  for (const SegmentPool* pool : pools_) bytes += pool->GetAccount(id_).value_or(AccountState()).came_back_bytes;
  return bytes;
}

absl::StatusOr<uint64_t> LeasedSession::TrimSlowly(uint64_t bytes) {
  const uint64_t before = CameBackBytes();
  const absl::StatusOr<ClientAnswer> answer =
      Ask({.kind = ClientQuestion::Kind::kTrim, .bytes = bytes, .device = -1, .time = bounds_.client_timeout});
  if (!answer.ok()) return answer.status();
  return std::min(answer->released_bytes, SaturatingSub(CameBackBytes(), before));  // do not trust the client's value
}

void LeasedSession::Report(int device, MemoryStats stats) {
  // No session holds more, except a session carrying over more than a reduced capacity.
  const uint64_t most =
      std::max(pool(device).capacity_bytes(), pool(device).GetAccount(id_).value_or(AccountState()).reserved_bytes);
  for (PoolStat* const bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes,
                                &stats.inactive_split_bytes, &stats.requested_bytes}) {
    for (Stat* const stat : {&bytes->all, &bytes->pool[0], &bytes->pool[1]}) {
      stat->current = std::min(stat->current, most);
      stat->peak = std::min(stat->peak, most);
    }
  }
  MutexLock lock(mu_);
  if (!TellOfNoUse(reported_[device], stats)) NoteUse(clock_());
  reported_[device] = stats;
  if (counts_before_[device]) CountRetriesFrom(device, stats.num_alloc_retries);
  counts_before_[device] = false;
  UpdateRetries(device);
}

MemoryStats LeasedSession::GetMemoryStats(int device) const {
  MutexLock lock(mu_);
  return reported_[device];
}

absl::Status LeasedSession::ResetStats(int /*device*/, bool /*accumulated*/) {
  return absl::FailedPreconditionError("the session leases segments: its client keeps the statistics");
}

absl::Status LeasedSession::RefreshStats() {
  return Ask({.kind = ClientQuestion::Kind::kStats}).status();
}

absl::StatusOr<HeapSnapshot> LeasedSession::SnapshotSlowly(int device, bool with_history) {
  absl::StatusOr<ClientAnswer> answer =
      Ask({.kind = ClientQuestion::Kind::kSnapshot, .device = device, .with_history = with_history});
  if (!answer.ok()) return answer.status();
  return std::move(answer->snapshot);
}

absl::StatusOr<HeapSnapshot> LeasedSession::RecordingOfRefusal(int device) {
  absl::StatusOr<ClientAnswer> answer =
      Ask({.kind = ClientQuestion::Kind::kSnapshot, .device = device}, kMaxRecordedItems, /*most_patience=*/1);
  if (!answer.ok()) return answer.status();
  return std::move(answer->snapshot);
}

absl::Status LeasedSession::SetRecording(uint64_t max_events, bool /*exact_times*/) {
  absl::Status status = Ask({.kind = ClientQuestion::Kind::kRecord, .max_events = max_events}).status();
  if (status.ok()) recorded_events_ = max_events;
  return status;
}

void LeasedSession::SendRecordingHold(uint64_t question_id, uint64_t held_events) {
  events()->Ask(question_id, {.kind = ClientQuestion::Kind::kHoldRecording,
                              .max_events = std::max<uint64_t>(recorded_events_, held_events),
                              .held_events = held_events});
}

void LeasedSession::ApplyRecordingHolds() {
  recording_holds_.Apply([this](uint64_t most) {
    questions_.AskLater([&](uint64_t id) { SendRecordingHold(id, most); }, [](const absl::StatusOr<ClientAnswer>&) {});
  });
}

absl::Status LeasedSession::ApplyRecordingHoldsSlowly() {
  if (absl::Status status = CheckNotEnded(); !status.ok()) return status;
  const absl::StatusOr<UserSlots::Slot> waiting = workers_.StartWaiting(caller_.user());
  if (!waiting.ok()) return waiting.status();
  return questions_
      .Ask([this](uint64_t id) { recording_holds_.Apply([&](uint64_t most) { SendRecordingHold(id, most); }); },
           bounds_.client_timeout, /*max_items=*/0)
      .status();
}

}  // namespace vrambroker
