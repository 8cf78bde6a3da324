// SPDX-License-Identifier: Apache-2.0
//
// A real daemon and real clients under everything that can happen to them, while memory is scarce: is any byte lost or
// seen by somebody else, is any promise broken, does everything come back?
//
// First part: clients with guarantees, clients that wait, clients that make others give up what is idle, and clients
// that hoard. Those that hoard are killed, stopped for a while, and cut off at random, and leave children behind that
// hold on to their memory; the daemon itself is stopped and killed, too, as often as asked. Second part, for figures:
// how soon can somebody else use the memory of a killed process, and what another one holds idle?
//
// Exit codes: 0 all is well, 1 not. Times are printed and never judged.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "client/vrambroker/client.h"
#include "tests/fault/chaos_counters.h"
#include "tests/fault/chaos_worker.h"
#include "tests/support/child_process.h"
#include "tests/support/daemon_process.h"
#include "tests/support/raw_client.h"
#include "tests/support/shared_counters.h"
#include "tests/support/util.h"

ABSL_FLAG(int, seconds, 60, "How long the first part takes.");
ABSL_FLAG(int, restarts, 4, "How often the daemon is stopped or killed in it, and started again.");
ABSL_FLAG(int, handovers, 50, "How often each of the second part's two times is taken.");
ABSL_FLAG(uint64_t, seed, 1, "Of everything that is random.");
ABSL_FLAG(std::string, worker, "", "Internal: a role of chaos_worker.h.");
ABSL_FLAG(std::string, socket_dir, "", "Internal: of the daemon.");
ABSL_FLAG(std::string, proxy_dir, "", "Internal: of a client that is cut off.");
ABSL_FLAG(std::string, counters, "", "Internal: file of the counters that all processes share.");

namespace vrambroker::fault {
namespace {

using testing_support::ChildProcess;
using testing_support::DaemonOptions;
using testing_support::DaemonProcess;
using testing_support::kPatience;
using testing_support::MakeTempDir;
using testing_support::RawClient;
using testing_support::WaitFor;

// Short times for those that are asked: some of them are stopped.
std::string Config() {
  return absl::StrCat(R"(
  idle_decay: "100ms"
  reclaim_timeout: "200ms"
  client_timeout: "400ms"
  rules { session_name: "guaranteed*" guarantee { bytes: ")",
                      kChaosGuarantee, R"(" } tenant: "guaranteed" }
  rules { session_name: "urgent*" priority: 5 tenant: "waiting" }
  rules { session_name: "waiting*" tenant: "waiting" }
  rules { session_name: "asking*" isolation: STRICT }
  rules { session_name: "victim*" tenant: "victims" }
)");
}
constexpr int kAlwaysThere[] = {kGuaranteedClients, 3, 1, 2};  // guaranteed, waiting, urgent, asking
constexpr const char* kAlwaysThereRoles[] = {"guaranteed", "waiting", "urgent", "asking"};
constexpr int kVictims = 4;
constexpr int kCut = 2;

// "1.2 ms / 3.4 ms": the value that half of them do not exceed, and 99 of 100.
std::string Percentiles(std::vector<double> milliseconds) {
  if (milliseconds.empty()) return "none";
  std::sort(milliseconds.begin(), milliseconds.end());
  const auto at = [&](size_t percent) { return milliseconds[(milliseconds.size() - 1) * percent / 100]; };
  std::array<char, 96> text{};
  std::snprintf(text.data(), text.size(), "p50 %.1f ms, p99 %.1f ms (of %zu)", at(50), at(99), milliseconds.size());
  return text.data();
}

std::vector<double> Milliseconds(const Samples& nanoseconds) {
  std::vector<double> milliseconds;
  milliseconds.reserve(nanoseconds.size());
  for (uint64_t i = 0; i < nanoseconds.size(); ++i) milliseconds.push_back(static_cast<double>(nanoseconds[i]) / 1e6);
  return milliseconds;
}

class Chaos {
 public:
  bool Run() {
    counters_path_ = MakeTempDir() + "/counters";
    counters_ = testing_support::MapCounters<ChaosCounters>(counters_path_);
    DaemonOptions options;
    options.capacity = absl::StrCat(kChaosCapacity);
    options.config = Config();
    absl::StatusOr<std::unique_ptr<DaemonProcess>> daemon = DaemonProcess::Start(options);
    if (!daemon.ok()) return Fail(daemon.status().ToString());
    daemon_ = *std::move(daemon);
    bool well = ConnectAdmin() && Disturb() && Measure();
    admin_.reset();
    const absl::StatusOr<int> code = daemon_->Stop();
    if (!code.ok() || *code != 0) well = Fail(absl::StrCat("the daemon ended with ", code.value_or(-1)));
    if (!well) std::fprintf(stderr, "---- the daemon's log ----\n%s----\n", daemon_->log().c_str());
    return well;
  }

 private:
  struct Worker {
    std::string role;
    std::unique_ptr<ChildProcess> process;
    bool stopped = false;
    bool to_kill = false;  // when its stop is over
    absl::Time stopped_until;
  };

  static bool Fail(const std::string& why) {
    std::fprintf(stderr, "chaos: %s\n", why.c_str());
    return false;
  }

  bool ConnectAdmin() {
    absl::StatusOr<RawClient> admin = RawClient::Connect(daemon_->socket_dir());
    if (!admin.ok()) return Fail(admin.status().ToString());
    admin_ = std::make_unique<RawClient>(*std::move(admin));
    return true;
  }

  absl::StatusOr<Worker> Start(const std::string& role) {
    absl::StatusOr<std::unique_ptr<ChildProcess>> process = ChildProcess::Start(
        {"/proc/self/exe", absl::StrCat("--worker=", role), absl::StrCat("--socket_dir=", daemon_->socket_dir()),
         absl::StrCat("--proxy_dir=", role == "cut" ? MakeTempDir() : ""), absl::StrCat("--counters=", counters_path_),
         absl::StrCat("--seed=", absl::GetFlag(FLAGS_seed) * 1000 + started_++)});
    if (!process.ok()) return process.status();
    Worker worker;
    worker.role = role;
    worker.process = *std::move(process);
    return worker;
  }
  bool StartInto(std::vector<Worker>& workers, const std::string& role, int count) {
    for (int i = 0; i < count; ++i) {
      absl::StatusOr<Worker> worker = Start(role);
      if (!worker.ok()) return Fail(worker.status().ToString());
      workers.push_back(*std::move(worker));
    }
    return true;
  }

  static bool EndedBy(const Worker& worker) {
    return Fail(absl::StrCat("a client (", worker.role, ", pid ", worker.process->pid(), ") ended with ",
                             worker.process->Wait(absl::ZeroDuration()).value_or(-1), "; it wrote:\n",
                             worker.process->ErrorText()));
  }

  // ---- The first part ----

  bool Disturb() {
    std::vector<Worker> steady;
    for (size_t i = 0; i < std::size(kAlwaysThere); ++i) {
      if (!StartInto(steady, kAlwaysThereRoles[i], kAlwaysThere[i])) return false;
      if (i > 0) continue;
      // A guarantee is refused, not broken, while others hold too much of it: these come first.
      for (const Worker& worker : steady) {
        if (worker.process->ReadLine().value_or("") != "ready") return EndedBy(worker);
      }
    }
    std::vector<Worker> unlucky;
    if (!StartInto(unlucky, "victim", kVictims) || !StartInto(unlucky, "cut", kCut)) return false;
    const absl::Time begin = absl::Now();
    const absl::Duration length = absl::Seconds(absl::GetFlag(FLAGS_seconds));
    const int restarts = absl::GetFlag(FLAGS_restarts);
    for (int restarted = 0; absl::Now() < begin + length;) {
      absl::SleepFor(absl::Milliseconds(random_() % 60));
      for (const Worker& worker : steady) {
        if (!worker.process->Running()) return EndedBy(worker);
      }
      for (Worker& worker : unlucky) {
        if (!Strike(worker)) return false;
      }
      if (random_() % 16 == 0 && !CheckHeld({&steady, &unlucky})) return false;
      if (restarted < restarts && absl::Now() > begin + length * (restarted + 1) / (restarts + 1)) {
        if (!RestartDaemon(/*kill=*/restarted % 2 == 1)) return false;
        ++restarted;
      }
    }
    counters_->stop = true;
    for (Worker& worker : unlucky) worker.process->Signal(SIGCONT);
    for (std::vector<Worker>* workers : {&steady, &unlucky}) {
      for (const Worker& worker : *workers) {
        if (worker.process->Wait().value_or(-1) != 0) return EndedBy(worker);
      }
    }
    const bool empty = AwaitEmpty();
    Print();
    if (counters_->wrong_blocks > 0) return Fail("a block, perhaps one that a child looked at, held other bytes");
    return empty;  // a broken guarantee has ended its client
  }

  // What may happen to a client. At random, on average every two seconds.
  bool Strike(Worker& worker) {
    if (!worker.stopped && !worker.process->Running()) return EndedBy(worker);
    if (worker.stopped) {
      if (absl::Now() < worker.stopped_until) return true;
      worker.stopped = false;
      if (worker.to_kill) return Kill(worker);
      worker.process->Signal(SIGCONT);
      return true;
    }
    switch (random_() % 100) {
      case 0:
        return Kill(worker);
      case 1:
        worker.stopped = true;
        worker.to_kill = random_() % 2 == 0;
        // Often longer than others wait for its answer.
        worker.stopped_until = absl::Now() + absl::Milliseconds(50 + random_() % 1000);
        worker.process->Signal(SIGSTOP);
        ++stops_;
        return true;
      default:
        return true;
    }
  }

  bool Kill(Worker& worker) {
    worker.process->Signal(SIGKILL);
    (void)worker.process->Wait();
    ++kills_;
    absl::StatusOr<Worker> next = Start(worker.role);
    if (!next.ok()) return Fail(next.status().ToString());
    worker = *std::move(next);
    return true;
  }

  // What clients have mapped, all of them at one moment, is never more than the capacity, whichever daemon gave it.
  bool CheckHeld(const std::vector<std::vector<Worker>*>& groups) {
    std::vector<const Worker*> workers;
    for (const std::vector<Worker>* group : groups) {
      for (const Worker& worker : *group) workers.push_back(&worker);
    }
    for (const Worker* worker : workers) worker->process->Signal(SIGSTOP);
    const bool stopped = WaitFor([&] {
      return std::all_of(workers.begin(), workers.end(), [](const Worker* worker) {
        std::ifstream stat(absl::StrCat("/proc/", worker->process->pid(), "/stat"));
        std::string pid, name, state;
        return !(stat >> pid >> name >> state) || state == "T" || state == "Z";
      });
    });
    std::map<std::string, uint64_t> files;  // bytes, by inode
    for (const Worker* worker : workers) {
      std::ifstream maps(absl::StrCat("/proc/", worker->process->pid(), "/maps"));
      for (std::string line; std::getline(maps, line);) {
        // 7f00-7f20 rw-s 00000000 00:01 1234    /memfd:vrambroker-segment:OWNER:ORDINAL:RUN:BYTES (deleted)
        const std::vector<std::string> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
        if (words.size() < 6 || !absl::StrContains(words[5], "vrambroker-segment:")) continue;
        uint64_t bytes = 0;
        if (absl::SimpleAtoi(words[5].substr(words[5].rfind(':') + 1), &bytes)) files[words[4]] = bytes;
      }
    }
    for (const Worker* worker : workers) {
      if (!worker->stopped) worker->process->Signal(SIGCONT);
    }
    uint64_t held = 0;
    for (const auto& [inode, bytes] : files) held += bytes;
    ++looks_;
    most_held_ = std::max(most_held_, held);
    if (!stopped) return Fail("the clients did not stop");
    return held <= kChaosCapacity ||
           Fail(absl::StrCat("clients hold ", held, " bytes of a device with a capacity of ", kChaosCapacity));
  }

  bool RestartDaemon(bool kill) {
    ++counters_->restarts;  // before it is gone
    admin_.reset();
    if (kill) {
      daemon_->Kill();
      ++daemon_kills_;
    } else {
      const absl::StatusOr<int> code = daemon_->Stop();
      if (!code.ok() || *code != 0) return Fail(absl::StrCat("the daemon ended with ", code.value_or(-1)));
      ++daemon_stops_;
    }
    if (absl::Status status = daemon_->Restart(); !status.ok()) return Fail(status.ToString());
    ++counters_->restarts_done;
    return ConnectAdmin();
  }

  // Everybody has gone: the daemon holds nothing of the device, no session, and no file.
  bool AwaitEmpty() {
    uint64_t reserved = 0;
    int sessions = 0;
    int quarantined = 0;
    int files = 0;
    const bool empty = WaitFor([&] {
      const absl::StatusOr<v1::Device> device = admin_->GetDevice();
      const absl::StatusOr<v1::ListSessionsResponse> list = admin_->ListSessions();
      v1::ListQuarantineResponse quarantine;
      const absl::Status listed =
          RawClient::Call(admin_->admin(), &v1::Admin::Stub::ListQuarantine, v1::ListQuarantineRequest(), &quarantine);
      if (!device.ok() || !list.ok() || !listed.ok()) return false;
      reserved = device->reserved_bytes();
      sessions = list->sessions_size();
      quarantined = quarantine.holdings_size();
      files = SegmentFiles();
      return reserved == 0 && sessions == 0 && quarantined == 0 && files == 0;
    });
    return empty || Fail(absl::StrCat("everybody has gone, and still ", reserved, " bytes are reserved, ", sessions,
                                      " sessions open, ", quarantined, " clients' memory quarantined, and ", files,
                                      " files open"));
  }

  int SegmentFiles() const {
    int files = 0;
    std::error_code error;
    for (const auto& entry :
         std::filesystem::directory_iterator(absl::StrCat("/proc/", daemon_->pid(), "/fd"), error)) {
      if (absl::StrContains(std::filesystem::read_symlink(entry, error).string(), "vrambroker-segment")) ++files;
    }
    return files;
  }

  void Print() const {
    const auto count = [](const std::atomic<uint64_t>& counter) {
      return static_cast<unsigned long long>(counter.load());
    };
    std::printf("%d seconds, seed %llu\n", absl::GetFlag(FLAGS_seconds),
                static_cast<unsigned long long>(absl::GetFlag(FLAGS_seed)));
    std::printf("  clients killed with -9           %d\n", kills_);
    std::printf("  clients stopped for a while      %d\n", stops_);
    std::printf("  connections broken               %llu (sessions resumed %llu times)\n", count(counters_->cuts),
                count(counters_->resumed));
    std::printf("  children left with descriptors   %llu of clients (looked %llu times after those were killed)\n",
                count(counters_->children), count(counters_->orphans_verified));
    std::printf("  daemon stopped, killed           %d, %d (new sessions of living clients: %llu)\n", daemon_stops_,
                daemon_kills_, count(counters_->new_sessions));
    std::printf("  guarantees had from new daemons  %s\n",
                Percentiles(Milliseconds(counters_->guaranteed_back_ns)).c_str());
    std::printf("  memory of all clients            at most %llu of %llu bytes, in %d looks\n",
                static_cast<unsigned long long>(most_held_), static_cast<unsigned long long>(kChaosCapacity), looks_);
    std::printf("  blocks verified                  %llu (%llu bytes), with other bytes: %llu\n",
                count(counters_->verified_blocks), count(counters_->verified_bytes), count(counters_->wrong_blocks));
    std::printf("  requests within guarantees       %llu, refused: %llu\n",
                count(counters_->kept_guarantees) + count(counters_->broken_guarantees),
                count(counters_->broken_guarantees));
    std::printf("  requests granted at once         %llu\n", count(counters_->granted_at_once));
    std::printf("  granted by reclaim               %llu, %s\n", count(counters_->granted_by_reclaim),
                Percentiles(Milliseconds(counters_->reclaim_ns)).c_str());
    std::printf("  granted after waiting            %llu\n", count(counters_->granted_after_wait));
    std::printf("  refused for lack of memory       %llu\n", count(counters_->refused));
    std::fflush(stdout);
  }

  // ---- The second part ----

  bool Measure() {
    const absl::StatusOr<std::vector<double>> kills = MeasureKills();
    if (!kills.ok()) return Fail(kills.status().ToString());
    const absl::StatusOr<std::vector<double>> reclaims = MeasureReclaim();
    if (!reclaims.ok()) return Fail(reclaims.status().ToString());
    std::printf("%d hand-overs of half the device\n", absl::GetFlag(FLAGS_handovers));
    std::printf("  kill -9 to memory in use elsewhere  %s\n", Percentiles(*kills).c_str());
    std::printf("  from one that holds it idle         %s\n", Percentiles(*reclaims).c_str());
    return AwaitEmpty();
  }

  absl::StatusOr<Client> ConnectTaker() {
    return Client::Connect({.socket_dir = daemon_->socket_dir(),
                            .name = "taker",
                            .wait = kPatience,
                            .alloc_conf = "",
                            .connect_timeout = kPatience,
                            .call_timeout = kPatience});
  }

  static absl::Status Ready(const Worker& worker) {
    const absl::StatusOr<std::string> line = worker.process->ReadLine();
    if (!line.ok()) return line.status();
    return *line == "ready" ? absl::OkStatus() : absl::InternalError(*line);
  }

  // A request waits for the memory of a process that is then killed.
  absl::StatusOr<std::vector<double>> MeasureKills() {
    std::vector<double> milliseconds;
    absl::StatusOr<Client> taker = ConnectTaker();
    if (!taker.ok()) return taker.status();
    for (int i = 0; i < absl::GetFlag(FLAGS_handovers); ++i) {
      const absl::StatusOr<Worker> holder = Start("full");
      if (!holder.ok()) return holder.status();
      if (absl::Status status = Ready(*holder); !status.ok()) return status;
      absl::StatusOr<void*> segment = absl::UnknownError("");
      absl::Time granted;
      std::thread waiting([&] {
        segment = taker->LeaseSegment(kChaosCapacity / 2);
        granted = absl::Now();
      });
      const bool waits = WaitFor([&] { return AnybodyWaits(); });
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

  bool AnybodyWaits() {
    const absl::StatusOr<v1::ListSessionsResponse> list = admin_->ListSessions();
    if (!list.ok()) return false;
    return std::any_of(list->sessions().begin(), list->sessions().end(), [](const v1::Session& session) {
      return !session.devices().empty() && !session.devices(0).waiting().empty();
    });
  }

  // A request needs what another process has in its cache.
  absl::StatusOr<std::vector<double>> MeasureReclaim() {
    std::vector<double> milliseconds;
    absl::StatusOr<Client> taker = ConnectTaker();
    if (!taker.ok()) return taker.status();
    const absl::StatusOr<Worker> holder = Start("idle");
    if (!holder.ok()) return holder.status();
    for (int i = 0; i < absl::GetFlag(FLAGS_handovers); ++i) {
      if (i > 0) {
        if (absl::Status status = holder->process->WriteLine("again"); !status.ok()) return status;
      }
      if (absl::Status status = Ready(*holder); !status.ok()) return status;
      const absl::Time begin = absl::Now();
      const absl::StatusOr<void*> segment = taker->LeaseSegment(kChaosCapacity / 2);
      if (!segment.ok()) return segment.status();
      milliseconds.push_back(absl::ToDoubleMilliseconds(absl::Now() - begin));
      if (absl::Status status = taker->ReturnSegment(*segment); !status.ok()) return status;
    }
    holder->process->Signal(SIGKILL);
    (void)holder->process->Wait();
    return milliseconds;
  }

  std::string counters_path_;
  ChaosCounters* counters_ = nullptr;
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<RawClient> admin_;
  std::mt19937_64 random_{absl::GetFlag(FLAGS_seed)};
  uint64_t started_ = 0;
  int kills_ = 0;
  int stops_ = 0;
  int daemon_stops_ = 0;
  int daemon_kills_ = 0;
  int looks_ = 0;  // at what all clients hold
  uint64_t most_held_ = 0;
};

}  // namespace
}  // namespace vrambroker::fault

int main(int argc, char** argv) {
  using vrambroker::fault::ChaosCounters;
  absl::SetProgramUsageMessage("kills, stops and cuts off clients of a daemon.\n\n  chaos --seconds=300 --restarts=20");
  absl::ParseCommandLine(argc, argv);
  const std::string role = absl::GetFlag(FLAGS_worker);
  if (role.empty()) return vrambroker::fault::Chaos().Run() ? 0 : 1;
  ChaosCounters& counters = *vrambroker::testing_support::MapCounters<ChaosCounters>(absl::GetFlag(FLAGS_counters));
  return vrambroker::fault::RunWorker({.role = role,
                                       .socket_dir = absl::GetFlag(FLAGS_socket_dir),
                                       .proxy_dir = absl::GetFlag(FLAGS_proxy_dir),
                                       .seed = absl::GetFlag(FLAGS_seed)},
                                      counters);
}
