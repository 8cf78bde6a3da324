// SPDX-License-Identifier: Apache-2.0
//
// Files that a daemon leaves in its socket directory for the next daemon: operators' settings of live sessions, and
// files that the daemon cannot use.
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "tests/support/count_client.h"
#include "tests/support/raw_client.h"
#include "tests/support/test_device.h"
#include "tests/support/util.h"
#include "tests/support/vramctl_test.h"

namespace vrambroker::testing_support {
namespace {

constexpr char kNoRoom[] = "no room for the guarantee";

class KeptSettingsTest : public VramctlDaemonTest {
 protected:
  void SetUp() override {
    ASSERT_OK(StartDaemon({.capacity = "256MiB",
                           .config = "session_limit { fraction: 0.5 } "
                                     "rules { session_name: 'guaranteed' guarantee { bytes: '20MiB' } }"}));
  }

  void Change(const Arguments& arguments) {
    const RunResult result = Ctl(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.err, "");
  }
  // Kills the daemon right after its answer, and starts the daemon again.
  void KillAndRestart() {
    daemon_->Kill();
    ASSERT_OK(daemon_->Restart());
  }
  // Kills the daemon, and lets `other` have the limit of the whole capacity, and `guarantee`, before `stopped`
  // processes reach the next daemon.
  void RestartWithOther(const std::string& guarantee, const std::vector<ClientProcess*>& stopped = {}) {
    for (ClientProcess* process : stopped) process->process().Signal(SIGSTOP);
    ASSERT_NO_FATAL_FAILURE(KillAndRestart());
    ASSERT_OK_AND_ASSIGN(ClientProcess other, ConnectProcess("other"));
    other_.emplace(std::move(other));
    Change({"limit", "other", "1.0"});
    Change({"guarantee", "other", guarantee});
    for (ClientProcess* process : stopped) process->process().Signal(SIGCONT);
  }
  // Returns the daemon's view of the session; empty if the session is unknown.
  v1::Session Session(const std::string& name) {
    absl::StatusOr<RawClient> raw = RawClient::Connect(dir());
    const absl::StatusOr<v1::ListSessionsResponse> sessions = raw.ok() ? raw->ListSessions() : raw.status();
    if (!sessions.ok()) return {};
    for (const v1::Session& session : sessions->sessions()) {
      if (session.name() == name && session.devices_size() > 0) return session;
    }
    return {};
  }
  bool IsBack(const std::string& name) {
    return WaitFor([&] { return !Session(name).name().empty(); });
  }
  uint64_t LimitOf(const std::string& name) {
    const v1::Session session = Session(name);
    return session.devices().empty() ? 0 : session.devices(0).limit_bytes();
  }

 private:
  std::optional<ClientProcess> other_;
};

TEST_F(KeptSettingsTest, WhatAnOperatorHasSetHoldsOverRestarts) {
  ASSERT_OK_AND_ASSIGN(ClientProcess trainer, ConnectProcess("trainer"));
  ASSERT_OK_AND_ASSIGN(ClientProcess other, ConnectProcess("other"));
  EXPECT_EQ(LimitOf("trainer"), 128_MiB);
  Change({"limit", "trainer", "192MiB"});  // the limit is above the policy's limit
  Change({"guarantee", "trainer", "0.25"});
  Change({"priority", "trainer", "7"});
  for (int restart = 0; restart < 3; ++restart) {
    if (restart == 1) {
      ASSERT_OK(daemon_->Stop());
      ASSERT_OK(daemon_->Restart());
    } else {
      ASSERT_NO_FATAL_FAILURE(KillAndRestart());
    }
    ASSERT_TRUE(IsBack("trainer"));
    ASSERT_TRUE(WaitFor([&] { return Session("trainer").devices(0).guarantee_bytes() == 64_MiB; }));
    EXPECT_EQ(LimitOf("trainer"), 192_MiB);
    EXPECT_EQ(Session("trainer").priority(), 7);
    ASSERT_TRUE(IsBack("other"));
    EXPECT_EQ(LimitOf("other"), 128_MiB);
    EXPECT_EQ(Session("other").priority(), 0);
  }
  EXPECT_TRUE(absl::StrContains(daemon_->log(), "session has what an operator had set before the daemon was started"))
      << daemon_->log();
  // A limit that was kept may be changed again.
  Change({"limit", "trainer", "100MiB"});
  ASSERT_NO_FATAL_FAILURE(KillAndRestart());
  ASSERT_TRUE(IsBack("trainer"));
  EXPECT_EQ(LimitOf("trainer"), 100_MiB);
  EXPECT_STATUS(trainer.Call(absl::StrCat("alloc ", 101_MiB)), absl::StatusCode::kResourceExhausted, "limit");
}

TEST_F(KeptSettingsTest, AnotherProcessOfTheNameHasItsOwnTerms) {
  {
    ASSERT_OK_AND_ASSIGN(ClientProcess trainer, ConnectProcess("trainer"));
    Change({"limit", "trainer", "192MiB"});
    daemon_->Kill();
    trainer.process().Signal(SIGKILL);
    ASSERT_OK(trainer.process().Wait());
  }
  ASSERT_OK(daemon_->Restart());
  ASSERT_OK_AND_ASSIGN(ClientProcess trainer, ConnectProcess("trainer"));
  EXPECT_EQ(LimitOf("trainer"), 128_MiB);
}

TEST_F(KeptSettingsTest, ASessionThatItsClientHasEndedLeavesNothing) {
  ASSERT_OK_AND_ASSIGN(ClientProcess process, ConnectProcess("trainer"));
  Change({"limit", "trainer", "192MiB"});
  ASSERT_OK(process.Call("goodbye"));
  ASSERT_OK(process.Call("connect trainer -"));
  EXPECT_EQ(LimitOf("trainer"), 128_MiB);
  ASSERT_NO_FATAL_FAILURE(KillAndRestart());
  ASSERT_TRUE(IsBack("trainer"));
  EXPECT_EQ(LimitOf("trainer"), 128_MiB);
}

// Sessions come back in any order.
TEST_F(KeptSettingsTest, SessionsOfOneProcessAndNameAreToldApart) {
  std::vector<Client> clients;
  for (int i = 0; i < 4; ++i) {
    ASSERT_OK_AND_ASSIGN(Client client, Connect("twin"));
    clients.push_back(std::move(client));
  }
  const std::string changed = clients[2].name();
  Change({"limit", changed, "40MiB"});
  for (int restart = 0; restart < 3; ++restart) {
    daemon_->Kill();
    for (Client& client : clients) {
      ASSERT_TRUE(WaitFor([&] { return absl::IsUnavailable(client.status()); }));
    }
    ASSERT_OK(daemon_->Restart());
    for (Client& client : clients) {
      ASSERT_TRUE(WaitFor([&] { return client.status().ok(); })) << client.status();
    }
    for (size_t i = 0; i < clients.size(); ++i) {
      EXPECT_EQ(LimitOf(clients[i].name()), i == 2 ? 40_MiB : 128_MiB) << i << " " << clients[i].name();
    }
  }
}

TEST_F(KeptSettingsTest, AGuaranteeWithoutRoomIsGivenWhenThereIsRoom) {
  ASSERT_OK_AND_ASSIGN(ClientProcess guaranteed, ConnectProcess("guaranteed"));
  Change({"guarantee", "guaranteed", "100MiB"});
  Change({"priority", "guaranteed", "3"});
  ASSERT_NO_FATAL_FAILURE(RestartWithOther("200MiB", {&guaranteed}));
  ASSERT_TRUE(IsBack("guaranteed"));
  EXPECT_TRUE(WaitFor([&] { return absl::StrContains(daemon_->log(), kNoRoom); })) << daemon_->log();
  EXPECT_EQ(Session("guaranteed").devices(0).guarantee_bytes(), 20_MiB) << "of its rule";
  EXPECT_EQ(Session("guaranteed").priority(), 3);
  EXPECT_OK(guaranteed.Call("alloc 1000"));
  Change({"guarantee", "other", "0"});
  EXPECT_TRUE(WaitFor([&] { return Session("guaranteed").devices(0).guarantee_bytes() == 100_MiB; }));
}

TEST_F(KeptSettingsTest, AnOperatorsGuaranteeTakesThePlaceOfTheEarlierOneWithoutRoom) {
  ASSERT_OK_AND_ASSIGN(ClientProcess one, ConnectProcess("one"));
  ASSERT_OK_AND_ASSIGN(ClientProcess two, ConnectProcess("two"));
  for (const char* session : {"one", "two"}) Change({"guarantee", session, "100MiB"});
  ASSERT_NO_FATAL_FAILURE(RestartWithOther("200MiB", {&one, &two}));
  for (const char* session : {"one", "two"}) ASSERT_TRUE(IsBack(session));
  Change({"guarantee", "one", "30MiB"});
  Change({"guarantee", "other", "0"});
  EXPECT_TRUE(WaitFor([&] { return Session("two").devices(0).guarantee_bytes() == 100_MiB; }));
  EXPECT_EQ(Session("one").devices(0).guarantee_bytes(), 30_MiB);
}

TEST_F(KeptSettingsTest, AGuaranteeAboveALowerLimitIsGivenWhenTheLimitIsRaised) {
  ASSERT_OK_AND_ASSIGN(ClientProcess trainer, ConnectProcess("trainer"));
  Change({"guarantee", "trainer", "100MiB"});
  daemon_->Kill();
  std::ofstream(daemon_->config_path()) << "session_limit { fraction: 0.25 }";
  ASSERT_OK(daemon_->Restart());
  ASSERT_TRUE(IsBack("trainer"));
  EXPECT_EQ(LimitOf("trainer"), 64_MiB);
  EXPECT_EQ(Session("trainer").devices(0).guarantee_bytes(), 0u);
  Change({"limit", "trainer", "128MiB"});
  EXPECT_TRUE(WaitFor([&] { return Session("trainer").devices(0).guarantee_bytes() == 100_MiB; })) << daemon_->log();
}

// A GPU's driver tells how much memory is in use, but not by whom: the next daemon learns from the client only after
// the welcome that the session itself holds the memory.
TEST_F(KeptSettingsTest, ASessionIsNotInTheWayOfItsOwnGuarantee) {
  if (!OnSubstitute()) GTEST_SKIP() << "a GPU of known size, and nobody else's";
  ASSERT_OK(StartDaemon({.capacity = "", .config = "headroom: '64MiB' rules { guarantee { fraction: 0.75 } }"}));
  ASSERT_OK_AND_ASSIGN(ClientProcess trainer, ConnectProcess("trainer"));
  const uint64_t guarantee = Session("trainer").devices(0).guarantee_bytes();
  ASSERT_GT(guarantee, 64_MiB);
  ASSERT_OK(trainer.Call(absl::StrCat("alloc ", guarantee)));
  for (int restart = 0; restart < 2; ++restart) {
    ASSERT_NO_FATAL_FAILURE(KillAndRestart());
    ASSERT_TRUE(IsBack("trainer")) << daemon_->log();
    EXPECT_TRUE(WaitFor([&] { return Session("trainer").devices(0).guarantee_bytes() == guarantee; }))
        << daemon_->log();
  }
  EXPECT_OK(trainer.Call(absl::StrCat("alloc ", 2_MiB)));
}

// The session goes on without the guarantee of its rule, and with all else that operators have set.
TEST_F(KeptSettingsTest, ASessionWithoutRoomForAnyGuaranteeGoesOn) {
  ASSERT_OK_AND_ASSIGN(ClientProcess guaranteed, ConnectProcess("guaranteed"));
  Change({"guarantee", "guaranteed", "10MiB"});
  Change({"limit", "guaranteed", "15MiB"});  // lower than its rule's guarantee
  Change({"priority", "guaranteed", "3"});
  ASSERT_NO_FATAL_FAILURE(RestartWithOther("250MiB", {&guaranteed}));
  ASSERT_TRUE(IsBack("guaranteed"));
  EXPECT_TRUE(WaitFor([&] { return absl::StrContains(daemon_->log(), kNoRoom); })) << daemon_->log();
  EXPECT_EQ(Session("guaranteed").devices(0).guarantee_bytes(), 0u);
  EXPECT_EQ(LimitOf("guaranteed"), 15_MiB);
  EXPECT_EQ(Session("guaranteed").priority(), 3);
}

// Other programs hold all of the capacity: the session goes on, and gets the guarantee of its client later.
TEST_F(KeptSettingsTest, ASessionWithoutRoomForTheGuaranteeOfItsClientGoesOn) {
  ASSERT_OK_AND_ASSIGN(ClientProcess process, ClientProcess::Start(dir()));
  ASSERT_OK(process.Call("count_hello guaranteed -"));
  ASSERT_OK_AND_ASSIGN(const auto token, process.Call("count_token"));
  ASSERT_NO_FATAL_FAILURE(RestartWithOther("250MiB"));
  EXPECT_STATUS(process.Call("count_hello guaranteed -"), absl::StatusCode::kResourceExhausted, "guarantee")
      << "a new session";
  ASSERT_OK(process.Call("count_hello guaranteed - " + token[0]));
  EXPECT_EQ(Session("guaranteed").devices(0).guarantee_bytes(), 0u);
  EXPECT_OK(process.Call(absl::StrCat("charge ", 2_MiB)));
  Change({"guarantee", "other", "0"});
  EXPECT_TRUE(WaitFor([&] { return Session("guaranteed").devices(0).guarantee_bytes() == 20_MiB; }));
}

// The client names its earlier session: a new session would be refused.
TEST_F(KeptSettingsTest, ALeasingSessionWithoutRoomForTheGuaranteeOfItsRuleGoesOn) {
  ASSERT_OK_AND_ASSIGN(ClientProcess guaranteed, ConnectProcess("guaranteed"));
  EXPECT_EQ(Session("guaranteed").devices(0).guarantee_bytes(), 20_MiB);
  ASSERT_NO_FATAL_FAILURE(RestartWithOther("250MiB", {&guaranteed}));
  ASSERT_TRUE(WaitFor([&] { return guaranteed.Call("alloc 1000").ok(); })) << daemon_->log();
  EXPECT_EQ(Session("guaranteed").devices(0).guarantee_bytes(), 0u);
}

// The session has no guarantee from its client or from a rule.
TEST_F(KeptSettingsTest, ASessionWithoutAGuaranteeOfItsOwnGoesOnWithoutTheOperators) {
  ASSERT_OK_AND_ASSIGN(ClientProcess plain, ConnectProcess("plain"));
  Change({"guarantee", "plain", "10MiB"});
  Change({"priority", "plain", "3"});
  ASSERT_NO_FATAL_FAILURE(RestartWithOther("250MiB", {&plain}));
  ASSERT_TRUE(WaitFor([&] { return absl::StrContains(daemon_->log(), kNoRoom); })) << daemon_->log();
  EXPECT_TRUE(WaitFor([&] { return plain.Call("alloc 1000").ok(); })) << daemon_->log();
  EXPECT_EQ(Session("plain").devices(0).guarantee_bytes(), 0u);
  EXPECT_EQ(Session("plain").priority(), 3);
}

TEST_F(KeptSettingsTest, ASessionInAClaimHasItsOwn) {
  Change({"claim", "create", "team", "--limit", "160MiB", "--owner", "any"});
  ASSERT_OK_AND_ASSIGN(ClientProcess process, ClientProcess::Connect(dir() + "/claims/team", "member"));
  Change({"limit", "member", "64MiB"});
  Change({"priority", "member", "9"});
  ASSERT_NO_FATAL_FAILURE(KillAndRestart());
  ASSERT_TRUE(IsBack("member"));
  EXPECT_EQ(LimitOf("member"), 64_MiB);
  EXPECT_EQ(Session("member").priority(), 9);
  // The claim's priority is the later setting.
  Change({"claim", "set", "team", "--priority", "4"});
  ASSERT_NO_FATAL_FAILURE(KillAndRestart());
  ASSERT_TRUE(IsBack("member"));
  EXPECT_EQ(LimitOf("member"), 64_MiB);
  EXPECT_EQ(Session("member").priority(), 4);
}

TEST_F(KeptSettingsTest, ACountedSessionHasIt) {
  ASSERT_OK_AND_ASSIGN(ClientProcess process, ClientProcess::Start(dir()));
  ASSERT_OK(process.Call("count_hello counted -"));
  Change({"limit", "counted", "32MiB"});
  ASSERT_NO_FATAL_FAILURE(KillAndRestart());
  ASSERT_OK(process.Call("count_hello counted -"));
  EXPECT_EQ(LimitOf("counted"), 32_MiB);
  EXPECT_STATUS(process.Call(absl::StrCat("charge ", 34_MiB)), absl::StatusCode::kResourceExhausted, "");
}

TEST_F(KeptSettingsTest, ACountedSessionThatAnOperatorHasEndedStaysEnded) {
  ASSERT_OK_AND_ASSIGN(ClientProcess process, ClientProcess::Start(dir()));
  ASSERT_OK(process.Call("count_hello counted -"));
  Change({"end", "counted"});
  for (int restart = 0; restart < 2; ++restart) {
    ASSERT_NO_FATAL_FAILURE(KillAndRestart());
    EXPECT_STATUS(process.Call("count_hello counted -"), absl::StatusCode::kAborted, "an operator has ended");
  }
  ASSERT_OK_AND_ASSIGN(ClientProcess other, ClientProcess::Start(dir()));
  EXPECT_OK(other.Call("count_hello counted -"));
}

// A directory stands in the file's place: a container's runtime makes a directory for a mount that is not there.
TEST_F(KeptSettingsTest, NoFileThatCannotBeUsedKeepsTheDaemonFromServing) {
  for (const std::string file : {"vrambroker.state", "vrambroker.segments.0", "vrambroker.members",
                                 "vrambroker.sessions", "vrambroker.state.new", "vrambroker.sessions.new"}) {
    if (OnCuda() && file == "vrambroker.segments.0") continue;
    ASSERT_OK(daemon_->Stop());
    const std::string path = absl::StrCat(dir(), "/", file);
    std::filesystem::remove(path);
    std::filesystem::remove(dir() + "/vrambroker.state");  // the daemon then has to write the file
    ASSERT_TRUE(std::filesystem::create_directories(path + "/full"));
    ASSERT_OK(daemon_->Restart()) << file;
    EXPECT_TRUE(absl::StrContains(daemon_->log(), path)) << "it says what is in the way: " << daemon_->log();
    ASSERT_OK_AND_ASSIGN(Client client, Connect("client"));
    EXPECT_OK(client.Allocate(1000).status());
    std::filesystem::remove_all(path);
  }
}

TEST_F(KeptSettingsTest, AnOperatorIsToldWhenItCannotBeKept) {
  ASSERT_OK_AND_ASSIGN(ClientProcess trainer, ConnectProcess("trainer"));
  std::filesystem::remove(dir() + "/vrambroker.sessions");
  ASSERT_TRUE(std::filesystem::create_directories(dir() + "/vrambroker.sessions/in_the_way"));
  for (const Arguments& change : std::vector<Arguments>{
           {"limit", "trainer", "64MiB"}, {"guarantee", "trainer", "1MiB"}, {"priority", "trainer", "2"}}) {
    const RunResult result = Ctl(change);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_TRUE(absl::StrContains(result.err, "in effect, but a daemon that is started again will not know it"))
        << result.err;
  }
  EXPECT_EQ(LimitOf("trainer"), 64_MiB);
  // The next daemon serves all the same.
  ASSERT_NO_FATAL_FAILURE(KillAndRestart());
  ASSERT_TRUE(IsBack("trainer"));
  EXPECT_EQ(LimitOf("trainer"), 128_MiB);
}

}  // namespace
}  // namespace vrambroker::testing_support
