// SPDX-License-Identifier: Apache-2.0
//
// Tests of SegmentPool: memory that clients take from the driver themselves.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <utility>

#include "allocator/base/bytes.h"
#include "tests/support/status_macros.h"
#include "tests/unit/server/pool/segment_pool_fixture.h"

namespace vrambroker {
namespace {

class SegmentPoolCountedTest : public SegmentPoolTest {
 protected:
  std::optional<OomCause> ChargeRefusal(SessionId session, uint64_t bytes) {
    return SegmentRefusalCause(pool_->TryChargeCounted(session, bytes));
  }
  uint64_t Counted() {
    uint64_t bytes = 0;
    for (const SegmentView& segment : pool_->GetSegments()) {
      if (segment.state == SegmentView::State::kLeased) bytes += segment.bytes;
    }
    return bytes;
  }
};

TEST_F(SegmentPoolCountedTest, WhatIsChargedCountsLikeASegment) {
  MakePool(64_MiB);
  Open(kA, 40_MiB);
  Open(kB);
  EXPECT_TRUE(pool_->TryChargeCounted(kA, 30_MiB).ok());
  EXPECT_EQ(ChargeRefusal(kA, 12_MiB), OomCause::kLimit);
  EXPECT_EQ(Account(kA).reserved_bytes, 30_MiB);
  EXPECT_EQ(Refusal(kB, 36_MiB), OomCause::kCapacity);
  Lease(kB, 34_MiB);
  EXPECT_EQ(ChargeRefusal(kA, 2_MiB), OomCause::kCapacity);
  EXPECT_EQ(Stats().reserved_bytes, 64_MiB);
  EXPECT_EQ(Counted(), 64_MiB) << "in the list of segments, too";
  EXPECT_EQ(device_->live_bytes(), 34_MiB) << "the device is asked for segments alone";
  EXPECT_TRUE(pool_->UnchargeCounted(kA, 10_MiB).ok());
  EXPECT_EQ(Account(kA).reserved_bytes, 20_MiB);
  Lease(kB, 10_MiB);
}

TEST_F(SegmentPoolCountedTest, NobodyGivesBackMoreThanItWasCharged) {
  MakePool(64_MiB);
  Open(kA);
  Lease(kA, 8_MiB);
  EXPECT_TRUE(pool_->TryChargeCounted(kA, 4_MiB).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(pool_->UnchargeCounted(kA, 6_MiB))) << "a segment is given back otherwise";
  EXPECT_EQ(Account(kA).reserved_bytes, 12_MiB);
  EXPECT_TRUE(pool_->UnchargeCounted(kA, 4_MiB).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(pool_->UnchargeCounted(kA, 2_MiB)));
  EXPECT_TRUE(absl::IsAborted(pool_->UnchargeCounted(kB, 2_MiB)));
  EXPECT_TRUE(absl::IsAborted(pool_->ChargeCounted(kB, 2_MiB)));
  EXPECT_EQ(Account(kA).reserved_bytes, 8_MiB);
}

// The client is about to ask the driver, so the driver must have the memory by then.
TEST_F(SegmentPoolCountedTest, IdleSegmentsGoBackToTheDriverBeforeTheClientAsksIt) {
  MakePool(64_MiB);
  Open(kA);
  Open(kB);
  const SegmentId first = Lease(kA, 24_MiB);
  const SegmentId second = Lease(kA, 24_MiB);
  ASSERT_OK(pool_->Return(kA, {first, second}));
  EXPECT_TRUE(pool_->TryChargeCounted(kB, 16_MiB).ok()) << "there is room beside them";
  EXPECT_TRUE(absl::IsNotFound(pool_->TryChargeCounted(kB, 2_MiB))) << "only the driver can tell";
  EXPECT_EQ(device_->live_bytes(), 48_MiB);
  EXPECT_TRUE(pool_->ChargeCounted(kB, 2_MiB).ok());
  EXPECT_EQ(device_->live_bytes(), 24_MiB);
  EXPECT_TRUE(pool_->ChargeCounted(kB, 46_MiB).ok());
  EXPECT_EQ(device_->live_bytes(), 0u);
}

TEST_F(SegmentPoolCountedTest, AGrantIsUsedUpByTheCharge) {
  MakePool(64_MiB);
  Open(kA);
  ASSERT_OK(pool_->Grant(kA, 20_MiB));
  EXPECT_TRUE(pool_->ChargeCounted(kA, 20_MiB, /*granted=*/true).ok());
  EXPECT_EQ(Account(kA).reserved_bytes, 20_MiB);
  pool_->ReleaseGrant(kA, 0);
  ASSERT_OK(pool_->UnchargeCounted(kA, 20_MiB));
  EXPECT_EQ(Stats().charged_bytes, 0u);
}

TEST_F(SegmentPoolCountedTest, AllOfItComesBackWithTheAccount) {
  MakePool(64_MiB);
  Open(kA);
  Open(kB);
  ASSERT_OK(pool_->TryChargeCounted(kA, 30_MiB));
  ASSERT_OK(pool_->DeclareCounted(kB, 20_MiB));
  EXPECT_EQ(pool_->CloseAccountOfGone(kA).came_back, 30_MiB);
  pool_->CloseAccount(kB);
  EXPECT_EQ(Stats().charged_bytes, 0u);
  EXPECT_EQ(Stats().carried_over_bytes, 0u);
  EXPECT_EQ(pool_->GetShare(kAnnUid).used_bytes, 0u);
}

TEST_F(SegmentPoolCountedTest, WhatIsDeclaredIsGivenBackInParts) {
  MakePool(64_MiB);
  Open(kA);
  ASSERT_OK(pool_->DeclareCounted(kA, 20_MiB));
  EXPECT_EQ(Account(kA).carried_over_bytes, 20_MiB);
  EXPECT_TRUE(absl::IsFailedPrecondition(pool_->DeclareCounted(kA, 2_MiB))) << "once";
  ASSERT_OK(pool_->TryChargeCounted(kA, 4_MiB));
  ASSERT_OK(pool_->UnchargeCounted(kA, 10_MiB));
  EXPECT_EQ(Account(kA).reserved_bytes, 14_MiB);
  EXPECT_EQ(Account(kA).carried_over_bytes, 14_MiB);
  EXPECT_TRUE(absl::IsInvalidArgument(pool_->UnchargeCounted(kA, 16_MiB)));
  ASSERT_OK(pool_->UnchargeCounted(kA, 14_MiB));
  EXPECT_EQ(Stats().charged_bytes, 0u);
}

// A declaration takes no memory from other sessions.
TEST_F(SegmentPoolCountedTest, WhatIsDeclaredIsBelievedAsFarAsItCanBeTrue) {
  MakePool(64_MiB);
  Open(kA, 30_MiB);
  Open(kB);
  ASSERT_OK(pool_->DeclareCounted(kA, 1_GiB));
  EXPECT_EQ(Account(kA).reserved_bytes, 30_MiB);
  Lease(kB, 34_MiB);
  Open(kC);
  ASSERT_OK(pool_->DeclareCounted(kC, 2_MiB));
  EXPECT_EQ(Account(kC).reserved_bytes, 0u);
  ASSERT_OK(pool_->UnchargeCounted(kA, 2_MiB));
  ASSERT_OK(pool_->TryChargeCounted(kC, 2_MiB)) << "the rest is charged when there is room";
}

// The driver of a GPU reports how much was in use at the daemon's start.
TEST_F(SegmentPoolCountedTest, OnAGpuNoMoreIsBelievedThanTheDriverHasGivenToOthers) {
  MakePool(64_MiB, DeviceKind::kCuda);
  device_->set_foreign_bytes(24_MiB);
  ASSERT_OK(pool_->UpdateHealth());
  ASSERT_OK(pool_->FindCarriedOver());
  Open(kA);
  Open(kB);
  ASSERT_OK(pool_->DeclareCounted(kA, 40_MiB));
  EXPECT_EQ(Account(kA).carried_over_bytes, 24_MiB);
  EXPECT_EQ(Stats().carried_over_bytes, 24_MiB);
  ASSERT_OK(pool_->DeclareCounted(kB, 2_MiB));
  EXPECT_EQ(Account(kB).carried_over_bytes, 0u);
  ASSERT_OK(pool_->UnchargeCounted(kA, 24_MiB));
  device_->set_foreign_bytes(0);
  ASSERT_OK(pool_->UpdateHealth());
  EXPECT_EQ(Stats().charged_bytes, 0u);
  Lease(kB, 64_MiB);
}

// Memory of a client is missing from the driver's free memory, and is charged: the pool does not count the memory
// twice.
TEST_F(SegmentPoolCountedTest, OnAGpuCountedMemoryIsNoMemoryOfOthers) {
  MakePool(64_MiB, DeviceKind::kCuda);
  ASSERT_OK(pool_->FindCarriedOver());
  Open(kA);
  Open(kB);
  ASSERT_OK(pool_->TryChargeCounted(kA, 24_MiB));
  device_->set_foreign_bytes(24_MiB);
  ASSERT_OK(pool_->UpdateHealth());
  EXPECT_EQ(Stats().outside_bytes, 0u);
  EXPECT_EQ(Stats().carried_over_bytes, 0u);
  EXPECT_EQ(Stats().committed_bytes, 24_MiB);
  const SegmentId rest = Lease(kB, 40_MiB);
  EXPECT_EQ(Refusal(kB, 2_MiB), OomCause::kCapacity);
  device_->set_foreign_bytes(0);
  ASSERT_OK(pool_->UnchargeCounted(kA, 24_MiB));
  ASSERT_OK(pool_->UpdateHealth());
  EXPECT_EQ(Stats().outside_bytes, 0u);
  Lease(kB, 24_MiB);
  EXPECT_NE(rest, SegmentId{});
}

// An uncounted program has taken memory: the pool refuses the next charge before the driver does.
TEST_F(SegmentPoolCountedTest, OnAGpuWhatOthersTakeIsNotCharged) {
  MakePool(64_MiB, DeviceKind::kCuda);
  ASSERT_OK(pool_->FindCarriedOver());
  Open(kA);
  device_->set_foreign_bytes(30_MiB);
  ASSERT_OK(pool_->UpdateHealth());
  EXPECT_EQ(SegmentRefusalCause(pool_->ChargeCounted(kA, 36_MiB)), OomCause::kCapacity);
  device_->set_foreign_bytes(0);
  EXPECT_TRUE(absl::IsNotFound(pool_->TryChargeCounted(kA, 36_MiB))) << "the driver may have it by now";
  EXPECT_TRUE(pool_->ChargeCounted(kA, 36_MiB).ok()) << "it is asked";
}

TEST_F(SegmentPoolCountedTest, RoomIsIndependentOfOthers) {
  MakePool(64_MiB);
  Open(kA, 40_MiB);
  Open(kB);
  Lease(kB, 60_MiB);
  const std::optional<SegmentPool::AccountRoom> room = pool_->GetRoom(kA);
  ASSERT_TRUE(room.has_value());
  EXPECT_EQ(room->free_bytes, 40_MiB);
  EXPECT_FALSE(pool_->GetRoom(kC).has_value());
}

}  // namespace
}  // namespace vrambroker
