// SPDX-License-Identifier: Apache-2.0
//
// LeasedSegments: segments of a device held by sessions, and valid tickets for their descriptors. A plain container,
// not thread-safe.
#ifndef VRAMBROKER_SERVER_POOL_LEASED_SEGMENTS_H_
#define VRAMBROKER_SERVER_POOL_LEASED_SEGMENTS_H_

#include <cstddef>
#include <optional>
#include <vector>

#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "allocator/base/ids.h"
#include "allocator/device/device.h"
#include "server/base/random_token.h"

namespace vrambroker {

// Right to fetch the file descriptor of a segment once.
using FdTicket = RandomToken;

struct LeasedSegment {
  DeviceSegment segment;
  SessionId holder{};
  bool returning = false;
  bool exported = false;           // the holder has, or once had, the means to open the segment
  std::optional<FdTicket> ticket;  // the valid ticket, if any
};

// Each ticket is for a segment here. A segment has at most one valid ticket.
class LeasedSegments {
 public:
  // REQUIRES: `id` is not here.
  void Add(SegmentId id, const LeasedSegment& segment);
  // Removes the segment and voids its ticket. REQUIRES: the segment is here.
  LeasedSegment Remove(SegmentId id);
  // Returns nullptr if the session does not hold the segment.
  LeasedSegment* Find(SessionId holder, SegmentId id);
  // REQUIRES: the segment is here.
  const LeasedSegment& at(SegmentId id) const { return segments_.at(id); }

  // Call when the session will hold nothing here again. REQUIRES: it holds nothing.
  void Forget(SessionId holder) { of_session_.erase(holder); }

  // Returns the session's segments in the order of ids.
  std::vector<SegmentId> Of(SessionId holder) const;
  size_t CountOf(SessionId holder) const;
  const absl::flat_hash_map<SegmentId, LeasedSegment>& all() const { return segments_; }
  size_t size() const { return segments_.size(); }

  // Returns the segment's valid ticket, or a new ticket. REQUIRES: `segment` is the entry of `id`.
  absl::StatusOr<FdTicket> IssueTicket(SegmentId id, LeasedSegment& segment);
  // Returns the segment of the valid ticket; nullptr: none. The pointer holds until the next change.
  LeasedSegment* FindTicket(const FdTicket& ticket);
  // Voids the segment's ticket, if any.
  void VoidTicket(LeasedSegment& segment);

 private:
  absl::flat_hash_map<SegmentId, LeasedSegment> segments_;
  absl::flat_hash_map<SessionId, absl::btree_set<SegmentId>> of_session_;
  absl::flat_hash_map<FdTicket, SegmentId> tickets_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_POOL_LEASED_SEGMENTS_H_
