// SPDX-License-Identifier: Apache-2.0
//
// Tests of Broker: counted sessions, whose programs take memory from the driver themselves.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "allocator/base/bytes.h"
#include "server/requests/charges.h"
#include "server/sessions/counted_session.h"
#include "tests/unit/server/core/broker_fixture.h"

namespace vrambroker {
namespace {

using ::testing::HasSubstr;

class BrokerCountedTest : public BrokerTest {
 protected:
  // Holds the answer to a charge.
  struct Charging {
    Signal answered;
    absl::Status answer = absl::UnknownError("no answer");
  };

  SessionPtr OpenCounted(const std::string& name, std::optional<Limit> limit = std::nullopt,
                         Caller caller = Process(1, 1000)) {
    client_ = std::make_shared<FakeClient>();
    absl::StatusOr<SessionPtr> session =
        broker_->OpenSession(caller, {.name = name, .limit = limit, .placement = Placement::kCounted}, client_);
    EXPECT_TRUE(session.ok()) << session.status();
    return session.value_or(nullptr);
  }
  std::shared_ptr<Charging> StartCharge(const SessionPtr& session, uint64_t bytes, const RequestOptions& options = {},
                                        uint64_t device = 0) {
    auto charging = std::make_shared<Charging>();
    broker_->charges().Charge(
        session, device, bytes,
        [charging](absl::Status status) {
          charging->answer = std::move(status);
          charging->answered.Notify();
        },
        options);
    return charging;
  }
  absl::Status Charge(const SessionPtr& session, uint64_t bytes, const RequestOptions& options = {},
                      uint64_t device = 0) {
    const std::shared_ptr<Charging> charging = StartCharge(session, bytes, options, device);
    charging->answered.WaitForNotification();
    return charging->answer;
  }
  uint64_t Reserved(const SessionPtr& session) {
    return pools_[0]->GetAccount(session->id()).value_or(AccountState()).reserved_bytes;
  }
  void AwaitWaiting(size_t count) {
    while (broker_->waiting().size(0) != count) std::this_thread::yield();
  }

  static constexpr RequestOptions kWaits{.may_reclaim = true, .wait = std::chrono::hours(1), .cancel_key = 7};
};

TEST_F(BrokerCountedTest, ItIsHeldToItsLimitAndSeenByOperators) {
  const SessionPtr session = OpenCounted("train", Limit(32_MiB));
  EXPECT_TRUE(Charge(session, 20_MiB).ok());
  EXPECT_TRUE(Charge(session, 20_MiB, {}, /*device=*/1).ok()) << "on each device";
  const BrokerView view = broker_->operator_view().Look();
  ASSERT_EQ(view.sessions.size(), 1u);
  const SessionView& seen = view.sessions[0];
  EXPECT_EQ(seen.placement, Placement::kCounted);
  EXPECT_EQ(seen.devices[0].account.reserved_bytes, 20_MiB);
  EXPECT_EQ(seen.devices[0].stats.allocated_bytes.all.current, 20_MiB) << "what it is charged it uses";
  EXPECT_EQ(seen.devices[0].idle_bytes, 0u);
  const absl::Status refused = Charge(session, 14_MiB, {.may_reclaim = true});
  EXPECT_EQ(Report(refused).cause(), v1::OutOfMemory::CAUSE_LIMIT);
  EXPECT_EQ(Report(refused).requested_bytes(), 14_MiB);
  EXPECT_TRUE(broker_->charges().Uncharge(session, 0, 20_MiB).ok());
  EXPECT_EQ(Reserved(session), 0u);
  EXPECT_EQ(session->GetMemoryStats(0).reserved_bytes.all.peak, 20_MiB);
}

// The first try takes the fast way. Only a refusal after questions to other sessions leaves the program without memory.
TEST_F(BrokerCountedTest, ARefusalCountsOnceOthersWereAsked) {
  const SessionPtr session = OpenCounted("train", Limit(8_MiB));
  EXPECT_TRUE(absl::IsResourceExhausted(Charge(session, 10_MiB)));
  EXPECT_EQ(Refusals(0, OomCause::kLimit), 0u);
  EXPECT_TRUE(broker_->refusals().log().NewestFirst().empty());
  EXPECT_TRUE(absl::IsResourceExhausted(Charge(session, 10_MiB, {.may_reclaim = true})));
  EXPECT_EQ(Refusals(0, OomCause::kLimit), 1u);
  ASSERT_EQ(broker_->refusals().log().NewestFirst().size(), 1u);
}

TEST_F(BrokerCountedTest, BadCallsAreRefused) {
  const SessionPtr counted = OpenCounted("counted");
  const SessionPtr remote = Open("remote");
  EXPECT_TRUE(absl::IsInvalidArgument(Charge(counted, 0)));
  EXPECT_TRUE(absl::IsInvalidArgument(Charge(counted, 3)));
  EXPECT_TRUE(absl::IsNotFound(Charge(counted, 2_MiB, {}, /*device=*/2)));
  EXPECT_TRUE(absl::IsFailedPrecondition(Charge(remote, 2_MiB)));
  EXPECT_TRUE(absl::IsFailedPrecondition(broker_->charges().Uncharge(remote, 0, 2_MiB)));
  EXPECT_EQ(Report(Charge(counted, uint64_t{1} << 62)).cause(), v1::OutOfMemory::CAUSE_LARGER_THAN_DEVICE);
  EXPECT_TRUE(absl::IsInvalidArgument(Charge(counted, 2_MiB, {.may_reclaim = true, .wait = std::chrono::hours(2)})));
  // A counted session gets no memory of the daemon, either.
  EXPECT_TRUE(absl::IsFailedPrecondition(LeaseSegments(counted, {2_MiB}).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(Allocate(counted, 2_MiB).status()));
}

TEST_F(BrokerCountedTest, ItWaitsUntilAnotherProgramEnds) {
  const SessionPtr first = OpenCounted("first");
  const SessionPtr second = OpenCounted("second", std::nullopt, Process(2, 1000));
  ASSERT_TRUE(Charge(first, 60_MiB).ok());
  const std::shared_ptr<Charging> waiting = StartCharge(second, 40_MiB, kWaits);
  AwaitWaiting(1);
  gone_[0]();
  waiting->answered.WaitForNotification();
  EXPECT_TRUE(waiting->answer.ok()) << waiting->answer;
  EXPECT_EQ(Reserved(second), 40_MiB);
  Drain(second);
}

TEST_F(BrokerCountedTest, AClientThatGivesUpIsNotCharged) {
  const SessionPtr first = OpenCounted("first");
  const SessionPtr second = OpenCounted("second", std::nullopt, Process(2, 1000));
  ASSERT_TRUE(Charge(first, 60_MiB).ok());
  const std::shared_ptr<Charging> waiting = StartCharge(second, 40_MiB, kWaits);
  AwaitWaiting(1);
  broker_->waiting().Cancel(second, 7);
  waiting->answered.WaitForNotification();
  EXPECT_TRUE(absl::IsCancelled(waiting->answer));
  ASSERT_TRUE(broker_->charges().Uncharge(first, 0, 60_MiB).ok());
  EXPECT_EQ(Reserved(second), 0u);
}

// The broker first asks for memory that other sessions only cache.
TEST_F(BrokerCountedTest, OthersGiveBackWhatTheyCache) {
  const SessionPtr cache = Open("cache", std::nullopt, Process(2, 1000));
  const absl::StatusOr<Allocation> block = Allocate(cache, 60_MiB);
  ASSERT_TRUE(block.ok());
  ASSERT_TRUE(broker_->allocations().Free(cache, {block->block}).ok());
  const SessionPtr session = OpenCounted("train");
  EXPECT_TRUE(absl::IsResourceExhausted(Charge(session, 40_MiB))) << "the fast way asks nobody";
  EXPECT_TRUE(Charge(session, 40_MiB, {.may_reclaim = true}).ok());
  EXPECT_EQ(controls_[0]->live_bytes(), 0u) << "and the driver has it";
  Drain(cache);
  Drain(session);
}

TEST_F(BrokerCountedTest, NothingCanBeTakenFromIt) {
  const SessionPtr session = OpenCounted("train");
  ASSERT_TRUE(Charge(session, 60_MiB).ok());
  const SessionPtr other = Open("other", std::nullopt, Process(2, 1000));
  const absl::StatusOr<Allocation> block = Allocate(other, 40_MiB, 0, 0, {.may_reclaim = true});
  EXPECT_EQ(Report(block.status()).cause(), v1::OutOfMemory::CAUSE_CAPACITY);
  EXPECT_EQ(Trim(session, 0).value_or(1), 0u);
  EXPECT_EQ(Reserved(session), 60_MiB);
}

// The broker does not ask a counted session: no request waits for an answer that is known.
TEST_F(BrokerCountedTest, ItIsNotAskedForMemory) {
  const SessionPtr session = OpenCounted("train");
  const SessionPtr other = OpenCounted("other", std::nullopt, Process(2, 1000));
  ASSERT_TRUE(Charge(session, 60_MiB).ok());
  EXPECT_EQ(Report(Charge(other, 40_MiB, {.may_reclaim = true})).cause(), v1::OutOfMemory::CAUSE_CAPACITY);
  EXPECT_EQ(pools_[0]->GetView().reclaims.reclaims, 0u);
}

TEST_F(BrokerCountedTest, AnEndedSessionGrowsNoMoreAndGivesBack) {
  const SessionPtr session = OpenCounted("train");
  ASSERT_TRUE(Charge(session, 20_MiB).ok());
  EXPECT_EQ(broker_->EndSession(session, "by hand"), 20_MiB);
  EXPECT_TRUE(absl::IsAborted(Charge(session, 2_MiB)));
  EXPECT_TRUE(broker_->charges().Uncharge(session, 0, 20_MiB).ok());
  EXPECT_EQ(Reserved(session), 0u);
}

TEST_F(BrokerCountedTest, ADisconnectedSessionStaysCharged) {
  const SessionPtr session = OpenCounted("train");
  ASSERT_TRUE(Charge(session, 20_MiB).ok());
  broker_->Disconnect(session);
  EXPECT_TRUE(absl::IsAborted(Charge(session, 2_MiB)));
  EXPECT_EQ(pools_[0]->GetStats().charged_bytes, 20_MiB);
  gone_[0]();
  EXPECT_EQ(pools_[0]->GetStats().charged_bytes, 0u);
}

TEST_F(BrokerCountedTest, ItHasNoBlocksToShow) {
  const SessionPtr session = OpenCounted("train");
  Signal answered;
  session->Snapshot(0, [&](const absl::StatusOr<HeapSnapshot>& snapshot) {
    EXPECT_TRUE(absl::IsFailedPrecondition(snapshot.status()));
    EXPECT_THAT(std::string(snapshot.status().message()), HasSubstr("the daemon knows no blocks"));
    answered.Notify();
  });
  answered.WaitForNotification();
  EXPECT_TRUE(absl::IsFailedPrecondition(SetRecording(session, 100)));
  Drain(session);
}

// Two programs that start at once would both take all free memory if the programs sized themselves by the device's free
// memory.
TEST_F(BrokerCountedTest, ProgramsSizeThemselvesByTheirOwnShare) {
  const SessionPtr first = OpenCounted("first", Limit(0.5));
  const SessionPtr second = OpenCounted("second", Limit(0.5), Process(2, 1000));
  ASSERT_TRUE(Charge(first, 20_MiB).ok());
  const absl::StatusOr<Charges::Room> room = broker_->charges().GetRoom(second, 0);
  ASSERT_TRUE(room.ok());
  EXPECT_EQ(room->limit, 32_MiB);
  EXPECT_EQ(room->free, 32_MiB);
  EXPECT_EQ(room->charged, 0u);
  const absl::StatusOr<Charges::Room> own = broker_->charges().GetRoom(first, 0);
  ASSERT_TRUE(own.ok());
  EXPECT_EQ(own->free, 12_MiB);
  EXPECT_EQ(own->charged, 20_MiB);
}

}  // namespace
}  // namespace vrambroker
