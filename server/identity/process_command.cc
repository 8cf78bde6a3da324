// SPDX-License-Identifier: Apache-2.0
#include "server/identity/process_command.h"

#include <utility>

#include "server/base/detached_threads.h"

namespace vrambroker {

std::shared_ptr<const ProcessCommand> ProcessCommand::Of(pid_t pid, std::string (*read)(pid_t pid)) {
  static auto* const readers = new DetachedThreads(kMostReaders, kMostWaiting);  // never destroyed
  auto command = std::make_shared<ProcessCommand>();
  readers->Submit([command, pid, read] { command->Set(read(pid)); });
  return command;
}

std::string ProcessCommand::text() const {
  MutexLock lock(mu_);
  return text_;
}

void ProcessCommand::Set(std::string text) {
  MutexLock lock(mu_);
  text_ = std::move(text);
}

}  // namespace vrambroker
