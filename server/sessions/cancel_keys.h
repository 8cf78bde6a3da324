// SPDX-License-Identifier: Apache-2.0
//
// CancelKeys: the requests of a session that its client may cancel, by the keys that it gave them.
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

  // Returns a flag that Cancel(key) sets, for as long as the caller keeps it. Nothing sets the flag of key 0.
  std::shared_ptr<const Flag> Add(uint64_t key) ABSL_LOCKS_EXCLUDED(mu_);
  // Nothing happens for a key that is not known.
  void Cancel(uint64_t key) ABSL_LOCKS_EXCLUDED(mu_);
  // Those that are known, with some that have ended.
  size_t size() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  static constexpr size_t kLeastCleaned = 512;

  mutable Mutex mu_;
  absl::flat_hash_map<uint64_t, std::weak_ptr<Flag>> flags_ ABSL_GUARDED_BY(mu_);
  size_t clean_above_ ABSL_GUARDED_BY(mu_) = kLeastCleaned;  // the size at which those that have ended are dropped
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_SESSIONS_CANCEL_KEYS_H_
