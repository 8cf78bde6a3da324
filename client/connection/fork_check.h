// SPDX-License-Identifier: Apache-2.0
//
// ForkCheck: whether this process is still the one that something was made in.
#ifndef VRAMBROKER_CLIENT_CONNECTION_FORK_CHECK_H_
#define VRAMBROKER_CLIENT_CONNECTION_FORK_CHECK_H_

#include <atomic>

namespace vrambroker::client_internal {

// A child made by fork() must not touch gRPC, whose threads are not there, locks that another thread may have held, or
// memory that its parent hands out, too. Thread-safe; asking costs one load.
class ForkCheck {
 public:
  ForkCheck();

  bool IsForked() const { return count.load(std::memory_order_relaxed) != forks_; }
  // Of this process and its ancestors, when this object was made.
  int forks() const { return forks_; }

 private:
  static std::atomic<int> count;

  const int forks_;
};

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_CONNECTION_FORK_CHECK_H_
