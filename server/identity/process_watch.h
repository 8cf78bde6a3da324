// SPDX-License-Identifier: Apache-2.0
//
// ProcessWatch: descriptors that become readable once a process has ended, for event loops and HasEnded().
//
// Uses pidfds if possible. If the kernel has none (before Linux 5.3, or in a gVisor sandbox), an event descriptor
// replaces the pidfd, and a thread checks /proc four times a second. A live process keeps its pid and its start time.
#ifndef VRAMBROKER_SERVER_IDENTITY_PROCESS_WATCH_H_
#define VRAMBROKER_SERVER_IDENTITY_PROCESS_WATCH_H_

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/status/statusor.h"
#include "allocator/base/mutex.h"
#include "allocator/base/unique_fd.h"
#include "allocator/device/device.h"

namespace vrambroker {

// Safe to call from any thread.
class ProcessWatch {
 public:
  static constexpr std::chrono::milliseconds kPeriod{250};

  // `use_pidfds`: use pidfds if the kernel has them. Tests pass false.
  explicit ProcessWatch(bool use_pidfds = true);
  ~ProcessWatch();
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;

  bool has_pidfds() const { return has_pidfds_; }

  // Returns a descriptor for process `pid`, which the kernel reports as the peer of `socket`, a new connection. The
  // descriptor becomes readable when the process ends, provided the process existed at the call. NotFound when the
  // process had gone before. The last owner closes the descriptor.
  absl::StatusOr<std::shared_ptr<const UniqueFd>> OfPeer(int socket, pid_t pid) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  absl::StatusOr<std::shared_ptr<const UniqueFd>> LookAt(pid_t pid) ABSL_LOCKS_EXCLUDED(mu_);
  void Run() ABSL_LOCKS_EXCLUDED(mu_);
  void LookAtAll() ABSL_LOCKS_EXCLUDED(mu_);

  const bool has_pidfds_;

  Mutex mu_;
  CondVar stopping_changed_;
  // Processes being polled, with the descriptors to make readable once a process has ended.
  absl::btree_map<ProcessId, std::vector<std::weak_ptr<const UniqueFd>>> watched_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_ ABSL_GUARDED_BY(mu_);  // runs from the first polled process on
};

// From /proc/PID/stat.
struct ProcessStat {
  char state = '?';
  uint64_t threads = 0;  // live threads, plus the main thread even if ended
  uint64_t started = 0;  // see ProcessId
};
// nullopt: the text is not a line of /proc/PID/stat.
std::optional<ProcessStat> ParseProcessStat(const std::string& text);

// Whether the process has ended, or is a zombie. False also when unknown: memory of a possibly live process must not be
// reused.
bool HasEnded(const ProcessId& process);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_IDENTITY_PROCESS_WATCH_H_
