// SPDX-License-Identifier: Apache-2.0
//
// QuarantineChecks: submits due checks of quarantined and carried-over segments to workers.
#ifndef VRAMBROKER_SERVER_CORE_QUARANTINE_CHECKS_H_
#define VRAMBROKER_SERVER_CORE_QUARANTINE_CHECKS_H_

#include <atomic>
#include <optional>
#include <vector>

#include "server/base/shared_timer.h"
#include "server/base/steady_time.h"
#include "server/base/worker_pool.h"
#include "server/pool/segment_pool.h"

namespace vrambroker {

// Thread-safe.
class QuarantineChecks {
 public:
  // `pools` are indexed by device. All arguments outlive the object and its tasks.
  QuarantineChecks(std::vector<SegmentPool*> pools, Executor* workers, SharedTimer* timer);

  // Time of the next check not yet given to a worker; nullopt: none is due.
  std::optional<SteadyTime> NextCheck() const;
  // Submits the due checks.
  void OnTimer(SteadyTime now);

 private:
  const std::vector<SegmentPool*> pools_;
  Executor& workers_;
  SharedTimer& timer_;
  std::vector<std::atomic<bool>> is_checking_;  // by device: a check is queued or running
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CORE_QUARANTINE_CHECKS_H_
