// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/segment_calls.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "allocator/base/ids.h"
#include "allocator/base/segment_call_bounds.h"
#include "server/sessions/leased_session.h"
#include "server/wire/convert.h"

namespace vrambroker {

class SegmentCalls::Answer {
 public:
  Answer(RpcMeter::Method* method, Send send) : rpc_(RpcMeter::Start(method)), send_(std::move(send)) {}

  // False: the client can no longer get the answer.
  bool Give(const v1::CallResult& result, const std::vector<UniqueFd>& descriptors = {}) const {
    const bool sent = send_(result, descriptors);
    rpc_.Done(sent ? static_cast<absl::StatusCode>(result.error().code()) : absl::StatusCode::kCancelled);
    return sent;
  }

 private:
  const RpcMeter::Call rpc_;
  const Send send_;
};

SegmentCalls::SegmentCalls(Broker* broker, const SessionCalls* calls, const RpcMeter* rpcs)
    : broker_(*broker),
      calls_(*calls),
      lease_method_(rpcs->Find("Session.LeaseSegments")),
      return_method_(rpcs->Find("Session.ReturnSegments")) {}

void SegmentCalls::Make(const Caller& caller, const v1::SegmentCall& call, const Send& send) const {
  const Answer answer(call.has_lease() ? lease_method_ : return_method_, send);
  const Admission admitted = calls_.Admit(caller.user());
  const absl::StatusOr<SessionPtr> session = FindSession(caller, call);
  if (!session.ok()) {
    v1::CallResult result = ErrorResult(session.status());
    result.set_no_session(true);
    answer.Give(result);
    return;
  }
  switch (call.call_case()) {
    case v1::SegmentCall::kLease:
      return Lease(*session, call.lease(), admitted, answer);
    case v1::SegmentCall::kReturnSegments:
      return Return(*session, call.return_segments(), admitted, answer);
    case v1::SegmentCall::CALL_NOT_SET:
      answer.Give(ErrorResult(absl::InvalidArgumentError("call: empty, or of a newer protocol")));
  }
}

absl::StatusOr<SessionPtr> SegmentCalls::FindSession(const Caller& caller, const v1::SegmentCall& call) const {
  absl::StatusOr<SessionPtr> session = broker_.sessions().Find(SessionId{call.session_id()}, caller);
  if (!session.ok()) return session.status();
  const LeasedSession* const leased = (*session)->leased();
  if (leased == nullptr) return absl::FailedPreconditionError("the session is remote: its calls go over gRPC");
  // The id alone could belong to a session of an earlier run of the daemon.
  const ResumeToken& token = leased->resume_token();
  if (call.resume_token() != absl::string_view(reinterpret_cast<const char*>(token.data()), token.size())) {
    return absl::NotFoundError("resume_token: no session of this daemon has this id and this token");
  }
  return session;
}

void SegmentCalls::Lease(const SessionPtr& session, const v1::LeaseSegmentsRequest& request, const Admission& admitted,
                         const Answer& answer) const {
  if (request.last_resort()) {
    answer.Give(ErrorResult(
        absl::InvalidArgumentError("lease.last_resort: a request that may wait goes over the session's stream")));
    return;
  }
  calls_.LeaseSegments(session, request, /*cancel_key=*/0, admitted,
                       [this, session, request, answer](absl::StatusOr<v1::LeaseSegmentsResponse> leased) {
                         if (!leased.ok()) {
                           answer.Give(ErrorResult(leased.status()));
                           return;
                         }
                         const std::vector<UniqueFd> descriptors = Attach(*session, request.device(), &*leased);
                         v1::CallResult result;
                         *result.mutable_leased() = *leased;
                         if (!answer.Give(result, descriptors)) calls_.Abandon(session, request, *leased);
                       });
}

void SegmentCalls::Return(const SessionPtr& session, const v1::ReturnSegmentsRequest& request,
                          const Admission& admitted, const Answer& answer) const {
  absl::Status status;
  if (request.segment_ids_size() > kMaxSegmentCallIds) {
    status = absl::InvalidArgumentError(absl::StrCat("return_segments.segment_ids: ", request.segment_ids_size(),
                                                     " ids; at most ", kMaxSegmentCallIds,
                                                     " here, more over the session's stream"));
  } else {
    status = calls_.ReturnSegments(session, request, admitted);
  }
  v1::CallResult result;
  if (status.ok()) {
    result.mutable_returned();
  } else {
    result = ErrorResult(status);
  }
  answer.Give(result);
}

std::vector<UniqueFd> SegmentCalls::Attach(const Session& session, uint64_t device,
                                           v1::LeaseSegmentsResponse* leased) const {
  std::vector<UniqueFd> descriptors;
  for (v1::LeaseSegmentsResponse::Segment& segment : *leased->mutable_segments()) {
    if (descriptors.size() == kMaxSegmentCallDescriptors) break;
    v1::SegmentHandle& handle = *segment.mutable_handle();
    FdTicket ticket;
    if (handle.descriptor_ticket().size() != ticket.size()) continue;  // the segment has another handle
    std::memcpy(ticket.data(), handle.descriptor_ticket().data(), ticket.size());
    absl::StatusOr<UniqueFd> descriptor =
        broker_.pools()[device]->RedeemTicket(ticket, session.caller().pid, session.caller().uid);
    if (!descriptor.ok()) continue;  // the ticket stays valid: redeeming it reports the reason
    descriptors.push_back(*std::move(descriptor));
    handle.set_descriptor_attached(true);
  }
  return descriptors;
}

}  // namespace vrambroker
