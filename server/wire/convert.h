// SPDX-License-Identifier: Apache-2.0
//
// Converts between the broker's C++ types and messages.
#ifndef VRAMBROKER_SERVER_WIRE_CONVERT_H_
#define VRAMBROKER_SERVER_WIRE_CONVERT_H_

#include <grpcpp/grpcpp.h>

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/core/broker.h"
#include "vrambroker/v1/admin.pb.h"
#include "vrambroker/v1/broker.pb.h"
#include "vrambroker/v1/types.pb.h"

namespace vrambroker {

// Code, message, and payloads as details.
v1::StatusDetails ToProto(const absl::Status& status);
// Result of a failed call, without a call_id.
v1::CallResult ErrorResult(const absl::Status& status);
grpc::Status ToGrpc(const absl::Status& status);

// Answers a unary call.
grpc::ServerUnaryReactor* Reply(grpc::CallbackServerContext* context, const absl::Status& status);

v1::Device ToProto(const SegmentPool& pool);
// Adds the processes using a device that has contexts.
void AddProcesses(const DeviceProcesses& processes, v1::Device& device);
void AddSensors(const GpuSensors& sensors, v1::Device& device);
v1::Session ToProto(const SessionView& info);
// `socket_dir`: the daemon's.
v1::Claim ToProto(const ClaimView& info, const std::string& socket_dir);
v1::ClaimTerms ToProto(const ClaimTerms& terms);
v1::OutOfMemoryEvent ToProto(const OomEvent& event, const RefusalRecordings& recordings);
v1::AllocateResponse ToProto(const Allocation& allocation);
v1::LeaseSegmentsResponse ToProto(const std::vector<Lease>& leases);

v1::Limit ToProto(const Limit& limit);
v1::ExplainPolicyResponse ToProto(const PolicySubject& subject, const PolicyExplanation& explanation);

PolicySubject FromProto(const v1::ExplainPolicyRequest::User& user);
// InvalidArgument when neither an id nor a name is set, or the name is longer than any session's.
absl::StatusOr<SessionRef> FromProto(const v1::SessionRef& ref);
// nullopt when neither bytes nor fraction is set.
std::optional<Limit> FromProto(const v1::Limit& limit);

// Converts without checking; Claims checks the values. InvalidArgument: a limit or guarantee is neither bytes nor a
// fraction. `caller`: the default owner.
absl::StatusOr<ClaimTerms> FromProto(const v1::ClaimTerms& terms, uid_t caller);
absl::StatusOr<ClaimChange> FromProto(const v1::UpdateClaimRequest& request);

// Options of a request; `cancel_key` can cancel the request. The scope is a scope of `session`. InvalidArgument: the
// scope is nested deeper than ScopeTable::kMaxDepth.
absl::StatusOr<RequestOptions> RequestOptionsOf(const v1::AllocateRequest& request, uint64_t cancel_key,
                                                Session* session);
RequestOptions RequestOptionsOf(const v1::LeaseSegmentsRequest& request, uint64_t cancel_key);

// InvalidArgument unless the request names 1 to 1024 blocks.
absl::StatusOr<std::vector<BlockId>> BlockIds(const v1::FreeRequest& request);
// InvalidArgument unless the request names 1 to 4096 segments.
absl::StatusOr<std::vector<SegmentId>> SegmentIds(const v1::ReturnSegmentsRequest& request);
// InvalidArgument for a cause impossible for a refused lease.
absl::StatusOr<RefusedRequest> FromProto(const v1::ExplainRequest& request);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_WIRE_CONVERT_H_
