// SPDX-License-Identifier: Apache-2.0
//
// Tests of SegmentPool with a driver that refuses or takes its time.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "allocator/base/bytes.h"
#include "server/base/worker_pool.h"
#include "server/pool/idle_decay.h"
#include "server/pool/segment_pool.h"
#include "tests/support/fake_device.h"
#include "tests/unit/server/pool/segment_pool_fixture.h"

namespace vrambroker {
namespace {

using Call = FakeDevice::Call;

// ---- Refusals of the driver ----

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
  // The capacity leaves 4 MiB, but a program outside the broker has taken the memory.
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
  // A call for several segments fails at a segment: segments that the driver gave stay for the next try, and the pool
  // awaits no segment.
  for (const int failing : {1, 2}) {
    device_->Fail(Call::kAllocate, failing, 1, absl::InternalError("cudaMalloc failed"));
    EXPECT_FALSE(pool_->LeaseAll(kA, {2_MiB, 4_MiB}).ok());
    EXPECT_EQ(Account(kA).reserved_bytes, 0u);
    EXPECT_EQ(Stats().charged_bytes, 0u);
    EXPECT_EQ(Stats().reserved_bytes, failing == 1 ? 0u : 2_MiB);
    EXPECT_EQ(Stats().idle_bytes, Stats().reserved_bytes);
  }
  // Earlier idle segments stay, too.
  device_->Fail(Call::kAllocate, 1, 1, absl::InternalError("cudaMalloc failed"));
  EXPECT_FALSE(pool_->LeaseAll(kA, {2_MiB, 4_MiB}).ok());
  EXPECT_EQ(Stats().idle_bytes, 2_MiB);
  EXPECT_EQ(Stats().reserved_bytes, 2_MiB);
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

// Makes each kind of call to the driver. A lease may fail; the ledger must be right in any case.
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
    LeaseOrNot(kA, 6_MiB);  // idle segments of B must go
    GiveBackOne();
    LeaseOrNot(kB, 4_MiB);
    GiveBackOne();
    pool_->ReleaseIdleSince(std::chrono::steady_clock::now());
    LeaseOrNot(kB, 6_MiB);
    GiveBackOne();
    LeaseOrNot(kB, 6_MiB);  // takes an idle segment
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

  // Lets the first, the second, ... call of a kind fail, until no further call is left to fail.
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
  // The gate opens only after these calls: a lock held during the driver's call would block the test for ever.
  EXPECT_EQ(Stats().charged_bytes, 4_MiB);
  EXPECT_EQ(pool_->SetLimit(kB, 16_MiB), absl::OkStatus());
  Lease(kB, 4_MiB);  // takes an idle segment
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

TEST_F(SegmentPoolTest, AFreedSegmentWhosePlaceIsLeasedCountsOnce) {
  MakePool(4_MiB);
  Open(kA);
  GiveBack(kA, Lease(kA, 4_MiB));
  Gate& gate = device_->Hold(Call::kFreed);
  std::thread decay([&] { EXPECT_EQ(pool_->ReleaseIdleSince(std::chrono::steady_clock::now()), 4_MiB); });
  gate.AwaitArrivals(1);
  Lease(kA, 4_MiB);
  EXPECT_EQ(Stats().charged_bytes, 4_MiB);
  EXPECT_EQ(Stats().idle_bytes, 0u) << "the pool has not heard yet that the driver has freed it";
  gate.Open();
  decay.join();
}

TEST_F(SegmentPoolTest, LeaseWaitsForNoMoreFreesThanItNeeds) {
  MakePool(8_MiB);
  Open(kA, kPlenty, kAnnUid);
  Open(kB, kPlenty, kBenUid);
  Lease(kA, 4_MiB);
  Lease(kA, 4_MiB);
  pool_->CloseAccount(kA);
  Gate& gate = device_->Hold(Call::kFree);
  std::thread first([&] { Lease(kB, 2_MiB); });  // frees one of the two segments, more than the lease needs
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

// Many sessions lease at once. A session that waited for another would never reach the gate, and the test would never
// end.
class SegmentPoolOverlapTest : public SegmentPoolTest {
 protected:
  static constexpr int kSessions = 32;

  // Leases a segment for each session n of `tenant`, beginning with `first`. Each session has its own queue, as in the
  // daemon.
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

}  // namespace
}  // namespace vrambroker
