// SPDX-License-Identifier: Apache-2.0
//
// DescriptorSocket: hands out file descriptors on vrambroker-fd.sock, because gRPC cannot carry descriptors. Sends
// descriptors in exchange for tickets, and with the answers to SegmentCalls. proto/README.md describes the protocol.
#ifndef VRAMBROKER_SERVER_RPC_DESCRIPTOR_SOCKET_H_
#define VRAMBROKER_SERVER_RPC_DESCRIPTOR_SOCKET_H_

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "server/base/event_loop.h"
#include "server/base/peer_queue.h"
#include "server/identity/caller.h"
#include "server/identity/unix_socket.h"
#include "server/pool/segment_pool.h"
#include "server/rpc/descriptor_budget.h"
#include "server/rpc/segment_calls.h"

namespace vrambroker {

// Call every method on the loop's thread, or before it runs, except the methods for claims.
class DescriptorSocket {
 public:
  // All arguments outlive this object.
  DescriptorSocket(EventLoop* loop, ProcessWatch* processes, std::vector<SegmentPool*> pools, const SegmentCalls* calls)
      : loop_(*loop), processes_(*processes), pools_(std::move(pools)), calls_(*calls) {}

  absl::Status Serve(const ClientSocket& listener);
  // Puts callers connecting to `listener` into the claim, until Unlisten(). Both functions may be called from any
  // thread.
  absl::Status Listen(const ClientSocket& listener, const ClaimOfListener& claim);
  void Unlisten(const ClientSocket& listener) { loop_.Unwatch(listener.get()); }
  void StopAccepting() { loop_.Unwatch(listener_); }
  // Shares `budget.descriptor_connections` places among users; call before Serve(). When the places are full, a new
  // connection replaces the longest silent connection of its user, or of the user with most connections: clients
  // reconnect on demand. So cooperating users cannot shut anybody out.
  void SetBudget(const DescriptorBudget& budget) {
    places_ = std::make_unique<PeerQueue>(budget.descriptor_connections, budget.descriptor_connections_per_uid);
  }
  // Drops connections that have been silent for a while.
  void Tick();

 private:
  struct Connection {
    ClientSocket socket;
    Caller caller;
    SteadyTime last_used;
    PeerQueue::EntryId place = 0;
    // A call is in progress. If the connection is dropped meanwhile, the answer cannot be sent, and the call's leases
    // are given back.
    std::shared_ptr<std::atomic<bool>> in_call = std::make_shared<std::atomic<bool>>(false);
  };

  void AcceptAll(int listener, const ClaimOfListener& claim);
  void OnReadable(int fd);
  // Answers a pending packet, now or when its call is done. False: drop the connection.
  bool AnswerPacket(const Connection& connection);
  void AnswerCall(const Connection& connection, const v1::SegmentCall& call);
  void AnswerTicket(const Connection& connection, const FdTicket& ticket);
  // Marks the connection as recently used.
  void Use(int fd, Connection& connection);
  void Drop(int fd);

  EventLoop& loop_;
  ProcessWatch& processes_;
  Acceptor acceptor_;
  const std::vector<SegmentPool*> pools_;
  const SegmentCalls& calls_;
  std::unique_ptr<PeerQueue> places_;
  int listener_ = -1;
  absl::flat_hash_map<int, Connection> connections_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_RPC_DESCRIPTOR_SOCKET_H_
