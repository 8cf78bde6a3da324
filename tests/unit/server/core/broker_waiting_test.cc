// SPDX-License-Identifier: Apache-2.0
//
// Tests of requests that wait for memory, as the broker sees the requests. The test controls the broker's clock.
#include <memory>
#include <optional>
#include <vector>

#include "tests/unit/server/core/broker_waiting_fixture.h"

namespace vrambroker {
namespace {

using std::chrono::milliseconds;

// ---- Memory that the driver lacks ----

// Contexts, or other programs, have taken granted memory meanwhile. The request waits on.
TEST_F(BrokerWaitingTest, WhatTheDriverRefusesIsWaitedFor) {
  for (const bool leases : {true, false}) {
    SCOPED_TRACE(leases ? "leased" : "remote");
    BrokerOptions options;
    options.clock = [this] { return ReadClock(); };
    Make(std::move(options), {.clock = [this] { return now_; }}, DeviceKind::kCuda);
    const SessionPtr holder = OpenLeasing("holder");
    const std::vector<Lease> held = Hold(holder, {32_MiB, 16_MiB});
    controls_[0]->set_foreign_bytes(16_MiB);
    std::optional<absl::Status> answer;
    AskOrAllocate(leases, 16_MiB, answer);
    Settle();
    ASSERT_EQ(broker_->waiting().GetWaiting(0).size(), 1u) << answer.value_or(absl::OkStatus());
    // Other programs take the returned memory, too, before the broker asks the driver.
    ASSERT_TRUE(pools_[0]->UpdateHealth().ok());
    ASSERT_TRUE(broker_->leases().ReturnSegments(holder, 0, {held[1].segment}).ok());
    pools_[0]->ReleaseIdleSince(now_);
    controls_[0]->set_foreign_bytes(32_MiB);
    Settle();
    EXPECT_FALSE(answer.has_value()) << *answer;
    ASSERT_EQ(broker_->waiting().GetWaiting(0).size(), 1u);
    ASSERT_TRUE(broker_->leases().ReturnSegments(holder, 0, {held[0].segment}).ok());
    Settle();
    ASSERT_TRUE(answer.has_value());
    EXPECT_TRUE(answer->ok()) << *answer;
    controls_[0]->set_foreign_bytes(0);
    ASSERT_TRUE(pools_[0]->UpdateHealth().ok());
    broker_->CloseAll("next");
    Settle();
  }
}

// The rule's bound covers the whole request, however often a grant is in vain.
TEST_F(BrokerWaitingTest, TheRulesMaxWaitBoundsAllWaitsOfARequestTogether) {
  for (const bool leases : {true, false}) {
    SCOPED_TRACE(leases ? "leased" : "remote");
    BrokerOptions options;
    options.clock = [this] { return ReadClock(); };
    options.policy = PolicyOf({.max_wait = std::chrono::seconds(10)});
    Make(std::move(options), {.clock = [this] { return now_; }}, DeviceKind::kCuda);
    const SessionPtr holder = OpenLeasing("holder");
    const std::vector<Lease> held = Hold(holder, {32_MiB, 16_MiB});
    controls_[0]->set_foreign_bytes(16_MiB);
    const SteadyTime began = now_;
    std::optional<absl::Status> answer;
    AskOrAllocate(leases, 16_MiB, answer);
    Settle();
    ASSERT_EQ(broker_->waiting().GetWaiting(0).size(), 1u);
    EXPECT_EQ(broker_->waiting().GetWaiting(0)[0].deadline, began + std::chrono::seconds(10));
    Pass(std::chrono::seconds(6));
    // Other programs take the returned memory before the broker asks the driver.
    ASSERT_TRUE(pools_[0]->UpdateHealth().ok());
    ASSERT_TRUE(broker_->leases().ReturnSegments(holder, 0, {held[1].segment}).ok());
    pools_[0]->ReleaseIdleSince(now_);
    controls_[0]->set_foreign_bytes(32_MiB);
    Settle();
    ASSERT_EQ(broker_->waiting().GetWaiting(0).size(), 1u) << "it waits on";
    EXPECT_EQ(broker_->waiting().GetWaiting(0)[0].since, now_);
    EXPECT_EQ(broker_->waiting().GetWaiting(0)[0].deadline, began + std::chrono::seconds(10));
    Pass(std::chrono::seconds(4));
    ASSERT_TRUE(answer.has_value());
    EXPECT_TRUE(absl::IsResourceExhausted(*answer)) << *answer;
    controls_[0]->set_foreign_bytes(0);
    ASSERT_TRUE(pools_[0]->UpdateHealth().ok());
    broker_->CloseAll("next");
    Settle();
  }
}

// The client asks for explanations of refusals in a separate call.
TEST_F(BrokerWaitingTest, WhatWasDoneForALeaseExplainsOneRefusal) {
  Hold(OpenLeasing("holder"), {kCapacity});
  const SessionPtr session = OpenLeasing("waiting");
  const auto answer = Ask(session, {2_MiB}, {.may_reclaim = true, .wait = std::chrono::seconds(5)});
  Settle();
  Pass(std::chrono::seconds(6));
  ASSERT_TRUE(answer->has_value());
  EXPECT_EQ(Report((*answer)->status()).waited_ms(), 6000u);
  const RefusedRequest request{
      .cause = OomCause::kCapacity, .requested_bytes = 2_MiB, .fit = {.block_bytes = 2_MiB, .segment_bytes = 2_MiB}};
  EXPECT_EQ(Report(Explain(session, 0, request)).waited_ms(), 6000u);
  EXPECT_EQ(Report(Explain(session, 0, request)).waited_ms(), 0u) << "another request's";
}

TEST_F(BrokerWaitingTest, ABrokerThatGoesForgetsWhoWaits) {
  Hold(OpenLeasing("holder"), {kCapacity});
  const RequestOptions waits{.may_reclaim = true, .wait = std::chrono::hours(1)};
  const SessionPtr leasing = OpenLeasing("leasing");
  const auto lease = Ask(leasing, {2_MiB}, waits);
  const SessionPtr remote = Open("remote");
  std::optional<absl::Status> block;
  broker_->allocations().Allocate(
      remote, 0, 2_MiB, 0, [&](const auto& allocation) { block = allocation.status(); }, waits);
  Settle();
  ASSERT_EQ(broker_->waiting().GetWaiting(0).size(), 2u);
  broker_.reset();
  EXPECT_FALSE(lease->has_value());
  EXPECT_FALSE(block.has_value());
  // Later changes of the pool concern no request.
  for (const SessionPtr& session : {leasing, remote}) pools_[0]->CloseAccount(session->id());
  BrokerOptions options;
  options.clock = [this] { return ReadClock(); };
  Make(std::move(options), {.clock = [this] { return now_; }});
}

TEST_F(BrokerWaitingTest, AGuaranteeOfADisconnectedSessionWaitsForNobody) {
  const SessionPtr holder = OpenLeasing("holder");
  Hold(holder, {kCapacity});
  const SessionPtr session = OpenLeasing("session");
  broker_->Disconnect(session);
  std::optional<absl::Status> answer;
  broker_->limits().SetGuarantee(session, Limit(uint64_t{8_MiB}), [&](const absl::Status& status) { answer = status; });
  ASSERT_TRUE(answer.has_value()) << "at once";
  EXPECT_TRUE(absl::IsAborted(*answer)) << *answer;
  EXPECT_EQ(broker_->waiting().GetWaiting(0).size(), 0u);
}

// The earlier call waits for the second device meanwhile. The undoing of the earlier call comes before the answer to
// the later call.
TEST_F(BrokerWaitingTest, AGuaranteeThatWasGivenIsNotTakenAwayByAnEarlierCallThatFails) {
  const SessionPtr holder = OpenLeasing("holder");
  broker_->leases().LeaseSegments(holder, 1, {kCapacity - 10_MiB},
                                  [](const Leases& held) { EXPECT_TRUE(held.ok()) << held.status(); });
  Settle();
  const SessionPtr session = OpenLeasing("session");
  std::vector<std::pair<uint64_t, bool>> answers;
  for (const uint64_t bytes : {30_MiB, 8_MiB, 40_MiB}) {
    broker_->limits().SetGuarantee(
        session, Limit(bytes), [&, bytes](const absl::Status& status) { answers.emplace_back(bytes, status.ok()); });
    Settle();
  }
  EXPECT_EQ(broker_->waiting().GetWaiting(1).size(), 1u) << "one after the other";
  for (int i = 0; i < 10 && answers.size() < 3; ++i) Pass(milliseconds(1000));
  EXPECT_EQ(answers, (std::vector<std::pair<uint64_t, bool>>{{30_MiB, false}, {8_MiB, true}, {40_MiB, false}}));
  for (const auto& pool : pools_) EXPECT_EQ(pool->GetAccount(session->id())->guarantee_bytes, 8_MiB);
}

TEST_F(BrokerWaitingTest, AsManyChangesOfAGuaranteeAsThereAreMayWaitForOne) {
  constexpr int kChanges = 100'000;  // a stack could not hold changes nested this deep
  Hold(OpenLeasing("holder"), {kCapacity});
  const SessionPtr session = OpenLeasing("session");
  int answers = 0;
  broker_->limits().SetGuarantee(session, Limit(8_MiB), [&](const absl::Status&) { ++answers; });
  for (int i = 0; i < kChanges; ++i) {
    broker_->limits().SetGuarantee(session, Limit(2.0), [&](const absl::Status&) { ++answers; });
  }
  EXPECT_EQ(answers, 0);
  for (int i = 0; i < 10 && answers == 0; ++i) Pass(milliseconds(1000));
  EXPECT_EQ(answers, kChanges + 1);
}

// The two sessions look at the rest of their user's guarantee before a session has a part of the guarantee.
TEST_F(BrokerWaitingTest, ASessionGetsOfAGuaranteeWhatAnotherThatOpensWithItHasLeft) {
  PolicyRule rule;
  rule.label = "all";
  rule.guarantee = 30_MiB;
  broker_->SetPolicy(PolicyOf({.rules = {rule}, .user_guarantee = Limit(30_MiB)}));
  const SessionPtr holder = OpenLeasing("holder", std::nullopt, Process(2, 7));
  const std::vector<Lease> held = Hold(holder, {44_MiB});
  const SessionPtr session = OpenLeasing("session");
  std::optional<absl::Status> answer;
  broker_->limits().KeepGuarantee(session, std::nullopt, /*goes_on=*/false,
                                  [&](const absl::Status& status) { answer = status; });
  Settle();
  ASSERT_FALSE(answer.has_value()) << "others are asked for it";
  const SessionPtr other = OpenLeasing("other");
  for (const auto& pool : pools_) ASSERT_TRUE(pool->SetGuarantee(other->id(), 20_MiB).ok());
  ASSERT_TRUE(broker_->leases().ReturnSegments(holder, 0, {held[0].segment}).ok());
  Settle();
  ASSERT_TRUE(answer.has_value());
  EXPECT_EQ(*answer, absl::OkStatus());
  for (const auto& pool : pools_) EXPECT_EQ(pool->GetAccount(session->id())->guarantee_bytes, 10_MiB);
}

// The session's new connection does not know a lease that the old connection asked for.
TEST_F(BrokerWaitingTest, WhatABrokenConnectionAskedForIsNotLeasedToTheNextOne) {
  const SessionPtr hoards = OpenLeasing("hoards");
  const std::vector<Lease> held = Hold(hoards, {kCapacity});
  Ask(OpenLeasing("waiting"), {2_MiB}, {.may_reclaim = true, .wait = std::chrono::hours(1)});
  Settle();
  const SessionPtr session = OpenLeasing("session");
  // The session asks, breaks, and comes back while waiting requests are about to have their turn.
  ASSERT_TRUE(broker_->leases().ReturnSegments(hoards, 0, {held[0].segment}).ok());
  const auto answer = Ask(session, {2_MiB}, {});
  broker_->Disconnect(session);
  std::optional<absl::Status> resumed;
  broker_->ResumeSession(Process(1, 1000), session->leased()->resume_token(), {}, std::make_shared<FakeClient>(),
                         [&](const absl::StatusOr<SessionPtr>& status) { resumed = status.status(); });
  EXPECT_FALSE(answer->has_value());
  Settle();
  ASSERT_TRUE(resumed.has_value() && answer->has_value());
  EXPECT_EQ(*resumed, absl::OkStatus());
  EXPECT_TRUE(absl::IsAborted((*answer)->status())) << (*answer)->status();
  EXPECT_EQ(pools_[0]->GetAccount(session->id())->reserved_bytes, 0u);
}

// The connection breaks, and comes back, between the grant and the task that uses the grant.
TEST_F(BrokerWaitingTest, WhatABrokenConnectionWasGrantedIsNotLeasedToTheNextOne) {
  int broken = 0;
  for (int reads = 0; reads < 8; ++reads) {
    SCOPED_TRACE(reads);
    const SessionPtr hoards = OpenLeasing("hoards");
    const std::vector<Lease> held = Hold(hoards, {kCapacity});
    const SessionPtr session = OpenLeasing("session");
    const auto reserved = [&] { return pools_[0]->GetAccount(session->id())->reserved_bytes; };
    const auto answer = Ask(session, {2_MiB}, {.may_reclaim = true, .wait = std::chrono::hours(1)});
    Settle();
    ASSERT_EQ(broker_->waiting().GetWaiting(0).size(), 1u);
    std::optional<absl::Status> resumed;
    After(reads, [&] {
      if (reserved() == 0 || answer->has_value()) return;
      broker_->Disconnect(session);
      broker_->ResumeSession(Process(1, 1000), session->leased()->resume_token(), {}, std::make_shared<FakeClient>(),
                             [&](const absl::StatusOr<SessionPtr>& status) { resumed = status.status(); });
      Settle();
    });
    ASSERT_TRUE(broker_->leases().ReturnSegments(hoards, 0, {held[0].segment}).ok());
    Settle();
    reads_until_.reset();
    ASSERT_TRUE(answer->has_value());
    if (resumed.has_value()) {
      ++broken;
      EXPECT_EQ(*resumed, absl::OkStatus());
      EXPECT_TRUE(absl::IsAborted((*answer)->status())) << (*answer)->status();
      EXPECT_EQ(reserved(), 0u);
    }
    broker_->Close(session, "test");
    broker_->Close(hoards, "test");
    Settle();
  }
  EXPECT_GT(broken, 0);
}

// ---- Recordings of refusals ----

// Nine sessions of a user are refused at a time. The broker asks eight sessions for their recordings.
TEST_F(BrokerWaitingTest, WhoHasNoPlaceForItsRecordingHasOneTheNextTime) {
  Hold(OpenLeasing("holder"), {kCapacity});
  std::vector<SessionPtr> sessions;
  for (int i = 0; i < 9; ++i) {
    sessions.push_back(Open(absl::StrCat("s", i)));
    ASSERT_TRUE(sessions.back()->SetRecording(100, /*exact_times=*/false).ok());
  }
  const auto refuse = [&](const SessionPtr& session) {
    broker_->allocations().Allocate(session, 0, 2_MiB, 0, [](const auto& block) { EXPECT_FALSE(block.ok()); }, {});
  };
  const auto recorded = [&] {
    size_t number = 0;
    for (const auto& event : broker_->refusals().log().NewestFirst()) number += event->report.is_recorded ? 1 : 0;
    return number;
  };
  for (const SessionPtr& session : sessions) refuse(session);
  Settle();
  EXPECT_EQ(broker_->refusals().log().total(), 9u);
  EXPECT_EQ(recorded(), 8u);
  now_ += milliseconds(60000);
  for (const SessionPtr& session : sessions) {
    refuse(session);
    Settle();
  }
  EXPECT_EQ(recorded(), 17u);
}

// A session that ends long after a refusal ended of something else.
TEST_F(BrokerWaitingTest, AnEndLongAfterARefusalDoesNotCountAsOneAfterIt) {
  Hold(OpenLeasing("holder"), {kCapacity});
  for (const std::chrono::seconds later : {std::chrono::seconds(50), std::chrono::seconds(70)}) {
    const SessionPtr session = Open("refused");
    broker_->allocations().Allocate(session, 0, 2_MiB, 0, [](const auto& block) { EXPECT_FALSE(block.ok()); }, {});
    Settle();
    now_ += later;
    broker_->CloseGone(session);
    Settle();
    uint64_t counted = 0;
    for (const auto& [tenant, counts] : broker_->refusals().GetByTenant()) counted += counts[0].ended_sessions;
    EXPECT_EQ(counted, 1u) << later.count() << " s after its refusal";
  }
}

// ---- Serving threads ----

// A worker serves waiting requests. The thread that makes room may be the daemon's event loop, and would serve for as
// long as clients like.
TEST_F(BrokerWaitingTest, WhoGivesBackDoesNotServeThoseWhoWait) {
  const SessionPtr holder = OpenLeasing("holder");
  const std::vector<Lease> held = Hold(holder, {kCapacity});
  const auto answer = Ask(OpenLeasing("waiting"), {2_MiB}, {.may_reclaim = true, .wait = std::chrono::hours(1)});
  Settle();
  ASSERT_EQ(broker_->waiting().GetWaiting(0).size(), 1u);
  ASSERT_TRUE(broker_->leases().ReturnSegments(holder, 0, {held[0].segment}).ok());
  EXPECT_EQ(broker_->waiting().GetWaiting(0).size(), 1u);
  Settle();
  EXPECT_TRUE(answer->has_value() && (*answer)->ok());
}

// The hoarding session gives and takes in one go, and would never let another session have the memory.
TEST_F(BrokerWaitingTest, WhoTakesAgainAtOnceComesAfterThoseWhoWait) {
  const SessionPtr hoards = OpenLeasing("hoards");
  const std::vector<Lease> held = Hold(hoards, {kCapacity});
  const RequestOptions waits{.may_reclaim = true, .wait = std::chrono::hours(1)};
  const auto waiting = Ask(OpenLeasing("waiting"), {kCapacity}, waits);
  Settle();
  ASSERT_TRUE(broker_->leases().ReturnSegments(hoards, 0, {held[0].segment}).ok());
  const auto again = Ask(hoards, {kCapacity}, waits);
  Settle();
  EXPECT_TRUE(waiting->has_value() && (*waiting)->ok());
  EXPECT_FALSE(again->has_value());
}

TEST_F(BrokerWaitingTest, WhatAGuaranteeAllowsDoesNotComeAfterThoseWhoWait) {
  const SessionPtr guaranteed = OpenLeasing("guaranteed");
  broker_->limits().SetGuarantee(guaranteed, Limit(uint64_t{8_MiB}),
                                 [](const absl::Status& status) { EXPECT_TRUE(status.ok()); });
  Settle();
  const std::vector<Lease> own = Hold(guaranteed, {8_MiB});
  Hold(OpenLeasing("holder"), {kCapacity - 8_MiB});
  const auto waiting = Ask(OpenLeasing("waiting"), {2_MiB}, {.may_reclaim = true, .wait = std::chrono::hours(1)});
  Settle();
  ASSERT_TRUE(broker_->leases().ReturnSegments(guaranteed, 0, {own[0].segment}).ok());
  const auto again = Ask(guaranteed, {8_MiB}, {});
  EXPECT_TRUE(again->has_value() && (*again)->ok()) << "at once: it is idle, and its own";
  Settle();
  EXPECT_FALSE(waiting->has_value());
}

// ---- Requests for the second device ----

TEST_F(BrokerWaitingTest, AnEndedSessionWaitsForNoDevice) {
  Hold(OpenLeasing("holder"), {kCapacity}, 1);
  const SessionPtr session = OpenLeasing("waiting");
  const auto answer = Ask(session, {2_MiB}, {.may_reclaim = true, .wait = std::chrono::hours(1)}, 1);
  Settle();
  ASSERT_EQ(broker_->waiting().GetWaiting(1).size(), 1u);
  broker_->EndSession(session, "test");
  Settle();
  EXPECT_EQ(broker_->waiting().GetWaiting(1).size(), 0u);
  ASSERT_TRUE(answer->has_value());
  EXPECT_TRUE(absl::IsAborted((*answer)->status())) << (*answer)->status();
}

TEST_F(BrokerWaitingTest, APriorityMovesTheRequestsForEachDevice) {
  const SessionPtr holder = OpenLeasing("holder");
  const std::vector<Lease> held = Hold(holder, {2_MiB, kCapacity - 2_MiB}, 1);
  const RequestOptions waits{.may_reclaim = true, .wait = std::chrono::hours(1)};
  const auto first = Ask(OpenLeasing("first"), {2_MiB}, waits, 1);
  const SessionPtr session = OpenLeasing("second");
  const auto second = Ask(session, {2_MiB}, waits, 1);
  Settle();
  ASSERT_TRUE(broker_->limits().SetPriority(session, 1).ok());
  ASSERT_TRUE(broker_->leases().ReturnSegments(holder, 1, {held[0].segment}).ok());
  Settle();
  EXPECT_FALSE(first->has_value());
  EXPECT_TRUE(second->has_value() && (*second)->ok());
}

TEST_F(BrokerWaitingTest, AWaitForEachDeviceEndsInTime) {
  Hold(OpenLeasing("holder"), {kCapacity}, 1);
  const auto answer = Ask(OpenLeasing("waiting"), {2_MiB}, {.may_reclaim = true, .wait = std::chrono::seconds(5)}, 1);
  Settle();
  ASSERT_FALSE(answer->has_value());
  EXPECT_TRUE(broker_->waiting().NextWake().has_value());
  Pass(std::chrono::seconds(6));
  ASSERT_TRUE(answer->has_value());
  EXPECT_TRUE(absl::IsResourceExhausted((*answer)->status())) << (*answer)->status();
}

TEST_F(BrokerWaitingTest, AFreeServesTheRequestsForEachDevice) {
  const SessionPtr remote = Open("remote");
  std::vector<absl::StatusOr<Allocation>> answers;
  const auto allocate = [&] {
    broker_->allocations().Allocate(remote, 1, 16_MiB, 0,
                                    [&](absl::StatusOr<Allocation> answer) { answers.push_back(std::move(answer)); },
                                    {.may_reclaim = true, .wait = std::chrono::hours(1)});
    Settle();
  };
  allocate();
  ASSERT_EQ(answers.size(), 1u);
  const Allocation block = answers[0].value();
  Hold(OpenLeasing("holder"), {kCapacity - 16_MiB}, 1);
  allocate();
  ASSERT_EQ(answers.size(), 1u);
  ASSERT_TRUE(broker_->allocations().Free(remote, {block.block}).ok());
  ASSERT_EQ(answers.size(), 2u);
  EXPECT_EQ(answers[1].value().segment, block.segment);
}

// ---- Times ----

TEST_F(BrokerWaitingTest, WhatBeginsDuringALookHasNotWaitedForLessThanNothing) {
  Hold(OpenLeasing("holder"), {kCapacity});
  const RequestOptions waits{.may_reclaim = true, .wait = std::chrono::hours(1)};
  for (int reads = 0; reads < 8; ++reads) {
    const SessionPtr waiting = OpenLeasing("waiting");
    After(reads, [&] { Ask(waiting, {2_MiB}, waits); });
    const BrokerView view = broker_->operator_view().Look();
    reads_until_.reset();
    EXPECT_GE(view.devices[0].longest_waiting, milliseconds(0)) << "after " << reads << " reads of the clock";
    for (const SessionView& session : view.sessions) {
      for (const SessionDeviceView::Waiting& request : session.devices[0].waiting) {
        EXPECT_GE(request.waited, milliseconds(0)) << "after " << reads << " reads of the clock";
      }
    }
    After(0, [&] { Ask(waiting, {2_MiB}, waits); });
    const SessionView info = broker_->operator_view().Describe(*waiting);
    reads_until_.reset();
    for (const SessionDeviceView::Waiting& request : info.devices[0].waiting) {
      EXPECT_GE(request.waited, milliseconds(0));
    }
    broker_->Close(waiting, "done");
  }
}

TEST_F(BrokerWaitingTest, WhatIsQuarantinedDuringALookIsNotYoungerThanNothing) {
  for (int reads = 0; reads < 8; ++reads) {
    const SessionPtr dies = OpenLeasing("dies");
    const std::vector<Lease> leases = Hold(dies, {2_MiB});
    ASSERT_TRUE(pools_[0]->RedeemTicket(std::get<FdTicket>(leases[0].handle), 1, 1000).ok());
    After(reads, [&] { broker_->CloseGone(dies); });
    const BrokerView view = broker_->operator_view().Look();
    reads_until_.reset();
    for (const QuarantinedView& left : view.devices[0].quarantine) {
      EXPECT_GE(left.age, milliseconds(0)) << "after " << reads << " reads of the clock";
    }
    broker_->CloseGone(dies);
    EXPECT_EQ(pools_[0]->GetStats().quarantined_bytes, 2_MiB) << "its process could open it";
    pools_[0]->CheckQuarantine();
  }
}

// ---- Looks for memory carried over ----

// Has a session that carries over a segment of an earlier daemon. The next look for such segments is not soon.
class BrokerLookTest : public BrokerWaitingTest {
 protected:
  BrokerLookTest() {
    BrokerOptions options;
    options.clock = [this] { return now_; };
    options.set_timer = [this](SteadyTime time) { timer_ = time; };
    Make(std::move(options), {.clock = [this] { return now_; }});
    controls_[0]->Leave({{.file_device = 1, .file_inode = 1, .bytes = 4_MiB, .holders = {{.pid = 1}}}});
    EXPECT_TRUE(pools_[0]->FindCarriedOver().ok());
    session_ = OpenLeasing("heir");
    vrambroker::Leases::CarriedByDevice held;
    held[0].push_back({.id = 1, .bytes = 4_MiB, .file_device = 1, .file_inode = 1});
    EXPECT_TRUE(broker_->leases().DeclareCarriedOver(session_, held, /*begins=*/true, /*ends=*/true).ok());
    EXPECT_EQ(pools_[0]->GetAccount(session_->id())->carried_over_bytes, 4_MiB);
    Pass(std::chrono::seconds(5));
  }

  SteadyTime timer_ = SteadyTime::max();
  SessionPtr session_;
};

TEST_F(BrokerLookTest, WhatAClientHasClosedIsLookedForSoon) {
  const SteadyTime before = timer_;
  ASSERT_GT(before, now_ + std::chrono::seconds(1));
  broker_->leases().FreeCarriedOver(session_, {1});
  EXPECT_LT(timer_, before);
}

TEST_F(BrokerLookTest, WhatADeclarationLacksIsLookedForSoon) {
  const SteadyTime before = timer_;
  ASSERT_GT(before, now_ + std::chrono::seconds(1));
  ASSERT_TRUE(broker_->leases().DeclareCarriedOver(session_, {}, /*begins=*/true, /*ends=*/false).ok());
  EXPECT_EQ(timer_, before) << "more of the declaration is to come";
  ASSERT_TRUE(broker_->leases().DeclareCarriedOver(session_, {}, /*begins=*/false, /*ends=*/true).ok());
  EXPECT_LT(timer_, before);
}

// ---- Asked sessions and silent sessions ----

// Has a client that holds all of the device idle, and answers on the test's command.
class BrokerReclaimTest : public BrokerWaitingTest {
 protected:
  BrokerReclaimTest() {
    holder_ = OpenLeasing("holder");
    client_->on_ask = [this](uint64_t id, const ClientQuestion& question) {
      if (question.kind == ClientQuestion::Kind::kTrim) asked_.push_back(id);
    };
    for (const Lease& lease : Hold(holder_, std::vector<uint64_t>(kCapacity / 2_MiB, 2_MiB))) {
      held_.push_back(lease.segment);
    }
  }

  // Gives a segment back, and answers.
  void Answer() {
    ASSERT_EQ(asked_.size(), 1u) << "one question at a time";
    const uint64_t id = asked_[0];
    asked_.clear();
    ASSERT_TRUE(broker_->leases().ReturnSegments(holder_, 0, {held_.back()}).ok());
    held_.pop_back();
    holder_->leased()->questions().Receive(id, 0, /*more=*/false, [](ClientAnswer& answer) {
      answer.released_bytes = 2_MiB;
      return absl::OkStatus();
    });
    Settle();
  }
  // Requests a segment for a new session. The request may not wait, and the session uses its memory.
  std::shared_ptr<std::optional<Leases>> AskForOne() {
    const SessionPtr session = OpenLeasing("asks");
    MemoryStats stats;
    stats.active_bytes.all.current = 2_MiB;
    session->leased()->Report(0, stats);
    client_->on_ask = [weak = std::weak_ptr<Session>(session)](uint64_t id, const ClientQuestion&) {
      weak.lock()->leased()->questions().Receive(id, 0, /*more=*/false, [](ClientAnswer&) { return absl::OkStatus(); });
    };
    auto answer = Ask(session, {2_MiB}, {.may_reclaim = true});
    Settle();
    return answer;
  }

  SessionPtr holder_;
  std::vector<SegmentId> held_;
  std::vector<uint64_t> asked_;  // questions without an answer
};

TEST_F(BrokerReclaimTest, WhoAnswersEachOfARowOfQuestionsIsNotSilent) {
  std::vector<std::shared_ptr<std::optional<Leases>>> answers = {AskForOne()};
  for (int i = 1; i < 20; ++i) {
    // Another request comes before the answer to the last request: the row of questions never ends.
    Pass(milliseconds(30));
    answers.push_back(AskForOne());
    ASSERT_FALSE(answers.back()->has_value()) << "request " << i << ": " << (*answers.back())->status();
    ASSERT_NO_FATAL_FAILURE(Answer());
  }
  ASSERT_NO_FATAL_FAILURE(Answer());
  for (const auto& answer : answers) {
    ASSERT_TRUE(answer->has_value());
    EXPECT_TRUE((*answer)->ok()) << (*answer)->status();
  }
}

// A slow session may have more memory than the broker asked for.
TEST_F(BrokerReclaimTest, WhoIsSlowIsWaitedForWhenNobodyElseHasAnything) {
  const auto first = AskForOne();
  Pass(milliseconds(300));
  const auto second = AskForOne();
  EXPECT_FALSE(second->has_value()) << (*second)->status();
  ASSERT_NO_FATAL_FAILURE(Answer());
  EXPECT_TRUE(first->has_value());
  Pass(milliseconds(100));
  ASSERT_FALSE(second->has_value()) << (*second)->status();
  ASSERT_NO_FATAL_FAILURE(Answer());
  ASSERT_TRUE(second->has_value());
  EXPECT_TRUE((*second)->ok()) << (*second)->status();
}

TEST_F(BrokerReclaimTest, WhoDoesNotAnswerInTimeIsNotAskedAgain) {
  const auto first = AskForOne();
  Pass(BrokerOptions().reclaim_timeout + milliseconds(1));
  ASSERT_TRUE(first->has_value());
  EXPECT_FALSE((*first)->ok());
  const auto second = AskForOne();
  ASSERT_TRUE(second->has_value()) << "at once";
  EXPECT_FALSE((*second)->ok());
}

}  // namespace
}  // namespace vrambroker
