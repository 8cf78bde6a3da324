// SPDX-License-Identifier: Apache-2.0
//
// DescriptorSocket: hands out file descriptors for tickets on vrambroker-fd.sock, because gRPC cannot carry them.
// The protocol is described in proto/README.md.
#ifndef VRAMBROKER_SERVER_DESCRIPTOR_SOCKET_H_
#define VRAMBROKER_SERVER_DESCRIPTOR_SOCKET_H_

#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "server/descriptor_budget.h"
#include "server/event_loop.h"
#include "server/segment_pool.h"
#include "server/session.h"
#include "server/unix_socket.h"

namespace vrambroker {

// All calls on the loop's thread, or before it runs.
class DescriptorSocket {
 public:
  // All outlive this object.
  DescriptorSocket(EventLoop* loop, std::vector<SegmentPool*> pools) : loop_(*loop), pools_(std::move(pools)) {}

  absl::Status Serve(UniqueFd listener);
  void StopAccepting() { loop_.Unwatch(listener_); }
  // How many connections it keeps; before Serve(). One more, and the user's longest silent one is dropped, or that of
  // the user who has most: clients connect again when they need to.
  void SetBudget(const DescriptorBudget& budget) { budget_ = budget; }
  // Drops connections that were silent for a while.
  void Tick();

 private:
  struct Connection {
    Caller caller;
    SteadyTime last_used;
  };

  void AcceptAll();
  void Answer(int fd);
  void Drop(int fd);
  // Makes room for one more of `uid`.
  void MakeRoom(uid_t uid);

  EventLoop& loop_;
  Acceptor acceptor_;
  const std::vector<SegmentPool*> pools_;
  DescriptorBudget budget_ = DescriptorBudget::Of(1024, 0);
  int listener_ = -1;
  absl::flat_hash_map<int, Connection> connections_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_DESCRIPTOR_SOCKET_H_
