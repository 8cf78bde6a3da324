// SPDX-License-Identifier: Apache-2.0
#include "server/reset_guard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>

namespace vrambroker {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

constexpr SteadyTime kAttack = SteadyTime(seconds(1000));
constexpr uint64_t kBound = StreamConduct::kMaxResets;

TEST(StreamConductTest, WhoGivesUpCallsNowAndThenMayStay) {
  StreamConduct conduct(100);
  StreamCounts counts;
  for (int i = 0; i < 100; ++i) {
    counts.started += 1000;
    counts.completed += 500;
    counts.reset += 500;
    EXPECT_TRUE(conduct.Judge(counts, kAttack).ok()) << i;
  }
  counts.started += kBound;
  counts.reset += kBound;
  EXPECT_TRUE(conduct.Judge(counts, kAttack).ok()) << "all at once, when the program ends";
}

TEST(StreamConductTest, MoreResetsThanCompletedStreamsAreAnAttack) {
  StreamConduct conduct(100);
  EXPECT_TRUE(conduct.Judge({.started = kBound, .completed = 0, .reset = kBound}, kAttack).ok());
  EXPECT_TRUE(conduct.Judge({.started = kBound + 20, .completed = 10, .reset = kBound + 10}, kAttack).ok());
  const absl::Status status = conduct.Judge({.started = kBound + 21, .completed = 10, .reset = kBound + 11}, kAttack);
  EXPECT_TRUE(absl::IsResourceExhausted(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("it reset 1011 streams and completed 10"));
}

TEST(StreamConductTest, CompletedStreamsAreNotSavedUp) {
  StreamConduct conduct(100);
  EXPECT_TRUE(conduct.Judge({.started = 1'000'000, .completed = 1'000'000, .reset = 0}, kAttack).ok());
  EXPECT_FALSE(
      conduct.Judge({.started = 1'000'000 + kBound + 1, .completed = 1'000'000, .reset = kBound + 1}, kAttack).ok());
}

TEST(StreamConductTest, ResetsNowAndThenAreForgiven) {
  StreamConduct conduct(100);
  StreamCounts counts;
  for (int i = 0; i < 10'000; ++i) {  // each gives up a call every five seconds
    ++counts.started;
    ++counts.reset;
    EXPECT_TRUE(conduct.Judge(counts, kAttack + i * seconds(5)).ok());
  }
  counts.started += kBound + 1;
  counts.reset += kBound + 1;
  EXPECT_FALSE(conduct.Judge(counts, kAttack + 10'000 * seconds(5)).ok()) << "all at once";
}

TEST(StreamConductTest, OpenStreamsAreBounded) {
  StreamConduct conduct(100);
  EXPECT_TRUE(conduct.Judge({.started = 100, .completed = 0, .reset = 0}, kAttack).ok());
  EXPECT_TRUE(conduct.Judge({.started = 110, .completed = 11, .reset = 0}, kAttack).ok());
  EXPECT_TRUE(conduct.Judge({.started = 110, .completed = 112, .reset = 0}, kAttack).ok())
      << "figures of different moments";
  EXPECT_FALSE(conduct.Judge({.started = 301, .completed = 100, .reset = 100}, kAttack).ok());
}

TEST(BannedTest, AProcessForAWhile) {
  Banned banned;
  EXPECT_TRUE(banned.Check(7, 1, kAttack).ok());
  banned.Add(7, 1, kAttack);
  EXPECT_FALSE(banned.Check(7, 1, kAttack + Banned::kTime - seconds(1)).ok());
  EXPECT_TRUE(banned.Check(8, 1, kAttack).ok());
  EXPECT_TRUE(banned.Check(7, 2, kAttack).ok()) << "the number belongs to another process now";
  EXPECT_TRUE(banned.Check(7, 1, kAttack + Banned::kTime).ok());
}

TEST(BannedTest, AUserWhoseProcessesKeepAttacking) {
  Banned banned;
  for (size_t i = 0; i < Banned::kMaxProcesses; ++i) {
    EXPECT_TRUE(banned.Check(1000, 1, kAttack).ok()) << i;
    banned.Add(static_cast<pid_t>(i + 1), 1, kAttack);
  }
  EXPECT_FALSE(banned.Check(1000, 1, kAttack).ok());
  EXPECT_TRUE(banned.Check(1000, 2, kAttack).ok()) << "another user";
  EXPECT_TRUE(banned.Check(1000, 1, kAttack + Banned::kTime).ok());
}

}  // namespace
}  // namespace vrambroker
