// SPDX-License-Identifier: Apache-2.0
//
// Recordings of PyTorch with only one of the two events of a free (skip_actions of _record_memory_history).
#ifndef VRAMBROKER_ALLOCATOR_REPLAY_SKIPPED_FREES_H_
#define VRAMBROKER_ALLOCATOR_REPLAY_SKIPPED_FREES_H_

#include <string>
#include <vector>

#include "allocator/heap/heap_snapshot.h"
#include "allocator/replay/rewind.h"

namespace vrambroker {

// Adds events derived from the recorded events, as RecordedEvent::is_derived, if one kind was evidently skipped: a
// block is freed without a free_requested, or becomes free without a free_completed, and no event has the kind missing.
// The recorded event then counts as both. `segments`: the heap after the events, if known; a block waiting there for
// other streams counts as allocated if its free_requested was skipped. Returns a sentence on the change; empty: no
// change.
std::string AddSkippedFrees(std::vector<RecordedEvent>& events, std::vector<SegmentSnapshot>& segments,
                            bool has_segments);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_REPLAY_SKIPPED_FREES_H_
