// SPDX-License-Identifier: Apache-2.0
//
// Measures the cost of remote allocation on top of gRPC: an Allocate + Free pair against two empty calls to the same
// daemon.
//
// Every client is a process with its own connection. Each way of making a pair has its own clients. A round runs a
// batch of every way, one after the other, in an order that changes from round to round. A way's ratio is the median
// over the rounds of (empty pairs per second) / (the way's pairs per second) in the same round.
#include <algorithm>
#include <array>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "nlohmann/json.hpp"
#include "tests/bench/bench_client.h"
#include "tests/bench/daemon_process.h"
#include "tests/bench/worker_process.h"

ABSL_FLAG(std::string, daemon, "", "The vrambrokerd to measure.");
ABSL_FLAG(std::string, clients, "1,4,16", "Numbers of clients at a time.");
ABSL_FLAG(int, rounds, 41, "Rounds of batches for each number of clients.");
ABSL_FLAG(int, batch_ms, 100, "How long a batch takes.");
ABSL_FLAG(std::string, json, "", "Where to write the figures, too.");

namespace vrambroker::bench {
namespace {

// Figures of a batch of all clients, or of a way over all rounds.
struct Figures {
  double ratio = 0;
  double pair_us = 0;  // a client's wait for a pair
  double pairs_per_second = 0;
  double daemon_cpu_us = 0;  // per pair
};

using Workers = std::vector<std::unique_ptr<WorkerProcess>>;

absl::StatusOr<Workers> StartWorkers(const DaemonProcess& daemon, Way way, int clients) {
  Workers workers;
  for (int i = 0; i < clients; ++i) {
    absl::StatusOr<std::unique_ptr<WorkerProcess>> worker = WorkerProcess::Start(daemon.socket_dir(), way);
    if (!worker.ok()) return worker.status();
    workers.push_back(*std::move(worker));
  }
  for (const auto& worker : workers) {
    if (absl::Status status = worker->WaitReady(); !status.ok()) return status;
  }
  return workers;
}

absl::StatusOr<Figures> RunBatch(const DaemonProcess& daemon, const Workers& workers, int batch_ms) {
  const int64_t from_ns = MonotonicNanoseconds() + 2'000'000;
  const double cpu_before = daemon.CpuSeconds();
  for (const auto& worker : workers) {
    if (absl::Status status = worker->StartBatch(from_ns, from_ns + int64_t{batch_ms} * 1'000'000); !status.ok()) {
      return status;
    }
  }
  int64_t pairs = 0;
  double waited = 0;
  Figures figures;
  for (const auto& worker : workers) {
    const absl::StatusOr<Batch> batch = worker->WaitBatch();
    if (!batch.ok()) return batch.status();
    pairs += batch->pairs;
    waited += batch->seconds;
    figures.pairs_per_second += static_cast<double>(batch->pairs) / batch->seconds;
  }
  figures.pair_us = waited / static_cast<double>(pairs) * 1e6;
  figures.daemon_cpu_us = (daemon.CpuSeconds() - cpu_before) / static_cast<double>(pairs) * 1e6;
  return figures;
}

// A quantile of a figure; `share` 0.5 is the median.
double Quantile(const std::vector<Figures>& rounds, double Figures::*figure, double share) {
  std::vector<double> values;
  for (const Figures& round : rounds) values.push_back(round.*figure);
  const size_t index = static_cast<size_t>(share * static_cast<double>(values.size() - 1) + 0.5);
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(index), values.end());
  return values[index];
}

// Figures by way, then round.
using Rounds = std::array<std::vector<Figures>, kWays.size()>;

absl::StatusOr<Rounds> Measure(const DaemonProcess& daemon, int clients) {
  std::array<Workers, kWays.size()> workers;
  for (size_t way = 0; way < kWays.size(); ++way) {
    absl::StatusOr<Workers> started = StartWorkers(daemon, kWays[way], clients);
    if (!started.ok()) return started.status();
    workers[way] = *std::move(started);
  }
  Rounds rounds;
  const int count = absl::GetFlag(FLAGS_rounds);
  for (int round = -1; round < count; ++round) {  // -1: a warm-up
    std::array<Figures, kWays.size()> batches;
    for (size_t i = 0; i < kWays.size(); ++i) {
      const size_t way = (i + static_cast<size_t>(round + 1)) % kWays.size();
      const absl::StatusOr<Figures> batch = RunBatch(daemon, workers[way], absl::GetFlag(FLAGS_batch_ms));
      if (!batch.ok()) return batch.status();
      batches[way] = *batch;
    }
    if (round < 0) continue;
    for (size_t way = 0; way < kWays.size(); ++way) {
      batches[way].ratio = batches[0].pairs_per_second / batches[way].pairs_per_second;
      rounds[way].push_back(batches[way]);
    }
  }
  return rounds;
}

absl::Status Run() {
  absl::StatusOr<std::unique_ptr<DaemonProcess>> daemon = DaemonProcess::Start(absl::GetFlag(FLAGS_daemon));
  if (!daemon.ok()) return daemon.status();
  nlohmann::json lines = nlohmann::json::array();
  std::printf("clients  way      ratio  (quartiles)     us/pair   pairs/s  daemon CPU us/pair\n");
  for (const std::string& text : std::vector<std::string>(absl::StrSplit(absl::GetFlag(FLAGS_clients), ','))) {
    int clients = 0;
    if (!absl::SimpleAtoi(text, &clients) || clients < 1) {
      return absl::InvalidArgumentError(absl::StrCat("--clients: '", text, "' is no number of clients"));
    }
    const absl::StatusOr<Rounds> rounds = Measure(**daemon, clients);
    if (!rounds.ok()) return rounds.status();
    for (size_t way = 0; way < kWays.size(); ++way) {
      const auto quantile = [&](double Figures::*figure, double share) {
        return Quantile((*rounds)[way], figure, share);
      };
      lines.push_back({{"clients", clients},
                       {"way", WayName(kWays[way])},
                       {"ratio", quantile(&Figures::ratio, 0.5)},
                       {"ratio_first_quartile", quantile(&Figures::ratio, 0.25)},
                       {"ratio_third_quartile", quantile(&Figures::ratio, 0.75)},
                       {"us_per_pair", quantile(&Figures::pair_us, 0.5)},
                       {"pairs_per_second", quantile(&Figures::pairs_per_second, 0.5)},
                       {"daemon_cpu_us_per_pair", quantile(&Figures::daemon_cpu_us, 0.5)}});
      const auto& line = lines.back();
      std::printf("%7d  %-7s  %5.2f  (%4.2f to %4.2f)  %8.1f  %8.0f  %18.1f\n", clients, WayName(kWays[way]),
                  line["ratio"].get<double>(), line["ratio_first_quartile"].get<double>(),
                  line["ratio_third_quartile"].get<double>(), line["us_per_pair"].get<double>(),
                  line["pairs_per_second"].get<double>(), line["daemon_cpu_us_per_pair"].get<double>());
      std::fflush(stdout);
    }
  }
  if (const std::string path = absl::GetFlag(FLAGS_json); !path.empty()) {
    std::ofstream file(path);
    file << nlohmann::json{{"rounds", absl::GetFlag(FLAGS_rounds)},
                           {"batch_ms", absl::GetFlag(FLAGS_batch_ms)},
                           {"block_bytes", kBlockBytes},
                           {"lines", lines}}
                .dump(2)
         << "\n";
    file.close();
    if (!file) return absl::UnavailableError(absl::StrCat("cannot write ", path));
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace vrambroker::bench

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("compares remote allocation with empty gRPC calls.\n\n  rpc_bench --daemon=PATH");
  absl::ParseCommandLine(argc, argv);
  if (absl::GetFlag(FLAGS_daemon).empty() || absl::GetFlag(FLAGS_rounds) < 1) {
    std::fprintf(stderr, "rpc_bench: give --daemon=PATH, and --rounds of 1 or more\n");
    return 2;
  }
  const absl::Status status = vrambroker::bench::Run();
  if (!status.ok()) std::fprintf(stderr, "rpc_bench: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
