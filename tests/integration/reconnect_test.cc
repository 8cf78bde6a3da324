// SPDX-License-Identifier: Apache-2.0
//
// Clients after a reconnect: reported figures, kept memory and returned memory. A test runs a single daemon and a
// single client.
#include <gtest/gtest.h>

#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "allocator/base/bytes.h"
#include "allocator/base/mutex.h"
#include "tests/support/buffers.h"
#include "tests/support/daemon_test.h"
#include "tests/support/proxy.h"
#include "tests/support/raw_client.h"
#include "tests/support/test_device.h"
#include "tests/support/util.h"

namespace vrambroker::testing_support {
namespace {

constexpr uint64_t kTooMuch = uint64_t{1} << 62;  // the client asks the daemon for the reason only

class ReconnectTest : public DaemonTest {
 protected:
  struct Log {
    Mutex mu;
    CondVar changed;
    std::string text ABSL_GUARDED_BY(mu);
    std::string pauses_at ABSL_GUARDED_BY(mu);
  };

  // Makes the client's background thread wait after its next line with `text`, until the end of this object.
  class Pause {
   public:
    Pause(std::shared_ptr<Log> log, const std::string& text) : log_(std::move(log)) { At(text); }
    ~Pause() { At(""); }
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;

   private:
    void At(const std::string& text) {
      MutexLock lock(log_->mu);
      log_->pauses_at = text;
      log_->changed.NotifyAll();
    }

    const std::shared_ptr<Log> log_;
  };

  // Connects through a proxy. The client's background thread returns no memory by age.
  absl::StatusOr<Client> ConnectThroughProxy() {
    const std::string proxy_dir = MakeTempDir();
    absl::StatusOr<std::unique_ptr<Proxy>> proxy = Proxy::Start(proxy_dir, dir());
    if (!proxy.ok()) return proxy.status();
    proxy_ = *std::move(proxy);
    ClientOptions options;
    options.socket_dir = proxy_dir;
    options.name = "client";
    options.call_timeout = kPatience;
    options.connect_timeout = kPatience;
    options.idle_decay = absl::InfiniteDuration();
    options.log = [log = log_](const std::string& line) {
      MutexLock lock(log->mu);
      absl::StrAppend(&log->text, line, "\n");
      while (!log->pauses_at.empty() && absl::StrContains(line, log->pauses_at)) log->changed.Wait(log->mu);
    };
    return Client::Connect(options);
  }
  bool HasSaid(const std::string& text) {
    MutexLock lock(log_->mu);
    return absl::StrContains(log_->text, text);
  }
  std::string Said() {
    MutexLock lock(log_->mu);
    return log_->text;
  }
  // Changes the configuration of the next daemon.
  void Reconfigure(const std::string& old, const std::string& now) {
    std::stringstream config;
    config << std::ifstream(daemon_->config_path()).rdbuf();
    std::ofstream(daemon_->config_path()) << absl::StrReplaceAll(config.str(), {{old, now}});
  }
  // Asks the daemon, not the client, for the session.
  v1::SessionDevice Listed() { return ListedDevice(dir(), "client"); }

  std::shared_ptr<Log> log_ = std::make_shared<Log>();
  std::unique_ptr<Proxy> proxy_;
};

TEST_F(ReconnectTest, TheNextDaemonLearnsAllAndItsLimitHolds) {
  ASSERT_OK(StartDaemon({.config = "record_events: 0 session_limit { bytes: \"200MiB\" }"}));
  ASSERT_OK_AND_ASSIGN(Client client, ConnectThroughProxy());
  EXPECT_EQ(client.limit_bytes(), 200_MiB);
  ASSERT_OK_AND_ASSIGN(Buffer held, client.Allocate(40_MiB));
  EXPECT_OK(client.Allocate(30_MiB)) << "stays in the cache";
  ASSERT_TRUE(WaitFor([&] { return Listed().stats().reserved_bytes().all().current() == 70_MiB; }));
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  RawHold recording(raw.admin(), Ref("client"), 100);
  ASSERT_OK(recording.WaitForStart());
  const auto restart = [&] {
    daemon_->Kill();
    ASSERT_TRUE(WaitFor([&] { return absl::IsUnavailable(client.status()); }));
    Reconfigure("200MiB", "100MiB");
    ASSERT_OK(daemon_->Restart());
    ASSERT_TRUE(WaitFor([&] { return client.status().ok(); })) << client.status();
  };
  ASSERT_NO_FATAL_FAILURE(restart());
  EXPECT_TRUE(WaitFor([&] { return HasSaid("connected to another daemon as a new session"); }));
  EXPECT_TRUE(HasSaid("; 1 segment of the old session stays usable until it is freed"))
      << "what was idle has gone back: " << Said();
  EXPECT_EQ(client.limit_bytes(), 100_MiB);
  EXPECT_TRUE(WaitFor([&] { return Listed().stats().reserved_bytes().all().current() == 40_MiB; }));
  // Restarts once more without any change: the client reports its figures without a call of the application.
  ASSERT_NO_FATAL_FAILURE(restart());
  EXPECT_TRUE(WaitFor([&] { return Listed().stats().allocated_bytes().all().current() == 40_MiB; }));
  EXPECT_TRUE(WaitFor([&] { return Listed().carried_over_bytes() == 40_MiB; }));
  EXPECT_EQ(Listed().reserved_bytes(), 40_MiB);
  EXPECT_OK(held.Reset());
  EXPECT_OK(client.EmptyCache());
  EXPECT_TRUE(WaitFor([&] { return Listed().reserved_bytes() == 0; }));
  ASSERT_OK_AND_ASSIGN(held, client.Allocate(100_MiB));
  EXPECT_STATUS(client.Allocate(2_MiB), absl::StatusCode::kResourceExhausted, "limit 100.00 MiB");
  ASSERT_OK_AND_ASSIGN(RawClient next, RawClient::Connect(dir()));
  ASSERT_OK_AND_ASSIGN(const std::vector<v1::GetSnapshotResponse> snapshot, next.GetSnapshot(Ref("client"), 0));
  for (const v1::GetSnapshotResponse& part : snapshot) EXPECT_EQ(part.events_size(), 0) << "who watched has gone";
}

TEST_F(ReconnectTest, FiguresThatWereLostOnTheWayAreToldAgain) {
  ASSERT_OK(StartDaemon());
  ASSERT_OK_AND_ASSIGN(Client client, ConnectThroughProxy());
  ASSERT_OK_AND_ASSIGN(Buffer held, client.Allocate(40_MiB));
  ASSERT_TRUE(WaitFor([&] { return Listed().stats().allocated_bytes().all().current() == 40_MiB; }));
  proxy_->Stall(Proxy::Which::kGrpc);
  EXPECT_OK(held.Reset());
  // The client reports before its call for an explanation. Stalled data would prove nothing: gRPC sends pings.
  const uint64_t calls = client.calls();
  std::thread refused([&] { EXPECT_STATUS(client.LeaseSegment(kTooMuch), absl::StatusCode::kResourceExhausted, ""); });
  EXPECT_TRUE(WaitFor([&] { return client.calls() > calls; }));
  proxy_->Break();
  refused.join();
  EXPECT_TRUE(WaitFor([&] { return Listed().stats().allocated_bytes().all().current() == 0; }))
      << "although nothing changes any more";
}

// A process that ends with the refusal makes no later report. The client's background thread, which reports once a
// second, waits here.
TEST_F(ReconnectTest, TheFiguresAreToldWithARefusal) {
  ASSERT_OK(StartDaemon());
  ASSERT_OK_AND_ASSIGN(Client client, ConnectThroughProxy());
  const Pause paused(log_, "resumed the session");
  proxy_->Break();
  ASSERT_TRUE(WaitFor([&] { return HasSaid("resumed the session"); })) << Said();
  EXPECT_STATUS(client.LeaseSegment(kTooMuch), absl::StatusCode::kResourceExhausted, "");
  EXPECT_EQ(Listed().stats().num_ooms(), 1u);
}

// The client's background thread waits before its first report to the next daemon.
TEST_F(ReconnectTest, TheNextDaemonCountsRetriesFromItsStartOn) {
  ASSERT_OK(StartDaemon({.http = true}));
  ASSERT_OK_AND_ASSIGN(Client client, ConnectThroughProxy());
  const auto retry = [&] {
    EXPECT_OK(client.Allocate(150_MiB)) << "stays in the cache";
    EXPECT_OK(client.Allocate(200_MiB)) << "needs more than what is left of 256 MiB";
    EXPECT_OK(client.EmptyCache());
  };
  retry();
  EXPECT_EQ(client.GetMemoryStats()->num_alloc_retries, 1u);
  {
    const Pause paused(log_, "as a new session");
    daemon_->Kill();
    ASSERT_TRUE(WaitFor([&] { return absl::IsUnavailable(client.status()); }));
    ASSERT_OK(daemon_->Restart());
    ASSERT_TRUE(WaitFor([&] { return HasSaid("as a new session"); })) << Said();
    retry();
    EXPECT_EQ(client.GetMemoryStats()->num_alloc_retries, 2u);
  }
  EXPECT_TRUE(WaitFor([&] { return Listed().stats().num_alloc_retries() == 2; }));
  EXPECT_EQ(daemon_->Metrics().Value("vrambroker_device_alloc_retries_total", {{"gpu", "0"}}), 1);
}

TEST_F(ReconnectTest, TheNextDaemonsCapacityCounts) {
  ASSERT_OK(StartDaemon({.capacity = "", .config = "capacity: '256MiB'"}));
  ASSERT_OK_AND_ASSIGN(Client client, ConnectThroughProxy());
  const std::vector<DeviceInfo>& before = client.devices();
  ASSERT_OK(client.SetMemoryFraction(0.5));
  EXPECT_EQ(client.limit_bytes(), 128_MiB);
  daemon_->Kill();
  ASSERT_TRUE(WaitFor([&] { return absl::IsUnavailable(client.status()); }));
  Reconfigure("256MiB", "512MiB");
  ASSERT_OK(daemon_->Restart());
  ASSERT_TRUE(WaitFor([&] { return client.status().ok(); })) << client.status();
  EXPECT_EQ(client.limit_bytes(), 256_MiB) << "half of what there is now";
  EXPECT_EQ(before[0].capacity_bytes, 256_MiB) << "what the application looks at stays as it was";
  EXPECT_EQ(client.devices()[0].capacity_bytes, 512_MiB);
  EXPECT_STATUS(client.Allocate(300_MiB), absl::StatusCode::kResourceExhausted,
                "the memory fraction that this process has set allows it 256.00 MiB of the device");
  EXPECT_OK(client.Allocate(240_MiB));
  ASSERT_OK(client.SetMemoryFraction(0.75));
  EXPECT_EQ(client.limit_bytes(), 384_MiB);
}

TEST_F(ReconnectTest, TheNextDaemonsCapacityCountsForTheAllocatorsSettings) {
  ASSERT_OK(StartDaemon({.capacity = "", .config = "capacity: '256MiB' alloc_conf: 'throw_on_cudamalloc_oom:True'"}));
  ASSERT_OK_AND_ASSIGN(Client client, ConnectThroughProxy());
  daemon_->Kill();
  ASSERT_TRUE(WaitFor([&] { return absl::IsUnavailable(client.status()); }));
  Reconfigure("256MiB", "512MiB");
  ASSERT_OK(daemon_->Restart());
  ASSERT_TRUE(WaitFor([&] { return client.status().ok(); })) << client.status();
  EXPECT_OK(client.Allocate(400_MiB));
}

TEST_F(ReconnectTest, ADaemonOfOtherDevicesIsNotUsed) {
  HOST_DEVICE_ONLY();
  ASSERT_OK(StartDaemon());
  ASSERT_OK_AND_ASSIGN(Client client, ConnectThroughProxy());
  ASSERT_OK_AND_ASSIGN(Buffer held, client.Allocate(40_MiB));
  Fill(held, 4096, 1);
  daemon_->Kill();
  Reconfigure("host_devices: 1", "host_devices: 2");
  ASSERT_OK(daemon_->Restart());
  EXPECT_TRUE(WaitFor([&] {
    return HasSaid("the daemon's number of devices changed from 1 to 2: connect again with a new client");
  })) << Said();
  EXPECT_TRUE(absl::IsUnavailable(client.status())) << client.status();
  EXPECT_TRUE(Holds(held, 4096, 1));
  daemon_->Kill();
  Reconfigure("host_devices: 2", "host_devices: 1");
  ASSERT_OK(daemon_->Restart());
  EXPECT_TRUE(WaitFor([&] { return client.status().ok(); })) << client.status();
}

// The daemon takes back segments that a resumed session does not name. A lease answered after the link was lost may be
// missing from the client's list of held segments.
TEST_F(ReconnectTest, ALeaseIsNotUsedWhenItsLinkIsLost) {
  ASSERT_OK(StartDaemon());
  ASSERT_OK_AND_ASSIGN(Client client, ConnectThroughProxy());
  ASSERT_OK_AND_ASSIGN(const Buffer held, client.Allocate(40_MiB));
  proxy_->Hold(Proxy::Which::kDescriptors);
  absl::Status late;
  std::thread leases([&] { late = client.Allocate(30_MiB).status(); });
  EXPECT_TRUE(WaitFor([&] { return proxy_->held() == 1; })) << "the daemon has answered";
  proxy_->Hold(Proxy::Which::kGrpc);
  proxy_->Break(Proxy::Which::kGrpc);
  EXPECT_TRUE(WaitFor([&] { return absl::IsUnavailable(client.status()); }));
  proxy_->Release(Proxy::Which::kDescriptors);
  leases.join();
  EXPECT_STATUS(late, absl::StatusCode::kUnavailable, "the connection to the daemon broke; try again");
  proxy_->Release(Proxy::Which::kGrpc);
  EXPECT_TRUE(WaitFor([&] { return client.status().ok(); })) << client.status();
  EXPECT_TRUE(WaitFor([&] { return Listed().reserved_bytes() == 40_MiB; })) << "the daemon has it back";
  EXPECT_EQ(client.GetMemoryStats()->reserved_bytes.all.current, 40_MiB);
  EXPECT_OK(client.Allocate(30_MiB));
}

}  // namespace
}  // namespace vrambroker::testing_support
