// SPDX-License-Identifier: Apache-2.0
#include "server/sessions/session_refusals.h"

#include <algorithm>
#include <utility>

namespace vrambroker {

SessionRefusals::SessionRefusals(size_t devices) : counts_(devices), last_times_(devices) {}

void SessionRefusals::Count(int device, OomCause cause, SteadyTime now) {
  counts_[device][static_cast<size_t>(cause)].fetch_add(1, std::memory_order_relaxed);
  last_times_[device] = now;
}

SessionRefusals::Counts SessionRefusals::GetCounts(int device) const {
  Counts counts;
  for (size_t i = 0; i < counts.size(); ++i) counts[i] = counts_[device][i].load(std::memory_order_relaxed);
  return counts;
}

std::optional<SteadyTime> SessionRefusals::TakeLastTime(int device) {
  const SteadyTime time = last_times_[device].exchange({});
  return time == SteadyTime() ? std::nullopt : std::optional<SteadyTime>(time);
}

void SessionRefusals::AddLeaseOutcome(int device, uint64_t bytes, SteadyTime now, WaitRecord outcome) {
  if (outcome.asked.empty() && outcome.waited.count() == 0) return;  // explains nothing
  MutexLock lock(mu_);
  if (lease_outcomes_.size() == kMaxLeaseOutcomes) lease_outcomes_.pop_front();
  lease_outcomes_.push_back({.device = device, .bytes = bytes, .time = now, .outcome = std::move(outcome)});
}

WaitRecord SessionRefusals::TakeLeaseOutcome(int device, uint64_t bytes, SteadyTime now) {
  MutexLock lock(mu_);
  while (!lease_outcomes_.empty() && now - lease_outcomes_.front().time > kExplainedWithin) lease_outcomes_.pop_front();
  const auto it = std::find_if(lease_outcomes_.begin(), lease_outcomes_.end(), [&](const LeaseOutcome& lease) {
    return lease.device == device && lease.bytes == bytes;
  });
  if (it == lease_outcomes_.end()) return {};
  WaitRecord outcome = std::move(it->outcome);
  lease_outcomes_.erase(it);
  return outcome;
}

bool SessionRefusals::StartRecording(SteadyTime now) {
  constexpr std::chrono::seconds kAhead{10};
  if (is_recording_.exchange(true)) return false;
  if (recordings_paid_.load() - now < kAhead) return true;
  is_recording_ = false;
  return false;
}

void SessionRefusals::EndRecording(SteadyTime now, SteadyTime::duration took) {
  constexpr int kShare = 20;
  // Allows ten in a row rather than hundreds.
  constexpr SteadyTime::duration kLeast = std::chrono::milliseconds(50);
  if (took > SteadyTime::duration(0)) {
    recordings_paid_ = std::max(recordings_paid_.load(), now) + kShare * std::max(kLeast, took);
  }
  is_recording_ = false;
}

}  // namespace vrambroker
