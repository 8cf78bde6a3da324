// SPDX-License-Identifier: Apache-2.0
#include "tests/fault/chaos_setup.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/support/shared_counters.h"
#include "tests/support/util.h"

namespace vrambroker::fault {

using testing_support::ChildProcess;
using testing_support::DaemonProcess;
using testing_support::MakeTempDir;
using testing_support::RawClient;

absl::Status ChaosWorker::AwaitReady() const {
  const absl::StatusOr<std::string> line = process->ReadLine();
  if (!line.ok()) return line.status();
  return *line == "ready" ? absl::OkStatus() : absl::InternalError(*line);
}

std::string Percentiles(std::vector<double> milliseconds) {
  if (milliseconds.empty()) return "none";
  std::sort(milliseconds.begin(), milliseconds.end());
  const auto at = [&](size_t percent) { return milliseconds[(milliseconds.size() - 1) * percent / 100]; };
  std::array<char, 96> text{};
  std::snprintf(text.data(), text.size(), "p50 %.1f ms, p99 %.1f ms (of %zu)", at(50), at(99), milliseconds.size());
  return text.data();
}

std::vector<double> Milliseconds(const Samples& nanoseconds, uint64_t first) {
  std::vector<double> milliseconds;
  for (uint64_t i = first; i < nanoseconds.size(); ++i)
    milliseconds.push_back(static_cast<double>(nanoseconds[i]) / 1e6);
  return milliseconds;
}

absl::StatusOr<std::unique_ptr<ChaosSetup>> ChaosSetup::Start(const Options& options) {
  std::unique_ptr<ChaosSetup> setup(new ChaosSetup());
  setup->seed_ = options.seed;
  setup->environment_ = options.environment;
  setup->counters_path_ = MakeTempDir() + "/counters";
  setup->counters_ = testing_support::MapCounters<ChaosCounters>(setup->counters_path_);
  setup->counters_->capacity_bytes = options.capacity_bytes;
  setup->counters_->clients = options.clients;
  setup->counters_->devices = static_cast<uint64_t>(options.daemon.devices);
  testing_support::DaemonOptions daemon_options = options.daemon;
  daemon_options.capacity = absl::StrCat(options.capacity_bytes);
  absl::StatusOr<std::unique_ptr<DaemonProcess>> daemon = DaemonProcess::Start(daemon_options);
  if (!daemon.ok()) return daemon.status();
  setup->daemon_ = *std::move(daemon);
  if (absl::Status status = setup->ConnectAdmin(); !status.ok()) return status;
  return setup;
}

absl::Status ChaosSetup::ConnectAdmin() {
  absl::StatusOr<RawClient> admin = RawClient::Connect(daemon_->socket_dir());
  if (!admin.ok()) return admin.status();
  admin_ = std::make_unique<RawClient>(*std::move(admin));
  return absl::OkStatus();
}

absl::StatusOr<ChaosWorker> ChaosSetup::StartWorker(const std::string& role) {
  absl::StatusOr<std::unique_ptr<ChildProcess>> process = ChildProcess::Start(
      {"/proc/self/exe", absl::StrCat("--worker=", role), absl::StrCat("--socket_dir=", daemon_->socket_dir()),
       absl::StrCat("--proxy_dir=", role == "cut" ? MakeTempDir() : ""), absl::StrCat("--counters=", counters_path_),
       absl::StrCat("--seed=", seed_ * 1'000'000 + started_++)},
      environment_);
  if (!process.ok()) return process.status();
  ChaosWorker worker;
  worker.role = role;
  worker.process = *std::move(process);
  return worker;
}

absl::Status ChaosSetup::StartInto(std::vector<ChaosWorker>& workers, const std::string& role, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) {
    absl::StatusOr<ChaosWorker> worker = StartWorker(role);
    if (!worker.ok()) return worker.status();
    workers.push_back(*std::move(worker));
  }
  return absl::OkStatus();
}

absl::Status ChaosSetup::StopDaemon() {
  admin_.reset();
  const absl::StatusOr<int> code = daemon_->Stop();
  if (!code.ok()) return code.status();
  return *code == 0 ? absl::OkStatus() : absl::InternalError(absl::StrCat("the daemon ended with ", *code));
}

absl::Status ChaosSetup::RestartDaemon(bool kill) {
  ++counters_->restarts;  // counts the restart before the daemon is gone
  if (kill) {
    admin_.reset();
    daemon_->Kill();
  } else if (absl::Status status = StopDaemon(); !status.ok()) {
    return status;
  }
  if (absl::Status status = daemon_->Restart(); !status.ok()) return status;
  ++counters_->restarts_done;
  return ConnectAdmin();
}

absl::Status ChaosSetup::AwaitEmpty() {
  uint64_t reserved = 0;
  uint64_t carried_over = 0;
  int sessions = 0;
  int quarantined = 0;
  int files = 0;
  const bool empty = testing_support::WaitFor([&] {
    v1::GetDevicesResponse devices;
    const absl::Status had =
        RawClient::Call(admin_->broker(), &v1::Broker::Stub::GetDevices, v1::GetDevicesRequest(), &devices);
    const absl::StatusOr<v1::ListSessionsResponse> list = admin_->ListSessions();
    v1::ListQuarantineResponse quarantine;
    const absl::Status listed =
        RawClient::Call(admin_->admin(), &v1::Admin::Stub::ListQuarantine, v1::ListQuarantineRequest(), &quarantine);
    if (!had.ok() || !list.ok() || !listed.ok()) return false;
    reserved = 0;
    carried_over = 0;
    for (const v1::Device& device : devices.devices()) {
      reserved += device.reserved_bytes();
      carried_over += device.carried_over_bytes();
    }
    sessions = list->sessions_size();
    quarantined = quarantine.holdings_size();
    files = SegmentFiles();
    return reserved == 0 && carried_over == 0 && sessions == 0 && quarantined == 0 && files == 0;
  });
  if (empty) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("everybody has gone, and still ", reserved, " bytes are reserved, ",
                                          carried_over, " carried over, ", sessions, " sessions open, ", quarantined,
                                          " clients' memory quarantined, and ", files, " files open"));
}

int ChaosSetup::SegmentFiles() const {
  int files = 0;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(absl::StrCat("/proc/", daemon_->pid(), "/fd"), error)) {
    if (absl::StrContains(std::filesystem::read_symlink(entry, error).string(), "vrambroker-segment")) ++files;
  }
  return files;
}

}  // namespace vrambroker::fault
