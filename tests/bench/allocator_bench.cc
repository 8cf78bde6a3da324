// SPDX-License-Identifier: Apache-2.0
//
// Measures the cost of an allocation or a free in vrambroker's allocator, without daemon, device or memory. The host
// allocators tcmalloc, jemalloc and mimalloc perform the same sequences in the same run.
//
// Each allocator has its own process. A round measures one workload in all processes, one after the other, in an order
// that changes from round to round. A figure is the best of all rounds.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "nlohmann/json.hpp"
#include "tests/bench/peer_process.h"
#include "tests/bench/workload.h"

ABSL_FLAG(std::string, golden, "tests/golden", "Where the traces are.");
ABSL_FLAG(int, rounds, 11, "How often everything is measured.");
ABSL_FLAG(int, ops, 40000, "Operations of a loop, at a time; traces have their own number.");
ABSL_FLAG(int, max_live, 1000000, "The curves go up to so many live blocks.");
ABSL_FLAG(std::string, hosts, "tcmalloc,jemalloc,je-tuned,mimalloc", "Which host allocators to measure, too.");
ABSL_FLAG(std::string, json, "", "Where to write the figures, too.");
ABSL_FLAG(std::string, peer, "", "Internal: be the process of this allocator.");

namespace vrambroker::bench {
namespace {

// Figures recorded on another machine (two-core x86-64, best of 11), in ns per operation: PyTorch's allocator with a
// simulated device. Figures of tcmalloc 2.10, and of jemalloc 5.3.0 as tuned in kPeers, serve to compare the machines.
struct Recorded {
  const char* workload;
  double pytorch, tcmalloc, je_tuned;
};
constexpr Recorded kRecorded[] = {
    {"hot_512B", 138.8, 4.3, 4.8},        {"hot_64KiB", 139.3, 5.0, 36.9},
    {"hot_4MiB", 142.1, 26.5, 25.9},      {"hot_mixed_1000_blocks", 144.4, 21.9, 45.2},
    {"resnet50_b64", 242.3, 51.7, 140.5}, {"gpt2_124m", 252.5, 50.0, 195.1},
    {"llm_serving", 233.5, 88.8, 144.3},  {"rand_mixed_5k", 270.5, 96.3, 169.7},
    {"rand_small_2k", 260.5, 52.6, 95.4}, {"two_stream_overlap", 210.3, 82.7, 211.8},
};

// Costs by peer; a peer that is not installed is absent.
using Costs = std::map<std::string, Cost>;

class Bench {
 public:
  absl::Status Start() {
    const std::vector<std::string> hosts = absl::StrSplit(absl::GetFlag(FLAGS_hosts), ',');
    for (const Peer& peer : kPeers) {
      if (peer.subject == Subject::kHost && std::ranges::count(hosts, peer.name) == 0) continue;
      absl::StatusOr<std::unique_ptr<PeerProcess>> process =
          PeerProcess::Start(peer, {absl::StrCat("--peer=", peer.name), "--golden=" + absl::GetFlag(FLAGS_golden),
                                    absl::StrCat("--ops=", absl::GetFlag(FLAGS_ops))});
      if (absl::IsNotFound(process.status())) {
        missing_.push_back(peer.name);
        continue;
      }
      if (!process.ok())
        return absl::Status(process.status().code(), absl::StrCat(peer.name, ": ", process.status().message()));
      processes_.push_back({peer.name, *std::move(process)});
    }
    return absl::OkStatus();
  }

  // `hosts`: measure the host allocators, too.
  absl::StatusOr<Costs> Measure(const std::string& workload, bool hosts) {
    Costs best;
    const size_t rounds = static_cast<size_t>(absl::GetFlag(FLAGS_rounds));
    for (size_t round = 0; round < rounds; ++round) {
      for (size_t i = 0; i < processes_.size(); ++i) {
        auto& [name, process] = processes_[(i + round) % processes_.size()];
        if (!hosts && name != "vrambroker" && name != "recording" && name != "empty") continue;
        const absl::StatusOr<Cost> cost = process->Measure(workload);
        if (!cost.ok())
          return absl::Status(cost.status().code(), absl::StrCat(name, ", ", workload, ": ", cost.status().message()));
        const auto [it, first] = best.try_emplace(name, *cost);
        if (!first && cost->ns < it->second.ns) it->second = *cost;
      }
    }
    for (const auto& [name, cost] : best) {
      json_.push_back({{"workload", workload},
                       {"allocator", name},
                       {"ns_per_operation", cost.ns},
                       {"metadata_bytes_per_live_block", cost.metadata_per_block}});
    }
    return best;
  }

  const std::vector<std::string>& missing() const { return missing_; }
  const nlohmann::json& json() const { return json_; }

 private:
  std::vector<std::pair<std::string, std::unique_ptr<PeerProcess>>> processes_;
  std::vector<std::string> missing_;
  nlohmann::json json_ = nlohmann::json::array();
};

double NsOf(const Costs& costs, const std::string& peer) {
  const auto it = costs.find(peer);
  return it == costs.end() ? std::nan("") : it->second.ns;
}

// Prints a column of `width`; "-" without a figure.
void PrintNumber(double value, int width, int digits) {
  if (std::isnan(value)) {
    std::printf("%*s", width, "-");
  } else {
    std::printf("%*.*f", width, digits, value);
  }
}

void PrintCosts(const std::string& workload, const Costs& costs) {
  std::printf("%-24s", workload.c_str());
  for (const Peer& peer : kPeers) PrintNumber(NsOf(costs, peer.name), 12, 1);
}

void PrintHeading(const char* first) {
  std::printf("\n%-24s", first);
  for (const Peer& peer : kPeers) std::printf("%12s", peer.name);
}

// A host allocator, measured on both machines, gives the estimate for the share of PyTorch's cost.
absl::Status CompareWithHosts(Bench& bench) {
  PrintHeading("ns per operation");
  std::printf("%14s%14s%20s%26s\n", "/tcmalloc", "/je-tuned", "PyTorch/tcmalloc", "share of PyTorch's cost");
  for (const Recorded& recorded : kRecorded) {
    const absl::StatusOr<Costs> costs = bench.Measure(recorded.workload, /*hosts=*/true);
    if (!costs.ok()) return costs.status();
    PrintCosts(recorded.workload, *costs);
    const double to_tcmalloc = NsOf(*costs, "vrambroker") / NsOf(*costs, "tcmalloc");
    const double to_je_tuned = NsOf(*costs, "vrambroker") / NsOf(*costs, "je-tuned");
    PrintNumber(to_tcmalloc, 14, 2);
    PrintNumber(to_je_tuned, 14, 2);
    PrintNumber(recorded.pytorch / recorded.tcmalloc, 20, 2);
    PrintNumber(to_tcmalloc / (recorded.pytorch / recorded.tcmalloc), 13, 2);
    PrintNumber(to_je_tuned / (recorded.pytorch / recorded.je_tuned), 13, 2);
    std::printf("\n");
    std::fflush(stdout);
  }
  for (const char* workload : {"threads_one_heap", "threads_own_heaps"}) {
    const absl::StatusOr<Costs> costs = bench.Measure(workload, /*hosts=*/true);
    if (!costs.ok()) return costs.status();
    PrintCosts(workload, *costs);
    std::printf("\n");
    std::fflush(stdout);
  }
  return absl::OkStatus();
}

// Measures the cost over the number of live blocks, and the cost of a miss. Host allocators run only with small blocks.
// A host allocator writes into freed memory, and would take tens of gigabytes for larger blocks.
absl::Status MeasureGrowth(Bench& bench) {
  PrintHeading("ns per operation");
  std::printf("%14s%26s\n", "/log2(live)", "metadata bytes per block");
  for (const char* curve : {"mixed_live:", "equal_live:"}) {
    for (int live = 1000; live <= absl::GetFlag(FLAGS_max_live); live *= 10) {
      const std::string workload = absl::StrCat(curve, live);
      const absl::StatusOr<Costs> costs = bench.Measure(workload, /*hosts=*/curve == std::string("equal_live:"));
      if (!costs.ok()) return costs.status();
      PrintCosts(workload, *costs);
      std::printf("%14.1f%26.0f\n", NsOf(*costs, "vrambroker") / std::log2(live),
                  costs->at("vrambroker").metadata_per_block);
      std::fflush(stdout);
    }
  }
  for (const char* workload : {"miss:512", "miss:4194304", "miss:33554432"}) {
    const absl::StatusOr<Costs> costs = bench.Measure(workload, /*hosts=*/false);
    if (!costs.ok()) return costs.status();
    PrintCosts(workload, *costs);
    std::printf("\n");
  }
  return absl::OkStatus();
}

absl::Status Run() {
  Bench bench;
  if (absl::Status status = bench.Start(); !status.ok()) return status;
  for (const std::string& name : bench.missing()) std::printf("%s: not installed\n", name.c_str());
  if (absl::Status status = CompareWithHosts(bench); !status.ok()) return status;
  if (absl::Status status = MeasureGrowth(bench); !status.ok()) return status;
  if (const std::string path = absl::GetFlag(FLAGS_json); !path.empty()) {
    nlohmann::json recorded = nlohmann::json::array();
    for (const Recorded& line : kRecorded) {
      recorded.push_back({{"workload", line.workload},
                          {"pytorch", line.pytorch},
                          {"tcmalloc", line.tcmalloc},
                          {"je-tuned", line.je_tuned}});
    }
    std::ofstream file(path);
    file << nlohmann::json{{"rounds", absl::GetFlag(FLAGS_rounds)},
                           {"ops", absl::GetFlag(FLAGS_ops)},
                           {"not_installed", bench.missing()},
                           {"lines", bench.json()},
                           {"recorded_elsewhere_ns_per_operation", recorded}}
                .dump(2)
         << "\n";
    file.close();
    if (!file) return absl::UnavailableError(absl::StrCat("cannot write ", path));
  }
  return absl::OkStatus();
}

absl::Status Serve(const std::string& name) {
  for (const Peer& peer : kPeers) {
    if (peer.name == name)
      return ServePeer(peer, absl::GetFlag(FLAGS_golden), static_cast<size_t>(absl::GetFlag(FLAGS_ops)));
  }
  return absl::InvalidArgumentError(absl::StrCat("--peer: no allocator '", name, "'"));
}

}  // namespace
}  // namespace vrambroker::bench

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("compares the allocator with host allocators.\n\n  allocator_bench --golden=DIR");
  absl::ParseCommandLine(argc, argv);
  if (absl::GetFlag(FLAGS_rounds) < 1 || absl::GetFlag(FLAGS_ops) < 2) {
    std::fprintf(stderr, "allocator_bench: give --rounds of 1 or more, --ops of 2 or more\n");
    return 2;
  }
  const std::string peer = absl::GetFlag(FLAGS_peer);
  const absl::Status status = peer.empty() ? vrambroker::bench::Run() : vrambroker::bench::Serve(peer);
  if (!status.ok()) std::fprintf(stderr, "allocator_bench: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
