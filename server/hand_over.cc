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
    ++begun_;
    began = began_.insert(std::chrono::steady_clock::now());
  }
  give();
  MutexLock lock(mu_);
  began_.erase(began);
}

std::optional<intptr_t> HandOver::Pause(SteadyTime now) {
  MutexLock lock(mu_);
  paused_ = true;
  if (!began_.empty() && *began_.rbegin() + kMade > now) return std::nullopt;
  return begun_;
}

void HandOver::Resume() {
  MutexLock lock(mu_);
  paused_ = false;
  resumed_.NotifyAll();
}

}  // namespace vrambroker
