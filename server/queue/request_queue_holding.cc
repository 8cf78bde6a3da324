// SPDX-License-Identifier: Apache-2.0
//
// Holds free memory back for a large request, to prevent starvation. A hold's use depends on the holdings of all
// sessions and on all requests, so it is checked some 64 times a second at most.
#include <algorithm>
#include <limits>

#include "server/base/saturating.h"
#include "server/queue/request_queue.h"

namespace vrambroker {

bool RequestQueue::IsHeldBack(const QueuedRequest& request, const Place& place) const {
  if (!hold_.has_value() || hold_->place == place) return false;
  // A guarantee would put held-back memory out of reach for good.
  return request.guarantee ? place.first >= hold_->place.first : pool_.IsHeldBack(request.session, request.bytes);
}

uint64_t RequestQueue::CameBackLately(SteadyTime now) {
  const uint64_t total = pool_.CameBackTotal();
  if (came_back_.empty() || now - came_back_.back().first >= options_.hold_back_time / kHoldLooks) {
    came_back_.emplace_back(now, total);
  }
  // Keep one sample from the beginning of that time, or before.
  while (came_back_.size() > 1 && came_back_[1].first <= now - options_.hold_back_time) came_back_.pop_front();
  return total - came_back_.front().second;
}

uint64_t RequestQueue::AskedFor(const Waiter& waiter, SteadyTime now) const {
  uint64_t bytes = 0;
  for (const auto& [session, asked] : waiter.asked) {
    if (!asked.last.is_answered && now < owed_.at(session).since + options_.reclaim_timeout) bytes += asked.expected;
  }
  return bytes;
}

bool RequestQueue::IsOver(const Hold& hold, SteadyTime now) {
  const auto it = waiters_.find(hold.place);
  if (it == waiters_.end() || now >= hold.since + options_.hold_back_time) return true;
  if (!IsTimeToLook(now)) return false;
  const QueuedRequest& request = it->second.request;
  if (pool_.MissingInShare(request.session, request.bytes) > 0) return true;
  const uint64_t came_back = pool_.CameBackTotal() - hold.came_back_total;
  const uint64_t still_churning = SaturatingSub(hold.churning, came_back);
  return pool_.MissingBytes(request.session, request.bytes, /*guarantee=*/false) >
         AskedFor(it->second, now) + pool_.ExpectedFor({request.session})[0].returning_bytes + still_churning;
}

bool RequestQueue::IsTimeToLook(SteadyTime now) {
  hold_look_wanted_ = now < next_hold_look_;
  if (!hold_look_wanted_) next_hold_look_ = now + std::min(options_.hold_back_time / kHoldLooks, kLongestHoldLook);
  return !hold_look_wanted_;
}

bool RequestQueue::EndHold(SteadyTime now) {
  if (!hold_.has_value()) return false;
  const Hold hold = *hold_;
  if (!IsOver(hold, now)) return false;
  const SteadyTime::duration held = now - hold.since;
  rest_until_ = now + held;
  users_rest_until_[hold.user] = now + kUserRest * held;
  hold_.reset();
  pool_.HoldBack(std::nullopt);
  CallHeldBack();
  return true;
}

void RequestQueue::CallHeldBack() {
  for (auto it = groups_.begin(); it != groups_.end();) {
    if (!it->first.is_held_back) {
      ++it;
      continue;
    }
    constexpr uint64_t kAny = std::numeric_limits<uint64_t>::max();
    for (auto place = it->second.First(kAny); place.has_value(); place = it->second.First(kAny)) {
      it->second.Erase(*place);
      waiters_.at(*place).group.reset();
      to_visit_.insert(*place);
    }
    it = groups_.erase(it);
  }
}

void RequestQueue::BeginHold(SteadyTime now) {
  if (waiters_.empty()) return came_back_.clear();
  if (hold_.has_value() || options_.hold_back_time.count() == 0) return;
  const uint64_t came_back = CameBackLately(now);
  if (now < rest_until_ || !IsTimeToLook(now)) return;
  absl::erase_if(users_rest_until_, [now](const auto& entry) { return entry.second <= now; });
  std::vector<Waiters::const_iterator> qualified;
  std::vector<SessionId> sessions;
  for (auto it = waiters_.cbegin(); it != waiters_.cend(); ++it) {
    const QueuedRequest& request = it->second.request;
    if (request.guarantee || it->second.awaits_look || now < it->second.served_since + kHoldAfter ||
        users_rest_until_.contains(request.user)) {
      continue;
    }
    qualified.push_back(it);
    sessions.push_back(request.session);
  }
  if (qualified.empty()) return;
  const std::vector<SegmentPool::Expected> expected = pool_.ExpectedFor(sessions);
  for (size_t i = 0; i < qualified.size(); ++i) {
    const auto& [place, waiter] = *qualified[i];
    const QueuedRequest& request = waiter.request;
    // At most the bytes held by these sessions, however often bytes came back.
    const uint64_t churning = std::min(came_back, expected[i].churning_bytes);
    const uint64_t missing = pool_.MissingBytes(request.session, request.bytes, /*guarantee=*/false);
    const uint64_t comes_back = expected[i].returning_bytes + churning;
    // Device memory is of no use while the share's limit is in the way.
    if (pool_.MissingInShare(request.session, request.bytes) > 0) continue;
    if (missing > waiter.expected + comes_back || missing > AskedFor(waiter, now) + comes_back) continue;
    hold_ = {.place = place,
             .user = request.user,
             .since = now,
             .churning = churning,
             .came_back_total = pool_.CameBackTotal()};
    const uint64_t bytes = std::min(pool_.GrowthOf(request.session, request.bytes), options_.hold_back_bytes);
    pool_.HoldBack(Ledger::Held{.priority = -place.first, .bytes = bytes});
    return;
  }
}

}  // namespace vrambroker
