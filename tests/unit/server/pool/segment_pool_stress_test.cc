// SPDX-License-Identifier: Apache-2.0
//
// Random sequences of all calls of a pool: a call at a time against a model of the pool, and eight sessions at a time.
// The ledger is right at every moment, and all memory is back at the end.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "server/oom/out_of_memory.h"
#include "server/pool/idle_decay.h"
#include "server/pool/segment_pool.h"
#include "tests/support/fake_device.h"

namespace vrambroker {
namespace {

// ---- A call at a time ----

// Holds a pool, and a model of the pool's contents.
class PoolWithModel {
 public:
  PoolWithModel(uint64_t seed, uint64_t idle_limit) : random_(seed), idle_limit_(idle_limit) {
    auto device = std::make_unique<FakeDevice>(kDeviceBytes);
    device_ = device->control();
    pool_ = std::make_unique<SegmentPool>(std::move(device), kDeviceBytes, &next_segment_,
                                          SegmentPoolOptions{.idle_limit_bytes = idle_limit});
  }

  void Step() {
    const uint64_t dice = Random(100);
    if (sessions_.empty() || (dice < 10 && sessions_.size() < 6)) {
      const SessionId id{next_session_++};
      sessions_[id] = {.tenant = static_cast<uid_t>(Random(3)), .limit = 2_MiB * (Random(16) + 1)};
      pool_->OpenAccount(id, {.pid = 1,
                              .uid = sessions_[id].tenant,
                              .tenant = absl::StrCat(sessions_[id].tenant),
                              .limit_bytes = sessions_[id].limit});
    } else if (dice < 55) {
      Lease(PickSession());
    } else if (dice < 80) {
      MarkOrReturn(PickSession());
    } else if (dice < 88) {
      Close(PickSession());
    } else if (dice < 92) {
      mark_ = std::chrono::steady_clock::now();
      while (std::chrono::steady_clock::now() == mark_) {
      }
      older_than_mark_ = idle_.size();
    } else {
      Release(Random(4) > 0);
    }
    Check();
  }

  void End() {
    while (!sessions_.empty()) Close(sessions_.begin()->first);
    Check();
    pool_->ReleaseIdleSince(std::chrono::steady_clock::now());
    idle_.clear();
    Check();
    EXPECT_EQ(pool_->GetStats().reserved_bytes, 0u);
    EXPECT_EQ(pool_->GetStats().segment_allocs, pool_->GetStats().segment_frees);
    EXPECT_EQ(device_->misuse(), "");
  }

  uint64_t leases_from_idle() const { return leases_from_idle_; }
  uint64_t given_back() const { return given_back_; }

 private:
  static constexpr uint64_t kDeviceBytes = 48_MiB;
  struct Segment {
    uint64_t bytes = 0;
    bool returning = false;
  };
  struct ModelSession {
    uid_t tenant = 0;
    uint64_t limit = 0;
    uint64_t reserved = 0;
    std::map<SegmentId, Segment> segments;
  };
  struct Idle {
    uid_t tenant = 0;
    uint64_t bytes = 0;
  };

  uint64_t Random(uint64_t below) { return random_() % below; }
  SessionId PickSession() {
    return std::next(sessions_.begin(), static_cast<std::ptrdiff_t>(Random(sessions_.size())))->first;
  }
  uint64_t ChargedBytes() const {
    uint64_t bytes = 0;
    for (const auto& [id, session] : sessions_) bytes += session.reserved;
    return bytes;
  }
  uint64_t IdleBytes() const {
    uint64_t bytes = 0;
    for (const Idle& idle : idle_) bytes += idle.bytes;
    return bytes;
  }
  void GiveBackOldest() {
    idle_.pop_front();
    older_than_mark_ -= older_than_mark_ > 0 ? 1 : 0;
    ++given_back_;
  }

  void Lease(SessionId id) {
    ModelSession& session = sessions_[id];
    const uint64_t bytes = 2_MiB * (Random(4) + 1);
    const absl::StatusOr<SegmentId> segment = pool_->Lease(id, bytes);
    const bool allowed = session.reserved + bytes <= session.limit && ChargedBytes() + bytes <= kDeviceBytes;
    EXPECT_EQ(segment.ok(), allowed) << segment.status();
    if (!segment.ok()) return;
    EXPECT_TRUE(ids_.insert(*segment).second) << "an id was used again";
    session.reserved += bytes;
    session.segments[*segment] = {.bytes = bytes};
    for (size_t i = idle_.size(); i-- > 0;) {  // the youngest segment that fits
      if (idle_[i].tenant != session.tenant || idle_[i].bytes != bytes) continue;
      idle_.erase(idle_.begin() + static_cast<std::ptrdiff_t>(i));
      older_than_mark_ -= i < older_than_mark_ ? 1 : 0;
      ++leases_from_idle_;
      return;
    }
    ++allocs_;
    while (ChargedBytes() + IdleBytes() > kDeviceBytes) GiveBackOldest();
  }
  void MarkOrReturn(SessionId id) {
    ModelSession& session = sessions_[id];
    if (session.segments.empty()) return;
    const auto it = std::next(session.segments.begin(), static_cast<std::ptrdiff_t>(Random(session.segments.size())));
    if (Random(3) == 0) {  // finishes also segments that were not asked back; the pool ignores such calls
      pool_->FinishReturning(id, {it->first});
      if (!it->second.returning) return;
      BecomesIdle(session, it->second);
      session.segments.erase(it);
    } else {
      pool_->MarkReturning(id, {it->first});
      it->second.returning = true;
    }
  }
  void Close(SessionId id) {
    const uint64_t reserved = sessions_[id].reserved;
    EXPECT_EQ(pool_->CloseAccount(id), reserved);
    for (const auto& [segment, held] : sessions_[id].segments) BecomesIdle(sessions_[id], held);
    sessions_.erase(id);
  }
  void BecomesIdle(ModelSession& session, const Segment& segment) {
    session.reserved -= segment.bytes;
    idle_.push_back({.tenant = session.tenant, .bytes = segment.bytes});
  }
  // Releases all segments that were idle at the mark, or only segments beyond the limit.
  void Release(bool by_age) {
    const uint64_t before = IdleBytes();
    const uint64_t released = pool_->ReleaseIdleSince(by_age ? mark_ : SteadyTime());
    while (by_age && older_than_mark_ > 0) GiveBackOldest();
    while (IdleBytes() > idle_limit_) GiveBackOldest();
    EXPECT_EQ(released, before - IdleBytes());
  }

  void Check() {
    const PoolStats stats = pool_->GetStats();
    EXPECT_EQ(stats.charged_bytes, ChargedBytes());
    EXPECT_EQ(stats.idle_bytes, IdleBytes());
    EXPECT_EQ(stats.reserved_bytes, stats.charged_bytes + stats.idle_bytes);
    EXPECT_EQ(stats.reserved_bytes, device_->live_bytes());
    EXPECT_EQ(stats.segment_allocs, allocs_);
    EXPECT_EQ(stats.segment_allocs, static_cast<uint64_t>(device_->allocations()));
    EXPECT_EQ(stats.segment_frees, static_cast<uint64_t>(device_->frees()));
    size_t leased = 0;
    for (const auto& [id, session] : sessions_) {
      uint64_t returning = 0;
      for (const auto& [segment, held] : session.segments) returning += held.returning ? held.bytes : 0;
      const AccountState account = pool_->GetAccount(id).value_or(AccountState());
      EXPECT_EQ(account.reserved_bytes, session.reserved);
      EXPECT_EQ(account.returning_bytes, returning);
      leased += session.segments.size();
    }
    EXPECT_EQ(stats.segments, leased);
  }

  std::mt19937_64 random_;
  const uint64_t idle_limit_;
  std::atomic<uint64_t> next_segment_ = 1;
  std::shared_ptr<FakeDevice::Control> device_;
  std::unique_ptr<SegmentPool> pool_;

  uint64_t next_session_ = 1;
  std::map<SessionId, ModelSession> sessions_;
  std::deque<Idle> idle_;  // the oldest first
  SteadyTime mark_;
  size_t older_than_mark_ = 0;  // counts segments of idle_
  std::set<SegmentId> ids_;
  uint64_t allocs_ = 0;
  uint64_t leases_from_idle_ = 0;
  uint64_t given_back_ = 0;
};

TEST(SegmentPoolSequenceTest, EveryByteIsAccountedFor) {
  uint64_t leases_from_idle = 0;
  uint64_t given_back = 0;
  for (const uint64_t idle_limit : {SegmentPoolOptions::kNoIdleLimit, uint64_t{0}, 4_MiB, 12_MiB}) {
    for (uint64_t seed = 1; seed <= 50; ++seed) {
      SCOPED_TRACE(::testing::Message() << "seed " << seed << ", idle limit " << idle_limit);
      PoolWithModel pool(seed, idle_limit);
      for (int step = 0; step < 300 && !::testing::Test::HasFailure(); ++step) pool.Step();
      pool.End();
      if (::testing::Test::HasFailure()) return;
      leases_from_idle += pool.leases_from_idle();
      given_back += pool.given_back();
    }
  }
  EXPECT_GT(leases_from_idle, 1000u);
  EXPECT_GT(given_back, 1000u);
}

// ---- Eight sessions at a time ----

constexpr int kThreads = 8;
constexpr int kSessionsEach = 40;
constexpr int kStepsEach = 40;
constexpr uint64_t kCapacity = 64_MiB;
constexpr uint64_t kLimit = 24_MiB;

class SegmentPoolStressTest : public ::testing::Test {
 protected:
  SegmentPoolStressTest() { MakePool(SegmentPoolOptions::kNoIdleLimit); }

  void MakePool(uint64_t idle_limit) {
    auto device = std::make_unique<FakeDevice>(kCapacity);
    device_ = device->control();
    pool_ = std::make_unique<SegmentPool>(std::move(device), kCapacity, &next_segment_,
                                          SegmentPoolOptions{.idle_limit_bytes = idle_limit});
  }

  void RunSession(SessionId session, std::mt19937_64& random) {
    const auto tenant = static_cast<uid_t>(random() % 3);
    pool_->OpenAccount(session, {.pid = 1, .uid = tenant, .tenant = absl::StrCat(tenant), .limit_bytes = kLimit});
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
        pool_->FinishReturning(session, {held.back().first});
        reserved -= held.back().second;
        held.pop_back();
      } else if (dice < 95 && !held.empty()) {
        const absl::StatusOr<WireHandle> handle = pool_->HandleFor(session, held[0].first);
        ASSERT_TRUE(handle.ok()) << handle.status();
        EXPECT_TRUE(pool_->RedeemTicket(std::get<FdTicket>(*handle), 1, tenant).ok());
      } else {
        pool_->ReleaseIdleSince(std::chrono::steady_clock::now());
      }
      const AccountState account = pool_->GetAccount(session).value();
      EXPECT_EQ(account.reserved_bytes, reserved) << "nobody else changes this account";
      EXPECT_LE(account.reserved_bytes, account.limit_bytes);
    }
    EXPECT_EQ(pool_->CloseAccount(session), reserved);
  }

  // Runs kThreads threads, each with a series of sessions, while an observer looks on.
  void RunSessions();
  void ExpectAllGivenBack();

  std::atomic<uint64_t> next_segment_ = 1;
  std::shared_ptr<FakeDevice::Control> device_;
  std::unique_ptr<SegmentPool> pool_;
};

void SegmentPoolStressTest::RunSessions() {
  std::atomic<bool> done = false;
  std::atomic<int> looks = 0;
  std::thread observer([&] {
    while (!done.load() || looks.load() == 0) {
      const PoolStats stats = pool_->GetStats();
      EXPECT_LE(stats.charged_bytes, stats.capacity_bytes);
      EXPECT_LE(stats.charged_bytes + stats.idle_bytes, stats.capacity_bytes);
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
}

void SegmentPoolStressTest::ExpectAllGivenBack() {
  pool_->ReleaseIdleSince(std::chrono::steady_clock::now());
  const PoolStats stats = pool_->GetStats();
  EXPECT_EQ(stats.charged_bytes, 0u);
  EXPECT_EQ(stats.idle_bytes, 0u);
  EXPECT_EQ(stats.reserved_bytes, 0u);
  EXPECT_EQ(stats.segments, 0u);
  EXPECT_EQ(stats.segment_allocs, stats.segment_frees);
  EXPECT_GT(stats.segment_allocs, 100u) << "something happened";
  EXPECT_EQ(device_->live_bytes(), 0u);
  EXPECT_LE(device_->peak_bytes(), kCapacity);
  EXPECT_EQ(device_->misuse(), "");
}

TEST_F(SegmentPoolStressTest, FiguresNeverExceedCapacityAndEndAtZero) {
  RunSessions();
  ExpectAllGivenBack();
}

TEST_F(SegmentPoolStressTest, WithDecayAndAnIdleLimitToo) {
  MakePool(8_MiB);
  {
    const IdleDecay decay(pool_.get(), std::chrono::milliseconds(1));
    RunSessions();
  }
  ExpectAllGivenBack();
}

// A thread closes sessions while another thread leases for the sessions, as at the death of a process.
TEST_F(SegmentPoolStressTest, ClosingWhileLeasingLeaksNothing) {
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads / 2; ++t) {
    threads.emplace_back([this, t] {
      for (int i = 0; i < 200; ++i) {
        const SessionId session{static_cast<uint64_t>(t * 1000 + i + 1)};
        pool_->OpenAccount(session, {.pid = 1, .tenant = absl::StrCat(t % 2), .limit_bytes = kLimit});
        std::atomic<bool> started = false;
        std::thread closer([&] {
          while (!started) std::this_thread::yield();
          pool_->CloseAccount(session);
        });
        // Leases until the account is gone: a lease succeeds, meets the limit, or is aborted.
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
  EXPECT_EQ(pool_->GetStats().charged_bytes, 0u);
  pool_->ReleaseIdleSince(std::chrono::steady_clock::now());
  EXPECT_EQ(pool_->GetStats().reserved_bytes, 0u);
  EXPECT_EQ(device_->live_bytes(), 0u);
  EXPECT_EQ(device_->misuse(), "");
}

}  // namespace
}  // namespace vrambroker
