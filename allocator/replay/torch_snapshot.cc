// SPDX-License-Identifier: Apache-2.0
#include "allocator/replay/torch_snapshot.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "allocator/heap/allocator_options.h"

namespace vrambroker {
namespace {

using Kind = PickleValue::Kind;

// Texts: a shared copy of each text, so that a million entries do not hold "action" a million times.
class Texts {
 public:
  // REQUIRES: `text` is a literal, or outlives the Texts.
  PickleValue operator()(absl::string_view text) {
    PickleValue& value = values_[text];
    if (value.kind() == Kind::kNone) value = PickleValue::String(text);
    return value;
  }

 private:
  absl::flat_hash_map<absl::string_view, PickleValue> values_;
};

// Sizes and addresses: PyTorch's viewer cannot calculate with integers of more than 63 bits.
PickleValue Size(uint64_t bytes) {
  return PickleValue::Int(
      static_cast<int64_t>(std::min(bytes, static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))));
}

// PyTorch writes a stream's handle as a signed integer.
PickleValue StreamNumber(Stream stream) {
  return PickleValue::Int(static_cast<int64_t>(stream));
}

absl::string_view StateName(BlockState state) {
  switch (state) {
    case BlockState::kFree:
      return "inactive";
    case BlockState::kAllocated:
      return "active_allocated";
    case BlockState::kPendingFree:
      return "active_pending_free";
  }
  return "inactive";
}

absl::string_view ActionName(HistoryAction action) {
  switch (action) {
    case HistoryAction::kAllocate:
      return "alloc";
    case HistoryAction::kFreeRequested:
      return "free_requested";
    case HistoryAction::kFreeCompleted:
      return "free_completed";
    case HistoryAction::kSegmentAllocate:
      return "segment_alloc";
    case HistoryAction::kSegmentFree:
      return "segment_free";
    case HistoryAction::kSnapshot:
      return "snapshot";
    case HistoryAction::kOutOfMemory:
      return "oom";
  }
  return "snapshot";
}

// Undoes a heap's history from its end, as PyTorch's viewer does.
class Rewind {
 public:
  explicit Rewind(const HeapSnapshot& heap) {
    for (const SegmentSnapshot& segment : heap.segments) {
      segments_[segment.address] = segment.bytes;
      for (const BlockSnapshot& block : segment.blocks) {
        if (block.state == BlockState::kFree) continue;
        blocks_[segment.address + block.offset] = block.state == BlockState::kPendingFree;
      }
    }
  }

  // Returns false when `event` cannot have led to the present state in a way tolerated by the viewer. The viewer
  // tolerates an allocation whose block is missing.
  bool Undo(const HistoryEvent& event) {
    switch (event.action) {
      case HistoryAction::kAllocate:
        blocks_.erase(event.address);
        return true;
      case HistoryAction::kFreeRequested: {
        const auto block = blocks_.find(event.address);
        if (block == blocks_.end() || !block->second) return false;
        block->second = false;
        return true;
      }
      case HistoryAction::kFreeCompleted:
        return InSegment(event.address) && blocks_.emplace(event.address, true).second;
      case HistoryAction::kSegmentAllocate: {
        const auto segment = segments_.find(event.address);
        if (segment == segments_.end() || segment->second != event.bytes) return false;
        const auto block = blocks_.lower_bound(event.address);
        if (block != blocks_.end() && block->first - event.address < event.bytes) return false;
        segments_.erase(segment);
        return true;
      }
      case HistoryAction::kSegmentFree: {
        const auto next = segments_.lower_bound(event.address);
        if (InSegment(event.address) || (next != segments_.end() && next->first - event.address < event.bytes)) {
          return false;
        }
        segments_[event.address] = event.bytes;
        return true;
      }
      case HistoryAction::kSnapshot:
      case HistoryAction::kOutOfMemory:
        return true;
    }
    return true;
  }

 private:
  bool InSegment(uint64_t address) const {
    auto segment = segments_.upper_bound(address);
    if (segment == segments_.begin()) return false;
    --segment;
    return address - segment->first < segment->second;
  }

  std::map<uint64_t, uint64_t> segments_;  // address to size
  std::map<uint64_t, bool> blocks_;        // in use: address to whether a free is pending
};

// The "frames" of each scope, made once: a list of thousands of blocks has few scopes.
class Frames {
 public:
  Frames(absl::Span<const Scope> scopes, Texts& text)
      : scopes_(scopes), text_(text), lists_(scopes.size()), frames_(scopes.size()) {}

  // Innermost first, as PyTorch writes a stack. A named scope is a frame without a file.
  PickleValue operator()(ScopeId scope) {
    if (scope == 0 || scope >= scopes_.size()) return PickleValue::List({});
    PickleValue& list = lists_[scope];
    if (list.kind() == Kind::kNone) list = Make(scope);
    return list;
  }

 private:
  PickleValue Make(ScopeId scope) {
    PickleValue::Items frames;
    for (ScopeId at = scope; at != 0; at = scopes_[at].parent) {
      PickleValue& frame = frames_[at];
      if (frame.kind() == Kind::kNone) {
        frame = PickleValue::Dict({{text_("filename"), PickleValue::String(scopes_[at].file)},
                                   {text_("line"), PickleValue::Int(scopes_[at].line)},
                                   {text_("name"), PickleValue::String(scopes_[at].name)}});
      }
      frames.push_back(frame);
    }
    return PickleValue::List(std::move(frames));
  }

  const absl::Span<const Scope> scopes_;
  Texts& text_;
  std::vector<PickleValue> lists_;   // by scope
  std::vector<PickleValue> frames_;  // by scope: innermost frame
};

PickleValue TorchSegment(const SegmentSnapshot& segment, int64_t device, Texts& text, Frames& frames) {
  uint64_t allocated = 0;
  uint64_t active = 0;
  uint64_t requested = 0;
  PickleValue::Items blocks;
  blocks.reserve(segment.blocks.size());
  for (const BlockSnapshot& block : segment.blocks) {
    if (block.state == BlockState::kAllocated) allocated += block.bytes;
    if (block.state != BlockState::kFree) {
      active += block.bytes;
      requested += block.requested_bytes;
    }
    blocks.push_back(PickleValue::Dict({
        {text("address"), Size(segment.address + block.offset)},
        {text("size"), Size(block.bytes)},
        {text("requested_size"), Size(block.requested_bytes)},
        {text("state"), text(StateName(block.state))},
        {text("frames"), block.state == BlockState::kFree ? PickleValue::List({}) : frames(block.scope)},
    }));
  }
  return PickleValue::Dict({
      {text("device"), PickleValue::Int(device)},
      {text("address"), Size(segment.address)},
      {text("total_size"), Size(segment.bytes)},
      {text("allocated_size"), Size(allocated)},
      {text("active_size"), Size(active)},
      {text("requested_size"), Size(requested)},
      {text("stream"), StreamNumber(segment.stream)},
      {text("segment_type"), text(segment.pool == PoolKind::kSmall ? "small" : "large")},
      {text("segment_pool_id"), PickleValue::Tuple({PickleValue::Int(0), PickleValue::Int(0)})},
      {text("is_expandable"), PickleValue::Bool(false)},
      {text("frames"), PickleValue::List({})},
      {text("blocks"), PickleValue::List(std::move(blocks))},
  });
}

// Leaves "frames" out without a scope, as PyTorch does when recording no stacks. "block_size" is ours: for readers
// starting in the middle (RewindHeap()), and ignored by the rest.
PickleValue TorchEntry(const HistoryEvent& event, Texts& text, Frames& frames) {
  PickleValue::Pairs pairs = {
      {text("action"), text(ActionName(event.action))},
      {text(event.action == HistoryAction::kOutOfMemory ? "device_free" : "addr"), Size(event.address)},
      {text("size"), Size(event.bytes)},
      {text("stream"), StreamNumber(event.stream)},
      {text("time_us"), PickleValue::Int(event.time_us)},
      {text("compile_context"), text("N/A")},
      {text("user_metadata"), text("")},
  };
  if (event.scope != 0) pairs.emplace_back(text("frames"), frames(event.scope));
  if (event.block_units != 0) pairs.emplace_back(text("block_size"), Size(event.block_bytes()));
  return PickleValue::Dict(std::move(pairs));
}

PickleValue TorchHistory(const HeapSnapshot& heap, Texts& text, Frames& frames) {
  Rewind rewind(heap);
  size_t begin = heap.history.size();
  while (begin > 0 && rewind.Undo(heap.history[begin - 1])) --begin;
  PickleValue::Items entries;
  entries.reserve(heap.history.size() - begin);
  for (size_t i = begin; i < heap.history.size(); ++i) entries.push_back(TorchEntry(heap.history[i], text, frames));
  return PickleValue::List(std::move(entries));
}

PickleValue TorchSettings(const AllocatorOptions& options, Texts& text) {
  PickleValue::Pairs divisions;
  for (size_t i = 0; i < options.roundup_power2_divisions.size(); ++i) {
    divisions.emplace_back(PickleValue::String(absl::StrCat(uint64_t{1} << i)),
                           PickleValue::Int(options.roundup_power2_divisions[i]));
  }
  return PickleValue::Dict({
      {text("PYTORCH_CUDA_ALLOC_CONF"), PickleValue::String(FormatAllocConf(options))},
      {text("max_split_size"),
       options.max_split_bytes == AllocatorOptions::kNoLimit ? PickleValue::Int(-1) : Size(options.max_split_bytes)},
      {text("garbage_collection_threshold"), PickleValue::Double(options.garbage_collection_threshold)},
      {text("expandable_segments"), PickleValue::Bool(false)},
      {text("pinned_num_register_threads"), PickleValue::Int(1)},
      {text("release_lock_on_cudamalloc"), PickleValue::Bool(false)},
      {text("pinned_use_cuda_host_register"), PickleValue::Bool(false)},
      {text("graph_capture_record_stream_reuse"), PickleValue::Bool(false)},
      {text("roundup_power2_divisions"), PickleValue::Dict(std::move(divisions))},
  });
}

}  // namespace

PickleValue TorchSnapshot(absl::Span<const HeapSnapshot> devices) {
  Texts text;
  PickleValue::Items segments;
  PickleValue::Items histories;
  for (size_t device = 0; device < devices.size(); ++device) {
    Frames frames(devices[device].scopes, text);
    for (const SegmentSnapshot& segment : devices[device].segments) {
      segments.push_back(TorchSegment(segment, static_cast<int64_t>(device), text, frames));
    }
    histories.push_back(TorchHistory(devices[device], text, frames));
  }
  const AllocatorOptions options = devices.empty() ? AllocatorOptions() : devices.front().options;
  return PickleValue::Dict({
      {text("segments"), PickleValue::List(std::move(segments))},
      {text("device_traces"), PickleValue::List(std::move(histories))},
      {text("allocator_settings"), TorchSettings(options, text)},
      {text("external_annotations"), PickleValue::List({})},
  });
}

}  // namespace vrambroker
