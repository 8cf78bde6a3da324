// SPDX-License-Identifier: Apache-2.0
//
// Trace: the sequence of allocations, frees and stream uses of a heap, replayable.
//
// Text form, one operation a line (the same as tests/golden):
//   a ID BYTES STREAM   allocate          f ID            free
//   r ID STREAM         a stream uses it  s [STREAM]      the device finishes all work queued [on one stream]
//   e                   empty the cache   frac X          set the memory fraction
//   p                   reset the peaks
// An ID is any word, a BYTES below 2^60; freeing twice does nothing. An ID that is allocated again names the new block,
// or nothing when that allocation fails; the old block stays for good. What follows a # is skipped.
#ifndef VRAMBROKER_ALLOCATOR_REPLAY_TRACE_H_
#define VRAMBROKER_ALLOCATOR_REPLAY_TRACE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "allocator/events.h"

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
  };
  Kind kind = Kind::kAllocate;
  uint32_t id = 0;      // kAllocate, kFree, kRecordStream: which allocation; ids are 0, 1, ... in order of appearance
  uint64_t bytes = 0;   // kAllocate
  Stream stream = 0;    // kAllocate, kRecordStream, kSyncStream
  double fraction = 0;  // kSetFraction
};

struct Trace {
  std::vector<TraceOp> ops;
  uint32_t ids = 0;                // every id is below this
  std::vector<std::string> notes;  // what had to be left out or guessed, a sentence each
};

// Reads the text form. InvalidArgument names the line.
absl::StatusOr<Trace> ParseTraceText(absl::string_view text);

// Reads a file: the text form, or a PyTorch memory snapshot (pickle; the events of `device`); either may be gzipped.
// NotFound or InvalidArgument name the file and the line or byte.
absl::StatusOr<Trace> ReadTraceFile(const std::string& path, int device = 0);

// A file's bytes, unpacked when it is gzipped. At most 1 GiB.
absl::StatusOr<std::string> ReadMaybeGzipped(const std::string& path);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_REPLAY_TRACE_H_
