// SPDX-License-Identifier: Apache-2.0
//
// Sums over the heaps of a snapshot, and the growth from a snapshot to the next. Pure: no files, no daemon.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_VIEWS_HEAP_SUMS_H_
#define VRAMBROKER_CLIENT_VRAMCTL_VIEWS_HEAP_SUMS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "allocator/heap/heap_snapshot.h"

namespace vrambroker::vramctl {

// Sums, in the terms of deploy/GLOSSARY.md.
struct HeapSums {
  uint64_t segments = 0;  // COUNT
  uint64_t blocks = 0;    // COUNT, allocated
  uint64_t holes = 0;     // COUNT, beside used blocks
  uint64_t reserved_bytes = 0;
  uint64_t allocated_bytes = 0;
  uint64_t pending_bytes = 0;
  uint64_t fragmented_bytes = 0;   // sum of the holes
  uint64_t reclaimable_bytes = 0;  // sum of the segments without a used block
  uint64_t largest_hole_bytes = 0;
};

HeapSums SumsOf(absl::Span<const HeapSnapshot> heaps);

// Returns "400.00 MiB reserved in 20 segments: 280.00 MiB allocated in 40 blocks, ...".
std::string SumsText(const HeapSums& sums);

// Blocks of a scope and a place in the program, in two snapshots.
struct HeapGrowth {
  std::string scope;               // ScopePath() of the names alone; "": none
  std::vector<std::string> stack;  // "function (file:line)", the innermost first
  uint64_t before_bytes = 0;
  uint64_t after_bytes = 0;
  uint64_t before_blocks = 0;  // COUNT
  uint64_t after_blocks = 0;   // COUNT

  int64_t growth_bytes() const { return static_cast<int64_t>(after_bytes) - static_cast<int64_t>(before_bytes); }
};

// Sorts by growth, largest first; omits unchanged places. Counts blocks in use, on all devices.
std::vector<HeapGrowth> GrowthOf(absl::Span<const HeapSnapshot> before, absl::Span<const HeapSnapshot> after);

// Formats a table with at most `most` places; the last line counts the omitted places.
std::string GrowthTable(const std::vector<HeapGrowth>& growth, size_t most);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_HEAP_SUMS_H_
