// SPDX-License-Identifier: Apache-2.0
//
// How vramctl map draws segments. Pure: no terminal, no daemon.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_VIEWS_MAP_LAYOUT_H_
#define VRAMBROKER_CLIENT_VRAMCTL_VIEWS_MAP_LAYOUT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "allocator/heap/heap_snapshot.h"
#include "client/vramctl/views/bars.h"

namespace vrambroker::vramctl {

// What a cell of a segment's bar stands for.
enum class MapCell : uint8_t {
  kUsed,        // allocated blocks only
  kMostlyUsed,  // at least half of it; so that no hole is lost between two blocks
  kPartUsed,    // less than half
  kPending,     // some of it is freed, still in use by a stream
  kUnused,      // holes, or all of a segment without a block
};

// The segment as `cells` cells, by address.
std::vector<MapCell> MapCells(const SegmentSnapshot& segment, int cells);

// Cells of a segment's bar, in proportion to the largest one's `width`; at least kLeastMapCells, or `width` if that is
// less.
int MapCellCount(uint64_t bytes, uint64_t largest_bytes, int width);
inline constexpr int kLeastMapCells = 16;

// A line for each segment, the largest first, as "  20.00 MiB large [████▒▁▁▁▁▁] 3 blocks, 2 holes of 4.00 MiB,
// largest 3.00 MiB", at most `width` cells wide, unless its figures need more:
// they are never cut. Used cells have `style`.
std::vector<Line> SegmentLines(const HeapSnapshot& heap, int width, Style style, bool utf8);

// What the cells mean, each.
std::vector<Line> MapLegend(bool utf8);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_MAP_LAYOUT_H_
