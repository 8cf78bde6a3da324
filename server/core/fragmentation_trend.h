// SPDX-License-Identifier: Apache-2.0
//
// FragmentationTrend: detects heaps growing at equal use, with the growth rate and the time left.
#ifndef VRAMBROKER_SERVER_CORE_FRAGMENTATION_TREND_H_
#define VRAMBROKER_SERVER_CORE_FRAGMENTATION_TREND_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "server/base/steady_time.h"

namespace vrambroker {

// A heap at one moment.
struct HeapUse {
  SteadyTime time;
  uint64_t allocated_bytes = 0;
  uint64_t allocated_peak_bytes = 0;  // highest since the heap was made, or its peaks were reset
  uint64_t held_bytes = 0;            // reserved, in segments with a block: no trim and no flush gives it back
};

// Trend of a session on a device. A program's use goes up and down in each step, and steps may differ. So windows are
// compared rather than samples, each by a pair of figures independent of the steps. The pair is the allocated and held
// bytes of the sample with the least gap between both, among samples with at least half of the highest allocated bytes.
// Held bytes are compared rather than reserved bytes: a growing cache is given up before a request is refused. Only
// windows of similar use are compared: their highest allocated bytes are within a third of the reference. The reference
// is the upper quartile of the newest windows, so an unusual step or two change nothing.
//
// - The excess of a window is the held bytes less a share of the allocated bytes. The share, of 0 to 1, minimises the
//   difference of the excess between successive windows (least absolute deviations of first differences, unbiased by a
//   slow trend): 1 where the heap goes up and down with the use, 0 where it stays constant.
// - The test of Mann and Kendall decides whether the excess grows: over all pairs of windows, the share of rising pairs
//   less the share of falling pairs must be four fifths. A single jump makes half of the pairs rise.
// - The newest quarter of the windows must exceed all earlier windows of similar use, each set without the highest.
//   Growth that has ended is no trend, nor is memory returning after a flush or a trim.
// - The estimator of Theil and Sen, the median of the pairs' slopes, gives the rate. The mean growth of allocated bytes
//   is subtracted. If that growth is more than half, the cause is a leak or a growing model, and there is no trend.
//
// The last 8, 16 and 32 windows of similar use are tried in turn, to see fast growth soon, and slow growth at all.
// Takes about 1.5 KiB after half an hour of use. Not thread-safe.
class FragmentationTrend {
 public:
  static constexpr size_t kMaxWindows = 32;
  static constexpr size_t kLeastWindows = 8;
  static constexpr uint64_t kNoiseBytes = uint64_t{2} << 20;  // smaller differences do not count: size of a segment

  // A window should be longer than a step of the program. REQUIRES: above 0.
  explicit FragmentationTrend(std::chrono::milliseconds window = std::chrono::minutes(1)) : window_(window) {}

  // Ignores a sample no later than the last.
  void Add(const HeapUse& use);

  // At equal allocated bytes. 0: no trend.
  double bytes_per_second() const { return growth_.at_equal_use; }
  // Seconds at the current rate until a heap with room for `most_bytes` is refused more; 0: it may happen now. Includes
  // growth beside the fragmentation. nullopt: no trend.
  std::optional<double> SecondsUntil(uint64_t most_bytes) const;

 private:
  struct Pair {
    uint64_t allocated_bytes = 0;
    uint64_t held_bytes = 0;  // at least allocated_bytes
  };
  struct Window {
    SteadyTime begin;
    Pair highest;           // each member by itself
    Pair tightest;          // the sample with the least gap at high use
    double mean_bytes = 0;  // allocated
  };
  struct OpenWindow {
    Window window;
    size_t samples = 0;
    bool is_used = false;        // `tightest` is set
    uint64_t sampled_bytes = 0;  // highest allocated bytes of the samples: use between samples may be higher
  };

  void Close(const OpenWindow& open);
  // Closed windows with use similar to the newest windows, oldest first.
  std::vector<Window> SimilarWindows() const;
  // Bytes a second.
  struct Growth {
    double at_equal_use = 0;
    double held = 0;  // total
  };
  // Growth over the last `count` of `windows`; 0: no trend.
  static Growth GrowthOver(const std::vector<Window>& windows, size_t count);

  std::chrono::milliseconds window_;
  std::vector<Window> windows_;  // closed windows, oldest first
  std::optional<OpenWindow> open_;
  uint64_t usual_bytes_ = 0;  // highest allocated bytes of the last window
  std::optional<HeapUse> last_;
  Growth growth_;
  uint64_t level_bytes_ = 0;  // highest held bytes in the newest windows of similar use
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CORE_FRAGMENTATION_TREND_H_
