// SPDX-License-Identifier: Apache-2.0
//
// Programs that have the daemon count their memory: the count after the end and the new beginning of a connection, a
// program or the daemon.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/integration/count_socket_fixture.h"
#include "tests/support/test_device.h"
#include "tests/support/thread_state.h"

namespace vrambroker::testing_support {
namespace {

using absl::StatusCode;
using ::testing::HasSubstr;

// Opens a session of this process, charges the session 100 MiB, and closes the connection.
absl::StatusOr<CountClient> OpenLost(const std::string& socket_dir) {
  absl::StatusOr<CountClient> client = CountClient::Open(socket_dir, CountHello("client"));
  if (!client.ok()) return client;
  if (absl::Status status = client->Charge(100_MiB); !status.ok()) return status;
  client->Close();
  return client;
}

TEST_F(CountSocketTest, AProcessThatEndsGivesEverythingBack) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  for (const int signal : {SIGKILL, SIGTERM, SIGSEGV}) {
    ASSERT_OK_AND_ASSIGN(ClientProcess client, OpenProcess("client"));
    ASSERT_OK(client.Call(absl::StrCat("charge ", 256_MiB)));
    EXPECT_TRUE(IsCharged(256_MiB));
    client.process().Signal(signal);
    EXPECT_TRUE(IsCharged(0));
  }
}

TEST_F(CountSocketTest, AClientThatLostItsConnectionGoesOnAsItWas) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(CountClient client, Open("client", 200_MiB));
  ASSERT_OK(client.Charge(100_MiB));
  const CountToken token = client.token();
  client.Close();
  ASSERT_OK_AND_ASSIGN(CountClient again, CountClient::Open(dir(), CountHelloAgain("other", token)));
  EXPECT_EQ(again.session(), client.session());
  EXPECT_EQ(again.ChargedBytes(), 100_MiB);
  EXPECT_EQ(again.Info()->limit_bytes, 200_MiB) << "its terms stay";
  EXPECT_OK(again.Charge(100_MiB));
  EXPECT_STATUS(again.Hold(2_MiB), StatusCode::kFailedPrecondition, "");
  EXPECT_TRUE(IsCharged(200_MiB));
  EXPECT_THAT(daemon_->process().ErrorText(), HasSubstr("session resumed"));
  // The daemon does not take the session for lost again at its next look for lost connections.
  ASSERT_OK_AND_ASSIGN(ClientProcess other, OpenProcess("other"));
  ASSERT_OK(other.Call("count_close"));
  Json sessions;
  EXPECT_TRUE(WaitFor([&] {
    sessions = CtlJson({"sessions"})["sessions"];
    return sessions.size() == 2 && sessions[1]["state"] == "disconnected";
  })) << sessions.dump();
  EXPECT_EQ(sessions[0]["name"], "client");
  EXPECT_EQ(sessions[0]["state"], "active");
}

TEST_F(CountSocketTest, NobodyGetsMeanwhileWhatItIsCharged) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(CountClient client, Open("client"));
  ASSERT_OK(client.Charge(200_MiB));
  ASSERT_OK_AND_ASSIGN(ClientProcess other, OpenProcess("other"));
  std::thread waiter([&] { (void)other.Call(absl::StrCat("wait ", 100_MiB, " 3600000")); });
  EXPECT_TRUE(Waits(1));
  for (int i = 0; i < 20; ++i) {
    const CountToken token = client.token();
    client.Close();
    ASSERT_OK_AND_ASSIGN(client, CountClient::Open(dir(), CountHelloAgain("client", token)));
    EXPECT_EQ(client.ChargedBytes(), 200_MiB);
  }
  EXPECT_TRUE(Waits(1)) << "it has got nothing";
  ASSERT_OK(client.Uncharge(100_MiB));
  waiter.join();
  EXPECT_TRUE(IsCharged(200_MiB));
}

TEST_F(CountSocketTest, WhatALostConnectionHadBegunChargesNothingMore) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(CountClient client, Open("client"));
  ASSERT_OK_AND_ASSIGN(CountClient idle, client.Join());
  ASSERT_OK_AND_ASSIGN(CountClient waiting, client.Join());
  ASSERT_OK_AND_ASSIGN(ClientProcess other, OpenProcess("other"));
  ASSERT_OK(other.Call(absl::StrCat("charge ", 256_MiB)));
  ASSERT_TRUE(waiting.Send(CountWait(0, 10_MiB, 3'600'000)));
  EXPECT_TRUE(Waits(1));
  const CountToken token = client.token();
  client.Close();
  ASSERT_OK_AND_ASSIGN(client, CountClient::Open(dir(), CountHelloAgain("client", token)));
  ASSERT_OK_AND_ASSIGN(const CountAnswer answer, waiting.Receive());
  EXPECT_NE(answer.code, 0u);
  EXPECT_TRUE(Waits(0));
  ASSERT_OK(other.Call(absl::StrCat("uncharge ", 256_MiB)));
  EXPECT_STATUS(idle.Wait(10_MiB, 1000), StatusCode::kUnavailable, "has gone on with another connection");
  EXPECT_STATUS(idle.Hold(10_MiB), StatusCode::kUnavailable, "has gone on with another connection");
  EXPECT_STATUS(CountClient::Open(dir(), CountJoin(token)), StatusCode::kNotFound, "") << "a token of before";
  ASSERT_OK_AND_ASSIGN(CountClient joined, client.Join());
  EXPECT_OK(joined.Wait(10_MiB, 1000));
  EXPECT_TRUE(IsCharged(10_MiB));
}

// The daemon hears of the next connection before it hears that the last connection has ended.
class CountSocketOvertakenTest : public CountSocketTest {
 protected:
  // Continues the client's session over another connection. Returns the bytes charged then.
  absl::StatusOr<uint64_t> ChargedAfter(CountClient* lost) {
    absl::StatusOr<CountClient> next = CountClient::Connect(dir());
    if (!next.ok()) return next.status();
    EXPECT_STATUS(next->Info(), StatusCode::kFailedPrecondition, "HELLO") << "the daemon has the connection";
    daemon_->process().Signal(SIGSTOP);
    EXPECT_TRUE(WaitFor([&] { return IsStopped(); }));
    EXPECT_TRUE(next->Send(CountHelloAgain("client", lost->token())));
    lost->Close();
    daemon_->process().Signal(SIGCONT);
    const absl::StatusOr<CountAnswer> answer = next->Receive();
    if (!answer.ok()) return answer.status();
    if (absl::Status status = StatusOfAnswer(*answer); !status.ok()) return status;
    EXPECT_EQ(answer->session, lost->session());
    return next->ChargedBytes();
  }

 private:
  // Tells whether all of the daemon's threads are stopped.
  bool IsStopped() {
    const std::string process = absl::StrCat(daemon_->process().pid());
    for (const auto& thread : std::filesystem::directory_iterator("/proc/" + process + "/task")) {
      if (StateOfThread(thread.path().filename(), process) != 'T') return false;
    }
    return true;
  }
};

TEST_F(CountSocketOvertakenTest, WhatAClientHasReadStaysItsOwn) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(CountClient client, Open("client"));
  ASSERT_OK(client.Charge(100_MiB));
  ASSERT_OK_AND_ASSIGN(const uint64_t charged, ChargedAfter(&client));
  EXPECT_EQ(charged, 100_MiB);
}

TEST_F(CountSocketOvertakenTest, WhatAClientHasNotReadIsTakenBack) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(CountClient client, Open("client"));
  ASSERT_OK(client.Charge(100_MiB));
  ASSERT_TRUE(client.Send(MakeCountRequest(VRAMBROKER_COUNT_CHARGE, 0, 20_MiB)));
  EXPECT_TRUE(IsCharged(120_MiB));
  ASSERT_OK_AND_ASSIGN(const uint64_t charged, ChargedAfter(&client));
  EXPECT_EQ(charged, 100_MiB);
}

// The answer that had the next token was lost, too.
TEST_F(CountSocketTest, AConnectionMayBeLostTwice) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(const CountClient lost, OpenLost(dir()));
  {
    ASSERT_OK_AND_ASSIGN(CountClient unheard, CountClient::Connect(dir()));
    ASSERT_TRUE(unheard.Send(CountHelloAgain("client", lost.token())));
    EXPECT_TRUE(WaitFor([&] { return absl::StrContains(daemon_->process().ErrorText(), "session resumed"); }));
  }
  ASSERT_OK_AND_ASSIGN(CountClient again, CountClient::Open(dir(), CountHelloAgain("client", lost.token())));
  EXPECT_EQ(again.session(), lost.session());
  EXPECT_EQ(again.ChargedBytes(), 100_MiB);
}

TEST_F(CountSocketTest, AConnectionMayBeLostWhileItIsMade) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(CountClient client, Open("client"));
  ASSERT_OK(client.Charge(100_MiB));
  for (int i = 0; i < 20; ++i) {
    const CountToken token = client.token();
    client.Close();
    {
      ASSERT_OK_AND_ASSIGN(CountClient unheard, CountClient::Connect(dir()));
      ASSERT_TRUE(unheard.Send(CountHelloAgain("client", token)));
    }
    absl::StatusOr<CountClient> again = absl::UnknownError("not asked");
    ASSERT_TRUE(WaitFor([&] {
      again = CountClient::Open(dir(), CountHelloAgain("client", token));
      return !absl::IsUnavailable(again.status());
    }));
    ASSERT_OK(again.status());
    client = *std::move(again);
    ASSERT_EQ(client.ChargedBytes(), 100_MiB) << i;
  }
}

TEST_F(CountSocketTest, OnlyItsOwnProcessGoesOnWithASession) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(CountClient client, Open("client"));
  ASSERT_OK(client.Charge(100_MiB));
  // A session cannot go on with a new connection while the session's own connection is there.
  EXPECT_STATUS(CountClient::Open(dir(), CountHelloAgain("again", client.token())), StatusCode::kUnavailable,
                "has not ended yet");
  ASSERT_OK_AND_ASSIGN(ClientProcess other, ClientProcess::Start(dir()));
  const CountToken& token = client.token();
  const absl::string_view bytes(reinterpret_cast<const char*>(token.data()), token.size());
  ASSERT_OK(other.Call(absl::StrCat("count_hello other - ", absl::BytesToHexString(bytes))));
  EXPECT_EQ(CtlJson({"sessions"})["sessions"].size(), 2u);
  EXPECT_EQ(client.ChargedBytes(), 100_MiB);
  // A token of no session opens a new session.
  client.Close();
  CountToken wrong = token;
  wrong[0] ^= 1;
  ASSERT_OK_AND_ASSIGN(CountClient next, CountClient::Open(dir(), CountHelloAgain("next", wrong)));
  EXPECT_NE(next.session(), client.session());
  EXPECT_TRUE(IsCharged(0));
}

TEST_F(CountSocketTest, ASessionThatAnOperatorHasEndedDoesNotGoOn) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(const CountClient lost, OpenLost(dir()));
  ASSERT_EQ(Ctl({"end", "client"}).exit_code, 0);
  EXPECT_STATUS(CountClient::Open(dir(), CountHelloAgain("client", lost.token())), StatusCode::kAborted, "operator");
}

// A hello without the token comes from another program in the process.
TEST_F(CountSocketTest, ANewHelloOfTheProcessReplacesTheSessionItHasLost) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(ClientProcess client, OpenProcess("client"));
  ASSERT_OK(client.Call(absl::StrCat("charge ", 100_MiB)));
  ASSERT_OK(client.Call("count_close"));
  EXPECT_TRUE(IsCharged(100_MiB));
  ASSERT_OK(client.Call("count_hello again -"));
  EXPECT_TRUE(IsCharged(0));
  EXPECT_OK(client.Call(absl::StrCat("hold ", 100_MiB)));
  // Memory in use at the daemon's start is the only memory from before on a GPU.
  EXPECT_TRUE(IsCharged(OnCuda() ? 0 : 100_MiB));
  EXPECT_EQ(CtlJson({"sessions"})["sessions"].size(), 1u);
}

// exec() frees the program's memory at the driver.
TEST_F(CountSocketTest, ExecBeginsWithNothing) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(ClientProcess client, OpenProcess("client"));
  for (int i = 0; i < 3; ++i) {
    ASSERT_OK(client.Call(absl::StrCat("charge ", 200_MiB)));
    ASSERT_OK(client.Call("exec"));
    ASSERT_OK(client.Call("count_hello again -"));
    EXPECT_TRUE(IsCharged(0));
  }
  EXPECT_EQ(CtlJson({"sessions"})["sessions"].size(), 1u);
}

TEST_F(CountSocketTest, ExecDoesNotUndoWhatAnOperatorHasEnded) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(ClientProcess client, OpenProcess("client"));
  ASSERT_OK(client.Call(absl::StrCat("charge ", 40_MiB)));
  ASSERT_EQ(Ctl({"end", "client"}).exit_code, 0);
  ASSERT_OK(client.Call("exec"));
  EXPECT_STATUS(client.Call("count_hello again -"), StatusCode::kAborted, "an operator has ended the session");
}

TEST_F(CountSocketTest, AProcessMayChangeItsUser) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  ASSERT_NO_FATAL_FAILURE(Begin({.config = "socket_mode: '0666'"}));
  ASSERT_OK_AND_ASSIGN(ClientProcess client, OpenProcess("client"));
  ASSERT_OK(client.Call(absl::StrCat("charge ", 40_MiB)));
  ASSERT_OK(client.Call("setuid 65534"));
  EXPECT_OK(client.Call(absl::StrCat("wait ", 2_MiB, " 0"))) << "it joins its session";
  EXPECT_TRUE(IsCharged(42_MiB));
  ASSERT_OK(client.Call("count_close"));
  ASSERT_OK(client.Call("count_hello again -"));
  EXPECT_TRUE(IsCharged(0)) << "not twice";
}

// The lost session does not stand in the way of the next session.
TEST_F(CountSocketTest, ExecByAUserWhoHasAllSessionsThatHeMayHave) {
  ASSERT_NO_FATAL_FAILURE(Begin({.config = "max_sessions_per_uid: 1"}));
  ASSERT_OK_AND_ASSIGN(ClientProcess client, OpenProcess("client"));
  ASSERT_OK(client.Call(absl::StrCat("charge ", 200_MiB)));
  ASSERT_OK(client.Call("exec"));
  EXPECT_OK(client.Call("count_hello again -"));
  EXPECT_STATUS(OpenProcess("another"), StatusCode::kResourceExhausted, "max_sessions_per_uid");
}

TEST_F(CountSocketTest, AChildIsASessionOfItsOwn) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_EQ(Ctl({"claim", "create", "tree", "--limit=64MiB"}).exit_code, 0);
  ASSERT_OK_AND_ASSIGN(ClientProcess parent, ClientProcess::Start(dir() + "/claims/tree"));
  ASSERT_OK(parent.Call("count_hello parent -"));
  ASSERT_OK(parent.Call(absl::StrCat("charge ", 40_MiB)));
  ASSERT_OK_AND_ASSIGN(const auto token, parent.Call("count_token"));
  EXPECT_STATUS(parent.Call("in_child count_join " + token[0]), StatusCode::kNotFound, "token");
  EXPECT_OK(parent.Call("count_join " + token[0]));
  ASSERT_OK(parent.Call("in_child count_hello child -"));
  const Json sessions = CtlJson({"claim", "show", "tree"})["sessions"];
  ASSERT_EQ(sessions.size(), 2u);
  EXPECT_NE(sessions[0]["pid"], sessions[1]["pid"]);
  // The child inherits the parent's connection, and outlives the parent.
  parent.process().Signal(SIGKILL);
  EXPECT_TRUE(IsCharged(0));
  EXPECT_TRUE(WaitFor([&] { return CtlJson({"sessions"})["sessions"].size() == 1; }));
}

TEST_F(CountSocketTest, APidNamespaceOfItsOwn) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to make a pid namespace";
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(
      std::unique_ptr<ChildProcess> inside,
      ChildProcess::Start({"/usr/bin/unshare", "--pid", "--fork", "--kill-child", TestClientProgram(), dir()}));
  const auto call = [&](const std::string& command) {
    EXPECT_OK(inside->WriteLine(command));
    const absl::StatusOr<std::string> line = inside->ReadLine();
    EXPECT_OK(line);
    EXPECT_TRUE(line.ok() && absl::StartsWith(*line, "ok")) << command << ": " << line.value_or("");
  };
  call("count_hello inside -");
  call(absl::StrCat("charge ", 40_MiB));
  call(absl::StrCat("wait ", 40_MiB, " 0"));
  EXPECT_TRUE(IsCharged(80_MiB));
  EXPECT_NE(CtlJson({"sessions"})["sessions"][0]["pid"], inside->pid());
  call("in_child count_hello child -");
  kill(inside->pid(), SIGKILL);
  EXPECT_TRUE(IsCharged(0));
}

TEST_F(CountSocketTest, ADaemonThatDrainsTakesNoNewSessions) {
  ASSERT_NO_FATAL_FAILURE(Begin({.config = "drain_timeout: '1h'"}));
  ASSERT_OK_AND_ASSIGN(ClientProcess client, OpenProcess("client"));
  ASSERT_OK(client.Call(absl::StrCat("charge ", 40_MiB)));
  daemon_->process().Signal(SIGTERM);
  ASSERT_TRUE(WaitFor([&] { return absl::StrContains(daemon_->log(), "draining"); }));
  EXPECT_STATUS(Open("late"), StatusCode::kUnavailable, "");
  EXPECT_OK(client.Call(absl::StrCat("charge ", 2_MiB)));
  EXPECT_OK(client.Call(absl::StrCat("uncharge ", 42_MiB)));
  client.process().Signal(SIGKILL);
  const absl::StatusOr<int> exit_code = daemon_->process().Wait();
  EXPECT_TRUE(exit_code.ok() && *exit_code == 0) << "it was the last one";
}

TEST_F(CountSocketTest, ADaemonThatStopsEndsWaiting) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(CountClient client, Open("client"));
  ASSERT_OK(client.Charge(200_MiB));
  ASSERT_OK_AND_ASSIGN(ClientProcess waiting, OpenProcess("waiting"));
  ASSERT_OK(waiting.Send(absl::StrCat("wait ", 100_MiB, " 3600000")));
  ASSERT_TRUE(Waits(1));
  const absl::StatusOr<int> exit_code = daemon_->Stop();
  EXPECT_TRUE(exit_code.ok() && *exit_code == 0);
  EXPECT_STATUS(waiting.Receive(), StatusCode::kUnavailable, "");
  EXPECT_STATUS(client.Charge(2_MiB), StatusCode::kUnavailable, "");
}

TEST_F(CountSocketTest, TheNextDaemonIsToldWhatIsHeld) {
  HOST_DEVICE_ONLY();
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(ClientProcess first, OpenProcess("first", absl::StrCat(128_MiB)));
  ASSERT_OK_AND_ASSIGN(ClientProcess second, OpenProcess("second"));
  ASSERT_OK(first.Call(absl::StrCat("charge ", 100_MiB)));
  ASSERT_OK(second.Call(absl::StrCat("charge ", 100_MiB)));
  for (int restart = 0; restart < 3; ++restart) {
    if (restart % 2 == 0) {
      daemon_->Kill();
    } else {
      ASSERT_OK(daemon_->Stop());
    }
    ASSERT_OK(daemon_->Restart());
    ASSERT_NO_FATAL_FAILURE(Look());
    EXPECT_STATUS(first.Call(absl::StrCat("charge ", 2_MiB)), StatusCode::kUnavailable, "");
    ASSERT_OK(first.Call(absl::StrCat("count_hello first ", 128_MiB)));
    ASSERT_OK(second.Call("count_hello second -"));
    ASSERT_OK_AND_ASSIGN(const auto held, first.Call(absl::StrCat("hold ", 100_MiB)));
    EXPECT_EQ(held[0], absl::StrCat(100_MiB));
    ASSERT_OK(second.Call(absl::StrCat("hold ", 100_MiB)));
    EXPECT_TRUE(IsCharged(200_MiB));
    EXPECT_STATUS(first.Call(absl::StrCat("charge ", 30_MiB)), StatusCode::kResourceExhausted, "");
    EXPECT_STATUS(second.Call(absl::StrCat("charge ", 60_MiB)), StatusCode::kResourceExhausted, "");
    EXPECT_OK(first.Call(absl::StrCat("charge ", 28_MiB)));
    EXPECT_OK(first.Call(absl::StrCat("uncharge ", 60_MiB)));  // memory charged in this run, and memory held before
    EXPECT_TRUE(IsCharged(168_MiB));
    EXPECT_OK(first.Call(absl::StrCat("charge ", 32_MiB)));
    EXPECT_TRUE(IsCharged(200_MiB));
  }
  first.process().Signal(SIGKILL);
  EXPECT_TRUE(IsCharged(100_MiB));
  EXPECT_OK(second.Call(absl::StrCat("uncharge ", 100_MiB)));
  EXPECT_TRUE(IsCharged(0));
}

}  // namespace
}  // namespace vrambroker::testing_support
