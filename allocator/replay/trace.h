// SPDX-License-Identifier: Apache-2.0
//
// Trace: the sequence of allocations, frees and stream uses of a heap, replayable.
//
// Text form, one operation a line (the same as tests/golden):
//   a ID BYTES STREAM   allocate          f ID            free
//   r ID STREAM         a stream uses it  s [STREAM]      the device finishes all work queued [on one stream]
//   e                   empty the cache   frac X          set the memory fraction
//   p                   reset the peaks
//   t                   give back all wholly free segments; wait for no stream
//   g N BYTES           give segment N back; where none of BYTES has that number (other settings), others of as many
// Segments are numbered from 0, in the order in which the heap gets them; those of the start come first.
//
// Before the operations, the heap as it is at the start, unless it is empty: each segment, followed by its blocks,
// which fill it.
//   seg BYTES STREAM small|large          a segment of one of the pools
//   b BYTES                               a free block
//   b BYTES ID REQUESTED                  a block in use, for which REQUESTED bytes were asked
//   b BYTES ID REQUESTED STREAM           one that was freed and waits for the work queued on STREAM
//
// An ID is any word, a BYTES below 2^60; freeing twice does nothing. An ID that is allocated again names the new block,
// or nothing when that allocation fails; the old block stays for good. What follows a # is skipped.
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
    kGiveBack,  // segment `id`, or if it is not there, wholly free and of `bytes`: segments of as many bytes
  };
  Kind kind = Kind::kAllocate;
  uint32_t id = 0;      // kAllocate, kFree, kRecordStream: which allocation; ids are 0, 1, ... in order of appearance.
                        // kGiveBack: a segment
  uint64_t bytes = 0;   // kAllocate, kGiveBack
  Stream stream = 0;    // kAllocate, kRecordStream, kSyncStream
  double fraction = 0;  // kSetFraction
};

// The heap before the first operation.
struct TraceStart {
  // In the order in which the heap got them; their ids and addresses mean nothing. The blocks in use have the trace's
  // ids 0, 1, 2, ... in this order. CachingAllocator::CheckSegments() holds.
  std::vector<SegmentSnapshot> segments;
  std::map<uint32_t, Stream> waits;  // of each pending block, by id: the stream that keeps it

  uint64_t ReservedBytes() const;
};

// The release of PyTorch that wrote a snapshot, as far as the file shows.
struct TraceWriter {
  SettingsTarget oldest;  // that may have written it
  std::string words;      // "PyTorch 2.3 or newer wrote it"
};

// LeftOutSettings: the settings of a heap that a replay leaves out. Who replaces all settings has to say these again.
struct LeftOutSettings {
  double per_process_memory_fraction = 1.0;  // of a device whose size is not known
  std::string ignored;                       // AllocConf::ignored

  bool operator==(const LeftOutSettings&) const = default;
};

struct Trace {
  TraceStart start;
  std::vector<TraceOp> ops;
  uint32_t ids = 0;                                  // every id is below this
  std::vector<size_t> recorded_refusals;             // allocations in `ops` that were refused when it was recorded
  std::vector<std::string> notes;                    // what had to be left out or guessed, a sentence each
  std::optional<AllocatorOptions> recorded_options;  // the settings of the heap that was recorded, where known
  LeftOutSettings left_out;                          // of these settings
  std::optional<TraceWriter> writer;                 // of a snapshot of PyTorch's
};

// Reads the text form. InvalidArgument names the line.
absl::StatusOr<Trace> ParseTraceText(absl::string_view text);
// The text form, without notes and settings. ParseTraceText() makes the same start and operations of it, if the ids are
// in the order of appearance.
std::string FormatTrace(const Trace& trace);

// Reads a file, or standard input where `path` is "-": the text form, or a PyTorch memory snapshot (pickle; the events
// of `device`); either may be gzipped. NotFound or InvalidArgument name the file and the line or byte.
absl::StatusOr<Trace> ReadTraceFile(const std::string& path, int device = 0);

// A file's bytes, or standard input's where `path` is "-", unpacked when it is gzipped. At most 1 GiB.
absl::StatusOr<std::string> ReadMaybeGzipped(const std::string& path);
// As errors call it: the path, or "standard input".
std::string InputName(const std::string& path);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_REPLAY_TRACE_H_
