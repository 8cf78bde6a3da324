// SPDX-License-Identifier: Apache-2.0
//
// Claims that users make for themselves, which never give more than the policy. Also claims that end with a process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "allocator/device/process_files.h"
#include "server/wire/claim_file.h"
#include "tests/unit/server/core/claims_fixture.h"

namespace vrambroker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class OwnClaimsTest : public ClaimsTest {
 protected:
  void SetRule(PolicyRule rule) {
    rule.label = "users";
    policy_ = PolicyOf({.rules = {std::move(rule)}});
    broker_->SetPolicy(policy_);
  }
  ClaimAsker User(uid_t uid = kOwner) const {
    const Caller caller = Process(1, uid);
    return {.caller = caller, .rule = broker_->TermsOf(caller).value(), .max_claims = max_claims_};
  }
  absl::StatusOr<Claim> CreateOwn(const std::string& name, ClaimTerms terms, const ClaimAsker& asker) {
    if (!terms.owner.uid.has_value()) terms.owner.uid = asker.caller.uid;
    return Answer([&](const Claims::Done& done) { broker_->claims().Create(name, terms, done, asker); });
  }
  absl::StatusOr<Claim> CreateOwn(const std::string& name, const ClaimTerms& terms = {.limit = 8_MiB}) {
    return CreateOwn(name, terms, User());
  }
  absl::StatusOr<Claim> UpdateOwn(const std::string& name, const ClaimChange& change, uid_t uid = kOwner) {
    return Answer([&](const Claims::Done& done) { broker_->claims().Update(name, change, done, User(uid)); });
  }
  absl::Status DeleteOwn(const std::string& name, uid_t uid = kOwner) {
    Signal answered;
    absl::Status answer;
    broker_->claims().Delete(
        name, /*revoke=*/true,
        [&](const absl::StatusOr<Claims::Deleted>& deleted) {
          answer = deleted.status();
          answered.Notify();
        },
        User(uid));
    answered.WaitForNotification();
    return answer;
  }
  static std::string WhyDenied(const absl::Status& status) {
    EXPECT_TRUE(absl::IsPermissionDenied(status)) << status;
    return std::string(status.message());
  }

  size_t max_claims_ = 3;
};

TEST_F(OwnClaimsTest, WhatIsNotSaidIsTheRules) {
  SetRule({.limit = 16_MiB, .priority = 4, .tenant = "lab", .max_wait = std::chrono::seconds(9)});
  const absl::StatusOr<Claim> claim = CreateOwn("u1000.a");
  ASSERT_TRUE(claim.ok()) << claim.status();
  EXPECT_TRUE(claim->is_own);
  EXPECT_EQ(claim->terms.priority, 4);
  EXPECT_EQ(claim->terms.tenant, "lab");
  EXPECT_EQ(claim->terms.max_wait, std::chrono::seconds(9));
  EXPECT_EQ(View("u1000.a").limit_bytes, 8_MiB);
  EXPECT_THAT(saved(), ElementsAre("u1000.a active"));
  ASSERT_TRUE(CreateOwn("u1000.lower", {.limit = 8_MiB, .priority = -1, .max_wait = std::chrono::seconds(1)}).ok());
}

TEST_F(OwnClaimsTest, NobodyGetsMoreThanTheRuleGives) {
  SetRule({.limit = 16_MiB, .priority = 4, .tenant = "lab", .max_wait = std::chrono::seconds(9)});
  const auto why = [&](const ClaimTerms& terms) { return WhyDenied(CreateOwn("u1000.a", terms).status()); };
  EXPECT_THAT(why({.limit = 17_MiB}), HasSubstr("limit: 17.00 MiB is above the 16.00 MiB"));
  EXPECT_THAT(why({.limit = 0.5}), HasSubstr("limit: "));
  EXPECT_THAT(why({}), HasSubstr("that the policy's rule users gives; more takes the right ADMIN"));
  EXPECT_THAT(why({.limit = 8_MiB, .guarantee = 1_MiB}), HasSubstr("guarantee: "));
  EXPECT_THAT(why({.limit = 8_MiB, .guarantee = 0.1}), HasSubstr("guarantee: "));
  EXPECT_THAT(why({.limit = 8_MiB, .priority = 5}), HasSubstr("priority: 5 is above the 4"));
  EXPECT_THAT(why({.limit = 8_MiB, .tenant = "other"}), HasSubstr("tenant: it is 'lab'"));
  EXPECT_THAT(why({.limit = 8_MiB, .max_wait = std::chrono::seconds(10)}), HasSubstr("max_wait_ms: 10000"));
  EXPECT_THAT(why({.limit = 8_MiB, .owner = {.uid = 7}}), HasSubstr("owner: "));
  EXPECT_THAT(why({.limit = 8_MiB, .owner = {.uid = kOwner, .gid = 7}}), HasSubstr("owner: "));
  ClaimTerms for_all{.limit = 8_MiB};
  const absl::Status anybodys =
      Answer([&](const Claims::Done& done) { broker_->claims().Create("u1000.a", for_all, done, User()); }).status();
  EXPECT_THAT(WhyDenied(anybodys), HasSubstr("owner: "));
  EXPECT_THAT(broker_->claims().GetAll(), IsEmpty());
  EXPECT_THAT(saved(), IsEmpty());
  // Later changes get no more than the rule, either.
  ASSERT_TRUE(CreateOwn("u1000.a").ok());
  EXPECT_TRUE(UpdateOwn("u1000.a", {.limit = Limit(16_MiB)}).ok());
  EXPECT_THAT(WhyDenied(UpdateOwn("u1000.a", {.limit = Limit(17_MiB)}).status()), HasSubstr("limit: "));
  EXPECT_THAT(WhyDenied(UpdateOwn("u1000.a", {.guarantee = Limit(1_MiB)}).status()), HasSubstr("guarantee: "));
  EXPECT_THAT(WhyDenied(UpdateOwn("u1000.a", {.priority = 5}).status()), HasSubstr("priority: "));
  EXPECT_THAT(WhyDenied(UpdateOwn("u1000.a", {.max_wait = std::chrono::hours(1)}).status()),
              HasSubstr("max_wait_ms: "));
  EXPECT_EQ(View("u1000.a").limit_bytes, 16_MiB);
}

TEST_F(OwnClaimsTest, WhomTheRuleBoundsOtherwiseMakesNone) {
  const auto why = [&](PolicyRule rule) {
    SetRule(std::move(rule));
    return WhyDenied(CreateOwn("u1000.a").status());
  };
  EXPECT_THAT(why({.user_limit = 16_MiB}), HasSubstr("the policy's rule users bounds what it may have in all"));
  EXPECT_THAT(why({.user_guarantee = 16_MiB}), HasSubstr("user_guarantee"));
  EXPECT_THAT(why({.max_sessions = 2}), HasSubstr("max_sessions"));
  EXPECT_THAT(why({.claim = "batch"}), HasSubstr("puts its sessions into a claim already"));
  EXPECT_THAT(why({.claim_per_user = true}), HasSubstr("puts its sessions into a claim already"));
  EXPECT_THAT(why({.strict = true}), HasSubstr("STRICT"));
  EXPECT_THAT(why({.rights = {.client = false}}), HasSubstr("right CLIENT"));
  EXPECT_THAT(broker_->claims().GetAll(), IsEmpty());
}

TEST_F(OwnClaimsTest, OnlyNamesOfItsOwnAndNotTooMany) {
  for (const char* name : {"team", "u1000", "u1000.", "u10001.a", "u100.a", "u0.a", "uid:1000"}) {
    EXPECT_THAT(WhyDenied(CreateOwn(name).status()), HasSubstr("a claim of one's own is called u1000.NAME")) << name;
  }
  for (const char* name : {"u1000.a", "u1000.b", "u1000.c"}) EXPECT_TRUE(CreateOwn(name).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(CreateOwn("u1000.a").status()));
  const absl::Status fourth = CreateOwn("u1000.d").status();
  EXPECT_TRUE(absl::IsResourceExhausted(fourth)) << fourth;
  EXPECT_THAT(std::string(fourth.message()), HasSubstr("uid 1000 has 3 claims of its own"));
  EXPECT_TRUE(CreateOwn("u7.a", {.limit = 8_MiB}, User(7)).ok()) << "others have their own";
  EXPECT_TRUE(Create("u1000.d", {}).ok()) << "an operator is not bound by it";
  ASSERT_TRUE(DeleteOwn("u1000.b").ok());
  EXPECT_TRUE(CreateOwn("u1000.e").ok());
  max_claims_ = 0;
  EXPECT_TRUE(absl::IsResourceExhausted(CreateOwn("u8.a", {.limit = 8_MiB}, User(8)).status()));
}

TEST_F(OwnClaimsTest, LabelsOfItsOwnAreFew) {
  const auto labels = [](size_t bytes) {
    return absl::btree_map<std::string, std::string>{{"a", std::string(127, 'v')},
                                                     {"b", std::string(127, 'v')},
                                                     {"c", std::string(127, 'v')},
                                                     {"d", std::string(bytes - 385, 'v')}};
  };
  EXPECT_TRUE(CreateOwn("u1000.a", {.limit = 8_MiB, .labels = labels(512)}).ok());
  const absl::Status status = CreateOwn("u1000.b", {.limit = 8_MiB, .labels = labels(513)}).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("labels: 513 bytes; a claim of one's own may have 512 in all"));
  EXPECT_FALSE(UpdateOwn("u1000.a", {.labels = labels(513)}).ok());
  EXPECT_TRUE(Create("team", {.labels = labels(513)}).ok()) << "an operator's";
}

// Each claim needs file descriptors.
TEST_F(OwnClaimsTest, UsersShareWhatTheDaemonCanServeAndOperatorsMakeTheirs) {
  most_own_ = 16;
  max_claims_ = 64;
  Restart();
  const auto fill = [&](uid_t uid) {
    int made = 0;
    while (CreateOwn(absl::StrCat("u", uid, ".", made), {.limit = 8_MiB}, User(uid)).ok()) ++made;
    return made;
  };
  EXPECT_EQ(fill(1), 6);
  EXPECT_EQ(fill(2), 4);
  const absl::Status share = CreateOwn("u2.x", {.limit = 8_MiB}, User(2)).status();
  EXPECT_TRUE(absl::IsResourceExhausted(share)) << share;
  EXPECT_THAT(std::string(share.message()), HasSubstr("uid 2 has 4 claims of its own, and users may make 6 more: each "
                                                      "may have half as many as are free"));
  int all = 10;
  for (uid_t uid = 3; uid < 20; ++uid) all += fill(uid);
  EXPECT_EQ(all, 16);
  const absl::Status none = CreateOwn("u99.x", {.limit = 8_MiB}, User(99)).status();
  EXPECT_THAT(std::string(none.message()),
              HasSubstr("there are 16 claims that users have made for themselves, the most "
                        "that the daemon's file descriptors allow; raise LimitNOFILE"));
  EXPECT_TRUE(Create("team", {}).ok()) << "an operator's";
}

TEST_F(OwnClaimsTest, OperatorsHaveClaimsThatUsersCannotTake) {
  std::vector<Claim> claims;
  for (size_t i = 0; i < Claims::kMaxOwnClaims; ++i) {
    const uid_t uid = static_cast<uid_t>(2000 + i % 64);
    claims.push_back({.name = absl::StrCat("u", uid, ".", i), .terms = {.owner = {.uid = uid}}, .is_own = true});
  }
  broker_->claims().Restore(std::move(claims));
  const absl::Status status = CreateOwn("u1000.a").status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("there are 3072 claims that users have made for themselves, the "
                                                       "most there can be"));
  EXPECT_TRUE(Create("team", {}).ok());
}

// The daemon starts with fewer file descriptors.
TEST_F(OwnClaimsTest, OperatorsAreServedFirstAndNoMoreOfUsersThanCanBe) {
  most_own_ = 2;
  Restart();
  const auto own = [](const char* name) {
    return Claim{.name = name, .terms = {.owner = {.uid = kOwner}}, .is_own = true};
  };
  broker_->claims().Restore({own("u1000.a"), own("u1000.b"), own("u1000.c"), {.name = "z"}});
  broker_->claims().ServeRestored();
  EXPECT_THAT(served(), ElementsAre("z", "u1000.a", "u1000.b"));
  ASSERT_TRUE(DeleteOwn("u1000.a").ok());
  EXPECT_TRUE(testing_support::WaitFor([&] {
    broker_->claims().Tick();
    return served() == std::vector<std::string>{"z", "u1000.b", "u1000.c"};
  }));
}

TEST_F(OwnClaimsTest, AnOperatorsChangeWaitsBehindNoUsers) {
  ASSERT_TRUE(CreateOwn("u1000.a").ok());
  ASSERT_TRUE(Create("team", {}).ok());
  Signal may_go_on;
  on_save_ = [&] { may_go_on.WaitForNotification(); };
  Mutex mu;
  std::vector<std::string> order;
  const auto note = [&](const absl::StatusOr<Claim>& claim) {
    ASSERT_TRUE(claim.ok()) << claim.status();
    MutexLock lock(mu);
    order.push_back(claim->name);
  };
  for (int i = 0; i < 3; ++i) broker_->claims().Update("u1000.a", {.limit = Limit(7_MiB)}, note, User());
  for (int i = 0; i < 2; ++i) broker_->claims().Update("team", {.limit = Limit(0.5)}, note);
  may_go_on.Notify();
  const auto answered = [&] {
    MutexLock lock(mu);
    return order;
  };
  EXPECT_TRUE(testing_support::WaitFor([&] { return answered().size() == 5; }));
  const std::vector<std::string> all = answered();
  // The first change of the user may have begun, or not.
  const std::vector<std::string> last(all.end() - 2, all.end());
  EXPECT_THAT(last, ElementsAre("u1000.a", "u1000.a"));
}

TEST_F(OwnClaimsTest, NobodyChangesAnothersOrAnOperators) {
  ASSERT_TRUE(CreateOwn("u1000.a").ok());
  ASSERT_TRUE(Create("team", {.owner = {.uid = 7}}).ok());
  for (const char* name : {"u1000.a", "team", "none"}) {
    // The error does not tell whether the claim belongs to another user or does not exist.
    const std::string refusal =
        "uid 7 has no claim of its own of that name (vramctl claim ls); others take the right ADMIN";
    EXPECT_EQ(WhyDenied(DeleteOwn(name, 7)), refusal) << name;
    EXPECT_EQ(WhyDenied(UpdateOwn(name, {.limit = Limit(1_MiB)}, 7).status()), refusal) << name;
  }
  EXPECT_EQ(broker_->claims().GetAll().size(), 2u);
  EXPECT_TRUE(
      absl::IsPermissionDenied(TryOpen("b", std::nullopt, In(broker_->claims().Find("u1000.a"), 2, 7)).status()));
  EXPECT_TRUE(Update("u1000.a", {.limit = Limit(30_MiB), .guarantee = Limit(4_MiB)}).ok()) << "an operator gives more";
  EXPECT_TRUE(Delete("u1000.a").ok());
}

// A session gets the policy at the time of the session's opening.
TEST_F(OwnClaimsTest, ASessionInItGetsNoMoreThanThePolicyGivesItNow) {
  SetRule({.limit = 40_MiB});
  const absl::StatusOr<Claim> claim = CreateOwn("u1000.a", {.limit = 40_MiB});
  ASSERT_TRUE(claim.ok()) << claim.status();
  const SessionPtr before = OpenLeasing("a", std::nullopt, In(claim));
  SetRule({.limit = 16_MiB});
  const SessionPtr after = OpenLeasing("b", std::nullopt, In(claim, 2));
  EXPECT_FALSE(LeaseSegments(after, {18_MiB}).ok());
  EXPECT_TRUE(LeaseSegments(after, {16_MiB}).ok());
  EXPECT_TRUE(LeaseSegments(before, {24_MiB}).ok()) << "one that is open keeps what it has";
  SetRule({.limit = 16_MiB, .user_limit = 16_MiB});
  EXPECT_THAT(WhyDenied(TryOpen("c", std::nullopt, In(claim, 3)).status()), HasSubstr("user_limit"));
  SetRule({.rights = {.client = false}});
  EXPECT_THAT(WhyDenied(TryOpen("c", std::nullopt, In(claim, 3)).status()), HasSubstr("right CLIENT"));
  EXPECT_TRUE(TryOpen("root", std::nullopt, In(claim, 4, 0)).ok());
  // An operator's claim does not depend on the rules.
  EXPECT_TRUE(TryOpen("c", std::nullopt, In(Create("team", {}), 3)).ok());
  // Administrators may change every limit: no rule bounds an administrator.
  broker_->Close(before, "test");
  broker_->Close(after, "test");
  SetRule({.limit = 16_MiB, .rights = {.client = true, .observer = true, .admin = true}, .user_limit = 16_MiB});
  const SessionPtr admin = OpenLeasing("admin", std::nullopt, In(claim, 5));
  EXPECT_TRUE(LeaseSegments(admin, {40_MiB}).ok());
}

// The user has left the team in which the user made the claim.
TEST_F(OwnClaimsTest, ASessionInItHasNeitherTheTenantNorThePriorityOfARuleThatAppliesNoMore) {
  using std::chrono::seconds;
  SetRule({.priority = 4, .tenant = "lab", .max_wait = seconds(9)});
  const absl::StatusOr<Claim> claim = CreateOwn("u1000.a", {.limit = 40_MiB});
  ASSERT_TRUE(claim.ok()) << claim.status();
  const SessionPtr before = OpenLeasing("a", std::nullopt, In(claim));
  const SessionPtr root_before = OpenLeasing("r", std::nullopt, In(claim, 2, 0));
  const SessionPtr team = OpenLeasing("team", std::nullopt, Process(3, 7));
  for (const SessionPtr& session : {before, root_before, team}) ASSERT_TRUE(LeaseSegments(session, {8_MiB}).ok());
  EXPECT_EQ(before->terms().tenant, "lab");
  EXPECT_EQ(broker_->operator_view().Describe(*before).devices[0].account.priority, 4);
  // A restart changes no claim: the claim's terms are the terms of the claims file.
  Claim saved = *broker_->claims().Find("u1000.a");
  saved.name = "u1000.saved";
  broker_->claims().Restore({saved});

  SetRule({.priority = 1, .max_wait = seconds(2)});
  broker_->Close(team, "test");  // the pool caches the session's memory for the tenant
  broker_->Close(before, "test");
  for (const char* name : {"u1000.a", "u1000.saved"}) {
    const absl::StatusOr<Claim> its = broker_->claims().Find(name);
    const SessionPtr after = OpenLeasing("b", std::nullopt, In(its, 4));
    EXPECT_EQ(after->terms().tenant, "uid:1000") << name;
    EXPECT_EQ(broker_->operator_view().Describe(*after).devices[0].account.priority, 1) << name;
    EXPECT_EQ(after->max_wait(), seconds(2)) << name;
    ASSERT_TRUE(LeaseSegments(after, {8_MiB}).ok());
    // A change of the claim gives no more, either.
    ASSERT_TRUE(Update(name, {.priority = 6, .max_wait = seconds(30)}).ok());
    EXPECT_EQ(broker_->operator_view().Describe(*after).devices[0].account.priority, 1) << name;
    EXPECT_EQ(after->max_wait(), seconds(2)) << name;
    // Root is the user of a container's processes: no rule says whose uncleared memory root may get.
    const SessionPtr root = OpenLeasing("root", std::nullopt, In(its, 5, 0));
    ASSERT_TRUE(LeaseSegments(root, {8_MiB}).ok());
  }
  EXPECT_EQ(pools_[0]->GetStats().handovers, 0u) << "nobody has read what others wrote";
  broker_->Close(root_before, "test");
  ASSERT_TRUE(LeaseSegments(OpenLeasing("root", std::nullopt, In(claim, 6, 0)), {8_MiB}).ok());
  EXPECT_EQ(pools_[0]->GetStats().handovers, 1u) << "they share what they leave in the claim";
  // The user can still change the claim, and has the current tenant.
  ASSERT_TRUE(UpdateOwn("u1000.a", {.priority = 1, .max_wait = seconds(2)}).ok());
  EXPECT_EQ(broker_->claims().Find("u1000.a")->terms.tenant, "uid:1000");
}

// A user cannot multiply the user's bounds by making claims.
TEST_F(OwnClaimsTest, ItsOwnersSessionsCountAsTheUsers) {
  const absl::StatusOr<Claim> own = CreateOwn("u1000.a");
  const absl::StatusOr<Claim> team = Create("team", {});
  EXPECT_FALSE(broker_->claims().CountsInClaim(own->id, In(own)));
  EXPECT_TRUE(broker_->claims().CountsInClaim(team->id, In(team)));
  EXPECT_TRUE(broker_->claims().CountsInClaim(own->id, In(own, 1, 0))) << "a container's root is not root";
}

TEST_F(OwnClaimsTest, AChangeThatIsAnsweredIsUnderWayNoMore) {
  constexpr int kMost = 64;  // changes at a time
  ASSERT_TRUE(CreateOwn("u1000.a").ok());
  Signal may_go_on;
  on_save_ = [&] { may_go_on.WaitForNotification(); };
  std::atomic<int> answered{0};
  absl::Status next = absl::UnknownError("no answer");
  const auto change = [&](const Claims::Done& done) {
    broker_->claims().Update("u1000.a", {.limit = Limit(7_MiB)}, done, User());
  };
  change([&](const absl::StatusOr<Claim>& first) {
    EXPECT_TRUE(first.ok()) << first.status();
    change([&](const absl::StatusOr<Claim>& claim) {
      next = claim.status();
      ++answered;
    });
    ++answered;
  });
  for (int i = 1; i < kMost; ++i) {
    change([&](const absl::StatusOr<Claim>& claim) {
      EXPECT_TRUE(claim.ok()) << claim.status();
      ++answered;
    });
  }
  absl::Status beyond;
  change([&](const absl::StatusOr<Claim>& claim) { beyond = claim.status(); });
  EXPECT_TRUE(absl::IsResourceExhausted(beyond)) << beyond;
  may_go_on.Notify();
  EXPECT_TRUE(testing_support::WaitFor([&] { return answered == kMost + 1; }));
  EXPECT_TRUE(next.ok()) << next;
}

TEST_F(OwnClaimsTest, ItIsAUsersOwnForTheNextDaemonToo) {
  const std::string path = testing_support::MakeTempDir() + "/claims";
  ASSERT_TRUE(CreateOwn("u1000.a").ok());
  ASSERT_TRUE(SaveClaims(path, broker_->claims().GetAll()).ok());
  ASSERT_TRUE(DeleteOwn("u1000.a").ok());
  Restart();
  broker_->claims().Restore(LoadClaims(path).value());
  EXPECT_TRUE(broker_->claims().Find("u1000.a")->is_own);
  EXPECT_TRUE(DeleteOwn("u1000.a").ok());
}

// ---- Claims that end with a process ----

class EphemeralClaimsTest : public OwnClaimsTest {
 protected:
  EphemeralClaimsTest() : process_(fork()) {
    if (process_ == 0) {
      pause();
      _exit(0);
    }
  }
  ~EphemeralClaimsTest() override { EndProcess(); }

  void EndProcess() {
    if (process_ == 0) return;
    kill(process_, SIGKILL);
    waitpid(process_, nullptr, 0);
    process_ = 0;
  }
  absl::StatusOr<Claim> CreateEphemeral(const std::string& name = "") {
    const ClaimAsker asker{.caller = Process(process_, kOwner)};
    ClaimTerms terms{.owner = {.uid = kOwner}};
    return Answer([&](const Claims::Done& done) { broker_->claims().Create(name, terms, done, asker, true); });
  }
  // Works like IsRemoved(), and also looks at makers.
  bool IsGone(const std::string& name) {
    const bool is_gone = testing_support::WaitFor([&] {
      broker_->claims().Tick();
      return !broker_->claims().Find(name).ok();
    });
    WaitForChanges();
    return is_gone;
  }

  pid_t process_;
};

TEST_F(EphemeralClaimsTest, ItGoesWithItsMakerWhenItHasNoSession) {
  const absl::StatusOr<Claim> claim = CreateEphemeral();
  ASSERT_TRUE(claim.ok()) << claim.status();
  EXPECT_THAT(claim->name, HasSubstr(absl::StrCat("u1000.run-", process_, "-")));
  const absl::StatusOr<Claim> other = CreateEphemeral("named");
  ASSERT_TRUE(other.ok()) << other.status();
  ASSERT_TRUE(Create("stays", {}).ok());
  const SessionPtr session = OpenLeasing("a", std::nullopt, In(claim));
  ASSERT_TRUE(LeaseSegments(session, {8_MiB}).ok());
  broker_->claims().Tick();
  WaitForChanges();
  EXPECT_EQ(broker_->claims().GetAll().size(), 3u);
  EndProcess();
  EXPECT_TRUE(IsGone("named"));
  EXPECT_TRUE(broker_->claims().Find(claim->name).ok()) << "it has a session";
  const SessionPtr late = OpenLeasing("b", std::nullopt, In(claim, 2));
  broker_->Close(session, "test");
  broker_->claims().Tick();
  WaitForChanges();
  EXPECT_TRUE(broker_->claims().Find(claim->name).ok());
  broker_->Close(late, "test");
  EXPECT_TRUE(IsGone(claim->name));
  EXPECT_THAT(served(), ElementsAre("stays"));
  EXPECT_THAT(saved(), ElementsAre("stays active"));
}

TEST_F(EphemeralClaimsTest, OneThatIsRemovedHasNoMakerAnyMore) {
  const absl::StatusOr<Claim> claim = CreateEphemeral();
  ASSERT_TRUE(claim.ok()) << claim.status();
  ASSERT_TRUE(Delete(claim->name)->is_removed);
  broker_->claims().Tick();  // the daemon looks for no maker
  WaitForChanges();
  EXPECT_THAT(broker_->claims().GetAll(), IsEmpty());
}

TEST_F(EphemeralClaimsTest, AMakerThatEndsDuringAChangeIsMissed) {
  const absl::StatusOr<Claim> claim = CreateEphemeral();
  ASSERT_TRUE(claim.ok()) << claim.status();
  const SessionPtr session = OpenLeasing("a", std::nullopt, In(claim));
  on_save_ = [&] {
    EndProcess();
    broker_->claims().Tick();
    EXPECT_TRUE(broker_->claims().Find(claim->name)->has_lost_maker);
  };
  ASSERT_TRUE(Update(claim->name, {.limit = Limit(8_MiB)}).ok());
  ASSERT_TRUE(broker_->claims().Find(claim->name)->has_lost_maker);
  EXPECT_EQ(broker_->claims().Find(claim->name)->sessions, 1u);
  broker_->Close(session, "test");
  EXPECT_TRUE(IsRemoved(claim->name));
}

TEST_F(EphemeralClaimsTest, TheNextDaemonKnowsTheProcess) {
  const std::string path = testing_support::MakeTempDir() + "/claims";
  const std::string name = CreateEphemeral()->name;
  ASSERT_TRUE(SaveClaims(path, broker_->claims().GetAll()).ok());
  Restart();
  broker_->claims().Restore(LoadClaims(path).value());
  broker_->claims().ServeRestored();
  broker_->claims().Tick();
  WaitForChanges();
  EXPECT_TRUE(broker_->claims().Find(name).ok());
  EndProcess();
  EXPECT_TRUE(IsGone(name));
  // Adds a claim whose maker has gone meanwhile. Another process with the maker's number is not the maker.
  Restart();
  std::vector<Claim> claims = LoadClaims(path).value();
  claims.push_back({.name = "other", .maker = ProcessId{.pid = getpid(), .started = StartOf(getpid()) + 1}});
  claims.push_back({.name = "lives", .maker = ProcessId{.pid = getpid(), .started = StartOf(getpid())}});
  broker_->claims().Restore(claims);
  EXPECT_TRUE(broker_->claims().Find(name)->has_lost_maker);
  EXPECT_TRUE(broker_->claims().Find("other")->has_lost_maker);
  EXPECT_FALSE(broker_->claims().Find("lives")->has_lost_maker);
}

}  // namespace
}  // namespace vrambroker
