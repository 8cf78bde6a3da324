// SPDX-License-Identifier: Apache-2.0
#include "allocator/heap/free_index.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "allocator/heap/size_class.h"

namespace vrambroker {

// Sizes count in units of 512 bytes. Row 0: a bin for each of 0 to 63 units. Row r: sizes of r + 6 bits, by the 6 bits
// after the highest.
FreeIndex::Place FreeIndex::PlaceOf(uint64_t bytes) {
  const uint64_t units = bytes / kMinBlockBytes;
  if (units < 64) return {.row = 0, .column = static_cast<int>(units)};
  const int row = static_cast<int>(std::bit_width(units)) - 6;
  return {.row = row, .column = static_cast<int>((units >> (row - 1)) & 63)};
}

void FreeIndex::Bin::InsertInTree(Block* block, BlockTree::NodeStore& nodes) {
  tree.Insert(block, nodes);
  ++tree_blocks;
  tree_bytes += block->bytes;
}

Block* FreeIndex::Bin::First() const {
  return only != nullptr ? only : tree.First();
}

Block* FreeIndex::Bin::FirstAtLeast(uint64_t bytes) const {
  if (only != nullptr) return only->bytes >= bytes ? only : nullptr;
  return tree.FirstFrom({.bytes = bytes});
}

void FreeIndex::Insert(Block* block) {
  const Place place = PlaceOf(block->bytes);
  ++size_;
  if (bins_[place.row] == nullptr) bins_[place.row] = std::make_unique<Row>();
  Bin& bin = BinAt(place);
  if (!bin.tree.empty()) {
    bin.InsertInTree(block, nodes_);
  } else if (bin.only != nullptr) {
    bin.InsertInTree(std::exchange(bin.only, nullptr), nodes_);
    bin.InsertInTree(block, nodes_);
  } else {
    bin.only = block;
    columns_[place.row] |= uint64_t{1} << place.column;
    rows_ |= uint64_t{1} << place.row;
  }
}

void FreeIndex::Erase(Block* block) {
  const Place place = PlaceOf(block->bytes);
  --size_;
  Bin& bin = BinAt(place);
  if (bin.only != nullptr) {
    bin.only = nullptr;
  } else {
    bin.tree.Erase(block, nodes_);
    --bin.tree_blocks;
    bin.tree_bytes -= block->bytes;
    if (!bin.tree.empty()) return;
  }
  columns_[place.row] &= ~(uint64_t{1} << place.column);
  if (columns_[place.row] == 0) rows_ &= ~(uint64_t{1} << place.row);
}

Block* FreeIndex::FirstAtLeast(uint64_t bytes) const {
  const Place place = PlaceOf(bytes);
  const uint64_t columns = columns_[place.row] >> place.column;
  if ((columns & 1) != 0) {
    if (Block* found = BinAt(place).FirstAtLeast(bytes)) return found;
  }
  // Every following bin holds only larger blocks.
  if (const uint64_t rest = columns >> 1; rest != 0) {
    return BinAt({.row = place.row, .column = place.column + 1 + std::countr_zero(rest)}).First();
  }
  const uint64_t rows = rows_ >> place.row >> 1;
  if (rows == 0) return nullptr;
  const int row = place.row + 1 + std::countr_zero(rows);
  return BinAt({.row = row, .column = std::countr_zero(columns_[row])}).First();
}

bool FreeIndex::Contains(const Block* block) const {
  const Place place = PlaceOf(block->bytes);
  if ((columns_[place.row] >> place.column & 1) == 0) return false;
  const Bin& bin = BinAt(place);
  if (bin.only != nullptr) return bin.only == block;
  return bin.tree.FirstFrom({.bytes = block->bytes, .address = block->address}) == block;
}

FreeSizes FreeIndex::GetSizes() const {
  FreeSizes sizes;
  for (uint64_t rows = rows_; rows != 0; rows &= rows - 1) {
    const int row = std::countr_zero(rows);
    for (uint64_t columns = columns_[row]; columns != 0; columns &= columns - 1) {
      const Bin& bin = BinAt({.row = row, .column = std::countr_zero(columns)});
      if (bin.only != nullptr) {
        sizes.Add(bin.only->bytes);
        continue;
      }
      // Classes begin at powers of two, as rows do: all blocks of a bin are in one class.
      const uint64_t last = bin.tree.Last()->bytes;
      const size_t size_class = FreeSizes::ClassOf(last);
      sizes.blocks[size_class] += bin.tree_blocks;
      sizes.bytes[size_class] += bin.tree_bytes;
      sizes.largest_bytes = last;  // bins come in order of size
    }
  }
  return sizes;
}

std::vector<Block*> FreeIndex::InOrder() const {
  std::vector<Block*> blocks;
  blocks.reserve(size_);
  for (const auto& row : bins_) {
    if (row == nullptr) continue;
    for (const Bin& bin : *row) {
      if (bin.only != nullptr) blocks.push_back(bin.only);
      bin.tree.AppendTo(&blocks);
    }
  }
  return blocks;
}

uint64_t FreeIndex::MemoryBytes() const {
  const auto rows = std::count_if(bins_.begin(), bins_.end(), [](const auto& row) { return row != nullptr; });
  return sizeof *this + static_cast<uint64_t>(rows) * sizeof(Row) + nodes_.MemoryBytes();
}

}  // namespace vrambroker
