// SPDX-License-Identifier: Apache-2.0
#include "server/identity/policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "allocator/base/bytes.h"
#include "server/wire/convert.h"

namespace vrambroker {
namespace {

using ::testing::HasSubstr;

constexpr uid_t kDaemon = 900;

PolicyRule Rule(const std::string& label) {
  PolicyRule rule;
  rule.label = label;
  rule.place = "p:1:1";
  return rule;
}

Policy Make(std::vector<PolicyRule> rules) {
  return Policy({.rules = std::move(rules), .session_limit = Limit(0.5), .daemon_uid = kDaemon});
}

// Returns a rule for each kind of matcher. Each of the first two rules has two matchers.
std::vector<PolicyRule> Rules() {
  std::vector<PolicyRule> rules;
  rules.push_back(Rule("both"));
  rules.back().uid = 1000;
  rules.back().session_name = "train-*";
  rules.push_back(Rule("group-in-slice"));
  rules.back().gid = 44;
  rules.back().cgroup = "/user.slice/*";
  rules.push_back(Rule("user"));
  rules.back().uid = 1000;
  rules.push_back(Rule("group"));
  rules.back().gid = 44;
  rules.push_back(Rule("cgroup"));
  rules.back().cgroup = "/system.slice/jupyter?.service";
  rules.push_back(Rule("name"));
  rules.back().session_name = "serve";
  return rules;
}

TEST(PolicyTest, TheFirstRuleThatMatchesCounts) {
  const Policy policy = Make(Rules());
  struct Case {
    PolicySubject subject;
    std::string rule;
  };
  const std::optional<std::string> none;
  const std::vector<Case> cases = {
      {{1000, {1000}, none, "train-7"}, "both"},
      {{1000, {1000}, none, "train"}, "user"},
      {{1000, {1000}, none, none}, "user"},
      {{1000, {44}, "/user.slice/a/b", "train-7"}, "both"},
      {{1000, {44}, "/user.slice/a/b", "x"}, "group-in-slice"},
      {{1001, {1001}, none, "train-7"}, ""},
      {{1001, {44}, none, "x"}, "group"},
      {{1001, {1001, 27, 44}, none, "x"}, "group"},
      {{1001, {1001, 27}, "/user.slice/x", "x"}, ""},
      {{1001, {1001, 44}, "/user.slice/", "x"}, "group-in-slice"},
      {{1001, {1001, 44}, "/other/user.slice/", "x"}, "group"},
      {{1001, {1001}, "/system.slice/jupyter1.service", none}, "cgroup"},
      {{1001, {1001}, "/system.slice/jupyter12.service", "serve"}, "name"},
      {{1001, {1001}, none, "serve"}, "name"},
      {{1001, {1001}, none, "serve2"}, ""},
      {{1001, {}, none, none}, ""},
      {{0, {0}, none, none}, ""},
  };
  for (const Case& each : cases) {
    SCOPED_TRACE(::testing::PrintToString(each.subject.session_name) + " expects " + each.rule);
    EXPECT_EQ(policy.TermsFor(each.subject).rule, each.rule);
    // The explanation agrees with the terms.
    const PolicyExplanation explanation = policy.Explain(each.subject);
    EXPECT_EQ(explanation.terms.rule, each.rule);
    for (size_t i = 0; i < explanation.rules.size(); ++i) {
      EXPECT_EQ(explanation.rules[i].matches, explanation.rules[i].label == each.rule) << i;
      EXPECT_FALSE(explanation.rules[i].why.empty());
      EXPECT_EQ(explanation.rules[i].matches && i + 1 != explanation.rules.size(), false)
          << "only the last one matches";
    }
    if (each.rule.empty()) {
      EXPECT_EQ(explanation.rules.size(), Rules().size());
    }
  }
}

TEST(PolicyTest, WhoMatchesNoRuleGetsTheDefaults) {
  const SessionTerms terms = Make({}).TermsFor({.uid = 1000});
  EXPECT_EQ(terms.rule, "");
  EXPECT_EQ(terms.limit, Limit(0.5)) << "session_limit";
  EXPECT_EQ(terms.guarantee, Limit(uint64_t{0}));
  EXPECT_EQ(terms.priority, 0);
  EXPECT_EQ(terms.tenant, "uid:1000");
  EXPECT_FALSE(terms.strict);
  EXPECT_EQ(terms.rights, (Rights{.client = true, .observer = true, .admin = false}));
}

TEST(PolicyTest, ARuleGivesAllThatItSays) {
  using std::chrono::seconds;
  PolicyRule rule = Rule("all");
  rule.limit = Limit(0.75);
  rule.guarantee = Limit(1_GiB);
  rule.priority = -7;
  rule.tenant = "team";
  rule.strict = true;
  rule.rights = {.client = true, .observer = false, .admin = false};
  const SessionTerms terms = Make({rule}).TermsFor({.uid = 1000});
  EXPECT_EQ(terms.rule, "all");
  EXPECT_EQ(terms.limit, Limit(0.75)) << "a rule's limit may be above session_limit";
  EXPECT_EQ(terms.guarantee, Limit(1_GiB));
  EXPECT_EQ(terms.priority, -7);
  EXPECT_EQ(terms.tenant, "team");
  EXPECT_TRUE(terms.strict);
  EXPECT_EQ(terms.rights, rule.rights);

  // Sets bounds on all sessions of a user together.
  const Policy several(
      {.rules = {rule}, .max_wait = seconds(9), .user_limit = Limit(0.7), .user_guarantee = Limit(0.2)});
  const SessionTerms of_policy = several.TermsFor({.uid = 1000});
  EXPECT_EQ(of_policy.max_wait, seconds(9));
  EXPECT_EQ(of_policy.user_limit, Limit(0.7));
  EXPECT_EQ(of_policy.user_guarantee, Limit(0.2));
  EXPECT_EQ(of_policy.max_sessions, 0u);
  rule.max_wait = seconds(4);
  rule.user_limit = Limit(0.6);
  rule.user_guarantee = Limit(0.1);
  rule.max_sessions = 5;
  const PolicyOptions with_all{
      .rules = {rule}, .max_wait = seconds(9), .user_limit = Limit(0.7), .user_guarantee = Limit(0.2)};
  const SessionTerms of_rule = Policy(with_all).TermsFor({.uid = 1000});
  EXPECT_EQ(of_rule.max_wait, seconds(4));
  EXPECT_EQ(of_rule.user_limit, Limit(0.6));
  EXPECT_EQ(of_rule.user_guarantee, Limit(0.1));
  EXPECT_EQ(of_rule.max_sessions, 5u);
  // Sessions in a rule's claim have only the bounds of the claim.
  rule.user_limit = rule.user_guarantee = std::nullopt;
  rule.claim = "team";
  rule.claim_limit = Limit(0.4);
  rule.claim_guarantee = Limit(0.3);
  for (const bool per_user : {false, true}) {
    rule.claim_per_user = per_user;
    PolicyOptions options = with_all;
    options.rules = {rule};
    const SessionTerms of_claim = Policy(options).TermsFor({.uid = 1000});
    EXPECT_EQ(of_claim.claim, per_user ? "uid:1000" : "team");
    EXPECT_EQ(of_claim.claim_limit, Limit(0.4));
    EXPECT_EQ(of_claim.claim_guarantee, Limit(0.3));
    EXPECT_EQ(of_claim.user_limit, std::nullopt);
    EXPECT_EQ(of_claim.user_guarantee, std::nullopt);
  }

  // A rule that leaves a setting out takes the default, not a later rule's value.
  const SessionTerms plain = Make({Rule("plain"), rule}).TermsFor({.uid = 1000});
  EXPECT_EQ(plain.rule, "plain");
  EXPECT_EQ(plain.limit, Limit(0.5));
  EXPECT_EQ(plain.tenant, "uid:1000");
  EXPECT_EQ(plain.rights, Rights());
}

TEST(PolicyTest, RootAndTheDaemonsUserHaveEveryRight) {
  PolicyRule nothing = Rule("nothing");
  nothing.priority = 3;
  nothing.rights = {.client = false, .observer = false, .admin = false};
  const Policy policy = Make({nothing});
  for (const uid_t uid : {uid_t{0}, kDaemon}) {
    const PolicyExplanation explanation = policy.Explain({.uid = uid});
    EXPECT_TRUE(explanation.is_operator);
    EXPECT_EQ(explanation.terms.rights, kEveryRight);
    EXPECT_EQ(explanation.terms.priority, 3) << "the rest is the rule's";
  }
  EXPECT_EQ(policy.TermsFor({.uid = kDaemon + 1}).rights, nothing.rights);
  EXPECT_FALSE(policy.Explain({.uid = kDaemon + 1}).is_operator);
}

TEST(PolicyTest, ReasonsNameWhatDidNotMatch) {
  const Policy policy = Make(Rules());
  const PolicyExplanation explanation =
      policy.Explain({.uid = 1001, .gids = {1001, 27}, .cgroup = "/a", .session_name = "serve"});
  ASSERT_EQ(explanation.rules.size(), 6u);
  EXPECT_EQ(explanation.rules[0].why, "uid is 1001, not 1000; name serve does not match train-*");
  EXPECT_EQ(explanation.rules[1].why,
            "gid 44 is not among the groups (1001, 27); cgroup /a does not match /user.slice/*");
  EXPECT_EQ(explanation.rules[2].why, "uid is 1001, not 1000");
  EXPECT_EQ(explanation.rules[5].why, "name serve matches serve");
  EXPECT_EQ(explanation.rules[5].place, "p:1:1");

  const PolicyExplanation unknown = policy.Explain({.uid = 1001});
  EXPECT_THAT(unknown.rules[1].why, HasSubstr("none is known"));
  EXPECT_THAT(unknown.rules[5].why, HasSubstr("no session name is given"));
  EXPECT_EQ(policy.Explain({.uid = 1001, .gids = {44}, .cgroup = "/user.slice/u"}).rules.back().why,
            "gid 44 is among the groups; cgroup /user.slice/u matches /user.slice/*");
  EXPECT_THAT(Make({Rule("all")}).Explain({.uid = 5}).rules[0].why, HasSubstr("matches everyone"));
}

TEST(GlobTest, Table) {
  struct Case {
    std::string pattern, text;
    bool matches;
  };
  const std::vector<Case> cases = {
      {"", "", true},
      {"", "a", false},
      {"a", "", false},
      {"abc", "abc", true},
      {"abc", "abcd", false},
      {"abcd", "abc", false},
      {"ABC", "abc", false},
      {"*", "", true},
      {"*", "a/b", true},
      {"**", "a", true},
      {"?", "", false},
      {"?", "a", true},
      {"?", "ab", false},
      {"a?c", "abc", true},
      {"a*c", "ac", true},
      {"a*c", "abbbc", true},
      {"a*c", "abcb", false},
      {"a*b*c", "axbxbxc", true},
      {"a*b*c", "axcxbx", false},
      {"*.service", "/a/b.service", true},
      {"/a/*/c", "/a/b/b/c", true},
      {"/a/*", "/a", false},
      {"*a*?", "ba", false},
      {"*a*?", "bab", true},
      {"[a]", "a", false},
  };
  for (const Case& each : cases) {
    EXPECT_EQ(GlobMatches(each.pattern, each.text), each.matches) << each.pattern << " " << each.text;
  }
}

TEST(GlobTest, ManyStarsTakeNoTime) {
  // A matcher that tries each star again takes exponential time.
  std::string pattern;
  for (int i = 0; i < 1000; ++i) pattern += "a*";
  EXPECT_FALSE(GlobMatches(pattern + "b", std::string(4000, 'a')));
  EXPECT_TRUE(GlobMatches(pattern, std::string(4000, 'a')));
}

// Administrators write paths and patterns; messages with these strings carry UTF-8 only.
TEST(PolicyTest, ExplanationsCanBeSentWhateverTheFileSays) {
  std::vector<PolicyRule> rules = {Rule("first"), Rule("second")};
  rules[0].place = "/etc/\xff/c:1:1";
  rules[0].session_name = "z\xff*";
  const PolicySubject subject = {1000, {1000}, "/slice", "train"};
  const v1::ExplainPolicyResponse sent = ToProto(subject, Make(std::move(rules)).Explain(subject));
  v1::ExplainPolicyResponse received;
  ASSERT_TRUE(received.ParseFromString(sent.SerializeAsString()));
  EXPECT_EQ(received.rules(0).place(), "/etc/\xEF\xBF\xBD/c:1:1");
  EXPECT_THAT(received.rules(0).why(), HasSubstr("z\xEF\xBF\xBD*"));
  EXPECT_EQ(received.rule(), "second");

  v1::StatusDetails details;
  EXPECT_TRUE(details.ParseFromString(ToProto(absl::InternalError("\xff")).SerializeAsString()));
}

}  // namespace
}  // namespace vrambroker
