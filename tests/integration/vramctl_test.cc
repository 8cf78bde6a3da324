// SPDX-License-Identifier: Apache-2.0
//
// Commands of vramctl, on a daemon with sessions.
#include <gtest/gtest.h>
#include <signal.h>

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "allocator/base/bytes.h"
#include "tests/support/raw_client.h"
#include "tests/support/test_device.h"
#include "tests/support/vramctl_test.h"

namespace vrambroker::testing_support {
namespace {

using Json = nlohmann::json;
using absl::StrContains;

class VramctlTest : public VramctlDaemonTest {
 protected:
  void SetUp() override { ASSERT_OK(StartDaemon({.capacity = "256MiB"})); }
};

TEST_F(VramctlTest, StatusAndSessions) {
  placement_ = Placement::kRemote;
  EXPECT_EQ(Ctl({"sessions"}).out, "no sessions\n");
  EXPECT_EQ(CtlJson({"sessions"})["sessions"], Json::array());

  ASSERT_OK_AND_ASSIGN(Client client, Connect("trainer", Limit(0.5)));
  ASSERT_OK_AND_ASSIGN(const Buffer buffer, client.Allocate(10_MiB));
  const Json status = CtlJson({"status"});
  EXPECT_EQ(status["sessions"], 1);
  EXPECT_EQ(status["socket_dir"], dir());
  EXPECT_FALSE(status["daemon_version"].get<std::string>().empty());
  EXPECT_EQ(status["devices"][0]["kind"], OnCuda() ? "cuda" : "host");
  EXPECT_EQ(status["devices"][0]["capacity_bytes"], 256_MiB);
  EXPECT_EQ(status["devices"][0]["reserved_bytes"], 10_MiB);
  EXPECT_EQ(status["devices"][0]["allocated_bytes"], 10_MiB);
  EXPECT_EQ(status["devices"][0]["idle_bytes"], 0);
  EXPECT_EQ(status["devices"][0]["free_bytes"], 246_MiB);
  EXPECT_EQ(status["devices"][0]["fragmentation_ratio"], 0);
  const RunResult status_text = Ctl({"status"});
  EXPECT_EQ(status_text.exit_code, 0);
  EXPECT_TRUE(StrContains(status_text.out, "1 session\n")) << status_text.out;
  EXPECT_TRUE(StrContains(status_text.out, "256.00 MiB")) << status_text.out;

  const Json session = CtlJson({"sessions"})["sessions"][0];
  EXPECT_EQ(session["name"], "trainer");
  EXPECT_EQ(session["id"], client.session_id());
  EXPECT_EQ(session["pid"], getpid());
  EXPECT_EQ(session["uid"], getuid());
  EXPECT_EQ(session["state"], "active");
  EXPECT_TRUE(StrContains(session["started"].get<std::string>(), "T"));
  EXPECT_EQ(session["devices"][0]["limit_bytes"], 128_MiB);
  EXPECT_EQ(session["devices"][0]["reserved_bytes"], 10_MiB);
  EXPECT_EQ(session["devices"][0]["allocated_bytes"], 10_MiB);
  const RunResult sessions_text = Ctl({"sessions"});
  EXPECT_TRUE(StrContains(sessions_text.out, "trainer")) << sessions_text.out;
  EXPECT_TRUE(StrContains(sessions_text.out, "  128M     10.0M")) << sessions_text.out;
}

TEST_F(VramctlTest, StatsAndSummary) {
  ASSERT_OK_AND_ASSIGN(Client a, Connect("a"));
  ASSERT_OK_AND_ASSIGN(Client b, Connect("b"));
  ASSERT_OK_AND_ASSIGN(const Buffer x, a.Allocate(1000));
  ASSERT_OK_AND_ASSIGN(const Buffer y, b.Allocate(3000));
  EXPECT_EQ(CtlJson({"stats", "a"})["allocated_bytes.all.current"], 1024);
  EXPECT_EQ(CtlJson({"stats", absl::StrCat(b.session_id())})["requested_bytes.all.current"], 3000);
  const Json all = CtlJson({"stats"});
  EXPECT_EQ(all["requested_bytes.all.current"], 4000);
  EXPECT_EQ(all["reserved_bytes.all.current"], 4_MiB);
  for (const char* name : {"num_ooms", "num_alloc_retries", "active.all.peak", "segment.large_pool.allocated",
                           "inactive_split_bytes.small_pool.current"}) {
    EXPECT_TRUE(all.contains(name)) << name;
  }
  EXPECT_TRUE(StrContains(Ctl({"stats", "a"}).out, "requested_bytes.all.current 1000\n"));

  const RunResult summary = Ctl({"summary", "a"});
  EXPECT_EQ(summary.exit_code, 0);
  EXPECT_TRUE(StrContains(summary.out, "Allocated memory")) << summary.out;
  EXPECT_EQ(CtlJson({"summary", "a"})["name"], "a");
  EXPECT_EQ(Ctl({"summary", "a", "--device=1"}).exit_code, 1);
  EXPECT_EQ(Ctl({"stats", "a", "--device=-1"}).exit_code, 1);
}

TEST_F(VramctlTest, TopIsWrittenToAPipe) {
  ASSERT_OK_AND_ASSIGN(const Client client, Connect("trainer"));
  const RunResult once = Ctl({"top", "-b"});
  EXPECT_EQ(once.exit_code, 0) << once.err;
  EXPECT_TRUE(StrContains(once.out, " free of 256.00 MiB, ")) << once.out;
  EXPECT_TRUE(StrContains(once.out, "\ntrainer ")) << once.out;
  EXPECT_FALSE(StrContains(once.out, "\x1b")) << once.out;
  const RunResult thrice = Ctl({"top", "-b", "-n", "3", "--interval=0.1"});
  EXPECT_EQ(thrice.exit_code, 0) << thrice.err;
  const std::vector<std::string> pictures = absl::StrSplit(thrice.out, "\ntrainer ");
  EXPECT_EQ(pictures.size(), 4u) << thrice.out;
  EXPECT_EQ(Ctl({"top", "-n", "3"}).exit_code, 2) << "of a live view";
  EXPECT_EQ(Ctl({"top", "-b", "-n", "0"}).exit_code, 2);
  EXPECT_TRUE(StrContains(Ctl({"top"}).err, "vramctl top -b writes text"));
  EXPECT_EQ(RunProgram({VramctlProgram(), "top", "-b", "--socket-dir=" + MakeTempDir()}).exit_code, 1);
}

TEST_F(VramctlTest, SummaryIsOfAllWhereNobodyIsNamed) {
  EXPECT_TRUE(StrContains(Ctl({"summary"}).out, "device ID 0, all sessions ")) << "also of none";
  ASSERT_OK_AND_ASSIGN(Client a, Connect("a"));
  ASSERT_OK_AND_ASSIGN(Client b, Connect("b"));
  ASSERT_OK_AND_ASSIGN(const Buffer x, a.Allocate(2_MiB));
  ASSERT_OK_AND_ASSIGN(const Buffer y, b.Allocate(2_MiB));
  EXPECT_TRUE(WaitFor([&] { return StrContains(Ctl({"summary"}).out, "| Allocated memory      |   4096 KiB |"); }))
      << Ctl({"summary"}).out;
  EXPECT_EQ(CtlJson({"summary"})["sessions"].size(), 2u);
}

TEST_F(VramctlTest, WhatCanNeverFitIsSaidWithoutTrying) {
  ASSERT_OK(StartDaemon({.config = "record_events: 1000"}));
  ASSERT_OK_AND_ASSIGN(Client client, Connect("trainer", Limit(uint64_t{64_MiB})));
  EXPECT_FALSE(client.Allocate(1_GiB).ok());
  EXPECT_FALSE(client.Allocate(100_MiB).ok());
  for (const auto& [refusal, what] : {std::pair("1", "1.00 GiB. No setting changes that."),
                                      std::pair("2", "100.00 MiB, and the session could have 64.00 MiB in all.")}) {
    const RunResult text = Ctl({"ooms", "--diagnose", refusal});
    EXPECT_EQ(text.exit_code, 0) << text.err;
    EXPECT_TRUE(StrContains(text.out, absl::StrCat("It can never fit: it asks for ", what))) << text.out;
    EXPECT_FALSE(StrContains(text.out, "tried")) << text.out;
    const Json json = CtlJson({"ooms", "--diagnose", refusal});
    EXPECT_EQ(json["never_fits"], true);
    EXPECT_EQ(json["tried"], 0);
    EXPECT_GE(json["next_steps"].size(), 1u);
  }
}

TEST_F(VramctlTest, Ooms) {
  EXPECT_EQ(Ctl({"ooms"}).out, "no refused request is on record\n");
  EXPECT_EQ(CtlJson({"ooms"})["events"], Json::array());

  {
    ASSERT_OK_AND_ASSIGN(ClientProcess trainer, ConnectProcess("trainer", "64MiB"));
    EXPECT_FALSE(trainer.Call(absl::StrCat("alloc ", 100_MiB)).ok());
    EXPECT_FALSE(trainer.Call(absl::StrCat("alloc ", 512_MiB)).ok());
    ASSERT_OK(trainer.Call("goodbye"));
  }
  ASSERT_OK_AND_ASSIGN(Client holder, Connect("holder"));
  ASSERT_OK_AND_ASSIGN(const Buffer buffer, holder.Allocate(200_MiB));
  ASSERT_OK_AND_ASSIGN(Client server, Connect("server"));
  const absl::Status refused = server.Allocate(80_MiB).status();
  ASSERT_TRUE(absl::IsResourceExhausted(refused)) << refused;

  const Json all = CtlJson({"ooms"});
  EXPECT_EQ(all["total_events"], 3);
  EXPECT_EQ(all["matching_events"], 3);
  ASSERT_EQ(all["events"].size(), 3u);
  const Json& newest = all["events"][0];
  EXPECT_EQ(newest["client"], "server");
  EXPECT_EQ(newest["session_id"], server.session_id());
  EXPECT_EQ(newest["uid"], getuid());
  EXPECT_TRUE(StrContains(newest["time"].get<std::string>(), "T"));
  EXPECT_EQ(newest["out_of_memory"]["cause"], "CAPACITY");
  EXPECT_EQ(newest["out_of_memory"]["requested_bytes"], 80_MiB);
  EXPECT_EQ(newest["out_of_memory"]["reserved_bytes"], 0);
  EXPECT_EQ(newest["out_of_memory"]["largest_holders"][0]["client"], "holder");
  EXPECT_EQ(newest["out_of_memory"]["largest_holders"][0]["reserved_bytes"], 200_MiB);
  EXPECT_EQ(newest["out_of_memory"]["advice"], GetOutOfMemory(refused)->advice);
  EXPECT_EQ(all["events"][1]["out_of_memory"]["cause"], "LARGER_THAN_DEVICE");
  EXPECT_EQ(all["events"][2]["out_of_memory"]["cause"], "LIMIT");
  EXPECT_EQ(all["events"][2]["out_of_memory"]["limit_bytes"], 64_MiB);

  // Selects the refusals of an ended session by name and id, then only the last refusals.
  EXPECT_EQ(CtlJson({"ooms", "--session=trainer"})["events"].size(), 2u);
  EXPECT_EQ(CtlJson({"ooms", "--session=" + all["events"][2]["session_id"].dump()})["events"].size(), 2u);
  EXPECT_EQ(CtlJson({"ooms", "--session=nobody"})["matching_events"], 0);
  const Json last = CtlJson({"ooms", "--last=1", "--session=trainer"});
  ASSERT_EQ(last["events"].size(), 1u);
  EXPECT_EQ(last["events"][0]["out_of_memory"]["requested_bytes"], 512_MiB);
  EXPECT_EQ(last["matching_events"], 2);
  EXPECT_EQ(Ctl({"ooms", "--session=" + std::string(256, 'x')}).exit_code, 1);

  const RunResult text = Ctl({"ooms", "--last=2"});
  EXPECT_EQ(text.exit_code, 0) << text.err;
  for (const char* words : {"CLIENT", "capacity", "larger_than_device", "80.00 MiB", "2 of 3"}) {
    EXPECT_TRUE(StrContains(text.out, words)) << words << " in\n" << text.out;
  }
  EXPECT_FALSE(StrContains(text.out, " limit ")) << text.out;
}

TEST_F(VramctlTest, NumbersAreOfOneRunOfTheDaemon) {
  // Opens a session, causes a refusal, and returns the run id that all commands with numbers print.
  const auto run_of = [&] {
    Client client = Connect("trainer").value();
    EXPECT_FALSE(client.Allocate(512_MiB).ok());
    const Json ooms = CtlJson({"ooms"});
    EXPECT_EQ(ooms["total_events"], 1);
    EXPECT_EQ(ooms["events"][0]["refusal"], 1);
    const std::string run = ooms.value("run_id", "");
    EXPECT_NE(run, "");
    for (const Arguments& command :
         std::vector<Arguments>{{"status"}, {"sessions"}, {"summary"}, {"watch", "--count=1"}}) {
      EXPECT_EQ(CtlJson(command)["run_id"], run) << command[0];
    }
    return run;
  };
  const std::string first = run_of();
  daemon_->Kill();
  ASSERT_OK(daemon_->Restart());
  EXPECT_NE(run_of(), first);
}

TEST_F(VramctlTest, LimitTrimAndEnd) {
  ASSERT_OK_AND_ASSIGN(ClientProcess client, ConnectProcess("trainer"));
  ASSERT_OK(client.Call("alloc 33554432"));
  ASSERT_OK(client.Call("alloc 33554432"));
  ASSERT_OK(client.Call("free 1"));

  EXPECT_EQ(CtlJson({"limit", "trainer", "0.25"})["devices"][0]["limit_bytes"], 64_MiB);
  const RunResult over = Ctl({"limit", "trainer", "40MiB"});
  EXPECT_EQ(over.exit_code, 0);
  // The daemon asks for idle memory at once; the answer may come before or after this line is printed.
  EXPECT_TRUE(StrContains(over.out, "trainer: limit 40.00 MiB on device 0")) << over.out;
  WaitFor([&] { return CtlJson({"sessions"})["sessions"][0]["devices"][0]["reserved_bytes"] == 32_MiB; });
  EXPECT_EQ(CtlJson({"limit", "trainer", "20MiB"})["devices"][0]["over_limit"], true);
  EXPECT_TRUE(StrContains(Ctl({"sessions"}).out, "over limit"));
  EXPECT_TRUE(StrContains(Ctl({"trim", "trainer"}).out, "trainer: 0 B came back"));
  EXPECT_EQ(CtlJson({"end", "trainer"})["quarantined_bytes"], 32_MiB);
  EXPECT_EQ(CtlJson({"sessions"})["sessions"][0]["state"], "ended");
  EXPECT_TRUE(StrContains(Ctl({"sessions"}).out, "ended") && !StrContains(Ctl({"sessions"}).out, "over limit"));
  const RunResult again = Ctl({"end", "trainer"});
  EXPECT_EQ(again.exit_code, 0);
  EXPECT_TRUE(StrContains(again.out, "32.00 MiB stays charged")) << again.out;
  EXPECT_TRUE(WaitFor([&] { return !client.Call("status").ok(); })) << "the client is told";
  EXPECT_STATUS(client.Call("alloc 1"), absl::StatusCode::kAborted, "operator");
}

TEST_F(VramctlTest, LessThanWasAskedForIsSaid) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("c"));
  EXPECT_EQ(
      Ctl({"limit", "c", "100GiB"}).out,
      "c: limit 256.00 MiB on device 0 (asked for 100.00 GiB; the device's capacity is 256.00 MiB), reserved 0 B\n");
  EXPECT_EQ(Ctl({"limit", "c", "50%"}).out, "c: limit 128.00 MiB on device 0, reserved 0 B\n");
  EXPECT_EQ(Ctl({"limit", "c", "1.0"}).out, "c: limit 256.00 MiB on device 0, reserved 0 B\n");
  EXPECT_TRUE(StrContains(Ctl({"guarantee", "c", "1TiB"}).out,
                          "on device 0 (asked for 1.00 TiB; the device's capacity is 256.00 MiB), 0 B reserved\n"));
  EXPECT_EQ(Ctl({"guarantee", "c", "0"}).exit_code, 0);
  const auto hold = [&](const Arguments& flag, const Environment& environment) {
    Arguments arguments = {VramctlProgram(), "hold", "1MiB", "--socket_dir=" + dir()};
    arguments.insert(arguments.end(), flag.begin(), flag.end());
    const auto holder = ChildProcess::Start(arguments, environment);
    EXPECT_OK(holder.status());
    return (*holder)->ReadLine().value_or("");
  };
  EXPECT_TRUE(StrContains(hold({"--limit", "25%"}, {}), ", limit 64.00 MiB; pattern"));
  const char* const less = ", limit 256.00 MiB (asked for 8.00 GiB; the device's capacity is 256.00 MiB); pattern";
  EXPECT_TRUE(StrContains(hold({"--limit", "8G"}, {}), less));
  EXPECT_TRUE(StrContains(hold({}, {{"VRAMBROKER_LIMIT", "8G"}}), less));
}

TEST_F(VramctlTest, RefusalsExitWithOneAndWrongUseWithTwo) {
  for (const Arguments& arguments : std::vector<Arguments>{{"stats", "nobody"},
                                                           {"summary", "nobody"},
                                                           {"limit", "nobody", "0.5"},
                                                           {"trim", "nobody"},
                                                           {"end", "nobody"},
                                                           {"end", "12345"}}) {
    const RunResult result = Ctl(arguments);
    EXPECT_EQ(result.exit_code, 1) << arguments[0];
    EXPECT_TRUE(absl::StartsWith(result.err, "vramctl: ") && StrContains(result.err, "no session")) << result.err;
    EXPECT_EQ(result.out, "");
  }
  // An ended session is distinguished from a session that never existed.
  ASSERT_OK(Connect("first").status());
  ASSERT_TRUE(WaitFor([&] { return CtlJson({"sessions"})["sessions"].empty(); }));
  EXPECT_TRUE(StrContains(Ctl({"summary", "1"}).err, "session 1 has ended"));
  ASSERT_OK_AND_ASSIGN(Client client, Connect("c"));
  for (const Arguments& arguments : std::vector<Arguments>{{},
                                                           {"nonsense"},
                                                           {"status", "surplus"},
                                                           {"snapshot"},
                                                           {"limit", "c"},
                                                           {"limit", "c", "half"},
                                                           {"limit", "c", "1.5"},
                                                           {"limit", "c", "1"},
                                                           {"hold"},
                                                           {"hold", "lots"},
                                                           {"hold", "0"},
                                                           {"hold", "1MiB", "--limit=2.0"},
                                                           {"status", "--format=xml"}}) {
    const RunResult result = Ctl(arguments);
    EXPECT_EQ(result.exit_code, 2) << ::testing::PrintToString(arguments) << result.err;
    EXPECT_TRUE(StrContains(result.err, "vramctl")) << result.err;
  }
  EXPECT_EQ(client.limit_bytes(), 256_MiB);

  const RunResult json = Ctl({"end", "nobody", "--format=json"});
  const Json error = Json::parse(json.err, nullptr, false);
  ASSERT_FALSE(error.is_discarded()) << json.err;
  EXPECT_EQ(error["error"]["code"], "NOT_FOUND");

  const RunResult no_daemon = RunProgram({VramctlProgram(), "status", "--socket_dir=" + MakeTempDir()});
  EXPECT_EQ(no_daemon.exit_code, 1);
  EXPECT_TRUE(StrContains(no_daemon.err, "no vrambrokerd")) << no_daemon.err;
  const RunResult by_environment = RunProgram({VramctlProgram(), "sessions"}, {{"VRAMBROKER_SOCKET_DIR", dir()}});
  EXPECT_EQ(by_environment.exit_code, 0) << by_environment.err;
}

TEST_F(VramctlTest, HoldVerifiesAndGivesBackWhenInterrupted) {
  for (const int signal : {SIGINT, SIGTERM}) {
    ASSERT_OK_AND_ASSIGN(const std::unique_ptr<ChildProcess> hold,
                         ChildProcess::Start({VramctlProgram(), "hold", "5MiB", "--name=holder", "--limit=0.5",
                                              "--format=json", "--socket_dir=" + dir()}));
    ASSERT_OK_AND_ASSIGN(const std::string line, hold->ReadLine());
    const Json json = Json::parse(line, nullptr, false);
    ASSERT_FALSE(json.is_discarded()) << line;
    EXPECT_EQ(json["name"], "holder");
    EXPECT_EQ(json["pid"], hold->pid());
    EXPECT_EQ(json["bytes"], 5_MiB);
    EXPECT_EQ(json["limit_bytes"], 128_MiB);
    EXPECT_TRUE(
        WaitFor([&] { return CtlJson({"sessions"})["sessions"][0]["devices"][0]["allocated_bytes"] == 5_MiB; }));
    hold->Signal(signal);
    ASSERT_OK_AND_ASSIGN(const int exit_code, hold->Wait());
    EXPECT_EQ(exit_code, 0) << hold->ErrorText();
    EXPECT_EQ(CtlJson({"sessions"})["sessions"], Json::array());
  }
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<ChildProcess> hold,
                       ChildProcess::Start({VramctlProgram(), "hold", "1000", "--socket_dir=" + dir()}));
  ASSERT_OK_AND_ASSIGN(const std::string line, hold->ReadLine());
  EXPECT_TRUE(StrContains(line, "holding 1000 B as session")) << line;
  // A key cannot interrupt a program in the background.
  EXPECT_EQ(hold->ReadLine().value_or(""), absl::StrCat("until ended (kill ", hold->pid(), ")"));
  hold->Signal(SIGINT);
  EXPECT_TRUE(StrContains(hold->ReadRest(), "gave 1000 B back"));
  EXPECT_EQ(hold->Wait().value_or(-1), 0);
}

TEST_F(VramctlTest, HoldSaysWhyItIsRefused) {
  const RunResult text = Ctl({"hold", "65MiB", "--limit=64MiB"});
  EXPECT_EQ(text.exit_code, 1);
  EXPECT_TRUE(StrContains(text.err, "out of memory (limit)")) << text.err;
  EXPECT_TRUE(StrContains(text.err, "limit 64.00 MiB")) << text.err;
  const RunResult json = Ctl({"hold", "65MiB", "--limit=64MiB", "--format=json"});
  EXPECT_EQ(json.exit_code, 1);
  const Json error = Json::parse(json.err, nullptr, false);
  ASSERT_FALSE(error.is_discarded()) << json.err;
  EXPECT_EQ(error["error"]["code"], "RESOURCE_EXHAUSTED");
  EXPECT_EQ(error["error"]["out_of_memory"]["cause"], "LIMIT");
  EXPECT_EQ(error["error"]["out_of_memory"]["requested_bytes"], 65_MiB);
  EXPECT_EQ(error["error"]["out_of_memory"]["limit_bytes"], 64_MiB);
}

TEST_F(VramctlTest, HoldEndsWhenAnOperatorEndsItsSession) {
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<ChildProcess> hold,
                       ChildProcess::Start({VramctlProgram(), "hold", "1000", "--name=h", "--socket-dir=" + dir()}));
  ASSERT_OK(hold->ReadLine());
  ASSERT_EQ(Ctl({"end", "h"}).exit_code, 0);
  EXPECT_EQ(hold->Wait().value_or(-1), 1);
  EXPECT_EQ(hold->ErrorText(), "vramctl: the session has ended: ended by an operator\n") << "said once";
}

TEST_F(VramctlTest, HoldOutlivesTheDaemon) {
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<ChildProcess> hold,
                       ChildProcess::Start({VramctlProgram(), "hold", "5MiB", "--name=h", "--socket-dir=" + dir()}));
  ASSERT_OK(hold->ReadLine());
  daemon_->Kill();
  ASSERT_TRUE(WaitFor([&] { return StrContains(hold->ErrorText(), "trying to reconnect"); })) << hold->ErrorText();
  ASSERT_OK(daemon_->Restart());
  ASSERT_TRUE(WaitFor([&] { return StrContains(hold->ErrorText(), "connected to another daemon"); }))
      << hold->ErrorText();
  EXPECT_TRUE(StrContains(Ctl({"sessions"}).out, " h "));
  hold->Signal(SIGTERM);
  EXPECT_EQ(hold->Wait().value_or(-1), 0) << hold->ErrorText();

  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<ChildProcess> alone,
                       ChildProcess::Start({VramctlProgram(), "hold", "5MiB", "--name=a", "--socket-dir=" + dir()}));
  ASSERT_OK(alone->ReadLine());
  daemon_->Kill();
  ASSERT_TRUE(WaitFor([&] { return StrContains(alone->ErrorText(), "trying to reconnect"); }));
  alone->Signal(SIGTERM);
  EXPECT_EQ(alone->Wait().value_or(-1), 1);
  EXPECT_TRUE(StrContains(alone->ErrorText(), "the pattern is intact")) << alone->ErrorText();
}

}  // namespace
}  // namespace vrambroker::testing_support
