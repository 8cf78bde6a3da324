// SPDX-License-Identifier: Apache-2.0
//
// PeerQueue: what may wait, a bounded number of it, shared fairly between peers. The peer that has waited longest goes
// first.
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
  using EntryId = uint64_t;  // later ones are greater; 0 is none

  // REQUIRES: neither is 0.
  PeerQueue(size_t max_in_all, size_t max_per_peer) : max_in_all_(max_in_all), max_per_peer_(max_per_peer) {}

  // Adds one, whose `drop` is called when it has to make room. Of a peer that has its share, the oldest makes room. If
  // there are too many in all, it is the oldest of the peer that has most; of several such peers, of the one that waits
  // longest. One may count as several, `weight` of them: at most as many as a peer may have.
  EntryId Add(const std::string& peer, std::function<void()> drop, size_t weight = 1);
  // Makes it the newest. Returns its new id; 0: it has gone already.
  EntryId Renew(EntryId id);
  // Does nothing if it has gone already.
  void Remove(EntryId ticket);
  // The oldest of the peer that has most. False: there is none.
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
