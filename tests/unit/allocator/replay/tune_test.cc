// SPDX-License-Identifier: Apache-2.0
#include "allocator/replay/tune.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"

namespace vrambroker {
namespace {

Trace MakeTrace(const std::string& text) {
  absl::StatusOr<Trace> trace = ParseTraceText(text);
  EXPECT_EQ(trace.status(), absl::OkStatus());
  return *std::move(trace);
}

// Random allocations of 2 MB to 32 MB, and frees, which fragment the heap.
Trace Fragmenting() {
  std::mt19937_64 random(7);
  std::string text;
  int next = 0;
  std::vector<int> live;
  for (int i = 0; i < 600; ++i) {
    if (live.size() < 40 || random() % 2 == 0) {
      absl::StrAppend(&text, "a ", next, " ", 2'000'000 + random() % 30'000'000, " 0\n");
      live.push_back(next++);
    } else {
      std::swap(live[random() % live.size()], live.back());
      absl::StrAppend(&text, "f ", live.back(), "\n");
      live.pop_back();
    }
  }
  return MakeTrace(text);
}

TuneResult Quietly(const Trace& trace, const ReplayConfig& config) {
  return Tune(trace, config, {}, 2, [](size_t, size_t) {});
}

TEST(TuneGridTest, EverySettingIsAllowedAndDifferent) {
  for (const bool limited : {false, true}) {
    ReplayConfig config;
    if (limited) config.fraction = 0.5;
    std::set<std::string> seen;
    bool collects = false;
    for (const AllocatorOptions& options : TuneGrid(config)) {
      const std::string text = FormatAllocConf(options);
      const absl::StatusOr<AllocConf> parsed = ParseAllocConf(text);
      ASSERT_EQ(parsed.status(), absl::OkStatus()) << text;
      EXPECT_EQ(parsed->options, options) << text;
      EXPECT_NE(options, config.options) << "the baseline is not tried twice";
      EXPECT_TRUE(seen.insert(text).second) << text;
      collects = collects || options.garbage_collection_threshold > 0;
    }
    EXPECT_EQ(collects, limited) << "without a limit nothing is collected";
  }
}

TEST(SmallestDeviceTest, OneStepLessIsTooSmall) {
  const Trace trace = Fragmenting();
  for (const char* settings : {"", "max_split_size_mb:20", "large_segment_size_mb:64"}) {
    ReplayConfig config{.options = ParseAllocConf(settings)->options};
    const std::optional<uint64_t> smallest = SmallestDevice(trace, config);
    ASSERT_TRUE(smallest.has_value());
    config.device_bytes = *smallest;
    EXPECT_EQ(SummarizeReplay(trace, config).ooms, 0u);
    config.device_bytes -= 2_MiB;
    EXPECT_GT(SummarizeReplay(trace, config).ooms, 0u);
  }
}

TEST(SmallestDeviceTest, KnownTraces) {
  EXPECT_EQ(SmallestDevice(MakeTrace(""), {}), 0u);
  EXPECT_EQ(SmallestDevice(MakeTrace("a 1 512 0"), {}), 2_MiB);
  EXPECT_EQ(SmallestDevice(MakeTrace("a 1 2000000 0"), {}), 20_MiB) << "the segment, not the block";
  // The heap gives back cached segments that are in the way.
  EXPECT_EQ(SmallestDevice(MakeTrace("a 1 31457280 0\nf 1\na 2 41943040 0"), {}), 40_MiB);
  EXPECT_EQ(SmallestDevice(MakeTrace("a 1 31457280 0"), {.device_bytes = 20_MiB}), std::nullopt);
  // The fraction allows half of the device.
  EXPECT_EQ(SmallestDevice(MakeTrace("a 1 31457280 0"), {.device_bytes = 1_GiB, .fraction = 0.5}), 60_MiB);
}

TEST(TuneTest, TheBestAreBetterAndInOrder) {
  const Trace trace = Fragmenting();
  const TuneResult result = Quietly(trace, {});
  EXPECT_EQ(result.tried, TuneGrid({}).size());
  ASSERT_FALSE(result.by_peak_reserved.empty());
  ASSERT_FALSE(result.by_device_calls.empty());
  uint64_t last = 0;
  for (const TuneCandidate& candidate : result.by_peak_reserved) {
    EXPECT_LT(candidate.summary.peak_reserved_bytes, result.baseline.summary.peak_reserved_bytes);
    EXPECT_GE(candidate.summary.peak_reserved_bytes, last);
    last = candidate.summary.peak_reserved_bytes;
    const ReplaySummary again = SummarizeReplay(trace, {.options = candidate.options});
    EXPECT_EQ(again.peak_reserved_bytes, candidate.summary.peak_reserved_bytes) << "the figures are its own";
  }
  last = 0;
  for (const TuneCandidate& candidate : result.by_device_calls) {
    EXPECT_LT(candidate.summary.device_calls, result.baseline.summary.device_calls);
    EXPECT_GE(candidate.summary.device_calls, last);
    last = candidate.summary.device_calls;
  }
}

TEST(TuneTest, SmallerDevicesAreReallyTried) {
  const Trace trace = Fragmenting();
  const TuneResult result = Quietly(trace, {});
  ASSERT_EQ(result.smaller_devices.size(), 3u);
  ASSERT_EQ(result.baseline.ooms_on_smaller.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    const uint64_t bytes = result.smaller_devices[i];
    EXPECT_LT(bytes, result.baseline.summary.peak_reserved_bytes);
    EXPECT_EQ(result.baseline.ooms_on_smaller[i], SummarizeReplay(trace, {.device_bytes = bytes}).ooms);
    EXPECT_EQ(result.baseline.ooms_on_smaller[i] == 0, bytes >= *result.baseline.smallest_device);
  }
}

TEST(TuneTest, SmallerDevicesAreDistinctAndNotEmpty) {
  const auto devices = [](const std::string& text) { return Quietly(MakeTrace(text), {}).smaller_devices; };
  EXPECT_THAT(devices("a 0 512 0\n"), ::testing::IsEmpty()) << "one segment of 2 MiB";
  EXPECT_THAT(devices("a 0 1048576 0\na 1 1048576 0\na 2 1048576 0\n"), ::testing::ElementsAre(2_MiB)) << "two of them";
  EXPECT_THAT(devices("a 0 20971520 0\n"), ::testing::ElementsAre(18_MiB, 16_MiB));
}

TEST(TuneTest, RunningOutIsNeverBetter) {
  const Trace trace = Fragmenting();
  const ReplayConfig config{.device_bytes = *SmallestDevice(trace, {})};
  const TuneResult result = Quietly(trace, config);
  EXPECT_EQ(result.baseline.summary.ooms, 0u);
  for (const auto* list : {&result.by_peak_reserved, &result.by_device_calls}) {
    for (const TuneCandidate& candidate : *list) EXPECT_EQ(candidate.summary.ooms, 0u);
  }
}

// The compared runs have the same memory.
TEST(TuneTest, TheDefaultKeepsTheMemoryFraction) {
  const Trace trace = Fragmenting();
  AllocatorOptions options;
  options.per_process_memory_fraction = 0.5;
  AllocatorOptions other = options;
  other.max_split_bytes = 64_MiB;
  const uint64_t device_bytes = *SmallestDevice(trace, {});
  const ReplaySummary expected = SummarizeReplay(trace, {.options = options, .device_bytes = device_bytes});
  ASSERT_GT(expected.ooms, 0u) << "half of the device is too little";

  const TuneResult result = Quietly(trace, {.options = other, .device_bytes = device_bytes});
  ASSERT_TRUE(result.pytorch_default.has_value());
  EXPECT_EQ(result.pytorch_default->options, options);
  EXPECT_EQ(result.pytorch_default->summary.ooms, expected.ooms);
  EXPECT_EQ(result.pytorch_default->summary.peak_reserved_bytes, expected.peak_reserved_bytes);

  EXPECT_FALSE(Quietly(trace, {.options = options, .device_bytes = device_bytes}).pytorch_default.has_value())
      << "it is the baseline";
}

TEST(TuneTest, ProgressEndsAtItsTotal) {
  size_t last = 0;
  size_t total = 0;
  Tune(MakeTrace("a 1 512 0\nf 1"), {}, {}, 3, [&](size_t done, size_t all) {
    EXPECT_GE(done, last);
    EXPECT_LE(done, all);
    last = done;
    total = all;
  });
  EXPECT_EQ(last, total);
  EXPECT_GT(total, TuneGrid({}).size());
}

TEST(TuneTest, EndsWhenTheTimeIsOver) {
  const Trace trace = MakeTrace("a 1 512 0\nf 1");
  std::atomic<int> left{10};
  const TuneResult some = Tune(
      trace, {}, {}, 2, [](size_t, size_t) {}, [&] { return left-- > 0; });
  EXPECT_EQ(some.tried, 10u);
  EXPECT_FALSE(some.is_complete);
  const TuneResult all = Tune(trace, {}, {}, 2, [](size_t, size_t) {});
  EXPECT_EQ(all.tried, TuneGrid({}).size());
  EXPECT_TRUE(all.is_complete);
}

TEST(TuneTest, NothingToGain) {
  const TuneResult result = Quietly(MakeTrace("a 1 512 0\nf 1"), {});
  EXPECT_TRUE(result.by_peak_reserved.empty());
  EXPECT_TRUE(result.by_device_calls.empty());
}

}  // namespace
}  // namespace vrambroker
