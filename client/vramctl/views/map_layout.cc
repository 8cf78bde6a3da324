// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/views/map_layout.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "client/vramctl/views/output.h"

namespace vrambroker::vramctl {
namespace {

constexpr std::array<MapCell, 5> kAllCells = {MapCell::kUsed, MapCell::kMostlyUsed, MapCell::kPartUsed,
                                              MapCell::kPending, MapCell::kUnused};

const char* GlyphOf(MapCell cell, bool utf8) {
  static constexpr std::array<const char*, kAllCells.size()> kUtf8 = {"█", "▓", "▒", "▚", "▁"};
  static constexpr std::array<const char*, kAllCells.size()> kAscii = {"#", "+", "-", "%", "_"};
  return (utf8 ? kUtf8 : kAscii)[static_cast<size_t>(cell)];
}

const char* MeaningOf(MapCell cell) {
  static constexpr std::array<const char*, kAllCells.size()> kMeanings = {"allocated", "half or more", "less",
                                                                          "waiting for a stream", "unused"};
  return kMeanings[static_cast<size_t>(cell)];
}

Style StyleOfCell(MapCell cell, Style used) {
  switch (cell) {
    case MapCell::kPending:
      return Style::kPending;
    case MapCell::kUnused:
      return Style::kFree;
    default:
      return used;
  }
}

// Returns the size and pool, shown before the bar.
std::string LabelOf(const SegmentSnapshot& segment) {
  return absl::StrCat("  ", Fit(FormatBytes(segment.bytes), 11, true), " ",
                      segment.pool == PoolKind::kSmall ? "small" : "large", " ");
}

// Returns the figures too exact for the bar.
std::string FiguresOf(const SegmentSnapshot& segment) {
  uint64_t blocks = 0;
  uint64_t holes = 0;
  uint64_t free_bytes = 0;
  uint64_t largest = 0;
  for (const BlockSnapshot& block : segment.blocks) {
    if (block.state != BlockState::kFree) {
      ++blocks;
      continue;
    }
    ++holes;
    free_bytes += block.bytes;
    largest = std::max(largest, block.bytes);
  }
  std::string text = absl::StrCat(" ", Counted(blocks, "block"));
  if (blocks == 0) {
    absl::StrAppend(&text, ", reclaimable");
  } else if (holes == 1) {
    absl::StrAppend(&text, ", a hole of ", FormatBytes(free_bytes));
  } else if (holes > 1) {
    absl::StrAppend(&text, ", ", holes, " holes of ", FormatBytes(free_bytes), ", largest ", FormatBytes(largest));
  }
  if (segment.stream != 0) absl::StrAppend(&text, ", stream ", segment.stream);
  return text;
}

}  // namespace

std::vector<MapCell> MapCells(const SegmentSnapshot& segment, int cells) {
  struct Share {
    double used = 0;
    double pending = 0;
  };
  std::vector<Share> shares(static_cast<size_t>(std::max(cells, 0)));
  const double cell_bytes = static_cast<double>(segment.bytes) / std::max(cells, 1);
  for (const BlockSnapshot& block : segment.blocks) {
    if (block.state == BlockState::kFree || cell_bytes <= 0) continue;
    // Block bounds come from the client, so may be wrong.
    if (block.offset > segment.bytes || block.bytes > segment.bytes - block.offset) continue;
    const double begin = static_cast<double>(block.offset) / cell_bytes;
    const double end = static_cast<double>(block.offset + block.bytes) / cell_bytes;
    for (auto i = static_cast<size_t>(begin); i < shares.size() && static_cast<double>(i) < end; ++i) {
      const double overlap = std::min(end, static_cast<double>(i + 1)) - std::max(begin, static_cast<double>(i));
      (block.state == BlockState::kPendingFree ? shares[i].pending : shares[i].used) += overlap;
    }
  }
  constexpr double kRounding = 1e-6;
  std::vector<MapCell> out;
  out.reserve(shares.size());
  for (const Share& share : shares) {
    if (share.pending > kRounding) {
      out.push_back(MapCell::kPending);
    } else if (share.used >= 1 - kRounding) {
      out.push_back(MapCell::kUsed);
    } else if (share.used >= 0.5) {
      out.push_back(MapCell::kMostlyUsed);
    } else {
      out.push_back(share.used > kRounding ? MapCell::kPartUsed : MapCell::kUnused);
    }
  }
  return out;
}

int MapCellCount(uint64_t bytes, uint64_t largest_bytes, int width) {
  const double share = largest_bytes == 0 ? 0 : static_cast<double>(bytes) / static_cast<double>(largest_bytes);
  return std::clamp(static_cast<int>(std::lround(share * width)), std::min(kLeastMapCells, width), std::max(width, 1));
}

std::vector<Line> SegmentLines(const HeapSnapshot& heap, int width, Style style, bool utf8) {
  uint64_t largest = 0;
  int around = 0;
  for (const SegmentSnapshot& segment : heap.segments) {
    largest = std::max(largest, segment.bytes);
    around = std::max(around, Cells(LabelOf(segment)) + 2 + Cells(FiguresOf(segment)));
  }
  const int bar_width = std::max(width - around, kLeastMapCells / 2);
  std::vector<const SegmentSnapshot*> sorted;
  sorted.reserve(heap.segments.size());
  for (const SegmentSnapshot& segment : heap.segments) sorted.push_back(&segment);
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const SegmentSnapshot* a, const SegmentSnapshot* b) { return a->bytes > b->bytes; });
  std::vector<Line> lines;
  lines.reserve(sorted.size());
  for (const SegmentSnapshot* each : sorted) {
    const SegmentSnapshot& segment = *each;
    Line line = {{absl::StrCat(LabelOf(segment), "[")}};
    for (const MapCell cell : MapCells(segment, MapCellCount(segment.bytes, largest, bar_width))) {
      const Style wanted = StyleOfCell(cell, style);
      if (line.size() == 1 || line.back().style != wanted) line.push_back({"", wanted});
      line.back().text += GlyphOf(cell, utf8);
    }
    line.push_back({"]"});
    line.push_back({FiguresOf(segment), Style::kDim});
    lines.push_back(std::move(line));
  }
  return lines;
}

std::vector<Line> MapLegend(bool utf8) {
  std::vector<Line> items;
  items.reserve(kAllCells.size());
  for (const MapCell cell : kAllCells) {
    items.push_back({{absl::StrCat(items.empty() ? "cells:  " : "", GlyphOf(cell, utf8), " ", MeaningOf(cell))}});
  }
  return items;
}

}  // namespace vrambroker::vramctl
