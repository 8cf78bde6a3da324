// SPDX-License-Identifier: Apache-2.0
#include "tests/fault/chaos_worker.h"

#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <memory>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/vrambroker/client.h"
#include "tests/support/marks.h"
#include "tests/support/proxy.h"
#include "tests/support/raw_client.h"
#include "tests/support/util.h"

namespace vrambroker::fault {
namespace {

using testing_support::FindOtherBytes;
using testing_support::kPatience;
using testing_support::Mark;
using testing_support::Proxy;
using testing_support::WaitFor;

constexpr int kStormSegments = 4;
constexpr absl::Duration kWait = absl::Seconds(2);

[[noreturn]] void Unexplained(const std::string& what, const absl::Status& status) {
  std::fprintf(stderr, "%s: %s\n", what.c_str(), status.ToString().c_str());
  std::fflush(stderr);
  _exit(4);
}

bool IsOverTheRate(const absl::Status& status) {
  return absl::StrContains(status.message(), "max_calls_per_second_per_uid");
}

void SayReady() {
  std::printf("ready\n");
  std::fflush(stdout);
}

int64_t Now() {
  timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// A block or segment, with the key of the written bytes.
struct Marked {
  void* memory = nullptr;
  uint64_t bytes = 0;
  int device = 0;
  uint64_t key = 0;
  uint64_t marked_bytes = 0;
  Buffer buffer;  // set for caching clients
};

class Worker {
 public:
  Worker(const WorkerOptions& options, ChaosCounters& counters)
      : options_(options), counters_(counters), random_(options.seed), key_(options.seed << 32) {}
  virtual ~Worker() = default;

  int Run() {
    if (!Connect()) return 0;
    SayReady();
    while (!counters_.stop) {
      Step();
      absl::SleepFor(absl::Microseconds(Random(8000 * counters_.clients / kUsualClients)));
    }
    GiveAllBack();
    BeforeEnd();
    // A client that lost the daemon must reach a daemon again.
    AwaitDaemon("at the end");
    client_.reset();
    return 0;
  }

 protected:
  virtual void Step() = 0;
  virtual absl::Status GiveBack(Marked& marked) = 0;
  virtual std::string SocketDir() { return options_.socket_dir; }
  virtual void BeforeEnd() {}

  Client& client() { return *client_; }
  uint64_t Random(uint64_t below) { return random_() % below; }
  ChaosCounters& counters() { return counters_; }
  const WorkerOptions& options() const { return options_; }
  const std::string& role() const { return options_.role; }
  std::vector<Marked>& held() { return held_; }
  uint64_t held_bytes(int device) const { return held_bytes_[static_cast<size_t>(device)]; }
  int AnyDevice() { return static_cast<int>(Random(counters_.devices)); }

  void MarkAndHold(Marked marked) {
    marked.key = ++key_ * 0x1'0000'0001;
    marked.marked_bytes = Mark(marked.memory, marked.bytes, marked.key);
    held_bytes_[static_cast<size_t>(marked.device)] += marked.bytes;
    held_.push_back(std::move(marked));
  }

  void Verify(const Marked& marked) {
    if (const std::optional<uint64_t> wrong = FindOtherBytes(marked.memory, marked.bytes, marked.key)) {
      ++counters_.wrong_blocks;
      std::fprintf(stderr, "%s: a block of %lu bytes holds other bytes than were written, at %lu\n",
                   client_->name().c_str(), marked.bytes, *wrong);
      std::fflush(stderr);
      _exit(3);
    }
    counters_.verified_blocks.fetch_add(1, std::memory_order_relaxed);
    counters_.verified_bytes.fetch_add(marked.marked_bytes, std::memory_order_relaxed);
  }
  void VerifyAll() {
    for (const Marked& marked : held_) Verify(marked);
  }

  void GiveOneBack() {
    std::swap(held_[Random(held_.size())], held_.back());
    Marked marked = std::move(held_.back());
    held_.pop_back();
    held_bytes_[static_cast<size_t>(marked.device)] -= marked.bytes;
    Verify(marked);
    // The block is given up, no matter how the daemon answers.
    if (absl::Status status = GiveBack(marked); !status.ok()) ExplainedByLoss("giving back", status);
  }
  void GiveAllBack() {
    while (!held_.empty()) GiveOneBack();
  }

  void Refused(const absl::Status& status) {
    ++counters_.refused;
    const std::optional<OutOfMemory> why = GetOutOfMemory(status);
    if (why.has_value() && why->cause == OutOfMemory::Cause::kLimit) ++counters_.refused_by_limit;
    if (!held_.empty()) GiveOneBack();
  }

  // Ends the process unless a lost connection or too many calls explain `status`. After a lost connection, verifies
  // that the held memory is unchanged, and waits until the daemon is reached again.
  void ExplainedByLoss(const char* what, const absl::Status& status) {
    if (IsOverTheRate(status)) {
      ++counters_.refused_by_rate;
      return;
    }
    const bool lost = absl::IsUnavailable(status) || absl::IsAborted(status);
    if (!lost || (!may_be_cut_ && counters_.restarts == 0)) Unexplained(absl::StrCat(role(), ", ", what), status);
    VerifyAll();
    AwaitDaemon(what);
  }

  void set_may_be_cut() { may_be_cut_ = true; }

 private:
  // Returns false if the run ends before the daemon serves the client.
  bool Connect() {
    ClientOptions options;
    options.socket_dir = SocketDir();
    options.name = role();
    options.connect_timeout = options.call_timeout = kPatience;
    if (role() == "waiting" || role() == "urgent") options.wait = kWait;
    options.log = [this](const std::string& line) {
      if (absl::StrContains(line, "resumed the session")) ++counters_.resumed;
      if (absl::StrContains(line, "as a new session")) ++counters_.new_sessions;
    };
    // The daemon may be restarting, and earlier clients may use the guaranteed memory.
    absl::StatusOr<Client> client;
    WaitFor([&] {
      restarts_ = counters_.restarts_done;
      client = Client::Connect(options);
      return client.ok() || counters_.stop || (counters_.restarts == 0 && !IsOverTheRate(client.status()));
    });
    if (!client.ok()) {
      if (counters_.stop && (counters_.restarts > 0 || IsOverTheRate(client.status()))) return false;
      Unexplained(absl::StrCat(role(), ", Connect"), client.status());
    }
    client_.emplace(*std::move(client));
    session_ = client_->session_id();
    return true;
  }

  void AwaitDaemon(const char* what) {
    uint64_t restarts_done = 0;
    const auto reach = [&] {
      restarts_done = counters_.restarts_done;
      return client_->status().ok();
    };
    // A new daemon refuses a guarantee while earlier clients use too much memory, at the latest until the end of
    // earlier clients.
    const int64_t lost = Now();
    while (role() == "guaranteed" && !counters_.stop && !WaitFor(reach, absl::Seconds(1))) {
    }
    const bool reached = WaitFor(reach);
    if (!reached) Unexplained(absl::StrCat(role(), ", ", what, ": the daemon is not reached again"), client_->status());
    if (client_->session_id() == session_) return;
    // A session survives while its daemon runs, and is lost only with the daemon.
    if (counters_.restarts == restarts_) {
      Unexplained(role(), absl::InternalError(
                              absl::StrCat("session ", session_, " was lost, now it is ", client_->session_id())));
    }
    restarts_ = restarts_done;
    session_ = client_->session_id();
    if (role() == "guaranteed") counters_.guaranteed_back_ns.Add(static_cast<uint64_t>(Now() - lost));
  }

  const WorkerOptions options_;
  ChaosCounters& counters_;
  std::mt19937_64 random_;
  uint64_t key_;
  std::optional<Client> client_;
  uint64_t session_ = 0;
  uint64_t restarts_ = 0;  // restarts of the daemon that were done when the session began
  bool may_be_cut_ = false;
  std::vector<Marked> held_;
  std::array<uint64_t, kMostDevices> held_bytes_{};  // indexed by device
};

// ---- Clients of whole segments: no cache, so that held memory equals charged memory ----

class SegmentWorker : public Worker {
 public:
  using Worker::Worker;

 protected:
  void Step() override {
    const bool guaranteed = role() == "guaranteed";
    const uint64_t most = guaranteed ? kChaosGuarantee : 2 * kChaosLimit;
    const uint64_t bytes = (1 + Random(16)) * 2_MiB;
    switch (Random(8)) {
      case 0:  // verifies all, or gives all back: guaranteed memory is available again at once
        if (Random(10) == 0) return GiveAllBack();
        return VerifyAll();
      case 1:
      case 2:
      case 3:
        if (!held().empty()) GiveOneBack();
        return;
      default:
        if (const int device = AnyDevice(); held_bytes(device) + bytes <= most) Lease(bytes, device);
    }
  }

  absl::Status GiveBack(Marked& marked) override { return client().ReturnSegment(marked.memory); }

 private:
  // A session of one run of the daemon: the next run numbers sessions from 1 again.
  struct SessionOfRun {
    uint64_t restarts = 0;
    uint64_t session = 0;
    friend bool operator==(const SessionOfRun&, const SessionOfRun&) = default;
  };
  SessionOfRun CurrentRun() { return {.restarts = counters().restarts, .session = client().session_id()}; }

  // Asks the daemon whether the session has its guarantee, until it has. After a restart, a session whose operator's
  // guarantee does not fit goes on with less: see server/RESTARTS.md.
  bool HasGuarantee(const SessionOfRun& run) {
    if (counters().restarts_done != run.restarts) return false;
    if (guaranteed_ == run) return true;
    absl::StatusOr<testing_support::RawClient> admin = testing_support::RawClient::Connect(SocketDir());
    const absl::StatusOr<v1::ListSessionsResponse> sessions = admin.ok() ? admin->ListSessions() : admin.status();
    if (!sessions.ok()) return false;
    const bool has = absl::c_any_of(sessions->sessions(), [&](const v1::Session& session) {
      return session.id() == run.session && session.pid() == getpid() &&
             absl::c_all_of(session.devices(),
                            [](const auto& device) { return device.guarantee_bytes() >= kChaosGuarantee; });
    });
    if (has && run == CurrentRun()) guaranteed_ = run;
    return guaranteed_ == run;
  }

  void Lease(uint64_t bytes, int device) {
    const SessionOfRun run = CurrentRun();
    const bool is_guaranteed = role() == "guaranteed" && HasGuarantee(run);
    const uint64_t calls = client().calls();
    const int64_t began = Now();
    const absl::StatusOr<void*> memory = client().LeaseSegment(bytes, device);
    const int64_t ended = Now();
    const bool queued = client().calls() > calls + 1;
    if (memory.ok()) {
      MarkAndHold({.memory = *memory, .bytes = bytes, .device = device, .buffer = Buffer()});
    } else if (!absl::IsResourceExhausted(memory.status())) {
      return ExplainedByLoss("LeaseSegment", memory.status());
    }
    const bool waits = role() == "waiting" || role() == "urgent";
    if (role() == "guaranteed") {
      if (!is_guaranteed || run != CurrentRun()) return;
      ++(memory.ok() ? counters().kept_guarantees : counters().broken_guarantees);
      if (!memory.ok()) Unexplained("a guarantee was broken", memory.status());
      return;
    }
    if (!memory.ok()) {
      Refused(memory.status());
    } else if (!queued) {
      ++counters().granted_at_once;
    } else if (waits) {
      ++counters().granted_after_wait;
    } else {
      ++counters().granted_by_reclaim;
      counters().reclaim_ns.Add(static_cast<uint64_t>(ended - began));
    }
  }

  std::optional<SessionOfRun> guaranteed_;  // has its guarantee, as the daemon says
};

// ---- Clients with a cache, which are stopped, killed and cut off ----

class CachingWorker : public Worker {
 public:
  using Worker::Worker;

 protected:
  void Step() override {
    switch (Random(8)) {
      case 0:  // gives memory back until most of it is idle
        for (int device = AnyDevice(); held_bytes(device) > 16_MiB;) GiveOneBack();
        return;
      case 1:
        return VerifyAll();
      case 2:
        if (child_ == 0 && Random(4) == 0) return Fork();
        return ReapChild(/*wait=*/false);
      default:
        if (const int device = AnyDevice(); held_bytes(device) < 96_MiB) Allocate((1 + Random(24)) * 1_MiB, device);
    }
  }

  void BeforeEnd() override { ReapChild(/*wait=*/true); }

  absl::Status GiveBack(Marked& marked) override {
    absl::Status status = marked.buffer.Reset();
    marked.buffer = Buffer();
    return status;
  }

 private:
  void Allocate(uint64_t bytes, int device) {
    absl::StatusOr<Buffer> buffer = client().Allocate(bytes, device);
    if (buffer.ok()) {
      void* const memory = buffer->data();
      return MarkAndHold({.memory = memory, .bytes = bytes, .device = device, .buffer = *std::move(buffer)});
    }
    if (!absl::IsResourceExhausted(buffer.status())) return ExplainedByLoss("Allocate", buffer.status());
    Refused(buffer.status());
  }

  // Forks a child that inherits all mappings and outlives this process when killed. Until the child has gone, no other
  // session may get the memory. The child looks at a block that this process leaves alone meanwhile.
  void Fork() {
    absl::StatusOr<Buffer> buffer = client().Allocate(1_MiB);
    if (!buffer.ok()) return;
    const uint64_t seed = Random(1'000'000);
    testing_support::Fill(buffer->data(), buffer->size(), seed);
    const int naps = 5 + static_cast<int>(Random(40));
    ++counters().children;
    const pid_t parent = getpid();
    const pid_t child = fork();
    if (child == 0) {
      // The child takes no lock that another thread may have held. Stopping the parent does not stop the child.
      for (int nap = 0; nap < naps; ++nap) {
        const timespec pause = {.tv_sec = 0, .tv_nsec = 10'000'000};
        nanosleep(&pause, nullptr);
        if (!testing_support::Holds(buffer->data(), 1_MiB, seed)) {
          ++counters().wrong_blocks;
          _exit(3);
        }
        if (getppid() != parent) ++counters().orphans_verified;
      }
      _exit(0);
    }
    if (child < 0) Unexplained("fork", absl::ErrnoToStatus(errno, "fork failed"));
    child_ = child;
    childs_ = *std::move(buffer);
  }

  void ReapChild(bool wait) {
    if (child_ == 0 || waitpid(child_, nullptr, wait ? 0 : WNOHANG) == 0) return;
    child_ = 0;
    childs_ = Buffer();
  }

  pid_t child_ = 0;
  Buffer childs_;  // block that the child looks at
};

class CutWorker : public CachingWorker {
 public:
  using CachingWorker::CachingWorker;

 protected:
  std::string SocketDir() override {
    set_may_be_cut();
    absl::StatusOr<std::unique_ptr<Proxy>> proxy = Proxy::Start(options().proxy_dir, options().socket_dir);
    if (!proxy.ok()) Unexplained("Proxy", proxy.status());
    proxy_ = *std::move(proxy);
    return options().proxy_dir;
  }
  void Step() override {
    CachingWorker::Step();
    if (Random(40) != 0) return;
    proxy_->Break();
    ++counters().cuts;
  }

 private:
  std::unique_ptr<Proxy> proxy_;
};

// ---- Clients for measuring ----

absl::StatusOr<Client> ConnectToMeasure(const WorkerOptions& options, absl::Duration wait = absl::ZeroDuration()) {
  return Client::Connect({.socket_dir = options.socket_dir,
                          .name = options.role,
                          .wait = wait,
                          .alloc_conf = "",
                          .connect_timeout = kPatience,
                          .call_timeout = kPatience});
}

// Fills three quarters of the device and keeps the memory in `blocks`.
void TakeMost(Client& client, const ChaosCounters& counters, std::vector<Buffer>& blocks) {
  for (uint64_t bytes = 0; bytes < counters.capacity_bytes / 4 * 3; bytes += 16_MiB) {
    absl::StatusOr<Buffer> block = client.Allocate(16_MiB);
    if (!block.ok()) Unexplained("Allocate", block.status());
    testing_support::Fill(block->data(), block->size(), bytes);
    blocks.push_back(*std::move(block));
  }
}

int BeFull(const WorkerOptions& options, const ChaosCounters& counters) {
  absl::StatusOr<Client> client = ConnectToMeasure(options);
  if (!client.ok()) Unexplained("Connect", client.status());
  std::vector<Buffer> blocks;
  TakeMost(*client, counters, blocks);
  SayReady();
  while (true) pause();
}

int BeIdle(const WorkerOptions& options, const ChaosCounters& counters) {
  absl::StatusOr<Client> client = ConnectToMeasure(options);
  if (!client.ok()) Unexplained("Connect", client.status());
  std::string line;
  do {
    std::vector<Buffer> blocks;
    TakeMost(*client, counters, blocks);
    blocks.clear();
    SayReady();
  } while (std::getline(std::cin, line));
  return 0;
}

// Takes an equal share of the device, segment by segment, while all other clients do so too, and writes to the whole
// share.
int BeInStorm(const WorkerOptions& options, ChaosCounters& counters) {
  absl::StatusOr<Client> client = ConnectToMeasure(options, /*wait=*/kPatience);
  if (!client.ok()) Unexplained("Connect", client.status());
  const uint64_t segment_bytes = counters.capacity_bytes / counters.clients / kStormSegments / 2_MiB * 2_MiB;
  for (int i = 0; i < kStormSegments; ++i) {
    const absl::StatusOr<void*> segment = client->LeaseSegment(segment_bytes);
    if (!segment.ok()) Unexplained("LeaseSegment", segment.status());
    std::memset(*segment, i, segment_bytes);
  }
  if (counters.storm_began_ns != 0) counters.storm_ns.Add(static_cast<uint64_t>(Now() - counters.storm_began_ns));
  SayReady();
  while (true) pause();
}

}  // namespace

int RunWorker(const WorkerOptions& options, ChaosCounters& counters) {
  if (options.role == "full") return BeFull(options, counters);
  if (options.role == "idle") return BeIdle(options, counters);
  if (options.role == "storm") return BeInStorm(options, counters);
  if (options.role == "victim") return CachingWorker(options, counters).Run();
  if (options.role == "cut") return CutWorker(options, counters).Run();
  return SegmentWorker(options, counters).Run();
}

}  // namespace vrambroker::fault
