// SPDX-License-Identifier: Apache-2.0
//
// Memory that clients hold when the daemon dies, and the limits and capacity of the next daemon.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "allocator/base/mutex.h"
#include "tests/support/buffers.h"
#include "tests/support/daemon_test.h"
#include "tests/support/proxy.h"
#include "tests/support/raw_client.h"
#include "tests/support/test_device.h"
#include "tests/support/util.h"
#include "vrambroker/v1/broker.grpc.pb.h"

namespace vrambroker::testing_support {
namespace {

// PlayedDaemon takes the place of a daemon that has died, opens every new session, and refuses all requests for memory.
class PlayedDaemon final : public v1::Broker::Service {
 public:
  using Stream = grpc::ServerReaderWriter<v1::SessionResponse, v1::SessionRequest>;

  PlayedDaemon(const std::string& dir, const std::vector<DeviceInfo>& devices, uint64_t limit_bytes) {
    welcome_.set_session_id(1);
    welcome_.set_name("client");
    welcome_.set_resume_token(std::string(16, 't'));
    welcome_.set_takes_carried_over(true);
    for (const DeviceInfo& device : devices) {
      v1::Welcome::DeviceGrant& grant = *welcome_.add_devices();
      grant.mutable_device()->set_ordinal(static_cast<uint32_t>(device.ordinal));
      grant.mutable_device()->set_uuid(device.uuid);
      grant.mutable_device()->set_capacity_bytes(device.capacity_bytes);
      grant.set_limit_bytes(limit_bytes);
    }
    const std::string path = dir + "/vrambroker.sock";
    std::filesystem::remove(path);
    server_ = grpc::ServerBuilder()
                  .AddListeningPort("unix:" + path, grpc::InsecureServerCredentials())
                  .RegisterService(this)
                  .BuildAndStart();
  }
  ~PlayedDaemon() override { server_->Shutdown(std::chrono::system_clock::now()); }

  // Returns the number of leases that clients asked for.
  int leases() {
    MutexLock lock(mu_);
    return leases_;
  }
  // Asks the client of the last session, and returns the client's answer.
  v1::Answer Ask(v1::Question question) {
    Stream* stream = nullptr;
    {
      MutexLock lock(mu_);
      question.set_question_id(++questions_);
      stream = stream_;
    }
    v1::SessionResponse response;
    *response.mutable_question() = std::move(question);
    stream->Write(response);
    v1::Answer answer;
    EXPECT_TRUE(WaitFor([&] {
      MutexLock lock(mu_);
      answer = answer_;
      return answer.question_id() == questions_;
    }));
    return answer;
  }

 private:
  grpc::Status Session(grpc::ServerContext* /*context*/, Stream* stream) override {
    v1::SessionRequest request;
    while (stream->Read(&request) && !request.has_goodbye()) {
      if (request.hello().has_resume()) return {grpc::StatusCode::NOT_FOUND, "a session of another daemon"};
      const v1::SessionResponse response = Take(request, stream);
      if (response.message_case() != v1::SessionResponse::MESSAGE_NOT_SET) stream->Write(response);
    }
    return grpc::Status::OK;
  }
  // Returns the response, or an empty message if the request has no response.
  v1::SessionResponse Take(const v1::SessionRequest& request, Stream* stream) {
    v1::SessionResponse response;
    MutexLock lock(mu_);
    if (request.has_hello()) {
      *response.mutable_welcome() = welcome_;
      stream_ = stream;
    } else if (request.has_lease()) {
      ++leases_;
      response.mutable_result()->set_call_id(request.lease().call_id());
      response.mutable_result()->mutable_error()->set_code(grpc::StatusCode::INTERNAL);
      response.mutable_result()->mutable_error()->set_message("only played");
    } else if (request.has_answer()) {
      answer_ = request.answer();
    }
    return response;
  }

  v1::Welcome welcome_;  // constant after construction
  Mutex mu_;
  Stream* stream_ ABSL_GUARDED_BY(mu_) = nullptr;
  v1::Answer answer_ ABSL_GUARDED_BY(mu_);
  uint64_t questions_ ABSL_GUARDED_BY(mu_) = 0;
  int leases_ ABSL_GUARDED_BY(mu_) = 0;
  std::unique_ptr<grpc::Server> server_;
};

class CarriedOverTest : public DaemonTest {
 protected:
  void SetUp() override { ASSERT_OK(StartDaemon({.capacity = "256MiB"})); }
  // Kills the daemon, starts the daemon again, and waits until `clients` have reached the daemon.
  void Restart(const std::vector<Client*>& clients) {
    daemon_->Kill();
    for (Client* client : clients) {
      ASSERT_TRUE(WaitFor([&] { return absl::IsUnavailable(client->status()); }));
    }
    ASSERT_OK(daemon_->Restart());
    for (Client* client : clients) {
      ASSERT_TRUE(WaitFor([&] { return client->status().ok(); })) << client->status();
    }
  }
  // Returns the session's figures without asking the session's client.
  v1::SessionDevice Session(const std::string& name) { return ListedDevice(dir(), name); }
  v1::Device Device() {
    absl::StatusOr<RawClient> raw = RawClient::Connect(dir());
    return raw.ok() ? raw->GetDevice().value_or(v1::Device()) : v1::Device();
  }
  v1::ListQuarantineResponse Quarantine() {
    v1::ListQuarantineResponse response;
    absl::StatusOr<RawClient> raw = RawClient::Connect(dir());
    if (raw.ok()) {
      EXPECT_OK(
          RawClient::Call(raw->admin(), &v1::Admin::Stub::ListQuarantine, v1::ListQuarantineRequest(), &response));
    }
    return response;
  }
};

TEST_F(CarriedOverTest, LimitsAndCapacityHoldOverRestarts) {
  HOST_DEVICE_ONLY();
  ASSERT_OK_AND_ASSIGN(Client first, Connect("first", Limit(0.5)));
  ASSERT_OK_AND_ASSIGN(Client second, Connect("second"));
  ASSERT_OK_AND_ASSIGN(Buffer a, first.Allocate(100_MiB));
  ASSERT_OK_AND_ASSIGN(Buffer b, second.Allocate(100_MiB));
  Fill(a, 4096, 1);
  Fill(b, 4096, 2);
  for (int restart = 0; restart < 3; ++restart) {
    ASSERT_NO_FATAL_FAILURE(Restart({&first, &second}));
    // Clients first tell the daemon which files of the process belong to which client.
    EXPECT_TRUE(WaitFor([&] {
      return Session("first").carried_over_bytes() == 100_MiB && Session("second").carried_over_bytes() == 100_MiB;
    }));
    EXPECT_EQ(Session("first").reserved_bytes(), 100_MiB);
    EXPECT_EQ(Device().carried_over_bytes(), 200_MiB);
    const std::optional<OutOfMemory> limited = GetOutOfMemory(first.Allocate(30_MiB).status());
    ASSERT_TRUE(limited.has_value());
    EXPECT_EQ(limited->cause, OutOfMemory::Cause::kLimit);
    const std::optional<OutOfMemory> full = GetOutOfMemory(second.Allocate(60_MiB).status());
    ASSERT_TRUE(full.has_value());
    EXPECT_EQ(full->cause, OutOfMemory::Cause::kCapacity);
    EXPECT_OK(first.Allocate(28_MiB));
    EXPECT_OK(first.EmptyCache());
    EXPECT_TRUE(Holds(a, 4096, 1));
    EXPECT_TRUE(Holds(b, 4096, 2));
  }
  // Freed memory is free for other clients.
  EXPECT_OK(b.Reset());
  EXPECT_OK(second.EmptyCache());
  EXPECT_TRUE(WaitFor([&] { return Device().carried_over_bytes() == 100_MiB; }));
  EXPECT_EQ(Session("second").reserved_bytes(), 0u);
  ASSERT_OK_AND_ASSIGN(Client third, Connect("third"));
  EXPECT_OK(third.Allocate(150_MiB));
  EXPECT_TRUE(Holds(a, 4096, 1));
}

// The daemon takes some time to see that memory is free.
TEST_F(CarriedOverTest, WhatIsFreedCanBeHadAgainAtOnce) {
  HOST_DEVICE_ONLY();
  ASSERT_OK_AND_ASSIGN(Client client, Connect("client", Limit(0.5)));
  ASSERT_OK_AND_ASSIGN(Buffer buffer, client.Allocate(100_MiB));
  for (int restart = 0; restart < 3; ++restart) {
    ASSERT_NO_FATAL_FAILURE(Restart({&client}));
    EXPECT_TRUE(WaitFor([&] { return Session("client").carried_over_bytes() == 100_MiB; }));
    EXPECT_OK(buffer.Reset());
    EXPECT_OK(client.EmptyCache());
    absl::StatusOr<Buffer> again = client.Allocate(110_MiB);
    ASSERT_OK(again.status());
    EXPECT_OK(again->Reset());
    EXPECT_OK(client.EmptyCache());
    ASSERT_OK_AND_ASSIGN(buffer, client.Allocate(100_MiB));
  }
  // A new look at the memory does not help a request beyond the limit.
  EXPECT_EQ(GetOutOfMemory(client.Allocate(140_MiB).status()).value_or(OutOfMemory()).cause,
            OutOfMemory::Cause::kLimit);
}

// The daemon finds memory that a client holds and does not declare.
TEST_F(CarriedOverTest, AClientThatDoesNotSayIsChargedAllTheSame) {
  HOST_DEVICE_ONLY();
  placement_ = Placement::kRemote;  // a remote client does not reconnect
  ASSERT_OK_AND_ASSIGN(Client old, Connect("old"));
  ASSERT_OK_AND_ASSIGN(Buffer held, old.Allocate(100_MiB));
  daemon_->Kill();
  ASSERT_OK(daemon_->Restart());
  EXPECT_EQ(Device().carried_over_bytes(), 100_MiB) << "before anybody has connected";
  const RunResult status = RunProgram({VramctlProgram(), "status", "--socket-dir=" + dir()});
  EXPECT_TRUE(absl::StrContains(status.out, "Device 0: 100.00 MiB carried over")) << status.out;
  ASSERT_EQ(Quarantine().holdings_size(), 1);
  EXPECT_TRUE(Quarantine().holdings(0).carried_over());
  EXPECT_EQ(Quarantine().holdings(0).holders(0), getpid());
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  RawStream stream(raw);
  v1::SessionRequest hello = LeasingHello("mute");
  *hello.mutable_hello()->mutable_limit() = BytesLimit(128_MiB);
  ASSERT_OK(stream.Open(hello));
  EXPECT_EQ(Session("mute").reserved_bytes(), 100_MiB);
  EXPECT_EQ(Session("mute").carried_over_bytes(), 100_MiB);
  EXPECT_EQ(Quarantine().holdings_size(), 0);
}

// The allocator of a remote session is in the daemon, and does not know carried over memory.
TEST_F(CarriedOverTest, WhatARemoteSessionCarriesOverIsNeitherAllocatedNorFragmented) {
  HOST_DEVICE_ONLY();
  ASSERT_OK(StartDaemon({.capacity = "256MiB", .http = true}));
  placement_ = Placement::kRemote;
  ASSERT_OK_AND_ASSIGN(Client old, Connect("old"));
  ASSERT_OK_AND_ASSIGN(Buffer held, old.Allocate(100_MiB));
  daemon_->Kill();
  ASSERT_OK(daemon_->Restart());
  ASSERT_OK_AND_ASSIGN(Client next, Connect("next"));
  ASSERT_OK_AND_ASSIGN(Buffer buffer, next.Allocate(20_MiB));
  ASSERT_EQ(Session("next").carried_over_bytes(), 100_MiB);

  const auto ctl = [&](const char* command) {
    return RunProgram({VramctlProgram(), command, "--socket-dir=" + dir()}).out;
  };
  for (const char* command : {"map", "status", "sessions"}) {
    EXPECT_FALSE(absl::StrContains(ctl(command), "%") && !absl::StrContains(ctl(command), " 0.0%")) << ctl(command);
  }
  EXPECT_TRUE(absl::StrContains(ctl("map"), "unknown 100.00 MiB")) << ctl("map");
  EXPECT_FALSE(absl::StrContains(ctl("map"), "fragmented")) << ctl("map");
  const auto expect = [](const nlohmann::json& device) {
    EXPECT_EQ(device["unknown_bytes"], 100_MiB);
    EXPECT_EQ(device["allocated_bytes"], 20_MiB);
    EXPECT_EQ(device["inactive_split_bytes"], 0);
    EXPECT_EQ(device["fragmentation_ratio"], 0);
  };
  ASSERT_OK_AND_ASSIGN(const HttpAnswer state, daemon_->Get("/api/v1/state"));
  const nlohmann::json page = nlohmann::json::parse(state.body, nullptr, /*allow_exceptions=*/false);
  ASSERT_TRUE(page.is_object()) << state.body;
  expect(page["devices"][0]);
  expect(page["sessions"][0]["devices"][0]);
  const MetricsPage metrics = daemon_->Metrics();
  for (const char* name : {"device_fragmentation_ratio", "client_fragmentation_ratio", "device_cached_free_bytes",
                           "client_cached_free_bytes", "device_inactive_split_bytes", "client_inactive_split_bytes",
                           "client_idle_bytes"}) {
    EXPECT_EQ(metrics.Value(absl::StrCat("vrambroker_", name)), 0) << name;
  }
  // A refusal does not call carried over memory unused, either.
  const std::optional<OutOfMemory> refused = GetOutOfMemory(next.Allocate(200_MiB).status());
  ASSERT_TRUE(refused.has_value());
  EXPECT_EQ(refused->idle_bytes, 0u);
}

// A client that lies about its carried over memory harms no other client.
TEST_F(CarriedOverTest, WhatIsOnlySaidIsChargedToWhoSaysItWithinItsLimit) {
  HOST_DEVICE_ONLY();
  ASSERT_OK_AND_ASSIGN(ClientProcess holder, ConnectProcess("holder"));
  ASSERT_OK(holder.Call(absl::StrCat("alloc ", 40_MiB)));
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  RawStream stream(raw);
  v1::SessionRequest hello = LeasingHello("liar");
  *hello.mutable_hello()->mutable_limit() = BytesLimit(64_MiB);
  ASSERT_OK(stream.Open(hello));
  v1::SessionRequest message;
  for (uint64_t id = 1; id <= 100; ++id) {
    v1::CarriedOver::Segment& segment = *message.mutable_carried_over()->add_segments();
    segment.set_id(id);
    segment.set_segment_bytes(20_MiB);
    segment.set_file_inode(id % 2 == 0 ? id : 0);
  }
  ASSERT_TRUE(stream.Send(message));
  EXPECT_TRUE(WaitFor([&] { return Session("liar").carried_over_bytes() == 60_MiB; }))
      << Session("liar").carried_over_bytes();
  EXPECT_OK(holder.Call(absl::StrCat("alloc ", 150_MiB)));
  message.Clear();
  for (uint64_t id = 1; id <= 100; ++id) message.mutable_carried_over_freed()->add_ids(id);
  ASSERT_TRUE(stream.Send(message));
  EXPECT_TRUE(WaitFor([&] { return Session("liar").carried_over_bytes() == 0; }));
  message.Clear();
  message.mutable_carried_over()->add_segments()->set_segment_bytes(1);
  ASSERT_TRUE(stream.Send(message));
  EXPECT_STATUS(stream.End(), absl::StatusCode::kInvalidArgument, "carried_over.segments: ");
}

// Forked children of ended clients hold memory.
TEST_F(CarriedOverTest, WhatProcessesWithoutASessionHoldIsNamed) {
  HOST_DEVICE_ONLY();
  ASSERT_OK_AND_ASSIGN(ClientProcess parent, ConnectProcess("parent"));
  ASSERT_OK(parent.Call("fill 1 100000 1"));
  ASSERT_OK(parent.Call("fork"));
  daemon_->Kill();
  parent.process().Signal(SIGKILL);
  ASSERT_OK(parent.process().Wait());
  ASSERT_OK(daemon_->Restart());
  const v1::ListQuarantineResponse quarantine = Quarantine();
  ASSERT_EQ(quarantine.holdings_size(), 1);
  ASSERT_EQ(quarantine.holdings(0).holders_size(), 1);
  EXPECT_GT(Device().carried_over_bytes(), 0u);
  kill(quarantine.holdings(0).holders(0), SIGKILL);
  EXPECT_TRUE(WaitFor([&] { return Device().carried_over_bytes() == 0; }));
}

// The daemon runs as the service does: as a separate user with two capabilities. Such a daemon cannot see the creator
// of a file that a client of another user has mapped.
TEST_F(CarriedOverTest, ADaemonOfItsOwnUserCountsWhatClientsOfOthersHold) {
  HOST_DEVICE_ONLY();
  if (geteuid() != 0) GTEST_SKIP() << "only root can become other users";
  const std::string as_the_service = MakeTempDir() + "/as_the_service";
  std::ofstream(as_the_service) << R"(#!/bin/sh
for argument; do
  case $argument in --socket_dir=*) chown -R 54322 "${argument#*=}" ;; esac
done
capabilities=-all,+sys_ptrace,+checkpoint_restore
exec setpriv --reuid=54322 --regid=54322 --clear-groups --no-new-privs --pdeathsig=KILL \
  --bounding-set=$capabilities --inh-caps=$capabilities --ambient-caps=$capabilities "$@"
)";
  ASSERT_EQ(chmod(as_the_service.c_str(), 0755), 0);
  if (const RunResult can_run = RunProgram({as_the_service, "/usr/bin/test", "-x", DaemonProgram()});
      can_run.exit_code != 0) {
    GTEST_SKIP() << "not with the rights of this root, or in this folder: " << can_run.err;
  }
  ASSERT_OK(StartDaemon({.config = "socket_mode: '0666'", .runner = as_the_service}));
  const auto hold = [&](const char* name, uint64_t bytes) -> absl::StatusOr<ClientProcess> {
    absl::StatusOr<ClientProcess> client = ClientProcess::Start(dir());
    // A remote client does not reconnect, and so does not declare its memory.
    for (const std::string& command :
         {std::string("setuid 54321"), absl::StrCat("connect ", name, " - remote"), absl::StrCat("alloc ", bytes)}) {
      if (!client.ok()) break;
      if (absl::Status status = client->Call(command).status(); !status.ok()) return status;
    }
    return client;
  };
  ASSERT_OK_AND_ASSIGN(ClientProcess first, hold("first", 40_MiB));
  for (const auto& entry : std::filesystem::directory_iterator(absl::StrCat("/proc/", first.pid(), "/fd"))) {
    std::error_code gone;
    EXPECT_FALSE(absl::StrContains(std::filesystem::read_symlink(entry, gone).string(), "vrambroker-segment"));
  }
  // A daemon that stops frees its memory, and clients keep the memory all the same.
  const absl::StatusOr<int> stopped = daemon_->Stop();
  EXPECT_TRUE(stopped.ok() && *stopped == 0);
  ASSERT_OK(daemon_->Restart());
  EXPECT_EQ(Device().carried_over_bytes(), 40_MiB);
  ASSERT_OK_AND_ASSIGN(ClientProcess second, hold("second", 100_MiB));
  for (int restart = 0; restart < 2; ++restart) {
    daemon_->Kill();
    ASSERT_OK(daemon_->Restart());
    EXPECT_EQ(Device().carried_over_bytes(), 140_MiB) << restart;
  }
  const v1::ListQuarantineResponse quarantine = Quarantine();
  ASSERT_EQ(quarantine.holdings_size(), 2);
  EXPECT_EQ(quarantine.holdings(0).holders(0) + quarantine.holdings(1).holders(0), first.pid() + second.pid());
  second.process().Signal(SIGKILL);
  EXPECT_TRUE(WaitFor([&] { return Device().carried_over_bytes() == 40_MiB; }));
  daemon_->Kill();
  ASSERT_OK(daemon_->Restart());
  EXPECT_EQ(Device().carried_over_bytes(), 40_MiB);
}

// Daemons in containers have the same path, but different directories.
TEST_F(CarriedOverTest, WhatAnotherDaemonOfTheSamePathHasGivenIsNotOurs) {
  HOST_DEVICE_ONLY();
  placement_ = Placement::kRemote;  // a remote client does not reconnect
  ASSERT_OK_AND_ASSIGN(Client client, Connect("of_the_first"));
  ASSERT_OK_AND_ASSIGN(Buffer held, client.Allocate(100_MiB));
  daemon_->Kill();
  const std::string aside = dir() + ".first";
  std::filesystem::rename(dir(), aside);
  std::filesystem::create_directory(dir());
  std::filesystem::copy(aside + "/config.textproto", dir());
  ASSERT_OK(daemon_->Restart());
  EXPECT_EQ(Device().carried_over_bytes(), 0u);
  daemon_->Kill();
  std::filesystem::remove_all(dir());
  std::filesystem::rename(aside, dir());
  ASSERT_OK(daemon_->Restart());
  EXPECT_EQ(Device().carried_over_bytes(), 100_MiB);
}

// A daemon on a GPU cannot look for itself: only the client's messages tell the daemon about freed memory.
TEST_F(CarriedOverTest, WhatIsFreedIsKnownAlsoWhenTheMessageWasLost) {
  const std::string proxy_dir = MakeTempDir();
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Proxy> proxy, Proxy::Start(proxy_dir, dir()));
  ASSERT_OK_AND_ASSIGN(
      Client client,
      Client::Connect(
          {.socket_dir = proxy_dir, .name = "cut_off", .connect_timeout = kPatience, .call_timeout = kPatience}));
  ASSERT_OK_AND_ASSIGN(Buffer kept, client.Allocate(40_MiB));
  ASSERT_OK_AND_ASSIGN(Buffer freed, client.Allocate(60_MiB));
  Fill(kept, 4096, 1);
  daemon_->Kill();
  ASSERT_TRUE(WaitFor([&] { return absl::IsUnavailable(client.status()); }));
  EXPECT_OK(client.EmptyCache());
  ASSERT_OK(daemon_->Restart());
  ASSERT_TRUE(WaitFor([&] { return client.status().ok(); })) << client.status();
  EXPECT_TRUE(WaitFor([&] { return Session("cut_off").carried_over_bytes() == 100_MiB; }));
  proxy->Swallow();
  EXPECT_OK(freed.Reset());
  EXPECT_OK(client.EmptyCache());
  proxy->Break();
  EXPECT_TRUE(WaitFor([&] { return Session("cut_off").carried_over_bytes() == 40_MiB; }))
      << Session("cut_off").carried_over_bytes();
  EXPECT_TRUE(Holds(kept, 4096, 1));
}

// A message names at most 1024 segments that the client holds, or 4096 segments that the client has freed.
TEST_F(CarriedOverTest, ManySegmentsAreNamedInSeveralMessages) {
  ASSERT_OK(StartDaemon({.capacity = "16GiB"}));
  // The daemon may see which files the process holds, but only messages tell the process's two sessions apart.
  ASSERT_OK_AND_ASSIGN(Client whole, Connect("whole"));
  ASSERT_OK_AND_ASSIGN(Client cached, Connect("cached"));
  std::vector<void*> segments;
  for (int i = 0; i < 1025; ++i) {
    ASSERT_OK_AND_ASSIGN(void* const segment, whole.LeaseSegment(2_MiB));
    segments.push_back(segment);
  }
  std::vector<Buffer> buffers;
  for (int i = 0; i < 2 * 4097; ++i) {  // two buffers fill a segment
    ASSERT_OK_AND_ASSIGN(Buffer buffer, cached.Allocate(1_MiB));
    buffers.push_back(std::move(buffer));
  }
  ASSERT_NO_FATAL_FAILURE(Restart({&whole, &cached}));
  const auto carries = [this](const std::string& name, uint64_t count) {
    return WaitFor([&] { return Session(name).carried_over_bytes() == count * 2_MiB; });
  };
  EXPECT_TRUE(carries("whole", 1025)) << Session("whole").carried_over_bytes();
  EXPECT_TRUE(carries("cached", 4097)) << Session("cached").carried_over_bytes();
  while (segments.size() > 1) {
    EXPECT_OK(whole.ReturnSegment(segments.back()));
    segments.pop_back();
  }
  EXPECT_TRUE(carries("whole", 1)) << Session("whole").carried_over_bytes();
  EXPECT_OK(whole.ReturnSegment(segments[0]));
  EXPECT_TRUE(carries("whole", 0)) << Session("whole").carried_over_bytes();
  buffers.clear();
  EXPECT_OK(cached.EmptyCache());
  EXPECT_TRUE(carries("cached", 0)) << Session("cached").carried_over_bytes();
  EXPECT_FALSE(absl::StrContains(daemon_->log(), "session disconnected")) << "no message was too large";
}

// The daemon could otherwise lease more than the limits allow, before the daemon knows the client's carried over
// memory.
TEST_F(CarriedOverTest, ALeaseDoesNotOvertakeTheListOfIt) {
  const std::string proxy_dir = MakeTempDir();
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Proxy> proxy, Proxy::Start(proxy_dir, dir()));
  ASSERT_OK_AND_ASSIGN(
      Client client,
      Client::Connect(
          {.socket_dir = proxy_dir, .name = "orderly", .connect_timeout = kPatience, .call_timeout = kPatience}));
  ASSERT_OK_AND_ASSIGN(Buffer held, client.Allocate(40_MiB));
  EXPECT_EQ(proxy->segment_calls(), 1);
  daemon_->Kill();
  ASSERT_TRUE(WaitFor([&] { return absl::IsUnavailable(client.status()); }));
  ASSERT_OK(daemon_->Restart());
  ASSERT_TRUE(WaitFor([&] { return client.status().ok(); })) << client.status();
  std::vector<Buffer> buffers;
  const auto lease = [&] {
    ASSERT_OK_AND_ASSIGN(Buffer buffer, client.Allocate(20_MiB));
    buffers.push_back(std::move(buffer));
  };
  ASSERT_NO_FATAL_FAILURE(lease());
  EXPECT_EQ(proxy->segment_calls(), 1) << "the first comes after what was said, on the same stream";
  ASSERT_NO_FATAL_FAILURE(lease());
  EXPECT_EQ(proxy->segment_calls(), 2);
  EXPECT_OK(held.Reset());
  EXPECT_OK(client.EmptyCache());
  ASSERT_NO_FATAL_FAILURE(lease());
  EXPECT_EQ(proxy->segment_calls(), 2);
  ASSERT_NO_FATAL_FAILURE(lease());
  EXPECT_EQ(proxy->segment_calls(), 3);
}

// The next daemon may not count memory of an earlier daemon.
TEST_F(CarriedOverTest, TheClientHoldsItselfToItsLimit) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("client"));
  ASSERT_OK_AND_ASSIGN(const Buffer first, client.Allocate(20_MiB));
  ASSERT_OK_AND_ASSIGN(const Buffer second, client.Allocate(30_MiB));
  daemon_->Kill();
  ASSERT_TRUE(WaitFor([&] { return absl::IsUnavailable(client.status()); }));
  PlayedDaemon next(dir(), client.devices(), /*limit_bytes=*/64_MiB);
  ASSERT_TRUE(WaitFor([&] { return client.status().ok(); })) << client.status();
  EXPECT_STATUS(client.TryLeaseSegment(16_MiB), absl::StatusCode::kResourceExhausted,
                "the session's limit of 64.00 MiB is used up: it holds 50.00 MiB, in part from an earlier run");
  EXPECT_EQ(next.leases(), 0);
  EXPECT_STATUS(client.TryLeaseSegment(14_MiB), absl::StatusCode::kInternal, "only played");
  EXPECT_EQ(next.leases(), 1);
}

// A daemon may ask for memory of any device.
TEST_F(CarriedOverTest, ATrimOfSeveralDevicesEndsWithTheBytesThatAreWanted) {
  if (OnCuda() && !OnSubstitute()) GTEST_SKIP() << "needs two devices";
  ASSERT_OK(StartDaemon({.devices = 2}));
  ASSERT_OK_AND_ASSIGN(Client client, Connect("client"));
  std::vector<Buffer> buffers;
  for (const int device : {0, 1, 1}) {
    ASSERT_OK_AND_ASSIGN(Buffer buffer, client.Allocate(20_MiB, device));
    buffers.push_back(std::move(buffer));
  }
  daemon_->Kill();
  ASSERT_TRUE(WaitFor([&] { return absl::IsUnavailable(client.status()); }));
  PlayedDaemon next(dir(), client.devices(), /*limit_bytes=*/256_MiB);
  ASSERT_TRUE(WaitFor([&] { return client.status().ok(); })) << client.status();
  v1::Question stats;
  stats.mutable_stats();
  next.Ask(stats);  // by the answer, the client has given back all that was idle when it connected
  buffers.clear();
  v1::Question trim;
  trim.mutable_trim()->set_bytes(30_MiB);
  EXPECT_EQ(next.Ask(trim).released_bytes(), 40_MiB) << "20 MiB of the first device, then 10 MiB are missing";
  EXPECT_EQ(client.GetMemoryStats(0)->reserved_bytes.all.current, 0u);
  EXPECT_EQ(client.GetMemoryStats(1)->reserved_bytes.all.current, 20_MiB);
}

// Memory of clients on a GPU is not free when the daemon starts again. The capacity and the limits would shrink at each
// start; the daemon of this test would not start at all.
TEST_F(CarriedOverTest, TheDefaultCapacityStaysWhatItWas) {
  if (!OnSubstitute()) GTEST_SKIP() << "a GPU of known size, and nobody else's";
  const auto free_bytes_saved = [&] {
    std::ifstream file(dir() + "/vrambroker.state");
    return absl::StrContains(std::string(std::istreambuf_iterator<char>(file), {}), "free ");
  };
  ASSERT_OK(StartDaemon({.capacity = "", .config = "headroom: \"1GiB\""}));
  const uint64_t free = Device().capacity_bytes() + 1_GiB;
  ASSERT_OK(StartDaemon({.capacity = "", .config = absl::StrCat("headroom: \"", (free - 256_MiB) >> 20, "MiB\"")}));
  ASSERT_EQ(Device().capacity_bytes(), 256_MiB);
  ASSERT_OK_AND_ASSIGN(Client first, Connect("first", Limit(0.5)));
  ASSERT_OK_AND_ASSIGN(Client second, Connect("second"));
  ASSERT_OK_AND_ASSIGN(Buffer a, first.Allocate(100_MiB));
  ASSERT_OK_AND_ASSIGN(Buffer b, second.Allocate(156_MiB));
  for (int restart = 0; restart < 2; ++restart) {
    EXPECT_TRUE(free_bytes_saved());
    ASSERT_NO_FATAL_FAILURE(Restart({&first, &second}));
    EXPECT_EQ(Device().capacity_bytes(), 256_MiB);
    EXPECT_EQ(first.limit_bytes(), 128_MiB);
    EXPECT_TRUE(WaitFor([&] { return Session("first").carried_over_bytes() == 100_MiB; }));
    EXPECT_TRUE(WaitFor([&] { return Session("second").carried_over_bytes() == 156_MiB; }));
    EXPECT_EQ(GetOutOfMemory(first.Allocate(20_MiB).status()).value_or(OutOfMemory()).cause,
              OutOfMemory::Cause::kCapacity);
  }
  EXPECT_OK(b.Reset());
  EXPECT_OK(second.EmptyCache());
  EXPECT_TRUE(WaitFor([&] { return first.Allocate(20_MiB).ok(); })) << "when the driver has it";
  EXPECT_OK(a.Reset());
  EXPECT_OK(first.EmptyCache());
  EXPECT_TRUE(WaitFor([&] { return second.Allocate(256_MiB).ok(); }));
  EXPECT_EQ(Device().carried_over_bytes(), 0u);
  // The daemon stops while no client holds memory: the next daemon then takes the free memory of its own start.
  EXPECT_OK(second.EmptyCache());
  EXPECT_TRUE(WaitFor([&] { return Session("first").reserved_bytes() + Session("second").reserved_bytes() == 0; }));
  ASSERT_OK(daemon_->Stop());
  EXPECT_FALSE(free_bytes_saved());
}

}  // namespace
}  // namespace vrambroker::testing_support
