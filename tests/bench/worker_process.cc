// SPDX-License-Identifier: Apache-2.0
//
// Both sides of a worker's socket send structs of fixed size: a Job for each batch, and an Answer for each job. The
// worker sends a first Answer when the worker is connected.
#include "tests/bench/worker_process.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <utility>

namespace vrambroker::bench {
namespace {

struct Job {
  int64_t from_ns = 0;
  int64_t until_ns = 0;
};

absl::StatusOr<Batch> RunBatch(BenchClient& client, const Job& job) {
  const timespec start = {.tv_sec = job.from_ns / 1'000'000'000, .tv_nsec = job.from_ns % 1'000'000'000};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &start, nullptr) == EINTR) {
  }
  Batch batch;
  const int64_t from_ns = MonotonicNanoseconds();
  int64_t now_ns = from_ns;
  do {
    if (absl::Status status = client.Pair(); !status.ok()) return status;
    ++batch.pairs;
    now_ns = MonotonicNanoseconds();
  } while (now_ns < job.until_ns);
  batch.seconds = static_cast<double>(now_ns - from_ns) * 1e-9;
  return batch;
}

// The worker's life. Returns when the other side of the socket closes.
absl::Status Work(const std::string& socket_dir, Way way, int socket) {
  absl::StatusOr<std::unique_ptr<BenchClient>> client = BenchClient::Connect(socket_dir, way);
  if (!client.ok()) return client.status();
  Batch answer;
  Job job;
  do {
    if (send(socket, &answer, sizeof answer, MSG_NOSIGNAL) != sizeof answer) break;
    if (recv(socket, &job, sizeof job, 0) != sizeof job) break;
    absl::StatusOr<Batch> batch = RunBatch(**client, job);
    if (!batch.ok()) return batch.status();
    answer = *batch;
  } while (true);
  return absl::OkStatus();
}

}  // namespace

int64_t MonotonicNanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

absl::StatusOr<std::unique_ptr<WorkerProcess>> WorkerProcess::Start(const std::string& socket_dir, Way way) {
  int sockets[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) != 0) {
    return absl::ErrnoToStatus(errno, "socketpair failed");
  }
  UniqueFd ours(sockets[0]);
  UniqueFd theirs(sockets[1]);
  const pid_t pid = fork();
  if (pid < 0) return absl::ErrnoToStatus(errno, "fork failed");
  if (pid > 0) return std::unique_ptr<WorkerProcess>(new WorkerProcess(pid, std::move(ours)));

  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const absl::Status status = Work(socket_dir, way, theirs.get());
  if (!status.ok()) std::fprintf(stderr, "%s client: %s\n", WayName(way), status.ToString().c_str());
  _exit(status.ok() ? 0 : 1);
}

WorkerProcess::~WorkerProcess() {
  // A plain close would not end the worker, because workers that start later hold a copy of the socket.
  shutdown(socket_.get(), SHUT_RDWR);
  waitpid(pid_, nullptr, 0);
}

absl::Status WorkerProcess::WaitReady() {
  return WaitBatch().status();
}

absl::Status WorkerProcess::StartBatch(int64_t from_ns, int64_t until_ns) {
  const Job job{.from_ns = from_ns, .until_ns = until_ns};
  if (send(socket_.get(), &job, sizeof job, MSG_NOSIGNAL) == sizeof job) return absl::OkStatus();
  return absl::UnavailableError("a worker has died");
}

absl::StatusOr<Batch> WorkerProcess::WaitBatch() {
  Batch batch;
  if (recv(socket_.get(), &batch, sizeof batch, 0) == sizeof batch) return batch;
  return absl::UnavailableError("a worker has died");
}

}  // namespace vrambroker::bench
