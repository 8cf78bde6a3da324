// SPDX-License-Identifier: Apache-2.0
//
// FragmentationTrend: whether a heap holds more and more memory for the same use, how fast, and for how long that can
// go on.
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
  uint64_t allocated_peak_bytes = 0;  // the most allocated since the heap was made, or its peaks were reset
  uint64_t held_bytes = 0;            // reserved, in segments that hold a block: what no trim and no flush gives back
};

// Of one session on one device. A program goes up and down in each of its steps, and its steps may differ, so not
// samples are compared but windows, each by a pair of figures in which the steps cancel out: allocated and held bytes
// of the sample that has the least gap between the two, of those with at least half of the highest allocated bytes.
// What is held, not all that is reserved, is compared: a cache that grows is given up before a request is refused. Only
// windows of similar use are compared: whose highest allocated bytes are within a third of the reference, which is the
// upper quartile of the newest ones', so that an unusual step or two change nothing.
//
// - The excess of a window is what it holds less a share of what it has allocated. The share, of 0 to 1, is the one by
//   which the excess differs least from one window to the next (least absolute deviations of first differences, which
//   a slow trend does not bias): 1 where the heap goes up and down with the use, 0 where it stays as it is.
// - Whether the excess grows, Mann and Kendall's test says: of all pairs of windows, the share that rises less the
//   share that falls must be four fifths. One jump makes half of the pairs rise.
// - The newest quarter of the windows must exceed all windows of similar use before it, each without its highest:
//   growth that is over is no trend, nor is what comes back after a flush or a trim.
// - How fast it grows, Theil and Sen's estimator says, the median of the pairs' slopes. What allocated bytes grow by on
//   average is taken off. If that is more than half, it is a leak or a growing model, and no trend.
//
// The last 8, 16 and 32 windows of similar use are tried in turn, so that fast growth is seen soon, and slow growth at
// all. Takes about 1.5 KiB once it has been used for half an hour. Not thread-safe.
class FragmentationTrend {
 public:
  static constexpr size_t kMaxWindows = 32;
  static constexpr size_t kLeastWindows = 8;
  static constexpr uint64_t kNoiseBytes = uint64_t{2} << 20;  // no smaller difference counts: a segment has as much

  // A window should be longer than a step of the program. REQUIRES: above 0.
  explicit FragmentationTrend(std::chrono::milliseconds window = std::chrono::minutes(1)) : window_(window) {}

  // A sample that is not later than the last one is left out.
  void Add(const HeapUse& use);

  // At equal allocated bytes. 0: no trend.
  double bytes_per_second() const { return growth_.at_equal_use; }
  // How many seconds it takes at this rate until a heap that can hold `most_bytes` is refused more; 0: it may happen
  // now. What grows beside the fragmentation counts here. nullopt: no trend.
  std::optional<double> SecondsUntil(uint64_t most_bytes) const;

 private:
  struct Pair {
    uint64_t allocated_bytes = 0;
    uint64_t held_bytes = 0;  // not less
  };
  struct Window {
    SteadyTime begin;
    Pair highest;           // each by itself
    Pair tightest;          // the sample with the least gap at high use
    double mean_bytes = 0;  // allocated
  };
  struct OpenWindow {
    Window window;
    size_t samples = 0;
    bool is_used = false;        // there is a tightest sample
    uint64_t sampled_bytes = 0;  // the highest allocated of the samples: it may have been more in between
  };

  void Close(const OpenWindow& open);
  // Those that are used as much as the newest ones, oldest first.
  std::vector<Window> SimilarWindows() const;
  // Bytes a second.
  struct Growth {
    double at_equal_use = 0;
    double held = 0;  // in all
  };
  // Over the last `count` of `windows`; 0: they show no trend.
  static Growth GrowthOver(const std::vector<Window>& windows, size_t count);

  std::chrono::milliseconds window_;
  std::vector<Window> windows_;  // closed ones, oldest first
  std::optional<OpenWindow> open_;
  uint64_t usual_bytes_ = 0;  // the highest allocated of the last window
  std::optional<HeapUse> last_;
  Growth growth_;
  uint64_t level_bytes_ = 0;  // held at most, in the newest windows of similar use
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CORE_FRAGMENTATION_TREND_H_
