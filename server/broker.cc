// SPDX-License-Identifier: Apache-2.0
#include "server/broker.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "allocator/bytes.h"
#include "server/client_log.h"

namespace vrambroker {
namespace {

constexpr size_t kMaxNameLength = 63;

bool IsNameCharacter(char c) {
  return absl::ascii_isalnum(static_cast<unsigned char>(c)) || absl::StrContains("._-/:@", absl::string_view(&c, 1));
}

absl::Status CheckName(absl::string_view name) {
  if (name.size() > kMaxNameLength) {
    return absl::InvalidArgumentError(
        absl::StrCat("name: ", name.size(), " characters; at most ", kMaxNameLength, " are allowed"));
  }
  if (!std::all_of(name.begin(), name.end(), IsNameCharacter)) {
    return absl::InvalidArgumentError("name: only letters, digits and . _ - / : @ are allowed");
  }
  return absl::OkStatus();
}

absl::Status CheckLimit(const Limit& limit) {
  if (const double* fraction = std::get_if<double>(&limit);
      fraction != nullptr && !(*fraction >= 0 && *fraction <= 1)) {
    return absl::InvalidArgumentError(absl::StrCat("limit.fraction: ", *fraction, " is not within [0, 1]"));
  }
  return absl::OkStatus();
}

absl::Status TooManyCalls() {
  return absl::ResourceExhaustedError(absl::StrCat(
      "calls: ", SerialQueue::kMaxTasks, " calls of this session wait already; wait for their answers first"));
}

// The command name of a process, with other characters than a name may have replaced.
std::string CommandName(pid_t pid) {
  std::string name;
  std::ifstream comm(absl::StrCat("/proc/", pid, "/comm"));
  std::getline(comm, name);
  for (char& c : name) {
    if (!IsNameCharacter(c)) c = '_';
  }
  return name.empty() ? "client" : name;
}

}  // namespace

uint64_t LimitBytes(const Limit& limit, uint64_t capacity_bytes) {
  if (const uint64_t* bytes = std::get_if<uint64_t>(&limit)) return std::min(*bytes, capacity_bytes);
  // Cut, not rounded, as set_per_process_memory_fraction() does.
  return std::min(capacity_bytes, static_cast<uint64_t>(std::get<double>(limit) * static_cast<double>(capacity_bytes)));
}

Broker::Broker(BrokerOptions options, std::vector<SegmentPool*> pools, WorkerPool* workers)
    : options_(std::move(options)), pools_(std::move(pools)), workers_(*workers), ooms_(pools_.size()) {}

absl::StatusOr<SessionPtr> Broker::OpenSession(const Caller& caller, const SessionWishes& wishes,
                                               std::shared_ptr<SessionEvents> events) {
  if (absl::Status status = CheckName(wishes.name); !status.ok()) return status;
  if (wishes.limit.has_value()) {
    if (absl::Status status = CheckLimit(*wishes.limit); !status.ok()) return status;
  }
  const std::string wanted = wishes.name.empty() ? CommandName(caller.pid) : wishes.name;
  const AllocatorOptions& allocator = wishes.allocator.has_value() ? *wishes.allocator : options_.allocator;

  SessionPtr session;
  {
    MutexLock lock(mu_);
    if (draining_) return absl::UnavailableError("the daemon is stopping; connect again when it has restarted");
    size_t& open = sessions_of_uid_[caller.uid];
    if (open >= options_.max_sessions_per_uid) {
      return absl::ResourceExhaustedError(
          absl::StrCat("uid ", caller.uid, " has ", open, " sessions open, the most that max_sessions_per_uid allows"));
    }
    ++open;
    const SessionId id{next_session_++};
    session = std::make_shared<Session>(id, UniqueName(wanted), caller, pools_, &workers_,
                                        options_.max_blocks_per_session, std::move(events), allocator);
    names_[session->name()] = id;
    for (size_t device = 0; device < pools_.size(); ++device) {
      SegmentPool& pool = *pools_[device];
      uint64_t limit = std::min(LimitBytes(options_.session_limit, pool.capacity_bytes()),
                                LimitBytes(allocator.per_process_memory_fraction, pool.capacity_bytes()));
      if (wishes.limit.has_value()) limit = std::min(limit, LimitBytes(*wishes.limit, pool.capacity_bytes()));
      pool.OpenAccount(id, caller.pid, caller.uid, limit);
      session->LimitIs(static_cast<int>(device), limit);
      session->allocator(static_cast<int>(device)).SetRecording(options_.record_events);
    }
    sessions_[id] = session;
  }
  LogClientEvent(spdlog::level::info, "session={} name={} pid={} uid={} opened limit={} alloc_conf={}",
                 Raw(session->id()), session->name(), caller.pid, caller.uid,
                 absl::StrJoin(pools_, ",",
                               [&](std::string* out, SegmentPool* pool) {
                                 absl::StrAppend(
                                     out, pool->GetAccount(session->id()).value_or(AccountFigures()).limit_bytes);
                               }),
                 FormatAllocConf(allocator));
  absl::StatusOr<int> watch = options_.watch_process(*caller.pidfd, [this, weak = std::weak_ptr<Session>(session)] {
    if (const SessionPtr gone = weak.lock()) Close(gone, "its process has ended");
  });
  if (!watch.ok()) {
    Close(session, "its process cannot be watched");
    return watch.status();
  }
  session->set_process_watch(*watch);
  // The process may have ended before the watch was known here.
  if (session->state() == SessionState::kClosed) Unwatch(*session);
  return session;
}

std::string Broker::UniqueName(absl::string_view wanted) const {
  std::string name(wanted);
  for (int suffix = 2; names_.contains(name); ++suffix) name = absl::StrCat(wanted, "-", suffix);
  return name;
}

void Broker::Unwatch(Session& session) {
  if (const int watch = session.TakeProcessWatch(); watch >= 0) options_.unwatch_process(watch);
}

void Broker::Disconnect(const SessionPtr& session) {
  if (!session->Advance(SessionState::kDisconnected)) return;
  uint64_t bytes = 0;
  for (const SessionDeviceInfo& device : Describe(*session).devices) bytes += device.account.reserved_bytes;
  LogClientEvent(spdlog::level::warn, "session={} name={} pid={} disconnected; {} stay charged until the process ends",
                 Raw(session->id()), session->name(), session->caller().pid, FormatBytes(bytes));
}

void Broker::Close(const SessionPtr& session, const std::string& why) {
  if (!session->Advance(SessionState::kClosed)) return;
  Unwatch(*session);
  uint64_t bytes = 0;
  for (SegmentPool* pool : pools_) bytes += pool->CloseAccount(session->id());
  {
    MutexLock lock(mu_);
    names_.erase(session->name());
    if (--sessions_of_uid_[session->caller().uid] == 0) sessions_of_uid_.erase(session->caller().uid);
    sessions_.erase(session->id());
  }
  LogClientEvent(spdlog::level::info, "session={} name={} pid={} closed: {}; {} came back", Raw(session->id()),
                 session->name(), session->caller().pid, why, FormatBytes(bytes));
}

absl::StatusOr<SessionPtr> Broker::FindSession(SessionId id, const Caller& caller) const {
  absl::StatusOr<SessionPtr> session = FindSession(SessionRef(id));
  if (session.ok() && ((*session)->caller().pid != caller.pid || (*session)->caller().uid != caller.uid)) {
    return absl::PermissionDeniedError(absl::StrCat("session_id: session ", Raw(id), " belongs to another process"));
  }
  return session;
}

absl::StatusOr<SessionPtr> Broker::FindSession(const SessionRef& ref) const {
  MutexLock lock(mu_);
  SessionId id{};
  if (const auto* name = std::get_if<std::string>(&ref)) {
    const auto it = names_.find(*name);
    if (it == names_.end()) return absl::NotFoundError(absl::StrCat("no session is named '", *name, "'"));
    id = it->second;
  } else {
    id = std::get<SessionId>(ref);
  }
  const auto it = sessions_.find(id);
  if (it == sessions_.end()) return absl::NotFoundError(absl::StrCat("session_id: no session ", Raw(id)));
  return it->second;
}

absl::Status Broker::CheckDevice(uint64_t device) const {
  if (device < pools_.size()) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat("device: no device ", device, "; there are ", pools_.size()));
}

void Broker::Allocate(const SessionPtr& session, uint64_t device, uint64_t requested, Stream stream,
                      const AllocateDone& done) {
  if (absl::Status status = CheckDevice(device); !status.ok()) return done(std::move(status));
  const int ordinal = static_cast<int>(device);
  if (requested == 0) return done(absl::InvalidArgumentError("requested_bytes: must be 1 or more"));
  if (requested >= kMaxRequestBytes) {
    if (absl::Status status = session->CheckMayAllocate(); !status.ok()) return done(std::move(status));
    session->allocator(ordinal).CountOutOfMemory();
    return done(Refuse(*session, ordinal, requested, stream, OomCause::kLargerThanDevice));
  }
  absl::StatusOr<Allocation> cached = session->AllocateFromCache(ordinal, requested, stream);
  if (!absl::IsNotFound(cached.status())) return done(std::move(cached));
  const bool queued = session->slow_calls().Submit([this, session, ordinal, requested, stream, done] {
    absl::StatusOr<Allocation> allocation = session->AllocateSlowly(ordinal, requested, stream);
    const std::optional<OomCause> refusal = SegmentRefusalCause(allocation.status());
    done(refusal.has_value() ? Refuse(*session, ordinal, requested, stream, *refusal) : std::move(allocation));
  });
  if (!queued) done(TooManyCalls());
}

absl::Status Broker::Refuse(Session& session, int device, uint64_t requested, Stream stream, OomCause refusal) {
  const SegmentPool& pool = *pools_[device];
  OomReport report;
  report.device = device;
  report.requested_bytes = requested;
  FitReport fit;
  if (requested < kMaxRequestBytes) {
    fit = session.allocator(device).ExplainFit(requested, stream);
    report.segment_bytes = fit.segment_bytes;
  } else {
    report.segment_bytes = requested;
  }
  report.cause = FinalCause(refusal, fit);
  const AccountFigures account = pool.GetAccount(session.id()).value_or(AccountFigures());
  report.limit_bytes = account.limit_bytes;
  report.reserved_bytes = account.reserved_bytes;
  report.allocated_bytes = session.GetMemoryStats(device).allocated_bytes.all.current;
  report.largest_free_block_bytes = fit.pool_largest_bytes;
  const PoolFigures figures = pool.GetFigures();
  report.capacity_bytes = figures.capacity_bytes;
  report.available_bytes = figures.capacity_bytes - figures.charged_bytes;
  for (const SessionInfo& info : ListSessions()) {
    const SessionDeviceInfo& held = info.devices[device];
    if (held.account.reserved_bytes == 0) continue;
    report.largest_holders.push_back({.client = info.name,
                                      .reserved_bytes = held.account.reserved_bytes,
                                      .allocated_bytes = held.stats.allocated_bytes.all.current});
  }
  std::stable_sort(report.largest_holders.begin(), report.largest_holders.end(),
                   [](const auto& a, const auto& b) { return a.reserved_bytes > b.reserved_bytes; });
  if (report.largest_holders.size() > 3) report.largest_holders.resize(3);

  ooms_[device][static_cast<size_t>(report.cause)].fetch_add(1, std::memory_order_relaxed);
  absl::Status status = OutOfMemoryError(report);
  LogClientEvent(spdlog::level::info,
                 "session={} name={} device={} refused cause={} requested={} limit={} reserved={} allocated={}",
                 Raw(session.id()), session.name(), device, OomCauseName(report.cause), requested, report.limit_bytes,
                 report.reserved_bytes, report.allocated_bytes);
  return status;
}

absl::Status Broker::Free(const SessionPtr& session, absl::Span<const BlockId> blocks) {
  return session->Free(blocks);
}

void Broker::EmptyCache(const SessionPtr& session, const std::function<void(absl::StatusOr<uint64_t>)>& done) {
  if (!session->slow_calls().Submit([session, done] { done(session->EmptyCache()); })) done(TooManyCalls());
}

std::vector<SessionPtr> Broker::Sessions() const {
  std::vector<SessionPtr> sessions;
  MutexLock lock(mu_);
  sessions.reserve(sessions_.size());
  for (const auto& [id, session] : sessions_) sessions.push_back(session);
  return sessions;
}

std::vector<SessionInfo> Broker::ListSessions() const {
  std::vector<SessionInfo> infos;
  for (const SessionPtr& session : Sessions()) infos.push_back(Describe(*session));
  return infos;
}

SessionInfo Broker::Describe(const Session& session) const {
  SessionInfo info{.id = session.id(),
                   .name = session.name(),
                   .caller = session.caller(),
                   .state = session.state(),
                   .started = session.started()};
  for (size_t device = 0; device < pools_.size(); ++device) {
    info.devices.push_back({.account = pools_[device]->GetAccount(session.id()).value_or(AccountFigures()),
                            .stats = session.GetMemoryStats(static_cast<int>(device))});
  }
  return info;
}

absl::Status Broker::SetLimit(const SessionPtr& session, const Limit& limit) {
  if (absl::Status status = CheckLimit(limit); !status.ok()) return status;
  for (size_t device = 0; device < pools_.size(); ++device) {
    const uint64_t bytes = LimitBytes(limit, pools_[device]->capacity_bytes());
    if (absl::Status status = pools_[device]->SetLimit(session->id(), bytes); !status.ok()) return status;
    session->LimitIs(static_cast<int>(device), bytes);
    session->events().LimitChanged(static_cast<int>(device), bytes);
    LogClientEvent(spdlog::level::info, "session={} name={} device={} limit={}", Raw(session->id()), session->name(),
                   device, bytes);
  }
  return absl::OkStatus();
}

absl::Status Broker::SetRecording(const SessionPtr& session, uint64_t max_events) {
  if (max_events > kMaxRecordedEvents) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_events: ", max_events, " is above ", kMaxRecordedEvents, ", the most that is kept"));
  }
  for (size_t device = 0; device < pools_.size(); ++device) {
    session->allocator(static_cast<int>(device)).SetRecording(max_events);
  }
  LogClientEvent(spdlog::level::info, "session={} name={} records {} events", Raw(session->id()), session->name(),
                 max_events);
  return absl::OkStatus();
}

uint64_t Broker::EndSession(const SessionPtr& session, const std::string& reason) {
  if (session->Advance(SessionState::kEnded)) {
    LogClientEvent(spdlog::level::info, "session={} name={} ended: {}", Raw(session->id()), session->name(), reason);
    session->events().Ended(reason);
  }
  uint64_t bytes = 0;
  for (const SessionDeviceInfo& device : Describe(*session).devices) bytes += device.account.reserved_bytes;
  return bytes;
}

uint64_t Broker::OomCount(int device, OomCause cause) const {
  return ooms_[device][static_cast<size_t>(cause)].load(std::memory_order_relaxed);
}

void Broker::Drain() {
  {
    MutexLock lock(mu_);
    draining_ = true;
  }
  for (const SessionPtr& session : Sessions()) session->events().Draining();
}

size_t Broker::session_count() const {
  MutexLock lock(mu_);
  return sessions_.size();
}

void Broker::CloseAll(const std::string& why) {
  for (const SessionPtr& session : Sessions()) Close(session, why);
}

}  // namespace vrambroker
