// SPDX-License-Identifier: Apache-2.0
//
// Connections: accepts on vrambroker.sock and hands the connections to gRPC, so that the caller of every RPC is known
// from the kernel. gRPC's own unix listener would tell neither pid nor uid, and would steal a live daemon's path.
// A connection ends with the process that made it, also when a child of it still has the socket: its streams end, and
// its user may open another one.
#ifndef VRAMBROKER_SERVER_CONNECTIONS_H_
#define VRAMBROKER_SERVER_CONNECTIONS_H_

#include <grpcpp/grpcpp.h>
#include <sys/types.h>

#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "allocator/mutex.h"
#include "server/event_loop.h"
#include "server/rate_limit.h"
#include "server/session.h"
#include "server/unix_socket.h"

namespace vrambroker {

// Safe to call from any thread.
class Connections {
 public:
  // Both outlive this object.
  Connections(EventLoop* loop, CallRates* rates) : loop_(*loop), rates_(*rates) {}

  // Accepts on `listener` from now on, at most `max_per_uid` connections of one user at a time, for `server`, which
  // outlives this object.
  absl::Status Serve(UniqueFd listener, grpc::Server* server, size_t max_per_uid);
  // Accepts no more.
  void StopAccepting();

  // Who makes the call. Unauthenticated when the connection is already gone, or the process that made it: a child that
  // inherited the connection must not speak for whoever gets its parent's pid next. ResourceExhausted when its user
  // calls too often; every handler asks once, and one whose work is that of several calls says of how many.
  absl::StatusOr<Caller> Identify(const grpc::CallbackServerContext& context, size_t calls = 1) const;
  CallRates& rates() const { return rates_; }

 private:
  struct Connection {
    Caller caller;
    int watched = -1;  // as in Watches
  };
  // What the loop watches of a connection.
  struct Watches {
    int connection = -1;  // our duplicate of the descriptor, on which the loop sees the end of the connection
    int process = -1;     // the caller's pidfd
  };

  absl::StatusOr<Caller> Peer(const grpc::CallbackServerContext& context) const;
  void AcceptAll();
  void Accept(UniqueFd fd);
  void Forget(int fd, const Watches& watches);
  // The process that made the connection has ended.
  void HangUp(int fd, const Watches& watches, pid_t pid);

  EventLoop& loop_;
  CallRates& rates_;
  Acceptor acceptor_;
  grpc::Server* server_ = nullptr;
  int listener_ = -1;
  size_t max_per_uid_ = 0;

  mutable Mutex mu_;
  absl::flat_hash_map<int, Connection> by_fd_ ABSL_GUARDED_BY(mu_);  // by gRPC's descriptor number
  absl::flat_hash_map<uid_t, size_t> of_uid_ ABSL_GUARDED_BY(mu_);
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CONNECTIONS_H_
