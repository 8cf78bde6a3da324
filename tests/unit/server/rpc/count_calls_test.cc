// SPDX-License-Identifier: Apache-2.0
//
// Tests of the count socket's calls on a broker, without the socket: a client's session, and the cost of a client's
// calls.
#include "server/rpc/count_calls.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <string>

#include "server/core/returning.h"
#include "tests/support/step_workers.h"
#include "tests/unit/server/core/broker_fixture.h"

namespace vrambroker {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::StartsWith;

constexpr uid_t kUser = 1000;

class CountCallsTest : public BrokerTest {
 protected:
  CountCallsTest() {
    broker_.reset();
    workers_ = std::make_unique<StepWorkers>();
    PolicyRule rule;
    rule.label = "one";
    rule.session_name = "one";
    rule.max_sessions = 1;
    BrokerOptions options;
    options.policy = PolicyOf({.rules = {rule}});
    Make(std::move(options));
  }
  void SetUp() override {
    session_calls_ = std::make_unique<SessionCalls>(broker_.get(), &rates_);
    returning_ = std::make_unique<Returning>(&broker_->sessions());
    calls_ = std::make_unique<CountCalls>(broker_.get(), session_calls_.get(), &rpcs_, returning_.get());
  }

  void Settle() { static_cast<StepWorkers&>(*workers_).Settle(); }
  // Returns a process as a caller: this process or its parent.
  static Caller Of(pid_t pid, uid_t uid = kUser) {
    const auto pidfd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
    return {.pid = pid, .uid = uid, .pidfd = std::make_shared<UniqueFd>(pidfd)};
  }
  absl::StatusOr<SessionPtr> Hello(const std::string& name, const Caller& caller = Of(getpid()),
                                   const RandomToken& token = {}, const std::string& devices = "") {
    CountRequest request = {};
    request.call = VRAMBROKER_COUNT_HELLO;
    name.copy(request.name, sizeof request.name - 1);
    devices.copy(request.devices, sizeof request.devices);  // a NUL follows only where room is left
    std::memcpy(request.token, token.data(), sizeof request.token);
    absl::StatusOr<SessionPtr> answer = absl::UnknownError("no answer");
    calls_->Hello(caller, request, [&](absl::StatusOr<SessionPtr> session) { answer = std::move(session); });
    Settle();
    return answer;
  }
  absl::StatusOr<SessionPtr> Join(const Caller& caller, const RandomToken& token) {
    CountRequest request = {};
    request.call = VRAMBROKER_COUNT_JOIN;
    std::memcpy(request.token, token.data(), sizeof request.token);
    const absl::StatusOr<CountCalls::Joined> joined = calls_->Join(caller, request);
    if (!joined.ok()) return joined.status();
    return joined->session;
  }
  // Returns the code of the answer. `arrives`: true if the client gets the answer.
  absl::StatusCode Call(const SessionPtr& session, uint32_t call, uint64_t bytes, bool arrives = true) {
    CountRequest request = {};
    request.call = call;
    request.bytes = bytes;
    std::optional<absl::StatusCode> code;
    calls_->Make(session, request, {}, [&](const CountAnswer& answer) {
      code = static_cast<absl::StatusCode>(answer.code);
      return arrives;
    });
    Settle();
    return code.value_or(absl::StatusCode::kUnknown);
  }
  uint64_t Charged(const SessionPtr& session) const {
    return pools_[0]->GetAccount(session->id()).value_or(AccountState()).reserved_bytes;
  }

  static constexpr uint32_t kPerSecond = 20;
  CallRates rates_{kPerSecond};
  RpcMeter rpcs_;
  std::unique_ptr<SessionCalls> session_calls_;
  std::unique_ptr<Returning> returning_;
  std::unique_ptr<CountCalls> calls_;
};

// A lost session counts against its process's bound until the process opens the next session.
TEST_F(CountCallsTest, ASessionThatWasLostIsNotInTheWayOfTheNextOne) {
  const absl::StatusOr<SessionPtr> first = Hello("one");
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(Call(*first, VRAMBROKER_COUNT_CHARGE, 8_MiB), absl::StatusCode::kOk);
  EXPECT_TRUE(absl::IsResourceExhausted(Hello("one").status())) << "it has its connection";
  EXPECT_EQ((*first)->state(), SessionState::kActive);
  EXPECT_EQ(Charged(*first), 8_MiB);
  broker_->Disconnect(*first);
  EXPECT_TRUE(absl::IsResourceExhausted(Hello("one", Of(getppid())).status())) << "another process";
  EXPECT_EQ(Charged(*first), 8_MiB);
  const absl::StatusOr<SessionPtr> next = Hello("one");
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ((*first)->state(), SessionState::kClosed);
  EXPECT_EQ(pools_[0]->GetStats().charged_bytes, 0u);
  // A lost session goes even if the session is in no client's way.
  const absl::StatusOr<SessionPtr> other = Hello("other");
  ASSERT_TRUE(other.ok()) << other.status();
  broker_->Disconnect(*other);
  ASSERT_TRUE(Hello("third").ok());
  EXPECT_EQ((*other)->state(), SessionState::kClosed);
  EXPECT_EQ((*next)->state(), SessionState::kActive);
}

TEST_F(CountCallsTest, ALostSessionStaysWhereThereIsNoOther) {
  const absl::StatusOr<SessionPtr> lost = Hello("lost");
  ASSERT_TRUE(lost.ok()) << lost.status();
  EXPECT_EQ(Call(*lost, VRAMBROKER_COUNT_CHARGE, 8_MiB), absl::StatusCode::kOk);
  broker_->Disconnect(*lost);
  EXPECT_TRUE(absl::IsInvalidArgument(Hello("no name\n").status()));
  EXPECT_EQ((*lost)->state(), SessionState::kDisconnected);
  EXPECT_EQ(Charged(*lost), 8_MiB);
}

TEST_F(CountCallsTest, ATokenIsGoodInItsProcessAlone) {
  const absl::StatusOr<SessionPtr> session = Hello("a");
  ASSERT_TRUE(session.ok()) << session.status();
  const RandomToken token = (*session)->counted()->join_token();
  EXPECT_EQ(Join(Of(getpid()), token).value(), *session);
  EXPECT_TRUE(absl::IsNotFound(Join(Of(getppid()), token).status()));
  EXPECT_TRUE(absl::IsNotFound(Join(Of(getpid()), {}).status()));
  broker_->Disconnect(*session);
  const absl::StatusOr<SessionPtr> others = Hello("b", Of(getppid()), token);
  ASSERT_TRUE(others.ok()) << others.status();
  EXPECT_NE(*others, *session);
  EXPECT_EQ((*session)->state(), SessionState::kDisconnected);
  EXPECT_EQ(Hello("a", Of(getpid()), token).value(), *session) << "it goes on";
  EXPECT_EQ((*session)->state(), SessionState::kActive);
  // A program without the session's token begins a new session.
  broker_->Disconnect(*session);
  EXPECT_NE(Hello("a", Of(getpid()), (*others)->counted()->join_token()).value(), *session);
  EXPECT_EQ((*session)->state(), SessionState::kClosed);
}

TEST_F(CountCallsTest, ASessionHasTheDevicesThatItNames) {
  EXPECT_THAT(Hello("all").value()->devices(), IsEmpty());
  for (const std::string& devices : {std::string(","), std::string("1,"), std::string(" "), std::string(512, '0')}) {
    const absl::Status wrong = Hello("wrong", Of(getpid()), {}, devices).status();
    EXPECT_EQ(wrong.code(), absl::StatusCode::kInvalidArgument) << devices;
    EXPECT_THAT(std::string(wrong.message()), StartsWith("devices: "));
  }
  EXPECT_TRUE(absl::IsNotFound(Hello("wrong", Of(getpid()), {}, "1,2").status()));

  const absl::StatusOr<SessionPtr> session = Hello("a", Of(getpid()), {}, " 1 ,1");
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_THAT((*session)->devices(), ElementsAre(1));
  for (const uint32_t call : {VRAMBROKER_COUNT_CHARGE, VRAMBROKER_COUNT_WAIT}) {
    EXPECT_EQ(Call(*session, call, 2_MiB), absl::StatusCode::kResourceExhausted);
  }
  // HOLD charges no bytes on such a device, and succeeds: the program's memory is others' use of the device.
  EXPECT_EQ(Call(*session, VRAMBROKER_COUNT_HOLD, 2_MiB), absl::StatusCode::kOk);
  EXPECT_EQ(Charged(*session), 0u);
  // A session that goes on keeps its devices.
  broker_->Disconnect(*session);
  EXPECT_EQ(Hello("a", Of(getpid()), (*session)->counted()->join_token(), "0").value(), *session);
  EXPECT_THAT((*session)->devices(), ElementsAre(1));
}

TEST_F(CountCallsTest, WhomAnOperatorHasEndedGetsNoOther) {
  const absl::StatusOr<SessionPtr> session = Hello("a");
  ASSERT_TRUE(session.ok()) << session.status();
  const RandomToken token = (*session)->counted()->join_token();
  broker_->EndSession(*session, "test");
  EXPECT_TRUE(absl::IsAborted(Hello("a").status()));
  EXPECT_TRUE(absl::IsAborted(Hello("a", Of(getpid()), token).status()));
  EXPECT_TRUE(Hello("a", Of(getppid())).ok());
}

// The daemon makes each uncharge at any call rate, and the client owes the call: a client is not charged for memory
// that the client has given back.
TEST_F(CountCallsTest, WhatIsGivenBackTooOftenIsOwed) {
  const absl::StatusOr<SessionPtr> session = Hello("a");
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_EQ(Call(*session, VRAMBROKER_COUNT_CHARGE, 60_MiB), absl::StatusCode::kOk);
  while (Call(*session, VRAMBROKER_COUNT_INFO, 0) == absl::StatusCode::kOk) {
  }
  EXPECT_EQ(Call(*session, VRAMBROKER_COUNT_CHARGE, 2_MiB), absl::StatusCode::kUnavailable);
  SteadyTime last;
  for (uint32_t i = 0; i < 10 * kPerSecond; ++i) {
    last = std::chrono::steady_clock::now();
    EXPECT_EQ(Call(*session, VRAMBROKER_COUNT_UNCHARGE, 2_MiB) == absl::StatusCode::kOk, i < 30) << i;
  }
  EXPECT_EQ(Charged(*session), 0u);
  // A client can owe the calls of two seconds.
  EXPECT_FALSE(rates_.Take((*session)->caller().user(), last + std::chrono::seconds(1)).ok());
}

TEST_F(CountCallsTest, WhatAClientCannotBeToldItIsNotCharged) {
  const absl::StatusOr<SessionPtr> session = Hello("a");
  ASSERT_TRUE(session.ok()) << session.status();
  (void)Call(*session, VRAMBROKER_COUNT_CHARGE, 8_MiB, /*arrives=*/false);
  EXPECT_EQ(Charged(*session), 0u);
  EXPECT_EQ(Call(*session, VRAMBROKER_COUNT_CHARGE, 8_MiB), absl::StatusCode::kOk);
  // A lost refusal takes no memory back.
  (void)Call(*session, VRAMBROKER_COUNT_CHARGE, kCapacity, /*arrives=*/false);
  EXPECT_EQ(Charged(*session), 8_MiB);
}

}  // namespace
}  // namespace vrambroker
