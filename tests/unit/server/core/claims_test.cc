// SPDX-License-Identifier: Apache-2.0
//
// Claims: operators' calls, and the terms of sessions in claims. tests/integration covers sockets and files.
#include "server/core/claims.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "allocator/device/process_files.h"
#include "server/wire/claim_file.h"
#include "server/wire/convert.h"
#include "tests/unit/server/core/claims_fixture.h"

namespace vrambroker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr pid_t kYounger = 1 << 30;  // pid of no process, so not older than this process

TEST_F(ClaimsTest, ItsLimitBindsAllOfItsSessionsTogether) {
  const absl::StatusOr<Claim> team = Create("team", {.limit = 40_MiB});
  ASSERT_TRUE(team.ok()) << team.status();
  EXPECT_THAT(served(), ElementsAre("team"));
  EXPECT_THAT(saved(), ElementsAre("team active"));
  const SessionPtr first = OpenLeasing("a", std::nullopt, In(team));
  const SessionPtr second = OpenLeasing("b", std::nullopt, In(team, 2));
  EXPECT_EQ(first->terms().claim, "team");
  EXPECT_EQ(first->terms().tenant, "claim:team") << "nobody else sees its old bytes";
  ASSERT_TRUE(LeaseSegments(first, {30_MiB}).ok());
  const absl::Status refusal = LeaseSegments(second, {12_MiB}).status();
  const v1::OutOfMemory report = Report(refusal);
  EXPECT_EQ(report.cause(), v1::OutOfMemory::CAUSE_LIMIT);
  EXPECT_EQ(report.claim(), "team");
  EXPECT_EQ(report.claim_limit_bytes(), 40_MiB);
  EXPECT_EQ(report.claim_reserved_bytes(), 30_MiB);
  EXPECT_EQ(report.user_limit_bytes(), 0u);
  EXPECT_THAT(report.explanation(), HasSubstr("the sessions of claim team already have 30.00 MiB of its limit"));
  ASSERT_TRUE(LeaseSegments(second, {10_MiB}).ok());
  EXPECT_EQ(View("team").reserved_bytes, 40_MiB);
  EXPECT_EQ(View("team").peak_bytes, 40_MiB);
  EXPECT_EQ(View("team", 1).peak_bytes, 0u);
  // The limit applies on each device.
  ASSERT_TRUE(LeaseSegments(second, {40_MiB}, 1).ok());
  // A session outside the claim has the rest of the device.
  ASSERT_TRUE(LeaseSegments(OpenLeasing("c"), {24_MiB}).ok());
}

TEST_F(ClaimsTest, RefusalsAreCountedForEachDevice) {
  const SessionPtr session = Open("a", std::nullopt, In(Create("team", {.limit = 40_MiB})));
  for (const uint64_t device : {0, 1, 1}) EXPECT_FALSE(Allocate(session, 50_MiB, device).ok());
  const v1::Claim claim = ToProto(broker_->operator_view().Look().claims.at(0), "/run");
  EXPECT_EQ(claim.refusals(), 3u);
  EXPECT_EQ(claim.devices(0).refusals(), 1u);
  EXPECT_EQ(claim.devices(1).refusals(), 2u);
}

// Siblings may use each other's idle memory: the broker asks for idle memory before refusing a request.
TEST_F(ClaimsTest, IdleMemoryOfItsOtherSessionsIsAskedForBeforeItsLimitRefuses) {
  const absl::StatusOr<Claim> team = Create("team", {.limit = 40_MiB});
  const SessionPtr holder = Open("holder", std::nullopt, In(team));
  const absl::StatusOr<Allocation> block = Allocate(holder, 30_MiB);
  ASSERT_TRUE(block.ok()) << block.status();
  ASSERT_TRUE(broker_->allocations().Free(holder, {block->block}).ok());
  EXPECT_EQ(View("team").idle_bytes, 30_MiB);
  EXPECT_TRUE(Allocate(Open("asker", std::nullopt, In(team, 2)), 20_MiB, 0, 0, {.may_reclaim = true}).ok());
  EXPECT_LE(View("team").reserved_bytes, 40_MiB);
}

TEST_F(ClaimsTest, ItsGuaranteeIsKeptBeforeItHasASessionAndBelongsToAllOfThem) {
  const absl::StatusOr<Claim> team = Create("team", {.limit = 40_MiB, .guarantee = 20_MiB});
  ASSERT_TRUE(team.ok()) << team.status();
  const SessionPtr outside = OpenLeasing("outside");
  EXPECT_FALSE(LeaseSegments(outside, {46_MiB}).ok());
  ASSERT_TRUE(LeaseSegments(outside, {44_MiB}).ok());
  ASSERT_TRUE(LeaseSegments(OpenLeasing("a", std::nullopt, In(team)), {8_MiB}).ok());
  ASSERT_TRUE(LeaseSegments(OpenLeasing("b", std::nullopt, In(team, 2)), {12_MiB}).ok());
}

TEST_F(ClaimsTest, AGuaranteeIsTakenFromWhatOthersDoNotUse) {
  const SessionPtr holder = Open("holder");
  const absl::StatusOr<Allocation> block = Allocate(holder, 60_MiB);
  ASSERT_TRUE(block.ok()) << block.status();
  const absl::Status in_use = Create("team", {.limit = 40_MiB, .guarantee = 20_MiB}).status();
  EXPECT_TRUE(absl::IsResourceExhausted(in_use)) << in_use;
  EXPECT_THAT(std::string(in_use.message()), HasSubstr("more than is free"));
  EXPECT_THAT(broker_->claims().GetAll(), IsEmpty());
  EXPECT_THAT(served(), IsEmpty());
  ASSERT_TRUE(broker_->allocations().Free(holder, {block->block}).ok());
  EXPECT_TRUE(Create("team", {.limit = 40_MiB, .guarantee = 20_MiB}).ok());
}

TEST_F(ClaimsTest, BadTermsAreRefusedAndNamed) {
  const auto why = [&](const std::string& name, const ClaimTerms& terms) {
    const absl::Status status = Create(name, terms).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(why("", {}), HasSubstr("name: a claim needs one"));
  EXPECT_THAT(why("a/b", {}), HasSubstr("name: only letters"));
  EXPECT_THAT(why("a", {.limit = 1.5}), HasSubstr("limit.fraction: 1.5"));
  EXPECT_THAT(why("a", {.limit = uint64_t{0}}), HasSubstr("limit: 0 bytes"));
  EXPECT_THAT(why("a", {.limit = 8_MiB, .guarantee = 9_MiB}), HasSubstr("above the claim's limit"));
  EXPECT_THAT(why("a", {.priority = 1001}), HasSubstr("priority: 1001 is not within"));
  EXPECT_THAT(why("a", {.tenant = "x y"}), HasSubstr("tenant: only letters"));
  EXPECT_THAT(why("a", {.max_wait = std::chrono::hours(2)}), HasSubstr("max_wait_ms: 7200000 is more than 3600000"));
  EXPECT_THAT(why("a", {.devices = {2}}), HasSubstr("there is no device 2; the daemon has "));
  EXPECT_THAT(why("a", {.labels = {{"0k", "v"}}}), HasSubstr("labels: the key '0k'"));
  EXPECT_THAT(why("a", {.labels = {{"k", std::string(129, 'v')}}}), HasSubstr("the value of 'k' has 129 bytes"));
  EXPECT_THAT(saved(), IsEmpty());
  ASSERT_TRUE(Create("a", {}).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(Create("a", {}).status()));
  EXPECT_TRUE(absl::IsNotFound(Update("b", {}).status()));
  EXPECT_TRUE(absl::IsNotFound(Delete("b").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(Update("a", {.guarantee = Limit(0.5), .priority = int64_t{1} << 40}).status()));
  EXPECT_EQ(broker_->claims().Find("a")->terms.guarantee, Limit(uint64_t{0})) << "all of it, or nothing";
}

TEST_F(ClaimsTest, ItHasNothingOfDevicesThatItMayNotUse) {
  const absl::StatusOr<Claim> team = Create("team", {.limit = 40_MiB, .devices = {1}});
  const SessionPtr session = OpenLeasing("a", std::nullopt, In(team));
  EXPECT_FALSE(LeaseSegments(session, {2_MiB}, 0).ok());
  EXPECT_TRUE(LeaseSegments(session, {40_MiB}, 1).ok());
}

TEST_F(ClaimsTest, ARaiseServesWhoWaits) {
  const absl::StatusOr<Claim> team = Create("team", {.limit = 20_MiB});
  const SessionPtr holder = Open("a", std::nullopt, In(team));
  ASSERT_TRUE(Allocate(holder, 18_MiB, 1).ok());
  const SessionPtr session = Open("b", std::nullopt, In(team));
  Signal answered;
  absl::Status waited = absl::UnknownError("no answer");
  broker_->allocations().Allocate(session, 1, 18_MiB, 0,
                                  [&](const absl::StatusOr<Allocation>& allocation) {
                                    waited = allocation.status();
                                    answered.Notify();
                                  },
                                  {.may_reclaim = true, .wait = std::chrono::minutes(10)});
  ASSERT_TRUE(testing_support::WaitFor([&] { return View("team", 1).waiting == 1; }));
  EXPECT_EQ(View("team", 1).waits.waits, 0u) << "it waits still";
  ASSERT_TRUE(Update("team", {.limit = Limit(40_MiB)}).ok());
  answered.WaitForNotification();
  EXPECT_TRUE(waited.ok()) << waited;
  EXPECT_EQ(View("team", 1).waits.waits, 1u);
  EXPECT_EQ(View("team", 0).waits.waits, 0u);
  EXPECT_THAT(client_->told(), ::testing::Contains(absl::StrCat("limit 1 ", 40_MiB)));
}

// The session would wait for its own memory.
TEST_F(ClaimsTest, WhatTheLimitNeverAllowsIsRefusedAtOnce) {
  const absl::StatusOr<Claim> team = Create("team", {.limit = 20_MiB});
  const SessionPtr session = Open("a", std::nullopt, In(team));
  ASSERT_TRUE(Allocate(session, 18_MiB).ok());
  Signal answered;
  absl::Status refused = absl::UnknownError("no answer");
  broker_->allocations().Allocate(session, 0, 18_MiB, 0,
                                  [&](const absl::StatusOr<Allocation>& allocation) {
                                    refused = allocation.status();
                                    answered.Notify();
                                  },
                                  {.may_reclaim = true, .wait = std::chrono::minutes(10)});
  answered.WaitForNotification();
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("claim"));
}

TEST_F(ClaimsTest, ACutAsksForWhatIsIdleAndRefusesGrowthUntilItFits) {
  const absl::StatusOr<Claim> team = Create("team", {.limit = 60_MiB});
  const SessionPtr session = Open("a", std::nullopt, In(team));
  ASSERT_TRUE(Allocate(session, 20_MiB).ok());
  const absl::StatusOr<Allocation> idle = Allocate(session, 30_MiB);
  ASSERT_TRUE(idle.ok());
  ASSERT_TRUE(broker_->allocations().Free(session, {idle->block}).ok());
  ASSERT_TRUE(Update("team", {.limit = Limit(10_MiB)}).ok());
  EXPECT_TRUE(testing_support::WaitFor([&] { return View("team").reserved_bytes == 20_MiB; }));
  EXPECT_EQ(View("team").limit_bytes, 10_MiB);
  EXPECT_FALSE(Allocate(session, 2_MiB).ok());
}

// A second round before all answers would ask for memory that another session is about to give back.
TEST_F(ClaimsTest, ACutAsksNobodyAgainBeforeAllHaveAnswered) {
  struct Member {
    SessionPtr session;
    SegmentId idle{};
    std::vector<uint64_t> asked;  // questions
  };
  Member quick, slow;
  const auto answer = [&](const Member& member) {
    (void)broker_->leases().ReturnSegments(member.session, 0, {member.idle});
    member.session->leased()->questions().Receive(member.asked.back(), 0, /*more=*/false,
                                                  [](ClientAnswer&) { return absl::OkStatus(); });
  };
  const absl::StatusOr<Claim> team = Create("team", {.limit = 60_MiB});
  for (Member* const member : {&quick, &slow}) {
    member->session = OpenLeasing("member", std::nullopt, In(team));
    client_->on_ask = [&, member](uint64_t id, const ClientQuestion&) {
      member->asked.push_back(id);
      if (member == &quick) answer(*member);
    };
    const absl::StatusOr<std::vector<Lease>> leases = LeaseSegments(member->session, {6_MiB, 14_MiB});
    ASSERT_TRUE(leases.ok()) << leases.status();
    member->idle = leases->back().segment;
    MemoryStats stats;
    stats.active_bytes.all.current = 6_MiB;
    member->session->leased()->Report(0, stats);
  }
  ASSERT_TRUE(Update("team", {.limit = Limit(12_MiB)}).ok());
  EXPECT_EQ(quick.asked.size(), 1u);
  ASSERT_EQ(slow.asked.size(), 1u);
  answer(slow);
  EXPECT_EQ(View("team").reserved_bytes, 12_MiB);
  EXPECT_EQ(quick.asked.size() + slow.asked.size(), 2u) << "nothing is missing any more";
}

TEST_F(ClaimsTest, ItsPriorityIsThatOfItsSessions) {
  const absl::StatusOr<Claim> team = Create("team", {.priority = 3});
  const SessionPtr session = OpenLeasing("a", std::nullopt, In(team));
  EXPECT_EQ(broker_->operator_view().Describe(*session).devices[0].account.priority, 3);
  ASSERT_TRUE(Update("team", {.priority = -7}).ok());
  EXPECT_EQ(broker_->operator_view().Describe(*session).devices[0].account.priority, -7);
}

TEST_F(ClaimsTest, OnlyItsOwnerGetsIn) {
  const absl::StatusOr<Claim> team = Create("team", {.owner = {.uid = 7, .gid = 70}});
  EXPECT_TRUE(TryOpen("a", std::nullopt, In(team, 1, 7)).ok());
  EXPECT_TRUE(TryOpen("a", std::nullopt, In(team, 1, 0)).ok()) << "root";
  const absl::Status other = TryOpen("a", std::nullopt, In(team, 1, 8)).status();
  EXPECT_TRUE(absl::IsPermissionDenied(other)) << other;
  EXPECT_THAT(std::string(other.message()), HasSubstr("uid 8 may not use the claim 'team', which is uid 7's"));
  Caller member = In(team, 1, 8);
  member.groups = {5, 70};
  EXPECT_TRUE(TryOpen("a", std::nullopt, member).ok());
}

// Containers run as root. A caller in a claim may not see or change state outside the claim.
TEST_F(ClaimsTest, ThroughAClaimsSocketRootIsNobody) {
  const absl::StatusOr<Claim> team = Create("team", {});
  const absl::StatusOr<SessionTerms> terms = broker_->TermsOf(In(team, 1, 0));
  ASSERT_TRUE(terms.ok()) << terms.status();
  EXPECT_EQ(terms->rights, (Rights{.client = true, .observer = false, .admin = false}));
}

TEST_F(ClaimsTest, ADrainingClaimTakesNoSessionsAndGoesWithItsLast) {
  const absl::StatusOr<Claim> team = Create("team", {.limit = 40_MiB, .guarantee = 20_MiB});
  const SessionPtr session = OpenLeasing("a", std::nullopt, In(team));
  ASSERT_TRUE(LeaseSegments(session, {8_MiB}).ok());
  const absl::StatusOr<Claims::Deleted> deleted = Delete("team");
  ASSERT_TRUE(deleted.ok()) << deleted.status();
  EXPECT_FALSE(deleted->is_removed);
  EXPECT_THAT(saved(), ElementsAre("team draining"));
  EXPECT_TRUE(absl::IsFailedPrecondition(TryOpen("b", std::nullopt, In(team, kYounger)).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(Update("team", {.limit = Limit(50_MiB)}).status()));
  EXPECT_TRUE(LeaseSegments(session, {8_MiB}).ok()) << "its sessions go on";
  EXPECT_THAT(forgotten(), IsEmpty());
  EXPECT_FALSE(LeaseSegments(session, {40_MiB}).ok());
  const auto has_tenant = [this] {
    const TenantRefusals::ByTenant tenants = broker_->refusals().GetByTenant();
    return std::any_of(tenants.begin(), tenants.end(), [](const auto& entry) { return entry.first == "claim:team"; });
  };
  EXPECT_TRUE(has_tenant());
  broker_->Close(session, "test");
  EXPECT_TRUE(IsRemoved("team"));
  EXPECT_THAT(forgotten(), ElementsAre("team")) << "the next one of its name is another";
  EXPECT_FALSE(has_tenant());
  EXPECT_THAT(broker_->waiting().GetClaimWaits(), IsEmpty());
  EXPECT_THAT(served(), IsEmpty());
  EXPECT_THAT(saved(), IsEmpty());
  EXPECT_EQ(pools_[0]->GetStats().guaranteed_bytes, 0u);
  // A client that is still connected by the claim's sockets is in no claim, and also not outside of claims.
  const absl::Status late = TryOpen("c", std::nullopt, In(team, 3)).status();
  EXPECT_THAT(std::string(late.message()), HasSubstr("the claim of this socket was removed"));
  EXPECT_FALSE(broker_->TermsOf(In(team, 3)).ok());
}

// A session returns to the claim that the session had before a restart of the daemon.
TEST_F(ClaimsTest, ADrainingClaimTakesNoMemberOfAnother) {
  const absl::StatusOr<Claim> team = Create("team", {});
  const SessionPtr keeps = OpenLeasing("keeps", std::nullopt, In(team));
  ASSERT_TRUE(Delete("team").ok());
  const ProcessId self{.pid = getpid(), .started = StartOf(getpid())};
  const auto back = [&] { return TryOpen("back", std::nullopt, In(team, self.pid)).status(); };
  EXPECT_TRUE(absl::IsFailedPrecondition(back()));
  broker_->claims().SetEarlierMembers({{self, "other"}});
  EXPECT_TRUE(absl::IsFailedPrecondition(back()));
  broker_->claims().SetEarlierMembers({{{.pid = self.pid, .started = self.started + 1}, "team"}});
  EXPECT_TRUE(absl::IsFailedPrecondition(back())) << "another process had the number";
  broker_->claims().SetEarlierMembers({{self, "team"}});
  EXPECT_EQ(back(), absl::OkStatus());
  ASSERT_TRUE(Delete("team", /*revoke=*/true).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(back())) << "nobody comes back to one that is revoked";
}

TEST_F(ClaimsTest, WhatAnEndedProcessLeavesIsChargedToItsClaimUntilItIsQuiet) {
  const absl::StatusOr<Claim> team = Create("team", {.limit = 40_MiB});
  const SessionPtr session = OpenLeasing("a", std::nullopt, In(team));
  const std::vector<Lease> left = LeaseSegments(session, {30_MiB}).value();
  ASSERT_TRUE(pools_[0]->RedeemTicket(std::get<FdTicket>(left[0].handle), 1, kOwner).ok());
  broker_->CloseGone(session);
  EXPECT_EQ(View("team").left_behind_bytes, 30_MiB);
  EXPECT_EQ(View("team").reserved_bytes, 30_MiB);
  const SessionPtr next = OpenLeasing("b", std::nullopt, In(team, 2));
  EXPECT_FALSE(LeaseSegments(next, {12_MiB}).ok());
  ASSERT_TRUE(LeaseSegments(next, {10_MiB}).ok());
  broker_->Close(next, "test");
  ASSERT_TRUE(Delete("team").ok());
  EXPECT_TRUE(broker_->claims().Find("team").ok()) << "it has something";
  pools_[0]->CheckQuarantine();
  EXPECT_TRUE(IsRemoved("team"));
}

TEST_F(ClaimsTest, RevokingEndsItsSessions) {
  const absl::StatusOr<Claim> team = Create("team", {});
  const SessionPtr session = OpenLeasing("a", std::nullopt, In(team));
  const SessionPtr outside = OpenLeasing("b");
  ASSERT_TRUE(LeaseSegments(session, {8_MiB}).ok());
  ASSERT_TRUE(Delete("team", /*revoke=*/true).ok());
  EXPECT_EQ(session->state(), SessionState::kEnded);
  EXPECT_EQ(outside->state(), SessionState::kActive);
  EXPECT_TRUE(broker_->claims().Find("team").ok()) << "its client has not closed its memory";
  broker_->Close(session, "test");
  EXPECT_TRUE(IsRemoved("team"));
}

TEST_F(ClaimsTest, WhatCannotBeSavedOrServedIsNotDone) {
  save_error_ = absl::ResourceExhaustedError("disk full");
  EXPECT_TRUE(absl::IsResourceExhausted(Create("team", {.guarantee = 20_MiB}).status()));
  EXPECT_THAT(broker_->claims().GetAll(), IsEmpty());
  EXPECT_EQ(pools_[0]->GetStats().guaranteed_bytes, 0u);
  EXPECT_THAT(served(), IsEmpty());
  save_error_ = absl::OkStatus();
  serve_error_ = absl::FailedPreconditionError("in the way");
  EXPECT_TRUE(absl::IsFailedPrecondition(Create("team", {.guarantee = 20_MiB}).status()));
  EXPECT_THAT(broker_->claims().GetAll(), IsEmpty());
  EXPECT_THAT(saved(), IsEmpty());
  EXPECT_EQ(pools_[1]->GetStats().guaranteed_bytes, 0u);
  EXPECT_THAT(half_served(), IsEmpty()) << "what there is of its sockets goes, too";
  EXPECT_THAT(broker_->waiting().GetClaimWaits(), IsEmpty());
  serve_error_ = absl::OkStatus();
  ASSERT_TRUE(Create("team", {.limit = 40_MiB, .guarantee = 20_MiB}).ok());
  save_error_ = absl::ResourceExhaustedError("disk full");
  EXPECT_FALSE(Update("team", {.limit = Limit(60_MiB), .guarantee = Limit(30_MiB)}).ok());
  EXPECT_EQ(View("team").limit_bytes, 40_MiB);
  EXPECT_EQ(View("team").guarantee_bytes, 20_MiB);
  state_error_ = save_error_;
  EXPECT_FALSE(Delete("team").ok());
  EXPECT_EQ(broker_->claims().Find("team")->state, ClaimState::kActive);
}

// The claim's members may have filled the disk.
TEST_F(ClaimsTest, ARevokedClaimIsRevokedThoughThatCannotBeSaved) {
  const absl::StatusOr<Claim> team = Create("team", {});
  const SessionPtr session = OpenLeasing("a", std::nullopt, In(team));
  save_error_ = state_error_ = absl::ResourceExhaustedError("disk full");
  EXPECT_TRUE(Delete("team", /*revoke=*/true).ok());
  EXPECT_EQ(session->state(), SessionState::kEnded);
  broker_->Close(session, "test");
  EXPECT_TRUE(IsRemoved("team"));
}

TEST_F(ClaimsTest, ALowerGuaranteeThatCannotBeSavedIsTheOldOneStill) {
  ASSERT_TRUE(Create("team", {.limit = 40_MiB, .guarantee = 20_MiB}).ok());
  ASSERT_TRUE(LeaseSegments(OpenLeasing("outside"), {44_MiB}).ok());
  // Another session tries to take free memory at that moment.
  on_save_ = [&] { EXPECT_FALSE(LeaseSegments(OpenLeasing("greedy"), {4_MiB}).ok()); };
  save_error_ = absl::ResourceExhaustedError("disk full");
  EXPECT_FALSE(Update("team", {.guarantee = Limit(10_MiB)}).ok());
  EXPECT_EQ(View("team").guarantee_bytes, 20_MiB);
}

TEST_F(ClaimsTest, AGuaranteeThatOneDeviceRefusesIsRaisedOnNone) {
  ASSERT_TRUE(Create("team", {.limit = 40_MiB, .guarantee = 4_MiB}).ok());
  // No session can be asked for memory in use.
  constexpr SessionId kOutside{1000};
  pools_[1]->OpenAccount(kOutside, {.pid = 1, .limit_bytes = kCapacity});
  ASSERT_TRUE(pools_[1]->TryChargeCounted(kOutside, 50_MiB).ok());
  const absl::Status refused = Update("team", {.guarantee = Limit(20_MiB)}).status();
  EXPECT_THAT(std::string(refused.message()), HasSubstr("device 1: guarantee: "));
  for (const size_t device : {0, 1}) EXPECT_EQ(View("team", device).guarantee_bytes, 4_MiB) << device;
  EXPECT_TRUE(Update("team", {.guarantee = Limit(10_MiB)}).ok());
  for (const size_t device : {0, 1}) EXPECT_EQ(View("team", device).guarantee_bytes, 10_MiB) << device;
  pools_[1]->CloseAccount(kOutside);
}

// The claim's own memory beyond its guarantee frees room on an overcommitted device.
TEST_F(ClaimsTest, OnAnOvercommittedDeviceItsSessionsAreAskedForWhatIsBeyondItsGuarantee) {
  const absl::StatusOr<Claim> team = Create("team", {.limit = 60_MiB});
  const SessionPtr member = Open("member", std::nullopt, In(team));
  const absl::StatusOr<Allocation> cached = Allocate(member, 30_MiB);
  ASSERT_TRUE(cached.ok() && member->remote()->Free({cached->block}).ok());
  controls_[0]->Leave({{.file_device = 1, .file_inode = 1, .bytes = kCapacity - 20_MiB, .holders = {{.pid = 7}}}});
  ASSERT_TRUE(pools_[0]->FindCarriedOver().ok());
  const absl::StatusOr<Claim> more = Update("team", {.guarantee = Limit(10_MiB)});
  EXPECT_TRUE(more.ok()) << more.status();
}

// Memory kept for the claim is kept for the claim's sessions: the sessions need no memory of other sessions.
TEST_F(ClaimsTest, ARefusalCountsWhatIsKeptForOthersAlone) {
  const absl::StatusOr<Claim> team = Create("team", {.limit = 60_MiB, .guarantee = 20_MiB});
  const SessionPtr outside = OpenLeasing("outside");
  ASSERT_TRUE(LeaseSegments(outside, {40_MiB}).ok());
  const SessionPtr member = OpenLeasing("member", std::nullopt, In(team, 2));
  EXPECT_EQ(Report(LeaseSegments(outside, {8_MiB}).status()).device_kept_free_bytes(), 20_MiB);
  EXPECT_EQ(Report(LeaseSegments(member, {30_MiB}).status()).device_kept_free_bytes(), 0u);
  ASSERT_TRUE(pools_[0]->SetGuarantee(member->id(), 22_MiB).ok()) << "2 MiB of it are beyond the claim's";
  EXPECT_EQ(Report(LeaseSegments(member, {30_MiB}).status()).device_kept_free_bytes(), 0u);
  EXPECT_EQ(Report(LeaseSegments(outside, {8_MiB}).status()).device_kept_free_bytes(), 22_MiB);
}

// Operators see waits: a request that may not wait has not waited.
TEST_F(ClaimsTest, WhatIsRefusedAtOnceIsNoWait) {
  const absl::StatusOr<Claim> team = Create("team", {.limit = 20_MiB});
  ASSERT_TRUE(Allocate(Open("a", std::nullopt, In(team)), 18_MiB).ok());
  const SessionPtr session = Open("b", std::nullopt, In(team));
  EXPECT_FALSE(Allocate(session, 18_MiB, 0, 0, {.may_reclaim = true}).ok());
  EXPECT_EQ(View("team").waits.waits, 0u);
}

TEST_F(ClaimsTest, ALimitBelowTheGuaranteesOfItsSessionsIsRefused) {
  const absl::StatusOr<Claim> team = Create("team", {.limit = 40_MiB});
  const SessionPtr session = OpenLeasing("a", std::nullopt, In(team));
  ASSERT_TRUE(pools_[0]->SetGuarantee(session->id(), 30_MiB).ok());
  const absl::Status status = Update("team", {.limit = Limit(20_MiB)}).status();
  EXPECT_THAT(std::string(status.message()), HasSubstr("below the guarantees of the claim's sessions, 30.00 MiB"));
}

// A change may wait for other sessions while sessions ask for guarantees.
TEST_F(ClaimsTest, NoSessionIsGuaranteedMoreThanTheLimitThatIsBeingSet) {
  const absl::StatusOr<Claim> team = Create("team", {.limit = 40_MiB});
  const SessionPtr session = OpenLeasing("a", std::nullopt, In(team));
  const auto guarantee = [&](const SessionPtr& of, uint64_t bytes) {
    return pools_[0]->SetGuarantee(of->id(), bytes).ok() && pools_[1]->SetGuarantee(of->id(), bytes).ok();
  };
  const auto tries = [&] {
    EXPECT_FALSE(guarantee(session, 30_MiB));
    EXPECT_FALSE(guarantee(OpenLeasing("b", std::nullopt, In(team, 2)), 30_MiB)) << "one that is opened meanwhile";
    EXPECT_TRUE(guarantee(session, 10_MiB));
    EXPECT_TRUE(LeaseSegments(session, {24_MiB}).ok()) << "the old limit holds";
  };
  on_save_ = tries;
  save_error_ = absl::ResourceExhaustedError("disk full");
  EXPECT_FALSE(Update("team", {.limit = Limit(20_MiB)}).ok());
  EXPECT_TRUE(guarantee(session, 30_MiB)) << "nothing has changed";
  EXPECT_TRUE(guarantee(session, 0));
  save_error_ = absl::OkStatus();
  on_save_ = [&] { EXPECT_FALSE(guarantee(session, 30_MiB)); };
  EXPECT_TRUE(Update("team", {.limit = Limit(20_MiB)}).ok());
  EXPECT_TRUE(guarantee(session, 20_MiB));
  // A limit changes on all devices or on no device.
  EXPECT_TRUE(pools_[0]->SetGuarantee(session->id(), 0).ok());
  EXPECT_FALSE(Update("team", {.limit = Limit(10_MiB)}).ok());
  EXPECT_TRUE(guarantee(session, 20_MiB));
  // Higher guarantees come with the new limit, not before.
  on_save_ = [&] { EXPECT_FALSE(guarantee(session, 30_MiB)); };
  EXPECT_TRUE(Update("team", {.limit = Limit(30_MiB)}).ok());
  EXPECT_TRUE(guarantee(session, 30_MiB));
}

// The next claim of the name may be another user's.
TEST_F(ClaimsTest, NobodyGetsTheOldBytesOfAnEarlierClaimOfTheSameName) {
  const absl::StatusOr<Claim> first = Create("team", {});
  const SessionPtr session = OpenLeasing("a", std::nullopt, In(first));
  ASSERT_TRUE(LeaseSegments(session, {8_MiB}).ok());
  broker_->Close(session, "test");
  ASSERT_TRUE(Delete("team").ok());
  const absl::StatusOr<Claim> second = Create("team", {});
  ASSERT_TRUE(LeaseSegments(OpenLeasing("b", std::nullopt, In(second)), {8_MiB}).ok());
  EXPECT_EQ(pools_[0]->GetStats().handovers, 0u);
}

TEST_F(ClaimsTest, WhoComesWhileItIsRevokedIsEndedToo) {
  const absl::StatusOr<Claim> team = Create("team", {});
  on_member_ = [&] { EXPECT_TRUE(Delete("team", /*revoke=*/true).ok()); };
  const SessionPtr session = OpenLeasing("a", std::nullopt, In(team));
  EXPECT_TRUE(testing_support::WaitFor([&] {
    broker_->claims().RemoveEmpty();
    return session->state() == SessionState::kEnded;
  }));
}

TEST_F(ClaimsTest, ASessionThatIsBeingOpenedGetsWhatIsChangedMeanwhile) {
  const absl::StatusOr<Claim> team = Create("team", {.limit = 20_MiB});
  on_member_ = [&] { EXPECT_TRUE(Update("team", {.limit = Limit(40_MiB), .priority = 5}).ok()); };
  const SessionPtr session = Open("a", std::nullopt, In(team), kCollects);
  EXPECT_EQ(broker_->operator_view().Describe(*session).devices[0].account.priority, 5);
  ExpectHeapKnows40MiB(session);
}

TEST_F(ClaimsTest, HowLongItsRequestsMayWaitIsChangedForItsSessionsToo) {
  const absl::StatusOr<Claim> team = Create("team", {.max_wait = std::chrono::seconds(5)});
  const SessionPtr session = OpenLeasing("a", std::nullopt, In(team));
  ASSERT_TRUE(Update("team", {.max_wait = std::chrono::milliseconds(0)}).ok());
  EXPECT_EQ(session->max_wait(), std::chrono::milliseconds(0));
  on_member_ = [&] { EXPECT_TRUE(Update("team", {.max_wait = std::chrono::milliseconds(7)}).ok()); };
  EXPECT_EQ(OpenLeasing("b", std::nullopt, In(team))->max_wait(), std::chrono::milliseconds(7));
}

TEST_F(ClaimsTest, AChangeOfSomethingElseKeepsThePriorityOfASession) {
  const absl::StatusOr<Claim> team = Create("team", {.priority = 3});
  const SessionPtr session = OpenLeasing("a", std::nullopt, In(team));
  ASSERT_TRUE(broker_->limits().SetPriority(session, 9).ok());
  ASSERT_TRUE(Update("team", {.limit = Limit(0.5)}).ok());
  EXPECT_EQ(broker_->operator_view().Describe(*session).devices[0].account.priority, 9);
}

TEST_F(ClaimsTest, OneThatIsRestoredIsServedAsSoonAsThatCanBe) {
  serve_error_ = absl::FailedPreconditionError("in the way");
  broker_->claims().Restore({{.name = "a"}});
  broker_->claims().ServeRestored();
  EXPECT_THAT(served(), IsEmpty());
  serve_error_ = absl::OkStatus();
  EXPECT_TRUE(testing_support::WaitFor([&] {
    broker_->claims().Tick();
    return serves_ == 1;
  }));
}

TEST_F(ClaimsTest, AFileThatIsNotThereIsNoClaimThatIsNotThere) {
  ASSERT_TRUE(Create("team", {}).ok());
  save_error_ = absl::NotFoundError("no such directory");
  state_error_ = save_error_;
  EXPECT_TRUE(absl::IsFailedPrecondition(Update("team", {.limit = Limit(0.5)}).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(Delete("team").status()));
}

TEST_F(ClaimsTest, ARevocationIsInTheFileAlsoWhenTheDiskIsFull) {
  const absl::StatusOr<Claim> team = Create("team", {});
  const SessionPtr session = OpenLeasing("a", std::nullopt, In(team));
  ASSERT_TRUE(LeaseSegments(session, {8_MiB}).ok());
  save_error_ = absl::ResourceExhaustedError("no space left on device");
  EXPECT_TRUE(Delete("team", /*revoke=*/true).ok());
  EXPECT_THAT(saved(), ElementsAre("team revoked"));
  EXPECT_FALSE(Update("team", {.limit = Limit(0.5)}).ok());
}

TEST_F(ClaimsTest, WhatTheFileLacksIsWrittenAsSoonAsThatCanBe) {
  const absl::StatusOr<Claim> team = Create("team", {});
  ASSERT_TRUE(Create("gone", {}).ok());
  const SessionPtr session = OpenLeasing("a", std::nullopt, In(team));
  ASSERT_TRUE(LeaseSegments(session, {8_MiB}).ok());
  save_error_ = state_error_ = absl::ResourceExhaustedError("no space left on device");
  EXPECT_FALSE(Delete("gone").ok()) << "it can be asked for again";
  EXPECT_TRUE(Delete("gone", /*revoke=*/true)->is_removed);
  EXPECT_FALSE(Delete("team", /*revoke=*/true)->is_removed) << "its process has memory still";
  EXPECT_THAT(saved(), ElementsAre("team active", "gone active"));
  save_error_ = state_error_ = absl::OkStatus();
  EXPECT_TRUE(testing_support::WaitFor([&] {
    broker_->claims().Tick();
    return saved() == std::vector<std::string>{"team revoked"};
  }));
}

// A claim that is in the file but cannot be served does not exist.
TEST_F(ClaimsTest, WhatCouldNotBeCreatedIsNotTheNextDaemons) {
  serve_error_ = absl::FailedPreconditionError("no descriptors");
  on_saved_ = [&] { save_error_ = absl::ResourceExhaustedError("no space left on device"); };
  EXPECT_FALSE(Create("team", {}).ok());
  EXPECT_THAT(saved(), ElementsAre("team revoked"));
  save_error_ = absl::OkStatus();
  EXPECT_TRUE(testing_support::WaitFor([&] {
    broker_->claims().Tick();
    return saved().empty();
  }));
}

TEST_F(ClaimsTest, AClaimThatDrainsIsTheNextDaemonsWhenThisOneStops) {
  const absl::StatusOr<Claim> team = Create("team", {});
  const SessionPtr session = OpenLeasing("a", std::nullopt, In(team));
  ASSERT_TRUE(Delete("team").ok());
  broker_->claims().StopRemoving();
  broker_->CloseAll("stops");
  workers_.reset();
  EXPECT_THAT(saved(), ElementsAre("team draining"));
  EXPECT_THAT(served(), ElementsAre("team"));
}

// The daemon starts with a device fewer.
TEST_F(ClaimsTest, AClaimOfADeviceThatIsGoneGetsNothingOfTheOthers) {
  broker_->claims().Restore({{.name = "a", .terms = {.limit = 40_MiB, .devices = {2}}}});
  EXPECT_EQ(View("a", 0).limit_bytes, 0u);
  EXPECT_EQ(View("a", 1).limit_bytes, 0u);
}

TEST_F(ClaimsTest, TheNextDaemonHasTheSameClaims) {
  const std::string path = testing_support::MakeTempDir() + "/claims";
  ASSERT_TRUE(LoadClaims(path).ok()) << "none";
  Claim claim{.name = "team",
              .terms = {.limit = 40_MiB,
                        .guarantee = 0.25,
                        .priority = -3,
                        .tenant = "t",
                        .max_wait = std::chrono::seconds(2),
                        .owner = {.uid = 7, .gid = 70},
                        .devices = {1},
                        .labels = {{"pod", "a \"quoted\"\n name"}}},
              .state = ClaimState::kDraining,
              .created = std::chrono::system_clock::time_point(std::chrono::microseconds(1795736397701433))};
  ASSERT_TRUE(SaveClaims(path, {claim, {.name = "any"}}).ok());
  const absl::StatusOr<std::vector<Claim>> loaded = LoadClaims(path);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  ASSERT_EQ(loaded->size(), 2u);
  const Claim& same = loaded->front();
  EXPECT_EQ(same.name, "team");
  EXPECT_EQ(same.terms.limit, claim.terms.limit);
  EXPECT_EQ(same.terms.guarantee, claim.terms.guarantee);
  EXPECT_EQ(same.terms.priority, -3);
  EXPECT_EQ(same.terms.tenant, "t");
  EXPECT_EQ(same.terms.max_wait, claim.terms.max_wait);
  EXPECT_EQ(same.terms.owner, claim.terms.owner);
  EXPECT_EQ(same.terms.devices, claim.terms.devices);
  EXPECT_EQ(same.terms.labels, claim.terms.labels);
  EXPECT_EQ(same.state, ClaimState::kDraining);
  EXPECT_EQ(same.created, claim.created);
  EXPECT_FALSE((*loaded)[1].terms.owner.uid.has_value()) << "anybody's";

  broker_->claims().Restore(*loaded);
  broker_->claims().ServeRestored();
  EXPECT_THAT(served(), ElementsAre("any", "team"));
  EXPECT_EQ(View("team", 1).limit_bytes, 40_MiB);
  EXPECT_EQ(View("team", 1).guarantee_bytes, 16_MiB);
  EXPECT_EQ(View("team", 0).limit_bytes, 0u);
  // Sessions of the last daemon look for the claim: the daemon does not remove the draining claim yet.
  broker_->claims().RemoveEmpty();
  WaitForChanges();
  EXPECT_TRUE(broker_->claims().Find("team").ok());
  EXPECT_THAT(served(), ElementsAre("any", "team"));
}

TEST_F(ClaimsTest, AGuaranteeThatCannotBeGivenAnyMoreDoesNotKeepTheDaemonFromStarting) {
  broker_->claims().Restore(
      {{.name = "a", .terms = {.guarantee = 40_MiB}}, {.name = "b", .terms = {.guarantee = 40_MiB}}});
  EXPECT_EQ(View("a").guarantee_bytes, 40_MiB);
  EXPECT_EQ(View("b").guarantee_bytes, 0u);
  EXPECT_EQ(View("b").limit_bytes, kCapacity);
  EXPECT_TRUE(Update("b", {.limit = Limit(50_MiB)}).ok()) << "it says nothing of the guarantee";
  EXPECT_EQ(View("b").limit_bytes, 50_MiB);
  EXPECT_TRUE(absl::IsResourceExhausted(Update("b", {.guarantee = Limit(40_MiB)}).status()));
}

}  // namespace
}  // namespace vrambroker
