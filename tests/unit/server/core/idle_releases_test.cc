// SPDX-License-Identifier: Apache-2.0
#include "server/core/idle_releases.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "allocator/base/bytes.h"
#include "tests/support/fake_device.h"
#include "tests/support/step_workers.h"

namespace vrambroker {
namespace {

using ::testing::HasSubstr;
using Released = absl::StatusOr<SegmentPool::Released>;

// Has two devices: the first device caches 4 MiB and 8 MiB, the second device 2 MiB.
class IdleReleasesTest : public ::testing::Test {
 protected:
  IdleReleasesTest() {
    for (int device = 0; device < 2; ++device) {
      auto fake = std::make_unique<FakeDevice>(64_MiB);
      controls_.push_back(fake->control());
      pools_.push_back(std::make_unique<SegmentPool>(std::move(fake), 64_MiB, &next_segment_));
      pools_[device]->OpenAccount(kHolder, {.pid = 1, .limit_bytes = 64_MiB});
    }
    releases_.emplace(std::vector<SegmentPool*>{pools_[0].get(), pools_[1].get()}, &workers_);
    Cache(0, 4_MiB);
    Cache(0, 8_MiB);
    Cache(1, 2_MiB);
  }
  void Cache(int device, uint64_t bytes) {
    const SegmentId segment = pools_[device]->Lease(kHolder, bytes).value();
    ASSERT_TRUE(pools_[device]->Return(kHolder, {segment}).ok());
  }
  void Release(std::optional<uint64_t> device, std::optional<Released>& answer) {
    releases_->Release(device, [&answer](const Released& released) { answer = released; });
  }

  static constexpr SessionId kHolder{7};
  std::atomic<uint64_t> next_segment_ = 1;
  std::vector<std::shared_ptr<FakeDevice::Control>> controls_;
  std::vector<std::unique_ptr<SegmentPool>> pools_;
  StepWorkers workers_;
  std::optional<IdleReleases> releases_;
};

TEST_F(IdleReleasesTest, TheAnswerIsTheSumOverDevices) {
  std::optional<Released> answer;
  Release(std::nullopt, answer);
  EXPECT_EQ(workers_.waiting(), 2u) << "the devices do not wait for each other";
  workers_.Step();
  EXPECT_FALSE(answer.has_value());
  workers_.Step();
  ASSERT_TRUE(answer.has_value() && answer->ok());
  EXPECT_EQ((*answer)->bytes, 14_MiB);
  EXPECT_EQ((*answer)->refused_bytes, 0u);
  for (const auto& control : controls_) EXPECT_EQ(control->live_bytes(), 0u);
}

TEST_F(IdleReleasesTest, OfOneDeviceAlone) {
  std::optional<Released> answer;
  Release(1, answer);
  workers_.Settle();
  ASSERT_TRUE(answer.has_value() && answer->ok());
  EXPECT_EQ((*answer)->bytes, 2_MiB);
  EXPECT_EQ(controls_[0]->live_bytes(), 12_MiB);

  std::optional<Released> unknown;
  Release(2, unknown);
  ASSERT_TRUE(unknown.has_value()) << "without a worker";
  EXPECT_TRUE(absl::IsNotFound(unknown->status()));
}

// Calls for a hanging driver hold a single worker, however many calls come.
TEST_F(IdleReleasesTest, CallsForADeviceShareAWorker) {
  std::optional<Released> first, second;
  Release(0, first);
  Release(0, second);
  EXPECT_EQ(workers_.waiting(), 1u);
  workers_.Settle();
  ASSERT_TRUE(first.has_value() && first->ok() && second.has_value() && second->ok());
  EXPECT_EQ((*first)->bytes, 12_MiB);
  EXPECT_EQ((*second)->bytes, 12_MiB) << "released by the same worker";
}

TEST_F(IdleReleasesTest, ACallThatComesMeanwhileIsServedByTheSameWorker) {
  std::optional<Released> second;
  std::optional<Released> first;
  releases_->Release(0, [&](const Released& released) {
    first = released;
    Cache(0, 6_MiB);
    Release(0, second);
  });
  workers_.Step();
  EXPECT_EQ(workers_.waiting(), 0u);
  ASSERT_TRUE(second.has_value() && second->ok());
  EXPECT_EQ((*second)->bytes, 6_MiB);
  EXPECT_EQ(controls_[0]->live_bytes(), 0u);
}

TEST_F(IdleReleasesTest, OnlyWhatTheDriverHasTakenCounts) {
  controls_[0]->Fail(FakeDevice::Call::kFree, 1, 1, absl::InternalError("busy"));
  std::optional<Released> answer;
  Release(0, answer);
  workers_.Settle();
  ASSERT_TRUE(answer.has_value() && answer->ok());
  EXPECT_EQ((*answer)->bytes, 8_MiB);
  EXPECT_EQ((*answer)->refused_bytes, 4_MiB);
  std::optional<Released> again;
  Release(0, again);
  workers_.Settle();
  ASSERT_TRUE(again.has_value() && again->ok());
  EXPECT_EQ((*again)->bytes, 4_MiB) << "asked once more";
  EXPECT_EQ((*again)->refused_bytes, 0u);
}

TEST_F(IdleReleasesTest, ADeviceThatCannotBeUsedDoesNotHoldUpTheOthers) {
  controls_[0]->set_free_bytes_error(absl::InternalError("the device is lost"));
  ASSERT_FALSE(pools_[0]->UpdateHealth().ok());
  std::optional<Released> answer;
  Release(std::nullopt, answer);
  workers_.Settle();
  ASSERT_TRUE(answer.has_value());
  EXPECT_THAT(std::string(answer->status().message()), HasSubstr("device 0 cannot be used: the device is lost"));
  EXPECT_EQ(controls_[1]->live_bytes(), 0u);
}

}  // namespace
}  // namespace vrambroker
