// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_ALLOCATOR_HEAP_MEMORY_SUMMARY_H_
#define VRAMBROKER_ALLOCATOR_HEAP_MEMORY_SUMMARY_H_

#include <string>

#include "absl/strings/string_view.h"
#include "allocator/heap/memory_stats.h"

namespace vrambroker {

// The table printed by torch.cuda.memory_summary(), of a session on a device (ordinal). The second line has the
// session's name, cut to fit; an empty name stands for all sessions. `abbreviated`: without the rows of the two pools.
// Every line is 77 characters wide and ends in a newline.
std::string MemorySummary(absl::string_view session, int device, const MemoryStats& stats, bool abbreviated = false);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_HEAP_MEMORY_SUMMARY_H_
