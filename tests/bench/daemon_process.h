// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_TESTS_BENCH_DAEMON_PROCESS_H_
#define VRAMBROKER_TESTS_BENCH_DAEMON_PROCESS_H_

#include <sys/types.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace vrambroker::bench {

// A vrambrokerd on the host device, with its sockets in a new directory. The daemon ends with the object.
class DaemonProcess {
 public:
  // Returns when the daemon serves; Unavailable if the daemon does not serve within 20 seconds.
  static absl::StatusOr<std::unique_ptr<DaemonProcess>> Start(const std::string& program);
  ~DaemonProcess();
  DaemonProcess(const DaemonProcess&) = delete;
  DaemonProcess& operator=(const DaemonProcess&) = delete;

  const std::string& socket_dir() const { return socket_dir_; }
  // Processor time of the daemon so far.
  double CpuSeconds() const;

 private:
  DaemonProcess(std::string socket_dir, pid_t pid) : socket_dir_(std::move(socket_dir)), pid_(pid) {}

  const std::string socket_dir_;
  const pid_t pid_;
};

}  // namespace vrambroker::bench

#endif  // VRAMBROKER_TESTS_BENCH_DAEMON_PROCESS_H_
