// SPDX-License-Identifier: Apache-2.0
//
// Recordings: how much of its past a session records. Events of remote sessions are in the daemon's memory and counted
// for their users; those of a session that leases are in its client's.
#ifndef VRAMBROKER_SERVER_CORE_RECORDINGS_H_
#define VRAMBROKER_SERVER_CORE_RECORDINGS_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/user_slots.h"
#include "server/identity/saved_settings.h"
#include "server/sessions/session.h"
#include "server/sessions/session_registry.h"

namespace vrambroker {

class Recordings;

// While it lives, a session keeps at least so many events: see Recordings::Hold(). Thread-safe.
class RecordingHold {
 public:
  // `owner` outlives it.
  RecordingHold(Recordings* owner, const SessionPtr& session, uint64_t events, UserSlots::Slot slot);
  ~RecordingHold();
  RecordingHold(const RecordingHold&) = delete;
  RecordingHold& operator=(const RecordingHold&) = delete;

 private:
  Recordings& owner_;
  const std::weak_ptr<Session> session_;  // it may end before
  const uint64_t events_;
  const UserSlots::Slot slot_;
};

// Thread-safe. No call blocks.
class Recordings {
 public:
  // `default_events`: what sessions keep from the start. The others outlive it.
  Recordings(uint64_t default_events, SessionRegistry* sessions, SavedSettings* settings);

  // Keeps the last `max_events` events of each of the session's heaps for snapshots; 0: none. InvalidArgument above
  // kMaxRecordedEvents; ResourceExhausted when the remote sessions of its user may keep no more.
  void Set(const SessionPtr& session, uint64_t max_events, const std::function<void(absl::Status)>& done);
  // Keeps at least `events` of each of its heaps, with exact times, whatever Set() says, until what `done` gets is
  // destroyed. `user`: who asks. Errors as Set(); ResourceExhausted also when `user` has too many of them.
  void Hold(const SessionPtr& session, uint64_t events, const UserKey& user,
            const std::function<void(absl::StatusOr<std::shared_ptr<RecordingHold>>)>& done);

 private:
  friend class RecordingHold;
  void EndHold(const SessionPtr& session, uint64_t events);
  static uint64_t EventsToKeep(Session& session);  // in each heap

  const uint64_t default_events_;
  SessionRegistry& sessions_;
  SavedSettings& settings_;
  UserSlots slots_;  // holds
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CORE_RECORDINGS_H_
