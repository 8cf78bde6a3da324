// SPDX-License-Identifier: Apache-2.0
#include "server/sessions/cancel_keys.h"

#include <algorithm>

namespace vrambroker {

std::shared_ptr<const CancelKeys::Flag> CancelKeys::Add(uint64_t key) {
  auto flag = std::make_shared<Flag>(false);
  if (key == 0) return flag;
  MutexLock lock(mu_);
  // Drops the entries of ended requests.
  if (flags_.size() > clean_above_) {
    absl::erase_if(flags_, [](const auto& entry) { return entry.second.expired(); });
    clean_above_ = std::max(kLeastCleaned, 2 * flags_.size());
  }
  flags_[key] = flag;
  return flag;
}

void CancelKeys::Cancel(uint64_t key) {
  MutexLock lock(mu_);
  const auto it = flags_.find(key);
  if (it == flags_.end()) return;
  if (const std::shared_ptr<Flag> flag = it->second.lock()) *flag = true;
  flags_.erase(it);
}

size_t CancelKeys::size() const {
  MutexLock lock(mu_);
  return flags_.size();
}

}  // namespace vrambroker
