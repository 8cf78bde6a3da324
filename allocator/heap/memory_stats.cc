// SPDX-License-Identifier: Apache-2.0
#include "allocator/heap/memory_stats.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace vrambroker {
namespace {

struct Quantity {
  const char* name;
  PoolStat MemoryStats::*stat;
};

// The only list of quantities: every walk over quantities goes through it.
constexpr Quantity kQuantities[] = {
    {"allocation", &MemoryStats::allocation},
    {"segment", &MemoryStats::segment},
    {"active", &MemoryStats::active},
    {"inactive_split", &MemoryStats::inactive_split},
    {"allocated_bytes", &MemoryStats::allocated_bytes},
    {"reserved_bytes", &MemoryStats::reserved_bytes},
    {"active_bytes", &MemoryStats::active_bytes},
    {"inactive_split_bytes", &MemoryStats::inactive_split_bytes},
    {"requested_bytes", &MemoryStats::requested_bytes},
};

template <typename Stats, typename Visit>
void Walk(Stats& stats, const Visit& visit) {
  for (const Quantity& quantity : kQuantities) visit(quantity.name, stats.*quantity.stat);
}

}  // namespace

void MemoryStats::ForEach(const std::function<void(const char*, const PoolStat&)>& visit) const {
  Walk(*this, visit);
}
void MemoryStats::ForEach(const std::function<void(const char*, PoolStat&)>& visit) {
  Walk(*this, visit);
}

void MemoryStats::ResetPeaks() {
  Walk(*this, [](const char*, PoolStat& stat) {
    stat.all.peak = stat.all.current;
    for (Stat& pool : stat.pool) pool.peak = pool.current;
  });
  oversize_allocations.peak = oversize_allocations.current;
  oversize_segments.peak = oversize_segments.current;
}

void MemoryStats::Add(const MemoryStats& other) {
  for (const Quantity& quantity : kQuantities) {
    PoolStat& stat = this->*quantity.stat;
    const PoolStat& add = other.*quantity.stat;
    stat.all.Add(add.all);
    for (size_t p = 0; p < stat.pool.size(); ++p) stat.pool[p].Add(add.pool[p]);
  }
  oversize_allocations.Add(other.oversize_allocations);
  oversize_segments.Add(other.oversize_segments);
  num_alloc_retries += other.num_alloc_retries;
  num_ooms += other.num_ooms;
  num_oom_rejections += other.num_oom_rejections;
  num_sync_all_streams += other.num_sync_all_streams;
  num_device_alloc += other.num_device_alloc;
  num_device_free += other.num_device_free;
  free.Add(other.free);
  if (max_split_bytes != other.max_split_bytes) max_split_bytes = std::numeric_limits<uint64_t>::max();
}

double FragmentationRatio(uint64_t allocated_bytes, uint64_t reserved_bytes) {
  if (reserved_bytes == 0) return 0;
  return 1.0 - static_cast<double>(std::min(allocated_bytes, reserved_bytes)) / static_cast<double>(reserved_bytes);
}

double ExternalFragmentationRatio(uint64_t largest_free_block_bytes, uint64_t free_bytes) {
  return FragmentationRatio(largest_free_block_bytes, free_bytes);
}

std::vector<std::pair<std::string, int64_t>> FlatMemoryStats(const MemoryStats& stats) {
  std::vector<std::pair<std::string, int64_t>> flat;
  const auto add = [&](const std::string& name, const Stat& stat) {
    flat.emplace_back(name + ".current", stat.current);
    flat.emplace_back(name + ".peak", stat.peak);
    flat.emplace_back(name + ".allocated", stat.allocated);
    flat.emplace_back(name + ".freed", stat.freed);
  };
  stats.ForEach([&](const char* name, const PoolStat& stat) {
    add(absl::StrCat(name, ".all"), stat.all);
    add(absl::StrCat(name, ".small_pool"), stat.pool[static_cast<int>(PoolKind::kSmall)]);
    add(absl::StrCat(name, ".large_pool"), stat.pool[static_cast<int>(PoolKind::kLarge)]);
  });
  add("oversize_allocations", stats.oversize_allocations);
  add("oversize_segments", stats.oversize_segments);
  flat.emplace_back("num_alloc_retries", stats.num_alloc_retries);
  flat.emplace_back("num_ooms", stats.num_ooms);
  flat.emplace_back("num_oom_rejections", stats.num_oom_rejections);
  flat.emplace_back("num_sync_all_streams", stats.num_sync_all_streams);
  flat.emplace_back("max_split_size", static_cast<int64_t>(stats.max_split_bytes));  // kNoLimit becomes -1
  flat.emplace_back("num_device_alloc", stats.num_device_alloc);
  flat.emplace_back("num_device_free", stats.num_device_free);
  std::sort(flat.begin(), flat.end());
  return flat;
}

}  // namespace vrambroker
