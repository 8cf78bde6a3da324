// SPDX-License-Identifier: Apache-2.0
//
// Quarantine: the segments of processes that have ended, until it is known that nobody can touch them any more. A plain
// container, not thread-safe.
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
    UnleasedSegment unleased;  // as DriverSegments::Free() takes it
    std::string client;        // whose it was
    pid_t pid = 0;
    ShareId share;         // to which it stays charged
    SessionMark mark = 0;  // of its client
    SteadyTime next_check;
    int checks = 0;                // so far
    bool checking = false;         // somebody looks at it now
    std::vector<pid_t> holders{};  // processes that could still touch it when it was last looked at
  };
  // What is to be looked at.
  struct Due {
    SegmentId id{};
    DeviceSegment segment;
    SessionMark mark = 0;
  };
  // What one client left behind, for people.
  struct Holding {
    std::string client;
    pid_t pid = 0;
    uint64_t bytes = 0;
    uint64_t segments = 0;
    SteadyTime since;            // of the oldest
    std::vector<pid_t> holders;  // of any of them, each once; empty: it only settles
  };

  uint64_t bytes() const { return bytes_; }
  void Add(SegmentId id, Entry entry);
  // When the next segment is to be looked at; nullopt when there is none.
  std::optional<SteadyTime> next_check() const;
  // What has not been looked at yet: it may be reusable soon.
  uint64_t settling_bytes() const { return settling_bytes_; }
  // Marks those that are due at `now` as being looked at, and returns them.
  std::vector<Due> StartChecks(SteadyTime now);
  // Nobody holds the segment any more. REQUIRES: it is here.
  UnleasedSegment Remove(SegmentId id);
  // `holders` still can; it is to be looked at again soon, and less often each time. True when they are others than
  // before.
  bool Keep(SegmentId id, std::vector<pid_t> holders, SteadyTime now);
  std::vector<Holding> Holdings() const;
  // By id.
  const absl::btree_map<SegmentId, Entry>& entries() const { return entries_; }
  // All of it, for giving it back at the end.
  std::vector<DeviceSegment> Segments() const;

 private:
  uint64_t bytes_ = 0;
  uint64_t settling_bytes_ = 0;
  absl::btree_map<SegmentId, Entry> entries_;
  absl::btree_set<std::pair<SteadyTime, SegmentId>> checks_;  // to come: of those that nobody looks at now
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_POOL_QUARANTINE_H_
