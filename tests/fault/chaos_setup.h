// SPDX-License-Identifier: Apache-2.0
//
// Base of all parts of the chaos test: a daemon that can be restarted, and client processes.
#ifndef VRAMBROKER_TESTS_FAULT_CHAOS_SETUP_H_
#define VRAMBROKER_TESTS_FAULT_CHAOS_SETUP_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "tests/fault/chaos_counters.h"
#include "tests/support/child_process.h"
#include "tests/support/daemon_process.h"
#include "tests/support/raw_client.h"

namespace vrambroker::fault {

struct ChaosWorker {
  std::string role;
  std::unique_ptr<testing_support::ChildProcess> process;
  bool stopped = false;
  bool to_kill = false;  // kill the client when the stop is over
  absl::Time stopped_until;

  absl::Status AwaitReady() const;
};

// Returns text like "p50 1.2 ms, p99 3.4 ms (of 100)".
std::string Percentiles(std::vector<double> milliseconds);
// Returns the samples in milliseconds, beginning with sample `first`.
std::vector<double> Milliseconds(const Samples& nanoseconds, uint64_t first = 0);

class ChaosSetup {
 public:
  struct Options {
    testing_support::DaemonOptions daemon;
    uint64_t capacity_bytes = 0;
    uint64_t clients = 0;
    uint64_t seed = 0;
    testing_support::Environment environment;  // environment of the clients
  };
  static absl::StatusOr<std::unique_ptr<ChaosSetup>> Start(const Options& options);

  // Starts a client; chaos_worker.h lists the roles.
  absl::StatusOr<ChaosWorker> StartWorker(const std::string& role);
  absl::Status StartInto(std::vector<ChaosWorker>& workers, const std::string& role, uint64_t count);

  absl::Status RestartDaemon(bool kill);
  // Waits until the daemon holds no memory of the device, no session, and no file. REQUIRES: all clients have gone.
  absl::Status AwaitEmpty();
  // Stops the daemon; returns an error when the exit code is not 0.
  absl::Status StopDaemon();

  testing_support::DaemonProcess& daemon() { return *daemon_; }
  testing_support::RawClient& admin() { return *admin_; }
  ChaosCounters& counters() { return *counters_; }

 private:
  ChaosSetup() = default;
  absl::Status ConnectAdmin();
  int SegmentFiles() const;

  uint64_t seed_ = 0;
  uint64_t started_ = 0;
  testing_support::Environment environment_;
  std::string counters_path_;
  ChaosCounters* counters_ = nullptr;
  std::unique_ptr<testing_support::DaemonProcess> daemon_;
  std::unique_ptr<testing_support::RawClient> admin_;
};

}  // namespace vrambroker::fault

#endif  // VRAMBROKER_TESTS_FAULT_CHAOS_SETUP_H_
