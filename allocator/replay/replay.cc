// SPDX-License-Identifier: Apache-2.0
#include "allocator/replay/replay.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "allocator/base/amounts.h"
#include "allocator/base/bytes.h"

namespace vrambroker {
namespace {

char Letter(TraceOp::Kind kind) {
  switch (kind) {
    case TraceOp::Kind::kAllocate:
      return 'a';
    case TraceOp::Kind::kFree:
      return 'f';
    case TraceOp::Kind::kRecordStream:
      return 'r';
    case TraceOp::Kind::kSyncAll:
    case TraceOp::Kind::kSyncStream:
      return 's';
    case TraceOp::Kind::kEmptyCache:
      return 'e';
    case TraceOp::Kind::kSetFraction:
      return 'F';
    case TraceOp::Kind::kResetPeaks:
      return 'p';
    case TraceOp::Kind::kTrim:
      return 't';
    case TraceOp::Kind::kGiveBack:
      return 'g';
  }
  return '?';
}

const char* Name(Replay::Result result) {
  switch (result) {
    case Replay::Result::kOk:
      return "ok";
    case Replay::Result::kOutOfMemory:
      return "oom";
    case Replay::Result::kNothing:
      return "nop";
  }
  return "?";
}

}  // namespace

absl::StatusOr<ReplayConfig> ParseReplayConf(absl::string_view text, std::vector<std::string>* warnings) {
  ReplayConfig config;
  int number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    line = absl::StripSuffix(line, "\r");
    if (line.empty() || line[0] == '#') continue;
    const auto bad = [&](absl::string_view what) {
      return absl::InvalidArgumentError(absl::StrCat("line ", number, ": ", what));
    };
    const std::pair<absl::string_view, absl::string_view> item = absl::StrSplit(line, absl::MaxSplits('=', 1));
    const auto& [key, value] = item;
    if (key.size() == line.size())
      return bad(absl::StrCat("\"", absl::Utf8SafeCHexEscape(line.substr(0, 40)), "\" is not KEY=VALUE"));
    if (key == "alloc_conf") {
      absl::StatusOr<AllocConf> conf = ParseAllocConf(value);
      if (!conf.ok()) return bad(conf.status().message());
      config.options = conf->options;
      config.left_out.ignored = conf->ignored;
      if (warnings != nullptr) warnings->insert(warnings->end(), conf->warnings.begin(), conf->warnings.end());
    } else if (key == "device_bytes") {
      const absl::StatusOr<uint64_t> bytes = ParseBytes(value);
      if (!bytes.ok()) return bad(absl::StrCat("device_bytes: ", bytes.status().message()));
      if (*bytes > ReplayConfig::kUnlimitedBytes) return bad("device_bytes: above 4 EiB");
      config.device_bytes = *bytes;
    } else if (key == "fraction") {
      config.fraction.reset();
      if (value == "-1") continue;
      const absl::StatusOr<double> share = ParseShare(value);
      if (!share.ok()) return bad(absl::StrCat("fraction: ", share.status().message(), ", or -1 for none"));
      config.fraction = *share;
    } else if (key != "trace") {
      return bad(absl::StrCat("unknown key \"", absl::Utf8SafeCHexEscape(key.substr(0, 40)),
                              "\"; known: alloc_conf, device_bytes, fraction, trace"));
    }
  }
  return config;
}

Replay::Replay(const ReplayConfig& config, const Trace& trace)
    : device_(config.device_bytes),
      allocator_(&device_, &device_, config.options, config.device_bytes),
      blocks_(trace.ids, nullptr) {
  if (config.fraction.has_value()) allocator_.SetMemoryFraction(*config.fraction);
  if (!trace.start.segments.empty()) start_status_ = Start(trace.start);
}

absl::Status Replay::Start(const TraceStart& start) {
  const uint64_t bytes = start.ReservedBytes();
  if (const uint64_t device = device_.AvailableBytes(); bytes > device) {
    return absl::ResourceExhaustedError(absl::StrCat(
        FormatBytesExactly(bytes), " was held when the recording began; the device has ", FormatBytesExactly(device)));
  }
  std::vector<SegmentSnapshot> segments = start.segments;
  for (SegmentSnapshot& segment : segments) {
    const absl::StatusOr<AcquiredSegment> acquired = device_.AcquireSegment(segment.bytes);
    if (!acquired.ok()) return acquired.status();
    segment.id = acquired->id;
  }
  absl::StatusOr<std::vector<Segment*>> held = allocator_.StartWith(segments);
  if (!held.ok()) return held.status();
  segments_ = *std::move(held);
  size_t id = 0;
  for (const Segment* segment : segments_) {
    for (Block* block = segment->first; block != nullptr; block = block->next) {
      if (block->state == BlockState::kFree) continue;
      if (id == blocks_.size()) return absl::InternalError("the start has more blocks in use than the trace has ids");
      blocks_[id++] = block;
    }
  }
  for (const auto& [pending, stream] : start.waits) {
    Block* const block = pending < blocks_.size() ? std::exchange(blocks_[pending], nullptr) : nullptr;
    if (block == nullptr) continue;
    allocator_.RecordStream(block, stream);
    allocator_.Free(block);
  }
  // Blocks pending at the start were never allocated: peaks begin after their free.
  allocator_.ResetPeakStats();
  return absl::OkStatus();
}

// With the recorded settings, gives back the recorded segment. With other settings, gives back as many bytes; any
// excess counts for the next operation of the run.
void Replay::GiveBack(uint32_t number, uint64_t bytes) {
  // Ids of the device count like the heap's segments, from 1.
  if (number < segments_.size() && device_.Holds(SegmentId{uint64_t{number} + 1}) &&
      segments_[number]->bytes == bytes && allocator_.GiveBack(segments_[number]) > 0) {
    return;
  }
  const uint64_t ahead = std::min(given_back_ahead_, bytes);
  given_back_ahead_ -= ahead;
  if (ahead == bytes) return;
  const uint64_t given = allocator_.Trim({.wanted_bytes = bytes - ahead});
  given_back_ahead_ += given - std::min(given, bytes - ahead);
}

Replay::Result Replay::Do(const TraceOp& op) {
  if (op.kind != TraceOp::Kind::kGiveBack) given_back_ahead_ = 0;
  switch (op.kind) {
    case TraceOp::Kind::kAllocate: {
      const absl::StatusOr<Block*> block = allocator_.Allocate(op.bytes, op.stream);
      blocks_[op.id] = block.value_or(nullptr);
      // A new segment is the last.
      if (block.ok() && (*block)->segment->order >= segments_.size()) {
        segments_.resize((*block)->segment->order + 1);
        segments_.back() = (*block)->segment;
      }
      return block.ok() ? Result::kOk : Result::kOutOfMemory;
    }
    case TraceOp::Kind::kFree: {
      Block* block = std::exchange(blocks_[op.id], nullptr);
      if (block == nullptr) return Result::kNothing;
      allocator_.Free(block);
      return Result::kOk;
    }
    case TraceOp::Kind::kRecordStream:
      if (blocks_[op.id] == nullptr) return Result::kNothing;
      allocator_.RecordStream(blocks_[op.id], op.stream);
      return Result::kOk;
    case TraceOp::Kind::kSyncAll:
      device_.FinishAll();
      return Result::kOk;
    case TraceOp::Kind::kSyncStream:
      device_.FinishStream(op.stream);
      return Result::kOk;
    case TraceOp::Kind::kEmptyCache:
      allocator_.EmptyCache();
      return Result::kOk;
    case TraceOp::Kind::kSetFraction:
      allocator_.SetMemoryFraction(op.fraction);
      return Result::kOk;
    case TraceOp::Kind::kResetPeaks:
      allocator_.ResetPeakStats();
      return Result::kOk;
    case TraceOp::Kind::kTrim:
      allocator_.Trim();
      return Result::kOk;
    case TraceOp::Kind::kGiveBack:
      GiveBack(op.id, op.bytes);
      return Result::kOk;
  }
  return Result::kNothing;
}

absl::string_view PerOpHeading() {
  return "i,op,res,seg,off,segsize,bsize,alloc_b,alloc_n,active_b,active_n,resv_b,nseg,insplit_b,insplit_n,req_b,"
         "retries,ooms";
}

std::string PerOpRow(size_t i, const TraceOp& op, Replay::Result result, Replay& replay) {
  std::optional<PlacedBlock> placed;
  if (op.kind == TraceOp::Kind::kAllocate && result == Replay::Result::kOk) {
    const Block& block = *replay.block(op.id);
    placed = PlacedBlock{.segment = block.segment->order,
                         .offset = block.offset(),
                         .segment_bytes = block.segment_bytes(),
                         .block_bytes = block.bytes};
  }
  return PerOpRow(i, op, result, placed, replay.allocator().GetMemoryStats());
}

std::string PerOpRow(size_t i, const TraceOp& op, Replay::Result result, const std::optional<PlacedBlock>& placed,
                     const MemoryStats& stats) {
  std::string row = absl::StrCat(i, ",", std::string(1, Letter(op.kind)), ",", Name(result), ",");
  if (placed.has_value()) {
    absl::StrAppend(&row, placed->segment, ",", placed->offset, ",", placed->segment_bytes, ",", placed->block_bytes);
  } else {
    row += ",,,";
  }
  for (const PoolStat* stat :
       {&stats.allocated_bytes, &stats.allocation, &stats.active_bytes, &stats.active, &stats.reserved_bytes,
        &stats.segment, &stats.inactive_split_bytes, &stats.inactive_split, &stats.requested_bytes}) {
    absl::StrAppend(&row, ",", stat->all.current);
  }
  absl::StrAppend(&row, ",", stats.num_alloc_retries, ",", stats.num_ooms);
  return row;
}

std::string FinalLine(Replay& replay) {
  return FinalLine(replay.allocator().GetMemoryStats(), replay.device().used_bytes());
}

std::string FinalLine(const MemoryStats& stats, uint64_t device_used_bytes) {
  std::string line = "#final {";
  const auto add = [&](absl::string_view name, const Stat& stat) {
    absl::StrAppend(&line, "\"", name, "\":[", stat.current, ",", stat.peak, ",");
    absl::StrAppend(&line, stat.allocated, ",", stat.freed, "],");
  };
  stats.ForEach([&](const char* name, const PoolStat& stat) {
    add(absl::StrCat(name, ".all"), stat.all);
    add(absl::StrCat(name, ".small_pool"), stat.pool[static_cast<int>(PoolKind::kSmall)]);
    add(absl::StrCat(name, ".large_pool"), stat.pool[static_cast<int>(PoolKind::kLarge)]);
  });
  add("oversize_allocations", stats.oversize_allocations);
  add("oversize_segments", stats.oversize_segments);
  absl::StrAppend(&line, "\"num_alloc_retries\":", stats.num_alloc_retries, ",\"num_ooms\":", stats.num_ooms,
                  ",\"num_sync_all_streams\":", stats.num_sync_all_streams);
  absl::StrAppend(&line, ",\"num_device_alloc\":", stats.num_device_alloc,
                  ",\"num_device_free\":", stats.num_device_free, ",\"num_oom_rejections\":", stats.num_oom_rejections);
  absl::StrAppend(&line, ",\"dev_used\":", device_used_bytes, "}");
  return line;
}

ReplaySummary SummarizeReplay(const Trace& trace, const ReplayConfig& config) {
  Replay replay(config, trace);
  ReplaySummary summary{.ops = trace.ops.size(), .start_fits = replay.start_status().ok()};
  const auto note_peaks = [&] {
    summary.stats = replay.allocator().GetMemoryStats();
    const auto keep_highest = [](uint64_t& highest, uint64_t peak) { highest = std::max(highest, peak); };
    keep_highest(summary.peak_allocated_bytes, summary.stats.allocated_bytes.all.peak);
    keep_highest(summary.peak_reserved_bytes, summary.stats.reserved_bytes.all.peak);
  };
  for (const TraceOp& op : trace.ops) {
    if (op.kind == TraceOp::Kind::kAllocate) ++summary.allocations;
    if (!summary.start_fits) continue;
    if (op.kind == TraceOp::Kind::kResetPeaks) note_peaks();
    replay.Do(op);
  }
  note_peaks();
  summary.fragmentation_at_peak = FragmentationRatio(summary.peak_allocated_bytes, summary.peak_reserved_bytes);
  summary.ooms = summary.stats.num_ooms + summary.stats.num_oom_rejections;
  if (!summary.start_fits) summary.ooms = std::max<uint64_t>(1, summary.allocations);
  summary.device_calls = summary.stats.num_device_alloc + summary.stats.num_device_free;
  return summary;
}

double MeasureReplay(const Trace& trace, const ReplayConfig& config) {
  using Clock = std::chrono::steady_clock;
  if (trace.ops.empty()) return 0;
  double best = std::numeric_limits<double>::infinity();
  const Clock::time_point deadline = Clock::now() + std::chrono::milliseconds(500);
  for (int run = 0; run < 3 || (run < 11 && Clock::now() < deadline); ++run) {
    Replay replay(config, trace);
    const Clock::time_point start = Clock::now();
    for (const TraceOp& op : trace.ops) replay.Do(op);
    best = std::min(best, std::chrono::duration<double, std::nano>(Clock::now() - start).count());
  }
  return best / static_cast<double>(trace.ops.size());
}

}  // namespace vrambroker
