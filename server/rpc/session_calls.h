// SPDX-License-Identifier: Apache-2.0
//
// SessionCalls: what a client calls for its session. A call comes as an RPC of its own (BrokerService), or as a message
// on the session's stream (SessionReactor). Either way it is made here. Its errors are those of Allocations, Leases and
// Refusals, and of the conversion of its request.
#ifndef VRAMBROKER_SERVER_RPC_SESSION_CALLS_H_
#define VRAMBROKER_SERVER_RPC_SESSION_CALLS_H_

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/rate_limit.h"
#include "server/base/steady_time.h"
#include "server/core/broker.h"
#include "vrambroker/v1/broker.pb.h"

namespace vrambroker {

// Whether a call may be made, and when it came. By itself: one that was counted elsewhere, and that comes now.
struct Admission {
  absl::Status status;
  SteadyTime time = std::chrono::steady_clock::now();
};

// Thread-safe. No call blocks.
class SessionCalls {
 public:
  // Called once, with the response or with why there is none; perhaps before the call returns, and from any thread.
  using AllocateDone = std::function<void(absl::StatusOr<v1::AllocateResponse>)>;
  using LeaseDone = std::function<void(absl::StatusOr<v1::LeaseSegmentsResponse>)>;
  using ExplainDone = std::function<void(absl::Status)>;

  // Both outlive it.
  SessionCalls(Broker* broker, CallRates* rates) : broker_(*broker), rates_(*rates) {}

  // Counts a call of the user. ResourceExhausted: the user calls too often. What this said is `admitted` for the calls
  // below.
  Admission Admit(const UserKey& user) const;

  // For a call that was made although it was not admitted.
  void Owe(const UserKey& user) const;

  // ---- Calls that get something. `cancel_key` is what a request that waits can be cancelled by. ----

  // A call that is not admitted is not made. Its refusal is the answer.
  void Allocate(const SessionPtr& session, const v1::AllocateRequest& request, uint64_t cancel_key,
                const Admission& admitted, AllocateDone done) const;
  void LeaseSegments(const SessionPtr& session, const v1::LeaseSegmentsRequest& request, uint64_t cancel_key,
                     const Admission& admitted, LeaseDone done) const;
  // Gives back what such a call got: its caller has gone and will never learn the ids.
  void Abandon(const SessionPtr& session, const v1::AllocateResponse& got) const;
  void Abandon(const SessionPtr& session, const v1::LeaseSegmentsRequest& request,
               const v1::LeaseSegmentsResponse& got) const;

  // ---- Calls that give something back ----

  // They are made at any rate: a client that calls too often must not be left with what it does not want. When one that
  // is not admitted gave something back, the user owes it; else the refusal is the answer.
  absl::Status Free(const SessionPtr& session, const v1::FreeRequest& request, const Admission& admitted) const;
  absl::Status ReturnSegments(const SessionPtr& session, const v1::ReturnSegmentsRequest& request,
                              const Admission& admitted) const;

  // ---- Refusals ----

  // Always an error: why the session was left without memory.
  void Explain(const SessionPtr& session, const v1::ExplainRequest& request, const Admission& admitted,
               const ExplainDone& done) const;

 private:
  absl::Status GaveBack(Session& session, const absl::Status& status, const Admission& admitted) const;

  Broker& broker_;
  CallRates& rates_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_RPC_SESSION_CALLS_H_
