// SPDX-License-Identifier: Apache-2.0
#include "tests/support/daemon_process.h"

#include <signal.h>

#include <cstdlib>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/support/test_device.h"

namespace vrambroker::testing_support {

DaemonProcess::DaemonProcess(const DaemonOptions& options) : options_(options), socket_dir_(MakeTempDir()) {
  const auto unless_said = [&](const char* field, const char* value) {
    return absl::StrContains(options.config, field) ? "" : absl::StrCat(field, ": \"", value, "\"\n");
  };
  std::ofstream(socket_dir_ + "/config.textproto")
      << unless_said("drain_timeout", "500ms")  // tests that end a daemon while sessions are open wait this long
      // Timeouts are long: clients that do answer may be slow.
      << unless_said("client_timeout", "20s") << unless_said("reclaim_timeout", "10s")
      << (OnCuda() ? "" : absl::StrCat("host_devices: ", options.devices, "\n")) << options.config;
  (void)OnSubstitute();  // makes sure that a machine exists from now on
}

Arguments DaemonProcess::CommandLine() const {
  Arguments arguments;
  if (const int limit = options_.descriptors; limit > 0) {
    arguments = {"/usr/bin/prlimit", absl::StrCat("--nofile=", limit, ":", limit)};
  }
  if (!options_.runner.empty()) arguments.push_back(options_.runner);
  for (const std::string& argument :
       {options_.program.empty() ? DaemonProgram() : options_.program,
        absl::StrCat("--config=", socket_dir_, "/config.textproto"), absl::StrCat("--socket_dir=", socket_dir_),
        std::string(OnCuda() ? "--device=cuda" : "--device=host"),
        std::string(options_.http ? "--http_address=127.0.0.1:0" : "--http_address=off")}) {
    arguments.push_back(argument);
  }
  if (!options_.capacity.empty()) arguments.push_back(absl::StrCat("--capacity=", options_.capacity));
  arguments.insert(arguments.end(), options_.flags.begin(), options_.flags.end());
  return arguments;
}

absl::StatusOr<std::unique_ptr<DaemonProcess>> DaemonProcess::Start(const DaemonOptions& options) {
  std::unique_ptr<DaemonProcess> daemon(new DaemonProcess(options));
  if (absl::Status status = daemon->Restart(); !status.ok()) return status;
  return daemon;
}

absl::Status DaemonProcess::Restart() {
  Environment environment = options_.environment;
  if (OnCuda()) {
    // Clients know the GPUs by other ordinals than the daemon: the daemon sees the last GPUs, in reverse order.
    const int last = OnSubstitute() ? kSubstituteDevices : options_.devices;
    std::string devices;
    for (int i = 1; i <= options_.devices; ++i) absl::StrAppend(&devices, i == 1 ? "" : ",", last - i);
    environment.emplace_back("CUDA_VISIBLE_DEVICES", devices);
  }
  absl::StatusOr<std::unique_ptr<ChildProcess>> process = ChildProcess::Start(CommandLine(), environment);
  if (!process.ok()) return process.status();
  process_ = *std::move(process);
  // "daemon ready" is the last line of the log before the daemon serves.
  const bool told = WaitFor([this] { return absl::StrContains(log(), "daemon ready") || !Running(); });
  if (!told || !Running()) return absl::UnavailableError(absl::StrCat("the daemon does not serve; its log:\n", log()));
  const std::string http = "http://127.0.0.1:";
  const std::string text = log();
  const size_t at = text.find(http);
  http_port_ = at == std::string::npos ? 0 : std::atoi(text.c_str() + at + http.size());
  return absl::OkStatus();
}

absl::StatusOr<int> DaemonProcess::Stop() {
  process_->Signal(SIGTERM);
  return process_->Wait();
}

void DaemonProcess::Kill() {
  process_->Signal(SIGKILL);
  (void)process_->Wait();
}

MetricsPage DaemonProcess::Metrics() const {
  absl::StatusOr<HttpAnswer> answer = Get("/metrics");
  return MetricsPage(answer.ok() && answer->code == 200 ? answer->body : "");
}

}  // namespace vrambroker::testing_support
