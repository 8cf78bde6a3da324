// SPDX-License-Identifier: Apache-2.0
#include "server/http/timeline.h"

#include <numeric>

namespace vrambroker {

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
    std::deque<TimelineSample>& kept = samples_[device];
    const TimelineSample& sample = samples[device];
    // Both bounds: a machine that slept, or whose clock was set, has fewer samples in the same time.
    while (!kept.empty() && (kept.size() >= kMaxSamples || kept.front().time < sample.time - kLength)) kept.pop_front();
    // A clock that was set back would draw its line back.
    while (!kept.empty() && kept.back().time >= sample.time) kept.pop_back();
    kept.push_back(sample);
  }
}

std::vector<TimelineSample> Timeline::Get(size_t device) const {
  MutexLock lock(mu_);
  if (device >= samples_.size()) return {};
  return {samples_[device].begin(), samples_[device].end()};
}

}  // namespace vrambroker
