// SPDX-License-Identifier: Apache-2.0
#include "server/oom_log.h"

#include <utility>

namespace vrambroker {

void OomLog::Add(OomEvent event) {
  auto added = std::make_shared<const OomEvent>(std::move(event));
  std::shared_ptr<const OomEvent> oldest;  // is destroyed after the lock is released
  MutexLock lock(mu_);
  ++total_;
  if (events_.size() == kMaxEvents) {
    oldest = std::move(events_.front());
    events_.pop_front();
  }
  events_.push_back(std::move(added));
}

std::vector<std::shared_ptr<const OomEvent>> OomLog::NewestFirst() const {
  MutexLock lock(mu_);
  return {events_.rbegin(), events_.rend()};
}

uint64_t OomLog::total() const {
  MutexLock lock(mu_);
  return total_;
}

}  // namespace vrambroker
