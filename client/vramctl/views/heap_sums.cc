// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/views/heap_sums.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "allocator/base/bytes.h"
#include "client/vramctl/views/bars.h"
#include "client/vramctl/views/output.h"

namespace vrambroker::vramctl {
namespace {

using Place = std::pair<std::string, std::vector<std::string>>;  // scope and stack

Place PlaceOf(absl::Span<const Scope> scopes, ScopeId id) {
  std::vector<std::string> names;
  Place place;
  for (ScopeId at = id; at != 0 && at < scopes.size(); at = scopes[at].parent) {
    const Scope& scope = scopes[at];
    if (scope.file.empty()) {
      names.push_back(scope.name);
    } else {
      place.second.push_back(
          absl::StrCat(scope.name, " (", scope.file.substr(scope.file.rfind('/') + 1), ":", scope.line, ")"));
    }
  }
  std::reverse(names.begin(), names.end());
  place.first = absl::StrJoin(names, "/");
  return place;
}

void Count(absl::Span<const HeapSnapshot> heaps, uint64_t HeapGrowth::*bytes, uint64_t HeapGrowth::*blocks,
           std::map<Place, HeapGrowth>& places) {
  for (const HeapSnapshot& heap : heaps) {
    std::map<ScopeId, HeapGrowth*> known;
    for (const SegmentSnapshot& segment : heap.segments) {
      for (const BlockSnapshot& block : segment.blocks) {
        if (block.state != BlockState::kAllocated) continue;
        HeapGrowth*& growth = known[block.scope];
        if (growth == nullptr) growth = &places[PlaceOf(heap.scopes, block.scope)];
        growth->*bytes += block.bytes;
        growth->*blocks += 1;
      }
    }
  }
}

std::string Signed(int64_t value, const std::string& absolute) {
  return absl::StrCat(value < 0 ? "-" : "+", absolute);
}

std::string WhereText(const HeapGrowth& growth) {
  const std::string stack = absl::StrJoin(growth.stack, " < ");
  if (growth.scope.empty()) return stack.empty() ? "(no scope or stack)" : stack;
  return stack.empty() ? growth.scope : absl::StrCat(growth.scope, ": ", stack);
}

}  // namespace

HeapSums SumsOf(absl::Span<const HeapSnapshot> heaps) {
  HeapSums sums;
  for (const HeapSnapshot& heap : heaps) {
    for (const SegmentSnapshot& segment : heap.segments) {
      ++sums.segments;
      sums.reserved_bytes += segment.bytes;
      uint64_t free = 0;
      uint64_t holes = 0;
      uint64_t largest = 0;
      for (const BlockSnapshot& block : segment.blocks) {
        if (block.state == BlockState::kAllocated) {
          ++sums.blocks;
          sums.allocated_bytes += block.bytes;
        } else if (block.state == BlockState::kPendingFree) {
          sums.pending_bytes += block.bytes;
        } else {
          ++holes;
          free += block.bytes;
          largest = std::max(largest, block.bytes);
        }
      }
      if (free == segment.bytes) {
        sums.reclaimable_bytes += free;
        continue;
      }
      sums.holes += holes;
      sums.fragmented_bytes += free;
      sums.largest_hole_bytes = std::max(sums.largest_hole_bytes, largest);
    }
  }
  return sums;
}

std::string SumsText(const HeapSums& sums) {
  std::string text =
      absl::StrCat(FormatBytes(sums.reserved_bytes), " reserved in ", Counted(sums.segments, "segment"), ": ",
                   FormatBytes(sums.allocated_bytes), " allocated in ", Counted(sums.blocks, "block"));
  if (sums.pending_bytes > 0) absl::StrAppend(&text, ", ", FormatBytes(sums.pending_bytes), " waits to be free");
  absl::StrAppend(&text, ", ", FormatBytes(sums.fragmented_bytes), " fragmented");
  if (sums.holes > 0) {
    absl::StrAppend(&text, " (", Counted(sums.holes, "hole"), ", the largest ", FormatBytes(sums.largest_hole_bytes),
                    ")");
  }
  return absl::StrCat(text, ", ", FormatBytes(sums.reclaimable_bytes), " reclaimable");
}

std::vector<HeapGrowth> GrowthOf(absl::Span<const HeapSnapshot> before, absl::Span<const HeapSnapshot> after) {
  std::map<Place, HeapGrowth> places;
  Count(before, &HeapGrowth::before_bytes, &HeapGrowth::before_blocks, places);
  Count(after, &HeapGrowth::after_bytes, &HeapGrowth::after_blocks, places);
  std::vector<HeapGrowth> all;
  for (auto& [place, growth] : places) {
    if (growth.before_bytes == growth.after_bytes && growth.before_blocks == growth.after_blocks) continue;
    growth.scope = place.first;
    growth.stack = place.second;
    all.push_back(std::move(growth));
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const HeapGrowth& a, const HeapGrowth& b) { return a.growth_bytes() > b.growth_bytes(); });
  return all;
}

std::string GrowthTable(const std::vector<HeapGrowth>& growth, size_t most) {
  std::vector<std::vector<std::string>> rows = {{">GROWTH", ">BEFORE", ">AFTER", ">BLOCKS", "WHERE"}};
  for (const HeapGrowth& each : growth) {
    if (rows.size() > most) break;
    const int64_t bytes = each.growth_bytes();
    const int64_t blocks = static_cast<int64_t>(each.after_blocks) - static_cast<int64_t>(each.before_blocks);
    rows.push_back({Signed(bytes, FormatBytes(static_cast<uint64_t>(bytes < 0 ? -bytes : bytes))),
                    FormatBytes(each.before_bytes), FormatBytes(each.after_bytes),
                    Signed(blocks, absl::StrCat(blocks < 0 ? -blocks : blocks)), Printable(WhereText(each))});
  }
  std::string table = Table(rows);
  if (growth.size() > most) absl::StrAppend(&table, "and ", Counted(growth.size() - most, "place"), " more\n");
  return table;
}

}  // namespace vrambroker::vramctl
