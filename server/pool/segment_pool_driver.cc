// SPDX-License-Identifier: Apache-2.0
//
// SegmentPool: memory at the driver, freeing, and the health of the device.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/saturating.h"
#include "server/pool/segment_pool.h"
#include "server/pool/segment_refusal.h"

namespace vrambroker {

std::vector<UnleasedSegment> SegmentPool::StartFreeing(std::vector<UnleasedSegment> entries) {
  driver_.StartFreeing(entries);
  return entries;
}

void SegmentPool::RetryFrees() {
  (void)driver_.RetryFrees();
}

uint64_t SegmentPool::ReleaseIdleSince(SteadyTime time) {
  return ReleaseOldest([this, time](SteadyTime oldest, uint64_t idle_bytes) {
    return oldest <= time || idle_bytes > options_.idle_limit_bytes;
  });
}

absl::StatusOr<SegmentPool::Released> SegmentPool::ReleaseIdle() {
  if (const absl::Status health = this->health(); !health.ok()) {
    return absl::Status(health.code(),
                        absl::StrCat("device ", properties().ordinal, " cannot be used: ", health.message()));
  }
  // Segments becoming idle meanwhile are left for reuse, so that the call ends.
  const SteadyTime now = options_.clock();
  Released released{.bytes = driver_.RetryFrees()};
  released.bytes += ReleaseOldest([now](SteadyTime oldest, uint64_t /*idle_bytes*/) { return oldest <= now; });
  released.refused_bytes = driver_.counts().unfreed_bytes;
  return released;
}

uint64_t SegmentPool::ReleaseOldest(const std::function<bool(SteadyTime oldest, uint64_t idle_bytes)>& is_due) {
  // Free segments singly: while the driver is busy, the remaining segments can still be leased.
  for (uint64_t bytes = 0;;) {
    std::vector<UnleasedSegment> oldest;
    {
      MutexLock lock(mu_);
      const std::optional<SteadyTime> since = idle_.oldest();
      if (!since.has_value() || !is_due(*since, idle_.bytes())) return bytes;
      oldest = StartFreeing(idle_.TakeOldest(1));
    }
    bytes += driver_.Free(oldest);
  }
}

std::optional<SteadyTime> SegmentPool::NextDecay(std::chrono::milliseconds decay) const {
  MutexLock lock(mu_);
  const std::optional<SteadyTime> since = idle_.oldest();
  if (!since.has_value()) return std::nullopt;
  return idle_.bytes() > options_.idle_limit_bytes ? *since : *since + decay;
}

void SegmentPool::SetOnDecayChanged(std::function<void()> callback) {
  MutexLock lock(mu_);
  on_decay_changed_ = std::move(callback);
}

absl::Status SegmentPool::UpdateHealth() {
  absl::Status health = device_->Health();
  const FromDriver before = GetFromDriver();
  const absl::StatusOr<uint64_t> free = health.ok() ? device_->FreeBytes() : health;
  // ResourceExhausted would tell requesters that other sessions have the memory.
  if (!free.ok())
    health = absl::IsResourceExhausted(free.status()) ? absl::InternalError(free.status().message()) : free.status();
  bool changed = false;
  {
    MutexLock lock(mu_);
    changed = health_.ok() != health.ok();
    if (changed) accounts_.Forbid();
    health_ = health;
    const uint64_t unowned = UnownedBytes();
    if (free.ok()) {
      const FromDriver now = FromDriverNow();
      driver_memory_.Update(*free, std::min(before.at_least, now.at_least), std::max(before.at_most, now.at_most));
    }
    Settle();
    changed = changed || unowned != UnownedBytes();
  }
  if (changed) CapacityFreed();  // waiting requests are refused now, or served
  return health;
}

void SegmentPool::DriverRefused(uint64_t bytes) {
  const absl::StatusOr<uint64_t> free = device_->FreeBytes();
  MutexLock lock(mu_);
  driver_memory_.Refused(bytes, free.ok() ? std::optional<uint64_t>(*free) : std::nullopt, FromDriverNow().bytes);
  Settle();
}

bool SegmentPool::IsOutside(const absl::Status& refusal) const {
  return driver_memory_.unowned().outside > 0 && SegmentRefusalCause(refusal) == OomCause::kCapacity;
}

void SegmentPool::AskDriver() {
  const FromDriver before = GetFromDriver();
  const absl::StatusOr<uint64_t> free = device_->FreeBytes();
  if (!free.ok()) return;
  bool has_more = false;
  {
    MutexLock lock(mu_);
    const uint64_t outside = driver_memory_.unowned().outside;
    driver_memory_.UpdateMost(*free, std::max(before.at_most, FromDriverNow().at_most));
    Settle();
    has_more = driver_memory_.unowned().outside < outside;
  }
  if (has_more) CapacityFreed();
}

SegmentPool::FromDriver SegmentPool::GetFromDriver() const {
  MutexLock lock(mu_);
  return FromDriverNow();
}

uint64_t SegmentPool::GetOwnBytes() const {
  MutexLock lock(mu_);
  uint64_t counted = 0;
  for (const auto& [session, account] : accounts_.all()) counted += account.counted_bytes;
  return SaturatingSub(FromDriverNow().at_most, counted);
}

void SegmentPool::SetContexts(uint64_t bytes, uint64_t clients) {
  bool has_more = false;
  {
    MutexLock lock(mu_);
    const uint64_t outside = driver_memory_.unowned().outside;
    driver_memory_.SetContexts(bytes, clients);
    Settle();
    has_more = driver_memory_.unowned().outside < outside;
  }
  if (has_more) CapacityFreed();
}

SegmentPool::FromDriver SegmentPool::FromDriverBy(const DriverSegments::Counts& driver) const {
  const uint64_t bytes = accounts_.ledger().charged_bytes() - accounts_.granted_bytes() - driver.obtaining_bytes -
                         carried_over_.bytes() - UnownedBytes() + idle_.bytes() + driver.freeing_bytes +
                         driver.unfreed_bytes;
  return {.bytes = bytes, .at_least = bytes - driver.freeing_bytes, .at_most = bytes + driver.obtaining_bytes};
}

uint64_t SegmentPool::UnownedBytes() const {
  return driver_memory_.unowned().elsewhere + driver_memory_.unowned().outside;
}

void SegmentPool::Settle() {
  const auto& accounts = accounts_.all();
  const auto clients =
      options_.headroom_bytes == 0 ? 0 : std::count_if(accounts.begin(), accounts.end(), [](const auto& entry) {
        return entry.second.holds_since != SteadyTime();
      });
  const uint64_t before = UnownedBytes();
  const DriverMemory::Unowned& unowned = driver_memory_.Settle({.declared = carried_over_.declared_bytes(),
                                                                .carried_over = carried_over_.bytes(),
                                                                .clients = static_cast<uint64_t>(clients)});
  if (properties().has_other_programs) accounts_.ExtendCapacity(unowned.beyond_capacity);
  if (UnownedBytes() > before) {
    accounts_.ChargeUnowned(UnownedBytes() - before);
  } else {
    accounts_.UnchargeUnowned(before - UnownedBytes());
  }
}

}  // namespace vrambroker
