// SPDX-License-Identifier: Apache-2.0
//
// ProcessWatch: descriptors that can be read once a process has ended, for event loops and HasEnded().
//
// A pidfd is one. Where the kernel has none (before Linux 5.3, or in a gVisor sandbox), an event descriptor stands for
// it, and a thread looks in /proc four times a second whether the process lives: it then has the same pid and started
// at the same time.
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

  // `use_pidfds`: if the kernel has them. Tests do without.
  explicit ProcessWatch(bool use_pidfds = true);
  ~ProcessWatch();
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;

  bool has_pidfds() const { return has_pidfds_; }

  // Of the process `pid`, which the kernel names for the other end of `socket`, a connection that has just been made.
  // It can be read as long as the process was there when this was called, and has ended. NotFound when it had gone
  // before. The descriptor of a process that nobody watches any more goes with its last owner.
  absl::StatusOr<std::shared_ptr<const UniqueFd>> OfPeer(int socket, pid_t pid) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  absl::StatusOr<std::shared_ptr<const UniqueFd>> LookAt(pid_t pid) ABSL_LOCKS_EXCLUDED(mu_);
  void Run() ABSL_LOCKS_EXCLUDED(mu_);
  void LookAtAll() ABSL_LOCKS_EXCLUDED(mu_);

  const bool has_pidfds_;

  Mutex mu_;
  CondVar stopping_changed_;
  // The processes that are looked at, and what can be read once they have ended.
  absl::btree_map<ProcessId, std::vector<std::weak_ptr<const UniqueFd>>> watched_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_ ABSL_GUARDED_BY(mu_);  // since the first process that is looked at
};

// Of /proc/PID/stat.
struct ProcessStat {
  char state = '?';
  uint64_t threads = 0;  // that have not ended, and the main one also when it has
  uint64_t started = 0;  // as ProcessId has it
};
// Nothing when it is no such line.
std::optional<ProcessStat> ParseProcessStat(const std::string& text);

// True when the process has ended, or is a zombie. False also when that cannot be told: nobody may take the memory of a
// process that may live.
bool HasEnded(const ProcessId& process);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_IDENTITY_PROCESS_WATCH_H_
