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

#include <chrono>
#include <memory>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "allocator/mutex.h"
#include "server/client_log.h"
#include "server/descriptor_budget.h"
#include "server/event_loop.h"
#include "server/hand_over.h"
#include "server/rate_limit.h"
#include "server/reset_guard.h"
#include "server/session.h"
#include "server/unix_socket.h"

namespace vrambroker {

// Safe to call from any thread.
class Connections {
 public:
  // Both outlive this object.
  Connections(EventLoop* loop, CallRates* rates) : loop_(*loop), rates_(*rates) {}

  // Accepts on `listener` from now on, as many connections as `budget` allows, for `server`, which outlives this
  // object.
  absl::Status Serve(UniqueFd listener, grpc::Server* server, const DescriptorBudget& budget);
  // Accepts no more.
  void StopAccepting();
  // Returns when gRPC has every connection. REQUIRES: the server was told to shut down.
  void Stop() { handing_over_.reset(); }
  // (loop) Closes connections that reset streams instead of completing them, or hold too many open, and refuses their
  // processes for a while. True when it closed some: what gRPC kept for them can go back to the system.
  bool CloseAttackers();

  // Who makes the call. Unauthenticated when the connection is already gone, or the process that made it: a child that
  // inherited the connection must not speak for whoever gets its parent's pid next. ResourceExhausted when its user
  // calls too often; every handler asks once, and one whose work is that of several calls says of how many.
  absl::StatusOr<Caller> Identify(const grpc::CallbackServerContext& context, size_t calls = 1) const;
  CallRates& rates() const { return rates_; }

 private:
  // What the loop knows of a connection that gRPC serves.
  struct Watched {
    Caller caller;
    int fd = -1;         // gRPC's
    intptr_t books = 0;  // see StreamBooks; 0: not known yet
    std::unique_ptr<StreamConduct> conduct;
  };
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
  // ResourceExhausted when the user has too many connections, or all users together.
  absl::Status CheckRoom(uid_t uid) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Accept(UniqueFd fd);
  void Forget(int fd, const Watches& watches);
  // The process that made the connection has ended.
  void HangUp(int fd, const Watches& watches, pid_t pid);
  // Says why, once in a while.
  void LogRefusal(spdlog::level::level_enum level, const Caller& caller, absl::string_view why);
  // Finds the books of new connections. False: not now, because gRPC may still be writing some; until they are found,
  // no more connections are handed over.
  bool FindBooks();
  // False when the connection behaves.
  bool BanAttacker(Watched& connection);

  EventLoop& loop_;
  CallRates& rates_;
  Acceptor acceptor_;
  grpc::Server* server_ = nullptr;
  int listener_ = -1;
  DescriptorBudget budget_;

  // On the loop's thread.
  StreamBooks books_;
  intptr_t handed_over_ = 0;                   // connections so far
  intptr_t found_ = 0;                         // of these, when books were last looked for
  absl::flat_hash_map<int, Watched> watched_;  // by our duplicate of the descriptor
  Banned banned_;
  bool attacked_ = false;                  // since CloseAttackers() said so
  LineLimit refusals_{0.2, 5};             // lines about them
  std::chrono::nanoseconds judged_at_{0};  // of the process's processor time
  std::unique_ptr<HandOver> handing_over_ = std::make_unique<HandOver>(32);

  mutable Mutex mu_;
  absl::flat_hash_map<int, Connection> by_fd_ ABSL_GUARDED_BY(mu_);  // by gRPC's descriptor number
  absl::flat_hash_map<uid_t, size_t> of_uid_ ABSL_GUARDED_BY(mu_);
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CONNECTIONS_H_
