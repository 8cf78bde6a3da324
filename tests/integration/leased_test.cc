// SPDX-License-Identifier: Apache-2.0
//
// Clients with their own allocator over leased segments: the client's view, the daemon's view, and the end of a client
// or of the daemon.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "allocator/base/bytes.h"
#include "allocator/base/mutex.h"
#include "tests/support/buffers.h"
#include "tests/support/daemon_test.h"
#include "tests/support/proxy.h"
#include "tests/support/raw_client.h"

namespace vrambroker::testing_support {
namespace {

class LeasedTest : public DaemonTest {
 protected:
  // The client's log lines.
  struct Log {
    Mutex mu;
    std::vector<std::string> lines ABSL_GUARDED_BY(mu);

    bool Has(const std::string& text) {
      MutexLock lock(mu);
      return std::any_of(lines.begin(), lines.end(),
                         [&](const std::string& line) { return absl::StrContains(line, text); });
    }
  };

  ClientOptions Options(const std::string& name) {
    ClientOptions options;
    options.socket_dir = dir();
    options.name = name;
    options.call_timeout = kPatience;
    options.connect_timeout = kPatience;
    options.log = [log = log_](const std::string& line) {
      MutexLock lock(log->mu);
      log->lines.push_back(line);
    };
    return options;
  }
  // Returns the daemon's view of a session without asking the session's client; zeros if there is no such session.
  v1::SessionDevice Listed(const std::string& name) { return ListedDevice(dir(), name); }
  // Returns the session's figures of this moment: the daemon asks the client.
  v1::SessionDevice Asked(const std::string& name) {
    absl::StatusOr<RawClient> raw = RawClient::Connect(dir());
    if (!raw.ok()) return {};
    const absl::StatusOr<v1::Session> session = raw->GetSession(Ref(name));
    return session.ok() ? session->devices(0) : v1::SessionDevice();
  }
  uint64_t DeviceReserved() {
    absl::StatusOr<RawClient> raw = RawClient::Connect(dir());
    if (!raw.ok()) return ~uint64_t{0};
    const absl::StatusOr<v1::Device> device = raw->GetDevice();
    return device.ok() ? device->reserved_bytes() : ~uint64_t{0};
  }

  std::shared_ptr<Log> log_ = std::make_shared<Log>();
};

TEST_F(LeasedTest, HitsMakeNoCalls) {
  ASSERT_OK(StartDaemon());
  ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(Options("quiet")));
  EXPECT_OK(client.Allocate(1000));
  EXPECT_OK(client.Allocate(5_MiB));
  const uint64_t calls = client.calls();
  EXPECT_GT(calls, 0u) << "each segment is a call";
  for (int i = 0; i < 1000; ++i) {
    ASSERT_OK_AND_ASSIGN(Buffer small, client.Allocate(1000));
    ASSERT_OK_AND_ASSIGN(Buffer large, client.Allocate(5_MiB));
    ASSERT_OK_AND_ASSIGN(void* const pointer, client.Malloc(2000));
    ASSERT_OK(client.Free(pointer));
  }
  EXPECT_EQ(client.calls(), calls);
}

TEST_F(LeasedTest, PointersAreCheckedWhenTheyAreFreed) {
  ASSERT_OK(StartDaemon());
  ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(Options("pointers")));
  ASSERT_OK_AND_ASSIGN(void* const a, client.Malloc(1000));
  ASSERT_OK_AND_ASSIGN(void* const b, client.Malloc(30_MiB));
  Fill(client, a, 1000, 1);
  Fill(client, b, 30_MiB, 2);
  EXPECT_TRUE(Holds(client, a, 1000, 1));
  EXPECT_TRUE(Holds(client, b, 30_MiB, 2));
  int on_the_stack = 0;
  for (void* wrong : {static_cast<void*>(&on_the_stack), static_cast<void*>(static_cast<char*>(a) + 512),
                      static_cast<void*>(static_cast<char*>(b) + 1)}) {
    EXPECT_STATUS(client.Free(wrong), absl::StatusCode::kInvalidArgument, "not from this client's Malloc()");
  }
  EXPECT_OK(client.Free(nullptr));
  EXPECT_OK(client.Free(a));
  EXPECT_STATUS(client.Free(a), absl::StatusCode::kInvalidArgument, "already freed");
  EXPECT_OK(client.RecordStream(b, 7));
  EXPECT_OK(client.Free(b, 8));
  EXPECT_STATUS(client.RecordStream(b, 7), absl::StatusCode::kInvalidArgument, "already freed");
  ASSERT_OK_AND_ASSIGN(const Buffer buffer, client.Allocate(1000));
  EXPECT_STATUS(client.Free(buffer.data()), absl::StatusCode::kInvalidArgument, "") << "the buffer frees it";
  EXPECT_STATUS(client.Malloc(0), absl::StatusCode::kInvalidArgument, "1 or more");
  EXPECT_STATUS(client.Malloc(1, 5), absl::StatusCode::kNotFound, "no device 5");
}

TEST_F(LeasedTest, TheDaemonSeesWhatTheClientCounts) {
  ASSERT_OK(StartDaemon({.http = true}));
  ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(Options("seen")));
  ASSERT_OK_AND_ASSIGN(Buffer buffer, client.Allocate(5_MiB));
  EXPECT_EQ(Listed("seen").reserved_bytes(), 20_MiB) << "the daemon's own account, at once";
  EXPECT_EQ(Asked("seen").stats().allocated_bytes().all().current(), 5_MiB) << "as the client answers";

  ASSERT_OK_AND_ASSIGN(Buffer more, client.Allocate(3_MiB));
  EXPECT_TRUE(WaitFor([&] { return Listed("seen").stats().allocated_bytes().all().current() == 8_MiB; }));
  EXPECT_EQ(daemon_->Metrics().Value("vrambroker_client_allocated_bytes", {{"client", "seen"}, {"gpu", "0"}}), 8_MiB);
  EXPECT_EQ(daemon_->Metrics().Value("vrambroker_client_reserved_bytes", {{"client", "seen"}, {"gpu", "0"}}), 20_MiB);
  ASSERT_OK_AND_ASSIGN(const MemoryStats own, client.GetMemoryStats());
  EXPECT_EQ(own.allocated_bytes.all.current, 8_MiB);
  EXPECT_EQ(own.num_device_alloc, 1u);
}

TEST_F(LeasedTest, OutOfMemoryIsTheDaemonsAnswer) {
  ASSERT_OK(StartDaemon({.capacity = "256MiB"}));
  ClientOptions options = Options("limited");
  options.limit = Limit(uint64_t{40_MiB});
  ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(options));
  ASSERT_OK_AND_ASSIGN(Buffer held, client.Allocate(40_MiB));  // the session is at its limit
  const absl::Status refused = client.Allocate(1).status();
  EXPECT_STATUS(refused, absl::StatusCode::kResourceExhausted, "out of memory (limit)");
  const std::optional<OutOfMemory> oom = GetOutOfMemory(refused);
  ASSERT_TRUE(oom.has_value());
  EXPECT_EQ(oom->cause, OutOfMemory::Cause::kLimit);
  EXPECT_EQ(oom->requested_bytes, 1u);
  EXPECT_EQ(oom->segment_bytes, 2_MiB);
  EXPECT_EQ(oom->limit_bytes, 40_MiB);
  EXPECT_EQ(oom->reserved_bytes, 40_MiB);
  EXPECT_EQ(oom->allocated_bytes, 40_MiB);
  EXPECT_TRUE(absl::StrContains(daemon_->log(), "refused cause=limit")) << "an event for the operator";
  EXPECT_EQ(GetOutOfMemory(client.Allocate(300_MiB).status())->cause, OutOfMemory::Cause::kLargerThanDevice);
  EXPECT_EQ(GetOutOfMemory(client.Allocate(uint64_t{1} << 62).status())->cause, OutOfMemory::Cause::kLargerThanDevice);
  EXPECT_EQ(client.GetMemoryStats()->num_ooms, 3u);

  // The client gives back cached memory of the wrong shape for the request.
  held = Buffer();
  ASSERT_OK_AND_ASSIGN(Buffer first, client.Allocate(18_MiB));
  ASSERT_OK_AND_ASSIGN(Buffer second, client.Allocate(22_MiB));
  first = Buffer();
  second = Buffer();
  EXPECT_OK(client.Allocate(38_MiB));
  EXPECT_GT(client.GetMemoryStats()->num_alloc_retries, 0u);
}

TEST_F(LeasedTest, AFractionCountsWhatOtherThreadsWaitFor) {
  ASSERT_OK(StartDaemon({.capacity = "256MiB"}));
  ASSERT_OK_AND_ASSIGN(Client other, Client::Connect(Options("other")));
  ASSERT_OK_AND_ASSIGN(Buffer rest, other.Allocate(220_MiB));
  ClientOptions options = Options("quarter");
  options.wait = absl::Minutes(10);
  ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(options));
  ASSERT_OK(client.SetMemoryFraction(0.25));
  Buffer waited;
  std::thread waits([&] { waited = client.Allocate(60_MiB).value_or(Buffer()); });
  EXPECT_TRUE(WaitFor([&] { return Listed("quarter").waiting_size() == 1; }));
  const absl::Status refused = client.Allocate(10_MiB).status();
  EXPECT_STATUS(refused, absl::StatusCode::kResourceExhausted, "beside 60.00 MiB that other threads are waiting for");
  const std::optional<OutOfMemory> oom = GetOutOfMemory(refused);
  EXPECT_TRUE(oom.has_value() && oom->reserved_bytes == 0 && oom->room_bytes == 4_MiB) << refused;
  rest = Buffer();
  waits.join();
  EXPECT_EQ(waited.size(), 60_MiB);
}

TEST_F(LeasedTest, AProcessHoldsItselfToAFraction) {
  ASSERT_OK(StartDaemon({.capacity = "256MiB"}));
  ClientOptions options = Options("half");
  options.alloc_conf = "garbage_collection_threshold:0.5";
  ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(options));
  ASSERT_OK(client.SetMemoryFraction(0.5));
  EXPECT_EQ(client.limit_bytes(), 128_MiB);
  ASSERT_OK_AND_ASSIGN(Buffer held, client.Allocate(30_MiB));
  ASSERT_OK_AND_ASSIGN(void* whole, client.LeaseSegment(40_MiB));
  const absl::Status refused = client.Allocate(60_MiB).status();
  EXPECT_STATUS(refused, absl::StatusCode::kResourceExhausted, "out of memory (limit) on device 0: 60.00 MiB");
  EXPECT_STATUS(refused, absl::StatusCode::kResourceExhausted,
                "the memory fraction that this process has set allows it 128.00 MiB of the device");
  const std::optional<OutOfMemory> oom = GetOutOfMemory(refused);
  ASSERT_TRUE(oom.has_value());
  EXPECT_EQ(oom->cause, OutOfMemory::Cause::kLimit);
  EXPECT_EQ(oom->requested_bytes, 60_MiB);
  EXPECT_EQ(oom->segment_bytes, 60_MiB);
  EXPECT_EQ(oom->limit_bytes, 128_MiB);
  EXPECT_EQ(oom->reserved_bytes, 70_MiB);
  EXPECT_EQ(oom->allocated_bytes, 70_MiB);
  EXPECT_EQ(oom->room_bytes, 58_MiB);
  EXPECT_STATUS(client.TryLeaseSegment(60_MiB), absl::StatusCode::kResourceExhausted, "memory fraction");
  EXPECT_EQ(client.GetMemoryStats()->num_ooms, 1u);
  ASSERT_OK_AND_ASSIGN(void* const rest, client.TryLeaseSegment(58_MiB));
  ASSERT_OK(client.ReturnSegment(rest));
  ASSERT_OK(client.ReturnSegment(whole));
  ASSERT_OK(client.Allocate(60_MiB).status());
  // The heap collects free memory early, by the lower of both limits: 90 MiB is more than half of 128 MiB.
  ASSERT_OK(client.Allocate(20_MiB).status());
  EXPECT_LT(client.GetMemoryStats()->reserved_bytes.all.current, 110_MiB);

  ASSERT_OK(client.SetMemoryFraction(1));
  ASSERT_OK(client.Allocate(220_MiB).status());
  EXPECT_STATUS(client.Allocate(240_MiB), absl::StatusCode::kResourceExhausted, "limit 256.00 MiB");
  for (const double wrong : {-0.1, 1.1, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_STATUS(client.SetMemoryFraction(wrong), absl::StatusCode::kInvalidArgument, "is not between 0 and 1");
  }
  EXPECT_STATUS(client.SetMemoryFraction(0.5, 1), absl::StatusCode::kNotFound, "no device 1");
  options.placement = Placement::kRemote;
  ASSERT_OK_AND_ASSIGN(Client remote, Client::Connect(options));
  EXPECT_STATUS(remote.SetMemoryFraction(0.5), absl::StatusCode::kFailedPrecondition, "vramctl limit");
  EXPECT_STATUS(remote.ResetTotals(), absl::StatusCode::kFailedPrecondition, "together with the peaks");
}

TEST_F(LeasedTest, TotalsBeginAgainWithoutThePeaks) {
  ASSERT_OK(StartDaemon());
  ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(Options("totals")));
  ASSERT_OK(client.Allocate(30_MiB).status());
  ASSERT_OK_AND_ASSIGN(void* whole, client.LeaseSegment(4_MiB));
  ASSERT_OK(client.ReturnSegment(whole));
  ASSERT_OK(client.ResetTotals());
  const MemoryStats stats = *client.GetMemoryStats();
  EXPECT_EQ(stats.allocated_bytes.all.allocated, 0u);
  EXPECT_EQ(stats.allocated_bytes.all.freed, 0u);
  EXPECT_EQ(stats.num_device_alloc, 0u);
  EXPECT_EQ(stats.allocated_bytes.all.peak, 34_MiB);
  ASSERT_OK(client.ResetStats());
  EXPECT_EQ(client.GetMemoryStats()->allocated_bytes.all.peak, 0u);
  ASSERT_OK_AND_ASSIGN(const std::string table, client.MemorySummary());
  EXPECT_TRUE(absl::StrContains(table, "device ID 0, session totals")) << table;
  ASSERT_OK_AND_ASSIGN(const std::string abbreviated, client.MemorySummary(0, /*abbreviated=*/true));
  EXPECT_LT(abbreviated.size(), table.size());
  EXPECT_STATUS(client.MemorySummary(1), absl::StatusCode::kNotFound, "no device 1");
}

TEST_F(LeasedTest, OperatorsTrimLimitRecordAndLook) {
  ASSERT_OK(StartDaemon());
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(Options("operated")));
  ASSERT_OK(raw.SetRecording(Ref("operated"), 100));
  ASSERT_OK_AND_ASSIGN(Buffer kept, client.Allocate(1000));
  EXPECT_OK(client.Allocate(30_MiB));
  EXPECT_EQ(Listed("operated").reserved_bytes(), 32_MiB);
  ASSERT_OK_AND_ASSIGN(const uint64_t trimmed, raw.TrimSession(Ref("operated")));
  EXPECT_EQ(trimmed, 30_MiB);
  EXPECT_EQ(Listed("operated").reserved_bytes(), 2_MiB);
  EXPECT_EQ(Listed("operated").stats().num_device_free(), 1u) << "the figures come before the answer";

  ASSERT_OK_AND_ASSIGN(const std::vector<v1::GetSnapshotResponse> parts, raw.GetSnapshot(Ref("operated"), 0));
  ASSERT_EQ(parts.size(), 1u);
  ASSERT_EQ(parts[0].segments_size(), 1);
  EXPECT_EQ(parts[0].segments(0).id(), kept.segment_id());
  EXPECT_EQ(parts[0].segments(0).blocks_size(), 2);
  EXPECT_EQ(parts[0].events_size(), 8) << "two segments and blocks, a free of two steps, a segment back, the snapshot";

  ASSERT_OK(raw.SetLimit(Ref("operated"), BytesLimit(10_MiB)));
  EXPECT_TRUE(WaitFor([&] { return client.limit_bytes() == 10_MiB; }));
  EXPECT_STATUS(client.Allocate(30_MiB), absl::StatusCode::kResourceExhausted, "limit");
  ASSERT_OK(raw.EndSession(Ref("operated")));
  EXPECT_TRUE(WaitFor([&] { return absl::IsAborted(client.status()); })) << client.status();
  EXPECT_STATUS(client.Allocate(30_MiB), absl::StatusCode::kAborted, "");
  Fill(kept, 3);
  EXPECT_TRUE(Holds(kept, 3));
  EXPECT_TRUE(WaitFor([&] { return log_->Has("the session has ended"); }));

  // Operators get one answer to all calls after the end.
  constexpr char kHasEnded[] = "session 'operated' has ended: ";
  EXPECT_STATUS(raw.TrimSession(Ref("operated")), absl::StatusCode::kAborted, kHasEnded);
  EXPECT_STATUS(raw.GetSnapshot(Ref("operated"), 0), absl::StatusCode::kAborted, kHasEnded);
  EXPECT_STATUS(raw.SetLimit(Ref("operated"), BytesLimit(20_MiB)), absl::StatusCode::kAborted, kHasEnded);
}

TEST_F(LeasedTest, ALargeSnapshotComesWhole) {
  ASSERT_OK(StartDaemon());
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(Options("large")));
  ASSERT_OK(raw.SetRecording(Ref("large"), 20'000));
  std::vector<Buffer> buffers;
  for (int i = 0; i < 10'000; ++i) {
    ASSERT_OK_AND_ASSIGN(Buffer buffer, client.Allocate(512));
    buffers.push_back(std::move(buffer));
  }
  ASSERT_OK_AND_ASSIGN(const std::vector<v1::GetSnapshotResponse> parts, raw.GetSnapshot(Ref("large"), 0));
  int blocks = 0;
  int events = 0;
  for (const v1::GetSnapshotResponse& part : parts) {
    events += part.events_size();
    for (const auto& segment : part.segments()) {
      for (const auto& block : segment.blocks()) {
        blocks += block.state() == v1::GetSnapshotResponse::BLOCK_STATE_ALLOCATED ? 1 : 0;
      }
    }
  }
  EXPECT_EQ(blocks, 10'000);
  EXPECT_EQ(events, 10'000 + 3 + 1) << "each block, three segments, the snapshot";
}

TEST_F(LeasedTest, IdleSegmentsGoBackByThemselvesWhenAsked) {
  ASSERT_OK(StartDaemon({.config = "idle_decay: \"100ms\""}));
  ClientOptions options = Options("decaying");
  options.idle_decay = absl::Milliseconds(200);
  ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(options));
  ASSERT_OK_AND_ASSIGN(Client hoarder, Client::Connect(Options("hoarder")));
  ASSERT_OK_AND_ASSIGN(Buffer kept, client.Allocate(1000));
  EXPECT_OK(client.Allocate(30_MiB));
  EXPECT_OK(hoarder.Allocate(30_MiB));
  EXPECT_TRUE(WaitFor([&] { return Listed("decaying").reserved_bytes() == 2_MiB; }));
  EXPECT_EQ(Listed("hoarder").reserved_bytes(), 30_MiB) << "off unless asked for";
  EXPECT_TRUE(WaitFor([&] { return DeviceReserved() == 32_MiB; })) << "and from the daemon to the driver";
}

TEST_F(LeasedTest, WholeSegments) {
  ASSERT_OK(StartDaemon({.capacity = "256MiB"}));
  ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(Options("whole")));
  ASSERT_OK_AND_ASSIGN(void* const segment, client.LeaseSegment(3_MiB));
  Fill(client, segment, 4_MiB, 1);
  EXPECT_EQ(Listed("whole").reserved_bytes(), 4_MiB);
  const v1::SessionDevice asked = Asked("whole");
  EXPECT_EQ(asked.stats().allocated_bytes().all().current(), 4_MiB);
  EXPECT_EQ(asked.stats().requested_bytes().all().current(), 3_MiB);
  EXPECT_STATUS(client.Free(segment), absl::StatusCode::kInvalidArgument, "");
  EXPECT_STATUS(client.ReturnSegment(static_cast<char*>(segment) + 512), absl::StatusCode::kInvalidArgument, "");
  EXPECT_STATUS(client.LeaseSegment(0), absl::StatusCode::kInvalidArgument, "");
  EXPECT_STATUS(client.LeaseSegment(300_MiB), absl::StatusCode::kResourceExhausted, "larger");
  EXPECT_OK(client.Allocate(200_MiB));
  ASSERT_OK_AND_ASSIGN(void* const large, client.LeaseSegment(220_MiB));  // the client empties its cache first
  EXPECT_TRUE(Holds(client, segment, 4_MiB, 1));
  EXPECT_OK(client.ReturnSegment(large));
  EXPECT_OK(client.ReturnSegment(segment));
  EXPECT_STATUS(client.ReturnSegment(segment), absl::StatusCode::kInvalidArgument, "already returned");
  EXPECT_EQ(Listed("whole").reserved_bytes(), 0u);

  ClientOptions remote = Options("remote");
  remote.placement = Placement::kRemote;
  ASSERT_OK_AND_ASSIGN(Client other, Client::Connect(remote));
  EXPECT_STATUS(other.LeaseSegment(1), absl::StatusCode::kFailedPrecondition, "kLeased");
  ASSERT_OK_AND_ASSIGN(void* const pointer, other.Malloc(1000));
  EXPECT_STATUS(other.RecordStream(pointer, 3), absl::StatusCode::kFailedPrecondition, "kLeased");
  EXPECT_OK(other.Free(pointer));
  EXPECT_STATUS(other.Free(pointer), absl::StatusCode::kInvalidArgument, "");
}

TEST_F(LeasedTest, BuffersMayOutliveTheirClient) {
  ASSERT_OK(StartDaemon());
  for (const Placement placement : {Placement::kLeased, Placement::kRemote}) {
    const std::string name = placement == Placement::kLeased ? "leased" : "remote";
    Buffer buffer;
    {
      ClientOptions options = Options(name);
      options.placement = placement;
      ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(options));
      ASSERT_OK_AND_ASSIGN(buffer, client.Allocate(1_MiB));
    }
    Fill(buffer, 4);
    EXPECT_TRUE(Holds(buffer, 4));
    absl::SleepFor(absl::Milliseconds(1200));  // longer than the time between two reports of figures
    EXPECT_GT(Listed(name).reserved_bytes(), 0u);
    buffer = Buffer();
    EXPECT_TRUE(WaitFor([&] { return Listed(name).reserved_bytes() == 0; }));
  }
}

TEST_F(LeasedTest, AChildMadeByForkIsRefused) {
  ASSERT_OK(StartDaemon());
  ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(Options("parent")));
  ASSERT_OK_AND_ASSIGN(Buffer buffer, client.Allocate(1000));
  ASSERT_OK_AND_ASSIGN(void* const pointer, client.Malloc(1000));
  // The client's reporting thread is then quiet, and holds no lock that the child would have for ever.
  ASSERT_TRUE(WaitFor([&] { return Listed("parent").stats().allocation().all().current() == 2; }));
  const pid_t child = fork();
  if (child == 0) {
    bool refused =
        absl::IsFailedPrecondition(client.Allocate(10).status()) &&
        absl::IsFailedPrecondition(client.Malloc(10).status()) && absl::IsFailedPrecondition(client.Free(pointer)) &&
        absl::IsFailedPrecondition(client.EmptyCache().status()) && absl::IsFailedPrecondition(client.status());
    buffer = Buffer();  // does nothing in the child
    _exit(refused ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_OK(client.Free(pointer));
  EXPECT_EQ(client.GetMemoryStats()->allocation.all.current, 1u) << "the buffer is the parent's";
}

TEST_F(LeasedTest, AnEndedSessionGivesBackWhatIsFreed) {
  ASSERT_OK(StartDaemon());
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(Options("ended")));
  ASSERT_OK_AND_ASSIGN(void* const segment, client.LeaseSegment(10_MiB));
  ASSERT_OK_AND_ASSIGN(Buffer buffer, client.Allocate(30_MiB));
  EXPECT_OK(client.Allocate(40_MiB));
  ASSERT_OK(raw.EndSession(Ref("ended")));
  EXPECT_TRUE(WaitFor([&] { return Listed("ended").reserved_bytes() == 40_MiB; })) << "what was idle";
  EXPECT_OK(client.ReturnSegment(segment));
  EXPECT_EQ(Listed("ended").reserved_bytes(), 30_MiB);
  buffer = Buffer();
  EXPECT_OK(client.EmptyCache());
  EXPECT_EQ(Listed("ended").reserved_bytes(), 0u);
}

// ---- Loss of the daemon ----

TEST_F(LeasedTest, ALostDaemonIsReachedAgain) {
  ASSERT_OK(StartDaemon());
  std::atomic<int> told{0};
  ClientOptions options = Options("survivor");
  options.on_lost = [&](const absl::Status&) { ++told; };
  ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(options));
  ASSERT_OK_AND_ASSIGN(Buffer held, client.Allocate(8_MiB));
  Fill(held, 11);
  daemon_->Kill();
  ASSERT_TRUE(WaitFor([&] { return absl::IsUnavailable(client.status()); }));
  EXPECT_TRUE(WaitFor([&] { return log_->Has("trying to reconnect"); }));

  // The cache works on, growth fails, and no call blocks.
  EXPECT_TRUE(Holds(held, 11));
  ASSERT_OK_AND_ASSIGN(Buffer cached, client.Allocate(8_MiB));
  EXPECT_EQ(cached.segment_id(), held.segment_id());
  EXPECT_STATUS(client.Allocate(50_MiB), absl::StatusCode::kUnavailable, "held memory stays usable");
  cached = Buffer();
  EXPECT_OK(client.EmptyCache());
  EXPECT_OK(client.GetMemoryStats());

  ASSERT_OK(daemon_->Restart());
  ASSERT_TRUE(WaitFor([&] { return client.status().ok(); })) << client.status();
  EXPECT_TRUE(WaitFor([&] { return log_->Has("connected to another daemon as a new session; 1 segment of"); }));
  EXPECT_EQ(client.name(), "survivor");
  ASSERT_OK_AND_ASSIGN(Buffer grown, client.Allocate(50_MiB));
  Fill(grown, 12);
  EXPECT_TRUE(Holds(held, 11)) << "the old daemon's memory is still there";
  EXPECT_EQ(Listed("survivor").carried_over_bytes(), 20_MiB);
  EXPECT_EQ(Listed("survivor").reserved_bytes(), 70_MiB) << "it counts, whichever daemon leased it";
  held = Buffer();
  EXPECT_OK(client.EmptyCache());
  EXPECT_TRUE(Holds(grown, 12));
  EXPECT_TRUE(WaitFor([&] { return Listed("survivor").reserved_bytes() == 50_MiB; })) << "and no longer";
  EXPECT_EQ(Listed("survivor").carried_over_bytes(), 0u);
  EXPECT_EQ(told, 1);
}

TEST_F(LeasedTest, AllocationsUnderWayEndWhenTheDaemonDies) {
  ASSERT_OK(StartDaemon({.capacity = "8GiB"}));
  ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(Options("busy")));
  std::atomic<bool> stop{false};
  std::atomic<int> unavailable{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      while (!stop) {
        absl::StatusOr<void*> segment = client.LeaseSegment(2_MiB);
        if (segment.ok()) (void)client.ReturnSegment(*segment);
        if (absl::IsUnavailable(segment.status())) ++unavailable;
      }
    });
  }
  absl::SleepFor(absl::Milliseconds(100));
  daemon_->Kill();
  EXPECT_TRUE(WaitFor([&] { return unavailable > 100; }));
  stop = true;
  for (std::thread& thread : threads) thread.join();
}

TEST_F(LeasedTest, AClientThatGoesWhileItIsDisconnectedLeavesNothing) {
  ASSERT_OK(StartDaemon());
  const std::string proxy_dir = MakeTempDir();
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Proxy> proxy, Proxy::Start(proxy_dir, dir()));
  ClientOptions options = Options("brief");
  options.socket_dir = proxy_dir;
  for (int round = 0; round < 5; ++round) {
    ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(options));
    EXPECT_OK(client.Allocate(40_MiB));
    proxy->Break();
  }
  EXPECT_TRUE(WaitFor([&] { return Listed("brief").reserved_bytes() == 0; })) << Listed("brief").reserved_bytes();
}

// The daemon reads the request only after the session was resumed over another connection.
TEST_F(LeasedTest, ALeaseOverABrokenConnectionIsGivenBack) {
  ASSERT_OK(StartDaemon());
  const std::string proxy_dir = MakeTempDir();
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Proxy> proxy, Proxy::Start(proxy_dir, dir()));
  ClientOptions options = Options("delayed");
  options.socket_dir = proxy_dir;
  ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(options));
  ASSERT_OK_AND_ASSIGN(const Buffer held, client.Allocate(2_MiB));
  const uint64_t reserved = Listed("delayed").reserved_bytes();
  proxy->Stall(Proxy::Which::kDescriptors);
  std::thread leasing([&] { EXPECT_STATUS(client.Allocate(40_MiB).status(), absl::StatusCode::kUnavailable, ""); });
  EXPECT_TRUE(WaitFor([&] { return proxy->stalled() > 0; }));
  proxy->Break(Proxy::Which::kGrpc);
  EXPECT_TRUE(WaitFor([&] { return absl::StrContains(daemon_->log(), "session resumed"); }));
  proxy->PassOn();
  leasing.join();
  EXPECT_TRUE(WaitFor([&] { return Listed("delayed").reserved_bytes() == reserved; }));
  EXPECT_OK(client.Allocate(40_MiB));
}

// The session survives broken descriptor connections, so the daemon never takes back a segment that was leased without
// an answer.
TEST_F(LeasedTest, LeasesAreExactWhereDescriptorConnectionsBreak) {
  ASSERT_OK(StartDaemon());
  const std::string proxy_dir = MakeTempDir();
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Proxy> proxy, Proxy::Start(proxy_dir, dir()));
  ClientOptions options = Options("exact");
  options.socket_dir = proxy_dir;
  ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(options));
  std::atomic<bool> stop{false};
  std::vector<std::thread> workers;
  for (int i = 0; i < 2; ++i) {
    workers.emplace_back([&] {
      while (!stop) {
        // A lease or a return is unavailable to a client whose second try fails like the first try.
        if (const absl::StatusOr<void*> segment = client.LeaseSegment(2_MiB); segment.ok()) {
          (void)client.ReturnSegment(*segment);
        }
      }
    });
  }
  for (int calls = 0; calls < 2000; calls = proxy->segment_calls()) {
    proxy->Break(Proxy::Which::kDescriptors);
    EXPECT_TRUE(WaitFor([&] { return proxy->segment_calls() > calls; }));
  }
  stop = true;
  for (std::thread& worker : workers) worker.join();
  EXPECT_TRUE(WaitFor([&] { return Listed("exact").reserved_bytes() == 0; })) << Listed("exact").reserved_bytes();
  EXPECT_FALSE(absl::StrContains(daemon_->log(), "session disconnected"));
}

TEST_F(LeasedTest, ATraceGoesOnOverAResumedConnection) {
  ASSERT_OK(StartDaemon({.config = "record_events: 100"}));
  const std::string proxy_dir = MakeTempDir();
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Proxy> proxy, Proxy::Start(proxy_dir, dir()));
  ClientOptions options = Options("traced");
  options.socket_dir = proxy_dir;
  ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(options));
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  const auto kept = [&]() -> uint64_t {
    const auto parts = raw.GetSnapshot(Ref("traced"), 0);
    return parts.ok() && !parts->empty() ? parts->front().max_events() : 0;
  };
  auto hold = std::make_unique<RawHold>(raw.admin(), Ref("traced"), 5000);
  ASSERT_OK(hold->WaitForStart());
  for (size_t round = 1; round <= 5; ++round) {
    proxy->Break();
    ASSERT_TRUE(WaitFor(
        [&] { return std::vector<std::string>(absl::StrSplit(daemon_->log(), "session resumed")).size() > round; }));
    EXPECT_TRUE(WaitFor([&] { return kept() == 5000; })) << round;
  }
  // The trace ends while the daemon cannot tell the client.
  proxy->Break();
  hold.reset();
  EXPECT_TRUE(WaitFor([&] { return kept() == 100; }));
}

TEST_F(LeasedTest, ABrokenConnectionIsResumed) {
  ASSERT_OK(StartDaemon({.capacity = "2GiB"}));
  const std::string proxy_dir = MakeTempDir();
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Proxy> proxy, Proxy::Start(proxy_dir, dir()));
  ClientOptions options = Options("resumed");
  options.socket_dir = proxy_dir;
  options.limit = Limit(uint64_t{300_MiB});
  ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(options));
  const uint64_t id = client.session_id();
  ASSERT_OK_AND_ASSIGN(Buffer held, client.Allocate(40_MiB));
  Fill(held, 5);
  EXPECT_OK(client.Allocate(60_MiB));
  ASSERT_OK_AND_ASSIGN(Client other, Connect("other"));
  // Writes to memory of a client and finds the bytes unchanged: no segment ever belongs to both clients.
  const auto use = [](Client& user, uint64_t seed) {
    absl::StatusOr<Buffer> buffer = user.Allocate(20_MiB);
    if (!buffer.ok()) return;
    Fill(*buffer, 64 << 10, seed);
    std::this_thread::yield();
    EXPECT_TRUE(Holds(*buffer, 64 << 10, seed)) << user.name();
    *buffer = Buffer();
    (void)user.EmptyCache();
  };
  for (int round = 0; round < 8; ++round) {
    // Work goes on while the connection breaks: leases and returns are lost at any point.
    std::atomic<bool> stop{false};
    std::vector<std::thread> workers;
    for (Client* user : {&client, &client, &other}) {
      const uint64_t seed = workers.size();
      workers.emplace_back([&, user, seed] {
        while (!stop) use(*user, seed);
      });
    }
    absl::SleepFor(absl::Milliseconds(20));
    proxy->Break();
    absl::SleepFor(absl::Milliseconds(20));
    stop = true;
    for (std::thread& worker : workers) worker.join();
    ASSERT_TRUE(WaitFor([&] { return client.status().ok(); })) << client.status();
    EXPECT_EQ(client.session_id(), id);
    EXPECT_TRUE(Holds(held, 5));
    EXPECT_OK(client.EmptyCache());
    EXPECT_TRUE(WaitFor([&] { return Listed("resumed").reserved_bytes() == 40_MiB; }))
        << Listed("resumed").reserved_bytes() << ": neither lost nor kept twice";
  }
  EXPECT_TRUE(log_->Has("resumed the session"));
  EXPECT_TRUE(WaitFor([&] { return client.Allocate(250_MiB).ok(); })) << "the last break may be noticed only now";
}

}  // namespace
}  // namespace vrambroker::testing_support
