// SPDX-License-Identifier: Apache-2.0
#include "server/http/timeline.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <utility>
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
  ASSERT_EQ(samples.size(), 6u);  // samples of seconds 10 to 18, and the new sample
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

// Returns a view of sessions on two devices. `sessions`: each session's id and its reserved bytes by device.
BrokerView ViewOfSessions(const std::vector<std::pair<uint64_t, std::vector<uint64_t>>>& sessions) {
  BrokerView view;
  view.devices.resize(2);
  for (const auto& [id, reserved] : sessions) {
    SessionView& session = view.sessions.emplace_back();
    session.id = SessionId{id};
    for (const uint64_t bytes : reserved) {
      SessionDeviceView& held = session.devices.emplace_back();
      held.account.reserved_bytes = bytes;
      held.stats.allocated_bytes.all.current = bytes / 2;
    }
  }
  return view;
}

TEST(TimelineTest, ASessionHasACoarserHistoryAndItsNewestSample) {
  Timeline timeline(2);
  for (uint64_t i = 0; i < 1000; ++i) {
    timeline.Add(ViewOfSessions({{5, {2 * i, i < 997 ? 0 : 8u}}}), kStart + i * Timeline::kPeriod);
    if (i == 5) {
      EXPECT_EQ(timeline.GetOfSession(SessionId{5}, 0).back().reserved_bytes, 10u) << "between two steps";
    }
  }
  const std::vector<SessionSample> samples = timeline.GetOfSession(SessionId{5}, 0);
  EXPECT_EQ(samples.size(), Timeline::kMaxSessionSamples);
  EXPECT_LE(samples.size() * sizeof(SessionSample), size_t{4096});
  EXPECT_EQ(samples.back().time, kStart + 999 * Timeline::kPeriod);
  EXPECT_EQ(samples.back().reserved_bytes, 1998u);
  EXPECT_EQ(samples.back().allocated_bytes, 999u);
  for (size_t i = 1; i + 1 < samples.size(); ++i) {
    EXPECT_EQ(samples[i].time - samples[i - 1].time, Timeline::kSessionPeriod);
  }
  EXPECT_EQ(timeline.GetOfSession(SessionId{5}, 1).size(), 2u) << "from when it first held memory of the device";
  EXPECT_EQ(timeline.Get(0).size(), Timeline::kMaxSamples);
}

TEST(TimelineTest, HistoriesOfSessionsGoWithThemAndAreBounded) {
  Timeline timeline(2);
  timeline.Add(ViewOfSessions({{1, {4, 0}}, {2, {4, 4}}}), kStart);
  EXPECT_EQ(timeline.GetOfSession(SessionId{1}, 0).size(), 1u);
  EXPECT_TRUE(timeline.GetOfSession(SessionId{1}, 1).empty());
  timeline.Add(ViewOfSessions({{2, {0, 4}}}), kStart + Timeline::kPeriod);
  EXPECT_TRUE(timeline.GetOfSession(SessionId{1}, 0).empty());
  EXPECT_EQ(timeline.GetOfSession(SessionId{2}, 0).size(), 2u) << "also while it holds nothing";

  std::vector<std::pair<uint64_t, std::vector<uint64_t>>> many;
  for (uint64_t id = 1; id <= Timeline::kMaxHistories + 1; ++id) many.emplace_back(id, std::vector<uint64_t>{4, 0});
  timeline.Add(ViewOfSessions(many), kStart + 2 * Timeline::kPeriod);
  size_t histories = 0;
  for (const auto& [id, reserved] : many) {
    for (const size_t device : {size_t{0}, size_t{1}})
      histories += timeline.GetOfSession(SessionId{id}, device).empty() ? 0 : 1;
  }
  EXPECT_EQ(histories, Timeline::kMaxHistories);
}

}  // namespace
}  // namespace vrambroker
