// SPDX-License-Identifier: Apache-2.0
//
// Tests of remote sessions' allocations that wait for memory.
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/unit/server/core/broker_waiting_fixture.h"

namespace vrambroker {
namespace {

// ---- Allocations of remote sessions ----

// `remote_` holds a block of 16 MiB and asks for another block, for which the device is too full.
class BrokerAllocationTest : public BrokerWaitingTest {
 protected:
  using Answers = std::vector<absl::StatusOr<Allocation>>;

  BrokerAllocationTest() {
    holder_ = OpenLeasing("holder");
    held_ = Hold(holder_, {32_MiB, 16_MiB});
    remote_ = Open("remote");
    Allocate();
    block_ = answers_.at(0).value();
    answers_.clear();
    Allocate();
    EXPECT_EQ(answers_.size(), 0u);
  }

  // Starts anew, with a device that the holder has filled, and with a remote session without memory.
  void Restart(const SessionBounds& bounds) {
    broker_->CloseAll("next");
    Settle();
    BrokerOptions options;
    options.clock = [this] { return ReadClock(); };
    options.session_bounds = bounds;
    Make(std::move(options), {.clock = [this] { return now_; }});
    holder_ = OpenLeasing("holder");
    held_ = Hold(holder_, {32_MiB, 32_MiB});
    remote_ = Open("remote");
    answers_.clear();
  }
  void Allocate() {
    broker_->allocations().Allocate(
        remote_, 0, 16_MiB, 0, [this](absl::StatusOr<Allocation> answer) { answers_.push_back(std::move(answer)); },
        {.may_reclaim = true, .wait = std::chrono::minutes(1)});
    Settle();
  }
  uint64_t Reserved() const { return pools_[0]->GetAccount(remote_->id())->reserved_bytes; }
  // Returns 16 MiB of the holder. The broker grants the memory at once; the slow call that uses the grant has not
  // begun.
  void Grant() {
    ASSERT_TRUE(broker_->leases().ReturnSegments(holder_, 0, {held_[1].segment}).ok());
    auto& workers = static_cast<StepWorkers&>(*workers_);
    while (Reserved() == 16_MiB && workers.waiting() > 0) workers.Step();
    ASSERT_EQ(Reserved(), 32_MiB);
    ASSERT_EQ(answers_.size(), 0u);
  }

  SessionPtr holder_;
  std::vector<Lease> held_;
  SessionPtr remote_;
  Allocation block_;
  Answers answers_;
};

TEST_F(BrokerAllocationTest, AGrantServesIt) {
  Grant();
  Settle();
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_NE(answers_[0].value().segment, block_.segment);
  EXPECT_EQ(Reserved(), 32_MiB);
  EXPECT_EQ(remote_->GetMemoryStats(0).num_alloc_retries, 1u) << "one request has flushed once";
}

TEST_F(BrokerAllocationTest, ItsOwnFreeServesItWithoutAGrant) {
  ASSERT_TRUE(broker_->allocations().Free(remote_, {block_.block}).ok());
  ASSERT_EQ(answers_.size(), 1u) << "at once";
  EXPECT_EQ(answers_[0].value().segment, block_.segment);
  EXPECT_EQ(broker_->waiting().GetWaiting(0).size(), 0u);
  ASSERT_TRUE(broker_->leases().ReturnSegments(holder_, 0, {held_[1].segment}).ok());
  Settle();
  EXPECT_EQ(Reserved(), 16_MiB);
  EXPECT_EQ(answers_.size(), 1u) << "one answer";
}

TEST_F(BrokerAllocationTest, WhatIsFreeByTheTimeOfTheGrantIsTakenInstead) {
  Grant();
  ASSERT_TRUE(broker_->allocations().Free(remote_, {block_.block}).ok());
  EXPECT_EQ(answers_.size(), 0u) << "it is granted, and does not wait any more";
  Settle();
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_EQ(answers_[0].value().segment, block_.segment);
  EXPECT_EQ(Reserved(), 16_MiB) << "the grant is given up";
}

TEST_F(BrokerAllocationTest, RefusedAfterItHasWaitedItIsOneOutOfMemoryEvent) {
  remote_->remote()->allocator(0).SetRecording(100);
  Pass(std::chrono::minutes(2));
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(absl::IsResourceExhausted(answers_[0].status())) << answers_[0].status();
  EXPECT_EQ(remote_->GetMemoryStats(0).num_ooms, 1u);
  EXPECT_EQ(remote_->GetMemoryStats(0).num_alloc_retries, 1u);
  const std::vector<HistoryEvent> events = remote_->remote()->allocator(0).Snapshot().history;
  ASSERT_EQ(events.size(), 2u) << "that, and the snapshot";
  EXPECT_EQ(events[0].action, HistoryAction::kOutOfMemory);
  EXPECT_EQ(events[0].bytes, 16_MiB);
  EXPECT_EQ(events[0].address, 0u) << "nothing was left";
}

TEST_F(BrokerAllocationTest, BlocksBeyondTheBoundAreNotHandedOutHoweverTheyCome) {
  Restart({.max_blocks = 1});
  Allocate();
  Allocate();
  ASSERT_EQ(broker_->waiting().GetWaiting(0).size(), 2u);
  ASSERT_TRUE(broker_->leases().ReturnSegments(holder_, 0, {held_[0].segment}).ok());
  Settle();
  ASSERT_EQ(answers_.size(), 2u);
  EXPECT_TRUE(answers_[0].ok()) << answers_[0].status();
  EXPECT_THAT(std::string(answers_[1].status().message()), ::testing::HasSubstr("max_blocks_per_session"));
  EXPECT_EQ(remote_->GetMemoryStats(0).allocated_bytes.all.current, 16_MiB);
  EXPECT_EQ(Reserved(), 16_MiB) << "the grant of the other one is given up";
}

// A session that has ended or disconnected gets no more memory.
TEST_F(BrokerAllocationTest, AGrantOfASessionThatHasEndedSinceIsGivenUp) {
  Grant();
  broker_->EndSession(remote_, "test");
  Settle();
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(absl::IsAborted(answers_[0].status())) << answers_[0].status();
  EXPECT_EQ(Reserved(), 16_MiB);
}

TEST_F(BrokerAllocationTest, AGrantOfASessionWhoseStreamBrokeSinceIsGivenUp) {
  Grant();
  broker_->Disconnect(remote_);
  Settle();
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(absl::IsAborted(answers_[0].status())) << answers_[0].status();
  EXPECT_EQ(Reserved(), 16_MiB);
}

// ---- Requests on the way to the queue ----

// Has a remote session whose cached segment must go before the session waits. The test controls all events meanwhile.
class BrokerOnTheWayTest : public BrokerWaitingTest {
 protected:
  BrokerOnTheWayTest() {
    remote_ = Open("remote");
    used_ = Get(16_MiB);
    const Allocation cached = Get(20_MiB);
    EXPECT_TRUE(broker_->allocations().Free(remote_, {cached.block}).ok());
    holder_ = OpenLeasing("holder");
    Hold(holder_, {kCapacity - 36_MiB});
  }

  Allocation Get(uint64_t bytes) {
    Allocate(bytes);
    Settle();
    const Allocation got = answers_.at(0).value();
    answers_.clear();
    return got;
  }
  void Allocate(uint64_t bytes) {
    broker_->allocations().Allocate(
        remote_, 0, bytes, 0, [this](absl::StatusOr<Allocation> answer) { answers_.push_back(std::move(answer)); },
        {.may_reclaim = true, .wait = std::chrono::minutes(1), .cancel_key = kKey});
  }
  // Calls `meanwhile` when the daemon asks the client to close the cached segment.
  void WhenAskedToClose(std::function<void()> meanwhile) {
    client_of_remote_->on_close = [this, meanwhile = std::move(meanwhile)](absl::Span<const SegmentId> segments) {
      meanwhile();
      remote_->remote()->SegmentsClosed(segments);
    };
  }
  SessionPtr Open(const std::string& name) {
    SessionPtr session = BrokerTest::Open(name);
    client_of_remote_ = client_;
    return session;
  }

  static constexpr uint64_t kKey = 5;
  SessionPtr remote_;
  std::shared_ptr<FakeClient> client_of_remote_;
  SessionPtr holder_;
  Allocation used_;
  std::vector<absl::StatusOr<Allocation>> answers_;
};

TEST_F(BrokerOnTheWayTest, ACancellationThatIsEarlierThanTheWaitEndsIt) {
  WhenAskedToClose([&] {
    broker_->waiting().Cancel(remote_, kKey + 1);
    broker_->waiting().Cancel(remote_, kKey);
  });
  Allocate(40_MiB);
  Settle();
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(absl::IsCancelled(answers_[0].status())) << answers_[0].status();
  EXPECT_EQ(broker_->waiting().GetWaiting(0).size(), 0u);
}

TEST_F(BrokerOnTheWayTest, AWaitIsCancelledByItsKey) {
  Allocate(40_MiB);
  Settle();
  ASSERT_EQ(broker_->waiting().GetWaiting(0).size(), 1u);
  broker_->waiting().Cancel(remote_, kKey + 1);
  broker_->waiting().Cancel(holder_, kKey);
  EXPECT_EQ(answers_.size(), 0u);
  broker_->waiting().Cancel(remote_, kKey);
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(absl::IsCancelled(answers_[0].status())) << answers_[0].status();
}

TEST_F(BrokerOnTheWayTest, ASessionWhoseStreamBreaksDoesNotComeToWait) {
  WhenAskedToClose([&] { broker_->Disconnect(remote_); });
  Allocate(40_MiB);
  Settle();
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(absl::IsAborted(answers_[0].status())) << answers_[0].status();
  EXPECT_EQ(broker_->waiting().GetWaiting(0).size(), 0u);
}

// The session frees a block after a vain search of the cache, and frees no block later.
TEST_F(BrokerOnTheWayTest, WhatIsFreedBeforeItWaitsServesIt) {
  ASSERT_EQ(remote_->TrimSlowly(0).value_or(0), 20_MiB);
  Hold(OpenLeasing("newcomer"), {20_MiB});
  // The first read of the clock is the read at which the wait begins.
  bool is_freed = false;
  After(0, [&] {
    EXPECT_EQ(broker_->waiting().size(0), 0u);
    is_freed = broker_->allocations().Free(remote_, {used_.block}).ok();
  });
  Allocate(16_MiB);
  Settle();
  ASSERT_TRUE(is_freed);
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_EQ(answers_[0].value().segment, used_.segment);
  EXPECT_EQ(broker_->waiting().size(0), 0u);
}

}  // namespace
}  // namespace vrambroker
