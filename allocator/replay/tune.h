// SPDX-License-Identifier: Apache-2.0
//
// Tune: which settings would have served a trace better?
#ifndef VRAMBROKER_ALLOCATOR_REPLAY_TUNE_H_
#define VRAMBROKER_ALLOCATOR_REPLAY_TUNE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "allocator/replay/replay.h"
#include "allocator/replay/settings_target.h"
#include "allocator/replay/trace.h"

namespace vrambroker {

struct TuneCandidate {
  AllocatorOptions options;
  ReplaySummary summary;                    // with the device that was given
  std::optional<uint64_t> smallest_device;  // bytes with which nothing is refused; none up to the device given
  std::vector<uint64_t> ooms_on_smaller;    // allocations refused on each of TuneResult::smaller_devices
};

struct TuneResult {
  size_t tried = 0;
  bool is_complete = true;  // false: the time was over before all were tried, or tried on smaller devices
  // 95, 90 and 80% of what the baseline had reserved at its peak, bytes, in whole segments; each once, and none of 0.
  std::vector<uint64_t> smaller_devices;
  TuneCandidate baseline;  // the settings that were given
  // PyTorch's defaults with the memory fraction that was given; none when they are the baseline.
  std::optional<TuneCandidate> pytorch_default;
  // Better than the baseline, best first, at most kBest each; of settings with equal results the simplest.
  static constexpr size_t kBest = 4;
  std::vector<TuneCandidate> by_peak_reserved;
  std::vector<TuneCandidate> by_device_calls;
};

// The settings to try besides those of `config`: all that `target` has. `has_limit`: there is one, whatever `config`
// says.
std::vector<AllocatorOptions> TuneGrid(const ReplayConfig& config, const SettingsTarget& target = {},
                                       bool has_limit = false);

// Replays `trace` with each of TuneGrid() on `threads` threads. `progress(done, total)` is called from any of them, one
// at a time. Ranks by allocations refused first: a setting that runs out of memory is never better than one that does
// not. `may_go_on` is asked before each replay, from any of the threads: false ends it with what was tried so far.
TuneResult Tune(
    const Trace& trace, const ReplayConfig& config, const SettingsTarget& target, int threads,
    const std::function<void(size_t done, size_t total)>& progress,
    const std::function<bool()>& may_go_on = [] { return true; });

// The smallest device, in steps of 2 MiB, on which no allocation of `trace` is refused, by bisection below
// config.device_bytes: a larger device is taken never to be worse. None when config.device_bytes is too small.
std::optional<uint64_t> SmallestDevice(const Trace& trace, const ReplayConfig& config);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_REPLAY_TUNE_H_
