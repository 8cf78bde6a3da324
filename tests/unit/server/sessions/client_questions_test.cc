// SPDX-License-Identifier: Apache-2.0
#include "server/sessions/client_questions.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

namespace vrambroker {
namespace {

using std::chrono::milliseconds;
constexpr std::chrono::seconds kLong(60);

absl::Status Nothing(ClientAnswer&) {
  return absl::OkStatus();
}

TEST(ClientQuestionsTest, AnAnswerInPartsIsPutTogether) {
  ClientQuestions questions;
  const absl::StatusOr<ClientAnswer> answer = questions.Ask(
      [&](uint64_t id) {
        for (int part = 0; part < 3; ++part) {
          questions.Receive(id, 0, part < 2, [](ClientAnswer& so_far) {
            ++so_far.released_bytes;
            return absl::OkStatus();
          });
        }
        questions.Receive(id, 0, false, [](ClientAnswer& so_far) {
          so_far.released_bytes = 100;  // comes too late
          return absl::OkStatus();
        });
      },
      kLong);
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_EQ(answer->released_bytes, 3u);
}

TEST(ClientQuestionsTest, SilenceEndsAQuestion) {
  ClientQuestions questions;
  EXPECT_TRUE(absl::IsDeadlineExceeded(questions.Ask([](uint64_t) {}, milliseconds(10)).status()));
  uint64_t late = 0;
  EXPECT_FALSE(questions.Ask([&](uint64_t id) { late = id; }, milliseconds(1)).ok());
  questions.Receive(late, 0, false, Nothing);  // no caller waits: the answer has no effect
  questions.Receive(12345, 0, false, Nothing);
}

TEST(ClientQuestionsTest, AnAnswerDropByDropEndsSomeTime) {
  ClientQuestions questions;
  std::atomic<bool> over{false};
  std::thread client;
  const absl::StatusOr<ClientAnswer> answer = questions.Ask(
      [&](uint64_t id) {
        client = std::thread([&, id] {
          while (!over) {
            questions.Receive(id, 1, true, Nothing);
            std::this_thread::sleep_for(milliseconds(1));
          }
        });
      },
      milliseconds(20));
  over = true;
  client.join();
  EXPECT_TRUE(absl::IsDeadlineExceeded(answer.status())) << answer.status();
}

TEST(ClientQuestionsTest, EachPartRenewsThePatience) {
  using Clock = std::chrono::steady_clock;
  constexpr milliseconds kPatience(2000);
  absl::StatusOr<ClientAnswer> answer = absl::UnknownError("not asked");
  // The test runs once more if the machine was so slow that a pause was longer than the patience.
  Clock::duration longest = kPatience;
  for (int run = 0; run < 10 && !answer.ok() && longest >= kPatience; ++run) {
    ClientQuestions questions;
    std::thread client;
    longest = {};
    answer = questions.Ask(
        [&](uint64_t id) {
          client = std::thread([&, id, last = Clock::now()]() mutable {
            for (int part = 0; part < 5; ++part) {
              std::this_thread::sleep_for(milliseconds(500));
              const Clock::time_point sent = Clock::now();
              questions.Receive(id, 1, part < 4, Nothing);
              longest = std::max(longest, Clock::now() - last);
              last = sent;
            }
          });
        },
        kPatience);
    client.join();
  }
  EXPECT_TRUE(answer.ok()) << answer.status() << ": all parts together took longer than the patience, each did not";
}

TEST(ClientQuestionsTest, EmptyPartsRenewNothing) {
  ClientQuestions questions;
  std::atomic<bool> stop{false};
  std::thread client;
  const absl::StatusOr<ClientAnswer> answer = questions.Ask(
      [&](uint64_t id) {
        client = std::thread([&, id] {
          while (!stop) questions.Receive(id, 0, /*more=*/true, Nothing);
        });
      },
      milliseconds(50));
  stop = true;
  client.join();
  EXPECT_TRUE(absl::IsDeadlineExceeded(answer.status())) << answer.status();
}

TEST(ClientQuestionsTest, WhatIsWrongWithAnAnswerEndsIt) {
  ClientQuestions questions;
  const auto wrong = [](ClientAnswer&) { return absl::InvalidArgumentError("state: no block state"); };
  EXPECT_TRUE(absl::IsInvalidArgument(
      questions.Ask([&](uint64_t id) { questions.Receive(id, 0, true, wrong); }, kLong).status()));
  const auto huge = [&](uint64_t id) {
    questions.Receive(id, ClientQuestions::kMaxSnapshotItems, true, Nothing);
    questions.Receive(id, 1, true, Nothing);
  };
  EXPECT_TRUE(absl::IsResourceExhausted(questions.Ask(huge, kLong).status()));
}

// A client that reconnects at once knows no earlier question.
TEST(ClientQuestionsTest, OpeningAgainDoesNotReviveAQuestion) {
  ClientQuestions questions;
  const absl::StatusOr<ClientAnswer> answer = questions.Ask(
      [&](uint64_t) {
        EXPECT_TRUE(questions.Close().empty());
        questions.Open();
      },
      std::chrono::hours(1));
  EXPECT_TRUE(absl::IsAborted(answer.status())) << answer.status();
  EXPECT_TRUE(questions.Ask([&](uint64_t id) { questions.Receive(id, 0, false, Nothing); }, kLong).ok());
}

TEST(ClientQuestionsTest, ClosingEndsQuestionsUntilItIsOpenAgain) {
  ClientQuestions questions;
  std::thread closer;
  EXPECT_TRUE(absl::IsAborted(
      questions.Ask([&](uint64_t) { closer = std::thread([&] { (void)questions.Close(); }); }, kLong).status()));
  closer.join();
  EXPECT_TRUE(absl::IsAborted(questions.Ask([](uint64_t) { FAIL() << "asked"; }, kLong).status()));
  questions.Open();
  EXPECT_TRUE(questions.Ask([&](uint64_t id) { questions.Receive(id, 0, false, Nothing); }, kLong).ok());
}

}  // namespace
}  // namespace vrambroker
