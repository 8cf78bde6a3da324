// SPDX-License-Identifier: Apache-2.0
#include "client/connection/fork_check.h"

#include <pthread.h>

namespace vrambroker::client_internal {

std::atomic<int> ForkCheck::count{0};

ForkCheck::ForkCheck()
    : forks_([] {
        static const int registered =
            pthread_atfork(nullptr, nullptr, [] { count.fetch_add(1, std::memory_order_relaxed); });
        (void)registered;
        return count.load(std::memory_order_relaxed);
      }()) {}

}  // namespace vrambroker::client_internal
