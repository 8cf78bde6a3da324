// SPDX-License-Identifier: Apache-2.0
//
// Memory comes back however its client ends: not while a process can touch the memory, and not much later.
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "allocator/base/bytes.h"
#include "tests/support/buffers.h"
#include "tests/support/daemon_test.h"
#include "tests/support/raw_client.h"

namespace vrambroker::testing_support {
namespace {

class LifetimeTest : public DaemonTest {
 protected:
  void SetUp() override { ASSERT_OK(StartDaemon({.capacity = "128MiB", .http = true})); }

  std::optional<double> Reserved(const std::string& client) {
    return daemon_->Metrics().Value("vrambroker_client_reserved_bytes", {{"client", client}, {"gpu", "0"}});
  }
};

TEST_F(LifetimeTest, AKilledHoldersMemoryComesBack) {
  ASSERT_OK_AND_ASSIGN(ClientProcess holder, ConnectProcess("holder"));
  ASSERT_OK(holder.Call("alloc 134217728"));
  ASSERT_OK(holder.Call("write 0 1"));
  ASSERT_EQ(Reserved("holder"), 128.0 * (1 << 20));
  ASSERT_OK_AND_ASSIGN(Client other, Connect("other"));
  EXPECT_STATUS(other.Allocate(128_MiB), absl::StatusCode::kResourceExhausted, "capacity");

  const absl::Time killed = absl::Now();
  holder.process().Signal(SIGKILL);
  EXPECT_TRUE(WaitFor([&] { return !Reserved("holder").has_value(); }));
  std::cout << "series gone " << absl::Now() - killed << " after SIGKILL\n";
  EXPECT_OK(other.Allocate(128_MiB));
}

TEST_F(LifetimeTest, AHolderKilledInATightLoopLeavesNothing) {
  for (int round = 0; round < 3; ++round) {
    ASSERT_OK_AND_ASSIGN(ClientProcess holder, ConnectProcess("churner"));
    ASSERT_OK(holder.Call(absl::StrCat("churn 4 ", 3_MiB * (round + 1))));
    holder.process().Signal(SIGKILL);
    EXPECT_TRUE(WaitFor([&] { return !Reserved("churner").has_value(); }));
    ASSERT_OK_AND_ASSIGN(Client other, Connect("other"));
    EXPECT_OK(other.Allocate(128_MiB));
  }
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  ASSERT_OK_AND_ASSIGN(const v1::Device device, raw.GetDevice());
  EXPECT_EQ(device.reserved_bytes() - device.idle_bytes(), 0u);
}

TEST_F(LifetimeTest, ABrokenStreamKeepsTheMemoryChargedUntilTheProcessIsGone) {
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  uint64_t id = 0;
  v1::AllocateResponse block;
  {
    RawStream stream(raw);
    ASSERT_OK_AND_ASSIGN(const v1::Welcome welcome, stream.Hello("broken"));
    id = welcome.session_id();
    ASSERT_OK_AND_ASSIGN(block, raw.Allocate(id, 100_MiB));
    stream.Cancel();
  }
  const auto state = [&] {
    const absl::StatusOr<v1::Session> session = raw.GetSession(Ref(id));
    return session.ok() ? session->state() : v1::SESSION_STATE_UNSPECIFIED;
  };
  EXPECT_TRUE(WaitFor([&] { return state() == v1::SESSION_STATE_DISCONNECTED; }));
  EXPECT_EQ(Reserved("broken"), 100.0 * (1 << 20));
  ASSERT_OK_AND_ASSIGN(Client other, Connect("other"));
  EXPECT_STATUS(other.Allocate(100_MiB), absl::StatusCode::kResourceExhausted, "capacity");
  // The session is over for its process, too.
  EXPECT_STATUS(raw.Allocate(id, 1), absl::StatusCode::kAborted, "disconnected");
}

TEST_F(LifetimeTest, ADisconnectedSessionEndsWithItsProcess) {
  ASSERT_OK_AND_ASSIGN(ClientProcess holder, ConnectProcess("holder"));
  ASSERT_OK(holder.Call("alloc 104857600"));
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  // An operator ends the session. The process still has its mapping, so the memory is not free for other clients yet.
  ASSERT_OK_AND_ASSIGN(const uint64_t quarantined, raw.EndSession(Ref("holder")));
  EXPECT_EQ(quarantined, 100_MiB);
  ASSERT_OK_AND_ASSIGN(const v1::Session ended, raw.GetSession(Ref("holder")));
  EXPECT_EQ(ended.state(), v1::SESSION_STATE_ENDED);
  EXPECT_EQ(Reserved("holder"), 100.0 * (1 << 20));
  EXPECT_STATUS(holder.Call("alloc 1"), absl::StatusCode::kAborted, "ended");
  EXPECT_OK(holder.Call("write 0 5"));
  EXPECT_OK(holder.Call("verify 0 5"));
  holder.process().Signal(SIGKILL);
  EXPECT_TRUE(WaitFor([&] { return !Reserved("holder").has_value(); }));
}

TEST_F(LifetimeTest, AnEndedSessionsGoodbyeGivesItsMemoryBack) {
  ASSERT_OK_AND_ASSIGN(ClientProcess holder, ConnectProcess("holder"));
  ASSERT_OK(holder.Call("alloc 104857600"));
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  ASSERT_OK(raw.EndSession(Ref("holder")));
  ASSERT_OK(holder.Call("goodbye"));
  EXPECT_TRUE(WaitFor([&] { return !Reserved("holder").has_value(); }));
}

TEST_F(LifetimeTest, GoodbyeGivesEverythingBackBeforeTheClientIsGone) {
  ASSERT_OK_AND_ASSIGN(Client other, Connect("other"));
  std::chrono::steady_clock::time_point begin;
  {
    ASSERT_OK_AND_ASSIGN(Client client, Connect("polite"));
    ASSERT_OK_AND_ASSIGN(const Buffer all, client.Allocate(128_MiB));
    EXPECT_EQ(Reserved("polite"), 128.0 * (1 << 20));
    begin = std::chrono::steady_clock::now();
  }
  // The destructor returns when the daemon has taken the memory. A take-back of more than 2 s goes on in the
  // background.
  if (std::chrono::steady_clock::now() - begin < std::chrono::seconds(2)) {
    EXPECT_FALSE(Reserved("polite").has_value());
  }
  EXPECT_TRUE(WaitFor([&] { return !Reserved("polite").has_value(); }));
  EXPECT_OK(other.Allocate(128_MiB));
}

TEST_F(LifetimeTest, ABufferMayOutliveItsClient) {
  Buffer buffer;
  {
    ASSERT_OK_AND_ASSIGN(Client client, Connect("short"));
    ASSERT_OK_AND_ASSIGN(buffer, client.Allocate(1_MiB));
  }
  Fill(buffer, 3);
  EXPECT_TRUE(Holds(buffer, 3));
  EXPECT_TRUE(Reserved("short").has_value());
  EXPECT_OK(buffer.Reset());
  EXPECT_TRUE(WaitFor([&] { return !Reserved("short").has_value(); }));
}

TEST_F(LifetimeTest, AForkedChildDoesNotKeepItsParentsConnection) {
  const auto sockets = [&] {
    size_t count = 0;
    for (const auto& entry : std::filesystem::directory_iterator(absl::StrCat("/proc/", daemon_->pid(), "/fd"))) {
      std::error_code gone;
      if (absl::StartsWith(std::filesystem::read_symlink(entry, gone).string(), "socket:")) ++count;
    }
    return count;
  };
  const auto streams = [&] { return daemon_->Metrics().Value("vrambroker_rpc_in_flight", {{"method", "Session"}}); };
  const size_t before = sockets();
  ASSERT_OK_AND_ASSIGN(ClientProcess holder, ConnectProcess("holder"));
  ASSERT_OK(holder.Call("alloc 1048576"));
  ASSERT_OK_AND_ASSIGN(const std::vector<std::string> child, holder.Call("fork"));  // the child ends with this test
  EXPECT_EQ(streams(), 1);
  holder.process().Signal(SIGKILL);
  EXPECT_TRUE(WaitFor([&] { return streams() == 0; }));
  // The descriptor socket's connection may stay until it has been silent for long enough.
  EXPECT_TRUE(WaitFor([&] { return sockets() <= before + 1; })) << sockets() << " sockets, before " << before;
  EXPECT_TRUE(WaitFor([&] { return !Reserved("holder").has_value(); }));
  EXPECT_EQ(kill(std::atoi(child.at(0).c_str()), 0), 0) << "the child lives, and has the socket";
}

TEST_F(LifetimeTest, AStoppedProcessDoesNotHoldOthersUp) {
  ASSERT_OK(StartDaemon({.capacity = "128MiB", .config = "client_timeout: '2s'"}));
  ASSERT_OK_AND_ASSIGN(ClientProcess stopped, ClientProcess::Start(dir()));
  ASSERT_OK(stopped.Call("connect stopped - remote"));
  ASSERT_OK(stopped.Call("alloc 20971520"));
  ASSERT_OK(stopped.Call("alloc 20971520"));
  ASSERT_OK(stopped.Call("write 0 4"));
  ASSERT_OK(stopped.Call("free 1"));  // gives the daemon a segment to ask for
  stopped.process().Signal(SIGSTOP);

  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  ASSERT_OK_AND_ASSIGN(const uint64_t trimmed, raw.TrimSession(Ref("stopped")));
  EXPECT_EQ(trimmed, 0u) << "it cannot have closed its mapping";
  ASSERT_OK_AND_ASSIGN(Client other, Connect("other"));
  for (uint64_t i = 0; i < 100; ++i) {
    ASSERT_OK_AND_ASSIGN(Buffer buffer, other.Allocate(1_MiB));
    Fill(buffer, 64, i);
  }
  ASSERT_OK_AND_ASSIGN(const v1::Session session, raw.GetSession(Ref("stopped")));
  EXPECT_EQ(session.devices(0).reserved_bytes(), 40_MiB);
  EXPECT_EQ(session.devices(0).returning_bytes(), 20_MiB);

  // The client wakes, closes the segment that the daemon asked for, and works on.
  stopped.process().Signal(SIGCONT);
  EXPECT_TRUE(WaitFor([&] {
    const absl::StatusOr<v1::Session> now = raw.GetSession(Ref("stopped"));
    return now.ok() && now->devices(0).reserved_bytes() == 20_MiB && now->devices(0).returning_bytes() == 0;
  }));
  EXPECT_OK(stopped.Call("verify 0 4"));
  EXPECT_OK(stopped.Call("alloc 1048576"));
}

}  // namespace
}  // namespace vrambroker::testing_support
