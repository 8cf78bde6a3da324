// SPDX-License-Identifier: Apache-2.0
//
// Connections: accepts on vrambroker.sock and hands the connections to gRPC, so that the caller of every RPC is known
// from the kernel. gRPC's own unix listener would tell neither pid nor uid, and would steal a live daemon's path.
// What passes between a client and gRPC is carried by a thread here (Relay), which sees who abuses it (StreamGuard). A
// client that says nothing costs gRPC nothing.
// A connection ends with the process that made it, also when a child of it still has the socket: its streams end, and
// its user may open another one.
#ifndef VRAMBROKER_SERVER_RPC_CONNECTIONS_H_
#define VRAMBROKER_SERVER_RPC_CONNECTIONS_H_

#include <grpcpp/grpcpp.h>
#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "allocator/base/mutex.h"
#include "server/base/client_log.h"
#include "server/base/event_loop.h"
#include "server/base/rate_limit.h"
#include "server/identity/caller.h"
#include "server/identity/process_watch.h"
#include "server/identity/unix_socket.h"
#include "server/rpc/descriptor_budget.h"
#include "server/rpc/relay.h"
#include "server/rpc/stream_guard.h"

namespace vrambroker {

// Safe to call from any thread.
class Connections {
 public:
  // Both outlive this object.
  Connections(CallRates* rates, ProcessWatch* processes);
  ~Connections();

  // Accepts on `listener` from now on, as many connections as `budget` allows, for `server`, which outlives this
  // object. Once.
  absl::Status Serve(const ClientSocket& listener, grpc::Server* server, const DescriptorBudget& budget);
  // The same on this one, whose callers are in the claim, from Serve() until Unlisten(). Both from any thread.
  absl::Status Listen(const ClientSocket& listener, const ClaimOfListener& claim);
  void Unlisten(const ClientSocket& listener) { loop_.Unwatch(listener.get()); }
  // Accepts no more, and gRPC gets no more: it may be shut down.
  void StopAccepting() ABSL_LOCKS_EXCLUDED(server_mu_);
  // Ends all connections after `time`, also those of clients that do not read. Once, after StopAccepting().
  void CutOffAfter(std::chrono::seconds time) const;
  // Returns when clients have what gRPC wrote before it closed its connections, or do not read it. REQUIRES: gRPC was
  // shut down.
  void Stop() ABSL_LOCKS_EXCLUDED(mu_);

  // Names the caller by the token of its connection, which the relay has put into the call's headers. gRPC itself names
  // a peer by a descriptor number, which another connection gets once gRPC has closed this one, while calls of this one
  // still run.
  // Unauthenticated when the connection is already gone, or the process that made it: a child that inherited the
  // connection must not speak for the process that gets its parent's pid next. ResourceExhausted when its
  // user calls too often; every handler asks once, and one whose work is that of several calls says of how many.
  absl::StatusOr<Caller> Identify(const grpc::CallbackServerContext& context, size_t calls = 1) const;
  // The same, however often its user calls.
  absl::StatusOr<Caller> Peer(const grpc::CallbackServerContext& context) const;

 private:
  class Connection;

  // On the loop's thread.
  void AcceptAll(int listener, const ClaimOfListener& claim);
  void Accept(ClientSocket socket, const ClaimOfListener& claim);
  // ResourceExhausted when the user has too many connections, or all users together.
  absl::Status CheckRoom(const Caller& caller) const;
  // gRPC's end of the connection. Unavailable when its user connects too often: later.
  absl::StatusOr<UniqueFd> OpenServer(Connection& connection) ABSL_LOCKS_EXCLUDED(mu_, server_mu_);
  void OpenWaiting();
  void CutOff();
  void Forget(Connection& connection, const absl::Status& why) ABSL_LOCKS_EXCLUDED(mu_);
  // Says why, once in a while.
  void LogRefusal(spdlog::level::level_enum level, const Caller& caller, absl::string_view why);

  CallRates& rates_;
  ProcessWatch& processes_;
  EventLoop loop_;
  std::thread thread_;
  DescriptorBudget budget_;

  // On the loop's thread.
  Acceptor acceptor_;
  StreamGuard guard_;
  LineLimit refusals_{0.2, 5};  // lines about them
  uint64_t next_id_ = 1;
  absl::flat_hash_map<uint64_t, std::unique_ptr<Connection>> connections_;  // by id
  absl::flat_hash_map<UserKey, size_t> of_user_;
  std::vector<uint64_t> waiting_;  // to be handed over, in this order
  int retry_ = -1;                 // a timer: when to look at those
  int cut_off_ = -1;               // a timer

  Mutex server_mu_ ABSL_ACQUIRED_AFTER(lock_level::kServer)
      ABSL_ACQUIRED_BEFORE(lock_level::kConnect){lock_level::kServer};
  grpc::Server* server_ ABSL_GUARDED_BY(server_mu_) = nullptr;  // null when it accepts no more

  mutable Mutex mu_;
  CondVar closed_;
  absl::flat_hash_map<std::string, Caller> handed_over_ ABSL_GUARDED_BY(mu_);  // to gRPC, by the connection's token
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_RPC_CONNECTIONS_H_
