// SPDX-License-Identifier: Apache-2.0
//
// Returning: the processes that were in claims when the last daemon ended, and run still. What they have of a GPU only
// they can say. Until they have, a counted session is given no more: it could get what is theirs.
#ifndef VRAMBROKER_SERVER_CORE_RETURNING_H_
#define VRAMBROKER_SERVER_CORE_RETURNING_H_

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/flat_hash_set.h"
#include "allocator/base/mutex.h"
#include "allocator/device/device.h"
#include "server/base/steady_time.h"
#include "server/sessions/session_registry.h"

namespace vrambroker {

// Thread-safe.
class Returning {
 public:
  // The library looks for a daemon every second. A process that is stopped, or that has closed its session long ago,
  // does not come: then the others go on without it.
  static constexpr std::chrono::seconds kMost{10};
  // How often it looks who has ended: many ask again and again.
  static constexpr std::chrono::milliseconds kBetweenLooks{100};

  // Outlives it.
  explicit Returning(const SessionRegistry* sessions) : sessions_(*sessions) {}

  // Those that run still.
  void Await(const std::vector<ProcessId>& processes, SteadyTime until) ABSL_LOCKS_EXCLUDED(mu_);
  // The process has said what it holds on the device.
  void HasSaid(pid_t process, uint64_t device) ABSL_LOCKS_EXCLUDED(mu_);
  // Whether there is one that has not, other than `asking`. One with a session that is not counted has said it when
  // that was opened.
  bool AreAwaited(uint64_t device, pid_t asking, SteadyTime now) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // Leaves out those that have ended, and those with a session that is not counted.
  void Look() ABSL_LOCKS_EXCLUDED(mu_);
  bool IsTimeToLook(SteadyTime now) ABSL_LOCKS_EXCLUDED(mu_);

  const SessionRegistry& sessions_;
  std::atomic<bool> has_any_{false};
  Mutex mu_;
  SteadyTime until_ ABSL_GUARDED_BY(mu_);
  SteadyTime next_look_ ABSL_GUARDED_BY(mu_);
  // The devices that each has spoken of.
  absl::btree_map<ProcessId, absl::flat_hash_set<uint64_t>> processes_ ABSL_GUARDED_BY(mu_);
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CORE_RETURNING_H_
