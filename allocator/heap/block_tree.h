// SPDX-License-Identifier: Apache-2.0
//
// BlockTree: blocks ordered by (size, address), in a B+ tree.
//
// Its nodes hold the keys, so that a search touches no block: in a large heap every record that is touched is a cache
// miss. A node is not joined with its neighbour when it gets half empty, only removed when it gets empty: free blocks
// come and go too fast for the joining to pay.
#ifndef VRAMBROKER_ALLOCATOR_HEAP_BLOCK_TREE_H_
#define VRAMBROKER_ALLOCATOR_HEAP_BLOCK_TREE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "allocator/heap/block.h"

namespace vrambroker {

// Not thread-safe. Nodes belong to a store, which several trees share.
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
  // REQUIRES: `block` is not in the tree, and its size does not change while it is.
  void Insert(Block* block, NodeStore& store);
  // REQUIRES: `block` is in the tree.
  void Erase(const Block* block, NodeStore& store);

  // The first block. REQUIRES: !empty().
  Block* First() const;
  // The last block. REQUIRES: !empty().
  Block* Last() const;
  // The first block that is not before `key`, or nullptr. REQUIRES: !empty().
  Block* FirstFrom(const Key& key) const;
  // Adds all blocks in order.
  void AppendTo(std::vector<Block*>* blocks) const;

 private:
  Node* root_ = nullptr;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_HEAP_BLOCK_TREE_H_
