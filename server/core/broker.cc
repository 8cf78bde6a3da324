// SPDX-License-Identifier: Apache-2.0
#include "server/core/broker.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "allocator/base/bytes.h"
#include "allocator/device/process_files.h"
#include "server/base/client_log.h"
#include "server/identity/process_info.h"

namespace vrambroker {
namespace {

// Whose client is asked for what it has recorded, at a time. The ranks of a job may all be refused at once.
constexpr size_t kMaxRefusalsRecordedOfUser = 8;
constexpr size_t kMaxRefusalsRecorded = 16;
constexpr size_t kMaxRecordingHoldsOfUser = 16;

absl::Status CheckLimit(absl::string_view field, const Limit& limit) {
  if (const double* fraction = std::get_if<double>(&limit);
      fraction != nullptr && !(*fraction >= 0 && *fraction <= 1)) {
    return absl::InvalidArgumentError(absl::StrCat(field, ".fraction: ", *fraction, " is not within [0, 1]"));
  }
  return absl::OkStatus();
}

// Of all sessions of a user together.
uint64_t BoundBytes(const std::optional<Limit>& bound, const SegmentPool& pool) {
  return bound.has_value() ? LimitBytes(*bound, pool.capacity_bytes()) : AccountFigures::kNoBound;
}

LogLine SessionLine(absl::string_view event, const Session& session) {
  return vrambroker::SessionLine(event, session.id(), session.name());
}

absl::Status StoppingError() {
  return absl::UnavailableError("the daemon is stopping; connect again when it has restarted");
}

}  // namespace

const char* CloseReasonName(CloseReason reason) {
  switch (reason) {
    case CloseReason::kGoodbye:
      return "goodbye";
    case CloseReason::kProcessEnded:
      return "process_ended";
    case CloseReason::kNotOpened:
      return "not_opened";
    case CloseReason::kDaemonStops:
      return "daemon_stops";
  }
  return "unknown";
}

Broker::Broker(BrokerOptions options, std::vector<SegmentPool*> pools, Executor* workers)
    : options_(std::move(options)),
      pools_(std::move(pools)),
      workers_(*workers),
      ooms_(pools_.size()),
      waiting_({.what = "requests waiting",
                .per_uid = options_.max_waiting_per_uid,
                .per_uid_bound = "max_waiting_per_uid"}),
      checking_quarantine_(pools_.size()),
      tenant_refusals_(pools_.size()),
      recording_refusals_({.what = "recordings of refusals under way",
                           .per_uid = kMaxRefusalsRecordedOfUser,
                           .in_all = kMaxRefusalsRecorded}),
      recording_holds_(
          {.what = "traces under way", .per_uid = kMaxRecordingHoldsOfUser, .per_uid_bound = "the daemon"}),
      policy_(options_.policy != nullptr ? options_.policy : std::make_shared<const Policy>(PolicyOptions())),
      closed_retries_(pools_.size()) {
  for (size_t device = 0; device < pools_.size(); ++device) {
    const int ordinal = static_cast<int>(device);
    queues_.push_back(std::make_unique<GrowthQueue>(
        pools_[device],
        GrowthQueueOptions{.reclaim_timeout = options_.reclaim_timeout,
                           .hold_back_time = options_.hold_back_time,
                           .hold_back_bytes = LimitBytes(options_.hold_back_limit, pools_[device]->capacity_bytes())},
        GrowthQueueHooks{.clock = options_.clock,
                         .candidates = [this, ordinal] { return ReclaimCandidates(ordinal); },
                         .ask =
                             [this, ordinal](const ReclaimVictim& victim, const std::function<void()>& answered) {
                               const absl::StatusOr<SessionPtr> session = FindSession(SessionRef(victim.session));
                               if (!session.ok()) return answered();
                               (*session)->Reclaim(ordinal, victim.bytes, options_.reclaim_timeout, answered);
                             },
                         .wake_changed = [this] { SetTimer(); },
                         .run = [this](std::function<void()> task) { workers_.SubmitFirst(std::move(task)); }}));
    pools_[device]->OnRoom([queue = queues_.back().get()] { queue->OnRoom(); });
  }
}

Broker::~Broker() {
  for (SegmentPool* pool : pools_) pool->OnRoom(nullptr);
}

absl::StatusOr<SessionPtr> Broker::OpenSession(const Caller& caller, const SessionWishes& wishes,
                                               std::shared_ptr<SessionEvents> events) {
  absl::StatusOr<SessionPtr> session = TryOpenSession(caller, wishes, std::move(events));
  if (session.ok()) return session;
  MutexLock lock(mu_);
  ++counts_.refused;
  return session;
}

absl::StatusOr<SessionPtr> Broker::TryOpenSession(const Caller& caller, const SessionWishes& wishes,
                                                  std::shared_ptr<SessionEvents> events) {
  if (absl::Status status = CheckName(wishes.name); !status.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("name: ", status.message()));
  }
  if (wishes.limit.has_value()) {
    if (absl::Status status = CheckLimit("limit", *wishes.limit); !status.ok()) return status;
  }
  const std::string wanted = wishes.name.empty() ? CommandName(caller.pid) : wishes.name;
  const std::shared_ptr<const Policy> policy = this->policy();
  const uint64_t started = StartOf(caller.pid);
  const absl::StatusOr<PolicySubject> subject = SubjectOf(caller, wanted);  // which sees that it runs still
  if (!subject.ok()) return subject.status();
  const SessionTerms terms = policy->TermsFor(*subject);
  if (!terms.rights.client) {
    return absl::PermissionDeniedError(absl::StrCat("uid ", caller.uid, " may not open a session named '", wanted,
                                                    "': the policy's rule ", terms.rule,
                                                    " does not give it the right CLIENT"));
  }
  const AllocatorOptions& allocator = wishes.allocator.has_value() ? *wishes.allocator : options_.allocator;

  std::optional<Ticket> resume_token;
  if (wishes.leases) {
    absl::StatusOr<Ticket> token = RandomTicket();
    if (!token.ok()) return token.status();
    resume_token = *token;
  }

  SessionId id{};
  std::string name;
  uint64_t events_to_record = options_.record_events;
  {
    MutexLock lock(mu_);
    if (draining_) return StoppingError();
    size_t& open = sessions_of_uid_[caller.uid];
    if (open >= policy->max_sessions_per_uid()) {
      return absl::ResourceExhaustedError(absl::StrCat("uid ", caller.uid, " has ", open,
                                                       open == 1 ? " session" : " sessions",
                                                       " open, the most that max_sessions_per_uid allows"));
    }
    size_t& of_rule = sessions_of_rule_[{caller.uid, terms.rule}];
    if (terms.max_sessions > 0 && of_rule >= terms.max_sessions) {
      return absl::ResourceExhaustedError(
          absl::StrCat("uid ", caller.uid, " has ", of_rule, of_rule == 1 ? " session" : " sessions",
                       " open by the policy's rule ", terms.rule, ", the most that its max_sessions allows"));
    }
    ++open;
    ++of_rule;
    id = SessionId{next_session_++};
    name = UniqueName(wanted);
    names_[name] = id;  // taken, but nobody finds the session yet
    if (!wishes.leases) {
      // A session is worth more than its history.
      uint64_t& of_uid = events_of_uid_[caller.uid];
      events_to_record = std::min(events_to_record, (options_.max_recorded_events_per_uid - of_uid) / pools_.size());
      events_of_[id] = events_to_record * pools_.size();
      of_uid += events_of_[id];
    }
  }
  // Made without the lock, seen by nobody until it is whole.
  const SessionMark mark = MarkOf(caller, wishes);
  SessionPtr session = std::make_shared<Session>(id, name, caller, pools_, &workers_, options_.session_bounds,
                                                 std::move(events), allocator, resume_token, terms, options_.clock);
  for (size_t device = 0; device < pools_.size(); ++device) {
    SegmentPool& pool = *pools_[device];
    uint64_t limit = std::min(LimitBytes(terms.limit, pool.capacity_bytes()),
                              LimitBytes(allocator.per_process_memory_fraction, pool.capacity_bytes()));
    if (wishes.limit.has_value()) limit = std::min(limit, LimitBytes(*wishes.limit, pool.capacity_bytes()));
    pool.OpenAccount(id, {.client = name,
                          .pid = caller.pid,
                          .started = started,
                          .uid = caller.uid,
                          .domain = terms.strict ? absl::StrCat("session:", Raw(id)) : terms.tenant,
                          .limit_bytes = limit,
                          .priority = terms.priority,
                          .user_limit_bytes = BoundBytes(terms.user_limit, pool),
                          .user_guarantee_bytes = BoundBytes(terms.user_guarantee, pool),
                          .mark = mark});
    session->LimitIs(static_cast<int>(device), limit);
    session->allocator(static_cast<int>(device)).SetRecording(events_to_record, /*exact_times=*/false);
  }
  session->set_recorded_events(events_to_record);
  if (!Publish(session)) {
    for (SegmentPool* pool : pools_) (void)pool->CloseAccount(id);
    return StoppingError();
  }
  const auto limit_of = [&](std::string* out, const SegmentPool* pool) {
    absl::StrAppend(out, pool->GetAccount(session->id()).value_or(AccountFigures()).limit_bytes);
  };
  LogClientEvent(spdlog::level::info, SessionLine("session opened", *session)
                                          .Add("pid", caller.pid)
                                          .Add("uid", caller.uid)
                                          .Add("rule", terms.rule)
                                          .Add("tenant", terms.tenant)
                                          .Add("placement", wishes.leases ? "leased" : "remote")
                                          .Add("limits", absl::StrJoin(pools_, ",", limit_of))
                                          .Add("alloc_conf", FormatAllocConf(allocator)));
  absl::StatusOr<int> watch = options_.watch_process(*caller.pidfd, [this, weak = std::weak_ptr<Session>(session)] {
    if (const SessionPtr gone = weak.lock()) CloseGone(gone);
  });
  if (!watch.ok()) {
    Close(session, "its process cannot be watched", CloseReason::kNotOpened);
    return watch.status();
  }
  session->set_process_watch(*watch);
  // The process may have ended before the watch was known here.
  if (session->state() == SessionState::kClosed) Unwatch(*session);
  return session;
}

SessionMark Broker::MarkOf(const Caller& caller, const SessionWishes& wishes) {
  const bool needed = std::any_of(pools_.begin(), pools_.end(), [](const SegmentPool* pool) {
    return pool->properties().kind == DeviceKind::kCuda;  // the driver does not tell who holds memory
  });
  if (!needed || !wishes.mark.has_value()) return 0;
  const absl::StatusOr<SessionMark> mark = FindSessionMark(caller.pid, *wishes.mark);
  if (mark.ok()) return *mark;
  if (!absl::IsPermissionDenied(mark.status())) {
    LogClientEvent(spdlog::level::warn, "the mark of process {} of uid {} is not known: {}", caller.pid, caller.uid,
                   mark.status().ToString());
  } else if (!warned_of_mark_.exchange(true)) {
    spdlog::warn(
        "process {} of uid {}: the daemon cannot see who inherits its descriptors, so GPU memory of such processes "
        "leaves quarantine after settle_time even if their children still have it ({}); run the daemon as root, or "
        "with CAP_SYS_PTRACE on Linux 5.14 or newer",
        caller.pid, caller.uid, mark.status().ToString());
  }
  return 0;
}

bool Broker::Publish(const SessionPtr& session) {
  MutexLock lock(mu_);
  if (draining_) {  // since it was begun: it would not be told
    Release(*session);
    return false;
  }
  sessions_[session->id()] = session;
  ++counts_.opened;
  tenant_refusals_.Add(session->terms().tenant);
  return true;
}

void Broker::Release(const Session& session) {
  names_.erase(session.name());
  const uid_t uid = session.caller().uid;
  if (--sessions_of_uid_[uid] == 0) sessions_of_uid_.erase(uid);
  const auto of_rule = sessions_of_rule_.find({uid, session.terms().rule});
  if (--of_rule->second == 0) sessions_of_rule_.erase(of_rule);
  if (const auto it = events_of_.find(session.id()); it != events_of_.end()) {
    events_of_uid_[uid] -= it->second;
    if (events_of_uid_[uid] == 0) events_of_uid_.erase(uid);
    events_of_.erase(it);
  }
}

std::string Broker::UniqueName(absl::string_view wanted) const {
  std::string name(wanted);
  // "_other" is what metrics call all those for whom there is no room.
  for (int suffix = 2; names_.contains(name) || name == "_other"; ++suffix) name = absl::StrCat(wanted, "-", suffix);
  return name;
}

void Broker::Unwatch(Session& session) {
  if (const int watch = session.TakeProcessWatch(); watch >= 0) options_.unwatch_process(watch);
}

absl::StatusOr<SessionPtr> Broker::FindToResume(const Caller& caller, const Ticket& token) const {
  for (const SessionPtr& session : Sessions()) {
    if (session->resume_token() != token) continue;
    if (session->caller().pid == caller.pid && session->caller().uid == caller.uid) return session;
    return absl::PermissionDeniedError("resume.token: the session belongs to another process");
  }
  return absl::NotFoundError("resume.token: no session of this daemon has this token");
}

void Broker::ResumeSession(const Caller& caller, const Ticket& token, absl::flat_hash_set<SegmentId> held,
                           std::shared_ptr<SessionEvents> events, const ResumeDone& done) {
  const absl::StatusOr<SessionPtr> found = FindToResume(caller, token);
  if (!found.ok()) return done(found.status());
  const SessionPtr& session = *found;
  // After the slow calls that were under way: what they leased belongs to nobody.
  const bool queued = session->slow_calls().Submit([session, held = std::move(held), events = std::move(events), done] {
    switch (session->state()) {
      case SessionState::kActive:
        return done(absl::UnavailableError("resume: the old stream of the session has not ended yet; try again"));
      case SessionState::kEnded:
        return done(absl::AbortedError("the session was ended by an operator"));
      case SessionState::kClosed:
        return done(absl::NotFoundError("resume.token: the session has ended"));
      case SessionState::kDisconnected:
        break;
    }
    session->KeepOnly(held);
    if (!session->Resume(events)) return done(absl::UnavailableError("resume: the session is changing; try again"));
    LogClientEvent(
        spdlog::level::info,
        SessionLine("session resumed", *session).Add("pid", session->caller().pid).Add("segments", held.size()));
    done(session);
    // After the welcome, at which the client forgets what it kept for traces.
    if (session->recording_holds().Most() > 0) session->ApplyRecordingHolds();
  });
  if (!queued) done(absl::UnavailableError("resume: calls of the session are still under way; try again"));
}

void Broker::Disconnect(const SessionPtr& session) {
  if (!session->Advance(SessionState::kDisconnected)) return;
  CancelWaits(*session, absl::AbortedError("the connection has broken"));
  uint64_t bytes = 0;
  for (const SegmentPool* pool : pools_) {
    bytes += pool->GetAccount(session->id()).value_or(AccountFigures()).reserved_bytes;
  }
  LogClientEvent(spdlog::level::warn, SessionLine("session disconnected", *session)
                                          .Add("pid", session->caller().pid)
                                          .Add("charged_until_process_ends", bytes));
}

void Broker::Close(const SessionPtr& session, const std::string& why, CloseReason reason) {
  CloseWith(&SegmentPool::CloseAccount, session, why, reason);
}

void Broker::CloseGone(const SessionPtr& session) {
  CloseWith(&SegmentPool::CloseAccountOfGone, session, "its process has ended", CloseReason::kProcessEnded);
}

void Broker::CloseWith(uint64_t (SegmentPool::*close)(SessionId), const SessionPtr& session, const std::string& why,
                       CloseReason reason) {
  if (!session->Advance(SessionState::kClosed)) return;
  Unwatch(*session);
  CancelWaits(*session, absl::AbortedError("the session has ended"));
  uint64_t bytes = 0;
  for (SegmentPool* pool : pools_) bytes += (pool->*close)(session->id());
  std::vector<uint64_t> retries;  // final, since it is closed
  retries.reserve(pools_.size());
  for (size_t device = 0; device < pools_.size(); ++device) {
    retries.push_back(session->CountAllocRetries(static_cast<int>(device)));
  }
  {
    MutexLock lock(mu_);
    Release(*session);
    sessions_.erase(session->id());
    ++counts_.closed[static_cast<size_t>(reason)];
    // In one step with the removal: View() sees these either here or there.
    for (size_t device = 0; device < pools_.size(); ++device) closed_retries_[device] += retries[device];
  }
  const bool by_itself = reason == CloseReason::kGoodbye || reason == CloseReason::kProcessEnded;
  LogClosed(*session, why, reason, bytes, by_itself ? CountEndedAfterRefusal(*session) : std::nullopt);
  SetTimer();  // what it has left is looked at
}

std::optional<std::chrono::milliseconds> Broker::CountEndedAfterRefusal(Session& session) {
  const SteadyTime now = options_.clock();
  std::optional<std::chrono::milliseconds> least;
  for (size_t device = 0; device < pools_.size(); ++device) {
    const std::optional<SteadyTime> refused = session.TakeLastRefusal(static_cast<int>(device));
    if (!refused.has_value() || now - *refused > TenantRefusals::kSoon) continue;
    tenant_refusals_.CountEndedSession(session.terms().tenant, static_cast<int>(device));
    const auto after = std::chrono::duration_cast<std::chrono::milliseconds>(now - *refused);
    least = std::min(after, least.value_or(after));
  }
  return least;
}

// One line that says what became of the session; its peaks are sums over the devices.
void Broker::LogClosed(const Session& session, const std::string& why, CloseReason reason, uint64_t bytes,
                       std::optional<std::chrono::milliseconds> after_refusal) const {
  MemoryStats sum;
  uint64_t refusals = 0;
  for (size_t device = 0; device < pools_.size(); ++device) {
    sum.Add(session.GetMemoryStats(static_cast<int>(device)));
    for (const uint64_t count : session.GetOoms(static_cast<int>(device))) refusals += count;
  }
  const auto lived =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now() - session.started());
  LogLine line = SessionLine("session closed", session)
                     .Add("pid", session.caller().pid)
                     .Add("reason", CloseReasonName(reason))
                     .Add("why", why)
                     .Add("came_back", bytes)
                     // What a client reports may be up to a second old when it is killed.
                     .Add("peak_reserved", std::max(sum.reserved_bytes.all.peak, bytes))
                     .Add("peak_allocated", sum.allocated_bytes.all.peak)
                     .Add("allocations", sum.allocation.all.allocated)
                     .Add("refusals", refusals)
                     .Add("duration_ms", lived.count());
  if (after_refusal.has_value()) line.Add("after_refusal_ms", after_refusal->count());
  LogClientEvent(spdlog::level::info, line);
}

absl::StatusOr<SessionPtr> Broker::FindSession(SessionId id, const Caller& caller) const {
  absl::StatusOr<SessionPtr> session = FindSession(SessionRef(id));
  if (session.ok() && ((*session)->caller().pid != caller.pid || (*session)->caller().uid != caller.uid)) {
    return absl::PermissionDeniedError(absl::StrCat("session_id: session ", Raw(id), " belongs to another process"));
  }
  return session;
}

absl::Status Broker::CheckDevice(uint64_t device) const {
  if (device < pools_.size()) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat("device: no device ", device, "; the daemon has ", pools_.size(),
                                          pools_.size() == 1 ? " device" : " devices"));
}

uint64_t Broker::IdleBytes(const Session& session, const AccountFigures& account, const MemoryStats& stats) {
  // The allocator of a remote session does not know what is carried over.
  const uint64_t unknown = session.leases() ? 0 : account.carried_over_bytes;
  const uint64_t in_use = stats.active_bytes.all.current + stats.inactive_split_bytes.all.current + unknown;
  return account.reserved_bytes - std::min(account.reserved_bytes, in_use);
}

absl::Status Broker::TooManyCalls() {
  return absl::ResourceExhaustedError(absl::StrCat(
      "calls: ", SerialQueue::kMaxTasks, " calls of this session are already waiting; wait for their answers first"));
}

void Broker::Trim(const SessionPtr& session, uint64_t bytes,
                  const std::function<void(absl::StatusOr<uint64_t>)>& done) {
  // Those of a remote session come after its allocations.
  SerialQueue& queue = session->leases() ? session->slow_questions() : session->slow_calls();
  if (!queue.Submit([session, bytes, done] { done(session->Trim(bytes)); })) done(TooManyCalls());
}

void Broker::Refresh(const SessionPtr& session, const std::function<void()>& done) {
  if (!session->leases() || !session->slow_questions().Submit([session, done] {
        (void)session->RefreshStats();  // what was reported last still stands
        done();
      })) {
    done();
  }
}

void Broker::Snapshot(const SessionPtr& session, int device,
                      const std::function<void(absl::StatusOr<HeapSnapshot>)>& done, bool with_history) {
  if (!session->slow_questions().Submit(
          [session, device, done, with_history] { done(session->Snapshot(device, with_history)); })) {
    done(TooManyCalls());
  }
}

std::vector<SessionPtr> Broker::Sessions() const {
  std::vector<SessionPtr> sessions;
  MutexLock lock(mu_);
  sessions.reserve(sessions_.size());
  for (const auto& [id, session] : sessions_) sessions.push_back(session);
  return sessions;
}

absl::Status Broker::SetLimit(const SessionPtr& session, const Limit& limit) {
  if (absl::Status status = CheckLimit("limit", limit); !status.ok()) return status;
  MutexLock lock(limits_mu_);
  // On all devices or on none: a guarantee above it may be given at the same time.
  std::vector<uint64_t> before;
  for (SegmentPool* pool : pools_) {
    before.push_back(pool->GetAccount(session->id()).value_or(AccountFigures()).limit_bytes);
    const absl::Status status = pool->SetLimit(session->id(), LimitBytes(limit, pool->capacity_bytes()));
    if (status.ok()) continue;
    for (size_t i = 0; i + 1 < before.size(); ++i) (void)pools_[i]->SetLimit(session->id(), before[i]);
    return status;
  }
  for (size_t device = 0; device < pools_.size(); ++device) {
    const int ordinal = static_cast<int>(device);
    const uint64_t bytes = LimitBytes(limit, pools_[device]->capacity_bytes());
    session->LimitIs(ordinal, bytes);
    session->events()->LimitChanged(ordinal, bytes);
    const uint64_t reserved = pools_[device]->GetAccount(session->id()).value_or(AccountFigures()).reserved_bytes;
    if (reserved > bytes) session->Reclaim(ordinal, reserved - bytes, options_.reclaim_timeout, [] {});
    LogClientEvent(spdlog::level::info,
                   SessionLine("limit changed", *session).Add("device", device).Add("limit", bytes));
  }
  return absl::OkStatus();
}

void Broker::KeepGuarantee(const SessionPtr& session, const std::optional<Limit>& wished,
                           const std::function<void(absl::Status)>& done) {
  const Limit& allowed = session->terms().guarantee;
  if (wished.has_value()) {
    if (absl::Status status = CheckLimit("guarantee", *wished); !status.ok()) return done(status);
    for (const SegmentPool* pool : pools_) {
      const uint64_t wanted = LimitBytes(*wished, pool->capacity_bytes());
      const uint64_t most = LimitBytes(allowed, pool->capacity_bytes());
      if (wanted > most) {
        return done(absl::PermissionDeniedError(absl::StrCat("guarantee: ", FormatBytesExactly(wanted), " of device ",
                                                             pool->properties().ordinal, "; the policy allows ",
                                                             FormatBytesExactly(most), " (vramctl policy explain)")));
      }
    }
  }
  Limit guarantee = wished.value_or(allowed);
  for (const SegmentPool* pool : pools_) {
    if (wished.has_value()) continue;
    // What the policy gives without being asked is at most the session's limit, and what others of the user leave.
    const AccountFigures account = pool->GetAccount(session->id()).value_or(AccountFigures());
    const UserFigures user = pool->GetUser(account.uid);
    const auto left = [](uint64_t bound, uint64_t used) { return bound - std::min(bound, used); };
    const uint64_t most = std::min({account.limit_bytes, left(account.user_guarantee_bytes, user.guaranteed_bytes),
                                    left(account.user_limit_bytes, user.committed_bytes - account.committed_bytes())});
    if (LimitBytes(guarantee, pool->capacity_bytes()) > most) guarantee = most;
  }
  if (guarantee == Limit(uint64_t{0}) || guarantee == Limit(0.0)) return done(absl::OkStatus());
  SetGuarantee(session, guarantee, done);
}

void Broker::SetGuarantee(const SessionPtr& session, const Limit& guarantee,
                          const std::function<void(absl::Status)>& done) {
  if (absl::Status status = CheckLimit("guarantee", guarantee); !status.ok()) return done(status);
  if (session->state() >= SessionState::kEnded) return done(absl::AbortedError("the session has ended"));
  SetGuaranteeFrom(0, session, guarantee, {}, done);
}

// `before`: the guarantees on the devices that have been done.
void Broker::SetGuaranteeFrom(size_t device, const SessionPtr& session, const Limit& guarantee,
                              std::vector<uint64_t> before, const std::function<void(absl::Status)>& done) {
  if (session->state() >= SessionState::kEnded) {
    // EndSession() may have taken its guarantees before the last of these was given.
    for (SegmentPool* pool : pools_) (void)pool->SetGuarantee(session->id(), 0);
    return done(absl::AbortedError("the session has ended"));
  }
  if (device == pools_.size()) {
    LogClientEvent(spdlog::level::info,
                   SessionLine("guarantee changed", *session)
                       .Add("guarantee", pools_.empty() ? 0 : LimitBytes(guarantee, pools_[0]->capacity_bytes())));
    return done(absl::OkStatus());
  }
  SegmentPool& pool = *pools_[device];
  const uint64_t bytes = LimitBytes(guarantee, pool.capacity_bytes());
  before.push_back(pool.GetAccount(session->id()).value_or(AccountFigures()).guarantee_bytes);
  const GrowthDone next = [=, this](const absl::Status& status) {
    if (status.ok()) return SetGuaranteeFrom(device + 1, session, guarantee, before, done);
    for (size_t i = 0; i < device; ++i) (void)pools_[i]->SetGuarantee(session->id(), before[i]);
    if (session->state() >= SessionState::kEnded) {  // EndSession() may have taken them before
      for (size_t i = 0; i < device; ++i) (void)pools_[i]->SetGuarantee(session->id(), 0);
    }
    if (!SegmentRefusalCause(status).has_value()) return done(status);
    done(absl::ResourceExhaustedError(status.message()));  // its cause is for requests for memory
  };
  const absl::Status status = pool.SetGuarantee(session->id(), bytes);
  if (SegmentRefusalCause(status) != OomCause::kCapacity) return next(status);
  Enqueue(session, static_cast<int>(device),
          {.session = session->id(),
           .uid = session->caller().uid,
           .bytes = bytes,
           .guarantee = true,
           .deadline = options_.clock(),
           .done = [next](const absl::Status& granted, const GrowthOutcome&) { next(granted); }});
}

absl::Status Broker::SetPriority(const SessionPtr& session, int64_t priority) {
  if (priority < -kMaxPriority || priority > kMaxPriority) {
    return absl::InvalidArgumentError(
        absl::StrCat("priority: ", priority, " is not within [", -kMaxPriority, ", ", kMaxPriority, "]"));
  }
  for (size_t device = 0; device < pools_.size(); ++device) {
    if (absl::Status status = pools_[device]->SetPriority(session->id(), static_cast<int>(priority)); !status.ok()) {
      return status;
    }
    queues_[device]->PriorityIs(session->id(), static_cast<int>(priority));
  }
  LogClientEvent(spdlog::level::info, SessionLine("priority changed", *session).Add("priority", priority));
  return absl::OkStatus();
}

uint64_t Broker::EndSession(const SessionPtr& session, const std::string& reason) {
  if (session->Advance(SessionState::kEnded)) {
    LogClientEvent(spdlog::level::info, SessionLine("session ended", *session).Add("why", reason));
    CancelWaits(*session, absl::AbortedError("the session was ended by an operator"));
    for (SegmentPool* pool : pools_) {
      (void)pool->SetGuarantee(session->id(), 0);  // it grows no more
      pool->MarkEnding(session->id());
    }
    session->events()->Ended(reason);
  }
  uint64_t bytes = 0;
  for (const SegmentPool* pool : pools_) {
    bytes += pool->GetAccount(session->id()).value_or(AccountFigures()).reserved_bytes;
  }
  return bytes;
}

std::shared_ptr<const Policy> Broker::policy() const {
  MutexLock lock(mu_);
  return policy_;
}

void Broker::SetPolicy(std::shared_ptr<const Policy> policy) {
  MutexLock lock(mu_);
  policy_.swap(policy);
}

absl::StatusOr<PolicySubject> Broker::SubjectOf(const Caller& caller,
                                                const std::optional<std::string>& session_name) const {
  PolicySubject subject{.uid = caller.uid, .gids = {caller.gid}, .session_name = session_name};
  subject.gids.insert(subject.gids.end(), caller.groups.begin(), caller.groups.end());
  subject.cgroup = CgroupOf(caller.pid);
  if (HasEnded(*caller.pidfd)) return absl::UnauthenticatedError("the process that made the connection is gone");
  return subject;
}

absl::StatusOr<SessionTerms> Broker::TermsOf(const Caller& caller) const {
  const absl::StatusOr<PolicySubject> subject = SubjectOf(caller, /*session_name=*/std::nullopt);
  if (!subject.ok()) return subject.status();
  return policy()->TermsFor(*subject);
}

void Broker::Drain(const std::string& reason) {
  {
    MutexLock lock(mu_);
    draining_ = true;
  }
  for (const SessionPtr& session : Sessions()) session->events()->Draining(reason);
}

size_t Broker::session_count() const {
  MutexLock lock(mu_);
  return sessions_.size();
}

void Broker::CloseAll(const std::string& why) {
  // Clients go on using what they hold: nobody may get it from sessions that are closed before theirs.
  for (SegmentPool* pool : pools_) pool->Seal();
  for (const SessionPtr& session : Sessions()) Close(session, why, CloseReason::kDaemonStops);
}

}  // namespace vrambroker
