// SPDX-License-Identifier: Apache-2.0
//
// IdleSegments: the segments of a device that no session holds, kept for reuse. A plain container, not thread-safe.
#ifndef VRAMBROKER_SERVER_IDLE_SEGMENTS_H_
#define VRAMBROKER_SERVER_IDLE_SEGMENTS_H_

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/btree_set.h"
#include "allocator/device.h"

namespace vrambroker {

using SteadyTime = std::chrono::steady_clock::time_point;

class IdleSegments {
 public:
  struct Entry {
    DeviceSegment segment;
    std::optional<CudaIpcHandle> cuda_ipc;
    uid_t tenant = 0;  // who held it last; nobody else may get it
    SteadyTime since;
  };

  uint64_t bytes() const { return bytes_; }

  void Add(const Entry& entry);

  // The youngest segment of exactly `bytes` that `tenant` held last; its pages are the likeliest to be warm.
  std::optional<Entry> Take(uid_t tenant, uint64_t bytes);

  // The oldest segments, until they come to `bytes` or none is left.
  std::vector<Entry> TakeOldest(uint64_t bytes);

  // All segments that have been idle since `time` or longer.
  std::vector<Entry> TakeIdleSince(SteadyTime time);

 private:
  using Sequence = uint64_t;  // order of Add

  Entry Remove(Sequence sequence);

  Sequence next_ = 0;
  uint64_t bytes_ = 0;
  absl::btree_map<Sequence, Entry> by_age_;
  absl::btree_set<std::tuple<uid_t, uint64_t, Sequence>> by_fit_;  // tenant, size, age
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_IDLE_SEGMENTS_H_
