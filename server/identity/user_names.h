// SPDX-License-Identifier: Apache-2.0
//
// UserNames: caches the names of users. A name service may take seconds, or hang: no caller waits.
#ifndef VRAMBROKER_SERVER_IDENTITY_USER_NAMES_H_
#define VRAMBROKER_SERVER_IDENTITY_USER_NAMES_H_

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "allocator/base/mutex.h"
#include "server/base/detached_threads.h"
#include "server/base/steady_time.h"

namespace vrambroker {

// Returns a user's name on this machine, in printable form; empty: the user has none. None when the lookup failed. May
// take long.
std::optional<std::string> LookUpUserName(uid_t uid);

// Thread-safe. Held by a shared pointer.
class UserNames : public std::enable_shared_from_this<UserNames> {
 public:
  static constexpr size_t kMostUsers = 1024;       // a new name replaces the oldest
  static constexpr std::chrono::minutes kAge{10};  // afterwards a name is looked up again

  using Lookup = std::function<std::optional<std::string>(uid_t uid)>;
  explicit UserNames(
      Lookup look_up = LookUpUserName,
      std::function<SteadyTime()> clock = [] { return std::chrono::steady_clock::now(); });

  // Empty: the user has no name, or the name is not known yet. For an unknown or old name, starts a lookup on a thread.
  std::string Get(uid_t uid) ABSL_LOCKS_EXCLUDED(mu_);
  // Number of known users.
  size_t size() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Name {
    std::string name;
    SteadyTime wanted_since;  // time of the last request for a lookup
  };

  void LookUp(uid_t uid) ABSL_LOCKS_EXCLUDED(mu_);
  void ForgetOldest() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Lookup look_up_;
  const std::function<SteadyTime()> clock_;

  mutable Mutex mu_;  // held for names_ alone; no other lock is taken
  absl::flat_hash_map<uid_t, Name> names_ ABSL_GUARDED_BY(mu_);

  DetachedThreads thread_{1, kMostUsers};
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_IDENTITY_USER_NAMES_H_
