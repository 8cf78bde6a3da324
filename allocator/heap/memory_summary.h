// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_ALLOCATOR_HEAP_MEMORY_SUMMARY_H_
#define VRAMBROKER_ALLOCATOR_HEAP_MEMORY_SUMMARY_H_

#include <string>

#include "absl/strings/string_view.h"
#include "allocator/heap/memory_stats.h"

namespace vrambroker {

// The table that torch.cuda.memory_summary() prints, of a session on a device (ordinal). Its name stands in the second
// line, cut to fit; without one, that it is of all sessions. `abbreviated`: without the rows of the two pools. Every
// line is 77 characters wide and ends in a newline.
std::string MemorySummary(absl::string_view session, int device, const MemoryStats& stats, bool abbreviated = false);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_HEAP_MEMORY_SUMMARY_H_
