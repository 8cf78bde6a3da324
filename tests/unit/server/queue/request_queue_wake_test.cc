// SPDX-License-Identifier: Apache-2.0
//
// Wake-ups: each change that makes room for a request causes one pass, which serves the request. No timer runs: a
// request without a wake-up waits for ever.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "allocator/base/bytes.h"
#include "server/pool/segment_refusal.h"
#include "server/queue/request_queue.h"
#include "tests/support/fake_device.h"

namespace vrambroker {
namespace {

class WakeTest : public ::testing::Test {
 protected:
  static constexpr SessionId kWaiter{1};
  static constexpr SessionId kHolder{2};
  static constexpr SessionId kOther{3};
  static constexpr ClaimId kClaim{7};
  static constexpr uid_t kUser = 1000;
  static constexpr uint64_t kCapacity = 64_MiB;
  static constexpr ProcessId kEarlier{.pid = 1, .started = 5};

  explicit WakeTest(DeviceKind kind = DeviceKind::kHost, SegmentPoolOptions options = {}) {
    auto device = std::make_unique<FakeDevice>(kCapacity, kind);
    device_ = device->control();
    options.clock = [this] { return now_; };
    pool_ = std::make_unique<SegmentPool>(std::move(device), kCapacity, &next_segment_, std::move(options));
    queue_ = std::make_unique<RequestQueue>(
        pool_.get(), RequestQueueOptions{},
        RequestQueueHooks{.clock = [this] { return now_; },
                          .candidates = [] { return std::vector<ReclaimCandidate>(); },
                          .ask = [](const ReclaimVictim&, const std::function<void()>& answered) { answered(); },
                          .run = [this](std::function<void()> task) { tasks_.push_back(std::move(task)); }});
    pool_->SetOnCapacityFreed([this] { queue_->OnCapacityFreed(); });
    Open(kHolder);
    Open(kOther);
  }
  ~WakeTest() override { pool_->SetOnCapacityFreed(nullptr); }

  void Open(SessionId session, AccountTerms terms = {}) {
    terms.pid = static_cast<pid_t>(100 + Raw(session));
    terms.uid = kUser;
    terms.tenant = "d";
    terms.limit_bytes = kCapacity;
    pool_->OpenAccount(session, terms);
  }
  SegmentId Hold(SessionId session, uint64_t bytes) { return pool_->Lease(session, bytes).value(); }
  void RunAll() {
    while (!tasks_.empty()) {
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      task();
    }
  }
  // Adds a request, which asks every session and then waits.
  void Wait(const AccountTerms& terms = {}, uint64_t bytes = 8_MiB) {
    Open(kWaiter, terms);
    queue_->Add({.session = kWaiter,
                 .user = kUser,
                 .bytes = bytes,
                 .deadline = now_ + std::chrono::hours(1),
                 .done = [this](const absl::Status& status, const WaitRecord&) { answer_ = status; }});
    RunAll();
    ASSERT_FALSE(answer_.has_value()) << *answer_;
  }
  // Expects a single pass from the last change, and that the pass serves the request.
  void ExpectServed() {
    ASSERT_EQ(tasks_.size(), 1u) << "nobody is woken";
    EXPECT_FALSE(answer_.has_value()) << "by a pass of its own";
    RunAll();
    ASSERT_TRUE(answer_.has_value());
    EXPECT_EQ(*answer_, absl::OkStatus());
  }
  void ExpectRefused(std::optional<OomCause> cause) {
    ASSERT_EQ(tasks_.size(), 1u) << "nobody looks at it";
    RunAll();
    ASSERT_TRUE(answer_.has_value());
    EXPECT_FALSE(answer_->ok());
    EXPECT_EQ(SegmentRefusalCause(*answer_), cause) << *answer_;
  }

  SteadyTime now_{std::chrono::hours(1)};
  std::atomic<uint64_t> next_segment_ = 1;
  std::shared_ptr<FakeDevice::Control> device_;
  std::deque<std::function<void()>> tasks_;
  std::optional<absl::Status> answer_;
  std::unique_ptr<SegmentPool> pool_;
  std::unique_ptr<RequestQueue> queue_;
};

// ---- Guarantees and limits ----

TEST_F(WakeTest, ALowerGuarantee) {
  ASSERT_TRUE(pool_->SetGuarantee(kHolder, 40_MiB).ok());
  Hold(kOther, 20_MiB);
  Wait();
  ASSERT_TRUE(pool_->SetGuarantee(kHolder, 30_MiB).ok());
  ExpectServed();
}

TEST_F(WakeTest, ALowerGuaranteeOfAClaim) {
  pool_->SetClaimLimit(kClaim, 40_MiB);
  ASSERT_TRUE(pool_->SetClaimGuarantee(kClaim, 40_MiB).ok());
  Hold(kOther, 20_MiB);
  Wait();
  ASSERT_TRUE(pool_->SetClaimGuarantee(kClaim, 30_MiB).ok());
  ExpectServed();
}

TEST_F(WakeTest, AClaimThatIsRemoved) {
  pool_->SetClaimLimit(kClaim, 40_MiB);
  ASSERT_TRUE(pool_->SetClaimGuarantee(kClaim, 40_MiB).ok());
  Hold(kOther, 20_MiB);
  Wait();
  pool_->CloseClaim(kClaim);
  ExpectServed();
}

TEST_F(WakeTest, AHigherLimitOfItsClaim) {
  pool_->SetClaimLimit(kClaim, 20_MiB);
  constexpr SessionId kSibling{4};
  Open(kSibling, {.claim = kClaim});
  Hold(kSibling, 16_MiB);
  Wait({.claim = kClaim});
  pool_->SetClaimLimit(kClaim, 24_MiB);
  ExpectServed();
}

// Guarantees may forbid a request for good: the request then ends.
TEST_F(WakeTest, AGuaranteeThatLeavesNoRoomForItEver) {
  Hold(kHolder, 30_MiB);
  Wait({}, 40_MiB);
  ASSERT_TRUE(pool_->SetGuarantee(kOther, 30_MiB).ok());
  queue_->OnTimer();
  ExpectRefused(OomCause::kCapacity);
}

TEST_F(WakeTest, AClaimsGuaranteeThatLeavesNoRoomForItEver) {
  pool_->SetClaimLimit(kClaim, 40_MiB);
  Hold(kHolder, 30_MiB);
  Wait({}, 40_MiB);
  ASSERT_TRUE(pool_->SetClaimGuarantee(kClaim, 30_MiB).ok());
  ExpectRefused(OomCause::kCapacity);
}

TEST_F(WakeTest, ALowerLimitOfItsOwn) {
  Hold(kHolder, 60_MiB);
  Wait();
  ASSERT_TRUE(pool_->SetLimit(kWaiter, 4_MiB).ok());
  ExpectRefused(OomCause::kLimit);
}

// ---- Memory that sessions give back ----

TEST_F(WakeTest, AGrantThatIsGivenUp) {
  ASSERT_TRUE(pool_->Grant(kHolder, 60_MiB).ok());
  Wait();
  pool_->ReleaseGrant(kHolder, 60_MiB);
  ExpectServed();
}

TEST_F(WakeTest, ASegmentThatIsReturned) {
  const SegmentId segment = Hold(kHolder, 60_MiB);
  Wait();
  ASSERT_TRUE(pool_->Return(kHolder, {segment}).ok());
  ExpectServed();
}

TEST_F(WakeTest, ASegmentThatWasAskedFor) {
  const SegmentId segment = Hold(kHolder, 60_MiB);
  Wait();
  pool_->MarkReturning(kHolder, {segment});
  pool_->FinishReturning(kHolder, {segment});
  ExpectServed();
}

TEST_F(WakeTest, ASegmentThatAResumedSessionHasNoMore) {
  Hold(kHolder, 60_MiB);
  Wait();
  pool_->ReturnAllBut(kHolder, {});
  ExpectServed();
}

TEST_F(WakeTest, ASessionThatIsClosed) {
  Hold(kHolder, 60_MiB);
  Wait();
  pool_->CloseAccount(kHolder);
  ExpectServed();
}

TEST_F(WakeTest, AProcessThatHasEnded) {
  Hold(kHolder, 60_MiB);
  Wait();
  pool_->CloseAccountOfGone(kHolder);
  ExpectServed();
}

TEST_F(WakeTest, CountedMemoryThatIsGivenBack) {
  ASSERT_TRUE(pool_->TryChargeCounted(kHolder, 60_MiB).ok());
  Wait();
  ASSERT_TRUE(pool_->UnchargeCounted(kHolder, 6_MiB).ok());
  ExpectServed();
}

// A request may have found no room during the attempt to lease.
TEST_F(WakeTest, ALeaseThatFails) {
  Gate& gate = device_->Hold(FakeDevice::Call::kAllocate);
  device_->Fail(FakeDevice::Call::kAllocate, 1, 1, absl::InternalError("no"));
  std::thread leasing([&] { EXPECT_FALSE(pool_->Lease(kHolder, 60_MiB).ok()); });
  gate.AwaitArrivals(1);
  Wait();
  gate.Open();
  leasing.join();
  ExpectServed();
}

// ---- Memory of processes that are gone, or come back ----

TEST_F(WakeTest, WhatWasInQuarantine) {
  const SegmentId segment = Hold(kHolder, 60_MiB);
  const FdTicket ticket = std::get<FdTicket>(pool_->HandleFor(kHolder, segment).value());
  ASSERT_TRUE(pool_->RedeemTicket(ticket, static_cast<pid_t>(100 + Raw(kHolder)), kUser).ok());
  pool_->CloseAccountOfGone(kHolder);
  Wait();
  now_ = pool_->NextQuarantineCheck().value();
  pool_->CheckQuarantine();
  ExpectServed();
}

TEST_F(WakeTest, WhatAProcessOfTheRunBeforeHasClosed) {
  device_->Leave({{.file_device = 1, .file_inode = 1, .bytes = 60_MiB, .holders = {kEarlier}, .holder_uid = 7}});
  ASSERT_TRUE(pool_->FindCarriedOver().ok());
  Wait();
  device_->Leave({});
  ASSERT_TRUE(pool_->FindCarriedOver().ok());
  RunAll();
  EXPECT_FALSE(answer_.has_value()) << "a look may miss it once";
  ASSERT_TRUE(pool_->FindCarriedOver().ok());
  ExpectServed();
}

TEST_F(WakeTest, WhatAClientSaysItHasClosed) {
  ASSERT_TRUE(pool_->DeclareCarriedOver(kHolder, {{.id = 1, .bytes = 60_MiB}}).ok());
  Wait();
  pool_->FreeCarriedOver(kHolder, {1});
  ExpectServed();
}

TEST_F(WakeTest, WhatAClientDeclaresNoMore) {
  ASSERT_TRUE(pool_->DeclareCarriedOver(kHolder, {{.id = 1, .bytes = 60_MiB}}).ok());
  Wait();
  ASSERT_TRUE(pool_->DeclareCarriedOver(kHolder, {}, /*begins=*/true, /*ends=*/true).ok());
  ExpectServed();
}

TEST_F(WakeTest, WhatIsAClaimsAndNoMoreItsUsers) {
  device_->Leave({{.file_device = 1, .file_inode = 1, .bytes = 16_MiB, .holders = {kEarlier}, .holder_uid = kUser}});
  ASSERT_TRUE(pool_->FindCarriedOver().ok());
  Wait({.user_limit_bytes = 20_MiB});
  pool_->SetClaimLimit(kClaim, 40_MiB);
  RunAll();
  ASSERT_FALSE(answer_.has_value());
  pool_->ChargeCarriedOver(kClaim, {kEarlier});
  ExpectServed();
}

// ---- Memory of the driver ----

TEST_F(WakeTest, ADeviceThatBreaks) {
  Hold(kHolder, 60_MiB);
  Wait();
  device_->set_free_bytes_error(absl::InternalError("fell off the bus"));
  EXPECT_FALSE(pool_->UpdateHealth().ok());
  ExpectRefused(std::nullopt);
  device_->set_free_bytes_error(absl::OkStatus());
}

// Programs beside the broker take GPU memory that the broker cannot give.
class WakeOnCudaTest : public WakeTest {
 protected:
  explicit WakeOnCudaTest(uint64_t headroom_bytes = 0)
      : WakeTest(DeviceKind::kCuda, {.headroom_bytes = headroom_bytes}) {}

  void LetOthersUse(uint64_t bytes) {
    device_->set_foreign_bytes(bytes);
    ASSERT_TRUE(pool_->UpdateHealth().ok());
  }
};

TEST_F(WakeOnCudaTest, WhatOthersUseNoMore) {
  ASSERT_TRUE(pool_->FindCarriedOver().ok());
  LetOthersUse(60_MiB);
  Wait();
  LetOthersUse(40_MiB);
  ExpectServed();
}

TEST_F(WakeOnCudaTest, WhatOthersAreFoundToUseNoMoreByOneWhoAsks) {
  ASSERT_TRUE(pool_->FindCarriedOver().ok());
  LetOthersUse(60_MiB);
  Wait();
  device_->set_foreign_bytes(40_MiB);
  ASSERT_TRUE(pool_->ChargeCounted(kOther, 6_MiB).ok());
  ExpectServed();
}

// The pool keeps memory free for the next client's context: as much as clients' contexts take on average.
class WakeWithContextsTest : public WakeOnCudaTest {
 protected:
  WakeWithContextsTest() : WakeOnCudaTest(/*headroom_bytes=*/10_MiB) {}
};

TEST_F(WakeWithContextsTest, SmallerContextsThanItSeemed) {
  ASSERT_TRUE(pool_->FindCarriedOver().ok());
  LetOthersUse(20_MiB);
  Hold(kHolder, 30_MiB);
  Wait();
  pool_->SetContexts(/*bytes=*/2_MiB, /*clients=*/1);
  ExpectServed();
}

TEST_F(WakeOnCudaTest, CountedMemoryThatIsGivenBack) {
  ASSERT_TRUE(pool_->FindCarriedOver().ok());
  ASSERT_TRUE(pool_->TryChargeCounted(kHolder, 60_MiB).ok());
  Wait();
  ASSERT_TRUE(pool_->UnchargeCounted(kHolder, 60_MiB).ok());
  ExpectServed();
}

}  // namespace
}  // namespace vrambroker
