// SPDX-License-Identifier: Apache-2.0
#include "server/oom/tenant_refusals.h"

namespace vrambroker {
namespace {

constexpr absl::string_view kOtherTenants = "_other";  // tenants beyond the bound

}  // namespace

void TenantRefusals::Add(absl::string_view tenant) {
  MutexLock lock(mu_);
  known_.emplace(tenant);
  Of(tenant);
}

void TenantRefusals::CountRefusal(absl::string_view tenant, int device, OomCause cause) {
  MutexLock lock(mu_);
  if (known_.contains(tenant)) ++Of(tenant)[static_cast<size_t>(device)].ooms[static_cast<size_t>(cause)];
}

void TenantRefusals::CountEndedSession(absl::string_view tenant, int device) {
  MutexLock lock(mu_);
  if (known_.contains(tenant)) ++Of(tenant)[static_cast<size_t>(device)].ended_sessions;
}

void TenantRefusals::Forget(absl::string_view tenant) {
  MutexLock lock(mu_);
  known_.erase(tenant);
  const auto it = places_.find(tenant);
  if (it == places_.end() || tenant == kOtherTenants) return;
  tenants_.erase(tenants_.begin() + static_cast<std::ptrdiff_t>(it->second));
  places_.erase(it);
  for (size_t i = 0; i < tenants_.size(); ++i) places_[tenants_[i].first] = i;
}

TenantRefusals::ByTenant TenantRefusals::Get() const {
  MutexLock lock(mu_);
  return tenants_;
}

std::vector<TenantRefusals::Counts>& TenantRefusals::Of(absl::string_view tenant) {
  if (const auto it = places_.find(tenant); it != places_.end()) return tenants_[it->second].second;
  if (tenants_.size() - (places_.contains(kOtherTenants) ? 1 : 0) >= max_tenants_) tenant = kOtherTenants;
  const auto [it, is_new] = places_.try_emplace(std::string(tenant), tenants_.size());
  if (is_new) tenants_.emplace_back(std::string(tenant), std::vector<Counts>(devices_));
  return tenants_[it->second].second;
}

}  // namespace vrambroker
