// SPDX-License-Identifier: Apache-2.0
//
// LeasedSegments: the segments of a device that sessions hold, and the tickets that are out for their descriptors. A
// plain container, not thread-safe.
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

// One-time right to fetch the file descriptor of a segment.
using FdTicket = RandomToken;

struct LeasedSegment {
  DeviceSegment segment;
  std::optional<CudaIpcHandle> cuda_ipc;
  SessionId holder{};
  bool returning = false;
  bool exported = false;           // the holder has, or had, what opens it
  std::optional<FdTicket> ticket;  // the one that is out, if any
};

// Each ticket is for one of these segments. Each segment has at most one ticket out.
class LeasedSegments {
 public:
  // REQUIRES: `id` is not here.
  void Add(SegmentId id, const LeasedSegment& segment);
  // Its ticket is void. REQUIRES: it is here.
  LeasedSegment Remove(SegmentId id);
  // nullptr: the session holds no such segment.
  LeasedSegment* Find(SessionId holder, SegmentId id);
  // REQUIRES: it is here.
  const LeasedSegment& at(SegmentId id) const { return segments_.at(id); }

  // The session will hold nothing here again. REQUIRES: it holds nothing.
  void Forget(SessionId holder) { of_session_.erase(holder); }

  // In the order of their ids.
  std::vector<SegmentId> Of(SessionId holder) const;
  size_t CountOf(SessionId holder) const;
  const absl::flat_hash_map<SegmentId, LeasedSegment>& all() const { return segments_; }
  size_t size() const { return segments_.size(); }

  // The ticket that is out for the segment, or a new one. REQUIRES: `segment` is one of these, with that id.
  absl::StatusOr<FdTicket> IssueTicket(SegmentId id, LeasedSegment& segment);
  // The segment that the ticket is out for; nullptr: none. Stays until the next change.
  LeasedSegment* FindTicket(const FdTicket& ticket);
  // The one that is out for it, if any.
  void VoidTicket(LeasedSegment& segment);

 private:
  absl::flat_hash_map<SegmentId, LeasedSegment> segments_;
  absl::flat_hash_map<SessionId, absl::btree_set<SegmentId>> of_session_;
  absl::flat_hash_map<FdTicket, SegmentId> tickets_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_POOL_LEASED_SEGMENTS_H_
