// SPDX-License-Identifier: Apache-2.0
#include "allocator/wire/heap_convert.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "allocator/heap/allocator_options.h"

namespace vrambroker {
namespace {

using Part = v1::GetSnapshotResponse;

constexpr uint64_t kMostEvents = std::numeric_limits<uint32_t>::max();

void Fill(const Stat& from, v1::Stat* to) {
  to->set_current(from.current);
  to->set_peak(from.peak);
  to->set_allocated(from.allocated);
  to->set_freed(from.freed);
}

void Fill(const PoolStat& from, v1::PoolStat* to) {
  Fill(from.all, to->mutable_all());
  Fill(from.pool[static_cast<int>(PoolKind::kSmall)], to->mutable_small_pool());
  Fill(from.pool[static_cast<int>(PoolKind::kLarge)], to->mutable_large_pool());
}

Stat FromProto(const v1::Stat& proto) {
  return {.current = proto.current(), .peak = proto.peak(), .allocated = proto.allocated(), .freed = proto.freed()};
}

PoolStat FromProto(const v1::PoolStat& proto) {
  return {.all = FromProto(proto.all()), .pool = {FromProto(proto.small_pool()), FromProto(proto.large_pool())}};
}

Part::BlockState ToProto(BlockState state) {
  switch (state) {
    case BlockState::kFree:
      return Part::BLOCK_STATE_FREE;
    case BlockState::kAllocated:
      return Part::BLOCK_STATE_ALLOCATED;
    case BlockState::kPendingFree:
      return Part::BLOCK_STATE_PENDING_FREE;
  }
  return Part::BLOCK_STATE_UNSPECIFIED;
}

Part::Event::Action ToProto(HistoryAction action) {
  using Event = Part::Event;
  switch (action) {
    case HistoryAction::kAllocate:
      return Event::ACTION_ALLOCATE;
    case HistoryAction::kFreeRequested:
      return Event::ACTION_FREE_REQUESTED;
    case HistoryAction::kFreeCompleted:
      return Event::ACTION_FREE_COMPLETED;
    case HistoryAction::kSegmentAllocate:
      return Event::ACTION_SEGMENT_ALLOCATE;
    case HistoryAction::kSegmentFree:
      return Event::ACTION_SEGMENT_FREE;
    case HistoryAction::kSnapshot:
      return Event::ACTION_SNAPSHOT;
    case HistoryAction::kOutOfMemory:
      return Event::ACTION_OUT_OF_MEMORY;
  }
  return Event::ACTION_UNSPECIFIED;
}

absl::StatusOr<BlockState> FromProto(Part::BlockState state) {
  switch (state) {
    case Part::BLOCK_STATE_FREE:
      return BlockState::kFree;
    case Part::BLOCK_STATE_ALLOCATED:
      return BlockState::kAllocated;
    case Part::BLOCK_STATE_PENDING_FREE:
      return BlockState::kPendingFree;
    default:
      return absl::InvalidArgumentError(absl::StrCat("state: no block state of this version: ", state));
  }
}

absl::StatusOr<HistoryAction> FromProto(Part::Event::Action action) {
  switch (action) {
    case Part::Event::ACTION_ALLOCATE:
      return HistoryAction::kAllocate;
    case Part::Event::ACTION_FREE_REQUESTED:
      return HistoryAction::kFreeRequested;
    case Part::Event::ACTION_FREE_COMPLETED:
      return HistoryAction::kFreeCompleted;
    case Part::Event::ACTION_SEGMENT_ALLOCATE:
      return HistoryAction::kSegmentAllocate;
    case Part::Event::ACTION_SEGMENT_FREE:
      return HistoryAction::kSegmentFree;
    case Part::Event::ACTION_SNAPSHOT:
      return HistoryAction::kSnapshot;
    case Part::Event::ACTION_OUT_OF_MEMORY:
      return HistoryAction::kOutOfMemory;
    default:
      return absl::InvalidArgumentError(absl::StrCat("action: no event of this version: ", action));
  }
}

void AddEvent(const HistoryEvent& from, Part* part) {
  Part::Event* to = part->add_events();
  to->set_action(ToProto(from.action));
  to->set_address(from.address);
  to->set_bytes(from.bytes);
  to->set_stream(from.stream);
  to->set_time_us(from.time_us);
  to->set_block_bytes(from.block_bytes());
  to->set_scope(from.scope);
}

// Checks that `scope` is a place in the list of `heap`.
absl::StatusOr<ScopeId> CheckScope(uint32_t scope, const HeapSnapshot& heap) {
  if (scope == 0 || scope < heap.scopes.size()) return static_cast<ScopeId>(scope);
  return absl::InvalidArgumentError(absl::StrCat("scope: ", scope, "; the snapshot has ", heap.scopes.size()));
}

// Counts `place` and the scopes around; at most one more than allowed.
int DepthOf(const std::vector<Scope>& scopes, size_t place) {
  int depth = 0;
  for (; place != 0 && depth <= ScopeTable::kMaxDepth; place = scopes[place].parent) ++depth;
  return depth;
}

// Only the first scope, for everything in no scope, has no name.
absl::Status AddScope(const Part::Scope& from, HeapSnapshot* heap) {
  const size_t place = heap->scopes.size();
  if (place > ScopeTable::kMaxScopes) {
    return absl::InvalidArgumentError(absl::StrCat("scopes: at most ", ScopeTable::kMaxScopes));
  }
  if (place == 0 ? from.parent() != 0 : from.parent() >= place) {
    return absl::InvalidArgumentError(absl::StrCat("scopes: parent ", from.parent(), " of scope ", place));
  }
  // Cleans text from a client: such text may be anything, and is shown to people.
  heap->scopes.push_back({.parent = static_cast<ScopeId>(from.parent()),
                          .name = CleanScopeText(from.scope().name(), ScopeTable::kMaxNameBytes),
                          .file = CleanScopeText(from.scope().file(), ScopeTable::kMaxFileBytes),
                          .line = from.scope().line()});
  heap->scope_bytes_at_peak.push_back(from.bytes_at_peak());
  if (heap->scopes.back().name.empty() != (place == 0)) {
    return absl::InvalidArgumentError(absl::StrCat("scopes: scope ", place, " has ", place == 0 ? "a" : "no", " name"));
  }
  if (DepthOf(heap->scopes, place) > ScopeTable::kMaxDepth) {
    return absl::InvalidArgumentError(absl::StrCat("scopes: more than ", ScopeTable::kMaxDepth, " within one another"));
  }
  return absl::OkStatus();
}

// Checks a table's bounds; the scope for overflow may come on top.
absl::Status CheckScopeText(const std::vector<Scope>& scopes) {
  size_t bytes = 0;
  for (const Scope& scope : scopes) bytes += scope.name.size() + scope.file.size();
  if (bytes <= ScopeTable::kMaxTextBytes + ScopeTable::kMaxNameBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("scopes: more than ", ScopeTable::kMaxTextBytes, " bytes of names"));
}

}  // namespace

v1::MemoryStats StatsToProto(const MemoryStats& stats) {
  v1::MemoryStats proto;
  Fill(stats.allocation, proto.mutable_allocation());
  Fill(stats.segment, proto.mutable_segment());
  Fill(stats.active, proto.mutable_active());
  Fill(stats.inactive_split, proto.mutable_inactive_split());
  Fill(stats.allocated_bytes, proto.mutable_allocated_bytes());
  Fill(stats.reserved_bytes, proto.mutable_reserved_bytes());
  Fill(stats.active_bytes, proto.mutable_active_bytes());
  Fill(stats.inactive_split_bytes, proto.mutable_inactive_split_bytes());
  Fill(stats.requested_bytes, proto.mutable_requested_bytes());
  Fill(stats.oversize_allocations, proto.mutable_oversize_allocations());
  Fill(stats.oversize_segments, proto.mutable_oversize_segments());
  proto.set_num_alloc_retries(stats.num_alloc_retries);
  proto.set_num_ooms(stats.num_ooms);
  proto.set_num_oom_rejections(stats.num_oom_rejections);
  proto.set_num_sync_all_streams(stats.num_sync_all_streams);
  proto.set_num_device_alloc(stats.num_device_alloc);
  proto.set_num_device_free(stats.num_device_free);
  proto.mutable_free_blocks()->Add(stats.free.blocks.begin(), stats.free.blocks.end());
  proto.mutable_free_block_bytes()->Add(stats.free.bytes.begin(), stats.free.bytes.end());
  proto.set_largest_free_block_bytes(stats.free.largest_bytes);
  if (stats.max_split_bytes != AllocatorOptions::kNoLimit) proto.set_max_split_bytes(stats.max_split_bytes);
  return proto;
}

MemoryStats StatsFromProto(const v1::MemoryStats& proto) {
  MemoryStats stats;
  stats.allocation = FromProto(proto.allocation());
  stats.segment = FromProto(proto.segment());
  stats.active = FromProto(proto.active());
  stats.inactive_split = FromProto(proto.inactive_split());
  stats.allocated_bytes = FromProto(proto.allocated_bytes());
  stats.reserved_bytes = FromProto(proto.reserved_bytes());
  stats.active_bytes = FromProto(proto.active_bytes());
  stats.inactive_split_bytes = FromProto(proto.inactive_split_bytes());
  stats.requested_bytes = FromProto(proto.requested_bytes());
  stats.oversize_allocations = FromProto(proto.oversize_allocations());
  stats.oversize_segments = FromProto(proto.oversize_segments());
  stats.num_alloc_retries = proto.num_alloc_retries();
  stats.num_ooms = proto.num_ooms();
  stats.num_oom_rejections = proto.num_oom_rejections();
  stats.num_sync_all_streams = proto.num_sync_all_streams();
  stats.num_device_alloc = proto.num_device_alloc();
  stats.num_device_free = proto.num_device_free();
  const auto copy = [](const google::protobuf::RepeatedField<uint64_t>& from, auto& to) {
    std::copy_n(from.begin(), std::min(static_cast<size_t>(from.size()), to.size()), to.begin());
  };
  copy(proto.free_blocks(), stats.free.blocks);
  copy(proto.free_block_bytes(), stats.free.bytes);
  stats.free.largest_bytes = proto.largest_free_block_bytes();
  if (proto.has_max_split_bytes()) stats.max_split_bytes = proto.max_split_bytes();
  return stats;
}

std::optional<Part> SnapshotParts::Next() {
  Part part;
  if (is_first_) {
    part.set_alloc_conf(FormatAllocConf(snapshot_.options));
    part.set_max_events(static_cast<uint32_t>(std::min(snapshot_.max_events, kMostEvents)));
  }
  int room = items_in_part_;
  room -= AddScopes(room, &part);
  while (room > 0 && scope_ == snapshot_.scopes.size() && segment_ < snapshot_.segments.size())
    room -= AddSegment(room, &part);
  while (room > 0 && segment_ == snapshot_.segments.size() && event_ < snapshot_.history.size()) {
    AddEvent(snapshot_.history[event_++], &part);
    --room;
  }
  if (room == items_in_part_ && !is_first_) return std::nullopt;
  is_first_ = false;
  return part;
}

int SnapshotParts::AddScopes(int room, Part* part) {
  int items = 0;
  for (; scope_ < snapshot_.scopes.size() && (items == 0 || items + kItemsInScope <= room); ++scope_) {
    const Scope& from = snapshot_.scopes[scope_];
    Part::Scope* to = part->add_scopes();
    to->set_parent(from.parent);
    to->mutable_scope()->set_name(from.name);
    to->mutable_scope()->set_file(from.file);
    to->mutable_scope()->set_line(from.line);
    if (scope_ < snapshot_.scope_bytes_at_peak.size()) to->set_bytes_at_peak(snapshot_.scope_bytes_at_peak[scope_]);
    items += kItemsInScope;
  }
  return items;
}

int SnapshotParts::AddSegment(int room, Part* part) {
  const SegmentSnapshot& from = snapshot_.segments[segment_];
  Part::Segment* to = part->add_segments();
  to->set_id(Raw(from.id));
  to->set_segment_bytes(from.bytes);
  to->set_small_pool(from.pool == PoolKind::kSmall);
  to->set_address(from.address);
  to->set_stream(from.stream);
  to->set_whole(from.whole);
  for (; block_ < from.blocks.size() && to->blocks_size() < room; ++block_) {
    Part::Block* block = to->add_blocks();
    block->set_offset_bytes(from.blocks[block_].offset);
    block->set_block_bytes(from.blocks[block_].bytes);
    block->set_requested_bytes(from.blocks[block_].requested_bytes);
    block->set_state(ToProto(from.blocks[block_].state));
    block->set_scope(from.blocks[block_].scope);
  }
  if (block_ == from.blocks.size()) {
    ++segment_;
    block_ = 0;
  }
  return to->blocks_size();
}

absl::Status AddSnapshotPart(const Part& part, HeapSnapshot* heap) {
  if (!part.alloc_conf().empty()) {
    absl::StatusOr<AllocConf> conf = ParseAllocConf(part.alloc_conf());
    if (!conf.ok()) return absl::InvalidArgumentError(absl::StrCat("alloc_conf: ", conf.status().message()));
    heap->options = conf->options;
  }
  for (const Part::Scope& from : part.scopes()) {
    if (absl::Status status = AddScope(from, heap); !status.ok()) return status;
  }
  if (!part.scopes().empty()) {
    if (absl::Status status = CheckScopeText(heap->scopes); !status.ok()) return status;
  }
  for (const Part::Segment& from : part.segments()) {
    const SegmentId id{from.id()};
    if (from.blocks().empty()) return absl::InvalidArgumentError(absl::StrCat("segment ", Raw(id), ": has no block"));
    if (heap->segments.empty() || heap->segments.back().id != id) {  // else the segment continues
      heap->segments.push_back({.id = id,
                                .address = from.address(),
                                .bytes = from.segment_bytes(),
                                .pool = from.small_pool() ? PoolKind::kSmall : PoolKind::kLarge,
                                .stream = from.stream(),
                                .whole = from.whole()});
    }
    for (const Part::Block& block : from.blocks()) {
      const absl::StatusOr<BlockState> state = FromProto(block.state());
      if (!state.ok()) return state.status();
      const absl::StatusOr<ScopeId> scope = CheckScope(block.scope(), *heap);
      if (!scope.ok()) return scope.status();
      heap->segments.back().blocks.push_back({.offset = block.offset_bytes(),
                                              .bytes = block.block_bytes(),
                                              .requested_bytes = block.requested_bytes(),
                                              .state = *state,
                                              .scope = *scope});
    }
  }
  for (const Part::Event& event : part.events()) {
    const absl::StatusOr<HistoryAction> action = FromProto(event.action());
    if (!action.ok()) return action.status();
    const absl::StatusOr<ScopeId> scope = CheckScope(event.scope(), *heap);
    if (!scope.ok()) return scope.status();
    heap->history.push_back({.action = *action,
                             .scope = *scope,
                             .address = event.address(),
                             .bytes = event.bytes(),
                             .stream = event.stream(),
                             .time_us = event.time_us()});
    heap->history.back().set_block_bytes(event.block_bytes());
  }
  if (part.max_events() > 0) heap->max_events = part.max_events();
  return absl::OkStatus();
}

v1::OutOfMemory::Holes HolesToProto(const Holes& holes) {
  v1::OutOfMemory::Holes proto;
  proto.set_hole_bytes(holes.bytes);
  proto.set_holes(holes.count);
  proto.set_segments(holes.segments);
  for (const PinnedSegment& pinned : holes.most_bytes) {
    v1::OutOfMemory::Holes::PinnedSegment* to = proto.add_most_bytes();
    to->set_address(pinned.address);
    to->set_segment_bytes(pinned.bytes);
    to->set_hole_bytes(pinned.hole_bytes);
    to->set_largest_hole_bytes(pinned.largest_hole_bytes);
    to->set_pinning_blocks(pinned.pinning_blocks);
    for (const PinningBlock& block : pinned.longest_held) {
      v1::OutOfMemory::Holes::PinningBlock* held = to->add_longest_held();
      held->set_address(block.address);
      held->set_block_bytes(block.bytes);
      held->set_held_seconds(block.held_seconds);
      held->set_scope(block.scope);
    }
  }
  return proto;
}

void ScopeUsesToProto(const std::vector<ScopeUse>& uses,
                      google::protobuf::RepeatedPtrField<v1::OutOfMemory::ScopeUse>* proto) {
  for (const ScopeUse& use : uses) {
    v1::OutOfMemory::ScopeUse* to = proto->Add();
    to->set_scope(use.scope);
    to->set_allocated_bytes(use.allocated_bytes);
    to->set_bytes_at_peak(use.bytes_at_peak);
    to->set_blocks(use.blocks);
    to->set_pinned_hole_bytes(use.pinned_hole_bytes);
  }
}

std::vector<ScopeUse> ScopeUsesFromProto(const google::protobuf::RepeatedPtrField<v1::OutOfMemory::ScopeUse>& proto) {
  std::vector<ScopeUse> uses;
  for (const v1::OutOfMemory::ScopeUse& use : proto) {
    if (uses.size() == ScopeUse::kMaxInReport) break;
    uses.push_back({.scope = CleanScopeText(use.scope(), kMaxReportedScopeBytes),
                    .allocated_bytes = use.allocated_bytes(),
                    .bytes_at_peak = use.bytes_at_peak(),
                    .blocks = use.blocks(),
                    .pinned_hole_bytes = use.pinned_hole_bytes()});
  }
  return uses;
}

absl::StatusOr<Holes> HolesFromProto(const v1::OutOfMemory::Holes& proto) {
  if (static_cast<size_t>(proto.most_bytes_size()) > Holes::kMaxSegments) {
    return absl::InvalidArgumentError(
        absl::StrCat("holes.most_bytes: ", proto.most_bytes_size(), " segments; at most ", Holes::kMaxSegments));
  }
  Holes holes{.bytes = proto.hole_bytes(), .count = proto.holes(), .segments = proto.segments()};
  for (const v1::OutOfMemory::Holes::PinnedSegment& from : proto.most_bytes()) {
    if (static_cast<size_t>(from.longest_held_size()) > Holes::kMaxBlocks) {
      return absl::InvalidArgumentError(absl::StrCat("holes.most_bytes.longest_held: ", from.longest_held_size(),
                                                     " blocks; at most ", Holes::kMaxBlocks));
    }
    PinnedSegment& to = holes.most_bytes.emplace_back(PinnedSegment{.address = from.address(),
                                                                    .bytes = from.segment_bytes(),
                                                                    .hole_bytes = from.hole_bytes(),
                                                                    .largest_hole_bytes = from.largest_hole_bytes(),
                                                                    .pinning_blocks = from.pinning_blocks()});
    for (const v1::OutOfMemory::Holes::PinningBlock& block : from.longest_held()) {
      to.longest_held.push_back({.address = block.address(),
                                 .bytes = block.block_bytes(),
                                 .held_seconds = block.held_seconds(),
                                 .scope = CleanScopeText(block.scope(), kMaxReportedScopeBytes)});
    }
  }
  return holes;
}

}  // namespace vrambroker
