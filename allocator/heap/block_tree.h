// SPDX-License-Identifier: Apache-2.0
//
// BlockTree: blocks ordered by (size, address), in a B+ tree.
//
// Nodes hold the keys, so a search touches no block: in a large heap each touched record is a cache miss. A half-empty
// node is not joined with its neighbour, and only an empty node is removed: free blocks come and go too fast for
// joining to pay.
#ifndef VRAMBROKER_ALLOCATOR_HEAP_BLOCK_TREE_H_
#define VRAMBROKER_ALLOCATOR_HEAP_BLOCK_TREE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "allocator/heap/block.h"

namespace vrambroker {

// Not thread-safe. Nodes belong to a store shared by several trees.
class BlockTree {
 public:
  struct Key {
    uint64_t bytes = 0;
    uint64_t address = 0;
  };
  struct Node;

  class NodeStore {
   public:
    NodeStore();
    ~NodeStore();
    Node* New(bool is_leaf);
    void Recycle(Node* node) { spare_.push_back(node); }
    uint64_t MemoryBytes() const;

   private:
    std::vector<std::unique_ptr<Node>> nodes_;
    std::vector<Node*> spare_;
  };

  bool empty() const { return root_ == nullptr; }
  // REQUIRES: `block` is not in the tree, and keeps its size while there.
  void Insert(Block* block, NodeStore& store);
  // REQUIRES: `block` is in the tree.
  void Erase(const Block* block, NodeStore& store);

  // The first block. REQUIRES: !empty().
  Block* First() const;
  // The last block. REQUIRES: !empty().
  Block* Last() const;
  // The first block at or after `key`, or nullptr. REQUIRES: !empty().
  Block* FirstFrom(const Key& key) const;
  // Adds all blocks in order.
  void AppendTo(std::vector<Block*>* blocks) const;

 private:
  Node* root_ = nullptr;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_HEAP_BLOCK_TREE_H_
