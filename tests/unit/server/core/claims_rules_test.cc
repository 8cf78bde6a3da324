// SPDX-License-Identifier: Apache-2.0
//
// Claims that rules of the policy put sessions into.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "allocator/device/process_files.h"
#include "tests/unit/server/core/claims_fixture.h"

namespace vrambroker {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

class RuleClaimsTest : public ClaimsTest {
 protected:
  // Returns a policy whose rule puts sessions named `team*` into the claim "team".
  static std::shared_ptr<const Policy> RuleOf(const Limit& limit, const Limit& guarantee) {
    PolicyRule rule;
    rule.label = "teams";
    rule.session_name = "team*";
    rule.claim = "team";
    rule.claim_limit = limit;
    rule.claim_guarantee = guarantee;
    return PolicyOf({.rules = {rule}});
  }

  // Returns the log lines of `run`.
  static std::string LogOf(const std::function<void()>& run) {
    std::ostringstream log;
    const std::shared_ptr<spdlog::logger> before = spdlog::default_logger();
    spdlog::set_default_logger(
        std::make_shared<spdlog::logger>("test", std::make_shared<spdlog::sinks::ostream_sink_mt>(log)));
    run();
    spdlog::set_default_logger(before);
    return log.str();
  }

  // Restarts the broker with the rule, which then places new sessions.
  void StartWith(const Limit& limit, const Limit& guarantee) {
    policy_ = RuleOf(limit, guarantee);
    Restart();
  }
  // Leaves the claim "team" with a session and no guarantee. The returned session leaves no room for a guarantee of 40
  // MiB.
  SessionPtr LeaveNoRoomForAGuarantee() {
    StartWith(Limit(60_MiB), Limit(uint64_t{0}));
    OpenLeasing("team-1");
    const SessionPtr other = OpenLeasing("other");
    EXPECT_TRUE(LeaseSegments(other, {40_MiB}).ok());
    return other;
  }
};

TEST_F(RuleClaimsTest, ASessionThatARulePutsThereGetsWhatIsChangedMeanwhileToo) {
  StartWith(Limit(20_MiB), Limit(uint64_t{0}));
  ASSERT_TRUE(Create("team", {.limit = 20_MiB}).ok());
  on_member_ = [&] { EXPECT_TRUE(Update("team", {.limit = Limit(40_MiB)}).ok()); };
  ExpectHeapKnows40MiB(Open("team-1", std::nullopt, Process(1, kOwner), kCollects));
}

// The second session begins to open under the old policy.
TEST_F(RuleClaimsTest, ASessionThatIsBeingOpenedDoesNotBringTheOldPolicyBack) {
  StartWith(Limit(20_MiB), Limit(uint64_t{0}));
  const SessionPtr first = OpenLeasing("team-1");
  on_member_ = [&] {
    broker_->SetPolicy(RuleOf(Limit(40_MiB), Limit(uint64_t{0})));
    EXPECT_TRUE(testing_support::WaitFor([&] { return View("team").limit_bytes == 40_MiB; }));
  };
  const SessionPtr second = OpenLeasing("team-2");
  WaitForChanges();
  EXPECT_EQ(View("team").limit_bytes, 40_MiB);
}

TEST_F(RuleClaimsTest, ARulesClaimIsThereForAsLongAsItHasSessions) {
  StartWith(Limit(40_MiB), Limit(10_MiB));
  const SessionPtr first = OpenLeasing("team-1");
  const SessionPtr second = OpenLeasing("team-2");
  EXPECT_EQ(first->terms().claim, "team");
  EXPECT_EQ(View("team").guarantee_bytes, 10_MiB);
  ASSERT_TRUE(LeaseSegments(first, {30_MiB}).ok());
  EXPECT_FALSE(LeaseSegments(second, {12_MiB}).ok());
  EXPECT_THAT(saved(), IsEmpty()) << "it is the configuration's";
  EXPECT_TRUE(absl::IsAlreadyExists(Create("team", {}).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(Update("team", {.limit = Limit(0.5)}).status()));
  // A reload of the configuration applies to open sessions.
  broker_->SetPolicy(RuleOf(Limit(50_MiB), Limit(5_MiB)));
  EXPECT_TRUE(testing_support::WaitFor(
      [&] { return View("team").limit_bytes == 50_MiB && View("team").guarantee_bytes == 5_MiB; }));
  WaitForChanges();  // the view shows the change before the pools know the change
  EXPECT_TRUE(LeaseSegments(second, {20_MiB}).ok());
  for (const SessionPtr& session : {first, second}) broker_->Close(session, "test");
  EXPECT_TRUE(IsRemoved("team"));
  EXPECT_EQ(pools_[0]->GetStats().guaranteed_bytes, 0u);
}

// A client comes back after a kill. Memory of the earlier run still counts as the user's, and takes the room of the
// guarantee.
TEST_F(RuleClaimsTest, AClientOfARulesClaimComesBackThoughItsGuaranteeIsNotFreeYet) {
  StartWith(Limit(60_MiB), Limit(40_MiB));
  const SessionPtr other = OpenLeasing("other");
  ASSERT_TRUE(LeaseSegments(other, {40_MiB}).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(TryOpen("team-0", std::nullopt, Process(getppid(), kOwner)).status()));
  const pid_t self = getpid();
  broker_->claims().SetEarlierMembers({{{.pid = self, .started = StartOf(self)}, "team"}});
  const SessionPtr back = OpenLeasing("team-1", std::nullopt, Process(self, kOwner));
  ASSERT_NE(back, nullptr);
  EXPECT_EQ(View("team").guarantee_bytes, 0u);
  // The claim has the guarantee as soon as there is room.
  broker_->Close(other, "test");
  EXPECT_TRUE(testing_support::WaitFor([&] {
    broker_->claims().Tick();
    return View("team").guarantee_bytes == 40_MiB;
  }));
}

// A rule's claim that cannot be made takes no memory with it.
TEST_F(RuleClaimsTest, WhatMembersHoldIsTheirUsersAgainWhenTheirClaimCannotBeMade) {
  StartWith(Limit(60_MiB), Limit(40_MiB));
  const SessionPtr other = OpenLeasing("other", std::nullopt, Process(1, 7));
  ASSERT_TRUE(LeaseSegments(other, {40_MiB}).ok());
  const ProcessId member{.pid = getppid(), .started = StartOf(getppid())};
  controls_[0]->Leave({{.file_device = 1, .file_inode = 1, .bytes = 8_MiB, .holders = {member}, .holder_uid = kOwner}});
  ASSERT_TRUE(pools_[0]->FindCarriedOver().ok());
  EXPECT_EQ(pools_[0]->GetShare(kOwner).used_bytes, 8_MiB);
  broker_->claims().SetEarlierMembers({{member, "team"}});
  EXPECT_TRUE(absl::IsResourceExhausted(TryOpen("team-0", std::nullopt, Process(getpid(), kOwner)).status()));
  EXPECT_EQ(pools_[0]->GetShare(kOwner).used_bytes, 8_MiB);
  for (const auto& pool : pools_) {
    for (const auto& [share, stats] : pool->GetView().shares) EXPECT_FALSE(stats.is_claim) << "one for each try";
  }
  broker_->Close(other, "test");
  ASSERT_NE(OpenLeasing("team-0", std::nullopt, Process(getpid(), kOwner)), nullptr);
  EXPECT_EQ(View("team").reserved_bytes, 8_MiB) << "of the claim, once there is one";
  EXPECT_EQ(pools_[0]->GetShare(kOwner).used_bytes, 0u);
  controls_[0]->Leave({});
  for (int looks = 0; looks < 2; ++looks) ASSERT_TRUE(pools_[0]->FindCarriedOver().ok());
}

// A reload cannot refuse such a limit. The sessions' guarantees then get only as much as the limit leaves.
TEST_F(RuleClaimsTest, ALimitThatAReloadLowersBelowGuaranteesHolds) {
  StartWith(Limit(60_MiB), Limit(uint64_t{0}));
  const SessionPtr first = OpenLeasing("team-1");
  const SessionPtr second = OpenLeasing("team-2");
  for (const SessionPtr& session : {first, second}) {
    ASSERT_TRUE(pools_[0]->SetGuarantee(session->id(), 20_MiB).ok());
  }
  ASSERT_TRUE(LeaseSegments(first, {12_MiB}).ok());
  const std::string log = LogOf([&] {
    broker_->SetPolicy(RuleOf(Limit(30_MiB), Limit(uint64_t{0})));
    EXPECT_TRUE(testing_support::WaitFor([&] { return View("team").limit_bytes == 30_MiB; }));
    WaitForChanges();
  });
  EXPECT_THAT(log, HasSubstr("the claim's limit is below the guarantees of its sessions, which get no more than it "
                             "allows claim=team device=0 limit=31457280 guarantees=41943040"));
  EXPECT_THAT(log, Not(HasSubstr("device=1 limit")));
  ASSERT_TRUE(LeaseSegments(second, {18_MiB}).ok());
  const absl::Status refused = LeaseSegments(first, {2_MiB}).status();
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("the sessions of claim team already have 30.00 MiB of its limit of 30.00 MiB"));
  EXPECT_EQ(View("team").limit_bytes, 30_MiB);
  broker_->SetPolicy(RuleOf(Limit(60_MiB), Limit(uint64_t{0})));
  EXPECT_TRUE(testing_support::WaitFor([&] { return View("team").limit_bytes == 60_MiB; }));
  WaitForChanges();
  EXPECT_TRUE(LeaseSegments(first, {8_MiB}).ok());
}

// An earlier refusal does not keep a reload waiting.
TEST_F(RuleClaimsTest, AReloadLowersAGuaranteeThatCouldNotBeGiven) {
  const SessionPtr other = LeaveNoRoomForAGuarantee();
  broker_->SetPolicy(RuleOf(Limit(50_MiB), Limit(40_MiB)));
  EXPECT_TRUE(testing_support::WaitFor([&] { return View("team").limit_bytes == 50_MiB; }));
  EXPECT_EQ(View("team").guarantee_bytes, 0u);
  broker_->SetPolicy(RuleOf(Limit(50_MiB), Limit(10_MiB)));
  EXPECT_TRUE(testing_support::WaitFor([&] { return View("team").guarantee_bytes == 10_MiB; }));
}

// The daemon tries a guarantee without room again and again; the log reports the guarantee once.
TEST_F(RuleClaimsTest, AGuaranteeThatIsTriedAgainIsLoggedOnce) {
  const SessionPtr other = LeaveNoRoomForAGuarantee();
  const std::string log = LogOf([&] {
    broker_->SetPolicy(RuleOf(Limit(60_MiB), Limit(40_MiB)));
    // The daemon tries once a second.
    for (const absl::Time end = absl::Now() + absl::Seconds(4); absl::Now() < end;
         absl::SleepFor(absl::Milliseconds(50))) {
      broker_->claims().Tick();
      WaitForChanges();
    }
  });
  const std::vector<std::string> parts = absl::StrSplit(log, "keeps its old guarantee, for now");
  EXPECT_THAT(parts, SizeIs(2)) << log;
  broker_->Close(other, "test");
  EXPECT_TRUE(testing_support::WaitFor([&] {
    broker_->claims().Tick();
    return View("team").guarantee_bytes == 40_MiB;
  }));
}

TEST_F(RuleClaimsTest, AReloadIsNotLostThoughTooManyChangesWait) {
  StartWith(Limit(60_MiB), Limit(uint64_t{0}));
  const SessionPtr session = OpenLeasing("team-1");
  Signal saves;
  Signal goes_on;
  on_save_ = [&] {
    saves.Notify();
    goes_on.WaitForNotification();
  };
  broker_->claims().Create("busy", {.owner = {.uid = kOwner, .gid = {}}}, [](const absl::StatusOr<Claim>&) {});
  saves.WaitForNotification();
  std::atomic<bool> is_full{false};
  while (!is_full) {
    broker_->claims().Update("no-such-claim", {}, [&is_full](const absl::StatusOr<Claim>& updated) {
      if (!absl::IsNotFound(updated.status())) is_full = true;
    });
  }
  broker_->SetPolicy(RuleOf(Limit(50_MiB), Limit(10_MiB)));
  goes_on.Notify();
  EXPECT_TRUE(testing_support::WaitFor([&] {
    broker_->claims().Tick();
    return View("team").limit_bytes == 50_MiB && View("team").guarantee_bytes == 10_MiB;
  }));
}

TEST_F(RuleClaimsTest, AnOperatorAndARuleThatMakeOneClaimAtATimeMakeOne) {
  StartWith(Limit(40_MiB), Limit(10_MiB));
  SessionPtr session;
  on_save_ = [&] { session = OpenLeasing("team-1"); };
  EXPECT_TRUE(absl::IsAlreadyExists(Create("team", {.limit = 20_MiB, .guarantee = 20_MiB}).status()));
  EXPECT_EQ(View("team").limit_bytes, 40_MiB);
  EXPECT_EQ(View("team").guarantee_bytes, 10_MiB);
  EXPECT_THAT(saved(), IsEmpty());
  broker_->Close(session, "test");
  EXPECT_TRUE(IsRemoved("team"));
  EXPECT_EQ(pools_[0]->GetStats().guaranteed_bytes, 0u);
}

// A single round of many is enough to lose a count.
TEST_F(RuleClaimsTest, OperatorsAndRulesThatRaceForAClaimLoseNothing) {
  StartWith(Limit(40_MiB), Limit(1_MiB));
  for (int round = 0; round < 200; ++round) {
    absl::StatusOr<SessionPtr> session = absl::UnknownError("not opened");
    std::thread opens([&] { session = TryOpen("team-1", std::nullopt, Process(getpid(), kOwner)); });
    const absl::StatusOr<Claim> created = Create("team", {.limit = 20_MiB});
    opens.join();
    const absl::StatusOr<Claim> claim = broker_->claims().Find("team");
    ASSERT_TRUE(claim.ok()) << claim.status();
    EXPECT_EQ(claim->rule.empty(), created.ok()) << created.status();
    EXPECT_EQ(claim->sessions, session.ok() ? 1u : 0u) << session.status();
    if (session.ok()) {
      EXPECT_EQ((*session)->terms().claim_id, claim->id);
      broker_->Close(*session, "test");
    }
    if (created.ok()) {
      ASSERT_TRUE(Delete("team").ok());
    }
    ASSERT_TRUE(IsRemoved("team"));
    ASSERT_EQ(pools_[0]->GetStats().guaranteed_bytes, 0u);
  }
}

}  // namespace
}  // namespace vrambroker
