// SPDX-License-Identifier: Apache-2.0
#include "server/identity/process_watch.h"

#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <iterator>
#include <system_error>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/descriptor_reserve.h"
#include "allocator/base/room_to_start.h"
#include "allocator/device/process_files.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

namespace vrambroker {
namespace {

int OpenPidfd(pid_t pid) {
  return static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
}

bool KernelHasPidfds() {
  const UniqueFd own(OpenPidfd(getpid()));
  return own.valid() || errno == EMFILE || errno == ENFILE || errno == ENOMEM;
}

absl::Status Gone(pid_t pid) {
  return absl::NotFoundError(absl::StrCat("process ", pid, " has gone: ", std::strerror(errno)));
}

}  // namespace

std::optional<ProcessStat> ParseProcessStat(const std::string& text) {
  const std::vector<absl::string_view> fields = StatFields(text);  // reads fields 3, 20 and 22
  ProcessStat stat;
  if (fields.size() <= 19 || !absl::SimpleAtoi(fields[17], &stat.threads) ||
      !absl::SimpleAtoi(fields[19], &stat.started)) {
    return std::nullopt;
  }
  stat.state = fields[0][0];
  return stat;
}

bool HasEnded(const ProcessId& process) {
  if (kill(process.pid, 0) != 0 && errno == ESRCH) return true;
  const std::optional<ProcessStat> stat = ParseProcessStat(ReadProcessFile(process.pid, "stat"));
  if (!stat.has_value()) return false;
  if (stat->started != process.started) return true;  // another process has the pid
  // While threads are left, only the main thread has ended.
  return (stat->state == 'Z' || stat->state == 'X') && stat->threads <= 1;
}

ProcessWatch::ProcessWatch(bool use_pidfds) : has_pidfds_(use_pidfds && KernelHasPidfds()) {}

ProcessWatch::~ProcessWatch() {
  std::thread thread;
  {
    MutexLock lock(mu_);
    stopping_ = true;
    stopping_changed_.NotifyAll();
    thread = std::move(thread_);
  }
  if (thread.joinable()) thread.join();
}

absl::StatusOr<std::shared_ptr<const UniqueFd>> ProcessWatch::OfPeer(int socket, pid_t pid) {
  if (!has_pidfds_) return LookAt(pid);
  // SO_PEERPIDFD (Linux 6.5) cannot hit a reused pid. On older kernels, opens the pid at once, while the connection is
  // new.
  int pidfd = -1;
  socklen_t size = sizeof pidfd;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &size) != 0 && errno == ENOPROTOOPT) pidfd = OpenPidfd(pid);
  if (pidfd < 0) return Gone(pid);
  return std::make_shared<const UniqueFd>(pidfd);
}

absl::StatusOr<std::shared_ptr<const UniqueFd>> ProcessWatch::LookAt(pid_t pid) {
  const ProcessId process{.pid = pid, .started = StartOf(pid)};
  if (process.started == 0) {
    if (kill(pid, 0) != 0 && errno == ESRCH) return Gone(pid);
    return absl::FailedPreconditionError(absl::StrCat("process ", pid,
                                                      " cannot be watched: the kernel has no pidfd_open ",
                                                      "(Linux 5.3), and /proc does not show the process (hidepid)"));
  }
  if (HasEnded(process)) return absl::NotFoundError(absl::StrCat("process ", pid, " has gone"));
  auto end = std::make_shared<const UniqueFd>(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!end->valid()) return DescriptorError(errno, "eventfd");
  MutexLock lock(mu_);
  try {
    if (!thread_.joinable() && !stopping_) thread_ = std::thread([this] { Run(); });
  } catch (const std::system_error&) {
    return NoThreadError();
  }
  watched_[process].push_back(end);
  return end;
}

void ProcessWatch::Run() {
  auto next = std::chrono::steady_clock::now();
  while (true) {
    {
      MutexLock lock(mu_);
      while (!stopping_ && stopping_changed_.WaitUntil(mu_, next)) {
      }
      if (stopping_) return;
    }
    LookAtAll();
    next = std::chrono::steady_clock::now() + kPeriod;
  }
}

void ProcessWatch::LookAtAll() {
  std::vector<ProcessId> processes;
  {
    MutexLock lock(mu_);
    for (auto it = watched_.begin(); it != watched_.end();) {
      std::erase_if(it->second, [](const auto& end) { return end.expired(); });
      if (!it->second.empty()) processes.push_back(it->first);
      it = it->second.empty() ? watched_.erase(it) : std::next(it);
    }
  }
  for (const ProcessId& process : processes) {
    if (!HasEnded(process)) continue;
    std::vector<std::weak_ptr<const UniqueFd>> ends;
    {
      MutexLock lock(mu_);
      if (const auto it = watched_.find(process); it != watched_.end()) {
        ends = std::move(it->second);
        watched_.erase(it);
      }
    }
    for (const auto& weak : ends) {
      constexpr uint64_t kOne = 1;
      if (const auto end = weak.lock()) (void)!write(end->get(), &kOne, sizeof kOne);
    }
  }
}

}  // namespace vrambroker
