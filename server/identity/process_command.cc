// SPDX-License-Identifier: Apache-2.0
#include "server/identity/process_command.h"

#include <deque>
#include <functional>
#include <thread>
#include <utility>

namespace vrambroker {
namespace {

struct Readers {
  Mutex mu;
  std::deque<std::function<void()>> waiting ABSL_GUARDED_BY(mu);
  size_t threads ABSL_GUARDED_BY(mu) = 0;
};

// Never destroyed: a thread that hangs may outlive everything else.
Readers& TheReaders() {
  static auto* const readers = new Readers;
  return *readers;
}

void ReadAll(Readers& readers) {
  while (true) {
    std::function<void()> read;
    {
      MutexLock lock(readers.mu);
      if (readers.waiting.empty()) {
        --readers.threads;
        return;
      }
      read = std::move(readers.waiting.front());
      readers.waiting.pop_front();
    }
    read();
  }
}

}  // namespace

std::shared_ptr<const ProcessCommand> ProcessCommand::Of(pid_t pid, std::string (*read)(pid_t pid)) {
  auto command = std::make_shared<ProcessCommand>();
  Readers& readers = TheReaders();
  {
    MutexLock lock(readers.mu);
    if (readers.waiting.size() >= kMostWaiting) return command;
    readers.waiting.emplace_back([command, pid, read] { command->Set(read(pid)); });
    if (readers.threads >= kMostReaders) return command;
    ++readers.threads;
  }
  std::thread([&readers] { ReadAll(readers); }).detach();
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
