// SPDX-License-Identifier: Apache-2.0
#include "server/queue/request_queue.h"

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

#include "allocator/base/bytes.h"
#include "server/oom/out_of_memory.h"
#include "tests/support/fake_device.h"

namespace vrambroker {
namespace {

using std::chrono::milliseconds;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

class RequestQueueTest : public ::testing::Test {
 protected:
  static constexpr SessionId kA{1};
  static constexpr SessionId kB{2};
  static constexpr SessionId kC{3};
  static constexpr SessionId kD{4};
  static constexpr uint64_t kCapacity = 64_MiB;
  static constexpr milliseconds kTimeout{2000};
  static constexpr milliseconds kHoldBack{1000};
  static constexpr milliseconds kLook = kHoldBack / RequestQueue::kHoldLooks;

  RequestQueueTest() : RequestQueueTest(std::make_unique<FakeDevice>(kCapacity)) {}
  explicit RequestQueueTest(std::unique_ptr<FakeDevice> device)
      : device_(device->control()),
        pool_(std::move(device), kCapacity, &next_segment_, {.clock = [this] { return now_; }}) {
    queue_ = std::make_unique<RequestQueue>(
        &pool_, RequestQueueOptions{.reclaim_timeout = kTimeout, .hold_back_time = kHoldBack},
        RequestQueueHooks{.clock =
                              [this] {
                                if (const auto change = std::exchange(at_next_look_, nullptr)) change();
                                return now_;
                              },
                          .candidates = [this] { return candidates_; },
                          .ask =
                              [this](const ReclaimVictim& victim, std::function<void()> answered) {
                                asked_.push_back(victim);
                                answers_.push_back(std::move(answered));
                              }});
    pool_.SetOnCapacityFreed([this] { queue_->OnCapacityFreed(); });
    for (const SessionId session : {kA, kB, kC, kD}) {
      pool_.OpenAccount(session, {.pid = 1, .tenant = "d", .limit_bytes = kCapacity});
    }
  }

  // Leases `bytes` for the session.
  SegmentId Hold(SessionId session, uint64_t bytes) { return pool_.Lease(session, bytes).value(); }
  void Return(SessionId session, SegmentId segment) { ASSERT_TRUE(pool_.Return(session, {segment}).ok()); }
  void Add(const std::string& name, SessionId session, uint64_t bytes, milliseconds wait = milliseconds(0),
           uint64_t key = 0, bool guarantee = false) {
    queue_->Add({.session = session,
                 .user = Raw(session) == Raw(kD) ? uid_t{2} : uid_t{1},
                 .bytes = bytes,
                 .guarantee = guarantee,
                 .deadline = now_ + wait,
                 .cancel_key = key,
                 .done = [this, name](const absl::Status& status, const WaitRecord& outcome) {
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
  // Lets time pass while the session takes and gives `bytes` again and again.
  void Churn(SessionId session, uint64_t bytes, milliseconds time) {
    for (milliseconds passed(0); passed < time; passed += milliseconds(50)) {
      const SegmentId segment = Hold(session, bytes);
      Pass(milliseconds(50));
      Return(session, segment);
    }
  }
  // Has 30 MiB held back: kB holds 50 MiB of the device, reports the memory as idle, and does not answer.
  void HoldBackForALargeOne() {
    Hold(kB, 50_MiB);
    candidates_ = {{.session = kB, .reserved_bytes = 50_MiB, .idle_bytes = 50_MiB}};
    Add("large", kA, 30_MiB, milliseconds(60000));
    Pass(RequestQueue::kHoldAfter);
  }
  bool Fits(SessionId session, uint64_t bytes) {
    const absl::StatusOr<SegmentId> segment = pool_.Lease(session, bytes);
    if (segment.ok()) {
      Return(session, *segment);
    } else {
      EXPECT_EQ(SegmentRefusalCause(segment.status()), OomCause::kCapacity);
    }
    return segment.ok();
  }
  void AnswerAll() {
    for (const auto& answer : std::exchange(answers_, {})) answer();
  }
  std::optional<OomCause> Refusal(const std::string& name) {
    return ended_.contains(name) ? SegmentRefusalCause(ended_[name]) : std::nullopt;
  }

  SteadyTime now_{std::chrono::hours(1)};
  std::function<void()> at_next_look_;  // runs at a read of the queue's clock
  std::atomic<uint64_t> next_segment_ = 1;
  const std::shared_ptr<FakeDevice::Control> device_;
  SegmentPool pool_;
  std::vector<ReclaimCandidate> candidates_;
  std::vector<ReclaimVictim> asked_;
  std::vector<std::function<void()>> answers_;
  std::map<std::string, absl::Status> ended_;
  std::map<std::string, WaitRecord> outcomes_;
  std::vector<std::string> granted_;
  std::unique_ptr<RequestQueue> queue_;
};

TEST_F(RequestQueueTest, GrantsAtOnceWhatFits) {
  Add("x", kA, 10_MiB);
  EXPECT_THAT(granted_, ElementsAre("x"));
  EXPECT_EQ(pool_.GetAccount(kA)->reserved_bytes, 10_MiB) << "charged for the lease to come";
  EXPECT_EQ(queue_->size(), 0u);
}

TEST_F(RequestQueueTest, RefusesAtOnceWhenNobodyCanBeAskedAndItMayNotWait) {
  Hold(kB, 60_MiB);
  Add("x", kA, 10_MiB);
  EXPECT_EQ(Refusal("x"), OomCause::kCapacity);
  EXPECT_EQ(queue_->size(), 0u);
}

TEST_F(RequestQueueTest, AsksForWhatIsMissingAndGrantsWhenItCameBack) {
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

TEST_F(RequestQueueTest, AsksEverybodyWhenThoseChosenHadTooLittle) {
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

TEST_F(RequestQueueTest, OneThatIsSilentDoesNotKeepTheOthersFromBeingAsked) {
  Hold(kB, 40_MiB);
  const SegmentId idle = Hold(kC, 20_MiB);
  candidates_ = {{.session = kB, .reserved_bytes = 40_MiB, .idle_bytes = 40_MiB},
                 {.session = kC, .reserved_bytes = 20_MiB, .idle_bytes = 20_MiB}};
  Add("x", kA, 10_MiB);
  EXPECT_THAT(asked_, ElementsAre(ReclaimVictim{kB, 6_MiB}));
  candidates_.erase(candidates_.begin());  // the broker leaves silent sessions out
  Pass(kTimeout / 8);
  EXPECT_THAT(asked_, ElementsAre(ReclaimVictim{kB, 6_MiB}, ReclaimVictim{kC, 6_MiB}));
  Return(kC, idle);
  EXPECT_THAT(granted_, ElementsAre("x"));
  AnswerAll();
}

TEST_F(RequestQueueTest, AsksEverybodyTenTimesASecondAtMost) {
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
  EXPECT_THAT(asked_, ElementsAre(testing::_, ReclaimVictim{kB, 12_MiB})) << "for both together";
  AnswerAll();
  EXPECT_EQ(Refusal("second"), OomCause::kCapacity);
  EXPECT_EQ(Refusal("third"), OomCause::kCapacity);
}

TEST_F(RequestQueueTest, WhatGuaranteesForbidForEverIsRefusedAtOnce) {
  ASSERT_TRUE(pool_.SetGuarantee(kB, 40_MiB).ok());
  Hold(kC, 10_MiB);
  Add("never", kA, 30_MiB, milliseconds(60000));
  EXPECT_EQ(Refusal("never"), OomCause::kCapacity);
  Add("perhaps", kA, 20_MiB, milliseconds(60000));
  EXPECT_FALSE(ended_.contains("perhaps"));
  queue_->Cancel(kA, absl::CancelledError("end"));
}

TEST_F(RequestQueueTest, WhatItHoldsItselfIsNotWaitedFor) {
  ASSERT_TRUE(pool_.SetGuarantee(kC, 2_MiB).ok());
  Hold(kB, 60_MiB);
  Add("own", kB, 4_MiB, milliseconds(60000));
  EXPECT_EQ(Refusal("own"), OomCause::kCapacity) << "at once";
  Hold(kD, 2_MiB);
  Add("of another", kB, 2_MiB, milliseconds(60000));
  EXPECT_FALSE(ended_.contains("of another"));
  queue_->Cancel(kB, absl::CancelledError("end"));
}

TEST_F(RequestQueueTest, WaitsForTheMemoryOfAProcessThatHasJustDied) {
  const SegmentId segment = Hold(kB, 60_MiB);
  // A process that has fetched its descriptor may have the segment mapped.
  const FdTicket ticket = std::get<FdTicket>(pool_.HandleFor(kB, segment).value());
  ASSERT_TRUE(pool_.RedeemTicket(ticket, 1, 0).ok());
  pool_.CloseAccountOfGone(kB);
  EXPECT_EQ(pool_.GetStats().quarantined_bytes, 60_MiB);
  Add("x", kA, 10_MiB);
  EXPECT_THAT(ended_, IsEmpty());
  pool_.CheckQuarantine();
  EXPECT_THAT(granted_, ElementsAre("x"));
}

TEST_F(RequestQueueTest, ARetryMayServeARequestOtherwise) {
  Hold(kB, 60_MiB);
  bool freed = false;
  queue_->Add({.session = kA,
               .bytes = 10_MiB,
               .deadline = now_ + milliseconds(5000),
               .retry = [&] { return freed; },
               .done = [this](const absl::Status& status, const WaitRecord&) { ended_["x"] = status; }});
  queue_->Retry(kB);
  queue_->Retry(kA);
  EXPECT_THAT(ended_, IsEmpty());
  freed = true;
  queue_->Retry(kA);
  EXPECT_TRUE(absl::IsCancelled(ended_["x"]));
  EXPECT_EQ(queue_->size(), 0u);
  const auto ended = [this](WaitOutcome outcome) {
    return queue_->GetStats().durations[static_cast<size_t>(outcome)].sample_count;
  };
  EXPECT_EQ(ended(WaitOutcome::kGranted), 1u) << "it has got its memory";
  EXPECT_EQ(ended(WaitOutcome::kCancelled), 0u);
  EXPECT_EQ(ended(WaitOutcome::kRefused), 0u);
}

TEST_F(RequestQueueTest, WhoDoesNotAnswerIsNotWaitedForForever) {
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
  AnswerAll();  // a late answer
}

TEST_F(RequestQueueTest, WhoIsSlowIsWaitedForAlthoughNobodyElseCanBeAsked) {
  const SegmentId idle = Hold(kB, 60_MiB);
  candidates_ = {{.session = kB, .reserved_bytes = 60_MiB, .idle_bytes = 60_MiB}};
  Add("x", kA, 10_MiB);
  Add("too much", kC, 62_MiB);
  candidates_.clear();  // the broker leaves silent sessions out
  Pass(kTimeout / 8);
  Pass(kTimeout / 2);
  EXPECT_THAT(ended_, IsEmpty());
  Return(kB, idle);
  EXPECT_THAT(granted_, ElementsAre("x"));
  AnswerAll();
  EXPECT_EQ(Refusal("too much"), OomCause::kCapacity) << "at the last answer, not when time is up";
}

// An answer owed to any request counts: the returned memory may be enough for another request.
TEST_F(RequestQueueTest, NothingIsHopelessWhileSomebodyOwesAnAnswer) {
  Hold(kB, 60_MiB);
  candidates_ = {{.session = kB, .reserved_bytes = 60_MiB, .idle_bytes = 60_MiB}};
  Add("waits", kA, 10_MiB, milliseconds(60000));
  ASSERT_EQ(asked_.size(), 1u);
  candidates_.clear();
  Pass(milliseconds(500));
  Add("may not wait", kC, 10_MiB);
  EXPECT_FALSE(ended_.contains("may not wait"));
  AnswerAll();
  EXPECT_EQ(Refusal("may not wait"), OomCause::kCapacity) << "it was the last hope";
  EXPECT_FALSE(ended_.contains("waits"));
  queue_->Cancel(kA, absl::CancelledError("end"));
}

TEST_F(RequestQueueTest, AnAnswerThatIsOverdueIsNoHope) {
  Hold(kB, 60_MiB);
  candidates_ = {{.session = kB, .reserved_bytes = 60_MiB, .idle_bytes = 60_MiB}};
  Add("waits", kA, 10_MiB, milliseconds(60000));
  candidates_.clear();
  Pass(milliseconds(500));
  Add("may not wait", kC, 10_MiB);
  Pass(kTimeout - milliseconds(501));
  EXPECT_FALSE(ended_.contains("may not wait"));
  ASSERT_TRUE(queue_->NextWake().has_value());
  EXPECT_EQ(*queue_->NextWake(), now_ + milliseconds(1));
  Pass(milliseconds(1));
  EXPECT_EQ(Refusal("may not wait"), OomCause::kCapacity);
  Add("comes later", kC, 10_MiB);
  EXPECT_EQ(Refusal("comes later"), OomCause::kCapacity) << "at once";
  queue_->Cancel(kA, absl::CancelledError("end"));
  AnswerAll();
}

TEST_F(RequestQueueTest, WhoAnswersOneQuestionAfterTheOtherIsWaitedFor) {
  Hold(kB, 60_MiB);
  candidates_ = {{.session = kB, .reserved_bytes = 60_MiB, .idle_bytes = 60_MiB}};
  Add("first", kA, 10_MiB, milliseconds(60000));
  Add("second", kC, 10_MiB, milliseconds(60000));
  ASSERT_EQ(answers_.size(), 2u);
  candidates_.clear();
  Pass(kTimeout - milliseconds(100));
  answers_[0]();
  answers_.erase(answers_.begin());
  Add("may not wait", kD, 10_MiB);
  Pass(milliseconds(200));
  EXPECT_FALSE(ended_.contains("may not wait")) << "it has answered a moment ago, and will again";
  AnswerAll();
  EXPECT_EQ(Refusal("may not wait"), OomCause::kCapacity);
  queue_->Cancel(kA, absl::CancelledError("end"));
  queue_->Cancel(kC, absl::CancelledError("end"));
}

TEST_F(RequestQueueTest, WhoIsSlowIsAskedWithEverybody) {
  const SegmentId idle = Hold(kB, 60_MiB);
  candidates_ = {{.session = kB, .reserved_bytes = 60_MiB, .idle_bytes = 60_MiB, .is_slow = true}};
  Add("x", kA, 10_MiB);
  EXPECT_THAT(asked_, ElementsAre(ReclaimVictim{kB, 6_MiB})) << "nobody else has anything";
  Return(kB, idle);
  AnswerAll();
  EXPECT_THAT(granted_, ElementsAre("x"));
}

TEST_F(RequestQueueTest, WaitsUntilItsDeadline) {
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

TEST_F(RequestQueueTest, TheFirstThatWaitsAsksAgain) {
  Hold(kB, 60_MiB);
  Add("x", kA, 10_MiB, milliseconds(5000));
  EXPECT_THAT(asked_, IsEmpty());
  candidates_ = {{.session = kB, .reserved_bytes = 60_MiB, .idle_bytes = 60_MiB}};
  Pass(RequestQueue::kAskPeriod - milliseconds(1));
  EXPECT_THAT(asked_, IsEmpty());
  Pass(milliseconds(1));
  EXPECT_THAT(asked_, ElementsAre(ReclaimVictim{kB, 6_MiB}));
}

// ---- Sessions that are asked again ----

class AskAgainTest : public RequestQueueTest {
 protected:
  // kB is more important than the waiting request of kA, and kC less important. kB and kC hold all but 4 MiB.
  AskAgainTest() {
    Hold(kB, 40_MiB);
    kept_ = Hold(kC, 20_MiB);
    candidates_ = {{.session = kB, .priority = 900, .reserved_bytes = 40_MiB},
                   {.session = kC, .priority = -900, .reserved_bytes = 20_MiB}};
    Add("waits", kA, 10_MiB, std::chrono::hours(1));
  }
  ~AskAgainTest() override { queue_->Cancel(kA, absl::CancelledError("end")); }
  // Returns how often the queue asks each session in the given time. Sessions answer at once, and give no memory.
  std::map<SessionId, int> AskedIn(milliseconds time) {
    std::map<SessionId, int> times;
    for (milliseconds passed(0); passed < time; passed += milliseconds(10)) {
      for (const ReclaimVictim& victim : std::exchange(asked_, {})) ++times[victim.session];
      AnswerAll();
      Pass(milliseconds(10));
    }
    for (const ReclaimVictim& victim : std::exchange(asked_, {})) ++times[victim.session];
    AnswerAll();
    return times;
  }
  static std::pair<const SessionId, int> Times(SessionId session, int times) { return {session, times}; }

  SegmentId kept_;
};

TEST_F(AskAgainTest, WhoHasNothingIsAskedOnce) {
  EXPECT_THAT(AskedIn(milliseconds(5000)), ElementsAre(Times(kB, 1), Times(kC, 1)));
}

TEST_F(AskAgainTest, WhoHasSomethingLaterIsAskedSoon) {
  (void)AskedIn(milliseconds(1000));
  candidates_[1].idle_bytes = 8_MiB;
  EXPECT_THAT(AskedIn(RequestQueue::kAskPeriod), ElementsAre(Times(kC, 1)));
  EXPECT_THAT(AskedIn(RequestQueue::kAskPeriod), IsEmpty()) << "it has given nothing of that";
  candidates_[1].idle_bytes = 6_MiB;
  EXPECT_THAT(AskedIn(RequestQueue::kAskPeriod), ElementsAre(Times(kC, 1))) << "its figures say something new";
  EXPECT_THAT(AskedIn(RequestQueue::kAskInVainPeriod + RequestQueue::kAskPeriod), ElementsAre(Times(kC, 1)))
      << "they may be the same by chance";
}

TEST_F(AskAgainTest, WhoHasGivenSomethingIsAskedForMore) {
  queue_->Cancel(kA, absl::CancelledError("for a larger one"));
  Add("large", kA, 60_MiB, std::chrono::hours(1));
  (void)AskedIn(milliseconds(1000));
  candidates_[1].idle_bytes = 20_MiB;
  Pass(RequestQueue::kAskPeriod);
  EXPECT_THAT(asked_, ElementsAre(ReclaimVictim{kC, 20_MiB}));
  // kC gives the 20 MiB back, and has leased as much again at the next look.
  Return(kC, kept_);
  AnswerAll();
  Hold(kC, 20_MiB);
  asked_.clear();
  Pass(RequestQueue::kAskPeriod);
  EXPECT_THAT(asked_, ElementsAre(ReclaimVictim{kC, 20_MiB})) << "although its figures are the same";
  AnswerAll();
}

TEST_F(AskAgainTest, WhoIsMoreImportantIsAskedSeldomByItsFigures) {
  (void)AskedIn(milliseconds(1000));
  for (uint64_t idle = 2_MiB; idle <= 14_MiB; idle += 2_MiB) {
    candidates_[0].idle_bytes = candidates_[1].idle_bytes = idle;
    const int times = idle == 2_MiB ? 1 : 0;
    const std::map<SessionId, int> asked = AskedIn(RequestQueue::kAskPeriod);
    EXPECT_EQ(asked.contains(kB) ? asked.at(kB) : 0, times) << idle;
    EXPECT_EQ(asked.contains(kC) ? asked.at(kC) : 0, 1) << idle;
    candidates_[1].reserved_bytes -= 1;
  }
  EXPECT_THAT(AskedIn(RequestQueue::kAskInVainPeriod), Contains(Times(kB, 1))) << "what it has may be idle by now";
}

TEST_F(AskAgainTest, WhoIsMoreImportantIsNotAskedWithEverybodyAfterThat) {
  queue_->Cancel(kA, absl::CancelledError("again"));
  (void)AskedIn(milliseconds(1000));
  ended_.clear();
  candidates_[0].idle_bytes = candidates_[1].idle_bytes = 2_MiB;
  Add("waits", kA, 10_MiB, std::chrono::hours(1));
  EXPECT_THAT(AskedIn(milliseconds(1000)), ElementsAre(Times(kB, 1), Times(kC, 2)));
}

TEST_F(AskAgainTest, WhoDoesNotAnswerKeepsNobodyFromBeingAskedAgain) {
  (void)AskedIn(milliseconds(1000));
  candidates_[1].idle_bytes = 4_MiB;
  Pass(RequestQueue::kAskPeriod);
  ASSERT_THAT(asked_, ElementsAre(ReclaimVictim{kC, 4_MiB}));
  candidates_.push_back({.session = kD, .reserved_bytes = 2_MiB, .idle_bytes = 2_MiB});
  asked_.clear();
  for (int i = 0; i < 20; ++i) Pass(2 * RequestQueue::kAskPeriod / 10);
  EXPECT_THAT(asked_, ElementsAre(ReclaimVictim{kD, 2_MiB}));
  AnswerAll();
}

TEST_F(RequestQueueTest, ServesByPriorityThenByArrival) {
  const SegmentId held = Hold(kB, 60_MiB);
  ASSERT_TRUE(pool_.SetPriority(kC, 5).ok());
  Add("first", kA, 8_MiB, milliseconds(5000));
  Add("second", kA, 8_MiB, milliseconds(5000));
  Add("important", kC, 8_MiB, milliseconds(5000));
  Return(kB, held);
  EXPECT_THAT(granted_, ElementsAre("important", "first", "second"));
}

TEST_F(RequestQueueTest, ANewPriorityIsANewPlace) {
  const SegmentId held = Hold(kB, 60_MiB);
  Add("a", kA, 8_MiB, milliseconds(5000));
  Add("c", kC, 8_MiB, milliseconds(5000));
  ASSERT_TRUE(pool_.SetPriority(kC, 5).ok());
  queue_->UpdatePriority(kC, 5);
  EXPECT_EQ(queue_->GetWaiting()[0].session, kC);
  Return(kB, held);
  EXPECT_THAT(granted_, ElementsAre("c", "a"));
}

// UpdatePriority() finds no request just before the request is added.
TEST_F(RequestQueueTest, APriorityThatChangesWhileARequestComesIsItsPlace) {
  const SegmentId held = Hold(kB, 60_MiB);
  Add("a", kA, 8_MiB, milliseconds(5000));
  at_next_look_ = [this] { ASSERT_TRUE(pool_.SetPriority(kC, 5).ok()); };
  Add("c", kC, 8_MiB, milliseconds(5000));
  Return(kB, held);
  EXPECT_THAT(granted_, ElementsAre("c", "a"));
}

// ---- Holding memory back ----

// A request keeps no free memory from other sessions unless a session is expected to give memory back.
TEST_F(RequestQueueTest, ARequestThatNothingCanServeHoldsNobodyBack) {
  Hold(kB, 6_MiB);
  Add("everything", kA, kCapacity, std::chrono::hours(1));
  for (int i = 0; i < 100; ++i) {
    Pass(milliseconds(100));
    EXPECT_TRUE(Fits(kC, 2_MiB)) << "a newcomer";
    EXPECT_TRUE(Fits(kC, 58_MiB));
  }
  EXPECT_TRUE(Fits(kB, 4_MiB)) << "the one that it waits for";
  Add("small", kD, 2_MiB);
  EXPECT_THAT(granted_, ElementsAre("small"));
}

// A session that takes and gives a little cannot feign a large return of memory.
TEST_F(RequestQueueTest, WhatComesBackAgainAndAgainCountsOnce) {
  Hold(kB, 6_MiB);
  Add("everything", kA, kCapacity, std::chrono::hours(1));
  for (int i = 0; i < 100; ++i) {
    Churn(kC, 2_MiB, milliseconds(50));
    EXPECT_TRUE(Fits(kD, 2_MiB));
  }
}

TEST_F(RequestQueueTest, WhatIsReportedIdleIsWaitedForWithMemoryHeldBack) {
  Hold(kB, 50_MiB);
  Add("large", kA, 30_MiB, milliseconds(60000));
  Pass(RequestQueue::kHoldAfter);
  candidates_ = {{.session = kB, .reserved_bytes = 50_MiB, .idle_bytes = 16_MiB}};
  Pass(RequestQueue::kAskPeriod);
  EXPECT_THAT(asked_, ElementsAre(ReclaimVictim{kB, 16_MiB}));
  EXPECT_TRUE(Fits(kC, 2_MiB)) << "it has only just been asked for";
  Pass(kLook);
  EXPECT_FALSE(Fits(kC, 2_MiB));
  EXPECT_TRUE(Fits(kB, 2_MiB)) << "the one that is waited for may need more to get done";
  // kB answers, and has kept the memory that was reported idle.
  AnswerAll();
  candidates_[0].idle_bytes = 0;
  Pass(milliseconds(1));
  EXPECT_TRUE(Fits(kC, 2_MiB));
}

TEST_F(RequestQueueTest, WhoIsHeldBackIsNotRefusedAndGetsItAfterTheBound) {
  HoldBackForALargeOne();
  ASSERT_FALSE(Fits(kC, 2_MiB));
  Add("may not wait", kC, 2_MiB);
  EXPECT_FALSE(ended_.contains("may not wait"));
  EXPECT_EQ(*queue_->NextWake(), now_ + kLook) << "it may be of use no more";
  Pass(kHoldBack - milliseconds(1));
  EXPECT_FALSE(ended_.contains("may not wait"));
  Pass(milliseconds(1));
  EXPECT_THAT(granted_, ElementsAre("may not wait"));
  EXPECT_EQ(outcomes_["may not wait"].waited, kHoldBack);
}

// A request may have memory held back again at the end of a rest: the queue wakes at that time.
TEST_F(RequestQueueTest, TheEndOfARestIsATimeToLook) {
  HoldBackForALargeOne();
  candidates_.clear();
  Pass(kHoldBack);
  const SteadyTime ended = now_;
  for (const int times : {1, RequestQueue::kUserRest}) {
    const SteadyTime end = ended + times * kHoldBack;
    Pass(std::chrono::duration_cast<milliseconds>(end - now_) - milliseconds(10));
    EXPECT_EQ(*queue_->NextWake(), end);
  }
  queue_->Cancel(kA, absl::CancelledError("end"));
  AnswerAll();  // a late answer
}

// The queue holds memory of an ending session back for the large request. No session owes an answer, and no memory
// settles.
TEST_F(RequestQueueTest, WhoIsHeldBackAtItsDeadlineIsServedWhenTheHoldEnds) {
  Hold(kB, 50_MiB);
  pool_.MarkEnding(kB);
  Add("large", kA, 30_MiB, milliseconds(60000));
  Pass(RequestQueue::kHoldAfter);
  ASSERT_FALSE(Fits(kC, 2_MiB));
  Add("may not wait", kC, 2_MiB);
  Add("may wait a moment", kC, 2_MiB, milliseconds(100));
  Pass(milliseconds(100));
  EXPECT_FALSE(ended_.contains("may not wait"));
  EXPECT_FALSE(ended_.contains("may wait a moment"));
  Pass(kHoldBack - milliseconds(100));
  EXPECT_THAT(granted_, ElementsAre("may not wait", "may wait a moment"));
  queue_->Cancel(kA, absl::CancelledError("end"));
}

// Sessions take and give all the time. The large request gets returned memory while the sessions wait.
TEST_F(RequestQueueTest, ALargeRequestDoesNotStarveAmongSmallOnes) {
  Add("large", kA, 60_MiB, milliseconds(60000));
  EXPECT_THAT(granted_, ElementsAre("large"));
  granted_.clear();
  pool_.ReleaseGrant(kA, 60_MiB);
  ended_.clear();
  std::map<SessionId, SegmentId> held = {{kB, Hold(kB, 24_MiB)}, {kC, Hold(kC, 24_MiB)}};
  Add("large", kA, 60_MiB, milliseconds(60000));
  // kB or kC always holds its part, unless memory is held back.
  int turns = 0;
  for (; granted_.empty() && turns < 1000; ++turns) {
    Pass(milliseconds(60));
    const SessionId session = turns % 2 == 0 ? kB : kC;
    if (held.contains(session)) Return(session, held[session]);
    held.erase(session);
    if (const auto segment = pool_.Lease(session, 24_MiB); segment.ok()) held[session] = *segment;
  }
  EXPECT_THAT(granted_, ElementsAre("large"));
}

TEST_F(RequestQueueTest, WhoHasGivenSomethingBackIsHeldBackLikeOthers) {
  Hold(kB, 46_MiB);
  const SegmentId more = Hold(kB, 4_MiB);
  candidates_ = {{.session = kB, .reserved_bytes = 50_MiB, .idle_bytes = 50_MiB}};
  Add("large", kA, 30_MiB, milliseconds(60000));
  Pass(RequestQueue::kHoldAfter);
  EXPECT_TRUE(pool_.Lease(kB, 2_MiB).ok());
  Return(kB, more);
  EXPECT_FALSE(Fits(kB, 2_MiB)) << "what came back is for the one that waits";
}

TEST_F(RequestQueueTest, HoldsBackForOthersOnlyWhenEverybodyHadAsLong) {
  Hold(kB, 50_MiB);
  candidates_ = {{.session = kB, .reserved_bytes = 50_MiB, .idle_bytes = 50_MiB}};
  Add("large", kA, 30_MiB, milliseconds(600000));
  Pass(RequestQueue::kHoldAfter);
  ASSERT_FALSE(Fits(kC, 2_MiB));
  // Adds a request of another user behind the large request.
  Add("of another", kD, 30_MiB, milliseconds(600000));
  // kB answers late, and gives no memory. kB's figures still report idle memory again and again.
  const auto is_held = [this](milliseconds time) {
    Pass(time);
    return !Fits(kC, 2_MiB);
  };
  EXPECT_TRUE(is_held(kHoldBack - milliseconds(1)));
  EXPECT_FALSE(is_held(milliseconds(1)));
  int held = 0;
  int free = 0;
  std::vector<int> stretches;  // lengths of stretches without and with memory held back, in turn
  bool was_held = false;
  stretches.push_back(0);
  for (int i = 0; i < 4000; ++i) {
    if (i % 100 == 0) {
      AnswerAll();
      candidates_[0].idle_bytes = i % 200 == 0 ? 50_MiB : 48_MiB;
    }
    const bool now_held = is_held(milliseconds(10));
    now_held ? ++held : ++free;
    if (now_held != was_held) stretches.push_back(0);
    was_held = now_held;
    ++stretches.back();
  }
  EXPECT_GT(held, 0) << "their turn comes again";
  EXPECT_GE(free, held);
  for (size_t i = 1; i < stretches.size(); i += 2) EXPECT_LE(stretches[i], kHoldBack / milliseconds(10)) << i;
}

TEST_F(RequestQueueTest, ALimitedPartOfTheDeviceIsHeldBack) {
  queue_ = std::make_unique<RequestQueue>(&pool_, RequestQueueOptions{.hold_back_bytes = 4_MiB},
                                          RequestQueueHooks{.clock = [this] { return now_; },
                                                            .candidates = [this] { return candidates_; },
                                                            .ask = [](const ReclaimVictim&, const auto&) {}});
  HoldBackForALargeOne();
  EXPECT_TRUE(Fits(kC, 10_MiB));
  EXPECT_FALSE(Fits(kC, 12_MiB));
}

TEST_F(RequestQueueTest, NothingIsHeldBackWhenItIsTurnedOff) {
  queue_ = std::make_unique<RequestQueue>(&pool_, RequestQueueOptions{.hold_back_time = milliseconds(0)},
                                          RequestQueueHooks{.clock = [this] { return now_; },
                                                            .candidates = [this] { return candidates_; },
                                                            .ask = [](const ReclaimVictim&, const auto&) {}});
  Hold(kB, 50_MiB);
  candidates_ = {{.session = kB, .reserved_bytes = 50_MiB, .idle_bytes = 50_MiB}};
  Add("large", kA, 30_MiB, milliseconds(60000));
  for (int i = 0; i < 100; ++i) {
    Pass(milliseconds(50));
    EXPECT_TRUE(Fits(kC, 2_MiB));
  }
}

TEST_F(RequestQueueTest, MoreImportantSessionsAreNotHeldBack) {
  HoldBackForALargeOne();
  EXPECT_FALSE(Fits(kC, 2_MiB));
  ASSERT_TRUE(pool_.SetPriority(kC, 1).ok());
  EXPECT_TRUE(Fits(kC, 2_MiB));
}

TEST_F(RequestQueueTest, MemoryThatSettlesOrThatAnEndedSessionHoldsIsExpected) {
  const SegmentId held = Hold(kB, 40_MiB);
  ASSERT_TRUE(pool_.RedeemTicket(std::get<FdTicket>(pool_.HandleFor(kB, held).value()), 1, 0).ok());
  Hold(kC, 10_MiB);
  Add("large", kA, 60_MiB, milliseconds(60000));
  Pass(RequestQueue::kHoldAfter);
  EXPECT_TRUE(Fits(kD, 2_MiB));
  pool_.CloseAccountOfGone(kB);
  Pass(kLook);
  EXPECT_TRUE(Fits(kD, 2_MiB)) << "not enough yet";
  pool_.MarkEnding(kC);
  Pass(kLook);
  EXPECT_FALSE(Fits(kD, 2_MiB));
}

TEST_F(RequestQueueTest, WhoIsServedHoldsNobodyBack) {
  const SegmentId held = Hold(kB, 50_MiB);
  candidates_ = {{.session = kB, .reserved_bytes = 50_MiB, .idle_bytes = 50_MiB}};
  Add("large", kA, 30_MiB, milliseconds(60000));
  Pass(RequestQueue::kHoldAfter);
  Add("held back", kC, 2_MiB);
  EXPECT_THAT(granted_, IsEmpty());
  Return(kB, held);
  EXPECT_THAT(granted_, ElementsAre("large", "held back"));
  EXPECT_TRUE(Fits(kD, 2_MiB));
}

TEST_F(RequestQueueTest, WhoIsServedOtherwiseHoldsNobodyBack) {
  Hold(kB, 50_MiB);
  candidates_ = {{.session = kB, .reserved_bytes = 50_MiB, .idle_bytes = 50_MiB}};
  bool has_freed = false;
  queue_->Add({.session = kA,
               .user = uid_t{1},
               .bytes = 30_MiB,
               .deadline = now_ + milliseconds(60000),
               .retry = [&] { return has_freed; },
               .done = [](const absl::Status&, const WaitRecord&) {}});
  Pass(RequestQueue::kHoldAfter);
  Add("small", kC, 2_MiB, milliseconds(60000));
  EXPECT_THAT(granted_, IsEmpty());
  has_freed = true;
  queue_->Retry(kA);
  EXPECT_THAT(granted_, ElementsAre("small")) << "at once";
}

TEST_F(RequestQueueTest, WhoGivesUpHoldsNobodyBack) {
  HoldBackForALargeOne();
  Add("small", kC, 2_MiB, milliseconds(60000));
  EXPECT_THAT(granted_, IsEmpty());
  queue_->Cancel(kA, absl::AbortedError("it has ended"));
  EXPECT_TRUE(absl::IsAborted(ended_["large"]));
  EXPECT_THAT(granted_, ElementsAre("small"));
  EXPECT_TRUE(Fits(kD, 2_MiB));
}

TEST_F(RequestQueueTest, AGuaranteeIsNeverHeldBack) {
  ASSERT_TRUE(pool_.SetGuarantee(kC, 4_MiB).ok());
  HoldBackForALargeOne();
  EXPECT_TRUE(Fits(kC, 4_MiB));
  EXPECT_FALSE(Fits(kC, 6_MiB));
}

TEST_F(RequestQueueTest, ANewGuaranteeDoesNotTakeWhatIsHeldBack) {
  HoldBackForALargeOne();
  Add("guarantee", kC, 4_MiB, milliseconds(0), 0, /*guarantee=*/true);
  EXPECT_FALSE(ended_.contains("guarantee"));
  Pass(kHoldBack);
  EXPECT_THAT(granted_, ElementsAre("guarantee"));
}

// ---- Carried-over memory that the session has closed ----

class ClosingTest : public RequestQueueTest {
 protected:
  // kE carries 40 MiB over, which is kE's limit, and has closed the memory. The daemon has not looked since.
  void Close(uint64_t guarantee = 0) {
    device_->Leave({{.file_device = 1, .file_inode = 1, .bytes = 40_MiB, .holders = {kProcess}}});
    ASSERT_TRUE(pool_.FindCarriedOver().ok());
    pool_.OpenAccount(kE, {.pid = kProcess.pid, .tenant = "d", .limit_bytes = 40_MiB});
    const CarriedSegment carried{.id = 1, .bytes = 40_MiB, .file_device = 1, .file_inode = 1};
    ASSERT_TRUE(pool_.DeclareCarriedOver(kE, {carried}, /*begins=*/true, /*ends=*/true).ok());
    ASSERT_EQ(pool_.GetAccount(kE)->carried_over_bytes, 40_MiB);
    if (guarantee > 0) {
      ASSERT_TRUE(pool_.SetLimit(kE, kCapacity).ok());
      ASSERT_TRUE(pool_.SetGuarantee(kE, guarantee).ok());
    }
    pool_.FreeCarriedOver(kE, {1});
    device_->Leave({});
  }
  void Look() {
    ASSERT_TRUE(pool_.FindCarriedOver().ok());
    queue_->OnTimer();
  }

  static constexpr SessionId kE{5};
  static constexpr ProcessId kProcess{.pid = 7};
};

TEST_F(ClosingTest, AGuaranteeWaitsForTheLook) {
  ASSERT_NO_FATAL_FAILURE(Close(/*guarantee=*/40_MiB));
  Hold(kB, 24_MiB);
  Add("x", kE, 40_MiB);
  Pass(2 * kTimeout);
  EXPECT_FALSE(ended_.contains("x")) << "the look takes long";
  Look();
  EXPECT_FALSE(ended_.contains("x"));
  Look();
  EXPECT_THAT(granted_, ElementsAre("x"));
  EXPECT_EQ(pool_.GetAccount(kE)->reserved_bytes, 40_MiB);
}

TEST_F(ClosingTest, SoDoesWhatTheLimitAllows) {
  ASSERT_NO_FATAL_FAILURE(Close());
  Add("x", kE, 40_MiB);
  Pass(2 * kTimeout);
  EXPECT_FALSE(ended_.contains("x"));
  Look();
  Look();
  EXPECT_THAT(granted_, ElementsAre("x"));
}

TEST_F(ClosingTest, AfterTheLookItIsServedAsAllOthers) {
  ASSERT_NO_FATAL_FAILURE(Close());
  const SegmentId idle = Hold(kB, 24_MiB);
  candidates_ = {{.session = kB, .reserved_bytes = 24_MiB, .idle_bytes = 24_MiB}};
  ASSERT_TRUE(pool_.SetLimit(kE, kCapacity).ok());
  Add("x", kE, 60_MiB);
  Pass(2 * kTimeout);
  EXPECT_THAT(asked_, IsEmpty()) << "perhaps it needs nothing of others";
  Look();
  Look();
  EXPECT_THAT(asked_, ElementsAre(ReclaimVictim{kB, 20_MiB}));
  EXPECT_FALSE(ended_.contains("x"));
  Return(kB, idle);
  EXPECT_THAT(granted_, ElementsAre("x"));
}

TEST_F(ClosingTest, ItTakesNothingFromOthersMeanwhile) {
  ASSERT_NO_FATAL_FAILURE(Close());
  Add("x", kE, 20_MiB, milliseconds(60000));
  for (int i = 0; i < 50; ++i) {
    Pass(milliseconds(100));
    EXPECT_TRUE(Fits(kC, 24_MiB)) << "nothing is held back";
  }
  // The waiting request keeps no request behind it from asking again.
  Hold(kB, 24_MiB);
  candidates_ = {{.session = kB, .reserved_bytes = 24_MiB, .idle_bytes = 24_MiB}};
  Add("behind", kC, 40_MiB, milliseconds(60000));
  for (int i = 0; i < 3; ++i) {  // first chosen sessions, then all sessions
    AnswerAll();
    Pass(milliseconds(100));
  }
  const size_t asked = asked_.size();
  candidates_[0].idle_bytes = 20_MiB;
  Pass(RequestQueue::kAskPeriod);
  EXPECT_GT(asked_.size(), asked);
}

TEST_F(ClosingTest, NotForEver) {
  ASSERT_NO_FATAL_FAILURE(Close());
  Add("x", kE, 40_MiB, /*wait=*/milliseconds(60000));
  Pass(RequestQueue::kLongestLook - milliseconds(1));
  EXPECT_FALSE(ended_.contains("x"));
  ASSERT_TRUE(queue_->NextWake().has_value());
  EXPECT_EQ(*queue_->NextWake(), now_ + milliseconds(1));
  Pass(milliseconds(1));
  EXPECT_EQ(Refusal("x"), OomCause::kLimit);
}

TEST_F(ClosingTest, NotWhenAnotherProcessHasItStill) {
  ASSERT_NO_FATAL_FAILURE(Close());
  device_->Leave({{.file_device = 1, .file_inode = 1, .bytes = 40_MiB, .holders = {{.pid = 8}}}});
  Add("x", kE, 2_MiB);
  EXPECT_FALSE(ended_.contains("x"));
  Look();
  EXPECT_EQ(Refusal("x"), OomCause::kLimit);
  pool_.FreeCarriedOver(kE, {1});
  Add("again", kE, 2_MiB);
  EXPECT_EQ(Refusal("again"), OomCause::kLimit) << "it is believed once";
}

TEST_F(ClosingTest, WhatEndsMeanwhileEnds) {
  ASSERT_NO_FATAL_FAILURE(Close());
  Add("cancelled", kE, 20_MiB, milliseconds(60000), /*key=*/7);
  Add("of the session", kE, 20_MiB, milliseconds(60000));
  queue_->Cancel(kE, 7, absl::CancelledError("given up"));
  EXPECT_TRUE(absl::IsCancelled(ended_["cancelled"]));
  EXPECT_FALSE(ended_.contains("of the session"));
  queue_->UpdatePriority(kE, 1);
  EXPECT_FALSE(ended_.contains("of the session"));
  pool_.CloseAccountOfGone(kE);
  queue_->OnTimer();
  EXPECT_TRUE(absl::IsAborted(ended_["of the session"])) << ended_["of the session"];
}

TEST_F(ClosingTest, NotWhatIsLargerThanTheDevice) {
  ASSERT_NO_FATAL_FAILURE(Close());
  Add("x", kE, kCapacity + 2_MiB);
  EXPECT_EQ(Refusal("x"), OomCause::kLargerThanDevice);
}

TEST_F(RequestQueueTest, CancelsOneRequestByItsKey) {
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

TEST_F(RequestQueueTest, ALoweredLimitEndsTheWaiting) {
  Hold(kB, 60_MiB);
  Add("x", kA, 10_MiB, milliseconds(5000));
  ASSERT_TRUE(pool_.SetLimit(kA, 8_MiB).ok());
  EXPECT_EQ(Refusal("x"), OomCause::kLimit);
}

// A session would lose its cache in vain: the session's memory counts for the session's guarantee.
TEST_F(RequestQueueTest, NobodyIsAskedForMemoryOfItsOwnForItsGuarantee) {
  Hold(kA, 10_MiB);
  Hold(kB, 54_MiB);
  candidates_ = {{.session = kA, .reserved_bytes = 10_MiB, .idle_bytes = 10_MiB},
                 {.session = kB, .reserved_bytes = 54_MiB}};
  Add("guarantee", kA, 20_MiB, milliseconds(0), 0, /*guarantee=*/true);
  EXPECT_THAT(asked_, ElementsAre(ReclaimVictim{kB, 10_MiB}));
  AnswerAll();
  EXPECT_EQ(Refusal("guarantee"), OomCause::kCapacity);
}

// A session's own memory beyond the guarantee frees room on an overcommitted device.
TEST_F(RequestQueueTest, OnAnOvercommittedDeviceASessionIsAskedForWhatItHoldsBeyondItsGuarantee) {
  device_->Leave({{.file_device = 1, .file_inode = 1, .bytes = 12_MiB, .holders = {{.pid = 7}}}});
  const SegmentId idle = Hold(kA, 10_MiB);
  Hold(kA, 10_MiB);
  Hold(kB, 40_MiB);
  ASSERT_TRUE(pool_.FindCarriedOver().ok());  // 8 MiB more than the capacity
  candidates_ = {{.session = kA, .reserved_bytes = 20_MiB, .idle_bytes = 10_MiB},
                 {.session = kB, .reserved_bytes = 40_MiB}};
  Add("guarantee", kA, 8_MiB, milliseconds(0), 0, /*guarantee=*/true);
  EXPECT_THAT(asked_, ElementsAre(ReclaimVictim{kA, 8_MiB}));
  Return(kA, idle);
  EXPECT_THAT(granted_, ElementsAre("guarantee"));
  AnswerAll();
}

TEST_F(RequestQueueTest, AGuaranteeIsRaisedWhenOthersHaveGivenWhatItTakes) {
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

TEST_F(RequestQueueTest, ARequestOfASessionThatIsGoneEndsAtOnce) {
  pool_.CloseAccount(kA);
  Add("x", kA, 2_MiB, milliseconds(5000));
  EXPECT_TRUE(absl::IsAborted(ended_["x"]));
}

}  // namespace
}  // namespace vrambroker
