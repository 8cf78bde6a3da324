// SPDX-License-Identifier: Apache-2.0
#include "server/pool/idle_segments.h"

#include <iterator>
#include <limits>

namespace vrambroker {

std::optional<SteadyTime> IdleSegments::oldest() const {
  if (by_age_.empty()) return std::nullopt;
  return by_age_.begin()->second.since;
}

FreeSizes IdleSegments::GetSizes() const {
  FreeSizes sizes;
  for (const auto& [tenant, bytes, sequence] : by_fit_) sizes.Add(bytes);
  return sizes;
}

void IdleSegments::Add(const UnleasedSegment& entry) {
  Insert(next_++, entry);
}

void IdleSegments::Insert(Sequence sequence, const UnleasedSegment& entry) {
  bytes_ += entry.segment.bytes;
  by_fit_.insert({entry.tenant, entry.segment.bytes, sequence});
  by_age_.insert({sequence, entry});
}

std::optional<IdleSegments::Taken> IdleSegments::Take(const std::string& tenant, uint64_t bytes) {
  auto it = by_fit_.upper_bound({tenant, bytes, std::numeric_limits<Sequence>::max()});
  if (it == by_fit_.begin()) return std::nullopt;
  const auto& [found_tenant, found_bytes, sequence] = *std::prev(it);
  if (found_tenant != tenant || found_bytes != bytes) return std::nullopt;
  return Taken{.place = sequence, .entry = Remove(sequence)};
}

std::vector<UnleasedSegment> IdleSegments::TakeOldest(uint64_t bytes) {
  std::vector<UnleasedSegment> taken;
  for (uint64_t sum = 0; sum < bytes && !by_age_.empty();) {
    taken.push_back(Remove(by_age_.begin()->first));
    sum += taken.back().segment.bytes;
  }
  return taken;
}

std::vector<std::pair<uint64_t, uint64_t>> IdleSegments::NumbersAndBytes() const {
  std::vector<std::pair<uint64_t, uint64_t>> all;
  all.reserve(by_age_.size());
  for (const auto& [sequence, entry] : by_age_) all.emplace_back(sequence, entry.segment.bytes);
  return all;
}

UnleasedSegment IdleSegments::Remove(Sequence sequence) {
  const auto it = by_age_.find(sequence);
  UnleasedSegment entry = std::move(it->second);
  by_age_.erase(it);
  by_fit_.erase({entry.tenant, entry.segment.bytes, sequence});
  bytes_ -= entry.segment.bytes;
  return entry;
}

}  // namespace vrambroker
