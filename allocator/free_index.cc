// SPDX-License-Identifier: Apache-2.0
//
// The treap is a binary search tree by (size, address) and a heap by a hash of the record's own address, which keeps it
// balanced whatever the order of insertions (Seidel and Aragon, 1996). Insertion splits, removal joins; both walk down
// once and need no parent links.
#include "allocator/free_index.h"

#include <bit>

#include "allocator/size_class.h"

namespace vrambroker {
namespace {

bool Less(const Block* a, const Block* b) {
  return a->bytes != b->bytes ? a->bytes < b->bytes : a->address < b->address;
}

// Well mixed, because records that lie next to each other often have keys that do.
uint64_t Priority(const Block* block) {
  uint64_t x = reinterpret_cast<uintptr_t>(block) >> 6;
  x *= 0xFF51AFD7ED558CCD;
  x ^= x >> 33;
  return x * 0xC4CEB9FE1A85EC53;
}

void InsertInto(Block** link, Block* block) {
  const uint64_t priority = Priority(block);
  while (*link != nullptr && Priority(*link) >= priority) {
    link = Less(block, *link) ? &(*link)->left : &(*link)->right;
  }
  // `block` takes this place; what was below is split into its two sides.
  Block* rest = *link;
  *link = block;
  Block** lower = &block->left;
  Block** upper = &block->right;
  while (rest != nullptr) {
    if (Less(rest, block)) {
      *lower = rest;
      lower = &rest->right;
      rest = rest->right;
    } else {
      *upper = rest;
      upper = &rest->left;
      rest = rest->left;
    }
  }
  *lower = nullptr;
  *upper = nullptr;
}

void EraseFrom(Block** link, const Block* block) {
  while (*link != block) link = Less(block, *link) ? &(*link)->left : &(*link)->right;
  Block* lower = block->left;
  Block* upper = block->right;
  while (lower != nullptr && upper != nullptr) {
    if (Priority(lower) >= Priority(upper)) {
      *link = lower;
      link = &lower->right;
      lower = lower->right;
    } else {
      *link = upper;
      link = &upper->left;
      upper = upper->left;
    }
  }
  *link = lower != nullptr ? lower : upper;
}

Block* Leftmost(Block* root) {
  while (root->left != nullptr) root = root->left;
  return root;
}

}  // namespace

// Sizes in units of 512 bytes. Row 0: one bin for each of 0 to 63 units. Row r: sizes of r + 6 bits, by the 6 bits
// that follow the highest.
FreeIndex::Bin FreeIndex::BinOf(uint64_t bytes) {
  const uint64_t units = bytes / kMinBlockBytes;
  if (units < 64) return {.row = 0, .column = static_cast<int>(units)};
  const int row = static_cast<int>(std::bit_width(units)) - 6;
  return {.row = row, .column = static_cast<int>((units >> (row - 1)) & 63)};
}

void FreeIndex::Insert(Block* block) {
  const Bin bin = BinOf(block->bytes);
  ++size_;
  if (bins_[bin.row] == nullptr) bins_[bin.row] = std::make_unique<Row>();
  Block*& root = (*bins_[bin.row])[bin.column];
  if (root != nullptr) {
    InsertInto(&root, block);
    return;
  }
  block->left = nullptr;
  block->right = nullptr;
  root = block;
  columns_[bin.row] |= uint64_t{1} << bin.column;
  rows_ |= uint64_t{1} << bin.row;
}

void FreeIndex::Erase(Block* block) {
  const Bin bin = BinOf(block->bytes);
  --size_;
  Block*& root = (*bins_[bin.row])[bin.column];
  EraseFrom(&root, block);
  if (root != nullptr) return;
  columns_[bin.row] &= ~(uint64_t{1} << bin.column);
  if (columns_[bin.row] == 0) rows_ &= ~(uint64_t{1} << bin.row);
}

Block* FreeIndex::FirstAtLeast(uint64_t bytes) const {
  const Bin bin = BinOf(bytes);
  const uint64_t columns = columns_[bin.row] >> bin.column;
  if ((columns & 1) != 0) {
    Block* found = nullptr;
    for (Block* block = (*bins_[bin.row])[bin.column]; block != nullptr;) {
      if (block->bytes < bytes) {
        block = block->right;
      } else {
        found = block;
        block = block->left;
      }
    }
    if (found != nullptr) return found;
  }
  // Every other bin that follows holds only larger blocks.
  if (const uint64_t rest = columns >> 1; rest != 0) {
    return Leftmost((*bins_[bin.row])[bin.column + 1 + std::countr_zero(rest)]);
  }
  const uint64_t rows = rows_ >> bin.row >> 1;
  if (rows == 0) return nullptr;
  const int row = bin.row + 1 + std::countr_zero(rows);
  return Leftmost((*bins_[row])[std::countr_zero(columns_[row])]);
}

bool FreeIndex::Contains(const Block* block) const {
  const Bin bin = BinOf(block->bytes);
  if (bins_[bin.row] == nullptr) return false;
  const Block* at = (*bins_[bin.row])[bin.column];
  while (at != nullptr && at != block) at = Less(block, at) ? at->left : at->right;
  return at == block;
}

std::vector<Block*> FreeIndex::InOrder() const {
  std::vector<Block*> blocks;
  blocks.reserve(size_);
  std::vector<Block*> above;  // whose left side is done or being walked
  for (const auto& row : bins_) {
    if (row == nullptr) continue;
    for (Block* at : *row) {
      while (at != nullptr || !above.empty()) {
        for (; at != nullptr; at = at->left) above.push_back(at);
        at = above.back();
        above.pop_back();
        blocks.push_back(at);
        at = at->right;
      }
    }
  }
  return blocks;
}

}  // namespace vrambroker
