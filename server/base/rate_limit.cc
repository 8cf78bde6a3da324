// SPDX-License-Identifier: Apache-2.0
#include "server/base/rate_limit.h"

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"

namespace vrambroker {

void TokenBucket::Refill(SteadyTime now) {
  if (now <= last_) return;  // threads read the clock before getting here, in any order
  tokens_ = std::min(burst_, tokens_ + per_second_ * std::chrono::duration<double>(now - last_).count());
  last_ = now;
}

bool TokenBucket::Take(SteadyTime now, double tokens) {
  Refill(now);
  tokens = std::min(tokens, burst_);
  if (tokens_ < tokens) return false;
  tokens_ -= tokens;
  return true;
}

void TokenBucket::Owe(SteadyTime now, double tokens) {
  Refill(now);
  tokens_ = std::max(-burst_, tokens_ - tokens);
}

bool TokenBucket::IsFull(SteadyTime now) {
  Refill(now);
  return tokens_ >= burst_;
}

absl::Status CallRates::Take(const UserKey& user, SteadyTime now, size_t calls) {
  MutexLock lock(mu_);
  if (BucketOf(user, now).Take(now, static_cast<double>(calls))) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("rate: ", user.Text(), " makes more calls a second than the ",
                                                   per_second_,
                                                   " that max_calls_per_second_per_uid allows; call less often"));
}

void CallRates::Owe(const UserKey& user, SteadyTime now) {
  MutexLock lock(mu_);
  BucketOf(user, now).Owe(now);
}

TokenBucket& CallRates::BucketOf(const UserKey& user, SteadyTime now) {
  auto it = buckets_.find(user);
  if (it == buckets_.end()) {
    if (buckets_.size() >= forget_at_) EvictIdle(now);
    it = buckets_.emplace(user, TokenBucket(per_second_, 2.0 * per_second_)).first;
  }
  return it->second;
}

// Full buckets can go: a user without a bucket gets a full bucket.
void CallRates::EvictIdle(SteadyTime now) {
  absl::erase_if(buckets_, [now](auto& entry) { return entry.second.IsFull(now); });
  forget_at_ = std::max<size_t>(64, 2 * buckets_.size());
}

size_t CallRates::users() const {
  MutexLock lock(mu_);
  return buckets_.size();
}

}  // namespace vrambroker
