// SPDX-License-Identifier: Apache-2.0
//
// Tune: searches for settings that serve a trace better.
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
  ReplaySummary summary;                    // with the device given
  std::optional<uint64_t> smallest_device;  // fewest bytes without a refusal; nullopt: more than the device given
  std::vector<uint64_t> ooms_on_smaller;    // allocations refused on each of TuneResult::smaller_devices
};

struct TuneResult {
  size_t tried = 0;
  bool is_complete = true;  // false: time ran out before all candidates were tried, or tried on smaller devices
  // 95, 90 and 80% of the baseline's peak of reserved bytes, in whole segments; without duplicates and 0.
  std::vector<uint64_t> smaller_devices;
  TuneCandidate baseline;  // the settings given
  // PyTorch's defaults with the memory fraction given; nullopt if equal to the baseline.
  std::optional<TuneCandidate> pytorch_default;
  // Better than the baseline, best first, at most kBest each; of settings with equal results the simplest.
  static constexpr size_t kBest = 4;
  std::vector<TuneCandidate> by_peak_reserved;
  std::vector<TuneCandidate> by_device_calls;
};

// Returns the settings to try beside the settings of `config`: all known to `target`. `has_limit`: a limit exists,
// despite `config`.
std::vector<AllocatorOptions> TuneGrid(const ReplayConfig& config, const SettingsTarget& target = {},
                                       bool has_limit = false);

// Replays `trace` with each of TuneGrid() on `threads` threads. Calls `progress(done, total)` from any of the threads,
// by one at a time. Ranks by allocations refused first: settings that run out of memory are never better than settings
// that do not. Asks `may_go_on` before each replay, from any of the threads: false ends the search with the results so
// far.
TuneResult Tune(
    const Trace& trace, const ReplayConfig& config, const SettingsTarget& target, int threads,
    const std::function<void(size_t done, size_t total)>& progress,
    const std::function<bool()>& may_go_on = [] { return true; });

// Returns the smallest device, in steps of 2 MiB, without a refused allocation of `trace`, by bisection below
// config.device_bytes: a larger device is taken never to be worse. nullopt if config.device_bytes is too small.
std::optional<uint64_t> SmallestDevice(const Trace& trace, const ReplayConfig& config);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_REPLAY_TUNE_H_
