// SPDX-License-Identifier: Apache-2.0
#include "server/core/broker.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "allocator/base/names.h"
#include "allocator/device/process_files.h"
#include "server/base/client_log.h"
#include "server/identity/process_command.h"
#include "server/identity/process_info.h"
#include "server/sessions/counted_session.h"

namespace vrambroker {
namespace {

// Bound on all sessions of a user together.
uint64_t BoundBytes(const std::optional<Limit>& bound, const SegmentPool& pool) {
  return bound.has_value() ? LimitBytes(*bound, pool.capacity_bytes()) : AccountState::kNoBound;
}

// Tenant of idle memory usable for the session without scrubbing.
std::string TenantOf(const Session& session) {
  const SessionTerms& terms = session.terms();
  if (terms.strict) return absl::StrCat("session:", Raw(session.id()));
  if (!terms.has_claims_tenant || !terms.claim_id.has_value()) return terms.tenant;
  // A later claim may reuse the name for another user. Names never contain a #.
  return absl::StrCat(terms.tenant, "#", Raw(*terms.claim_id));
}

SegmentPool::Closed CloseAccount(SegmentPool& pool, SessionId session, CloseReason reason) {
  switch (reason) {
    case CloseReason::kGoodbye:
    case CloseReason::kNotOpened:
      return {.came_back = pool.CloseAccount(session)};
    case CloseReason::kProcessEnded:
      return pool.CloseAccountOfGone(session);
    case CloseReason::kDaemonStops:
      return pool.CloseAccountOfHolder(session);
  }
  return {};
}

LogLine SessionLine(absl::string_view event, const Session& session) {
  return vrambroker::SessionLine(event, session.id(), session.name());
}

}  // namespace

Broker::Broker(BrokerOptions options, std::vector<SegmentPool*> pools, Executor* workers)
    : options_(std::move(options)),
      pools_(std::move(pools)),
      workers_(workers),
      settings_(options_.settings_file),
      timer_(options_.set_timer),
      sessions_(pools_.size(), options_.max_recorded_events_per_uid),
      waiting_({.clock = options_.clock,
                .reclaim_timeout = options_.reclaim_timeout,
                .hold_back_time = options_.hold_back_time,
                .hold_back_limit = options_.hold_back_limit,
                .max_waiting_per_uid = options_.max_waiting_per_uid},
               pools_, workers_, &sessions_, &timer_),
      refusals_(options_.clock, options_.session_bounds, pools_, &sessions_, options_.max_tenants),
      allocations_(pools_, options_.clock, &waiting_, &refusals_),
      leases_(pools_, options_.clock, &waiting_, &refusals_, &timer_),
      charges_(pools_, options_.clock, &waiting_, &refusals_),
      limits_(pools_, options_.reclaim_timeout, &waiting_, &settings_),
      claims_({.reclaim_timeout = options_.reclaim_timeout,
               .max_wait = [this] { return policy()->max_wait(); },
               .end_session = [this](const SessionPtr& session,
                                     const std::string& reason) { (void)EndSession(session, reason); },
               .added =
                   [this](const Claim& claim) {
                     refusals_.AddClaim(claim.name);
                     waiting_.AddClaim(claim.id);
                   },
               .removed =
                   [this](const Claim& claim, const std::string& own_tenant) {
                     refusals_.ForgetClaim(claim.name);
                     waiting_.ForgetClaim(claim.id);
                     refusals_.ForgetTenant(own_tenant);
                   },
               .hooks = options_.claims},
              pools_, workers_, &sessions_, &waiting_, &limits_),
      recordings_(options_.record_events, &sessions_, &settings_),
      fragmentation_(pools_, options_.fragmentation_window, options_.clock),
      reconciliation_(options_.overhead_allowance_bytes, pools_, workers_, &sessions_),
      quarantine_checks_(pools_, workers_, &timer_),
      idle_releases_(pools_, workers_),
      operator_view_(pools_, options_.clock, options_.user_name,
                     {.sessions = &sessions_,
                      .waiting = &waiting_,
                      .refusals = &refusals_,
                      .fragmentation = &fragmentation_,
                      .reconciliation = &reconciliation_,
                      .claims = &claims_}),
      policy_(options_.policy != nullptr ? options_.policy : std::make_shared<const Policy>(PolicyOptions())) {
  timer_.AddSource([this] { return waiting_.NextWake(); });
  timer_.AddSource([this] { return quarantine_checks_.NextCheck(); });
}

// ---- Opening ----

absl::StatusOr<SessionPtr> Broker::OpenSession(const Caller& caller, const OpenOptions& options,
                                               std::shared_ptr<SessionEvents> events) {
  absl::StatusOr<SessionPtr> session = TryOpenSession(caller, options, std::move(events));
  if (!session.ok()) sessions_.CountRefused();
  return session;
}

absl::StatusOr<SessionPtr> Broker::TryOpenSession(const Caller& caller, const OpenOptions& options,
                                                  std::shared_ptr<SessionEvents> events) {
  if (absl::Status status = CheckName(options.name); !status.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("name: ", status.message()));
  }
  if (options.limit.has_value()) {
    if (absl::Status status = CheckLimit("limit", *options.limit); !status.ok()) return status;
  }
  if (options.placement != Placement::kCounted) {  // counted sessions share no memory with the daemon
    if (absl::Status status = CheckPidNamespace(caller); !status.ok()) return status;
  }
  const std::string name = options.name.empty() ? CommandName(caller.pid) : options.name;
  const std::shared_ptr<const Policy> policy = this->policy();
  const uint64_t started = StartOf(caller.pid);
  const absl::StatusOr<SessionTerms> terms = TermsOfNew(*policy, caller, name, started);  // fails if caller ended
  if (!terms.ok()) return terms.status();
  // Finish() leaves the claim once the session is published.
  auto leave_claim = absl::MakeCleanup([&] {
    if (terms->claim_id.has_value()) claims_.Leave(*terms->claim_id);
  });
  const absl::StatusOr<RandomToken> token = NewRandomToken();
  if (!token.ok()) return token.status();

  const absl::StatusOr<SessionRegistry::Reserved> reserved =
      sessions_.Reserve({.name = name,
                         .user = caller.user(),
                         .terms = *terms,
                         .max_sessions_per_uid = policy->max_sessions_per_uid(),
                         .placement = options.placement,
                         .record_events = options_.record_events});
  if (!reserved.ok()) return reserved.status();
  (void)options_.user_name(caller.uid);  // so that the name is known when needed
  SavedSession saved{.process = {.pid = caller.pid, .started = started},
                     .kind = PlacementName(options.placement),
                     .name = name,
                     .token = {},
                     .earlier = options.earlier};
  if (options.placement == Placement::kLeased) saved.token = *token;
  const SessionSettings set = settings_.Opened(reserved->id, std::move(saved));
  // A leasing client goes on with its recording; other clients begin anew.
  const bool keeps_recording = options.placement == Placement::kLeased && set.recorded_events.has_value();
  // Visible to no thread until complete.
  const SessionSetup setup{.id = reserved->id,
                           .name = reserved->name,
                           .caller = caller,
                           .command = ProcessCommand::Of(caller.pid),
                           .terms = *terms,
                           .pools = pools_,
                           .workers = workers_,
                           .bounds = options_.session_bounds,
                           .events = std::move(events),
                           .allocator = options.allocator.value_or(options_.allocator),
                           .record_events = keeps_recording ? *set.recorded_events : reserved->record_events,
                           .devices = options.devices,
                           .goes_on = options.earlier.has_value(),
                           .clock = options_.clock};
  SessionPtr session;
  switch (options.placement) {
    case Placement::kRemote:
      session = std::make_shared<RemoteSession>(setup);
      break;
    case Placement::kLeased:
      session = std::make_shared<LeasedSession>(setup, *token);
      break;
    case Placement::kCounted:
      session = std::make_shared<CountedSession>(setup, *token);
      break;
  }
  OpenAccounts(*session, options, setup.allocator, started, set);
  // Must precede the session's first memory.
  if (terms->claim_id.has_value()) options_.claims.note_member({.pid = caller.pid, .started = started}, terms->claim);
  refusals_.AddTenant(terms->tenant);  // before the session becomes visible
  if (absl::Status status = sessions_.Publish(session); !status.ok()) {
    for (SegmentPool* pool : pools_) (void)pool->CloseAccount(session->id());
    settings_.Left(session->id());
    return status;
  }
  std::move(leave_claim).Cancel();
  claims_.Published(session, *this->policy());
  LogOpened(*session, setup.allocator);
  LogSet(*session, set);
  if (absl::Status status = Watch(session); !status.ok()) return status;
  return session;
}

absl::Status Broker::CheckPidNamespace(const Caller& caller) const {
  const bool matters = std::any_of(pools_.begin(), pools_.end(),
                                   [](const SegmentPool* pool) { return pool->properties().needs_one_pid_namespace; });
  if (!matters || !IsInInnerPidNamespace(caller.pid)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "this process is in a pid namespace of its own, as in a container, and CUDA shares memory only within one: start "
      "the container with --pid=host (in Kubernetes: hostPID: true)");
}

absl::StatusOr<SessionTerms> Broker::TermsOfNew(const Policy& policy, const Caller& caller, const std::string& name,
                                                uint64_t started) {
  const absl::StatusOr<PolicySubject> subject = SubjectOf(caller, name);
  if (!subject.ok()) return subject.status();
  const ProcessId process{.pid = caller.pid, .started = started};
  if (caller.claim.has_value()) return claims_.Enter(caller, process, policy.TermsFor(*subject));
  SessionTerms terms = policy.TermsFor(*subject);
  if (terms.rights.client && terms.claim.empty()) return terms;
  if (terms.rights.client) {
    const absl::StatusOr<ClaimId> claim = claims_.EnterByPolicy(terms, process);
    if (!claim.ok()) return claim.status();
    terms.claim_id = *claim;
    return terms;
  }
  return absl::PermissionDeniedError(absl::StrCat("uid ", caller.uid, " may not open a session named '", name,
                                                  "': the policy's rule ", terms.rule,
                                                  " does not give it the right CLIENT"));
}

void Broker::OpenAccounts(Session& session, const OpenOptions& options, const AllocatorOptions& allocator,
                          uint64_t started, const SessionSettings& set) {
  const SessionTerms& terms = session.terms();
  const SessionMark mark = MarkOf(session.caller(), options);
  for (size_t device = 0; device < pools_.size(); ++device) {
    SegmentPool& pool = *pools_[device];
    uint64_t limit =
        std::min(session.BytesOn(device, terms.limit), session.BytesOn(device, allocator.per_process_memory_fraction));
    if (options.limit.has_value()) limit = std::min(limit, session.BytesOn(device, *options.limit));
    if (set.limit.has_value()) limit = session.BytesOn(device, *set.limit);
    pool.OpenAccount(session.id(), {.client = session.name(),
                                    .pid = session.caller().pid,
                                    .started = started,
                                    .uid = session.caller().uid,
                                    .claim = terms.claim_id,
                                    .tenant = TenantOf(session),
                                    .limit_bytes = limit,
                                    .priority = set.priority.value_or(terms.priority),
                                    .user_limit_bytes = BoundBytes(terms.user_limit, pool),
                                    .user_guarantee_bytes = BoundBytes(terms.user_guarantee, pool),
                                    .mark = mark});
    session.SetLimit(static_cast<int>(device),
                     pool.GetAccount(session.id()).value_or(AccountState()).effective_limit_bytes());
  }
}

SessionMark Broker::MarkOf(const Caller& caller, const OpenOptions& options) {
  const bool needed = std::any_of(pools_.begin(), pools_.end(),
                                  [](const SegmentPool* pool) { return !pool->properties().tells_holders; });
  if (!needed || !options.mark.has_value()) return 0;
  const absl::StatusOr<SessionMark> mark = FindSessionMark(caller.pid, *options.mark);
  if (mark.ok()) return *mark;
  if (!absl::IsPermissionDenied(mark.status())) {
    LogClientEvent(spdlog::level::warn, "the mark of process {} of uid {} is not known: {}", caller.pid, caller.uid,
                   mark.status().ToString());
  } else if (!warned_of_mark_.exchange(true)) {
    spdlog::warn(
        "process {} of uid {}: the daemon cannot see who inherits its descriptors, so GPU memory of such processes "
        "leaves quarantine after settle_time even if their children still have it ({}); {}",
        caller.pid, caller.uid, mark.status().ToString(), HowToLookIntoProcesses());
  }
  return 0;
}

void Broker::LogOpened(const Session& session, const AllocatorOptions& allocator) const {
  const auto limit_of = [&](std::string* out, const SegmentPool* pool) {
    absl::StrAppend(out, pool->GetAccount(session.id()).value_or(AccountState()).effective_limit_bytes());
  };
  LogClientEvent(spdlog::level::info, SessionLine("session opened", session)
                                          .Add("pid", session.caller().pid)
                                          .Add("uid", session.caller().uid)
                                          .Add("rule", session.terms().rule)
                                          .Add("claim", session.terms().claim)
                                          .Add("tenant", session.terms().tenant)
                                          .Add("placement", PlacementName(session.placement()))
                                          .Add("limits", absl::StrJoin(pools_, ",", limit_of))
                                          .Add("alloc_conf", FormatAllocConf(allocator)));
}

void Broker::LogSet(const Session& session, const SessionSettings& set) const {
  if (set == SessionSettings()) return;
  LogLine line = SessionLine("session has what an operator had set before the daemon was started", session);
  const auto text = [&](const Limit& limit) {
    return absl::StrJoin(pools_, ",", [&](std::string* out, const SegmentPool* pool) {
      absl::StrAppend(out, session.BytesOn(static_cast<size_t>(pool->properties().ordinal), limit));
    });
  };
  if (set.limit.has_value()) line.Add("limits", text(*set.limit));
  if (set.guarantee.has_value()) line.Add("guarantees", text(*set.guarantee));
  if (set.priority.has_value()) line.Add("priority", *set.priority);
  if (set.recorded_events.has_value()) line.Add("events", *set.recorded_events);
  LogClientEvent(spdlog::level::info, line);
}

absl::Status Broker::Watch(const SessionPtr& session) {
  const absl::StatusOr<int> watch =
      options_.watch_process(*session->caller().pidfd, [this, weak = std::weak_ptr<Session>(session)] {
        if (const SessionPtr gone = weak.lock()) CloseGone(gone);
      });
  if (!watch.ok()) {
    Close(session, "its process cannot be watched", CloseReason::kNotOpened);
    return watch.status();
  }
  session->set_process_watch(*watch);
  // The process may have ended before its watch was stored.
  if (session->state() == SessionState::kClosed) Unwatch(*session);
  return absl::OkStatus();
}

void Broker::Unwatch(Session& session) {
  if (const int watch = session.TakeProcessWatch(); watch >= 0) options_.unwatch_process(watch);
}

// ---- Resuming ----

absl::StatusOr<SessionPtr> Broker::FindToResume(const Caller& caller, const ResumeToken& token) const {
  for (const SessionPtr& session : sessions_.GetAll()) {
    const LeasedSession* const leased = session->leased();
    if (leased == nullptr || leased->resume_token() != token) continue;
    if (session->caller().pid == caller.pid && session->caller().uid == caller.uid) return session;
    return absl::PermissionDeniedError("resume.token: the session belongs to another process");
  }
  return absl::NotFoundError("resume.token: no session of this daemon has this token");
}

void Broker::ResumeSession(const Caller& caller, const ResumeToken& token, absl::flat_hash_set<SegmentId> held,
                           std::shared_ptr<SessionEvents> events, const ResumeDone& done) {
  const absl::StatusOr<SessionPtr> found = FindToResume(caller, token);
  if (!found.ok()) return done(found.status());
  // Runs after the session's running slow calls: segments from such calls belong to no client.
  const bool queued =
      (*found)->slow_calls().Submit([session = *found, held = std::move(held), events = std::move(events), done] {
        const absl::Status status = Resume(*session->leased(), held, events);
        if (!status.ok()) return done(status);
        done(session);
        // After the welcome, since the welcome makes the client drop recordings kept for traces.
        if (session->recording_holds().Most() > 0) session->ApplyRecordingHolds();
      });
  if (!queued) done(absl::UnavailableError("resume: calls of the session are still under way; try again"));
}

absl::Status Broker::Resume(LeasedSession& session, const absl::flat_hash_set<SegmentId>& held,
                            const std::shared_ptr<SessionEvents>& events) {
  switch (session.state()) {
    case SessionState::kActive:
      return absl::UnavailableError("resume: the old stream of the session has not ended yet; try again");
    case SessionState::kEnded:
      return absl::AbortedError("the session was ended by an operator");
    case SessionState::kClosed:
      return absl::NotFoundError("resume.token: the session has ended");
    case SessionState::kDisconnected:
      break;
  }
  session.ReturnAllBut(held);
  if (!session.Resume(events)) return absl::UnavailableError("resume: the session is changing; try again");
  LogClientEvent(spdlog::level::info,
                 SessionLine("session resumed", session).Add("pid", session.caller().pid).Add("segments", held.size()));
  return absl::OkStatus();
}

void Broker::ResumeCounted(const SessionPtr& session, const ResumeDone& done) {
  const absl::StatusOr<RandomToken> token = NewRandomToken();
  if (!token.ok()) return done(token.status());
  const bool queued = session->slow_calls().Submit([session, token = *token, done] {
    if (!session->counted()->Resume(token)) {
      return done(absl::UnavailableError("token: the session's connection has not ended yet; try again"));
    }
    LogClientEvent(spdlog::level::info, SessionLine("session resumed", *session).Add("pid", session->caller().pid));
    done(session);
  });
  if (!queued) done(absl::UnavailableError("token: calls of the session are still under way; try again"));
}

// ---- Ending ----

void Broker::Disconnect(const SessionPtr& session) {
  if (!session->Advance(SessionState::kDisconnected)) return;
  waiting_.CancelAll(*session, absl::AbortedError("the connection has broken"));
  LogClientEvent(spdlog::level::warn, SessionLine("session disconnected", *session)
                                          .Add("pid", session->caller().pid)
                                          .Add("charged_until_process_ends", ReservedBytes(*session)));
}

void Broker::Close(const SessionPtr& session, const std::string& why, CloseReason reason) {
  Finish(session, why, reason);
}

void Broker::CloseGone(const SessionPtr& session) {
  Finish(session, "its process has ended", CloseReason::kProcessEnded);
}

void Broker::Finish(const SessionPtr& session, const std::string& why, CloseReason reason) {
  if (!session->Advance(SessionState::kClosed)) return;
  Unwatch(*session);
  waiting_.CancelAll(*session, absl::AbortedError("the session has ended"));
  SegmentPool::Closed held;
  std::vector<uint64_t> alloc_retries;  // final, since the session is closed
  alloc_retries.reserve(pools_.size());
  for (size_t device = 0; device < pools_.size(); ++device) {
    const SegmentPool::Closed on_device = CloseAccount(*pools_[device], session->id(), reason);
    held.came_back += on_device.came_back;
    held.still_held += on_device.still_held;
    alloc_retries.push_back(session->CountAllocRetries(static_cast<int>(device)));
  }
  sessions_.Remove(*session, reason, alloc_retries);
  const bool by_itself = reason == CloseReason::kGoodbye || reason == CloseReason::kProcessEnded;
  by_itself ? settings_.Ended(session->id()) : settings_.Left(session->id());
  LogClosed(*session, why, reason, held, by_itself ? refusals_.CountEndedAfterRefusal(*session) : std::nullopt);
  if (const std::optional<ClaimId> claim = session->terms().claim_id) claims_.Leave(*claim);
  timer_.Update();  // schedules checks of memory left behind
}

// Logs the session's outcome in one line; peaks are sums over the devices.
void Broker::LogClosed(const Session& session, const std::string& why, CloseReason reason,
                       const SegmentPool::Closed& held, std::optional<std::chrono::milliseconds> after_refusal) const {
  MemoryStats sum;
  uint64_t refusals = 0;
  for (size_t device = 0; device < pools_.size(); ++device) {
    sum.Add(session.GetMemoryStats(static_cast<int>(device)));
    for (const uint64_t count : session.refusals().GetCounts(static_cast<int>(device))) refusals += count;
  }
  const auto lived =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now() - session.started());
  LogLine line = SessionLine("session closed", session)
                     .Add("pid", session.caller().pid)
                     .Add("reason", CloseReasonName(reason))
                     .Add("why", why)
                     .Add("came_back", held.came_back)
                     // A client's report may be up to a second old when the client is killed.
                     .Add("peak_reserved", std::max(sum.reserved_bytes.all.peak, held.bytes()))
                     .Add("peak_allocated", sum.allocated_bytes.all.peak)
                     .Add("allocations", sum.allocation.all.allocated)
                     .Add("refusals", refusals)
                     .Add("duration_ms", lived.count());
  if (held.still_held > 0) {
    line.Add(reason == CloseReason::kProcessEnded ? "quarantined" : "still_held", held.still_held);
  }
  if (after_refusal.has_value()) line.Add("after_refusal_ms", after_refusal->count());
  LogClientEvent(spdlog::level::info, line);
}

uint64_t Broker::EndSession(const SessionPtr& session, const std::string& reason) {
  if (session->Advance(SessionState::kEnded)) {
    // Only counted clients try to come back to an ended session.
    if (session->counted() != nullptr)
      settings_.Change(session->id(), [](SessionSettings& set) { set.is_ended = true; });
    LogClientEvent(spdlog::level::info, SessionLine("session ended", *session).Add("why", reason));
    waiting_.CancelAll(*session, absl::AbortedError("the session was ended by an operator"));
    for (SegmentPool* pool : pools_) {
      (void)pool->SetGuarantee(session->id(), 0);  // the guarantee grows no more
      pool->MarkEnding(session->id());
    }
    session->events()->Ended(reason);
  }
  return ReservedBytes(*session);
}

uint64_t Broker::ReservedBytes(const Session& session) const {
  uint64_t bytes = 0;
  for (const SegmentPool* pool : pools_) {
    if (const std::optional<AccountState> account = pool->GetAccount(session.id())) bytes += account->reserved_bytes;
  }
  return bytes;
}

void Broker::OnTimer() {
  waiting_.OnTimer();
  quarantine_checks_.OnTimer(options_.clock());
  timer_.Update();
}

// ---- Policy ----

std::shared_ptr<const Policy> Broker::policy() const {
  MutexLock lock(policy_mu_);
  return policy_;
}

void Broker::SetPolicy(const std::shared_ptr<const Policy>& policy) {
  {
    MutexLock lock(policy_mu_);
    policy_ = policy;
  }
  claims_.UpdateByPolicy(*policy);
}

absl::StatusOr<PolicySubject> Broker::SubjectOf(const Caller& caller, const std::optional<std::string>& session_name) {
  PolicySubject subject{.uid = caller.uid, .gids = {caller.gid}, .session_name = session_name};
  absl::c_copy_if(caller.groups, std::back_inserter(subject.gids), [&](gid_t group) { return group != caller.gid; });
  subject.cgroup = CgroupOf(caller.pid);
  if (HasEnded(*caller.pidfd)) return absl::UnauthenticatedError("the process that made the connection is gone");
  return subject;
}

absl::StatusOr<SessionTerms> Broker::TermsOf(const Caller& caller) const {
  const absl::StatusOr<PolicySubject> subject = SubjectOf(caller, /*session_name=*/std::nullopt);
  if (!subject.ok()) return subject.status();
  if (caller.claim.has_value()) return claims_.TermsOf(caller);
  return policy()->TermsFor(*subject);
}

// ---- Stopping ----

void Broker::Drain(const std::string& reason) {
  sessions_.Drain();
  for (const SessionPtr& session : sessions_.GetAll()) session->events()->Draining(reason);
}

void Broker::CloseAll(const std::string& why) {
  // Clients keep using memory after the end: a session closed early must not release memory to sessions still open.
  for (SegmentPool* pool : pools_) pool->Seal();
  for (const SessionPtr& session : sessions_.GetAll()) Close(session, why, CloseReason::kDaemonStops);
}

}  // namespace vrambroker
