// SPDX-License-Identifier: Apache-2.0
#include "allocator/replay/torch_segments.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "allocator/heap/size_class.h"
#include "allocator/replay/torch_fields.h"

namespace vrambroker {
namespace {

using Kind = PickleValue::Kind;

constexpr size_t kMaxDevices = 128;

// Finds the scope of a block by its "frames", innermost first. A frame without a file is a scope named by the program,
// and always counts. From the stack only kPlaces frames count: the innermost in Python files, more telling than frames
// of the allocator and of PyTorch's C++ code, or else the innermost.
class BlockScopes {
 public:
  explicit BlockScopes(ScopeTable* scopes) : scopes_(scopes) {}

  ScopeId operator()(const PickleValue& block) {
    const PickleValue* const frames = scopes_ == nullptr ? nullptr : block.Find("frames");
    if (frames == nullptr || frames->kind() != Kind::kList || frames->AsItems().empty()) return 0;
    // Blocks of a stack share the list.
    const auto [known, is_new] = known_.try_emplace(&frames->AsItems(), ScopeId{0});
    if (is_new) known->second = Find(frames->AsItems());
    return known->second;
  }

 private:
  static constexpr size_t kPlaces = 3;
  static constexpr size_t kMaxFrames = 1024;
  static constexpr size_t kMaxKeys = 16;  // PyTorch writes three

  struct Frame {
    absl::string_view name;
    absl::string_view file;
    uint32_t line = 0;
  };

  static absl::string_view Text(const PickleValue& frame, absl::string_view key) {
    const PickleValue* const value = frame.Find(key);
    return value != nullptr && value->kind() == Kind::kString ? absl::string_view(value->AsString()) : "";
  }

  ScopeId Find(const PickleValue::Items& items) {
    std::vector<Frame> frames;
    for (const PickleValue& item : items) {
      if (frames.size() == kMaxFrames) break;
      if (item.kind() != Kind::kDict || item.AsPairs().size() > kMaxKeys) continue;
      const PickleValue* const line = item.Find("line");
      const bool has_line = line != nullptr && line->kind() == Kind::kInt && line->AsInt() > 0;
      frames.push_back({.name = Text(item, "name"),
                        .file = Text(item, "filename"),
                        .line = has_line ? static_cast<uint32_t>(line->AsInt()) : 0});
    }
    const auto is_python = [](const Frame& frame) { return absl::EndsWith(frame.file, ".py"); };
    const bool has_python = std::any_of(frames.begin(), frames.end(), is_python);
    size_t places = 0;
    const auto is_left_out = [&](const Frame& frame) {
      return !frame.file.empty() && ((has_python && !is_python(frame)) || ++places > kPlaces);
    };
    frames.erase(std::remove_if(frames.begin(), frames.end(), is_left_out), frames.end());
    ScopeId scope = 0;
    for (auto frame = frames.rbegin(); frame != frames.rend(); ++frame) {
      scope = scopes_->Find(scope, frame->name, frame->file, frame->line);
    }
    return scope;
  }

  ScopeTable* const scopes_;
  absl::flat_hash_map<const PickleValue::Items*, ScopeId> known_;
};

absl::StatusOr<BlockState> StateField(const PickleValue& block, absl::string_view path) {
  const absl::StatusOr<absl::string_view> state = TextField(block, path, "state");
  if (!state.ok()) return state.status();
  if (*state == "active_allocated") return BlockState::kAllocated;
  // active_awaiting_free is from PyTorch before 2.0.
  if (*state == "active_pending_free" || *state == "active_awaiting_free") return BlockState::kPendingFree;
  if (*state == "inactive") return BlockState::kFree;
  return absl::InvalidArgumentError(absl::StrCat(path, ".state: \"", absl::Utf8SafeCHexEscape(state->substr(0, 40)),
                                                 "\"; known: active_allocated, active_pending_free, inactive"));
}

}  // namespace

absl::StatusOr<TorchSegments> ReadTorchSegments(const PickleValue::Items& segments, int device, ScopeTable* scopes) {
  TorchSegments result;
  BlockScopes scope_of(scopes);
  // Lists of blocks shared by several segments would make a small file take for ever; no real snapshot has any.
  absl::flat_hash_set<const PickleValue::Items*> seen;
  for (size_t i = 0; i < segments.size(); ++i) {
    const PickleValue& from = segments[i];
    const std::string path = absl::StrCat("segments[", i, "]");
    const absl::StatusOr<uint64_t> segment_device = HandleField(from, path, "device");
    if (!segment_device.ok()) return segment_device.status();
    if (*segment_device != static_cast<uint64_t>(device)) continue;
    const absl::StatusOr<uint64_t> address = HandleField(from, path, "address");
    if (!address.ok()) return address.status();
    const absl::StatusOr<uint64_t> bytes = SizeField(from, path, "total_size");
    if (!bytes.ok()) return bytes.status();
    const absl::StatusOr<uint64_t> stream = HandleField(from, path, "stream");
    if (!stream.ok()) return stream.status();
    PoolKind pool = *bytes == kSmallSegmentBytes ? PoolKind::kSmall : PoolKind::kLarge;
    if (from.Find("segment_type") != nullptr) {
      const absl::StatusOr<absl::string_view> type = TextField(from, path, "segment_type");
      if (!type.ok()) return type.status();
      if (*type != "small" && *type != "large") {
        return absl::InvalidArgumentError(absl::StrCat(
            path, ".segment_type: \"", absl::Utf8SafeCHexEscape(type->substr(0, 40)), "\"; known: small, large"));
      }
      pool = *type == "small" ? PoolKind::kSmall : PoolKind::kLarge;
    }
    const absl::StatusOr<const PickleValue::Items*> blocks = ItemsField(from, path, "blocks");
    if (!blocks.ok()) return blocks.status();
    if (!seen.insert(*blocks).second) {
      return absl::InvalidArgumentError(absl::StrCat(path, ".blocks: is the list of another segment too"));
    }
    if (const PickleValue* expandable = from.Find("is_expandable");
        expandable != nullptr && expandable->kind() == Kind::kBool && expandable->AsBool()) {
      result.are_expandable = true;
    }
    if (const PickleValue* owner = from.Find("segment_pool_id");
        owner != nullptr && !(*owner == PickleValue::Tuple({PickleValue::Int(0), PickleValue::Int(0)}))) {
      ++result.in_private_pools;
    }
    SegmentSnapshot segment = {.address = *address, .bytes = *bytes, .pool = pool, .stream = *stream};
    // Adds up sizes, as PyTorch's viewer does: older snapshots have no addresses of blocks.
    uint64_t offset = 0;
    for (size_t j = 0; j < (*blocks)->size(); ++j) {
      const PickleValue& block = (**blocks)[j];
      const std::string block_path = absl::StrCat(path, ".blocks[", j, "]");
      const absl::StatusOr<BlockState> state = StateField(block, block_path);
      if (!state.ok()) return state.status();
      const absl::StatusOr<uint64_t> size = SizeField(block, block_path, "size");
      if (!size.ok()) return size.status();
      uint64_t requested = 0;  // not in older snapshots
      if (block.Find("requested_size") != nullptr && *state != BlockState::kFree) {
        const absl::StatusOr<uint64_t> field = SizeField(block, block_path, "requested_size");
        if (!field.ok()) return field.status();
        requested = *field;
      }
      if (*size > segment.bytes - offset) {
        return absl::InvalidArgumentError(
            absl::StrCat(block_path, ": ends past the segment's ", segment.bytes, " bytes"));
      }
      if (*state == BlockState::kFree && !segment.blocks.empty() && segment.blocks.back().state == BlockState::kFree) {
        segment.blocks.back().bytes += *size;
      } else {
        segment.blocks.push_back({.offset = offset,
                                  .bytes = *size,
                                  .requested_bytes = requested,
                                  .state = *state,
                                  .scope = *state == BlockState::kFree ? ScopeId{0} : scope_of(block)});
      }
      offset += *size;
    }
    if (offset != segment.bytes) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ".blocks: end at ", offset, " of ", segment.bytes, " bytes"));
    }
    result.segments.push_back(std::move(segment));
  }
  std::sort(result.segments.begin(), result.segments.end(),
            [](const SegmentSnapshot& a, const SegmentSnapshot& b) { return a.address < b.address; });
  return result;
}

absl::StatusOr<std::vector<HeapSnapshot>> HeapsOfTorchSnapshot(const PickleValue& snapshot) {
  if (snapshot.kind() != Kind::kDict) return WrongType("snapshot", snapshot, "a dict");
  const absl::StatusOr<const PickleValue::Items*> segments = ItemsField(snapshot, "snapshot", "segments");
  if (!segments.ok()) return segments.status();
  size_t devices = 0;
  if (const PickleValue* traces = snapshot.Find("device_traces");
      traces != nullptr && (traces->kind() == Kind::kList || traces->kind() == Kind::kTuple)) {
    devices = traces->AsItems().size();
  }
  // Refuses lists shared across devices, too: see above.
  absl::flat_hash_set<const PickleValue::Items*> seen;
  for (size_t i = 0; i < (*segments)->size(); ++i) {
    const std::string path = absl::StrCat("segments[", i, "]");
    const absl::StatusOr<uint64_t> device = HandleField((**segments)[i], path, "device");
    if (!device.ok()) return device.status();
    const absl::StatusOr<const PickleValue::Items*> blocks = ItemsField((**segments)[i], path, "blocks");
    if (!blocks.ok()) return blocks.status();
    if (!seen.insert(*blocks).second) {
      return absl::InvalidArgumentError(absl::StrCat(path, ".blocks: is the list of another segment too"));
    }
    devices = std::max(devices, static_cast<size_t>(std::min<uint64_t>(*device, kMaxDevices)) + 1);
  }
  if (devices > kMaxDevices) {
    return absl::InvalidArgumentError(absl::StrCat("snapshot: has more than ", kMaxDevices, " devices"));
  }
  std::vector<HeapSnapshot> heaps(devices);
  for (size_t device = 0; device < devices; ++device) {
    ScopeTable scopes;
    absl::StatusOr<TorchSegments> read = ReadTorchSegments(**segments, static_cast<int>(device), &scopes);
    if (!read.ok()) return read.status();
    heaps[device].segments = std::move(read->segments);
    heaps[device].scopes = scopes.scopes();
  }
  return heaps;
}

}  // namespace vrambroker
