// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_TESTS_SUPPORT_DAEMON_PROCESS_H_
#define VRAMBROKER_TESTS_SUPPORT_DAEMON_PROCESS_H_

#include <sys/types.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "tests/support/child_process.h"
#include "tests/support/http.h"

namespace vrambroker::testing_support {

struct DaemonOptions {
  std::string program;              // another build of the daemon; empty: this build's
  std::string capacity = "256MiB";  // empty: the default
  std::string config;               // further lines of the configuration file
  int devices = 1;
  bool http = false;    // serve /metrics: only where wanted
  int descriptors = 0;  // its limit of file descriptors; 0: this process's
  Arguments flags;      // further flags
  std::string runner;   // a program that runs the daemon; empty: none
  Environment environment;
};

// A vrambrokerd of the test's own, on the device of test_device.h, with its sockets in a fresh directory. Killed at the
// end of this object. Start it on a thread that stays: it ends with the thread that started it.
class DaemonProcess {
 public:
  // Returns when it serves; otherwise an error with its log.
  static absl::StatusOr<std::unique_ptr<DaemonProcess>> Start(const DaemonOptions& options = {});

  // The command line on its directory, for starting another one.
  Arguments CommandLine() const;

  absl::StatusOr<int> Stop();  // SIGTERM; the exit code
  void Kill();                 // SIGKILL; returns when it has gone
  absl::Status Restart();      // on the same directory

  bool Running() { return process_->Running(); }
  ChildProcess& process() { return *process_; }
  pid_t pid() const { return process_->pid(); }
  std::string config_path() const { return socket_dir_ + "/config.textproto"; }
  const std::string& socket_dir() const { return socket_dir_; }
  std::string log() const { return process_->ErrorText(); }
  int http_port() const { return http_port_; }

  absl::StatusOr<HttpAnswer> Get(const std::string& path) const { return HttpGet(http_port_, path); }
  // An empty page when it cannot be had.
  MetricsPage Metrics() const;

 private:
  explicit DaemonProcess(const DaemonOptions& options);

  const DaemonOptions options_;
  const std::string socket_dir_;
  std::unique_ptr<ChildProcess> process_;
  int http_port_ = 0;
};

}  // namespace vrambroker::testing_support

#endif  // VRAMBROKER_TESTS_SUPPORT_DAEMON_PROCESS_H_
