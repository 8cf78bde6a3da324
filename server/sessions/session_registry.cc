// SPDX-License-Identifier: Apache-2.0
#include "server/sessions/session_registry.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace vrambroker {
namespace {

absl::Status StoppingError() {
  return absl::UnavailableError("the daemon is stopping; connect again when it has restarted");
}

}  // namespace

absl::Status AmbiguousSession(const IdOrName& ref, absl::string_view holder, SessionId namesake) {
  return absl::InvalidArgumentError(absl::StrCat("session: ", ref.name, " is the id of the session named '", holder,
                                                 "' and the name of the session with id ", Raw(namesake),
                                                 "; id:", Raw(ref.id), " or name:", ref.name, " says which is meant"));
}

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

SessionRegistry::SessionRegistry(size_t devices, uint64_t max_recorded_events_per_uid)
    : devices_(devices), max_recorded_events_per_uid_(max_recorded_events_per_uid), closed_retries_(devices) {}

// ---- Coming and going ----

absl::StatusOr<SessionRegistry::Reserved> SessionRegistry::Reserve(const Candidate& candidate) {
  MutexLock lock(mu_);
  if (draining_) return StoppingError();
  const UserKey& user = candidate.user;
  size_t& open = sessions_of_user_[user];
  if (open >= candidate.max_sessions_per_uid) {
    return absl::ResourceExhaustedError(absl::StrCat(user.Text(), " has ", open, open == 1 ? " session" : " sessions",
                                                     " open, the most that max_sessions_per_uid allows"));
  }
  const SessionTerms& terms = candidate.terms;
  size_t& of_rule = sessions_of_rule_[{user, terms.rule}];
  if (terms.max_sessions > 0 && of_rule >= terms.max_sessions) {
    return absl::ResourceExhaustedError(
        absl::StrCat(user.Text(), " has ", of_rule, of_rule == 1 ? " session" : " sessions",
                     " open by the policy's rule ", terms.rule, ", the most that its max_sessions allows"));
  }
  ++open;
  ++of_rule;
  Reserved reserved{
      .id = SessionId{next_session_++}, .name = UniqueName(candidate.name), .record_events = candidate.record_events};
  names_[reserved.name] = reserved.id;
  if (candidate.placement != Placement::kRemote) return reserved;
  // Records fewer events rather than refuse the session.
  uint64_t& of_uid = events_of_user_[user];
  reserved.record_events = std::min(reserved.record_events, (max_recorded_events_per_uid_ - of_uid) / devices_);
  events_of_[reserved.id] = reserved.record_events * devices_;
  of_uid += events_of_[reserved.id];
  return reserved;
}

absl::Status SessionRegistry::Publish(const SessionPtr& session) {
  MutexLock lock(mu_);
  if (draining_) {  // draining began after Reserve(), so the session would miss the message
    Release(*session);
    return StoppingError();
  }
  sessions_[session->id()] = session;
  ++counts_.opened;
  return absl::OkStatus();
}

void SessionRegistry::Remove(const Session& session, CloseReason reason, const std::vector<uint64_t>& alloc_retries) {
  SessionPtr removed;  // perhaps the last reference: destroyed after unlocking
  MutexLock lock(mu_);
  Release(session);
  if (const auto it = sessions_.find(session.id()); it != sessions_.end()) {
    removed = std::move(it->second);
    sessions_.erase(it);
  }
  ++counts_.closed[static_cast<size_t>(reason)];
  for (size_t device = 0; device < devices_; ++device) closed_retries_[device] += alloc_retries[device];
}

void SessionRegistry::Release(const Session& session) {
  names_.erase(session.name());
  const UserKey user = session.caller().user();
  if (--sessions_of_user_[user] == 0) sessions_of_user_.erase(user);
  const auto of_rule = sessions_of_rule_.find({user, session.terms().rule});
  if (--of_rule->second == 0) sessions_of_rule_.erase(of_rule);
  if (const auto it = events_of_.find(session.id()); it != events_of_.end()) {
    events_of_user_[user] -= it->second;
    if (events_of_user_[user] == 0) events_of_user_.erase(user);
    events_of_.erase(it);
  }
}

void SessionRegistry::CountRefused() {
  MutexLock lock(mu_);
  ++counts_.refused;
}

void SessionRegistry::Drain() {
  MutexLock lock(mu_);
  draining_ = true;
}

std::string SessionRegistry::UniqueName(absl::string_view wanted) const {
  std::string name(wanted);
  // Metrics use "_other" for sessions beyond their bound.
  for (int suffix = 2; names_.contains(name) || name == "_other"; ++suffix) name = absl::StrCat(wanted, "-", suffix);
  return name;
}

// ---- Looking up ----

SessionPtr SessionRegistry::ById(SessionId id) const {
  const auto it = sessions_.find(id);
  return it == sessions_.end() ? nullptr : it->second;
}

SessionPtr SessionRegistry::ByName(absl::string_view name) const {
  const auto it = names_.find(name);
  return it == names_.end() ? nullptr : ById(it->second);
}

bool SessionRegistry::HasEnded(SessionId id) const {
  return Raw(id) > 0 && Raw(id) < next_session_ && !sessions_.contains(id);
}

absl::StatusOr<SessionPtr> SessionRegistry::Find(SessionId id, const Caller& caller) const {
  absl::StatusOr<SessionPtr> session = Find(SessionRef(id));
  if (session.ok() && ((*session)->caller().pid != caller.pid || (*session)->caller().uid != caller.uid)) {
    return absl::PermissionDeniedError(absl::StrCat("session_id: session ", Raw(id), " belongs to another process"));
  }
  return session;
}

absl::StatusOr<SessionPtr> SessionRegistry::Find(const SessionRef& ref) const {
  MutexLock lock(mu_);
  if (const auto* name = std::get_if<std::string>(&ref)) {
    SessionPtr found = ByName(*name);
    if (found == nullptr) return absl::NotFoundError(absl::StrCat("no session is named '", *name, "'"));
    return found;
  }
  if (const auto* id = std::get_if<SessionId>(&ref)) {
    SessionPtr found = ById(*id);
    if (found != nullptr) return found;
    return absl::NotFoundError(HasEnded(*id) ? absl::StrCat("session_id: session ", Raw(*id), " has ended")
                                             : absl::StrCat("session_id: no session ", Raw(*id)));
  }
  const auto& either = std::get<IdOrName>(ref);
  SessionPtr by_id = ById(either.id);
  SessionPtr by_name = ByName(either.name);
  if (by_id != nullptr && by_name != nullptr && by_id != by_name) {
    return AmbiguousSession(either, by_id->name(), by_name->id());
  }
  if (by_id != nullptr) return by_id;
  if (by_name != nullptr) return by_name;
  return absl::NotFoundError(
      HasEnded(either.id)
          ? absl::StrCat("session ", Raw(either.id), " has ended, and no session is named '", either.name, "'")
          : absl::StrCat("no session has the id ", Raw(either.id), ", and none is named '", either.name, "'"));
}

std::pair<SessionPtr, SessionPtr> SessionRegistry::FindEither(const IdOrName& ref) const {
  MutexLock lock(mu_);
  return {ById(ref.id), ByName(ref.name)};
}

std::vector<SessionPtr> SessionRegistry::GetAll() const {
  std::vector<SessionPtr> sessions;
  MutexLock lock(mu_);
  sessions.reserve(sessions_.size());
  for (const auto& [id, session] : sessions_) sessions.push_back(session);
  return sessions;
}

size_t SessionRegistry::size() const {
  MutexLock lock(mu_);
  return sessions_.size();
}

SessionRegistry::View SessionRegistry::GetView() const {
  View view;
  MutexLock lock(mu_);
  view.sessions.reserve(sessions_.size());
  for (const auto& [id, session] : sessions_) view.sessions.push_back(session);
  view.closed_retries = closed_retries_;
  view.counts = counts_;
  view.draining = draining_;
  return view;
}

// ---- Recorded events ----

absl::Status SessionRegistry::ReserveEvents(const Session& session, uint64_t events_of_heap) {
  if (session.placement() != Placement::kRemote) return absl::OkStatus();
  const uint64_t events = events_of_heap * devices_;
  MutexLock lock(mu_);
  const auto it = events_of_.find(session.id());
  if (it == events_of_.end()) return absl::AbortedError("the session has ended");
  uint64_t& of_uid = events_of_user_[session.caller().user()];
  const uint64_t others = of_uid - it->second;
  if (others + events > max_recorded_events_per_uid_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("max_events: with ", events, " more, the remote sessions of ", session.caller().user().Text(),
                     " would record ", others + events, " events, more than the ", max_recorded_events_per_uid_,
                     " that max_recorded_events_per_uid allows; record less, or let others record less"));
  }
  it->second = events;
  of_uid = others + events;
  return absl::OkStatus();
}

}  // namespace vrambroker
