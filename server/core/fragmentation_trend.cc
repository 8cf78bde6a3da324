// SPDX-License-Identifier: Apache-2.0
#include "server/core/fragmentation_trend.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <utility>

namespace vrambroker {
namespace {

constexpr double kLeastShare = 0.8;   // least share of rising pairs less falling pairs
constexpr double kSimilar = 1.0 / 3;  // of the reference
constexpr auto kNoise = static_cast<double>(FragmentationTrend::kNoiseBytes);

double Difference(uint64_t from, uint64_t to) {
  return to >= from ? static_cast<double>(to - from) : -static_cast<double>(from - to);
}

double Median(std::vector<double>& values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

template <typename Pair>
uint64_t GapOf(const Pair& pair) {
  return pair.held_bytes - pair.allocated_bytes;
}

// In bytes; exact where the share is 1, however large the figures are.
template <typename Pair>
double ExcessOf(const Pair& pair, double share) {
  return static_cast<double>(GapOf(pair)) + (1 - share) * static_cast<double>(pair.allocated_bytes);
}

double SecondHighest(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + 1, values.end(), std::greater<>());
  return values[1];
}

}  // namespace

void FragmentationTrend::Add(const HeapUse& use) {
  if (last_.has_value() && use.time <= last_->time) return;
  if (open_.has_value() && use.time >= open_->window.begin + window_) {
    Close(*open_);
    open_.reset();
  }
  if (!open_.has_value()) open_ = OpenWindow{.window = {.begin = use.time}};
  const Pair now = {.allocated_bytes = use.allocated_bytes,
                    .held_bytes = std::max(use.held_bytes, use.allocated_bytes)};
  auto& [begin, highest, tightest, mean] = open_->window;
  mean += (static_cast<double>(now.allocated_bytes) - mean) / static_cast<double>(++open_->samples);
  open_->sampled_bytes = std::max(open_->sampled_bytes, now.allocated_bytes);
  highest.allocated_bytes = std::max(highest.allocated_bytes, now.allocated_bytes);
  // Samples miss the top of most steps. A raised peak was reached since the last sample.
  if (last_.has_value() && use.allocated_peak_bytes > last_->allocated_peak_bytes) {
    highest.allocated_bytes = std::max(highest.allocated_bytes, use.allocated_peak_bytes);
  }
  highest.held_bytes = std::max({highest.held_bytes, now.held_bytes, highest.allocated_bytes});
  last_ = use;

  const uint64_t high_use = std::max(usual_bytes_, highest.allocated_bytes) / 2;
  if (now.allocated_bytes >= high_use &&
      (!open_->is_used || tightest.allocated_bytes < high_use || GapOf(now) <= GapOf(tightest))) {
    tightest = now;
    open_->is_used = true;
  } else if (tightest.allocated_bytes < high_use) {
    open_->is_used = false;
  }
}

std::optional<double> FragmentationTrend::SecondsUntil(uint64_t most_bytes) const {
  if (growth_.held <= 0) return std::nullopt;
  return std::max(0.0, Difference(level_bytes_, most_bytes)) / growth_.held;
}

void FragmentationTrend::Close(const OpenWindow& open) {
  Window window = open.window;
  usual_bytes_ = window.highest.allocated_bytes;
  const bool is_unseen = window.highest.allocated_bytes > open.sampled_bytes;  // the top was between two samples
  if (is_unseen && (!open.is_used || GapOf(window.highest) < GapOf(window.tightest))) {
    window.tightest = window.highest;
  } else if (!open.is_used) {
    return;  // far less use than before: the next window counts
  }
  if (windows_.size() == kMaxWindows) windows_.erase(windows_.begin());
  windows_.push_back(window);
  const std::vector<Window> similar = SimilarWindows();
  growth_ = {};
  for (size_t count = kLeastWindows; count <= similar.size() && growth_.held == 0; count *= 2) {
    growth_ = GrowthOver(similar, count);
  }
  level_bytes_ = 0;
  for (size_t i = similar.size() - std::min(similar.size(), kLeastWindows); i < similar.size(); ++i) {
    level_bytes_ = std::max(level_bytes_, similar[i].highest.held_bytes);
  }
}

std::vector<FragmentationTrend::Window> FragmentationTrend::SimilarWindows() const {
  // Several windows, not just the newest: a short phase with less use, say an evaluation, does not hide the phase
  // before.
  std::vector<uint64_t> newest;
  for (size_t i = windows_.size() - std::min(windows_.size(), kLeastWindows); i < windows_.size(); ++i) {
    newest.push_back(windows_[i].highest.allocated_bytes);
  }
  std::sort(newest.begin(), newest.end());
  const uint64_t reference = newest[(newest.size() * 3 - 1) / 4];
  std::vector<Window> similar;
  std::copy_if(windows_.begin(), windows_.end(), std::back_inserter(similar), [reference](const Window& window) {
    return std::abs(Difference(reference, window.highest.allocated_bytes)) <=
           std::max(kSimilar * static_cast<double>(reference), kNoise);
  });
  return similar;
}

FragmentationTrend::Growth FragmentationTrend::GrowthOver(const std::vector<Window>& windows, size_t count) {
  const size_t begin = windows.size() - count;
  std::vector<double> excess;
  double share = 1;
  double least = std::numeric_limits<double>::infinity();
  for (const double candidate : {1.0, 0.75, 0.5, 0.25, 0.0}) {
    std::vector<double> of_candidate;
    double differences = 0;
    for (size_t i = 0; i < windows.size(); ++i) {
      of_candidate.push_back(ExcessOf(windows[i].tightest, candidate));
      if (i > begin) differences += std::abs(of_candidate[i] - of_candidate[i - 1]);
    }
    if (differences >= least) continue;
    least = differences;
    share = candidate;
    excess = std::move(of_candidate);
  }
  const auto newest = excess.end() - static_cast<std::ptrdiff_t>(count / 4);
  if (SecondHighest({newest, excess.end()}) - SecondHighest({excess.begin(), newest}) < kNoise) return {};

  std::vector<double> rises;  // slopes
  std::vector<double> allocated;
  rises.reserve(count * (count - 1) / 2);
  allocated.reserve(rises.capacity());
  int rising = 0;  // rising pairs less falling pairs
  for (size_t from = begin; from < windows.size(); ++from) {
    for (size_t to = from + 1; to < windows.size(); ++to) {
      const double seconds = std::chrono::duration<double>(windows[to].begin - windows[from].begin).count();
      const double rise = excess[to] - excess[from];
      if (rise >= kNoise) ++rising;
      if (rise <= -kNoise) --rising;
      rises.push_back(rise / seconds);
      // Uses the mean, since chance changes the highest value much more.
      allocated.push_back((windows[to].mean_bytes - windows[from].mean_bytes) / seconds);
    }
  }
  if (rising < kLeastShare * static_cast<double>(rises.size())) return {};
  const double use = Median(allocated);
  const double in_all = Median(rises) + share * use;
  const double at_equal_use = in_all - std::max(0.0, use);
  return at_equal_use > in_all / 2 ? Growth{.at_equal_use = at_equal_use, .held = in_all} : Growth();
}

}  // namespace vrambroker
