// SPDX-License-Identifier: Apache-2.0
#include "server/sessions/session_refusals.h"

#include <gtest/gtest.h>

#include <chrono>

namespace vrambroker {
namespace {

TEST(SessionRefusalsTest, EachIsCountedByDeviceAndCause) {
  const SteadyTime now{std::chrono::hours(1)};
  SessionRefusals refusals(/*devices=*/2);
  refusals.Count(1, OomCause::kLimit, now);
  refusals.Count(1, OomCause::kLimit, now + std::chrono::seconds(1));
  EXPECT_EQ(refusals.GetCounts(1)[static_cast<size_t>(OomCause::kLimit)], 2u);
  EXPECT_EQ(refusals.GetCounts(1)[static_cast<size_t>(OomCause::kCapacity)], 0u);
  EXPECT_EQ(refusals.GetCounts(0), SessionRefusals::Counts{});
  EXPECT_EQ(refusals.TakeLastTime(0), std::nullopt);
  EXPECT_EQ(refusals.TakeLastTime(1), now + std::chrono::seconds(1));
  EXPECT_EQ(refusals.TakeLastTime(1), std::nullopt) << "taken once";
}

WaitRecord WaitedFor(int64_t time_ms) {
  return {.waited = std::chrono::milliseconds(time_ms)};
}

TEST(SessionRefusalsTest, WhatWasDoneForALeaseExplainsTheRefusalOfItsSize) {
  const SteadyTime now{std::chrono::hours(1)};
  SessionRefusals refusals(/*devices=*/2);
  const auto explained = [&](int device, uint64_t bytes) {
    return refusals.TakeLeaseOutcome(device, bytes, now).waited.count();
  };
  // Adds outcomes of two threads before the first thread has its outcome explained.
  refusals.AddLeaseOutcome(0, 100, now, WaitedFor(40));
  refusals.AddLeaseOutcome(0, 200, now, WaitedFor(50));
  refusals.AddLeaseOutcome(0, 200, now, WaitedFor(60));
  EXPECT_EQ(explained(1, 200), 0);
  EXPECT_EQ(explained(0, 300), 0);
  EXPECT_EQ(explained(0, 200), 50) << "the oldest";
  EXPECT_EQ(explained(0, 200), 60);
  EXPECT_EQ(explained(0, 200), 0) << "each explains one";
  EXPECT_EQ(explained(0, 100), 40);
}

TEST(SessionRefusalsTest, AnOutcomeThatWasNotExplainedAtOnceIsForgotten) {
  SteadyTime now{std::chrono::hours(1)};
  SessionRefusals refusals(/*devices=*/1);
  refusals.AddLeaseOutcome(0, 100, now, WaitedFor(40));
  now += SessionRefusals::kExplainedWithin;
  refusals.AddLeaseOutcome(0, 200, now, WaitedFor(50));
  now += std::chrono::milliseconds(1);
  EXPECT_EQ(refusals.TakeLeaseOutcome(0, 100, now).waited.count(), 0);
  EXPECT_EQ(refusals.TakeLeaseOutcome(0, 200, now).waited.count(), 50);
}

TEST(SessionRefusalsTest, TheOldestOutcomesMakeRoom) {
  const SteadyTime now{std::chrono::hours(1)};
  SessionRefusals refusals(/*devices=*/100);  // the number of devices changes nothing
  for (uint64_t bytes = 0; bytes <= SessionRefusals::kMaxLeaseOutcomes; ++bytes) {
    refusals.AddLeaseOutcome(0, bytes, now, {.asked = {{SessionId{3}, true}}});
  }
  EXPECT_TRUE(refusals.TakeLeaseOutcome(0, 0, now).asked.empty());
  for (uint64_t bytes = 1; bytes <= SessionRefusals::kMaxLeaseOutcomes; ++bytes) {
    EXPECT_EQ(refusals.TakeLeaseOutcome(0, bytes, now).asked.size(), 1u);
  }
}

TEST(SessionRefusalsTest, RecordingTakesATwentiethOfTheTime) {
  using std::chrono::milliseconds;
  SteadyTime now{std::chrono::hours(1)};
  SessionRefusals refusals(/*devices=*/1);
  ASSERT_TRUE(refusals.StartRecording(now));
  EXPECT_FALSE(refusals.StartRecording(now)) << "one at a time";
  refusals.EndRecording(now, {});
  // A program that retries without pause gets its first recordings in a row, later recordings once a second.
  int in_a_row = 0;
  while (in_a_row < 100 && refusals.StartRecording(now)) {
    now += milliseconds(1);
    refusals.EndRecording(now, milliseconds(1));
    ++in_a_row;
  }
  EXPECT_EQ(in_a_row, 11);
  EXPECT_FALSE(refusals.StartRecording(now + milliseconds(900)));
  now += milliseconds(1000);
  ASSERT_TRUE(refusals.StartRecording(now));
  refusals.EndRecording(now, milliseconds(1));
  EXPECT_FALSE(refusals.StartRecording(now));
  // A long recording delays the next recording for 20 times as long.
  now += std::chrono::minutes(1);
  ASSERT_TRUE(refusals.StartRecording(now));
  refusals.EndRecording(now, std::chrono::seconds(2));
  EXPECT_FALSE(refusals.StartRecording(now + std::chrono::seconds(30)));
  EXPECT_TRUE(refusals.StartRecording(now + std::chrono::seconds(30) + milliseconds(1)));
}

}  // namespace
}  // namespace vrambroker
