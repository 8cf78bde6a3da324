// SPDX-License-Identifier: Apache-2.0
//
// SavedSettings: what operators have set of live sessions, in a file of the socket directory. The next daemon gives it
// to the same sessions of the same processes when they come back.
#ifndef VRAMBROKER_SERVER_IDENTITY_SAVED_SETTINGS_H_
#define VRAMBROKER_SERVER_IDENTITY_SAVED_SETTINGS_H_

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "allocator/base/ids.h"
#include "allocator/base/mutex.h"
#include "allocator/device/device.h"
#include "server/base/random_token.h"
#include "server/identity/policy.h"

namespace vrambroker {

// Settings that operators have made; absent: not made.
struct SessionSettings {
  std::optional<Limit> limit;
  std::optional<Limit> guarantee;
  std::optional<int> priority;
  std::optional<uint64_t> recorded_events;
  bool is_ended = false;  // the process gets no other session

  friend bool operator==(const SessionSettings&, const SessionSettings&) = default;
};

// Identity of a session, for a daemon that has not seen it yet.
struct SavedSession {
  ProcessId process;
  std::string kind;  // its placement: a word
  std::string name;  // that it asks for: it may get another one when it comes back
  // Resume token of its client. None: a process has one session of this kind and name.
  std::optional<RandomToken> token;
  // Token of the session that it went on from: its client may not have heard of `token`.
  std::optional<RandomToken> earlier{};
};

// Thread-safe.
class SavedSettings {
 public:
  // Reads what the last daemon has left of processes that run still. What is damaged, or could be others' words, is
  // left out, and logged. Empty: nothing is kept.
  explicit SavedSettings(std::string path);

  // The session is open. Returns what was set of the one that `session.earlier` names, or, where its client does not
  // say, of one of the same name that an earlier daemon had.
  SessionSettings Opened(SessionId id, SavedSession session) ABSL_LOCKS_EXCLUDED(mu_);
  // In the file when it returns; see status(). Of a session that is not open nothing is kept.
  void Change(SessionId id, absl::FunctionRef<void(SessionSettings&)> change) ABSL_LOCKS_EXCLUDED(mu_);
  SessionSettings Get(SessionId id) const ABSL_LOCKS_EXCLUDED(mu_);
  // Its client has ended it: nobody comes back to it.
  void Ended(SessionId id) ABSL_LOCKS_EXCLUDED(mu_);
  // Its client may come back to it, here or to the next daemon.
  void Left(SessionId id) ABSL_LOCKS_EXCLUDED(mu_);

  // Whether an operator has ended a session of this kind of the process while an earlier daemon ran.
  bool HasEnded(pid_t pid, absl::string_view kind) const ABSL_LOCKS_EXCLUDED(mu_);
  // An error while the next daemon would not know the last change.
  absl::Status status() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Entry {
    SavedSession session;
    SessionSettings set;
  };

  static std::string Line(const Entry& entry);
  static std::optional<Entry> ParseLine(absl::string_view line);
  void Read() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Save() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::string path_;
  mutable Mutex mu_;
  absl::flat_hash_map<SessionId, Entry> open_ ABSL_GUARDED_BY(mu_);  // all, also those of which nothing is set
  std::vector<Entry> earlier_ ABSL_GUARDED_BY(mu_);                  // that have not come back
  absl::Status status_ ABSL_GUARDED_BY(mu_);
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_IDENTITY_SAVED_SETTINGS_H_
