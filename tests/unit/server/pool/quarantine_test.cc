// SPDX-License-Identifier: Apache-2.0
//
// Tests of memory that ended processes leave on a device whose driver does not name the holders.
#include "server/pool/quarantine.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "allocator/base/bytes.h"
#include "allocator/device/session_mark.h"
#include "server/pool/segment_pool.h"
#include "tests/support/fake_device.h"

namespace vrambroker {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;

constexpr milliseconds kSettle(500);
constexpr SessionId kParent{1};
constexpr SessionId kOther{2};

class QuarantineOnCudaTest : public ::testing::Test {
 protected:
  // The child keeps all descriptors of this process until the test kills the child.
  void SetUp() override {
    child_ = fork();
    if (child_ == 0) {
      for (;;) pause();
    }
    ASSERT_GT(child_, 0);
  }
  void TearDown() override { EndChild(); }

  void EndChild() {
    if (child_ <= 0) return;
    kill(child_, SIGKILL);
    EXPECT_EQ(waitpid(child_, nullptr, 0), child_);
    child_ = 0;
  }

  // Leaves `bytes` of a session that can open the memory, and whose process has ended.
  void LeaveBehind(SessionId session, uint64_t bytes, SessionMark mark, std::optional<ClaimId> claim = std::nullopt) {
    pool_.OpenAccount(session, {.client = session == kParent ? "parent" : "other",
                                .pid = static_cast<pid_t>(100 + Raw(session)),
                                .claim = claim,
                                .limit_bytes = 1_GiB,
                                .mark = mark});
    const absl::StatusOr<SegmentId> segment = pool_.Lease(session, bytes);
    ASSERT_TRUE(segment.ok()) << segment.status();
    ASSERT_TRUE(pool_.HandleFor(session, *segment).ok());
    pool_.CloseAccountOfGone(session);
  }
  uint64_t Quarantined() { return pool_.GetStats().quarantined_bytes; }
  // Returns the bytes that other sessions expect back.
  uint64_t Expected() { return pool_.ExpectedFor({SessionId{9}})[0].returning_bytes; }
  // Moves the clock to the next check, and checks.
  void Check() {
    const std::optional<SteadyTime> check = pool_.NextQuarantineCheck();
    ASSERT_TRUE(check.has_value());
    now_ = *check;
    pool_.CheckQuarantine();
  }

  UniqueFd mark_fd_ = MakeSessionMark();  // made before the child
  const SessionMark mark_ = FindSessionMark(getpid(), static_cast<uint32_t>(mark_fd_.get())).value_or(0);
  pid_t child_ = 0;
  SteadyTime now_ = std::chrono::steady_clock::now();
  SteadyTime::duration look_takes_{0};  // passes at each read of the clock
  std::atomic<uint64_t> next_segment_ = 1;
  std::unique_ptr<FakeDevice> made_ = std::make_unique<FakeDevice>(1_GiB, DeviceKind::kCuda);
  const std::shared_ptr<FakeDevice::Control> device_ = made_->control();
  SegmentPool pool_{std::move(made_), 1_GiB, &next_segment_,
                    SegmentPoolOptions{.settle_time = kSettle, .clock = [this] { return now_ += look_takes_; }}};
};

TEST_F(QuarantineOnCudaTest, LastsUntilNoChildHasTheDescriptors) {
  ASSERT_NE(mark_, 0u);
  LeaveBehind(kParent, 4_MiB, mark_);
  const UniqueFd others = MakeSessionMark();  // made after the child
  LeaveBehind(kOther, 2_MiB, *FindSessionMark(getpid(), static_cast<uint32_t>(others.get())));
  now_ += kSettle - milliseconds(1);
  pool_.CheckQuarantine();
  EXPECT_EQ(Quarantined(), 6_MiB) << "both are settling";
  EXPECT_TRUE(pool_.IsSettling());
  EXPECT_EQ(Expected(), 6_MiB);
  Check();
  EXPECT_EQ(Quarantined(), 4_MiB);
  EXPECT_FALSE(pool_.IsSettling()) << "nobody is to wait for it";
  EXPECT_EQ(Expected(), 0u);
  ASSERT_EQ(pool_.GetView().quarantine.size(), 1u);
  const Quarantine::Holding holding = pool_.GetView().quarantine[0];
  EXPECT_EQ(holding.client, "parent");
  EXPECT_THAT(holding.holders, ElementsAre(child_));
  // Checks repeat, ever less often.
  SteadyTime before = now_;
  for (const milliseconds pause : {milliseconds(100), milliseconds(200), milliseconds(400)}) {
    Check();
    EXPECT_EQ(now_ - before, pause);
    EXPECT_EQ(Quarantined(), 4_MiB);
    before = now_;
  }
  EndChild();
  Check();
  EXPECT_EQ(Quarantined(), 0u);
  EXPECT_EQ(pool_.GetStats().charged_bytes, 0u);
  EXPECT_EQ(pool_.GetStats().segment_frees, 2u) << "nobody gets them as they are";
  EXPECT_EQ(pool_.NextQuarantineCheck(), std::nullopt);
}

// Looks for many dead processes with living children must not follow one another without a pause.
TEST_F(QuarantineOnCudaTest, LooksThatBringNothingBackLeaveTime) {
  LeaveBehind(kParent, 4_MiB, mark_);
  now_ += kSettle / 2;
  LeaveBehind(kOther, 2_MiB, mark_);
  look_takes_ = milliseconds(40);
  Check();
  look_takes_ = {};
  EXPECT_EQ(Quarantined(), 6_MiB);
  EXPECT_EQ(pool_.NextQuarantineCheck(), now_ + 10 * milliseconds(40)) << "the other one is due in 250 ms";
  EndChild();
  Check();
  EXPECT_EQ(Quarantined(), 0u);
}

// A process that can still write to the segment would write to the next session's memory.
TEST_F(QuarantineOnCudaTest, NothingIsFreedWhereNobodyCanTell) {
  LeaveBehind(kParent, 4_MiB, 0);
  device_->set_holders(absl::InternalError("no descriptors left"));
  for (int looks = 0; looks < 3; ++looks) {
    Check();
    EXPECT_EQ(Quarantined(), 4_MiB);
    EXPECT_EQ(pool_.GetStats().charged_bytes, 4_MiB);
  }
  EXPECT_FALSE(pool_.IsSettling());
  device_->set_holders(SegmentHolders());
  Check();
  EXPECT_EQ(Quarantined(), 0u);
  EXPECT_EQ(pool_.GetStats().charged_bytes, 0u);
}

TEST_F(QuarantineOnCudaTest, EachSegmentHasItsHoldersAndItsClaimKnowsThem) {
  constexpr ClaimId kClaim{3};
  pool_.SetClaimLimit(kClaim, 1_GiB);
  std::vector<std::pair<pid_t, ClaimId>> told;
  pool_.SetOnClaimHolder([&](pid_t process, ClaimId claim) { told.emplace_back(process, claim); });
  LeaveBehind(kOther, 2_MiB, 0);
  LeaveBehind(kParent, 4_MiB, 0, kClaim);
  device_->set_holders(SegmentHolders{.holders = {{.segment = 1, .pid = 71}, {.segment = 1, .pid = 72}}});
  Check();
  EXPECT_EQ(Quarantined(), 4_MiB);
  EXPECT_EQ(pool_.GetShare(kClaim).charged_bytes, 4_MiB);
  EXPECT_THAT(pool_.GetView().quarantine.at(0).holders, ElementsAre(71, 72));
  EXPECT_THAT(told, ElementsAre(std::pair(71, kClaim), std::pair(72, kClaim)));
  // The remaining segment is the first segment of the next look.
  device_->set_holders(SegmentHolders{.holders = {{.segment = 0, .pid = 71}, {.segment = 0, .pid = 72}}});
  Check();
  EXPECT_EQ(told.size(), 2u) << "they are known";
  device_->set_holders(SegmentHolders());
  Check();
  EXPECT_EQ(pool_.GetShare(kClaim).charged_bytes, 0u);
}

TEST_F(QuarantineOnCudaTest, IsATimerForClientsWithoutAMark) {
  LeaveBehind(kParent, 4_MiB, 0);
  Check();
  EXPECT_EQ(Quarantined(), 0u) << "although the child of this process has all that it had";
}

}  // namespace
}  // namespace vrambroker
