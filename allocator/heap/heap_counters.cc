// SPDX-License-Identifier: Apache-2.0
#include "allocator/heap/heap_counters.h"

namespace vrambroker {
namespace {

template <typename Counters, typename Visit>
void ForEachPoolCounter(Counters& c, const Visit& visit) {
  for (auto* counter : {&c.allocation, &c.allocated_bytes, &c.active, &c.active_bytes, &c.requested_bytes,
                        &c.inactive_split, &c.inactive_split_bytes, &c.segment, &c.reserved_bytes}) {
    visit(*counter);
  }
}

void ResetTotal(Stat& stat) {
  stat.allocated = 0;
  stat.freed = 0;
}

}  // namespace

MemoryStats HeapCounters::Report() const {
  MemoryStats stats;
  stats.allocation = allocation.Report();
  stats.allocated_bytes = allocated_bytes.Report();
  stats.active = active.Report();
  stats.active_bytes = active_bytes.Report();
  stats.requested_bytes = requested_bytes.Report();
  stats.inactive_split = inactive_split.Report();
  stats.inactive_split_bytes = inactive_split_bytes.Report();
  stats.segment = segment.Report();
  stats.reserved_bytes = reserved_bytes.Report();
  stats.oversize_allocations = oversize_allocations;
  stats.oversize_segments = oversize_segments;
  stats.num_alloc_retries = num_alloc_retries;
  stats.num_ooms = num_ooms;
  stats.num_oom_rejections = num_oom_rejections;
  stats.num_sync_all_streams = num_sync_all_streams;
  stats.num_device_alloc = num_device_alloc;
  stats.num_device_free = num_device_free;
  return stats;
}

void HeapCounters::ResetPeaks() {
  ForEachPoolCounter(*this, [](PoolCounter& counter) { counter.ResetPeak(); });
  oversize_allocations.peak = oversize_allocations.current;
  oversize_segments.peak = oversize_segments.current;
}

void HeapCounters::ResetTotals() {
  ForEachPoolCounter(*this, [](PoolCounter& counter) { counter.ResetTotals(); });
  ResetTotal(oversize_allocations);
  ResetTotal(oversize_segments);
  num_alloc_retries = num_ooms = num_oom_rejections = num_sync_all_streams = 0;
  num_device_alloc = num_device_free = 0;
}

}  // namespace vrambroker
