// SPDX-License-Identifier: Apache-2.0
//
// Trace: the sequence of allocations, frees and stream uses of a heap, replayable.
//
// Text form, one operation a line (as in tests/golden):
//   a ID BYTES STREAM   allocate          f ID            free
//   r ID STREAM         use by a stream   s [STREAM]      the device finishes all work queued [on one stream]
//   e                   empty the cache   frac X          set the memory fraction
//   p                   reset the peaks
//   t                   give back all wholly free segments; wait for no stream
//   g N BYTES           give segment N back; if N is gone or not of BYTES (other settings), segments of as many bytes
// Segments are numbered from 0, in the order in which the heap gets them; segments of the start come first.
//
// Before the operations comes the heap at the start, unless empty: each segment, followed by blocks filling the
// segment.
//   seg BYTES STREAM small|large          a segment of one of the pools
//   b BYTES                               a free block
//   b BYTES ID REQUESTED                  a block in use; REQUESTED bytes were asked for
//   b BYTES ID REQUESTED STREAM           a freed block, waiting for the work queued on STREAM
//
// An ID is any word, a BYTES below 2^60; freeing twice does nothing. An ID allocated again names the new block, or
// nothing when the allocation fails; the old block stays for good. Text after a # is skipped.
#ifndef VRAMBROKER_ALLOCATOR_REPLAY_TRACE_H_
#define VRAMBROKER_ALLOCATOR_REPLAY_TRACE_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "allocator/device/events.h"
#include "allocator/heap/allocator_options.h"
#include "allocator/heap/heap_snapshot.h"
#include "allocator/replay/settings_target.h"

namespace vrambroker {

struct TraceOp {
  enum class Kind : uint8_t {
    kAllocate,
    kFree,
    kRecordStream,
    kSyncAll,
    kSyncStream,
    kEmptyCache,
    kSetFraction,
    kResetPeaks,
    kTrim,      // DirectHeap::Trim()
    kGiveBack,  // segment `id`; if not there, wholly free and of `bytes`: segments of as many bytes
  };
  Kind kind = Kind::kAllocate;
  uint32_t id = 0;      // kAllocate, kFree, kRecordStream: the allocation; ids are 0, 1, ... in order of appearance.
                        // kGiveBack: a segment
  uint64_t bytes = 0;   // kAllocate, kGiveBack
  Stream stream = 0;    // kAllocate, kRecordStream, kSyncStream
  double fraction = 0;  // kSetFraction
};

// The heap before the first operation.
struct TraceStart {
  // Sorted as the heap got the segments; ids and addresses mean nothing. The blocks in use have the trace's ids 0, 1,
  // 2, ... in the same order. CachingAllocator::CheckSegments() holds.
  std::vector<SegmentSnapshot> segments;
  std::map<uint32_t, Stream> waits;  // of each pending block, by id: the stream to wait for

  uint64_t ReservedBytes() const;
};

// TraceWriter: the release of PyTorch that wrote a snapshot, as far as the file shows.
struct TraceWriter {
  SettingsTarget oldest;  // oldest possible release
  std::string words;      // "PyTorch 2.3 or newer wrote it"
};

// LeftOutSettings: settings of a heap left out of a replay. Advice replacing all settings has to repeat the settings
// left out.
struct LeftOutSettings {
  double per_process_memory_fraction = 1.0;  // as a share of a device of unknown size
  std::string ignored;                       // AllocConf::ignored

  bool operator==(const LeftOutSettings&) const = default;
};

struct Trace {
  TraceStart start;
  std::vector<TraceOp> ops;
  uint32_t ids = 0;                                  // every id is below `ids`
  std::vector<size_t> recorded_refusals;             // allocations in `ops` refused during the recording
  std::vector<std::string> notes;                    // everything left out or guessed, a sentence each
  std::optional<AllocatorOptions> recorded_options;  // settings of the recorded heap, if known
  LeftOutSettings left_out;                          // settings missing in `recorded_options`
  std::optional<TraceWriter> writer;                 // of a snapshot by PyTorch
};

// Reads the text form. InvalidArgument names the line.
absl::StatusOr<Trace> ParseTraceText(absl::string_view text);
// Writes the text form, without notes and settings. ParseTraceText() restores start and operations, if ids are in the
// order of appearance.
std::string FormatTrace(const Trace& trace);

// Reads a file, or standard input if `path` is "-": the text form, or a PyTorch memory snapshot (pickle; the events of
// `device`), possibly gzipped. NotFound or InvalidArgument name the file and the line or byte.
absl::StatusOr<Trace> ReadTraceFile(const std::string& path, int device = 0);

// Returns the bytes of a file, or of standard input if `path` is "-", unpacked if gzipped. At most 1 GiB.
absl::StatusOr<std::string> ReadMaybeGzipped(const std::string& path);
// Names an input in errors: the path, or "standard input".
std::string InputName(const std::string& path);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_REPLAY_TRACE_H_
