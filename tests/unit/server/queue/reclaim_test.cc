// SPDX-License-Identifier: Apache-2.0
#include "server/queue/reclaim.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

namespace vrambroker {
namespace {

using ::testing::ElementsAre;

ReclaimVictim Victim(uint64_t session, uint64_t bytes) {
  return {.session = SessionId{session}, .bytes = bytes};
}

struct Case {
  std::string name;
  std::vector<ReclaimCandidate> candidates;
  uint64_t wanted;
  std::vector<ReclaimVictim> victims;
};

// Candidates have a session, a priority, and reserved, guaranteed and idle bytes.
const std::vector<Case>& Cases() {
  static const auto* const cases = new std::vector<Case>{
      {"NobodyIsThere", {}, 10, {}},
      {"NothingIsWanted", {{SessionId{1}, 0, 100, 0, 100}}, 0, {}},
      {"OneGivesWhatIsWanted", {{SessionId{1}, 0, 100, 0, 60}}, 50, {Victim(1, 50)}},
      {"OneGivesWhatIsIdle", {{SessionId{1}, 0, 100, 0, 60}}, 90, {Victim(1, 60)}},
      {"NobodyIsAskedBelowItsGuarantee", {{SessionId{1}, 0, 100, 70, 60}}, 90, {Victim(1, 30)}},
      {"WithinItsGuaranteeNobodyIsAsked", {{SessionId{1}, 0, 70, 100, 60}}, 90, {}},
      {"NobodyBusyIsAsked", {{SessionId{1}, 0, 100, 0, 0}, {SessionId{2}, 0, 100, 0, 5}}, 10, {Victim(2, 5)}},
      {"TheLowestPriorityComesFirst",
       {{SessionId{1}, 5, 100, 0, 90}, {SessionId{2}, -5, 100, 0, 10}, {SessionId{3}, 0, 100, 0, 50}},
       70,
       {Victim(2, 10), Victim(3, 50), Victim(1, 10)}},
      {"ThenTheMostIdle",
       {{SessionId{1}, 0, 100, 0, 10}, {SessionId{2}, 0, 100, 0, 30}, {SessionId{3}, 0, 100, 0, 20}},
       55,
       {Victim(2, 30), Victim(3, 20), Victim(1, 5)}},
      {"IdleBytesCountAboveTheGuaranteeOnly",
       {{SessionId{1}, 0, 100, 95, 90}, {SessionId{2}, 0, 100, 0, 20}},
       25,
       {Victim(2, 20), Victim(1, 5)}},
      {"NobodyWaitsForSlowOnes",
       {{SessionId{1}, 0, 100, 0, 90, /*is_slow=*/true}, {SessionId{2}, 0, 100, 0, 20}},
       50,
       {Victim(2, 20)}},
      {"ThenTheOldestSession", {{SessionId{7}, 0, 9, 0, 9}, {SessionId{4}, 0, 9, 0, 9}}, 5, {Victim(4, 5)}},
  };
  return *cases;
}

class ChooseVictimsTest : public ::testing::TestWithParam<Case> {};

TEST_P(ChooseVictimsTest, Chooses) {
  EXPECT_EQ(ChooseVictims(GetParam().candidates, {.bytes = GetParam().wanted}), GetParam().victims);
}

INSTANTIATE_TEST_SUITE_P(Table, ChooseVictimsTest, ::testing::ValuesIn(Cases()),
                         [](const auto& test) { return test.param.name; });

// Returns candidates of two claims and of a user, with the bytes that help other shares.
std::vector<ReclaimCandidate> OfClaims() {
  const ShareId team = ClaimId{1};
  const ShareId other = ClaimId{2};
  return {{SessionId{1}, 0, 50, 0, 40, false, team, 70},
          {SessionId{2}, 0, 20, 0, 10, false, team, 70},
          {SessionId{3}, 0, 60, 0, 60, false, other, 25},
          {SessionId{4}, 0, 60, 0, 20, false, other, 25},
          {SessionId{5}, 0, 30, 0, 30, false, uid_t{7}}};
}

TEST(ReclaimInClaimsTest, WhatAClaimsLimitLacksComesFromItsOwnSessions) {
  EXPECT_EQ(ChooseVictims(OfClaims(), {.share = ClaimId{1}, .in_share = 45}),
            (std::vector<ReclaimVictim>{{SessionId{1}, 40}, {SessionId{2}, 5}}));
  EXPECT_EQ(ChooseVictims(OfClaims(), {.share = ClaimId{1}, .in_share = 500}),
            (std::vector<ReclaimVictim>{{SessionId{1}, 40}, {SessionId{2}, 10}}))
      << "nobody else is asked";
}

TEST(ReclaimInClaimsTest, ThatCountsForTheDeviceToo) {
  EXPECT_EQ(ChooseVictims(OfClaims(), {.bytes = 30, .share = ClaimId{1}, .in_share = 40}),
            (std::vector<ReclaimVictim>{{SessionId{1}, 40}}));
  EXPECT_EQ(ChooseVictims(OfClaims(), {.bytes = 60, .share = ClaimId{1}, .in_share = 40}),
            (std::vector<ReclaimVictim>{{SessionId{3}, 20}, {SessionId{1}, 40}}));
}

TEST(ReclaimInClaimsTest, AClaimIsNotAskedForWhatItIsGuaranteed) {
  EXPECT_EQ(
      ChooseVictims(OfClaims(), {.bytes = 100, .share = uid_t{9}}),
      (std::vector<ReclaimVictim>{{SessionId{3}, 25}, {SessionId{1}, 40}, {SessionId{5}, 30}, {SessionId{2}, 5}}));
  EXPECT_EQ(ChooseVictims(OfClaims(), {.bytes = 100, .share = ClaimId{2}}),
            (std::vector<ReclaimVictim>{{SessionId{3}, 60}, {SessionId{1}, 40}}))
      << "what it gives to itself stays its own";
}

TEST(ReclaimInClaimsTest, ForItsOwnGuaranteeAClaimIsAskedForWhatItUsesBeyondIt) {
  const Missing missing{.bytes = 75, .share = ClaimId{1}, .from_share = 35};
  EXPECT_EQ(ChooseVictims(OfClaims(), missing),
            (std::vector<ReclaimVictim>{{SessionId{3}, 25}, {SessionId{1}, 35}, {SessionId{5}, 15}}));
  EXPECT_EQ(EveryVictim(OfClaims(), missing)[0], (ReclaimVictim{SessionId{1}, 35}));
}

TEST(ReclaimInClaimsTest, EverybodyOfTheClaimIsAskedForItsLimit) {
  EXPECT_EQ(EveryVictim(OfClaims(), {.bytes = 10, .share = ClaimId{1}, .in_share = 35}),
            (std::vector<ReclaimVictim>{
                {SessionId{1}, 35}, {SessionId{2}, 20}, {SessionId{3}, 10}, {SessionId{4}, 10}, {SessionId{5}, 10}}));
}

TEST(EveryVictimTest, AsksAllAboveTheirGuaranteesWhateverTheyReport) {
  EXPECT_THAT(EveryVictim({{SessionId{1}, 0, 100, 0, 0}, {SessionId{2}, 9, 100, 60, 0}, {SessionId{3}, 0, 50, 50, 50}},
                          {.bytes = 70}),
              ElementsAre(Victim(1, 70), Victim(2, 40)));
}

// ---- Repeated questions ----

TEST(AskAgainFiguresTest, OnceInVainIsEnoughUntilFiguresChange) {
  const ReclaimCandidate candidate{.session = SessionId{1}, .reserved_bytes = 10, .idle_bytes = 4};
  EXPECT_TRUE(MayAskAgain(candidate, 0, std::nullopt));
  LastAsked last{.reserved_bytes = 10, .idle_bytes = 4, .by_figures = true};
  EXPECT_FALSE(MayAskAgain(candidate, 0, last)) << "it has not answered yet";
  last.is_answered = true;
  EXPECT_FALSE(MayAskAgain(candidate, 0, last));
  std::vector<LastAsked> reasons(4, last);
  reasons[0].idle_bytes = 3;
  reasons[1].reserved_bytes = 11;
  reasons[2].has_given = true;
  reasons[3].is_long_ago = true;
  for (size_t i = 0; i < reasons.size(); ++i) {
    EXPECT_TRUE(MayAskAgain(candidate, 0, reasons[i])) << i;
    EXPECT_EQ(MayAskAgain(candidate, -1, reasons[i]), reasons[i].is_long_ago) << "it is more important: " << i;
    reasons[i].by_figures = false;
    EXPECT_TRUE(MayAskAgain(candidate, -1, reasons[i])) << "only with everybody so far: " << i;
  }
}

TEST(AskAgainFiguresTest, WhoIsMoreImportantIsAskedWithEverybodyUnlessItWasAskedBefore) {
  const ReclaimCandidate candidate{.session = SessionId{1}, .priority = 5, .reserved_bytes = 10};
  EXPECT_TRUE(MayAskWithEverybody(candidate, 5, LastAsked()));
  EXPECT_TRUE(MayAskWithEverybody(candidate, 4, std::nullopt));
  EXPECT_FALSE(MayAskWithEverybody(candidate, 4, LastAsked()));
}

}  // namespace
}  // namespace vrambroker
