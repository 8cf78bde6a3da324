// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_TESTS_UNIT_SERVER_POOL_SEGMENT_POOL_FIXTURE_H_
#define VRAMBROKER_TESTS_UNIT_SERVER_POOL_SEGMENT_POOL_FIXTURE_H_

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "server/pool/segment_pool.h"
#include "server/pool/segment_refusal.h"
#include "tests/support/fake_device.h"

namespace vrambroker {

// Makes a pool over a fake device. The device has all memory back at the end.
class SegmentPoolTest : public ::testing::Test {
 protected:
  static constexpr SessionId kA{1};
  static constexpr SessionId kB{2};
  static constexpr SessionId kC{3};
  static constexpr uid_t kAnnUid = 1001;
  static constexpr uid_t kBenUid = 1002;
  static constexpr uint64_t kPlenty = 1_GiB;

  // Makes a pool over a device of exactly the pool's capacity: the device notices a pool that takes more.
  void MakePool(uint64_t capacity, DeviceKind kind = DeviceKind::kHost) { MakePool(capacity, capacity, kind); }
  void MakePool(uint64_t capacity, uint64_t device_bytes, DeviceKind kind,
                uint64_t idle_limit = SegmentPoolOptions::kNoIdleLimit) {
    auto device = std::make_unique<FakeDevice>(device_bytes, kind);
    device_ = device->control();
    pool_ = std::make_unique<SegmentPool>(
        std::move(device), capacity, &next_segment_,
        SegmentPoolOptions{.idle_limit_bytes = idle_limit, .free_timeout = std::chrono::minutes(1)});
  }
  // Opens an account. Session n has pid 100 + n.
  void Open(SessionId session, uint64_t limit = kPlenty, uid_t tenant = kAnnUid) {
    pool_->OpenAccount(
        session, {.pid = PidOf(session), .uid = tenant, .tenant = absl::StrCat("uid:", tenant), .limit_bytes = limit});
  }
  static pid_t PidOf(SessionId session) { return static_cast<pid_t>(100 + Raw(session)); }

  SegmentId Lease(SessionId session, uint64_t bytes) {
    absl::StatusOr<SegmentId> segment = pool_->Lease(session, bytes);
    EXPECT_TRUE(segment.ok()) << segment.status();
    return segment.value_or(SegmentId{});
  }
  std::optional<OomCause> Refusal(SessionId session, uint64_t bytes) {
    const absl::StatusOr<SegmentId> segment = pool_->Lease(session, bytes);
    EXPECT_FALSE(segment.ok());
    return SegmentRefusalCause(segment.status());
  }
  AccountState Account(SessionId session) { return pool_->GetAccount(session).value_or(AccountState()); }
  PoolStats Stats() { return pool_->GetStats(); }
  FdTicket TicketFor(SessionId session, SegmentId segment) {
    absl::StatusOr<WireHandle> handle = pool_->HandleFor(session, segment);
    EXPECT_TRUE(handle.ok()) << handle.status();
    return handle.ok() ? std::get<FdTicket>(*handle) : FdTicket{};
  }
  void GiveBack(SessionId session, SegmentId segment) {
    pool_->MarkReturning(session, {segment});
    pool_->FinishReturning(session, {segment});
  }

  void TearDown() override {
    pool_.reset();
    if (device_ == nullptr) return;
    EXPECT_EQ(device_->live_bytes(), 0u) << "leaked";
    EXPECT_EQ(device_->misuse(), "");
  }

  std::atomic<uint64_t> next_segment_ = 1;
  std::shared_ptr<FakeDevice::Control> device_;
  std::unique_ptr<SegmentPool> pool_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_TESTS_UNIT_SERVER_POOL_SEGMENT_POOL_FIXTURE_H_
