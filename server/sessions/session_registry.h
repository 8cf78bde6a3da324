// SPDX-License-Identifier: Apache-2.0
//
// SessionRegistry: all sessions by id and by name, and each user's numbers of sessions and of recorded events.
#ifndef VRAMBROKER_SERVER_SESSIONS_SESSION_REGISTRY_H_
#define VRAMBROKER_SERVER_SESSIONS_SESSION_REGISTRY_H_

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "allocator/base/ids.h"
#include "allocator/base/mutex.h"
#include "server/identity/caller.h"
#include "server/sessions/session.h"

namespace vrambroker {

// A number meaning an id or a name.
struct IdOrName {
  SessionId id{};
  std::string name;
};
using SessionRef = std::variant<SessionId, std::string, IdOrName>;  // by id, by unique name, or by either

// InvalidArgument: `holder` has the id, `namesake` the name.
absl::Status AmbiguousSession(const IdOrName& ref, absl::string_view holder, SessionId namesake);

// Why a session was closed.
enum class CloseReason { kGoodbye, kProcessEnded, kNotOpened, kDaemonStops };

inline constexpr std::array<CloseReason, 4> kCloseReasons = {CloseReason::kGoodbye, CloseReason::kProcessEnded,
                                                             CloseReason::kNotOpened, CloseReason::kDaemonStops};

const char* CloseReasonName(CloseReason reason);  // "goodbye", "process_ended", "not_opened", "daemon_stops"

// Counts since the daemon started.
struct SessionCounts {
  uint64_t opened = 0;
  uint64_t refused = 0;  // errors of Broker::OpenSession(); a session denied its guarantee counts as opened and closed
  std::array<uint64_t, kCloseReasons.size()> closed{};  // by CloseReason
};

// Thread-safe.
class SessionRegistry {
 public:
  // `max_recorded_events_per_uid`: for remote sessions, over all devices.
  SessionRegistry(size_t devices, uint64_t max_recorded_events_per_uid);

  // ---- Coming and going ----

  struct Candidate {
    std::string name;  // as given by the client
    UserKey user;
    SessionTerms terms;
    size_t max_sessions_per_uid = 0;
    Placement placement = Placement::kRemote;
    uint64_t record_events = 0;  // per heap
  };
  // Resources of a session about to be made. The session cannot be found yet, but occupies its name, and counts for its
  // user.
  struct Reserved {
    SessionId id{};
    std::string name;
    uint64_t record_events = 0;  // per heap, within the user's bound
  };
  // Unavailable while draining; ResourceExhausted when the user has too many sessions. Call Publish() next.
  absl::StatusOr<Reserved> Reserve(const Candidate& candidate) ABSL_LOCKS_EXCLUDED(mu_);
  // Makes the session visible. Unavailable when the daemon stops; then frees its name.
  absl::Status Publish(const SessionPtr& session) ABSL_LOCKS_EXCLUDED(mu_);
  // `alloc_retries`: cache flushes of the session, by device.
  void Remove(const Session& session, CloseReason reason, const std::vector<uint64_t>& alloc_retries)
      ABSL_LOCKS_EXCLUDED(mu_);
  void CountRefused() ABSL_LOCKS_EXCLUDED(mu_);
  // Accepts no new sessions from now on.
  void Drain() ABSL_LOCKS_EXCLUDED(mu_);

  // ---- Looking up ----

  // NotFound, or PermissionDenied when the session belongs to another process.
  absl::StatusOr<SessionPtr> Find(SessionId id, const Caller& caller) const ABSL_LOCKS_EXCLUDED(mu_);
  // NotFound, or InvalidArgument when `ref` is a session's id and a different session's name.
  absl::StatusOr<SessionPtr> Find(const SessionRef& ref) const ABSL_LOCKS_EXCLUDED(mu_);
  // The session with the id, and the session with the name; nullptr where missing.
  std::pair<SessionPtr, SessionPtr> FindEither(const IdOrName& ref) const ABSL_LOCKS_EXCLUDED(mu_);
  std::vector<SessionPtr> GetAll() const ABSL_LOCKS_EXCLUDED(mu_);  // by id
  size_t size() const ABSL_LOCKS_EXCLUDED(mu_);

  // Consistent: a session removed meanwhile is either in `sessions` or in the totals.
  struct View {
    std::vector<SessionPtr> sessions;      // by id
    std::vector<uint64_t> closed_retries;  // by device, for closed sessions
    SessionCounts counts;
    bool draining = false;
  };
  View GetView() const ABSL_LOCKS_EXCLUDED(mu_);

  // ---- Recorded events ----

  // Replaces the number of events recordable per heap of a remote session; OK for other placements. ResourceExhausted
  // when the user may record no more; Aborted when the session has ended.
  absl::Status ReserveEvents(const Session& session, uint64_t events_of_heap) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // nullptr: no such session.
  SessionPtr ById(SessionId id) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  SessionPtr ByName(absl::string_view name) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool HasEnded(SessionId id) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::string UniqueName(absl::string_view wanted) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Frees the session's name and its place among the user's sessions.
  void Release(const Session& session) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const size_t devices_;
  const uint64_t max_recorded_events_per_uid_;

  mutable Mutex mu_;  // guards only the members below; no other lock is taken under it
  absl::btree_map<SessionId, SessionPtr> sessions_ ABSL_GUARDED_BY(mu_);
  absl::btree_map<std::string, SessionId, std::less<>> names_ ABSL_GUARDED_BY(mu_);
  absl::btree_map<UserKey, size_t> sessions_of_user_ ABSL_GUARDED_BY(mu_);
  absl::btree_map<std::pair<UserKey, std::string>, size_t> sessions_of_rule_ ABSL_GUARDED_BY(mu_);  // per user
  absl::btree_map<SessionId, uint64_t> events_of_ ABSL_GUARDED_BY(mu_);     // recordable by remote sessions
  absl::btree_map<UserKey, uint64_t> events_of_user_ ABSL_GUARDED_BY(mu_);  // sums of events_of_
  uint64_t next_session_ ABSL_GUARDED_BY(mu_) = 1;
  bool draining_ ABSL_GUARDED_BY(mu_) = false;
  SessionCounts counts_ ABSL_GUARDED_BY(mu_);
  std::vector<uint64_t> closed_retries_ ABSL_GUARDED_BY(mu_);  // by device
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_SESSIONS_SESSION_REGISTRY_H_
