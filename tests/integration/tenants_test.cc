// SPDX-License-Identifier: Apache-2.0
//
// Memory passed between sessions: visibility of bytes when the first holder, or its child, keeps returned memory.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "tests/support/buffers.h"
#include "tests/support/daemon_test.h"
#include "tests/support/opened_segment.h"
#include "tests/support/raw_client.h"
#include "tests/support/test_device.h"

namespace vrambroker::testing_support {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kDeviceBytes = 64_MiB;
constexpr uint64_t kMost = 48_MiB;  // no two sessions can have so much at once
constexpr uint64_t kKeepersSeed = 1;
constexpr uint64_t kNextSeed = 2;

// Idle memory does not decay: returned memory is available for the next request.
constexpr char kRules[] = R"(
  socket_mode: "0666"
  idle_decay: "1h"
  rules { session_name: "red*" tenant: "red" }
  rules { session_name: "blue*" tenant: "blue" }
  rules { session_name: "strict*" tenant: "red" isolation: STRICT }
)";

// A hostile client that leases a segment, writes to the segment, returns the segment, and keeps the mapping.
class Keeper {
 public:
  static absl::StatusOr<std::unique_ptr<Keeper>> Keep(const std::string& dir, const std::string& name) {
    absl::StatusOr<RawClient> raw = RawClient::Connect(dir);
    if (!raw.ok()) return raw.status();
    std::unique_ptr<Keeper> keeper(new Keeper(*std::move(raw)));
    v1::SessionRequest hello;
    hello.mutable_hello()->set_protocol_version(1);
    hello.mutable_hello()->set_name(name);
    hello.mutable_hello()->set_placement(v1::PLACEMENT_LEASED);
    const absl::StatusOr<v1::Welcome> welcome = keeper->stream_.Open(hello);
    if (!welcome.ok()) return welcome.status();

    v1::LeaseSegmentsRequest lease;
    lease.set_session_id(welcome->session_id());
    lease.add_segment_bytes(kMost);
    v1::LeaseSegmentsResponse leased;
    v1::Broker::Stub& broker = keeper->raw_.broker();
    absl::Status status = RawClient::Call(broker, &v1::Broker::Stub::LeaseSegments, lease, &leased);
    if (!status.ok()) return status;
    absl::StatusOr<OpenedSegment> segment =
        OpenedSegment::Open(dir, welcome->devices(0).device().uuid(), leased.segments(0).handle(), kMost);
    if (!segment.ok()) return segment.status();
    keeper->segment_.emplace(*std::move(segment));
    keeper->segment_->Fill(kKeepersSeed);

    v1::ReturnSegmentsRequest give_back;
    give_back.set_session_id(welcome->session_id());
    give_back.add_segment_ids(leased.segments(0).segment_id());
    v1::ReturnSegmentsResponse returned;
    status = RawClient::Call(broker, &v1::Broker::Stub::ReturnSegments, give_back, &returned);
    if (!status.ok()) return status;
    return keeper;
  }

  // Returns true if the mapping holds exactly the keeper's own bytes.
  bool SeesItsOwn() const { return Sees(kKeepersSeed); }
  bool Sees(uint64_t seed) const { return segment_->Holds(seed); }
  // Writes to memory that another session might read.
  void Scribble() { segment_->Fill(kKeepersSeed + 1); }

 private:
  explicit Keeper(RawClient raw) : raw_(std::move(raw)), stream_(raw_) {}

  RawClient raw_;
  RawStream stream_;
  std::optional<OpenedSegment> segment_;
};

class TenantsTest : public DaemonTest {
 protected:
  void SetUp() override { ASSERT_OK(StartDaemon(Options())); }

  static DaemonOptions Options(bool http = false) {
    return {.capacity = absl::StrCat(kDeviceBytes), .config = kRules, .http = http};
  }

  // Connects a client whose requests wait for memory.
  absl::StatusOr<Client> ConnectThatWaits(const std::string& name) {
    ClientOptions options;
    options.socket_dir = dir();
    options.name = name;
    options.wait = kPatience;
    options.connect_timeout = kPatience;
    return Client::Connect(options);
  }

  RunResult Ctl(const std::string& command) {
    return RunProgram({VramctlProgram(), command, "--socket_dir=" + dir(), "--format=json"});
  }
  Json Quarantine() {
    const Json json = Json::parse(Ctl("quarantine").out, nullptr, /*allow_exceptions=*/false);
    return json.is_object() ? json["quarantine"] : Json();
  }
};

TEST_F(TenantsTest, WithinATenantMemoryIsHandedOnAsItIs) {
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Keeper> keeper, Keeper::Keep(dir(), "red-keeper"));
  ASSERT_OK_AND_ASSIGN(Client next, Connect("red-next"));
  ASSERT_OK_AND_ASSIGN(Buffer buffer, next.Allocate(kMost));
  EXPECT_TRUE(Holds(buffer, kMost, kKeepersSeed)) << "no driver call, no scrubbing: these trust each other";
  Fill(buffer, kMost, kNextSeed);
  EXPECT_TRUE(keeper->Sees(kNextSeed)) << "and so this test would see it in the others";
}

TEST_F(TenantsTest, WhoKeepsAMappingSeesNothingOfAnotherTenant) {
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Keeper> keeper, Keeper::Keep(dir(), "red-keeper"));
  ASSERT_OK_AND_ASSIGN(Client next, Connect("blue-next"));
  ASSERT_OK_AND_ASSIGN(Buffer buffer, next.Allocate(kMost));
  EXPECT_TRUE(IsZero(buffer));
  Fill(buffer, kMost, kNextSeed);
  EXPECT_TRUE(keeper->SeesItsOwn());
  keeper->Scribble();
  EXPECT_TRUE(Holds(buffer, kMost, kNextSeed)) << "nor can it change them";
}

TEST_F(TenantsTest, StrictIsolationHoldsWithinATenantToo) {
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Keeper> keeper, Keeper::Keep(dir(), "strict-keeper"));
  for (const char* name : {"strict-next", "red-next"}) {
    ASSERT_OK_AND_ASSIGN(Client next, Connect(name));
    ASSERT_OK_AND_ASSIGN(Buffer buffer, next.Allocate(kMost));
    EXPECT_TRUE(IsZero(buffer)) << name;
    Fill(buffer, kMost, kNextSeed);
    EXPECT_TRUE(keeper->SeesItsOwn()) << name;
  }
}

TEST_F(TenantsTest, AnotherUserGetsZeros) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  // The user is the tenant of a session without a rule.
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Keeper> keeper, Keeper::Keep(dir(), "keeper"));
  ASSERT_OK_AND_ASSIGN(ClientProcess stranger, ClientProcess::Start(dir()));
  ASSERT_OK(stranger.Call("setuid 65533"));
  ASSERT_OK(stranger.Call("connect stranger -"));
  ASSERT_OK(stranger.Call(absl::StrCat("alloc ", kMost)));
  EXPECT_OK(stranger.Call("zeros 0"));
  ASSERT_OK(stranger.Call("write 0 2"));
  EXPECT_TRUE(keeper->SeesItsOwn());
  keeper->Scribble();
  EXPECT_OK(stranger.Call("verify 0 2"));
}

TEST_F(TenantsTest, WhatADeadProcessHadIsZerosForAnotherTenant) {
  ASSERT_OK_AND_ASSIGN(ClientProcess dead, ConnectProcess("red-dead"));
  ASSERT_OK(dead.Call(absl::StrCat("alloc ", kMost)));
  ASSERT_OK(dead.Call("write 0 1"));
  dead.process().Signal(SIGKILL);
  ASSERT_OK(dead.process().Wait());
  ASSERT_OK_AND_ASSIGN(Client next, ConnectThatWaits("blue-next"));
  ASSERT_OK_AND_ASSIGN(Buffer buffer, next.Allocate(kMost));
  EXPECT_TRUE(IsZero(buffer));
}

// The driver of a GPU does not name the child: the client's mark does.
TEST_F(TenantsTest, AChildThatKeepsDescriptorsDelaysReuseAndIsNamed) {
  ASSERT_OK(StartDaemon(Options(/*http=*/true)));
  ASSERT_OK_AND_ASSIGN(ClientProcess parent, ConnectProcess("red-parent"));
  ASSERT_OK(parent.Call(absl::StrCat("alloc ", kMost)));
  ASSERT_OK(parent.Call("write 0 1"));
  ASSERT_OK_AND_ASSIGN(const std::vector<std::string> answer, parent.Call("fork"));
  pid_t child = 0;
  ASSERT_TRUE(absl::SimpleAtoi(answer.at(0), &child));
  const pid_t parent_pid = parent.pid();
  parent.process().Signal(SIGKILL);
  ASSERT_OK(parent.process().Wait());

  Json quarantine;
  ASSERT_TRUE(WaitFor([&] {
    quarantine = Quarantine();
    return quarantine.size() == 1 && !quarantine[0]["holders"].empty();
  })) << quarantine;
  EXPECT_EQ(quarantine[0]["client"], "red-parent");
  EXPECT_EQ(quarantine[0]["pid"], parent_pid);
  EXPECT_EQ(quarantine[0]["bytes"], kMost);
  EXPECT_EQ(quarantine[0]["holders"], Json({child}));
  EXPECT_EQ(daemon_->Metrics().Value("vrambroker_device_quarantined_bytes", {{"gpu", "0"}, {"reason", "held_open"}}),
            static_cast<double>(kMost));
  const RunResult table = RunProgram({VramctlProgram(), "quarantine", "--socket_dir=" + dir()});
  EXPECT_TRUE(absl::StrContains(table.out, absl::StrCat("process ", child, " still has it open"))) << table.out;
  const std::string line = absl::StrCat("quarantine held open device=0 bytes=", kMost, " holder_pid=", child);
  EXPECT_TRUE(WaitFor([&] { return absl::StrContains(daemon_->log(), line); })) << daemon_->log();

  // Memory stays unused until the child has gone, even within the tenant. A request can wait for the memory.
  ASSERT_OK_AND_ASSIGN(Client hasty, Connect("red-hasty"));
  const std::optional<OutOfMemory> refused = GetOutOfMemory(hasty.Allocate(kMost).status());
  ASSERT_TRUE(refused.has_value());
  EXPECT_EQ(refused->cause, OutOfMemory::Cause::kCapacity);
  EXPECT_EQ(refused->device_quarantined_bytes, kMost);
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  ASSERT_OK_AND_ASSIGN(Client patient, ConnectThatWaits("blue-patient"));
  absl::StatusOr<Buffer> buffer = absl::UnknownError("");
  std::thread waiting([&] { buffer = patient.Allocate(kMost); });
  EXPECT_TRUE(WaitFor([&] {
    const absl::StatusOr<v1::Session> session = raw.GetSession(Ref("blue-patient"));
    return session.ok() && !session->devices(0).waiting().empty();
  }));
  EXPECT_EQ(kill(child, SIGKILL), 0);
  waiting.join();
  ASSERT_OK(buffer);
  EXPECT_TRUE(IsZero(*buffer));
  EXPECT_EQ(Quarantine(), Json::array());
  EXPECT_EQ(daemon_->Metrics().Value("vrambroker_device_quarantined_bytes", {{"gpu", "0"}, {"reason", "held_open"}}),
            0.0);
}

// The child has neither its parent's descriptors nor its parent's mappings: the parent's memory comes back.
TEST_F(TenantsTest, AChildThatRunsAnotherProgramKeepsNothing) {
  ASSERT_OK_AND_ASSIGN(ClientProcess parent, ConnectProcess("red-parent"));
  ASSERT_OK(parent.Call(absl::StrCat("alloc ", kMost)));
  ASSERT_OK_AND_ASSIGN(const std::vector<std::string> answer, parent.Call("fork_exec"));
  pid_t child = 0;
  ASSERT_TRUE(absl::SimpleAtoi(answer.at(0), &child));
  parent.process().Signal(SIGKILL);
  ASSERT_OK(parent.process().Wait());
  ASSERT_OK_AND_ASSIGN(Client next, ConnectThatWaits("red-next"));
  EXPECT_OK(next.Allocate(kMost));
  EXPECT_EQ(kill(child, 0), 0) << "it still runs";
  EXPECT_EQ(kill(child, SIGKILL), 0);
}

}  // namespace
}  // namespace vrambroker::testing_support
