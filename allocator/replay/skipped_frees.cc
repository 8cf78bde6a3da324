// SPDX-License-Identifier: Apache-2.0
#include "allocator/replay/skipped_frees.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"

namespace vrambroker {
namespace {

using Action = RecordedEvent::Action;

RecordedEvent Derived(const RecordedEvent& event, Action action) {
  RecordedEvent derived = event;
  derived.action = action;
  derived.is_derived = true;
  return derived;
}

// free_requested was skipped: a block allocated in the recording became free.
bool SkipsRequests(const std::vector<RecordedEvent>& events) {
  absl::flat_hash_set<uint64_t> allocated;
  for (const RecordedEvent& event : events) {
    if (event.action == Action::kAllocate) allocated.insert(event.address);
    if (event.action == Action::kFreeCompleted && allocated.contains(event.address)) return true;
  }
  return false;
}

// Returns the blocks, by the index of their free_requested, that were free afterwards: allocated again, or not in use
// at the end.
std::vector<size_t> FreedByRequest(const std::vector<RecordedEvent>& events,
                                   const absl::flat_hash_set<uint64_t>& in_use, bool has_segments) {
  std::vector<size_t> freed;
  absl::flat_hash_map<uint64_t, size_t> requested;  // by address
  for (size_t i = 0; i < events.size(); ++i) {
    const auto known = requested.find(events[i].address);
    if (events[i].action == Action::kAllocate && known != requested.end()) {
      freed.push_back(known->second);
      requested.erase(known);
    }
    if (events[i].action == Action::kFreeRequested) requested[events[i].address] = i;
  }
  // Without segments, any remaining block may still wait. If some blocks were free, the rest are taken to be free, too.
  if (!has_segments && freed.empty()) return freed;
  for (const auto& [address, index] : requested) {
    if (!in_use.contains(address)) freed.push_back(index);
  }
  std::sort(freed.begin(), freed.end());
  return freed;
}

}  // namespace

std::string AddSkippedFrees(std::vector<RecordedEvent>& events, std::vector<SegmentSnapshot>& segments,
                            bool has_segments) {
  const auto has = [&](Action action) {
    return std::any_of(events.begin(), events.end(),
                       [action](const RecordedEvent& event) { return event.action == action; });
  };
  const bool has_requests = has(Action::kFreeRequested);
  if (has_requests == has(Action::kFreeCompleted)) return "";
  std::vector<RecordedEvent> all;
  if (!has_requests) {
    if (!SkipsRequests(events)) return "";
    all.reserve(2 * events.size());
    for (const RecordedEvent& event : events) {
      if (event.action == Action::kFreeCompleted) all.push_back(Derived(event, Action::kFreeRequested));
      all.push_back(event);
    }
    for (SegmentSnapshot& segment : segments) {
      for (BlockSnapshot& block : segment.blocks) {
        if (block.state == BlockState::kPendingFree) block.state = BlockState::kAllocated;
      }
    }
    events = std::move(all);
    return "the recording skips free_requested: each block is taken to be freed when it became free (free_completed).";
  }
  absl::flat_hash_set<uint64_t> in_use;
  for (const SegmentSnapshot& segment : segments) {
    for (const BlockSnapshot& block : segment.blocks) {
      if (block.state != BlockState::kFree) in_use.insert(segment.address + block.offset);
    }
  }
  const std::vector<size_t> freed = FreedByRequest(events, in_use, has_segments);
  if (freed.empty()) return "";
  all.reserve(events.size() + freed.size());
  auto next = freed.begin();
  for (size_t i = 0; i < events.size(); ++i) {
    all.push_back(events[i]);
    if (next == freed.end() || *next != i) continue;
    all.push_back(Derived(events[i], Action::kFreeCompleted));
    ++next;
  }
  events = std::move(all);
  return "the recording skips free_completed: each block is taken to become free when its free was requested. One that "
         "other streams still used became free later, so that peaks may have been higher.";
}

}  // namespace vrambroker
