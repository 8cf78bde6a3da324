// SPDX-License-Identifier: Apache-2.0
#include "allocator/heap/block_tree.h"

#include <algorithm>
#include <array>

namespace vrambroker {
namespace {

constexpr int kEntries = 30;  // with 14, trees of a million blocks are a third slower

}  // namespace

struct BlockTree::Node {
  // In a leaf: a block and its key. Above: a child node and a separator. Keys in the child are at or after the
  // separator, keys in the nodes to the left before it. The first separator means nothing: the first child takes all
  // keys before the second separator.
  struct Entry {
    Key key;
    union {
      Block* block = nullptr;
      Node* node;
    };
  };

  bool is_leaf = true;
  int count = 0;
  std::array<Entry, kEntries> entries;
};

namespace {

using Key = BlockTree::Key;
using Node = BlockTree::Node;
using NodeStore = BlockTree::NodeStore;

// Compares without branches: branches would be mispredicted.
bool Less(const Key& a, const Key& b) {
  return (a.bytes < b.bytes) | ((a.bytes == b.bytes) & (a.address < b.address));
}

// Counts the entries of a leaf before `key`.
int CountBefore(const Node& leaf, const Key& key) {
  int at = 0;
  while (at < leaf.count && Less(leaf.entries[at].key, key)) ++at;
  return at;
}

// Index of the child for `key`.
int ChildFor(const Node& node, const Key& key) {
  int at = 0;
  while (at + 1 < node.count && !Less(key, node.entries[at + 1].key)) ++at;
  return at;
}

void InsertAt(Node* node, int at, const Node::Entry& entry) {
  for (int i = node->count; i > at; --i) node->entries[i] = node->entries[i - 1];
  node->entries[at] = entry;
  ++node->count;
}

void EraseAt(Node* node, int at) {
  --node->count;
  for (int i = at; i < node->count; ++i) node->entries[i] = node->entries[i + 1];
}

// Returns the entry for `node` in the parent node.
Node::Entry EntryFor(Node* node) {
  return {.key = node->entries[0].key, .node = node};
}

// Inserts `entry` below `node`. A full `node` is split: the upper half moves to a new node, returned for the parent.
Node* InsertBelow(Node* node, const Node::Entry& entry, NodeStore& store) {
  Node::Entry added = entry;
  int at = 0;
  if (node->is_leaf) {
    at = CountBefore(*node, entry.key);
  } else {
    const int child = ChildFor(*node, entry.key);
    Node* upper = InsertBelow(node->entries[child].node, entry, store);
    if (upper == nullptr) return nullptr;
    added = EntryFor(upper);
    at = child + 1;
  }
  if (node->count < kEntries) {
    InsertAt(node, at, added);
    return nullptr;
  }
  constexpr int kHalf = kEntries / 2;
  Node* upper = store.New(node->is_leaf);
  std::copy(node->entries.begin() + kHalf, node->entries.end(), upper->entries.begin());
  upper->count = kEntries - kHalf;
  node->count = kHalf;
  if (at <= kHalf) {
    InsertAt(node, at, added);
  } else {
    InsertAt(upper, at - kHalf, added);
  }
  return upper;
}

void EraseBelow(Node* node, const Key& key, NodeStore& store) {
  if (node->is_leaf) {
    EraseAt(node, CountBefore(*node, key));
    return;
  }
  const int at = ChildFor(*node, key);
  Node* child = node->entries[at].node;
  EraseBelow(child, key, store);
  if (child->count > 0) return;
  store.Recycle(child);
  EraseAt(node, at);
}

Block* FirstBelow(const Node* node) {
  while (!node->is_leaf) node = node->entries[0].node;
  return node->entries[0].block;
}

void AppendBelow(const Node& node, std::vector<Block*>* blocks) {
  for (int i = 0; i < node.count; ++i) {
    if (node.is_leaf) {
      blocks->push_back(node.entries[i].block);
    } else {
      AppendBelow(*node.entries[i].node, blocks);
    }
  }
}

}  // namespace

BlockTree::NodeStore::NodeStore() = default;
BlockTree::NodeStore::~NodeStore() = default;

BlockTree::Node* BlockTree::NodeStore::New(bool is_leaf) {
  if (spare_.empty()) {
    nodes_.push_back(std::make_unique<Node>());
    spare_.push_back(nodes_.back().get());
  }
  Node* node = spare_.back();
  spare_.pop_back();
  node->is_leaf = is_leaf;
  node->count = 0;
  return node;
}

uint64_t BlockTree::NodeStore::MemoryBytes() const {
  return nodes_.size() * sizeof(Node);
}

void BlockTree::Insert(Block* block, NodeStore& store) {
  if (root_ == nullptr) root_ = store.New(/*is_leaf=*/true);
  Node* upper = InsertBelow(root_, {.key = {block->bytes, block->address}, .block = block}, store);
  if (upper == nullptr) return;
  Node* lower = root_;
  root_ = store.New(/*is_leaf=*/false);
  InsertAt(root_, 0, EntryFor(lower));
  InsertAt(root_, 1, EntryFor(upper));
}

void BlockTree::Erase(const Block* block, NodeStore& store) {
  EraseBelow(root_, {block->bytes, block->address}, store);
  while (!root_->is_leaf && root_->count == 1) {
    Node* child = root_->entries[0].node;
    store.Recycle(root_);
    root_ = child;
  }
  if (root_->count > 0) return;
  store.Recycle(root_);
  root_ = nullptr;
}

Block* BlockTree::First() const {
  return FirstBelow(root_);
}

Block* BlockTree::Last() const {
  const Node* node = root_;
  while (!node->is_leaf) node = node->entries[node->count - 1].node;
  return node->entries[node->count - 1].block;
}

Block* BlockTree::FirstFrom(const Key& key) const {
  const Node* node = root_;
  const Node* after = nullptr;  // subtree right after `node`
  while (!node->is_leaf) {
    const int at = ChildFor(*node, key);
    if (at + 1 < node->count) after = node->entries[at + 1].node;
    node = node->entries[at].node;
  }
  if (const int at = CountBefore(*node, key); at < node->count) return node->entries[at].block;
  return after == nullptr ? nullptr : FirstBelow(after);
}

void BlockTree::AppendTo(std::vector<Block*>* blocks) const {
  if (root_ != nullptr) AppendBelow(*root_, blocks);
}

}  // namespace vrambroker
