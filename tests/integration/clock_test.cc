// SPDX-License-Identifier: Apache-2.0
//
// Changes of the system's clock: no wait lasts longer, and no wait ends early. clock_steps.c provides the clock of this
// program and of the daemon.
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <string>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "allocator/base/bytes.h"
#include "allocator/base/mutex.h"
#include "tests/support/daemon_test.h"
#include "tests/support/raw_client.h"
#include "tests/support/util.h"

namespace vrambroker::testing_support {
namespace {

constexpr char kSteps[] = "VRAMBROKER_TEST_CLOCK_STEPS";
constexpr char kHourAhead[] = "3600";

class ClockTest : public DaemonTest {
 protected:
  void TearDown() override {
    unsetenv(kSteps);
    DaemonTest::TearDown();
  }

  static void SetClock(const char* steps) { setenv(kSteps, steps, 1); }
  // Starts a daemon whose clock is set all the time.
  absl::Status StartDaemonWithSteps(DaemonOptions options, const char* steps = "0,3600,-3600,7") {
    options.environment = {{"LD_PRELOAD", CLOCK_STEPS_LIBRARY}, {kSteps, steps}};
    return StartDaemon(options);
  }
  ClientOptions Options(const std::string& name) {
    ClientOptions options;
    options.socket_dir = dir();
    options.name = name;
    options.connect_timeout = options.call_timeout = kPatience;
    return options;
  }
  // Returns the bytes as the daemon counts them. A question to the client would wake the client up.
  uint64_t Reserved(const std::string& name) {
    absl::StatusOr<RawClient> raw = RawClient::Connect(dir());
    const absl::StatusOr<v1::ListSessionsResponse> sessions = raw.ok() ? raw->ListSessions() : raw.status();
    if (!sessions.ok()) return ~uint64_t{0};
    for (const v1::Session& session : sessions->sessions()) {
      if (session.name() == name) return session.devices(0).reserved_bytes();
    }
    return ~uint64_t{0};
  }
};

TEST_F(ClockTest, TheClockIsSet) {
  const absl::Time before = absl::Now();
  SetClock(kHourAhead);
  EXPECT_GT(absl::Now() - before, absl::Minutes(50));
}

TEST_F(ClockTest, ATimedWaitFollowsTheSteadyClock) {
  for (const char* steps : {kHourAhead, "-3600"}) {
    SetClock(steps);
    Mutex mu;
    CondVar changed;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
    MutexLock lock(mu);
    int wakes = 0;
    while (changed.WaitUntil(mu, deadline)) ++wakes;
    EXPECT_GE(std::chrono::steady_clock::now(), deadline);
    EXPECT_LT(wakes, 10) << "it spins";
  }
}

TEST_F(ClockTest, AClientComesBack) {
  ASSERT_OK(StartDaemon());
  ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(Options("back")));
  SetClock(kHourAhead);
  daemon_->Kill();
  ASSERT_TRUE(WaitFor([&] { return !client.status().ok(); }));
  ASSERT_OK(daemon_->Restart());
  EXPECT_TRUE(WaitFor([&] { return client.status().ok(); })) << client.status();
}

TEST_F(ClockTest, IdleSegmentsGoBack) {
  ASSERT_OK(StartDaemonWithSteps({.config = "idle_decay: \"100ms\""}));
  SetClock(kHourAhead);
  ClientOptions options = Options("decaying");
  options.idle_decay = absl::Milliseconds(100);
  ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(options));
  EXPECT_OK(client.Allocate(30_MiB));
  EXPECT_TRUE(WaitFor([&] { return Reserved("decaying") == 0; })) << "by the client";
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  EXPECT_TRUE(WaitFor([&] {
    const absl::StatusOr<v1::Device> device = raw.GetDevice();
    return device.ok() && device->reserved_bytes() == 0;
  })) << "by the daemon";
}

TEST_F(ClockTest, AQuestionThatNobodyAnswersEnds) {
  ASSERT_OK(StartDaemonWithSteps({.config = "client_timeout: \"100ms\""}));
  ASSERT_OK_AND_ASSIGN(ClientProcess silent, ConnectProcess("silent"));
  ASSERT_OK(silent.Call("alloc 1000"));
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  silent.process().Signal(SIGSTOP);
  for (int i = 0; i < 10; ++i) {  // the rounds meet several steps of the daemon's clock
    EXPECT_STATUS(raw.GetSnapshot(Ref("silent"), 0), absl::StatusCode::kDeadlineExceeded, "does not answer");
  }
  silent.process().Signal(SIGCONT);
}

// The calls of a stopped client do not end: the daemon cuts the calls off after a time. Some threads of gRPC would wait
// for a deadline by the clock that is set here; chaos (tests/fault) meets such threads.
TEST_F(ClockTest, TheDaemonStops) {
  for (const char* steps : {"back", "86400"}) {
    ASSERT_OK(StartDaemonWithSteps({}, steps));
    ASSERT_OK_AND_ASSIGN(ClientProcess silent, ConnectProcess("silent"));
    ASSERT_OK(silent.Call("alloc 1000"));
    silent.process().Signal(SIGSTOP);
    ASSERT_OK_AND_ASSIGN(const int exit_code, daemon_->Stop());
    EXPECT_EQ(exit_code, 0) << steps;
    silent.process().Signal(SIGCONT);
  }
}

TEST_F(ClockTest, ARequestWaitsForAsLongAsItMay) {
  ASSERT_OK(StartDaemonWithSteps({.capacity = "64MiB"}));
  ASSERT_OK_AND_ASSIGN(Client holder, Client::Connect(Options("holder")));
  ASSERT_OK_AND_ASSIGN(Buffer held, holder.Allocate(60_MiB));
  SetClock("0,3600,-3600,7");
  ClientOptions options = Options("waiting");
  options.wait = absl::Milliseconds(700);
  ASSERT_OK_AND_ASSIGN(Client waiting, Client::Connect(options));
  for (int i = 0; i < 3; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    const absl::Status refused = waiting.Allocate(30_MiB).status();
    const absl::Duration took = absl::FromChrono(std::chrono::steady_clock::now() - begin);
    const std::optional<OutOfMemory> why = GetOutOfMemory(refused);
    ASSERT_TRUE(why.has_value()) << refused;
    EXPECT_GE(took, absl::Milliseconds(600));
    // The daemon's wait is shorter than the client's: the request takes time to reach the daemon.
    EXPECT_LE(absl::Milliseconds(why->waited_ms), took);
  }
}

}  // namespace
}  // namespace vrambroker::testing_support
