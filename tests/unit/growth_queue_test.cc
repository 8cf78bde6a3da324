// SPDX-License-Identifier: Apache-2.0
#include "server/growth_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "allocator/bytes.h"
#include "server/out_of_memory.h"
#include "tests/support/fake_device.h"

namespace vrambroker {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr SessionId kA{1};
constexpr SessionId kB{2};
constexpr SessionId kC{3};
constexpr uint64_t kCapacity = 64_MiB;
constexpr milliseconds kTimeout(2000);

class GrowthQueueTest : public ::testing::Test {
 protected:
  GrowthQueueTest() : pool_(std::make_unique<FakeDevice>(kCapacity), kCapacity, &next_segment_) {
    queue_ = std::make_unique<GrowthQueue>(
        &pool_, kTimeout,
        GrowthQueueHooks{.clock = [this] { return now_; },
                         .candidates = [this] { return candidates_; },
                         .ask =
                             [this](const ReclaimVictim& victim, std::function<void()> answered) {
                               asked_.push_back(victim);
                               answers_.push_back(std::move(answered));
                             }});
    pool_.OnRoom([this] { queue_->OnRoom(); });
    for (const SessionId session : {kA, kB, kC}) {
      pool_.OpenAccount(session, {.pid = 1, .domain = "d", .limit_bytes = kCapacity});
    }
  }

  // Has the session hold `bytes`.
  SegmentId Hold(SessionId session, uint64_t bytes) { return pool_.Lease(session, bytes).value(); }
  void Return(SessionId session, SegmentId segment) { ASSERT_TRUE(pool_.TakeBack(session, {segment}).ok()); }
  void Add(const std::string& name, SessionId session, uint64_t bytes, milliseconds wait = milliseconds(0),
           uint64_t key = 0, bool guarantee = false) {
    queue_->Add({.session = session,
                 .bytes = bytes,
                 .guarantee = guarantee,
                 .deadline = now_ + wait,
                 .cancel_key = key,
                 .done = [this, name](const absl::Status& status, const GrowthOutcome& outcome) {
                   EXPECT_FALSE(ended_.contains(name)) << name << " was told twice";
                   ended_[name] = status;
                   outcomes_[name] = outcome;
                   if (status.ok()) granted_.push_back(name);
                 }});
  }
  void Pass(milliseconds time) {
    now_ += time;
    queue_->OnTimer();
  }
  void AnswerAll() {
    for (const auto& answer : std::exchange(answers_, {})) answer();
  }
  std::optional<OomCause> Refusal(const std::string& name) {
    return ended_.contains(name) ? SegmentRefusalCause(ended_[name]) : std::nullopt;
  }

  SteadyTime now_{std::chrono::hours(1)};
  std::atomic<uint64_t> next_segment_ = 1;
  SegmentPool pool_;
  std::vector<ReclaimCandidate> candidates_;
  std::vector<ReclaimVictim> asked_;
  std::vector<std::function<void()>> answers_;
  std::map<std::string, absl::Status> ended_;
  std::map<std::string, GrowthOutcome> outcomes_;
  std::vector<std::string> granted_;
  std::unique_ptr<GrowthQueue> queue_;
};

TEST_F(GrowthQueueTest, GrantsAtOnceWhatFits) {
  Add("x", kA, 10_MiB);
  EXPECT_THAT(granted_, ElementsAre("x"));
  EXPECT_EQ(pool_.GetAccount(kA)->reserved_bytes, 10_MiB) << "charged for the lease to come";
  EXPECT_EQ(queue_->size(), 0u);
}

TEST_F(GrowthQueueTest, RefusesAtOnceWhenNobodyCanBeAskedAndItMayNotWait) {
  Hold(kB, 60_MiB);
  Add("x", kA, 10_MiB);
  EXPECT_EQ(Refusal("x"), OomCause::kCapacity);
  EXPECT_EQ(queue_->size(), 0u);
}

TEST_F(GrowthQueueTest, AsksForWhatIsMissingAndGrantsWhenItCameBack) {
  const SegmentId idle = Hold(kB, 60_MiB);
  candidates_ = {{.session = kB, .reserved_bytes = 60_MiB, .idle_bytes = 60_MiB}};
  Add("x", kA, 10_MiB);
  EXPECT_THAT(asked_, ElementsAre(ReclaimVictim{kB, 6_MiB}));
  EXPECT_THAT(granted_, IsEmpty());
  now_ += milliseconds(30);
  Return(kB, idle);
  EXPECT_THAT(granted_, ElementsAre("x")) << "as soon as it is there, before the answer";
  EXPECT_EQ(outcomes_["x"].waited, milliseconds(30));
  AnswerAll();
}

TEST_F(GrowthQueueTest, AsksEverybodyWhenThoseChosenHadTooLittle) {
  Hold(kB, 60_MiB);
  candidates_ = {{.session = kB, .reserved_bytes = 40_MiB, .idle_bytes = 2_MiB},
                 {.session = kC, .reserved_bytes = 20_MiB, .guarantee_bytes = 16_MiB}};
  Add("x", kA, 10_MiB);
  EXPECT_THAT(asked_, ElementsAre(ReclaimVictim{kB, 2_MiB}));
  AnswerAll();
  EXPECT_THAT(asked_, ElementsAre(ReclaimVictim{kB, 2_MiB}, ReclaimVictim{kB, 6_MiB}, ReclaimVictim{kC, 4_MiB}))
      << "nobody below its guarantee";
  EXPECT_FALSE(ended_.contains("x"));
  AnswerAll();
  EXPECT_EQ(Refusal("x"), OomCause::kCapacity);
  EXPECT_THAT(outcomes_["x"].asked, ElementsAre(std::pair(kB, true), std::pair(kC, true)));
}

TEST_F(GrowthQueueTest, OneThatIsSilentDoesNotKeepTheOthersFromBeingAsked) {
  Hold(kB, 40_MiB);
  const SegmentId idle = Hold(kC, 20_MiB);
  candidates_ = {{.session = kB, .reserved_bytes = 40_MiB, .idle_bytes = 40_MiB},
                 {.session = kC, .reserved_bytes = 20_MiB, .idle_bytes = 20_MiB}};
  Add("x", kA, 10_MiB);
  EXPECT_THAT(asked_, ElementsAre(ReclaimVictim{kB, 6_MiB}));
  candidates_.erase(candidates_.begin());  // the broker leaves silent ones out
  Pass(kTimeout / 8);
  EXPECT_THAT(asked_, ElementsAre(ReclaimVictim{kB, 6_MiB}, ReclaimVictim{kC, 6_MiB}));
  Return(kC, idle);
  EXPECT_THAT(granted_, ElementsAre("x"));
  AnswerAll();
}

TEST_F(GrowthQueueTest, AsksEverybodyTenTimesASecondAtMost) {
  Hold(kB, 60_MiB);
  candidates_ = {{.session = kB, .reserved_bytes = 60_MiB}};
  Add("first", kA, 10_MiB);
  EXPECT_EQ(asked_.size(), 1u);
  AnswerAll();
  EXPECT_EQ(Refusal("first"), OomCause::kCapacity);
  Add("second", kA, 10_MiB);
  Add("third", kA, 10_MiB);
  EXPECT_EQ(asked_.size(), 1u);
  Pass(milliseconds(99));
  EXPECT_EQ(asked_.size(), 1u);
  EXPECT_EQ(*queue_->NextWake(), now_ + milliseconds(1));
  Pass(milliseconds(1));
  EXPECT_EQ(asked_.size(), 3u) << "together";
  AnswerAll();
  EXPECT_EQ(Refusal("second"), OomCause::kCapacity);
  EXPECT_EQ(Refusal("third"), OomCause::kCapacity);
}

TEST_F(GrowthQueueTest, WhatGuaranteesForbidForEverIsRefusedAtOnce) {
  ASSERT_TRUE(pool_.SetGuarantee(kB, 40_MiB).ok());
  Hold(kC, 10_MiB);
  Add("never", kA, 30_MiB, milliseconds(60000));
  EXPECT_EQ(Refusal("never"), OomCause::kCapacity);
  Add("perhaps", kA, 20_MiB, milliseconds(60000));
  EXPECT_FALSE(ended_.contains("perhaps"));
  queue_->Cancel(kA, absl::CancelledError("end"));
}

TEST_F(GrowthQueueTest, WaitsForTheMemoryOfAProcessThatHasJustDied) {
  const SegmentId segment = Hold(kB, 60_MiB);
  // Whoever has fetched its descriptor may have it mapped.
  const Ticket ticket = std::get<Ticket>(pool_.HandleFor(kB, segment).value());
  ASSERT_TRUE(pool_.RedeemTicket(ticket, 1, 0).ok());
  pool_.CloseAccountOfGone(kB);
  EXPECT_EQ(pool_.GetFigures().quarantined_bytes, 60_MiB);
  Add("x", kA, 10_MiB);
  EXPECT_THAT(ended_, IsEmpty());
  pool_.CheckQuarantine();
  EXPECT_THAT(granted_, ElementsAre("x"));
}

TEST_F(GrowthQueueTest, ARetryMayServeARequestOtherwise) {
  Hold(kB, 60_MiB);
  bool freed = false;
  queue_->Add({.session = kA,
               .bytes = 10_MiB,
               .deadline = now_ + milliseconds(5000),
               .retry = [&] { return freed; },
               .done = [this](const absl::Status& status, const GrowthOutcome&) { ended_["x"] = status; }});
  queue_->Retry(kB);
  queue_->Retry(kA);
  EXPECT_THAT(ended_, IsEmpty());
  freed = true;
  queue_->Retry(kA);
  EXPECT_TRUE(absl::IsCancelled(ended_["x"]));
  EXPECT_EQ(queue_->size(), 0u);
}

TEST_F(GrowthQueueTest, WhoDoesNotAnswerIsNotWaitedForForever) {
  Hold(kB, 60_MiB);
  candidates_ = {{.session = kB, .reserved_bytes = 60_MiB, .idle_bytes = 60_MiB}};
  Add("x", kA, 10_MiB);
  EXPECT_EQ(*queue_->NextWake(), now_ + kTimeout / 8);
  candidates_.clear();
  Hold(kC, 2_MiB);
  candidates_ = {{.session = kC, .reserved_bytes = 2_MiB}};
  Pass(kTimeout / 8);
  EXPECT_EQ(asked_.back().session, kC);
  Pass(milliseconds(1999) - kTimeout / 8);
  EXPECT_FALSE(ended_.contains("x"));
  EXPECT_EQ(*queue_->NextWake(), now_ + milliseconds(1));
  Pass(milliseconds(1));
  EXPECT_EQ(Refusal("x"), OomCause::kCapacity);
  EXPECT_THAT(outcomes_["x"].asked, ElementsAre(std::pair(kB, false), std::pair(kC, false)));
  AnswerAll();  // late
}

TEST_F(GrowthQueueTest, WhoIsSlowIsWaitedForAlthoughNobodyElseCanBeAsked) {
  const SegmentId idle = Hold(kB, 60_MiB);
  candidates_ = {{.session = kB, .reserved_bytes = 60_MiB, .idle_bytes = 60_MiB}};
  Add("x", kA, 10_MiB);
  Add("too much", kC, 62_MiB);
  candidates_.clear();  // the broker leaves silent ones out
  Pass(kTimeout / 8);
  Pass(kTimeout / 2);
  EXPECT_THAT(ended_, IsEmpty());
  Return(kB, idle);
  EXPECT_THAT(granted_, ElementsAre("x"));
  AnswerAll();
  EXPECT_EQ(Refusal("too much"), OomCause::kCapacity) << "at the last answer, not when time is up";
}

TEST_F(GrowthQueueTest, WaitsUntilItsDeadline) {
  const SegmentId held = Hold(kB, 60_MiB);
  Add("in time", kA, 10_MiB, milliseconds(5000));
  Add("too long", kA, 30_MiB, milliseconds(3000));
  Pass(milliseconds(2999));
  EXPECT_THAT(ended_, IsEmpty());
  EXPECT_EQ(queue_->GetWaiting().size(), 2u);
  Pass(milliseconds(1));
  EXPECT_EQ(Refusal("too long"), OomCause::kCapacity);
  Return(kB, held);
  EXPECT_THAT(granted_, ElementsAre("in time"));
  EXPECT_FALSE(queue_->NextWake().has_value());
}

TEST_F(GrowthQueueTest, TheFirstThatWaitsAsksAgain) {
  Hold(kB, 60_MiB);
  Add("x", kA, 10_MiB, milliseconds(5000));
  EXPECT_THAT(asked_, IsEmpty());
  candidates_ = {{.session = kB, .reserved_bytes = 60_MiB, .idle_bytes = 60_MiB}};
  Pass(GrowthQueue::kAskPeriod - milliseconds(1));
  EXPECT_THAT(asked_, IsEmpty());
  Pass(milliseconds(1));
  EXPECT_THAT(asked_, ElementsAre(ReclaimVictim{kB, 6_MiB}));
}

TEST_F(GrowthQueueTest, ServesByPriorityThenByArrival) {
  const SegmentId held = Hold(kB, 60_MiB);
  ASSERT_TRUE(pool_.SetPriority(kC, 5).ok());
  Add("first", kA, 8_MiB, milliseconds(5000));
  Add("second", kA, 8_MiB, milliseconds(5000));
  Add("important", kC, 8_MiB, milliseconds(5000));
  Return(kB, held);
  EXPECT_THAT(granted_, ElementsAre("important", "first", "second"));
}

TEST_F(GrowthQueueTest, ANewPriorityIsANewPlace) {
  const SegmentId held = Hold(kB, 60_MiB);
  Add("a", kA, 8_MiB, milliseconds(5000));
  Add("c", kC, 8_MiB, milliseconds(5000));
  ASSERT_TRUE(pool_.SetPriority(kC, 5).ok());
  queue_->PriorityIs(kC, 5);
  EXPECT_EQ(queue_->GetWaiting()[0].session, kC);
  Return(kB, held);
  EXPECT_THAT(granted_, ElementsAre("c", "a"));
}

TEST_F(GrowthQueueTest, SmallerOnesOvertakeForASecondAndNoLonger) {
  Hold(kB, 50_MiB);
  Add("large", kA, 30_MiB, milliseconds(60000));
  Add("early", kC, 4_MiB, milliseconds(60000));
  EXPECT_THAT(granted_, ElementsAre("early"));
  EXPECT_TRUE(pool_.Lease(kC, 2_MiB).ok()) << "also past the queue";
  Pass(GrowthQueue::kMaxOvertaking);
  Add("late", kC, 2_MiB, milliseconds(60000));
  EXPECT_THAT(granted_, ElementsAre("early"));
  EXPECT_EQ(SegmentRefusalCause(pool_.Lease(kC, 2_MiB).status()), OomCause::kCapacity);
  ASSERT_TRUE(pool_.SetPriority(kC, 1).ok());
  EXPECT_TRUE(pool_.Lease(kC, 2_MiB).ok()) << "more important";
}

TEST_F(GrowthQueueTest, WhoIsServedHoldsNobodyBack) {
  const SegmentId held = Hold(kB, 50_MiB);
  Add("large", kA, 30_MiB, milliseconds(60000));
  Pass(GrowthQueue::kMaxOvertaking);
  EXPECT_FALSE(pool_.Lease(kC, 2_MiB).ok());
  Return(kB, held);
  EXPECT_THAT(granted_, ElementsAre("large"));
  EXPECT_TRUE(pool_.Lease(kC, 2_MiB).ok());
}

TEST_F(GrowthQueueTest, WhoGivesUpHoldsNobodyBack) {
  Hold(kB, 50_MiB);
  Add("large", kA, 30_MiB, milliseconds(60000));
  Pass(GrowthQueue::kMaxOvertaking);
  Add("small", kC, 2_MiB, milliseconds(60000));
  queue_->Cancel(kA, absl::AbortedError("it has ended"));
  EXPECT_TRUE(absl::IsAborted(ended_["large"]));
  EXPECT_THAT(granted_, ElementsAre("small"));
  EXPECT_TRUE(pool_.Lease(kC, 2_MiB).ok());
}

TEST_F(GrowthQueueTest, AGuaranteeIsNeverHeldBack) {
  ASSERT_TRUE(pool_.SetGuarantee(kC, 4_MiB).ok());
  Hold(kB, 50_MiB);
  Add("large", kA, 30_MiB, milliseconds(60000));
  Pass(GrowthQueue::kMaxOvertaking);
  EXPECT_TRUE(pool_.Lease(kC, 4_MiB).ok());
  EXPECT_FALSE(pool_.Lease(kC, 2_MiB).ok());
}

TEST_F(GrowthQueueTest, CancelsOneRequestByItsKey) {
  Hold(kB, 60_MiB);
  Add("one", kA, 10_MiB, milliseconds(5000), 1);
  Add("two", kA, 10_MiB, milliseconds(5000), 2);
  queue_->Cancel(kC, 2, absl::CancelledError("no"));
  EXPECT_THAT(ended_, IsEmpty()) << "another session's key";
  queue_->Cancel(kA, 2, absl::CancelledError("no"));
  EXPECT_TRUE(absl::IsCancelled(ended_["two"]));
  EXPECT_FALSE(ended_.contains("one"));
  queue_->Cancel(kA, absl::CancelledError("no"));
}

TEST_F(GrowthQueueTest, ALoweredLimitEndsTheWaiting) {
  Hold(kB, 60_MiB);
  Add("x", kA, 10_MiB, milliseconds(5000));
  ASSERT_TRUE(pool_.SetLimit(kA, 8_MiB).ok());
  EXPECT_EQ(Refusal("x"), OomCause::kLimit);
}

TEST_F(GrowthQueueTest, AGuaranteeIsRaisedWhenOthersHaveGivenWhatItTakes) {
  const SegmentId held = Hold(kB, 60_MiB);
  candidates_ = {{.session = kB, .reserved_bytes = 60_MiB, .idle_bytes = 60_MiB}};
  Add("guarantee", kA, 20_MiB, milliseconds(0), 0, /*guarantee=*/true);
  EXPECT_THAT(asked_, ElementsAre(ReclaimVictim{kB, 16_MiB}));
  EXPECT_EQ(pool_.GetAccount(kA)->guarantee_bytes, 0u);
  Return(kB, held);
  EXPECT_THAT(granted_, ElementsAre("guarantee"));
  EXPECT_EQ(pool_.GetAccount(kA)->guarantee_bytes, 20_MiB);
  EXPECT_EQ(pool_.GetAccount(kA)->reserved_bytes, 0u);
  AnswerAll();
}

TEST_F(GrowthQueueTest, ARequestOfASessionThatIsGoneEndsAtOnce) {
  pool_.CloseAccount(kA);
  Add("x", kA, 2_MiB, milliseconds(5000));
  EXPECT_TRUE(absl::IsAborted(ended_["x"]));
}

}  // namespace
}  // namespace vrambroker
