// SPDX-License-Identifier: Apache-2.0
#include "server/http/timeline.h"

namespace vrambroker {

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
