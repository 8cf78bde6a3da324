// SPDX-License-Identifier: Apache-2.0
//
// Claims with a real daemon, real processes and their sockets: the members of claims, the limits of all members
// together, and claims that outlive the daemon.
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "tests/support/any_library.h"
#include "tests/support/raw_client.h"
#include "tests/support/shared_counters.h"
#include "tests/support/test_device.h"
#include "tests/support/util.h"
#include "tests/support/vramctl_test.h"

namespace vrambroker::testing_support {
namespace {

using absl::StatusCode;

constexpr uid_t kNobody = 65534;

class ClaimsTest : public VramctlDaemonTest {
 protected:
  void Begin(DaemonOptions options = {}) {
    options.capacity = "256MiB";
    ASSERT_OK(StartDaemon(options));
  }

  std::string DirOf(const std::string& claim) const { return dir() + "/claims/" + claim; }
  void Create(const std::string& name, const Arguments& terms) {
    Arguments arguments = {"claim", "create", name};
    arguments.insert(arguments.end(), terms.begin(), terms.end());
    const RunResult result = Ctl(arguments);
    ASSERT_EQ(result.exit_code, 0) << result.err;
  }
  Json Show(const std::string& name) { return CtlJson({"claim", "show", name})["claim"]; }
  uint64_t Reserved(const std::string& name) { return Show(name)["devices"][0]["reserved_bytes"]; }
  bool IsThere(const std::string& name) { return Ctl({"claim", "show", name}).exit_code == 0; }

  absl::StatusOr<ClientProcess> ConnectIn(const std::string& claim, const std::string& name) {
    return ClientProcess::Connect(DirOf(claim), name);
  }
  // Starts a process of user `uid` in the claim. The process does not connect yet. REQUIRES: root.
  absl::StatusOr<ClientProcess> StartAs(uid_t uid, const std::string& claim) {
    absl::StatusOr<ClientProcess> process = ClientProcess::Start(DirOf(claim));
    if (!process.ok()) return process;
    if (const auto done = process->Call(absl::StrCat("setuid ", uid)); !done.ok()) return done.status();
    return process;
  }
};

TEST_F(ClaimsTest, ProcessesOfAClaimShareOneLimit) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_NO_FATAL_FAILURE(Create("team", {"--limit=64MiB"}));
  ASSERT_OK_AND_ASSIGN(ClientProcess first, ConnectIn("team", "first"));
  ASSERT_OK_AND_ASSIGN(ClientProcess second, ConnectIn("team", "second"));
  ASSERT_OK(first.Call(absl::StrCat("alloc ", 40_MiB)));
  EXPECT_STATUS(second.Call(absl::StrCat("alloc ", 40_MiB)), StatusCode::kResourceExhausted,
                "the sessions of claim team already have 40.00 MiB of its limit");
  ASSERT_OK(second.Call(absl::StrCat("alloc ", 24_MiB)));
  EXPECT_EQ(Reserved("team"), 64_MiB);
  // Processes outside of the claim may have the rest.
  ASSERT_OK_AND_ASSIGN(ClientProcess outside, ConnectProcess("outside"));
  ASSERT_OK(outside.Call(absl::StrCat("alloc ", 192_MiB)));
  const Json shown = Show("team");
  EXPECT_EQ(shown["sessions"], 2);
  const Json sessions = CtlJson({"claim", "show", "team"})["sessions"];
  EXPECT_EQ(sessions.size(), 2u);
  EXPECT_EQ(shown["refusals"], 1);
  EXPECT_EQ(sessions[0]["claim"], "team");
  EXPECT_EQ(sessions[0]["devices"][0]["limit_bytes"], 64_MiB);
  const Json oom = CtlJson({"ooms"})["events"][0]["out_of_memory"];
  EXPECT_EQ(oom["claim"], "team") << oom;
  EXPECT_EQ(oom["claim_limit_bytes"], 64_MiB);
}

// A container has such a namespace: the daemon knows the claim by its socket, and the kernel knows the process.
TEST_F(ClaimsTest, ItDoesNotMatterWhichPidNamespaceAProcessIsIn) {
  HOST_DEVICE_ONLY();  // CUDA IPC needs the daemon's pid namespace
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to make a pid namespace";
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_NO_FATAL_FAILURE(Create("team", {"--limit=64MiB"}));
  ASSERT_OK_AND_ASSIGN(std::unique_ptr<ChildProcess> inside,
                       ChildProcess::Start({"/usr/bin/unshare", "--pid", "--fork", "--kill-child", VramctlProgram(),
                                            "hold", "40MiB", "--socket-dir=" + DirOf("team")}));
  EXPECT_TRUE(WaitFor([&] { return Reserved("team") == 40_MiB; }));
  ASSERT_OK_AND_ASSIGN(ClientProcess sibling, ConnectIn("team", "sibling"));
  EXPECT_STATUS(sibling.Call(absl::StrCat("alloc ", 40_MiB)), StatusCode::kResourceExhausted, "claim team");
  kill(inside->pid(), SIGKILL);
  EXPECT_TRUE(WaitFor([&] { return Reserved("team") == 0; })) << Show("team");
  EXPECT_OK(sibling.Call(absl::StrCat("alloc ", 64_MiB)));
}

TEST_F(ClaimsTest, ThatCudaNeedsTheDaemonsPidNamespaceIsSaid) {
  if (!OnCuda()) GTEST_SKIP() << "host memory is shared by descriptors";
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to make a pid namespace";
  ASSERT_NO_FATAL_FAILURE(Begin());
  const RunResult inside = RunProgram({"/usr/bin/unshare", "--pid", "--fork", "--kill-child", VramctlProgram(), "hold",
                                       "1MiB", "--socket-dir=" + dir()});
  EXPECT_EQ(inside.exit_code, 1);
  EXPECT_TRUE(absl::StrContains(inside.err, "start the container with --pid=host")) << inside.err;
}

TEST_F(ClaimsTest, ContainersAreGivenItsDirectoryIfThatIsHere) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_NO_FATAL_FAILURE(Create("team", {}));
  ASSERT_NO_FATAL_FAILURE(Create("other", {}));
  const std::string file = dir() + "/cdi.json";
  const std::string team_dir = dir() + "/claims/team";
  const RunResult printed = Ctl({"claim", "cdi", "team", "-o", "-"});
  EXPECT_EQ(printed.exit_code, 0) << printed.err;
  EXPECT_TRUE(absl::StrContains(printed.out, absl::StrCat("\"hostPath\": \"", team_dir, "\""))) << printed.out;
  EXPECT_FALSE(absl::StrContains(printed.out, "LD_PRELOAD"));
  const RunResult preloaded =
      RunProgram({VramctlProgram(), "claim", "cdi", "team", "--preload", "-o", "-", "--socket-dir=" + dir()},
                 {{"VRAMBROKER_PRELOAD", AnyLibrary()}});
  EXPECT_TRUE(absl::StrContains(preloaded.out, absl::StrCat("\"hostPath\": \"", AnyLibrary(), "\""))) << preloaded.err;
  EXPECT_EQ(Ctl({"claim", "cdi", "team", "-o", file}).exit_code, 0);
  EXPECT_EQ(Ctl({"claim", "cdi", "team", "-o", file}).exit_code, 0) << "its own is replaced";
  const RunResult others = Ctl({"claim", "cdi", "other", "-o", file});
  EXPECT_EQ(others.exit_code, 1);
  EXPECT_TRUE(absl::StrContains(others.err, absl::StrCat("gives containers ", team_dir))) << others.err;
  std::filesystem::rename(team_dir, dir() + "/elsewhere");
  const RunResult nowhere = Ctl({"claim", "cdi", "team", "-o", "-"});
  EXPECT_EQ(nowhere.exit_code, 1);
  EXPECT_TRUE(absl::StrContains(nowhere.err, absl::StrCat("there is no ", team_dir, " here"))) << nowhere.err;
  std::filesystem::rename(dir() + "/elsewhere", team_dir);
}

TEST_F(ClaimsTest, OnlyItsOwnerCanConnect) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_NO_FATAL_FAILURE(Create("team", {"--owner=65534", "--limit=64MiB"}));
  ASSERT_NO_FATAL_FAILURE(Create("open", {"--owner=any", "--limit=64MiB"}));
  struct stat found = {};
  ASSERT_EQ(stat(DirOf("team").c_str(), &found), 0);
  EXPECT_EQ(found.st_uid, kNobody);
  EXPECT_EQ(found.st_mode & 0777, 0700u);
  ASSERT_OK_AND_ASSIGN(ClientProcess owner, StartAs(kNobody, "team"));
  ASSERT_OK(owner.Call("connect owner -"));
  EXPECT_OK(owner.Call("fill 3 100000 1"));
  ASSERT_OK_AND_ASSIGN(ClientProcess other, StartAs(kNobody - 1, "team"));
  EXPECT_STATUS(other.Call("connect other -"), StatusCode::kPermissionDenied, "the claim 'team' is for user ");
  // The daemon checks the user, too, however a process reaches the socket.
  ASSERT_EQ(chmod(DirOf("team").c_str(), 0755), 0);
  EXPECT_STATUS(other.Call("connect other -"), StatusCode::kPermissionDenied, "uid 65533 may not use the claim 'team'");
  EXPECT_STATUS(other.Call("list"), StatusCode::kPermissionDenied, "uid 65533 may not use the claim 'team'");
  ASSERT_OK_AND_ASSIGN(ClientProcess anybody, StartAs(kNobody - 1, "open"));
  EXPECT_OK(anybody.Call("connect anybody -"));
}

// A container's root connects as root, but gets no right of root.
TEST_F(ClaimsTest, NobodyInAClaimSeesOrChangesWhatIsOutsideOfIt) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_NO_FATAL_FAILURE(Create("team", {"--limit=64MiB"}));
  ASSERT_NO_FATAL_FAILURE(Create("other", {"--limit=64MiB"}));
  ASSERT_OK_AND_ASSIGN(ClientProcess outside, ConnectProcess("outside"));
  ASSERT_OK(outside.Call(absl::StrCat("alloc ", 20_MiB)));
  EXPECT_FALSE(outside.Call(absl::StrCat("alloc ", 2000_MiB)).ok()) << "a refusal that is not theirs to see";
  ASSERT_OK_AND_ASSIGN(ClientProcess inside, ConnectIn("team", "inside"));
  for (const char* command : {"set_limit outside 0", "set_limit inside 2097152", "trim outside", "end outside",
                              "reload", "release", "get outside"}) {
    EXPECT_STATUS(inside.Call(command), StatusCode::kPermissionDenied, "through the sockets of claim team") << command;
  }
  for (const char* command : {"record outside 10", "snapshot outside", "refusal 1"}) {
    EXPECT_STATUS(inside.Call(command), StatusCode::kPermissionDenied, "to another user") << command;
  }
  EXPECT_OK(inside.Call("snapshot inside"));
  EXPECT_OK(inside.Call("get inside"));
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(DirOf("team")));
  ASSERT_OK_AND_ASSIGN(const v1::ListSessionsResponse sessions, raw.ListSessions());
  ASSERT_EQ(sessions.sessions_size(), 1);
  EXPECT_EQ(sessions.sessions(0).name(), "inside");
  v1::ListOutOfMemoryResponse ooms;
  ASSERT_OK(RawClient::Call(raw.admin(), &v1::Admin::Stub::ListOutOfMemory, v1::ListOutOfMemoryRequest(), &ooms));
  EXPECT_EQ(ooms.events_size(), 0);
  v1::ListClaimsResponse claims;
  ASSERT_OK(RawClient::Call(raw.admin(), &v1::Admin::Stub::ListClaims, v1::ListClaimsRequest(), &claims));
  ASSERT_EQ(claims.claims_size(), 1);
  EXPECT_EQ(claims.claims(0).name(), "team");
  v1::CreateClaimRequest create;
  create.set_name("mine");
  v1::CreateClaimResponse created;
  EXPECT_STATUS(RawClient::Call(raw.admin(), &v1::Admin::Stub::CreateClaim, create, &created),
                StatusCode::kPermissionDenied, "may not create claims through the sockets of claim team");
  v1::UpdateClaimRequest update;
  update.set_name("team");
  update.mutable_limit()->set_fraction(1.0);
  v1::UpdateClaimResponse updated;
  EXPECT_STATUS(RawClient::Call(raw.admin(), &v1::Admin::Stub::UpdateClaim, update, &updated),
                StatusCode::kPermissionDenied, "may not change claims");
  v1::DeleteClaimRequest remove;
  remove.set_name("other");
  v1::DeleteClaimResponse removed;
  EXPECT_STATUS(RawClient::Call(raw.admin(), &v1::Admin::Stub::DeleteClaim, remove, &removed),
                StatusCode::kPermissionDenied, "may not remove claims");
}

// A claim lets a user in where the rules let nobody in.
TEST_F(ClaimsTest, AClaimLetsInWhomThePolicyDoesNot) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  ASSERT_NO_FATAL_FAILURE(Begin({.config = "socket_mode: '0666' rules { name: 'others' rights: NONE }"}));
  ASSERT_NO_FATAL_FAILURE(Create("team", {"--owner=65534", "--limit=64MiB"}));
  ASSERT_OK_AND_ASSIGN(ClientProcess outside, ClientProcess::Start(dir()));
  ASSERT_OK(outside.Call("setuid 65534"));
  EXPECT_STATUS(outside.Call("connect a -"), StatusCode::kPermissionDenied, "rule others");
  ASSERT_OK_AND_ASSIGN(ClientProcess inside, StartAs(kNobody, "team"));
  EXPECT_OK(inside.Call("connect a -"));
}

TEST_F(ClaimsTest, ARulePutsSessionsIntoAClaim) {
  ASSERT_NO_FATAL_FAILURE(
      Begin({.config = "rules { name: 'batch' session_name: 'batch*' claim: 'batch' claim_limit { bytes: '64MiB' } }"
                       "rules { name: 'each' claim_per: USER claim_limit { fraction: 0.25 } }"}));
  ASSERT_OK_AND_ASSIGN(ClientProcess first, ConnectProcess("batch-1"));
  ASSERT_OK_AND_ASSIGN(ClientProcess second, ConnectProcess("batch-2"));
  ASSERT_OK(first.Call(absl::StrCat("alloc ", 40_MiB)));
  EXPECT_STATUS(second.Call(absl::StrCat("alloc ", 40_MiB)), StatusCode::kResourceExhausted, "claim batch");
  EXPECT_EQ(Show("batch")["rule"], "batch");
  EXPECT_EQ(Show("batch")["socket_dir"], "");
  // The user may have a quarter of the device, with all of the user's sessions together.
  ASSERT_OK_AND_ASSIGN(ClientProcess mine, ConnectProcess("a"));
  ASSERT_OK_AND_ASSIGN(ClientProcess mine_too, ConnectProcess("b"));
  ASSERT_OK(mine.Call(absl::StrCat("alloc ", 60_MiB)));
  EXPECT_STATUS(mine_too.Call(absl::StrCat("alloc ", 6_MiB)), StatusCode::kResourceExhausted,
                absl::StrCat("claim uid:", geteuid()));
  EXPECT_EQ(CtlJson({"policy", "explain"})["claim"], absl::StrCat("uid:", geteuid()));
  // The policy alone changes a claim that the policy makes.
  const RunResult change = Ctl({"claim", "set", "batch", "--limit=128MiB"});
  EXPECT_EQ(change.exit_code, 1);
  EXPECT_TRUE(absl::StrContains(change.err, "is made by the policy's rule batch")) << change.err;
  EXPECT_EQ(Ctl({"claim", "rm", "batch"}).exit_code, 1);
  // The rule's claim ends with its last session. A claim that an operator creates has the operator's limit.
  ASSERT_OK(first.Call("goodbye"));
  ASSERT_OK(second.Call("goodbye"));
  EXPECT_TRUE(WaitFor([&] { return !IsThere("batch"); }));
  ASSERT_NO_FATAL_FAILURE(Create("batch", {"--limit=32MiB"}));
  ASSERT_OK_AND_ASSIGN(ClientProcess third, ConnectProcess("batch-3"));
  EXPECT_FALSE(third.Call(absl::StrCat("alloc ", 40_MiB)).ok());
  EXPECT_EQ(Show("batch")["sessions"], 1);
}

TEST_F(ClaimsTest, AKilledDaemonComesBackWithTheSameClaimsOnTheSamePaths) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_NO_FATAL_FAILURE(Create("team", {"--limit=64MiB", "--guarantee=16MiB", "--label=job=7"}));
  ASSERT_NO_FATAL_FAILURE(Create("gone", {}));
  ASSERT_EQ(Ctl({"claim", "rm", "gone"}).exit_code, 0);
  struct stat before = {};
  ASSERT_EQ(stat(DirOf("team").c_str(), &before), 0);
  ASSERT_OK_AND_ASSIGN(ClientProcess holder, ConnectIn("team", "holder"));
  ASSERT_OK(holder.Call(absl::StrCat("alloc ", 40_MiB)));
  ASSERT_OK(holder.Call("write 0 7"));
  std::filesystem::create_directories(DirOf("left"));  // the directory of a claim that was not saved

  daemon_->Kill();
  ASSERT_OK(daemon_->Restart());
  // The claims are there at once: the daemon answers nobody before it has the claims.
  const Json team = Show("team");
  EXPECT_EQ(team["devices"][0]["limit_bytes"], 64_MiB);
  EXPECT_EQ(team["devices"][0]["guarantee_bytes"], 16_MiB);
  EXPECT_EQ(team["labels"]["job"], "7");
  EXPECT_FALSE(IsThere("gone"));
  EXPECT_FALSE(std::filesystem::exists(DirOf("left")));
  struct stat after = {};
  ASSERT_EQ(stat(DirOf("team").c_str(), &after), 0);
  EXPECT_EQ(after.st_ino, before.st_ino) << "containers have mounted it";

  EXPECT_TRUE(WaitFor([&] { return Reserved("team") == 40_MiB; })) << "its client has come back: " << Show("team");
  EXPECT_OK(holder.Call("verify 0 7"));
  ASSERT_OK_AND_ASSIGN(ClientProcess sibling, ConnectIn("team", "sibling"));
  EXPECT_STATUS(sibling.Call(absl::StrCat("alloc ", 40_MiB)), StatusCode::kResourceExhausted, "claim team");
  EXPECT_OK(sibling.Call(absl::StrCat("alloc ", 24_MiB)));
}

// Memory of a client that has not come back yet is not free for other clients.
TEST_F(ClaimsTest, AfterAKillNobodyGetsWhatAnEarlierClientHoldsHoweverLateItComesBack) {
  HOST_DEVICE_ONLY();  // a GPU's driver does not tell who holds its memory
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_NO_FATAL_FAILURE(Create("team", {"--limit=64MiB"}));
  ASSERT_OK_AND_ASSIGN(ClientProcess holder, ConnectIn("team", "holder"));
  ASSERT_OK(holder.Call(absl::StrCat("alloc ", 40_MiB)));
  holder.process().Signal(SIGSTOP);
  daemon_->Kill();
  ASSERT_OK(daemon_->Restart());
  EXPECT_EQ(Reserved("team"), 40_MiB) << "at once";
  ASSERT_OK_AND_ASSIGN(ClientProcess sibling, ConnectIn("team", "sibling"));
  EXPECT_STATUS(sibling.Call(absl::StrCat("alloc ", 40_MiB)), StatusCode::kResourceExhausted, "claim team");
  ASSERT_OK(sibling.Call(absl::StrCat("alloc ", 24_MiB)));
  holder.process().Signal(SIGCONT);
  EXPECT_TRUE(WaitFor([&] { return Show("team")["sessions"] == 2; }));
  EXPECT_EQ(Reserved("team"), 64_MiB);
}

// The claim of a rule keeps the memory, too, although the claim exists only when one of its clients has come back.
TEST_F(ClaimsTest, AfterAKillNobodyGetsWhatAnEarlierClientOfARulesClaimHolds) {
  HOST_DEVICE_ONLY();
  ASSERT_NO_FATAL_FAILURE(Begin({.config = "rules { claim_per: USER claim_limit { bytes: '64MiB' } "
                                           "claim_guarantee { bytes: '48MiB' } }"}));
  ASSERT_OK_AND_ASSIGN(ClientProcess holder, ConnectProcess("holder"));
  ASSERT_OK(holder.Call(absl::StrCat("alloc ", 40_MiB)));
  holder.process().Signal(SIGSTOP);
  daemon_->Kill();
  ASSERT_OK(daemon_->Restart());
  ASSERT_OK_AND_ASSIGN(ClientProcess sibling, ConnectProcess("sibling"));
  const std::string claim = absl::StrCat("uid:", geteuid());
  EXPECT_EQ(Reserved(claim), 40_MiB) << "at once";
  EXPECT_EQ(Show(claim)["devices"][0]["guarantee_bytes"], 48_MiB);
  EXPECT_STATUS(sibling.Call(absl::StrCat("alloc ", 40_MiB)), StatusCode::kResourceExhausted, "claim " + claim);
  ASSERT_OK(sibling.Call(absl::StrCat("alloc ", 24_MiB)));
  // The claim stays while a process holds memory of the claim.
  ASSERT_OK(sibling.Call("goodbye"));
  EXPECT_TRUE(WaitFor([&] { return Reserved(claim) == 40_MiB; }));
  holder.process().Signal(SIGCONT);
  EXPECT_TRUE(WaitFor([&] { return Show(claim)["sessions"] == 1; }));
  EXPECT_EQ(Reserved(claim), 40_MiB);
}

// Memory that only the child of an ended member holds is in quarantine, and stays charged to the claim.
TEST_F(ClaimsTest, AfterAKillWhatAnEndedMembersChildHoldsStaysTheClaims) {
  HOST_DEVICE_ONLY();
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_NO_FATAL_FAILURE(Create("team", {"--limit=64MiB"}));
  ASSERT_OK_AND_ASSIGN(ClientProcess member, ConnectIn("team", "member"));
  ASSERT_OK(member.Call(absl::StrCat("alloc ", 40_MiB)));
  ASSERT_OK_AND_ASSIGN(const std::vector<std::string> child, member.Call("fork"));
  member.process().Signal(SIGKILL);
  EXPECT_TRUE(WaitFor([&] {
    std::ifstream members(dir() + "/vrambroker.members");
    const std::string text{std::istreambuf_iterator<char>(members), {}};
    return absl::StrContains("\n" + text, absl::StrCat("\n", child[0], " "));
  })) << "the next daemon can know";
  daemon_->Kill();
  ASSERT_OK(daemon_->Restart());
  EXPECT_EQ(Reserved("team"), 40_MiB);
}

// A former member of a policy's claim is not a member of an operator's later claim of the same name.
TEST_F(ClaimsTest, AfterAKillNobodyIsChargedToALaterClaimOfTheSameName) {
  HOST_DEVICE_ONLY();
  ASSERT_NO_FATAL_FAILURE(Begin({.config = "rules { session_name: 'batch*' claim: 'batch' }"}));
  ASSERT_OK_AND_ASSIGN(ClientProcess holder, ClientProcess::Start(dir()));
  ASSERT_OK(holder.Call("connect batch-1 -"));
  ASSERT_OK(holder.Call("goodbye"));
  EXPECT_TRUE(WaitFor([&] { return !IsThere("batch"); }));
  ASSERT_OK(holder.Call("connect other -"));
  ASSERT_OK(holder.Call(absl::StrCat("alloc ", 40_MiB)));
  ASSERT_NO_FATAL_FAILURE(Create("batch", {}));
  holder.process().Signal(SIGSTOP);
  daemon_->Kill();
  ASSERT_OK(daemon_->Restart());
  EXPECT_EQ(Reserved("batch"), 0u);
  holder.process().Signal(SIGCONT);
}

// A restart does not shut out a client of a draining claim.
TEST_F(ClaimsTest, SessionsOfADrainingClaimComeBackToTheNextDaemon) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_NO_FATAL_FAILURE(Create("team", {"--limit=64MiB"}));
  ASSERT_OK_AND_ASSIGN(ClientProcess holder, ConnectIn("team", "holder"));
  ASSERT_OK(holder.Call(absl::StrCat("alloc ", 40_MiB)));
  const RunResult removed = Ctl({"claim", "rm", "team"});
  EXPECT_TRUE(absl::StrContains(removed.out, "takes no more sessions")) << removed.out << removed.err;
  daemon_->Kill();
  ASSERT_OK(daemon_->Restart());
  EXPECT_TRUE(WaitFor([&] { return Reserved("team") == 40_MiB; }));
  EXPECT_STATUS(ConnectIn("team", "late"), StatusCode::kFailedPrecondition, "takes no more sessions");
  ASSERT_OK(holder.Call("goodbye"));
  EXPECT_TRUE(WaitFor([&] { return !IsThere("team"); }));
  EXPECT_TRUE(WaitFor([&] { return !std::filesystem::exists(DirOf("team")); })) << "its sockets go a moment later";
}

TEST_F(ClaimsTest, AFileThatCannotBeReadKeepsTheDaemonFromStarting) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_NO_FATAL_FAILURE(Create("team", {}));
  daemon_->Kill();
  std::ofstream(dir() + "/vrambroker.claims") << "claims {";
  EXPECT_STATUS(daemon_->Restart(), StatusCode::kUnavailable, "mend the file, or remove it to start without claims");
  std::filesystem::remove(dir() + "/vrambroker.claims");
  ASSERT_OK(daemon_->Restart());
}

TEST_F(ClaimsTest, AFileThatIsTooLargeIsPutAside) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_NO_FATAL_FAILURE(Create("team", {}));
  daemon_->Kill();
  std::filesystem::resize_file(dir() + "/vrambroker.claims", uint64_t{1} << 30);
  ASSERT_OK(daemon_->Restart());
  EXPECT_TRUE(absl::StrContains(daemon_->log(), "the file of claims is put aside")) << daemon_->log();
  EXPECT_TRUE(std::filesystem::exists(dir() + "/vrambroker.claims.too-large"));
  EXPECT_FALSE(IsThere("team"));
}

// The request is as large as a request may be.
TEST_F(ClaimsTest, ADeviceThatIsNamedOftenIsKeptOnce) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  v1::CreateClaimRequest request;
  request.set_name("team");
  for (int i = 0; i < 65000; ++i) request.mutable_terms()->add_devices(0);
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  v1::CreateClaimResponse response;
  ASSERT_OK(RawClient::Call(raw.admin(), &v1::Admin::Stub::CreateClaim, request, &response));
  EXPECT_EQ(response.claim().terms().devices_size(), 1);
  EXPECT_LT(std::filesystem::file_size(dir() + "/vrambroker.claims"), 1000u);
}

// The directory in the way prevents a new file: the daemon can write only to files that exist already.
TEST_F(ClaimsTest, ARevocationHoldsAfterARestartWhenItsFileCannotBeReplaced) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_NO_FATAL_FAILURE(Create("team", {}));
  ASSERT_OK_AND_ASSIGN(ClientProcess holder, ConnectIn("team", "holder"));
  ASSERT_OK(holder.Call(absl::StrCat("alloc ", 40_MiB)));
  std::filesystem::create_directories(dir() + "/vrambroker.claims.new/in_the_way");
  EXPECT_EQ(Ctl({"claim", "create", "other"}).exit_code, 1);
  EXPECT_EQ(Ctl({"claim", "rm", "team", "--revoke"}).exit_code, 0);
  daemon_->Kill();
  ASSERT_OK(daemon_->Restart());
  EXPECT_FALSE(ConnectIn("team", "again").ok());
}

TEST_F(ClaimsTest, WhatAnOwnerPutsIntoItsDirectoryKeepsNobodyElseWaiting) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_NO_FATAL_FAILURE(Create("bad", {}));
  ASSERT_NO_FATAL_FAILURE(Create("good", {}));
  daemon_->Kill();
  std::filesystem::remove(DirOf("bad") + "/vrambroker.sock");
  std::filesystem::create_directories(DirOf("bad") + "/vrambroker.sock/full");
  ASSERT_OK(daemon_->Restart());
  EXPECT_TRUE(absl::StrContains(daemon_->log(), "vrambroker.sock was in the way of the claim's socket"))
      << daemon_->log();
  EXPECT_OK(ConnectIn("good", "a"));
  EXPECT_OK(ConnectIn("bad", "a"));
  EXPECT_EQ(Ctl({"claim", "rm", "bad", "--wait"}).exit_code, 0);
  EXPECT_FALSE(IsThere("bad"));
}

TEST_F(ClaimsTest, RevokingGivesTheMemoryBack) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_NO_FATAL_FAILURE(Create("team", {"--limit=64MiB"}));
  ASSERT_OK_AND_ASSIGN(ClientProcess lives, ConnectIn("team", "lives"));
  ASSERT_OK(lives.Call(absl::StrCat("alloc ", 40_MiB)));
  ASSERT_OK_AND_ASSIGN(ClientProcess dies, ConnectIn("team", "dies"));
  ASSERT_OK(dies.Call(absl::StrCat("alloc ", 20_MiB)));
  dies.process().Signal(SIGSTOP);  // the stopped process closes nothing
  const RunResult late = Ctl({"claim", "rm", "team", "--revoke", "--wait", "--timeout=3"});
  EXPECT_EQ(late.exit_code, 1);
  EXPECT_TRUE(absl::StrContains(late.err, "is still there")) << late.err;
  EXPECT_STATUS(lives.Call(absl::StrCat("alloc ", 1_MiB)), StatusCode::kAborted, "");
  dies.process().Signal(SIGKILL);
  EXPECT_TRUE(WaitFor([&] { return Reserved("team") == 40_MiB; })) << "what its program still uses";
  ASSERT_OK(lives.Call("goodbye"));
  EXPECT_TRUE(WaitFor([&] { return !IsThere("team"); }));
}

TEST_F(ClaimsTest, WrongUseIsSaid) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  const auto error = [&](Arguments arguments, int exit_code) {
    const RunResult result = Ctl(std::move(arguments));
    EXPECT_EQ(result.exit_code, exit_code) << result.out << result.err;
    return result.err;
  };
  const auto has = [](const std::string& text, const std::string& part) {
    EXPECT_TRUE(absl::StrContains(text, part)) << text;
  };
  has(error({"claim", "create", "a b"}, 1), "name: only letters, digits and . _ - : @ are allowed");
  has(error({"claim", "create", std::string(64, 'x')}, 1), "at most 63 are allowed");
  has(error({"claim", "create", "a", "--limit=2"}, 2), "--limit: '2' is ambiguous");
  has(error({"claim", "create", "a", "--limit=64MiB", "--guarantee=65MiB"}, 1), "above the claim's limit");
  has(error({"claim", "create", "a", "--guarantee=1TiB"}, 1), "is above the capacity of device 0");
  has(error({"claim", "create", "a", "--guarantee=256MiB"}, 0), "");
  has(error({"claim", "create", "a"}, 1), "there is a claim 'a' already; vramctl claim set changes it");
  has(error({"claim", "create", "b", "--guarantee=1MiB"}, 1), "more than can be guaranteed");
  has(error({"claim", "create", "b", "--owner=nobody-of-that-name"}, 2),
      "--owner: no user 'nobody-of-that-name' is known");
  has(error({"claim", "create", "b", "--label=x"}, 2), "--label: 'x' is not KEY=VALUE");
  has(error({"claim", "create", "b", "--max-wait=2h"}, 2), "--max-wait: '2h' is longer than an hour");
  has(error({"claim", "create", "b", "--device=7"}, 1), "there is no device 7; the daemon has ");
  has(error({"claim", "set", "a"}, 2), "nothing is to be changed");
  has(error({"claim", "set", "c", "--limit=0.5"}, 1), "no claim is named 'c' (vramctl claim ls)");
  has(error({"claim", "show", "c"}, 1), "no claim is named 'c'");
  has(error({"claim", "rm", "c"}, 1), "no claim is named 'c'");
  EXPECT_STATUS(ConnectIn("c", "a"), StatusCode::kUnavailable, "is there a claim 'c' (vramctl claim ls)");
}

TEST_F(ClaimsTest, MetricsHaveTheClaim) {
  ASSERT_NO_FATAL_FAILURE(Begin({.http = true}));
  ASSERT_NO_FATAL_FAILURE(Create("team", {"--limit=64MiB", "--guarantee=8MiB", "--label=pod=a-1"}));
  ASSERT_OK_AND_ASSIGN(ClientProcess client, ConnectIn("team", "first"));
  ASSERT_OK(client.Call(absl::StrCat("alloc ", 40_MiB)));
  EXPECT_FALSE(client.Call(absl::StrCat("alloc ", 40_MiB)).ok());
  const Labels team = {{"claim", "team"}, {"gpu", "0"}};
  EXPECT_TRUE(WaitFor([&] { return daemon_->Metrics().Value("vrambroker_claim_allocated_bytes", team) == 40_MiB; }));
  const MetricsPage page = daemon_->Metrics();
  EXPECT_EQ(page.Value("vrambroker_claims"), 1);
  EXPECT_EQ(page.Value("vrambroker_claim_limit_bytes", team), 64_MiB);
  EXPECT_EQ(page.Value("vrambroker_claim_guarantee_bytes", team), 8_MiB);
  EXPECT_EQ(page.Value("vrambroker_claim_reserved_bytes", team), 40_MiB);
  EXPECT_EQ(page.Value("vrambroker_claim_peak_bytes", team), 40_MiB);
  EXPECT_EQ(page.Value("vrambroker_claim_ooms_total", {{"claim", "team"}, {"reason", "limit"}}), 1);
  EXPECT_EQ(page.Value("vrambroker_claim_sessions", {{"claim", "team"}}), 1);
  EXPECT_EQ(page.Value("vrambroker_claim_info", {{"claim", "team"}, {"state", "active"}, {"label_pod", "a-1"}}), 1);
}

// Eight processes want one and a half times the claim's limit, and the test kills processes at random. The processes
// check that they never hold more than the limit together. The daemon's books agree, and are empty at the end.
// VRAMBROKER_RACE_ROUNDS=1000 sets 1,000 rounds, for a run by hand.
TEST_F(ClaimsTest, ARaceForItsLimitNeverExceedsItWhoeverIsKilled) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_NO_FATAL_FAILURE(Create("team", {"--limit=64MiB"}));
  constexpr int kProcesses = 8;
  const char* const asked = std::getenv("VRAMBROKER_RACE_ROUNDS");
  const int rounds = asked != nullptr ? std::atoi(asked) : 60;
  const std::string file = MakeTempDir() + "/race";
  RaceCounters* const counters = MapCounters<RaceCounters>(file);
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  const auto look = [&] {
    v1::ListClaimsResponse claims;
    EXPECT_OK(RawClient::Call(raw.admin(), &v1::Admin::Stub::ListClaims, v1::ListClaimsRequest(), &claims));
    return claims.claims(0).devices(0);
  };
  std::vector<std::unique_ptr<ClientProcess>> processes(kProcesses);
  const auto start = [&](int slot) {
    absl::StatusOr<ClientProcess> process = ConnectIn("team", absl::StrCat("racer-", slot));
    ASSERT_OK(process);
    processes[slot] = std::make_unique<ClientProcess>(*std::move(process));
    ASSERT_OK(processes[slot]->Call(absl::StrCat("race ", file, " ", slot, " ", 12_MiB, " ", 64_MiB)));
  };
  for (int slot = 0; slot < kProcesses; ++slot) ASSERT_NO_FATAL_FAILURE(start(slot));
  std::minstd_rand random(17);
  for (int round = 0; round < rounds; ++round) {
    const uint64_t before = counters->rounds;
    ASSERT_TRUE(WaitFor([&] { return counters->rounds > before + random() % 20; }));
    const int slot = static_cast<int>(random() % kProcesses);
    ASSERT_TRUE(processes[slot]->process().Running()) << "a racer has seen more than the limit";
    processes[slot]->process().Signal(SIGSTOP);
    counters->held[slot] = 0;  // the counter must not exceed the memory that the process holds
    processes[slot]->process().Signal(SIGKILL);
    EXPECT_LE(look().reserved_bytes(), 64_MiB);
    ASSERT_NO_FATAL_FAILURE(start(slot));
  }
  for (const auto& process : processes) EXPECT_TRUE(process->process().Running());
  for (const auto& process : processes) process->process().Signal(SIGKILL);
  EXPECT_TRUE(WaitFor([&] { return look().reserved_bytes() == 0; })) << look().DebugString();
  EXPECT_TRUE(WaitFor([&] { return Show("team")["sessions"] == 0; }));
  const auto all_is_cache = [&] {
    const absl::StatusOr<v1::Device> device = raw.GetDevice();
    return device.ok() && device->reserved_bytes() == device->idle_bytes();
  };
  EXPECT_TRUE(WaitFor(all_is_cache)) << raw.GetDevice()->DebugString();
  std::cout << counters->rounds << " allocations, " << rounds << " kills\n";
}

}  // namespace
}  // namespace vrambroker::testing_support
