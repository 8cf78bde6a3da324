// SPDX-License-Identifier: Apache-2.0
#include "server/base/rate_limit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>

namespace vrambroker {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

// Stands for any moment.
constexpr SteadyTime kStart = SteadyTime(seconds(1000));

TEST(TokenBucketTest, ABurstThenTheRate) {
  TokenBucket bucket(10, 3);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(bucket.Take(kStart)) << i;
  EXPECT_FALSE(bucket.Take(kStart));
  EXPECT_FALSE(bucket.Take(kStart + milliseconds(90)));
  EXPECT_TRUE(bucket.Take(kStart + milliseconds(101)));
  EXPECT_FALSE(bucket.Take(kStart + milliseconds(101)));
}

TEST(TokenBucketTest, HoldsNoMoreThanTheBurst) {
  TokenBucket bucket(10, 3);
  EXPECT_TRUE(bucket.IsFull(kStart));
  EXPECT_TRUE(bucket.Take(kStart));
  EXPECT_FALSE(bucket.IsFull(kStart));
  EXPECT_TRUE(bucket.IsFull(kStart + seconds(3600)));
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(bucket.Take(kStart + seconds(3600))) << i;
  EXPECT_FALSE(bucket.Take(kStart + seconds(3600)));
}

TEST(TokenBucketTest, SeveralAtATimeOrNone) {
  TokenBucket bucket(10, 5);
  EXPECT_TRUE(bucket.Take(kStart, 3));
  EXPECT_FALSE(bucket.Take(kStart, 3));
  EXPECT_TRUE(bucket.Take(kStart, 2)) << "a refusal costs nothing";
  EXPECT_FALSE(bucket.Take(kStart + milliseconds(499), 1000));
  EXPECT_TRUE(bucket.Take(kStart + milliseconds(501), 1000)) << "no more than there can ever be";
}

TEST(TokenBucketTest, TimeThatGoesBackwardsGivesNothing) {
  TokenBucket bucket(10, 1);
  EXPECT_TRUE(bucket.Take(kStart));
  EXPECT_FALSE(bucket.Take(kStart - seconds(10)));
  EXPECT_FALSE(bucket.Take(kStart)) << "the ten seconds do not count";
  EXPECT_TRUE(bucket.Take(kStart + milliseconds(101)));
}

TEST(TokenBucketTest, WhatIsOwedIsPaidFirst) {
  TokenBucket bucket(10, 2);
  bucket.Owe(kStart, 3);
  EXPECT_FALSE(bucket.Take(kStart + milliseconds(199)));
  EXPECT_TRUE(bucket.Take(kStart + milliseconds(201)));
  bucket.Owe(kStart + milliseconds(201), 1000);
  EXPECT_FALSE(bucket.Take(kStart + milliseconds(499)));
  EXPECT_TRUE(bucket.Take(kStart + milliseconds(502))) << "no more than a burst is owed";
}

TEST(CallRatesTest, ACallThatIsMadeAllTheSameCounts) {
  CallRates rates(5);
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(rates.Take(1, kStart).ok()) << i;
  EXPECT_FALSE(rates.Take(1, kStart).ok());
  rates.Owe(1, kStart);
  EXPECT_FALSE(rates.Take(1, kStart + milliseconds(201)).ok()) << "the one that is owed";
  EXPECT_TRUE(rates.Take(1, kStart + milliseconds(402)).ok());
}

TEST(CallRatesTest, EachUserHasItsOwn) {
  CallRates rates(5);
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(rates.Take(1, kStart).ok()) << i;
  const absl::Status refused = rates.Take(1, kStart);
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("uid 1 makes more calls"));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("max_calls_per_second_per_uid"));
  EXPECT_TRUE(rates.Take(2, kStart).ok()) << "somebody else";
  EXPECT_TRUE(rates.Take(1, kStart + milliseconds(201)).ok());
}

TEST(CallRatesTest, ACostlyCallCountsAsSeveral) {
  CallRates rates(5);
  EXPECT_TRUE(rates.Take(0, kStart, 8).ok()) << "root like everyone";
  EXPECT_FALSE(rates.Take(0, kStart, 8).ok());
  EXPECT_TRUE(rates.Take(0, kStart, 2).ok());
}

TEST(CallRatesTest, QuietUsersAreForgotten) {
  CallRates rates(5);
  SteadyTime now = kStart;
  for (uid_t uid = 0; uid < 100'000; ++uid) {
    ASSERT_TRUE(rates.Take(uid, now).ok());
    now += milliseconds(1);
  }
  // A user's bucket is full again after 200 ms.
  EXPECT_LE(rates.users(), 1000u);
  for (int i = 0; i < 8; ++i) EXPECT_TRUE(rates.Take(99'999, now).ok()) << i;
  for (uid_t uid = 200'000; uid < 200'500; ++uid) ASSERT_TRUE(rates.Take(uid, now).ok());
  EXPECT_TRUE(rates.Take(99'999, now).ok());
  EXPECT_FALSE(rates.Take(99'999, now).ok()) << "who has called lately is remembered";
}

}  // namespace
}  // namespace vrambroker
