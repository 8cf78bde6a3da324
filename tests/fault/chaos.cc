// SPDX-License-Identifier: Apache-2.0
//
// Test of a real daemon and real clients under all kinds of faults, while memory is scarce. Questions: is any byte lost
// or seen by a stranger, is any promise broken, and does all memory come back?
//
// First part: some clients have guarantees, some wait, some make others give up idle memory, and some hoard. Hoarding
// clients are killed, stopped for a while, and cut off at random, and leave children behind that keep the memory. The
// daemon is stopped and killed as often as requested. An operator changes guarantees, and the daemon reads another
// configuration. The second and third parts produce figures: chaos_measure.h.
//
// Exit codes: 0 when all is well, otherwise 1. The test prints times and never judges times.
#include <signal.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "allocator/base/bytes.h"
#include "tests/fault/chaos_counters.h"
#include "tests/fault/chaos_look.h"
#include "tests/fault/chaos_measure.h"
#include "tests/fault/chaos_setup.h"
#include "tests/fault/chaos_worker.h"
#include "tests/support/shared_counters.h"

ABSL_FLAG(int, seconds, 60, "How long the first part takes.");
ABSL_FLAG(uint64_t, clients, vrambroker::fault::kUsualClients, "How many there are at a time in it.");
ABSL_FLAG(int, devices, 1, "How many the daemon has.");
ABSL_FLAG(int, guarantees, 0, "How often an operator changes the guarantee of a client in it.");
ABSL_FLAG(int, reloads, 0, "How often the daemon reads another configuration in it.");
ABSL_FLAG(std::string, capacity, "", "Of each device, as 1GiB. Default: 16 MiB for each client, at least 256 MiB.");
ABSL_FLAG(int, restarts, 4, "How often the daemon is stopped or killed in it, and started again.");
ABSL_FLAG(int, pauses, 0, "How often the daemon is stopped in it (SIGSTOP), for up to a second, and goes on.");
ABSL_FLAG(uint64_t, rate, 0, "max_calls_per_second_per_uid of the daemon; 0: the default, which nobody reaches.");
ABSL_FLAG(std::string, clock_steps, "", "A library to preload that sets the clock all the time: clock_steps.c.");
ABSL_FLAG(int, handovers, 50, "How often each of the second part's two times is taken.");
ABSL_FLAG(int, storms, 0, "How many storms of restarts the third part has.");
ABSL_FLAG(uint64_t, storm_clients, 16, "How many clients are killed in a storm.");
ABSL_FLAG(std::string, storm_beside, "", "Another build of the daemon, whose storms take turns with this build's.");
ABSL_FLAG(std::string, driver_latency, "", "host_driver_latency of the daemon.");
ABSL_FLAG(uint64_t, seed, 1, "Of everything that is random.");
ABSL_FLAG(std::string, worker, "", "Internal: a role of chaos_worker.h.");
ABSL_FLAG(std::string, socket_dir, "", "Internal: of the daemon.");
ABSL_FLAG(std::string, proxy_dir, "", "Internal: of a client that is cut off.");
ABSL_FLAG(std::string, counters, "", "Internal: file of the counters that all processes share.");

namespace vrambroker::fault {
namespace {

using testing_support::ChildProcess;

constexpr absl::Duration kReportEvery = absl::Minutes(1);

// Returns the daemon's configuration. Clients get short times to answer, because some clients are stopped.
std::string Config() {
  const std::string limit = absl::StrCat("limit { bytes: \"", kChaosLimit, "\" }");
  return absl::StrCat(R"(
  idle_decay: "100ms"
  reclaim_timeout: "200ms"
  client_timeout: "400ms"
  rules { session_name: "guaranteed*" guarantee { bytes: ")",
                      kChaosGuarantee, R"(" } tenant: "guaranteed" )", limit, R"( }
  rules { session_name: "urgent*" priority: 5 tenant: "waiting" )",
                      limit, R"( }
  rules { session_name: "waiting*" tenant: "waiting" )",
                      limit, R"( }
  rules { session_name: "asking*" isolation: STRICT )",
                      limit, R"( }
  rules { session_name: "victim*" tenant: "victims" )",
                      limit, R"( }
  rules { session_name: "cut*" )",
                      limit, R"( }
)",
                      absl::GetFlag(FLAGS_driver_latency).empty()
                          ? ""
                          : absl::StrCat("host_driver_latency: \"", absl::GetFlag(FLAGS_driver_latency), "\"\n"),
                      absl::GetFlag(FLAGS_rate) == 0
                          ? ""
                          : absl::StrCat("max_calls_per_second_per_uid: ", absl::GetFlag(FLAGS_rate), "\n"));
}

// Role of clients, with the number of clients among kUsualClients. Larger numbers of clients keep the mixture.
struct Part {
  const char* role;
  uint64_t clients;
  bool may_be_struck;
};
constexpr Part kParts[] = {{"guaranteed", 2, false}, {"waiting", 3, false}, {"urgent", 1, false},
                           {"asking", 2, false},     {"victim", 4, true},   {"cut", 2, true}};

class Chaos {
 public:
  explicit Chaos(ChaosSetup& setup) : setup_(setup), counters_(setup.counters()), looks_(counters_.capacity_bytes) {}

  absl::Status Run() {
    if (absl::Status status = StartClients(); !status.ok()) return status;
    if (absl::Status status = Disturb(); !status.ok()) return status;
    counters_.stop = true;
    for (ChaosWorker& worker : unlucky_) worker.process->Signal(SIGCONT);
    for (const std::vector<ChaosWorker>* workers : {&steady_, &unlucky_}) {
      for (const ChaosWorker& worker : *workers) {
        if (worker.process->Wait().value_or(-1) != 0) return EndedBy(worker);
      }
    }
    const absl::Status empty = setup_.AwaitEmpty();
    Print();
    if (counters_.wrong_blocks > 0) {
      return absl::DataLossError("a block, perhaps one that a child looked at, held other bytes");
    }
    if (!unlucky_.empty() && counters_.kept_guarantees == 0) {
      return absl::InternalError("no client has made a request within its guarantee");
    }
    if (!empty.ok()) return empty;  // a client with a broken guarantee ends itself: no count to check
    if (looks_.count() > 0 && looks_.most_held() == 0) {
      return absl::InternalError("no look saw any memory: it does not know the names of the segments' files any more");
    }
    const uint64_t left = looks_.BytesLeft();
    return left == 0 ? absl::OkStatus() : absl::InternalError(absl::StrCat(left, " bytes are still mapped"));
  }

 private:
  static absl::Status EndedBy(const ChaosWorker& worker) {
    return absl::InternalError(absl::StrCat("a client (", worker.role, ", pid ", worker.process->pid(), ") ended with ",
                                            worker.process->Wait(absl::ZeroDuration()).value_or(-1), "; it wrote:\n",
                                            worker.process->ErrorText()));
  }

  absl::Status StartClients() {
    const uint64_t clients = counters_.clients;
    uint64_t begun = 0;
    uint64_t started = 0;
    for (const Part& part : kParts) {
      begun += part.clients;
      const uint64_t until = clients * begun / kUsualClients;  // the counts of all roles add up to `clients`
      std::vector<ChaosWorker>& workers = part.may_be_struck ? unlucky_ : steady_;
      if (absl::Status status = setup_.StartInto(workers, part.role, until - started); !status.ok()) return status;
      started = until;
      if (begun > kParts[0].clients) continue;
      // Clients with guarantees start first: the daemon refuses a guarantee while other clients hold too much memory.
      for (const ChaosWorker& worker : workers) {
        if (!worker.AwaitReady().ok()) return EndedBy(worker);
      }
    }
    return absl::OkStatus();
  }

  absl::Status Disturb() {
    const absl::Time begin = absl::Now();
    const absl::Duration length = absl::Seconds(absl::GetFlag(FLAGS_seconds));
    const int restarts = absl::GetFlag(FLAGS_restarts);
    absl::Time next_report = begin + kReportEvery;
    while (absl::Now() < begin + length) {
      absl::SleepFor(absl::Milliseconds(random_() % 60));
      for (const ChaosWorker& worker : steady_) {
        if (!worker.process->Running()) return EndedBy(worker);
      }
      for (ChaosWorker& worker : unlucky_) {
        if (absl::Status status = Strike(worker); !status.ok()) return status;
      }
      if (random_() % 16 == 0) {
        if (absl::Status status = Look(); !status.ok()) return status;
      }
      const int restarted = daemon_stops_ + daemon_kills_;
      if (restarted < restarts && absl::Now() > begin + length * (restarted + 1) / (restarts + 1)) {
        const bool kill = restarted % 2 == 1;
        if (absl::Status status = setup_.RestartDaemon(kill); !status.ok()) return status;
        ++(kill ? daemon_kills_ : daemon_stops_);
      }
      const int pauses = absl::GetFlag(FLAGS_pauses);
      if (pauses_ < pauses && absl::Now() > begin + length * (pauses_ + 1) / (pauses + 1)) Pause();
      const int guarantees = absl::GetFlag(FLAGS_guarantees);
      const int changes = guarantees_changed_ + guarantees_kept_;
      if (changes < guarantees && absl::Now() > begin + length * (changes + 1) / (guarantees + 1)) {
        if (absl::Status status = ChangeGuarantee(); !status.ok()) return status;
      }
      const int reloads = absl::GetFlag(FLAGS_reloads);
      if (reloads_ < reloads && absl::Now() > begin + length * (reloads_ + 1) / (reloads + 1)) {
        if (absl::Status status = Reload(); !status.ok()) return status;
      }
      if (absl::Now() > next_report) {
        next_report += kReportEvery;
        std::printf("-- after %s\n", absl::FormatDuration(absl::Trunc(absl::Now() - begin, absl::Seconds(1))).c_str());
        Print();
      }
    }
    return absl::OkStatus();
  }

  // Stops the daemon for up to a second: often longer than the daemon waits for answers, always shorter than clients
  // wait for the daemon.
  void Pause() {
    setup_.daemon().process().Signal(SIGSTOP);
    absl::SleepFor(absl::Milliseconds(random_() % 1000));
    setup_.daemon().process().Signal(SIGCONT);
    ++pauses_;
  }

  // Changes the guarantee of a random client. A "guaranteed" client never gets less than kChaosGuarantee. A "waiting"
  // client gets a guarantee, or loses its guarantee.
  absl::Status ChangeGuarantee() {
    const absl::StatusOr<v1::ListSessionsResponse> sessions = setup_.admin().ListSessions();
    if (!sessions.ok()) return sessions.status();
    v1::SetGuaranteeRequest request;
    std::vector<v1::Session> candidates;
    for (const v1::Session& session : sessions->sessions()) {
      if (absl::StartsWith(session.name(), "guaranteed") || absl::StartsWith(session.name(), "waiting")) {
        candidates.push_back(session);
      }
    }
    ++guarantees_kept_;
    if (candidates.empty()) return absl::OkStatus();
    const v1::Session& session = candidates[random_() % candidates.size()];
    const bool relies = absl::StartsWith(session.name(), "guaranteed");
    *request.mutable_session() = testing_support::Ref(session.id());
    *request.mutable_guarantee() =
        testing_support::BytesLimit(relies ? kChaosGuarantee + random_() % 7 * 2_MiB : random_() % 5 * 2_MiB);
    v1::SetGuaranteeResponse response;
    const absl::Status status =
        testing_support::RawClient::Call(setup_.admin().admin(), &v1::Admin::Stub::SetGuarantee, request, &response);
    // Allowed refusals: other clients hold too much memory, or the client has gone or is about to go.
    if (absl::IsResourceExhausted(status) || absl::IsNotFound(status) || absl::IsAborted(status)) {
      return absl::OkStatus();
    }
    --guarantees_kept_;
    ++guarantees_changed_;
    return status;
  }

  // Switches the limit of "asking" clients between the whole limit and half of the limit.
  absl::Status Reload() {
    const std::string path = setup_.daemon().config_path();
    std::stringstream text;
    text << std::ifstream(path).rdbuf();
    const std::string whole = absl::StrCat("isolation: STRICT limit { bytes: \"", kChaosLimit, "\" }");
    const std::string half = absl::StrCat("isolation: STRICT limit { bytes: \"", kChaosLimit / 2, "\" }");
    const bool is_whole = absl::StrContains(text.str(), whole);
    std::ofstream(path) << absl::StrReplaceAll(text.str(), {{is_whole ? whole : half, is_whole ? half : whole}});
    v1::ReloadConfigResponse response;
    ++reloads_;
    return testing_support::RawClient::Call(setup_.admin().admin(), &v1::Admin::Stub::ReloadConfig,
                                            v1::ReloadConfigRequest(), &response);
  }

  // Kills or stops a client at random: about every two seconds for each client, with the usual number of clients.
  absl::Status Strike(ChaosWorker& worker) {
    if (!worker.stopped && !worker.process->Running()) return EndedBy(worker);
    if (worker.stopped) {
      if (absl::Now() < worker.stopped_until) return absl::OkStatus();
      worker.stopped = false;
      if (worker.to_kill) return Kill(worker);
      worker.process->Signal(SIGCONT);
      return absl::OkStatus();
    }
    switch (random_() % (100 * counters_.clients / kUsualClients)) {
      case 0:
        return Kill(worker);
      case 1:
        worker.stopped = true;
        worker.to_kill = random_() % 2 == 0;
        // The stop is often longer than the daemon waits for the client's answer.
        worker.stopped_until = absl::Now() + absl::Milliseconds(50 + random_() % 1000);
        worker.process->Signal(SIGSTOP);
        ++stops_;
        return absl::OkStatus();
      default:
        return absl::OkStatus();
    }
  }

  absl::Status Kill(ChaosWorker& worker) {
    worker.process->Signal(SIGKILL);
    (void)worker.process->Wait();
    ++kills_;
    absl::StatusOr<ChaosWorker> next = setup_.StartWorker(worker.role);
    if (!next.ok()) return next.status();
    worker = *std::move(next);
    return absl::OkStatus();
  }

  // Stops all clients, and looks at the memory of all clients at one moment.
  absl::Status Look() {
    std::vector<const ChildProcess*> processes;
    std::vector<Looks::Client> clients;
    for (const std::vector<ChaosWorker>* workers : {&steady_, &unlucky_}) {
      for (const ChaosWorker& worker : *workers) {
        processes.push_back(worker.process.get());
        clients.push_back({.pid = worker.process->pid(), .role = worker.role, .limit_bytes = kChaosLimit});
      }
    }
    ChildProcess::StopAll(processes);
    const absl::Status status = looks_.Look(clients);
    for (const std::vector<ChaosWorker>* workers : {&steady_, &unlucky_}) {
      for (const ChaosWorker& worker : *workers) {
        if (!worker.stopped) worker.process->Signal(SIGCONT);
      }
    }
    return status;
  }

  void Print() const {
    const auto count = [](const std::atomic<uint64_t>& counter) {
      return static_cast<unsigned long long>(counter.load());
    };
    std::printf("%llu clients, %d seconds, seed %llu\n", count(counters_.clients), absl::GetFlag(FLAGS_seconds),
                static_cast<unsigned long long>(absl::GetFlag(FLAGS_seed)));
    std::printf("  clients killed with -9           %d\n", kills_);
    std::printf("  clients stopped for a while      %d\n", stops_);
    std::printf("  connections broken               %llu (sessions resumed %llu times)\n", count(counters_.cuts),
                count(counters_.resumed));
    std::printf("  children left with descriptors   %llu of clients (looked %llu times after those were killed)\n",
                count(counters_.children), count(counters_.orphans_verified));
    std::printf("  daemon stopped, killed           %d, %d (new sessions of living clients: %llu)\n", daemon_stops_,
                daemon_kills_, count(counters_.new_sessions));
    std::printf("  daemon stopped for a while       %d\n", pauses_);
    std::printf("  guarantees changed, not          %d, %d\n", guarantees_changed_, guarantees_kept_);
    std::printf("  configurations read              %d\n", reloads_);
    std::printf("  calls refused by the rate        %llu\n", count(counters_.refused_by_rate));
    std::printf("  guarantees had from new daemons  %s\n",
                Percentiles(Milliseconds(counters_.guaranteed_back_ns)).c_str());
    std::printf("  memory of all clients            at most %llu of %llu bytes, in %llu looks\n",
                static_cast<unsigned long long>(looks_.most_held()), count(counters_.capacity_bytes),
                static_cast<unsigned long long>(looks_.count()));
    std::printf("  memory of one client             at most %llu bytes, limit %llu\n",
                static_cast<unsigned long long>(looks_.most_of_one()), static_cast<unsigned long long>(kChaosLimit));
    std::printf("  with what children still map     at most %llu bytes\n",
                static_cast<unsigned long long>(looks_.most_with_children()));
    std::printf("  blocks verified                  %llu (%llu bytes), with other bytes: %llu\n",
                count(counters_.verified_blocks), count(counters_.verified_bytes), count(counters_.wrong_blocks));
    std::printf("  requests within guarantees       %llu, refused: %llu\n",
                count(counters_.kept_guarantees) + count(counters_.broken_guarantees),
                count(counters_.broken_guarantees));
    std::printf("  requests granted at once         %llu\n", count(counters_.granted_at_once));
    std::printf("  granted by reclaim               %llu, %s\n", count(counters_.granted_by_reclaim),
                Percentiles(Milliseconds(counters_.reclaim_ns)).c_str());
    std::printf("  granted after waiting            %llu\n", count(counters_.granted_after_wait));
    std::printf("  refused for lack of memory       %llu, by the client's own limit: %llu\n", count(counters_.refused),
                count(counters_.refused_by_limit));
    std::fflush(stdout);
  }

  ChaosSetup& setup_;
  ChaosCounters& counters_;
  Looks looks_;
  std::vector<ChaosWorker> steady_;
  std::vector<ChaosWorker> unlucky_;
  std::mt19937_64 random_{absl::GetFlag(FLAGS_seed)};
  int kills_ = 0;
  int stops_ = 0;
  int daemon_stops_ = 0;
  int daemon_kills_ = 0;
  int pauses_ = 0;
  int guarantees_changed_ = 0;
  int guarantees_kept_ = 0;  // refused changes of guarantees
  int reloads_ = 0;
};

// Returns the capacity of each device. The default makes memory scarce.
absl::StatusOr<uint64_t> Capacity() {
  const std::string text = absl::GetFlag(FLAGS_capacity);
  if (text.empty()) return std::max<uint64_t>(256_MiB, 16_MiB * absl::GetFlag(FLAGS_clients));
  return ParseBytes(text);
}

// Raises the limit of descriptors: the test and its daemon have several descriptors for each client.
absl::Status AllowDescriptors(uint64_t wanted) {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return absl::ErrnoToStatus(errno, "getrlimit failed");
  if (limit.rlim_cur >= wanted) return absl::OkStatus();
  if (limit.rlim_max < wanted) {
    return absl::FailedPreconditionError(
        absl::StrCat("so many clients need ", wanted, " file descriptors: ulimit -Hn ", wanted));
  }
  limit.rlim_cur = wanted;
  return setrlimit(RLIMIT_NOFILE, &limit) == 0 ? absl::OkStatus() : absl::ErrnoToStatus(errno, "setrlimit failed");
}

absl::Status RunWith(ChaosSetup& setup) {
  if (absl::GetFlag(FLAGS_seconds) > 0) {
    if (absl::Status status = Chaos(setup).Run(); !status.ok()) return status;
  }
  if (absl::Status status = MeasureHandOvers(setup, absl::GetFlag(FLAGS_handovers)); !status.ok()) return status;
  return setup.StopDaemon();
}

absl::Status Run() {
  const absl::StatusOr<uint64_t> capacity = Capacity();
  if (!capacity.ok()) return capacity.status();
  ChaosSetup::Options options;
  options.daemon.config = Config();
  if (const std::string library = absl::GetFlag(FLAGS_clock_steps); !library.empty()) {
    options.environment = {{"LD_PRELOAD", library}, {"VRAMBROKER_TEST_CLOCK_STEPS", "0,3600,-3600,7,-86400"}};
  }
  options.daemon.environment = options.environment;
  options.capacity_bytes = *capacity;
  options.clients = absl::GetFlag(FLAGS_clients);
  options.daemon.devices = absl::GetFlag(FLAGS_devices);
  if (options.daemon.devices < 1 || options.daemon.devices > static_cast<int>(kMostDevices)) {
    return absl::InvalidArgumentError(absl::StrCat("--devices: 1 to ", kMostDevices));
  }
  options.seed = absl::GetFlag(FLAGS_seed);
  // Descriptors for the test and the daemon: the daemon leaves a user only a part of its descriptors for connections
  // (DescriptorBudget), and segments need descriptors, too.
  if (absl::Status status = AllowDescriptors(1024 + 24 * options.clients); !status.ok()) return status;
  absl::StatusOr<std::unique_ptr<ChaosSetup>> setup = ChaosSetup::Start(options);
  if (!setup.ok()) return setup.status();
  if (absl::Status status = RunWith(**setup); !status.ok()) {
    std::fprintf(stderr, "---- the daemon's log ----\n%s----\n", (*setup)->daemon().log().c_str());
    return status;
  }
  return MeasureStorms(options, absl::GetFlag(FLAGS_storms), absl::GetFlag(FLAGS_storm_clients),
                       absl::GetFlag(FLAGS_storm_beside));
}

}  // namespace
}  // namespace vrambroker::fault

int main(int argc, char** argv) {
  using vrambroker::fault::ChaosCounters;
  absl::SetProgramUsageMessage("kills, stops and cuts off clients of a daemon.\n\n  chaos --seconds=300 --restarts=20");
  absl::ParseCommandLine(argc, argv);
  const std::string role = absl::GetFlag(FLAGS_worker);
  if (role.empty()) {
    const absl::Status status = vrambroker::fault::Run();
    if (!status.ok()) std::fprintf(stderr, "chaos: %s\n", status.ToString().c_str());
    return status.ok() ? 0 : 1;
  }
  ChaosCounters& counters = *vrambroker::testing_support::MapCounters<ChaosCounters>(absl::GetFlag(FLAGS_counters));
  return vrambroker::fault::RunWorker({.role = role,
                                       .socket_dir = absl::GetFlag(FLAGS_socket_dir),
                                       .proxy_dir = absl::GetFlag(FLAGS_proxy_dir),
                                       .seed = absl::GetFlag(FLAGS_seed)},
                                      counters);
}
