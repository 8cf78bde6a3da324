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

SegmentCalls::SegmentCalls(Broker* broker, const SessionCalls* calls, const RpcMeter* rpcs)
    : broker_(*broker),
      calls_(*calls),
      lease_method_(rpcs->Find("Session.LeaseSegments")),
      return_method_(rpcs->Find("Session.ReturnSegments")) {}

namespace {

// Nothing was done.
v1::CallResult NoSession(const absl::Status& why) {
  v1::CallResult result = SegmentCalls::Failed(why);
  result.set_no_session(true);
  return result;
}

}  // namespace

v1::CallResult SegmentCalls::Failed(const absl::Status& why) {
  v1::CallResult result;
  *result.mutable_error() = ToProto(why);
  return result;
}

void SegmentCalls::Make(const Caller& caller, const v1::SegmentCall& call, const Send& send) const {
  call.has_lease() ? Lease(caller, call, send) : Return(caller, call, send);
}

absl::StatusOr<SessionPtr> SegmentCalls::FindSession(const Caller& caller, const v1::SegmentCall& call) const {
  absl::StatusOr<SessionPtr> session = broker_.sessions().Find(SessionId{call.session_id()}, caller);
  if (!session.ok()) return session.status();
  const LeasedSession* const leased = (*session)->leased();
  if (leased == nullptr) return absl::FailedPreconditionError("the session is remote: its calls go over gRPC");
  // The id alone could be that of a session of an earlier run of the daemon.
  const ResumeToken& token = leased->resume_token();
  if (call.resume_token() != absl::string_view(reinterpret_cast<const char*>(token.data()), token.size())) {
    return absl::NotFoundError("resume_token: no session of this daemon has this id and this token");
  }
  return session;
}

void SegmentCalls::Lease(const Caller& caller, const v1::SegmentCall& call, const Send& send) const {
  const RpcMeter::Call rpc = RpcMeter::Start(lease_method_);
  const auto refuse = [&send, &rpc](const v1::CallResult& result) {
    (void)send(result, {});
    rpc.Done(static_cast<absl::StatusCode>(result.error().code()));
  };
  const absl::Status admitted = calls_.Admit(caller.uid);
  const absl::StatusOr<SessionPtr> session = FindSession(caller, call);
  if (!session.ok()) return refuse(NoSession(session.status()));
  if (call.lease().last_resort()) {
    return refuse(Failed(
        absl::InvalidArgumentError("lease.last_resort: a request that may wait goes over the session's stream")));
  }
  calls_.LeaseSegments(
      *session, call.lease(), /*cancel_key=*/0, admitted,
      [this, session = *session, request = call.lease(), send, rpc](absl::StatusOr<v1::LeaseSegmentsResponse> leased) {
        v1::CallResult result;
        std::vector<UniqueFd> descriptors;
        if (leased.ok()) {
          descriptors = Attach(*session, request.device(), &*leased);
          *result.mutable_leased() = *leased;
        } else {
          result = Failed(leased.status());
        }
        const bool sent = send(result, descriptors);
        if (!sent && leased.ok()) calls_.Abandon(session, request, *leased);
        rpc.Done(sent ? leased.status().code() : absl::StatusCode::kCancelled);
      });
}

void SegmentCalls::Return(const Caller& caller, const v1::SegmentCall& call, const Send& send) const {
  const RpcMeter::Call rpc = RpcMeter::Start(return_method_);
  const absl::Status admitted = calls_.Admit(caller.uid);
  const absl::StatusOr<SessionPtr> session = FindSession(caller, call);
  absl::Status status = session.status();
  if (call.return_segments().segment_ids_size() > kMaxSegmentCallIds) {
    status = absl::InvalidArgumentError(
        absl::StrCat("return_segments.segment_ids: ", call.return_segments().segment_ids_size(), " ids; at most ",
                     kMaxSegmentCallIds, " here, more over the session's stream"));
  } else if (session.ok()) {
    status = calls_.ReturnSegments(*session, call.return_segments(), admitted);
  }
  v1::CallResult result;
  if (status.ok()) {
    result.mutable_returned();
  } else {
    result = session.ok() ? Failed(status) : NoSession(status);
  }
  (void)send(result, {});
  rpc.Done(status.code());
}

std::vector<UniqueFd> SegmentCalls::Attach(const Session& session, uint64_t device,
                                           v1::LeaseSegmentsResponse* leased) const {
  std::vector<UniqueFd> descriptors;
  for (v1::LeaseSegmentsResponse::Segment& segment : *leased->mutable_segments()) {
    if (descriptors.size() == kMaxSegmentCallDescriptors) break;
    v1::SegmentHandle& handle = *segment.mutable_handle();
    FdTicket ticket;
    if (handle.descriptor_ticket().size() != ticket.size()) continue;  // it has another handle
    std::memcpy(ticket.data(), handle.descriptor_ticket().data(), ticket.size());
    absl::StatusOr<UniqueFd> descriptor =
        broker_.pools()[device]->RedeemTicket(ticket, session.caller().pid, session.caller().uid);
    if (!descriptor.ok()) continue;  // the ticket stands: who exchanges it is told why
    descriptors.push_back(*std::move(descriptor));
    handle.set_descriptor_attached(true);
  }
  return descriptors;
}

}  // namespace vrambroker
