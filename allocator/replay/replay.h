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
  // Default: more than any device, four times the largest request.
  static constexpr uint64_t kUnlimitedBytes = uint64_t{1} << 62;

  AllocatorOptions options;
  uint64_t device_bytes = kUnlimitedBytes;
  std::optional<double> fraction;  // the memory fraction, set before the first operation
  LeftOutSettings left_out;        // from the origin of `options`, without use for a replay

  bool operator==(const ReplayConfig&) const = default;
};

// Reads the lines alloc_conf=, device_bytes= and fraction= (-1: not set) of a file such as tests/golden/*.conf; skips
// trace=. InvalidArgument names the line. Adds warnings of ParseAllocConf() to `warnings`, if given.
absl::StatusOr<ReplayConfig> ParseReplayConf(absl::string_view text, std::vector<std::string>* warnings = nullptr);

// A heap performing the operations of a trace. Not thread-safe.
class Replay {
 public:
  enum class Result { kOk, kOutOfMemory, kNothing };  // kNothing: the allocation had failed, or was freed before

  // Builds the heap at the start of `trace`. Uses nothing else of `trace` but the number of ids.
  Replay(const ReplayConfig& config, const Trace& trace);

  // ResourceExhausted: the device is too small for the start of the trace. Then the heap is empty, and operations on
  // blocks of the start do nothing.
  const absl::Status& start_status() const { return start_status_; }

  Result Do(const TraceOp& op);
  // The block named by an id now, or nullptr.
  const Block* block(uint32_t id) const { return blocks_[id]; }
  DirectHeap& allocator() { return allocator_; }
  const SimulatedDevice& device() const { return device_; }

 private:
  absl::Status Start(const TraceStart& start);
  void GiveBack(uint32_t number, uint64_t bytes);

  SimulatedDevice device_;
  DirectHeap allocator_;
  std::vector<Block*> blocks_;      // by id
  std::vector<Segment*> segments_;  // by number; valid while the device holds the segment
  uint64_t given_back_ahead_ = 0;   // excess bytes given back in the trace's current run of kGiveBack
  absl::Status start_status_;
};

// Heading, row of operation `i` after its execution, and last line, in the format of tests/golden.
absl::string_view PerOpHeading();
std::string PerOpRow(size_t i, const TraceOp& op, Replay::Result result, Replay& replay);
std::string FinalLine(Replay& replay);

// Row and last line for a heap elsewhere.
struct PlacedBlock {
  uint64_t segment = 0;  // 0 for the heap's first segment ever, then 1, ...
  uint64_t offset = 0;
  uint64_t segment_bytes = 0;
  uint64_t block_bytes = 0;
};
// `placed`: block of a successful allocation.
std::string PerOpRow(size_t i, const TraceOp& op, Replay::Result result, const std::optional<PlacedBlock>& placed,
                     const MemoryStats& stats);
std::string FinalLine(const MemoryStats& stats, uint64_t device_used_bytes);

struct ReplaySummary {
  uint64_t ops = 0;
  uint64_t allocations = 0;
  uint64_t peak_allocated_bytes = 0;  // of the whole trace, despite resets of peaks
  uint64_t peak_reserved_bytes = 0;
  double fragmentation_at_peak = 0;  // 1 - peak allocated / peak reserved
  uint64_t ooms = 0;                 // allocations refused; if the start does not fit: all, at least 1
  bool start_fits = true;
  uint64_t device_calls = 0;  // segments obtained and given back
  MemoryStats stats;          // at the end
};

ReplaySummary SummarizeReplay(const Trace& trace, const ReplayConfig& config);
// Nanoseconds per operation: best of a few runs, one thread.
double MeasureReplay(const Trace& trace, const ReplayConfig& config);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_REPLAY_REPLAY_H_
