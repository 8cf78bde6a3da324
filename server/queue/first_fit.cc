// SPDX-License-Identifier: Apache-2.0
#include "server/queue/first_fit.h"

#include <algorithm>

namespace vrambroker {

struct FirstFit::Node {
  Place place;
  uint64_t bytes = 0;
  uint64_t least_bytes = 0;  // least `bytes` of the subtree
  uint32_t rank = 0;         // highest at the root of a tree
  NodePtr left{};
  NodePtr right{};
};

FirstFit::FirstFit(std::minstd_rand* random) : random_(random) {}
FirstFit::~FirstFit() = default;
FirstFit::FirstFit(FirstFit&&) noexcept = default;
FirstFit& FirstFit::operator=(FirstFit&&) noexcept = default;

void FirstFit::Update(Node& node) {
  node.least_bytes = node.bytes;
  for (const Node* child : {node.left.get(), node.right.get()}) {
    if (child != nullptr) node.least_bytes = std::min(node.least_bytes, child->least_bytes);
  }
}

std::pair<FirstFit::NodePtr, FirstFit::NodePtr> FirstFit::Split(NodePtr node, const Place& place) {
  if (node == nullptr) return {};
  if (node->place < place) {
    auto [left, right] = Split(std::move(node->right), place);
    node->right = std::move(left);
    Update(*node);
    return {std::move(node), std::move(right)};
  }
  auto [left, right] = Split(std::move(node->left), place);
  node->left = std::move(right);
  Update(*node);
  return {std::move(left), std::move(node)};
}

FirstFit::NodePtr FirstFit::Merge(NodePtr left, NodePtr right) {
  if (left == nullptr) return right;
  if (right == nullptr) return left;
  if (left->rank > right->rank) {
    left->right = Merge(std::move(left->right), std::move(right));
    Update(*left);
    return left;
  }
  right->left = Merge(std::move(left), std::move(right->left));
  Update(*right);
  return right;
}

void FirstFit::Insert(const Place& place, uint64_t bytes) {
  auto node = std::make_unique<Node>(
      Node{.place = place, .bytes = bytes, .least_bytes = bytes, .rank = static_cast<uint32_t>((*random_)())});
  auto [left, right] = Split(std::move(root_), place);
  root_ = Merge(Merge(std::move(left), std::move(node)), std::move(right));
}

void FirstFit::Erase(NodePtr& node, const Place& place) {
  if (node->place == place) {
    node = Merge(std::move(node->left), std::move(node->right));
    return;
  }
  Erase(place < node->place ? node->left : node->right, place);
  Update(*node);
}

void FirstFit::Erase(const Place& place) {
  Erase(root_, place);
}

std::optional<Place> FirstFit::First(uint64_t bytes) const {
  const Node* node = root_.get();
  if (node == nullptr || node->least_bytes > bytes) return std::nullopt;
  // The subtree of `node` always contains a match.
  while (true) {
    if (node->left != nullptr && node->left->least_bytes <= bytes) {
      node = node->left.get();
    } else if (node->bytes <= bytes) {
      return node->place;
    } else {
      node = node->right.get();
    }
  }
}

}  // namespace vrambroker
