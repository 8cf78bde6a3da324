// SPDX-License-Identifier: Apache-2.0
#include "server/core/fragmentation_watch.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "server/base/saturating.h"

namespace vrambroker {
namespace {

// Bytes of a device kept by a session when memory is asked for: reserved and not reclaimable, or guaranteed.
uint64_t NeededBytes(const SessionDeviceView& held) {
  return std::max(SaturatingSub(held.account.reserved_bytes, held.idle_bytes), held.account.guarantee_bytes);
}

// Bytes of a device reclaimable for a request: in all, and by share.
struct Reclaimable {
  uint64_t bytes = 0;
  absl::flat_hash_map<ShareId, uint64_t> of_share;

  Reclaimable(const BrokerView& view, size_t device) {
    for (const SessionView& session : view.sessions) {
      const SessionDeviceView& held = session.devices[device];
      const uint64_t more = SaturatingSub(held.account.committed_bytes(), NeededBytes(held));
      bytes += more;
      of_share[held.account.share] += more;
    }
  }
};

// Most bytes for the session on the device, once all reclaimable memory is given up: bounded by the session's limit,
// the share's limit and the device's capacity.
uint64_t MostBytes(const SessionDeviceView& held, const SegmentPool& pool, const PoolStats& stats,
                   const Reclaimable& reclaimable) {
  const AccountState& account = held.account;
  const auto most_of = [&](uint64_t bound, uint64_t committed, uint64_t given_up) {
    return SaturatingSub(bound, SaturatingSub(SaturatingSub(committed, given_up), NeededBytes(held)));
  };
  uint64_t most =
      std::min(account.limit_bytes, most_of(stats.capacity_bytes, stats.committed_bytes, reclaimable.bytes));
  if (account.share_limit_bytes != AccountState::kNoBound) {
    const auto of_share = reclaimable.of_share.find(account.share);
    most = std::min(most, most_of(account.share_limit_bytes, pool.GetShare(account.share).used_bytes,
                                  of_share == reclaimable.of_share.end() ? 0 : of_share->second));
  }
  return most;
}

}  // namespace

FragmentationWatch::FragmentationWatch(std::vector<SegmentPool*> pools, std::chrono::milliseconds window,
                                       std::function<SteadyTime()> clock)
    : pools_(std::move(pools)), window_(window), clock_(std::move(clock)) {}

void FragmentationWatch::Follow(const BrokerView& view) {
  const SteadyTime now = clock_();
  std::vector<std::vector<uint64_t>> most(view.sessions.size());  // by session, then device
  for (size_t device = 0; device < view.devices.size(); ++device) {
    const Reclaimable reclaimable(view, device);
    for (size_t i = 0; i < view.sessions.size(); ++i) {
      const SessionDeviceView& held = view.sessions[i].devices[device];
      most[i].push_back(MostBytes(held, *pools_[device], view.devices[device].pool, reclaimable));
    }
  }
  absl::flat_hash_map<SessionId, std::vector<Trend>> of_live;
  of_live.reserve(view.sessions.size());
  MutexLock lock(mu_);
  for (size_t i = 0; i < view.sessions.size(); ++i) {
    const SessionView& session = view.sessions[i];
    std::vector<Trend>& trends = of_live[session.id];
    if (const auto known = trends_.find(session.id); known != trends_.end()) trends = std::move(known->second);
    trends.resize(view.devices.size(), {.trend = FragmentationTrend(window_), .stats = {}});
    for (size_t device = 0; device < trends.size(); ++device) {
      const SessionDeviceView& held = session.devices[device];
      FragmentationTrend& trend = trends[device].trend;
      if (held.account.reserved_bytes == 0) {  // no trend to follow or keep
        trend = FragmentationTrend(window_);
      } else {
        trend.Add({.time = now,
                   .allocated_bytes = held.stats.allocated_bytes.all.current,
                   .allocated_peak_bytes = held.stats.allocated_bytes.all.peak,
                   .held_bytes = SaturatingSub(held.account.reserved_bytes, held.idle_bytes)});
      }
      trends[device].stats = {.bytes_per_second = trend.bytes_per_second(),
                              .seconds_to_refusal = trend.SecondsUntil(most[i][device])};
    }
  }
  trends_ = std::move(of_live);
}

void FragmentationWatch::AddTo(absl::Span<SessionView> infos) const {
  MutexLock lock(mu_);
  for (SessionView& info : infos) {
    const auto known = trends_.find(info.id);
    if (known == trends_.end()) continue;
    for (size_t device = 0; device < info.devices.size(); ++device) {
      info.devices[device].fragmentation = known->second[device].stats;
    }
  }
}

}  // namespace vrambroker
