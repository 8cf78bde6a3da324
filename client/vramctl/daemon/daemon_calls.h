// SPDX-License-Identifier: Apache-2.0
//
// What the commands that talk to a daemon share.
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

// While it lives for longer than a moment, says on stderr that vramctl waits for the daemon, and for how long; once in
// a process.
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
  std::thread thread_;  // not joinable when there is none to be had: then nothing is said
};

// Gives up calls from another thread: the one under way, and all later ones. Thread-safe.
class CallCanceller {
 public:
  void Cancel() ABSL_LOCKS_EXCLUDED(mu_);

  // For a call's time.
  class Scope {
   public:
    Scope(CallCanceller* canceller, grpc::ClientContext* call);  // null: nobody gives it up
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    CallCanceller* const canceller_;
  };

 private:
  Mutex mu_;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  grpc::ClientContext* call_ ABSL_GUARDED_BY(mu_) = nullptr;  // under way
};

// Both services over one connection.
struct Daemon {
  std::unique_ptr<v1::Broker::Stub> broker;
  std::unique_ptr<v1::Admin::Stub> admin;
  absl::Duration timeout;  // of each call
  bool says_that_it_waits = false;
  CallCanceller* canceller = nullptr;  // of Call(), and of reading snapshots

  static absl::StatusOr<Daemon> Connect(const Context& context);
  // With a timeout of its own, and never a notice: for a caller that shows by itself that it waits.
  static absl::StatusOr<Daemon> Connect(const Context& context, absl::Duration timeout);
};

// The refusal for an error of connecting: it advises what a command has, --socket-dir.
absl::Status ConnectRefusal(const absl::Status& status);

// The status of a call that had `timeout`; when the daemon was silent, in words that say so. Errors are refusals.
absl::Status StatusOfCall(const grpc::Status& status, absl::Duration timeout);

// A call of v1::Broker or v1::Admin.
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

// `session`: ParseSessionRef() of what the user typed, or SessionRefOf() an id.
absl::StatusOr<v1::Session> GetSession(Daemon& daemon, const v1::SessionRef& session);

absl::StatusOr<Overview> ReadOverview(Daemon& daemon);

// The claim of this name; NotFound. Or all that the caller may see, for an empty name.
absl::StatusOr<v1::ListClaimsResponse> ReadClaims(Daemon& daemon, const std::string& name);
absl::StatusOr<v1::Claim> ReadClaim(Daemon& daemon, const std::string& name);

// What a session holds on a device, and its history. A client that leases is asked for it.
absl::StatusOr<HeapSnapshot> ReadSnapshot(Daemon& daemon, uint64_t session, uint32_t device);

// Reads a snapshot without its history.
absl::StatusOr<HeapSnapshot> ReadSegments(Daemon& daemon, uint64_t session, uint32_t device);

// The same as it was when a request was refused. NotFound says why it is not to be had.
absl::StatusOr<HeapSnapshot> ReadRefusalSnapshot(Daemon& daemon, uint64_t refusal);

// ReadSnapshot() of all devices of a session, by ordinal.
absl::StatusOr<std::vector<HeapSnapshot>> ReadSnapshots(Daemon& daemon, uint64_t session);

// To standard output.
void Print(const nlohmann::ordered_json& json);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_DAEMON_DAEMON_CALLS_H_
