// SPDX-License-Identifier: Apache-2.0
//
// HeapCounters: a heap's figures while counting. Fewer words to touch than MemoryStats, the form for reports.
#ifndef VRAMBROKER_ALLOCATOR_HEAP_HEAP_COUNTERS_H_
#define VRAMBROKER_ALLOCATOR_HEAP_HEAP_COUNTERS_H_

#include <array>
#include <cstdint>

#include "allocator/heap/memory_stats.h"
#include "allocator/heap/size_class.h"

namespace vrambroker {

// PoolCounter: a quantity in both pools. Sums of the pools are not stored, except for the peak of the sum.
class PoolCounter {
 public:
  // Returns whether the sum of the pools is at a new peak.
  bool Up(PoolKind kind, uint64_t n) {
    Part& part = parts_[static_cast<int>(kind)];
    part.current += n;
    part.allocated += n;
    if (part.current > part.peak) part.peak = part.current;
    const uint64_t all = current();
    if (all <= peak_) return false;
    peak_ = all;
    return true;
  }
  void Down(PoolKind kind, uint64_t n) { parts_[static_cast<int>(kind)].current -= n; }

  uint64_t current() const { return parts_[0].current + parts_[1].current; }
  uint64_t peak() const { return peak_; }
  void ResetPeak() {
    for (Part& part : parts_) part.peak = part.current;
    peak_ = current();
  }
  // Restarts totals at 0.
  void ResetTotals() {
    for (Part& part : parts_) {
      part.allocated = 0;
      part.at_reset = part.current;
    }
  }

  PoolStat Report() const {
    PoolStat report;
    for (size_t i = 0; i < parts_.size(); ++i) {
      const Part& part = parts_[i];
      report.pool[i] = {.current = part.current,
                        .peak = part.peak,
                        .allocated = part.allocated,
                        .freed = part.at_reset + part.allocated - part.current};
      report.all.Add(report.pool[i]);
    }
    report.all.peak = peak_;
    return report;
  }

 private:
  struct Part {
    uint64_t current = 0;
    uint64_t peak = 0;
    uint64_t allocated = 0;
    uint64_t at_reset = 0;  // `current` when the totals were last set to 0
  };
  std::array<Part, 2> parts_;  // indexed by PoolKind
  uint64_t peak_ = 0;          // peak of the sum
};

struct HeapCounters {
  PoolCounter allocation, allocated_bytes, active, active_bytes, requested_bytes;
  PoolCounter inactive_split, inactive_split_bytes;
  PoolCounter segment, reserved_bytes;
  Stat oversize_allocations, oversize_segments;
  uint64_t num_alloc_retries = 0;
  uint64_t num_ooms = 0;
  uint64_t num_oom_rejections = 0;
  uint64_t num_sync_all_streams = 0;
  uint64_t num_device_alloc = 0;
  uint64_t num_device_free = 0;

  MemoryStats Report() const;
  void ResetPeaks();
  void ResetTotals();
};

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_HEAP_HEAP_COUNTERS_H_
