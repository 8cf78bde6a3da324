// SPDX-License-Identifier: Apache-2.0
#include "server/pool/driver_segments.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <thread>
#include <utility>

#include "allocator/base/bytes.h"
#include "tests/support/fake_device.h"

namespace vrambroker {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;

class DriverSegmentsTest : public ::testing::Test {
 protected:
  explicit DriverSegmentsTest(DeviceKind kind = DeviceKind::kHost)
      : device_(std::make_unique<FakeDevice>(8_MiB, kind)), control_(device_->control()) {}
  ~DriverSegmentsTest() override { EXPECT_EQ(control_->misuse(), ""); }

  absl::StatusOr<DeviceSegment> Obtain(uint64_t bytes, const std::string& tenant = "ann") {
    driver_.StartObtaining(bytes);
    return driver_.Obtain(tenant, bytes, [this] {
      driver_.StartFreeing(idle_);
      return std::exchange(idle_, {});
    });
  }
  UnleasedSegment Get(uint64_t bytes, const std::string& tenant = "ann") {
    return {.segment = Obtain(bytes, tenant).value(), .tenant = tenant};
  }
  void Free(const UnleasedSegment& entry) {
    driver_.StartFreeing({entry});
    driver_.Free({entry});
  }

  const std::unique_ptr<FakeDevice> device_;
  const std::shared_ptr<FakeDevice::Control> control_;
  std::vector<UnleasedSegment> idle_;  // the owner gives these segments up when the driver has no memory
  DriverSegments driver_{device_.get(), std::chrono::minutes(1)};
};

TEST_F(DriverSegmentsTest, CountsWhatIsOnItsWay) {
  driver_.StartObtaining(6_MiB);
  EXPECT_EQ(driver_.counts().obtaining_bytes, 6_MiB);
  driver_.GiveUp(2_MiB);
  const auto obtained = driver_.Obtain("ann", 4_MiB, [] { return std::vector<UnleasedSegment>(); });
  ASSERT_TRUE(obtained.ok());
  EXPECT_EQ(driver_.counts().obtaining_bytes, 0u);
  EXPECT_EQ(driver_.counts().obtained, 1u);
  const UnleasedSegment entry{.segment = *obtained, .tenant = "ann"};
  driver_.StartFreeing({entry});
  EXPECT_EQ(driver_.counts().freeing_bytes, 4_MiB);
  EXPECT_EQ(driver_.Free({entry}), 4_MiB);
  EXPECT_EQ(driver_.counts().freeing_bytes, 0u);
  EXPECT_EQ(driver_.counts().freed, 1u);
  EXPECT_EQ(control_->live_bytes(), 0u);
}

TEST_F(DriverSegmentsTest, ARefusalEndsTheObtaining) {
  const UnleasedSegment held = Get(8_MiB);
  EXPECT_TRUE(absl::IsResourceExhausted(Obtain(2_MiB).status()));
  EXPECT_EQ(driver_.counts().obtaining_bytes, 0u);
  EXPECT_EQ(driver_.counts().obtained, 1u);
  Free(held);
}

TEST_F(DriverSegmentsTest, WhatIsIdleGoesBackBeforeTheDriverIsAskedAgain) {
  control_->set_foreign_bytes(4_MiB);
  idle_ = {Get(4_MiB)};
  const UnleasedSegment second = Get(4_MiB);
  EXPECT_THAT(idle_, IsEmpty());
  EXPECT_EQ(driver_.counts().freed, 1u);
  Free(second);
}

TEST_F(DriverSegmentsTest, WaitsForFreesThatAreUnderWay) {
  const UnleasedSegment held = Get(8_MiB);
  Gate& gate = control_->Hold(FakeDevice::Call::kFree);
  driver_.StartFreeing({held});
  std::thread freer([&] { driver_.Free({held}); });
  gate.AwaitArrivals(1);
  absl::StatusOr<DeviceSegment> obtained;
  std::thread taker([&] { obtained = Obtain(8_MiB); });
  control_->AwaitRefusals(1);
  gate.Open();
  freer.join();
  taker.join();
  ASSERT_TRUE(obtained.ok()) << obtained.status();
  Free({.segment = *obtained, .tenant = "ann"});
}

TEST_F(DriverSegmentsTest, WhatTheDriverDoesNotTakeBackIsKeptAndTriedAgain) {
  const UnleasedSegment held = Get(8_MiB);
  control_->Fail(FakeDevice::Call::kFree, 1, 1, absl::InternalError("busy"));
  driver_.StartFreeing({held});
  EXPECT_EQ(driver_.Free({held}), 0u) << "nothing was taken";
  EXPECT_EQ(driver_.counts().unfreed_bytes, 8_MiB);
  const UnleasedSegment next = Get(8_MiB);  // tries the free again
  EXPECT_EQ(driver_.counts().unfreed_bytes, 0u);
  control_->Fail(FakeDevice::Call::kFree, 1, 2, absl::InternalError("busy"));
  Free(next);
  driver_.RetryFrees();
  EXPECT_EQ(driver_.counts().unfreed_bytes, 8_MiB);
  const std::vector<DeviceSegment> unfreed = driver_.TakeUnfreed();
  ASSERT_THAT(unfreed, SizeIs(1));
  EXPECT_EQ(driver_.counts().unfreed_bytes, 0u);
  EXPECT_TRUE(device_->FreeSegment(unfreed[0]).ok());
}

// Has a driver that hands out memory with the old contents.
class DriverSegmentsOnCudaTest : public DriverSegmentsTest {
 protected:
  DriverSegmentsOnCudaTest() : DriverSegmentsTest(DeviceKind::kCuda) {}
};

TEST_F(DriverSegmentsOnCudaTest, OverwritesWhatMayBeAnotherTenants) {
  const UnleasedSegment anns = Get(4_MiB, "ann");
  EXPECT_EQ(control_->zeroed_bytes(), 0u) << "nobody's";
  Free(anns);
  const UnleasedSegment again = Get(4_MiB, "ann");
  EXPECT_EQ(control_->zeroed_bytes(), 0u) << "her own";
  const UnleasedSegment bens = Get(2_MiB, "ben");
  EXPECT_EQ(control_->zeroed_bytes(), 2_MiB);
  Free(bens);
  Free(again);
  Free(Get(2_MiB, "ann"));
  EXPECT_EQ(control_->zeroed_bytes(), 4_MiB) << "ben's, too, is back";
}

TEST_F(DriverSegmentsOnCudaTest, ASegmentThatCannotBeOverwrittenGoesBack) {
  Free(Get(4_MiB, "ben"));
  control_->Fail(FakeDevice::Call::kZero, 1, 1, absl::InternalError("no context"));
  EXPECT_TRUE(absl::IsInternal(Obtain(4_MiB, "ann").status()));
  EXPECT_EQ(control_->live_bytes(), 0u);
  EXPECT_EQ(driver_.counts().obtaining_bytes, 0u);
}

TEST_F(DriverSegmentsOnCudaTest, ASegmentThatCannotBeExportedGoesBack) {
  control_->Fail(FakeDevice::Call::kExport, 1, 1, absl::InternalError("no handle"));
  EXPECT_TRUE(absl::IsInternal(Obtain(4_MiB).status()));
  EXPECT_EQ(control_->live_bytes(), 0u);
  EXPECT_EQ(driver_.counts().obtained, 0u);
  EXPECT_EQ(driver_.counts().obtaining_bytes, 0u);
}

}  // namespace
}  // namespace vrambroker
