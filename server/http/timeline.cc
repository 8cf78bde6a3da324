// SPDX-License-Identifier: Apache-2.0
#include "server/http/timeline.h"

#include <numeric>

#include "absl/container/flat_hash_set.h"

namespace vrambroker {
namespace {

// Adds a sample to the kept samples, oldest first, at most `most`.
template <typename Sample>
void Append(const Sample& sample, size_t most, std::deque<Sample>& kept) {
  // Applies both bounds: a machine that slept, or whose clock was set, has fewer samples in the same time.
  while (!kept.empty() && (kept.size() >= most || kept.front().time < sample.time - Timeline::kLength))
    kept.pop_front();
  // Drops later samples after the clock was set back, to keep the line moving forward.
  while (!kept.empty() && kept.back().time >= sample.time) kept.pop_back();
  kept.push_back(sample);
}

}  // namespace

std::vector<TimelineSample> SamplesOf(const BrokerView& view, std::chrono::system_clock::time_point time) {
  std::vector<TimelineSample> samples(view.devices.size(), {.time = time});
  for (size_t i = 0; i < samples.size(); ++i) {
    const DeviceView& info = view.devices[i];
    samples[i].allocated_bytes = info.stats.allocated_bytes.all.current;
    samples[i].leased_bytes = info.leased_bytes;
    samples[i].inactive_split_bytes = info.stats.inactive_split_bytes.all.current;
    samples[i].reclaimable_bytes = info.reclaimable_bytes;
    samples[i].idle_bytes = info.pool.idle_bytes;
    samples[i].left_behind_bytes = info.left_behind_bytes;
    samples[i].refusals = std::accumulate(info.ooms.begin(), info.ooms.end(), uint64_t{0});
    for (const SessionView& session : view.sessions) samples[i].waiting += session.devices[i].waiting.size();
  }
  return samples;
}

void Timeline::Add(const std::vector<TimelineSample>& samples) {
  MutexLock lock(mu_);
  for (size_t device = 0; device < samples_.size() && device < samples.size(); ++device) {
    Append(samples[device], kMaxSamples, samples_[device]);
  }
}

void Timeline::Add(const BrokerView& view, std::chrono::system_clock::time_point time) {
  Add(SamplesOf(view, time));
  AddSessions(view, time);
}

void Timeline::AddSessions(const BrokerView& view, std::chrono::system_clock::time_point time) {
  absl::flat_hash_set<SessionId> live;
  MutexLock lock(mu_);
  for (const SessionView& session : view.sessions) {
    live.insert(session.id);
    for (size_t device = 0; device < session.devices.size(); ++device) {
      const SessionDeviceView& held = session.devices[device];
      const std::pair key(session.id, device);
      if (!histories_.contains(key) && (held.account.reserved_bytes == 0 || histories_.size() >= kMaxHistories)) {
        continue;
      }
      std::deque<SessionSample>& kept = histories_[key];
      // Replaces the last sample unless a period lies between the last two. Samples are not exactly on time.
      const bool is_full_step =
          kept.size() < 2 || kept.back().time - kept[kept.size() - 2].time > kSessionPeriod - kPeriod / 2;
      if (!is_full_step) kept.pop_back();
      Append({.time = time,
              .reserved_bytes = held.account.reserved_bytes,
              .allocated_bytes = held.stats.allocated_bytes.all.current},
             kMaxSessionSamples, kept);
    }
  }
  absl::erase_if(histories_, [&](const auto& history) { return !live.contains(history.first.first); });
}

std::vector<TimelineSample> Timeline::Get(size_t device) const {
  MutexLock lock(mu_);
  if (device >= samples_.size()) return {};
  return {samples_[device].begin(), samples_[device].end()};
}

std::vector<SessionSample> Timeline::GetOfSession(SessionId session, size_t device) const {
  MutexLock lock(mu_);
  const auto history = histories_.find({session, device});
  if (history == histories_.end()) return {};
  return {history->second.begin(), history->second.end()};
}

}  // namespace vrambroker
