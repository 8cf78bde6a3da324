// SPDX-License-Identifier: Apache-2.0
//
// Processes sharing a device: processes that share memory see the same bytes, and other processes see no such bytes.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <set>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "allocator/base/bytes.h"
#include "client/connection/descriptor_channel.h"
#include "tests/support/buffers.h"
#include "tests/support/daemon_test.h"
#include "tests/support/raw_client.h"
#include "tests/support/test_device.h"

namespace vrambroker::testing_support {
namespace {

class SharingTest : public DaemonTest {
 protected:
  // Returns the bytes leased by sessions; idle segments belong to no session.
  static uint64_t Charged(const v1::Device& device) { return device.reserved_bytes() - device.idle_bytes(); }
};

TEST_F(SharingTest, TwoMappingsOfASegmentAreTheSameBytes) {
  HOST_DEVICE_ONLY();
  ASSERT_OK(StartDaemon());
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  RawStream stream(raw);
  ASSERT_OK_AND_ASSIGN(const v1::Welcome welcome, stream.Hello());
  ASSERT_OK_AND_ASSIGN(const v1::AllocateResponse block, raw.Allocate(welcome.session_id(), 1000));
  EXPECT_EQ(block.block_bytes(), 1024u);
  EXPECT_EQ(block.segment_bytes(), 2_MiB);
  ASSERT_OK_AND_ASSIGN(const UniqueFd descriptor,
                       client_internal::DescriptorChannel(dir()).Fetch(block.handle().descriptor_ticket(), kPatience));
  void* first = mmap(nullptr, 2_MiB, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor.get(), 0);
  void* second = mmap(nullptr, 2_MiB, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor.get(), 0);
  ASSERT_NE(first, MAP_FAILED);
  ASSERT_NE(second, MAP_FAILED);
  ASSERT_NE(first, second);
  Fill(static_cast<char*>(first) + block.offset_bytes(), 1000, 42);
  EXPECT_TRUE(Holds(static_cast<char*>(second) + block.offset_bytes(), 1000, 42));
  munmap(first, 2_MiB);
  EXPECT_TRUE(Holds(static_cast<char*>(second) + block.offset_bytes(), 1000, 42));
  munmap(second, 2_MiB);
  EXPECT_OK(stream.Goodbye());
}

TEST_F(SharingTest, ANewSegmentIsZeroed) {
  if (OnSubstitute()) GTEST_SKIP() << "a GPU's driver clears it on its way from another process; this one does not";
  ASSERT_OK(StartDaemon());
  ASSERT_OK_AND_ASSIGN(Client client, Connect("zero"));
  ASSERT_OK_AND_ASSIGN(Buffer buffer, client.Allocate(4_MiB));
  EXPECT_TRUE(IsZero(buffer));
}

TEST_F(SharingTest, WriteAndReadCopyWithinBounds) {
  ASSERT_OK(StartDaemon());
  ASSERT_OK_AND_ASSIGN(Client client, Connect("copy"));
  ASSERT_OK_AND_ASSIGN(Buffer buffer, client.Allocate(1000));
  std::vector<char> text(1000, 'x');
  std::vector<char> back(1000);
  EXPECT_OK(buffer.Write(0, text.data(), 1000));
  EXPECT_OK(buffer.Read(0, back.data(), 1000));
  EXPECT_EQ(text, back);
  EXPECT_OK(buffer.Write(1000, text.data(), 0));
  EXPECT_STATUS(buffer.Write(1, text.data(), 1000), absl::StatusCode::kOutOfRange, "1000");
  EXPECT_STATUS(buffer.Read(~uint64_t{0}, back.data(), 2), absl::StatusCode::kOutOfRange, "");
  EXPECT_STATUS(client.Allocate(0), absl::StatusCode::kInvalidArgument, "bytes");
  EXPECT_STATUS(client.Allocate(1, 1), absl::StatusCode::kNotFound, "device");
  EXPECT_STATUS(client.Allocate(1, -1), absl::StatusCode::kNotFound, "device");
  EXPECT_EQ(client.limit_bytes(7), 0u);
  // The tests' own check of memory sees a single wrong byte, and the pattern of another seed.
  ASSERT_OK_AND_ASSIGN(Buffer large, client.Allocate(1_MiB));
  Fill(large, 3);
  EXPECT_TRUE(Holds(large, 3));
  EXPECT_FALSE(Holds(large, 4));
  EXPECT_OK(large.Write(700'000, "\1", 1));
  EXPECT_FALSE(Holds(large, 3));
  EXPECT_FALSE(IsZero(large));
}

TEST_F(SharingTest, ManyProcessesNeverSeeEachOthersBytes) {
  ASSERT_OK(StartDaemon());
  std::vector<ClientProcess> clients;
  for (int i = 0; i < 6; ++i) {
    ASSERT_OK_AND_ASSIGN(ClientProcess client, ConnectProcess("writer"));
    clients.push_back(std::move(client));
  }
  // Processes run at once: each process writes 40 buffers with its own pattern, then finds the buffers unchanged.
  for (size_t i = 0; i < clients.size(); ++i) ASSERT_OK(clients[i].Send(absl::StrCat("fill 40 50000 ", i * 1000)));
  for (ClientProcess& client : clients) EXPECT_OK(client.Receive());
  for (size_t i = 0; i < clients.size(); ++i) EXPECT_OK(clients[i].Call(absl::StrCat("check ", i * 1000)));
  // Writes again, into memory that has been used before.
  for (size_t i = 0; i < clients.size(); i += 2) {
    EXPECT_OK(clients[i].Call("goodbye"));
    ASSERT_OK_AND_ASSIGN(clients[i], ConnectProcess("writer"));
    EXPECT_OK(clients[i].Call(absl::StrCat("fill 40 50000 ", i * 1000 + 500)));
  }
  for (size_t i = 1; i < clients.size(); i += 2) EXPECT_OK(clients[i].Call(absl::StrCat("check ", i * 1000)));
}

TEST_F(SharingTest, SegmentsOfSessionsAreDisjointAndBlocksDoNotOverlap) {
  ASSERT_OK(StartDaemon());
  std::set<uint64_t> seen;
  std::vector<Client> clients;
  std::vector<Buffer> buffers;
  for (int i = 0; i < 4; ++i) {
    ASSERT_OK_AND_ASSIGN(Client client, Connect("disjoint"));
    EXPECT_EQ(client.name(), i == 0 ? "disjoint" : absl::StrCat("disjoint-", i + 1));
    std::set<uint64_t> own;
    std::set<std::pair<uint64_t, uint64_t>> starts;
    for (const uint64_t bytes : {100_KiB, 1_MiB, 2_MiB, 12_MiB, 300_KiB, 700_KiB, 5_MiB}) {
      ASSERT_OK_AND_ASSIGN(Buffer buffer, client.Allocate(bytes));
      own.insert(buffer.segment_id());
      EXPECT_TRUE(starts.insert({buffer.segment_id(), buffer.offset_bytes()}).second);
      Fill(buffer, buffers.size());
      buffers.push_back(std::move(buffer));
    }
    for (const uint64_t segment : own) EXPECT_TRUE(seen.insert(segment).second) << "segment " << segment;
    clients.push_back(std::move(client));
  }
  for (size_t i = 0; i < buffers.size(); ++i) EXPECT_TRUE(Holds(buffers[i], i)) << i;
}

TEST_F(SharingTest, ManyProcessesAtOnceAndAllMemoryComesBack) {
  // A process on a real GPU has a CUDA context, which takes half a GiB and half a second.
  const int count = OnCuda() && !OnSubstitute() ? 16 : kSanitized ? 24 : 64;
  ASSERT_OK(StartDaemon({.capacity = "1GiB", .config = "idle_decay: \"300ms\""}));
  std::vector<ClientProcess> clients;
  for (int i = 0; i < count; ++i) {
    ASSERT_OK_AND_ASSIGN(ClientProcess client, ClientProcess::Start(dir()));
    clients.push_back(std::move(client));
  }
  const auto all = [&](const std::function<std::string(size_t)>& command) {
    for (size_t i = 0; i < clients.size(); ++i) EXPECT_OK(clients[i].Send(command(i)));
    for (ClientProcess& client : clients) EXPECT_OK(client.Receive());
  };
  all([](size_t i) { return absl::StrCat("connect rank", i, " 16MiB"); });
  all([](size_t i) { return absl::StrCat("fill 5 60000 ", i * 100); });
  all([](size_t i) { return absl::StrCat("check ", i * 100); });

  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  ASSERT_OK_AND_ASSIGN(const v1::ListSessionsResponse sessions, raw.ListSessions());
  EXPECT_EQ(sessions.sessions_size(), count);
  ASSERT_OK_AND_ASSIGN(v1::Device device, raw.GetDevice());
  EXPECT_EQ(Charged(device), static_cast<uint64_t>(count) * 2_MiB);

  // Processes with even numbers say goodbye; processes with odd numbers are killed.
  for (size_t i = 0; i < clients.size(); ++i) {
    if (i % 2 == 0) {
      EXPECT_OK(clients[i].Call("goodbye"));
    } else {
      clients[i].process().Signal(SIGKILL);
    }
  }
  EXPECT_TRUE(WaitFor([&] {
    const absl::StatusOr<v1::ListSessionsResponse> left = raw.ListSessions();
    return left.ok() && left->sessions().empty();
  }));
  // Memory first becomes idle, then goes back to the driver.
  EXPECT_TRUE(WaitFor([&] {
    const absl::StatusOr<v1::Device> now = raw.GetDevice();
    return now.ok() && now->reserved_bytes() == 0 && now->idle_bytes() == 0;
  }));
}

TEST_F(SharingTest, NoMoreStaysIdleThanTheIdleLimit) {
  ASSERT_OK(StartDaemon({.config = "idle_decay: \"1h\"", .flags = {"--idle_limit=40MiB"}}));
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  ASSERT_OK_AND_ASSIGN(Client client, Connect("idle"));
  {
    std::vector<Buffer> buffers;
    for (int i = 0; i < 5; ++i) {
      ASSERT_OK_AND_ASSIGN(Buffer buffer, client.Allocate(20_MiB));
      buffers.push_back(std::move(buffer));
    }
  }
  EXPECT_OK(client.EmptyCache());
  EXPECT_TRUE(WaitFor([&] {
    const absl::StatusOr<v1::Device> now = raw.GetDevice();
    return now.ok() && now->reserved_bytes() == 40_MiB && now->idle_bytes() == 40_MiB;
  }));
}

TEST_F(SharingTest, AnOperatorHasIdleMemoryReleased) {
  HOST_DEVICE_ONLY();
  ASSERT_OK(StartDaemon({.config = "idle_decay: \"1h\"", .devices = 2}));
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  ASSERT_OK_AND_ASSIGN(Client client, Connect("idle"));
  ASSERT_OK_AND_ASSIGN(const Buffer kept, client.Allocate(20_MiB));
  EXPECT_OK(client.Allocate(40_MiB));
  EXPECT_OK(client.EmptyCache());
  ASSERT_OK_AND_ASSIGN(const v1::Device before, raw.GetDevice());
  EXPECT_EQ(before.idle_bytes(), 40_MiB);
  const auto release = [&](const Arguments& more) {
    Arguments arguments = {VramctlProgram(), "release", "--socket-dir=" + dir()};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return RunProgram(arguments);
  };
  EXPECT_EQ(release({"--device=1"}).out, "0 B went back to the driver\n");
  EXPECT_EQ(release({}).out, "40.00 MiB went back to the driver\n");
  ASSERT_OK_AND_ASSIGN(const v1::Device after, raw.GetDevice());
  EXPECT_EQ(after.idle_bytes(), 0u);
  EXPECT_EQ(after.reserved_bytes(), 20_MiB) << "what is held is left alone";
  const RunResult unknown = release({"--device=2"});
  EXPECT_NE(unknown.exit_code, 0);
  EXPECT_TRUE(absl::StrContains(unknown.err, "no device 2; the daemon has 2 devices")) << unknown.err;
}

TEST_F(SharingTest, TheOptionForTheIdleDecayOverridesTheConfiguration) {
  ASSERT_OK(StartDaemon({.config = "idle_decay: \"1h\"", .flags = {"--idle-decay=0s"}}));
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  ASSERT_OK_AND_ASSIGN(Client client, Connect("idle"));
  EXPECT_OK(client.Allocate(20_MiB));
  EXPECT_OK(client.EmptyCache());
  EXPECT_TRUE(WaitFor([&] {
    const absl::StatusOr<v1::Device> now = raw.GetDevice();
    return now.ok() && now->reserved_bytes() == 0 && now->idle_bytes() == 0;
  }));
}

TEST_F(SharingTest, ASimulatedDriverIsWarnedAbout) {
  HOST_DEVICE_ONLY();
  ASSERT_OK(StartDaemon({.flags = {"--host_driver_latency=20ms"}}));
  EXPECT_TRUE(absl::StrContains(daemon_->log(), "simulated driver latency 20ms")) << daemon_->log();
  EXPECT_TRUE(absl::StrContains(daemon_->log(), "for benchmarks only"));
  ASSERT_OK_AND_ASSIGN(Client client, Connect("patient"));
  const absl::Time start = absl::Now();
  EXPECT_OK(client.Allocate(1));
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(20));
}

TEST_F(SharingTest, EveryCallIsAttributedToTheProcessThatMakesIt) {
  ASSERT_OK(StartDaemon());
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  // Rounds let new processes reuse the daemon's descriptor numbers.
  for (int round = 0; round < 3; ++round) {
    std::vector<ClientProcess> clients;
    std::vector<std::string> ids;
    for (int i = 0; i < 12; ++i) {
      ASSERT_OK_AND_ASSIGN(ClientProcess client, ClientProcess::Start(dir()));
      clients.push_back(std::move(client));
    }
    for (ClientProcess& client : clients) ASSERT_OK(client.Send(absl::StrCat("connect p", client.pid(), " - remote")));
    for (ClientProcess& client : clients) {
      ASSERT_OK_AND_ASSIGN(const std::vector<std::string> words, client.Receive());
      ids.push_back(words[0]);
    }
    for (size_t i = 0; i < clients.size(); ++i) {
      ASSERT_OK_AND_ASSIGN(const v1::Session session, raw.GetSession(Ref(absl::StrCat("p", clients[i].pid()))));
      EXPECT_EQ(session.pid(), clients[i].pid());
      EXPECT_EQ(session.uid(), getuid());
      EXPECT_EQ(session.gid(), getgid());
      // The daemon accepts a new connection of the same process, and refuses a connection of another process.
      EXPECT_OK(clients[i].Call(absl::StrCat("allocate_raw ", ids[i], " 1000")));
      const std::string& other = ids[(i + 1) % ids.size()];
      for (const char* call : {"allocate_raw", "free_raw", "empty_raw", "stats_raw", "reset_raw"}) {
        EXPECT_STATUS(clients[i].Call(absl::StrCat(call, " ", other, " 1")), absl::StatusCode::kPermissionDenied,
                      "belongs to another process");
      }
    }
    ASSERT_OK_AND_ASSIGN(const v1::ListSessionsResponse sessions, raw.ListSessions());
    EXPECT_EQ(static_cast<size_t>(sessions.sessions_size()), clients.size());
    for (const v1::Session& session : sessions.sessions()) {
      EXPECT_EQ(session.devices(0).stats().allocation().all().current(), 1u) << session.name();
      EXPECT_EQ(session.name(), absl::StrCat("p", session.pid()));
    }
    clients.clear();
    EXPECT_TRUE(WaitFor([&] {
      const absl::StatusOr<v1::ListSessionsResponse> left = raw.ListSessions();
      return left.ok() && left->sessions().empty();
    }));
  }
}

TEST_F(SharingTest, OneClientInEightThreads) {
  ASSERT_OK(StartDaemon({.capacity = "512MiB"}));
  ASSERT_OK_AND_ASSIGN(Client client, Connect("threads"));
  std::atomic<int> failures{0};
  const int rounds = kSanitized ? 60 : 300;
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      std::vector<std::pair<uint64_t, Buffer>> held;
      uint64_t random = t + 1;
      for (int i = 0; i < rounds; ++i) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        // Blocks are mostly small. Some have a separate segment, so that segments come and go.
        const uint64_t bytes = (random >> 60) == 0 ? 12_MiB : 1 + (random >> 33) % 100000;
        absl::StatusOr<Buffer> buffer = client.Allocate(bytes);
        if (!buffer.ok()) {
          ADD_FAILURE() << buffer.status();
          ++failures;
          break;
        }
        const uint64_t seed = t * 1000000 + static_cast<uint64_t>(i);
        Fill(*buffer, std::min<uint64_t>(bytes, 4096), seed);
        held.emplace_back(seed, *std::move(buffer));
        if (held.size() > 5) {
          auto& [old_seed, old] = held[(random >> 20) % held.size()];
          if (!Holds(old, std::min<uint64_t>(old.size(), 4096), old_seed)) ++failures;
          if (!old.Reset().ok()) ++failures;
          std::swap(held[(random >> 20) % held.size()], held.back());
          held.pop_back();
        }
        if (i % 37 == 0 && !client.EmptyCache().ok()) ++failures;
      }
      for (const auto& [seed, buffer] : held) {
        if (!Holds(buffer, std::min<uint64_t>(buffer.size(), 4096), seed)) ++failures;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failures, 0);
  ASSERT_OK_AND_ASSIGN(const MemoryStats stats, client.GetMemoryStats());
  EXPECT_EQ(stats.allocation.all.current, 0u);
  EXPECT_EQ(stats.allocation.all.allocated, 8u * static_cast<uint64_t>(rounds));
  EXPECT_EQ(stats.allocated_bytes.all.current, 0u);
  EXPECT_OK(client.EmptyCache());
  ASSERT_OK_AND_ASSIGN(const MemoryStats empty, client.GetMemoryStats());
  EXPECT_EQ(empty.reserved_bytes.all.current, 0u);
  EXPECT_OK(client.ResetPeakStats());
  ASSERT_OK_AND_ASSIGN(const MemoryStats reset, client.GetMemoryStats());
  EXPECT_EQ(reset.allocated_bytes.all.peak, 0u);
}

TEST_F(SharingTest, AForkedChildIsRefusedAndTheParentGoesOn) {
  ASSERT_OK(StartDaemon());
  auto client = Connect("parent");
  ASSERT_OK(client);
  ASSERT_OK_AND_ASSIGN(Buffer buffer, client->Allocate(1000));
  Fill(buffer, 1000, 9);
  // Waits until the reporting thread is quiet: the child would inherit a lock held by the thread for ever.
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  ASSERT_TRUE(WaitFor([&] {
    const absl::StatusOr<v1::ListSessionsResponse> list = raw.ListSessions();
    return list.ok() && list->sessions(0).devices(0).stats().allocation().all().current() == 1;
  }));
  const pid_t child = fork();
  if (child == 0) {
    // Calls in the child must not hang, crash, or speak for the parent. _exit: the child still runs the test's program.
    if (!absl::IsFailedPrecondition(client->status())) _exit(1);
    if (!absl::IsFailedPrecondition(client->Allocate(1000).status())) _exit(2);
    if (!absl::IsFailedPrecondition(client->EmptyCache().status())) _exit(3);
    if (!absl::StrContains(client->status().message(), "fork")) _exit(4);
    // Connecting is refused as well: gRPC would not survive the fork.
    if (!absl::IsFailedPrecondition(Connect("child").status())) _exit(7);
    if (!OnCuda() && !Holds(buffer, 1000, 9)) _exit(5);  // CUDA does not work in the child of a CUDA user
    if (!absl::IsFailedPrecondition(buffer.Reset())) _exit(6);
    client = absl::CancelledError();  // destroys the last reference
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "step " << status;
  EXPECT_OK(client->status());
  EXPECT_OK(client->Allocate(1000));
  EXPECT_TRUE(Holds(buffer, 1000, 9));
  EXPECT_OK(buffer.Reset());
}

TEST_F(SharingTest, SeveralDevicesAreSeparate) {
  ASSERT_OK(StartDaemon({.capacity = "64MiB", .devices = 2}));
  ASSERT_OK_AND_ASSIGN(Client client, Connect("two", Limit(0.5)));
  ASSERT_EQ(client.devices().size(), 2u);
  EXPECT_NE(client.devices()[0].uuid, client.devices()[1].uuid);
  ASSERT_OK_AND_ASSIGN(Buffer a, client.Allocate(32_MiB, 0));
  ASSERT_OK_AND_ASSIGN(Buffer b, client.Allocate(32_MiB, 1));
  EXPECT_EQ(b.device(), 1);
  EXPECT_NE(a.segment_id(), b.segment_id());
  Fill(a, 1);
  Fill(b, 2);
  EXPECT_TRUE(Holds(a, 1));
  EXPECT_STATUS(client.Allocate(1, 1), absl::StatusCode::kResourceExhausted, "device 1");
  EXPECT_OK(b.Reset());
  ASSERT_OK_AND_ASSIGN(const MemoryStats first, client.GetMemoryStats(0));
  ASSERT_OK_AND_ASSIGN(const MemoryStats second, client.GetMemoryStats(1));
  EXPECT_EQ(first.allocated_bytes.all.current, 32_MiB);
  EXPECT_EQ(second.allocated_bytes.all.current, 0u);
}

TEST_F(SharingTest, OnlyTheDeviceThatLacksMemoryIsAskedForIt) {
  if (OnCuda() && !OnSubstitute()) GTEST_SKIP() << "needs two devices";
  ASSERT_OK(StartDaemon({.devices = 2}));
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  ASSERT_OK_AND_ASSIGN(Client holder, Connect("holder"));
  for (const int device : {0, 1}) EXPECT_OK(holder.Allocate(200_MiB, device)) << "stays in the cache";
  ASSERT_OK_AND_ASSIGN(const v1::Session before, raw.GetSession(Ref("holder")));
  EXPECT_EQ(before.devices(1).idle_bytes(), 200_MiB) << "the daemon goes by what it knows";
  ASSERT_OK_AND_ASSIGN(Client taker, Connect("taker"));
  EXPECT_OK(taker.Allocate(100_MiB, 1));
  ASSERT_OK_AND_ASSIGN(const v1::Session after, raw.GetSession(Ref("holder")));
  EXPECT_EQ(after.devices(0).reserved_bytes(), 200_MiB);
  EXPECT_EQ(after.devices(1).reserved_bytes(), 0u);
}

}  // namespace
}  // namespace vrambroker::testing_support
