// SPDX-License-Identifier: Apache-2.0
#include "server/pool/segment_pool.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <optional>
#include <set>
#include <thread>
#include <utility>
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
  // An idle segment keeps its tenant even after its last holder is gone.
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
  std::optional<IdleDecay> decay(std::in_place, pool_.get(), std::chrono::hours(1));
  for (int i = 0; i < 5; ++i) Lease(kA, 2_MiB);
  pool_->CloseAccount(kA);
  device_->AwaitFrees(4);
  decay.reset();  // the pool knows of the frees once the decay thread has ended
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
  // A lease takes the segment, and puts the segment back in its place.
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

// ---- Memory that dead processes leave ----

// A descriptor on its way through a socket is in no table: a later receiver could write to the next holder's segment.
TEST_F(SegmentPoolTest, WhatADeadProcessCouldOpenIsHandedToNobody) {
  MakePool(kPlenty);
  Open(kA);
  const FdTicket ticket = TicketFor(kA, Lease(kA, 2_MiB));
  ASSERT_TRUE(pool_->RedeemTicket(ticket, PidOf(kA), kAnnUid).ok());
  Lease(kA, 4_MiB);  // the process never had a descriptor of this segment
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

// ---- Contents of other tenants' memory ----

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
  // Idle memory passes on within a tenant unchanged.
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

// ---- Looks that explain a refusal ----

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

// The daemon stops: a process keeps memory that the process could open, and the pool does not report such memory as
// free.
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
