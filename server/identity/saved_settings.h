// SPDX-License-Identifier: Apache-2.0
//
// SavedSettings: records settings made by operators on live sessions, in a file of the socket directory. The next
// daemon restores the settings when the same sessions of the same processes return.
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

// Settings made by operators; absent: not made.
struct SessionSettings {
  std::optional<Limit> limit;
  std::optional<Limit> guarantee;
  std::optional<int> priority;
  std::optional<uint64_t> recorded_events;
  bool is_ended = false;  // the process gets no further session

  friend bool operator==(const SessionSettings&, const SessionSettings&) = default;
};

// Identity of a session, recognizable by a later daemon.
struct SavedSession {
  ProcessId process;
  std::string kind;  // the session's placement, as a word
  std::string name;  // requested by the session; a returning session may get a different name
  // The client's resume token. None: a process has a single session of this kind and name.
  std::optional<RandomToken> token;
  // Token of the session's predecessor: the client may not know `token` yet.
  std::optional<RandomToken> earlier{};
};

// Thread-safe.
class SavedSettings {
 public:
  // Reads the last daemon's settings for processes still running. Skips and logs entries that are damaged or could be
  // another user's. Empty: keeps no settings.
  explicit SavedSettings(std::string path);

  // Call when the session is open. Returns the settings of the session named by `session.earlier`; without
  // `session.earlier`, returns the settings of a session of the same name under an earlier daemon.
  SessionSettings Opened(SessionId id, SavedSession session) ABSL_LOCKS_EXCLUDED(mu_);
  // The change is in the file on return; see status(). Ignores a session that is not open.
  void Change(SessionId id, absl::FunctionRef<void(SessionSettings&)> change) ABSL_LOCKS_EXCLUDED(mu_);
  SessionSettings Get(SessionId id) const ABSL_LOCKS_EXCLUDED(mu_);
  // The client has ended the session and will not return.
  void Ended(SessionId id) ABSL_LOCKS_EXCLUDED(mu_);
  // The client may return to the session, here or at the next daemon.
  void Left(SessionId id) ABSL_LOCKS_EXCLUDED(mu_);

  // Whether an operator has ended a session of this kind of the process under an earlier daemon.
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
  absl::flat_hash_map<SessionId, Entry> open_ ABSL_GUARDED_BY(mu_);  // all open sessions, also those without settings
  std::vector<Entry> earlier_ ABSL_GUARDED_BY(mu_);                  // not returned yet
  absl::Status status_ ABSL_GUARDED_BY(mu_);
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_IDENTITY_SAVED_SETTINGS_H_
