// SPDX-License-Identifier: Apache-2.0
#include "server/core/broker.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "allocator/device/process_files.h"
#include "tests/support/util.h"
#include "tests/unit/server/core/broker_fixture.h"

namespace vrambroker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(LimitBytesTest, FractionsAreCutToBytes) {
  EXPECT_EQ(LimitBytes(Limit(0.5), 8_GiB), 4_GiB);
  EXPECT_EQ(LimitBytes(Limit(0.3), 100), 30u);
  EXPECT_EQ(LimitBytes(Limit(0.999), 10), 9u);
  EXPECT_EQ(LimitBytes(Limit(1.0), 8_GiB + 1), 8_GiB + 1);
  EXPECT_EQ(LimitBytes(Limit(0.0), 8_GiB), 0u);
  // The capacity is no exact double.
  EXPECT_LE(LimitBytes(Limit(1.0), (uint64_t{1} << 60) - 1), (uint64_t{1} << 60) - 1);
}

TEST(LimitBytesTest, BytesAreAtMostTheCapacity) {
  EXPECT_EQ(LimitBytes(Limit(uint64_t{5}), 10), 5u);
  EXPECT_EQ(LimitBytes(Limit(uint64_t{11}), 10), 10u);
  EXPECT_EQ(LimitBytes(Limit(uint64_t{0}), 10), 0u);
}

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
  EXPECT_EQ(broker_->sessions().size(), 0u);
}

TEST_F(BrokerTest, LimitIsTheSmallerOfWishAndPolicy) {
  Make({.policy = PolicyOf({.session_limit = Limit(0.5)})});
  const auto limit = [&](std::optional<Limit> wish) {
    return broker_->operator_view().Describe(*Open("x", wish)).devices[1].account.limit_bytes;
  };
  EXPECT_EQ(limit(std::nullopt), 32_MiB);
  EXPECT_EQ(limit(Limit(1.0)), 32_MiB);
  EXPECT_EQ(limit(Limit(0.25)), 16_MiB);
  EXPECT_EQ(limit(Limit(10_MiB)), 10_MiB);
}

// Returns a rule for each of two users: user 1000 gets much, user 2000 may not open sessions.
std::vector<PolicyRule> TwoRules() {
  PolicyRule much;
  much.label = "much";
  much.uid = 1000;
  much.session_name = "train*";
  much.limit = Limit(0.75);
  much.guarantee = Limit(8_MiB);
  much.priority = 5;
  much.tenant = "team";
  PolicyRule nothing;
  nothing.label = "nothing";
  nothing.uid = 2000;
  nothing.rights = {.client = false, .observer = false, .admin = false};
  return {much, nothing};
}

TEST_F(BrokerTest, SessionsGetTheTermsOfTheirRule) {
  Make({.policy = PolicyOf({.rules = TwoRules(), .session_limit = Limit(0.5)})});
  const SessionView train = broker_->operator_view().Describe(*Open("train"));
  EXPECT_EQ(train.terms.rule, "much");
  EXPECT_EQ(train.terms.tenant, "team");
  EXPECT_EQ(train.terms.priority, 5);
  EXPECT_EQ(train.terms.guarantee, Limit(8_MiB));
  EXPECT_EQ(train.devices[1].account.limit_bytes, 48_MiB) << "above session_limit";
  EXPECT_EQ(broker_->operator_view().Describe(*Open("train2", Limit(0.25))).devices[1].account.limit_bytes, 16_MiB)
      << "the wish";
  // The rule matches the name that the client gave, not the name that the daemon made unique.
  EXPECT_EQ(broker_->operator_view().Describe(*Open("train")).name, "train-2");
  const SessionView other = broker_->operator_view().Describe(*Open("other"));
  EXPECT_EQ(other.terms.rule, "");
  EXPECT_EQ(other.terms.tenant, "uid:1000");
  EXPECT_EQ(other.devices[1].account.limit_bytes, 32_MiB);
}

TEST_F(BrokerTest, WithoutTheRightNoSessionIsOpened) {
  Make({.policy = PolicyOf({.rules = TwoRules(), .max_sessions_per_uid = 1})});
  for (int i = 0; i < 3; ++i) {  // refusals do not count as sessions of the user
    const absl::Status status = TryOpen("x", std::nullopt, Process(1, 2000)).status();
    EXPECT_TRUE(absl::IsPermissionDenied(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("uid 2000 may not open a session named 'x'"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("rule nothing does not give it the right CLIENT"));
  }
  EXPECT_EQ(broker_->sessions().size(), 0u);
  broker_->SetPolicy(PolicyOf({}));
  Open("x", std::nullopt, Process(1, 2000));
}

TEST_F(BrokerTest, ANewPolicyIsForSessionsOpenedFromThenOn) {
  Make({.policy = PolicyOf({.rules = TwoRules()})});
  const SessionPtr before = Open("train");
  broker_->SetPolicy(PolicyOf({.session_limit = Limit(0.25), .max_sessions_per_uid = 2}));
  EXPECT_EQ(broker_->operator_view().Describe(*before).terms.rule, "much");
  EXPECT_EQ(broker_->operator_view().Describe(*before).devices[0].account.limit_bytes, 48_MiB);
  const SessionView after = broker_->operator_view().Describe(*Open("train"));
  EXPECT_EQ(after.terms.rule, "");
  EXPECT_EQ(after.devices[0].account.limit_bytes, 16_MiB);
  EXPECT_TRUE(absl::IsResourceExhausted(TryOpen("train").status()));
}

TEST_F(BrokerTest, TermsOfACallerAreApartFromAnySession) {
  std::vector<PolicyRule> rules = TwoRules();
  rules.push_back({.label = "group", .gid = 44, .rights = kEveryRight});
  Make({.policy = PolicyOf({.rules = rules, .daemon_uid = 900})});
  Caller caller = Process(1, 1000);
  EXPECT_EQ(broker_->TermsOf(caller)->rule, "") << "the rule that asks for a name is passed over";
  caller.groups = {27, 44};
  EXPECT_EQ(broker_->TermsOf(caller)->rule, "group");
  EXPECT_TRUE(broker_->TermsOf(caller)->rights.admin);
  EXPECT_TRUE(broker_->TermsOf(Process(1, 900))->rights.admin);
  EXPECT_FALSE(broker_->TermsOf(Process(1, 2000))->rights.observer);
}

TEST_F(BrokerTest, FractionsLowerTheLimit) {
  Make({.policy = PolicyOf({.session_limit = Limit(0.75)}), .allocator = {.per_process_memory_fraction = 0.5}});
  const auto limit = [&](std::optional<Limit> wish, std::optional<AllocatorOptions> allocator) {
    return broker_->operator_view()
        .Describe(*Open("x", wish, Process(1, 1000), allocator))
        .devices[1]
        .account.limit_bytes;
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
    ASSERT_EQ(broker_->allocations().Free(session, {Allocate(session, bytes).value().block}), absl::OkStatus());
  };
  free(12_MiB);
  free(14_MiB);
  ASSERT_TRUE(Allocate(session, 16_MiB).ok());
  EXPECT_EQ(session->GetMemoryStats(0).num_device_free, 0u) << "no limit, no collection";
  ASSERT_EQ(broker_->limits().SetLimit(session, Limit(62_MiB)), absl::OkStatus());
  ASSERT_TRUE(Allocate(session, 18_MiB).ok());
  EXPECT_EQ(session->GetMemoryStats(0).num_device_free, 2u) << "42 MiB are above half of 62; both are equally old";
  EXPECT_EQ(session->GetMemoryStats(0).num_alloc_retries, 0u);
}

TEST_F(BrokerTest, LimitsThatAreSetAtOnceDoNotMix) {
  const SessionPtr session = Open("a");
  client_->on_limit = [] { std::this_thread::yield(); };
  for (int round = 0; round < 200; ++round) {
    std::vector<std::thread> threads;
    for (const uint64_t limit : {20_MiB, 40_MiB}) {
      threads.emplace_back(
          [&, limit] { EXPECT_EQ(broker_->limits().SetLimit(session, Limit(limit)), absl::OkStatus()); });
    }
    for (std::thread& thread : threads) thread.join();
    const std::vector<std::string> told = client_->told();
    const std::vector<SessionDeviceView> devices = broker_->operator_view().Describe(*session).devices;
    ASSERT_EQ(told[told.size() - 2], absl::StrCat("limit 0 ", devices[0].account.limit_bytes));
    ASSERT_EQ(told[told.size() - 1], absl::StrCat("limit 1 ", devices[1].account.limit_bytes));
    ASSERT_EQ(devices[0].account.limit_bytes, devices[1].account.limit_bytes);
  }
}

TEST_F(BrokerTest, StreamsAreApart) {
  const SessionPtr session = Open("a", Limit(2_MiB));
  const Allocation first = Allocate(session, 512, 0, 7).value();
  const v1::OutOfMemory oom = Report(Allocate(session, 512, 0, 8).status());
  EXPECT_EQ(oom.cause(), v1::OutOfMemory::CAUSE_FRAGMENTATION) << "what stream 7 has free is not 8's";
  EXPECT_EQ(oom.holes().hole_bytes(), 2_MiB - 512);
  EXPECT_EQ(oom.largest_free_block_bytes(), 0u);
  EXPECT_THAT(oom.explanation(), HasSubstr("all of another stream or size than this request"));
  EXPECT_EQ(Allocate(session, 512, 0, 7).value().segment, first.segment);
}

TEST_F(BrokerTest, RecordingIsSetAndBounded) {
  Make({.record_events = 3});
  const SessionPtr session = Open("a");
  const auto recorded = [&](int device) { return session->remote()->allocator(device).Snapshot().history.size(); };
  ASSERT_TRUE(Allocate(session, 512, 1).ok());
  EXPECT_EQ(recorded(1), 3u) << "a segment, a block, the snapshot";
  EXPECT_EQ(recorded(0), 1u);
  ASSERT_EQ(SetRecording(session, 2), absl::OkStatus());
  EXPECT_EQ(recorded(1), 2u) << "a snapshot, and this one";
  const absl::Status status = SetRecording(session, kMaxRecordedEvents + 1);
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("max_events: 1000001 is above 1000000"));
  EXPECT_EQ(recorded(1), 2u) << "as it was";
  ASSERT_EQ(SetRecording(session, 0), absl::OkStatus());
  EXPECT_EQ(recorded(0) + recorded(1), 0u);
  EXPECT_EQ(SetRecording(session, kMaxRecordedEvents), absl::OkStatus());
}

TEST_F(BrokerTest, TimesAreExactForWhoAsksForMoreThanTheDefault) {
  Make({.record_events = 10});
  const SessionPtr session = Open("a");
  for (const bool exact : {false, true}) {
    ASSERT_EQ(SetRecording(session, exact ? 11 : 10), absl::OkStatus());
    const Allocation block = Allocate(session, 512).value();
    const auto allocated = std::chrono::steady_clock::now();
    while (std::chrono::steady_clock::now() - allocated < std::chrono::milliseconds(1)) {
    }
    ASSERT_EQ(broker_->allocations().Free(session, {block.block}), absl::OkStatus());
    int64_t allocate_us = 0;
    int64_t free_us = 0;
    for (const HistoryEvent& event : session->remote()->allocator(0).Snapshot().history) {
      if (event.action == HistoryAction::kAllocate) allocate_us = event.time_us;
      if (event.action == HistoryAction::kFreeRequested) free_us = event.time_us;
    }
    EXPECT_EQ(free_us > allocate_us, exact);
  }
}

TEST_F(BrokerTest, RecordedEventsOfAUserAreBounded) {
  // The broker has two devices.
  Make({.record_events = 10, .max_recorded_events_per_uid = 50});
  const SessionPtr first = Open("a");
  SessionPtr second = Open("b");
  EXPECT_EQ(second->recorded_events(), 10u);
  const SessionPtr third = Open("c");
  EXPECT_EQ(third->recorded_events(), 5u) << "less, but it is opened";
  EXPECT_EQ(Open("d")->recorded_events(), 0u);
  EXPECT_EQ(Open("e", std::nullopt, Process(1, 2000))->recorded_events(), 10u) << "another user";

  const absl::Status refused = SetRecording(third, 6);
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("max_recorded_events_per_uid"));
  EXPECT_EQ(third->recorded_events(), 5u) << "as it was";
  EXPECT_EQ(SetRecording(first, 9), absl::OkStatus());
  EXPECT_EQ(SetRecording(third, 6), absl::OkStatus());
  EXPECT_TRUE(absl::IsResourceExhausted(SetRecording(third, kMaxRecordedEvents)));
  broker_->Close(second, "test", CloseReason::kGoodbye);
  EXPECT_TRUE(absl::IsAborted(SetRecording(second, 1)));
  EXPECT_EQ(SetRecording(third, 16), absl::OkStatus());
  // A trace that needs less than a session records anyway leaves no more events to other sessions.
  Signal held;
  std::shared_ptr<RecordingHold> hold;
  broker_->recordings().Hold(first, 3, 1000, [&](absl::StatusOr<std::shared_ptr<RecordingHold>> answer) {
    hold = answer.value_or(nullptr);
    held.Notify();
  });
  held.WaitForNotification();
  ASSERT_NE(hold, nullptr);
  EXPECT_TRUE(absl::IsResourceExhausted(SetRecording(third, 17)));
  hold.reset();
}

TEST_F(BrokerTest, SessionsOfAUserAreCounted) {
  Make({.policy = PolicyOf({.max_sessions_per_uid = 2})});
  const SessionPtr first = Open("a");
  Open("b");
  EXPECT_TRUE(absl::IsResourceExhausted(TryOpen("c").status()));
  Open("c", std::nullopt, Process(1, 2000));
  broker_->Close(first, "test");
  Open("d");
}

TEST_F(BrokerTest, SessionsOfARuleAreCountedForEachUser) {
  PolicyRule rule;
  rule.label = "one";
  rule.session_name = "train*";
  rule.max_sessions = 1;
  Make({.policy = PolicyOf({.rules = {rule}})});
  const SessionPtr first = Open("train");
  const absl::Status refused = TryOpen("train2").status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("rule one, the most that its max_sessions allows"));
  Open("other");
  Open("train", std::nullopt, Process(1, 2000));
  broker_->Close(first, "test");
  Open("train");
}

TEST_F(BrokerTest, SessionsAreForTheProcessThatOpenedThem) {
  const SessionPtr session = Open("a", std::nullopt, Process(10, 1000));
  EXPECT_EQ(broker_->sessions().Find(session->id(), Process(10, 1000)).value(), session);
  EXPECT_TRUE(absl::IsPermissionDenied(broker_->sessions().Find(session->id(), Process(11, 1000)).status()));
  EXPECT_TRUE(absl::IsPermissionDenied(broker_->sessions().Find(session->id(), Process(10, 1001)).status()));
  EXPECT_TRUE(absl::IsNotFound(broker_->sessions().Find(SessionId{99}, Process(10, 1000)).status()));
  EXPECT_EQ(broker_->sessions().Find(SessionRef(std::string("a"))).value(), session);
  EXPECT_EQ(broker_->sessions().Find(SessionRef(session->id())).value(), session);
  EXPECT_TRUE(absl::IsNotFound(broker_->sessions().Find(SessionRef(std::string("b"))).status()));
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
  const SessionView info = broker_->operator_view().Describe(*session);
  EXPECT_EQ(info.devices[0].account.reserved_bytes, 40_MiB);
  EXPECT_EQ(info.devices[1].stats.allocated_bytes.all.current, 40_MiB);
}

// The broker may guarantee memory on unnamed devices to other sessions.
TEST_F(BrokerTest, ASessionHasNothingOfDevicesThatItHasNotNamed) {
  PolicyRule rule;
  rule.uid = 1000;
  rule.guarantee = Limit(0.75);
  Make({.policy = PolicyOf({.rules = {rule}})});
  const auto open = [&](std::vector<uint32_t> devices) {
    client_ = std::make_shared<FakeClient>();
    const absl::StatusOr<SessionPtr> session =
        broker_->OpenSession(Process(1, 1000), {.name = "rank", .devices = std::move(devices)}, client_);
    EXPECT_TRUE(session.ok()) << session.status();
    return *session;
  };
  const auto keep = [&](const SessionPtr& session, std::optional<Limit> wished) {
    absl::Status answer = absl::UnknownError("no answer");
    broker_->limits().KeepGuarantee(session, wished, /*goes_on=*/false,
                                    [&](const absl::Status& status) { answer = status; });
    return answer;
  };
  const auto has = [&](const SessionPtr& session, uint64_t limit, uint64_t guarantee) {
    const SessionView view = broker_->operator_view().Describe(*session);
    EXPECT_EQ(view.devices[0].account.limit_bytes, 0u);
    EXPECT_EQ(view.devices[0].account.guarantee_bytes, 0u);
    EXPECT_EQ(view.devices[1].account.limit_bytes, limit);
    EXPECT_EQ(view.devices[1].account.guarantee_bytes, guarantee);
  };
  EXPECT_EQ(keep(open({0}), Limit(0.75)), absl::OkStatus());
  const SessionPtr session = open({1});
  EXPECT_EQ(keep(session, std::nullopt), absl::OkStatus());  // keeps all that the policy allows
  has(session, kCapacity, 48_MiB);
  // Operators give the session no memory of unnamed devices, either.
  absl::Status set = absl::UnknownError("no answer");
  broker_->limits().SetGuarantee(session, Limit(0.5), [&](const absl::Status& status) { set = status; });
  EXPECT_EQ(set, absl::OkStatus());
  EXPECT_EQ(broker_->limits().SetLimit(session, Limit(0.5)), absl::OkStatus());
  has(session, 32_MiB, 32_MiB);
  EXPECT_THAT(client_->told(), ElementsAre("limit 0 0", "limit 1 33554432"));
  const absl::Status refused = Allocate(session, 2_MiB, 0).status();
  EXPECT_EQ(Report(refused).cause(), v1::OutOfMemory::CAUSE_LIMIT);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("the session has named other devices: 1"));
  EXPECT_THAT(Report(refused).advice(), HasSubstr("VRAMBROKER_DEVICES"));
  EXPECT_TRUE(Allocate(session, 2_MiB, 1).ok());
}

TEST_F(BrokerTest, LimitRefusalSaysSo) {
  const SessionPtr session = Open("a", Limit(22_MiB));
  ASSERT_TRUE(Allocate(session, 3_MiB).ok());
  const v1::OutOfMemory oom = Report(Allocate(session, 20_MiB).status());
  EXPECT_EQ(oom.cause(), v1::OutOfMemory::CAUSE_LIMIT);
  EXPECT_EQ(oom.limit_bytes(), 22_MiB);
  EXPECT_EQ(oom.reserved_bytes(), 20_MiB);
  EXPECT_EQ(oom.allocated_bytes(), 3_MiB);
  EXPECT_EQ(oom.segment_bytes(), 20_MiB);
  EXPECT_EQ(oom.largest_free_block_bytes(), 17_MiB);
  EXPECT_EQ(Refusals(0, OomCause::kLimit), 1u);
  EXPECT_EQ(Refusals(1, OomCause::kLimit), 0u);
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
  EXPECT_EQ(Refusals(0, OomCause::kCapacity), 1u);
}

TEST_F(BrokerTest, RefusalNamesIdleMemoryOfOthers) {
  const SessionPtr hoarder = Open("hoarder");
  const BlockId freed = Allocate(hoarder, 20_MiB).value().block;
  const BlockId split = Allocate(hoarder, 10_MiB).value().block;  // a segment of the same kind, kept partly used
  ASSERT_TRUE(Allocate(hoarder, 3_MiB).ok());
  ASSERT_EQ(broker_->allocations().Free(hoarder, {freed, split}), absl::OkStatus());
  const SessionPtr gone = Open("gone");
  ASSERT_TRUE(Allocate(gone, 10_MiB).ok());
  broker_->Disconnect(gone);

  Signal answered;
  absl::Status refused;
  broker_->allocations().Allocate(Open("late"), 0, 30_MiB, 0,
                                  [&](const absl::StatusOr<Allocation>& allocation) {
                                    refused = allocation.status();
                                    answered.Notify();
                                  },
                                  {.may_reclaim = false});
  answered.WaitForNotification();
  const v1::OutOfMemory oom = Report(refused);
  EXPECT_EQ(oom.cause(), v1::OutOfMemory::CAUSE_CAPACITY);
  const SessionView info = broker_->operator_view().Describe(*hoarder);
  const uint64_t idle = info.devices[0].account.reserved_bytes - 3_MiB;
  EXPECT_EQ(oom.idle_elsewhere_bytes(), idle);
  EXPECT_EQ(oom.device_quarantined_bytes(), 10_MiB);
  uint64_t not_asked = 0;
  uint64_t in_part_used = 0;
  for (const auto& holder : oom.idle_holders()) {
    EXPECT_EQ(holder.client(), "hoarder");
    (holder.why() == v1::OutOfMemory::IdleHolder::WHY_NOT_ASKED ? not_asked : in_part_used) += holder.idle_bytes();
  }
  EXPECT_GE(not_asked, 10_MiB);
  EXPECT_EQ(in_part_used, info.devices[0].stats.inactive_split_bytes.all.current);
  EXPECT_EQ(not_asked + in_part_used, idle);
}

// Memory that no living process holds comes back by itself: no process is left to end.
TEST_F(BrokerTest, RefusalTellsWhatEndedProcessesLeftFromWhatDetachedSessionsHold) {
  const SessionPtr dies = OpenLeasing("dies");
  const std::vector<Lease> left = LeaseSegments(dies, {20_MiB}).value();
  ASSERT_TRUE(pools_[0]->RedeemTicket(std::get<FdTicket>(left[0].handle), 1, 1000).ok());
  const SessionPtr detached = Open("detached");
  ASSERT_TRUE(Allocate(detached, 30_MiB).ok());
  broker_->Disconnect(detached);
  broker_->CloseGone(dies);
  ASSERT_EQ(pools_[0]->GetStats().quarantined_bytes, 20_MiB);

  const SessionPtr late = Open("late");
  const v1::OutOfMemory by_the_dead = Report(Allocate(late, 30_MiB, 0, 0, {.may_reclaim = false}).status());
  EXPECT_EQ(by_the_dead.device_quarantined_bytes(), 50_MiB);
  EXPECT_THAT(by_the_dead.advice(), HasSubstr("Wait for the 20.00 MiB that ended processes left behind"));
  EXPECT_THAT(by_the_dead.advice(), Not(HasSubstr("End the processes")));
  const v1::OutOfMemory by_the_detached = Report(Allocate(late, 40_MiB, 0, 0, {.may_reclaim = false}).status());
  EXPECT_THAT(by_the_detached.advice(), HasSubstr("End the processes of sessions that disconnected or were ended"));
  EXPECT_THAT(by_the_detached.advice(), HasSubstr("they still hold 30.00 MiB"));
  const v1::OutOfMemory by_both = Report(Allocate(late, 60_MiB, 0, 0, {.may_reclaim = false}).status());
  EXPECT_THAT(by_both.advice(), HasSubstr("which still hold 30.00 MiB, and wait for the 20.00 MiB"));
  pools_[0]->CheckQuarantine();
}

TEST_F(BrokerTest, RefusalsAreKept) {
  const SessionPtr session = Open("a", Limit(22_MiB));
  ASSERT_TRUE(Allocate(session, 3_MiB).ok());
  EXPECT_EQ(broker_->refusals().log().total(), 0u);
  const v1::OutOfMemory oom = Report(Allocate(session, 19_MiB).status());
  broker_->Close(session, "done");
  const auto events = broker_->refusals().log().NewestFirst();
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0]->session, session->id());
  EXPECT_EQ(events[0]->client, "a");
  EXPECT_EQ(events[0]->uid, session->caller().uid);
  EXPECT_EQ(events[0]->report.requested_bytes, 19_MiB);
  EXPECT_EQ(ToProto(events[0]->report).SerializeAsString(), oom.SerializeAsString());
}

// A session may be named like another session's number. Refusals tell a user no fact about a session that the user may
// not see.
TEST_F(BrokerTest, RefusalsAreFoundByNumberOrNameAmongThoseOneMaySee) {
  const SessionPtr secret = Open("secret", Limit(4_MiB), Process(1, 2000));
  const std::string number = absl::StrCat(Raw(secret->id()));
  const SessionPtr own = Open(number, Limit(4_MiB), Process(2, 1000));
  for (const SessionPtr& session : {secret, own}) EXPECT_FALSE(Allocate(session, 8_MiB).ok());
  const IdOrName wanted{.id = secret->id(), .name = number};
  const auto sessions_of = [&](const IdOrName& ref, std::optional<uid_t> uid) {
    std::vector<SessionId> sessions;
    const absl::StatusOr<Refusals::Events> events = broker_->refusals().LastOf(ref, uid);
    EXPECT_TRUE(events.ok()) << events.status();
    if (!events.ok()) return sessions;
    for (const auto& event : *events) sessions.push_back(event->session);
    return sessions;
  };
  EXPECT_THAT(sessions_of(wanted, 1000), ElementsAre(own->id()));
  EXPECT_THAT(sessions_of(wanted, 2000), ElementsAre(secret->id()));
  const absl::Status ambiguous = broker_->refusals().LastOf(wanted, std::nullopt).status();
  EXPECT_THAT(std::string(ambiguous.message()), HasSubstr("secret"));
  // Sessions without a refusal count, too.
  const SessionPtr quiet = Open("quiet", std::nullopt, Process(3, 2000));
  const std::string its_number = absl::StrCat(Raw(quiet->id()));
  const SessionPtr namesake = Open(its_number, std::nullopt, Process(4, 1000));
  const IdOrName either{.id = quiet->id(), .name = its_number};
  EXPECT_THAT(sessions_of(either, 1000), ::testing::IsEmpty());
  EXPECT_FALSE(broker_->refusals().LastOf(either, std::nullopt).ok());
}

TEST_F(BrokerTest, FragmentationIsToldFromALimit) {
  const SessionPtr session = Open("a", Limit(20_MiB));
  std::vector<BlockId> blocks;
  for (int i = 0; i < 10; ++i) blocks.push_back(Allocate(session, 2_MiB).value().block);
  for (size_t i = 0; i < blocks.size(); i += 2) {
    ASSERT_EQ(broker_->allocations().Free(session, {blocks[i]}), absl::OkStatus());
  }
  const v1::OutOfMemory oom = Report(Allocate(session, 4_MiB).status());
  EXPECT_EQ(oom.cause(), v1::OutOfMemory::CAUSE_FRAGMENTATION);
  EXPECT_EQ(oom.largest_free_block_bytes(), 2_MiB);
  EXPECT_EQ(Refusals(0, OomCause::kFragmentation), 1u);
  EXPECT_EQ(Refusals(0, OomCause::kLimit), 0u);
}

TEST_F(BrokerTest, WhatNoDeviceCouldHoldIsRefusedUnseen) {
  const SessionPtr session = Open("a");
  const std::vector<RemoteSession::NamedScope> scopes = {{.name = "forward"}, {.name = "attention"}};
  const RequestOptions growth{.scope = session->remote()->FindScope(scopes)};
  ASSERT_TRUE(Allocate(session, 4_MiB, 0, 0, growth).ok());
  for (const uint64_t bytes : {kCapacity + 1, kMaxRequestBytes, std::numeric_limits<uint64_t>::max()}) {
    const v1::OutOfMemory oom = Report(Allocate(session, bytes, 0, 0, growth).status());
    EXPECT_EQ(oom.cause(), v1::OutOfMemory::CAUSE_LARGER_THAN_DEVICE) << bytes;
    // The reader looks for the place in the program that computes the size wrongly.
    EXPECT_EQ(oom.scope(), "forward/attention") << bytes;
    ASSERT_EQ(oom.scopes_size(), 1) << bytes;
    EXPECT_EQ(oom.scopes(0).allocated_bytes(), 4_MiB) << bytes;
    EXPECT_EQ(oom.holes().hole_bytes(), 16_MiB) << bytes;
    EXPECT_GE(oom.block_bytes(), bytes);
    EXPECT_GE(oom.segment_bytes(), bytes);
  }
  EXPECT_EQ(Refusals(0, OomCause::kLargerThanDevice), 3u);
  EXPECT_EQ(session->GetMemoryStats(0).num_ooms, 3u);
}

TEST_F(BrokerTest, MemoryComesBackWhenTheProcessEnds) {
  const SessionPtr session = Open("a");
  ASSERT_TRUE(Allocate(session, 40_MiB).ok());
  broker_->Disconnect(session);
  EXPECT_EQ(pools_[0]->GetStats().charged_bytes, 40_MiB) << "the process may still use it";
  EXPECT_TRUE(absl::IsAborted(Allocate(session, 512).status()));
  ASSERT_EQ(gone_.size(), 1u);
  gone_[0]();
  EXPECT_EQ(pools_[0]->GetStats().charged_bytes, 0u);
  EXPECT_EQ(broker_->sessions().size(), 0u);
  gone_[0]();
  EXPECT_EQ(broker_->sessions().size(), 0u);
  EXPECT_THAT(unwatched_, ElementsAre(0)) << "once";
}

TEST_F(BrokerTest, OperatorsSeeWhoseASessionIsWhatItRunsAndHowLongItIsIdle) {
  SteadyTime now{std::chrono::hours(1)};
  std::vector<uid_t> asked;
  BrokerOptions options;
  options.clock = [&] { return now; };
  options.user_name = [&](uid_t uid) {
    asked.push_back(uid);
    return uid == 1000 ? "ann" : "";
  };
  Make(options);
  const SessionPtr session = Open("a", std::nullopt, Process(getpid(), 1000));
  EXPECT_THAT(asked, ElementsAre(1000)) << "so that it is known when somebody looks";
  now += std::chrono::seconds(3);
  const SessionPtr of_gone = Open("b", std::nullopt, Process(0x7FFFFFF0, 1001));
  now += std::chrono::milliseconds(5);
  EXPECT_TRUE(testing_support::WaitFor([&] { return session->command() == "server_test"; })) << session->command();
  const BrokerView view = broker_->operator_view().Look();
  ASSERT_EQ(view.sessions.size(), 2u);
  EXPECT_EQ(view.sessions[0].user, "ann");
  EXPECT_EQ(view.sessions[0].command, "server_test");
  EXPECT_EQ(view.sessions[0].idle, std::chrono::milliseconds(3005));
  EXPECT_EQ(view.sessions[1].user, "");
  EXPECT_EQ(view.sessions[1].command, "");
  EXPECT_EQ(view.sessions[1].idle, std::chrono::milliseconds(5));
  session->NoteUse(now + std::chrono::seconds(1));
  EXPECT_EQ(broker_->operator_view().Describe(*session).idle, std::chrono::milliseconds(0)) << "used after the look";
  EXPECT_EQ(broker_->operator_view().Describe(*session).user, "ann");
  broker_->CloseAll("while there is a clock");
}

TEST_F(BrokerTest, ASessionThatEndsSoonAfterARefusalIsCountedForItsTenant) {
  SteadyTime now{std::chrono::hours(1)};
  BrokerOptions options;
  options.clock = [&] { return now; };
  Make(options);
  const auto ended = [&](size_t device) {
    const TenantRefusals::ByTenant refusals = broker_->operator_view().Look().refusals;
    EXPECT_EQ(refusals.size(), 1u);
    return refusals.at(0).second.at(device).ended_sessions;
  };
  const auto refuse = [&](const SessionPtr& session, uint64_t device) {
    EXPECT_EQ(Report(Allocate(session, kCapacity + 1, device).status()).cause(),
              v1::OutOfMemory::CAUSE_LARGER_THAN_DEVICE);
  };
  SessionPtr session = Open("a");
  EXPECT_EQ(ended(0), 0u) << "it is there from the first session on";
  broker_->Close(session, "done");
  EXPECT_EQ(ended(0), 0u) << "nothing was refused";

  session = Open("b");
  refuse(session, 1);
  now += TenantRefusals::kSoon;
  broker_->Close(session, "done");
  EXPECT_EQ(ended(1), 1u);
  EXPECT_EQ(ended(0), 0u) << "another device";

  session = Open("c");
  refuse(session, 0);
  now += TenantRefusals::kSoon + std::chrono::milliseconds(1);
  gone_.back()();
  EXPECT_EQ(ended(0), 0u) << "it went on";

  session = Open("d");
  refuse(session, 0);
  refuse(session, 0);
  gone_.back()();
  EXPECT_EQ(ended(0), 1u) << "one session";

  session = Open("e");
  refuse(session, 0);
  broker_->Close(session, "the daemon stops", CloseReason::kDaemonStops);
  EXPECT_EQ(ended(0), 1u) << "it did not end by itself";
  const size_t cause = static_cast<size_t>(OomCause::kLargerThanDevice);
  EXPECT_EQ(broker_->operator_view().Look().refusals.at(0).second.at(0).ooms.at(cause), 4u)
      << "of sessions that are gone";
}

TEST_F(BrokerTest, ProcessThatCannotBeWatchedGetsNoSession) {
  watch_error_ = absl::InternalError("no descriptors left");
  EXPECT_EQ(TryOpen("a").status(), watch_error_);
  EXPECT_EQ(broker_->sessions().size(), 0u);
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
  broker_->allocations().Allocate(session, 0, 512, 0, count);
  gate.AwaitArrivals(1);
  constexpr int kMax = SerialQueue::kMaxTasks;
  for (int i = 0; i < kMax; ++i) broker_->allocations().Allocate(session, 0, 512, 0, count);
  EXPECT_EQ(refused, 0);
  broker_->allocations().Allocate(session, 0, 512, 0, count);
  EXPECT_EQ(refused, 1) << "answered at once";
  absl::Status status;
  session->Trim(0, [&](absl::StatusOr<uint64_t> bytes) { status = bytes.status(); });
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  gate.Open();
  workers_.reset();  // runs all tasks
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
  EXPECT_EQ(pools_[0]->GetStats().charged_bytes, 0u);
}

TEST_F(BrokerTest, OperatorChangesALimit) {
  const SessionPtr session = Open("a");
  const std::shared_ptr<FakeClient> client = client_;
  ASSERT_EQ(broker_->limits().SetLimit(session, Limit(0.25)), absl::OkStatus());
  EXPECT_THAT(client->told(), ElementsAre("limit 0 16777216", "limit 1 16777216"));
  EXPECT_FALSE(Allocate(session, 18_MiB).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(broker_->limits().SetLimit(session, Limit(2.0))));
  EXPECT_TRUE(Allocate(session, 16_MiB).ok());
  broker_->Close(session, "test");
  EXPECT_TRUE(absl::IsAborted(broker_->limits().SetLimit(session, Limit(0.5)))) << "it has ended";
}

TEST_F(BrokerTest, ALimitIsChangedOnAllDevicesOrOnNone) {
  const SessionPtr session = Open("a");
  const std::shared_ptr<FakeClient> client = client_;
  ASSERT_EQ(broker_->limits().SetLimit(session, Limit(48_MiB)), absl::OkStatus());
  ASSERT_TRUE(pools_[1]->SetGuarantee(session->id(), 20_MiB).ok());
  const absl::Status refused = broker_->limits().SetLimit(session, Limit(10_MiB));
  EXPECT_TRUE(absl::IsInvalidArgument(refused));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("below the session's guarantee"));
  for (const auto& pool : pools_) EXPECT_EQ(pool->GetAccount(session->id())->limit_bytes, 48_MiB);
  EXPECT_THAT(client->told(), ElementsAre("limit 0 50331648", "limit 1 50331648"));
  // The limit is possible once the guarantee is gone.
  ASSERT_TRUE(pools_[1]->SetGuarantee(session->id(), 0).ok());
  EXPECT_EQ(broker_->limits().SetLimit(session, Limit(10_MiB)), absl::OkStatus());
}

// A guarantee that is given in between does not keep the limit from going back to its old value.
TEST_F(BrokerTest, ALimitThatOneDeviceRefusesIsRaisedOnNone) {
  const SessionPtr session = Open("a");
  ASSERT_TRUE(pools_[0]->SetLimit(session->id(), 10_MiB).ok());
  ASSERT_TRUE(pools_[1]->SetGuarantee(session->id(), 20_MiB).ok());
  pools_[0]->SetOnCapacityFreed([&] { (void)pools_[0]->SetGuarantee(session->id(), 12_MiB); });
  EXPECT_TRUE(absl::IsInvalidArgument(broker_->limits().SetLimit(session, Limit(15_MiB))));
  pools_[0]->SetOnCapacityFreed(nullptr);
  EXPECT_EQ(pools_[0]->GetAccount(session->id())->limit_bytes, 10_MiB);
  EXPECT_EQ(pools_[1]->GetAccount(session->id())->limit_bytes, kCapacity);
}

TEST_F(BrokerTest, AGuaranteeIsGivenOnAllDevicesOrStaysAsItWas) {
  const SessionPtr holder = Open("holder");
  ASSERT_TRUE(Allocate(holder, 60_MiB, /*device=*/1).ok());
  const SessionPtr session = Open("a");
  const auto set = [&](uint64_t bytes) {
    Signal answered;
    absl::Status answer;
    broker_->limits().SetGuarantee(session, Limit(bytes), [&](const absl::Status& status) {
      answer = status;
      answered.Notify();
    });
    answered.WaitForNotification();
    return answer;
  };
  ASSERT_EQ(set(4_MiB), absl::OkStatus());
  const absl::Status refused = set(20_MiB);
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_EQ(SegmentRefusalCause(refused), std::nullopt) << "no request for memory";
  for (const auto& pool : pools_) EXPECT_EQ(pool->GetAccount(session->id())->guarantee_bytes, 4_MiB);
}

// Another session would have the released memory by the time of the refusal.
TEST_F(BrokerTest, AGuaranteeThatOneDeviceRefusesIsLoweredOnNone) {
  const SessionPtr holder = Open("holder");
  ASSERT_TRUE(Allocate(holder, 60_MiB, /*device=*/1).ok());
  const SessionPtr session = Open("a");
  ASSERT_TRUE(pools_[0]->SetGuarantee(session->id(), 40_MiB).ok());
  pools_[0]->SetOnCapacityFreed([&] { (void)pools_[0]->SetGuarantee(holder->id(), 40_MiB); });
  Signal answered;
  broker_->limits().SetGuarantee(session, Limit(20_MiB), [&](const absl::Status& status) {
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    answered.Notify();
  });
  answered.WaitForNotification();
  pools_[0]->SetOnCapacityFreed(nullptr);
  EXPECT_EQ(pools_[0]->GetAccount(session->id())->guarantee_bytes, 40_MiB);
  EXPECT_EQ(pools_[1]->GetAccount(session->id())->guarantee_bytes, 0u);
}

TEST_F(BrokerTest, AnEndedSessionIsLeftWithoutAGuarantee) {
  const SessionPtr holder = Open("holder");
  const std::shared_ptr<FakeClient> holding = client_;
  const absl::StatusOr<Allocation> cached = Allocate(holder, 60_MiB, /*device=*/1);
  ASSERT_TRUE(cached.ok() && holder->remote()->Free({cached->block}).ok());
  const SessionPtr session = Open("a");
  // The session ends while the second device makes room. The end cancels waiting requests; the request of this change
  // is not waiting yet.
  holding->on_close = [&](absl::Span<const SegmentId> segments) {
    EXPECT_TRUE(session->Advance(SessionState::kEnded));
    for (const auto& pool : pools_) EXPECT_TRUE(pool->SetGuarantee(session->id(), 0).ok());
    holder->remote()->SegmentsClosed(segments);
  };
  Signal answered;
  absl::Status answer;
  broker_->limits().SetGuarantee(session, Limit(20_MiB), [&](const absl::Status& status) {
    answer = status;
    answered.Notify();
  });
  answered.WaitForNotification();
  EXPECT_TRUE(absl::IsAborted(answer)) << answer;
  for (const auto& pool : pools_) EXPECT_EQ(pool->GetAccount(session->id())->guarantee_bytes, 0u);
}

TEST_F(BrokerTest, DrainTellsClientsAndRefusesNewOnes) {
  const SessionPtr session = Open("a");
  const std::shared_ptr<FakeClient> client = client_;
  broker_->Drain();
  broker_->Drain("no device can be used");
  EXPECT_THAT(client->told(), ElementsAre("draining", "draining: no device can be used"));
  EXPECT_TRUE(absl::IsUnavailable(TryOpen("b").status()));
  EXPECT_TRUE(Allocate(session, 512).ok()) << "those that are open go on";
}

// A pool whose lock is taken for long holds up only the session that is being made.
TEST_F(BrokerTest, ASessionIsMadeWithoutTheRegistrysLock) {
  const SessionId other{1000};
  Gate closing;
  std::atomic<bool> holds{false};
  SegmentPool free(std::make_unique<FakeDevice>(kCapacity), kCapacity, &next_segment_);
  SegmentPool busy(std::make_unique<FakeDevice>(kCapacity), kCapacity, &next_segment_, {.clock = [&] {
                     if (holds.exchange(false)) closing.Pass();
                     return std::chrono::steady_clock::now();
                   }});
  busy.OpenAccount(other, {.client = "other"});
  Broker broker(
      {.watch_process = [](const UniqueFd&, const std::function<void()>&) { return 1; }, .unwatch_process = [](int) {}},
      {&free, &busy}, workers_.get());
  holds = true;
  std::thread closer([&] { busy.CloseAccount(other); });  // reads the clock with the pool's lock held
  closing.AwaitArrivals(1);
  absl::Status opened;
  std::thread opener(
      [&] { opened = broker.OpenSession(Process(1, 1000), {.name = "a"}, std::make_shared<FakeClient>()).status(); });
  while (!free.GetAccount(SessionId{1}).has_value()) std::this_thread::yield();
  Signal looked;
  std::thread looker([&] {
    EXPECT_EQ(broker.sessions().size(), 0u) << "half made";
    EXPECT_TRUE(absl::IsNotFound(broker.sessions().Find(SessionRef("a")).status()));
    broker.Drain();
    looked.Notify();
  });
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!looked.HasBeenNotified() && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  EXPECT_TRUE(looked.HasBeenNotified()) << "the broker's lock is held";
  closing.Open();
  for (std::thread* thread : {&closer, &opener, &looker}) thread->join();
  EXPECT_TRUE(absl::IsUnavailable(opened)) << opened << ", though nobody told it that the daemon stops";
  EXPECT_EQ(broker.sessions().size(), 0u);
  EXPECT_FALSE(free.GetAccount(SessionId{1}).has_value());
  EXPECT_FALSE(busy.GetAccount(SessionId{1}).has_value());
  EXPECT_EQ(broker.operator_view().Look().counts.refused, 1u);
}

TEST_F(BrokerTest, EmptyCacheAnswersWithTheBytes) {
  const SessionPtr session = Open("a");
  ASSERT_EQ(broker_->allocations().Free(session, {Allocate(session, 30_MiB).value().block}), absl::OkStatus());
  std::atomic<uint64_t> released = 0;
  session->Trim(0, [&](absl::StatusOr<uint64_t> bytes) { released = bytes.value_or(0); });
  Drain(session);
  EXPECT_EQ(released, 30_MiB);
}

TEST_F(BrokerTest, HitsDoNotWaitForASlowRequestOfTheSession) {
  const SessionPtr session = Open("a");
  ASSERT_TRUE(Allocate(session, 512).ok());
  Gate& gate = controls_[0]->Hold(FakeDevice::Call::kAllocate);
  std::atomic<bool> slow_done = false;
  broker_->allocations().Allocate(session, 0, 40_MiB, 0, [&](absl::StatusOr<Allocation> allocation) {
    EXPECT_TRUE(allocation.ok()) << allocation.status();
    slow_done = true;
  });
  gate.AwaitArrivals(1);
  bool hit = false;
  broker_->allocations().Allocate(session, 0, 512, 0,
                                  [&](absl::StatusOr<Allocation> allocation) { hit = allocation.ok(); });
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
  broker_->allocations().Allocate(session, 0, 40_MiB, 0,
                                  [&](absl::StatusOr<Allocation> allocation) { status = allocation.status(); });
  gate.AwaitArrivals(1);
  broker_->Close(session, "its process has ended");
  gate.Open();
  Drain(session);
  EXPECT_TRUE(absl::IsAborted(status)) << status;
  EXPECT_EQ(pools_[0]->GetStats().charged_bytes, 0u);
}

// ---- Memory carried over ----

TEST_F(BrokerTest, WhatAProcessHasNotHeldItselfIsNotItsOwn) {
  const ProcessId self{.pid = getpid(), .started = StartOf(getpid())};
  const ProcessId before{.pid = getpid(), .started = self.started - 1};
  controls_[0]->Leave({{.file_device = 1, .file_inode = 1, .bytes = 4_MiB, .holders = {self}},
                       {.file_device = 1, .file_inode = 2, .bytes = 8_MiB, .holders = {before}}});
  ASSERT_TRUE(pools_[0]->FindCarriedOver().ok());
  const SessionPtr session = Open("heir", std::nullopt, Process(getpid(), 1000));
  EXPECT_EQ(pools_[0]->GetAccount(session->id())->carried_over_bytes, 4_MiB);
  controls_[0]->Leave({});
  ASSERT_TRUE(pools_[0]->FindCarriedOver().ok());
  ASSERT_TRUE(pools_[0]->FindCarriedOver().ok());
  EXPECT_EQ(pools_[0]->GetStats().charged_bytes, 0u);
}

}  // namespace
}  // namespace vrambroker
