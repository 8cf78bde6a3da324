// SPDX-License-Identifier: Apache-2.0
//
// Tests of leasing sessions, and of questions to their clients.
#include "tests/unit/server/core/broker_fixture.h"

namespace vrambroker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST_F(BrokerTest, SegmentsAreLeasedAndReturned) {
  const SessionPtr session = OpenLeasing("a");
  const absl::StatusOr<std::vector<Lease>> leases = LeaseSegments(session, {2_MiB, 20_MiB}, 1);
  ASSERT_TRUE(leases.ok()) << leases.status();
  ASSERT_EQ(leases->size(), 2u);
  EXPECT_EQ((*leases)[0].bytes, 2_MiB);
  EXPECT_EQ((*leases)[1].bytes, 20_MiB);
  EXPECT_EQ(pools_[1]->GetAccount(session->id())->reserved_bytes, 22_MiB);
  const SegmentId first = (*leases)[0].segment;
  const SegmentId second = (*leases)[1].segment;

  EXPECT_TRUE(absl::IsNotFound(broker_->leases().ReturnSegments(session, 1, {first, SegmentId{999}})));
  EXPECT_TRUE(absl::IsInvalidArgument(broker_->leases().ReturnSegments(session, 1, {first, first})));
  EXPECT_TRUE(absl::IsNotFound(broker_->leases().ReturnSegments(session, 0, {first}))) << "of another device";
  const SessionPtr other = OpenLeasing("b");
  EXPECT_TRUE(absl::IsNotFound(broker_->leases().ReturnSegments(other, 1, {first}))) << "another session's";
  EXPECT_EQ(pools_[1]->GetAccount(session->id())->reserved_bytes, 22_MiB) << "all of a call, or none";
  ASSERT_EQ(broker_->leases().ReturnSegments(session, 1, {second, first}), absl::OkStatus());
  EXPECT_TRUE(absl::IsNotFound(broker_->leases().ReturnSegments(session, 1, {first}))) << "twice";
  EXPECT_EQ(pools_[1]->GetAccount(session->id())->reserved_bytes, 0u);
  EXPECT_EQ(pools_[1]->GetStats().idle_bytes, 22_MiB);

  ASSERT_TRUE(LeaseSegments(other, {20_MiB}, 1).ok());
  EXPECT_EQ(pools_[1]->GetStats().segment_allocs, 2u) << "the same user's idle segment, without a driver call";
}

TEST_F(BrokerTest, AnIdleSegmentIsLeasedWhileSlowCallsAreUnderWay) {
  const SessionPtr session = OpenLeasing("a");
  ASSERT_EQ(broker_->leases().ReturnSegments(session, 0, {(*LeaseSegments(session, {2_MiB}))[0].segment}),
            absl::OkStatus());
  Gate& gate = controls_[0]->Hold(FakeDevice::Call::kAllocate);
  Signal slow_done;
  broker_->leases().LeaseSegments(session, 0, {20_MiB}, [&](const absl::StatusOr<std::vector<Lease>>& leases) {
    EXPECT_TRUE(leases.ok());
    slow_done.Notify();
  });
  gate.AwaitArrivals(1);
  EXPECT_TRUE(LeaseSegments(session, {2_MiB}).ok()) << "waited for the driver";
  gate.Open();
  slow_done.WaitForNotification();
}

TEST_F(BrokerTest, ALeaseIsRefusedAsAWhole) {
  const SessionPtr session = OpenLeasing("a", Limit(uint64_t{30_MiB}));
  const v1::OutOfMemory oom = Report(LeaseSegments(session, {20_MiB, 20_MiB}).status());
  EXPECT_EQ(oom.cause(), v1::OutOfMemory::CAUSE_LIMIT);
  EXPECT_EQ(pools_[0]->GetAccount(session->id())->reserved_bytes, 0u) << "the first one came back";
  EXPECT_EQ(Refusals(0, OomCause::kLimit), 0u) << "counted only when a request of the application failed";
  EXPECT_EQ(Report(LeaseSegments(session, {66_MiB}).status()).cause(), v1::OutOfMemory::CAUSE_LARGER_THAN_DEVICE);

  const std::vector<uint64_t> too_many(65, 2_MiB);
  for (const std::vector<uint64_t>& sizes : {std::vector<uint64_t>{}, {0}, {2_MiB + 1}, {2_MiB, 3_MiB}, too_many}) {
    const absl::Status status = LeaseSegments(session, sizes).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("segment_bytes"));
  }
  EXPECT_TRUE(absl::IsNotFound(LeaseSegments(session, {2_MiB}, 2).status())) << "no such device";
}

TEST_F(BrokerTest, PlacementsDoNotMix) {
  const SessionPtr remote = Open("remote");
  const SessionPtr leasing = OpenLeasing("leasing");
  EXPECT_TRUE(absl::IsFailedPrecondition(LeaseSegments(remote, {2_MiB}).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(broker_->leases().ReturnSegments(remote, 0, {SegmentId{1}})));
  EXPECT_TRUE(absl::IsFailedPrecondition(LeaseSegments(remote, {kCapacity + 2_MiB}).status())) << "whatever it wants";
  EXPECT_TRUE(absl::IsFailedPrecondition(Explain(remote, 0, {.requested_bytes = 512})));
  EXPECT_TRUE(absl::IsFailedPrecondition(Allocate(leasing, 512).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(broker_->allocations().Free(leasing, {BlockId{1}})));
  EXPECT_EQ(broker_->refusals().log().total(), 0u) << "nothing was refused for want of memory";
}

TEST_F(BrokerTest, ARefusedRequestOfTheClientsIsExplained) {
  const SessionPtr session = OpenLeasing("a", Limit(uint64_t{20_MiB}));
  ASSERT_TRUE(LeaseSegments(session, {20_MiB}).ok());
  RefusedRequest request{
      .cause = OomCause::kLimit,
      .requested_bytes = 5'000'000,
      .allocated_bytes = 19_MiB,
      .fit = {.block_bytes = 5_MiB, .segment_bytes = 20_MiB, .pool_free_bytes = 1_MiB, .pool_largest_bytes = 1_MiB}};
  request.fit.holes = {.bytes = 1_MiB, .count = 1, .segments = 1};
  request.fit.knows_holes = true;
  const v1::OutOfMemory oom = Report(Explain(session, 0, request));
  EXPECT_EQ(oom.cause(), v1::OutOfMemory::CAUSE_LIMIT);
  EXPECT_EQ(oom.requested_bytes(), 5'000'000u);
  EXPECT_EQ(oom.segment_bytes(), 20_MiB);
  EXPECT_EQ(oom.reserved_bytes(), 20_MiB);
  EXPECT_EQ(oom.allocated_bytes(), 19_MiB);
  ASSERT_EQ(oom.largest_holders_size(), 1);
  EXPECT_EQ(oom.largest_holders(0).allocated_bytes(), 19_MiB) << "its client has not reported yet";
  EXPECT_EQ(oom.idle_elsewhere_bytes(), 0u) << "there is nobody else";
  EXPECT_EQ(oom.largest_free_block_bytes(), 1_MiB);
  EXPECT_EQ(Refusals(0, OomCause::kLimit), 1u);
  EXPECT_EQ(oom.block_bytes(), 5_MiB);
  EXPECT_EQ(oom.holes().hole_bytes(), 1_MiB);
  request.allocated_bytes = 15_MiB;
  EXPECT_EQ(Report(Explain(session, 0, request)).cause(), v1::OutOfMemory::CAUSE_FRAGMENTATION);
  EXPECT_TRUE(absl::IsNotFound(Explain(session, 2, request))) << "no such device";
}

// A client's figures may be late, or false.
TEST_F(BrokerTest, ARefusalBelievesAClientNoMoreThanItHasReserved) {
  const SessionPtr session = OpenLeasing("a", Limit(uint64_t{20_MiB}));
  ASSERT_TRUE(LeaseSegments(session, {20_MiB}).ok());
  MemoryStats stats;
  stats.allocated_bytes.all.current = 1_GiB;
  session->leased()->Report(0, stats);
  EXPECT_EQ(Report(LeaseSegments(session, {2_MiB}).status()).allocated_bytes(), 20_MiB);
  const v1::OutOfMemory oom = Report(Explain(session, 0, {.requested_bytes = 512, .allocated_bytes = 1_GiB}));
  EXPECT_EQ(oom.allocated_bytes(), 20_MiB);
  EXPECT_EQ(oom.largest_holders(0).allocated_bytes(), 20_MiB);
}

TEST_F(BrokerTest, TheClientIsAskedForWhatOnlyItKnows) {
  const SessionPtr session = OpenLeasing("a");
  const absl::StatusOr<std::vector<Lease>> leases = LeaseSegments(session, {2_MiB, 20_MiB});
  ASSERT_TRUE(leases.ok()) << leases.status();
  const std::weak_ptr<Session> weak = session;
  client_->on_ask = [&](uint64_t id, const ClientQuestion& question) {
    const SessionPtr alive = weak.lock();
    LeasedSession& asked = *alive->leased();
    switch (question.kind) {
      case ClientQuestion::Kind::kTrim:
        EXPECT_EQ(question.bytes, 41u);
        EXPECT_TRUE(asked.ReturnSegments(0, {leases->front().segment}).ok());
        asked.questions().Receive(id, 0, false, [&](ClientAnswer& answer) {
          answer.released_bytes = 2_MiB;
          return absl::OkStatus();
        });
        break;
      case ClientQuestion::Kind::kStats: {
        MemoryStats stats;
        stats.allocated_bytes.all.Up(12345);
        asked.Report(0, stats);
        asked.questions().Receive(id, 0, false, [](ClientAnswer&) { return absl::OkStatus(); });
        break;
      }
      case ClientQuestion::Kind::kSnapshot:
        for (const bool more : {true, true, false}) {
          asked.questions().Receive(id, 1, more, [&](ClientAnswer& answer) {
            answer.snapshot.segments.push_back({.id = SegmentId{7}, .bytes = 2_MiB});
            return absl::OkStatus();
          });
        }
        break;
      case ClientQuestion::Kind::kRecord:
      case ClientQuestion::Kind::kHoldRecording:
        asked.questions().Receive(id, 0, false, [&](ClientAnswer&) { return absl::OkStatus(); });
        break;
    }
  };
  EXPECT_EQ(Trim(session, 41).value_or(0), 2_MiB);
  EXPECT_EQ(SetRecording(session, 5), absl::OkStatus());

  Signal refreshed;
  session->Refresh([&] { refreshed.Notify(); });
  refreshed.WaitForNotification();
  const SessionView info = broker_->operator_view().Describe(*session);
  EXPECT_EQ(info.devices[0].stats.allocated_bytes.all.current, 12345u) << "as the client says";
  EXPECT_EQ(info.devices[0].account.reserved_bytes, 20_MiB) << "as the daemon counts";

  Signal answered;
  session->Snapshot(0, [&](const absl::StatusOr<HeapSnapshot>& snapshot) {
    EXPECT_TRUE(snapshot.ok()) << snapshot.status();
    EXPECT_EQ(snapshot.value_or(HeapSnapshot()).segments.size(), 3u) << "all parts";
    answered.Notify();
  });
  answered.WaitForNotification();
}

TEST_F(BrokerTest, AQuestionEndsWithTheSession) {
  const SessionPtr session = OpenLeasing("a");
  client_->on_ask = [&](uint64_t, const ClientQuestion&) { broker_->Disconnect(session); };
  Signal answered;
  session->Trim(0, [&](const absl::StatusOr<uint64_t>& released) {
    EXPECT_TRUE(absl::IsAborted(released.status())) << released.status();
    answered.Notify();
  });
  answered.WaitForNotification();
  EXPECT_TRUE(absl::IsAborted(Trim(session, 0).status())) << "nobody to ask";
}

TEST_F(BrokerTest, ASessionIsResumed) {
  const SessionPtr session = OpenLeasing("a");
  const ResumeToken token = session->leased()->resume_token();
  const std::vector<Lease> leases = *LeaseSegments(session, {2_MiB, 20_MiB});
  EXPECT_TRUE(absl::IsUnavailable(Resume(token, {}).status())) << "its stream is there";

  broker_->Disconnect(session);
  EXPECT_TRUE(absl::IsAborted(LeaseSegments(session, {2_MiB}).status()));
  EXPECT_EQ(pools_[0]->GetAccount(session->id())->reserved_bytes, 22_MiB) << "stays charged";
  ResumeToken wrong = token;
  wrong[0] = static_cast<char>(wrong[0] + 1);
  EXPECT_TRUE(absl::IsNotFound(Resume(wrong, {}).status()));
  EXPECT_TRUE(absl::IsPermissionDenied(Resume(token, {}, Process(2, 1000)).status()));
  EXPECT_TRUE(absl::IsPermissionDenied(Resume(token, {}, Process(1, 1001)).status()));

  const absl::StatusOr<SessionPtr> resumed = Resume(token, {leases[1].segment});
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_EQ(*resumed, session);
  EXPECT_EQ(session->state(), SessionState::kActive);
  EXPECT_EQ(pools_[0]->GetAccount(session->id())->reserved_bytes, 20_MiB) << "what the client does not hold came back";
  EXPECT_EQ(broker_->leases().ReturnSegments(session, 0, {leases[1].segment}), absl::OkStatus());
  EXPECT_TRUE(LeaseSegments(session, {2_MiB}).ok());
  ASSERT_EQ(broker_->limits().SetLimit(session, Limit(0.5)), absl::OkStatus());
  EXPECT_THAT(client_->told(), ElementsAre("limit 0 33554432", "limit 1 33554432")) << "the new stream is told";

  broker_->Disconnect(session);
  broker_->EndSession(session, "operator");
  EXPECT_TRUE(absl::IsAborted(Resume(token, {}).status())) << "an operator's end is not evaded";
  std::vector<absl::Status> too_late = {broker_->limits().SetLimit(session, Limit(0.25)),
                                        broker_->limits().SetPriority(session, 1)};
  broker_->limits().SetGuarantee(session, Limit(0.1), [&](const absl::Status& set) { too_late.push_back(set); });
  too_late.push_back(Trim(session, 0).status());
  ASSERT_EQ(too_late.size(), 4u);
  for (const absl::Status& status : too_late) {
    EXPECT_TRUE(absl::IsAborted(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("session 'a' has ended: ")) << "one answer";
  }
  broker_->Close(session, "its process has ended");
  EXPECT_TRUE(absl::IsNotFound(Resume(token, {}).status()));
}

TEST_F(BrokerTest, NothingIsLeasedWhileAllAreClosed) {
  const SessionPtr first = OpenLeasing("a");
  const SessionPtr second = OpenLeasing("b");
  ASSERT_TRUE(LeaseSegments(first, {20_MiB}).ok());
  pools_[0]->Seal();  // CloseAll() begins in this way
  broker_->Close(first, "stopping");
  EXPECT_TRUE(absl::IsAborted(LeaseSegments(second, {20_MiB}).status())) << "the first client still uses it";
}

TEST_F(BrokerTest, WhatALostAnswerLeasedComesBackWithResume) {
  const SessionPtr session = OpenLeasing("a");
  Gate& gate = controls_[0]->Hold(FakeDevice::Call::kAllocate);
  broker_->leases().LeaseSegments(session, 0, {20_MiB}, [](const absl::StatusOr<std::vector<Lease>>&) {});
  gate.AwaitArrivals(1);
  broker_->Disconnect(session);
  Signal answered;
  broker_->ResumeSession(Process(1, 1000), session->leased()->resume_token(), {}, std::make_shared<FakeClient>(),
                         [&](const absl::StatusOr<SessionPtr>& resumed) {
                           EXPECT_TRUE(resumed.ok()) << resumed.status();
                           answered.Notify();
                         });
  EXPECT_FALSE(answered.HasBeenNotified()) << "a call of the session is under way";
  gate.Open();
  answered.WaitForNotification();
  EXPECT_EQ(pools_[0]->GetAccount(session->id())->reserved_bytes, 0u);
}

}  // namespace
}  // namespace vrambroker
