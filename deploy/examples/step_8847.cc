// SPDX-License-Identifier: Apache-2.0
//
// A training job with sequences of different lengths, for step_8847.sh. Weights stay, and each step allocates
// activations for its sequence length and frees them. Now and then the job keeps a small tensor for metrics, as jobs
// do: the tensor lands in free space, in the middle of a former activation segment, and the segment can never be
// returned afterwards.
//
// Requests depend on --seed only, and addresses on earlier requests: every run is identical. The default seed was found
// by a search over many seeds, and is refused at step 8847. Exits with 0 after --steps, and with 1 when refused memory.
#include <cstdio>
#include <iostream>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "allocator/base/command_line.h"
#include "vrambroker/client.h"

namespace {

struct Flags {
  std::string name = "trainer";
  std::string limit = "1.25GiB";
  std::string alloc_conf;
  int steps = 10000;
  int report_every = 400;
  uint64_t seed = 1469;
};
Flags& flags() {
  static Flags values;
  return values;
}

using vrambroker::Buffer;
using vrambroker::Client;
using vrambroker::FormatBytes;
using vrambroker::MemoryScope;

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr int kLayers = 3;
constexpr int kKeepEvery = 40;  // steps

class Job {
 public:
  explicit Job(Client client) : client_(std::move(client)), random_(flags().seed) {}

  absl::Status Begin() {
    if (absl::Status status = Take("weights", 128 * kMiB, state_); !status.ok()) return status;
    return Take("optimizer", 256 * kMiB, state_);
  }

  absl::Status Step(int step) {
    const uint64_t tokens = 256 + random_() % 1793;  // up to 2048
    const uint64_t bytes = tokens * 16 * 1024;       // of a layer's activations: 4 to 32 MiB
    std::vector<Buffer> activations;
    for (int layer = 1; layer <= kLayers; ++layer) {
      const MemoryScope forward("forward");
      if (absl::Status status = Take(absl::StrCat("layer", layer), bytes, activations); !status.ok()) return status;
    }
    if (step % kKeepEvery == 0) {
      if (absl::Status status = Take("metrics", tokens * 1024, kept_); !status.ok()) return status;
    }
    return Take("backward", bytes, activations);  // all activations are freed now
  }

  void Report(int step) {
    const absl::StatusOr<vrambroker::MemoryStats> stats = client_.GetMemoryStats();
    if (!stats.ok()) return;
    std::printf("step %d  allocated %s, reserved %s\n", step, FormatBytes(stats->allocated_bytes.all.current).c_str(),
                FormatBytes(stats->reserved_bytes.all.current).c_str());
    std::fflush(stdout);
  }

 private:
  absl::Status Take(const std::string& scope_name, uint64_t bytes, std::vector<Buffer>& into) {
    const MemoryScope scope(scope_name);
    absl::StatusOr<Buffer> buffer = client_.Allocate(bytes);
    if (!buffer.ok()) return buffer.status();
    into.push_back(*std::move(buffer));
    return absl::OkStatus();
  }

  Client client_;
  std::mt19937_64 random_;
  std::vector<Buffer> state_;
  std::vector<Buffer> kept_;
};

absl::StatusOr<Client> Connect() {
  const absl::StatusOr<vrambroker::Limit> limit = vrambroker::ParseLimit(flags().limit);
  if (!limit.ok()) return limit.status();
  return Client::Connect({.name = flags().name, .limit = *limit, .alloc_conf = flags().alloc_conf});
}

}  // namespace

int main(int argc, char** argv) {
  const std::unique_ptr<CLI::App> app = vrambroker::MakeCommandLine(
      "vrambroker-step-8847", "Trains with sequences of different lengths; see deploy/examples/step_8847.sh.");
  app->add_option("--name", flags().name, "Name of the session. Default: trainer.")->type_name("NAME");
  app->add_option("--limit", flags().limit,
                  "Limit to ask for: 0.25 or 25% of the capacity, or a size. Default: 1.25GiB.")
      ->type_name("LIMIT");
  app->add_option("--alloc-conf", flags().alloc_conf, "Settings of the allocator, as in PYTORCH_CUDA_ALLOC_CONF.")
      ->type_name("SETTINGS");
  app->add_option("--steps", flags().steps, "Stop after so many steps. Default: 10000.")->type_name("N");
  app->add_option("--report-every", flags().report_every,
                  "Print a line every so many steps, and wait for one on standard input. Default: 400.")
      ->type_name("N");
  app->add_option("--seed", flags().seed, "Of the lengths. Default: 1469.")->type_name("N");
  if (const std::optional<int> code = vrambroker::ParseOrPrint(*app, argc, argv)) return *code;
  absl::StatusOr<Client> client = Connect();
  if (!client.ok()) {
    std::fprintf(stderr, "%s: %s\n", flags().name.c_str(), client.status().ToString().c_str());
    return 1;
  }
  Job job(*std::move(client));
  absl::Status status = job.Begin();
  int step = 0;
  while (status.ok() && step < flags().steps) {
    status = job.Step(++step);
    if (!status.ok() || step % flags().report_every != 0) continue;
    job.Report(step);
    std::string line;
    std::getline(std::cin, line);  // no longer waits at the end of input
  }
  if (status.ok()) return 0;
  std::printf("step %d: REFUSED: %s\n", step, std::string(status.message()).c_str());
  return 1;
}
