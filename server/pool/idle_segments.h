// SPDX-License-Identifier: Apache-2.0
//
// IdleSegments: the segments of a device that no session holds, kept for reuse. A plain container, not thread-safe.
#ifndef VRAMBROKER_SERVER_POOL_IDLE_SEGMENTS_H_
#define VRAMBROKER_SERVER_POOL_IDLE_SEGMENTS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/btree_set.h"
#include "allocator/device/device.h"
#include "allocator/heap/memory_stats.h"
#include "server/base/steady_time.h"

namespace vrambroker {

// A segment of the driver's that no session holds: idle, in quarantine, or on its way back.
struct UnleasedSegment {
  DeviceSegment segment;
  std::optional<CudaIpcHandle> cuda_ipc;
  std::string tenant;  // no other tenant ever gets the segment: see server/README.md
  SteadyTime since;    // when it became idle, or came into quarantine
};

class IdleSegments {
 public:
  uint64_t bytes() const { return bytes_; }
  // Since when the oldest segment has been idle; nullopt when there is none.
  std::optional<SteadyTime> oldest() const;

  // Of all segments. Walks over them.
  FreeSizes GetSizes() const;

  void Add(const UnleasedSegment& entry);

  // An entry that was taken, and its place by age.
  struct Taken {
    uint64_t place = 0;
    UnleasedSegment entry;
  };
  // The youngest segment of exactly `bytes` that was of `tenant` last; its pages are the likeliest to be warm.
  std::optional<Taken> Take(const std::string& tenant, uint64_t bytes);
  // As if it had never been taken.
  void PutBack(const Taken& taken) { Insert(taken.place, taken.entry); }

  // The oldest segments, until they come to `bytes` or none is left.
  std::vector<UnleasedSegment> TakeOldest(uint64_t bytes);

  // The sizes of all, the oldest first, each with a number that stays its own while it is here.
  std::vector<std::pair<uint64_t, uint64_t>> NumbersAndBytes() const;

 private:
  using Sequence = uint64_t;  // order of Add

  void Insert(Sequence sequence, const UnleasedSegment& entry);
  UnleasedSegment Remove(Sequence sequence);

  Sequence next_ = 0;
  uint64_t bytes_ = 0;
  absl::btree_map<Sequence, UnleasedSegment> by_age_;
  absl::btree_set<std::tuple<std::string, uint64_t, Sequence>> by_fit_;  // tenant, size, age
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_POOL_IDLE_SEGMENTS_H_
