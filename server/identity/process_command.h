// SPDX-License-Identifier: Apache-2.0
//
// ProcessCommand: the command of a process, once read. The text lies in the process's own memory. A process can map
// that memory from a file system of its own, and then delay a read of /proc/PID/cmdline at will. So a few dedicated
// threads read, and no caller waits.
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
  static constexpr size_t kMostReaders = 8;     // threads; once all readers hang, further commands stay unknown
  static constexpr size_t kMostWaiting = 4096;  // further commands stay unknown

  // Begins to read the command of a process. `read`: for tests.
  static std::shared_ptr<const ProcessCommand> Of(pid_t pid, std::string (*read)(pid_t pid) = CommandOf);

  // Like CommandOf(); empty: unknown, or not yet known.
  std::string text() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  void Set(std::string text) ABSL_LOCKS_EXCLUDED(mu_);

  mutable Mutex mu_;
  std::string text_ ABSL_GUARDED_BY(mu_);
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_IDENTITY_PROCESS_COMMAND_H_
