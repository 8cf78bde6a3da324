// SPDX-License-Identifier: Apache-2.0
//
// CountSocket: serves vram-count.sock, on which programs have the broker count memory allocated from the driver
// directly. proto/README.md describes the protocol.
#ifndef VRAMBROKER_SERVER_RPC_COUNT_SOCKET_H_
#define VRAMBROKER_SERVER_RPC_COUNT_SOCKET_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "allocator/base/mutex.h"
#include "server/base/event_loop.h"
#include "server/identity/caller.h"
#include "server/identity/process_info.h"
#include "server/identity/unix_socket.h"
#include "server/rpc/count_calls.h"
#include "server/rpc/descriptor_budget.h"
#include "server/sessions/session.h"

namespace vrambroker {

// Call every method on the loop's thread, or before it runs, except the methods for claims.
class CountSocket {
 public:
  // All arguments outlive this object.
  CountSocket(EventLoop* loop, ProcessWatch* processes, Broker* broker, const CountCalls* calls)
      : loop_(*loop), processes_(*processes), broker_(*broker), calls_(*calls) {}

  absl::Status Serve(const ClientSocket& listener, const DescriptorBudget& budget);
  // Puts callers connecting to `listener` into the claim, until Unlisten(). Both functions may be called from any
  // thread.
  absl::Status Listen(const ClientSocket& listener, const ClaimOfListener& claim);
  void Unlisten(const ClientSocket& listener) { loop_.Unwatch(listener.get()); }
  void StopAccepting() { loop_.Unwatch(listener_); }
  // Drops connections that never said hello, and connections of closed sessions.
  void Tick();

 private:
  // Part of a connection used by answers from other threads. Outlives the Connection.
  class Line;
  struct Connection {
    ClientSocket socket;
    Caller caller;
    std::optional<ProcessImage> image;
    SteadyTime opened;
    std::shared_ptr<Line> line;
  };

  // A session whose connection has ended, and the program run by its process when the connection began.
  struct Lost {
    SessionPtr session;
    std::optional<ProcessImage> image;
  };

  void AcceptAll(int listener, const ClaimOfListener& claim);
  // ResourceExhausted when the user has too many connections, or all users together.
  absl::Status CheckRoom(const Caller& caller) const;
  void OnReadable(int fd);
  // False: the connection is to be dropped.
  bool ReadPacket(Connection& connection);
  void Hello(const Connection& connection, const CountRequest& request);
  void Join(const Connection& connection, const CountRequest& request);
  void Drop(int fd);
  // Loses the sessions of the process's main connections that are already closed. Skips connection `asking`, which is
  // in use.
  void FindLost(const Caller& caller, int asking);
  void Lose(const Lost& lost);

  EventLoop& loop_;
  ProcessWatch& processes_;
  Broker& broker_;
  const CountCalls& calls_;
  Acceptor acceptor_;
  DescriptorBudget budget_;
  int listener_ = -1;
  uint64_t last_key_ = 0;  // of a connection, for cancelling its waiting request
  absl::flat_hash_map<int, Connection> connections_;
  absl::flat_hash_map<UserKey, size_t> of_user_;
  absl::flat_hash_map<pid_t, absl::flat_hash_set<int>> greeted_;  // connections that have said HELLO, by process
  std::vector<Lost> lost_;                                        // their processes may have ended, too
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_RPC_COUNT_SOCKET_H_
