// SPDX-License-Identifier: Apache-2.0
#include "allocator/scope_use.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"

namespace vrambroker {

std::vector<ScopeUse> ScopeUses(const HeapSnapshot& heap) {
  if (heap.scopes.empty()) return {};
  std::vector<std::string> paths;
  paths.reserve(heap.scopes.size());
  for (size_t id = 0; id < heap.scopes.size(); ++id) {
    paths.push_back(ScopePath(heap.scopes, static_cast<ScopeId>(id)));
  }
  absl::flat_hash_map<std::string, ScopeUse> uses;
  const auto path_of = [&](size_t id) -> const std::string& { return paths[id < paths.size() ? id : 0]; };
  for (const SegmentSnapshot& segment : heap.segments) {
    uint64_t hole_bytes = 0;
    absl::flat_hash_set<ScopeId> pinning;
    for (const BlockSnapshot& block : segment.blocks) {
      if (block.state == BlockState::kFree) {
        hole_bytes += block.bytes;
        continue;
      }
      pinning.insert(block.scope);
      if (block.state != BlockState::kAllocated) continue;
      ScopeUse& use = uses[path_of(block.scope)];
      use.allocated_bytes += block.bytes;
      ++use.blocks;
    }
    if (hole_bytes == 0) continue;
    absl::flat_hash_set<std::string> counted;
    for (const ScopeId scope : pinning) {
      if (counted.insert(path_of(scope)).second) uses[path_of(scope)].pinned_hole_bytes += hole_bytes;
    }
  }
  for (size_t id = 0; id < heap.scope_bytes_at_peak.size(); ++id) {
    if (heap.scope_bytes_at_peak[id] > 0) uses[path_of(id)].bytes_at_peak += heap.scope_bytes_at_peak[id];
  }
  std::vector<ScopeUse> sorted;
  sorted.reserve(uses.size());
  for (auto& [path, use] : uses) {
    use.scope = path;
    sorted.push_back(std::move(use));
  }
  std::sort(sorted.begin(), sorted.end(), [](const ScopeUse& a, const ScopeUse& b) {
    return std::tuple(b.allocated_bytes, b.bytes_at_peak, a.scope) <
           std::tuple(a.allocated_bytes, a.bytes_at_peak, b.scope);
  });
  return sorted;
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
