// SPDX-License-Identifier: Apache-2.0
//
// IdleSegments: segments of a device held by no session, kept for reuse. A plain container, not thread-safe.
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

// A driver segment held by no session: idle, in quarantine, or on its way back.
struct UnleasedSegment {
  DeviceSegment segment;
  std::string tenant;  // the only tenant ever to get the segment: see server/DEVICES.md
  SteadyTime since;    // start of being idle or in quarantine
};

class IdleSegments {
 public:
  uint64_t bytes() const { return bytes_; }
  // Start of the oldest segment's idle time; nullopt when there is none.
  std::optional<SteadyTime> oldest() const;

  // Sizes of all segments. Walks over them.
  FreeSizes GetSizes() const;

  void Add(const UnleasedSegment& entry);

  // A taken entry, and its place by age.
  struct Taken {
    uint64_t place = 0;
    UnleasedSegment entry;
  };
  // Takes the youngest segment of exactly `bytes` last held by `tenant`; the youngest pages are the likeliest to be
  // warm.
  std::optional<Taken> Take(const std::string& tenant, uint64_t bytes);
  // Restores a taken entry, as if it had never been taken.
  void PutBack(const Taken& taken) { Insert(taken.place, taken.entry); }

  // Takes the oldest segments, until they come to `bytes` or none is left.
  std::vector<UnleasedSegment> TakeOldest(uint64_t bytes);

  // Sizes of all segments, the oldest first, each with a number unique and constant while the segment is here.
  std::vector<std::pair<uint64_t, uint64_t>> NumbersAndBytes() const;

 private:
  using Sequence = uint64_t;  // order of Add()

  void Insert(Sequence sequence, const UnleasedSegment& entry);
  UnleasedSegment Remove(Sequence sequence);

  Sequence next_ = 0;
  uint64_t bytes_ = 0;
  absl::btree_map<Sequence, UnleasedSegment> by_age_;
  absl::btree_set<std::tuple<std::string, uint64_t, Sequence>> by_fit_;  // tenant, size, age
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_POOL_IDLE_SEGMENTS_H_
