// SPDX-License-Identifier: Apache-2.0
//
// FreeIndex: the free blocks of one pool and stream, found by best fit.
//
// Bins by size, 64 to a power of two, with bitmaps of the non-empty bins (the two-level bins of TLSF, Masmano et al.
// 2004). Within a bin, a tree ordered by (size, address), since a bin may hold a single block or a million. The bitmaps
// lead to the right bin without touching a block. Most bins hold a single block, without a tree, or a handful.
//
// Order of equal sizes: the lowest address (the oldest segment, then the lowest offset), as in PyTorch since 2026.
// Costs: all O(log of the blocks in the bin).
#ifndef VRAMBROKER_ALLOCATOR_HEAP_FREE_INDEX_H_
#define VRAMBROKER_ALLOCATOR_HEAP_FREE_INDEX_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "allocator/heap/block.h"
#include "allocator/heap/block_tree.h"
#include "allocator/heap/memory_stats.h"

namespace vrambroker {

// Not thread-safe. Blocks belong to their allocator.
class FreeIndex {
 public:
  // REQUIRES: `block` is in no index, and keeps its size while in the index.
  void Insert(Block* block);
  // REQUIRES: `block` is in this index.
  void Erase(Block* block);

  // The first block in the order (size, address) of at least `bytes`, or nullptr.
  Block* FirstAtLeast(uint64_t bytes) const;

  bool Contains(const Block* block) const;
  size_t size() const { return size_; }
  // Sizes of all blocks. Costs a look at each non-empty bin, however full.
  FreeSizes GetSizes() const;
  // All blocks by (size, address).
  std::vector<Block*> InOrder() const;
  uint64_t MemoryBytes() const;

 private:
  static constexpr int kRows = 47;  // up to 2^60 bytes
  struct Bin {
    // A block in an empty bin is alone there. A second block moves both to the tree, in use until empty.
    Block* only = nullptr;
    BlockTree tree;
    uint64_t tree_blocks = 0;
    uint64_t tree_bytes = 0;

    void InsertInTree(Block* block, BlockTree::NodeStore& nodes);
    Block* First() const;
    Block* FirstAtLeast(uint64_t bytes) const;
  };
  using Row = std::array<Bin, 64>;

  struct Place {
    int row;
    int column;
  };
  static Place PlaceOf(uint64_t bytes);
  Bin& BinAt(Place place) const { return (*bins_[place.row])[place.column]; }

  size_t size_ = 0;
  uint64_t rows_ = 0;                             // bit r: row r has a block
  std::array<uint64_t, kRows> columns_{};         // bit c of entry r: bin (r, c) has a block
  std::array<std::unique_ptr<Row>, kRows> bins_;  // made at first use
  BlockTree::NodeStore nodes_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_HEAP_FREE_INDEX_H_
