// SPDX-License-Identifier: Apache-2.0
//
// What the commands that talk to a daemon share.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_DAEMON_CALLS_H_
#define VRAMBROKER_CLIENT_VRAMCTL_DAEMON_CALLS_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "allocator/heap_snapshot.h"
#include "client/connection.h"
#include "client/vramctl/commands.h"
#include "client/vramctl/overview.h"
#include "vrambroker/v1/admin.grpc.pb.h"
#include "vrambroker/v1/broker.grpc.pb.h"

namespace vrambroker::vramctl {

// Longer than the daemon waits for a client (client_timeout); a stopped daemon must not hang a script.
inline constexpr absl::Duration kDeadline = absl::Seconds(30);

// Both services over one connection.
struct Daemon {
  std::unique_ptr<v1::Broker::Stub> broker;
  std::unique_ptr<v1::Admin::Stub> admin;

  static absl::StatusOr<Daemon> Connect(const Context& context, absl::Duration timeout = kDeadline);
};

// The status of a call that had `timeout`; when the daemon was silent, in words that say so.
absl::Status StatusOfCall(const grpc::Status& status, absl::Duration timeout);

template <typename Stub, typename Method, typename Request, typename Response>
absl::Status Call(Stub& stub, Method method, const Request& request, Response* response,
                  absl::Duration timeout = kDeadline) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  return StatusOfCall((stub.*method)(&context, request, response), timeout);
}

// The id when `session` consists of digits, else the name.
void SetRef(const std::string& session, v1::SessionRef* ref);

absl::StatusOr<v1::Session> GetSession(Daemon& daemon, const std::string& session);

// `timeout` is for each of the three calls.
absl::StatusOr<Overview> ReadOverview(Daemon& daemon, absl::Duration timeout = kDeadline);

// What a session holds on a device, and its history. A client that leases is asked for it.
absl::StatusOr<HeapSnapshot> ReadSnapshot(Daemon& daemon, uint64_t session, uint32_t device);

// To standard output.
void Print(const nlohmann::ordered_json& json);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_DAEMON_CALLS_H_
