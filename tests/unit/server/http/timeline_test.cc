// SPDX-License-Identifier: Apache-2.0
#include "server/http/timeline.h"

#include <gtest/gtest.h>

#include <vector>

namespace vrambroker {
namespace {

using Time = std::chrono::system_clock::time_point;
const Time kStart = Time() + std::chrono::hours(500'000);

void Add(Timeline& timeline, Time time, uint64_t bytes) {
  timeline.Add({{.time = time, .allocated_bytes = bytes}, {.time = time, .allocated_bytes = 2 * bytes}});
}

TEST(TimelineTest, KeepsTheLastQuarterOfAnHour) {
  Timeline timeline(2);
  EXPECT_TRUE(timeline.Get(0).empty());
  for (uint64_t i = 0; i < 1000; ++i) Add(timeline, kStart + i * Timeline::kPeriod, i);
  for (size_t device = 0; device < 2; ++device) {
    const std::vector<TimelineSample> samples = timeline.Get(device);
    ASSERT_EQ(samples.size(), Timeline::kMaxSamples);
    EXPECT_EQ(samples.back().allocated_bytes, 999 * (device + 1));
    EXPECT_EQ(samples.front().allocated_bytes, 550 * (device + 1));
    for (size_t i = 1; i < samples.size(); ++i) EXPECT_EQ(samples[i].time - samples[i - 1].time, Timeline::kPeriod);
  }
  EXPECT_TRUE(timeline.Get(2).empty());
}

TEST(TimelineTest, WhatIsOldGoesAlsoWhenTheMachineSlept) {
  Timeline timeline(2);
  for (uint64_t i = 0; i < 10; ++i) Add(timeline, kStart + i * Timeline::kPeriod, i);
  Add(timeline, kStart + std::chrono::seconds(10) + Timeline::kLength, 10);
  const std::vector<TimelineSample> samples = timeline.Get(0);
  ASSERT_EQ(samples.size(), 6u);  // those of the seconds 10 to 18, and the new one
  EXPECT_EQ(samples.front().allocated_bytes, 5u);
  Add(timeline, kStart + std::chrono::hours(8), 11);
  EXPECT_EQ(timeline.Get(0).size(), 1u);
}

TEST(TimelineTest, AClockThatIsSetBackDrawsNoLineBack) {
  Timeline timeline(2);
  for (uint64_t i = 0; i < 10; ++i) Add(timeline, kStart + i * Timeline::kPeriod, i);
  Add(timeline, kStart + 4 * Timeline::kPeriod, 100);
  const std::vector<TimelineSample> samples = timeline.Get(0);
  ASSERT_EQ(samples.size(), 5u);
  EXPECT_EQ(samples[3].allocated_bytes, 3u);
  EXPECT_EQ(samples[4].allocated_bytes, 100u);
}

}  // namespace
}  // namespace vrambroker
