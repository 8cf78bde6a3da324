// SPDX-License-Identifier: Apache-2.0
//
// SessionCalls: calls made by a client for its session. A call arrives as an RPC (BrokerService) or as a message on the
// session's stream (SessionReactor); both make the call here. Errors are the errors of Allocations, Leases and
// Refusals, and of converting the request.
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

// Whether a call may be made, and its time of arrival. Default: a call counted elsewhere, arriving now.
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

  // Both arguments outlive this object.
  SessionCalls(Broker* broker, CallRates* rates) : broker_(*broker), rates_(*rates) {}

  // Counts a call of the user. ResourceExhausted: the user calls too often. The result is the argument `admitted` of
  // the calls below.
  Admission Admit(const UserKey& user) const;

  // Charges a call that was made without being admitted.
  void Owe(const UserKey& user) const;

  // ---- Calls that get memory. `cancel_key` cancels a waiting request. ----

  // Refuses a call that is not admitted: the answer is the refusal.
  void Allocate(const SessionPtr& session, const v1::AllocateRequest& request, uint64_t cancel_key,
                const Admission& admitted, AllocateDone done) const;
  void LeaseSegments(const SessionPtr& session, const v1::LeaseSegmentsRequest& request, uint64_t cancel_key,
                     const Admission& admitted, LeaseDone done) const;
  // Gives back the result of a call whose caller has gone and will never learn the ids.
  void Abandon(const SessionPtr& session, const v1::AllocateResponse& got) const;
  void Abandon(const SessionPtr& session, const v1::LeaseSegmentsRequest& request,
               const v1::LeaseSegmentsResponse& got) const;

  // ---- Calls that give memory back ----

  // Made at any rate: a client that calls too often must not be stuck with unwanted memory. If a call that was not
  // admitted gave memory back, the user owes the call; otherwise the answer is the refusal.
  absl::Status Free(const SessionPtr& session, const v1::FreeRequest& request, const Admission& admitted) const;
  absl::Status ReturnSegments(const SessionPtr& session, const v1::ReturnSegmentsRequest& request,
                              const Admission& admitted) const;

  // ---- Refusals ----

  // Always returns an error: the reason for refusing memory to the session.
  void Explain(const SessionPtr& session, const v1::ExplainRequest& request, const Admission& admitted,
               const ExplainDone& done) const;

 private:
  absl::Status GaveBack(Session& session, const absl::Status& status, const Admission& admitted) const;

  Broker& broker_;
  CallRates& rates_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_RPC_SESSION_CALLS_H_
