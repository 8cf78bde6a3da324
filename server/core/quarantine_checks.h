// SPDX-License-Identifier: Apache-2.0
//
// QuarantineChecks: has workers look at quarantined segments, and for carried-over ones, when that is due.
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
  // `pools` by device. All outlive it, and its tasks.
  QuarantineChecks(std::vector<SegmentPool*> pools, Executor* workers, SharedTimer* timer);

  // When the next one is due that no worker is at; nullopt: none is.
  std::optional<SteadyTime> NextCheck() const;
  // Has those made that are due.
  void OnTimer(SteadyTime now);

 private:
  const std::vector<SegmentPool*> pools_;
  Executor& workers_;
  SharedTimer& timer_;
  std::vector<std::atomic<bool>> is_checking_;  // by device: a worker is to do it
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CORE_QUARANTINE_CHECKS_H_
