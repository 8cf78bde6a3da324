// SPDX-License-Identifier: Apache-2.0
//
// Replay: a trace through the allocator, with a simulated device behind it.
#ifndef VRAMBROKER_ALLOCATOR_REPLAY_REPLAY_H_
#define VRAMBROKER_ALLOCATOR_REPLAY_REPLAY_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "allocator/heap/allocator_options.h"
#include "allocator/replay/direct_heap.h"
#include "allocator/replay/simulated_device.h"
#include "allocator/replay/trace.h"

namespace vrambroker {

struct ReplayConfig {
  // The default: more than any device, four times the largest request.
  static constexpr uint64_t kUnlimitedBytes = uint64_t{1} << 62;

  AllocatorOptions options;
  uint64_t device_bytes = kUnlimitedBytes;
  std::optional<double> fraction;  // the memory fraction, set before the first operation
  LeftOutSettings left_out;        // of who made the options: a replay has no use for it

  bool operator==(const ReplayConfig&) const = default;
};

// Reads the lines alloc_conf=, device_bytes= and fraction= (-1: not set) of a file such as tests/golden/*.conf; trace=
// is left to others. InvalidArgument names the line. Adds what ParseAllocConf() warns of to `warnings`, if given.
absl::StatusOr<ReplayConfig> ParseReplayConf(absl::string_view text, std::vector<std::string>* warnings = nullptr);

// One heap that performs the operations of a trace. Not thread-safe.
class Replay {
 public:
  enum class Result { kOk, kOutOfMemory, kNothing };  // kNothing: the allocation had failed, or was freed before

  // The heap is as `trace` starts. Of the trace, only that and the number of ids are used.
  Replay(const ReplayConfig& config, const Trace& trace);

  // ResourceExhausted: the device is too small for what the trace starts with, and the heap is empty; operations on
  // what was there do nothing.
  const absl::Status& start_status() const { return start_status_; }

  Result Do(const TraceOp& op);
  // The block that an id names now, or nullptr.
  const Block* block(uint32_t id) const { return blocks_[id]; }
  DirectHeap& allocator() { return allocator_; }
  const SimulatedDevice& device() const { return device_; }

 private:
  absl::Status Start(const TraceStart& start);
  void GiveBack(uint32_t number, uint64_t bytes);

  SimulatedDevice device_;
  DirectHeap allocator_;
  std::vector<Block*> blocks_;      // by id
  std::vector<Segment*> segments_;  // by number; not valid for those that the device does not hold any more
  uint64_t given_back_ahead_ = 0;   // bytes, more than the trace's run of kGiveBack asked for so far
  absl::Status start_status_;
};

// The heading, the row of operation `i` after it was done, and the last line, in the format of tests/golden.
absl::string_view PerOpHeading();
std::string PerOpRow(size_t i, const TraceOp& op, Replay::Result result, Replay& replay);
std::string FinalLine(Replay& replay);

// The same of a heap that is elsewhere.
struct PlacedBlock {
  uint64_t segment = 0;  // 0 for the first segment that the heap obtained, then 1, ...
  uint64_t offset = 0;
  uint64_t segment_bytes = 0;
  uint64_t block_bytes = 0;
};
// `placed`: of an allocation that succeeded.
std::string PerOpRow(size_t i, const TraceOp& op, Replay::Result result, const std::optional<PlacedBlock>& placed,
                     const MemoryStats& stats);
std::string FinalLine(const MemoryStats& stats, uint64_t device_used_bytes);

struct ReplaySummary {
  uint64_t ops = 0;
  uint64_t allocations = 0;
  uint64_t peak_allocated_bytes = 0;  // of the whole trace, whatever resets of peaks it holds
  uint64_t peak_reserved_bytes = 0;
  double fragmentation_at_peak = 0;  // 1 - peak allocated / peak reserved
  uint64_t ooms = 0;                 // allocations refused; where the start does not fit: all, at least 1
  bool start_fits = true;
  uint64_t device_calls = 0;  // segments obtained and given back
  MemoryStats stats;          // at the end
};

ReplaySummary SummarizeReplay(const Trace& trace, const ReplayConfig& config);
// Nanoseconds per operation: best of a few runs, one thread.
double MeasureReplay(const Trace& trace, const ReplayConfig& config);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_REPLAY_REPLAY_H_
