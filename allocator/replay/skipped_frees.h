// SPDX-License-Identifier: Apache-2.0
//
// Recordings of PyTorch that have only one of the two events of a free (skip_actions of _record_memory_history).
#ifndef VRAMBROKER_ALLOCATOR_REPLAY_SKIPPED_FREES_H_
#define VRAMBROKER_ALLOCATOR_REPLAY_SKIPPED_FREES_H_

#include <string>
#include <vector>

#include "allocator/heap/heap_snapshot.h"
#include "allocator/replay/rewind.h"

namespace vrambroker {

// Adds the events that follow from those that were recorded, as RecordedEvent::is_derived, where these show that one
// kind was skipped: where a block is freed without a free_requested, or becomes free without a free_completed, and no
// event is of that kind. The one that was recorded then counts as both. `segments` is the heap after the events, if
// that is known: a block that waits there for other streams, and whose free_requested was skipped, counts as allocated.
// Returns what was done as a sentence; empty: nothing.
std::string AddSkippedFrees(std::vector<RecordedEvent>& events, std::vector<SegmentSnapshot>& segments,
                            bool has_segments);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_REPLAY_SKIPPED_FREES_H_
