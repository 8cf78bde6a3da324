// SPDX-License-Identifier: Apache-2.0
#include "server/peer_queue.h"

#include <algorithm>
#include <utility>

namespace vrambroker {

PeerQueue::Ticket PeerQueue::Add(const std::string& peer, std::function<void()> drop) {
  if (const auto it = of_peer_.find(peer); it != of_peer_.end() && it->second.size() >= max_per_peer_) {
    Drop(*it->second.begin());
  } else if (waiting_.size() >= max_in_all_) {
    DropOne();
  }
  const Ticket ticket = ++last_;
  waiting_.emplace(ticket, Waiting{.peer = peer, .drop = std::move(drop)});
  of_peer_[peer].insert(ticket);
  return ticket;
}

void PeerQueue::Remove(Ticket ticket) {
  const auto it = waiting_.find(ticket);
  if (it == waiting_.end()) return;
  const auto peer = of_peer_.find(it->second.peer);
  peer->second.erase(ticket);
  if (peer->second.empty()) of_peer_.erase(peer);
  waiting_.erase(it);
}

bool PeerQueue::DropOne() {
  const auto most = std::max_element(of_peer_.begin(), of_peer_.end(),
                                     [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
  if (most == of_peer_.end()) return false;
  Drop(*most->second.begin());
  return true;
}

void PeerQueue::Drop(Ticket ticket) {
  const std::function<void()> drop = std::move(waiting_.at(ticket).drop);
  Remove(ticket);
  drop();
}

}  // namespace vrambroker
