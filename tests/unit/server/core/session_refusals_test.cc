// SPDX-License-Identifier: Apache-2.0
#include "server/core/session_refusals.h"

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

TEST(SessionRefusalsTest, TheOutcomeOfALeaseExplainsOneRefusal) {
  SessionRefusals refusals(/*devices=*/2);
  refusals.SetLeaseOutcome(0, {.waited = std::chrono::milliseconds(40), .asked = {{SessionId{3}, true}}});
  EXPECT_EQ(refusals.TakeLeaseOutcome(1).waited.count(), 0);
  const GrowthOutcome outcome = refusals.TakeLeaseOutcome(0);
  EXPECT_EQ(outcome.waited.count(), 40);
  EXPECT_EQ(outcome.asked.size(), 1u);
  EXPECT_EQ(refusals.TakeLeaseOutcome(0).waited.count(), 0);
}

TEST(SessionRefusalsTest, RecordingTakesATwentiethOfTheTime) {
  using std::chrono::milliseconds;
  SteadyTime now{std::chrono::hours(1)};
  SessionRefusals refusals(/*devices=*/1);
  ASSERT_TRUE(refusals.StartRecording(now));
  EXPECT_FALSE(refusals.StartRecording(now)) << "one at a time";
  refusals.EndRecording(now, {});
  // A program that tries again and again: those in a row, then one a second.
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
  // One that takes long: 20 times as long until there is room for the next.
  now += std::chrono::minutes(1);
  ASSERT_TRUE(refusals.StartRecording(now));
  refusals.EndRecording(now, std::chrono::seconds(2));
  EXPECT_FALSE(refusals.StartRecording(now + std::chrono::seconds(30)));
  EXPECT_TRUE(refusals.StartRecording(now + std::chrono::seconds(30) + milliseconds(1)));
}

}  // namespace
}  // namespace vrambroker
