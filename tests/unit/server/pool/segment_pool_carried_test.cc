// SPDX-License-Identifier: Apache-2.0
//
// Tests of SegmentPool: memory that processes hold from an earlier run of the daemon, and capacity that the driver
// lacks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <chrono>
#include <limits>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "allocator/base/bytes.h"
#include "tests/unit/server/pool/segment_pool_fixture.h"

namespace vrambroker {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// ---- Memory carried over from an earlier run ----

TEST_F(SegmentPoolTest, WhatIsCarriedOverCountsAgainstLimitAndCapacity) {
  MakePool(64_MiB);
  device_->Leave({{.file_device = 1, .file_inode = 1, .bytes = 40_MiB, .holders = {{.pid = PidOf(kA)}}},
                  {.file_device = 1, .file_inode = 2, .bytes = 8_MiB, .holders = {{.pid = 1}}}});
  ASSERT_TRUE(pool_->FindCarriedOver().ok());
  EXPECT_EQ(Stats().carried_over_bytes, 48_MiB);
  EXPECT_EQ(Stats().committed_bytes, 48_MiB);
  Open(kB);
  EXPECT_EQ(Refusal(kB, 18_MiB), OomCause::kCapacity);
  Open(kA, 44_MiB);
  EXPECT_EQ(Account(kA).reserved_bytes, 40_MiB);
  EXPECT_EQ(Account(kA).carried_over_bytes, 40_MiB);
  EXPECT_EQ(Stats().committed_bytes, 48_MiB);
  EXPECT_EQ(Refusal(kA, 6_MiB), OomCause::kLimit);
  Lease(kA, 4_MiB);
  Lease(kB, 12_MiB);
  EXPECT_EQ(Refusal(kB, 2_MiB), OomCause::kCapacity);
  device_->Leave({});
  ASSERT_TRUE(pool_->FindCarriedOver().ok());
  ASSERT_TRUE(pool_->FindCarriedOver().ok());
  EXPECT_EQ(Stats().carried_over_bytes, 0u);
  EXPECT_EQ(Account(kA).reserved_bytes, 4_MiB);
  EXPECT_EQ(Stats().committed_bytes, 16_MiB);
  EXPECT_EQ(Stats().reserved_bytes, 16_MiB);
}

TEST_F(SegmentPoolTest, ThatSomethingMayNotBeCountedIsSaidOnce) {
  std::ostringstream log;
  const std::shared_ptr<spdlog::logger> before = spdlog::default_logger();
  spdlog::set_default_logger(
      std::make_shared<spdlog::logger>("test", std::make_shared<spdlog::sinks::ostream_sink_mt>(log)));
  MakePool(64_MiB);
  ASSERT_TRUE(pool_->FindCarriedOver().ok());
  EXPECT_EQ(log.str(), "");
  device_->Leave({}, /*unread_processes=*/3);
  ASSERT_TRUE(pool_->FindCarriedOver().ok());
  EXPECT_THAT(log.str(), HasSubstr("3 processes cannot be inspected; memory they still hold from an earlier run is not "
                                   "counted, so the device may be overcommitted; "));
  EXPECT_THAT(log.str(), HasSubstr("CAP_SYS_PTRACE"));
  if (geteuid() == 0) {
    EXPECT_THAT(log.str(), Not(HasSubstr("run the daemon as root"))) << "it is";
  }
  log.str("");
  ASSERT_TRUE(pool_->FindCarriedOver().ok());
  EXPECT_EQ(log.str(), "");
  spdlog::set_default_logger(before);
}

// Processes hold more than the capacity: the capacity was lowered between the runs.
TEST_F(SegmentPoolTest, MoreMayBeCarriedOverThanTheCapacity) {
  std::ostringstream log;
  const std::shared_ptr<spdlog::logger> before = spdlog::default_logger();
  spdlog::set_default_logger(
      std::make_shared<spdlog::logger>("test", std::make_shared<spdlog::sinks::ostream_sink_mt>(log)));
  MakePool(16_MiB);
  device_->Leave({{.file_device = 1, .file_inode = 1, .bytes = 40_MiB, .holders = {{.pid = PidOf(kA)}}}});
  ASSERT_TRUE(pool_->FindCarriedOver().ok());
  spdlog::set_default_logger(before);
  EXPECT_THAT(log.str(), HasSubstr("nobody gets more memory until the excess is back device=0 capacity=16777216 "
                                   "bytes=41943040 excess=25165824"));
  Open(kA, 8_MiB);
  Open(kB);
  EXPECT_EQ(Account(kA).reserved_bytes, 40_MiB);
  EXPECT_EQ(Refusal(kA, 2_MiB), OomCause::kLimit);
  EXPECT_EQ(Refusal(kB, 2_MiB), OomCause::kCapacity);
  EXPECT_EQ(SegmentRefusalCause(pool_->SetGuarantee(kB, 2_MiB)), OomCause::kCapacity);
  pool_->CloseAccountOfGone(kA);
  EXPECT_EQ(Stats().committed_bytes, 40_MiB) << "until it is found to be gone";
  device_->Leave({});
  pool_->CheckQuarantine();
  ASSERT_TRUE(pool_->FindCarriedOver().ok());
  ASSERT_TRUE(pool_->FindCarriedOver().ok());
  EXPECT_EQ(Stats().committed_bytes, 0u);
  Lease(kB, 16_MiB);
}

// A file may have any size. Sums of the sizes do not overflow.
TEST_F(SegmentPoolTest, NoFileIsLargerThanCanBeCounted) {
  MakePool(64_MiB);
  constexpr uint64_t kMost = std::numeric_limits<uint64_t>::max();
  const ProcessId holder{.pid = PidOf(kA)};
  device_->Leave({{.file_device = 1, .file_inode = 1, .bytes = kMost, .holders = {holder}},
                  {.file_device = 1, .file_inode = 2, .bytes = kMost, .holders = {holder}}});
  ASSERT_TRUE(pool_->FindCarriedOver().ok());
  EXPECT_EQ(Stats().carried_over_bytes, uint64_t{2} << 44);
  Open(kA);
  Open(kB);
  EXPECT_EQ(Account(kA).carried_over_bytes, uint64_t{2} << 44);
  EXPECT_EQ(Refusal(kB, 2_MiB), OomCause::kCapacity);
  device_->Leave({});
  for (int looks = 0; looks < 2; ++looks) ASSERT_TRUE(pool_->FindCarriedOver().ok());
  EXPECT_EQ(Stats().committed_bytes, 0u);
}

// The daemon may find members of a claim after the claim is removed.
TEST_F(SegmentPoolTest, WhatAMemberOfARemovedClaimIsFoundToHoldIsItsUsers) {
  constexpr ClaimId kClaim{3};
  const ProcessId member{.pid = 5, .started = 1};
  const LeftSegment seen{
      .file_device = 1, .file_inode = 1, .bytes = 2_MiB, .holders = {{.pid = 1, .started = 1}}, .holder_uid = 7};
  const LeftSegment later{.file_device = 1, .file_inode = 2, .bytes = 8_MiB, .holders = {member}, .holder_uid = 7};
  for (const bool is_removed : {false, true}) {
    auto device = std::make_unique<FakeDevice>(64_MiB);
    device_ = device->control();
    SteadyTime now{std::chrono::hours(1)};
    SegmentPool pool(std::move(device), 64_MiB, &next_segment_, {.clock = [&] { return now; }});
    pool.SetClaimLimit(kClaim, 64_MiB);
    device_->Leave({seen});
    ASSERT_TRUE(pool.FindCarriedOver({{member, kClaim}}).ok());
    if (is_removed) pool.CloseClaim(kClaim);
    device_->Leave({seen, later});
    now += std::chrono::seconds(10);
    pool.CheckQuarantine();
    EXPECT_EQ(pool.GetShare(uid_t{7}).charged_bytes, is_removed ? 10_MiB : 2_MiB);
    EXPECT_EQ(pool.GetShare(kClaim).charged_bytes, is_removed ? 0u : 8_MiB);
  }
}

TEST_F(SegmentPoolTest, ADeviceThatCannotTellWhatItHasFreeIsNotUsed) {
  MakePool(64_MiB, DeviceKind::kCuda);
  Open(kA);
  const SegmentId held = Lease(kA, 2_MiB);
  for (const absl::Status& error :
       {absl::InternalError("cudaMemGetInfo failed"), absl::ResourceExhaustedError("oom")}) {
    device_->set_free_bytes_error(error);
    EXPECT_EQ(pool_->UpdateHealth(), absl::InternalError(error.message())) << "no want of memory";
    EXPECT_EQ(pool_->health(), absl::InternalError(error.message()));
    const absl::Status refused = pool_->Lease(kA, 2_MiB).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInternal);
    EXPECT_THAT(std::string(refused.message()),
                HasSubstr("the daemon's device 0 (fake, FAKE-0), which cannot be used: "));
    EXPECT_THAT(std::string(refused.message()), HasSubstr(std::string(error.message())));
  }
  EXPECT_TRUE(pool_->Return(kA, {held}).ok()) << "what is held can be given back";
  device_->set_free_bytes_error(absl::OkStatus());
  EXPECT_TRUE(pool_->UpdateHealth().ok());
  Lease(kA, 2_MiB);
}

// The device does not name the holders of memory: the driver's figure of free memory stands in for the names.
TEST_F(SegmentPoolTest, WhatTheDriverDoesNotHaveIsNotGiven) {
  MakePool(64_MiB, DeviceKind::kCuda);
  device_->set_foreign_bytes(24_MiB);
  ASSERT_TRUE(pool_->UpdateHealth().ok());
  ASSERT_TRUE(pool_->FindCarriedOver().ok());
  EXPECT_EQ(Stats().carried_over_bytes, 24_MiB);
  Open(kA);
  EXPECT_EQ(Refusal(kA, 42_MiB), OomCause::kCapacity);
  // A client declares half of the memory as its own.
  ASSERT_TRUE(pool_->DeclareCarriedOver(kA, {{.id = 1, .bytes = 12_MiB}}).ok());
  EXPECT_EQ(Account(kA).carried_over_bytes, 12_MiB);
  EXPECT_EQ(Stats().carried_over_bytes, 24_MiB);
  Lease(kA, 40_MiB);
  pool_->FreeCarriedOver(kA, {1});
  device_->set_foreign_bytes(12_MiB);
  ASSERT_TRUE(pool_->UpdateHealth().ok());
  EXPECT_EQ(Stats().carried_over_bytes, 12_MiB);
  Lease(kA, 12_MiB);
  device_->set_foreign_bytes(0);
  ASSERT_TRUE(pool_->UpdateHealth().ok());
  EXPECT_EQ(Stats().carried_over_bytes, 0u);
  EXPECT_EQ(Stats().committed_bytes, 52_MiB);
  EXPECT_TRUE(absl::IsInvalidArgument(pool_->DeclareCarriedOver(kA, {{.id = 1, .bytes = 3}})));
}

// Models a GPU of 100 MiB: 4 MiB for the daemon's context, a headroom of 10 MiB, and a capacity of 86 MiB. The capacity
// stays 86 MiB although clients hold 60 MiB and have contexts at the start.
class CarriedOnCudaTest : public SegmentPoolTest {
 protected:
  static constexpr uint64_t kDaemonsContext = 4_MiB;
  static constexpr uint64_t kContexts = 2_MiB;
  static constexpr uint64_t kHeld = 60_MiB;
  static constexpr uint64_t kCapacity = 86_MiB;

  void SetUp() override {
    auto device = std::make_unique<FakeDevice>(100_MiB, DeviceKind::kCuda);
    device_ = device->control();
    device_->set_foreign_bytes(kDaemonsContext + kContexts + kHeld);
    pool_ = std::make_unique<SegmentPool>(std::move(device), kCapacity, &next_segment_,
                                          SegmentPoolOptions{.headroom_bytes = 10_MiB});
    ASSERT_TRUE(pool_->FindCarriedOver().ok());
  }
  // Makes the driver report `bytes` in use by other processes.
  void HeldElsewhere(uint64_t bytes) {
    device_->set_foreign_bytes(kDaemonsContext + bytes);
    ASSERT_TRUE(pool_->UpdateHealth().ok());
  }
  uint64_t Available() {
    const PoolStats stats = Stats();
    return kCapacity - std::min(kCapacity, stats.committed_bytes);
  }
};

TEST_F(CarriedOnCudaTest, TheCapacityIsWhatItWasWhenAllIsFreed) {
  Open(kA);
  Open(kB);
  EXPECT_EQ(Available(), kCapacity - kHeld - kContexts) << "until somebody says what it is";
  ASSERT_TRUE(pool_->DeclareCarriedOver(kA, {{.id = 1, .bytes = kHeld}}, /*begins=*/true, /*ends=*/true).ok());
  EXPECT_EQ(Account(kA).carried_over_bytes, kHeld);
  EXPECT_EQ(Available(), kCapacity - kHeld) << "the rest are contexts, within the headroom";
  EXPECT_EQ(Refusal(kB, 28_MiB), OomCause::kCapacity);
  Lease(kB, 26_MiB);
  pool_->FreeCarriedOver(kA, {1});
  EXPECT_EQ(Refusal(kB, 2_MiB), OomCause::kCapacity) << "until the driver says so, too";
  HeldElsewhere(kContexts);
  EXPECT_EQ(Stats().carried_over_bytes, 0u);
  Lease(kA, 60_MiB);
  EXPECT_EQ(Available(), 0u);
}

// Memory that no client declares is still missing from the driver's free memory.
TEST_F(CarriedOnCudaTest, WhatNobodySaysIsGivenWhenTheDriverHasIt) {
  Open(kB);
  HeldElsewhere(kContexts + 20_MiB);
  EXPECT_EQ(Available(), kCapacity - 20_MiB - kContexts);
  HeldElsewhere(kContexts);
  EXPECT_EQ(Available(), kCapacity);
  HeldElsewhere(kContexts + 20_MiB);
  EXPECT_EQ(Stats().carried_over_bytes, 0u) << "what others take later is not carried over";
}

// ---- Memory that the driver lacks since the capacity was chosen ----

// Has the GPU of CarriedOnCudaTest, without other processes at the daemon's start.
class OutsideOnCudaTest : public CarriedOnCudaTest {
 protected:
  void SetUp() override { Start(10_MiB); }
  void Start(uint64_t headroom) {
    auto device = std::make_unique<FakeDevice>(100_MiB, DeviceKind::kCuda);
    device_ = device->control();
    device_->set_foreign_bytes(kDaemonsContext);
    pool_ = std::make_unique<SegmentPool>(std::move(device), kCapacity, &next_segment_,
                                          SegmentPoolOptions{.headroom_bytes = headroom});
    ASSERT_TRUE(pool_->FindCarriedOver().ok());
    for (const SessionId session : {kA, kB, kC}) Open(session);
  }
  void TearDown() override {
    HeldElsewhere(0);
    EXPECT_EQ(Stats().outside_bytes, 0u);
    CarriedOnCudaTest::TearDown();
  }
};

TEST_F(OutsideOnCudaTest, ContextsWithinTheHeadroomTakeNothing) {
  Lease(kA, 2_MiB);
  HeldElsewhere(4_MiB);
  EXPECT_EQ(Available(), kCapacity - 2_MiB);
  Lease(kB, 2_MiB);
  HeldElsewhere(6_MiB);
  EXPECT_EQ(Available(), kCapacity - 4_MiB);
}

// A headroom of 10 MiB is too small for three contexts of 4 MiB, and the next client needs a context, too.
TEST_F(OutsideOnCudaTest, ContextsBeyondTheHeadroomAreTakenFromTheCapacity) {
  for (const SessionId session : {kA, kB, kC}) Lease(session, 2_MiB);
  HeldElsewhere(12_MiB);
  EXPECT_EQ(Stats().outside_bytes, 6_MiB) << "2 beyond the headroom, and 4 for the next one";
  EXPECT_EQ(Available(), kCapacity - 12_MiB);
  EXPECT_EQ(Refusal(kA, 76_MiB), OomCause::kCapacity);
  Lease(kA, 74_MiB);
  HeldElsewhere(12_MiB + 4_MiB);  // the next client's context
  EXPECT_EQ(Refusal(kA, 2_MiB), OomCause::kCapacity);
  // Memory of ended contexts is available again.
  HeldElsewhere(4_MiB);
  Lease(kB, 6_MiB);
}

TEST_F(OutsideOnCudaTest, OtherProgramsTakeFromTheCapacity) {
  HeldElsewhere(50_MiB);
  Lease(kA, 30_MiB);
  EXPECT_EQ(Refusal(kA, 30_MiB), OomCause::kCapacity);
  HeldElsewhere(0);
  Lease(kA, 30_MiB);
  // Idle memory counts as the daemon's.
  EXPECT_EQ(pool_->CloseAccount(kA), 60_MiB);
  HeldElsewhere(0);
  EXPECT_EQ(Available(), kCapacity);
}

// A request after the driver's refusal waits for other sessions: the pool grants no memory that the driver lacks.
TEST_F(OutsideOnCudaTest, WhatTheDriverRefusesIsNotGrantedAgain) {
  Lease(kB, 20_MiB);
  device_->set_foreign_bytes(kDaemonsContext + 40_MiB);  // the pool has not looked since
  EXPECT_TRUE(pool_->Grant(kA, 40_MiB).ok());
  pool_->ReleaseGrant(kA, 40_MiB);
  EXPECT_EQ(Refusal(kA, 40_MiB), OomCause::kCapacity);
  EXPECT_FALSE(pool_->Grant(kA, 40_MiB).ok());
  EXPECT_GT(pool_->MissingBytes(kA, 40_MiB, /*guarantee=*/false), 0u);
  Lease(kA, 20_MiB);
  pool_->CloseAccount(kB);
  EXPECT_TRUE(pool_->Grant(kA, 20_MiB).ok()) << "what others give back is there";
  pool_->ReleaseGrant(kA, 20_MiB);
}

TEST_F(OutsideOnCudaTest, ADriverThatDoesNotKeepItsWordIsNotAskedAtOnceAgain) {
  device_->Fail(FakeDevice::Call::kAllocate, 1, 2, absl::ResourceExhaustedError("no memory"));
  EXPECT_EQ(Refusal(kA, 20_MiB), OomCause::kCapacity);
  EXPECT_FALSE(pool_->Grant(kA, 20_MiB).ok());
  Lease(kA, 18_MiB);
  HeldElsewhere(0);
  Lease(kA, 20_MiB);
}

TEST_F(OutsideOnCudaTest, ACapacityThatWasGivenHasNoHeadroom) {
  pool_.reset();
  Start(/*headroom=*/0);
  Lease(kA, 2_MiB);
  HeldElsewhere(10_MiB);
  EXPECT_EQ(Stats().outside_bytes, 0u);
  HeldElsewhere(12_MiB);
  EXPECT_EQ(Stats().outside_bytes, 2_MiB);
}

// A client that declares too much is charged for the declaration, and no other client is charged.
TEST_F(CarriedOnCudaTest, NoMoreIsDeclaredThanIsInUse) {
  Open(kA);
  Open(kB);
  Open(kC);
  ASSERT_TRUE(pool_->DeclareCarriedOver(kA, {{.id = 1, .bytes = kHeld}}).ok());
  std::vector<CarriedSegment> lies;
  for (uint64_t id = 1; id <= 50; ++id) lies.push_back({.id = id, .bytes = 2_MiB});
  ASSERT_TRUE(pool_->DeclareCarriedOver(kC, lies).ok());
  EXPECT_EQ(Account(kC).carried_over_bytes, kDaemonsContext + kContexts) << "what nobody else has claimed";
  const uint64_t others_room = kCapacity - kHeld - kContexts;
  Lease(kB, others_room);
  EXPECT_EQ(Refusal(kB, 4_MiB), OomCause::kCapacity);
  // Memory that the driver reports as free is for other sessions, whatever the liar declares.
  EXPECT_EQ(pool_->CloseAccount(kA), 0u);
  HeldElsewhere(0);
  Open(kA);
  Lease(kA, kCapacity - others_room);
  EXPECT_EQ(Refusal(kA, 2_MiB), OomCause::kCapacity);
  pool_->CloseAccount(kC);
  EXPECT_EQ(Stats().committed_bytes, kCapacity);
  // Other processes use no memory any more: the pool believes no declaration.
  Open(kC);
  HeldElsewhere(0);
  device_->set_foreign_bytes(0);
  ASSERT_TRUE(pool_->UpdateHealth().ok());
  ASSERT_TRUE(pool_->DeclareCarriedOver(kC, lies).ok());
  EXPECT_EQ(Account(kC).carried_over_bytes, 0u);
}

}  // namespace
}  // namespace vrambroker
