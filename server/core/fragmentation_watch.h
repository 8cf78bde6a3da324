// SPDX-License-Identifier: Apache-2.0
//
// FragmentationWatch: finds sessions whose memory fragments step by step, and predicts when a request will be refused.
#ifndef VRAMBROKER_SERVER_CORE_FRAGMENTATION_WATCH_H_
#define VRAMBROKER_SERVER_CORE_FRAGMENTATION_WATCH_H_

#include <chrono>
#include <functional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"
#include "allocator/base/ids.h"
#include "allocator/base/mutex.h"
#include "server/base/steady_time.h"
#include "server/core/broker_view.h"
#include "server/core/fragmentation_trend.h"
#include "server/pool/segment_pool.h"

namespace vrambroker {

// Thread-safe.
class FragmentationWatch {
 public:
  // `pools`, indexed by device, outlive the object. `window`: see FragmentationTrend.
  FragmentationWatch(std::vector<SegmentPool*> pools, std::chrono::milliseconds window,
                     std::function<SteadyTime()> clock);

  // Adds the use of all sessions in the current `view` to their trends. Call every few seconds.
  void Follow(const BrokerView& view) ABSL_LOCKS_EXCLUDED(mu_);
  // Adds the results of the last Follow().
  void AddTo(absl::Span<SessionView> infos) const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Trend {
    FragmentationTrend trend;
    SessionDeviceView::Fragmentation stats;
  };

  const std::vector<SegmentPool*> pools_;
  const std::chrono::milliseconds window_;
  const std::function<SteadyTime()> clock_;

  mutable Mutex mu_;  // guards only trends_; no other lock is taken under it
  absl::flat_hash_map<SessionId, std::vector<Trend>> trends_ ABSL_GUARDED_BY(mu_);  // by device
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CORE_FRAGMENTATION_WATCH_H_
