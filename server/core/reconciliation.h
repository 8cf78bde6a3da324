// SPDX-License-Identifier: Apache-2.0
//
// Reconciliation: compares the GPU memory of processes, as the driver reports it, with their charges. Reads the GPU's
// sensors at the same time.
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

// A process using a device.
struct ProcessView {
  enum class Kind { kDaemon, kClient, kUncounted };
  pid_t pid = 0;
  uid_t uid = 0;     // 0, with name "unknown", if the process has ended or /proc hides it
  std::string name;  // command name
  Kind kind = Kind::kUncounted;
  std::optional<SessionId> session;  // kClient: the first of the process's sessions
  uint64_t used_bytes = 0;
  uint64_t charged_bytes = 0;   // for the process's own memory; kDaemon: for its segments
  uint64_t overhead_bytes = 0;  // used beyond the charge: context and libraries; 0 if uncounted
  uint64_t drift_bytes = 0;     // overhead beyond the allowance: memory that bypassed the broker
  uint64_t unused_bytes = 0;    // charged to a counted client, but unused
};

// The known processes of a device.
struct DeviceProcesses {
  absl::Status status = absl::UnimplementedError("not looked at yet");  // reason if unknown
  std::vector<ProcessView> processes;                                   // by pid
  // Sums over `processes`.
  uint64_t overhead_bytes = 0;
  uint64_t drift_bytes = 0;
  uint64_t unused_bytes = 0;
  uint64_t uncounted_bytes = 0;
};

// Thread-safe.
class Reconciliation {
 public:
  // `pools`, indexed by device, and the other arguments outlive the object and its tasks. `allowance_bytes`: overhead
  // per process not counted as drift.
  Reconciliation(uint64_t allowance_bytes, std::vector<SegmentPool*> pools, Executor* workers,
                 const SessionRegistry* sessions);

  // Submits a task for each device without a running task. Call every few seconds.
  void Start();
  // (driver) Inspects a device, and tells its pool the memory taken by clients' contexts.
  void Look(size_t device) ABSL_LOCKS_EXCLUDED(mu_);
  // Result of the last Look(). Never null.
  std::shared_ptr<const DeviceProcesses> Get(size_t device) const ABSL_LOCKS_EXCLUDED(mu_);
  // Sensors as read by the last Look().
  GpuSensors GetSensors(size_t device) const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // Bounds on a process's use by the daemon's accounts, changing while the driver is asked.
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
  std::vector<std::atomic<bool>> is_looking_;  // by device: a task is queued or running

  mutable Mutex mu_;  // guards only found_ and sensors_; no other lock is taken under it
  std::vector<std::shared_ptr<const DeviceProcesses>> found_ ABSL_GUARDED_BY(mu_);  // by device
  std::vector<GpuSensors> sensors_ ABSL_GUARDED_BY(mu_);                            // by device
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CORE_RECONCILIATION_H_
