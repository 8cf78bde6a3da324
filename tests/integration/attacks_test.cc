// SPDX-License-Identifier: Apache-2.0
//
// Attacks below the level of gRPC's library: one user must not take the daemon from the other users.
// tests/fault/README.md lists the attacks with figures.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "allocator/base/bytes.h"
#include "server/rpc/stream_guard.h"
#include "tests/support/daemon_test.h"
#include "tests/support/raw_client.h"
#include "tests/support/raw_http2.h"
#include "tests/support/test_device.h"
#include "tests/support/unix_client.h"

namespace vrambroker::testing_support {
namespace {

using ::testing::HasSubstr;

constexpr char kGetDevices[] = "/vrambroker.v1.Broker/GetDevices";

class AttacksTest : public DaemonTest {
 protected:
  // Reads a figure of /proc/PID/status in bytes: VmRSS is the present size, VmHWM the peak.
  uint64_t DaemonMemory(const std::string& figure) const {
    std::ifstream status(absl::StrCat("/proc/", daemon_->pid(), "/status"));
    uint64_t kilobytes = 0;
    for (std::string line; std::getline(status, line);) {
      absl::string_view rest = line;
      if (absl::ConsumePrefix(&rest, figure + ":") && absl::ConsumeSuffix(&rest, " kB")) {
        EXPECT_TRUE(absl::SimpleAtoi(rest, &kilobytes)) << line;
      }
    }
    return kilobytes << 10;
  }

  // Opens many streams on several connections. Then waits until the daemon has closed all connections.
  void OpenStreams(bool reset) {
    constexpr int kConnections = 4;
    constexpr int kStreams = 20'000;
    std::vector<RawHttp2> connections;
    for (int i = 0; i < kConnections; ++i) {
      ASSERT_OK_AND_ASSIGN(RawHttp2 connection, RawHttp2::Connect(dir()));
      EXPECT_TRUE(connection.Greet(/*acknowledge=*/reset));
      connections.push_back(std::move(connection));
    }
    bool any_open = true;
    for (int i = 0; i < kStreams && any_open; ++i) {
      any_open = false;
      for (RawHttp2& connection : connections) {
        const bool open = connection.Begin(kGetDevices) && (!reset || connection.Reset());
        any_open = any_open || open;
      }
    }
    for (RawHttp2& connection : connections) EXPECT_TRUE(WaitFor([&] { return connection.Closed(); }));
  }

  // Checks that the daemon serves other processes during and after the attack. The attacker is this process.
  void ExpectRepelled(bool reset) {
    ASSERT_OK(StartDaemon());
    ASSERT_OK_AND_ASSIGN(ClientProcess honest, ConnectProcess("honest"));
    ASSERT_OK(honest.Call("fill 5 300000 41"));
    const uint64_t before = DaemonMemory("VmRSS");
    OpenStreams(reset);
    EXPECT_OK(honest.Call("check 41"));
    EXPECT_OK(honest.Call("alloc 4000000"));
    EXPECT_OK(ConnectProcess("newcomer")) << "another process of the same user";
    if (!kSanitized) {
      EXPECT_TRUE(WaitFor([&] { return DaemonMemory("VmRSS") < before + 64_MiB; }))
          << before << " before, now " << DaemonMemory("VmRSS");
    }
    EXPECT_THAT(daemon_->log(), HasSubstr("connection closed"));
    // The ban ends.
    EXPECT_TRUE(WaitFor([&] { return Connect("reformed").ok(); }));
  }
};

TEST_F(AttacksTest, RapidReset) {
  ExpectRepelled(/*reset=*/true);
}

// gRPC bounds the streams of a connection only when the client has acknowledged its settings.
TEST_F(AttacksTest, StreamsWithoutEndByAClientThatIgnoresTheSettings) {
  ExpectRepelled(/*reset=*/false);
}

// A connection stays below the bound, and closes before the daemon could check the connection.
TEST_F(AttacksTest, RapidResetInBursts) {
  ASSERT_OK(StartDaemon());
  ASSERT_OK_AND_ASSIGN(ClientProcess honest, ConnectProcess("honest"));
  constexpr int kResets = 900;
  // The daemon would refuse the whole user after the resets of 16 processes.
  int bursts = 0;
  for (bool refused = false; !refused && bursts < 15; ++bursts) {
    ASSERT_OK_AND_ASSIGN(RawHttp2 connection, RawHttp2::Connect(dir()));
    refused = !connection.Greet(/*acknowledge=*/true);
    for (int i = 0; i < kResets && !refused; ++i) refused = !connection.Begin(kGetDevices) || !connection.Reset();
    // Waits until the daemon has read the whole burst. A burst on a connection that closes sooner may never reach gRPC,
    // and costs gRPC nothing.
    if (!refused) refused = !connection.Ping() || !WaitFor([&] { return connection.Closed() || connection.Ponged(); });
    refused = refused || connection.Closed();
    EXPECT_OK(ConnectProcess(absl::StrCat("newcomer", bursts))) << "while a connection closes";
  }
  EXPECT_LE(bursts, 3);
  EXPECT_TRUE(WaitFor([&] { return absl::StrContains(daemon_->log(), "its process gave up more than 1000 calls"); }));
  EXPECT_OK(honest.Call("alloc 4000000"));
  EXPECT_OK(ConnectProcess("newcomer"));
}

// The daemon passes the connections to gRPC one after the other, and serves all connections.
TEST_F(AttacksTest, ConnectionsWithoutEnd) {
  ASSERT_OK(StartDaemon());
  for (int i = 0; i < static_cast<int>(StreamGuard::kConnectsAtOnce) + 100; ++i) {
    ASSERT_OK_AND_ASSIGN(RawHttp2 connection, RawHttp2::Connect(dir()));
    ASSERT_TRUE(connection.Greet(/*acknowledge=*/true)) << i;
    ASSERT_TRUE(WaitFor([&] { return connection.Closed() || !connection.received().empty(); }));
    ASSERT_FALSE(connection.received().empty()) << i;
  }
}

// Closing a received descriptor may take as long as its sender wants. ClientSocketTest covers kernels that do not
// refuse descriptors.
TEST_F(AttacksTest, NobodyMaySendDescriptors) {
  ASSERT_OK(StartDaemon());
  for (const auto& [name, type] :
       {std::pair("vrambroker.sock", SOCK_STREAM), std::pair("vrambroker-fd.sock", SOCK_SEQPACKET)}) {
    const UniqueFd fd = ConnectUnix(absl::StrCat(dir(), "/", name), type);
    ASSERT_TRUE(fd.valid());
    if (SendWithDescriptor(fd.get(), "x", fd.get()) < 0) {
      EXPECT_EQ(errno, EPERM) << name;
      continue;
    }
    char byte = 0;
    EXPECT_LE(recv(fd.get(), &byte, 1, 0), 0) << name << ": the daemon drops the connection";
  }
  ASSERT_OK_AND_ASSIGN(ClientProcess honest, ConnectProcess("honest"));
  EXPECT_OK(honest.Call("alloc 4000000"));
}

TEST_F(AttacksTest, CompressedMessagesAreNotInflated) {
  ASSERT_OK(StartDaemon());
  // The message is within the allowed size.
  const std::string bomb = GzipOfZeros(60_MiB);
  ASSERT_LT(bomb.size(), 64_KiB);
  const uint64_t before = DaemonMemory("VmHWM");
  ASSERT_OK_AND_ASSIGN(RawHttp2 connection, RawHttp2::Connect(dir()));
  EXPECT_TRUE(connection.Greet(/*acknowledge=*/true));
  EXPECT_TRUE(connection.Begin(kGetDevices, "gzip"));
  EXPECT_TRUE(connection.SendLast(bomb, /*compressed=*/true));
  EXPECT_TRUE(WaitFor([&] { return connection.Closed() || absl::StrContains(connection.received(), "grpc-message"); }));
  EXPECT_THAT(connection.received(), HasSubstr("'gzip' is disabled"));
  EXPECT_LT(DaemonMemory("VmHWM"), before + 30_MiB);
}

TEST_F(AttacksTest, RecordedEventsAreBounded) {
  ASSERT_OK(StartDaemon({.config = "record_events: 600 max_recorded_events_per_uid: 1000"}));
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  RawStream first(raw);
  ASSERT_OK_AND_ASSIGN(const v1::Welcome all, first.Hello("first"));
  EXPECT_EQ(all.warnings_size(), 0);
  RawStream second(raw);
  ASSERT_OK_AND_ASSIGN(const v1::Welcome less, second.Hello("second"));
  ASSERT_EQ(less.warnings_size(), 1);
  EXPECT_THAT(less.warnings(0), HasSubstr("400 events instead of 600: max_recorded_events_per_uid"));
  EXPECT_STATUS(raw.SetRecording(Ref("second"), 401), absl::StatusCode::kResourceExhausted,
                "max_recorded_events_per_uid");
  EXPECT_OK(first.Goodbye());
  EXPECT_OK(raw.SetRecording(Ref("second"), 1000));
  // Records of a leasing session are not in the daemon's memory.
  ASSERT_OK_AND_ASSIGN(ClientProcess leasing, ConnectProcess("leasing"));
  EXPECT_OK(leasing.Call("record leasing 5000"));
}

TEST_F(AttacksTest, TracesAreBounded) {
  ASSERT_OK(StartDaemon({.config = "record_events: 100 max_recorded_events_per_uid: 1000"}));
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  RawStream remote(raw);
  ASSERT_OK(remote.Hello("remote"));
  ASSERT_OK_AND_ASSIGN(ClientProcess leasing, ConnectProcess("leasing"));
  const auto kept = [&](const std::string& session) -> uint64_t {
    const auto parts = raw.GetSnapshot(Ref(session), 0);
    return parts.ok() && !parts->empty() ? parts->front().max_events() : 0;
  };
  EXPECT_STATUS(raw.HoldRecording(Ref("remote"), 1001), absl::StatusCode::kResourceExhausted,
                "max_recorded_events_per_uid");
  EXPECT_TRUE(WaitFor([&] { return kept("remote") == 100; }));
  std::vector<std::unique_ptr<RawHold>> holds;
  for (int i = 0; i < 16; ++i) {
    holds.push_back(std::make_unique<RawHold>(raw.admin(), Ref(i % 2 == 0 ? "remote" : "leasing"), 900 + i));
    EXPECT_OK(holds.back()->WaitForStart());
  }
  EXPECT_STATUS(raw.HoldRecording(Ref("remote"), 1), absl::StatusCode::kResourceExhausted, "16 traces under way");
  EXPECT_EQ(kept("remote"), 914u);
  EXPECT_EQ(kept("leasing"), 915u);
  EXPECT_STATUS(raw.SetRecording(Ref("remote"), 1001), absl::StatusCode::kResourceExhausted,
                "max_recorded_events_per_uid");
  // Stops the leasing client, so that the client does not answer.
  leasing.process().Signal(SIGSTOP);
  holds.erase(holds.begin() + 1, holds.end());
  EXPECT_TRUE(WaitFor([&] { return kept("remote") == 900; }));
  EXPECT_STATUS(raw.HoldRecording(Ref("leasing"), 500), absl::StatusCode::kDeadlineExceeded, "does not answer");
  leasing.process().Signal(SIGCONT);
  EXPECT_TRUE(WaitFor([&] { return kept("leasing") == 100; })) << "it hears of the end later";
  // The session ends before its hold.
  EXPECT_OK(remote.Goodbye());
  holds.clear();
  EXPECT_OK(raw.HoldRecording(Ref("leasing"), 500)) << "all have been given back";
}

class DescriptorsTest : public AttacksTest {
 protected:
  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "needs root, to become other users";
  }

  void Begin(int descriptors) { ASSERT_OK(StartDaemon({.config = "socket_mode: '0666'", .descriptors = descriptors})); }

  // Opens `count` connections of `uid` to a socket of the daemon. The daemon may have closed some of the connections
  // already.
  std::vector<UniqueFd> Occupy(uid_t uid, const std::string& socket_name, int type, int count) const {
    std::vector<UniqueFd> connections;
    const std::string path = absl::StrCat(dir(), "/", socket_name);
    // The raw system call changes the user of this thread alone.
    std::thread thread([&] {
      EXPECT_EQ(syscall(SYS_setresuid, -1, uid, -1), 0);
      for (int i = 0; i < count; ++i) {
        connections.push_back(ConnectUnix(path, type));
        ASSERT_TRUE(connections.back().valid()) << i << ": " << std::strerror(errno);
      }
    });
    thread.join();
    return connections;
  }

  // Checks that a process of `uid` connects and gets memory. The process needs both sockets for the memory.
  void ExpectServed(uid_t uid) {
    ASSERT_OK_AND_ASSIGN(ClientProcess client, ClientProcess::Start(dir()));
    if (uid != 0) {
      ASSERT_OK(client.Call(absl::StrCat("setuid ", uid)));
    }
    EXPECT_OK(client.Call(absl::StrCat("connect user", uid, " -"))) << uid;
    EXPECT_OK(client.Call("fill 2 300000 7")) << uid;
  }
};

TEST_F(DescriptorsTest, OneUserWithManyConnectionsShutsNobodyOut) {
  Begin(1024);
  ASSERT_OK_AND_ASSIGN(ClientProcess early, ConnectProcess("early"));
  const std::vector<UniqueFd> many = Occupy(65534, "vrambroker.sock", SOCK_STREAM, 1500);
  ExpectServed(0);
  ExpectServed(65533);
  // Users who work together leave places to other users, too.
  std::vector<std::vector<UniqueFd>> more;
  for (uid_t uid = 65525; uid < 65533; ++uid) more.push_back(Occupy(uid, "vrambroker.sock", SOCK_STREAM, 200));
  ExpectServed(65533);
  ExpectServed(0);
  EXPECT_OK(early.Call("fill 2 300000 8"));
  EXPECT_THAT(daemon_->log(), HasSubstr("raise LimitNOFILE"));
}

TEST_F(DescriptorsTest, SilentConnectionsToTheDescriptorSocketShutNobodyOut) {
  Begin(1024);
  const std::vector<UniqueFd> many = Occupy(65534, "vrambroker-fd.sock", SOCK_SEQPACKET, 1500);
  ExpectServed(0);
  ExpectServed(65533);
  ExpectServed(65534);
  std::vector<std::vector<UniqueFd>> more;
  for (uid_t uid = 65525; uid < 65533; ++uid) more.push_back(Occupy(uid, "vrambroker-fd.sock", SOCK_SEQPACKET, 200));
  ExpectServed(0);
  ExpectServed(65533);
}

TEST_F(DescriptorsTest, MaxConnectionsPerUid) {
  ASSERT_OK(StartDaemon({.config = "socket_mode: '0666' max_connections_per_uid: 3"}));
  const std::vector<UniqueFd> connections = Occupy(65534, "vrambroker.sock", SOCK_STREAM, 4);
  EXPECT_TRUE(WaitFor([&] { return absl::StrContains(daemon_->log(), "the user has 3 open"); }));
  ExpectServed(0);
}

TEST_F(DescriptorsTest, SegmentsLeaveSomeToOthers) {
  HOST_DEVICE_ONLY();
  Begin(128);
  EXPECT_THAT(daemon_->log(), HasSubstr("few file descriptors"));
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  RawStream stream(raw);
  ASSERT_OK_AND_ASSIGN(const v1::Welcome welcome, stream.Open(LeasingHello("hog")));
  v1::LeaseSegmentsRequest request;
  request.set_session_id(welcome.session_id());
  request.add_segment_bytes(2_MiB);
  absl::Status status;
  for (int i = 0; i < 128 && status.ok(); ++i) {
    v1::LeaseSegmentsResponse response;
    status = RawClient::Call(raw.broker(), &v1::Broker::Stub::LeaseSegments, request, &response);
  }
  EXPECT_STATUS(status, absl::StatusCode::kFailedPrecondition, "file descriptors");
  EXPECT_TRUE(WaitFor([&] { return absl::StrContains(daemon_->log(), "segments and sessions are refused"); }));
  ASSERT_OK_AND_ASSIGN(ClientProcess other, ClientProcess::Start(dir()));
  ASSERT_OK(other.Call("setuid 65533"));
  EXPECT_OK(other.Call("list"));
}

}  // namespace
}  // namespace vrambroker::testing_support
