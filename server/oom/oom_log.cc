// SPDX-License-Identifier: Apache-2.0
#include "server/oom/oom_log.h"

#include <algorithm>
#include <utility>

namespace vrambroker {

void OomLog::Add(OomEvent event) {
  auto added = std::make_shared<const OomEvent>(std::move(event));
  std::shared_ptr<const OomEvent> dropped;  // is destroyed after the lock is released
  MutexLock lock(mu_);
  const uint64_t number = ++total_;
  if (kept_ == kMaxEvents) dropped = MakeRoom();
  OfUser& user = events_[added->uid];
  user.Of(added->report).push_back({.number = number, .event = std::move(added)});
  ++kept_;
}

std::shared_ptr<const OomEvent> OomLog::MakeRoom() {
  const auto most = std::max_element(events_.begin(), events_.end(),
                                     [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
  OfUser& user = most->second;
  std::deque<Kept>& from = user.Largest();
  std::shared_ptr<const OomEvent> dropped = std::move(from.front().event);
  from.pop_front();
  --kept_;
  if (user.size() == 0) events_.erase(most);
  return dropped;
}

std::vector<std::shared_ptr<const OomEvent>> OomLog::NewestFirst() const {
  std::vector<Kept> kept;
  {
    MutexLock lock(mu_);
    kept.reserve(kept_);
    for (const auto& [uid, user] : events_) {
      for (const auto* of : {&user.first_recorded, &user.later_recorded, &user.others}) {
        kept.insert(kept.end(), of->begin(), of->end());
      }
    }
  }
  std::sort(kept.begin(), kept.end(), [](const Kept& a, const Kept& b) { return a.number > b.number; });
  std::vector<std::shared_ptr<const OomEvent>> events;
  events.reserve(kept.size());
  for (Kept& each : kept) events.push_back(std::move(each.event));
  return events;
}

uint64_t OomLog::total() const {
  MutexLock lock(mu_);
  return total_;
}

}  // namespace vrambroker
