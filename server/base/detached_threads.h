// SPDX-License-Identifier: Apache-2.0
//
// DetachedThreads: for calls that take as long as another program likes, or never return: reading another process's
// memory, asking a name service. The threads are never joined, so the daemon stops without them.
#ifndef VRAMBROKER_SERVER_BASE_DETACHED_THREADS_H_
#define VRAMBROKER_SERVER_BASE_DETACHED_THREADS_H_

#include <cstddef>
#include <functional>
#include <memory>

namespace vrambroker {

// Thread-safe. Threads are started when needed, and end when no task waits.
class DetachedThreads {
 public:
  DetachedThreads(size_t most_threads, size_t most_waiting);

  // Runs `task`, the owner of all its data, once a thread is free, even after the end of this object. False, and the
  // task is dropped: `most_waiting` tasks wait, or the machine allows no thread at all.
  bool Submit(std::function<void()> task);

 private:
  struct State;

  static void RunAll(State& state);

  const size_t most_threads_;
  const size_t most_waiting_;
  const std::shared_ptr<State> state_;  // shared with the threads
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_BASE_DETACHED_THREADS_H_
