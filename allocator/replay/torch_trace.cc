// SPDX-License-Identifier: Apache-2.0
#include "allocator/replay/torch_trace.h"

#include <bit>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "allocator/bytes.h"
#include "allocator/size_class.h"

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

enum class Action : uint8_t { kAllocate, kFreeRequested, kFreeCompleted, kOutOfMemory, kSegmentFree, kMap, kOther };

struct Entry {
  Action action = Action::kOther;
  uint64_t address = 0;
  uint64_t bytes = 0;
  Stream stream = 0;
};

// Converts one device's entries. See Convert() for how each becomes operations.
class TraceMaker {
 public:
  absl::Status ReadEntries(const PickleValue::Items& items, absl::string_view path);
  absl::Status Convert();
  // Counts what is in use at the end and was never allocated in the trace.
  absl::Status CountOldBlocks(const PickleValue::Items& segments, int device);
  Trace Finish();

 private:
  struct Live {
    uint32_t id = 0;
    bool pending = false;  // freed, and `stand_in` keeps it
    Stream stand_in = 0;
  };

  absl::StatusOr<Entry> ReadEntry(const PickleValue& item, absl::string_view path);
  void Emit(TraceOp::Kind kind, uint32_t id, uint64_t bytes, Stream stream) {
    trace_.ops.push_back({.kind = kind, .id = id, .bytes = bytes, .stream = stream});
  }
  absl::StatusOr<uint32_t> Allocate(uint64_t bytes, Stream stream);
  void FreePending(Live& block);
  void Complete(const Live& block);
  Stream TakeStandIn();
  void Note(uint64_t count, absl::string_view sentence) {
    if (count > 0) trace_.notes.push_back(absl::StrCat(count, " ", sentence));
  }

  Trace trace_;
  std::vector<Entry> entries_;
  absl::flat_hash_set<Stream> streams_;          // of the entries
  absl::flat_hash_map<uint64_t, Live> live_;     // by address
  absl::flat_hash_set<uint64_t> unknown_freed_;  // free requested, allocated before the first entry
  std::vector<Stream> spare_stand_ins_;
  Stream next_stand_in_ = std::numeric_limits<Stream>::max();

  uint64_t pending_frees_ = 0;
  uint64_t unknown_frees_ = 0;
  uint64_t failed_ = 0;
  uint64_t reused_ = 0;
  uint64_t repeated_frees_ = 0;
  uint64_t empty_ = 0;
  uint64_t segment_frees_ = 0;
  uint64_t maps_ = 0;
  uint64_t unknown_actions_ = 0;
  uint64_t old_blocks_ = 0;
  uint64_t old_bytes_ = 0;
};

absl::StatusOr<Entry> TraceMaker::ReadEntry(const PickleValue& item, absl::string_view path) {
  const absl::StatusOr<absl::string_view> name = TextField(item, path, "action");
  if (!name.ok()) return name.status();
  Entry entry;
  if (*name == "alloc") {
    entry.action = Action::kAllocate;
  } else if (*name == "free_requested") {
    entry.action = Action::kFreeRequested;
  } else if (*name == "free_completed") {
    entry.action = Action::kFreeCompleted;
  } else if (*name == "oom") {
    entry.action = Action::kOutOfMemory;
  } else if (*name == "segment_free") {
    entry.action = Action::kSegmentFree;
  } else if (*name == "segment_map" || *name == "segment_unmap") {
    entry.action = Action::kMap;
  } else if (*name != "segment_alloc" && *name != "snapshot" && *name != "annotate") {
    ++unknown_actions_;
  }
  const bool allocates = entry.action == Action::kAllocate || entry.action == Action::kOutOfMemory;
  const bool frees = entry.action == Action::kFreeRequested || entry.action == Action::kFreeCompleted;
  if (frees || entry.action == Action::kAllocate) {
    const absl::StatusOr<uint64_t> address = HandleField(item, path, "addr");
    if (!address.ok()) return address.status();
    entry.address = *address;
  }
  if (allocates) {
    const absl::StatusOr<uint64_t> bytes = SizeField(item, path, "size");
    if (!bytes.ok()) return bytes.status();
    const absl::StatusOr<uint64_t> stream = HandleField(item, path, "stream");
    if (!stream.ok()) return stream.status();
    entry.bytes = *bytes;
    entry.stream = *stream;
  }
  return entry;
}

absl::Status TraceMaker::ReadEntries(const PickleValue::Items& items, absl::string_view path) {
  entries_.reserve(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    const absl::StatusOr<Entry> entry = ReadEntry(items[i], absl::StrCat(path, "[", i, "]"));
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
// everything else   nothing: what is done with segments follows from the allocations.
absl::Status TraceMaker::Convert() {
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Entry& entry = entries_[i];
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
        Emit(TraceOp::Kind::kFree, *id, 0, 0);
        ++failed_;
        break;
      }
      case Action::kSegmentFree:
        ++segment_frees_;
        break;
      case Action::kMap:
        ++maps_;
        break;
      case Action::kOther:
        break;
    }
  }
  return absl::OkStatus();
}

absl::Status TraceMaker::CountOldBlocks(const PickleValue::Items& segments, int device) {
  // Lists of blocks that several segments share would make a small file take for ever; no real snapshot has them.
  absl::flat_hash_set<const PickleValue::Items*> seen;
  for (size_t i = 0; i < segments.size(); ++i) {
    const std::string path = absl::StrCat("segments[", i, "]");
    const absl::StatusOr<uint64_t> segment_device = HandleField(segments[i], path, "device");
    if (!segment_device.ok()) return segment_device.status();
    if (*segment_device != static_cast<uint64_t>(device)) continue;
    const absl::StatusOr<uint64_t> segment_address = HandleField(segments[i], path, "address");
    if (!segment_address.ok()) return segment_address.status();
    const absl::StatusOr<const PickleValue::Items*> blocks = ItemsField(segments[i], path, "blocks");
    if (!blocks.ok()) return blocks.status();
    if (!seen.insert(*blocks).second) {
      return absl::InvalidArgumentError(absl::StrCat(path, ".blocks: is the list of another segment too"));
    }
    // As PyTorch's viewer does: older snapshots have no addresses of blocks.
    uint64_t address = *segment_address;
    for (size_t j = 0; j < (*blocks)->size(); ++j) {
      const PickleValue& block = (**blocks)[j];
      const std::string block_path = absl::StrCat(path, ".blocks[", j, "]");
      const absl::StatusOr<absl::string_view> state = TextField(block, block_path, "state");
      if (!state.ok()) return state.status();
      const absl::StatusOr<uint64_t> bytes = SizeField(block, block_path, "size");
      if (!bytes.ok()) return bytes.status();
      if (*state == "active_allocated" && !live_.contains(address)) {
        ++old_blocks_;
        old_bytes_ += *bytes;
      }
      address += *bytes;
    }
  }
  return absl::OkStatus();
}

Trace TraceMaker::Finish() {
  if (unknown_frees_ > 0 || old_blocks_ > 0) {
    trace_.notes.emplace_back(
        "the recording began with blocks in use: when and in which order they were allocated is unknown, and the trace "
        "begins with an empty heap.");
  }
  Note(unknown_frees_, "frees of blocks allocated before the first entry were left out.");
  Note(old_blocks_,
       absl::StrCat("blocks (", FormatBytes(old_bytes_),
                    ") in use at the end were allocated before the first entry; they are not in the trace."));
  Note(pending_frees_,
       "frees had to wait for other streams, which are not recorded: stand-in streams, numbered from "
       "18446744073709551615 downwards, keep the blocks as long.");
  Note(failed_, "failed allocations (oom) are allocated and freed at once, with the size after rounding.");
  Note(reused_, "blocks were handed out again without a record of their free: they are freed just before that.");
  Note(repeated_frees_, "frees of blocks freed already were left out.");
  Note(empty_, "allocations of 0 bytes were left out.");
  Note(segment_frees_,
       "segments were given back: where that was not for want of memory but by empty_cache(), the trace does not "
       "repeat it.");
  Note(maps_, "entries are of expandable segments; the trace has only the allocations in them.");
  Note(unknown_actions_, "entries with an unknown action were left out.");
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
  if (absl::Status status = maker.ReadEntries(entries.AsItems(), path); !status.ok()) return status;
  if (absl::Status status = maker.Convert(); !status.ok()) return status;
  // Only for a note: the entries alone make a trace.
  if (const PickleValue* segments = snapshot.Find("segments"); segments != nullptr) {
    if (segments->kind() != Kind::kList && segments->kind() != Kind::kTuple) {
      return WrongType("segments", *segments, "a list");
    }
    if (absl::Status status = maker.CountOldBlocks(segments->AsItems(), device); !status.ok()) return status;
  }
  return maker.Finish();
}

}  // namespace vrambroker
