// SPDX-License-Identifier: Apache-2.0
#include "server/pool/idle_decay.h"

#include <optional>

namespace vrambroker {

IdleDecay::IdleDecay(SegmentPool* pool, std::chrono::milliseconds decay) : pool_(*pool), decay_(decay) {
  pool_.SetOnDecayChanged([this] {
    MutexLock lock(mu_);
    is_new_ = true;
    changed_.NotifyOne();
  });
  thread_ = std::thread([this] { Run(); });
}

IdleDecay::~IdleDecay() {
  pool_.SetOnDecayChanged(nullptr);
  {
    MutexLock lock(mu_);
    stops_ = true;
    changed_.NotifyOne();
  }
  thread_.join();
}

void IdleDecay::Run() {
  // A segment taken or leased after the wait does no harm: the pool checks again.
  while (Await()) pool_.ReleaseIdleSince(std::chrono::steady_clock::now() - decay_);
}

bool IdleDecay::Await() {
  while (true) {
    {
      MutexLock lock(mu_);
      is_new_ = false;  // before the look: changes during the look cause another
    }
    const std::optional<SteadyTime> next = pool_.NextDecay(decay_);
    MutexLock lock(mu_);
    while (!stops_ && !is_new_) {
      if (!next.has_value()) {
        changed_.Wait(mu_);
      } else if (!changed_.WaitUntil(mu_, *next)) {
        return !stops_;
      }
    }
    if (stops_) return false;
  }
}

}  // namespace vrambroker
