// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_ALLOCATOR_MEMORY_SUMMARY_H_
#define VRAMBROKER_ALLOCATOR_MEMORY_SUMMARY_H_

#include <string>

#include "absl/strings/string_view.h"
#include "allocator/memory_stats.h"

namespace vrambroker {

// The table that torch.cuda.memory_summary() prints, for `stats`. `title` stands in its second line, cut to fit.
// Every line is 77 characters wide and ends in a newline.
std::string MemorySummary(absl::string_view title, const MemoryStats& stats);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_MEMORY_SUMMARY_H_
