// SPDX-License-Identifier: Apache-2.0
//
// Eight sessions at a time, each with its own thread, on one pool: the ledger is right at every moment, and everything
// is back at the end.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "allocator/bytes.h"
#include "server/out_of_memory.h"
#include "server/segment_pool.h"
#include "tests/support/fake_device.h"

namespace vrambroker {
namespace {

constexpr int kThreads = 8;
constexpr int kSessionsEach = 40;
constexpr int kStepsEach = 40;
constexpr uint64_t kCapacity = 64_MiB;
constexpr uint64_t kLimit = 24_MiB;

class SegmentPoolStressTest : public ::testing::Test {
 protected:
  SegmentPoolStressTest() {
    auto device = std::make_unique<FakeDevice>(kCapacity);
    device_ = device->control();
    pool_ = std::make_unique<SegmentPool>(std::move(device), kCapacity, &next_segment_);
  }

  void RunSession(SessionId session, std::mt19937_64& random) {
    const auto tenant = static_cast<uid_t>(random() % 3);
    pool_->OpenAccount(session, 1, tenant, kLimit);
    std::vector<std::pair<SegmentId, uint64_t>> held;
    uint64_t reserved = 0;
    for (int step = 0; step < kStepsEach; ++step) {
      const uint64_t dice = random() % 100;
      if (dice < 55) {
        const uint64_t bytes = 2_MiB * (random() % 4 + 1);
        const absl::StatusOr<SegmentId> segment = pool_->Lease(session, bytes);
        if (segment.ok()) {
          held.push_back({*segment, bytes});
          reserved += bytes;
        } else {
          EXPECT_TRUE(SegmentRefusalCause(segment.status()).has_value()) << segment.status();
        }
      } else if (dice < 85 && !held.empty()) {
        pool_->MarkReturning(session, {held.back().first});
        pool_->Return(session, {held.back().first});
        reserved -= held.back().second;
        held.pop_back();
      } else if (dice < 95 && !held.empty()) {
        const absl::StatusOr<WireHandle> handle = pool_->HandleFor(session, held[0].first);
        ASSERT_TRUE(handle.ok()) << handle.status();
        EXPECT_TRUE(pool_->RedeemTicket(std::get<Ticket>(*handle), 1, tenant).ok());
      } else {
        pool_->ReleaseIdleSince(std::chrono::steady_clock::now());
      }
      const AccountFigures account = pool_->GetAccount(session).value();
      EXPECT_EQ(account.reserved_bytes, reserved) << "nobody else changes this account";
      EXPECT_LE(account.reserved_bytes, account.limit_bytes);
    }
    EXPECT_EQ(pool_->CloseAccount(session), reserved);
  }

  std::atomic<uint64_t> next_segment_ = 1;
  std::shared_ptr<FakeDevice::Control> device_;
  std::unique_ptr<SegmentPool> pool_;
};

TEST_F(SegmentPoolStressTest, FiguresNeverExceedCapacityAndEndAtZero) {
  std::atomic<bool> done = false;
  std::atomic<int> looks = 0;
  std::thread observer([&] {
    while (!done.load() || looks.load() == 0) {
      const PoolFigures figures = pool_->GetFigures();
      EXPECT_LE(figures.charged_bytes, figures.capacity_bytes);
      EXPECT_LE(figures.charged_bytes + figures.idle_bytes, figures.capacity_bytes);
      ++looks;
      std::this_thread::yield();
    }
  });
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([this, t] {
      std::mt19937_64 random(static_cast<uint64_t>(t) + 1);
      for (int i = 0; i < kSessionsEach; ++i) {
        RunSession(SessionId{static_cast<uint64_t>(t * kSessionsEach + i + 1)}, random);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  done = true;
  observer.join();

  pool_->ReleaseIdleSince(std::chrono::steady_clock::now());
  const PoolFigures figures = pool_->GetFigures();
  EXPECT_EQ(figures.charged_bytes, 0u);
  EXPECT_EQ(figures.idle_bytes, 0u);
  EXPECT_EQ(figures.reserved_bytes, 0u);
  EXPECT_EQ(figures.segments, 0u);
  EXPECT_EQ(figures.segment_allocs, figures.segment_frees);
  EXPECT_GT(figures.segment_allocs, 100u) << "something happened";
  EXPECT_EQ(device_->live_bytes(), 0u);
  EXPECT_LE(device_->peak_bytes(), kCapacity);
  EXPECT_EQ(device_->misuse(), "");
}

// Sessions are closed by one thread while another one leases for them, as when a process dies.
TEST_F(SegmentPoolStressTest, ClosingWhileLeasingLeaksNothing) {
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads / 2; ++t) {
    threads.emplace_back([this, t] {
      for (int i = 0; i < 200; ++i) {
        const SessionId session{static_cast<uint64_t>(t * 1000 + i + 1)};
        pool_->OpenAccount(session, 1, static_cast<uid_t>(t % 2), kLimit);
        std::atomic<bool> started = false;
        std::thread closer([&] {
          while (!started) std::this_thread::yield();
          pool_->CloseAccount(session);
        });
        // Until the account has gone: leased, refused for its limit, aborted.
        while (!absl::IsAborted(pool_->Lease(session, 2_MiB).status())) {
          started = true;
          std::this_thread::yield();
        }
        started = true;
        closer.join();
        EXPECT_EQ(pool_->GetAccount(session), std::nullopt);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pool_->GetFigures().charged_bytes, 0u);
  pool_->ReleaseIdleSince(std::chrono::steady_clock::now());
  EXPECT_EQ(pool_->GetFigures().reserved_bytes, 0u);
  EXPECT_EQ(device_->live_bytes(), 0u);
  EXPECT_EQ(device_->misuse(), "");
}

}  // namespace
}  // namespace vrambroker
