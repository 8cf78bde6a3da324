// SPDX-License-Identifier: Apache-2.0
//
// The broker's requests for memory: what is granted, what waits, and how a refusal is explained.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "allocator/base/mutex.h"
#include "allocator/heap/block_request.h"
#include "server/base/client_log.h"
#include "server/core/broker.h"
#include "server/core/oom_advice.h"
#include "server/core/refusal_line.h"

namespace vrambroker {
namespace {

constexpr size_t kMaxSegmentsInLease = 64;
constexpr size_t kMaxNamedInLog = 10;
constexpr size_t kMaxErrorInLog = 512;  // characters, of what a client says
constexpr size_t kMaxUsersInLog = 1000;

absl::Status CheckWait(const GrowthOptions& growth) {
  if (growth.wait <= kMaxWait) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("wait_ms: ", growth.wait.count(), "; a request may wait for at most ", kMaxWait.count()));
}

// What a client that is asked for memory may take before the next one is asked instead.
constexpr std::chrono::milliseconds kSilence(200);

void AddFit(const FitReport& fit, OomReport* report) {
  report->block_bytes = fit.block_bytes;
  report->segment_bytes = fit.segment_bytes;
  report->pool_free_bytes = fit.pool_free_bytes;
  report->largest_free_block_bytes = fit.pool_largest_bytes;
  report->holes = fit.holes;
  report->knows_holes = fit.knows_holes;
  report->scope = fit.scope;
  report->scopes = fit.scopes;
}

// Whether `recording` has the refusal. Heaps whose blocks the application cuts itself record none.
bool Shows(const HeapSnapshot& recording, const OomReport& report) {
  return std::any_of(recording.history.rbegin(), recording.history.rend(), [&](const HistoryEvent& event) {
    return event.action == HistoryAction::kOutOfMemory && event.bytes == report.block_bytes;
  });
}

// Has not answered the question that it was asked for so long.
bool IsSilent(const Session& session, int device, std::chrono::milliseconds time, SteadyTime now) {
  const std::optional<SteadyTime> since = session.ReclaimAskedSince(device);
  return since.has_value() && now > *since + time;
}

}  // namespace

// While one waits, it may be granted, refused, or served by a block that the session itself has freed, all at the same
// moment: who stops the waiting goes on with it alone.
struct Broker::PendingAllocation {
  PendingAllocation(SessionPtr for_session, int on_device, uint64_t bytes, Stream for_stream, GrowthOptions options,
                    AllocateDone answer)
      : session(std::move(for_session)),
        device(on_device),
        requested(bytes),
        stream(for_stream),
        growth(std::move(options)),
        done(std::move(answer)) {}

  // Returns the number of the wait: there may be several, one after the other.
  int StartWaiting() ABSL_LOCKS_EXCLUDED(mu) {
    MutexLock lock(mu);
    return current_wait = ++waits;
  }
  // False: somebody else has.
  bool StopWaiting(int wait) ABSL_LOCKS_EXCLUDED(mu) {
    MutexLock lock(mu);
    if (current_wait != wait) return false;
    current_wait = 0;
    return true;
  }
  // Only if the session may have another block and the heap has it: `request` is done then.
  bool StopWaitingIfInCache(int wait) ABSL_LOCKS_EXCLUDED(mu) {
    MutexLock lock(mu);
    if (current_wait != wait || !session->CheckMayAllocate().ok() || !request->SearchAgain()) return false;
    current_wait = 0;
    return true;
  }

  const SessionPtr session;
  const int device;
  const uint64_t requested;
  const Stream stream;
  const GrowthOptions growth;
  const AllocateDone done;
  std::unique_ptr<BlockRequest> request;  // of the session's heap; none before its first slow call

  Mutex mu;                                  // before the heap's
  int waits ABSL_GUARDED_BY(mu) = 0;         // number of them so far
  int current_wait ABSL_GUARDED_BY(mu) = 0;  // its number; 0: it does not wait
};

void Broker::Allocate(const SessionPtr& session, uint64_t device, uint64_t requested, Stream stream,
                      const AllocateDone& done, const GrowthOptions& growth) {
  if (absl::Status status = CheckDevice(device); !status.ok()) return done(std::move(status));
  if (absl::Status status = CheckWait(growth); !status.ok()) return done(std::move(status));
  const int ordinal = static_cast<int>(device);
  if (requested == 0) return done(absl::InvalidArgumentError("requested_bytes: must be 1 or more"));
  if (requested >= kMaxRequestBytes) {
    if (absl::Status status = session->CheckMayAllocate(); !status.ok()) return done(std::move(status));
    session->allocator(ordinal).CountOutOfMemory();
    return Refuse(session, ordinal, requested, stream, growth.scope, OomCause::kLargerThanDevice, done);
  }
  absl::StatusOr<Allocation> cached = session->AllocateFromCache(ordinal, requested, stream, growth.scope);
  if (!absl::IsNotFound(cached.status())) return done(std::move(cached));
  session->SetLastOutcome(ordinal, {});
  GrowthOptions options = growth;
  options.cancelled = session->StartGrowth(growth.cancel_key);
  const auto pending = std::make_shared<PendingAllocation>(session, ordinal, requested, stream, options, done);
  const auto allocate = [this, pending] {
    const bool queued = pending->session->slow_calls().Submit([this, pending] { AllocateSlowly(pending); });
    if (!queued) pending->done(TooManyCalls());
  };
  // What it needs is not known yet. One that has some of its guarantee left is not kept waiting.
  if (GoesFirst(*session, ordinal, /*bytes=*/1)) return allocate();
  queues_[device]->AfterPass(allocate);
}

void Broker::AllocateSlowly(const PendingAllocationPtr& pending) {
  Session& session = *pending->session;
  if (absl::Status status = session.CheckMayAllocate(); !status.ok()) return pending->done(std::move(status));
  pending->request = std::make_unique<BlockRequest>(&session.allocator(pending->device), pending->requested,
                                                    pending->stream, pending->growth.scope);
  const absl::Status refusal = session.RunUntilRefused(pending->device, *pending->request);
  if (!refusal.ok() && pending->growth.may_reclaim) return WaitToAllocate(pending, pending->growth);
  Answer(*pending, refusal);
}

void Broker::Answer(PendingAllocation& pending, const absl::Status& refusal) {
  if (!refusal.ok()) {
    if (absl::Status status = pending.session->CheckMayAllocate(); !status.ok()) return pending.done(std::move(status));
    pending.request->Deny(refusal, pools_[pending.device]->AvailableBytes(pending.session->id()));
  }
  absl::StatusOr<Allocation> allocation = pending.session->FinishAllocation(pending.device, *pending.request);
  const std::optional<OomCause> cause = SegmentRefusalCause(allocation.status());
  if (!cause.has_value()) return pending.done(std::move(allocation));
  Refuse(pending.session, pending.device, pending.requested, pending.stream, pending.growth.scope, *cause,
         pending.done);
}

void Broker::WaitToAllocate(const PendingAllocationPtr& pending, const GrowthOptions& growth) {
  const SessionPtr& session = pending->session;
  const int device = pending->device;
  const uint64_t bytes = pending->request->segment_bytes();
  const SteadyTime until = options_.clock() + growth.wait;
  pending->request->Park();
  const int wait = pending->StartWaiting();
  const auto finish = [=, this](const absl::Status& granted) {
    if (!pending->StopWaiting(wait)) {
      if (granted.ok()) pools_[device]->ReleaseGrant(pending->session->id(), bytes);
      return;
    }
    if (granted.ok()) return AllocateGranted(pending, growth, until);
    if (!SegmentRefusalCause(granted).has_value()) return pending->done(granted);
    Answer(*pending, granted);
  };
  const auto retry = [=, this] {
    if (!pending->StopWaitingIfInCache(wait)) return false;
    Answer(*pending);
    return true;
  };
  WaitForGrant(session, device, bytes, growth, finish, retry);
  queues_[device]->Retry(session->id());  // what was freed before it waited
}

void Broker::AllocateGranted(const PendingAllocationPtr& pending, const GrowthOptions& growth, SteadyTime until) {
  const bool queued = pending->session->slow_calls().Submit([=, this] {
    Session& session = *pending->session;
    const int device = pending->device;
    BlockRequest& request = *pending->request;
    const absl::Status may_allocate = session.CheckMayAllocate();  // it may have ended since the grant
    if (!may_allocate.ok() || request.SearchAgain()) {
      session.ReleaseGrant(device, request.segment_bytes());
      return may_allocate.ok() ? Answer(*pending) : pending->done(may_allocate);
    }
    absl::Status refusal = session.SupplyGranted(device, request);
    if (!refusal.ok()) {  // the driver's
      request.FlushAgain();
      refusal = session.RunUntilRefused(device, request);
    }
    const std::optional<GrowthOptions> again = refusal.ok() ? std::nullopt : WaitsOn(growth, until);
    if (again.has_value()) return WaitToAllocate(pending, *again);
    Answer(*pending, refusal);
  });
  if (queued) return;
  pending->session->ReleaseGrant(pending->device, pending->request->segment_bytes());
  pending->done(TooManyCalls());
}

bool Broker::GoesFirst(const Session& session, int device, uint64_t bytes) const {
  if (!queues_[device]->IsPassToCome()) return true;
  const AccountFigures account = pools_[device]->GetAccount(session.id()).value_or(AccountFigures());
  return bytes <= account.committed_bytes() - account.reserved_bytes;
}

void Broker::WaitForGrant(const SessionPtr& session, int device, uint64_t bytes, const GrowthOptions& growth,
                          const GrowthDone& done, const std::function<bool()>& retry) {
  absl::StatusOr<UserSlots::Slot> slot = waiting_.Take(session->caller().uid);
  if (!slot.ok()) return done(slot.status());
  Enqueue(session, device,
          {.session = session->id(),
           .uid = session->caller().uid,
           .bytes = bytes,
           .deadline = options_.clock() + std::min(growth.wait, session->terms().max_wait),
           .cancel_key = growth.cancel_key,
           .retry = retry,
           .done =
               [this, session, device, bytes, done, slot = std::make_shared<UserSlots::Slot>(*std::move(slot))](
                   const absl::Status& status, const GrowthOutcome& outcome) {
                 LogWait(*session, device, bytes, status, outcome);
                 session->SetLastOutcome(device, status.ok() ? GrowthOutcome() : outcome);
                 done(status);
               }},
          growth.cancelled);
}

void Broker::LogWait(const Session& session, int device, uint64_t bytes, const absl::Status& status,
                     const GrowthOutcome& outcome) const {
  if (outcome.asked.empty() && outcome.waited.count() == 0) return;
  std::string asked;  // the first of them
  size_t named = 0;
  for (const auto& [id, answered] : outcome.asked) {
    if (++named > kMaxNamedInLog) break;
    const absl::StatusOr<SessionPtr> other = FindSession(SessionRef(id));
    absl::StrAppend(&asked, asked.empty() ? "" : ",", other.ok() ? (*other)->name() : "-",
                    answered ? "" : "(no answer)");
  }
  LogClientEvent(spdlog::level::info, SessionLine("memory asked for", session.id(), session.name())
                                          .Add("device", device)
                                          .Add("bytes", bytes)
                                          .Add("granted", status.ok())
                                          .Add("waited_ms", outcome.waited.count())
                                          .Add("asked_sessions", outcome.asked.size())
                                          .Add("asked", asked));
}

void Broker::Enqueue(const SessionPtr& session, int device, GrowthRequest request,
                     const std::shared_ptr<std::atomic<bool>>& cancelled) {
  const uint64_t cancel_key = request.cancel_key;
  queues_[device]->Add(std::move(request));
  if (cancelled != nullptr && *cancelled) CancelWait(session, cancel_key);
  // Who ended the session meanwhile has not seen the request.
  if (session->state() != SessionState::kActive) CancelWaits(*session, absl::AbortedError("the session has ended"));
}

void Broker::CancelWait(const SessionPtr& session, uint64_t cancel_key) {
  if (cancel_key == 0) return;
  session->CancelGrowth(cancel_key);  // one that does not wait yet
  for (const auto& queue : queues_) {
    queue->Cancel(session->id(), cancel_key, absl::CancelledError("the client has given up waiting"));
  }
}

void Broker::CancelWaits(const Session& session, const absl::Status& why) {
  for (const auto& queue : queues_) queue->Cancel(session.id(), why);
}

std::vector<ReclaimCandidate> Broker::ReclaimCandidates(int device) const {
  std::vector<ReclaimCandidate> candidates;
  const SteadyTime now = options_.clock();
  for (const SessionPtr& session : Sessions()) {
    // Nobody waits for an answer that is overdue.
    if (session->state() != SessionState::kActive || IsSilent(*session, device, options_.reclaim_timeout, now))
      continue;
    const AccountFigures account = pools_[device]->GetAccount(session->id()).value_or(AccountFigures());
    if (account.reserved_bytes == 0) continue;
    candidates.push_back({.session = session->id(),
                          .priority = account.priority,
                          .reserved_bytes = account.reserved_bytes,
                          .guarantee_bytes = account.guarantee_bytes,
                          .idle_bytes = IdleBytes(*session, account, session->GetMemoryStats(device)),
                          .is_slow = IsSilent(*session, device, kSilence, now)});
  }
  return candidates;
}

void Broker::OnTimer() {
  const SteadyTime now = options_.clock();
  for (size_t device = 0; device < pools_.size(); ++device) {
    queues_[device]->OnTimer();
    SegmentPool* pool = pools_[device];
    const std::optional<SteadyTime> check = pool->NextQuarantineCheck();
    if (!check.has_value() || *check > now || checking_quarantine_[device].exchange(true)) continue;
    workers_.Submit([this, pool, device] {
      pool->CheckQuarantine();
      // Only now: what falls due meanwhile is for the next walk, and not for one beside this.
      checking_quarantine_[device] = false;
      SetTimer();
    });
  }
  SetTimer();
}

void Broker::SetTimer() {
  MutexLock lock(timer_mu_);
  std::optional<SteadyTime> next;
  for (size_t device = 0; device < pools_.size(); ++device) {
    const auto check =
        checking_quarantine_[device] ? std::optional<SteadyTime>() : pools_[device]->NextQuarantineCheck();
    for (const std::optional<SteadyTime>& wake : {queues_[device]->NextWake(), check}) {
      if (wake.has_value() && (!next.has_value() || *wake < *next)) next = wake;
    }
  }
  if (next.has_value()) options_.set_timer(*next);
}

void Broker::Refuse(const SessionPtr& session, int device, uint64_t requested, Stream stream, ScopeId scope,
                    OomCause refusal, const RefusalDone& done) {
  OomReport report = Report(*session, device);
  AddHolders(*session, &report);
  report.requested_bytes = requested;
  AddFit(session->ExplainFit(device, requested, stream, scope), &report);
  report.cause = CauseOf(report, refusal);
  EndRefusal(session, std::move(report), /*is_recording=*/session->records(), done);
}

OomReport Broker::Report(const Session& session, int device) const {
  const SegmentPool& pool = *pools_[device];
  OomReport report;
  report.device = device;
  const AccountFigures account = pool.GetAccount(session.id()).value_or(AccountFigures());
  report.limit_bytes = account.limit_bytes;
  report.reserved_bytes = account.reserved_bytes;
  const MemoryStats stats = session.GetMemoryStats(device);
  report.allocated_bytes = stats.allocated_bytes.all.current;
  report.inactive_split_bytes = stats.inactive_split_bytes.all.current;
  report.unknown_bytes = FiguresOn(session, device, account).unknown_bytes;
  const PoolFigures figures = pool.GetFigures();
  report.capacity_bytes = figures.capacity_bytes;
  report.available_bytes = figures.capacity_bytes - std::min(figures.capacity_bytes, figures.charged_bytes);
  report.guarantee_bytes = account.guarantee_bytes;
  // What is committed and not charged, less the session's own part of it.
  const uint64_t own_kept_free = account.committed_bytes() - account.reserved_bytes;
  const uint64_t kept_free = figures.committed_bytes - figures.charged_bytes;
  report.kept_free_bytes = kept_free - std::min(kept_free, own_kept_free);
  report.held_back = pool.IsHeldBack(session.id(), kSegmentGranuleBytes);
  report.waited_ms = static_cast<uint64_t>(session.GetLastOutcome(device).waited.count());
  report.device_idle_bytes = figures.idle_bytes;
  report.outside_bytes = figures.outside_bytes;
  if (account.user_limit_bytes != AccountFigures::kNoBound) {
    report.user_limit_bytes = account.user_limit_bytes;
    report.user_committed_bytes = pool.GetUser(account.uid).committed_bytes;
  }
  return report;
}

void Broker::AddHolders(const Session& session, OomReport* report) const {
  const GrowthOutcome outcome = session.GetLastOutcome(report->device);
  absl::flat_hash_set<SessionId> silent;
  for (const SessionPtr& other : Sessions()) {
    if (IsSilent(*other, report->device, kSilence, options_.clock())) silent.insert(other->id());
  }
  // Of this device alone: whoever is refused can have this done often.
  const PoolView pool = pools_[report->device]->GetView();
  const std::vector<SessionPtr> sessions = Sessions();
  std::vector<OtherSession> others;
  others.reserve(sessions.size());
  for (const SessionPtr& holder : sessions) {
    const auto account = pool.accounts.find(holder->id());
    if (account == pool.accounts.end() || account->second.reserved_bytes == 0) continue;
    const SessionDeviceInfo held = FiguresOn(*holder, report->device, account->second);
    report->largest_holders.push_back({.client = holder->name(),
                                       .reserved_bytes = held.account.reserved_bytes,
                                       // Its client may not have told yet what its refusal says.
                                       .allocated_bytes = holder->id() == session.id()
                                                              ? report->allocated_bytes
                                                              : held.stats.allocated_bytes.all.current});
    if (holder->id() == session.id()) continue;
    const auto asked = outcome.asked.find(holder->id());
    others.push_back({.client = holder->name(),
                      .reserved_bytes = held.account.reserved_bytes,
                      .guarantee_bytes = held.account.guarantee_bytes,
                      .active_bytes = held.stats.active_bytes.all.current,
                      .unknown_bytes = held.unknown_bytes,
                      .inactive_split_bytes = held.stats.inactive_split_bytes.all.current,
                      .is_connected = holder->state() == SessionState::kActive,
                      .asked = silent.contains(holder->id())  ? OtherSession::Asked::kNoAnswer
                               : asked == outcome.asked.end() ? OtherSession::Asked::kNo
                               : asked->second                ? OtherSession::Asked::kAnswered
                                                              : OtherSession::Asked::kNoAnswer});
  }
  std::stable_sort(report->largest_holders.begin(), report->largest_holders.end(),
                   [](const auto& a, const auto& b) { return a.reserved_bytes > b.reserved_bytes; });
  if (report->largest_holders.size() > kMaxHolders) report->largest_holders.resize(kMaxHolders);
  AddOthers(others, report);
  report->quarantined_bytes += pool.figures.quarantined_bytes;
}

void Broker::EndRefusal(const SessionPtr& session, OomReport report, bool is_recording, const RefusalDone& done) {
  report.refusal = ++refusals_;
  absl::StatusOr<UserSlots::Slot> slot = absl::UnavailableError("not now");
  // No setting serves what no device could, and heaps do not record it.
  const SteadyTime asked = options_.clock();
  if (is_recording && report.cause != OomCause::kLargerThanDevice && report.requested_bytes < kMaxRequestBytes &&
      session->StartRefusalRecording(asked)) {
    slot = recording_refusals_.Take(session->caller().uid);
    if (!slot.ok()) session->EndRefusalRecording(asked, {});
  }
  if (!slot.ok()) return done(CountRefusal(*session, report));
  const auto taken = std::make_shared<UserSlots::Slot>(*std::move(slot));
  // Before the answer: a program that dies of it cannot be asked any more.
  const bool queued = session->slow_questions().Submit([this, session, report, done, taken, asked] {
    const SteadyTime began = options_.clock();
    OomReport recorded = report;
    // Behind other questions the moment may have passed, and the program waits.
    if (began - asked <= options_.session_bounds.client_timeout) {
      absl::StatusOr<HeapSnapshot> recording = session->RecordingOfRefusal(report.device);
      if (recording.ok() && Shows(*recording, report) &&
          recording->segments.size() <= options_.session_bounds.max_segments) {
        const RefusalRecordings::Place place =
            refusal_recordings_.Add(report.refusal, session->id(), session->caller().uid, *std::move(recording));
        recorded.is_recorded = place != RefusalRecordings::Place::kNone;
        recorded.is_first_recorded = place == RefusalRecordings::Place::kFirst;
      }
      const SteadyTime now = options_.clock();
      session->EndRefusalRecording(now, std::max(now - began, SteadyTime::duration(1)));
    } else {
      session->EndRefusalRecording(began, {});
    }
    done(CountRefusal(*session, recorded));
  });
  if (queued) return;
  session->EndRefusalRecording(asked, {});
  done(CountRefusal(*session, report));
}

absl::Status Broker::CountRefusal(Session& session, const OomReport& report) {
  ooms_[report.device][static_cast<size_t>(report.cause)].fetch_add(1, std::memory_order_relaxed);
  session.CountOom(report.device, report.cause);
  tenant_refusals_.CountRefusal(session.terms().tenant, report.device, report.cause);
  session.set_last_refusal(report.device, options_.clock());
  // It may have ended while it was being asked for its recording.
  if (session.state() == SessionState::kClosed) CountEndedAfterRefusal(session);
  absl::Status status = OutOfMemoryError(report);
  LogClientEvent(spdlog::level::info, RefusalLine(session.id(), session.name(), report));
  oom_log_.Add({.time = std::chrono::system_clock::now(),
                .session = session.id(),
                .client = session.name(),
                .uid = session.caller().uid,
                .report = report});
  return status;
}

void Broker::LeaseSegments(const SessionPtr& session, uint64_t device, const std::vector<uint64_t>& sizes,
                           const LeaseDone& done, const GrowthOptions& growth) {
  if (absl::Status status = CheckDevice(device); !status.ok()) return done(std::move(status));
  if (sizes.empty() || sizes.size() > kMaxSegmentsInLease) {
    return done(absl::InvalidArgumentError(
        absl::StrCat("segment_bytes: ", sizes.size(), " sizes; a lease has 1 to ", kMaxSegmentsInLease)));
  }
  for (const uint64_t bytes : sizes) {
    if (absl::Status status = CheckSegmentBytes(bytes); !status.ok()) {
      return done(absl::InvalidArgumentError(absl::StrCat("segment_bytes: ", status.message())));
    }
  }
  // The sum of sizes may be beyond what can be counted.
  uint64_t sum = 0;
  bool too_large = false;
  for (const uint64_t bytes : sizes) {
    too_large = too_large || bytes > pools_[device]->capacity_bytes() - sum;
    if (!too_large) sum += bytes;
  }
  if (absl::Status status = CheckWait(growth); !status.ok()) return done(std::move(status));
  const int ordinal = static_cast<int>(device);
  const LeaseDone finish = [this, session, ordinal, sizes, done](absl::StatusOr<std::vector<Lease>> leases) {
    const std::optional<OomCause> refusal = SegmentRefusalCause(leases.status());
    if (!refusal.has_value()) return done(std::move(leases));
    OomReport report = Report(*session, ordinal);  // the client explains itself when it mattered
    report.requested_bytes = report.block_bytes = report.segment_bytes = *std::max_element(sizes.begin(), sizes.end());
    report.cause = *refusal == OomCause::kCapacity && IsUserLimit(report) ? OomCause::kLimit : *refusal;
    done(OutOfMemoryError(report));
  };
  if (too_large) return finish(SegmentRefused(OomCause::kLargerThanDevice, "larger than the device's capacity"));
  if (!growth.may_reclaim) session->SetLastOutcome(ordinal, {});
  GrowthOptions options = growth;
  if (growth.may_reclaim) options.cancelled = session->StartGrowth(growth.cancel_key);
  // Asked before the lease is tried: a look that ends meanwhile makes room that the lease has not seen.
  const bool may_await_look = growth.may_reclaim && pools_[device]->IsClosingCarriedOver(session->id()) &&
                              sum <= pools_[device]->GetAccount(session->id()).value_or(AccountFigures()).limit_bytes;
  const LeaseDone finish_or_wait = [=, this](absl::StatusOr<std::vector<Lease>> leases) {
    const std::optional<OomCause> refusal = SegmentRefusalCause(leases.status());
    const bool may_wait = refusal == OomCause::kCapacity || (refusal == OomCause::kLimit && may_await_look);
    if (!growth.may_reclaim || !may_wait) return finish(std::move(leases));
    WaitToLease(session, ordinal, sizes, options, finish);
  };
  const auto lease_slowly = [=, events = session->events()] {
    const bool queued = session->slow_calls().Submit([=] {
      // A client that has resumed the session meanwhile does not know of this lease.
      if (session->events() != events) return finish(absl::AbortedError("the connection has broken"));
      finish_or_wait(session->LeaseSlowly(ordinal, sizes));
    });
    if (!queued) done(TooManyCalls());
  };
  if (!GoesFirst(*session, ordinal, sum)) return queues_[device]->AfterPass(lease_slowly);
  absl::StatusOr<std::vector<Lease>> idle = session->LeaseIdle(ordinal, sizes);
  if (!absl::IsNotFound(idle.status())) return finish_or_wait(std::move(idle));
  lease_slowly();
}

void Broker::WaitToLease(const SessionPtr& session, int device, const std::vector<uint64_t>& sizes,
                         const GrowthOptions& growth, const LeaseDone& finish) {
  const uint64_t sum = std::accumulate(sizes.begin(), sizes.end(), uint64_t{0});
  const SteadyTime until = options_.clock() + growth.wait;
  const auto granted = [=, this, events = session->events()](const absl::Status& status) {
    if (!status.ok()) return finish(status);
    const bool queued = session->slow_calls().Submit([=, this] {
      // A client that has resumed the session meanwhile does not know of this lease.
      if (session->events() != events) {
        session->ReleaseGrant(device, sum);
        return finish(absl::AbortedError("the connection has broken"));
      }
      absl::StatusOr<std::vector<Lease>> leases = session->LeaseSlowly(device, sizes, /*granted=*/true);
      if (SegmentRefusalCause(leases.status()) != OomCause::kCapacity) return finish(std::move(leases));
      const std::optional<GrowthOptions> again = WaitsOn(growth, until);
      if (!again.has_value()) return finish(std::move(leases));
      WaitToLease(session, device, sizes, *again, finish);
    });
    if (queued) return;
    session->ReleaseGrant(device, sum);
    finish(TooManyCalls());
  };
  WaitForGrant(session, device, sum, growth, granted);
}

std::optional<GrowthOptions> Broker::WaitsOn(const GrowthOptions& growth, SteadyTime until) const {
  const SteadyTime now = options_.clock();
  if (now >= until) return std::nullopt;
  GrowthOptions rest = growth;
  rest.wait = std::chrono::ceil<std::chrono::milliseconds>(until - now);
  return rest;
}

absl::Status Broker::ReturnSegments(const SessionPtr& session, uint64_t device, absl::Span<const SegmentId> segments) {
  if (absl::Status status = CheckDevice(device); !status.ok()) return status;
  return session->ReturnLeased(static_cast<int>(device), segments);
}

absl::Status Broker::DeclareCarriedOver(const SessionPtr& session, const CarriedByDevice& segments, bool begins,
                                        bool ends) {
  // Buffers of remote sessions outlive the daemon, too, also on CUDA: the driver keeps what their process has open. But
  // such a session never reaches the next daemon, which charges to nobody what it finds of it, or what the driver says.
  if (!session->leases()) {
    return absl::FailedPreconditionError("carried_over: the session is remote: the daemon knows what it holds");
  }
  for (const auto& [device, unused] : segments) {
    if (absl::Status status = CheckDevice(device); !status.ok()) return status;
  }
  for (size_t device = 0; device < pools_.size(); ++device) {
    const auto it = segments.find(device);
    if (it == segments.end() && !begins && !ends) continue;
    const absl::Status status = pools_[device]->DeclareCarriedOver(
        session->id(), it == segments.end() ? absl::Span<const CarriedSegment>() : it->second, begins, ends);
    if (!status.ok()) return status;
  }
  if (ends) SetTimer();
  return absl::OkStatus();
}

void Broker::FreeCarriedOver(const SessionPtr& session, absl::Span<const uint64_t> ids) {
  for (SegmentPool* pool : pools_) pool->FreeCarriedOver(session->id(), ids);
  SetTimer();
}

void Broker::CannotOpen(const Session& session, int device, absl::string_view error) {
  const absl::string_view cause = error.substr(0, kMaxErrorInLog);
  const uid_t uid = session.caller().uid;
  if (pools_[device]->properties().kind != DeviceKind::kCuda || uid == geteuid()) {
    return LogClientEvent(spdlog::level::warn,
                          SessionLine("client cannot open its memory", session.id(), session.name())
                              .Add("device", device)
                              .Add("why", cause));
  }
  {
    MutexLock lock(mu_);
    if (cannot_open_.size() >= kMaxUsersInLog || !cannot_open_.insert(uid).second) return;
  }
  SessionLine("clients of another user cannot open the daemon's memory", session.id(), session.name())
      .Add("uid", uid)
      .Add("daemon_uid", geteuid())
      .Add("device", device)
      .Add("why", cause)
      .Add("advice", absl::StrCat("CUDA may share memory only between processes of one user: run the daemon as uid ",
                                  uid, ", or a daemon of its own for each user"))
      .Write(spdlog::level::err);
}

void Broker::Explain(const SessionPtr& session, uint64_t device, const RefusedRequest& request,
                     const RefusalDone& done) {
  if (absl::Status status = CheckDevice(device); !status.ok()) return done(std::move(status));
  OomReport report = Report(*session, static_cast<int>(device));
  report.allocated_bytes = request.allocated_bytes;  // also among the holders
  AddHolders(*session, &report);
  report.requested_bytes = request.requested_bytes;
  AddFit(request.fit, &report);
  report.cause = CauseOf(report, request.cause);
  // A client may have changed by itself what it keeps; one of version 0.1 does not say.
  const bool is_recording = request.fit.max_events > 0 || session->records();
  EndRefusal(session, std::move(report), is_recording, done);
}

absl::Status Broker::Free(const SessionPtr& session, absl::Span<const BlockId> blocks) {
  if (absl::Status status = session->Free(blocks); !status.ok()) return status;
  for (const auto& queue : queues_) queue->Retry(session->id());
  return absl::OkStatus();
}

}  // namespace vrambroker
