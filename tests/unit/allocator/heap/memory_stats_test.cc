// SPDX-License-Identifier: Apache-2.0
#include "allocator/heap/memory_stats.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

namespace vrambroker {
namespace {

const std::vector<std::string> kQuantities = {
    "allocation",      "segment",        "active",       "inactive_split",
    "allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes",
    "requested_bytes"};

// Fills every statistic with a different figure.
MemoryStats Sample(uint64_t scale) {
  MemoryStats stats;
  uint64_t n = scale;
  stats.ForEach([&](const char*, PoolStat& stat) {
    stat.Up(PoolKind::kSmall, n + 10);
    stat.Up(PoolKind::kLarge, 2 * n);
    stat.Down(PoolKind::kSmall, n);
    n += scale;
  });
  stats.num_alloc_retries = n + 1;
  stats.num_ooms = n + 2;
  stats.num_device_alloc = n + 3;
  stats.num_device_free = n + 4;
  return stats;
}

TEST(StatTest, PeakFollowsTheHighestCurrent) {
  Stat stat;
  stat.Up(5);
  stat.Down(3);
  stat.Up(2);
  EXPECT_EQ(stat.current, 4u);
  EXPECT_EQ(stat.peak, 5u);
  EXPECT_EQ(stat.allocated, 7u);
  EXPECT_EQ(stat.freed, 3u);
  stat.Up(2);
  EXPECT_EQ(stat.peak, 6u);
}

TEST(PoolStatTest, CountsTheWholeAndThePool) {
  PoolStat stat;
  stat.Up(PoolKind::kSmall, 5);
  stat.Up(PoolKind::kLarge, 7);
  stat.Down(PoolKind::kLarge, 2);
  EXPECT_EQ(stat.all.current, 10u);
  EXPECT_EQ(stat.all.peak, 12u);
  EXPECT_EQ(stat.pool[static_cast<int>(PoolKind::kSmall)].current, 5u);
  EXPECT_EQ(stat.pool[static_cast<int>(PoolKind::kLarge)].current, 5u);
  EXPECT_EQ(stat.pool[static_cast<int>(PoolKind::kLarge)].freed, 2u);
}

TEST(MemoryStatsTest, ForEachVisitsEveryQuantityInOrder) {
  std::vector<std::string> names;
  const MemoryStats stats;
  stats.ForEach([&](const char* name, const PoolStat&) { names.push_back(name); });
  EXPECT_EQ(names, kQuantities);
}

TEST(MemoryStatsTest, NamesBelongToTheirFields) {
  MemoryStats stats;
  const std::vector<const PoolStat*> fields = {
      &stats.allocation,      &stats.segment,        &stats.active,       &stats.inactive_split,
      &stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.inactive_split_bytes,
      &stats.requested_bytes};
  std::vector<const PoolStat*> visited;
  stats.ForEach([&](const char*, PoolStat& stat) { visited.push_back(&stat); });
  EXPECT_EQ(visited, fields);
}

TEST(MemoryStatsTest, ResetPeaksLowersEveryPeakAndNothingElse) {
  MemoryStats stats = Sample(3);
  const MemoryStats before = stats;
  stats.ResetPeaks();
  std::vector<const PoolStat*> old;
  before.ForEach([&](const char*, const PoolStat& stat) { old.push_back(&stat); });
  size_t i = 0;
  stats.ForEach([&](const char* name, PoolStat& stat) {
    SCOPED_TRACE(name);
    const PoolStat& was = *old[i++];
    EXPECT_LT(stat.all.peak, was.all.peak) << "the sample has a peak above current";
    for (const auto& [now, then] :
         {std::pair(stat.all, was.all), std::pair(stat.pool[0], was.pool[0]), std::pair(stat.pool[1], was.pool[1])}) {
      EXPECT_EQ(now.peak, then.current);
      EXPECT_EQ(now.current, then.current);
      EXPECT_EQ(now.allocated, then.allocated);
      EXPECT_EQ(now.freed, then.freed);
    }
  });
  EXPECT_EQ(stats.num_ooms, before.num_ooms);
}

TEST(MemoryStatsTest, AddAddsEveryFigure) {
  MemoryStats sum = Sample(3);
  sum.Add(Sample(100));
  std::map<std::string, int64_t> a;
  std::map<std::string, int64_t> b;
  for (const auto& [key, value] : FlatMemoryStats(Sample(3))) a[key] = value;
  for (const auto& [key, value] : FlatMemoryStats(Sample(100))) b[key] = value;
  for (const auto& [key, value] : FlatMemoryStats(sum)) {
    // The sum of two heaps without a max_split_size has none either.
    EXPECT_EQ(value, key == "max_split_size" ? -1 : a.at(key) + b.at(key)) << key;
  }
}

TEST(MemoryStatsTest, FlatNamesArePyTorchs) {
  std::vector<std::string> expected = {"num_alloc_retries", "num_device_alloc",   "num_device_free",     "num_ooms",
                                       "max_split_size",    "num_oom_rejections", "num_sync_all_streams"};
  for (const std::string oversize : {"oversize_allocations", "oversize_segments"}) {
    for (const char* figure : {".current", ".peak", ".allocated", ".freed"}) expected.push_back(oversize + figure);
  }
  for (const std::string& quantity : kQuantities) {
    for (const char* pool : {".all", ".small_pool", ".large_pool"}) {
      for (const char* figure : {".current", ".peak", ".allocated", ".freed"}) {
        expected.push_back(quantity + pool + figure);
      }
    }
  }
  std::sort(expected.begin(), expected.end());
  std::vector<std::string> names;
  for (const auto& [name, value] : FlatMemoryStats(MemoryStats())) names.push_back(name);
  EXPECT_EQ(names, expected);
  EXPECT_EQ(names.size(), 123u);
}

TEST(MemoryStatsTest, FlatValuesStandUnderTheirNames) {
  MemoryStats stats;
  stats.reserved_bytes.Up(PoolKind::kSmall, 100);
  stats.reserved_bytes.Up(PoolKind::kLarge, 1000);
  stats.reserved_bytes.Down(PoolKind::kLarge, 10);
  stats.num_ooms = 7;
  stats.num_device_free = 8;
  std::map<std::string, int64_t> flat;
  for (const auto& [name, value] : FlatMemoryStats(stats)) flat[name] = value;
  EXPECT_EQ(flat["reserved_bytes.all.current"], 1090);
  EXPECT_EQ(flat["reserved_bytes.all.peak"], 1100);
  EXPECT_EQ(flat["reserved_bytes.small_pool.current"], 100);
  EXPECT_EQ(flat["reserved_bytes.large_pool.current"], 990);
  EXPECT_EQ(flat["reserved_bytes.large_pool.allocated"], 1000);
  EXPECT_EQ(flat["reserved_bytes.large_pool.freed"], 10);
  EXPECT_EQ(flat["num_ooms"], 7);
  EXPECT_EQ(flat["num_device_free"], 8);
  EXPECT_EQ(flat["num_alloc_retries"], 0);
  EXPECT_EQ(flat["max_split_size"], -1);
  stats.max_split_bytes = 20 << 20;
  stats.oversize_segments.Up(3);
  for (const auto& [name, value] : FlatMemoryStats(stats)) flat[name] = value;
  EXPECT_EQ(flat["max_split_size"], 20 << 20);
  EXPECT_EQ(flat["oversize_segments.current"], 3);
}

TEST(FragmentationRatioTest, IsThePartThatIsReservedInVain) {
  EXPECT_DOUBLE_EQ(FragmentationRatio(0, 0), 0.0);
  EXPECT_DOUBLE_EQ(FragmentationRatio(0, 100), 1.0);
  EXPECT_DOUBLE_EQ(FragmentationRatio(25, 100), 0.75);
  EXPECT_DOUBLE_EQ(FragmentationRatio(100, 100), 0.0);
  // The figures may come from different moments.
  EXPECT_DOUBLE_EQ(FragmentationRatio(120, 100), 0.0);
}

}  // namespace
}  // namespace vrambroker
