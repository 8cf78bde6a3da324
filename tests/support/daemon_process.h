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
  std::string program;              // names another build of the daemon; empty: this build's daemon
  std::string capacity = "256MiB";  // sets the capacity; empty: the default
  std::string config;               // adds lines to the configuration file
  int devices = 1;
  bool http = false;    // serves /metrics, where a test needs the page
  int descriptors = 0;  // limits the daemon's file descriptors; 0: this process's limit
  Arguments flags;      // adds flags
  std::string runner;   // names a program that runs the daemon; empty: no such program
  Environment environment;
};

// Runs a vrambrokerd for one test, on the device of test_device.h, with sockets in a fresh directory. The daemon is
// killed at the end of this object. Start the daemon on a thread that stays: the daemon ends with the thread that
// started it.
class DaemonProcess {
 public:
  // Returns when the daemon serves, or an error that holds the daemon's log.
  static absl::StatusOr<std::unique_ptr<DaemonProcess>> Start(const DaemonOptions& options = {});

  // Returns the command line for another daemon on the same directory.
  Arguments CommandLine() const;

  absl::StatusOr<int> Stop();  // sends SIGTERM; returns the exit code
  void Kill();                 // sends SIGKILL; returns when the daemon has gone
  absl::Status Restart();      // starts the daemon again on the same directory

  bool Running() { return process_->Running(); }
  ChildProcess& process() { return *process_; }
  pid_t pid() const { return process_->pid(); }
  std::string config_path() const { return socket_dir_ + "/config.textproto"; }
  const std::string& socket_dir() const { return socket_dir_; }
  std::string log() const { return process_->ErrorText(); }
  int http_port() const { return http_port_; }

  absl::StatusOr<HttpAnswer> Get(const std::string& path) const { return HttpGet(http_port_, path); }
  // Returns an empty page when the daemon does not serve the page.
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
