// SPDX-License-Identifier: Apache-2.0
#include "tests/fault/chaos_measure.h"

#include <signal.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "client/vrambroker/client.h"
#include "tests/support/util.h"

namespace vrambroker::fault {
namespace {

using testing_support::kPatience;
using testing_support::WaitFor;

absl::StatusOr<Client> ConnectTaker(ChaosSetup& setup) {
  return Client::Connect({.socket_dir = setup.daemon().socket_dir(),
                          .name = "taker",
                          .wait = kPatience,
                          .alloc_conf = "",
                          .connect_timeout = kPatience,
                          .call_timeout = kPatience});
}

bool AnybodyWaits(ChaosSetup& setup) {
  const absl::StatusOr<v1::ListSessionsResponse> list = setup.admin().ListSessions();
  if (!list.ok()) return false;
  return std::any_of(list->sessions().begin(), list->sessions().end(), [](const v1::Session& session) {
    return !session.devices().empty() && !session.devices(0).waiting().empty();
  });
}

// Measures how long a request waits for the memory of a process, from the process's kill on.
absl::StatusOr<std::vector<double>> MeasureKills(ChaosSetup& setup, int times) {
  std::vector<double> milliseconds;
  absl::StatusOr<Client> taker = ConnectTaker(setup);
  if (!taker.ok()) return taker.status();
  for (int i = 0; i < times; ++i) {
    const absl::StatusOr<ChaosWorker> holder = setup.StartWorker("full");
    if (!holder.ok()) return holder.status();
    if (absl::Status status = holder->AwaitReady(); !status.ok()) return status;
    absl::StatusOr<void*> segment = absl::UnknownError("");
    absl::Time granted;
    std::thread waiting([&] {
      segment = taker->LeaseSegment(setup.counters().capacity_bytes / 2);
      granted = absl::Now();
    });
    const bool waits = WaitFor([&] { return AnybodyWaits(setup); });
    const absl::Time killed = absl::Now();
    holder->process->Signal(SIGKILL);
    waiting.join();
    if (!waits) return absl::DeadlineExceededError("the request does not wait");
    if (!segment.ok()) return segment.status();
    milliseconds.push_back(absl::ToDoubleMilliseconds(granted - killed));
    if (absl::Status status = taker->ReturnSegment(*segment); !status.ok()) return status;
    (void)holder->process->Wait();
  }
  return milliseconds;
}

// Measures how long a request takes that needs memory cached by another process.
absl::StatusOr<std::vector<double>> MeasureReclaim(ChaosSetup& setup, int times) {
  std::vector<double> milliseconds;
  absl::StatusOr<Client> taker = ConnectTaker(setup);
  if (!taker.ok()) return taker.status();
  const absl::StatusOr<ChaosWorker> holder = setup.StartWorker("idle");
  if (!holder.ok()) return holder.status();
  for (int i = 0; i < times; ++i) {
    if (i > 0) {
      if (absl::Status status = holder->process->WriteLine("again"); !status.ok()) return status;
    }
    if (absl::Status status = holder->AwaitReady(); !status.ok()) return status;
    const absl::Time begin = absl::Now();
    const absl::StatusOr<void*> segment = taker->LeaseSegment(setup.counters().capacity_bytes / 2);
    if (!segment.ok()) return segment.status();
    milliseconds.push_back(absl::ToDoubleMilliseconds(absl::Now() - begin));
    if (absl::Status status = taker->ReturnSegment(*segment); !status.ok()) return status;
  }
  holder->process->Signal(SIGKILL);
  (void)holder->process->Wait();
  return milliseconds;
}

int64_t Monotonic() {
  timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

class Storms {
 public:
  static absl::StatusOr<Storms> Begin(ChaosSetup::Options options, uint64_t clients) {
    options.clients = clients;
    absl::StatusOr<std::unique_ptr<ChaosSetup>> setup = ChaosSetup::Start(options);
    if (!setup.ok()) return setup.status();
    Storms storms(*std::move(setup));
    if (absl::Status status = storms.StartAll(); !status.ok()) return status;
    return storms;
  }

  absl::Status Once() {
    ChaosCounters& counters = setup_->counters();
    const uint64_t first = counters.storm_ns.size();
    counters.storm_began_ns = Monotonic();
    KillAll();
    if (absl::Status status = StartAll(); !status.ok()) return status;
    counters.storm_began_ns = 0;
    const std::vector<double> milliseconds = Milliseconds(counters.storm_ns, first);
    if (milliseconds.size() != counters.clients) return absl::InternalError("not every client took its time");
    last_ms_.push_back(*std::max_element(milliseconds.begin(), milliseconds.end()));
    return absl::OkStatus();
  }

  absl::Status End() {
    KillAll();
    if (absl::Status status = setup_->AwaitEmpty(); !status.ok()) return status;
    return setup_->StopDaemon();
  }

  void Print(const char* whose) const {
    const ChaosCounters& counters = setup_->counters();
    std::printf("%zu storms, %s daemon: %lu clients that hold all of %lu bytes are killed, and start again\n",
                last_ms_.size(), whose, static_cast<unsigned long>(counters.clients),
                static_cast<unsigned long>(counters.capacity_bytes));
    std::printf("  until a client has its memory again %s\n", Percentiles(Milliseconds(counters.storm_ns)).c_str());
    std::printf("  until the last one has              %s\n", Percentiles(last_ms_).c_str());
    std::fflush(stdout);
  }

 private:
  explicit Storms(std::unique_ptr<ChaosSetup> setup) : setup_(std::move(setup)) {}

  absl::Status StartAll() {
    if (absl::Status status = setup_->StartInto(workers_, "storm", setup_->counters().clients); !status.ok()) {
      return status;
    }
    for (const ChaosWorker& worker : workers_) {
      if (absl::Status status = worker.AwaitReady(); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  void KillAll() {
    for (const ChaosWorker& worker : workers_) worker.process->Signal(SIGKILL);
    workers_.clear();  // waits until the processes have ended
  }

  std::unique_ptr<ChaosSetup> setup_;
  std::vector<ChaosWorker> workers_;
  std::vector<double> last_ms_;  // time of each storm until the last client had its share
};

}  // namespace

absl::Status MeasureHandOvers(ChaosSetup& setup, int times) {
  if (times == 0) return absl::OkStatus();
  const absl::StatusOr<std::vector<double>> kills = MeasureKills(setup, times);
  if (!kills.ok()) return kills.status();
  const absl::StatusOr<std::vector<double>> reclaims = MeasureReclaim(setup, times);
  if (!reclaims.ok()) return reclaims.status();
  std::printf("%d hand-overs of half the device\n", times);
  std::printf("  kill -9 to memory in use elsewhere  %s\n", Percentiles(*kills).c_str());
  std::printf("  from one that holds it idle         %s\n", Percentiles(*reclaims).c_str());
  std::fflush(stdout);
  return setup.AwaitEmpty();
}

absl::Status MeasureStorms(const ChaosSetup::Options& options, int rounds, uint64_t clients,
                           const std::string& beside) {
  if (rounds == 0) return absl::OkStatus();
  std::vector<Storms> all;
  for (const std::string& program : {options.daemon.program, beside}) {
    if (!all.empty() && program.empty()) break;
    ChaosSetup::Options its = options;
    its.daemon.program = program;
    absl::StatusOr<Storms> storms = Storms::Begin(its, clients);
    if (!storms.ok()) return storms.status();
    all.push_back(*std::move(storms));
  }
  for (int round = 0; round < rounds; ++round) {
    for (Storms& storms : all) {
      if (absl::Status status = storms.Once(); !status.ok()) return status;
    }
  }
  for (Storms& storms : all) {
    if (absl::Status status = storms.End(); !status.ok()) return status;
    storms.Print(&storms == all.data() ? "this" : "the other");
  }
  return absl::OkStatus();
}

}  // namespace vrambroker::fault
