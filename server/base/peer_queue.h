// SPDX-License-Identifier: Apache-2.0
//
// PeerQueue: a bounded number of waiting entries, shared fairly between peers. The peer waiting longest goes first.
#ifndef VRAMBROKER_SERVER_BASE_PEER_QUEUE_H_
#define VRAMBROKER_SERVER_BASE_PEER_QUEUE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>

namespace vrambroker {

// Not thread-safe.
class PeerQueue {
 public:
  using EntryId = uint64_t;  // later ids are greater; 0 is none

  // REQUIRES: both are above 0.
  PeerQueue(size_t max_in_all, size_t max_per_peer) : max_in_all_(max_in_all), max_per_peer_(max_per_peer) {}

  // Adds an entry. `drop` is called when the entry has to make room. If the peer has its share, the peer's oldest entry
  // makes room. If the queue is full, the oldest entry of the peer with most entries makes room; among several such
  // peers, the peer waiting longest. An entry may count as several, `weight` of them: at most as many as a peer may
  // have.
  EntryId Add(const std::string& peer, std::function<void()> drop, size_t weight = 1);
  // Makes the entry the newest. Returns its new id; 0: the entry has gone already.
  EntryId Renew(EntryId id);
  // Does nothing if the entry has gone already.
  void Remove(EntryId ticket);
  // Drops the oldest entry of the peer with most entries. False: the queue is empty.
  bool DropOne();

  size_t size() const { return waiting_.size(); }

 private:
  struct Waiting {
    std::string peer;
    std::function<void()> drop;
    size_t weight = 0;
  };
  struct OfPeer {
    std::set<EntryId> tickets;
    size_t weight = 0;
  };

  void Drop(EntryId ticket);

  const size_t max_in_all_;
  const size_t max_per_peer_;
  EntryId last_ = 0;
  size_t weight_ = 0;
  std::map<EntryId, Waiting> waiting_;
  std::map<std::string, OfPeer> of_peer_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_BASE_PEER_QUEUE_H_
