// SPDX-License-Identifier: Apache-2.0
//
// TenantRefusals: what was refused to each tenant, or to each claim, since the daemon started. Unlike a session's own
// counts these stay when the session ends, as it often does when it is refused.
#ifndef VRAMBROKER_SERVER_OOM_TENANT_REFUSALS_H_
#define VRAMBROKER_SERVER_OOM_TENANT_REFUSALS_H_

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/string_view.h"
#include "allocator/base/mutex.h"
#include "server/oom/out_of_memory.h"

namespace vrambroker {

// Thread-safe.
class TenantRefusals {
 public:
  // A session that ends so soon after a refusal is taken to have ended because of it.
  static constexpr std::chrono::seconds kSoon{60};
  static constexpr size_t kMaxTenants = 4096;

  struct Counts {
    std::array<uint64_t, kOomCauses.size()> ooms{};  // by OomCause
    uint64_t ended_sessions = 0;                     // within kSoon of a refusal
  };
  // In the order in which the daemon came to know them; counts by device.
  using ByTenant = std::vector<std::pair<std::string, std::vector<Counts>>>;

  // Counts so many tenants by name, in the order in which they come, and any other as "_other". Counts of "_other" stay
  // when a tenant is no more: none falls, and each refusal is in one of them.
  explicit TenantRefusals(size_t devices, size_t max_tenants = kMaxTenants)
      : devices_(devices), max_tenants_(std::min(max_tenants, kMaxTenants)) {}

  // Has it counted from now on: who reads the counts sees them start from 0.
  void Add(absl::string_view tenant) ABSL_LOCKS_EXCLUDED(mu_);
  // Both count nothing for a tenant that is no more, as of a session that ended while it was asked for its recording:
  // the tenant would come back, for good.
  void CountRefusal(absl::string_view tenant, int device, OomCause cause) ABSL_LOCKS_EXCLUDED(mu_);
  void CountEndedSession(absl::string_view tenant, int device) ABSL_LOCKS_EXCLUDED(mu_);
  // The tenant is no more: where it is counted by name, it makes room for those that come from now on.
  void Forget(absl::string_view tenant) ABSL_LOCKS_EXCLUDED(mu_);

  ByTenant Get() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  std::vector<Counts>& Of(absl::string_view tenant) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const size_t devices_;
  const size_t max_tenants_;
  mutable Mutex mu_;
  absl::flat_hash_set<std::string> known_ ABSL_GUARDED_BY(mu_);  // added, and not forgotten
  ByTenant tenants_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<std::string, size_t> places_ ABSL_GUARDED_BY(mu_);  // in tenants_
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_OOM_TENANT_REFUSALS_H_
