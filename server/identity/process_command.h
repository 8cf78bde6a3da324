// SPDX-License-Identifier: Apache-2.0
//
// ProcessCommand: what a process runs, as soon as that is read. The text is the process's own memory, which a process
// can put on a file system of its own: then a read of /proc/PID/cmdline takes for as long as the process likes. So
// threads that do nothing else read, a few at most, and no caller waits for them.
#ifndef VRAMBROKER_SERVER_IDENTITY_PROCESS_COMMAND_H_
#define VRAMBROKER_SERVER_IDENTITY_PROCESS_COMMAND_H_

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <string>

#include "allocator/base/mutex.h"
#include "server/identity/process_info.h"

namespace vrambroker {

// Thread-safe.
class ProcessCommand {
 public:
  static constexpr size_t kMostReaders = 8;     // threads; once all of them hang, further commands stay unknown
  static constexpr size_t kMostWaiting = 4096;  // further commands stay unknown

  // Begins to read the command of a process. `read`: for tests.
  static std::shared_ptr<const ProcessCommand> Of(pid_t pid, std::string (*read)(pid_t pid) = CommandOf);

  // As CommandOf(); empty: it is not known, or not yet.
  std::string text() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  void Set(std::string text) ABSL_LOCKS_EXCLUDED(mu_);

  mutable Mutex mu_;
  std::string text_ ABSL_GUARDED_BY(mu_);
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_IDENTITY_PROCESS_COMMAND_H_
