// SPDX-License-Identifier: Apache-2.0
//
// Which session is meant.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/core/broker.h"

namespace vrambroker {
namespace {

// `holder` has the id, `namesake` the name.
absl::Status Ambiguous(const IdOrName& ref, absl::string_view holder, SessionId namesake) {
  return absl::InvalidArgumentError(absl::StrCat("session: ", ref.name, " is the id of the session named '", holder,
                                                 "' and the name of the session with id ", Raw(namesake),
                                                 "; id:", Raw(ref.id), " or name:", ref.name, " says which is meant"));
}

}  // namespace

SessionPtr Broker::SessionById(SessionId id) const {
  const auto it = sessions_.find(id);
  return it == sessions_.end() ? nullptr : it->second;
}

SessionPtr Broker::SessionByName(absl::string_view name) const {
  const auto it = names_.find(name);
  return it == names_.end() ? nullptr : SessionById(it->second);
}

bool Broker::SessionHasEnded(SessionId id) const {
  return Raw(id) > 0 && Raw(id) < next_session_ && !sessions_.contains(id);
}

absl::StatusOr<SessionPtr> Broker::FindSession(const SessionRef& ref) const {
  MutexLock lock(mu_);
  SessionPtr found;
  if (const auto* name = std::get_if<std::string>(&ref)) {
    found = SessionByName(*name);
    if (found == nullptr) return absl::NotFoundError(absl::StrCat("no session is named '", *name, "'"));
  } else if (const auto* id = std::get_if<SessionId>(&ref)) {
    found = SessionById(*id);
    if (found == nullptr) {
      return absl::NotFoundError(SessionHasEnded(*id) ? absl::StrCat("session_id: session ", Raw(*id), " has ended")
                                                      : absl::StrCat("session_id: no session ", Raw(*id)));
    }
  } else {
    const auto& either = std::get<IdOrName>(ref);
    const SessionPtr by_id = SessionById(either.id);
    const SessionPtr by_name = SessionByName(either.name);
    if (by_id != nullptr && by_name != nullptr && by_id != by_name) {
      return Ambiguous(either, by_id->name(), by_name->id());
    }
    found = by_id != nullptr ? by_id : by_name;
    if (found == nullptr) {
      return absl::NotFoundError(
          SessionHasEnded(either.id)
              ? absl::StrCat("session ", Raw(either.id), " has ended, and no session is named '", either.name, "'")
              : absl::StrCat("no session has the id ", Raw(either.id), ", and none is named '", either.name, "'"));
    }
  }
  return found;
}

std::vector<std::shared_ptr<const OomEvent>> Broker::Refusals(std::optional<uid_t> uid) const {
  std::vector<std::shared_ptr<const OomEvent>> events = oom_log_.NewestFirst();
  if (uid.has_value()) {
    std::erase_if(events, [&](const std::shared_ptr<const OomEvent>& event) { return event->uid != *uid; });
  }
  return events;
}

absl::StatusOr<std::vector<std::shared_ptr<const OomEvent>>> Broker::RefusalsOf(const SessionRef& ref,
                                                                                std::optional<uid_t> uid) const {
  std::vector<std::shared_ptr<const OomEvent>> events = Refusals(uid);
  // It may have ended: what is on record counts as well.
  SessionRef wanted = ref;
  if (const auto* either = std::get_if<IdOrName>(&ref)) {
    SessionPtr by_id;
    SessionPtr by_name;
    {
      MutexLock lock(mu_);
      by_id = SessionById(either->id);
      by_name = SessionByName(either->name);
    }
    const auto is_seen = [&](const SessionPtr& session) {
      return session != nullptr && (!uid.has_value() || session->caller().uid == *uid);
    };
    std::optional<std::string> holder;
    std::optional<SessionId> namesake;
    if (is_seen(by_id)) holder = by_id->name();
    if (is_seen(by_name) && by_name != by_id) namesake = by_name->id();
    for (const auto& event : events) {
      if (event->session == either->id) {
        holder = event->client;
      } else if (event->client == either->name && !namesake.has_value()) {
        namesake = event->session;
      }
    }
    if (holder.has_value() && namesake.has_value()) return Ambiguous(*either, *holder, *namesake);
    wanted = holder.has_value() ? SessionRef(either->id) : SessionRef(either->name);
  }
  const auto is_other = [&wanted](const std::shared_ptr<const OomEvent>& event) {
    const auto* id = std::get_if<SessionId>(&wanted);
    return id != nullptr ? event->session != *id : event->client != std::get<std::string>(wanted);
  };
  std::erase_if(events, is_other);
  return events;
}

}  // namespace vrambroker
