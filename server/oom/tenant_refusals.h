// SPDX-License-Identifier: Apache-2.0
//
// TenantRefusals: counts refusals of each tenant, or each claim, since the daemon started. Unlike a session's own
// counts, these counts outlive the session, which often ends on a refusal.
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
  // A session that ends within this time of a refusal is presumed to have ended because of it.
  static constexpr std::chrono::seconds kSoon{60};
  static constexpr size_t kMaxTenants = 4096;

  struct Counts {
    std::array<uint64_t, kOomCauses.size()> ooms{};  // by OomCause
    uint64_t ended_sessions = 0;                     // within kSoon of a refusal
  };
  // In the order of discovery by the daemon; counts by device.
  using ByTenant = std::vector<std::pair<std::string, std::vector<Counts>>>;

  // Counts up to `max_tenants` tenants by name, in order of arrival, and later tenants as "_other". Counts of "_other"
  // stay when a tenant is removed: no count falls, and each refusal is in one count.
  explicit TenantRefusals(size_t devices, size_t max_tenants = kMaxTenants)
      : devices_(devices), max_tenants_(std::min(max_tenants, kMaxTenants)) {}

  // Starts counting the tenant, so that readers see its counts start from 0.
  void Add(absl::string_view tenant) ABSL_LOCKS_EXCLUDED(mu_);
  // CountRefusal() and CountEndedSession() ignore a removed tenant, as for a session that ended while asked for its
  // recording. Counting would bring the tenant back for good.
  void CountRefusal(absl::string_view tenant, int device, OomCause cause) ABSL_LOCKS_EXCLUDED(mu_);
  void CountEndedSession(absl::string_view tenant, int device) ABSL_LOCKS_EXCLUDED(mu_);
  // Removes the tenant. A tenant counted by name makes room for future tenants.
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
