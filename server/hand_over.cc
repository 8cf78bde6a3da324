// SPDX-License-Identifier: Apache-2.0
#include "server/hand_over.h"

#include <utility>

namespace vrambroker {

void HandOver::Submit(std::function<void()> give) {
  threads_.Submit([this, give = std::move(give)] { Run(give); });
}

void HandOver::Run(const std::function<void()>& give) {
  std::multiset<SteadyTime>::iterator began;
  {
    MutexLock lock(mu_);
    while (paused_) resumed_.Wait(mu_);
    began = began_.insert(std::chrono::steady_clock::now());
  }
  give();
  MutexLock lock(mu_);
  began_.erase(began);
}

bool HandOver::Pause(SteadyTime now) {
  MutexLock lock(mu_);
  paused_ = true;
  return began_.empty() || *began_.rbegin() + kMade <= now;
}

void HandOver::Resume() {
  MutexLock lock(mu_);
  paused_ = false;
  resumed_.NotifyAll();
}

}  // namespace vrambroker
