// SPDX-License-Identifier: Apache-2.0
#include "allocator/replay/torch_trace.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "allocator/base/bytes.h"
#include "allocator/heap/allocator_options.h"
#include "allocator/heap/heap_snapshot.h"
#include "allocator/heap/size_class.h"
#include "allocator/replay/replay.h"
#include "allocator/replay/rewind.h"

namespace vrambroker {
namespace {

using Kind = PickleValue::Kind;

// Finding a key takes as long as there are keys, and a few bytes of the pickle can refer to a dict once more. PyTorch
// writes about ten.
constexpr size_t kMaxKeys = 256;

absl::Status WrongType(absl::string_view path, const PickleValue& value, absl::string_view expected) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": is ", PickleKindName(value.kind()), ", not ", expected));
}

absl::StatusOr<const PickleValue*> Field(const PickleValue& dict, absl::string_view path, absl::string_view key) {
  if (dict.kind() != Kind::kDict) return WrongType(path, dict, "a dict");
  if (const size_t keys = dict.AsPairs().size(); keys > kMaxKeys) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": has ", keys, " keys, more than ", kMaxKeys));
  }
  const PickleValue* value = dict.Find(key);
  if (value == nullptr) return absl::InvalidArgumentError(absl::StrCat(path, ".", key, ": missing"));
  return value;
}

absl::StatusOr<absl::string_view> TextField(const PickleValue& dict, absl::string_view path, absl::string_view key) {
  const absl::StatusOr<const PickleValue*> value = Field(dict, path, key);
  if (!value.ok()) return value.status();
  if ((*value)->kind() != Kind::kString) return WrongType(absl::StrCat(path, ".", key), **value, "a string");
  return absl::string_view((*value)->AsString());
}

// Handles and addresses. PyTorch writes them as signed integers, so that those from 2^63 on are negative there.
absl::StatusOr<uint64_t> HandleField(const PickleValue& dict, absl::string_view path, absl::string_view key) {
  const absl::StatusOr<const PickleValue*> value = Field(dict, path, key);
  if (!value.ok()) return value.status();
  if ((*value)->kind() == Kind::kInt) return static_cast<uint64_t>((*value)->AsInt());
  if ((*value)->kind() == Kind::kUint) return (*value)->AsUint();
  return WrongType(absl::StrCat(path, ".", key), **value, "an integer");
}

absl::StatusOr<uint64_t> SizeField(const PickleValue& dict, absl::string_view path, absl::string_view key) {
  const absl::StatusOr<const PickleValue*> value = Field(dict, path, key);
  if (!value.ok()) return value.status();
  uint64_t size = 0;
  if ((*value)->kind() == Kind::kInt) {
    if ((*value)->AsInt() < 0) return absl::InvalidArgumentError(absl::StrCat(path, ".", key, ": is negative"));
    size = static_cast<uint64_t>((*value)->AsInt());
  } else if ((*value)->kind() == Kind::kUint) {
    size = (*value)->AsUint();
  } else {
    return WrongType(absl::StrCat(path, ".", key), **value, "an integer");
  }
  // The allocator REQUIRES it, and a sum of sizes does not overflow before there are many.
  if (size >= kMaxRequestBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ".", key, ": ", size, " is not below 2^", std::countr_zero(kMaxRequestBytes)));
  }
  return size;
}

absl::StatusOr<const PickleValue::Items*> ItemsField(const PickleValue& dict, absl::string_view path,
                                                     absl::string_view key) {
  const absl::StatusOr<const PickleValue*> value = Field(dict, path, key);
  if (!value.ok()) return value.status();
  if ((*value)->kind() != Kind::kList && (*value)->kind() != Kind::kTuple) {
    return WrongType(absl::StrCat(path, ".", key), **value, "a list");
  }
  return &(*value)->AsItems();
}

using Action = RecordedEvent::Action;

// Converts one device's entries. See Convert() for how each becomes operations.
class TraceMaker {
 public:
  absl::Status ReadEntries(const PickleValue::Items& items, absl::string_view path);
  absl::Status Convert();
  // The segments of `device` at the end.
  absl::Status ReadSegments(const PickleValue::Items& segments, int device);
  void ReadSettings(const PickleValue& snapshot);
  // The heap at the beginning becomes the start of the trace. REQUIRES: the entries, segments and settings were read.
  absl::Status Rewind(absl::string_view path);
  absl::StatusOr<Trace> Finish(absl::string_view path);

 private:
  struct Live {
    uint32_t id = 0;
    bool pending = false;  // freed, and `stand_in` keeps it
    Stream stand_in = 0;
  };

  absl::StatusOr<RecordedEvent> ReadEntry(const PickleValue& item, absl::string_view path);
  void Emit(TraceOp::Kind kind, uint32_t id, uint64_t bytes, Stream stream) {
    trace_.ops.push_back({.kind = kind, .id = id, .bytes = bytes, .stream = stream});
  }
  absl::StatusOr<uint32_t> Allocate(uint64_t bytes, Stream stream);
  void GiveBack(const RecordedEvent& entry);
  void FreePending(Live& block);
  void Complete(const Live& block);
  Stream TakeStandIn();
  bool KnowsSegments() const { return has_segments_ && !expandable_segments_ && maps_ == 0; }
  void CompareWithRecording();
  // `one` where the count is 1. Both go on after the number.
  void Note(uint64_t count, absl::string_view one, absl::string_view many) {
    if (count > 0) trace_.notes.push_back(absl::StrCat(count, " ", count == 1 ? one : many));
  }

  Trace trace_;
  std::vector<RecordedEvent> entries_;
  absl::flat_hash_set<Stream> streams_;          // of the entries
  absl::flat_hash_map<uint64_t, Live> live_;     // by address
  absl::flat_hash_set<uint64_t> unknown_freed_;  // free requested, allocated before the first entry
  bool has_segments_ = false;                    // the snapshot has
  std::vector<SegmentSnapshot> segments_;        // at the end, by address
  bool expandable_segments_ = false;
  AllocatorOptions options_;
  absl::flat_hash_map<uint64_t, uint32_t> numbers_;  // of segments, by address
  uint32_t next_number_ = 0;
  uint64_t recorded_peak_reserved_ = 0;
  std::vector<Stream> spare_stand_ins_;
  Stream next_stand_in_ = std::numeric_limits<Stream>::max();

  uint64_t pending_frees_ = 0;
  uint64_t unknown_frees_ = 0;
  absl::flat_hash_set<uint32_t> failed_;  // ids of what stands for failed allocations
  uint64_t reused_ = 0;
  uint64_t repeated_frees_ = 0;
  uint64_t empty_ = 0;
  uint64_t private_segments_ = 0;
  uint64_t maps_ = 0;
  uint64_t unknown_actions_ = 0;
  uint64_t guessed_blocks_ = 0;
  uint64_t start_blocks_ = 0;
  uint64_t start_bytes_ = 0;
};

absl::StatusOr<RecordedEvent> TraceMaker::ReadEntry(const PickleValue& item, absl::string_view path) {
  const absl::StatusOr<absl::string_view> name = TextField(item, path, "action");
  if (!name.ok()) return name.status();
  RecordedEvent entry;
  if (*name == "alloc") {
    entry.action = Action::kAllocate;
  } else if (*name == "free_requested") {
    entry.action = Action::kFreeRequested;
  } else if (*name == "free_completed") {
    entry.action = Action::kFreeCompleted;
  } else if (*name == "oom") {
    entry.action = Action::kOutOfMemory;
  } else if (*name == "segment_alloc") {
    entry.action = Action::kSegmentAllocate;
  } else if (*name == "segment_free") {
    entry.action = Action::kSegmentFree;
  } else if (*name == "segment_map" || *name == "segment_unmap") {
    entry.action = Action::kMap;
    ++maps_;
  } else if (*name != "snapshot" && *name != "annotate") {
    ++unknown_actions_;
  }
  const bool is_of_segment = entry.action == Action::kSegmentAllocate || entry.action == Action::kSegmentFree;
  const bool frees = entry.action == Action::kFreeRequested || entry.action == Action::kFreeCompleted;
  const bool is_of_block = frees || entry.action == Action::kAllocate;
  if (is_of_block || is_of_segment) {
    const absl::StatusOr<uint64_t> address = HandleField(item, path, "addr");
    if (!address.ok()) return address.status();
    entry.address = *address;
  }
  if (is_of_block || is_of_segment || entry.action == Action::kOutOfMemory) {
    const absl::StatusOr<uint64_t> bytes = SizeField(item, path, "size");
    if (!bytes.ok()) return bytes.status();
    const absl::StatusOr<uint64_t> stream = HandleField(item, path, "stream");
    if (!stream.ok()) return stream.status();
    entry.bytes = *bytes;
    entry.stream = *stream;
  }
  if (is_of_block && item.Find("block_size") != nullptr) {
    const absl::StatusOr<uint64_t> bytes = SizeField(item, path, "block_size");
    if (!bytes.ok()) return bytes.status();
    entry.block_bytes = *bytes;
  }
  return entry;
}

absl::Status TraceMaker::ReadEntries(const PickleValue::Items& items, absl::string_view path) {
  entries_.reserve(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    const absl::StatusOr<RecordedEvent> entry = ReadEntry(items[i], absl::StrCat(path, "[", i, "]"));
    if (!entry.ok()) return entry.status();
    entries_.push_back(*entry);
    streams_.insert(entry->stream);
  }
  return absl::OkStatus();
}

absl::StatusOr<uint32_t> TraceMaker::Allocate(uint64_t bytes, Stream stream) {
  if (trace_.ids == std::numeric_limits<uint32_t>::max()) {
    return absl::InvalidArgumentError("the trace has more than 4294967294 allocations");
  }
  const uint32_t id = trace_.ids++;
  Emit(TraceOp::Kind::kAllocate, id, bytes, stream);
  return id;
}

// Stand-ins are counted down from 2^64-1, past every number that the entries use. Each keeps one block only, so the
// blocks become free in whatever order they did; when its block is free, it may keep the next one.
Stream TraceMaker::TakeStandIn() {
  if (!spare_stand_ins_.empty()) {
    const Stream stream = spare_stand_ins_.back();
    spare_stand_ins_.pop_back();
    return stream;
  }
  while (streams_.contains(next_stand_in_)) --next_stand_in_;
  return next_stand_in_--;
}

void TraceMaker::GiveBack(const RecordedEvent& entry) {
  // Without segments in the snapshot there is nothing to number them by.
  const auto number = numbers_.find(entry.address);
  if (number == numbers_.end()) return;
  Emit(TraceOp::Kind::kGiveBack, number->second, entry.bytes, 0);
  numbers_.erase(number);
  if (!entry.leaves_none_free) return;
  while (!trace_.ops.empty() && trace_.ops.back().kind == TraceOp::Kind::kGiveBack) trace_.ops.pop_back();
  Emit(TraceOp::Kind::kTrim, 0, 0, 0);
}

void TraceMaker::FreePending(Live& block) {
  block.pending = true;
  block.stand_in = TakeStandIn();
  Emit(TraceOp::Kind::kRecordStream, block.id, 0, block.stand_in);
  Emit(TraceOp::Kind::kFree, block.id, 0, 0);
}

void TraceMaker::Complete(const Live& block) {
  Emit(TraceOp::Kind::kSyncStream, 0, 0, block.stand_in);
  spare_stand_ins_.push_back(block.stand_in);
}

// alloc             an allocation.
// free_requested    followed at once by its free_completed: a free. Otherwise another stream used the block: which, and
//                   when, is not recorded, so a stand-in stream uses it just before the free, and is done where the
//                   block became free. PyTorch notices that at the start of an allocation, and so does a replay.
// oom               an allocation that is freed at once: where it fails again it leaves what it left then (an emptied
//                   cache); where the replay has more room, no block stays that nobody would ever free.
// segment_free      gives that segment back; after a run that left no wholly free segment: gives all back. Where the
//                   allocation that follows would have done so by itself, it finds that done.
// everything else   nothing: which segments are obtained follows from the allocations.
absl::Status TraceMaker::Convert() {
  // Each entry makes at most two operations.
  trace_.ops.reserve(entries_.size());
  for (size_t i = 0; i < entries_.size(); ++i) {
    const RecordedEvent& entry = entries_[i];
    switch (entry.action) {
      case Action::kAllocate: {
        unknown_freed_.erase(entry.address);
        if (const auto old = live_.find(entry.address); old != live_.end()) {
          // Its free is missing. It must have happened before this.
          ++reused_;
          if (old->second.pending) {
            Complete(old->second);
          } else {
            Emit(TraceOp::Kind::kFree, old->second.id, 0, 0);
          }
          live_.erase(old);
        }
        if (entry.bytes == 0) {
          ++empty_;
          break;
        }
        const absl::StatusOr<uint32_t> id = Allocate(entry.bytes, entry.stream);
        if (!id.ok()) return id.status();
        live_[entry.address] = {.id = *id};
        break;
      }
      case Action::kFreeRequested: {
        const auto block = live_.find(entry.address);
        if (block == live_.end()) {
          if (unknown_freed_.insert(entry.address).second) ++unknown_frees_;
          break;
        }
        if (block->second.pending) {
          ++repeated_frees_;
          break;
        }
        const bool at_once = i + 1 < entries_.size() && entries_[i + 1].action == Action::kFreeCompleted &&
                             entries_[i + 1].address == entry.address;
        // At once: the next entry does it.
        if (!at_once) {
          FreePending(block->second);
          ++pending_frees_;
        }
        break;
      }
      case Action::kFreeCompleted: {
        const auto block = live_.find(entry.address);
        if (block == live_.end()) {
          if (unknown_freed_.erase(entry.address) == 0) ++unknown_frees_;
          break;
        }
        if (block->second.pending) {
          Complete(block->second);
        } else {
          Emit(TraceOp::Kind::kFree, block->second.id, 0, 0);
        }
        live_.erase(block);
        break;
      }
      case Action::kOutOfMemory: {
        if (entry.bytes == 0) {
          ++empty_;
          break;
        }
        const absl::StatusOr<uint32_t> id = Allocate(entry.bytes, entry.stream);
        if (!id.ok()) return id.status();
        trace_.recorded_refusals.push_back(trace_.ops.size() - 1);
        Emit(TraceOp::Kind::kFree, *id, 0, 0);
        failed_.insert(*id);
        break;
      }
      case Action::kSegmentAllocate:
        numbers_[entry.address] = next_number_++;
        break;
      case Action::kSegmentFree:
        GiveBack(entry);
        break;
      case Action::kMap:
      case Action::kOther:
        break;
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<BlockState> StateField(const PickleValue& block, absl::string_view path) {
  const absl::StatusOr<absl::string_view> state = TextField(block, path, "state");
  if (!state.ok()) return state.status();
  if (*state == "active_allocated") return BlockState::kAllocated;
  // The second is what PyTorch wrote before 2.0.
  if (*state == "active_pending_free" || *state == "active_awaiting_free") return BlockState::kPendingFree;
  if (*state == "inactive") return BlockState::kFree;
  return absl::InvalidArgumentError(absl::StrCat(path, ".state: \"", absl::Utf8SafeCHexEscape(state->substr(0, 40)),
                                                 "\"; known: active_allocated, active_pending_free, inactive"));
}

absl::Status TraceMaker::ReadSegments(const PickleValue::Items& segments, int device) {
  // Lists of blocks that several segments share would make a small file take for ever; no real snapshot has them.
  absl::flat_hash_set<const PickleValue::Items*> seen;
  has_segments_ = true;
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
      expandable_segments_ = true;
    }
    if (const PickleValue* owner = from.Find("segment_pool_id");
        owner != nullptr && !(*owner == PickleValue::Tuple({PickleValue::Int(0), PickleValue::Int(0)}))) {
      ++private_segments_;
    }
    streams_.insert(*stream);
    SegmentSnapshot segment = {.address = *address, .bytes = *bytes, .pool = pool, .stream = *stream};
    // As PyTorch's viewer does: older snapshots have no addresses of blocks.
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
        segment.blocks.push_back({.offset = offset, .bytes = *size, .requested_bytes = requested, .state = *state});
      }
      offset += *size;
    }
    if (offset != segment.bytes) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ".blocks: end at ", offset, " of ", segment.bytes, " bytes"));
    }
    segments_.push_back(std::move(segment));
  }
  std::sort(segments_.begin(), segments_.end(),
            [](const SegmentSnapshot& a, const SegmentSnapshot& b) { return a.address < b.address; });
  return absl::OkStatus();
}

// Best effort: only sizes that were not recorded depend on them, and PyTorch has settings that are not known here.
void TraceMaker::ReadSettings(const PickleValue& snapshot) {
  const PickleValue* settings = snapshot.Find("allocator_settings");
  const PickleValue* text = settings == nullptr ? nullptr : settings->Find("PYTORCH_CUDA_ALLOC_CONF");
  if (text == nullptr || text->kind() != Kind::kString) return;
  const absl::StatusOr<AllocConf> conf = ParseAllocConf(text->AsString());
  if (!conf.ok()) {
    trace_.notes.push_back(
        absl::StrCat("the settings of the recording were not understood: ", conf.status().message()));
    return;
  }
  options_ = conf->options;
  // The fraction is of a device whose size is not known. What the limit did is in the events.
  options_.per_process_memory_fraction = 1.0;
  trace_.recorded_options = options_;
}

absl::Status TraceMaker::Rewind(absl::string_view path) {
  if (!KnowsSegments()) return absl::OkStatus();  // see Finish()
  size_t failed = 0;
  absl::StatusOr<RewoundHeap> heap = RewindHeap(segments_, absl::MakeSpan(entries_), options_, &failed);
  if (!heap.ok() && failed == entries_.size()) {
    return absl::InvalidArgumentError(absl::StrCat("segments: ", heap.status().message()));
  }
  if (!heap.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(
        path, "[", failed, "]: ", heap.status().message(),
        ": the entries are not of one recording without a gap, so the heap that it began with cannot be known"));
  }
  recorded_peak_reserved_ = heap->peak_reserved_bytes;
  guessed_blocks_ = heap->guessed_blocks;
  if (heap->in_use.size() >= std::numeric_limits<uint32_t>::max()) {
    return absl::InvalidArgumentError("segments: more than 4294967294 blocks");
  }
  for (const RewoundHeap::Block& block : heap->in_use) {
    Live live = {.id = trace_.ids++, .pending = block.pending};
    if (block.pending) {
      live.stand_in = TakeStandIn();
      trace_.start.waits[live.id] = live.stand_in;
      ++pending_frees_;
    }
    live_[block.address] = live;
  }
  for (const SegmentSnapshot& segment : heap->segments) {
    numbers_[segment.address] = next_number_++;
    for (const BlockSnapshot& block : segment.blocks) {
      if (block.state == BlockState::kFree) continue;
      ++start_blocks_;
      start_bytes_ += block.bytes;
    }
  }
  if (heap->obtains_segment_of_first) {
    const auto first = std::find_if(entries_.begin(), entries_.end(),
                                    [](const RecordedEvent& entry) { return entry.action == Action::kAllocate; });
    numbers_[first->address] = next_number_++;
  }
  trace_.start.segments = std::move(heap->segments);
  return absl::OkStatus();
}

// What a replay with the recorded settings makes of it, against what was recorded: never a wrong figure silently.
void TraceMaker::CompareWithRecording() {
  if (!KnowsSegments()) return;
  uint64_t reserved = 0;
  uint64_t active = 0;
  for (const SegmentSnapshot& segment : segments_) {
    reserved += segment.bytes;
    for (const BlockSnapshot& block : segment.blocks) active += block.state == BlockState::kFree ? 0 : block.bytes;
  }
  // An allocation asks each stand-in whether it is done.
  constexpr uint64_t kMostQuestions = 20'000'000;
  const uint64_t stand_ins = std::numeric_limits<Stream>::max() - next_stand_in_;
  if (stand_ins > kMostQuestions / std::max<uint64_t>(trace_.ops.size(), 1)) {
    trace_.notes.emplace_back("too many frees wait for streams to compare a replay with what was recorded.");
    return;
  }
  Replay replay({.options = options_}, trace_);
  for (const TraceOp& op : trace_.ops) {
    if ((op.kind == TraceOp::Kind::kAllocate || op.kind == TraceOp::Kind::kFree) && failed_.contains(op.id)) continue;
    if (replay.Do(op) != Replay::Result::kOutOfMemory) continue;
    trace_.notes.emplace_back("a replay needs more memory than any device has.");
    return;
  }
  replay.allocator().PollEvents();
  const MemoryStats stats = replay.allocator().GetMemoryStats();
  const auto compare = [&](absl::string_view what, uint64_t replayed, uint64_t recorded) {
    if (replayed == recorded) return;
    trace_.notes.push_back(absl::StrCat("a replay with the settings of the recording differs from it: ", what, " is ",
                                        FormatBytesExactly(replayed), ", and was ", FormatBytesExactly(recorded), "."));
  };
  compare("the peak of reserved memory", stats.reserved_bytes.all.peak, recorded_peak_reserved_);
  compare("the reserved memory at the end", stats.reserved_bytes.all.current, reserved);
  compare("the memory in use at the end", stats.active_bytes.all.current, active);
}

absl::StatusOr<Trace> TraceMaker::Finish(absl::string_view path) {
  uint64_t never_allocated = 0;  // in use at the end
  for (const SegmentSnapshot& segment : segments_) {
    if (KnowsSegments()) break;
    for (const BlockSnapshot& block : segment.blocks) {
      if (block.state != BlockState::kFree && !live_.contains(segment.address + block.offset)) ++never_allocated;
    }
  }
  if (!KnowsSegments() && unknown_frees_ + never_allocated > 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": began with blocks in use (", unknown_frees_, " frees are of such, and ", never_allocated,
                     " of them are in use at the end), and the heap of that moment cannot be known: ",
                     has_segments_ ? "its segments are expandable" : "the snapshot has no segments"));
  }
  if (trace_.ops.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        path,
        ": records no events to replay; run `vramctl record SESSION 100000` before the part that matters, then "
        "take the snapshot. Where a program cuts whole segments itself, as PyTorch does, only it can record: "
        "torch.cuda.memory._record_memory_history()"));
  }
  if (!has_segments_) {
    trace_.notes.emplace_back(
        "the snapshot has no segments: the trace begins with an empty heap, as if nothing had been in use.");
  }
  CompareWithRecording();
  if (!trace_.start.segments.empty()) {
    trace_.notes.push_back(
        absl::StrCat("the recording began with ", FormatBytes(start_bytes_), " in use (", start_blocks_, " blocks) of ",
                     FormatBytes(trace_.start.ReservedBytes()),
                     " reserved: a replay begins with them at their places, whatever the settings."));
  }
  Note(guessed_blocks_,
       "block that was in use at the beginning and freed later has the size that was requested, rounded: it may have "
       "had "
       "up to 1 MiB more.",
       "blocks that were in use at the beginning and freed later have the size that was requested, rounded: they may "
       "have had up to 1 MiB more.");
  Note(pending_frees_,
       "free had to wait for other streams, which are not recorded: a stand-in stream, number 18446744073709551615, "
       "keeps the block as long.",
       "frees had to wait for other streams, which are not recorded: stand-in streams, numbered from "
       "18446744073709551615 downwards, keep the blocks as long.");
  Note(
      failed_.size(),
      "failed allocation (oom) is allocated and freed at once, with the size after rounding: on a device that has room "
      "for it, the peaks are higher than those recorded.",
      "failed allocations (oom) are allocated and freed at once, with the size after rounding: on a device that has "
      "room for them, the peaks are higher than those recorded.");
  Note(reused_, "block was handed out again without a record of its free: it is freed just before that.",
       "blocks were handed out again without a record of their free: they are freed just before that.");
  Note(repeated_frees_, "free of a block freed already was left out.", "frees of blocks freed already were left out.");
  Note(empty_, "allocation of 0 bytes was left out.", "allocations of 0 bytes were left out.");
  Note(private_segments_, "segment is of a private pool (CUDA graphs): a replay lets all requests use it.",
       "segments are of private pools (CUDA graphs): a replay lets all requests use them.");
  Note(maps_, "entry is of an expandable segment; the trace has only the allocations in it.",
       "entries are of expandable segments; the trace has only the allocations in them.");
  Note(unknown_actions_, "entry with an unknown action was left out.", "entries with an unknown action were left out.");
  return std::move(trace_);
}

}  // namespace

absl::StatusOr<Trace> TraceFromTorchSnapshot(const PickleValue& snapshot, int device) {
  if (snapshot.kind() != Kind::kDict) return WrongType("snapshot", snapshot, "a dict");
  const PickleValue* traces = snapshot.Find("device_traces");
  if (traces == nullptr) return absl::InvalidArgumentError("device_traces: missing");
  if (traces->kind() != Kind::kList && traces->kind() != Kind::kTuple) {
    return WrongType("device_traces", *traces, "a list");
  }
  const std::string path = absl::StrCat("device_traces[", device, "]");
  if (device < 0 || static_cast<size_t>(device) >= traces->AsItems().size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": missing, the snapshot has ", traces->AsItems().size(), " devices"));
  }
  const PickleValue& entries = traces->AsItems()[static_cast<size_t>(device)];
  if (entries.kind() != Kind::kList && entries.kind() != Kind::kTuple) return WrongType(path, entries, "a list");

  TraceMaker maker;
  maker.ReadSettings(snapshot);
  if (absl::Status status = maker.ReadEntries(entries.AsItems(), path); !status.ok()) return status;
  if (const PickleValue* segments = snapshot.Find("segments"); segments != nullptr) {
    if (segments->kind() != Kind::kList && segments->kind() != Kind::kTuple) {
      return WrongType("segments", *segments, "a list");
    }
    if (absl::Status status = maker.ReadSegments(segments->AsItems(), device); !status.ok()) return status;
  }
  if (absl::Status status = maker.Rewind(path); !status.ok()) return status;
  if (absl::Status status = maker.Convert(); !status.ok()) return status;
  return maker.Finish(path);
}

}  // namespace vrambroker
