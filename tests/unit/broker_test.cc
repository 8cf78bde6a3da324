// SPDX-License-Identifier: Apache-2.0
#include "server/broker.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/cord.h"
#include "allocator/bytes.h"
#include "tests/support/fake_device.h"
#include "vrambroker/v1/types.pb.h"

namespace vrambroker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(LimitBytesTest, FractionsAreCutToBytes) {
  EXPECT_EQ(LimitBytes(Limit(0.5), 8_GiB), 4_GiB);
  EXPECT_EQ(LimitBytes(Limit(0.3), 100), 30u);
  EXPECT_EQ(LimitBytes(Limit(0.999), 10), 9u);
  EXPECT_EQ(LimitBytes(Limit(1.0), 8_GiB + 1), 8_GiB + 1);
  EXPECT_EQ(LimitBytes(Limit(0.0), 8_GiB), 0u);
  // A capacity that a double cannot hold exactly.
  EXPECT_LE(LimitBytes(Limit(1.0), (uint64_t{1} << 60) - 1), (uint64_t{1} << 60) - 1);
}

TEST(LimitBytesTest, BytesAreAtMostTheCapacity) {
  EXPECT_EQ(LimitBytes(Limit(uint64_t{5}), 10), 5u);
  EXPECT_EQ(LimitBytes(Limit(uint64_t{11}), 10), 10u);
  EXPECT_EQ(LimitBytes(Limit(uint64_t{0}), 10), 0u);
}

class FakeClient : public SessionEvents {
 public:
  void CloseSegments(absl::Span<const SegmentId> segments) override {
    if (on_close) on_close(segments);
  }
  void LimitChanged(int device, uint64_t limit_bytes) override {
    Note(absl::StrCat("limit ", device, " ", limit_bytes));
  }
  void Draining() override { Note("draining"); }
  void Ended(const std::string& reason) override { Note("ended: " + reason); }

  std::vector<std::string> told() const {
    MutexLock lock(mu_);
    return told_;
  }

  std::function<void(absl::Span<const SegmentId>)> on_close;  // set before use

 private:
  void Note(std::string text) {
    MutexLock lock(mu_);
    told_.push_back(std::move(text));
  }

  mutable Mutex mu_;
  std::vector<std::string> told_ ABSL_GUARDED_BY(mu_);
};

class BrokerTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kCapacity = 64_MiB;

  BrokerTest() { Make({}); }

  void Make(BrokerOptions options) {
    broker_.reset();
    pools_.clear();
    controls_.clear();
    for (int i = 0; i < 2; ++i) {
      auto device = std::make_unique<FakeDevice>(kCapacity);
      controls_.push_back(device->control());
      pools_.push_back(std::make_unique<SegmentPool>(std::move(device), kCapacity, &next_segment_));
    }
    options.watch_process = [this](const UniqueFd&, std::function<void()> gone) -> absl::StatusOr<int> {
      if (!watch_error_.ok()) return watch_error_;
      gone_.push_back(std::move(gone));
      return static_cast<int>(gone_.size() - 1);
    };
    options.unwatch_process = [this](int watch) { unwatched_.push_back(watch); };
    broker_ = std::make_unique<Broker>(std::move(options), std::vector<SegmentPool*>{pools_[0].get(), pools_[1].get()},
                                       workers_.get());
  }
  void TearDown() override {
    broker_->CloseAll("end of the test");
    workers_.reset();
    EXPECT_EQ(broker_->session_count(), 0u);
    for (const std::unique_ptr<SegmentPool>& pool : pools_) {
      EXPECT_EQ(pool->GetFigures().charged_bytes, 0u);
    }
    broker_.reset();
    pools_.clear();
    for (const auto& control : controls_) {
      EXPECT_EQ(control->live_bytes(), 0u);
      EXPECT_EQ(control->misuse(), "");
    }
  }

  static Caller Process(pid_t pid, uid_t uid) {
    return {.pid = pid, .uid = uid, .pidfd = std::make_shared<UniqueFd>()};
  }
  absl::StatusOr<SessionPtr> TryOpen(const std::string& name, std::optional<Limit> limit = std::nullopt,
                                     Caller caller = Process(1, 1000),
                                     std::optional<AllocatorOptions> allocator = std::nullopt) {
    client_ = std::make_shared<FakeClient>();
    return broker_->OpenSession(caller, {.name = name, .limit = limit, .allocator = allocator}, client_);
  }
  SessionPtr Open(const std::string& name, std::optional<Limit> limit = std::nullopt, Caller caller = Process(1, 1000),
                  std::optional<AllocatorOptions> allocator = std::nullopt) {
    absl::StatusOr<SessionPtr> session = TryOpen(name, limit, caller, allocator);
    EXPECT_TRUE(session.ok()) << session.status();
    const std::weak_ptr<Session> weak = *session;
    client_->on_close = [weak](absl::Span<const SegmentId> segments) {
      if (const SessionPtr alive = weak.lock()) alive->SegmentsClosed(segments);
    };
    return session.value_or(nullptr);
  }
  // Allocate() and its answer.
  absl::StatusOr<Allocation> Allocate(const SessionPtr& session, uint64_t bytes, uint64_t device = 0,
                                      Stream stream = 0) {
    Gate answered;
    answered.Open();
    absl::StatusOr<Allocation> answer = absl::UnknownError("no answer");
    broker_->Allocate(session, device, bytes, stream, [&](absl::StatusOr<Allocation> allocation) {
      answer = std::move(allocation);
      answered.Pass();
    });
    answered.AwaitArrivals(1);
    // The worker must have left the gate before it goes.
    Drain(session);
    return answer;
  }
  // Waits for what was submitted to the session so far.
  static void Drain(const SessionPtr& session) {
    const auto gate = std::make_shared<Gate>();
    gate->Open();
    session->slow_calls().Submit([gate] { gate->Pass(); });
    gate->AwaitArrivals(1);
  }
  static v1::OutOfMemory Report(const absl::Status& status) {
    v1::OutOfMemory proto;
    const absl::optional<absl::Cord> payload = status.GetPayload("type.googleapis.com/vrambroker.v1.OutOfMemory");
    EXPECT_TRUE(payload.has_value()) << status;
    if (payload.has_value()) {
      EXPECT_TRUE(proto.ParseFromString(std::string(*payload)));
    }
    return proto;
  }

  std::atomic<uint64_t> next_segment_ = 1;
  std::unique_ptr<WorkerPool> workers_ = std::make_unique<WorkerPool>(4);
  std::vector<std::shared_ptr<FakeDevice::Control>> controls_;
  std::vector<std::unique_ptr<SegmentPool>> pools_;
  absl::Status watch_error_;
  std::vector<std::function<void()>> gone_;  // one for each session, in order
  std::vector<int> unwatched_;               // indices of gone_
  std::unique_ptr<Broker> broker_;
  std::shared_ptr<FakeClient> client_;  // of the last session
};

TEST_F(BrokerTest, NamesAreMadeUnique) {
  const SessionPtr first = Open("job");
  EXPECT_EQ(first->name(), "job");
  EXPECT_EQ(Open("job")->name(), "job-2");
  EXPECT_EQ(Open("job")->name(), "job-3");
  broker_->Close(first, "test");
  EXPECT_EQ(Open("job")->name(), "job") << "free again";
  EXPECT_NE(Open("")->name(), "") << "the command's name";
}

TEST_F(BrokerTest, BadNamesAreRefused) {
  EXPECT_EQ(Open("a.b_c-d/e:f@9")->name(), "a.b_c-d/e:f@9");
  EXPECT_TRUE(TryOpen(std::string(63, 'x')).ok());
  for (const std::string& name : {std::string(64, 'x'), std::string("a b"), std::string("a\n"), std::string("a\"b"),
                                  std::string("ü"), std::string("a\0b", 3)}) {
    const absl::Status status = TryOpen(name).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("name"));
  }
}

TEST_F(BrokerTest, BadLimitsAreRefused) {
  for (const double fraction : {-0.1, 1.1, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_TRUE(absl::IsInvalidArgument(TryOpen("x", Limit(fraction)).status())) << fraction;
  }
  EXPECT_EQ(broker_->session_count(), 0u);
}

TEST_F(BrokerTest, LimitIsTheSmallerOfWishAndPolicy) {
  Make({.session_limit = Limit(0.5)});
  const auto limit = [&](std::optional<Limit> wish) {
    return broker_->Describe(*Open("x", wish)).devices[1].account.limit_bytes;
  };
  EXPECT_EQ(limit(std::nullopt), 32_MiB);
  EXPECT_EQ(limit(Limit(1.0)), 32_MiB);
  EXPECT_EQ(limit(Limit(0.25)), 16_MiB);
  EXPECT_EQ(limit(Limit(10_MiB)), 10_MiB);
}

TEST_F(BrokerTest, FractionsLowerTheLimit) {
  Make({.session_limit = Limit(0.75), .allocator = {.per_process_memory_fraction = 0.5}});
  const auto limit = [&](std::optional<Limit> wish, std::optional<AllocatorOptions> allocator) {
    return broker_->Describe(*Open("x", wish, Process(1, 1000), allocator)).devices[1].account.limit_bytes;
  };
  EXPECT_EQ(limit(std::nullopt, std::nullopt), 32_MiB) << "the broker's fraction";
  EXPECT_EQ(limit(std::nullopt, AllocatorOptions{.per_process_memory_fraction = 0.25}), 16_MiB) << "the session's own";
  EXPECT_EQ(limit(std::nullopt, AllocatorOptions{.per_process_memory_fraction = 1.0 / 3}), 22'369'621u) << "cut";
  EXPECT_EQ(limit(std::nullopt, AllocatorOptions{.per_process_memory_fraction = 0}), 0u);
  EXPECT_EQ(limit(std::nullopt, AllocatorOptions()), 48_MiB) << "the policy";
  EXPECT_EQ(limit(Limit(10_MiB), AllocatorOptions{.per_process_memory_fraction = 0.25}), 10_MiB) << "the wish";
  EXPECT_EQ(limit(Limit(20_MiB), AllocatorOptions{.per_process_memory_fraction = 0.25}), 16_MiB);
}

TEST_F(BrokerTest, AllocatorOptionsOfASessionReplaceTheBrokers) {
  Make({.allocator = {.max_split_bytes = 32_MiB, .roundup_power2_divisions = {4, 4, 4}}});
  const SessionPtr broker_s = Open("a");
  EXPECT_EQ(Allocate(broker_s, 1'200'000, 1).value().block_bytes, 1'310'720u);
  EXPECT_EQ(broker_s->GetMemoryStats(0).max_split_bytes, 32_MiB);
  const SessionPtr own = Open("b", std::nullopt, Process(1, 1000), AllocatorOptions{.max_split_bytes = 64_MiB});
  EXPECT_EQ(Allocate(own, 1'200'000, 1).value().block_bytes, 1'200'128u) << "not merged";
  EXPECT_EQ(own->GetMemoryStats(0).max_split_bytes, 64_MiB);
}

TEST_F(BrokerTest, RefusalsOfTheHeapItselfAreTyped) {
  const SessionPtr session = Open("a", std::nullopt, Process(1, 1000), AllocatorOptions{.reject_without_retry = true});
  EXPECT_EQ(Report(Allocate(session, kCapacity + 1).status()).cause(), v1::OutOfMemory::CAUSE_LARGER_THAN_DEVICE);
  ASSERT_TRUE(Allocate(session, 40_MiB).ok());
  const v1::OutOfMemory oom = Report(Allocate(session, 30_MiB).status());
  EXPECT_EQ(oom.cause(), v1::OutOfMemory::CAUSE_LIMIT);
  EXPECT_EQ(oom.limit_bytes(), kCapacity);
  EXPECT_EQ(oom.reserved_bytes(), 40_MiB);
}

TEST_F(BrokerTest, LimitChangesReachGarbageCollection) {
  const SessionPtr session =
      Open("a", std::nullopt, Process(1, 1000), AllocatorOptions{.garbage_collection_threshold = 0.5});
  const auto free = [&](uint64_t bytes) {
    ASSERT_EQ(broker_->Free(session, {Allocate(session, bytes).value().block}), absl::OkStatus());
  };
  free(12_MiB);
  free(14_MiB);
  ASSERT_TRUE(Allocate(session, 16_MiB).ok());
  EXPECT_EQ(session->GetMemoryStats(0).num_device_free, 0u) << "no limit, no collection";
  ASSERT_EQ(broker_->SetLimit(session, Limit(62_MiB)), absl::OkStatus());
  ASSERT_TRUE(Allocate(session, 18_MiB).ok());
  EXPECT_EQ(session->GetMemoryStats(0).num_device_free, 2u) << "42 MiB are above half of 62; both are equally old";
  EXPECT_EQ(session->GetMemoryStats(0).num_alloc_retries, 0u);
}

TEST_F(BrokerTest, StreamsAreApart) {
  const SessionPtr session = Open("a", Limit(2_MiB));
  const Allocation first = Allocate(session, 512, 0, 7).value();
  const v1::OutOfMemory oom = Report(Allocate(session, 512, 0, 8).status());
  EXPECT_EQ(oom.cause(), v1::OutOfMemory::CAUSE_LIMIT) << "what stream 7 has free is not 8's";
  EXPECT_EQ(oom.largest_free_block_bytes(), 0u);
  EXPECT_EQ(Allocate(session, 512, 0, 7).value().segment, first.segment);
}

TEST_F(BrokerTest, RecordingIsSetAndBounded) {
  Make({.record_events = 3});
  const SessionPtr session = Open("a");
  const auto recorded = [&](int device) { return session->allocator(device).Snapshot().history.size(); };
  ASSERT_TRUE(Allocate(session, 512, 1).ok());
  EXPECT_EQ(recorded(1), 3u) << "a segment, a block, the snapshot";
  EXPECT_EQ(recorded(0), 1u);
  ASSERT_EQ(broker_->SetRecording(session, 2), absl::OkStatus());
  EXPECT_EQ(recorded(1), 1u) << "forgotten";
  const absl::Status status = broker_->SetRecording(session, kMaxRecordedEvents + 1);
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("max_events: 1000001 is above 1000000"));
  EXPECT_EQ(recorded(1), 2u) << "as it was";
  ASSERT_EQ(broker_->SetRecording(session, 0), absl::OkStatus());
  EXPECT_EQ(recorded(0) + recorded(1), 0u);
  EXPECT_EQ(broker_->SetRecording(session, kMaxRecordedEvents), absl::OkStatus());
}

TEST_F(BrokerTest, SessionsOfAUserAreCounted) {
  Make({.max_sessions_per_uid = 2});
  const SessionPtr first = Open("a");
  Open("b");
  EXPECT_TRUE(absl::IsResourceExhausted(TryOpen("c").status()));
  Open("c", std::nullopt, Process(1, 2000));
  broker_->Close(first, "test");
  Open("d");
}

TEST_F(BrokerTest, SessionsAreForTheProcessThatOpenedThem) {
  const SessionPtr session = Open("a", std::nullopt, Process(10, 1000));
  EXPECT_EQ(broker_->FindSession(session->id(), Process(10, 1000)).value(), session);
  EXPECT_TRUE(absl::IsPermissionDenied(broker_->FindSession(session->id(), Process(11, 1000)).status()));
  EXPECT_TRUE(absl::IsPermissionDenied(broker_->FindSession(session->id(), Process(10, 1001)).status()));
  EXPECT_TRUE(absl::IsNotFound(broker_->FindSession(SessionId{99}, Process(10, 1000)).status()));
  EXPECT_EQ(broker_->FindSession(SessionRef(std::string("a"))).value(), session);
  EXPECT_EQ(broker_->FindSession(SessionRef(session->id())).value(), session);
  EXPECT_TRUE(absl::IsNotFound(broker_->FindSession(SessionRef(std::string("b"))).status()));
}

TEST_F(BrokerTest, BadRequestsAreAnswered) {
  const SessionPtr session = Open("a");
  EXPECT_TRUE(absl::IsInvalidArgument(Allocate(session, 0).status()));
  EXPECT_TRUE(absl::IsNotFound(Allocate(session, 512, 2).status()));
  EXPECT_TRUE(absl::IsNotFound(Allocate(session, 512, uint64_t{1} << 32).status())) << "not cut to 0";
}

TEST_F(BrokerTest, DevicesAreApart) {
  const SessionPtr session = Open("a");
  EXPECT_TRUE(Allocate(session, 40_MiB, 0).ok());
  EXPECT_TRUE(Allocate(session, 40_MiB, 1).ok());
  const SessionInfo info = broker_->Describe(*session);
  EXPECT_EQ(info.devices[0].account.reserved_bytes, 40_MiB);
  EXPECT_EQ(info.devices[1].stats.allocated_bytes.all.current, 40_MiB);
}

TEST_F(BrokerTest, LimitRefusalSaysSo) {
  const SessionPtr session = Open("a", Limit(22_MiB));
  ASSERT_TRUE(Allocate(session, 3_MiB).ok());
  const v1::OutOfMemory oom = Report(Allocate(session, 19_MiB).status());
  EXPECT_EQ(oom.cause(), v1::OutOfMemory::CAUSE_LIMIT);
  EXPECT_EQ(oom.limit_bytes(), 22_MiB);
  EXPECT_EQ(oom.reserved_bytes(), 20_MiB);
  EXPECT_EQ(oom.allocated_bytes(), 3_MiB);
  EXPECT_EQ(oom.segment_bytes(), 20_MiB);
  EXPECT_EQ(oom.largest_free_block_bytes(), 17_MiB);
  EXPECT_EQ(broker_->OomCount(0, OomCause::kLimit), 1u);
  EXPECT_EQ(broker_->OomCount(1, OomCause::kLimit), 0u);
}

TEST_F(BrokerTest, CapacityRefusalNamesTheLargestHolders) {
  for (const auto& [name, bytes] : std::vector<std::pair<std::string, uint64_t>>{
           {"small", 10_MiB}, {"big", 20_MiB}, {"middle", 12_MiB}, {"least", 2_MiB}}) {
    ASSERT_TRUE(Allocate(Open(name), bytes == 2_MiB ? 512 : bytes).ok());
  }
  const v1::OutOfMemory oom = Report(Allocate(Open("late"), 30_MiB).status());
  EXPECT_EQ(oom.cause(), v1::OutOfMemory::CAUSE_CAPACITY);
  EXPECT_EQ(oom.device_available_bytes(), 20_MiB);
  ASSERT_EQ(oom.largest_holders_size(), 3);
  EXPECT_EQ(oom.largest_holders(0).client(), "big");
  EXPECT_EQ(oom.largest_holders(1).client(), "middle");
  EXPECT_EQ(oom.largest_holders(2).client(), "small");
  EXPECT_EQ(broker_->OomCount(0, OomCause::kCapacity), 1u);
}

TEST_F(BrokerTest, FragmentationIsToldFromALimit) {
  const SessionPtr session = Open("a", Limit(20_MiB));
  std::vector<BlockId> blocks;
  for (int i = 0; i < 10; ++i) blocks.push_back(Allocate(session, 2_MiB).value().block);
  for (size_t i = 0; i < blocks.size(); i += 2) {
    ASSERT_EQ(broker_->Free(session, {blocks[i]}), absl::OkStatus());
  }
  const v1::OutOfMemory oom = Report(Allocate(session, 4_MiB).status());
  EXPECT_EQ(oom.cause(), v1::OutOfMemory::CAUSE_FRAGMENTATION);
  EXPECT_EQ(oom.largest_free_block_bytes(), 2_MiB);
  EXPECT_EQ(broker_->OomCount(0, OomCause::kFragmentation), 1u);
  EXPECT_EQ(broker_->OomCount(0, OomCause::kLimit), 0u);
}

TEST_F(BrokerTest, WhatNoDeviceCouldHoldIsRefusedUnseen) {
  const SessionPtr session = Open("a");
  for (const uint64_t bytes : {kCapacity + 1, kMaxRequestBytes, std::numeric_limits<uint64_t>::max()}) {
    EXPECT_EQ(Report(Allocate(session, bytes).status()).cause(), v1::OutOfMemory::CAUSE_LARGER_THAN_DEVICE) << bytes;
  }
  EXPECT_EQ(broker_->OomCount(0, OomCause::kLargerThanDevice), 3u);
  EXPECT_EQ(session->GetMemoryStats(0).num_ooms, 3u);
}

TEST_F(BrokerTest, MemoryComesBackWhenTheProcessEnds) {
  const SessionPtr session = Open("a");
  ASSERT_TRUE(Allocate(session, 40_MiB).ok());
  broker_->Disconnect(session);
  EXPECT_EQ(pools_[0]->GetFigures().charged_bytes, 40_MiB) << "the process may still use it";
  EXPECT_TRUE(absl::IsAborted(Allocate(session, 512).status()));
  ASSERT_EQ(gone_.size(), 1u);
  gone_[0]();
  EXPECT_EQ(pools_[0]->GetFigures().charged_bytes, 0u);
  EXPECT_EQ(broker_->session_count(), 0u);
  gone_[0]();
  EXPECT_EQ(broker_->session_count(), 0u);
  EXPECT_THAT(unwatched_, ElementsAre(0)) << "once";
}

TEST_F(BrokerTest, ProcessThatCannotBeWatchedGetsNoSession) {
  watch_error_ = absl::InternalError("no descriptors left");
  EXPECT_EQ(TryOpen("a").status(), watch_error_);
  EXPECT_EQ(broker_->session_count(), 0u);
  watch_error_ = absl::OkStatus();
  EXPECT_EQ(Open("a")->name(), "a") << "nothing is left of it";
}

TEST_F(BrokerTest, WaitingCallsAreLimited) {
  const SessionPtr session = Open("a");
  Gate& gate = controls_[0]->Hold(FakeDevice::Call::kAllocate);
  std::atomic<int> served = 0;
  std::atomic<int> refused = 0;
  const auto count = [&](absl::StatusOr<Allocation> allocation) {
    if (allocation.ok()) ++served;
    if (absl::IsResourceExhausted(allocation.status())) ++refused;
  };
  broker_->Allocate(session, 0, 512, 0, count);
  gate.AwaitArrivals(1);
  constexpr int kMax = SerialQueue::kMaxTasks;
  for (int i = 0; i < kMax; ++i) broker_->Allocate(session, 0, 512, 0, count);
  EXPECT_EQ(refused, 0);
  broker_->Allocate(session, 0, 512, 0, count);
  EXPECT_EQ(refused, 1) << "answered at once";
  absl::Status status;
  broker_->EmptyCache(session, [&](absl::StatusOr<uint64_t> bytes) { status = bytes.status(); });
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  gate.Open();
  workers_.reset();  // runs all
  EXPECT_EQ(served, kMax + 1);
}

TEST_F(BrokerTest, EndedSessionStaysChargedUntilClosed) {
  const SessionPtr session = Open("a");
  const std::shared_ptr<FakeClient> client = client_;
  ASSERT_TRUE(Allocate(session, 40_MiB).ok());
  EXPECT_EQ(broker_->EndSession(session, "operator"), 40_MiB);
  EXPECT_EQ(broker_->EndSession(session, "again"), 40_MiB);
  EXPECT_THAT(client->told(), ElementsAre("ended: operator"));
  EXPECT_TRUE(absl::IsAborted(Allocate(session, 512).status()));
  broker_->Close(session, "goodbye");
  EXPECT_EQ(pools_[0]->GetFigures().charged_bytes, 0u);
}

TEST_F(BrokerTest, OperatorChangesALimit) {
  const SessionPtr session = Open("a");
  const std::shared_ptr<FakeClient> client = client_;
  ASSERT_EQ(broker_->SetLimit(session, Limit(0.25)), absl::OkStatus());
  EXPECT_THAT(client->told(), ElementsAre("limit 0 16777216", "limit 1 16777216"));
  EXPECT_FALSE(Allocate(session, 18_MiB).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(broker_->SetLimit(session, Limit(2.0))));
  EXPECT_TRUE(Allocate(session, 16_MiB).ok());
  broker_->Close(session, "test");
  EXPECT_TRUE(absl::IsNotFound(broker_->SetLimit(session, Limit(0.5))));
}

TEST_F(BrokerTest, DrainTellsClientsAndRefusesNewOnes) {
  const SessionPtr session = Open("a");
  const std::shared_ptr<FakeClient> client = client_;
  broker_->Drain();
  EXPECT_THAT(client->told(), ElementsAre("draining"));
  EXPECT_TRUE(absl::IsUnavailable(TryOpen("b").status()));
  EXPECT_TRUE(Allocate(session, 512).ok()) << "those that are open go on";
}

TEST_F(BrokerTest, EmptyCacheAnswersWithTheBytes) {
  const SessionPtr session = Open("a");
  ASSERT_EQ(broker_->Free(session, {Allocate(session, 30_MiB).value().block}), absl::OkStatus());
  std::atomic<uint64_t> released = 0;
  broker_->EmptyCache(session, [&](absl::StatusOr<uint64_t> bytes) { released = bytes.value_or(0); });
  Drain(session);
  EXPECT_EQ(released, 30_MiB);
}

TEST_F(BrokerTest, HitsDoNotWaitForASlowRequestOfTheSession) {
  const SessionPtr session = Open("a");
  ASSERT_TRUE(Allocate(session, 512).ok());
  Gate& gate = controls_[0]->Hold(FakeDevice::Call::kAllocate);
  std::atomic<bool> slow_done = false;
  broker_->Allocate(session, 0, 40_MiB, 0, [&](absl::StatusOr<Allocation> allocation) {
    EXPECT_TRUE(allocation.ok()) << allocation.status();
    slow_done = true;
  });
  gate.AwaitArrivals(1);
  bool hit = false;
  broker_->Allocate(session, 0, 512, 0, [&](absl::StatusOr<Allocation> allocation) { hit = allocation.ok(); });
  EXPECT_TRUE(hit) << "answered before the call returned";
  EXPECT_FALSE(slow_done);
  gate.Open();
  Drain(session);
  EXPECT_TRUE(slow_done);
}

TEST_F(BrokerTest, CloseDuringASlowRequestAbortsIt) {
  const SessionPtr session = Open("a");
  Gate& gate = controls_[0]->Hold(FakeDevice::Call::kAllocate);
  absl::Status status;
  broker_->Allocate(session, 0, 40_MiB, 0,
                    [&](absl::StatusOr<Allocation> allocation) { status = allocation.status(); });
  gate.AwaitArrivals(1);
  broker_->Close(session, "its process has ended");
  gate.Open();
  Drain(session);
  EXPECT_TRUE(absl::IsAborted(status)) << status;
  EXPECT_EQ(pools_[0]->GetFigures().charged_bytes, 0u);
}

}  // namespace
}  // namespace vrambroker
