// SPDX-License-Identifier: Apache-2.0
//
// Draws segments for vramctl map. Pure: no terminal, no daemon.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_VIEWS_MAP_LAYOUT_H_
#define VRAMBROKER_CLIENT_VRAMCTL_VIEWS_MAP_LAYOUT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "allocator/heap/heap_snapshot.h"
#include "client/vramctl/views/bars.h"

namespace vrambroker::vramctl {

// Content of a cell in a segment's bar.
enum class MapCell : uint8_t {
  kUsed,        // allocated blocks only
  kMostlyUsed,  // at least half used; so that no hole is lost between two blocks
  kPartUsed,    // less than half
  kPending,     // partly freed, still in use by a stream
  kUnused,      // holes, or all of a segment without a block
};

// Divides the segment into `cells` cells, by address.
std::vector<MapCell> MapCells(const SegmentSnapshot& segment, int cells);

// Returns the cells of a segment's bar, in proportion to the `width` of the largest segment; at least kLeastMapCells,
// or `width` if smaller.
int MapCellCount(uint64_t bytes, uint64_t largest_bytes, int width);
inline constexpr int kLeastMapCells = 16;

// Returns a line for each segment, the largest first, as "  20.00 MiB large [████▒▁▁▁▁▁] 3 blocks, 2 holes of 4.00 MiB,
// largest 3.00 MiB", at most `width` cells wide, unless the figures need more: figures are never cut. Used cells have
// `style`.
std::vector<Line> SegmentLines(const HeapSnapshot& heap, int width, Style style, bool utf8);

// Explains the cells.
std::vector<Line> MapLegend(bool utf8);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_MAP_LAYOUT_H_
