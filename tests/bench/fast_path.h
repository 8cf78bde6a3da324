// SPDX-License-Identifier: Apache-2.0
//
// fast_path_bench: parts, and shared helpers.
#ifndef VRAMBROKER_TESTS_BENCH_FAST_PATH_H_
#define VRAMBROKER_TESTS_BENCH_FAST_PATH_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/vrambroker/client.h"
#include "nlohmann/json.hpp"
#include "tests/bench/peer_process.h"
#include "tests/support/child_process.h"
#include "tests/support/daemon_process.h"

namespace vrambroker::bench {

// Prints a table as Markdown, row by row, and keeps the table for the JSON file.
class Table {
 public:
  struct Cell {
    Cell(const char* words) : value(words), text(words) {}         // NOLINT(google-explicit-constructor)
    Cell(const std::string& words) : value(words), text(words) {}  // NOLINT(google-explicit-constructor)
    Cell(double number, int digits);
    explicit Cell(uint64_t number) : value(number), text(std::to_string(number)) {}
    nlohmann::json value;
    std::string text;
  };

  Table(nlohmann::json* all, const std::string& name, const std::string& title, std::vector<std::string> columns);
  void Row(const std::vector<Cell>& cells);

 private:
  nlohmann::json& rows_;
  const std::vector<std::string> columns_;
};

struct Settings {
  std::string golden;
  int rounds = 0;
  int ops = 0;        // operations of a loop
  int hits = 0;       // pairs for counting calls
  int handovers = 0;  // handovers of each kind
  std::vector<int> clients;
  int load_ms = 0;  // time of leasing and returning
  int blocks = 0;
  int segments = 0;
  int phases = 0;
  std::vector<std::string> traces;
  absl::Duration driver_latency;  // simulated, for a second run of misses and handovers
};

using Peers = std::vector<std::pair<std::string, std::unique_ptr<PeerProcess>>>;

// `latency`: simulated latency of the device. Each function measures one subject with a new daemon, and adds tables to
// `json`.
absl::Status MeasureHits(const Settings& settings, Peers& peers, nlohmann::json* json);
absl::Status MeasureTraces(const Settings& settings, nlohmann::json* json);
absl::Status MeasureNaive(const Settings& settings, nlohmann::json* json);
absl::Status MeasureMisses(const Settings& settings, absl::Duration latency, nlohmann::json* json);
absl::Status MeasureHandovers(const Settings& settings, absl::Duration latency, nlohmann::json* json);
absl::Status MeasurePeaks(const Settings& settings, nlohmann::json* json);
absl::Status MeasureScale(const Settings& settings, nlohmann::json* json);
absl::Status MeasureDaemonMemory(const Settings& settings, nlohmann::json* json);

// The work of a worker process; see fast_path_worker.cc.
absl::Status Work(const std::string& socket_dir);

// ---- Helpers ----

inline constexpr uint64_t kMiB = uint64_t{1} << 20;

using testing_support::ChildProcess;
using testing_support::DaemonProcess;

absl::StatusOr<std::unique_ptr<DaemonProcess>> StartDaemon(const std::string& capacity, const std::string& config = "",
                                                           const testing_support::Arguments& flags = {});
// Starts a process of the benchmark program that obeys lines; see fast_path_worker.cc.
absl::StatusOr<std::unique_ptr<ChildProcess>> StartWorker(const DaemonProcess& daemon);
// Sends a command and returns the answer.
absl::StatusOr<std::string> Ask(ChildProcess& worker, const std::string& command);

absl::StatusOr<Client> ConnectTo(const std::string& socket_dir, Placement placement = Placement::kLeased,
                                 absl::Duration idle_decay = absl::InfiniteDuration());

double CpuSeconds(pid_t process);
uint64_t RssBytes(pid_t process);
double ThreadCpuNs();
int64_t NowNs();
// `share` 0.5: the median.
double Quantile(std::vector<double> values, double share);

}  // namespace vrambroker::bench

#endif  // VRAMBROKER_TESTS_BENCH_FAST_PATH_H_
