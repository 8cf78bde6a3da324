// SPDX-License-Identifier: Apache-2.0
//
// Idle memory goes to the session that needs the memory, guarantees hold, and waiting requests keep their order.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <signal.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "allocator/base/bytes.h"
#include "tests/support/buffers.h"
#include "tests/support/daemon_test.h"
#include "tests/support/proxy.h"
#include "tests/support/raw_client.h"
#include "tests/support/util.h"

namespace vrambroker::testing_support {
namespace {

using ::testing::HasSubstr;

struct Wishes {
  std::optional<Limit> limit;
  std::optional<Limit> guarantee;
  absl::Duration wait = absl::ZeroDuration();
};

class MemorySharingTest : public DaemonTest, public ::testing::WithParamInterface<Placement> {
 protected:
  void Start(const std::string& config = "") {
    ASSERT_OK(StartDaemon({.capacity = "256MiB", .config = config}));
    absl::StatusOr<RawClient> raw = RawClient::Connect(dir());
    ASSERT_OK(raw);
    raw_.emplace(*std::move(raw));
  }
  absl::StatusOr<Client> ConnectAs(const std::string& name, const Wishes& wishes = {}) {
    ClientOptions options;
    options.socket_dir = dir();
    options.name = name;
    options.limit = wishes.limit;
    options.guarantee = wishes.guarantee;
    options.wait = wishes.wait;
    options.placement = GetParam();
    options.call_timeout = kPatience;
    options.connect_timeout = kPatience;
    return Client::Connect(options);
  }
  // Returns the session as it is now; empty if there is no such session.
  v1::Session Session(const std::string& name) { return raw_->GetSession(Ref(name)).value_or(v1::Session()); }
  // Returns when `name` has `count` requests waiting.
  void AwaitWaiting(const std::string& name, int count) {
    WaitFor([&] {
      const v1::Session session = Session(name);
      return session.devices_size() > 0 && session.devices(0).waiting_size() == count;
    });
  }
  absl::Status SetPriority(const std::string& name, int priority) {
    v1::SetPriorityRequest request;
    *request.mutable_session() = Ref(name);
    request.set_priority(priority);
    v1::SetPriorityResponse response;
    return RawClient::Call(raw_->admin(), &v1::Admin::Stub::SetPriority, request, &response);
  }
  absl::Status SetGuarantee(const std::string& name, uint64_t bytes) {
    v1::SetGuaranteeRequest request;
    *request.mutable_session() = Ref(name);
    *request.mutable_guarantee() = BytesLimit(bytes);
    v1::SetGuaranteeResponse response;
    return RawClient::Call(raw_->admin(), &v1::Admin::Stub::SetGuarantee, request, &response);
  }

  std::optional<RawClient> raw_;
};

INSTANTIATE_TEST_SUITE_P(Placements, MemorySharingTest, ::testing::Values(Placement::kLeased, Placement::kRemote),
                         [](const auto& test) { return test.param == Placement::kLeased ? "Leased" : "Remote"; });

TEST_P(MemorySharingTest, IdleMemoryOfAnotherIsHandedOver) {
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_OK_AND_ASSIGN(Client hoarder, ConnectAs("hoarder"));
  ASSERT_OK_AND_ASSIGN(Buffer kept, hoarder.Allocate(40_MiB));
  Fill(kept, 1);
  ASSERT_OK_AND_ASSIGN(Buffer freed, hoarder.Allocate(200_MiB));
  ASSERT_OK(freed.Reset());  // the memory goes into the client's cache
  ASSERT_OK_AND_ASSIGN(Client needy, ConnectAs("needy"));
  ASSERT_OK_AND_ASSIGN(Buffer got, needy.Allocate(150_MiB));
  Fill(got, 2);
  EXPECT_TRUE(Holds(kept, 1));
  EXPECT_OK(hoarder.status());
}

TEST_P(MemorySharingTest, MemoryInUseIsNot) {
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_OK_AND_ASSIGN(Client holder, ConnectAs("holder"));
  ASSERT_OK_AND_ASSIGN(Buffer kept, holder.Allocate(200_MiB));
  Fill(kept, 1);
  ASSERT_OK_AND_ASSIGN(Client needy, ConnectAs("needy"));
  const absl::StatusOr<Buffer> refused = needy.Allocate(100_MiB);
  const std::optional<OutOfMemory> oom = GetOutOfMemory(refused.status());
  ASSERT_TRUE(oom.has_value()) << refused.status();
  EXPECT_EQ(oom->cause, OutOfMemory::Cause::kCapacity);
  EXPECT_TRUE(Holds(kept, 1));
  ASSERT_OK_AND_ASSIGN(const MemoryStats stats, needy.GetMemoryStats());
  EXPECT_EQ(stats.num_ooms, 1u);
}

TEST_P(MemorySharingTest, ARequestWaitsForMemory) {
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_OK_AND_ASSIGN(Client holder, ConnectAs("holder"));
  ASSERT_OK_AND_ASSIGN(Buffer kept, holder.Allocate(200_MiB));
  ASSERT_OK_AND_ASSIGN(Client patient, ConnectAs("patient", {.wait = kPatience}));
  absl::StatusOr<Buffer> got = absl::UnknownError("not asked");
  std::thread waiting([&] { got = patient.Allocate(100_MiB); });
  AwaitWaiting("patient", 1);
  const v1::WaitingRequest request = Session("patient").devices(0).waiting(0);
  EXPECT_EQ(request.bytes(), 100_MiB);
  EXPECT_EQ(request.place(), 1u);
  EXPECT_GT(request.left_ms(), 0u);
  EXPECT_OK(kept.Reset());
  waiting.join();
  ASSERT_OK(got);
  Fill(*got, 3);
  ASSERT_OK_AND_ASSIGN(const MemoryStats stats, patient.GetMemoryStats());
  EXPECT_EQ(stats.num_ooms, 0u) << "it got its memory";
}

TEST_P(MemorySharingTest, AndIsRefusedWhenItsTimeIsUp) {
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_OK_AND_ASSIGN(Client holder, ConnectAs("holder"));
  ASSERT_OK_AND_ASSIGN(Buffer kept, holder.Allocate(200_MiB));
  ASSERT_OK_AND_ASSIGN(Client patient, ConnectAs("patient", {.wait = absl::Seconds(5)}));
  const absl::Time begin = absl::Now();
  const absl::StatusOr<Buffer> refused = patient.Allocate(100_MiB);
  const std::optional<OutOfMemory> oom = GetOutOfMemory(refused.status());
  ASSERT_TRUE(oom.has_value()) << refused.status();
  EXPECT_EQ(oom->cause, OutOfMemory::Cause::kCapacity);
  EXPECT_GE(absl::Now() - begin, absl::Seconds(5));
  EXPECT_GT(oom->waited_ms, 0u) << "the part of it that was spent in the queue";
  EXPECT_EQ(Session("patient").devices(0).waiting_size(), 0);
}

TEST_P(MemorySharingTest, WaitingEndsWithTheClient) {
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_OK_AND_ASSIGN(Client holder, ConnectAs("holder"));
  ASSERT_OK_AND_ASSIGN(Buffer kept, holder.Allocate(200_MiB));
  ASSERT_OK_AND_ASSIGN(ClientProcess doomed, ClientProcess::Start(dir()));
  ASSERT_OK(doomed.Call(absl::StrCat("connect doomed - ", GetParam() == Placement::kRemote ? "remote" : "leased",
                                     " wait_ms=", absl::ToInt64Milliseconds(kPatience))));
  ASSERT_OK(doomed.Send(absl::StrCat("alloc ", 100_MiB)));
  AwaitWaiting("doomed", 1);
  ASSERT_OK_AND_ASSIGN(Client patient, ConnectAs("patient", {.wait = kPatience}));
  absl::StatusOr<Buffer> got = absl::UnknownError("not asked");
  std::thread waiting([&] { got = patient.Allocate(100_MiB); });
  AwaitWaiting("patient", 1);
  EXPECT_EQ(Session("patient").devices(0).waiting(0).place(), 2u);
  doomed.process().Signal(SIGKILL);
  WaitFor([&] {
    const v1::Session session = Session("patient");
    return session.devices(0).waiting(0).place() == 1;
  });
  EXPECT_OK(kept.Reset());
  waiting.join();
  EXPECT_OK(got);
}

TEST_P(MemorySharingTest, TheMoreImportantIsServedFirst) {
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_OK_AND_ASSIGN(Client holder, ConnectAs("holder"));
  ASSERT_OK_AND_ASSIGN(Buffer kept, holder.Allocate(200_MiB));
  ASSERT_OK_AND_ASSIGN(Client low, ConnectAs("low", {.wait = kPatience}));
  ASSERT_OK_AND_ASSIGN(Client high, ConnectAs("high", {.wait = kPatience}));
  ASSERT_OK(SetPriority("high", 10));
  EXPECT_EQ(SetPriority("high", 1001).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Session("high").priority(), 10);
  std::atomic<bool> low_has{false};
  absl::StatusOr<Buffer> first = absl::UnknownError("not asked");
  absl::StatusOr<Buffer> second = absl::UnknownError("not asked");
  std::thread low_waits([&] {
    first = low.Allocate(200_MiB);
    low_has = true;
  });
  AwaitWaiting("low", 1);
  std::thread high_waits([&] { second = high.Allocate(200_MiB); });
  AwaitWaiting("high", 1);
  ASSERT_OK(kept.Reset());
  high_waits.join();
  EXPECT_OK(second);
  EXPECT_FALSE(low_has);
  second = absl::UnknownError("given back");
  low_waits.join();
  EXPECT_OK(first);
}

// A request that waits keeps no session from free memory, however long the request waits. The session that the request
// waits for must get memory above all.
TEST_P(MemorySharingTest, ARequestThatCannotBeServedYetKeepsNobodyFromMemory) {
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_OK_AND_ASSIGN(Client holder, ConnectAs("holder"));
  ASSERT_OK_AND_ASSIGN(Buffer kept, holder.Allocate(26_MiB));
  ASSERT_OK_AND_ASSIGN(Client greedy, ConnectAs("greedy", {.wait = absl::Hours(1)}));
  absl::StatusOr<Buffer> everything = absl::UnknownError("not asked");
  std::thread waiting([&] { everything = greedy.Allocate(256_MiB); });
  EXPECT_TRUE(WaitFor([&] {
    const v1::Session session = Session("greedy");
    return session.devices_size() > 0 && session.devices(0).waiting_size() == 1 &&
           session.devices(0).waiting(0).waited_ms() > 1500;
  }));
  ASSERT_OK_AND_ASSIGN(Client other, ConnectAs("other"));
  {
    const absl::StatusOr<Buffer> small = other.Allocate(2_MiB);
    EXPECT_OK(small);
    const absl::StatusOr<Buffer> more = holder.Allocate(100_MiB);
    EXPECT_OK(more) << "it may need that to get done";
  }
  EXPECT_OK(kept.Reset());
  waiting.join();
  EXPECT_OK(everything) << "it is served when they have given back what they held";
}

TEST_P(MemorySharingTest, ThePolicySaysHowLongRequestsMayWait) {
  ASSERT_NO_FATAL_FAILURE(Start("max_wait: '100ms' rules { session_name: 'never' max_wait: '0s' }"));
  ASSERT_OK_AND_ASSIGN(Client holder, ConnectAs("holder"));
  ASSERT_OK_AND_ASSIGN(Buffer kept, holder.Allocate(200_MiB));
  for (const char* name : {"soon", "never"}) {
    ASSERT_OK_AND_ASSIGN(Client patient, ConnectAs(name, {.wait = absl::Hours(1)}));
    const absl::StatusOr<Buffer> refused = patient.Allocate(100_MiB);
    EXPECT_STATUS(refused, absl::StatusCode::kResourceExhausted, "");
  }
}

TEST_P(MemorySharingTest, ABlockThatAnotherThreadFreesEndsTheWaiting) {
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_OK_AND_ASSIGN(Client holder, ConnectAs("holder"));
  ASSERT_OK_AND_ASSIGN(Buffer kept, holder.Allocate(150_MiB));
  ASSERT_OK_AND_ASSIGN(Client patient, ConnectAs("patient", {.wait = absl::Hours(1)}));  // longer than a test may take
  ASSERT_OK_AND_ASSIGN(Buffer own, patient.Allocate(100_MiB));
  absl::StatusOr<Buffer> got = absl::UnknownError("not asked");
  std::thread waiting([&] { got = patient.Allocate(90_MiB); });
  AwaitWaiting("patient", 1);
  EXPECT_OK(own.Reset());
  waiting.join();
  EXPECT_OK(got);
}

TEST_P(MemorySharingTest, AGuaranteeIsThereWhateverOthersTake) {
  ASSERT_NO_FATAL_FAILURE(Start("rules { session_name: 'g*' guarantee { bytes: '100MiB' } }"));
  ASSERT_OK_AND_ASSIGN(Client guarded, ConnectAs("g"));
  EXPECT_EQ(Session("g").devices(0).guarantee_bytes(), 100_MiB);
  ASSERT_OK_AND_ASSIGN(Client greedy, ConnectAs("greedy", {.guarantee = Limit(uint64_t{0})}));
  const absl::StatusOr<Buffer> too_much = greedy.Allocate(158_MiB);
  const std::optional<OutOfMemory> oom = GetOutOfMemory(too_much.status());
  ASSERT_TRUE(oom.has_value()) << too_much.status();
  EXPECT_EQ(oom->cause, OutOfMemory::Cause::kCapacity);
  ASSERT_OK_AND_ASSIGN(Buffer rest, greedy.Allocate(156_MiB));
  ASSERT_OK_AND_ASSIGN(Buffer promised, guarded.Allocate(100_MiB));
  // The guarantee survives the return of the memory.
  ASSERT_OK(promised.Reset());
  ASSERT_OK(guarded.EmptyCache());
  EXPECT_TRUE(WaitFor([&] { return Session("g").devices(0).reserved_bytes() == 0; }));
  EXPECT_FALSE(greedy.Allocate(2_MiB).ok());
  EXPECT_OK(guarded.Allocate(100_MiB));
}

TEST_P(MemorySharingTest, AGuaranteeThatCannotBeKeptIsRefused) {
  ASSERT_NO_FATAL_FAILURE(Start("rules { guarantee { bytes: '150MiB' } }"));
  ASSERT_OK_AND_ASSIGN(Client first, ConnectAs("first"));
  const absl::StatusOr<Client> second = ConnectAs("second");
  EXPECT_EQ(second.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("44.00 MiB more than"));
  EXPECT_OK(ConnectAs("modest", {.guarantee = Limit(uint64_t{100_MiB})}));
  EXPECT_EQ(ConnectAs("more", {.guarantee = Limit(uint64_t{200_MiB})}).status().code(),
            absl::StatusCode::kPermissionDenied);
  ASSERT_OK_AND_ASSIGN(const v1::ListSessionsResponse left, raw_->ListSessions());
  for (const v1::Session& session : left.sessions()) {
    EXPECT_TRUE(session.name() == "first" || session.name() == "modest") << session.name() << " was refused";
  }
}

TEST_P(MemorySharingTest, AGuaranteeIsMadeOfOthersIdleMemory) {
  ASSERT_NO_FATAL_FAILURE(Start("rules { session_name: 'g*' guarantee { bytes: '150MiB' } } rules {}"));
  ASSERT_OK_AND_ASSIGN(Client hoarder, ConnectAs("hoarder"));
  ASSERT_OK_AND_ASSIGN(Buffer freed, hoarder.Allocate(200_MiB));
  const absl::StatusOr<Client> in_use = ConnectAs("g");
  EXPECT_EQ(in_use.status().code(), absl::StatusCode::kResourceExhausted) << in_use.status();
  ASSERT_OK(freed.Reset());
  absl::StatusOr<Client> guarded = absl::UnknownError("not tried");
  ASSERT_TRUE(WaitFor([&] { return (guarded = ConnectAs("g")).ok(); })) << guarded.status();
  EXPECT_OK(guarded->Allocate(150_MiB));
}

TEST_P(MemorySharingTest, GuaranteesChangeWhileTheyAreUsed) {
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_OK_AND_ASSIGN(Client a, ConnectAs("a"));
  ASSERT_OK_AND_ASSIGN(Client b, ConnectAs("b"));
  ASSERT_OK(SetGuarantee("a", 200_MiB));
  EXPECT_EQ(SetGuarantee("b", 100_MiB).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_FALSE(b.Allocate(100_MiB).ok());
  EXPECT_EQ(raw_->SetLimit(Ref("a"), BytesLimit(100_MiB)).status().code(), absl::StatusCode::kInvalidArgument);
  ASSERT_OK(SetGuarantee("a", 50_MiB));
  EXPECT_OK(b.Allocate(100_MiB));
  ASSERT_OK(raw_->SetLimit(Ref("a"), BytesLimit(100_MiB)));
}

TEST_P(MemorySharingTest, ALoweredLimitTakesWhatIsIdleAndNothingElse) {
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_OK_AND_ASSIGN(Client client, ConnectAs("client"));
  ASSERT_OK_AND_ASSIGN(Buffer kept, client.Allocate(60_MiB));
  Fill(kept, 1);
  ASSERT_OK_AND_ASSIGN(Buffer freed, client.Allocate(100_MiB));
  ASSERT_OK(freed.Reset());
  ASSERT_OK(raw_->SetLimit(Ref("client"), BytesLimit(40_MiB)));
  WaitFor([&] { return Session("client").devices(0).reserved_bytes() == 60_MiB; });
  EXPECT_TRUE(Holds(kept, 1));
  const absl::StatusOr<Buffer> refused = client.Allocate(2_MiB);
  const std::optional<OutOfMemory> oom = GetOutOfMemory(refused.status());
  ASSERT_TRUE(oom.has_value()) << refused.status();
  EXPECT_EQ(oom->cause, OutOfMemory::Cause::kLimit);
}

int WaitingOf(RawClient& raw) {
  const absl::StatusOr<v1::Session> session = raw.GetSession(Ref("raw"));
  return session.ok() ? session->devices(0).waiting_size() : -1;
}

// A raw call, without the library: a client that gives a call up does not wait on.
TEST_F(DaemonTest, AUnaryCallThatIsGivenUpWaitsNoLonger) {
  ASSERT_OK(StartDaemon({.capacity = "64MiB"}));
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  RawStream stream(raw);
  ASSERT_OK_AND_ASSIGN(const v1::Welcome welcome, stream.Hello());
  ASSERT_OK_AND_ASSIGN(Client holder, Connect("holder"));
  ASSERT_OK_AND_ASSIGN(Buffer kept, holder.Allocate(60_MiB));
  v1::AllocateRequest request;
  request.set_session_id(welcome.session_id());
  request.set_requested_bytes(20_MiB);
  request.set_wait_ms(60'000);
  grpc::ClientContext context;
  std::thread giver([&] {
    WaitFor([&] { return WaitingOf(raw) == 1; });
    context.TryCancel();
  });
  v1::AllocateResponse response;
  EXPECT_EQ(raw.broker().Allocate(&context, request, &response).error_code(), grpc::StatusCode::CANCELLED);
  giver.join();
  WaitFor([&] { return WaitingOf(raw) == 0; });

  request.set_wait_ms(3'600'001);
  const absl::Status too_long = RawClient::Call(raw.broker(), &v1::Broker::Stub::Allocate, request, &response);
  EXPECT_EQ(too_long.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(too_long.message()), HasSubstr("wait_ms"));
  ASSERT_OK(stream.Goodbye());
}

// ---- Clients give up waiting in the daemon when their own process has freed memory for the request ----

class GivenUpWaitTest : public DaemonTest {
 protected:
  void TearDown() override {
    if (proxy_ != nullptr) proxy_->Release();
    if (waiting_.joinable()) waiting_.join();
    got_ = absl::UnknownError("given back");
    held_ = Buffer();
    kept_ = Buffer();
    patient_.reset();
    holder_.reset();
    DaemonTest::TearDown();
  }

  // Makes `patient` hold all remaining memory in one block, and another thread of `patient` wait for the same amount.
  void BeginToWait(absl::Duration wait) {
    // The daemon does not ask back memory within a guarantee.
    ASSERT_OK(
        StartDaemon({.capacity = "64MiB", .config = "rules { session_name: 'patient' guarantee { bytes: '30MiB' } }"}));
    const std::string proxy_dir = MakeTempDir();
    ASSERT_OK_AND_ASSIGN(proxy_, Proxy::Start(proxy_dir, dir()));
    ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
    raw_.emplace(std::move(raw));
    ASSERT_OK_AND_ASSIGN(Client holder, Connect("holder"));
    holder_.emplace(std::move(holder));
    ASSERT_OK_AND_ASSIGN(kept_, holder_->Allocate(34_MiB));
    ClientOptions options;
    options.socket_dir = proxy_dir;
    options.name = "patient";
    options.wait = wait;
    options.call_timeout = kPatience;
    options.connect_timeout = kPatience;
    ASSERT_OK_AND_ASSIGN(Client patient, Client::Connect(options));
    patient_.emplace(std::move(patient));
    ASSERT_OK(raw_->SetRecording(Ref("patient"), 1000));
    ASSERT_OK_AND_ASSIGN(held_, patient_->Allocate(30_MiB));
    waiting_ = std::thread([this] { got_ = patient_->Allocate(30_MiB); });
    ASSERT_TRUE(IsWaiting(true));
  }
  // Tells whether the waiting comes to be as expected. The list asks no client for its figures, as GetSession does.
  bool IsWaiting(bool expected) {
    return WaitFor([&] {
      const absl::StatusOr<v1::ListSessionsResponse> list = raw_->ListSessions();
      if (!list.ok()) return false;
      return expected == std::any_of(list->sessions().begin(), list->sessions().end(),
                                     [](const v1::Session& session) { return session.devices(0).waiting_size() > 0; });
    });
  }
  // The waiting thread gives up. The test's thread takes the block before the waiting thread learns that the daemon
  // knows.
  void FreeAndTakeAgain() {
    proxy_->Hold();
    EXPECT_OK(held_.Reset());
    EXPECT_TRUE(IsWaiting(false));
    ASSERT_OK_AND_ASSIGN(held_, patient_->Allocate(30_MiB));
  }
  uint64_t CountedOoms() { return patient_->GetMemoryStats().value_or(MemoryStats()).num_ooms; }
  int RecordedOoms() {
    const auto parts = raw_->GetSnapshot(Ref("patient"), 0);
    EXPECT_OK(parts);
    int ooms = 0;
    for (const v1::GetSnapshotResponse& part : parts.value_or(std::vector<v1::GetSnapshotResponse>())) {
      for (const auto& event : part.events()) {
        ooms += event.action() == v1::GetSnapshotResponse::Event::ACTION_OUT_OF_MEMORY ? 1 : 0;
      }
    }
    return ooms;
  }

  std::unique_ptr<Proxy> proxy_;
  std::optional<RawClient> raw_;
  std::optional<Client> holder_;
  std::optional<Client> patient_;
  Buffer kept_;
  Buffer held_;
  absl::StatusOr<Buffer> got_ = absl::UnknownError("not asked");
  std::thread waiting_;
};

TEST_F(GivenUpWaitTest, ARequestThatSucceedsInTheEndIsNotCounted) {
  ASSERT_NO_FATAL_FAILURE(BeginToWait(kPatience));
  ASSERT_NO_FATAL_FAILURE(FreeAndTakeAgain());
  proxy_->Release();
  EXPECT_TRUE(IsWaiting(true)) << "again";
  EXPECT_EQ(CountedOoms(), 0u);
  EXPECT_OK(held_.Reset());
  waiting_.join();
  EXPECT_OK(got_);
  EXPECT_EQ(CountedOoms(), 0u);
  EXPECT_EQ(RecordedOoms(), 0);
}

TEST_F(GivenUpWaitTest, WhenItsTimeIsUpThenItIsRefusedForWhatItWaitedFor) {
  const absl::Duration wait = absl::Seconds(15);  // the test sees the wait within this time
  ASSERT_NO_FATAL_FAILURE(BeginToWait(wait));
  const absl::Time deadline = absl::Now() + wait;
  ASSERT_NO_FATAL_FAILURE(FreeAndTakeAgain());
  absl::SleepFor(deadline - absl::Now() + absl::Milliseconds(10));
  proxy_->Release();
  waiting_.join();
  const std::optional<OutOfMemory> oom = GetOutOfMemory(got_.status());
  ASSERT_TRUE(oom.has_value()) << got_.status();
  EXPECT_EQ(oom->cause, OutOfMemory::Cause::kCapacity) << got_.status();
  EXPECT_EQ(CountedOoms(), 1u);
  EXPECT_EQ(RecordedOoms(), 1);
}

TEST_F(GivenUpWaitTest, AFreeThatStreamsAreDoneWithIsSeen) {
  ASSERT_NO_FATAL_FAILURE(BeginToWait(kPatience));
  ASSERT_OK(held_.RecordStream(1));
  proxy_->Hold();  // holds questions of the daemon, too: a client that answers looks at its streams
  EXPECT_OK(held_.Reset());
  EXPECT_TRUE(IsWaiting(false));
  proxy_->Release();
  waiting_.join();
  EXPECT_OK(got_);
}

}  // namespace
}  // namespace vrambroker::testing_support
