// SPDX-License-Identifier: Apache-2.0
//
// Rewind: a recording has the heap at its end and the events before it; undone from the last to the first, they lead to
// the heap at its beginning. So a ring that has dropped its oldest events is enough.
#ifndef VRAMBROKER_ALLOCATOR_REPLAY_REWIND_H_
#define VRAMBROKER_ALLOCATOR_REPLAY_REWIND_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "allocator/device/events.h"
#include "allocator/heap/allocator_options.h"
#include "allocator/heap/heap_snapshot.h"

namespace vrambroker {

// What was recorded of one event; what a kind does not need is 0.
struct RecordedEvent {
  enum class Action : uint8_t {
    kAllocate,
    kFreeRequested,
    kFreeCompleted,
    kOutOfMemory,
    kSegmentAllocate,
    kSegmentFree,
    kMap,    // of expandable segments
    kOther,  // changes nothing
  };
  Action action = Action::kOther;
  bool is_derived = false;  // not recorded: follows from the others (AddSkippedFrees())
  // kSegmentFree: after it no wholly free segment was left, and the next event is no kSegmentFree.
  bool leaves_none_free = false;
  uint64_t address = 0;
  uint64_t bytes = 0;        // requested; of the segment
  uint64_t block_bytes = 0;  // of the block; 0: not recorded
  Stream stream = 0;
};

// A heap at the beginning of its recording.
struct RewoundHeap {
  struct Block {
    uint64_t address = 0;
    bool pending = false;
  };
  std::vector<SegmentSnapshot> segments;  // by address; CachingAllocator::CheckSegments() holds
  std::vector<Block> in_use;              // in the order of the segments
  uint64_t guessed_blocks = 0;            // whose size is the rounded request, and may be up to 1 MiB more
  uint64_t peak_reserved_bytes = 0;       // from the beginning to the end
  bool obtains_segment_of_first = false;  // the first allocation obtains its segment; that event was not kept
};

// The heap before `events`, of the heap after them. Sets RecordedEvent::leaves_none_free. A block that was live at the
// beginning and freed in the recording has the size that was recorded, or else what the allocator's rules say, with
// `options`. InvalidArgument: `segments` contradict themselves, or `*failed_event` (its index) cannot have led to
// what is there after it. Takes n log n steps. Not thread-safe on the same events.
absl::StatusOr<RewoundHeap> RewindHeap(absl::Span<const SegmentSnapshot> segments, absl::Span<RecordedEvent> events,
                                       const AllocatorOptions& options, size_t* failed_event);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_REPLAY_REWIND_H_
