// SPDX-License-Identifier: Apache-2.0
//
// Tests of a pass over the growth queue: the cost of a pass, and the sessions that a pass keeps busy.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "allocator/base/bytes.h"
#include "server/queue/request_queue.h"
#include "tests/support/fake_device.h"

namespace vrambroker {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Makes passes only on the test's command.
class PassTest : public ::testing::Test {
 protected:
  static constexpr SessionId kHolder{1};
  static constexpr SessionId kOther{2};
  static constexpr SessionId kFirstWaiter{100};
  static constexpr uint64_t kCapacity = 64_GiB;

  PassTest() {
    pool_.SetOnCapacityFreed([this] { queue_.OnCapacityFreed(); });
    for (const SessionId session : {kHolder, kOther}) Open(session);
  }
  ~PassTest() override { pool_.SetOnCapacityFreed(nullptr); }

  void Open(SessionId session, uid_t uid = 1, uint64_t user_limit = AccountState::kNoBound) {
    pool_.OpenAccount(session,
                      {.pid = 1, .uid = uid, .tenant = "d", .limit_bytes = kCapacity, .user_limit_bytes = user_limit});
  }
  SegmentId Hold(SessionId session, uint64_t bytes) { return pool_.Lease(session, bytes).value(); }
  void Return(SessionId session, SegmentId segment) { ASSERT_TRUE(pool_.Return(session, {segment}).ok()); }
  void Add(SessionId session, uint64_t bytes, milliseconds wait = std::chrono::hours(1)) {
    queue_.Add({.session = session,
                .user = 1,
                .bytes = bytes,
                .deadline = now_ + wait,
                .done = [this, session](const absl::Status& status, const WaitRecord&) {
                  (status.ok() ? granted_ : refused_).push_back(session);
                }});
  }
  // Adds `count` sessions, each with a waiting request for `bytes`.
  void AddMany(uint64_t count, uint64_t bytes) {
    for (uint64_t i = 0; i < count; ++i) {
      Open(Waiter(i));
      Add(Waiter(i), bytes);
    }
    RunAll();
  }
  static SessionId Waiter(uint64_t i) { return SessionId{Raw(kFirstWaiter) + i}; }
  void RunOne() {
    const std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    task();
  }
  void RunAll() {
    while (!tasks_.empty()) RunOne();
  }
  void Pass(milliseconds time) {
    now_ += time;
    queue_.OnTimer();
    RunAll();
  }
  uint64_t Visits() { return queue_.GetStats().visits; }

  SteadyTime now_{std::chrono::hours(1)};
  std::atomic<uint64_t> next_segment_ = 1;
  std::vector<ReclaimCandidate> candidates_;
  std::vector<ReclaimVictim> asked_;
  std::vector<std::function<void()>> answers_;
  std::deque<std::function<void()>> tasks_;
  std::vector<SessionId> granted_;
  std::vector<SessionId> refused_;
  SegmentPool pool_{
      std::make_unique<FakeDevice>(kCapacity), kCapacity, &next_segment_, {.clock = [this] { return now_; }}};
  RequestQueue queue_{&pool_,
                      {},
                      {.clock = [this] { return now_; },
                       .candidates = [this] { return candidates_; },
                       .ask =
                           [this](const ReclaimVictim& victim, std::function<void()> answered) {
                             asked_.push_back(victim);
                             answers_.push_back(std::move(answered));
                           },
                       .run = [this](std::function<void()> task) { tasks_.push_back(std::move(task)); }}};
};

TEST_F(PassTest, NoCallServesTheQueue) {
  const SegmentId held = Hold(kHolder, kCapacity - 4_MiB);
  Add(kOther, 8_MiB);
  queue_.OnTimer();
  EXPECT_EQ(tasks_.size(), 1u) << "one is in line, whatever happens";
  RunAll();
  Return(kHolder, held);
  EXPECT_THAT(granted_, IsEmpty());
  EXPECT_EQ(tasks_.size(), 1u);
  EXPECT_FALSE(queue_.NextWake().has_value()) << "the pass says when it is done";
  RunAll();
  EXPECT_THAT(granted_, ElementsAre(kOther));
}

TEST_F(PassTest, APassServesSoManyAndLeavesTheOthersToTheNext) {
  const SegmentId held = Hold(kHolder, kCapacity - 2_MiB);
  constexpr uint64_t kRequests = 3 * RequestQueue::kMostVisits;
  AddMany(kRequests, 4_MiB);
  Return(kHolder, held);
  for (size_t passes = 0; granted_.size() < kRequests; ++passes) {
    ASSERT_FALSE(tasks_.empty()) << granted_.size();
    const size_t before = granted_.size();
    RunOne();
    EXPECT_LE(granted_.size() - before, size_t{RequestQueue::kMostVisits});
    ASSERT_LT(passes, 100u);
  }
  for (uint64_t i = 0; i < kRequests; ++i) EXPECT_EQ(granted_[i], Waiter(i)) << "in their order";
}

TEST_F(PassTest, WhatDoesNotFitIsNotLookedAt) {
  Hold(kHolder, kCapacity - 64_MiB);
  AddMany(4000, 128_MiB);
  Pass(milliseconds(1));
  const uint64_t before = Visits();
  for (int i = 0; i < 1000; ++i) {
    Return(kOther, Hold(kOther, 2_MiB));
    RunAll();
  }
  EXPECT_LT(Visits() - before, 10u);
  EXPECT_EQ(queue_.size(), 4000u);
}

TEST_F(PassTest, WhatIsHeldBackIsNotLookedAt) {
  const SegmentId held = Hold(kHolder, kCapacity - 64_MiB);
  candidates_ = {{.session = kHolder, .reserved_bytes = kCapacity - 64_MiB, .idle_bytes = kCapacity - 64_MiB}};
  Add(kOther, 1_GiB);
  RunAll();
  Pass(RequestQueue::kHoldAfter);
  ASSERT_GT(pool_.GetStats().held_back_bytes, 0u);
  AddMany(1000, 2_MiB);
  EXPECT_THAT(granted_, IsEmpty());
  const uint64_t before = Visits();
  for (int i = 0; i < 1000; ++i) {
    queue_.OnCapacityFreed();
    RunAll();
  }
  EXPECT_LT(Visits() - before, 10u);
  Return(kHolder, held);
  RunAll();
  EXPECT_EQ(granted_.size(), 1001u);
  EXPECT_EQ(granted_.front(), kOther);
  for (const auto& answered : std::exchange(answers_, {})) answered();
  RunAll();
}

// A request may not wait, but an owed answer may serve the request: the queue looks at the request after the answer.
TEST_F(PassTest, WhatAnAnswerMayServeIsNotLookedAtBeforeTheAnswer) {
  Hold(kHolder, kCapacity - 4_MiB);
  candidates_ = {{.session = kHolder, .reserved_bytes = kCapacity, .idle_bytes = kCapacity}};
  Open(Waiter(0));
  Add(Waiter(0), 64_MiB);
  RunAll();
  ASSERT_EQ(answers_.size(), 1u);
  candidates_.clear();
  Add(kOther, 8_MiB, milliseconds(0));
  RunAll();
  EXPECT_THAT(refused_, IsEmpty());
  const uint64_t before = Visits();
  for (int i = 0; i < 100; ++i) {
    queue_.OnCapacityFreed();
    RunAll();
  }
  EXPECT_LT(Visits() - before, 10u);
  std::exchange(answers_, {})[0]();
  RunAll();
  EXPECT_THAT(refused_, ElementsAre(kOther));
}

TEST_F(PassTest, ASessionIsAskedOnceForAllThatAskTogether) {
  for (uint64_t i = 0; i < 10; ++i) {
    const SessionId session{10 + i};
    Open(session);
    Hold(session, 6_GiB);
    candidates_.push_back({.session = session, .reserved_bytes = 6_GiB});
  }
  Open(Waiter(0));
  Add(Waiter(0), 16_GiB);
  RunAll();
  EXPECT_EQ(asked_.size(), 10u);
  for (uint64_t i = 0; i < 50; ++i) Add(Waiter(0), 8_GiB);
  RunAll();
  Pass(RequestQueue::kEverybodyPeriod);
  EXPECT_EQ(asked_.size(), 20u);
  EXPECT_EQ(asked_.back().bytes, 50 * 4_GiB);
  for (const auto& answered : std::exchange(answers_, {})) answered();
  RunAll();
  EXPECT_EQ(queue_.size(), 51u);
}

TEST_F(PassTest, ALateAnswerDoesNotEndTheNextQuestion) {
  Hold(kHolder, kCapacity);
  candidates_ = {{.session = kHolder, .reserved_bytes = kCapacity, .idle_bytes = kCapacity}};
  Add(kOther, 8_MiB, milliseconds(0));
  RunAll();
  ASSERT_EQ(asked_.size(), 1u);
  candidates_ = {{.session = Waiter(0), .reserved_bytes = 1_GiB}};  // reports no idle memory
  now_ += milliseconds(250);
  queue_.OnTimer();
  RunOne();  // the queue is about to ask all sessions
  std::exchange(answers_, {})[0]();
  RunAll();
  ASSERT_EQ(asked_.size(), 2u);
  EXPECT_EQ(asked_[1].session, Waiter(0));
  EXPECT_THAT(refused_, IsEmpty());
  std::exchange(answers_, {})[0]();
  RunAll();
  EXPECT_THAT(refused_, ElementsAre(kOther));
}

TEST_F(PassTest, WhoseTurnWasNotReachedAsksWhenOthersHadWhatThereWas) {
  const SegmentId held = Hold(kHolder, 8_MiB);
  Hold(kHolder, kCapacity - 8_MiB);
  Open(Waiter(0));
  candidates_ = {{.session = kHolder, .reserved_bytes = kCapacity - 8_MiB, .idle_bytes = kCapacity - 8_MiB}};
  Add(kOther, 8_MiB, milliseconds(0));
  Add(Waiter(0), 8_MiB, milliseconds(0));
  RunOne();
  Return(kHolder, held);  // enough for a single request
  RunOne();               // asks for both requests before a request is served
  RunAll();
  EXPECT_THAT(granted_, ElementsAre(kOther));
  EXPECT_THAT(refused_, IsEmpty());
  EXPECT_THAT(asked_, ElementsAre(ReclaimVictim{kHolder, 8_MiB}));
  for (int i = 0; i < 2; ++i) {  // by the holder's figures, then with all sessions
    for (const auto& answered : std::exchange(answers_, {})) answered();
    RunAll();
  }
  EXPECT_THAT(refused_, ElementsAre(Waiter(0)));
}

TEST_F(PassTest, WhatMayForbidAllIsLookedAtAndKeepsNobodyWaiting) {
  Hold(kHolder, kCapacity - 64_MiB);
  AddMany(1000, 128_MiB);
  ASSERT_TRUE(pool_.SetGuarantee(kOther, 2_MiB).ok());
  queue_.OnTimer();
  bool had_its_turn = false;
  queue_.AfterPass([&] { had_its_turn = true; });
  EXPECT_FALSE(had_its_turn) << "those who wait come first";
  RunOne();
  EXPECT_TRUE(had_its_turn) << "although not all have been looked at";
  EXPECT_FALSE(tasks_.empty());
  const uint64_t before = Visits();
  RunAll();
  EXPECT_GE(Visits() - before, 1000u - RequestQueue::kMostVisits);
}

TEST_F(PassTest, WhatAGuaranteeAllowsIsServedAlthoughNothingElseIsFree) {
  ASSERT_TRUE(pool_.SetGuarantee(kOther, 20_MiB).ok());
  const SegmentId own = Hold(kOther, 16_MiB);
  Hold(kHolder, kCapacity - 20_MiB);
  Add(kOther, 8_MiB);
  RunAll();
  EXPECT_THAT(granted_, IsEmpty());
  Return(kOther, own);
  RunAll();
  EXPECT_THAT(granted_, ElementsAre(kOther));
}

TEST_F(PassTest, WhatAUserMayNotHaveYetKeepsNobodyFromItsTurn) {
  constexpr SessionId kOfUser{3};
  constexpr SessionId kOfUserToo{4};
  Open(kOfUser, /*uid=*/7, /*user_limit=*/16_MiB);
  Open(kOfUserToo, /*uid=*/7, /*user_limit=*/16_MiB);
  const SegmentId held = Hold(kOfUser, 12_MiB);
  const SegmentId all = Hold(kHolder, kCapacity - 12_MiB);
  Add(kOfUserToo, 8_MiB);
  Add(kOther, 8_MiB);
  RunAll();
  Return(kHolder, all);
  RunAll();
  EXPECT_THAT(granted_, ElementsAre(kOther));
  Return(kOfUser, held);
  RunAll();
  EXPECT_THAT(granted_, ElementsAre(kOther, kOfUserToo));
}

// Settling memory may become free between the attempt to grant the memory and the look for settling memory. The race is
// rare, so the test tries many times.
TEST_F(PassTest, WhatSettlesIsNeverMissed) {
  constexpr int kRounds = 20000;
  constexpr uint64_t kFirstGone = 1000;
  pool_.SetOnCapacityFreed(nullptr);  // tasks_ belongs to this thread
  std::atomic<int> settling = 0;      // rounds whose memory has come into quarantine
  std::atomic<int> checked = 0;
  std::thread checker([&] {
    for (int round = 1; round <= kRounds; ++round) {
      while (settling.load() < round) std::this_thread::yield();
      for (int delay = round % 512; delay > 0 && settling.load() > 0; --delay) continue;
      pool_.CheckQuarantine();
      checked.store(round);
    }
  });
  for (int round = 1; round <= kRounds; ++round) {
    const SessionId gone{kFirstGone + static_cast<uint64_t>(round)};
    Open(gone);
    const SegmentId held = Hold(gone, kCapacity);
    EXPECT_TRUE(pool_.RedeemTicket(std::get<FdTicket>(pool_.HandleFor(gone, held).value()), 1, 1).ok());
    pool_.CloseAccountOfGone(gone);
    settling.store(round);
    Add(kOther, kCapacity, milliseconds(0));
    RunAll();
    while (checked.load() < round) std::this_thread::yield();
    queue_.OnCapacityFreed();
    RunAll();
    pool_.ReleaseGrant(kOther, pool_.GetAccount(kOther)->reserved_bytes);
  }
  checker.join();
  EXPECT_EQ(refused_.size(), 0u);
  EXPECT_EQ(granted_.size(), size_t{kRounds});
}

}  // namespace
}  // namespace vrambroker
