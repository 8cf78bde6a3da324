// SPDX-License-Identifier: Apache-2.0
#include "server/idle_segments.h"

#include <iterator>
#include <limits>

namespace vrambroker {

void IdleSegments::Add(const Entry& entry) {
  const Sequence sequence = next_++;
  bytes_ += entry.segment.bytes;
  by_fit_.insert({entry.tenant, entry.segment.bytes, sequence});
  by_age_.insert({sequence, entry});
}

std::optional<IdleSegments::Entry> IdleSegments::Take(uid_t tenant, uint64_t bytes) {
  auto it = by_fit_.upper_bound({tenant, bytes, std::numeric_limits<Sequence>::max()});
  if (it == by_fit_.begin()) return std::nullopt;
  const auto& [found_tenant, found_bytes, sequence] = *std::prev(it);
  if (found_tenant != tenant || found_bytes != bytes) return std::nullopt;
  return Remove(sequence);
}

std::vector<IdleSegments::Entry> IdleSegments::TakeOldest(uint64_t bytes) {
  std::vector<Entry> taken;
  for (uint64_t sum = 0; sum < bytes && !by_age_.empty();) {
    taken.push_back(Remove(by_age_.begin()->first));
    sum += taken.back().segment.bytes;
  }
  return taken;
}

std::vector<IdleSegments::Entry> IdleSegments::TakeIdleSince(SteadyTime time) {
  std::vector<Entry> taken;
  while (!by_age_.empty() && by_age_.begin()->second.since <= time) taken.push_back(Remove(by_age_.begin()->first));
  return taken;
}

IdleSegments::Entry IdleSegments::Remove(Sequence sequence) {
  const auto it = by_age_.find(sequence);
  const Entry entry = it->second;
  by_age_.erase(it);
  by_fit_.erase({entry.tenant, entry.segment.bytes, sequence});
  bytes_ -= entry.segment.bytes;
  return entry;
}

}  // namespace vrambroker
