// SPDX-License-Identifier: Apache-2.0
#include "allocator/replay/torch_trace.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "allocator/base/bytes.h"
#include "allocator/heap/allocator_options.h"
#include "allocator/heap/heap_snapshot.h"
#include "allocator/heap/size_class.h"
#include "allocator/replay/replay.h"
#include "allocator/replay/rewind.h"
#include "allocator/replay/skipped_frees.h"
#include "allocator/replay/torch_fields.h"
#include "allocator/replay/torch_segments.h"

namespace vrambroker {
namespace {

using Kind = PickleValue::Kind;

using Action = RecordedEvent::Action;

// Converts the entries of a device. See Convert() for the operations made from an entry.
class TraceMaker {
 public:
  absl::Status ReadEntries(const PickleValue::Items& items, absl::string_view path);
  absl::Status Convert();
  // Takes over the segments at the end.
  void TakeSegments(TorchSegments segments);
  void ReadSettings(const PickleValue& snapshot);
  // Finds the release of PyTorch that wrote the snapshot. REQUIRES: the entries and settings were read.
  void FindWriter(const PickleValue& snapshot);
  // Adds skipped events of frees. REQUIRES: the entries and segments were read.
  void AddSkipped();
  // Makes the heap at the beginning the trace's start. REQUIRES: the entries, segments and settings were read.
  absl::Status Rewind(absl::string_view path);
  // `traces`: of all devices.
  absl::StatusOr<Trace> Finish(absl::string_view path, int device, const PickleValue::Items& traces);

 private:
  struct Live {
    uint32_t id = 0;
    bool pending = false;  // freed, and kept by `stand_in`
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
  // Adds a note, worded by `one` for a count of 1. Both texts go on after the number.
  void Note(uint64_t count, absl::string_view one, absl::string_view many) {
    if (count > 0) trace_.notes.push_back(absl::StrCat(count, " ", count == 1 ? one : many));
  }

  Trace trace_;
  std::vector<RecordedEvent> entries_;
  absl::flat_hash_set<Stream> streams_;          // of the entries
  absl::flat_hash_map<uint64_t, Live> live_;     // by address
  absl::flat_hash_set<uint64_t> unknown_freed_;  // free requested, allocated before the first entry
  bool has_segments_ = false;                    // the snapshot has segments
  std::vector<SegmentSnapshot> segments_;        // at the end, by address
  bool expandable_segments_ = false;
  AllocatorOptions settings_;                        // of the recording, as far as understood
  AllocatorOptions options_;                         // `settings_` without the memory fraction
  absl::flat_hash_map<uint64_t, uint32_t> numbers_;  // of segments, by address
  uint32_t next_number_ = 0;
  uint64_t recorded_peak_reserved_ = 0;
  std::vector<Stream> spare_stand_ins_;
  Stream next_stand_in_ = std::numeric_limits<Stream>::max();

  uint64_t pending_frees_ = 0;
  uint64_t unknown_frees_ = 0;
  absl::flat_hash_set<uint32_t> failed_;  // ids of failed allocations
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

// Stand-ins count down from 2^64-1, past every number used by the entries. A stand-in keeps one block at a time, so
// blocks become free in any order; afterwards the stand-in may keep another block.
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
  // Without segments in the snapshot there are no numbers.
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
// free_requested    followed at once by free_completed: a free. Otherwise another stream used the block. Stream and
//                   time are not recorded, so a stand-in stream uses the block just before the free, and is done where
//                   the block became free. PyTorch notices finished streams at the start of an allocation, and so does
//                   a replay.
// oom               an allocation freed at once. A failure leaves the heap as in the recording (an emptied cache). With
//                   more room in the replay, no block stays without anyone to free it.
// segment_free      gives the segment back; after a run that left no wholly free segment: gives all back. An allocation
//                   that would have done so by itself finds that done.
// everything else   nothing: the allocations determine the segments obtained.
absl::Status TraceMaker::Convert() {
  // Each entry makes at most two operations.
  trace_.ops.reserve(entries_.size());
  for (size_t i = 0; i < entries_.size(); ++i) {
    const RecordedEvent& entry = entries_[i];
    switch (entry.action) {
      case Action::kAllocate: {
        unknown_freed_.erase(entry.address);
        if (const auto old = live_.find(entry.address); old != live_.end()) {
          // The old block's free is missing, and must have happened before.
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
        // At once: the next entry frees the block.
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

void TraceMaker::TakeSegments(TorchSegments segments) {
  has_segments_ = true;
  expandable_segments_ = segments.are_expandable;
  private_segments_ = segments.in_private_pools;
  segments_ = std::move(segments.segments);
  for (const SegmentSnapshot& segment : segments_) streams_.insert(segment.stream);
}

// Best effort: only unrecorded sizes depend on the settings, and PyTorch has settings unknown here.
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
  settings_ = conf->options;
  options_ = conf->options;
  // The fraction is of a device of unknown size. Effects of the limit are in the events.
  options_.per_process_memory_fraction = 1.0;
  trace_.recorded_options = options_;
  trace_.left_out = {.per_process_memory_fraction = settings_.per_process_memory_fraction, .ignored = conf->ignored};
}

void TraceMaker::FindWriter(const PickleValue& snapshot) {
  const auto has_size = [](const RecordedEvent& entry) { return entry.block_bytes != 0; };
  if (std::any_of(entries_.begin(), entries_.end(), has_size)) return;  // vrambroker's: PyTorch writes no block sizes
  const PickleValue* const settings = snapshot.Find("allocator_settings");
  TraceWriter writer;
  if (settings == nullptr) {
    writer = {SettingsTarget::Torch(2, 0), "PyTorch 2.2 or older wrote it (there are no allocator_settings)"};
  } else if (settings->Find("graph_capture_record_stream_reuse") != nullptr) {
    writer = {SettingsTarget::Torch(2, 7), "PyTorch newer than 2.6 wrote it"};
  } else {
    writer = {SettingsTarget::Torch(2, 3), "PyTorch 2.3 or newer wrote it"};
  }
  if (!writer.oldest.Has(settings_)) {
    writer.oldest = SettingsTarget::OldestTorchWith(settings_);
    writer.words = absl::StrCat("PyTorch ", writer.oldest.release(), " or newer wrote it, by the settings that it had");
  }
  trace_.writer = writer;
}

void TraceMaker::AddSkipped() {
  std::string note = AddSkippedFrees(entries_, segments_, has_segments_);
  if (!note.empty()) trace_.notes.push_back(std::move(note));
}

absl::Status TraceMaker::Rewind(absl::string_view path) {
  if (!KnowsSegments()) return absl::OkStatus();  // see Finish()
  size_t failed = 0;
  absl::StatusOr<RewoundHeap> heap = RewindHeap(segments_, absl::MakeSpan(entries_), options_, &failed);
  if (!heap.ok() && failed == entries_.size()) {
    return absl::InvalidArgumentError(absl::StrCat("segments: ", heap.status().message()));
  }
  if (!heap.ok()) {
    const auto end = entries_.begin() + static_cast<std::ptrdiff_t>(failed);
    auto recorded = std::count_if(entries_.begin(), end, [](const RecordedEvent& e) { return !e.is_derived; });
    // A derived event follows its recorded event.
    if (end->is_derived && end->action == Action::kFreeCompleted) --recorded;
    return absl::InvalidArgumentError(absl::StrCat(
        path, "[", recorded, "]: ", heap.status().message(),
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

// Compares a replay with the recorded settings to the recording: never a wrong figure silently.
void TraceMaker::CompareWithRecording() {
  if (!KnowsSegments()) return;
  uint64_t reserved = 0;
  uint64_t active = 0;
  for (const SegmentSnapshot& segment : segments_) {
    reserved += segment.bytes;
    for (const BlockSnapshot& block : segment.blocks) active += block.state == BlockState::kFree ? 0 : block.bytes;
  }
  // An allocation polls each stand-in.
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

// Returns "device 1 has 60 events: give --device 1" for devices other than `but`; empty when none has any. A snapshot
// is an event of each device.
std::string OthersWithEvents(const PickleValue::Items& traces, int but) {
  std::vector<std::string> devices;
  size_t first = 0;
  for (size_t device = 0; device < traces.size(); ++device) {
    const PickleValue& entries = traces[device];
    if (but >= 0 && device == static_cast<size_t>(but)) continue;
    if (entries.kind() != Kind::kList && entries.kind() != Kind::kTuple) continue;
    const auto events = std::count_if(entries.AsItems().begin(), entries.AsItems().end(), [](const PickleValue& entry) {
      const absl::StatusOr<absl::string_view> action = TextField(entry, "", "action");
      return action.ok() && *action != "snapshot";
    });
    if (events == 0) continue;
    if (devices.empty()) first = device;
    devices.push_back(absl::StrCat("device ", device, " has ", events, events == 1 ? " event" : " events"));
  }
  return devices.empty() ? "" : absl::StrCat(absl::StrJoin(devices, ", "), ": give --device ", first);
}

absl::StatusOr<Trace> TraceMaker::Finish(absl::string_view path, int device, const PickleValue::Items& traces) {
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
    if (const std::string devices = OthersWithEvents(traces, device); !devices.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": records no events to replay; ", devices));
    }
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
    const std::string with_events = OthersWithEvents(traces->AsItems(), device);
    return absl::InvalidArgumentError(absl::StrCat(path, ": missing, the snapshot has ", traces->AsItems().size(),
                                                   " devices", with_events.empty() ? "" : "; ", with_events));
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
    absl::StatusOr<TorchSegments> read = ReadTorchSegments(segments->AsItems(), device);
    if (!read.ok()) return read.status();
    maker.TakeSegments(*std::move(read));
  }
  maker.FindWriter(snapshot);
  maker.AddSkipped();
  if (absl::Status status = maker.Rewind(path); !status.ok()) return status;
  if (absl::Status status = maker.Convert(); !status.ok()) return status;
  return maker.Finish(path, device, traces->AsItems());
}

}  // namespace vrambroker
