// SPDX-License-Identifier: Apache-2.0
//
// The end of a client: no callback comes after the end, nothing blocks the end, and the daemon hears of the end.
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "allocator/base/bytes.h"
#include "client/connection/connection.h"
#include "client/connection/session_stream.h"
#include "tests/support/buffers.h"
#include "tests/support/daemon_test.h"
#include "tests/support/proxy.h"
#include "tests/support/raw_client.h"
#include "tests/support/test_device.h"
#include "tests/support/util.h"

namespace vrambroker::testing_support {
namespace {

using client_internal::SessionStream;

// Timeout of connections and calls: only a bug waits that long.
constexpr absl::Duration kTooLong = absl::Hours(1);

class ClosingTest : public DaemonTest {
 protected:
  ClientOptions Options(const std::string& name, const std::string& socket_dir) {
    ClientOptions options;
    options.socket_dir = socket_dir;
    options.name = name;
    options.connect_timeout = kTooLong;
    options.call_timeout = kTooLong;
    return options;
  }
  ClientOptions Options(const std::string& name) { return Options(name, dir()); }

  // Connects anew for each look: a daemon may have been restarted.
  bool IsListed(const std::string& name) {
    absl::StatusOr<RawClient> raw = RawClient::Connect(dir());
    return raw.ok() && raw->GetSession(Ref(name)).ok();
  }
  bool IsGone(const std::string& name) {
    absl::StatusOr<RawClient> raw = RawClient::Connect(dir());
    return raw.ok() && absl::IsNotFound(raw->GetSession(Ref(name)).status());
  }
};

// ---- Callbacks ----

TEST_F(ClosingTest, NoCallbackComesAfterTheClient) {
  ASSERT_OK(StartDaemon());
  Buffer outlives;
  std::atomic<int> calls{0};
  {
    ClientOptions options = Options("gone");
    options.on_lost = [&](const absl::Status&) { ++calls; };
    options.log = [&](const std::string&) { ++calls; };
    ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(options));
    ASSERT_OK_AND_ASSIGN(outlives, client.Allocate(1_MiB));
  }
  daemon_->Kill();
  ASSERT_OK(daemon_->Restart());
  // A listed session means that the loss and its report are in the past.
  EXPECT_TRUE(WaitFor([&] { return IsListed("gone"); }));
  EXPECT_EQ(calls, 0);
}

TEST_F(ClosingTest, TheEndWaitsForACallbackThatIsUnderWay) {
  ASSERT_OK(StartDaemon());
  std::atomic<bool> entered{false};
  std::atomic<bool> leave{false};
  std::atomic<bool> left{false};
  ClientOptions options = Options("told");
  options.on_lost = [&](const absl::Status&) {
    entered = true;
    EXPECT_TRUE(WaitFor([&] { return leave.load(); }));
    left = true;
  };
  absl::StatusOr<Client> client = Client::Connect(options);
  ASSERT_OK(client);
  ASSERT_OK_AND_ASSIGN(const Buffer outlives, client->Allocate(1_MiB));
  daemon_->Kill();
  ASSERT_TRUE(WaitFor([&] { return entered.load(); }));
  bool left_before_the_end = false;
  std::thread ending([&] {
    client = absl::CancelledError("gone");
    left_before_the_end = left;
  });
  absl::SleepFor(absl::Milliseconds(50));
  leave = true;
  ending.join();
  EXPECT_TRUE(left_before_the_end);
}

TEST_F(ClosingTest, WhoIsToldThatTheStreamIsLostMayDropIt) {
  ASSERT_OK(StartDaemon());
  ASSERT_OK_AND_ASSIGN(std::shared_ptr<grpc::Channel> channel, client_internal::ConnectChannel(dir(), kPatience));
  std::atomic<bool> dropped{false};
  std::shared_ptr<SessionStream> stream;
  std::vector<v1::SessionRequest> messages(1, LeasingHello("dropped"));
  stream = SessionStream::Start(std::exchange(channel, nullptr), std::move(messages),
                                {.welcomed = [](const v1::Welcome&) {},
                                 .close_segments = [](const v1::CloseSegments&) {},
                                 .limit_changed = [](const v1::LimitChanged&) {},
                                 .question = [](const v1::Question&) {},
                                 .lost =
                                     [&](const absl::Status&) {
                                       stream->Abort();
                                       stream = nullptr;  // the channel's last stream, too
                                       dropped = true;
                                     }});
  ASSERT_OK(stream->WaitForWelcome(kPatience));
  daemon_->Kill();
  EXPECT_TRUE(WaitFor([&] { return dropped.load(); }));
}

// ---- A daemon that does not answer ----

TEST_F(ClosingTest, AStoppedDaemonHearsOfItLater) {
  for (const Placement placement : {Placement::kLeased, Placement::kRemote}) {
    ASSERT_OK(StartDaemon());
    {
      ClientOptions options = Options("brief");
      options.placement = placement;
      ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(options));
      EXPECT_OK(client.Allocate(1_MiB));
      daemon_->process().Signal(SIGSTOP);
    }
    daemon_->process().Signal(SIGCONT);
    EXPECT_TRUE(WaitFor([&] { return IsGone("brief"); })) << "what it held would be charged until this process ends";
  }
}

// Two seconds for each buffer would be hours.
TEST_F(ClosingTest, ManyThingsThatAreGivenBackWaitForASilentDaemonOnce) {
  for (const Placement placement : {Placement::kLeased, Placement::kRemote}) {
    ASSERT_OK(StartDaemon());
    {
      ClientOptions options = Options("brief");
      options.placement = placement;
      ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(options));
      std::vector<Buffer> buffers;
      for (int i = 0; i < 5'000; ++i) {
        ASSERT_OK_AND_ASSIGN(Buffer buffer, client.Allocate(512));
        buffers.push_back(std::move(buffer));
      }
      daemon_->process().Signal(SIGSTOP);
      client.BeginEnd();
      for (Buffer& buffer : buffers) (void)buffer.Reset();
    }
    daemon_->process().Signal(SIGCONT);
    EXPECT_TRUE(WaitFor([&] { return IsGone("brief"); }));
  }
}

TEST_F(ClosingTest, AReturnThatIsNotAnsweredDoesNotHoldItUp) {
  ASSERT_OK(StartDaemon());
  const std::string proxy_dir = MakeTempDir();
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Proxy> proxy, Proxy::Start(proxy_dir, dir()));
  ClientOptions options = Options("returning", proxy_dir);
  options.idle_decay = absl::Milliseconds(20);
  ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(options));
  ASSERT_OK_AND_ASSIGN(Buffer buffer, client.Allocate(30_MiB));
  proxy->Swallow();
  const uint64_t calls = client.calls();
  buffer = Buffer();
  ASSERT_TRUE(WaitFor([&] { return client.calls() > calls; })) << "the segment goes back by itself";
}

TEST_F(ClosingTest, ASnapshotThatIsNotTakenDoesNotHoldItUp) {
  ASSERT_OK(StartDaemon({.config = "client_timeout: \"100ms\""}));
  const std::string proxy_dir = MakeTempDir();
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Proxy> proxy, Proxy::Start(proxy_dir, dir()));
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(Options("asked", proxy_dir)));
  ASSERT_OK(client.SetRecording(20'000));
  std::vector<Buffer> buffers;
  for (int i = 0; i < 10'000; ++i) {
    ASSERT_OK_AND_ASSIGN(Buffer buffer, client.Allocate(512));
    buffers.push_back(std::move(buffer));
  }
  proxy->Stall();
  // The snapshot is larger than sockets hold: the client waits for room.
  EXPECT_STATUS(raw.GetSnapshot(Ref("asked"), 0), absl::StatusCode::kDeadlineExceeded, "");
}

TEST_F(ClosingTest, AConnectionThatIsNotAcceptedDoesNotHoldItUp) {
  ASSERT_OK(StartDaemon());
  ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(Options("reconnecting")));
  // The daemon comes back stopped: connections succeed, and get no answer.
  daemon_->Kill();
  ASSERT_TRUE(WaitFor([&] { return !client.status().ok(); }));
  ASSERT_OK(daemon_->Restart());
  daemon_->process().Signal(SIGSTOP);
  absl::SleepFor(absl::Milliseconds(200));  // gives the client time to try; no check depends on the time
  { const Client gone = std::move(client); }
  daemon_->process().Signal(SIGCONT);
}

// ---- Durations ----

TEST_F(ClosingTest, NoTimeoutMeansNone) {
  ASSERT_OK(StartDaemon());
  for (const absl::Duration never :
       {absl::InfiniteDuration(), absl::Milliseconds(std::numeric_limits<int64_t>::max()), absl::Seconds(1e10)}) {
    for (const Placement placement : {Placement::kLeased, Placement::kRemote}) {
      ClientOptions options = Options("patient");
      options.placement = placement;
      options.connect_timeout = never;
      options.call_timeout = never;
      options.idle_decay = never;
      ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(options));
      EXPECT_OK(client.Allocate(30_MiB)) << never;
      EXPECT_OK(client.GetMemoryStats()) << never;
      absl::SleepFor(absl::Milliseconds(50));  // gives a keeper time that would take the decay for past
      ASSERT_OK_AND_ASSIGN(const uint64_t cached, client.EmptyCache());
      EXPECT_EQ(cached, 30_MiB) << never;
    }
  }
}

// ---- Resumption with many segments ----

// The session has more segments than one message of the protocol may name. CUDA needs no descriptors for segments, so
// the session has more segments there than one message can carry. Under a sanitizer, that many segments take minutes.
TEST_F(ClosingTest, ASessionOfManySegmentsIsResumed) {
  const int count = OnCuda() && !kSanitized ? 28'000 : 5'000;
  ASSERT_OK(StartDaemon({.capacity = "64GiB", .config = "max_calls_per_second_per_uid: 1000000"}));
  const std::string proxy_dir = MakeTempDir();
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Proxy> proxy, Proxy::Start(proxy_dir, dir()));
  std::atomic<bool> resumed{false};
  ClientOptions options = Options("rich", proxy_dir);
  options.log = [&](const std::string& line) {
    if (absl::StrContains(line, "resumed the session")) resumed = true;
  };
  ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(options));
  const uint64_t id = client.session_id();
  std::vector<void*> segments;
  for (int i = 0; i < count; ++i) {
    ASSERT_OK_AND_ASSIGN(void* const segment, client.LeaseSegment(2_MiB));
    segments.push_back(segment);
  }
  Fill(client, segments.back(), 1000, 3);
  proxy->Break();
  ASSERT_TRUE(WaitFor([&] { return resumed.load(); })) << client.status();
  EXPECT_EQ(client.session_id(), id);
  EXPECT_TRUE(Holds(client, segments.back(), 1000, 3));
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  ASSERT_OK_AND_ASSIGN(const v1::Session session, raw.GetSession(Ref("rich")));
  EXPECT_EQ(session.devices(0).reserved_bytes(), static_cast<uint64_t>(count) * 2_MiB);
}

}  // namespace
}  // namespace vrambroker::testing_support
