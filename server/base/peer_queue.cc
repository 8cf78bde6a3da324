// SPDX-License-Identifier: Apache-2.0
#include "server/base/peer_queue.h"

#include <algorithm>
#include <utility>

namespace vrambroker {

PeerQueue::EntryId PeerQueue::Add(const std::string& peer, std::function<void()> drop, size_t weight) {
  weight = std::min(weight, max_per_peer_);
  for (auto it = of_peer_.find(peer); it != of_peer_.end() && it->second.weight + weight > max_per_peer_;
       it = of_peer_.find(peer)) {
    Drop(*it->second.tickets.begin());
  }
  while (weight_ + weight > max_in_all_ && DropOne()) continue;
  const EntryId ticket = ++last_;
  waiting_.emplace(ticket, Waiting{.peer = peer, .drop = std::move(drop), .weight = weight});
  OfPeer& of_peer = of_peer_[peer];
  of_peer.tickets.insert(ticket);
  of_peer.weight += weight;
  weight_ += weight;
  return ticket;
}

PeerQueue::EntryId PeerQueue::Renew(EntryId id) {
  auto entry = waiting_.extract(id);  // nodes are kept: extract() allocates nothing
  if (entry.empty()) return 0;
  std::set<EntryId>& of_peer = of_peer_.at(entry.mapped().peer).tickets;
  auto own = of_peer.extract(id);
  entry.key() = own.value() = ++last_;
  of_peer.insert(std::move(own));
  waiting_.insert(std::move(entry));
  return last_;
}

void PeerQueue::Remove(EntryId ticket) {
  const auto it = waiting_.find(ticket);
  if (it == waiting_.end()) return;
  const auto peer = of_peer_.find(it->second.peer);
  peer->second.tickets.erase(ticket);
  peer->second.weight -= it->second.weight;
  weight_ -= it->second.weight;
  if (peer->second.tickets.empty()) of_peer_.erase(peer);
  waiting_.erase(it);
}

bool PeerQueue::DropOne() {
  const auto most = std::max_element(of_peer_.begin(), of_peer_.end(), [](const auto& a, const auto& b) {
    if (a.second.weight != b.second.weight) return a.second.weight < b.second.weight;
    return *a.second.tickets.begin() > *b.second.tickets.begin();
  });
  if (most == of_peer_.end()) return false;
  Drop(*most->second.tickets.begin());
  return true;
}

void PeerQueue::Drop(EntryId ticket) {
  const std::function<void()> drop = std::move(waiting_.at(ticket).drop);
  Remove(ticket);
  drop();
}

}  // namespace vrambroker
