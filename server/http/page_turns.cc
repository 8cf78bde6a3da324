// SPDX-License-Identifier: Apache-2.0
#include "server/http/page_turns.h"

#include <algorithm>
#include <utility>

namespace vrambroker {

PageTurns::PageTurns(size_t at_a_time, size_t max_waiting)
    : at_a_time_(at_a_time), of_a_peer_(std::max<size_t>(1, at_a_time / 2)), max_waiting_(max_waiting) {}

void PageTurns::Add(const std::string& name, Page page) {
  const auto peer = peers_.try_emplace(name).first;
  if (peer->second.waiting.size() >= std::max<size_t>(1, max_waiting_ / 4)) return page.refuse();
  if (peer->second.waiting.empty()) turns_.push_back(name);
  peer->second.waiting.push_back(std::move(page));
  ++waiting_;
  MakeWhatMayBe();
  if (waiting_ <= max_waiting_) return;
  const auto most = std::max_element(peers_.begin(), peers_.end(), [](const auto& a, const auto& b) {
    return a.second.waiting.size() < b.second.waiting.size();
  });
  TakeNewest(most).refuse();
}

void PageTurns::Done(const std::string& name) {
  const auto peer = peers_.find(name);
  --peer->second.being_made;
  --being_made_;
  // Peers that arrived while the page was made go first.
  if (!peer->second.waiting.empty()) turns_.splice(turns_.end(), turns_, std::find(turns_.begin(), turns_.end(), name));
  ForgetIfIdle(peer);
  MakeWhatMayBe();
}

void PageTurns::MakeWhatMayBe() {
  while (being_made_ < at_a_time_) {
    const auto turn = std::find_if(turns_.begin(), turns_.end(),
                                   [&](const std::string& name) { return peers_.at(name).being_made < of_a_peer_; });
    if (turn == turns_.end()) return;
    Peer& peer = peers_.at(*turn);
    const Page page = std::move(peer.waiting.front());
    peer.waiting.pop_front();
    --waiting_;
    ++peer.being_made;
    ++being_made_;
    if (peer.waiting.empty()) {
      turns_.erase(turn);
    } else {
      turns_.splice(turns_.end(), turns_, turn);
    }
    page.make();  // last, because make() may call Done()
  }
}

PageTurns::Page PageTurns::TakeNewest(Peers::iterator peer) {
  Page page = std::move(peer->second.waiting.back());
  peer->second.waiting.pop_back();
  --waiting_;
  if (peer->second.waiting.empty()) turns_.remove(peer->first);
  ForgetIfIdle(peer);
  return page;
}

void PageTurns::ForgetIfIdle(Peers::iterator peer) {
  if (peer->second.being_made == 0 && peer->second.waiting.empty()) peers_.erase(peer);
}

}  // namespace vrambroker
