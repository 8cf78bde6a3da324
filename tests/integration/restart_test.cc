// SPDX-License-Identifier: Apache-2.0
//
// Stops, kills and restarts of the daemon: clients survive, and are told.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "allocator/base/bytes.h"
#include "tests/support/buffers.h"
#include "tests/support/daemon_test.h"
#include "tests/support/raw_client.h"
#include "tests/support/test_device.h"
#include "tests/support/util.h"

namespace vrambroker::testing_support {
namespace {

class RestartTest : public DaemonTest {
 protected:
  void SetUp() override { ASSERT_OK(StartDaemon()); }

  // Checks a client that holds memory when the daemon goes away. `end` makes the daemon go, and returns when the daemon
  // has gone. The clients allocate remotely; leased_test.cc tests leased clients.
  void CheckOutage(const std::function<void()>& end) {
    placement_ = Placement::kRemote;
    ASSERT_OK_AND_ASSIGN(Client client, Connect("survivor"));
    ASSERT_OK_AND_ASSIGN(Buffer buffer, client.Allocate(8_MiB));
    Fill(buffer, 11);
    ASSERT_OK_AND_ASSIGN(ClientProcess process, ClientProcess::Start(dir()));
    ASSERT_OK(process.Call("connect other - remote"));
    ASSERT_OK(process.Call("fill 5 100000 3"));

    end();
    const absl::Time ended = absl::Now();
    EXPECT_TRUE(WaitFor([&] { return absl::IsUnavailable(client.status()); })) << client.status();
    std::cout << "status() became UNAVAILABLE " << absl::Now() - ended << " after the daemon had gone\n";
    EXPECT_TRUE(WaitFor([&] { return absl::IsUnavailable(process.Call("status").status()); }));

    EXPECT_TRUE(Holds(buffer, 11));
    Fill(buffer, 12);
    EXPECT_TRUE(Holds(buffer, 12));
    EXPECT_OK(process.Call("check 3"));
    EXPECT_STATUS(client.Allocate(1), absl::StatusCode::kUnavailable, "held memory stays usable");
    EXPECT_STATUS(client.Allocate(1), absl::StatusCode::kUnavailable, "connects again");
    EXPECT_STATUS(client.EmptyCache(), absl::StatusCode::kUnavailable, "the daemon went away");
    EXPECT_STATUS(client.GetMemoryStats(), absl::StatusCode::kUnavailable, "the daemon went away");
    EXPECT_STATUS(process.Call("alloc 1"), absl::StatusCode::kUnavailable, "connects again");
    EXPECT_STATUS(Connect("early"), absl::StatusCode::kUnavailable, "no vrambrokerd");

    ASSERT_OK(daemon_->Restart());
    ASSERT_OK_AND_ASSIGN(Client again, Connect("survivor"));
    EXPECT_EQ(again.name(), "survivor");
    ASSERT_OK_AND_ASSIGN(Buffer fresh, again.Allocate(200_MiB));
    Fill(fresh, 4096, 13);
    // The old session stays lost. The client keeps the session's memory.
    EXPECT_STATUS(client.Allocate(1), absl::StatusCode::kUnavailable, "");
    EXPECT_TRUE(Holds(buffer, 12));
    EXPECT_STATUS(buffer.Reset(), absl::StatusCode::kUnavailable, "");
    EXPECT_OK(process.Call("connect other -"));
    EXPECT_OK(process.Call("alloc 1000"));
  }
};

TEST_F(RestartTest, StopWithLiveClients) {
  CheckOutage([this] {
    const absl::StatusOr<int> exit_code = daemon_->Stop();
    EXPECT_TRUE(exit_code.ok() && *exit_code == 0) << daemon_->log();
    for (const char* name : {"vrambroker.sock", "vrambroker-fd.sock", "vram-count.sock"}) {
      EXPECT_FALSE(std::filesystem::exists(absl::StrCat(dir(), "/", name))) << name;
    }
  });
}

TEST_F(RestartTest, KillWithLiveClients) {
  CheckOutage([this] {
    daemon_->Kill();
    EXPECT_TRUE(std::filesystem::exists(dir() + "/vrambroker.sock"))
        << "a stale socket is what the restart must replace";
  });
}

TEST_F(RestartTest, StopEndsAsSoonAsTheLastSessionDoes) {
  ASSERT_OK(StartDaemon({.config = "drain_timeout: \"10m\""}));
  ASSERT_OK_AND_ASSIGN(ClientProcess last, ConnectProcess("last"));
  ASSERT_OK(last.Call("alloc 1000"));
  daemon_->process().Signal(SIGTERM);
  EXPECT_TRUE(WaitFor([&] { return absl::StrContains(daemon_->log(), "draining sessions=1"); }));
  // Sessions work while the daemon drains; new sessions are refused.
  EXPECT_OK(last.Call("alloc 1000"));
  EXPECT_STATUS(Connect("late"), absl::StatusCode::kUnavailable, "stopping");
  EXPECT_TRUE(daemon_->Running());
  ASSERT_OK(last.Call("goodbye"));
  ASSERT_OK_AND_ASSIGN(const int exit_code, daemon_->process().Wait());
  EXPECT_EQ(exit_code, 0);
}

TEST_F(RestartTest, ASecondSignalStopsAtOnce) {
  ASSERT_OK(StartDaemon({.config = "drain_timeout: \"10m\""}));
  ASSERT_OK_AND_ASSIGN(Client client, Connect("open"));
  daemon_->process().Signal(SIGTERM);
  EXPECT_TRUE(WaitFor([&] { return absl::StrContains(daemon_->log(), "draining"); }));
  daemon_->process().Signal(SIGINT);
  ASSERT_OK_AND_ASSIGN(const int exit_code, daemon_->process().Wait());
  EXPECT_EQ(exit_code, 0);
}

TEST_F(RestartTest, LostIsToldOnce) {
  std::atomic<int> told{0};
  ClientOptions options;
  options.socket_dir = dir();
  options.connect_timeout = kPatience;
  options.on_lost = [&](const absl::Status& why) {
    EXPECT_TRUE(absl::IsUnavailable(why)) << why;
    ++told;
  };
  ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(options));
  daemon_->Kill();
  EXPECT_TRUE(WaitFor([&] { return told == 1; }));
  EXPECT_STATUS(client.Allocate(1), absl::StatusCode::kUnavailable, "");
  EXPECT_EQ(told, 1);
}

TEST_F(RestartTest, ASecondDaemonOnTheDirectoryIsRefused) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("first"));
  ASSERT_OK_AND_ASSIGN(Buffer buffer, client.Allocate(1_MiB));
  const RunResult second = RunProgram(daemon_->CommandLine());
  EXPECT_EQ(second.exit_code, 1);
  EXPECT_TRUE(
      absl::StrContains(second.err, absl::StrCat("another vrambrokerd (pid ", daemon_->pid(), ") serves ", dir())))
      << second.err;
  // The first daemon is unharmed: old and new sessions work.
  EXPECT_OK(client.Allocate(1_MiB));
  EXPECT_OK(Connect("second"));
  EXPECT_TRUE(daemon_->Running());
}

TEST(ConnectTest, NoDaemon) {
  const std::string dir = MakeTempDir();
  EXPECT_STATUS(Client::Connect({.socket_dir = dir}), absl::StatusCode::kUnavailable, "there is no socket");
  EXPECT_STATUS(Client::Connect({.socket_dir = dir + "/missing"}), absl::StatusCode::kUnavailable,
                "there is no socket");
  EXPECT_STATUS(Client::Connect({.socket_dir = std::string(200, 'd')}), absl::StatusCode::kInvalidArgument, "too long");
  // A file where a directory is expected, and a file where a socket is expected.
  std::ofstream(dir + "/file") << "x";
  EXPECT_STATUS(Client::Connect({.socket_dir = dir + "/file"}), absl::StatusCode::kUnavailable, "there is no socket");
  std::ofstream(dir + "/vrambroker.sock") << "x";
  EXPECT_FALSE(Client::Connect({.socket_dir = dir}).ok());
}

TEST(ConnectTest, StaleSocket) {
  const std::string dir = MakeTempDir();
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::strcpy(address.sun_path, (dir + "/vrambroker.sock").c_str());
  {
    const UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  }
  EXPECT_STATUS(Client::Connect({.socket_dir = dir}), absl::StatusCode::kUnavailable, "nobody listens");
}

TEST(ConnectTest, ADaemonThatDoesNotAnswerTimesOut) {
  const std::string dir = MakeTempDir();
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::strcpy(address.sun_path, (dir + "/vrambroker.sock").c_str());
  const UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(listen(fd.get(), 5), 0);
  EXPECT_STATUS(Client::Connect({.socket_dir = dir, .connect_timeout = absl::Milliseconds(300)}),
                absl::StatusCode::kDeadlineExceeded, "did not answer");
}

TEST_F(RestartTest, ASuspendedDaemonTimesCallsOutAndThenWorksOn) {
  ClientOptions options;
  options.socket_dir = dir();
  options.connect_timeout = kPatience;
  options.call_timeout = absl::Milliseconds(200);
  ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(options));
  daemon_->process().Signal(SIGSTOP);
  EXPECT_STATUS(client.Allocate(1000), absl::StatusCode::kDeadlineExceeded, "");
  daemon_->process().Signal(SIGCONT);
  EXPECT_TRUE(WaitFor([&] { return client.Allocate(1000).ok(); })) << client.status();
  // The block of the timed-out call has no owner: the block must not stay allocated.
  EXPECT_TRUE(WaitFor([&] {
    const absl::StatusOr<MemoryStats> stats = client.GetMemoryStats();
    return stats.ok() && stats->allocation.all.current == 0;
  }));
}

TEST(PermissionTest, AnotherUserIsRefusedByTheSocketsMode) {
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<DaemonProcess> daemon,
                       DaemonProcess::Start({.config = "socket_mode: \"0600\""}));
  if (geteuid() != 0) {
    // The test cannot become another user without root: the test takes the permission from its own user instead.
    ASSERT_EQ(chmod((daemon->socket_dir() + "/vrambroker.sock").c_str(), 0), 0);
    EXPECT_STATUS(Client::Connect({.socket_dir = daemon->socket_dir()}), absl::StatusCode::kPermissionDenied,
                  "socket_mode");
    return;
  }
  ASSERT_OK_AND_ASSIGN(ClientProcess stranger, ClientProcess::Start(daemon->socket_dir()));
  ASSERT_OK(stranger.Call("setuid 65534"));
  EXPECT_STATUS(stranger.Call("connect stranger -"), absl::StatusCode::kPermissionDenied, "socket_mode");
  EXPECT_STATUS(stranger.Call("fetch 00112233445566778899aabbccddeeff"), absl::StatusCode::kPermissionDenied, "");
}

TEST(PermissionTest, AnotherUserMayUseTheMemoryButNotOperate) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<DaemonProcess> daemon,
                       DaemonProcess::Start({.config = "socket_mode: \"0666\""}));
  ASSERT_OK_AND_ASSIGN(
      Client roots,
      Client::Connect({.socket_dir = daemon->socket_dir(), .name = "roots", .connect_timeout = kPatience}));
  ASSERT_OK_AND_ASSIGN(Buffer held, roots.Allocate(1_MiB));
  ASSERT_OK_AND_ASSIGN(ClientProcess user, ClientProcess::Start(daemon->socket_dir()));
  ASSERT_OK(user.Call("setuid 65534"));
  ASSERT_OK(user.Call("connect user -"));
  EXPECT_OK(user.Call("fill 3 100000 1"));
  EXPECT_OK(user.Call("list"));
  for (const char* command : {"set_limit roots 0", "trim roots", "end roots", "set_limit user 0", "end nobody"}) {
    EXPECT_STATUS(user.Call(command), absl::StatusCode::kPermissionDenied, "may not change sessions");
  }
  for (const char* command : {"record roots 10", "snapshot roots"}) {
    EXPECT_STATUS(user.Call(command), absl::StatusCode::kPermissionDenied, "belongs to another user");
  }
  EXPECT_OK(user.Call("record user 10"));
  EXPECT_OK(user.Call("snapshot user"));
  EXPECT_EQ(roots.limit_bytes(), 256_MiB);
  EXPECT_OK(roots.Allocate(1_MiB));
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(daemon->socket_dir()));
  ASSERT_OK_AND_ASSIGN(const v1::Session session, raw.GetSession(Ref("user")));
  EXPECT_EQ(session.uid(), 65534u);
}

}  // namespace
}  // namespace vrambroker::testing_support
