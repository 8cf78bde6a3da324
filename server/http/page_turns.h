// SPDX-License-Identifier: Apache-2.0
//
// PageTurns: who may have a costly page made now, and who waits. Peers take turns, however much one of them asks for.
#ifndef VRAMBROKER_SERVER_HTTP_PAGE_TURNS_H_
#define VRAMBROKER_SERVER_HTTP_PAGE_TURNS_H_

#include <cstddef>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <string>

namespace vrambroker {

// A fixed number of pages are made at a time, at most half of them for one peer. The others wait, and peers take turns.
// A peer goes to the end of the queue when one of its pages is begun, and when one is made. So a peer that asks for the
// first time waits for a free place, and then for at most one page of each peer ahead of it. Not thread-safe.
class PageTurns {
 public:
  struct Page {
    std::function<void()> make;    // calls Done() once it is made
    std::function<void()> refuse;  // instead: too many wait
  };

  // REQUIRES: neither is 0.
  PageTurns(size_t at_a_time, size_t max_waiting);

  // Calls one of the two functions, now or later. A peer whose share of the waiting ones, a quarter, is taken is
  // refused. When too many wait in all, the newest of the peer with most of them is.
  void Add(const std::string& peer, Page page);
  // A page of the peer is made, so another one may be.
  void Done(const std::string& peer);

 private:
  struct Peer {
    size_t being_made = 0;
    std::deque<Page> waiting;
  };
  using Peers = std::map<std::string, Peer>;

  void MakeWhatMayBe();
  // REQUIRES: the peer has a waiting page. Takes its newest one.
  Page TakeNewest(Peers::iterator peer);
  void ForgetIfIdle(Peers::iterator peer);

  const size_t at_a_time_;
  const size_t of_a_peer_;
  const size_t max_waiting_;
  size_t being_made_ = 0;
  size_t waiting_ = 0;
  Peers peers_;                   // that have a page being made or waiting
  std::list<std::string> turns_;  // the peers that have a page waiting; the first one is next
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_HTTP_PAGE_TURNS_H_
