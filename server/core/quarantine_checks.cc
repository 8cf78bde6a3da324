// SPDX-License-Identifier: Apache-2.0
#include "server/core/quarantine_checks.h"

#include <utility>

namespace vrambroker {

QuarantineChecks::QuarantineChecks(std::vector<SegmentPool*> pools, Executor* workers, SharedTimer* timer)
    : pools_(std::move(pools)), workers_(*workers), timer_(*timer), is_checking_(pools_.size()) {}

std::optional<SteadyTime> QuarantineChecks::NextCheck() const {
  std::optional<SteadyTime> next;
  for (size_t device = 0; device < pools_.size(); ++device) {
    if (!is_checking_[device]) next = Earlier(next, pools_[device]->NextQuarantineCheck());
  }
  return next;
}

void QuarantineChecks::OnTimer(SteadyTime now) {
  for (size_t device = 0; device < pools_.size(); ++device) {
    const std::optional<SteadyTime> check = pools_[device]->NextQuarantineCheck();
    if (!check.has_value() || *check > now || is_checking_[device].exchange(true)) continue;
    workers_.Submit([this, device] {
      pools_[device]->CheckQuarantine();
      // Cleared only now: checks due meanwhile are left to the next walk, never run in parallel.
      is_checking_[device] = false;
      timer_.Update();
    });
  }
}

}  // namespace vrambroker
