// SPDX-License-Identifier: Apache-2.0
#include "server/pool/ledger.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "allocator/base/bytes.h"
#include "server/oom/out_of_memory.h"

namespace vrambroker {
namespace {

using ::testing::HasSubstr;

class LedgerTest : public ::testing::Test {
 protected:
  static AccountState Account(int priority = 0) { return {.limit_bytes = 100, .priority = priority}; }
  std::optional<OomCause> Refusal(const AccountState& account, uint64_t bytes) {
    return SegmentRefusalCause(ledger_.CheckGrowth(account, bytes));
  }

  Ledger ledger_{100};
  AccountState a_ = Account();
  AccountState b_ = Account();
};

TEST_F(LedgerTest, GrowsToTheLastByteOfTheCapacity) {
  EXPECT_TRUE(ledger_.CheckGrowth(a_, 100).ok());
  ledger_.Charge(a_, 60);
  EXPECT_TRUE(ledger_.CheckGrowth(b_, 40).ok());
  EXPECT_EQ(Refusal(b_, 41), OomCause::kCapacity);
  EXPECT_EQ(Refusal(b_, 101), OomCause::kLargerThanDevice);
  EXPECT_EQ(ledger_.MissingBytes(b_, 41), 1u);
  EXPECT_EQ(ledger_.MissingBytes(b_, 40), 0u);
  EXPECT_EQ(ledger_.AvailableBytes(b_), 40u);
}

// The daemon refuses requests for more than MostEver() at once: such requests wait for no other session.
TEST_F(LedgerTest, WhatItHoldsItselfAndWhatOthersAreGuaranteedIsNeverItsToHaveAgain) {
  ledger_.Charge(a_, 60);
  EXPECT_EQ(ledger_.MostEver(a_), 40u);
  EXPECT_EQ(ledger_.MostEver(b_), 100u);
  ASSERT_TRUE(ledger_.SetGuarantee(b_, 30).ok());
  EXPECT_EQ(ledger_.MostEver(a_), 10u);
  EXPECT_EQ(ledger_.MostEver(b_), 100u) << "its own";
  AccountState outside{.limit_bytes = 100, .share = uid_t{7}};
  EXPECT_EQ(ledger_.MostEver(outside), 70u);
  ASSERT_TRUE(ledger_.SetGuarantee(outside, 10).ok());
  EXPECT_EQ(ledger_.MostEver(a_), 0u);
}

TEST_F(LedgerTest, GrowsToTheLastByteOfTheLimit) {
  ASSERT_TRUE(ledger_.SetLimit(a_, 30).ok());
  ledger_.Charge(a_, 10);
  EXPECT_TRUE(ledger_.CheckGrowth(a_, 20).ok());
  EXPECT_EQ(Refusal(a_, 21), OomCause::kLimit);
  ASSERT_TRUE(ledger_.SetLimit(a_, 5).ok()) << "takes nothing away";
  EXPECT_EQ(a_.reserved_bytes, 10u);
  EXPECT_EQ(Refusal(a_, 1), OomCause::kLimit);
  EXPECT_EQ(ledger_.AvailableBytes(a_), 0u);
}

TEST_F(LedgerTest, AGuaranteeIsKeptFreeWhateverOthersWant) {
  ASSERT_TRUE(ledger_.SetGuarantee(a_, 40).ok());
  EXPECT_EQ(ledger_.AvailableBytes(b_), 60u);
  EXPECT_EQ(Refusal(b_, 61), OomCause::kCapacity);
  ledger_.Charge(b_, 60);
  EXPECT_TRUE(ledger_.CheckGrowth(a_, 40).ok());
  EXPECT_EQ(ledger_.AvailableBytes(a_), 40u);
  EXPECT_EQ(Refusal(a_, 41), OomCause::kCapacity);
  ledger_.Charge(a_, 40);
  EXPECT_EQ(ledger_.committed_bytes(), 100u);
}

TEST_F(LedgerTest, AGuaranteeSurvivesGivingMemoryBack) {
  ASSERT_TRUE(ledger_.SetGuarantee(a_, 40).ok());
  ledger_.Charge(a_, 50);
  ledger_.Charge(b_, 50);
  ledger_.Uncharge(a_, 50);
  EXPECT_EQ(ledger_.AvailableBytes(b_), 10u) << "what was above the guarantee";
  EXPECT_EQ(Refusal(b_, 11), OomCause::kCapacity);
  EXPECT_TRUE(ledger_.CheckGrowth(a_, 40).ok());
}

TEST_F(LedgerTest, RefusesAGuaranteeThatOthersGuaranteesForbid) {
  ASSERT_TRUE(ledger_.SetGuarantee(a_, 70).ok());
  const absl::Status status = ledger_.SetGuarantee(b_, 40);
  EXPECT_EQ(SegmentRefusalCause(status), OomCause::kLargerThanDevice);
  EXPECT_THAT(std::string(status.message()), HasSubstr("guarantee: 40 B is 10 B more than can be guaranteed"));
  EXPECT_EQ(b_.guarantee_bytes, 0u);
  EXPECT_TRUE(ledger_.SetGuarantee(b_, 30).ok());
  EXPECT_EQ(ledger_.guaranteed_bytes(), 100u);
}

TEST_F(LedgerTest, RefusesAGuaranteeThatOthersHold) {
  ledger_.Charge(a_, 80);
  const absl::Status status = ledger_.SetGuarantee(b_, 40);
  EXPECT_EQ(SegmentRefusalCause(status), OomCause::kCapacity);
  EXPECT_THAT(std::string(status.message()), HasSubstr("guarantee: 40 B is 20 B more than is free"));
  EXPECT_EQ(ledger_.MissingForGuarantee(b_, 40), 20u);
  EXPECT_EQ(ledger_.committed_bytes(), 80u);
  ledger_.Uncharge(a_, 20);
  EXPECT_TRUE(ledger_.SetGuarantee(b_, 40).ok());
}

TEST_F(LedgerTest, GuaranteeAndLimitDoNotCross) {
  ASSERT_TRUE(ledger_.SetLimit(a_, 30).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(ledger_.SetGuarantee(a_, 31)));
  ASSERT_TRUE(ledger_.SetGuarantee(a_, 30).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(ledger_.SetLimit(a_, 29)));
  EXPECT_TRUE(ledger_.SetLimit(a_, 30).ok());
}

TEST_F(LedgerTest, HoldsBackTheSameAndLowerPrioritiesBeyondTheirGuarantees) {
  AccountState low = Account(-1);
  AccountState high = Account(1);
  ASSERT_TRUE(ledger_.SetGuarantee(low, 10).ok());
  ledger_.HoldBack(Ledger::Held{.priority = 0, .bytes = 90});
  EXPECT_EQ(Refusal(a_, 1), OomCause::kCapacity);
  EXPECT_EQ(Refusal(low, 11), OomCause::kCapacity);
  EXPECT_TRUE(ledger_.CheckGrowth(low, 10).ok()) << "guaranteed";
  EXPECT_TRUE(ledger_.CheckGrowth(high, 50).ok());
  EXPECT_TRUE(ledger_.CheckGrowth(a_, 1, /*past_hold=*/true).ok());
  EXPECT_EQ(ledger_.held_back_bytes(), 90u);
  ledger_.HoldBack(Ledger::Held{.priority = 0, .bytes = 80});
  EXPECT_TRUE(ledger_.CheckGrowth(a_, 10).ok()) << "the rest";
  EXPECT_EQ(Refusal(a_, 11), OomCause::kCapacity);
  ledger_.HoldBack(std::nullopt);
  EXPECT_TRUE(ledger_.CheckGrowth(a_, 1).ok());
}

// ---- All accounts of a user together ----

class UserLedgerTest : public LedgerTest {
 protected:
  static AccountState Of(uid_t uid) {
    return {.limit_bytes = 100, .share = uid, .share_limit_bytes = 50, .share_guarantee_bytes = 30};
  }
  AccountState first_ = Of(7);
  AccountState second_ = Of(7);
  AccountState other_ = Of(8);
};

TEST_F(UserLedgerTest, UserLimitBindsAllAccountsOfAUser) {
  ledger_.Charge(first_, 30);
  EXPECT_EQ(Refusal(second_, 21), OomCause::kCapacity) << "it may wait for the user's other sessions";
  EXPECT_EQ(ledger_.MostEver(second_), 50u);
  EXPECT_EQ(ledger_.AvailableBytes(second_), 20u);
  EXPECT_TRUE(ledger_.CheckGrowth(second_, 20).ok());
  EXPECT_TRUE(ledger_.CheckGrowth(other_, 50).ok());
  ledger_.Charge(second_, 20);
  ledger_.Uncharge(first_, 10);
  EXPECT_EQ(ledger_.AvailableBytes(second_), 10u);
}

TEST_F(UserLedgerTest, WhatAnEndedSessionHasLeftCounts) {
  ledger_.Charge(first_, 30);
  ledger_.Close(first_, 30);
  EXPECT_EQ(Refusal(second_, 21), OomCause::kCapacity);
  ledger_.UnchargeUnowned(30, 7u);
  EXPECT_TRUE(ledger_.CheckGrowth(second_, 50).ok());
  EXPECT_EQ(ledger_.GetShare(7u).used_bytes, 0u);
}

TEST_F(UserLedgerTest, AGuaranteeCountsAndIsKept) {
  ASSERT_TRUE(ledger_.SetGuarantee(first_, 30).ok());
  EXPECT_EQ(Refusal(second_, 21), OomCause::kCapacity) << "as if it were used";
  ledger_.Charge(second_, 20);
  EXPECT_TRUE(ledger_.CheckGrowth(first_, 30).ok());
  EXPECT_EQ(Refusal(first_, 31), OomCause::kCapacity);
}

TEST_F(UserLedgerTest, GuaranteesOfAUserAreBoundTogether) {
  ASSERT_TRUE(ledger_.SetGuarantee(first_, 20).ok());
  const absl::Status status = ledger_.SetGuarantee(second_, 11);
  EXPECT_EQ(SegmentRefusalCause(status), OomCause::kLimit);
  EXPECT_THAT(std::string(status.message()), HasSubstr("user_guarantee leaves"));
  EXPECT_TRUE(ledger_.SetGuarantee(second_, 10).ok());
  EXPECT_TRUE(ledger_.SetGuarantee(other_, 30).ok());
  EXPECT_TRUE(ledger_.SetGuarantee(first_, 0).ok());
  EXPECT_EQ(ledger_.GetShare(7u).promised_bytes, 10u);
  ledger_.Charge(first_, 40);
  EXPECT_EQ(SegmentRefusalCause(ledger_.SetGuarantee(second_, 11)), OomCause::kLimit) << "beyond user_limit";
}

// A guarantee can be lowered however much is charged: processes may hold more than the device has at the start.
TEST_F(LedgerTest, AGuaranteeCanAlwaysBeLowered) {
  ASSERT_TRUE(ledger_.SetGuarantee(a_, 40).ok());
  ledger_.ChargeUnowned(100);
  EXPECT_EQ(SegmentRefusalCause(ledger_.SetGuarantee(a_, 41)), OomCause::kCapacity);
  EXPECT_TRUE(ledger_.SetGuarantee(a_, 10).ok());
  EXPECT_TRUE(ledger_.SetGuarantee(a_, 0).ok());
  EXPECT_EQ(ledger_.committed_bytes(), 100u);
}

TEST_F(LedgerTest, WhatAClosedAccountIsStillChargedForBelongsToNobody) {
  ASSERT_TRUE(ledger_.SetGuarantee(a_, 40).ok());
  ledger_.Charge(a_, 30);
  ledger_.Close(a_, 30);
  EXPECT_EQ(ledger_.committed_bytes(), 30u);
  EXPECT_EQ(ledger_.guaranteed_bytes(), 0u);
  EXPECT_EQ(ledger_.charged_bytes(), 30u);
  ledger_.UnchargeUnowned(30, a_.share);
  EXPECT_EQ(ledger_.committed_bytes(), 0u);
  EXPECT_EQ(ledger_.charged_bytes(), 0u);
}

TEST_F(LedgerTest, RandomStepsKeepTheSums) {
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    std::mt19937_64 random(seed);
    Ledger ledger(1000);
    std::vector<AccountState> accounts(6, AccountState{.limit_bytes = 1000});
    for (int step = 0; step < 500; ++step) {
      AccountState& account = accounts[random() % accounts.size()];
      const uint64_t bytes = random() % 400;
      const uint64_t before = account.guarantee_bytes;
      switch (random() % 4) {
        case 0:
          if (ledger.CheckGrowth(account, bytes).ok()) {
            ledger.Charge(account, bytes);
          } else {
            ASSERT_GT(account.reserved_bytes + bytes, before) << "seed " << seed << ": a guarantee was not kept";
          }
          break;
        case 1:
          ledger.Uncharge(account, std::min(bytes, account.reserved_bytes));
          break;
        case 2:
          (void)ledger.SetGuarantee(account, bytes);
          break;
        case 3:
          (void)ledger.SetLimit(account, bytes + 600);
          break;
      }
      uint64_t charged = 0, committed = 0, guaranteed = 0;
      for (const AccountState& each : accounts) {
        charged += each.reserved_bytes;
        committed += std::max(each.reserved_bytes, each.guarantee_bytes);
        guaranteed += each.guarantee_bytes;
      }
      ASSERT_EQ(ledger.charged_bytes(), charged) << "seed " << seed;
      ASSERT_EQ(ledger.committed_bytes(), committed) << "seed " << seed;
      ASSERT_EQ(ledger.guaranteed_bytes(), guaranteed) << "seed " << seed;
      ASSERT_LE(committed, 1000u) << "seed " << seed;
    }
  }
}

}  // namespace
}  // namespace vrambroker
