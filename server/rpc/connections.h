// SPDX-License-Identifier: Apache-2.0
//
// Connections: accepts on vrambroker.sock and hands the connections to gRPC, so that the kernel identifies the caller
// of every RPC. gRPC's own unix listener would report neither pid nor uid, and would steal a live daemon's path. A
// thread here (Relay) carries the bytes between client and gRPC, and detects abuse (StreamGuard). A silent client costs
// gRPC nothing. A connection ends with the process that made it, even if a child still has the socket: the streams end,
// and the user may open another connection.
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
  // Both arguments outlive this object.
  Connections(CallRates* rates, ProcessWatch* processes);
  ~Connections();

  // Starts accepting on `listener`, up to the number of connections allowed by `budget`, for `server`, which outlives
  // this object. Call once.
  absl::Status Serve(const ClientSocket& listener, grpc::Server* server, const DescriptorBudget& budget);
  // Accepts also on `listener`, with callers in `claim`, from Serve() until Unlisten(). Both functions may be called
  // from any thread.
  absl::Status Listen(const ClientSocket& listener, const ClaimOfListener& claim);
  void Unlisten(const ClientSocket& listener) { loop_.Unwatch(listener.get()); }
  // Stops accepting and stops handing over connections, so that gRPC may be shut down.
  void StopAccepting() ABSL_LOCKS_EXCLUDED(server_mu_);
  // Ends all connections after `time`, including connections of clients that do not read. Call once, after
  // StopAccepting().
  void CutOffAfter(std::chrono::seconds time) const;
  // Returns when each client has received, or does not read, the bytes written by gRPC before it closed its
  // connections. REQUIRES: gRPC was shut down.
  void Stop() ABSL_LOCKS_EXCLUDED(mu_);

  // Identifies the caller by the token of its connection, placed into the call's headers by the relay. gRPC identifies
  // peers by descriptor numbers, which are reused: another connection may get the number of a connection closed by gRPC
  // whose calls still run. Unauthenticated when the connection, or the process that made it, is gone: a child that
  // inherited the connection must not speak for a later process with its parent's pid. ResourceExhausted when the user
  // calls too often. Each handler calls Identify() once, with `calls` set to the work's equivalent in calls.
  absl::StatusOr<Caller> Identify(const grpc::CallbackServerContext& context, size_t calls = 1) const;
  // Like Identify(), without the limit on the rate.
  absl::StatusOr<Caller> Peer(const grpc::CallbackServerContext& context) const;

 private:
  class Connection;

  // Called on the loop's thread.
  void AcceptAll(int listener, const ClaimOfListener& claim);
  void Accept(ClientSocket socket, const ClaimOfListener& claim);
  // ResourceExhausted when the user has too many connections, or all users together.
  absl::Status CheckRoom(const Caller& caller) const;
  // Opens gRPC's end of the connection. Unavailable when the user connects too often: retried later.
  absl::StatusOr<UniqueFd> OpenServer(Connection& connection) ABSL_LOCKS_EXCLUDED(mu_, server_mu_);
  void OpenWaiting();
  void CutOff();
  void Forget(Connection& connection, const absl::Status& why) ABSL_LOCKS_EXCLUDED(mu_);
  // Logs the reason, at a limited rate.
  void LogRefusal(spdlog::level::level_enum level, const Caller& caller, absl::string_view why);

  CallRates& rates_;
  ProcessWatch& processes_;
  EventLoop loop_;
  std::thread thread_;
  DescriptorBudget budget_;

  // Used on the loop's thread.
  Acceptor acceptor_;
  StreamGuard guard_;
  LineLimit refusals_{0.2, 5};  // limits the lines on refused connections
  uint64_t next_id_ = 1;
  absl::flat_hash_map<uint64_t, std::unique_ptr<Connection>> connections_;  // by id
  absl::flat_hash_map<UserKey, size_t> of_user_;
  std::vector<uint64_t> waiting_;  // to be handed over, in this order
  int retry_ = -1;                 // a timer: when to retry waiting_
  int cut_off_ = -1;               // a timer

  Mutex server_mu_ ABSL_ACQUIRED_AFTER(lock_level::kServer)
      ABSL_ACQUIRED_BEFORE(lock_level::kConnect){lock_level::kServer};
  grpc::Server* server_ ABSL_GUARDED_BY(server_mu_) = nullptr;  // null after StopAccepting()

  mutable Mutex mu_;
  CondVar closed_;
  absl::flat_hash_map<std::string, Caller> handed_over_ ABSL_GUARDED_BY(mu_);  // to gRPC, by the connection's token
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_RPC_CONNECTIONS_H_
