// SPDX-License-Identifier: Apache-2.0
#include "allocator/heap/scope_use.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"

namespace vrambroker {

namespace {

// Uses of scopes by path: several ids may have an equal path.
class UsesByPath {
 public:
  explicit UsesByPath(absl::Span<const Scope> scopes) : scopes_(scopes) {}

  // Index of the scope's use in uses().
  size_t PlaceOf(size_t id) {
    if (id >= scopes_.size()) id = 0;
    if (id >= places_.size()) places_.resize(id + 1, kNone);
    if (places_[id] != kNone) return places_[id];
    std::string path = ScopePath(scopes_, static_cast<ScopeId>(id));
    const auto [it, is_new] = by_path_.emplace(path, uses_.size());
    if (is_new) uses_.push_back({.scope = std::move(path)});
    return places_[id] = it->second;
  }
  std::vector<ScopeUse>& uses() { return uses_; }

 private:
  static constexpr size_t kNone = ~size_t{0};

  const absl::Span<const Scope> scopes_;
  std::vector<size_t> places_;  // by id
  absl::flat_hash_map<std::string, size_t> by_path_;
  std::vector<ScopeUse> uses_;
};

}  // namespace

void ScopeTally::EndSegment() {
  const size_t begin = pinned_.empty() ? 0 : pinned_.back().end;
  if (hole_bytes_ == 0) {
    pinning_.resize(begin);
  } else if (pinning_.size() > begin) {  // else the segment is wholly free
    pinned_.push_back({.hole_bytes = hole_bytes_, .end = pinning_.size()});
  }
  hole_bytes_ = 0;
  ++segment_;
}

std::vector<ScopeUse> ScopeTally::Uses(absl::Span<const Scope> scopes, absl::Span<const uint64_t> bytes_at_peak) const {
  UsesByPath by_path(scopes);
  std::vector<ScopeUse>& uses = by_path.uses();
  for (size_t id = 0; id < held_.size(); ++id) {
    if (held_[id].blocks == 0) continue;
    ScopeUse& use = uses[by_path.PlaceOf(id)];
    use.allocated_bytes += held_[id].bytes;
    use.blocks += held_[id].blocks;
  }
  size_t next = 0;
  for (const PinnedSegment& segment : pinned_) {
    absl::flat_hash_set<size_t> counted;
    for (; next < segment.end; ++next) {
      const size_t place = by_path.PlaceOf(pinning_[next]);
      if (counted.insert(place).second) uses[place].pinned_hole_bytes += segment.hole_bytes;
    }
  }
  for (size_t id = 0; id < bytes_at_peak.size(); ++id) {
    if (bytes_at_peak[id] > 0) uses[by_path.PlaceOf(id)].bytes_at_peak += bytes_at_peak[id];
  }
  std::sort(uses.begin(), uses.end(), [](const ScopeUse& a, const ScopeUse& b) {
    return std::tuple(b.allocated_bytes, b.bytes_at_peak, a.scope) <
           std::tuple(a.allocated_bytes, a.bytes_at_peak, b.scope);
  });
  return std::move(uses);
}

std::vector<ScopeUse> ScopeUses(const HeapSnapshot& heap) {
  if (heap.scopes.empty()) return {};
  ScopeTally tally;
  for (const SegmentSnapshot& segment : heap.segments) {
    for (const BlockSnapshot& block : segment.blocks) tally.Add(block.state, block.bytes, block.scope);
    tally.EndSegment();
  }
  return tally.Uses(heap.scopes, heap.scope_bytes_at_peak);
}

std::vector<ScopeUse>::const_iterator LargestNamedScope(const std::vector<ScopeUse>& uses) {
  auto largest = uses.end();
  for (auto use = uses.begin(); use != uses.end(); ++use) {
    if (use->scope.empty()) continue;
    if (largest == uses.end() || use->allocated_bytes > largest->allocated_bytes) largest = use;
  }
  return largest;
}

std::vector<ScopeUse> LargestScopeUses(std::vector<ScopeUse> uses, size_t most) {
  std::stable_sort(uses.begin(), uses.end(), [](const ScopeUse& a, const ScopeUse& b) {
    return std::max(a.allocated_bytes, a.pinned_hole_bytes) > std::max(b.allocated_bytes, b.pinned_hole_bytes);
  });
  if (uses.size() <= most || most == 0) return uses;
  const auto largest = LargestNamedScope(uses);
  const auto place = static_cast<size_t>(largest - uses.begin());
  if (largest != uses.end() && place >= most) std::swap(uses[most - 1], uses[place]);
  uses.resize(most);
  return uses;
}

}  // namespace vrambroker
