// SPDX-License-Identifier: Apache-2.0
#include "server/pool/leased_segments.h"

#include "absl/status/status.h"

namespace vrambroker {

void LeasedSegments::Add(SegmentId id, const LeasedSegment& segment) {
  of_session_[segment.holder].insert(id);
  segments_.emplace(id, segment);
}

LeasedSegment LeasedSegments::Remove(SegmentId id) {
  const auto it = segments_.find(id);
  const LeasedSegment removed = it->second;
  VoidTicket(it->second);
  of_session_.at(removed.holder).erase(id);
  segments_.erase(it);
  return removed;
}

LeasedSegment* LeasedSegments::Find(SessionId holder, SegmentId id) {
  const auto it = segments_.find(id);
  return it == segments_.end() || it->second.holder != holder ? nullptr : &it->second;
}

std::vector<SegmentId> LeasedSegments::Of(SessionId holder) const {
  const auto own = of_session_.find(holder);
  if (own == of_session_.end()) return {};
  return {own->second.begin(), own->second.end()};
}

size_t LeasedSegments::CountOf(SessionId holder) const {
  const auto own = of_session_.find(holder);
  return own == of_session_.end() ? 0 : own->second.size();
}

absl::StatusOr<FdTicket> LeasedSegments::IssueTicket(SegmentId id, LeasedSegment& segment) {
  if (!segment.ticket.has_value()) {
    absl::StatusOr<FdTicket> ticket = NewRandomToken();
    if (!ticket.ok()) return ticket.status();
    segment.ticket = *ticket;
    tickets_.emplace(*ticket, id);
  }
  return *segment.ticket;
}

LeasedSegment* LeasedSegments::FindTicket(const FdTicket& ticket) {
  const auto it = tickets_.find(ticket);
  return it == tickets_.end() ? nullptr : &segments_.at(it->second);
}

void LeasedSegments::VoidTicket(LeasedSegment& segment) {
  if (!segment.ticket.has_value()) return;
  tickets_.erase(*segment.ticket);
  segment.ticket.reset();
}

}  // namespace vrambroker
