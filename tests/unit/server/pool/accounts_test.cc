// SPDX-License-Identifier: Apache-2.0
#include "server/pool/accounts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <optional>
#include <vector>

#include "allocator/base/bytes.h"

namespace vrambroker {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

class AccountsTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kCapacity = 64_MiB;
  static constexpr milliseconds kWindow{1000};
  static constexpr SessionId kFirst{1};
  static constexpr SessionId kSecond{2};

  Account& Open(SessionId session, uint64_t limit = kCapacity) {
    accounts_.Open(session, {.pid = 1, .uid = 1000, .limit_bytes = limit});
    return *accounts_.Find(session);
  }
  uint64_t Charged() const { return accounts_.ledger().charged_bytes(); }
  std::vector<SessionId> Changed() { return accounts_.TakeChanges().changed; }
  Accounts::Expected ExpectedFor(SessionId session, uint64_t settling = 0) const {
    return accounts_.ExpectedFor({session}, settling).at(0);
  }

  SteadyTime now_{std::chrono::hours(1)};
  Accounts accounts_{kCapacity, kWindow, [this] { return now_; }};
};

TEST_F(AccountsTest, AnAccountIsFoundUntilItIsClosed) {
  EXPECT_EQ(accounts_.Find(kFirst), nullptr);
  Account& account = Open(kFirst, 20_MiB);
  EXPECT_EQ(account.state.limit_bytes, 20_MiB);
  EXPECT_EQ(account.state.share, ShareId(uid_t{1000}));
  accounts_.Close(account);
  EXPECT_EQ(accounts_.Find(kFirst), nullptr);
  EXPECT_THAT(accounts_.all(), IsEmpty());
}

TEST_F(AccountsTest, GrantsAreChargedUntilTheyAreReleasedOrConsumed) {
  Account& account = Open(kFirst);
  accounts_.Grant(account, 20_MiB);
  accounts_.Grant(account, 10_MiB);
  EXPECT_EQ(Charged(), 30_MiB);
  EXPECT_EQ(accounts_.granted_bytes(), 30_MiB);
  accounts_.ReleaseGrant(account, 10_MiB);
  EXPECT_EQ(Charged(), 20_MiB);
  EXPECT_FALSE(accounts_.ConsumeGrant(account, 22_MiB)) << "so much is not granted";
  EXPECT_TRUE(accounts_.ConsumeGrant(account, 20_MiB));
  EXPECT_EQ(accounts_.granted_bytes(), 0u);
  EXPECT_EQ(Charged(), 20_MiB) << "the lease's";
}

TEST_F(AccountsTest, OfAClosedAccountOnlyGrantsAreChargedNoMore) {
  Account& account = Open(kFirst);
  accounts_.Charge(account, 8_MiB);  // as for a lease that is being obtained
  accounts_.Grant(account, 20_MiB);
  accounts_.Close(account);
  EXPECT_EQ(accounts_.granted_bytes(), 0u);
  EXPECT_EQ(Charged(), 8_MiB);
  EXPECT_EQ(accounts_.ledger().GetShare(1000u).used_bytes, 8_MiB) << "still its user's";
  accounts_.UnchargeUnowned(8_MiB, 1000u);
  EXPECT_EQ(Charged(), 0u);
}

TEST_F(AccountsTest, WatchedAccountsAreNamedOnceWhenTheyChange) {
  Account& account = Open(kFirst);
  accounts_.Charge(account, 2_MiB);
  EXPECT_THAT(Changed(), IsEmpty()) << "nobody watches it";
  account.is_watched = true;
  accounts_.Charge(account, 2_MiB);
  accounts_.Uncharge(account, 2_MiB);
  EXPECT_THAT(Changed(), ElementsAre(kFirst));
  EXPECT_THAT(Changed(), IsEmpty());
  EXPECT_TRUE(accounts_.SetLimit(account, 30_MiB).ok());
  EXPECT_THAT(Changed(), ElementsAre(kFirst));
  EXPECT_TRUE(accounts_.SetGuarantee(account, 8_MiB).ok());
  EXPECT_THAT(Changed(), ElementsAre(kFirst));
  EXPECT_FALSE(accounts_.SetGuarantee(account, 40_MiB).ok());
  EXPECT_THAT(Changed(), IsEmpty()) << "it was refused";
  Account& second = Open(kSecond);
  second.is_watched = true;
  accounts_.Close(second);
  EXPECT_THAT(Changed(), ElementsAre(kSecond)) << "also when it is closed";
}

TEST_F(AccountsTest, RoomSaysWhatMayForbidRequestsForGood) {
  Account& account = Open(kFirst);
  const uint64_t before = accounts_.TakeChanges().forbidden;
  EXPECT_TRUE(accounts_.SetGuarantee(account, 8_MiB).ok());
  EXPECT_EQ(accounts_.TakeChanges().forbidden, before + 1) << "a guarantee was raised";
  EXPECT_TRUE(accounts_.SetGuarantee(account, 4_MiB).ok());
  EXPECT_EQ(accounts_.TakeChanges().forbidden, before + 1);
  accounts_.ExtendCapacity(16_MiB);
  EXPECT_EQ(accounts_.TakeChanges().forbidden, before + 1);
  EXPECT_EQ(accounts_.TakeChanges().capacity_bytes, 80_MiB);
  accounts_.ExtendCapacity(8_MiB);
  EXPECT_EQ(accounts_.TakeChanges().forbidden, before + 2) << "the capacity has shrunk";
  constexpr ClaimId kClaim{1};
  accounts_.SetClaimLimit(kClaim, 20_MiB);
  EXPECT_TRUE(accounts_.SetClaimGuarantee(kClaim, 8_MiB).ok());
  EXPECT_EQ(accounts_.TakeChanges().forbidden, before + 3) << "a claim's";
  EXPECT_TRUE(accounts_.SetClaimGuarantee(kClaim, 8_MiB).ok());
  EXPECT_TRUE(accounts_.SetClaimGuarantee(kClaim, 4_MiB).ok());
  EXPECT_FALSE(accounts_.SetClaimGuarantee(kClaim, kCapacity + 16_MiB).ok());
  EXPECT_EQ(accounts_.TakeChanges().forbidden, before + 3);
}

TEST_F(AccountsTest, WhatIsHeldBackDoesNotConcernThoseWhoAreWaitedFor) {
  Account& holds = Open(kFirst);
  accounts_.Charge(holds, 2_MiB);
  Account* const newcomer = &Open(kSecond);
  Account& holder = *accounts_.Find(kFirst);
  accounts_.HoldBack(Ledger::Held{.priority = 0, .bytes = kCapacity});
  EXPECT_TRUE(accounts_.CheckGrowth(holder, 2_MiB).ok()) << "it may need more to finish";
  EXPECT_FALSE(accounts_.CheckGrowth(*newcomer, 2_MiB).ok());
  EXPECT_TRUE(accounts_.IsHeldBack(*newcomer, 2_MiB));
  EXPECT_FALSE(accounts_.IsHeldBack(*newcomer, kCapacity)) << "it is refused anyway";
  accounts_.GiveBack(holder, 2_MiB);
  EXPECT_FALSE(accounts_.CheckGrowth(holder, 2_MiB).ok()) << "it has given something back";
  accounts_.HoldBack(std::nullopt);
  EXPECT_TRUE(accounts_.CheckGrowth(*newcomer, 2_MiB).ok());
}

TEST_F(AccountsTest, WhoTakesAndGivesMayDoSoAgain) {
  Open(kFirst);
  Open(kSecond);
  Account& churns = *accounts_.Find(kFirst);
  accounts_.Charge(churns, 8_MiB);
  EXPECT_EQ(ExpectedFor(kSecond).churning_bytes, 8_MiB) << "it has just begun to hold memory";
  EXPECT_EQ(ExpectedFor(kFirst).churning_bytes, 0u) << "from others";
  now_ += kWindow;
  EXPECT_EQ(ExpectedFor(kSecond).churning_bytes, 0u) << "it keeps what it has";
  accounts_.GiveBack(churns, 2_MiB);
  EXPECT_EQ(ExpectedFor(kSecond).churning_bytes, 2_MiB);
  now_ += 2 * kWindow;
  EXPECT_EQ(ExpectedFor(kSecond).churning_bytes, 2_MiB);
  now_ += milliseconds(1);
  EXPECT_EQ(ExpectedFor(kSecond).churning_bytes, 0u);
  accounts_.GiveBack(churns, 1_MiB);
  EXPECT_EQ(ExpectedFor(kSecond).churning_bytes, 1_MiB) << "a new window: what it gave before counts no more";
  now_ += kWindow;
  accounts_.GiveBack(churns, 2_MiB);
  EXPECT_EQ(ExpectedFor(kSecond).churning_bytes, 3_MiB) << "both within it";
}

TEST_F(AccountsTest, WhatIsOnItsWayBackIsExpected) {
  Open(kFirst);
  Open(kSecond);
  Account& returns = *accounts_.Find(kFirst);
  accounts_.Charge(returns, 8_MiB);
  returns.state.returning_bytes = 2_MiB;
  EXPECT_EQ(ExpectedFor(kSecond, /*settling=*/4_MiB).returning_bytes, 6_MiB);
  EXPECT_EQ(ExpectedFor(kFirst, /*settling=*/4_MiB).returning_bytes, 4_MiB);
  returns.is_ending = true;
  EXPECT_EQ(ExpectedFor(kSecond).returning_bytes, 8_MiB) << "all that it holds";
}

}  // namespace
}  // namespace vrambroker
