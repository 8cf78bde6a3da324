// SPDX-License-Identifier: Apache-2.0
//
// Returning: live processes, members of claims when the last daemon ended. Only the processes know how much GPU memory
// they use. Until all have reported, counted sessions get no more memory: it could belong to a returning process.
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
  // The client library looks for a daemon every second. A stopped process, or a process with a session closed long ago,
  // does not return: after this time the daemon stops waiting.
  static constexpr std::chrono::seconds kMost{10};
  // Time between two checks for ended processes: many processes ask again and again.
  static constexpr std::chrono::milliseconds kBetweenLooks{100};

  // `sessions` outlives the object.
  explicit Returning(const SessionRegistry* sessions) : sessions_(*sessions) {}

  // Sets the processes to wait for; all still run.
  void Await(const std::vector<ProcessId>& processes, SteadyTime until) ABSL_LOCKS_EXCLUDED(mu_);
  // Notes the process's report of memory on the device.
  void HasSaid(pid_t process, uint64_t device) ABSL_LOCKS_EXCLUDED(mu_);
  // Whether a process other than `asking` has yet to report. A process with an uncounted session reported when it
  // opened the session.
  bool AreAwaited(uint64_t device, pid_t asking, SteadyTime now) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // Drops ended processes, and processes with an uncounted session.
  void Look() ABSL_LOCKS_EXCLUDED(mu_);
  bool IsTimeToLook(SteadyTime now) ABSL_LOCKS_EXCLUDED(mu_);

  const SessionRegistry& sessions_;
  std::atomic<bool> has_any_{false};
  Mutex mu_;
  SteadyTime until_ ABSL_GUARDED_BY(mu_);
  SteadyTime next_look_ ABSL_GUARDED_BY(mu_);
  // Devices reported by each process.
  absl::btree_map<ProcessId, absl::flat_hash_set<uint64_t>> processes_ ABSL_GUARDED_BY(mu_);
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CORE_RETURNING_H_
