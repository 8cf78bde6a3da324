// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_TESTS_BENCH_WORKER_PROCESS_H_
#define VRAMBROKER_TESTS_BENCH_WORKER_PROCESS_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "allocator/base/unique_fd.h"
#include "tests/bench/bench_client.h"

namespace vrambroker::bench {

struct Batch {
  int64_t pairs = 0;
  double seconds = 0;
};

// A process with a BenchClient. Workers of the same way run batches at the same time.
class WorkerProcess {
 public:
  // REQUIRES: the calling process has not used gRPC and has no other threads, because fork() makes the worker.
  static absl::StatusOr<std::unique_ptr<WorkerProcess>> Start(const std::string& socket_dir, Way way);
  ~WorkerProcess();
  WorkerProcess(const WorkerProcess&) = delete;
  WorkerProcess& operator=(const WorkerProcess&) = delete;

  // Waits until the worker is connected.
  absl::Status WaitReady();
  // Makes pairs between two times of CLOCK_MONOTONIC, in nanoseconds; WaitBatch() returns the batch.
  absl::Status StartBatch(int64_t from_ns, int64_t until_ns);
  absl::StatusOr<Batch> WaitBatch();

 private:
  WorkerProcess(pid_t pid, UniqueFd socket) : pid_(pid), socket_(std::move(socket)) {}

  const pid_t pid_;
  UniqueFd socket_;
};

int64_t MonotonicNanoseconds();

}  // namespace vrambroker::bench

#endif  // VRAMBROKER_TESTS_BENCH_WORKER_PROCESS_H_
