// SPDX-License-Identifier: Apache-2.0
//
// FirstFit: requests in serving order, each with the bytes it needs. Finds the first request needing no more than is
// free.
#ifndef VRAMBROKER_SERVER_QUEUE_FIRST_FIT_H_
#define VRAMBROKER_SERVER_QUEUE_FIRST_FIT_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <utility>

namespace vrambroker {

// Negated priority, then the arrival, unique per request.
using Place = std::pair<int, uint64_t>;

// A treap (Aragon and Seidel, "Randomized Search Trees", 1989); each node knows the least need of its subtree. A call
// takes O(log n) expected time, even when clients choose places to slow the search down. Not thread-safe.
class FirstFit {
 public:
  // `random` outlives the object and must be unpredictable to clients.
  explicit FirstFit(std::minstd_rand* random);
  ~FirstFit();
  FirstFit(FirstFit&&) noexcept;
  FirstFit& operator=(FirstFit&&) noexcept;

  bool empty() const { return root_ == nullptr; }
  // REQUIRES: `place` is not here.
  void Insert(const Place& place, uint64_t bytes);
  // REQUIRES: `place` is here.
  void Erase(const Place& place);
  // Returns the first request needing at most `bytes`; nullopt when there is none.
  std::optional<Place> First(uint64_t bytes) const;

 private:
  struct Node;
  using NodePtr = std::unique_ptr<Node>;

  static void Update(Node& node);
  // Returns the nodes before `place`, and the rest.
  static std::pair<NodePtr, NodePtr> Split(NodePtr node, const Place& place);
  // REQUIRES: all of `left` come before all of `right`.
  static NodePtr Merge(NodePtr left, NodePtr right);
  static void Erase(NodePtr& node, const Place& place);

  std::minstd_rand* random_;
  NodePtr root_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_QUEUE_FIRST_FIT_H_
