// SPDX-License-Identifier: Apache-2.0
#include "server/sessions/leased_session.h"
#include "server/sessions/remote_session.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "allocator/base/bytes.h"
#include "server/oom/out_of_memory.h"
#include "tests/support/allocate_slowly.h"
#include "tests/support/fake_device.h"

namespace vrambroker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Records the daemon's messages to a client.
class ClosingClient : public SessionEvents {
 public:
  void CloseSegments(absl::Span<const SegmentId> segments) override {
    {
      MutexLock lock(mu_);
      asked_back_.insert(asked_back_.end(), segments.begin(), segments.end());
    }
    if (on_close) on_close(segments);
  }
  void LimitChanged(int, uint64_t) override {}
  void Draining(const std::string&) override {}
  void Ended(const std::string&) override {}
  void Ask(uint64_t id, const ClientQuestion&) override {
    if (on_ask) on_ask(id);
  }

  std::vector<SegmentId> asked_back() const {
    MutexLock lock(mu_);
    return asked_back_;
  }

  std::function<void(absl::Span<const SegmentId>)> on_close;  // set before use
  std::function<void(uint64_t id)> on_ask;                    // set before use

 private:
  mutable Mutex mu_;
  std::vector<SegmentId> asked_back_ ABSL_GUARDED_BY(mu_);
};

class SessionTest : public ::testing::Test {
 protected:
  static constexpr SessionId kId{7};
  static constexpr uint64_t kCapacity = 64_MiB;

  SessionTest() { Make(/*max_blocks=*/100); }
  ~SessionTest() override { EXPECT_EQ(device_->misuse(), ""); }

  void Make(size_t max_blocks, const AllocatorOptions& options = {}) {
    session_.reset();
    pool_.reset();
    auto device = std::make_unique<FakeDevice>(kCapacity);
    device_ = device->control();
    pool_ = std::make_unique<SegmentPool>(std::move(device), kCapacity, &next_segment_);
    pool_->OpenAccount(kId, {.pid = 1, .limit_bytes = kCapacity});
    client_ = std::make_shared<ClosingClient>();
    // The client closes requested segments at once.
    client_->on_close = [this](absl::Span<const SegmentId> segments) { session_->SegmentsClosed(segments); };
    session_ = std::make_shared<RemoteSession>(MakeSetup({.max_blocks = max_blocks}, options));
  }
  SessionSetup MakeSetup(const SessionBounds& bounds, const AllocatorOptions& options) {
    return {.id = kId,
            .name = "test",
            .caller = {.pid = 1},
            .pools = {pool_.get()},
            .workers = &workers_,
            .bounds = bounds,
            .events = client_,
            .allocator = options};
  }
  Allocation Get(uint64_t bytes) {
    absl::StatusOr<Allocation> allocation = AllocateSlowly(*session_, 0, bytes);
    EXPECT_TRUE(allocation.ok()) << allocation.status();
    return allocation.value_or(Allocation());
  }
  uint64_t Allocated() { return session_->GetMemoryStats(0).allocated_bytes.all.current; }
  uint64_t Reserved() { return pool_->GetAccount(kId).value_or(AccountState()).reserved_bytes; }

  std::atomic<uint64_t> next_segment_ = 1;
  WorkerPool workers_{2};
  std::shared_ptr<FakeDevice::Control> device_;
  std::unique_ptr<SegmentPool> pool_;
  std::shared_ptr<ClosingClient> client_;
  std::shared_ptr<RemoteSession> session_;
};

TEST_F(SessionTest, CacheServesWhatItHasAndNothingElse) {
  EXPECT_TRUE(absl::IsNotFound(session_->AllocateFromCache(0, 512).status()));
  const Allocation first = Get(512);
  EXPECT_EQ(first.block_bytes, 512u);
  EXPECT_EQ(first.segment_bytes, 2_MiB);
  EXPECT_TRUE(std::holds_alternative<FdTicket>(first.handle));
  const absl::StatusOr<Allocation> second = session_->AllocateFromCache(0, 512);
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_NE(second->block, first.block);
  EXPECT_EQ(second->segment, first.segment);
  EXPECT_EQ(second->offset, 512u);
}

TEST_F(SessionTest, FreesAllOrNothing) {
  const BlockId a = Get(512).block;
  const BlockId b = Get(1024).block;
  EXPECT_TRUE(absl::IsNotFound(session_->Free({a, BlockId{999}, b})));
  EXPECT_TRUE(absl::IsInvalidArgument(session_->Free({a, b, a})));
  EXPECT_TRUE(absl::IsInvalidArgument(session_->Free({b, b})));
  EXPECT_EQ(Allocated(), 1536u) << "nothing was freed";
  EXPECT_EQ(session_->Free({b, a}), absl::OkStatus());
  EXPECT_EQ(Allocated(), 0u);
  EXPECT_TRUE(absl::IsNotFound(session_->Free({a}))) << "freed before";
  EXPECT_EQ(session_->Free({}), absl::OkStatus());
}

TEST_F(SessionTest, BlocksAreCounted) {
  Make(/*max_blocks=*/2);
  const BlockId first = Get(512).block;
  Get(512);
  const absl::Status status = session_->AllocateFromCache(0, 512).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_EQ(SegmentRefusalCause(status), std::nullopt) << "no lack of memory";
  EXPECT_TRUE(absl::IsResourceExhausted(AllocateSlowly(*session_, 0, 512).status()));
  EXPECT_EQ(session_->Free({first}), absl::OkStatus());
  EXPECT_TRUE(session_->AllocateFromCache(0, 512).ok());
}

TEST_F(SessionTest, StatesOnlyAdvance) {
  EXPECT_EQ(session_->state(), SessionState::kActive);
  EXPECT_FALSE(session_->Advance(SessionState::kActive));
  EXPECT_TRUE(session_->Advance(SessionState::kEnded));
  EXPECT_FALSE(session_->Advance(SessionState::kDisconnected));
  EXPECT_FALSE(session_->Advance(SessionState::kEnded));
  EXPECT_TRUE(session_->Advance(SessionState::kClosed));
  EXPECT_STREQ(SessionStateName(session_->state()), "closed");
}

TEST_F(SessionTest, OnlyActiveSessionsAllocate) {
  const BlockId block = Get(512).block;
  session_->Advance(SessionState::kEnded);
  const absl::Status status = session_->AllocateFromCache(0, 512).status();
  EXPECT_TRUE(absl::IsAborted(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("ended"));
  EXPECT_TRUE(absl::IsAborted(AllocateSlowly(*session_, 0, 512).status()));
  EXPECT_EQ(session_->Free({block}), absl::OkStatus());
}

TEST_F(SessionTest, EmptyCacheGivesBackWhatTheClientCloses) {
  Get(512);
  const Allocation freed = Get(30_MiB);
  EXPECT_EQ(session_->Free({freed.block}), absl::OkStatus());
  EXPECT_EQ(session_->TrimSlowly(0).value_or(~uint64_t{0}), 30_MiB);
  EXPECT_THAT(client_->asked_back(), ElementsAre(freed.segment));
  EXPECT_EQ(Reserved(), 2_MiB);
  EXPECT_EQ(pool_->GetStats().idle_bytes, 30_MiB);
}

TEST_F(SessionTest, MissFlushesTheCacheThroughTheClient) {
  EXPECT_EQ(session_->Free({Get(40_MiB).block, Get(20_MiB).block}), absl::OkStatus());
  Get(50_MiB);
  EXPECT_EQ(client_->asked_back().size(), 2u);
  EXPECT_EQ(Reserved(), 50_MiB);
}

TEST_F(SessionTest, WhatTheClientClosesLateComesBackLate) {
  const Allocation freed = Get(30_MiB);
  EXPECT_EQ(session_->Free({freed.block}), absl::OkStatus());
  Gate gate;
  client_->on_close = [&](absl::Span<const SegmentId>) { gate.Pass(); };
  std::thread slow([&] { EXPECT_EQ(session_->TrimSlowly(0).value_or(~uint64_t{0}), 30_MiB); });
  gate.AwaitArrivals(1);
  EXPECT_EQ(pool_->GetAccount(kId)->returning_bytes, 30_MiB);
  EXPECT_EQ(Reserved(), 30_MiB) << "charged until it is closed";
  session_->SegmentsClosed({SegmentId{999}});
  EXPECT_EQ(Reserved(), 30_MiB);
  session_->SegmentsClosed({freed.segment});
  EXPECT_EQ(Reserved(), 0u);
  gate.Open();
  slow.join();
}

TEST_F(SessionTest, EndOfTheSessionWakesWhoWaitsForTheClient) {
  const Allocation freed = Get(30_MiB);
  EXPECT_EQ(session_->Free({freed.block}), absl::OkStatus());
  Gate gate;
  client_->on_close = [&](absl::Span<const SegmentId>) { gate.Pass(); };
  std::thread slow([&] { EXPECT_EQ(session_->TrimSlowly(0).value_or(~uint64_t{0}), 0u); });
  gate.AwaitArrivals(1);
  session_->Advance(SessionState::kClosed);
  gate.Open();
  slow.join();
  EXPECT_EQ(Reserved(), 30_MiB) << "the account is closed by its owner";
}

TEST_F(SessionTest, WaitsForNoClientWhenTooManyOthersDo) {
  const Allocation freed = Get(30_MiB);
  EXPECT_EQ(session_->Free({freed.block}), absl::OkStatus());
  client_->on_close = nullptr;  // the client never answers
  absl::StatusOr<UserSlots::Slot> other = workers_.StartWaiting(/*uid=*/12345);
  ASSERT_TRUE(other.ok());
  EXPECT_EQ(session_->TrimSlowly(0).value_or(~uint64_t{0}), 0u);
  *other = UserSlots::Slot();
  session_->SegmentsClosed({freed.segment});
  EXPECT_EQ(Reserved(), 0u) << "what is closed later still counts";
}

TEST_F(SessionTest, ClientCannotReturnWhatItUses) {
  const Allocation used = Get(512);
  session_->SegmentsClosed({used.segment});
  EXPECT_EQ(Reserved(), 2_MiB);
}

TEST_F(SessionTest, LeaseOfAClosedAccountIsAborted) {
  pool_->CloseAccount(kId);
  EXPECT_TRUE(absl::IsAborted(AllocateSlowly(*session_, 0, 512).status()));
}

TEST_F(SessionTest, BlockOfASegmentThatIsGoneIsNotHandedOut) {
  Get(512);
  pool_->CloseAccount(kId);
  const absl::Status status = session_->AllocateFromCache(0, 512).status();
  EXPECT_TRUE(absl::IsAborted(status)) << status;
  EXPECT_EQ(Allocated(), 512u) << "and is free again";
}

TEST_F(SessionTest, RefusalsCarryThePoolsCause) {
  ASSERT_EQ(pool_->SetLimit(kId, 2_MiB), absl::OkStatus());
  EXPECT_EQ(SegmentRefusalCause(AllocateSlowly(*session_, 0, 2_MiB).status()), OomCause::kLimit);
  EXPECT_EQ(SegmentRefusalCause(AllocateSlowly(*session_, 0, kCapacity + 1).status()), OomCause::kLargerThanDevice);
  EXPECT_EQ(session_->GetMemoryStats(0).num_ooms, 2u);
}

TEST_F(SessionTest, OptionsShapeTheHeap) {
  Make(/*max_blocks=*/100, {.max_split_bytes = 32_MiB, .roundup_power2_divisions = {4, 4, 4, 4}});
  EXPECT_EQ(Get(1'200'000).block_bytes, 1'310'720u);
  EXPECT_EQ(session_->GetMemoryStats(0).max_split_bytes, 32_MiB);
}

TEST_F(SessionTest, StreamsDoNotShareFreedBlocks) {
  const Allocation first = AllocateSlowly(*session_, 0, 512, 1).value();
  ASSERT_EQ(session_->Free({first.block}), absl::OkStatus());
  EXPECT_TRUE(absl::IsNotFound(session_->AllocateFromCache(0, 512, 2).status()));
  EXPECT_TRUE(absl::IsNotFound(session_->AllocateFromCache(0, 512).status()));
  EXPECT_NE(AllocateSlowly(*session_, 0, 512, 2).value().segment, first.segment);
  EXPECT_EQ(session_->AllocateFromCache(0, 512, 1).value().segment, first.segment);
}

TEST_F(SessionTest, TheHeapsOwnRefusalsHaveACause) {
  Make(/*max_blocks=*/100, {.reject_without_retry = true});
  EXPECT_EQ(SegmentRefusalCause(AllocateSlowly(*session_, 0, kCapacity + 1).status()), OomCause::kLargerThanDevice);
  const Allocation held = Get(40_MiB);
  EXPECT_EQ(SegmentRefusalCause(AllocateSlowly(*session_, 0, 26_MiB).status()), OomCause::kLimit);
  EXPECT_EQ(session_->GetMemoryStats(0).num_oom_rejections, 2u);
  EXPECT_EQ(session_->Free({held.block}), absl::OkStatus());
}

TEST_F(SessionTest, LimitsAreThePoolsToRefuse) {
  // The heap knows a fraction and a limit; the account has no such bound.
  Make(/*max_blocks=*/100, {.per_process_memory_fraction = 0.25});
  session_->SetLimit(0, 16_MiB);
  EXPECT_EQ(Get(40_MiB).segment_bytes, 40_MiB);
  ASSERT_EQ(pool_->SetLimit(kId, 44_MiB), absl::OkStatus());
  EXPECT_EQ(SegmentRefusalCause(AllocateSlowly(*session_, 0, 10_MiB).status()), OomCause::kLimit);
  EXPECT_EQ(session_->GetMemoryStats(0).num_alloc_retries, 1u) << "the cache is flushed first";
}

TEST_F(SessionTest, GarbageCollectionGoesByTheLimit) {
  const auto collected = [&](uint64_t limit) {
    Make(/*max_blocks=*/100, {.garbage_collection_threshold = 0.5});
    session_->SetLimit(0, limit);
    const Allocation old = Get(12_MiB);
    EXPECT_EQ(session_->Free({old.block}), absl::OkStatus());
    EXPECT_EQ(session_->Free({Get(14_MiB).block}), absl::OkStatus());
    EXPECT_TRUE(client_->asked_back().empty());
    Get(16_MiB);
    EXPECT_EQ(session_->GetMemoryStats(0).num_alloc_retries, 0u);
    const std::vector<SegmentId> asked_back = client_->asked_back();
    if (!asked_back.empty()) {
      EXPECT_THAT(asked_back, ElementsAre(old.segment)) << "the one unused for longest";
    }
    return asked_back.size();
  };
  EXPECT_EQ(collected(44_MiB), 1u) << "26 MiB are above half of the limit";
  EXPECT_EQ(collected(56_MiB), 0u);
  EXPECT_EQ(collected(kCapacity), 0u) << "no limit";
}

TEST_F(SessionTest, OutOfMemoryEventsSayWhatWasLeft) {
  ASSERT_EQ(pool_->SetLimit(kId, 12_MiB), absl::OkStatus());
  session_->allocator(0).SetRecording(10);
  Get(10_MiB);
  EXPECT_FALSE(AllocateSlowly(*session_, 0, 10_MiB).ok());
  const std::vector<HistoryEvent> history = session_->allocator(0).Snapshot().history;
  ASSERT_EQ(history.size(), 4u);
  EXPECT_EQ(history[2].action, HistoryAction::kOutOfMemory);
  EXPECT_EQ(history[2].address, 2_MiB);
}

// A client's own heap reads the clock seldom. The cost of a network call leaves time for reading the clock at each
// block.
TEST_F(SessionTest, EachBlockHasItsOwnTime) {
  session_->allocator(0).SetRecording(10, /*exact_times=*/false);
  Get(1_MiB);
  const SteadyTime first = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() < first + std::chrono::milliseconds(1)) {
  }
  ASSERT_TRUE(session_->AllocateFromCache(0, 1_MiB).ok());
  const std::vector<HistoryEvent> history = session_->allocator(0).Snapshot().history;
  std::vector<int64_t> times_us;
  for (const HistoryEvent& event : history) {
    if (event.action == HistoryAction::kAllocate) times_us.push_back(event.time_us);
  }
  ASSERT_EQ(times_us.size(), 2u);
  EXPECT_GE(times_us[1], times_us[0] + 1000);
}

// ---- Leases of several segments: all, or none and no trace ----

class SessionLeaseTest : public SessionTest {
 protected:
  SessionLeaseTest() {
    session_.reset();
    auto device = std::make_unique<FakeDevice>(kCapacity);
    device_ = device->control();
    pool_ = std::make_unique<SegmentPool>(std::move(device), kCapacity, &next_segment_,
                                          SegmentPoolOptions{.clock = [this] { return now_; }});
    pool_->OpenAccount(kId, {.pid = 1, .tenant = "d", .limit_bytes = kCapacity});
    leased_ = std::make_shared<LeasedSession>(MakeSetup({}, {}), ResumeToken());
    // Two segments have been idle for ten seconds.
    const std::vector<Lease> leases = leased_->LeaseSlowly(0, {2_MiB, 2_MiB}).value();
    EXPECT_TRUE(leased_->ReturnSegments(0, {leases[0].segment, leases[1].segment}).ok());
    now_ += std::chrono::seconds(10);
    came_back_ = pool_->CameBackTotal();
  }
  void ExpectNoTrace(uint64_t more_idle = 0) {
    EXPECT_EQ(Reserved(), 0u);
    const PoolStats stats = pool_->GetStats();
    EXPECT_EQ(stats.handovers, 0u);
    EXPECT_EQ(stats.handover_bytes, 0u);
    EXPECT_EQ(stats.idle_bytes, 4_MiB + more_idle);
    EXPECT_EQ(stats.charged_bytes, 0u);
    EXPECT_EQ(pool_->ReleaseIdleSince(now_ - std::chrono::seconds(5)), 4_MiB) << "they are as old as they were";
  }

  SteadyTime now_{std::chrono::hours(1)};
  uint64_t came_back_ = 0;
  std::shared_ptr<LeasedSession> leased_;
};

TEST_F(SessionLeaseTest, WhatIsIdleIsHandedOverInTheirOrder) {
  const absl::StatusOr<std::vector<Lease>> leases = leased_->LeaseIdle(0, {2_MiB, 2_MiB});
  ASSERT_TRUE(leases.ok()) << leases.status();
  EXPECT_EQ(leases->size(), 2u);
  EXPECT_NE((*leases)[0].segment, (*leases)[1].segment);
  EXPECT_EQ(pool_->GetStats().handovers, 2u);
  EXPECT_EQ(pool_->GetStats().handover_bytes, 4_MiB);
  EXPECT_EQ(Reserved(), 4_MiB);
}

TEST_F(SessionLeaseTest, WhatAClientSaysIsCutToWhatCanBeTrue) {
  const std::vector<Lease> leases = leased_->LeaseIdle(0, {2_MiB, 2_MiB}).value();
  constexpr uint64_t kMost = std::numeric_limits<uint64_t>::max();
  // The client gives one of two segments back, and claims more released bytes than exist.
  client_->on_ask = [&](uint64_t id) {
    EXPECT_TRUE(leased_->ReturnSegments(0, {leases[0].segment}).ok());
    leased_->questions().Receive(id, 0, /*more=*/false, [&](ClientAnswer& answer) {
      answer.released_bytes = kMost;
      return absl::OkStatus();
    });
  };
  const absl::StatusOr<uint64_t> released = leased_->TrimSlowly(0);
  ASSERT_TRUE(released.ok()) << released.status();
  EXPECT_EQ(*released, 2_MiB);

  MemoryStats stats;
  for (PoolStat* const bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.requested_bytes}) {
    bytes->all.current = bytes->all.peak = bytes->pool[1].peak = kMost;
  }
  leased_->Report(0, stats);
  const MemoryStats kept = leased_->GetMemoryStats(0);
  for (const PoolStat* const bytes : {&kept.allocated_bytes, &kept.reserved_bytes, &kept.requested_bytes}) {
    EXPECT_EQ(bytes->all.current, kCapacity);
    EXPECT_EQ(bytes->all.peak, kCapacity);
    EXPECT_EQ(bytes->pool[1].peak, kCapacity);
  }
}

TEST_F(SessionLeaseTest, AReportThatDiffersIsAUse) {
  SessionSetup setup = MakeSetup({}, {});
  setup.clock = [this] { return now_; };
  const auto session = std::make_shared<LeasedSession>(setup, ResumeToken());
  const auto idle_after = [&](const MemoryStats& stats) {
    now_ += std::chrono::seconds(1);
    session->Report(0, stats);
    return now_ - session->last_use();
  };
  using std::chrono::seconds;
  MemoryStats stats;
  EXPECT_EQ(idle_after(stats), seconds(1)) << "since it was opened";
  stats.allocation.all.allocated = 1;
  EXPECT_EQ(idle_after(stats), seconds(0));
  stats.active_bytes.all.peak = 512;
  EXPECT_EQ(idle_after(stats), seconds(1)) << "nothing was allocated or freed";
  stats.allocation.all.freed = 1;
  EXPECT_EQ(idle_after(stats), seconds(0));
  stats.reserved_bytes.all.current = 2_MiB;
  EXPECT_EQ(idle_after(stats), seconds(0));
  ASSERT_TRUE(session->Advance(SessionState::kDisconnected));
  now_ += seconds(5);
  ASSERT_TRUE(session->Resume(client_));
  EXPECT_EQ(idle_after(stats), seconds(6)) << "a client that comes back has used nothing";
}

TEST_F(SessionLeaseTest, WhatIsNotAllIdleIsLeftAlone) {
  EXPECT_TRUE(absl::IsNotFound(leased_->LeaseIdle(0, {2_MiB, 2_MiB, 2_MiB}).status()));
  EXPECT_TRUE(absl::IsNotFound(leased_->LeaseIdle(0, {2_MiB, 20_MiB}).status()));
  EXPECT_EQ(pool_->CameBackTotal(), came_back_) << "nothing has come back";
  ExpectNoTrace();
}

TEST_F(SessionLeaseTest, WhatTheLimitForbidsTogetherIsNotBegun) {
  ASSERT_EQ(pool_->SetLimit(kId, 20_MiB), absl::OkStatus());
  EXPECT_EQ(SegmentRefusalCause(leased_->LeaseSlowly(0, {2_MiB, 20_MiB}).status()), OomCause::kLimit);
  EXPECT_EQ(device_->allocations(), 2) << "only those of before";
  ExpectNoTrace();
}

TEST_F(SessionLeaseTest, WhatTheDriverRefusesHalfwayIsGivenUpAsAWhole) {
  device_->Fail(FakeDevice::Call::kAllocate, 2, 1, absl::InternalError("the driver failed"));
  EXPECT_TRUE(absl::IsInternal(leased_->LeaseSlowly(0, {2_MiB, 20_MiB, 30_MiB}).status()));
  EXPECT_EQ(pool_->GetStats().segment_allocs, 3u);
  EXPECT_EQ(pool_->GetStats().reserved_bytes, device_->live_bytes());
  ExpectNoTrace(/*more_idle=*/20_MiB);
}

TEST_F(SessionLeaseTest, NothingIsLeftOfAGrantThatTheDriverRefuses) {
  ASSERT_EQ(pool_->Grant(kId, 52_MiB), absl::OkStatus());
  Reservation reserved(pool_.get(), kId, 52_MiB);
  device_->Fail(FakeDevice::Call::kAllocate, 2, 1, absl::InternalError("the driver failed"));
  EXPECT_TRUE(absl::IsInternal(leased_->LeaseSlowly(0, {2_MiB, 20_MiB, 30_MiB}, std::move(reserved)).status()));
  ExpectNoTrace(/*more_idle=*/20_MiB);
}

TEST_F(SessionLeaseTest, AReservationIsGivenBackByASessionThatMayNotLease) {
  ASSERT_EQ(pool_->Grant(kId, 20_MiB), absl::OkStatus());
  leased_->Advance(SessionState::kEnded);
  EXPECT_TRUE(absl::IsAborted(leased_->LeaseSlowly(0, {20_MiB}, Reservation(pool_.get(), kId, 20_MiB)).status()));
  ExpectNoTrace();
}

TEST_F(SessionLeaseTest, WhatEndsMeanwhileGetsNothing) {
  Gate& gate = device_->Hold(FakeDevice::Call::kAllocate);
  std::thread slow([&] { EXPECT_TRUE(absl::IsAborted(leased_->LeaseSlowly(0, {2_MiB, 20_MiB}).status())); });
  gate.AwaitArrivals(1);
  pool_->CloseAccountOfGone(kId);
  EXPECT_EQ(pool_->GetStats().charged_bytes, 22_MiB) << "until the driver has answered";
  gate.Open();
  slow.join();
  ExpectNoTrace();
  EXPECT_EQ(device_->live_bytes(), 0u);
}

TEST_F(SessionTest, ThreadsFreeAndAllocateAtOnce) {
  Make(/*max_blocks=*/100000);
  Mutex slow{lock_level::kRequest};  // allows one slow call of a session at a time, as on the session's queue
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 300; ++i) {
        absl::StatusOr<Allocation> a = session_->AllocateFromCache(0, 512 * (i % 9 + 1));
        if (!a.ok()) {
          MutexLock lock(slow);
          a = AllocateSlowly(*session_, 0, 512 * (i % 9 + 1));
        }
        ASSERT_TRUE(a.ok()) << a.status();
        EXPECT_EQ(session_->Free({a->block}), absl::OkStatus());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(Allocated(), 0u);
  EXPECT_EQ(session_->allocator(0).CheckInvariants(), absl::OkStatus());
}

// A client may add a scope, and allocate the scope's first block, at any moment while the daemon explains a refusal.
TEST_F(SessionTest, ARefusalKnowsScopesThatAreAddedMeanwhile) {
  constexpr int kBlocks = 2000;
  Make(/*max_blocks=*/kBlocks + 2);
  const auto scope = [&](const std::string& name) {
    return session_->FindScope(std::vector<RemoteSession::NamedScope>{{.name = name}});
  };
  const ScopeId weights = scope("weights");
  for (int i = 0; i < kBlocks; ++i) ASSERT_TRUE(AllocateSlowly(*session_, 0, 512, 0, weights).ok());
  std::atomic<bool> stop{false};
  std::atomic<int> looks{0};
  std::atomic<int> nameless{0};  // counts scopes without a name in all reports; no such scope may exist
  const auto explain = [&] {
    while (!stop) {
      ++looks;
      for (const ScopeUse& use : session_->ExplainFit(0, 20_MiB, 0, weights).scopes) nameless += use.scope.empty();
    }
  };
  std::thread first(explain);
  std::thread second(explain);  // the two threads wait for each other's locks, and leave time between their own
  // The loop holds one or two blocks at a time, and a report lists three scopes.
  std::optional<BlockId> held;
  for (int step = 0; step < 300; ++step) {
    for (const int before = looks; looks == before;) std::this_thread::yield();
    const absl::StatusOr<Allocation> block =
        AllocateSlowly(*session_, 0, 2_MiB, 0, scope("step " + std::to_string(step)));
    EXPECT_TRUE(block.ok()) << block.status();
    if (!block.ok()) break;
    if (held.has_value()) {
      EXPECT_EQ(session_->Free({*held}), absl::OkStatus());
    }
    held = block->block;
  }
  stop = true;
  first.join();
  second.join();
  EXPECT_EQ(nameless, 0) << "in " << looks << " looks";
}

}  // namespace
}  // namespace vrambroker
