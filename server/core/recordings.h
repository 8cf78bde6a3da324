// SPDX-License-Identifier: Apache-2.0
//
// Recordings: how many past events a session records. Events of remote sessions are stored in the daemon's memory and
// counted per user; events of leasing sessions are stored by the client.
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

// Makes a session keep at least so many events, for the lifetime of the hold: see Recordings::Hold(). Thread-safe.
class RecordingHold {
 public:
  // `owner` outlives the object.
  RecordingHold(Recordings* owner, const SessionPtr& session, uint64_t events, UserSlots::Slot slot);
  ~RecordingHold();
  RecordingHold(const RecordingHold&) = delete;
  RecordingHold& operator=(const RecordingHold&) = delete;

 private:
  Recordings& owner_;
  const std::weak_ptr<Session> session_;  // the session may end first
  const uint64_t events_;
  const UserSlots::Slot slot_;
};

// Thread-safe. No call blocks.
class Recordings {
 public:
  // `default_events`: initial number for sessions. The other arguments outlive the object.
  Recordings(uint64_t default_events, SessionRegistry* sessions, SavedSettings* settings);

  // Keeps the last `max_events` events of each of the session's heaps for snapshots; 0: none. InvalidArgument above
  // kMaxRecordedEvents; ResourceExhausted when the user's remote sessions may keep no more.
  void Set(const SessionPtr& session, uint64_t max_events, const std::function<void(absl::Status)>& done);
  // Keeps at least `events` events per heap, with exact times, regardless of Set(), until the result of `done` is
  // destroyed. `user`: the requester. Errors as Set(); ResourceExhausted also when `user` has too many holds.
  void Hold(const SessionPtr& session, uint64_t events, const UserKey& user,
            const std::function<void(absl::StatusOr<std::shared_ptr<RecordingHold>>)>& done);

 private:
  friend class RecordingHold;
  void EndHold(const SessionPtr& session, uint64_t events);
  static uint64_t EventsToKeep(Session& session);  // per heap

  const uint64_t default_events_;
  SessionRegistry& sessions_;
  SavedSettings& settings_;
  UserSlots slots_;  // for holds
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CORE_RECORDINGS_H_
