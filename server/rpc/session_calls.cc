// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/session_calls.h"

#include <chrono>
#include <utility>
#include <vector>

#include "allocator/base/ids.h"
#include "server/requests/allocations.h"
#include "server/requests/leases.h"
#include "server/requests/refusals.h"
#include "server/wire/convert.h"

namespace vrambroker {

Admission SessionCalls::Admit(const UserKey& user) const {
  Admission admission;
  admission.status = rates_.Take(user, admission.time);
  return admission;
}

void SessionCalls::Owe(const UserKey& user) const {
  rates_.Owe(user, std::chrono::steady_clock::now());
}

// ---- Calls that get memory ----

void SessionCalls::Allocate(const SessionPtr& session, const v1::AllocateRequest& request, uint64_t cancel_key,
                            const Admission& admitted, AllocateDone done) const {
  if (!admitted.status.ok()) return done(admitted.status);
  session->NoteUse(admitted.time);
  const absl::StatusOr<RequestOptions> options = RequestOptionsOf(request, cancel_key, session.get());
  if (!options.ok()) return done(options.status());
  broker_.allocations().Allocate(
      session, request.device(), request.requested_bytes(), request.stream(),
      [done = std::move(done)](const absl::StatusOr<Allocation>& allocation) {
        if (!allocation.ok()) return done(allocation.status());
        done(ToProto(*allocation));
      },
      *options);
}

void SessionCalls::LeaseSegments(const SessionPtr& session, const v1::LeaseSegmentsRequest& request,
                                 uint64_t cancel_key, const Admission& admitted, LeaseDone done) const {
  if (!admitted.status.ok()) return done(admitted.status);
  session->NoteUse(admitted.time);
  broker_.leases().LeaseSegments(
      session, request.device(), {request.segment_bytes().begin(), request.segment_bytes().end()},
      [done = std::move(done)](const absl::StatusOr<std::vector<Lease>>& leases) {
        if (!leases.ok()) return done(leases.status());
        done(ToProto(*leases));
      },
      RequestOptionsOf(request, cancel_key));
}

void SessionCalls::Abandon(const SessionPtr& session, const v1::AllocateResponse& got) const {
  (void)broker_.allocations().Free(session, {BlockId{got.block_id()}});
}

void SessionCalls::Abandon(const SessionPtr& session, const v1::LeaseSegmentsRequest& request,
                           const v1::LeaseSegmentsResponse& got) const {
  std::vector<SegmentId> segments;
  for (const v1::LeaseSegmentsResponse::Segment& segment : got.segments()) {
    segments.push_back(SegmentId{segment.segment_id()});
  }
  (void)broker_.leases().ReturnSegments(session, request.device(), segments);
}

// ---- Calls that give memory back ----

absl::Status SessionCalls::Free(const SessionPtr& session, const v1::FreeRequest& request,
                                const Admission& admitted) const {
  const absl::StatusOr<std::vector<BlockId>> blocks = BlockIds(request);
  return GaveBack(*session, blocks.ok() ? broker_.allocations().Free(session, *blocks) : blocks.status(), admitted);
}

absl::Status SessionCalls::ReturnSegments(const SessionPtr& session, const v1::ReturnSegmentsRequest& request,
                                          const Admission& admitted) const {
  const absl::StatusOr<std::vector<SegmentId>> segments = SegmentIds(request);
  return GaveBack(
      *session,
      segments.ok() ? broker_.leases().ReturnSegments(session, request.device(), *segments) : segments.status(),
      admitted);
}

absl::Status SessionCalls::GaveBack(Session& session, const absl::Status& status, const Admission& admitted) const {
  if (status.ok()) session.NoteUse(admitted.time);
  if (admitted.status.ok()) return status;
  if (!status.ok()) return admitted.status;
  Owe(session.caller().user());
  return status;
}

// ---- Refusals ----

void SessionCalls::Explain(const SessionPtr& session, const v1::ExplainRequest& request, const Admission& admitted,
                           const ExplainDone& done) const {
  if (!admitted.status.ok()) return done(admitted.status);
  const absl::StatusOr<RefusedRequest> refused = FromProto(request);
  if (!refused.ok()) return done(refused.status());
  broker_.refusals().Explain(session, request.device(), *refused, done);
}

}  // namespace vrambroker
