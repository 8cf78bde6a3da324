// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/descriptor_budget.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

namespace vrambroker {
namespace {

using ::testing::HasSubstr;

// Returns the open connections of users who, one after another, open as many connections as the budget admits.
std::vector<size_t> Greedy(const DescriptorBudget& budget, size_t users, size_t open_of_others = 0) {
  std::vector<size_t> open(users);
  size_t all = open_of_others;
  for (size_t& own : open) {
    for (; budget.Admit(own, all, /*privileged=*/false).ok(); ++own) ++all;
  }
  return open;
}

size_t Sum(const std::vector<size_t>& open) {
  return std::accumulate(open.begin(), open.end(), size_t{0});
}

TEST(DescriptorBudgetTest, OneUserAloneHasAThird) {
  for (const size_t limit : {64, 128, 1024, 4096, 16384}) {
    const DescriptorBudget budget = DescriptorBudget::Of(limit, 0);
    const size_t places = budget.connections - budget.for_root;
    EXPECT_EQ(Greedy(budget, 1)[0], (places + 2) / 3) << limit;
    EXPECT_EQ(budget.connections_per_uid, (places + 2) / 3) << limit;
  }
  EXPECT_EQ(DescriptorBudget::Of(1024, 0).connections_per_uid, 40u);
  EXPECT_EQ(DescriptorBudget::Of(65536, 0).connections_per_uid, DescriptorBudget::kMaxPerUid);
}

TEST(DescriptorBudgetTest, ClaimsOfUsersLeaveDescriptorsForConnections) {
  for (const size_t limit : {64, 1024, 65536}) {
    const DescriptorBudget budget = DescriptorBudget::Of(limit, 0);
    EXPECT_LE(4 * budget.own_claims, limit / 8) << limit;
    const size_t shared =
        4 * budget.connections + 2 * budget.descriptor_connections + budget.counted_connections + 4 * budget.own_claims;
    EXPECT_LE(shared, limit - limit / 8) << limit << ": the rest is for accepting";
  }
  EXPECT_EQ(DescriptorBudget::Of(1024, 0).own_claims, 16u);
}

TEST(DescriptorBudgetTest, UsersTogetherLeavePlacesForANewcomer) {
  const DescriptorBudget budget = DescriptorBudget::Of(1024, 0);
  for (const auto& [users, left_to_one] : {std::pair<size_t, size_t>(2, 18), {4, 8}, {8, 1}, {10, 1}}) {
    EXPECT_GE(Greedy(budget, 1, Sum(Greedy(budget, users)))[0], left_to_one) << users;
  }
  // The limit of the service unit has room for more users than most machines have.
  const DescriptorBudget unit = DescriptorBudget::Of(65536, 0);
  EXPECT_GE(Greedy(unit, 1, Sum(Greedy(unit, 20)))[0], 1u);
}

// Other users may have closed connections meanwhile, and come again.
TEST(DescriptorBudgetTest, WhatAUserGetsDependsOnWhatIsFreeAlone) {
  const DescriptorBudget budget = DescriptorBudget::Of(1024, 0);
  const size_t places = budget.connections - budget.for_root;
  for (size_t all = 0; all < places; ++all) {
    EXPECT_TRUE(budget.Admit(0, all, /*privileged=*/false).ok()) << all << ": the first one while any is free";
    for (size_t own = 0; own <= all; ++own) {
      EXPECT_EQ(budget.Admit(own, all, /*privileged=*/false).ok(), 2 * own < places - all) << own << " of " << all;
    }
  }
  EXPECT_FALSE(budget.Admit(0, places, /*privileged=*/false).ok());
}

TEST(DescriptorBudgetTest, RootAndTheDaemonsUserHaveAReserve) {
  for (const size_t limit : {16, 128, 1024, 65536}) {
    const DescriptorBudget budget = DescriptorBudget::Of(limit, 0);
    size_t all = Sum(Greedy(budget, 200));
    EXPECT_LE(all, budget.connections - budget.for_root);
    for (size_t own = 0; own < budget.for_root; ++own, ++all) {
      EXPECT_TRUE(budget.Admit(own, all, /*privileged=*/true).ok()) << own << " of " << limit;
    }
    EXPECT_FALSE(budget.Admit(0, budget.connections, /*privileged=*/true).ok());
  }
}

TEST(DescriptorBudgetTest, MaxConnectionsPerUidBoundsAUser) {
  const DescriptorBudget budget = DescriptorBudget::Of(65536, 3);
  EXPECT_EQ(budget.connections_per_uid, 3u);
  EXPECT_TRUE(budget.Admit(2, 2, /*privileged=*/false).ok());
  for (const bool privileged : {false, true}) EXPECT_FALSE(budget.Admit(3, 3, privileged).ok());
}

TEST(DescriptorBudgetTest, ARefusalSaysWhoseBoundItIs) {
  const auto message = [](size_t limit, size_t most, size_t own, size_t all) {
    return std::string(DescriptorBudget::Of(limit, most).Admit(own, all, /*privileged=*/false).message());
  };
  EXPECT_THAT(message(1024, 3, 3, 3), HasSubstr("the user has 3 open, the most that max_connections_per_uid allows"));
  EXPECT_THAT(message(1024, 0, 40, 40), HasSubstr("the user has 40 open, and 79 are free: a user may have half"));
  EXPECT_THAT(message(1024, 0, 40, 40), HasSubstr("raise LimitNOFILE, which is 1024"));
  EXPECT_THAT(message(1024, 0, 0, 120),
              HasSubstr("all users have 120 open, the most that 1024 file descriptors allow"));
}

}  // namespace
}  // namespace vrambroker
