// SPDX-License-Identifier: Apache-2.0
//
// Rewind: from the end of a recording to the beginning. Undoing the events, from the last to the first, leads from the
// heap at the end to the heap at the beginning. So a ring that has dropped the oldest events is enough.
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

// A recorded event; fields without use for a kind are 0.
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
  bool is_derived = false;  // not recorded: derived from other events (AddSkippedFrees())
  // kSegmentFree: no wholly free segment was left afterwards, and the next event is no kSegmentFree.
  bool leaves_none_free = false;
  uint64_t address = 0;
  uint64_t bytes = 0;        // requested; of the segment
  uint64_t block_bytes = 0;  // of the block; 0: not recorded
  Stream stream = 0;
};

// The heap at the beginning of a recording.
struct RewoundHeap {
  struct Block {
    uint64_t address = 0;
    bool pending = false;
  };
  std::vector<SegmentSnapshot> segments;  // by address; CachingAllocator::CheckSegments() holds
  std::vector<Block> in_use;              // in the order of the segments
  uint64_t guessed_blocks = 0;            // sized as the rounded request, in truth perhaps up to 1 MiB larger
  uint64_t peak_reserved_bytes = 0;       // from the beginning to the end
  bool obtains_segment_of_first = false;  // the first allocation obtains a segment, in an event not kept
};

// Returns the heap before `events`, from the heap after them. Sets RecordedEvent::leaves_none_free. A block live at the
// beginning and freed in the recording has the recorded size, or else the size by the allocator's rules with `options`.
// InvalidArgument: `segments` contradict themselves, or `*failed_event` (an index) cannot have led to the state
// afterwards. Takes n log n steps. Not thread-safe when calls share events.
absl::StatusOr<RewoundHeap> RewindHeap(absl::Span<const SegmentSnapshot> segments, absl::Span<RecordedEvent> events,
                                       const AllocatorOptions& options, size_t* failed_event);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_REPLAY_REWIND_H_
