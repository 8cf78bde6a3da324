// SPDX-License-Identifier: Apache-2.0
#include "server/pool/reservation.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <utility>

#include "allocator/base/bytes.h"
#include "tests/support/fake_device.h"

namespace vrambroker {
namespace {

class ReservationTest : public ::testing::Test {
 protected:
  static constexpr SessionId kId{7};

  ReservationTest() {
    pool_->OpenAccount(kId, {.pid = 1, .limit_bytes = 64_MiB});
    pool_->SetOnCapacityFreed([this] { ++room_; });
  }
  Reservation Reserve(uint64_t bytes) {
    EXPECT_EQ(pool_->Grant(kId, bytes), absl::OkStatus());
    return {pool_.get(), kId, bytes};
  }
  uint64_t Charged() const { return pool_->GetStats().charged_bytes; }

  std::atomic<uint64_t> next_segment_ = 1;
  std::unique_ptr<SegmentPool> pool_ =
      std::make_unique<SegmentPool>(std::make_unique<FakeDevice>(64_MiB), 64_MiB, &next_segment_);
  int room_ = 0;
};

TEST_F(ReservationTest, GivesItselfBackWhenItGoes) {
  {
    const Reservation reserved = Reserve(20_MiB);
    EXPECT_EQ(Charged(), 20_MiB);
    EXPECT_EQ(reserved.bytes(), 20_MiB);
  }
  EXPECT_EQ(Charged(), 0u);
  EXPECT_EQ(room_, 1) << "others may have it";
}

TEST_F(ReservationTest, IsGivenBackOnce) {
  Reservation reserved = Reserve(20_MiB);
  const Reservation other = Reserve(10_MiB);
  reserved.Release();
  EXPECT_EQ(Charged(), 10_MiB);
  reserved.Release();
  EXPECT_EQ(Charged(), 10_MiB);
  EXPECT_EQ(reserved.bytes(), 0u);
  EXPECT_FALSE(reserved.Consume());
}

TEST_F(ReservationTest, MovesWithItsBytes) {
  Reservation first = Reserve(20_MiB);
  {
    Reservation second(std::move(first));
    EXPECT_EQ(second.bytes(), 20_MiB);
    Reservation third = Reserve(10_MiB);
    third = std::move(second);
    EXPECT_EQ(third.bytes(), 20_MiB);
    EXPECT_EQ(Charged(), 30_MiB) << "what it had before goes with the other";
  }
  EXPECT_EQ(Charged(), 0u);
}

TEST_F(ReservationTest, ALeaseConsumesIt) {
  {
    Reservation reserved = Reserve(20_MiB);
    EXPECT_TRUE(reserved.Consume());
    EXPECT_TRUE(pool_->Lease(kId, 20_MiB, /*granted=*/true).ok());
  }
  EXPECT_EQ(Charged(), 20_MiB) << "the segment's, once";
}

TEST_F(ReservationTest, OutlivesItsSession) {
  {
    const Reservation reserved = Reserve(20_MiB);
    pool_->CloseAccount(kId);
    EXPECT_EQ(Charged(), 0u) << "it goes with the account";
    EXPECT_EQ(room_, 1);
  }
  EXPECT_EQ(Charged(), 0u);
  EXPECT_EQ(room_, 1) << "there is no more room than before";
}

}  // namespace
}  // namespace vrambroker
