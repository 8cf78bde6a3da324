// SPDX-License-Identifier: Apache-2.0
//
// ForkCheck: tells whether this process has been forked since an object was made.
#ifndef VRAMBROKER_CLIENT_CONNECTION_FORK_CHECK_H_
#define VRAMBROKER_CLIENT_CONNECTION_FORK_CHECK_H_

#include <atomic>

namespace vrambroker::client_internal {

// A child made by fork() must not touch gRPC, whose threads are missing; locks possibly held by another thread; or
// memory also handed out by its parent. Thread-safe; a check costs one load.
class ForkCheck {
 public:
  ForkCheck();

  bool IsForked() const { return count.load(std::memory_order_relaxed) != forks_; }
  // Number of forks leading to this process when this object was made.
  int forks() const { return forks_; }

 private:
  static std::atomic<int> count;

  const int forks_;
};

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_CONNECTION_FORK_CHECK_H_
