// SPDX-License-Identifier: Apache-2.0
//
// The ledger's second level: session <= claim <= device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "server/pool/ledger.h"
#include "server/pool/segment_refusal.h"

namespace vrambroker {
namespace {

using ::testing::HasSubstr;

constexpr ClaimId kFirstClaim{1};
constexpr ClaimId kSecondClaim{2};

AccountState In(ClaimId claim, uint64_t claim_limit) {
  return {.limit_bytes = 100, .share = claim, .share_limit_bytes = claim_limit, .share_guarantee_bytes = claim_limit};
}

class ClaimLedgerTest : public ::testing::Test {
 protected:
  std::optional<OomCause> Refusal(const AccountState& account, uint64_t bytes) {
    return SegmentRefusalCause(ledger_.CheckGrowth(account, bytes));
  }

  Ledger ledger_{100};
  AccountState first_ = In(kFirstClaim, 50);
  AccountState second_ = In(kFirstClaim, 50);
  AccountState outside_ = {.limit_bytes = 100};
};

TEST_F(ClaimLedgerTest, AClaimsLimitBindsItsSessionsTogetherToTheLastByte) {
  ledger_.Charge(first_, 30);
  EXPECT_TRUE(ledger_.CheckGrowth(second_, 20).ok());
  EXPECT_EQ(Refusal(second_, 21), OomCause::kCapacity) << "it may wait for its siblings";
  EXPECT_THAT(std::string(ledger_.CheckGrowth(second_, 21).message()), HasSubstr("the claim's limit"));
  EXPECT_EQ(ledger_.AvailableBytes(second_), 20u);
  EXPECT_EQ(ledger_.LimitRoom(second_), 20u);
  EXPECT_EQ(ledger_.MissingInShare(second_, 25), 5u);
  EXPECT_EQ(ledger_.MissingBytes(second_, 25), 0u) << "the device has it";
  EXPECT_EQ(ledger_.MostEver(second_), 50u) << "when its siblings have given all back";
  EXPECT_TRUE(ledger_.CheckGrowth(outside_, 70).ok());
}

// A session that waits for its own memory would wait in vain.
TEST_F(ClaimLedgerTest, WhatASessionHasItselfIsNotWaitedFor) {
  ledger_.Charge(first_, 30);
  ledger_.Charge(second_, 10);
  EXPECT_EQ(ledger_.MostEver(first_), 20u);
  EXPECT_EQ(ledger_.MostEver(second_), 40u);
  ASSERT_TRUE(ledger_.SetGuarantee(second_, 15).ok());
  EXPECT_EQ(ledger_.MostEver(first_), 5u);
  EXPECT_EQ(ledger_.MostEver(second_), 40u);
  first_.share_limit_bytes = second_.share_limit_bytes = 12;  // a cut meanwhile
  EXPECT_EQ(ledger_.MostEver(first_), 0u);
  EXPECT_EQ(ledger_.MostEver(second_), 2u) << "what the limit leaves of its guarantee";
}

TEST_F(ClaimLedgerTest, AClaimsGuaranteeIsKeptForAnyOfItsSessions) {
  ASSERT_TRUE(ledger_.SetGuarantee(kFirstClaim, 40).ok());
  EXPECT_EQ(ledger_.committed_bytes(), 40u) << "before it has a session";
  EXPECT_EQ(ledger_.AvailableBytes(outside_), 60u);
  ledger_.Charge(outside_, 60);
  EXPECT_EQ(Refusal(outside_, 1), OomCause::kCapacity);
  EXPECT_EQ(ledger_.GrowthOf(first_, 40), 0u);
  ledger_.Charge(first_, 25);
  EXPECT_EQ(ledger_.AvailableBytes(second_), 15u) << "what its sibling has left of it";
  ledger_.Charge(second_, 15);
  EXPECT_EQ(ledger_.committed_bytes(), 100u);
  EXPECT_EQ(Refusal(second_, 1), OomCause::kCapacity);
  ledger_.Uncharge(first_, 25);
  EXPECT_EQ(Refusal(outside_, 1), OomCause::kCapacity) << "it stays the claim's";
  EXPECT_TRUE(ledger_.CheckGrowth(second_, 25).ok());
}

TEST_F(ClaimLedgerTest, WhatEndedSessionsLeaveStaysTheClaims) {
  ledger_.Charge(first_, 30);
  ledger_.Close(first_, 30);
  EXPECT_EQ(ledger_.GetShare(kFirstClaim).used_bytes, 30u);
  EXPECT_EQ(Refusal(second_, 21), OomCause::kCapacity);
  ledger_.UnchargeUnowned(30, kFirstClaim);
  EXPECT_TRUE(ledger_.CheckGrowth(second_, 50).ok());
  EXPECT_EQ(ledger_.charged_bytes(), 0u);
}

TEST_F(ClaimLedgerTest, ThePeakOfAClaimIsTheMostThatWasChargedToItAtATime) {
  ledger_.OpenClaim(kFirstClaim);
  const auto peak = [&] { return ledger_.GetShare(kFirstClaim).peak_bytes; };
  EXPECT_EQ(peak(), 0u);
  ASSERT_TRUE(ledger_.SetGuarantee(kFirstClaim, 40).ok());
  ASSERT_TRUE(ledger_.SetGuarantee(second_, 10).ok());
  EXPECT_EQ(peak(), 0u) << "what is kept free is not charged";
  ledger_.Charge(first_, 20);
  ledger_.Charge(second_, 15);
  EXPECT_EQ(peak(), 35u);
  ledger_.Uncharge(first_, 20);
  ledger_.Charge(outside_, 30);
  EXPECT_EQ(peak(), 35u);
  ledger_.Close(second_, 15);
  ledger_.Charge(first_, 25);
  EXPECT_EQ(peak(), 40u) << "with what an ended session has left";
  ledger_.UnchargeUnowned(15, kFirstClaim);
  ledger_.ChargeUnowned(20, kFirstClaim);
  EXPECT_EQ(peak(), 45u);
  ledger_.UnchargeUnowned(20, kFirstClaim);
  ledger_.Close(first_, 0);
  ASSERT_TRUE(ledger_.SetGuarantee(kFirstClaim, 0).ok());
  EXPECT_EQ(peak(), 45u) << "it outlives its sessions";
  EXPECT_EQ(ledger_.GetShare(kFirstClaim).charged_bytes, 0u);
  ledger_.CloseClaim(kFirstClaim);
  EXPECT_EQ(ledger_.shares().count(kFirstClaim), 0u);
  EXPECT_EQ(ledger_.GetShare(kSecondClaim).peak_bytes, 0u);
}

TEST_F(ClaimLedgerTest, GuaranteesOfSessionsComeOutOfTheirClaims) {
  ASSERT_TRUE(ledger_.SetGuarantee(kFirstClaim, 40).ok());
  ledger_.Charge(outside_, 60);
  ASSERT_TRUE(ledger_.SetGuarantee(first_, 30).ok()) << "though the device is full";
  EXPECT_EQ(ledger_.guaranteed_bytes(), 40u);
  EXPECT_EQ(ledger_.committed_bytes(), 100u);
  EXPECT_EQ(ledger_.AvailableBytes(second_), 10u);
  EXPECT_EQ(ledger_.MostEver(second_), 20u) << "the claim's limit, less what its sibling is guaranteed";
  EXPECT_EQ(SegmentRefusalCause(ledger_.SetGuarantee(second_, 21)), OomCause::kLimit) << "beyond the claim's limit";
}

TEST_F(ClaimLedgerTest, NoGuaranteeIsGivenBeyondTheDevice) {
  ASSERT_TRUE(ledger_.SetGuarantee(kFirstClaim, 60).ok());
  const absl::Status status = ledger_.SetGuarantee(kSecondClaim, 41);
  EXPECT_EQ(SegmentRefusalCause(status), OomCause::kLargerThanDevice);
  EXPECT_THAT(std::string(status.message()), HasSubstr("guarantee: 41 B is 1 B more than can be guaranteed"));
  ledger_.Charge(outside_, 40);
  EXPECT_EQ(SegmentRefusalCause(ledger_.SetGuarantee(kSecondClaim, 1)), OomCause::kCapacity);
  EXPECT_EQ(ledger_.MissingForGuarantee(kSecondClaim, 5), 5u);
  EXPECT_TRUE(ledger_.SetGuarantee(kFirstClaim, 50).ok()) << "less is always possible";
  EXPECT_TRUE(ledger_.SetGuarantee(kSecondClaim, 10).ok());
  EXPECT_TRUE(ledger_.SetGuarantee(kFirstClaim, 0).ok());
  EXPECT_TRUE(ledger_.SetGuarantee(kSecondClaim, 0).ok());
  EXPECT_EQ(ledger_.committed_bytes(), 40u);
  EXPECT_TRUE(ledger_.shares().size() == 1) << "a claim that has nothing is not there";
}

// Memory beyond a lowered limit stays with its sessions, and the claim cannot grow.
TEST_F(ClaimLedgerTest, ALowerLimitTakesNothingAway) {
  ledger_.Charge(first_, 50);
  for (AccountState* account : {&first_, &second_}) account->share_limit_bytes = 20;
  EXPECT_EQ(Refusal(second_, 1), OomCause::kCapacity);
  EXPECT_EQ(ledger_.MissingInShare(second_, 1), 1u) << "a byte for a byte; what is above the limit is asked for apart";
  ledger_.Uncharge(first_, 35);
  EXPECT_EQ(ledger_.AvailableBytes(second_), 5u);
}

// A reload may lower a claim's limit below the guarantees of its sessions: the guarantees then take no part of the
// limit.
TEST_F(ClaimLedgerTest, ALimitBelowTheGuaranteesOfItsSessionsHolds) {
  for (AccountState* account : {&first_, &second_}) ASSERT_TRUE(ledger_.SetGuarantee(*account, 25).ok());
  for (AccountState* account : {&first_, &second_}) account->share_limit_bytes = account->share_guarantee_bytes = 30;
  ASSERT_TRUE(ledger_.CheckGrowth(first_, 25).ok()) << "who comes first has all of its guarantee";
  ledger_.Charge(first_, 25);
  EXPECT_TRUE(ledger_.CheckGrowth(second_, 5).ok());
  EXPECT_EQ(Refusal(second_, 6), OomCause::kCapacity) << "it may wait for its sibling";
  EXPECT_EQ(ledger_.AvailableBytes(second_), 5u);
  EXPECT_EQ(ledger_.LimitRoom(second_), 5u);
  EXPECT_EQ(ledger_.MissingInShare(second_, 8), 3u);
  EXPECT_EQ(ledger_.MostEver(second_), 25u);
  EXPECT_EQ(ledger_.MostEver(first_), 0u);
  for (AccountState* account : {&first_, &second_}) account->share_limit_bytes = 20;
  EXPECT_EQ(ledger_.MostEver(second_), 20u) << "not all that it is guaranteed";
  EXPECT_TRUE(ledger_.SetGuarantee(second_, 20).ok()) << "less is always possible";
  for (AccountState* account : {&first_, &second_}) account->share_limit_bytes = account->share_guarantee_bytes = 50;
  EXPECT_TRUE(ledger_.CheckGrowth(second_, 20).ok()) << "raised again";
}

// A model keeps the sums by hand over random steps of sessions in two claims and outside. The claims' limits change.
TEST(ClaimLedgerModelTest, RandomStepsKeepSessionWithinClaimWithinDevice) {
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    std::mt19937_64 random(seed);
    Ledger ledger(1000);
    std::vector<uint64_t> limits = {500, 700};
    std::vector<AccountState> accounts;
    for (int i = 0; i < 3; ++i) accounts.push_back(In(kFirstClaim, limits[0]));
    for (int i = 0; i < 3; ++i) accounts.push_back(In(kSecondClaim, limits[1]));
    accounts.push_back({.limit_bytes = 1000});
    for (AccountState& account : accounts) account.limit_bytes = 1000;
    std::vector<uint64_t> left(2), guarantees(2);  // indexed by claim
    const auto claim_of = [&](size_t i) { return i < 3 ? 0 : i < 6 ? 1 : 2; };
    const auto used = [&](int claim) {
      uint64_t sum = claim < 2 ? left[claim] : 0;
      for (size_t i = 0; i < accounts.size(); ++i) sum += claim_of(i) == claim ? accounts[i].committed_bytes() : 0;
      return sum;
    };
    const auto charged = [&](int claim) {
      uint64_t sum = claim < 2 ? left[claim] : 0;
      for (size_t i = 0; i < accounts.size(); ++i) sum += claim_of(i) == claim ? accounts[i].reserved_bytes : 0;
      return sum;
    };
    for (int step = 0; step < 400; ++step) {
      const size_t i = random() % accounts.size();
      AccountState& account = accounts[i];
      const int claim = claim_of(i);
      const uint64_t bytes = random() % 300;
      switch (random() % 7) {
        case 0: {
          const uint64_t limit = claim < 2 ? limits[claim] : 1000;
          if (ledger.CheckGrowth(account, bytes).ok()) {
            ASSERT_LE(ledger.GrowthOf(account, bytes), ledger.free_bytes());
            ledger.Charge(account, bytes);
            ASSERT_TRUE(bytes == 0 || charged(claim) <= limit) << "seed " << seed << " step " << step;
          } else if (charged(claim) + bytes <= limit) {
            ASSERT_GT(account.reserved_bytes + bytes, account.guarantee_bytes)
                << "seed " << seed << ": a session's guarantee was not kept";
            ASSERT_TRUE(claim == 2 || used(claim) + bytes > std::min(guarantees[claim], limit))
                << "seed " << seed << ": a claim's guarantee was not kept";
          }
          break;
        }
        case 1:
          ledger.Uncharge(account, std::min(bytes, account.reserved_bytes));
          break;
        case 2:
          (void)ledger.SetGuarantee(account, bytes / 3);
          break;
        case 3: {
          const int of = static_cast<int>(random() % 2);
          if (ledger.SetGuarantee(of == 0 ? kFirstClaim : kSecondClaim, bytes).ok()) guarantees[of] = bytes;
          break;
        }
        case 4:  // the session ends, and leaves its memory behind
          if (claim < 2) {
            left[claim] += account.reserved_bytes;
            ledger.Close(account, account.reserved_bytes);
            account = In(claim == 0 ? kFirstClaim : kSecondClaim, limits[claim]);
            account.limit_bytes = 1000;
          }
          break;
        case 5: {  // the limit falls, perhaps below the sessions' memory and guarantees, or rises
          const size_t of = random() % 2;
          limits[of] = random() % 700;
          for (size_t j = 0; j < accounts.size(); ++j) {
            if (claim_of(j) != static_cast<int>(of)) continue;
            accounts[j].share_limit_bytes = accounts[j].share_guarantee_bytes = limits[of];
          }
          break;
        }
        case 6:
          for (int of = 0; of < 2; ++of) {
            const uint64_t settled = std::min(left[of], bytes);
            ledger.UnchargeUnowned(settled, of == 0 ? kFirstClaim : kSecondClaim);
            left[of] -= settled;
          }
          break;
      }
      for (const AccountState& each : accounts) {
        const uint64_t most = ledger.AvailableBytes(each);
        ASSERT_TRUE(most == 0 || ledger.CheckGrowth(each, most).ok()) << "seed " << seed << " step " << step;
        ASSERT_FALSE(ledger.CheckGrowth(each, most + 1).ok()) << "seed " << seed << " step " << step;
        ASSERT_LE(most, ledger.MostEver(each)) << "seed " << seed << " step " << step;
        ASSERT_LE(most, ledger.LimitRoom(each)) << "seed " << seed << " step " << step;
        ASSERT_EQ(ledger.MissingInShare(each, most), 0u) << "seed " << seed << " step " << step;
      }
      const uint64_t committed = std::max(used(0), guarantees[0]) + std::max(used(1), guarantees[1]) + used(2);
      ASSERT_EQ(ledger.committed_bytes(), committed) << "seed " << seed << " step " << step;
      ASSERT_LE(committed, 1000u) << "seed " << seed << " step " << step;
      ASSERT_EQ(ledger.GetShare(kFirstClaim).used_bytes, used(0));
      ASSERT_EQ(ledger.GetShare(kSecondClaim).used_bytes, used(1));
    }
  }
}

}  // namespace
}  // namespace vrambroker
