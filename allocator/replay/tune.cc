// SPDX-License-Identifier: Apache-2.0
#include "allocator/replay/tune.h"

#include <algorithm>
#include <array>
#include <set>
#include <tuple>
#include <utility>

#include "allocator/base/bytes.h"
#include "allocator/heap/size_class.h"
#include "allocator/replay/in_parallel.h"

namespace vrambroker {
namespace {

ReplayConfig With(ReplayConfig config, const AllocatorOptions& options) {
  config.options = options;
  return config;
}

ReplayConfig On(ReplayConfig config, uint64_t device_bytes) {
  config.device_bytes = device_bytes;
  return config;
}

// PyTorch's defaults within the given limit: the amount of memory is no setting to compare.
AllocatorOptions DefaultsFor(const AllocatorOptions& given) {
  AllocatorOptions defaults;
  defaults.per_process_memory_fraction = given.per_process_memory_fraction;
  return defaults;
}

// Counts settings that differ from the default; the grid lists simple settings first.
int Complexity(const AllocatorOptions& options) {
  const AllocatorOptions defaults;
  return (options.max_split_bytes != defaults.max_split_bytes) +
         (options.max_non_split_rounding_bytes != options.large_segment_bytes) +
         (options.large_segment_bytes != defaults.large_segment_bytes) +
         (options.roundup_power2_divisions != defaults.roundup_power2_divisions) +
         (options.garbage_collection_threshold != defaults.garbage_collection_threshold);
}

// Returns the best of `candidates` by `key` that beat `baseline`, one for each result.
template <typename Key>
std::vector<TuneCandidate> Best(const std::vector<TuneCandidate>& candidates, const TuneCandidate& baseline,
                                const Key& key) {
  std::vector<const TuneCandidate*> better;
  for (const TuneCandidate& candidate : candidates) {
    if (key(candidate) < key(baseline)) better.push_back(&candidate);
  }
  // Stable: the grid has the simple settings first.
  std::stable_sort(better.begin(), better.end(), [&](const auto* a, const auto* b) { return key(*a) < key(*b); });
  std::vector<TuneCandidate> best;
  std::set<decltype(key(baseline))> seen;
  for (const TuneCandidate* candidate : better) {
    if (best.size() < TuneResult::kBest && seen.insert(key(*candidate)).second) best.push_back(*candidate);
  }
  return best;
}

}  // namespace

std::vector<AllocatorOptions> TuneGrid(const ReplayConfig& config, const SettingsTarget& target, bool has_limit) {
  const std::array<uint64_t, 8> max_splits = {
      AllocatorOptions::kNoLimit, target.least_max_split_bytes(), 32_MiB, 64_MiB, 128_MiB, 256_MiB, 512_MiB, 1_GiB};
  constexpr std::array<uint64_t, 3> kRounding = {0, 64_MiB, 256_MiB};  // 0: the default
  constexpr std::array<uint64_t, 8> kLargeSegment = {20_MiB, 12_MiB, 32_MiB, 48_MiB, 64_MiB, 96_MiB, 128_MiB, 256_MiB};
  constexpr std::array<uint32_t, 5> kDivisions = {0, 2, 4, 8, 16};
  const AllocatorOptions base = target.Nearest(config.options);
  // Collecting needs a limit.
  std::vector<double> thresholds = {base.garbage_collection_threshold};
  if (has_limit || config.fraction.value_or(config.options.per_process_memory_fraction) < 1) {
    for (const double threshold : {0.6, 0.8, 0.9}) {
      if (threshold != thresholds[0]) thresholds.push_back(threshold);
    }
  }

  std::vector<AllocatorOptions> grid;
  for (const uint64_t max_split : max_splits) {
    for (const uint64_t rounding : kRounding) {
      if (rounding != 0 && max_split == AllocatorOptions::kNoLimit) continue;  // no effect
      for (const uint64_t large_segment : kLargeSegment) {
        if (max_split < large_segment || (rounding != 0 && rounding <= large_segment))
          continue;  // not allowed, or the default
        for (const uint32_t divisions : kDivisions) {
          for (const double threshold : thresholds) {
            AllocatorOptions options = base;
            options.max_split_bytes = max_split;
            options.max_non_split_rounding_bytes = rounding != 0 ? rounding : large_segment;
            options.large_segment_bytes = large_segment;
            options.roundup_power2_divisions.fill(divisions);
            options.garbage_collection_threshold = threshold;
            if (options != config.options && target.Has(options)) grid.push_back(options);
          }
        }
      }
    }
  }
  std::stable_sort(grid.begin(), grid.end(),
                   [](const AllocatorOptions& a, const AllocatorOptions& b) { return Complexity(a) < Complexity(b); });
  return grid;
}

std::optional<uint64_t> SmallestDevice(const Trace& trace, const ReplayConfig& config) {
  const auto survives = [&](uint64_t granules) {
    return SummarizeReplay(trace, On(config, granules * kSegmentGranuleBytes)).ooms == 0;
  };
  const ReplaySummary summary = SummarizeReplay(trace, config);
  if (summary.ooms > 0) return std::nullopt;
  // The peak of reserved bytes is enough, unless a fraction of the device sets the limit.
  uint64_t too_small = 0;
  uint64_t enough = RoundUpTo(summary.peak_reserved_bytes, kSegmentGranuleBytes) / kSegmentGranuleBytes;
  if (enough == 0) return 0;
  if (!survives(enough)) {
    too_small = enough;
    enough = config.device_bytes / kSegmentGranuleBytes;
    if (enough <= too_small || !survives(enough)) return config.device_bytes;
  }
  while (enough - too_small > 1) {
    const uint64_t middle = too_small + (enough - too_small) / 2;
    (survives(middle) ? enough : too_small) = middle;
  }
  return enough * kSegmentGranuleBytes;
}

TuneResult Tune(const Trace& trace, const ReplayConfig& config, const SettingsTarget& target, int threads,
                const std::function<void(size_t done, size_t total)>& progress,
                const std::function<bool()>& may_go_on) {
  const std::vector<AllocatorOptions> grid = TuneGrid(config, target);
  TuneResult result;
  // Second part of the work: baseline and shown candidates, each on smaller devices.
  const size_t total = grid.size() + 2 + 2 * TuneResult::kBest;

  result.baseline = {.options = config.options, .summary = SummarizeReplay(trace, config)};
  const AllocatorOptions defaults = DefaultsFor(config.options);
  if (config.options != defaults) {
    result.pytorch_default =
        TuneCandidate{.options = defaults, .summary = SummarizeReplay(trace, With(config, defaults))};
  }
  std::vector<std::optional<TuneCandidate>> tried(grid.size());
  InParallel(
      grid.size(), threads,
      [&](size_t i) {
        if (!may_go_on()) return;
        tried[i] = TuneCandidate{.options = grid[i], .summary = SummarizeReplay(trace, With(config, grid[i]))};
      },
      [&](size_t done) { progress(done, total); });
  std::vector<TuneCandidate> candidates;
  for (std::optional<TuneCandidate>& candidate : tried) {
    if (candidate.has_value()) candidates.push_back(*std::move(candidate));
  }
  result.tried = candidates.size();

  result.by_peak_reserved = Best(candidates, result.baseline, [](const TuneCandidate& c) {
    return std::tuple(c.summary.ooms, c.summary.peak_reserved_bytes, c.summary.device_calls);
  });
  std::erase_if(result.by_peak_reserved, [&](const TuneCandidate& c) {
    return c.summary.ooms == result.baseline.summary.ooms &&
           c.summary.peak_reserved_bytes >= result.baseline.summary.peak_reserved_bytes;
  });
  result.by_device_calls = Best(candidates, result.baseline, [](const TuneCandidate& c) {
    return std::tuple(c.summary.ooms, c.summary.device_calls, c.summary.peak_reserved_bytes);
  });
  std::erase_if(result.by_device_calls, [&](const TuneCandidate& c) {
    return c.summary.ooms == result.baseline.summary.ooms &&
           c.summary.device_calls >= result.baseline.summary.device_calls;
  });

  for (const uint64_t percent : {95, 90, 80}) {
    const uint64_t granules = result.baseline.summary.peak_reserved_bytes / kSegmentGranuleBytes;
    const uint64_t bytes = granules * percent / 100 * kSegmentGranuleBytes;
    // With few segments, sizes may be equal or 0.
    const bool is_new = result.smaller_devices.empty() || result.smaller_devices.back() != bytes;
    if (bytes != 0 && is_new) result.smaller_devices.push_back(bytes);
  }
  std::vector<TuneCandidate*> shown = {&result.baseline};
  if (result.pytorch_default.has_value()) shown.push_back(&*result.pytorch_default);
  for (TuneCandidate& candidate : result.by_peak_reserved) shown.push_back(&candidate);
  for (TuneCandidate& candidate : result.by_device_calls) shown.push_back(&candidate);
  InParallel(
      shown.size(), threads,
      [&](size_t i) {
        if (!may_go_on()) return;
        const ReplayConfig with = With(config, shown[i]->options);
        shown[i]->smallest_device = SmallestDevice(trace, with);
        for (const uint64_t bytes : result.smaller_devices) {
          shown[i]->ooms_on_smaller.push_back(SummarizeReplay(trace, On(with, bytes)).ooms);
        }
      },
      [&](size_t done) { progress(done == shown.size() ? total : grid.size() + done, total); });
  result.is_complete = may_go_on();
  return result;
}

}  // namespace vrambroker
