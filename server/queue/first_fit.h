// SPDX-License-Identifier: Apache-2.0
//
// FirstFit: requests in the order in which they are served, and what each needs. Finds the first that needs no more
// than there is.
#ifndef VRAMBROKER_SERVER_QUEUE_FIRST_FIT_H_
#define VRAMBROKER_SERVER_QUEUE_FIRST_FIT_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <utility>

namespace vrambroker {

// Minus the priority, then the arrival, which is a request's own.
using Place = std::pair<int, uint64_t>;

// A treap (Aragon and Seidel, "Randomized Search Trees", 1989) whose nodes know the least that is needed below them. A
// call takes O(log n) expected time, even when clients choose the places to slow it down. Not thread-safe.
class FirstFit {
 public:
  // `random` outlives it. It is to be such that nobody can choose places by what it will say.
  explicit FirstFit(std::minstd_rand* random);
  ~FirstFit();
  FirstFit(FirstFit&&) noexcept;
  FirstFit& operator=(FirstFit&&) noexcept;

  bool empty() const { return root_ == nullptr; }
  // REQUIRES: `place` is not here.
  void Insert(const Place& place, uint64_t bytes);
  // REQUIRES: `place` is here.
  void Erase(const Place& place);
  // The first that needs at most `bytes`; nullopt when there is none.
  std::optional<Place> First(uint64_t bytes) const;

 private:
  struct Node;
  using NodePtr = std::unique_ptr<Node>;

  static void Update(Node& node);
  // All before `place`, and the others.
  static std::pair<NodePtr, NodePtr> Split(NodePtr node, const Place& place);
  // REQUIRES: all of `left` come before all of `right`.
  static NodePtr Merge(NodePtr left, NodePtr right);
  static void Erase(NodePtr& node, const Place& place);

  std::minstd_rand* random_;
  NodePtr root_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_QUEUE_FIRST_FIT_H_
