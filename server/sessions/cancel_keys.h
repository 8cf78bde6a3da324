// SPDX-License-Identifier: Apache-2.0
//
// CancelKeys: a session's cancellable requests, by the client's keys.
#ifndef VRAMBROKER_SERVER_SESSIONS_CANCEL_KEYS_H_
#define VRAMBROKER_SERVER_SESSIONS_CANCEL_KEYS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/container/flat_hash_map.h"
#include "allocator/base/mutex.h"

namespace vrambroker {

// Thread-safe.
class CancelKeys {
 public:
  using Flag = std::atomic<bool>;

  // Returns a flag set by Cancel(key), while the caller keeps the flag. The flag of key 0 is never set.
  std::shared_ptr<const Flag> Add(uint64_t key) ABSL_LOCKS_EXCLUDED(mu_);
  // Ignores unknown keys.
  void Cancel(uint64_t key) ABSL_LOCKS_EXCLUDED(mu_);
  // Number of known keys, including some of ended requests.
  size_t size() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  static constexpr size_t kLeastCleaned = 512;

  mutable Mutex mu_;
  absl::flat_hash_map<uint64_t, std::weak_ptr<Flag>> flags_ ABSL_GUARDED_BY(mu_);
  size_t clean_above_ ABSL_GUARDED_BY(mu_) = kLeastCleaned;  // the size above which ended requests are dropped
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_SESSIONS_CANCEL_KEYS_H_
