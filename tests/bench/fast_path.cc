// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/fast_path.h"

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"

namespace vrambroker::bench {

Table::Cell::Cell(double number, int digits) : value(number), text(absl::StrFormat("%.*f", digits, number)) {}

Table::Table(nlohmann::json* all, const std::string& name, const std::string& title, std::vector<std::string> columns)
    : rows_((*all)[name]), columns_(std::move(columns)) {
  rows_ = nlohmann::json::array();
  std::printf("\n%s\n\n| %s |\n|%s\n", title.c_str(), absl::StrJoin(columns_, " | ").c_str(),
              std::string(" --- |" + absl::StrJoin(std::vector<std::string>(columns_.size(), ""), " ---: |")).c_str());
}

void Table::Row(const std::vector<Cell>& cells) {
  nlohmann::json row;
  std::string line = "|";
  for (size_t i = 0; i < cells.size(); ++i) {
    row[columns_[i]] = cells[i].value;
    absl::StrAppend(&line, " ", cells[i].text, " |");
  }
  rows_.push_back(std::move(row));
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

absl::StatusOr<std::unique_ptr<DaemonProcess>> StartDaemon(const std::string& capacity, const std::string& config,
                                                           const testing_support::Arguments& flags) {
  testing_support::DaemonOptions options;
  options.capacity = capacity;
  options.config = config;
  options.flags = flags;
  return DaemonProcess::Start(options);
}

absl::StatusOr<std::unique_ptr<ChildProcess>> StartWorker(const DaemonProcess& daemon) {
  return ChildProcess::Start({"/proc/self/exe", absl::StrCat("--worker=", daemon.socket_dir())});
}

absl::StatusOr<std::string> Ask(ChildProcess& worker, const std::string& command) {
  if (absl::Status status = worker.WriteLine(command); !status.ok()) return status;
  return worker.ReadLine();
}

absl::StatusOr<Client> ConnectTo(const std::string& socket_dir, Placement placement, absl::Duration idle_decay) {
  return Client::Connect(
      {.socket_dir = socket_dir, .name = "bench", .alloc_conf = "", .placement = placement, .idle_decay = idle_decay});
}

double CpuSeconds(pid_t process) {
  clockid_t clock;
  timespec time = {};
  if (clock_getcpuclockid(process, &clock) != 0 || clock_gettime(clock, &time) != 0) return 0;
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

uint64_t RssBytes(pid_t process) {
  std::ifstream file(absl::StrCat("/proc/", process, "/statm"));
  uint64_t size = 0;
  uint64_t resident = 0;
  file >> size >> resident;
  return resident * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

double ThreadCpuNs() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e9 + static_cast<double>(now.tv_nsec);
}

int64_t NowNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

double Quantile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  const size_t index = static_cast<size_t>(share * static_cast<double>(values.size() - 1) + 0.5);
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(index), values.end());
  return values[index];
}

}  // namespace vrambroker::bench
