// SPDX-License-Identifier: Apache-2.0
//
// UserNames: the names of users. A name service may take seconds, or hang: no caller waits for it.
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

// The name of a user as this machine knows it, as people can read it; empty: the user has none. None when nobody could
// tell. May take long.
std::optional<std::string> LookUpUserName(uid_t uid);

// Thread-safe. Held by a shared pointer.
class UserNames : public std::enable_shared_from_this<UserNames> {
 public:
  static constexpr size_t kMostUsers = 1024;       // the oldest name is forgotten for a new one
  static constexpr std::chrono::minutes kAge{10};  // then a name is looked up again

  using Lookup = std::function<std::optional<std::string>(uid_t uid)>;
  explicit UserNames(
      Lookup look_up = LookUpUserName,
      std::function<SteadyTime()> clock = [] { return std::chrono::steady_clock::now(); });

  // Empty: the user has no name, or it is not known yet. Then, and when the name is old, a thread is to look it up.
  std::string Get(uid_t uid) ABSL_LOCKS_EXCLUDED(mu_);
  // How many users are known.
  size_t size() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Name {
    std::string name;
    SteadyTime wanted_since;  // when its last lookup was asked for
  };

  void LookUp(uid_t uid) ABSL_LOCKS_EXCLUDED(mu_);
  void ForgetOldest() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Lookup look_up_;
  const std::function<SteadyTime()> clock_;

  mutable Mutex mu_;  // held for nothing but this; no other lock is taken
  absl::flat_hash_map<uid_t, Name> names_ ABSL_GUARDED_BY(mu_);

  DetachedThreads thread_{1, kMostUsers};
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_IDENTITY_USER_NAMES_H_
