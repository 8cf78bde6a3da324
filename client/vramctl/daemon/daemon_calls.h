// SPDX-License-Identifier: Apache-2.0
//
// Shared by the commands talking to a daemon.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_DAEMON_DAEMON_CALLS_H_
#define VRAMBROKER_CLIENT_VRAMCTL_DAEMON_DAEMON_CALLS_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "allocator/base/mutex.h"
#include "allocator/heap/heap_snapshot.h"
#include "allocator/wire/session_ref.h"
#include "client/connection/connection.h"
#include "client/vramctl/options/context.h"
#include "client/vramctl/views/overview.h"
#include "vrambroker/v1/admin.grpc.pb.h"
#include "vrambroker/v1/broker.grpc.pb.h"

namespace vrambroker::vramctl {

// Prints on stderr, after a moment, that vramctl is waiting for the daemon, and for how long; once per process.
class WaitingNotice {
 public:
  explicit WaitingNotice(absl::Duration timeout);
  ~WaitingNotice();
  WaitingNotice(const WaitingNotice&) = delete;
  WaitingNotice& operator=(const WaitingNotice&) = delete;

 private:
  void Wait(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mu_);

  Mutex mu_;
  CondVar changed_;
  bool done_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;  // not joinable if no thread could start: then no notice is printed
};

// Cancels calls from another thread: the current call and all later calls. Thread-safe.
class CallCanceller {
 public:
  void Cancel() ABSL_LOCKS_EXCLUDED(mu_);

  // Registers a call while it runs.
  class Scope {
   public:
    Scope(CallCanceller* canceller, grpc::ClientContext* call);  // null canceller: the call cannot be cancelled
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    CallCanceller* const canceller_;
  };

 private:
  Mutex mu_;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  grpc::ClientContext* call_ ABSL_GUARDED_BY(mu_) = nullptr;  // in progress
};

// Both services over one connection.
struct Daemon {
  std::unique_ptr<v1::Broker::Stub> broker;
  std::unique_ptr<v1::Admin::Stub> admin;
  absl::Duration timeout;  // of each call
  bool says_that_it_waits = false;
  CallCanceller* canceller = nullptr;  // used by Call() and by reading snapshots

  static absl::StatusOr<Daemon> Connect(const Context& context);
  // Uses `timeout`, and never prints a notice: for callers showing by themselves that they wait.
  static absl::StatusOr<Daemon> Connect(const Context& context, absl::Duration timeout);
};

// Turns a connection error into a refusal with advice for commands: --socket-dir.
absl::Status ConnectRefusal(const absl::Status& status);

// Converts the status of a call with `timeout`; if the daemon was silent, the message says so. Errors are refusals.
absl::Status StatusOfCall(const grpc::Status& status, absl::Duration timeout);

// Calls a method of v1::Broker or v1::Admin.
template <typename Stub, typename Request, typename Response>
absl::Status Call(Daemon& daemon, grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                  const Request& request, Response* response) {
  std::optional<WaitingNotice> notice;
  if (daemon.says_that_it_waits) notice.emplace(daemon.timeout);
  grpc::ClientContext context;
  client_internal::SetTimeout(context, daemon.timeout);
  const CallCanceller::Scope scope(daemon.canceller, &context);
  if constexpr (std::is_same_v<Stub, v1::Broker::Stub>) {
    return StatusOfCall((*daemon.broker.*method)(&context, request, response), daemon.timeout);
  } else {
    return StatusOfCall((*daemon.admin.*method)(&context, request, response), daemon.timeout);
  }
}

// `session`: ParseSessionRef() of the user's text, or SessionRefOf() of an id.
absl::StatusOr<v1::Session> GetSession(Daemon& daemon, const v1::SessionRef& session);

absl::StatusOr<Overview> ReadOverview(Daemon& daemon);

// Returns the claim with this name; NotFound. For an empty name, all claims visible to the caller.
absl::StatusOr<v1::ListClaimsResponse> ReadClaims(Daemon& daemon, const std::string& name);
absl::StatusOr<v1::Claim> ReadClaim(Daemon& daemon, const std::string& name);

// Returns the session's memory on a device, with its history. Asks the client, if the client leases.
absl::StatusOr<HeapSnapshot> ReadSnapshot(Daemon& daemon, uint64_t session, uint32_t device);

// Reads a snapshot without its history.
absl::StatusOr<HeapSnapshot> ReadSegments(Daemon& daemon, uint64_t session, uint32_t device);

// Reads the snapshot taken when a request was refused. NotFound says why no snapshot is available.
absl::StatusOr<HeapSnapshot> ReadRefusalSnapshot(Daemon& daemon, uint64_t refusal);

// ReadSnapshot() of all devices of a session, by ordinal.
absl::StatusOr<std::vector<HeapSnapshot>> ReadSnapshots(Daemon& daemon, uint64_t session);

// Prints to standard output.
void Print(const nlohmann::ordered_json& json);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_DAEMON_DAEMON_CALLS_H_
