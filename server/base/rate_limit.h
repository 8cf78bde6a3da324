// SPDX-License-Identifier: Apache-2.0
//
// Rate limits: token buckets, and the bucket of each user for calls.
#ifndef VRAMBROKER_SERVER_BASE_RATE_LIMIT_H_
#define VRAMBROKER_SERVER_BASE_RATE_LIMIT_H_

#include <sys/types.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "allocator/base/mutex.h"
#include "server/base/steady_time.h"
#include "server/base/user_key.h"

namespace vrambroker {

// `per_second` on average, `burst` at once. For one thread.
class TokenBucket {
 public:
  TokenBucket(double per_second, double burst) : per_second_(per_second), burst_(burst), tokens_(burst) {}

  // False, and nothing is taken, if fewer than `tokens` are there. More than the burst counts as the burst.
  bool Take(SteadyTime now, double tokens = 1);
  // Takes tokens even if missing: up to a burst can be owed.
  void Owe(SteadyTime now, double tokens = 1);
  bool Has(SteadyTime now, double tokens) {
    Refill(now);
    return tokens_ >= tokens;
  }
  // Returns tokens taken before. No more than the burst is kept.
  void Give(double tokens) { tokens_ = std::min(burst_, tokens_ + tokens); }
  // True if no token is missing, as in a new bucket.
  bool IsFull(SteadyTime now);

 private:
  void Refill(SteadyTime now);

  double per_second_;
  double burst_;
  double tokens_;
  SteadyTime last_;
};

// Calls and stream messages of each user. Thread-safe.
class CallRates {
 public:
  // Twice `per_second` at once.
  explicit CallRates(uint32_t per_second) : per_second_(per_second) {}

  // ResourceExhausted when the user has called more often than allowed. A call as costly to the daemon as several calls
  // counts as `calls`.
  absl::Status Take(const UserKey& user, SteadyTime now, size_t calls = 1) ABSL_LOCKS_EXCLUDED(mu_);
  // Charges a call made although Take() refused: the user's next calls have to wait longer.
  void Owe(const UserKey& user, SteadyTime now) ABSL_LOCKS_EXCLUDED(mu_);
  // Number of users with a bucket: the users of the last seconds, and a few more.
  size_t users() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  TokenBucket& BucketOf(const UserKey& user, SteadyTime now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void EvictIdle(SteadyTime now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const uint32_t per_second_;
  mutable Mutex mu_;
  absl::flat_hash_map<UserKey, TokenBucket> buckets_ ABSL_GUARDED_BY(mu_);
  size_t forget_at_ ABSL_GUARDED_BY(mu_) = 64;  // users
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_BASE_RATE_LIMIT_H_
