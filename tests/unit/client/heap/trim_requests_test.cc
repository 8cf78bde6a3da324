// SPDX-License-Identifier: Apache-2.0
#include "client/heap/trim_requests.h"

#include <gtest/gtest.h>

#include <limits>
#include <thread>
#include <vector>

#include "allocator/base/bytes.h"
#include "tests/support/status_macros.h"

namespace vrambroker::client_internal {
namespace {

constexpr uint64_t kAll = std::numeric_limits<uint64_t>::max();
constexpr absl::Duration kSoon = absl::Milliseconds(1);

class TrimRequestsTest : public testing::Test {
 protected:
  static Deadline InAnHour() { return DeadlineAfter(absl::Hours(1)); }

  // Returns the ids of the ended questions.
  std::vector<uint64_t> Ended(Deadline now = std::chrono::steady_clock::now()) {
    std::vector<uint64_t> ids;
    for (const TrimRequests::Question& question : trims_.TakeEnded(now)) {
      ids.push_back(question.id);
      released_ = question.released_bytes;
    }
    return ids;
  }

  std::atomic<int> changes_{0};
  TrimRequests trims_{[this] { ++changes_; }};
  uint64_t released_ = 0;  // released bytes of the last question named by Ended()
};

TEST_F(TrimRequestsTest, WithoutAnApplicationThatAnswersNothingIsTaken) {
  EXPECT_FALSE(trims_.Add({.id = 1, .wanted_bytes = 1, .deadline = InAnHour()}));
  EXPECT_TRUE(absl::IsCancelled(trims_.Wait(absl::InfiniteDuration()).status()));
  EXPECT_FALSE(trims_.NextDeadline().has_value());
}

TEST_F(TrimRequestsTest, AQuestionIsTakenOnceAndEndsWhenTheApplicationSaysSo) {
  trims_.Serve(true);
  ASSERT_TRUE(trims_.Add({.id = 7, .device = 1, .wanted_bytes = 10, .deadline = InAnHour()}));
  ASSERT_OK_AND_ASSIGN(const TrimRequest request, trims_.Wait(absl::ZeroDuration()));
  EXPECT_EQ(request.device, 1);
  EXPECT_EQ(request.bytes, 10u);
  EXPECT_GT(request.time, absl::Minutes(59));
  EXPECT_TRUE(absl::IsDeadlineExceeded(trims_.Wait(kSoon).status()));
  trims_.Returned(1, 4);
  trims_.Returned(0, 100);  // bytes of another device
  EXPECT_EQ(Ended(), std::vector<uint64_t>());
  EXPECT_OK(trims_.End(request.number));
  EXPECT_EQ(Ended(), std::vector<uint64_t>{7});
  EXPECT_EQ(released_, 4u);
  EXPECT_EQ(Ended(), std::vector<uint64_t>());
  EXPECT_OK(trims_.End(request.number));
  EXPECT_TRUE(absl::IsInvalidArgument(trims_.End(request.number + 1)));
  EXPECT_TRUE(absl::IsInvalidArgument(trims_.End(0)));
}

TEST_F(TrimRequestsTest, ItEndsAsSoonAsEnoughHasComeBack) {
  trims_.Serve(true);
  ASSERT_TRUE(trims_.Add({.id = 1, .device = 0, .wanted_bytes = 10, .released_bytes = 3, .deadline = InAnHour()}));
  ASSERT_TRUE(trims_.Add({.id = 2, .device = 0, .wanted_bytes = 10, .deadline = InAnHour()}));
  const int before = changes_;
  trims_.Returned(0, 12);  // 7 bytes for the first question, 5 bytes for the second question
  EXPECT_GT(changes_, before);
  EXPECT_EQ(Ended(), std::vector<uint64_t>{1});
  EXPECT_EQ(released_, 10u);
  ASSERT_OK_AND_ASSIGN(const TrimRequest rest, trims_.Wait(absl::ZeroDuration()));
  EXPECT_EQ(rest.bytes, 5u);
}

TEST_F(TrimRequestsTest, WhatIsThereIsTakenTogether) {
  trims_.Serve(true);
  ASSERT_TRUE(trims_.Add({.id = 1, .device = 0, .wanted_bytes = 10, .deadline = InAnHour()}));
  ASSERT_TRUE(trims_.Add({.id = 2, .device = 0, .wanted_bytes = kAll, .deadline = DeadlineAfter(absl::Minutes(1))}));
  ASSERT_OK_AND_ASSIGN(const TrimRequest same, trims_.Wait(absl::ZeroDuration()));
  EXPECT_EQ(same.bytes, kAll);
  EXPECT_EQ(same.device, 0);
  EXPECT_LE(same.time, absl::Minutes(1));
  ASSERT_TRUE(trims_.Add({.id = 3, .device = 0, .wanted_bytes = 1, .deadline = DeadlineAfter(absl::Minutes(1))}));
  ASSERT_TRUE(trims_.Add({.id = 4, .device = 1, .wanted_bytes = 1, .deadline = InAnHour()}));
  ASSERT_OK_AND_ASSIGN(const TrimRequest different, trims_.Wait(absl::ZeroDuration()));
  EXPECT_EQ(different.device, -1);
  EXPECT_LE(different.time, absl::Minutes(1)) << "the first of the deadlines";
  EXPECT_OK(trims_.End(same.number));
  EXPECT_EQ(Ended(), (std::vector<uint64_t>{1, 2}));
}

TEST_F(TrimRequestsTest, ItEndsInTimeWhateverTheApplicationDoes) {
  trims_.Serve(true);
  const Deadline deadline = InAnHour();
  ASSERT_TRUE(trims_.Add({.id = 1, .wanted_bytes = 10, .deadline = deadline}));
  EXPECT_EQ(trims_.NextDeadline(), deadline);
  EXPECT_EQ(Ended(deadline - std::chrono::milliseconds(1)), std::vector<uint64_t>());
  EXPECT_EQ(Ended(deadline), std::vector<uint64_t>{1});
  EXPECT_TRUE(absl::IsDeadlineExceeded(trims_.Wait(kSoon).status())) << "it is too late for it";
  EXPECT_FALSE(trims_.NextDeadline().has_value());
}

TEST_F(TrimRequestsTest, WhoStopsLeavesNobodyWaiting) {
  trims_.Serve(true);
  std::thread waiting([&] { EXPECT_TRUE(absl::IsCancelled(trims_.Wait(absl::InfiniteDuration()).status())); });
  trims_.Serve(false);
  waiting.join();
  trims_.Serve(true);
  ASSERT_TRUE(trims_.Add({.id = 1, .wanted_bytes = 10, .deadline = InAnHour()}));
  trims_.Serve(false);
  EXPECT_EQ(Ended(), std::vector<uint64_t>{1});
}

TEST_F(TrimRequestsTest, AWaitEndsWhenSomethingComes) {
  trims_.Serve(true);
  std::thread asking([&] { trims_.Add({.id = 1, .wanted_bytes = 10, .deadline = InAnHour()}); });
  EXPECT_OK(trims_.Wait(absl::InfiniteDuration()).status());
  asking.join();
}

}  // namespace
}  // namespace vrambroker::client_internal
