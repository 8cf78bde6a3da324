// SPDX-License-Identifier: Apache-2.0
//
// Reconciliation: compares what processes use of a GPU, in the driver's words, with what they are charged. It reads the
// GPU's sensors at the same time.
#ifndef VRAMBROKER_SERVER_CORE_RECONCILIATION_H_
#define VRAMBROKER_SERVER_CORE_RECONCILIATION_H_

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "allocator/base/ids.h"
#include "allocator/base/mutex.h"
#include "server/base/worker_pool.h"
#include "server/pool/segment_pool.h"
#include "server/sessions/session_registry.h"

namespace vrambroker {

// A process that uses a device.
struct ProcessView {
  enum class Kind { kDaemon, kClient, kUncounted };
  pid_t pid = 0;
  uid_t uid = 0;     // 0, and "unknown", when it has ended meanwhile or /proc hides it
  std::string name;  // its command
  Kind kind = Kind::kUncounted;
  std::optional<SessionId> session;  // kClient: its first
  uint64_t used_bytes = 0;
  uint64_t charged_bytes = 0;   // for memory that is the process's own; the daemon's: of its segments
  uint64_t overhead_bytes = 0;  // used beyond that: its context, and what its libraries have. 0 if uncounted
  uint64_t drift_bytes = 0;     // of the overhead, what is beyond the allowance: it has got past the broker
  uint64_t unused_bytes = 0;    // charged to a counted client, and not used
};

// What is known of a device's processes.
struct DeviceProcesses {
  absl::Status status = absl::UnimplementedError("not looked at yet");  // why nothing is known
  std::vector<ProcessView> processes;                                   // by pid
  // Sums over them.
  uint64_t overhead_bytes = 0;
  uint64_t drift_bytes = 0;
  uint64_t unused_bytes = 0;
  uint64_t uncounted_bytes = 0;
};

// Thread-safe.
class Reconciliation {
 public:
  // `pools`, by device, and the others outlive it, and its tasks. `allowance_bytes`: how much overhead a process may
  // have that is no drift.
  Reconciliation(uint64_t allowance_bytes, std::vector<SegmentPool*> pools, Executor* workers,
                 const SessionRegistry* sessions);

  // Has workers look at each device that none is at. To be called every few seconds.
  void Start();
  // (driver) Looks at one, and tells its pool what the contexts of clients take.
  void Look(size_t device) ABSL_LOCKS_EXCLUDED(mu_);
  // What the last look has found. Never null.
  std::shared_ptr<const DeviceProcesses> Get(size_t device) const ABSL_LOCKS_EXCLUDED(mu_);
  // The sensors at that look.
  GpuSensors GetSensors(size_t device) const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // What a process may use by the daemon's accounts. They change while the driver is asked.
  struct Charged {
    std::optional<SessionId> session;
    uint64_t at_least = 0;
    uint64_t at_most = 0;
  };
  using ByProcess = absl::flat_hash_map<pid_t, Charged>;
  ByProcess GetCharged(size_t device) const;
  ProcessView Compare(const GpuProcess& process, const ByProcess& before, const ByProcess& after) const;
  void Log(size_t device, const absl::Status& before, const absl::Status& now) const;

  const uint64_t allowance_bytes_;
  const std::vector<SegmentPool*> pools_;
  Executor& workers_;
  const SessionRegistry& sessions_;
  std::vector<std::atomic<bool>> is_looking_;  // by device: a worker is to do it

  mutable Mutex mu_;  // held for nothing but this; no other lock is taken
  std::vector<std::shared_ptr<const DeviceProcesses>> found_ ABSL_GUARDED_BY(mu_);  // by device
  std::vector<GpuSensors> sensors_ ABSL_GUARDED_BY(mu_);                            // likewise
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CORE_RECONCILIATION_H_
