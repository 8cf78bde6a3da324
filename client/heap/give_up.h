// SPDX-License-Identifier: Apache-2.0
//
// Whether the caller of a request waiting for memory still wants the memory.
#ifndef VRAMBROKER_CLIENT_HEAP_GIVE_UP_H_
#define VRAMBROKER_CLIENT_HEAP_GIVE_UP_H_

#include <utility>

#include "absl/status/status.h"

namespace vrambroker::client_internal {

// During a scope, requests of this thread wait for memory only while `*flag` is 0; another thread may set the flag.
class GiveUpScope {
 public:
  explicit GiveUpScope(const int* flag) : before_(std::exchange(current, flag)) {}
  ~GiveUpScope() { current = before_; }
  GiveUpScope(const GiveUpScope&) = delete;
  GiveUpScope& operator=(const GiveUpScope&) = delete;

  // True when requests of this thread may be given up.
  static bool IsActive() { return current != nullptr; }
  // True when requests of this thread have been given up.
  static bool GaveUp() { return current != nullptr && __atomic_load_n(current, __ATOMIC_RELAXED) != 0; }
  static absl::Status Error() {
    return absl::CancelledError("there is no memory now, and the caller does not wait for it, or no longer");
  }

 private:
  static inline thread_local const int* current = nullptr;
  const int* const before_;
};

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_HEAP_GIVE_UP_H_
