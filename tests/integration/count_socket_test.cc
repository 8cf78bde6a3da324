// SPDX-License-Identifier: Apache-2.0
//
// Programs that keep their own memory of the driver and have the daemon count the memory: limits, waiting, and the view
// and calls of operators. count_socket_ends_test.cc covers ends and new beginnings.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/integration/count_socket_fixture.h"
#include "tests/support/test_device.h"

namespace vrambroker::testing_support {
namespace {

using absl::StatusCode;

// ---- Limits of a program ----

TEST_F(CountSocketTest, ChargesUpToTheLimit) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(CountClient client, CountClient::Open(dir(), CountHello("half", 0.5)));
  EXPECT_EQ(client.welcome().devices, 1u);
  ASSERT_OK_AND_ASSIGN(CountAnswer info, client.Info());
  EXPECT_EQ(info.limit_bytes, 128_MiB);
  EXPECT_EQ(info.free_bytes, 128_MiB);
  EXPECT_EQ(info.charged_bytes, 0u);
  EXPECT_EQ(raw_->GetDevice()->uuid(), std::string(info.uuid));
  EXPECT_OK(client.Charge(100_MiB));
  EXPECT_STATUS(client.Charge(30_MiB), StatusCode::kResourceExhausted, "");
  EXPECT_OK(client.Charge(28_MiB));
  ASSERT_OK_AND_ASSIGN(info, client.Info());
  EXPECT_EQ(info.free_bytes, 0u);
  EXPECT_EQ(info.charged_bytes, 128_MiB);
  EXPECT_TRUE(IsCharged(128_MiB));
  EXPECT_OK(client.Uncharge(100_MiB));
  EXPECT_OK(client.Charge(2_MiB));
  EXPECT_TRUE(IsCharged(30_MiB));
  client.Close();
  EXPECT_TRUE(WaitFor([&] { return StateOf("half") == "SESSION_STATE_DISCONNECTED"; })) << StateOf("half");
  EXPECT_TRUE(IsCharged(30_MiB)) << "the process lives, and has its memory";
}

// Two programs that start at the same moment size themselves right.
TEST_F(CountSocketTest, WhatIsFreeDoesNotDependOnOthers) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(CountClient first, CountClient::Open(dir(), CountHello("first", 0.5)));
  ASSERT_OK(first.Charge(128_MiB));
  ASSERT_OK_AND_ASSIGN(CountClient second, CountClient::Open(dir(), CountHello("second", 0.75)));
  EXPECT_EQ(second.Info()->free_bytes, 192_MiB);
  EXPECT_STATUS(second.Charge(192_MiB), StatusCode::kResourceExhausted, "");
  EXPECT_OK(second.Charge(128_MiB));
  EXPECT_TRUE(IsCharged(256_MiB));
}

TEST_F(CountSocketTest, ASessionIsIdleSinceItsLastCharge) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(CountClient client, Open("idle"));
  const auto idle_ms = [&] { return raw_->GetSession(Ref("idle"))->idle_ms(); };
  constexpr uint64_t kLongMs = 500;
  ASSERT_TRUE(WaitFor([&] {
    EXPECT_OK(client.Info().status());  // asks for figures, and uses no memory
    return idle_ms() > kLongMs;
  }));
  EXPECT_TRUE(WaitFor([&] {
    EXPECT_OK(client.Charge(2_MiB));
    return idle_ms() < kLongMs;
  }));
  ASSERT_TRUE(WaitFor([&] { return idle_ms() > kLongMs; }));
  EXPECT_TRUE(WaitFor([&] {
    EXPECT_OK(client.Uncharge(2_MiB));
    EXPECT_OK(client.Charge(2_MiB));
    return idle_ms() < kLongMs;
  }));
}

TEST_F(CountSocketTest, EachDeviceHasItsOwnCount) {
  ASSERT_NO_FATAL_FAILURE(Begin({.devices = 2}));
  ASSERT_OK_AND_ASSIGN(CountClient client, Open("two"));
  EXPECT_EQ(client.welcome().devices, 2u);
  EXPECT_OK(client.Charge(200_MiB, 0));
  EXPECT_OK(client.Charge(150_MiB, 1));
  EXPECT_STATUS(client.Uncharge(200_MiB, 1), StatusCode::kInvalidArgument, "charged only");
  EXPECT_EQ(client.ChargedBytes(0), 200_MiB);
  EXPECT_EQ(client.ChargedBytes(1), 150_MiB);
  EXPECT_STATUS(client.Charge(2_MiB, 2), StatusCode::kNotFound, "device");
}

// A device keeps guarantees only for sessions that name the device.
TEST_F(CountSocketTest, ASessionHasNothingOfDevicesThatItDoesNotName) {
  ASSERT_NO_FATAL_FAILURE(
      Begin({.config = "rules { guarantee { fraction: 0.4 } limit { fraction: 1 } }", .devices = 2}));
  CountRequest hello = CountHello("named");
  hello.guarantee_kind = VRAMBROKER_COUNT_LIMIT_FRACTION;
  hello.guarantee_fraction = 0.4;
  const std::string uuid = raw_->GetDevice()->uuid();
  std::vector<CountClient> clients;
  for (const std::string& devices : {std::string("1"), uuid, std::string("1")}) {
    devices.copy(hello.devices, sizeof hello.devices - 1);
    hello.devices[devices.size()] = '\0';
    ASSERT_OK_AND_ASSIGN(CountClient client, CountClient::Open(dir(), hello));
    clients.push_back(std::move(client));
  }
  std::strcpy(hello.devices, "1");
  EXPECT_STATUS(CountClient::Open(dir(), hello), StatusCode::kResourceExhausted, "guarantee");
  CountClient& client = clients.front();
  EXPECT_EQ(client.Info(0)->limit_bytes, 0u);
  EXPECT_EQ(client.Info(1)->limit_bytes, 256_MiB);
  EXPECT_STATUS(client.Charge(2_MiB, 0), StatusCode::kResourceExhausted, "named other devices: 1");
  EXPECT_OK(client.Charge(100_MiB, 1));
}

TEST_F(CountSocketTest, RulesGiveLimitsAndGuarantees) {
  ASSERT_NO_FATAL_FAILURE(Begin({.config = R"(
    rules { session_name: "kept*" guarantee { bytes: "64MiB" } limit { bytes: "96MiB" } }
    session_limit { bytes: "224MiB" })"}));
  ASSERT_OK_AND_ASSIGN(CountClient kept, Open("kept"));
  EXPECT_EQ(kept.Info()->limit_bytes, 96_MiB);
  ASSERT_OK_AND_ASSIGN(CountClient other, Open("other"));
  EXPECT_EQ(other.Info()->limit_bytes, 224_MiB);
  EXPECT_STATUS(other.Charge(200_MiB), StatusCode::kResourceExhausted, "");
  EXPECT_OK(other.Charge(192_MiB));
  EXPECT_OK(kept.Charge(64_MiB)) << "it was kept free";
  EXPECT_STATUS(Open("kept_too"), StatusCode::kResourceExhausted, "guarantee");
  EXPECT_TRUE(IsCharged(256_MiB));
}

TEST_F(CountSocketTest, TheSessionsOfAClaimShareItsLimit) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_EQ(Ctl({"claim", "create", "team", "--limit=64MiB"}).exit_code, 0);
  const std::string claim_dir = dir() + "/claims/team";
  ASSERT_OK_AND_ASSIGN(CountClient counted, CountClient::Open(claim_dir, CountHello("counted")));
  EXPECT_EQ(counted.Info()->limit_bytes, 64_MiB);
  EXPECT_OK(counted.Charge(40_MiB));
  ASSERT_OK_AND_ASSIGN(ClientProcess leased, ClientProcess::Connect(claim_dir, "leased"));
  EXPECT_STATUS(leased.Call(absl::StrCat("alloc ", 40_MiB)), StatusCode::kResourceExhausted, "claim team");
  EXPECT_OK(leased.Call(absl::StrCat("alloc ", 20_MiB)));
  EXPECT_STATUS(counted.Wait(20_MiB, 0), StatusCode::kFailedPrecondition, "JOIN");
  ASSERT_OK_AND_ASSIGN(CountClient joined, counted.Join());
  EXPECT_STATUS(joined.Wait(20_MiB, 0), StatusCode::kResourceExhausted, "claim team");
  const Json shown = CtlJson({"claim", "show", "team"})["claim"];
  EXPECT_EQ(shown["devices"][0]["reserved_bytes"], 60_MiB);
  EXPECT_EQ(shown["sessions"], 2);
  EXPECT_EQ(Ctl({"claim", "rm", "team", "--revoke"}).exit_code, 0);
}

// ---- Waiting ----

TEST_F(CountSocketTest, WaitsUntilAnotherFrees) {
  ASSERT_NO_FATAL_FAILURE(Begin({.http = true}));
  ASSERT_OK_AND_ASSIGN(ClientProcess other, OpenProcess("other"));
  ASSERT_OK(other.Call(absl::StrCat("charge ", 200_MiB)));
  ASSERT_OK_AND_ASSIGN(CountClient client, Open("waiting"));
  ASSERT_OK_AND_ASSIGN(CountClient joined, client.Join());
  EXPECT_EQ(joined.session(), client.session());
  ASSERT_TRUE(joined.Send(CountWait(0, 100_MiB, 3'600'000)));
  EXPECT_TRUE(Waits(1));
  EXPECT_OK(client.Charge(20_MiB)) << "its other threads go on meanwhile";
  ASSERT_OK(other.Call(absl::StrCat("uncharge ", 100_MiB)));
  ASSERT_OK_AND_ASSIGN(const CountAnswer answer, joined.Receive());
  EXPECT_OK(StatusOfAnswer(answer));
  EXPECT_EQ(answer.charged_bytes, 120_MiB);
  EXPECT_EQ(client.ChargedBytes(), 120_MiB);
  EXPECT_TRUE(IsCharged(220_MiB));
  EXPECT_TRUE(WaitFor([&] {
    return daemon_->Metrics().Sum("vrambroker_rpc_requests_total", {{"method", "Count.Wait"}, {"code", "OK"}}) == 1;
  }));
}

TEST_F(CountSocketTest, WaitsUntilAnotherDies) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(ClientProcess other, OpenProcess("other"));
  ASSERT_OK(other.Call(absl::StrCat("charge ", 200_MiB)));
  ASSERT_OK_AND_ASSIGN(CountClient client, Open("waiting"));
  ASSERT_OK_AND_ASSIGN(CountClient joined, client.Join());
  ASSERT_TRUE(joined.Send(CountWait(0, 256_MiB, 3'600'000)));
  EXPECT_TRUE(Waits(1));
  other.process().Signal(SIGKILL);
  ASSERT_OK_AND_ASSIGN(const CountAnswer answer, joined.Receive());
  EXPECT_OK(StatusOfAnswer(answer));
  EXPECT_TRUE(IsCharged(256_MiB));
}

TEST_F(CountSocketTest, WaitingEndsByItsTime) {
  ASSERT_NO_FATAL_FAILURE(Begin({.config = "max_wait: '2s'", .http = true}));
  ASSERT_OK_AND_ASSIGN(ClientProcess other, OpenProcess("other"));
  ASSERT_OK(other.Call(absl::StrCat("charge ", 200_MiB)));
  ASSERT_OK_AND_ASSIGN(CountClient client, Open("waiting"));
  ASSERT_OK_AND_ASSIGN(CountClient joined, client.Join());
  for (const uint64_t wait_ms : {uint64_t{0}, uint64_t{50}, ~uint64_t{0}}) {  // the last wait lasts max_wait
    ASSERT_OK_AND_ASSIGN(const CountAnswer refused, joined.Call(CountWait(0, 100_MiB, wait_ms)));
    EXPECT_STATUS(StatusOfAnswer(refused), StatusCode::kResourceExhausted, "");
    EXPECT_GE(refused.waited_ms, std::min<uint64_t>(wait_ms, 2000));
    EXPECT_EQ(refused.charged_bytes, 0u);
  }
  EXPECT_TRUE(Waits(0));
  EXPECT_EQ(CtlJson({"ooms"})["events"].size(), 3u) << "each of them is a refusal";
  EXPECT_STATUS(client.Charge(100_MiB), StatusCode::kResourceExhausted, "");
  EXPECT_EQ(CtlJson({"ooms"})["events"].size(), 3u) << "the fast way is not";
}

TEST_F(CountSocketTest, ClosingTheConnectionGivesUp) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(ClientProcess other, OpenProcess("other"));
  ASSERT_OK(other.Call(absl::StrCat("charge ", 200_MiB)));
  ASSERT_OK_AND_ASSIGN(CountClient client, Open("waiting"));
  ASSERT_OK_AND_ASSIGN(CountClient joined, client.Join());
  ASSERT_TRUE(joined.Send(CountWait(0, 100_MiB, 3'600'000)));
  EXPECT_TRUE(Waits(1));
  joined.Close();
  EXPECT_TRUE(Waits(0));
  ASSERT_OK(other.Call(absl::StrCat("uncharge ", 200_MiB)));
  EXPECT_TRUE(IsCharged(0));
  EXPECT_OK(client.Charge(256_MiB));
}

// Clients give up at the moment of the grant. The memory then belongs to the client or to nobody.
TEST_F(CountSocketTest, AGrantToOneWhoGivesUpIsTakenBack) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(CountClient other, Open("other"));
  ASSERT_OK_AND_ASSIGN(CountClient client, Open("hasty"));
  constexpr int kRounds = 300;
  for (int i = 0; i < kRounds; ++i) {
    ASSERT_TRUE(WaitFor([&] { return other.Charge(256_MiB).ok(); }));
    std::vector<CountClient> lines;
    for (int k = 0; k < 8; ++k) {
      ASSERT_OK_AND_ASSIGN(CountClient joined, client.Join());
      ASSERT_TRUE(joined.Send(CountWait(0, 20_MiB, 3'600'000)));
      lines.push_back(std::move(joined));
    }
    ASSERT_OK(other.Uncharge(256_MiB));
    uint64_t granted = 0;
    for (CountClient& line : lines) {
      const absl::Time end = absl::Now() + absl::Microseconds(i * 7 % 40);
      while (absl::Now() < end) {  // a sleep would be too long
      }
      const absl::StatusOr<CountAnswer> answer = line.Receive(absl::ZeroDuration());
      if (answer.ok() && answer->code == 0) granted += 20_MiB;
      line.Close();
    }
    ASSERT_TRUE(WaitFor([&] { return client.ChargedBytes() == granted; }))
        << client.ChargedBytes() << " of " << granted;
    if (granted > 0) {
      ASSERT_OK(client.Uncharge(granted));
    }
  }
  EXPECT_TRUE(IsCharged(0));
}

TEST_F(CountSocketTest, OthersAreAskedForWhatTheyOnlyCache) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(ClientProcess leased, ConnectProcess("leased"));
  ASSERT_OK_AND_ASSIGN(const auto buffer, leased.Call(absl::StrCat("alloc ", 200_MiB)));
  ASSERT_OK(leased.Call("free " + buffer[0]));
  ASSERT_EQ(Reserved("leased"), 200_MiB) << "its cache";
  ASSERT_OK_AND_ASSIGN(CountClient client, Open("counted"));
  EXPECT_STATUS(client.Charge(100_MiB), StatusCode::kResourceExhausted, "") << "the fast way asks nobody";
  ASSERT_OK_AND_ASSIGN(CountClient joined, client.Join());
  EXPECT_OK(joined.Wait(100_MiB, 0));
  EXPECT_EQ(client.ChargedBytes(), 100_MiB);
  EXPECT_TRUE(absl::StrContains(daemon_->log(), "memory asked for"));
}

// Memory that the daemon keeps of ended sessions is in nobody's way.
TEST_F(CountSocketTest, TheDaemonsOwnCacheMakesRoom) {
  HOST_DEVICE_ONLY();
  ASSERT_NO_FATAL_FAILURE(Begin({.config = "idle_decay: '1h'"}));
  {
    ASSERT_OK_AND_ASSIGN(Client leased, Connect("leased"));
    ASSERT_OK_AND_ASSIGN(Buffer buffer, leased.Allocate(200_MiB));
    ASSERT_OK(buffer.Reset());
  }
  ASSERT_TRUE(WaitFor([&] { return raw_->GetDevice()->idle_bytes() == 200_MiB; }));
  ASSERT_OK_AND_ASSIGN(CountClient client, Open("counted"));
  EXPECT_OK(client.Charge(200_MiB));
  EXPECT_LE(raw_->GetDevice()->idle_bytes(), 56_MiB);
  EXPECT_TRUE(IsCharged(200_MiB));
}

// A program with a grant gets the memory from the driver.
TEST_F(CountSocketTest, WhatTheDriverHasNotTakenBackYetIsWaitedFor) {
  HOST_DEVICE_ONLY();  // a slow driver exists for host memory only
  ASSERT_NO_FATAL_FAILURE(Begin({.config = "idle_decay: '1h' host_driver_latency: '1s'"}));
  {
    ASSERT_OK_AND_ASSIGN(Client leased, Connect("leased"));
    ASSERT_OK_AND_ASSIGN(Buffer buffer, leased.Allocate(200_MiB));
    ASSERT_OK(buffer.Reset());
  }
  ASSERT_TRUE(WaitFor([&] { return raw_->GetDevice()->idle_bytes() == 200_MiB; }));
  ASSERT_OK_AND_ASSIGN(CountClient client, Open("counted"));
  ASSERT_OK_AND_ASSIGN(ClientProcess operating, ClientProcess::Start(dir()));
  ASSERT_OK(operating.Send("release"));
  ASSERT_TRUE(WaitFor([&] { return raw_->GetDevice()->idle_bytes() == 0; }));  // the memory is on its way to the driver
  EXPECT_OK(client.Charge(256_MiB));
  EXPECT_LE(raw_->GetDevice()->reserved_bytes(), 256_MiB);
  EXPECT_OK(operating.Receive());
}

TEST_F(CountSocketTest, PriorityGoesFirstAndNobodyIsOvertaken) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(CountClient holder, Open("holder"));
  ASSERT_OK(holder.Charge(256_MiB));
  ASSERT_OK_AND_ASSIGN(CountClient low, Open("low"));
  ASSERT_OK_AND_ASSIGN(CountClient low_wait, low.Join());
  ASSERT_TRUE(low_wait.Send(CountWait(0, 100_MiB, 3'600'000)));
  ASSERT_TRUE(Waits(1));
  ASSERT_OK_AND_ASSIGN(CountClient high, Open("high"));
  ASSERT_EQ(Ctl({"priority", "high", "5"}).exit_code, 0);
  ASSERT_OK_AND_ASSIGN(CountClient high_wait, high.Join());
  ASSERT_TRUE(high_wait.Send(CountWait(0, 100_MiB, 3'600'000)));
  ASSERT_TRUE(Waits(2));
  ASSERT_OK(holder.Uncharge(100_MiB));
  ASSERT_OK_AND_ASSIGN(const CountAnswer first, high_wait.Receive());
  EXPECT_OK(StatusOfAnswer(first));
  EXPECT_EQ(low.ChargedBytes(), 0u);
  // A leasing program waits for its turn behind the counted program.
  ASSERT_OK_AND_ASSIGN(ClientProcess leased, ClientProcess::Start(dir()));
  ASSERT_OK(leased.Call("connect leased - wait_ms=3600000"));
  ASSERT_OK(leased.Send(absl::StrCat("alloc ", 100_MiB)));
  ASSERT_TRUE(Waits(2));
  ASSERT_OK(high.Uncharge(100_MiB));
  ASSERT_OK_AND_ASSIGN(const CountAnswer second, low_wait.Receive());
  EXPECT_OK(StatusOfAnswer(second));
  EXPECT_TRUE(Waits(1));
  ASSERT_OK(low.Uncharge(100_MiB));
  EXPECT_OK(leased.Receive());
  EXPECT_TRUE(IsCharged(256_MiB));
}

// ---- View and calls of operators ----

TEST_F(CountSocketTest, OperatorsSeeIt) {
  ASSERT_NO_FATAL_FAILURE(Begin({.http = true}));
  ASSERT_OK_AND_ASSIGN(CountClient client, Open("seen", 64_MiB));
  ASSERT_OK(client.Charge(40_MiB));
  ASSERT_OK_AND_ASSIGN(CountClient joined, client.Join());
  EXPECT_STATUS(joined.Wait(40_MiB, 0), StatusCode::kResourceExhausted, "limit");
  const Json session = CtlJson({"sessions"})["sessions"][0];
  EXPECT_EQ(session["name"], "seen");
  EXPECT_EQ(session["pid"], getpid());
  EXPECT_EQ(session["devices"][0]["reserved_bytes"], 40_MiB);
  EXPECT_EQ(session["devices"][0]["allocated_bytes"], 40_MiB);
  const Json oom = CtlJson({"ooms"})["events"][0]["out_of_memory"];
  EXPECT_EQ(oom["cause"], "LIMIT") << oom;
  EXPECT_EQ(oom["requested_bytes"], 40_MiB) << oom;
  const MetricsPage metrics = daemon_->Metrics();
  EXPECT_EQ(metrics.Value("vrambroker_client_info", {{"placement", "counted"}}), 1);
  EXPECT_EQ(metrics.Value("vrambroker_client_reserved_bytes"), 40_MiB);
  EXPECT_TRUE(absl::StrContains(Ctl({"sessions"}).out, "seen"));
  for (const char* page : {"/api/v1/state", "/api/v1/map?device=0", "/api/v1/ooms"}) {
    const absl::StatusOr<HttpAnswer> answer = daemon_->Get(page);
    ASSERT_OK(answer);
    EXPECT_EQ(answer->code, 200) << page << answer->body;
  }
  // A counted session has no blocks that anybody knows of.
  const RunResult snapshot = Ctl({"snapshot", "seen", "-o", dir() + "/x.json"});
  EXPECT_NE(snapshot.exit_code, 0);
  EXPECT_TRUE(absl::StrContains(snapshot.err, "counted")) << snapshot.err;
  EXPECT_EQ(Ctl({"trim", "seen"}).exit_code, 0) << "it has nothing to give";
  EXPECT_EQ(client.ChargedBytes(), 40_MiB);
}

TEST_F(CountSocketTest, AnOperatorEndsTheSession) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(CountClient other, Open("other"));
  ASSERT_OK(other.Charge(200_MiB));
  ASSERT_OK_AND_ASSIGN(ClientProcess ended, OpenProcess("ended"));
  ASSERT_OK(ended.Call(absl::StrCat("charge ", 40_MiB)));
  ASSERT_OK(ended.Send(absl::StrCat("wait ", 100_MiB, " 3600000")));
  ASSERT_TRUE(Waits(1));
  ASSERT_EQ(Ctl({"end", "ended"}).exit_code, 0);
  EXPECT_STATUS(ended.Receive(), StatusCode::kAborted, "operator");
  EXPECT_STATUS(ended.Call(absl::StrCat("charge ", 2_MiB)), StatusCode::kAborted, "");
  EXPECT_STATUS(ended.Call(absl::StrCat("wait ", 2_MiB, " 0")), StatusCode::kAborted, "");
  EXPECT_STATUS(ended.Call("count_hello again -"), StatusCode::kAborted, "operator");
  EXPECT_TRUE(IsCharged(240_MiB)) << "it has the memory still";
  EXPECT_OK(ended.Call(absl::StrCat("uncharge ", 20_MiB)));
  EXPECT_TRUE(IsCharged(220_MiB));
  // Closing the connection does not help.
  EXPECT_OK(ended.Call("count_close"));
  for (int i = 0; i < 3; ++i) {
    EXPECT_STATUS(ended.Call("count_hello again -"), StatusCode::kAborted, "operator");
  }
  EXPECT_TRUE(IsCharged(220_MiB));
  ended.process().Signal(SIGKILL);
  EXPECT_TRUE(IsCharged(200_MiB));
}

TEST_F(CountSocketTest, AnOperatorLowersTheLimit) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(CountClient client, Open("client"));
  ASSERT_OK(client.Charge(100_MiB));
  ASSERT_OK_AND_ASSIGN(CountClient joined, client.Join());
  ASSERT_EQ(Ctl({"limit", "client", "64MiB"}).exit_code, 0);
  ASSERT_OK_AND_ASSIGN(const CountAnswer info, client.Info());
  EXPECT_EQ(info.limit_bytes, 64_MiB);
  EXPECT_EQ(info.free_bytes, 0u);
  EXPECT_EQ(info.charged_bytes, 100_MiB);
  EXPECT_STATUS(client.Charge(2_MiB), StatusCode::kResourceExhausted, "");
  EXPECT_STATUS(joined.Wait(2_MiB, 3'600'000), StatusCode::kResourceExhausted, "") << "at once: nobody else has it";
  EXPECT_OK(client.Uncharge(40_MiB));
  EXPECT_OK(client.Charge(4_MiB));
  EXPECT_STATUS(client.Charge(2_MiB), StatusCode::kResourceExhausted, "");
  EXPECT_TRUE(IsCharged(64_MiB));
}

TEST_F(CountSocketTest, AReloadAppliesToSessionsOpenedFromThenOn) {
  ASSERT_NO_FATAL_FAILURE(Begin({.config = "session_limit { bytes: '64MiB' }\n"}));
  ASSERT_OK_AND_ASSIGN(CountClient before, Open("before"));
  std::ifstream file(daemon_->config_path());
  std::string text((std::istreambuf_iterator<char>(file)), {});
  text.replace(text.find("64MiB"), 5, "96MiB");
  std::ofstream(daemon_->config_path()) << text;
  ASSERT_EQ(Ctl({"reload"}).exit_code, 0);
  ASSERT_OK_AND_ASSIGN(CountClient after, Open("after"));
  EXPECT_EQ(before.Info()->limit_bytes, 64_MiB);
  EXPECT_EQ(after.Info()->limit_bytes, 96_MiB);
}

// ---- Concurrency ----

// Threads charge, wait and free at the same time, and leave with their memory freed. No charge is lost or counted
// twice.
TEST_F(CountSocketTest, ManyAtOnce) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  constexpr int kThreads = 4;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 10; ++round) {
        absl::StatusOr<CountClient> client = Open(absl::StrCat("thread", t), 128_MiB);
        absl::StatusOr<CountClient> joined = client.ok() ? client->Join() : client.status();
        ASSERT_OK(joined);
        uint64_t charged = 0;
        for (int i = 0; i < 50; ++i) {
          const uint64_t bytes = 2_MiB * static_cast<uint64_t>(1 + (t * 7 + i * 5) % 20);
          const absl::Status status = i % 5 == 4 ? joined->Wait(bytes, 20) : client->Charge(bytes);
          if (status.ok()) charged += bytes;
          EXPECT_TRUE(status.ok() || absl::IsResourceExhausted(status)) << status;
          EXPECT_EQ(client->ChargedBytes(), charged);
          if (i % 3 == 2 && charged > 0) {
            EXPECT_OK(client->Uncharge(std::min(charged, 40_MiB)));
            charged -= std::min(charged, 40_MiB);
          }
        }
        if (charged > 0) {
          EXPECT_OK(client->Uncharge(charged));
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(IsCharged(0));
}

}  // namespace
}  // namespace vrambroker::testing_support
