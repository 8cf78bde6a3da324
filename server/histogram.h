// SPDX-License-Identifier: Apache-2.0
//
// DurationHistogram: how often something took how long. Lock-free.
#ifndef VRAMBROKER_SERVER_HISTOGRAM_H_
#define VRAMBROKER_SERVER_HISTOGRAM_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace vrambroker {

// What a histogram has counted, of one moment as far as that goes without a lock.
struct HistogramFigures {
  absl::Span<const double> bounds;  // seconds, rising
  std::vector<uint64_t> counts;  // by bound: what took at most so long, and longer than the one before; last: the rest
  double sum_seconds = 0;

  uint64_t count() const;
  // REQUIRES: the same bounds, or no bounds yet.
  void Add(const HistogramFigures& other);
};

// Safe to call from any thread.
class DurationHistogram {
 public:
  static constexpr size_t kMaxBounds = 15;

  // `bounds` in seconds, rising, kMaxBounds at most; they outlive this object.
  explicit DurationHistogram(absl::Span<const double> bounds);

  void Observe(std::chrono::nanoseconds duration);
  HistogramFigures Get() const;

 private:
  const absl::Span<const double> bounds_;
  std::array<std::atomic<uint64_t>, kMaxBounds + 1> counts_{};
  std::atomic<uint64_t> sum_ns_{0};
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_HISTOGRAM_H_
