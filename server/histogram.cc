// SPDX-License-Identifier: Apache-2.0
#include "server/histogram.h"

#include <algorithm>
#include <numeric>

namespace vrambroker {

uint64_t HistogramFigures::count() const {
  return std::accumulate(counts.begin(), counts.end(), uint64_t{0});
}

void HistogramFigures::Add(const HistogramFigures& other) {
  if (counts.empty()) {
    *this = other;
    return;
  }
  for (size_t i = 0; i < counts.size() && i < other.counts.size(); ++i) counts[i] += other.counts[i];
  sum_seconds += other.sum_seconds;
}

DurationHistogram::DurationHistogram(absl::Span<const double> bounds) : bounds_(bounds.subspan(0, kMaxBounds)) {}

void DurationHistogram::Observe(std::chrono::nanoseconds duration) {
  duration = std::max(duration, std::chrono::nanoseconds(0));
  const double seconds = std::chrono::duration<double>(duration).count();
  const auto bucket = std::lower_bound(bounds_.begin(), bounds_.end(), seconds) - bounds_.begin();
  counts_[static_cast<size_t>(bucket)].fetch_add(1, std::memory_order_relaxed);
  sum_ns_.fetch_add(static_cast<uint64_t>(duration.count()), std::memory_order_relaxed);
}

HistogramFigures DurationHistogram::Get() const {
  HistogramFigures figures{.bounds = bounds_, .counts = std::vector<uint64_t>(bounds_.size() + 1)};
  for (size_t i = 0; i < figures.counts.size(); ++i) figures.counts[i] = counts_[i].load(std::memory_order_relaxed);
  figures.sum_seconds = static_cast<double>(sum_ns_.load(std::memory_order_relaxed)) / 1e9;
  return figures;
}

}  // namespace vrambroker
