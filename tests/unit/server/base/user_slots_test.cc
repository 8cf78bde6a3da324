// SPDX-License-Identifier: Apache-2.0
#include "server/base/user_slots.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace vrambroker {
namespace {

using ::testing::HasSubstr;
using Slot = UserSlots::Slot;

UserSlots::Bounds Bounds(size_t per_uid, size_t in_all) {
  return {.what = "cakes", .per_uid = per_uid, .per_uid_bound = "max_one", .in_all = in_all, .in_all_bound = "max_all"};
}

TEST(UserSlotsTest, OneUserCannotTakeThemAll) {
  UserSlots slots(Bounds(2, 3));
  absl::StatusOr<Slot> first = slots.Take(7);
  const absl::StatusOr<Slot> second = slots.Take(7);
  ASSERT_TRUE(first.ok() && second.ok());
  const absl::Status refused = slots.Take(7).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("uid 7 has 2 cakes, the most that max_one allows"));
  {
    const absl::StatusOr<Slot> other = slots.Take(8);
    EXPECT_TRUE(other.ok());
    const absl::Status full = slots.Take(9).status();
    EXPECT_TRUE(absl::IsResourceExhausted(full));
    EXPECT_THAT(std::string(full.message()), HasSubstr("the daemon has 3 cakes, the most that max_all allows"));
  }
  EXPECT_TRUE(slots.Take(9).ok()) << "given back";
}

TEST(UserSlotsTest, ASlotIsGivenBackOnce) {
  UserSlots slots(Bounds(1, 10));
  absl::StatusOr<Slot> taken = slots.Take(1);
  ASSERT_TRUE(taken.ok());
  Slot moved = *std::move(taken);
  EXPECT_FALSE(slots.Take(1).ok());
  Slot again = std::move(moved);
  EXPECT_FALSE(slots.Take(1).ok());
  again = Slot();
  absl::StatusOr<Slot> next = slots.Take(1);
  EXPECT_TRUE(next.ok());
  EXPECT_FALSE(slots.Take(1).ok());
}

}  // namespace
}  // namespace vrambroker
