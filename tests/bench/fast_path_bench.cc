// SPDX-License-Identifier: Apache-2.0
//
// Measures the cost of memory for a leasing client: hits, misses, handovers from one process to another, many
// processes. The peers are the allocator alone, host allocators, empty calls, the bare device, and brokers without a
// cache in the client.
//
// The daemons are real, on the host device. A round covers all peers. Memory is only reserved, not written, except
// where a table says written.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/bench/fast_path.h"

ABSL_FLAG(std::string, golden, "tests/golden", "Where the traces are.");
ABSL_FLAG(std::vector<std::string>, parts,
          (std::vector<std::string>{"hits", "traces", "naive", "misses", "handovers", "peaks", "scale", "memory"}),
          "What to measure.");
ABSL_FLAG(int, rounds, 21, "How often what is compared is measured.");
ABSL_FLAG(int, ops, 40000, "Operations of a loop, at a time; traces have their own number.");
ABSL_FLAG(int, hits, 1000000, "Pairs of which the calls are counted.");
ABSL_FLAG(int, handovers, 200, "How often memory is handed over, in each way.");
ABSL_FLAG(std::vector<std::string>, clients, (std::vector<std::string>{"1", "8", "64", "256"}),
          "Numbers of clients at a time.");
ABSL_FLAG(int, load_ms, 5000, "How long they lease and return.");
ABSL_FLAG(int, blocks, 1000000, "Blocks that the daemon holds.");
ABSL_FLAG(int, segments, 10000, "Segments that the daemon holds.");
ABSL_FLAG(int, phases, 8, "Twentieths of the traces that are replayed with peaks that do not coincide.");
ABSL_FLAG(std::vector<std::string>, traces, (std::vector<std::string>{"resnet50_b64", "gpt2_124m", "llm_serving"}),
          "Traces of tests/golden.");
ABSL_FLAG(std::vector<std::string>, hosts, (std::vector<std::string>{"tcmalloc", "jemalloc", "je-tuned", "mimalloc"}),
          "Which host allocators to measure, too.");
ABSL_FLAG(int32_t, driver_latency_ms, 1,
          "Misses and handovers are measured once more with a device that is so slow; 0: they are not.");
ABSL_FLAG(std::string, json, "", "Where to write the figures, too.");
ABSL_FLAG(std::string, peer, "", "Internal: be the process of this allocator.");
ABSL_FLAG(std::string, worker, "", "Internal: be a client of the daemon of this directory.");

namespace vrambroker::bench {
namespace {

absl::StatusOr<Peers> StartPeers() {
  Peers peers;
  const std::vector<std::string> hosts = absl::GetFlag(FLAGS_hosts);
  for (const Peer& peer : kPeers) {
    if (peer.subject != Subject::kHost || std::ranges::count(hosts, peer.name) == 0) continue;
    absl::StatusOr<std::unique_ptr<PeerProcess>> process =
        PeerProcess::Start(peer, {absl::StrCat("--peer=", peer.name), "--golden=" + absl::GetFlag(FLAGS_golden),
                                  absl::StrCat("--ops=", absl::GetFlag(FLAGS_ops))});
    if (absl::IsNotFound(process.status())) {
      std::printf("%s: not installed\n", peer.name);
      continue;
    }
    if (!process.ok()) return process.status();
    peers.emplace_back(peer.name, *std::move(process));
  }
  return peers;
}

absl::Status AtBothLatencies(absl::Status (*measure)(const Settings&, absl::Duration, nlohmann::json*),
                             const Settings& settings, nlohmann::json* json) {
  absl::Status status = measure(settings, absl::ZeroDuration(), json);
  if (!status.ok() || settings.driver_latency == absl::ZeroDuration()) return status;
  return measure(settings, settings.driver_latency, json);
}

absl::Status Run() {
  Settings settings{.golden = absl::GetFlag(FLAGS_golden),
                    .rounds = absl::GetFlag(FLAGS_rounds),
                    .ops = absl::GetFlag(FLAGS_ops),
                    .hits = absl::GetFlag(FLAGS_hits),
                    .handovers = absl::GetFlag(FLAGS_handovers),
                    .load_ms = absl::GetFlag(FLAGS_load_ms),
                    .blocks = absl::GetFlag(FLAGS_blocks),
                    .segments = absl::GetFlag(FLAGS_segments),
                    .phases = absl::GetFlag(FLAGS_phases),
                    .traces = absl::GetFlag(FLAGS_traces),
                    .driver_latency = absl::Milliseconds(absl::GetFlag(FLAGS_driver_latency_ms))};
  for (const std::string& text : absl::GetFlag(FLAGS_clients)) {
    int clients = 0;
    if (!absl::SimpleAtoi(text, &clients) || clients < 1) {
      return absl::InvalidArgumentError(absl::StrCat("--clients: '", text, "' is no number of clients"));
    }
    settings.clients.push_back(clients);
  }
  // The peers come first, because fork() must run before any thread starts.
  absl::StatusOr<Peers> peers = StartPeers();
  if (!peers.ok()) return peers.status();
  nlohmann::json json;
  for (const std::string& part : absl::GetFlag(FLAGS_parts)) {
    absl::Status status = absl::InvalidArgumentError("--parts: no such part");
    if (part == "hits") status = MeasureHits(settings, *peers, &json);
    if (part == "traces") status = MeasureTraces(settings, &json);
    if (part == "naive") status = MeasureNaive(settings, &json);
    if (part == "misses") status = AtBothLatencies(MeasureMisses, settings, &json);
    if (part == "handovers") status = AtBothLatencies(MeasureHandovers, settings, &json);
    if (part == "peaks") status = MeasurePeaks(settings, &json);
    if (part == "scale") status = MeasureScale(settings, &json);
    if (part == "memory") status = MeasureDaemonMemory(settings, &json);
    if (!status.ok()) return absl::Status(status.code(), absl::StrCat(part, ": ", status.message()));
  }
  if (const std::string path = absl::GetFlag(FLAGS_json); !path.empty()) {
    json["rounds"] = settings.rounds;
    json["ops"] = settings.ops;
    std::ofstream file(path);
    file << json.dump(2) << "\n";
    file.close();
    if (!file) return absl::UnavailableError(absl::StrCat("cannot write ", path));
  }
  return absl::OkStatus();
}

absl::Status Serve(const std::string& name) {
  for (const Peer& peer : kPeers) {
    if (peer.name == name) {
      return ServePeer(peer, absl::GetFlag(FLAGS_golden), static_cast<size_t>(absl::GetFlag(FLAGS_ops)));
    }
  }
  return absl::InvalidArgumentError(absl::StrCat("--peer: no allocator '", name, "'"));
}

}  // namespace
}  // namespace vrambroker::bench

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("measures leasing clients.\n\n  fast_path_bench --golden=DIR");
  absl::ParseCommandLine(argc, argv);
  if (absl::GetFlag(FLAGS_rounds) < 1 || absl::GetFlag(FLAGS_ops) < 20 || absl::GetFlag(FLAGS_phases) > 20) {
    std::fprintf(stderr, "fast_path_bench: give --rounds of 1 or more, --ops of 20 or more, --phases up to 20\n");
    return 2;
  }
  absl::Status status;
  if (const std::string peer = absl::GetFlag(FLAGS_peer); !peer.empty()) {
    status = vrambroker::bench::Serve(peer);
  } else if (const std::string worker = absl::GetFlag(FLAGS_worker); !worker.empty()) {
    status = vrambroker::bench::Work(worker);
  } else {
    status = vrambroker::bench::Run();
  }
  if (!status.ok()) std::fprintf(stderr, "fast_path_bench: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
