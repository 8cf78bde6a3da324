// SPDX-License-Identifier: Apache-2.0
//
// PageTurns: decides whose costly page is made now and whose waits. Peers take turns, however many pages a peer
// requests.
#ifndef VRAMBROKER_SERVER_HTTP_PAGE_TURNS_H_
#define VRAMBROKER_SERVER_HTTP_PAGE_TURNS_H_

#include <cstddef>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <string>

namespace vrambroker {

// Makes a fixed number of pages at a time, at most half of them for a single peer. Further pages wait, and peers take
// turns. A peer goes to the end of the queue when a page of the peer is begun, and when a page is done. So a new peer
// waits for a free place, and then for at most one page of each peer ahead. Not thread-safe.
class PageTurns {
 public:
  struct Page {
    std::function<void()> make;    // calls Done() when the page is made
    std::function<void()> refuse;  // called instead when too many pages wait
  };

  // REQUIRES: both arguments are positive.
  PageTurns(size_t at_a_time, size_t max_waiting);

  // Calls either function, now or later. Refuses a peer already waiting with a quarter of max_waiting pages. When too
  // many pages wait in all, refuses the newest page of the peer with most waiting pages.
  void Add(const std::string& peer, Page page);
  // A page of the peer is made, so another page may begin.
  void Done(const std::string& peer);

 private:
  struct Peer {
    size_t being_made = 0;
    std::deque<Page> waiting;
  };
  using Peers = std::map<std::string, Peer>;

  void MakeWhatMayBe();
  // REQUIRES: the peer has a waiting page. Takes the peer's newest waiting page.
  Page TakeNewest(Peers::iterator peer);
  void ForgetIfIdle(Peers::iterator peer);

  const size_t at_a_time_;
  const size_t of_a_peer_;
  const size_t max_waiting_;
  size_t being_made_ = 0;
  size_t waiting_ = 0;
  Peers peers_;                   // with a page being made or waiting
  std::list<std::string> turns_;  // peers with a waiting page; the front is next
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_HTTP_PAGE_TURNS_H_
