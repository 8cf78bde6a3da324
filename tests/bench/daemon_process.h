// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_TESTS_BENCH_DAEMON_PROCESS_H_
#define VRAMBROKER_TESTS_BENCH_DAEMON_PROCESS_H_

#include <sys/types.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace vrambroker::bench {

// A vrambrokerd of our own on the host device, with its sockets in a fresh directory. Ends with this object.
class DaemonProcess {
 public:
  // Returns when the daemon serves. Unavailable when it does not within some seconds.
  static absl::StatusOr<std::unique_ptr<DaemonProcess>> Start(const std::string& program);
  ~DaemonProcess();
  DaemonProcess(const DaemonProcess&) = delete;
  DaemonProcess& operator=(const DaemonProcess&) = delete;

  const std::string& socket_dir() const { return socket_dir_; }
  // Processor time that the daemon has used so far.
  double CpuSeconds() const;

 private:
  DaemonProcess(std::string socket_dir, pid_t pid) : socket_dir_(std::move(socket_dir)), pid_(pid) {}

  const std::string socket_dir_;
  const pid_t pid_;
};

}  // namespace vrambroker::bench

#endif  // VRAMBROKER_TESTS_BENCH_DAEMON_PROCESS_H_
