// SPDX-License-Identifier: Apache-2.0
//
// Quarantine: segments of ended processes, until no process can touch them any more. A plain container, not
// thread-safe.
#ifndef VRAMBROKER_SERVER_POOL_QUARANTINE_H_
#define VRAMBROKER_SERVER_POOL_QUARANTINE_H_

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/btree_set.h"
#include "allocator/base/ids.h"
#include "allocator/device/session_mark.h"
#include "server/pool/idle_segments.h"
#include "server/pool/share.h"

namespace vrambroker {

class Quarantine {
 public:
  struct Entry {
    UnleasedSegment unleased;  // as passed to DriverSegments::Free()
    std::string client;        // last holder
    pid_t pid = 0;
    ShareId share;         // charged for the segment
    SessionMark mark = 0;  // mark of the client
    SteadyTime next_check;
    int checks = 0;                // so far
    bool checking = false;         // a look is under way
    std::vector<pid_t> holders{};  // processes able to touch the segment at the last look
  };
  // A segment to look at.
  struct Due {
    SegmentId id{};
    DeviceSegment segment;
    SessionMark mark = 0;
  };
  // Segments left behind by one client, for people.
  struct Holding {
    std::string client;
    pid_t pid = 0;
    uint64_t bytes = 0;
    uint64_t segments = 0;
    SteadyTime since;            // of the oldest segment
    std::vector<pid_t> holders;  // of any segment, each process once; empty: the segments only settle
  };

  uint64_t bytes() const { return bytes_; }
  void Add(SegmentId id, Entry entry);
  // Time of the next look at a segment; nullopt when there is none.
  std::optional<SteadyTime> next_check() const;
  // Bytes not looked at yet: reuse may be possible soon.
  uint64_t settling_bytes() const { return settling_bytes_; }
  // Marks segments due at `now` as being looked at, and returns them.
  std::vector<Due> StartChecks(SteadyTime now);
  // Call when no process holds the segment any more. REQUIRES: the segment is here.
  UnleasedSegment Remove(SegmentId id);
  // Keeps the segment, as `holders` can still touch it. The next look comes soon, and later each time. Returns true
  // when the holders have changed.
  bool Keep(SegmentId id, std::vector<pid_t> holders, SteadyTime now);
  std::vector<Holding> Holdings() const;
  // By id.
  const absl::btree_map<SegmentId, Entry>& entries() const { return entries_; }
  // Returns all segments, for giving them back at the end.
  std::vector<DeviceSegment> Segments() const;

 private:
  uint64_t bytes_ = 0;
  uint64_t settling_bytes_ = 0;
  absl::btree_map<SegmentId, Entry> entries_;
  absl::btree_set<std::pair<SteadyTime, SegmentId>> checks_;  // next looks, except at segments being looked at now
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_POOL_QUARANTINE_H_
