// SPDX-License-Identifier: Apache-2.0
#include "server/pool/segment_pool.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "allocator/base/bytes.h"
#include "server/base/worker_pool.h"
#include "server/pool/idle_decay.h"
#include "tests/support/fake_device.h"
#include "tests/unit/server/pool/segment_pool_fixture.h"

namespace vrambroker {
namespace {

using Call = FakeDevice::Call;

// ---- Limits ----

TEST_F(SegmentPoolTest, LimitHoldsToTheByte) {
  MakePool(kPlenty);
  Open(kA, 4_MiB);
  Open(kB, 4_MiB - 1);
  Lease(kA, 2_MiB);
  Lease(kA, 2_MiB);
  EXPECT_EQ(Refusal(kA, 2_MiB), OomCause::kLimit);
  EXPECT_EQ(Account(kA).reserved_bytes, 4_MiB) << "a refusal charges nothing";
  Lease(kB, 2_MiB);
  EXPECT_EQ(Refusal(kB, 2_MiB), OomCause::kLimit) << "one byte short";
  EXPECT_EQ(Stats().charged_bytes, 6_MiB);
}

TEST_F(SegmentPoolTest, CapacityHoldsToTheByteOverAllAccounts) {
  MakePool(6_MiB);
  Open(kA);
  Open(kB);
  Lease(kA, 4_MiB);
  Lease(kB, 2_MiB);
  EXPECT_EQ(Refusal(kB, 2_MiB), OomCause::kCapacity);
  EXPECT_EQ(Refusal(kA, 2_MiB), OomCause::kCapacity);
  EXPECT_EQ(Account(kB).reserved_bytes, 2_MiB);
  EXPECT_EQ(Stats().charged_bytes, 6_MiB);
}

TEST_F(SegmentPoolTest, CapacityOneByteShortIsShort) {
  MakePool(6_MiB - 1, 1_GiB, DeviceKind::kHost);
  Open(kA);
  Open(kB);
  Lease(kA, 4_MiB);
  EXPECT_EQ(Refusal(kB, 2_MiB), OomCause::kCapacity);
}

TEST_F(SegmentPoolTest, MoreThanTheCapacityIsSaidAtOnce) {
  MakePool(6_MiB);
  Open(kA, 2_MiB);
  EXPECT_EQ(Refusal(kA, 8_MiB), OomCause::kLargerThanDevice) << "whatever the limit";
  EXPECT_EQ(Refusal(kA, 6_MiB), OomCause::kLimit);
  EXPECT_EQ(device_->allocations(), 0) << "the device is not asked";
}

TEST_F(SegmentPoolTest, LimitBelowWhatIsReservedTakesNothingAway) {
  MakePool(kPlenty);
  Open(kA, 8_MiB);
  const SegmentId first = Lease(kA, 2_MiB);
  Lease(kA, 4_MiB);
  EXPECT_EQ(pool_->SetLimit(kA, 3_MiB), absl::OkStatus());
  EXPECT_EQ(Account(kA).reserved_bytes, 6_MiB);
  EXPECT_EQ(Account(kA).limit_bytes, 3_MiB);
  EXPECT_EQ(Refusal(kA, 2_MiB), OomCause::kLimit);
  GiveBack(kA, first);
  EXPECT_EQ(Refusal(kA, 2_MiB), OomCause::kLimit) << "4 MiB are still above 3 MiB";
  EXPECT_EQ(pool_->SetLimit(kA, 6_MiB), absl::OkStatus());
  Lease(kA, 2_MiB);
}

TEST_F(SegmentPoolTest, UnknownSessionsHaveNothing) {
  MakePool(kPlenty);
  EXPECT_TRUE(absl::IsAborted(pool_->Lease(kA, 2_MiB).status()));
  EXPECT_TRUE(absl::IsNotFound(pool_->SetLimit(kA, 1)));
  EXPECT_TRUE(absl::IsNotFound(pool_->HandleFor(kA, SegmentId{1}).status()));
  EXPECT_EQ(pool_->GetAccount(kA), std::nullopt);
  EXPECT_EQ(pool_->CloseAccount(kA), 0u);
  pool_->MarkReturning(kA, {SegmentId{1}});
  pool_->FinishReturning(kA, {SegmentId{1}});
}

TEST_F(SegmentPoolTest, IdsAreUniqueOverPools) {
  MakePool(kPlenty);
  SegmentPool other(std::make_unique<FakeDevice>(kPlenty), kPlenty, &next_segment_);
  Open(kA);
  other.OpenAccount(kA, {.pid = 1, .uid = kAnnUid, .limit_bytes = kPlenty});
  std::set<uint64_t> ids;
  for (int i = 0; i < 5; ++i) {
    ids.insert(Raw(Lease(kA, 2_MiB)));
    ids.insert(Raw(other.Lease(kA, 2_MiB).value()));
  }
  EXPECT_EQ(ids.size(), 10u);
  EXPECT_FALSE(ids.contains(0));
}

// ---- Giving back ----

TEST_F(SegmentPoolTest, ReturningStaysChargedUntilReturned) {
  MakePool(kPlenty);
  Open(kA);
  const SegmentId segment = Lease(kA, 2_MiB);
  pool_->MarkReturning(kA, {segment});
  pool_->MarkReturning(kA, {segment});
  EXPECT_EQ(Account(kA).returning_bytes, 2_MiB) << "counted once";
  EXPECT_EQ(Account(kA).reserved_bytes, 2_MiB);
  EXPECT_EQ(Stats().idle_bytes, 0u);
  pool_->FinishReturning(kA, {segment});
  EXPECT_EQ(Account(kA).returning_bytes, 0u);
  EXPECT_EQ(Account(kA).reserved_bytes, 0u);
  EXPECT_EQ(Stats().charged_bytes, 0u);
  EXPECT_EQ(Stats().idle_bytes, 2_MiB);
  EXPECT_EQ(Stats().reserved_bytes, 2_MiB);
  pool_->FinishReturning(kA, {segment});
  EXPECT_EQ(Stats().idle_bytes, 2_MiB) << "a second return changes nothing";
}

TEST_F(SegmentPoolTest, ReturnOfWhatWasNotAskedBackIsIgnored) {
  MakePool(kPlenty);
  Open(kA);
  Open(kB);
  const SegmentId in_use = Lease(kA, 2_MiB);
  const SegmentId returning = Lease(kA, 2_MiB);
  pool_->FinishReturning(kA, {in_use, SegmentId{999}});
  EXPECT_EQ(Account(kA).reserved_bytes, 4_MiB);
  pool_->MarkReturning(kB, {in_use});
  EXPECT_EQ(Account(kA).returning_bytes, 0u) << "another's";
  EXPECT_EQ(Account(kB).returning_bytes, 0u);
  pool_->MarkReturning(kA, {returning});
  pool_->FinishReturning(kB, {returning});
  EXPECT_EQ(Account(kA).reserved_bytes, 4_MiB) << "nobody returns another's segment";
  pool_->FinishReturning(kA, {in_use, returning});
  EXPECT_EQ(Account(kA).reserved_bytes, 2_MiB);
  EXPECT_EQ(Stats().segments, 1u);
}

TEST_F(SegmentPoolTest, CloseAccountMakesEverythingIdle) {
  MakePool(kPlenty);
  Open(kA);
  Open(kB);
  Lease(kA, 2_MiB);
  pool_->MarkReturning(kA, {Lease(kA, 4_MiB)});
  Lease(kB, 8_MiB);
  EXPECT_EQ(pool_->CloseAccount(kA), 6_MiB);
  EXPECT_EQ(pool_->GetAccount(kA), std::nullopt);
  EXPECT_EQ(Stats().charged_bytes, 8_MiB);
  EXPECT_EQ(Stats().idle_bytes, 6_MiB);
  EXPECT_EQ(Stats().segments, 1u);
  EXPECT_EQ(pool_->CloseAccount(kA), 0u);
}

TEST_F(SegmentPoolTest, DestructorGivesEverythingBack) {
  MakePool(kPlenty);
  Open(kA);
  Lease(kA, 2_MiB);
  GiveBack(kA, Lease(kA, 4_MiB));
  EXPECT_EQ(device_->live_bytes(), 6_MiB);
  pool_.reset();
  EXPECT_EQ(device_->live_bytes(), 0u);
  EXPECT_EQ(device_->frees(), 2);
}

// ---- Idle segments ----

TEST_F(SegmentPoolTest, IdleSegmentIsReusedByTheSameTenant) {
  MakePool(kPlenty);
  Open(kA);
  const SegmentId first = Lease(kA, 2_MiB);
  pool_->CloseAccount(kA);
  Open(kB);
  const SegmentId second = Lease(kB, 2_MiB);
  EXPECT_NE(second, first) << "ids are never reused";
  EXPECT_EQ(device_->allocations(), 1);
  EXPECT_EQ(Stats().segment_allocs, 1u);
  EXPECT_EQ(Stats().idle_bytes, 0u);
  EXPECT_EQ(Stats().charged_bytes, 2_MiB);
  EXPECT_TRUE(pool_->HandleFor(kB, second).ok());
  EXPECT_TRUE(absl::IsNotFound(pool_->HandleFor(kB, first).status()));
}

TEST_F(SegmentPoolTest, IdleSegmentIsNeverGivenToAnotherTenant) {
  MakePool(kPlenty);
  Open(kA, kPlenty, kAnnUid);
  Lease(kA, 2_MiB);
  pool_->CloseAccount(kA);
  Open(kB, kPlenty, kBenUid);
  Lease(kB, 2_MiB);
  EXPECT_EQ(device_->allocations(), 2);
  EXPECT_EQ(Stats().idle_bytes, 2_MiB);
  // Even with its last holder gone it remembers its tenant.
  Open(kC, kPlenty, kAnnUid);
  Lease(kC, 2_MiB);
  EXPECT_EQ(device_->allocations(), 2);
}

TEST_F(SegmentPoolTest, IdleSegmentOfAnotherSizeIsNotReused) {
  MakePool(kPlenty);
  Open(kA);
  GiveBack(kA, Lease(kA, 4_MiB));
  Lease(kA, 2_MiB);
  EXPECT_EQ(device_->allocations(), 2);
  EXPECT_EQ(Stats().idle_bytes, 4_MiB);
}

TEST_F(SegmentPoolTest, NeedOfAnotherTenantSendsIdleSegmentsToTheDriver) {
  MakePool(8_MiB);
  Open(kA, kPlenty, kAnnUid);
  for (int i = 0; i < 4; ++i) Lease(kA, 2_MiB);
  pool_->CloseAccount(kA);
  EXPECT_EQ(Stats().idle_bytes, 8_MiB);
  Open(kB, kPlenty, kBenUid);
  Lease(kB, 4_MiB);
  EXPECT_EQ(Stats().idle_bytes, 4_MiB) << "no more than is needed";
  EXPECT_EQ(Stats().segment_frees, 2u);
  EXPECT_EQ(Stats().reserved_bytes, 8_MiB);
  EXPECT_EQ(device_->peak_bytes(), 8_MiB);
  Lease(kB, 4_MiB);
  EXPECT_EQ(Stats().idle_bytes, 0u);
}

TEST_F(SegmentPoolTest, OwnIdleSegmentsOfAnotherSizeMakeRoomToo) {
  MakePool(8_MiB);
  Open(kA);
  GiveBack(kA, Lease(kA, 6_MiB));
  Lease(kA, 4_MiB);
  EXPECT_EQ(Stats().idle_bytes, 0u);
  EXPECT_EQ(device_->live_bytes(), 4_MiB);
}

TEST_F(SegmentPoolTest, ReleaseIdleSinceSparesWhatIsYounger) {
  MakePool(kPlenty);
  Open(kA);
  const SteadyTime before = std::chrono::steady_clock::now() - std::chrono::seconds(1);
  GiveBack(kA, Lease(kA, 2_MiB));
  EXPECT_EQ(pool_->ReleaseIdleSince(before), 0u);
  EXPECT_EQ(Stats().idle_bytes, 2_MiB);
  EXPECT_EQ(pool_->ReleaseIdleSince(std::chrono::steady_clock::now()), 2_MiB);
  EXPECT_EQ(Stats().idle_bytes, 0u);
  EXPECT_EQ(Stats().reserved_bytes, 0u);
  EXPECT_EQ(Stats().segment_frees, 1u);
  EXPECT_EQ(device_->live_bytes(), 0u);
}

TEST_F(SegmentPoolTest, BeyondTheIdleLimitTheOldestGoBack) {
  MakePool(kPlenty, kPlenty, DeviceKind::kHost, 6_MiB);
  Open(kA, kPlenty, kAnnUid);
  Open(kB, kPlenty, kBenUid);
  Open(kC, kPlenty, kBenUid);
  const SegmentId younger = Lease(kA, 4_MiB);
  GiveBack(kB, Lease(kB, 2_MiB));
  const SteadyTime before = std::chrono::steady_clock::now() - std::chrono::hours(1);
  EXPECT_EQ(pool_->ReleaseIdleSince(before), 0u) << "within the limit";
  GiveBack(kA, younger);
  EXPECT_EQ(pool_->ReleaseIdleSince(before), 0u) << "at the limit";
  GiveBack(kA, Lease(kA, 2_MiB));
  EXPECT_EQ(Stats().idle_bytes, 8_MiB) << "nothing calls the driver but ReleaseIdleSince()";
  EXPECT_EQ(pool_->ReleaseIdleSince(before), 2_MiB) << "that of B, and no more than needed";
  EXPECT_EQ(Stats().idle_bytes, 6_MiB);
  EXPECT_EQ(Stats().reserved_bytes, 6_MiB);
  EXPECT_EQ(Stats().segment_frees, 1u);
  EXPECT_EQ(device_->live_bytes(), 6_MiB);
  Lease(kA, 4_MiB);
  EXPECT_EQ(device_->allocations(), 3) << "from idle";
  GiveBack(kA, Lease(kA, 10_MiB));
  EXPECT_EQ(pool_->ReleaseIdleSince(before), 12_MiB) << "a segment larger than the limit is not kept, nor older ones";
}

TEST_F(SegmentPoolTest, NothingIsKeptAtAnIdleLimitOfZero) {
  MakePool(kPlenty, kPlenty, DeviceKind::kHost, 0);
  Open(kA);
  Lease(kA, 2_MiB);
  Lease(kA, 4_MiB);
  pool_->CloseAccount(kA);
  EXPECT_EQ(pool_->ReleaseIdleSince(SteadyTime()), 6_MiB);
  EXPECT_EQ(Stats().reserved_bytes, 0u);
}

TEST_F(SegmentPoolTest, WhatIsDueCanBeLeasedUntilTheDriverHasIt) {
  MakePool(kPlenty);
  Open(kA);
  const SegmentId first = Lease(kA, 2_MiB);
  const SegmentId second = Lease(kA, 2_MiB);
  GiveBack(kA, first);
  GiveBack(kA, second);
  Gate& gate = device_->Hold(Call::kFree);
  std::thread decay([&] { EXPECT_EQ(pool_->ReleaseIdleSince(std::chrono::steady_clock::now()), 2_MiB); });
  gate.AwaitArrivals(1);
  Lease(kA, 2_MiB);
  EXPECT_EQ(device_->allocations(), 2) << "the second one";
  gate.Open();
  decay.join();
}

// ---- Decay on its own thread ----

TEST_F(SegmentPoolTest, DecayGivesBackWhatIsDue) {
  MakePool(kPlenty);
  Open(kA);
  Lease(kA, 2_MiB);
  Lease(kA, 4_MiB);
  const IdleDecay decay(pool_.get(), std::chrono::milliseconds(20));
  for (int round = 1; round <= 3; ++round) {
    SCOPED_TRACE(round);
    GiveBack(kA, Lease(kA, 8_MiB));
    device_->AwaitFrees(round);
  }
  const SteadyTime closed = std::chrono::steady_clock::now();
  pool_->CloseAccount(kA);
  device_->AwaitFrees(5);
  EXPECT_GE(std::chrono::steady_clock::now() - closed, std::chrono::milliseconds(20));
}

TEST_F(SegmentPoolTest, DecaySparesWhatIsYoungAndStopsAtOnce) {
  MakePool(kPlenty);
  Open(kA);
  const IdleDecay decay(pool_.get(), std::chrono::hours(1));
  GiveBack(kA, Lease(kA, 2_MiB));
  EXPECT_EQ(Stats().idle_bytes, 2_MiB);
}

TEST_F(SegmentPoolTest, DecayDoesNotWaitWithWhatIsBeyondTheIdleLimit) {
  MakePool(kPlenty, kPlenty, DeviceKind::kHost, 2_MiB);
  Open(kA);
  const IdleDecay decay(pool_.get(), std::chrono::hours(1));
  for (int i = 0; i < 5; ++i) Lease(kA, 2_MiB);
  pool_->CloseAccount(kA);
  device_->AwaitFrees(4);
  EXPECT_EQ(Stats().idle_bytes, 2_MiB);
}

TEST_F(SegmentPoolTest, TellsWhenSomethingIsDueEarlier) {
  MakePool(16_MiB);
  Open(kA);
  int told = 0;
  pool_->SetOnDecayChanged([&] { ++told; });
  EXPECT_EQ(pool_->NextDecay(std::chrono::hours(1)), std::nullopt);
  GiveBack(kA, Lease(kA, 2_MiB));
  EXPECT_EQ(told, 1) << "nothing was idle";
  const std::optional<SteadyTime> next = pool_->NextDecay(std::chrono::hours(1));
  ASSERT_TRUE(next.has_value());
  EXPECT_GT(*next, std::chrono::steady_clock::now());
  GiveBack(kA, Lease(kA, 4_MiB));
  EXPECT_EQ(told, 1) << "the first one is the oldest";
  // Taken for a lease, and put back where it was.
  EXPECT_TRUE(absl::IsNotFound(pool_->LeaseIdle(kA, {2_MiB, 8_MiB}).status()));
  EXPECT_EQ(told, 2);
  EXPECT_TRUE(absl::IsNotFound(pool_->LeaseIdle(kA, {8_MiB}).status()));
  EXPECT_EQ(told, 2) << "nothing was taken";
  EXPECT_EQ(pool_->NextDecay(std::chrono::hours(1)), next);
  pool_->SetOnDecayChanged(nullptr);
}

TEST_F(SegmentPoolTest, MakingSegmentsIdleDoesNotWaitForTheDriver) {
  MakePool(kPlenty, kPlenty, DeviceKind::kHost, 0);
  Open(kA);
  Open(kB);
  const SegmentId segment = Lease(kA, 2_MiB);
  Gate& gate = device_->Hold(Call::kFree);
  const IdleDecay decay(pool_.get(), std::chrono::milliseconds(0));
  GiveBack(kA, segment);
  gate.AwaitArrivals(1);
  EXPECT_EQ(Stats().reserved_bytes, 2_MiB) << "held until the driver has it";
  Lease(kB, 4_MiB);
  pool_->CloseAccount(kB);
  EXPECT_EQ(pool_->CloseAccount(kA), 0u);
  gate.Open();
  device_->AwaitFrees(2);
}

// ---- The driver says no ----

TEST_F(SegmentPoolTest, DriverOutOfMemoryIsACapacityRefusal) {
  MakePool(8_MiB);
  Open(kA);
  device_->set_foreign_bytes(7_MiB);
  EXPECT_EQ(Refusal(kA, 2_MiB), OomCause::kCapacity);
  EXPECT_EQ(Account(kA).reserved_bytes, 0u);
  EXPECT_EQ(Stats().charged_bytes, 0u);
  device_->set_foreign_bytes(0);
  Lease(kA, 8_MiB);
}

TEST_F(SegmentPoolTest, DriverOutOfMemorySendsIdleSegmentsToTheDriver) {
  MakePool(8_MiB);
  Open(kA, kPlenty, kAnnUid);
  Open(kB, kPlenty, kBenUid);
  GiveBack(kA, Lease(kA, 4_MiB));
  // Capacity would allow 4 MiB, but somebody outside of the broker has taken them.
  device_->set_foreign_bytes(4_MiB);
  Lease(kB, 4_MiB);
  EXPECT_EQ(Stats().idle_bytes, 0u);
  EXPECT_EQ(Stats().segment_frees, 1u);
  device_->set_foreign_bytes(0);
}

TEST_F(SegmentPoolTest, OtherDriverErrorsPassThrough) {
  MakePool(8_MiB);
  Open(kA);
  device_->Fail(Call::kAllocate, 1, 1, absl::InternalError("cudaMalloc failed"));
  const absl::Status status = pool_->Lease(kA, 2_MiB).status();
  EXPECT_EQ(status, absl::InternalError("cudaMalloc failed"));
  EXPECT_EQ(SegmentRefusalCause(status), std::nullopt);
  EXPECT_EQ(Account(kA).reserved_bytes, 0u);
}

TEST_F(SegmentPoolTest, FailedExportGivesTheSegmentBack) {
  MakePool(8_MiB, DeviceKind::kCuda);
  Open(kA);
  device_->Fail(Call::kExport, 1, 1, absl::InternalError("cudaIpcGetMemHandle failed"));
  EXPECT_EQ(pool_->Lease(kA, 2_MiB).status(), absl::InternalError("cudaIpcGetMemHandle failed"));
  EXPECT_EQ(device_->live_bytes(), 0u);
  EXPECT_EQ(Stats().charged_bytes, 0u);
  EXPECT_EQ(Stats().segments, 0u);
}

// A bit of everything that calls the driver. A lease may fail; whatever happens, the ledger must be right.
class SegmentPoolFaultTest : public SegmentPoolTest {
 protected:
  void LeaseOrNot(SessionId session, uint64_t bytes) {
    const AccountState before = Account(session);
    const uint64_t charged = Stats().charged_bytes;
    const absl::StatusOr<SegmentId> segment = pool_->Lease(session, bytes);
    const uint64_t change = segment.ok() ? bytes : 0;
    EXPECT_EQ(Account(session).reserved_bytes, before.reserved_bytes + change) << segment.status();
    EXPECT_EQ(Stats().charged_bytes, charged + change);
    if (segment.ok()) leased_.push_back({session, *segment});
    if (!segment.ok()) ++failures_;
    CheckLedger();
  }
  void GiveBackOne() {
    if (leased_.empty()) return;
    GiveBack(leased_.back().first, leased_.back().second);
    leased_.pop_back();
    CheckLedger();
  }
  void CheckLedger() {
    const PoolStats stats = Stats();
    EXPECT_EQ(stats.charged_bytes, Account(kA).reserved_bytes + Account(kB).reserved_bytes);
    EXPECT_LE(stats.charged_bytes + stats.idle_bytes, stats.capacity_bytes);
    EXPECT_EQ(stats.segments, leased_.size());
  }

  void Scenario() {
    leased_.clear();
    failures_ = 0;
    Open(kA, 12_MiB, kAnnUid);
    Open(kB, kPlenty, kBenUid);
    LeaseOrNot(kA, 2_MiB);
    LeaseOrNot(kA, 4_MiB);
    LeaseOrNot(kB, 6_MiB);
    GiveBackOne();
    LeaseOrNot(kA, 6_MiB);  // idle segments of B have to go
    GiveBackOne();
    LeaseOrNot(kB, 4_MiB);
    GiveBackOne();
    pool_->ReleaseIdleSince(std::chrono::steady_clock::now());
    LeaseOrNot(kB, 6_MiB);
    GiveBackOne();
    LeaseOrNot(kB, 6_MiB);  // from idle
    leased_.clear();
    pool_->CloseAccount(kA);
    pool_->CloseAccount(kB);
    pool_->ReleaseIdleSince(std::chrono::steady_clock::now());
    pool_->RetryFrees();
    const PoolStats end = Stats();
    EXPECT_EQ(end.charged_bytes, 0u);
    EXPECT_EQ(end.idle_bytes, 0u);
    EXPECT_EQ(end.reserved_bytes, 0u);
    EXPECT_EQ(end.segments, 0u);
    EXPECT_EQ(end.segment_allocs, end.segment_frees);
  }

  // Lets the first, the second, ... call of this kind fail, until none is left that could.
  void FailEach(Call call, int in_a_row, const absl::Status& status, DeviceKind kind, bool leases_fail) {
    for (int nth = 1;; ++nth) {
      SCOPED_TRACE(::testing::Message() << "call number " << nth << " fails " << in_a_row << " times");
      ASSERT_LT(nth, 100);
      MakePool(12_MiB, 64_MiB, kind);
      device_->Fail(call, nth, in_a_row, status);
      Scenario();
      if (device_->faults_fired() == 0) {
        EXPECT_EQ(failures_, 0);
        EXPECT_GT(nth, 3) << "the scenario has several such calls";
        break;
      }
      EXPECT_EQ(failures_ > 0, leases_fail);
      pool_.reset();
      EXPECT_EQ(device_->live_bytes(), 0u);
      EXPECT_EQ(device_->misuse(), "");
      if (HasFailure()) return;
    }
  }

  std::vector<std::pair<SessionId, SegmentId>> leased_;
  int failures_ = 0;
};

TEST_F(SegmentPoolFaultTest, ChargeIsRolledBackWhenTheDriverHasNoRoom) {
  FailEach(Call::kAllocate, 2, absl::ResourceExhaustedError("no room"), DeviceKind::kHost, true);
}

TEST_F(SegmentPoolFaultTest, OneRefusalOfTheDriverIsTriedAgain) {
  FailEach(Call::kAllocate, 1, absl::ResourceExhaustedError("no room"), DeviceKind::kHost, false);
}

TEST_F(SegmentPoolFaultTest, ChargeIsRolledBackWhenTheDriverBreaks) {
  FailEach(Call::kAllocate, 1, absl::InternalError("broken"), DeviceKind::kCuda, true);
}

TEST_F(SegmentPoolFaultTest, ChargeIsRolledBackWhenTheExportFails) {
  FailEach(Call::kExport, 1, absl::InternalError("broken"), DeviceKind::kCuda, true);
}

TEST_F(SegmentPoolFaultTest, FailedFreesDoNotUpsetTheLedger) {
  FailEach(Call::kFree, 1, absl::InternalError("broken"), DeviceKind::kHost, false);
}

TEST_F(SegmentPoolTest, WhatTheDriverRefusesToTakeBackIsTriedAgain) {
  MakePool(8_MiB);
  Open(kA);
  GiveBack(kA, Lease(kA, 4_MiB));
  device_->Fail(Call::kFree, 1, 2, absl::InternalError("broken"));
  EXPECT_EQ(pool_->ReleaseIdleSince(std::chrono::steady_clock::now()), 0u) << "what the driver has taken";
  EXPECT_EQ(Stats().reserved_bytes, 4_MiB) << "the driver still has it as ours";
  EXPECT_EQ(Stats().unfreed_bytes, 4_MiB);
  pool_->RetryFrees();
  EXPECT_EQ(Stats().reserved_bytes, 4_MiB);
  pool_->RetryFrees();
  EXPECT_EQ(Stats().reserved_bytes, 0u);
  EXPECT_EQ(Stats().unfreed_bytes, 0u);
  EXPECT_EQ(device_->live_bytes(), 0u);
  pool_->RetryFrees();
  EXPECT_EQ(device_->misuse(), "") << "freed once";
}

// ---- Waiting for the driver ----

TEST_F(SegmentPoolTest, CloseDuringALeaseAbortsItAndLeaksNothing) {
  MakePool(8_MiB);
  Open(kA);
  Gate& gate = device_->Hold(Call::kAllocate);
  absl::Status status;
  std::thread lease([&] { status = pool_->Lease(kA, 4_MiB).status(); });
  gate.AwaitArrivals(1);
  EXPECT_EQ(Account(kA).reserved_bytes, 4_MiB) << "charged while it is being obtained";
  EXPECT_EQ(Stats().reserved_bytes, 0u) << "the driver has not given it yet";
  EXPECT_EQ(pool_->CloseAccount(kA), 0u);
  EXPECT_EQ(Stats().charged_bytes, 4_MiB) << "still, or others could be promised the same bytes";
  gate.Open();
  lease.join();
  EXPECT_TRUE(absl::IsAborted(status)) << status;
  EXPECT_EQ(Stats().charged_bytes, 0u);
  EXPECT_EQ(Stats().reserved_bytes, 0u);
  EXPECT_EQ(Stats().idle_bytes, 0u);
  EXPECT_EQ(device_->live_bytes(), 0u);
}

TEST_F(SegmentPoolTest, CloseDuringAFailingLeaseRollsBack) {
  MakePool(8_MiB);
  Open(kA);
  Gate& gate = device_->Hold(Call::kAllocate);
  device_->Fail(Call::kAllocate, 1, 1, absl::InternalError("broken"));
  std::thread lease([&] { EXPECT_FALSE(pool_->Lease(kA, 4_MiB).ok()); });
  gate.AwaitArrivals(1);
  pool_->CloseAccount(kA);
  gate.Open();
  lease.join();
  EXPECT_EQ(Stats().charged_bytes, 0u);
}

TEST_F(SegmentPoolTest, NothingElseWaitsForTheDriver) {
  MakePool(kPlenty);
  Open(kA);
  Open(kB, kPlenty, kBenUid);
  const SegmentId held = Lease(kB, 2_MiB);
  GiveBack(kB, Lease(kB, 4_MiB));
  Gate& gate = device_->Hold(Call::kAllocate);
  std::thread lease([&] { Lease(kA, 2_MiB); });
  gate.AwaitArrivals(1);
  // The gate opens only after all this: were a lock held during the driver's call, the test would never end.
  EXPECT_EQ(Stats().charged_bytes, 4_MiB);
  EXPECT_EQ(pool_->SetLimit(kB, 16_MiB), absl::OkStatus());
  Lease(kB, 4_MiB);  // idle
  const FdTicket ticket = TicketFor(kB, held);
  EXPECT_TRUE(pool_->RedeemTicket(ticket, PidOf(kB), kBenUid).ok());
  EXPECT_EQ(pool_->ReleaseIdleSince(std::chrono::steady_clock::now()), 0u);
  GiveBack(kB, held);
  EXPECT_EQ(pool_->CloseAccount(kB), 4_MiB);
  gate.Open();
  lease.join();
}

TEST_F(SegmentPoolTest, CapacityCountsWhatIsBeingObtained) {
  MakePool(8_MiB);
  Open(kA);
  Open(kB);
  Gate& gate = device_->Hold(Call::kAllocate);
  std::thread lease([&] { Lease(kA, 6_MiB); });
  gate.AwaitArrivals(1);
  EXPECT_EQ(Refusal(kB, 4_MiB), OomCause::kCapacity);
  EXPECT_EQ(Refusal(kA, 4_MiB), OomCause::kCapacity);
  gate.Open();
  lease.join();
}

TEST_F(SegmentPoolTest, LeaseWaitsForFreesThatAreUnderWay) {
  MakePool(4_MiB);
  Open(kA);
  GiveBack(kA, Lease(kA, 4_MiB));
  Gate& gate = device_->Hold(Call::kFree);
  std::thread decay([&] { EXPECT_EQ(pool_->ReleaseIdleSince(std::chrono::steady_clock::now()), 4_MiB); });
  gate.AwaitArrivals(1);
  EXPECT_EQ(Stats().reserved_bytes, 4_MiB) << "still held from the driver";
  EXPECT_EQ(Stats().idle_bytes, 4_MiB) << "and by no session";
  std::thread lease([&] { Lease(kA, 2_MiB); });
  device_->AwaitRefusals(1);
  gate.Open();
  decay.join();
  lease.join();
  EXPECT_EQ(device_->live_bytes(), 2_MiB);
}

TEST_F(SegmentPoolTest, LeaseWaitsForNoMoreFreesThanItNeeds) {
  MakePool(8_MiB);
  Open(kA, kPlenty, kAnnUid);
  Open(kB, kPlenty, kBenUid);
  Lease(kA, 4_MiB);
  Lease(kA, 4_MiB);
  pool_->CloseAccount(kA);
  Gate& gate = device_->Hold(Call::kFree);
  std::thread first([&] { Lease(kB, 2_MiB); });  // gives up one of the two, more than it needs
  gate.AwaitArrivals(1);
  std::thread second([&] { Lease(kB, 2_MiB); });
  device_->AwaitRefusals(1);
  std::thread decay([&] { pool_->ReleaseIdleSince(std::chrono::steady_clock::now()); });
  gate.AwaitArrivals(2);
  gate.LetThrough(1);
  first.join();
  second.join();
  EXPECT_EQ(device_->frees(), 1) << "the other one is still held by the driver";
  gate.Open();
  decay.join();
}

// Many sessions at once. Were one to wait for another, not all would come to the gate, and the test would never end.
class SegmentPoolOverlapTest : public SegmentPoolTest {
 protected:
  static constexpr int kSessions = 32;

  // Session n of `tenant` leases a segment, for n from `first`: each on its own queue, as the daemon's sessions do.
  void LeaseAll(WorkerPool& workers, uint64_t first, uid_t tenant) {
    for (uint64_t n = first; n < first + kSessions; ++n) {
      Open(SessionId{n}, kPlenty, tenant);
      std::make_shared<SerialQueue>(&workers)->Submit([this, n] { Lease(SessionId{n}, 2_MiB); });
    }
  }
};

TEST_F(SegmentPoolOverlapTest, AllAreInTheDriverAtATime) {
  MakePool(kSessions * 2_MiB);
  Gate& gate = device_->Hold(Call::kAllocate);
  {
    WorkerPool workers(64);
    LeaseAll(workers, 1, kAnnUid);
    gate.AwaitArrivals(kSessions);
    EXPECT_EQ(Stats().charged_bytes, kSessions * 2_MiB);
    gate.Open();
  }
  EXPECT_EQ(Stats().segments, kSessions);
}

TEST_F(SegmentPoolOverlapTest, AllMakeRoomAtATime) {
  MakePool(kSessions * 2_MiB);
  {
    WorkerPool workers(64);
    LeaseAll(workers, 1, kAnnUid);
  }
  for (uint64_t n = 1; n <= kSessions; ++n) pool_->CloseAccount(SessionId{n});
  Gate& frees = device_->Hold(Call::kFree);
  Gate& allocations = device_->Hold(Call::kAllocate);
  {
    WorkerPool workers(64);
    LeaseAll(workers, 1000, kBenUid);
    frees.AwaitArrivals(kSessions);
    EXPECT_EQ(Stats().idle_bytes, 0u);
    EXPECT_EQ(Stats().charged_bytes, kSessions * 2_MiB);
    EXPECT_EQ(Stats().reserved_bytes, kSessions * 2_MiB) << "what is being freed, not what is yet to be obtained";
    frees.Open();
    allocations.AwaitArrivals(kSessions);
    allocations.Open();
  }
  EXPECT_EQ(Stats().segments, kSessions);
  EXPECT_EQ(device_->peak_bytes(), kSessions * 2_MiB);
}

// ---- Handles and tickets ----

TEST_F(SegmentPoolTest, CudaSegmentsAreOpenedByTheirIpcHandle) {
  MakePool(kPlenty, DeviceKind::kCuda);
  Open(kA);
  const SegmentId a = Lease(kA, 2_MiB);
  const SegmentId b = Lease(kA, 2_MiB);
  const WireHandle handle = pool_->HandleFor(kA, a).value();
  ASSERT_TRUE(std::holds_alternative<CudaIpcHandle>(handle));
  EXPECT_EQ(pool_->HandleFor(kA, a).value(), handle);
  EXPECT_NE(pool_->HandleFor(kA, b).value(), handle);
  EXPECT_EQ(device_->allocations(), 2);
  GiveBack(kA, a);
  const SegmentId again = Lease(kA, 2_MiB);
  EXPECT_EQ(pool_->HandleFor(kA, again).value(), handle) << "an idle segment keeps its handle";
}

TEST_F(SegmentPoolTest, HandlesAreForTheHolderOnly) {
  MakePool(kPlenty);
  Open(kA);
  Open(kB);
  const SegmentId segment = Lease(kA, 2_MiB);
  EXPECT_TRUE(absl::IsNotFound(pool_->HandleFor(kB, segment).status()));
  EXPECT_TRUE(absl::IsNotFound(pool_->HandleFor(kA, SegmentId{999}).status()));
  EXPECT_TRUE(pool_->HandleFor(kA, segment).ok());
}

TEST_F(SegmentPoolTest, TicketIsGoodOnce) {
  MakePool(kPlenty);
  Open(kA);
  const SegmentId segment = Lease(kA, 2_MiB);
  const FdTicket ticket = TicketFor(kA, segment);
  EXPECT_EQ(TicketFor(kA, segment), ticket) << "one ticket a segment";
  const absl::StatusOr<UniqueFd> fd = pool_->RedeemTicket(ticket, PidOf(kA), kAnnUid);
  ASSERT_TRUE(fd.ok()) << fd.status();
  EXPECT_TRUE(fd->valid());
  EXPECT_TRUE(absl::IsNotFound(pool_->RedeemTicket(ticket, PidOf(kA), kAnnUid).status()));
  const FdTicket next = TicketFor(kA, segment);
  EXPECT_NE(next, ticket);
  EXPECT_TRUE(pool_->RedeemTicket(next, PidOf(kA), kAnnUid).ok());
}

TEST_F(SegmentPoolTest, TicketIsForItsProcessAndUser) {
  MakePool(kPlenty);
  Open(kA, kPlenty, kAnnUid);
  Open(kB, kPlenty, kBenUid);
  const FdTicket ticket = TicketFor(kA, Lease(kA, 2_MiB));
  EXPECT_TRUE(absl::IsPermissionDenied(pool_->RedeemTicket(ticket, PidOf(kB), kAnnUid).status()));
  EXPECT_TRUE(absl::IsPermissionDenied(pool_->RedeemTicket(ticket, PidOf(kA), kBenUid).status()));
  EXPECT_TRUE(absl::IsPermissionDenied(pool_->RedeemTicket(ticket, PidOf(kA), 0).status())) << "root neither";
  EXPECT_TRUE(pool_->RedeemTicket(ticket, PidOf(kA), kAnnUid).ok()) << "the attempts of others do not use it up";
}

TEST_F(SegmentPoolTest, UnknownTicketIsNoTicket) {
  MakePool(kPlenty);
  Open(kA);
  FdTicket ticket = TicketFor(kA, Lease(kA, 2_MiB));
  ticket[15] = static_cast<char>(ticket[15] ^ 1);
  EXPECT_TRUE(absl::IsNotFound(pool_->RedeemTicket(ticket, PidOf(kA), kAnnUid).status()));
  EXPECT_TRUE(absl::IsNotFound(pool_->RedeemTicket(FdTicket{}, PidOf(kA), kAnnUid).status()));
}

TEST_F(SegmentPoolTest, TicketIsVoidWhenTheSegmentIsReturned) {
  MakePool(kPlenty);
  Open(kA);
  const SegmentId segment = Lease(kA, 2_MiB);
  const FdTicket ticket = TicketFor(kA, segment);
  GiveBack(kA, segment);
  EXPECT_TRUE(absl::IsNotFound(pool_->RedeemTicket(ticket, PidOf(kA), kAnnUid).status()));
  Lease(kA, 2_MiB);
  EXPECT_TRUE(absl::IsNotFound(pool_->RedeemTicket(ticket, PidOf(kA), kAnnUid).status()))
      << "nor when it is leased anew";
}

TEST_F(SegmentPoolTest, TicketIsVoidWhenTheAccountIsClosed) {
  MakePool(kPlenty);
  Open(kA);
  const FdTicket ticket = TicketFor(kA, Lease(kA, 2_MiB));
  pool_->CloseAccount(kA);
  EXPECT_TRUE(absl::IsNotFound(pool_->RedeemTicket(ticket, PidOf(kA), kAnnUid).status()));
}

TEST_F(SegmentPoolTest, TicketSurvivesAFailedExport) {
  MakePool(kPlenty);
  Open(kA);
  const FdTicket ticket = TicketFor(kA, Lease(kA, 2_MiB));
  device_->Fail(Call::kExport, 1, 1, absl::InternalError("fcntl failed"));
  EXPECT_EQ(pool_->RedeemTicket(ticket, PidOf(kA), kAnnUid).status(), absl::InternalError("fcntl failed"));
  EXPECT_TRUE(pool_->RedeemTicket(ticket, PidOf(kA), kAnnUid).ok());
}

TEST_F(SegmentPoolTest, TicketsDiffer) {
  MakePool(kPlenty);
  Open(kA);
  std::set<FdTicket> tickets;
  for (int i = 0; i < 100; ++i) tickets.insert(TicketFor(kA, Lease(kA, 2_MiB)));
  EXPECT_EQ(tickets.size(), 100u);
}

// ---- What dead processes leave ----

// A descriptor on its way through a socket is in no table: a process that gets it later could write to the next one's
// segment.
TEST_F(SegmentPoolTest, WhatADeadProcessCouldOpenIsHandedToNobody) {
  MakePool(kPlenty);
  Open(kA);
  const FdTicket ticket = TicketFor(kA, Lease(kA, 2_MiB));
  ASSERT_TRUE(pool_->RedeemTicket(ticket, PidOf(kA), kAnnUid).ok());
  Lease(kA, 4_MiB);  // it never had what opens this one
  pool_->CloseAccountOfGone(kA);
  EXPECT_EQ(Stats().quarantined_bytes, 2_MiB);
  EXPECT_EQ(Stats().idle_bytes, 4_MiB);
  Gate& gate = device_->Hold(Call::kFree);
  std::thread check([&] { pool_->CheckQuarantine(); });
  gate.AwaitArrivals(1);
  EXPECT_EQ(Stats().quarantined_bytes, 0u);
  EXPECT_EQ(Stats().idle_bytes, 6_MiB) << "reserved memory is somewhere, also on its way to the driver";
  EXPECT_EQ(Stats().reserved_bytes, 6_MiB);
  gate.Open();
  check.join();
  EXPECT_EQ(Stats().idle_bytes, 4_MiB);
  EXPECT_EQ(Stats().segment_frees, 1u) << "it went back to the driver";
  Open(kB);
  Lease(kB, 2_MiB);
  EXPECT_EQ(Stats().handovers, 0u);
  Lease(kB, 4_MiB);
  EXPECT_EQ(Stats().handovers, 1u);
}

// ---- Bytes of others ----

TEST_F(SegmentPoolTest, NewMemoryIsZeroedOnceItMayBeAnotherTenants) {
  MakePool(16_MiB, DeviceKind::kCuda);
  constexpr uid_t kBob = 2000;
  Open(kA);
  Open(kB);
  Open(kC, kPlenty, kBob);
  const auto comes_and_goes = [&](SessionId session) {
    const uint64_t before = device_->zeroed_bytes();
    GiveBack(session, Lease(session, 4_MiB));
    pool_->ReleaseIdleSince(SteadyTime::max());
    return device_->zeroed_bytes() - before;
  };
  EXPECT_EQ(comes_and_goes(kA), 0u) << "the driver has cleared it";
  EXPECT_EQ(comes_and_goes(kB), 0u) << "of the same tenant";
  EXPECT_EQ(comes_and_goes(kC), 4_MiB);
  EXPECT_EQ(comes_and_goes(kA), 4_MiB);
  EXPECT_EQ(comes_and_goes(kA), 4_MiB) << "the driver may give what Bob had";
  // What is idle is handed on within a tenant as it is.
  GiveBack(kA, Lease(kA, 4_MiB));
  const uint64_t before = device_->zeroed_bytes();
  Lease(kB, 4_MiB);
  EXPECT_EQ(device_->zeroed_bytes(), before);
}

TEST_F(SegmentPoolTest, WhatADeadProcessLeftIsAnotherTenants) {
  MakePool(16_MiB, DeviceKind::kCuda);
  Open(kA);
  Lease(kA, 4_MiB);
  ASSERT_TRUE(pool_->HandleFor(kA, SegmentId{1}).ok());
  pool_->CloseAccountOfGone(kA);
  pool_->CheckQuarantine();
  ASSERT_EQ(Stats().quarantined_bytes, 0u);
  Open(kB, kPlenty, /*tenant=*/2000);
  Lease(kB, 4_MiB);
  EXPECT_EQ(device_->zeroed_bytes(), 4_MiB);
}

// ---- What explains a refusal ----

TEST_F(SegmentPoolTest, ALookHasSessionUserAndDevice) {
  MakePool(64_MiB);
  Open(kA);
  Open(kB);
  Open(kC, kPlenty, kBenUid);
  Lease(kA, 20_MiB);
  Lease(kB, 10_MiB);
  Lease(kC, 4_MiB);
  const PoolLook look = pool_->LookFor(kA, /*with_accounts=*/true);
  EXPECT_EQ(look.account.reserved_bytes, 20_MiB);
  EXPECT_EQ(look.account.segments, 1u);
  EXPECT_EQ(look.share.used_bytes, 30_MiB) << "with B's";
  EXPECT_EQ(look.stats.charged_bytes, 34_MiB);
  EXPECT_FALSE(look.is_held_back);
  ASSERT_EQ(look.accounts.size(), 3u);
  EXPECT_EQ(look.accounts.at(kC).reserved_bytes, 4_MiB);
  EXPECT_TRUE(pool_->LookFor(kA, /*with_accounts=*/false).accounts.empty());
}

TEST_F(SegmentPoolTest, ALookSaysThatMemoryIsHeldBack) {
  MakePool(64_MiB);
  Open(kA);
  pool_->HoldBack(Ledger::Held{.priority = 0, .bytes = 64_MiB});
  EXPECT_TRUE(pool_->LookFor(kA, /*with_accounts=*/false).is_held_back);
  pool_->HoldBack(std::nullopt);
  EXPECT_FALSE(pool_->LookFor(kA, /*with_accounts=*/false).is_held_back);
}

TEST_F(SegmentPoolTest, ALookForNobodyStillShowsTheDevice) {
  MakePool(64_MiB);
  Open(kA);
  Lease(kA, 20_MiB);
  const PoolLook look = pool_->LookFor(kB, /*with_accounts=*/true);
  EXPECT_EQ(look.account.limit_bytes, 0u);
  EXPECT_FALSE(look.is_held_back);
  EXPECT_EQ(look.stats.charged_bytes, 20_MiB);
  EXPECT_EQ(look.accounts.size(), 1u);
}

// The daemon stops: what a process could open it keeps, and nobody is told that it is free.
TEST_F(SegmentPoolTest, WhatAProcessKeepsWhenTheDaemonStopsIsNotCached) {
  MakePool(64_MiB);
  Open(kA);
  (void)TicketFor(kA, Lease(kA, 20_MiB));
  const FdTicket opened = TicketFor(kA, Lease(kA, 10_MiB));
  EXPECT_TRUE(pool_->RedeemTicket(opened, PidOf(kA), kAnnUid).ok());
  ASSERT_TRUE(pool_->ChargeCounted(kA, 6_MiB).ok());
  pool_->Seal();
  const SegmentPool::Closed closed = pool_->CloseAccountOfHolder(kA);
  EXPECT_EQ(closed.came_back, 20_MiB) << "it had no way to open it";
  EXPECT_EQ(closed.still_held, 16_MiB);
  EXPECT_EQ(Stats().idle_bytes, 20_MiB);
  EXPECT_EQ(Stats().quarantined_bytes, 10_MiB);
  EXPECT_EQ(Stats().carried_over_bytes, 6_MiB);
  EXPECT_EQ(Stats().charged_bytes, 16_MiB);
  EXPECT_EQ(Stats().free_bytes, 48_MiB);
}

}  // namespace
}  // namespace vrambroker
