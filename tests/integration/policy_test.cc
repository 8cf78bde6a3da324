// SPDX-License-Identifier: Apache-2.0
//
// Policy: rules, vramctl's output about rules, rights, and reloads of the configuration.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "tests/support/daemon_test.h"
#include "tests/support/raw_client.h"
#include "tests/support/test_device.h"
#include "tests/support/vramctl_test.h"

namespace vrambroker::testing_support {
namespace {

using Json = nlohmann::json;
using absl::StatusCode;
using absl::StrContains;

constexpr uint64_t kCapacity = 256_MiB;

class PolicyTest : public VramctlDaemonTest {
 protected:
  void Begin(const std::string& config) {
    ASSERT_OK(StartDaemon({.capacity = "256MiB", .config = absl::StrCat("socket_mode: '0666'\n", config)}));
  }

  // Returns a process of another user, with the group 44. REQUIRES: root.
  absl::StatusOr<ClientProcess> Stranger(uid_t uid) {
    absl::StatusOr<ClientProcess> process = ClientProcess::Start(dir());
    if (!process.ok()) return process;
    if (const auto done = process->Call(absl::StrCat("setuid ", uid, " 44")); !done.ok()) return done.status();
    return process;
  }

  // Replaces the file like an editor: a reader sees the old file or the new file.
  void WriteConfig(const std::string& text) const {
    const std::string path = daemon_->config_path();
    std::ofstream(path + ".new")
        << "socket_mode: '0666'\ndrain_timeout: '500ms' client_timeout: '20s' reclaim_timeout: '10s'\n"
        << text;
    std::filesystem::rename(path + ".new", path);
  }

  // Counts how often the daemon has logged `line`.
  size_t Said(const std::string& line) const {
    const std::string log = daemon_->log();
    size_t count = 0;
    for (size_t at = log.find(line); at != std::string::npos; at = log.find(line, at + 1)) ++count;
    return count;
  }
};

constexpr char kRules[] = R"(
  session_limit { fraction: 0.25 }
  rules {
    name: "training" session_name: "train-*"
    limit { fraction: 0.5 } guarantee { bytes: "32MiB" } priority: 7 tenant: "ml" isolation: STRICT
  }
  rules { uid: "65533" rights: NONE }
)";

TEST_F(PolicyTest, SessionsGetWhatTheirRuleGives) {
  Begin(kRules);
  ASSERT_OK_AND_ASSIGN(Client train, Connect("train-1"));
  EXPECT_EQ(train.limit_bytes(), kCapacity / 2) << "above session_limit";
  ASSERT_OK_AND_ASSIGN(Client wish, Connect("train-2", Limit(uint64_t{10_MiB})));
  EXPECT_EQ(wish.limit_bytes(), 10_MiB);
  ASSERT_OK_AND_ASSIGN(Client other, Connect("other", Limit(0.75)));
  EXPECT_EQ(other.limit_bytes(), kCapacity / 4) << "session_limit";

  const Json sessions = CtlJson({"sessions"})["sessions"];
  ASSERT_EQ(sessions.size(), 3u);
  EXPECT_EQ(sessions[0]["rule"], "training");
  EXPECT_EQ(sessions[0]["tenant"], "ml");
  EXPECT_EQ(sessions[0]["priority"], 7);
  EXPECT_EQ(sessions[2]["rule"], "");
  EXPECT_EQ(sessions[2]["tenant"], absl::StrCat("uid:", geteuid()));
  EXPECT_EQ(sessions[2]["priority"], 0);
  const RunResult text = Ctl({"sessions"});
  EXPECT_TRUE(StrContains(text.out, "PRIO")) << text.out;
}

TEST_F(PolicyTest, ExplainSaysWhichRuleAndWhy) {
  Begin(kRules);
  const Json self = CtlJson({"policy", "explain"});
  EXPECT_EQ(self["uid"], geteuid());
  const auto gids = self["gids"].get<std::vector<gid_t>>();
  EXPECT_EQ(std::set<gid_t>(gids.begin(), gids.end()).size(), gids.size()) << "each once: " << self["gids"];
  EXPECT_EQ(self["rule"], "");
  EXPECT_EQ(self["limit"]["fraction"], 0.25);
  EXPECT_EQ(self["name"], nullptr);
  EXPECT_EQ(self["operator"], true);
  EXPECT_EQ(self["rights"], Json({"client", "observer", "admin"}));
  ASSERT_EQ(self["rules"].size(), 2u);
  EXPECT_EQ(self["rules"][0]["matches"], false);

  const Json train = CtlJson({"policy", "explain", "--name=train-9"});
  EXPECT_EQ(train["rule"], "training");
  EXPECT_EQ(train["limit"]["fraction"], 0.5);
  EXPECT_EQ(train["guarantee"]["bytes"], 32_MiB);
  EXPECT_EQ(train["priority"], 7);
  EXPECT_EQ(train["tenant"], "ml");
  EXPECT_EQ(train["isolation"], "strict");
  ASSERT_EQ(train["rules"].size(), 1u);
  EXPECT_EQ(train["rules"][0]["why"], "name train-9 matches train-*");
  // The place is the line of the rule; the file's first line comes from the test.
  EXPECT_TRUE(StrContains(train["rules"][0]["place"].get<std::string>(), daemon_->config_path() + ":"));

  const Json other = CtlJson({"policy", "explain", "--uid=65533", "--gid=5", "--cgroup=/a/b"});
  EXPECT_EQ(other["uid"], 65533);
  EXPECT_EQ(other["gids"], Json({5}));
  EXPECT_EQ(other["cgroup"], "/a/b");
  EXPECT_EQ(other["rule"], "rules[1]");
  EXPECT_EQ(other["rights"], Json::array());
  EXPECT_EQ(other["operator"], false);
  EXPECT_EQ(other["rules"][1]["why"], "uid is 65533");

  // The name of a process is its command name.
  const Json process = CtlJson({"policy", "explain", absl::StrCat("--pid=", daemon_->pid())});
  EXPECT_EQ(process["name"], "vrambrokerd");
  EXPECT_EQ(process["uid"], geteuid());

  const RunResult text = Ctl({"policy", "explain", "--name=train-9"});
  EXPECT_EQ(text.exit_code, 0) << text.err;
  for (const char* part : {"name train-9 matches train-*", "rule       training", "limit      50.0% of the capacity",
                           "guarantee  32.00 MiB", "tenant     ml (strict)"}) {
    EXPECT_TRUE(StrContains(text.out, part)) << part << "\n" << text.out;
  }
}

TEST_F(PolicyTest, ExplainShowsPatternsThatAreNotUtf8) {
  Begin("rules { name: 'odd' session_name: 'z\\377*' cgroup: '/\\377' }");
  const Json explained = CtlJson({"policy", "explain", "--name=train"});
  EXPECT_TRUE(StrContains(explained["rules"][0]["why"].get<std::string>(), "z\xEF\xBF\xBD*")) << explained;
}

TEST_F(PolicyTest, ExplainRefusesWhatItCannotAnswer) {
  Begin("");
  for (const auto& [arguments, code, part] : std::vector<std::tuple<Arguments, int, std::string>>{
           {{"policy", "explain", "--pid=x"}, 2, "--pid: 'x'"},
           {{"policy", "explain", "--pid=1", "--uid=1"}, 2, "--pid goes without"},
           {{"policy", "explain", "--uid=no such user"}, 2, "--uid: no user"},
           {{"policy", "explain", "--gid=no such group"}, 2, "--gid: no group"},
           {{"policy", "explain", "--name=a b"}, 1, "session_name: only letters"},
           {{"policy", "show"}, 2, "policy: no command 'show'; see vramctl policy --help"},
           {{"policy"}, 2, "policy: no command given; see vramctl policy --help"},
           {{"policy", "explain", "--pid=2147483647"}, 1, "no process 2147483647"}}) {
    const RunResult result = Ctl(arguments);
    EXPECT_EQ(result.exit_code, code) << part;
    EXPECT_TRUE(StrContains(result.err, part)) << part << "\n" << result.err;
  }
}

// ---- Rights of users that are not root ----

class RightsTest : public PolicyTest {
 protected:
  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "needs root, to become other users";
  }
};

TEST_F(RightsTest, WithoutClientNoSessionIsOpened) {
  Begin("rules { name: 'watchers' uid: '65532' rights: OBSERVER }");
  ASSERT_OK_AND_ASSIGN(ClientProcess watcher, Stranger(65532));
  EXPECT_STATUS(
      watcher.Call("connect x -"), StatusCode::kPermissionDenied,
      "uid 65532 may not open a session named 'x': the policy's rule watchers does not give it the right CLIENT");
  EXPECT_OK(watcher.Call("list"));
  ASSERT_OK_AND_ASSIGN(ClientProcess other, Stranger(65531));
  EXPECT_OK(other.Call("connect x -"));
}

TEST_F(RightsTest, WithoutObserverOnlyOnesOwnSessionsAreShown) {
  Begin("rules { name: 'quiet' uid: '65532' rights: CLIENT }");
  ASSERT_OK_AND_ASSIGN(Client roots, Connect("roots"));
  ASSERT_OK_AND_ASSIGN(ClientProcess quiet, Stranger(65532));
  ASSERT_OK(quiet.Call("connect mine -"));
  EXPECT_STATUS(quiet.Call("list"), StatusCode::kPermissionDenied,
                "uid 65532 may not list sessions: the policy's rule quiet does not give it the right OBSERVER");
  for (const char* command : {"get roots", "get nobody"}) {
    EXPECT_STATUS(quiet.Call(command), StatusCode::kPermissionDenied, "may not look at other users' sessions");
  }
  EXPECT_OK(quiet.Call("get mine"));
  EXPECT_OK(quiet.Call("record mine 10"));
  EXPECT_OK(quiet.Call("snapshot mine"));
  EXPECT_STATUS(quiet.Call("snapshot roots"), StatusCode::kPermissionDenied, "belongs to another user");
}

TEST_F(RightsTest, ObserversChangeNothing) {
  Begin("rules { name: 'watchers' uid: '65532' rights: [OBSERVER, CLIENT] }");
  ASSERT_OK_AND_ASSIGN(Client roots, Connect("roots"));
  for (const uid_t uid : {uid_t{65532}, uid_t{65531}}) {  // rights from a rule, and default rights
    ASSERT_OK_AND_ASSIGN(ClientProcess watcher, Stranger(uid));
    EXPECT_OK(watcher.Call("list"));
    EXPECT_OK(watcher.Call("get roots"));
    EXPECT_STATUS(watcher.Call("get nobody"), StatusCode::kNotFound, "nobody");
    for (const char* command : {"set_limit roots 0", "trim roots", "end roots", "end nobody"}) {
      EXPECT_STATUS(watcher.Call(command), StatusCode::kPermissionDenied, "may not change sessions");
    }
    for (const char* command : {"record roots 10", "snapshot roots"}) {
      EXPECT_STATUS(watcher.Call(command), StatusCode::kPermissionDenied, "belongs to another user");
    }
    EXPECT_STATUS(watcher.Call("reload"), StatusCode::kPermissionDenied, "may not reload the configuration");
    EXPECT_STATUS(watcher.Call("release"), StatusCode::kPermissionDenied, "may not release idle memory");
  }
  EXPECT_EQ(roots.limit_bytes(), kCapacity);
  EXPECT_OK(roots.Allocate(1_MiB));
}

TEST_F(RightsTest, WhatLedToARefusalIsForItsUser) {
  Begin("rules { name: 'watchers' uid: '65532' rights: [OBSERVER, CLIENT] }");
  ASSERT_OK_AND_ASSIGN(Client roots, Connect("roots", Limit(20_MiB)));
  EXPECT_FALSE(roots.Allocate(30_MiB).ok());
  ASSERT_OK_AND_ASSIGN(ClientProcess own, Stranger(65531));
  ASSERT_OK(own.Call("connect own 20971520"));
  EXPECT_FALSE(own.Call(absl::StrCat("alloc ", 30_MiB)).ok());
  ASSERT_OK_AND_ASSIGN(ClientProcess watcher, Stranger(65532));
  for (const char* command : {"refusal 1", "refusal 2"}) {
    EXPECT_STATUS(watcher.Call(command), StatusCode::kPermissionDenied, "the session belonged to another user");
  }
  EXPECT_STATUS(watcher.Call("refusal 3"), StatusCode::kNotFound, "no refusal 3 is on record");
  EXPECT_OK(own.Call("refusal 2"));
  EXPECT_STATUS(own.Call("refusal 1"), StatusCode::kPermissionDenied, "the session belonged to another user");
  ASSERT_OK(own.Call("goodbye"));
  EXPECT_OK(own.Call("refusal 2")) << "also when it has ended";
  EXPECT_EQ(Ctl({"ooms", "--diagnose=2", "--for=torch-2.6"}).exit_code, 0) << "operators may";
}

// A user can follow the advice of the user's own refusals.
TEST_F(RightsTest, WithoutObserverOnesOwnRefusalsAreShown) {
  Begin("rules { name: 'quiet' uid: '65532' rights: CLIENT } rules { name: 'watchers' uid: '65530' rights: OBSERVER }");
  ASSERT_OK_AND_ASSIGN(Client roots, Connect("roots", Limit(20_MiB)));
  ASSERT_OK_AND_ASSIGN(ClientProcess quiet, Stranger(65532));
  ASSERT_OK(quiet.Call("connect mine 20971520"));
  EXPECT_EQ(*quiet.Call("ooms"), (std::vector<std::string>{"0", "0"}));
  EXPECT_FALSE(roots.Allocate(30_MiB).ok());
  EXPECT_FALSE(quiet.Call(absl::StrCat("alloc ", 30_MiB)).ok());
  EXPECT_FALSE(roots.Allocate(30_MiB).ok());
  EXPECT_EQ(*quiet.Call("ooms"), (std::vector<std::string>{"1", "1", "2"}));
  ASSERT_OK_AND_ASSIGN(ClientProcess watcher, Stranger(65530));
  EXPECT_EQ(*watcher.Call("ooms"), (std::vector<std::string>{"3", "3", "3", "2", "1"}));

  const auto as_quiet = [&](Arguments arguments) {
    Arguments command = {"/usr/bin/setpriv", "--reuid=65532",  "--regid=65532",
                         "--clear-groups",   VramctlProgram(), "--socket_dir=" + dir()};
    command.insert(command.end(), arguments.begin(), arguments.end());
    return RunProgram(command);
  };
  for (int round = 0; round < 2; ++round) {
    const RunResult listed = as_quiet({"ooms"});
    EXPECT_EQ(listed.exit_code, 0) << listed.err;
    EXPECT_TRUE(StrContains(listed.out, "vramctl ooms --diagnose 2")) << listed.out;
    EXPECT_FALSE(StrContains(listed.out, "roots")) << listed.out;
    for (const Arguments& diagnose : {Arguments{"ooms", "--diagnose=2"}, Arguments{"diagnose", "mine"}}) {
      const RunResult diagnosed = as_quiet(diagnose);
      EXPECT_EQ(diagnosed.exit_code, 0) << diagnosed.err;
      EXPECT_TRUE(StrContains(diagnosed.out, "refusal 2: mine")) << diagnosed.out;
    }
    const RunResult others = as_quiet({"ooms", "--diagnose=1"});
    EXPECT_EQ(others.exit_code, 1);
    EXPECT_TRUE(StrContains(others.err, "no refusal 1 of your own sessions is on record")) << others.err;
    if (round == 0) {
      ASSERT_OK(quiet.Call("goodbye"));  // refusals stay visible after the end of the session
    }
  }
}

TEST_F(RightsTest, AdminsOfAGroupMayEverything) {
  Begin("rules { name: 'operators' gid: '44' rights: ADMIN }");
  ASSERT_OK_AND_ASSIGN(Client roots, Connect("roots"));
  ASSERT_OK_AND_ASSIGN(ClientProcess admin, Stranger(65532));
  EXPECT_EQ(*admin.Call("explain"), std::vector<std::string>{"operators"});
  for (const char* command : {"list", "get roots", "record roots 10", "snapshot roots", "trim roots", "connect x -",
                              "set_limit roots 1048576", "reload", "release", "end roots"}) {
    EXPECT_OK(admin.Call(command)) << command;
  }
  EXPECT_TRUE(WaitFor([&] { return !roots.status().ok(); })) << "ended";
}

TEST_F(RightsTest, NoneMeansNothing) {
  Begin("rules { name: 'out' uid: '65532' rights: NONE }");
  ASSERT_OK_AND_ASSIGN(ClientProcess out, Stranger(65532));
  for (const char* command : {"connect x -", "list", "get roots", "trim roots", "reload"}) {
    EXPECT_STATUS(out.Call(command), StatusCode::kPermissionDenied, "rule out does not give it the right") << command;
  }
  // Asking for the reason is allowed.
  EXPECT_EQ(*out.Call("explain"), std::vector<std::string>{"out"});
}

TEST_F(RightsTest, OnlyAdminsAskAboutOthers) {
  Begin("rules { name: 'me' uid: '65532' }");
  ASSERT_OK_AND_ASSIGN(ClientProcess user, Stranger(65532));
  EXPECT_EQ(*user.Call(absl::StrCat("explain ", user.pid())), std::vector<std::string>{"me"});
  EXPECT_STATUS(user.Call(absl::StrCat("explain ", getpid())), StatusCode::kPermissionDenied,
                "may not ask about other users or processes");
  const Json seen = CtlJson({"policy", "explain", absl::StrCat("--pid=", user.pid())});
  EXPECT_EQ(seen["rule"], "me");
  EXPECT_EQ(seen["gids"].back(), 44);
}

// ---- Reloads of the configuration ----

TEST_F(PolicyTest, AReloadIsForSessionsOpenedFromThenOn) {
  Begin("");
  ASSERT_OK_AND_ASSIGN(Client before, Connect("train-1"));
  WriteConfig(kRules);
  const RunResult result = Ctl({"reload"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out, "reloaded: 2 rules, for sessions opened from now on; live sessions keep their terms\n");
  ASSERT_OK_AND_ASSIGN(Client after, Connect("train-2"));
  EXPECT_EQ(before.limit_bytes(), kCapacity);
  EXPECT_EQ(after.limit_bytes(), kCapacity / 2);
  const Json sessions = CtlJson({"sessions"})["sessions"];
  EXPECT_EQ(sessions[0]["rule"], "");
  EXPECT_EQ(sessions[1]["rule"], "training");

  WriteConfig("max_sessions_per_uid: 2");
  EXPECT_EQ(CtlJson({"reload"})["rules"], 0);
  EXPECT_STATUS(Connect("third"), StatusCode::kResourceExhausted, "max_sessions_per_uid");
}

TEST_F(PolicyTest, AFaultyFileIsRefusedWhole) {
  Begin(kRules);
  // The first rule is valid, and must not be applied.
  WriteConfig("rules { name: 'good' }\nrules {\n  guarantee { fraction: 3 }\n}\nrules { uid: '' }\n");
  const RunResult values = Ctl({"reload"});
  EXPECT_EQ(values.exit_code, 1);
  for (const std::string& part :
       {std::string("the old configuration stays"), daemon_->config_path() + ":5:15: rules[1].guarantee.fraction: 3",
        daemon_->config_path() + ":7:9: rules[2].uid: is empty"}) {
    EXPECT_TRUE(StrContains(values.err, part)) << part << "\n" << values.err;
  }
  EXPECT_EQ(CtlJson({"policy", "explain", "--name=train-1"})["rule"], "training");

  WriteConfig("rules { nam: 'x' }\n");
  const RunResult syntax = Ctl({"reload", "--format=json"});
  EXPECT_EQ(syntax.exit_code, 1);
  EXPECT_TRUE(StrContains(syntax.err, daemon_->config_path() + ":3:")) << syntax.err;

  // A status could not carry so many faults.
  std::string many;
  for (int i = 0; i < 500; ++i) absl::StrAppend(&many, "rules { priority: 5000 }\n");
  WriteConfig(many);
  const RunResult cut = Ctl({"reload"});
  EXPECT_EQ(cut.exit_code, 1);
  EXPECT_TRUE(StrContains(cut.err, "500 faults")) << cut.err;
  EXPECT_TRUE(StrContains(cut.err, "and more: see the daemon's log")) << cut.err;
  EXPECT_TRUE(StrContains(daemon_->log(), "rules[499].priority")) << "the log has all";

  std::filesystem::remove(daemon_->config_path());
  const RunResult gone = Ctl({"reload"});
  EXPECT_EQ(gone.exit_code, 1);
  EXPECT_TRUE(StrContains(gone.err, daemon_->config_path())) << gone.err;
  EXPECT_EQ(CtlJson({"policy", "explain", "--name=train-1"})["rule"], "training");
}

TEST_F(PolicyTest, FieldsThatNeedARestartAreNamed) {
  Begin("");
  // Flags override the file: capacity and socket_dir are given as flags.
  WriteConfig("idle_decay: '3s'\nrecord_events: 5\ncapacity: '1GiB'\nrules { }\n");
  const Json report = CtlJson({"reload"});
  EXPECT_EQ(report["rules"], 1);
  EXPECT_EQ(report["needs_restart"], Json({"idle_decay", "record_events"}));
  const RunResult text = Ctl({"reload"});
  EXPECT_TRUE(StrContains(text.out, "only after a restart: idle_decay, record_events")) << text.out;
  EXPECT_EQ(Said("needs_restart=idle_decay,record_events"), 2u);
}

TEST_F(PolicyTest, SighupReloadsToo) {
  Begin("");
  WriteConfig(kRules);
  daemon_->process().Signal(SIGHUP);
  ASSERT_TRUE(WaitFor([&] { return Said("configuration reloaded rules=2") == 1; })) << daemon_->log();
  EXPECT_EQ(CtlJson({"policy", "explain", "--name=train-1"})["rule"], "training");
  WriteConfig("rules { uid: '' }");
  daemon_->process().Signal(SIGHUP);
  ASSERT_TRUE(WaitFor([&] { return Said("configuration not reloaded") == 1; })) << daemon_->log();
  EXPECT_TRUE(StrContains(daemon_->log(), daemon_->config_path() + ":3:9: rules[0].uid: is empty")) << daemon_->log();
  EXPECT_EQ(CtlJson({"policy", "explain", "--name=train-1"})["rule"], "training");
  EXPECT_TRUE(daemon_->Running());
}

// ---- Limits and guarantees of all sessions of a user together ----

TEST_F(PolicyTest, UserLimitBindsAllSessionsOfAUser) {
  ASSERT_NO_FATAL_FAILURE(
      Begin("user_limit { bytes: '100MiB' } rules { session_name: 'large*' user_limit { fraction: 1 } }"));
  ASSERT_OK_AND_ASSIGN(Client first, Connect("first"));
  ASSERT_OK_AND_ASSIGN(Client second, Connect("second"));
  ASSERT_OK_AND_ASSIGN(Buffer held, first.Allocate(60_MiB));
  const absl::StatusOr<Buffer> refused = second.Allocate(60_MiB);
  const std::optional<OutOfMemory> oom = GetOutOfMemory(refused.status());
  ASSERT_TRUE(oom.has_value()) << refused.status();
  EXPECT_EQ(oom->cause, OutOfMemory::Cause::kLimit);
  EXPECT_TRUE(StrContains(refused.status().message(), "this user's sessions already have 60.00 MiB of the "))
      << refused.status();
  EXPECT_TRUE(StrContains(refused.status().message(), "user_limit raised")) << refused.status();
  EXPECT_OK(second.Allocate(40_MiB));
  // A rule may give more. The user's memory of all sessions counts.
  ASSERT_OK_AND_ASSIGN(Client large, Connect("large"));
  EXPECT_OK(large.Allocate(150_MiB));
  if (geteuid() != 0) return;
  ASSERT_OK_AND_ASSIGN(ClientProcess stranger, Stranger(54321));
  ASSERT_OK(stranger.Call("connect stranger -"));
  EXPECT_OK(stranger.Call(absl::StrCat("alloc ", 60_MiB))) << "another user";
}

TEST_F(PolicyTest, GuaranteesOfAUserAreBoundTogetherAndSessionsOfARuleCounted) {
  ASSERT_NO_FATAL_FAILURE(
      Begin("rules { name: 'kept' session_name: 'kept*' guarantee { bytes: '40MiB' } "
            "user_guarantee { bytes: '60MiB' } max_sessions: 3 }"));
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  std::vector<Client> clients;
  for (const uint64_t guarantee : {40_MiB, 20_MiB, 0_MiB}) {
    const std::string name = absl::StrCat("kept-", clients.size());
    ASSERT_OK_AND_ASSIGN(Client client, Connect(name));
    clients.push_back(std::move(client));
    ASSERT_OK_AND_ASSIGN(const v1::Session session, raw.GetSession(Ref(name)));
    EXPECT_EQ(session.devices(0).guarantee_bytes(), guarantee) << name << " gets what is left";
  }
  EXPECT_STATUS(Connect("kept-4"), StatusCode::kResourceExhausted, "rule kept, the most that its max_sessions allows");
  EXPECT_OK(Connect("other"));
  const RunResult raised = Ctl({"guarantee", "kept-1", "30MiB"});
  EXPECT_EQ(raised.exit_code, 1);
  EXPECT_TRUE(StrContains(raised.err, "more than user_guarantee leaves")) << raised.err;
  clients.erase(clients.begin());
  EXPECT_TRUE(WaitFor([&] { return Ctl({"guarantee", "kept-1", "60MiB"}).exit_code == 0; }));
  const Json explained = CtlJson({"policy", "explain", "--name=kept"});
  EXPECT_EQ(explained["user_guarantee"]["bytes"], 60_MiB) << explained;
  EXPECT_EQ(explained["user_limit"], nullptr);
  EXPECT_EQ(explained["max_sessions"], 3);
}

// Names devices like ranks of torchrun.
TEST_F(PolicyTest, GuaranteesAreTakenOnNamedDevicesAlone) {
  HOST_DEVICE_ONLY();
  ASSERT_OK(StartDaemon({.capacity = "64MiB", .config = "rules { guarantee { fraction: 0.4 } }", .devices = 3}));
  const auto connect = [&](const std::string& name, const std::string& device) {
    return Client::Connect({.socket_dir = dir(),
                            .name = name,
                            .guarantee = Limit(0.4),
                            .devices = {device},
                            .connect_timeout = kPatience,
                            .call_timeout = kPatience,
                            .log = [](const std::string&) {}});
  };
  ASSERT_OK_AND_ASSIGN(const Client first, connect("rank-0", "0"));
  ASSERT_OK_AND_ASSIGN(const Client second, connect("rank-1", "1"));
  ASSERT_OK_AND_ASSIGN(Client third, connect("rank-2", "HOST-2"));
  ASSERT_OK_AND_ASSIGN(const Client fourth, connect("rank-3", "2"));
  EXPECT_STATUS(connect("rank-4", "2"), StatusCode::kResourceExhausted, "more than can be guaranteed");
  EXPECT_STATUS(connect("rank-5", "3"), StatusCode::kNotFound, "devices: no device 3; the daemon has 0 (HOST-0), ");
  const auto check = [&](uint64_t limit, uint64_t guarantee) {
    for (const int device : {0, 1, 2}) EXPECT_EQ(third.limit_bytes(device), device == 2 ? limit : 0) << device;
    ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
    ASSERT_OK_AND_ASSIGN(const v1::Session session, raw.GetSession(Ref("rank-2")));
    for (const v1::SessionDevice& device : session.devices()) {
      EXPECT_EQ(device.limit_bytes(), device.device() == 2 ? limit : 0) << device.device();
      EXPECT_EQ(device.guarantee_bytes(), device.device() == 2 ? guarantee : 0) << device.device();
    }
    EXPECT_STATUS(third.Allocate(2_MiB, 0), StatusCode::kResourceExhausted, "the session has named other devices: 2");
    EXPECT_OK(third.Allocate(2_MiB, 2));
  };
  ASSERT_NO_FATAL_FAILURE(check(64_MiB, static_cast<uint64_t>(0.4 * 64_MiB)));
  EXPECT_EQ(Ctl({"guarantee", "rank-2", "0.25"}).exit_code, 0);
  const RunResult limited = Ctl({"limit", "rank-2", "0.5"});
  EXPECT_EQ(limited.exit_code, 0) << limited.err;
  EXPECT_TRUE(StrContains(limited.out, "limit 0 B on device 0 (asked for 32.00 MiB; the session's choice of devices"))
      << limited.out;
  ASSERT_TRUE(WaitFor([&] { return third.limit_bytes(2) == 32_MiB; }));
  ASSERT_NO_FATAL_FAILURE(check(32_MiB, 16_MiB));
  daemon_->Kill();
  ASSERT_TRUE(WaitFor([&] { return absl::IsUnavailable(third.status()); }));
  ASSERT_OK(daemon_->Restart());
  ASSERT_TRUE(WaitFor([&] { return third.status().ok(); })) << third.status();
  ASSERT_NO_FATAL_FAILURE(check(32_MiB, 16_MiB));
}

TEST_F(PolicyTest, CheckConfigWarnsOfGuaranteesThatCouldTakeAllOfTheDevice) {
  const std::string path = MakeTempDir() + "/config";
  const auto check = [&](const std::string& text) {
    std::ofstream(path) << text;
    const RunResult result = RunProgram({DaemonProgram(), "--check-config", "--config=" + path});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return result.err;
  };
  EXPECT_TRUE(StrContains(check("capacity: '1GiB' rules { name: 'r' guarantee { bytes: '2MiB' } }"),
                          "rule r: one user's 1024 sessions, with a guarantee of 2.00 MiB each"));
  EXPECT_TRUE(StrContains(check("rules { guarantee { fraction: 0.5 } max_sessions: 3 }"), "one user's 3 sessions"));
  EXPECT_EQ(check("rules { guarantee { fraction: 0.5 } max_sessions: 2 }"), "");
  EXPECT_EQ(check("rules { guarantee { fraction: 0.5 } user_guarantee { fraction: 0.5 } }"), "");
  EXPECT_EQ(check("capacity: '1GiB' rules { guarantee { bytes: '1MiB' } }"), "");
  EXPECT_EQ(check("rules { priority: 4 }"), "");
}

TEST(ReloadTest, WithoutAFileItSaysSoAndGoesOn) {
  const std::string dir = MakeTempDir();
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<ChildProcess> daemon,
                       ChildProcess::Start({DaemonProgram(), "--socket_dir=" + dir, "--device=host", "--capacity=64MiB",
                                            "--http_address=off"}));
  ASSERT_TRUE(WaitFor([&] { return StrContains(daemon->ErrorText(), "daemon ready"); })) << daemon->ErrorText();
  const Arguments reload = {VramctlProgram(), "reload", "--socket_dir=" + dir};
  const RunResult refused = RunProgram(reload);
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_TRUE(StrContains(refused.err, "started without --config")) << refused.err;
  const auto warnings = [&] {
    const std::string log = daemon->ErrorText();
    const size_t first = log.find("configuration not reloaded");
    return first == std::string::npos                                               ? 0
           : log.find("configuration not reloaded", first + 1) == std::string::npos ? 1
                                                                                    : 2;
  };
  EXPECT_EQ(warnings(), 1);
  daemon->Signal(SIGHUP);
  EXPECT_TRUE(WaitFor([&] { return warnings() == 2; })) << daemon->ErrorText();
  EXPECT_TRUE(StrContains(RunProgram(reload).err, "started without --config")) << "it serves on";
  daemon->Signal(SIGTERM);
  EXPECT_EQ(daemon->Wait().value_or(-1), 0);
}

}  // namespace
}  // namespace vrambroker::testing_support
