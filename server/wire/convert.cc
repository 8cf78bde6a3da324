// SPDX-License-Identifier: Apache-2.0
#include "server/wire/convert.h"

#include <google/protobuf/util/time_util.h>

#include <algorithm>
#include <numeric>
#include <string>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/utf8.h"
#include "allocator/wire/device_kind.h"
#include "allocator/wire/heap_convert.h"

namespace vrambroker {
namespace {

void Fill(const WireHandle& from, v1::SegmentHandle* to) {
  if (const auto* ipc = std::get_if<CudaIpcHandle>(&from)) {
    to->set_cuda_ipc(ipc->data(), ipc->size());
  } else {
    const FdTicket& ticket = std::get<FdTicket>(from);
    to->set_descriptor_ticket(ticket.data(), ticket.size());
  }
}

v1::SessionState ToProto(SessionState state) {
  switch (state) {
    case SessionState::kActive:
      return v1::SESSION_STATE_ACTIVE;
    case SessionState::kDisconnected:
      return v1::SESSION_STATE_DISCONNECTED;
    case SessionState::kEnded:
    case SessionState::kClosed:
      return v1::SESSION_STATE_ENDED;
  }
  return v1::SESSION_STATE_UNSPECIFIED;
}

v1::ClaimState ToProto(ClaimState state) {
  switch (state) {
    case ClaimState::kActive:
      return v1::CLAIM_STATE_ACTIVE;
    case ClaimState::kDraining:
      return v1::CLAIM_STATE_DRAINING;
    case ClaimState::kRevoked:
      return v1::CLAIM_STATE_REVOKED;
  }
  return v1::CLAIM_STATE_UNSPECIFIED;
}

google::protobuf::Timestamp ToProto(std::chrono::system_clock::time_point time) {
  return google::protobuf::util::TimeUtil::MicrosecondsToTimestamp(
      std::chrono::duration_cast<std::chrono::microseconds>(time.time_since_epoch()).count());
}

// Leaves `to` unchanged if the limit is absent.
absl::Status ReadLimit(absl::string_view field, bool is_there, const v1::Limit& from, Limit& to) {
  if (!is_there) return absl::OkStatus();
  const std::optional<Limit> limit = FromProto(from);
  if (!limit.has_value()) return absl::InvalidArgumentError(absl::StrCat(field, ": neither bytes nor fraction is set"));
  to = *limit;
  return absl::OkStatus();
}

v1::DeviceProcess::Kind ToProto(ProcessView::Kind kind) {
  switch (kind) {
    case ProcessView::Kind::kDaemon:
      return v1::DeviceProcess::DAEMON;
    case ProcessView::Kind::kClient:
      return v1::DeviceProcess::CLIENT;
    case ProcessView::Kind::kUncounted:
      return v1::DeviceProcess::UNCOUNTED;
  }
  return v1::DeviceProcess::KIND_UNSPECIFIED;
}

}  // namespace

v1::StatusDetails ToProto(const absl::Status& status) {
  v1::StatusDetails details;
  details.set_code(static_cast<int>(status.code()));
  details.set_message(ToUtf8(status.message()));
  status.ForEachPayload([&](absl::string_view type_url, const absl::Cord& value) {
    v1::StatusDetails::Any* detail = details.add_details();
    detail->set_type_url(std::string(type_url));
    detail->set_value(std::string(value));
  });
  return details;
}

v1::CallResult ErrorResult(const absl::Status& status) {
  v1::CallResult result;
  *result.mutable_error() = ToProto(status);
  return result;
}

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const v1::StatusDetails details = ToProto(status);
  // absl::Status and gRPC use the same numbers as codes.
  return {static_cast<grpc::StatusCode>(details.code()), details.message(),
          details.details().empty() ? std::string() : details.SerializeAsString()};
}

grpc::ServerUnaryReactor* Reply(grpc::CallbackServerContext* context, const absl::Status& status) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(ToGrpc(status));
  return reactor;
}

v1::Device ToProto(const SegmentPool& pool) {
  const DeviceProperties& properties = pool.properties();
  const PoolStats stats = pool.GetStats();
  v1::Device device;
  device.set_ordinal(static_cast<uint32_t>(properties.ordinal));
  device.set_uuid(properties.uuid);
  device.set_name(properties.name);
  device.set_kind(KindNamed(properties.kind));
  device.set_total_bytes(properties.total_bytes);
  device.set_capacity_bytes(stats.capacity_bytes);
  device.set_reserved_bytes(stats.reserved_bytes);
  device.set_idle_bytes(stats.idle_bytes);
  device.set_free_bytes(stats.free_bytes);
  device.set_kept_free_bytes(stats.kept_free_bytes());
  device.set_carried_over_bytes(stats.carried_over_bytes);
  device.set_fault(ToUtf8(pool.health().message()));
  return device;
}

void AddProcesses(const DeviceProcesses& processes, v1::Device& device) {
  if (!processes.status.ok()) device.set_processes_fault(ToUtf8(processes.status.message()));
  for (const ProcessView& from : processes.processes) {
    v1::DeviceProcess* process = device.add_processes();
    process->set_pid(from.pid);
    process->set_uid(from.uid);
    process->set_name(from.name);
    process->set_kind(ToProto(from.kind));
    process->set_used_bytes(from.used_bytes);
    process->set_charged_bytes(from.charged_bytes);
    process->set_overhead_bytes(from.overhead_bytes);
    process->set_drift_bytes(from.drift_bytes);
  }
}

void AddSensors(const GpuSensors& sensors, v1::Device& device) {
  if (sensors.use_percent.has_value()) device.mutable_use_percent()->set_value(*sensors.use_percent);
  if (sensors.temperature_celsius.has_value()) {
    device.mutable_temperature_celsius()->set_value(*sensors.temperature_celsius);
  }
  if (sensors.power_watts.has_value()) device.mutable_power_watts()->set_value(*sensors.power_watts);
}

v1::Session ToProto(const SessionView& info) {
  v1::Session session;
  session.set_id(Raw(info.id));
  session.set_name(info.name);
  session.set_pid(info.caller.pid);
  session.set_uid(info.caller.uid);
  session.set_gid(info.caller.gid);
  session.set_user(info.user);
  session.set_command(info.command);
  session.set_idle_ms(static_cast<uint64_t>(info.idle.count()));
  session.set_state(ToProto(info.state));
  *session.mutable_started() = ToProto(info.started);
  session.set_rule(info.terms.rule);
  session.set_tenant(info.terms.tenant);
  session.set_placement(PlacementName(info.placement));
  session.set_claim(info.terms.claim);
  session.set_priority(info.devices.empty() ? info.terms.priority : info.devices[0].account.priority);
  for (size_t ordinal = 0; ordinal < info.devices.size(); ++ordinal) {
    const SessionDeviceView& from = info.devices[ordinal];
    v1::SessionDevice* device = session.add_devices();
    device->set_device(static_cast<uint32_t>(ordinal));
    device->set_limit_bytes(from.account.effective_limit_bytes());
    device->set_reserved_bytes(from.account.reserved_bytes);
    device->set_returning_bytes(from.account.returning_bytes);
    *device->mutable_stats() = StatsToProto(from.stats);
    device->set_guarantee_bytes(from.account.guarantee_bytes);
    device->set_idle_bytes(from.idle_bytes);
    device->set_carried_over_bytes(from.account.carried_over_bytes);
    device->set_used_bytes(from.used_bytes);
    device->set_overhead_bytes(from.overhead_bytes);
    for (const SessionDeviceView::Waiting& waiting : from.waiting) {
      v1::WaitingRequest* request = device->add_waiting();
      request->set_bytes(waiting.bytes);
      request->set_guarantee(waiting.guarantee);
      request->set_waited_ms(static_cast<uint64_t>(waiting.waited.count()));
      request->set_left_ms(static_cast<uint64_t>(waiting.left.count()));
      request->set_place(static_cast<uint32_t>(waiting.place));
    }
  }
  return session;
}

v1::Claim ToProto(const ClaimView& info, const std::string& socket_dir) {
  v1::Claim claim;
  claim.set_name(info.claim.name);
  *claim.mutable_terms() = ToProto(info.claim.terms);
  if (!info.claim.rule.empty()) claim.mutable_terms()->clear_any_owner();  // the claim has no sockets
  claim.set_state(ToProto(info.claim.state));
  *claim.mutable_created() = ToProto(info.claim.created);
  if (info.claim.rule.empty()) claim.set_socket_dir(ClaimDir(socket_dir, info.claim.name));
  claim.set_rule(info.claim.rule);
  claim.set_own(info.claim.is_own);
  if (info.claim.maker.has_value()) claim.set_maker_pid(info.claim.maker->pid);
  claim.set_sessions(static_cast<uint32_t>(info.claim.sessions));
  uint64_t refusals = 0;
  for (size_t ordinal = 0; ordinal < info.devices.size(); ++ordinal) {
    const ClaimDeviceView& from = info.devices[ordinal];
    v1::ClaimDevice* device = claim.add_devices();
    device->set_device(static_cast<uint32_t>(ordinal));
    device->set_limit_bytes(from.limit_bytes);
    device->set_guarantee_bytes(from.guarantee_bytes);
    device->set_reserved_bytes(from.reserved_bytes);
    device->set_left_behind_bytes(from.left_behind_bytes);
    device->set_allocated_bytes(from.allocated_bytes);
    device->set_idle_bytes(from.idle_bytes);
    device->set_waiting(static_cast<uint32_t>(from.waiting));
    device->set_peak_bytes(from.peak_bytes);
    device->set_waits(from.waits.waits);
    device->set_waited_ms(static_cast<uint64_t>(from.waits.waited.count()));
    device->set_refusals(std::accumulate(from.ooms.begin(), from.ooms.end(), uint64_t{0}));
    refusals += device->refusals();
  }
  claim.set_refusals(refusals);
  return claim;
}

v1::ClaimTerms ToProto(const ClaimTerms& terms) {
  v1::ClaimTerms proto;
  *proto.mutable_limit() = ToProto(terms.limit);
  *proto.mutable_guarantee() = ToProto(terms.guarantee);
  proto.set_priority(terms.priority);
  proto.set_tenant(terms.tenant);
  if (terms.max_wait.has_value()) proto.set_max_wait_ms(static_cast<uint32_t>(terms.max_wait->count()));
  if (terms.owner.uid.has_value()) {
    proto.set_owner_uid(*terms.owner.uid);
  } else {
    proto.set_any_owner(true);
  }
  if (terms.owner.gid.has_value()) proto.set_owner_gid(*terms.owner.gid);
  for (const size_t device : terms.devices) proto.add_devices(static_cast<uint32_t>(device));
  for (const auto& [key, value] : terms.labels) (*proto.mutable_labels())[key] = ToUtf8(value);
  return proto;
}

v1::OutOfMemoryEvent ToProto(const OomEvent& event, const RefusalRecordings& recordings) {
  v1::OutOfMemoryEvent proto;
  *proto.mutable_time() = ToProto(event.time);
  proto.set_session_id(Raw(event.session));
  proto.set_client(event.client);
  proto.set_uid(event.uid);
  // A recording may have been dropped to make room; the advice must not mention a dropped recording.
  OomReport report = event.report;
  report.is_recorded = report.is_recorded && recordings.Find(report.refusal) != nullptr;
  *proto.mutable_out_of_memory() = ToProto(report);
  proto.set_recorded(report.is_recorded);
  return proto;
}

v1::AllocateResponse ToProto(const Allocation& allocation) {
  v1::AllocateResponse response;
  response.set_block_id(Raw(allocation.block));
  response.set_segment_id(Raw(allocation.segment));
  response.set_segment_bytes(allocation.segment_bytes);
  response.set_offset_bytes(allocation.offset);
  response.set_block_bytes(allocation.block_bytes);
  Fill(allocation.handle, response.mutable_handle());
  return response;
}

v1::LeaseSegmentsResponse ToProto(const std::vector<Lease>& leases) {
  v1::LeaseSegmentsResponse response;
  for (const Lease& lease : leases) {
    v1::LeaseSegmentsResponse::Segment* segment = response.add_segments();
    segment->set_segment_id(Raw(lease.segment));
    segment->set_segment_bytes(lease.bytes);
    Fill(lease.handle, segment->mutable_handle());
  }
  return response;
}

v1::Limit ToProto(const Limit& limit) {
  v1::Limit proto;
  if (const uint64_t* bytes = std::get_if<uint64_t>(&limit)) {
    proto.set_bytes(*bytes);
  } else {
    proto.set_fraction(std::get<double>(limit));
  }
  return proto;
}

v1::ExplainPolicyResponse ToProto(const PolicySubject& subject, const PolicyExplanation& explanation) {
  v1::ExplainPolicyResponse response;
  for (const PolicyExplanation::Rule& from : explanation.rules) {
    v1::ExplainPolicyResponse::Rule* rule = response.add_rules();
    rule->set_rule(from.label);
    rule->set_place(ToUtf8(from.place));  // a path, and patterns from the configuration file
    rule->set_matches(from.matches);
    rule->set_why(ToUtf8(from.why));
  }
  response.mutable_user()->set_uid(subject.uid);
  for (const gid_t gid : subject.gids) response.mutable_user()->add_gids(gid);
  if (subject.cgroup.has_value()) response.mutable_user()->set_cgroup(*subject.cgroup);
  if (subject.session_name.has_value()) response.set_session_name(*subject.session_name);
  const SessionTerms& terms = explanation.terms;
  response.set_rule(terms.rule);
  *response.mutable_limit() = ToProto(terms.limit);
  *response.mutable_guarantee() = ToProto(terms.guarantee);
  response.set_priority(terms.priority);
  response.set_tenant(terms.tenant);
  response.set_strict(terms.strict);
  response.set_may_open_sessions(terms.rights.client);
  response.set_may_observe(terms.rights.observer);
  response.set_may_change(terms.rights.admin);
  response.set_is_operator(explanation.is_operator);
  response.set_max_wait_ms(static_cast<uint32_t>(terms.max_wait.count()));
  if (!terms.claim.empty()) {
    response.set_claim(terms.claim);
    *response.mutable_claim_limit() = ToProto(terms.claim_limit);
    *response.mutable_claim_guarantee() = ToProto(terms.claim_guarantee);
  }
  if (terms.user_limit.has_value()) *response.mutable_user_limit() = ToProto(*terms.user_limit);
  if (terms.user_guarantee.has_value()) *response.mutable_user_guarantee() = ToProto(*terms.user_guarantee);
  response.set_max_sessions(terms.max_sessions);
  return response;
}

absl::StatusOr<ClaimTerms> FromProto(const v1::ClaimTerms& from, uid_t caller) {
  ClaimTerms terms;
  if (absl::Status status = ReadLimit("limit", from.has_limit(), from.limit(), terms.limit); !status.ok())
    return status;
  if (absl::Status status = ReadLimit("guarantee", from.has_guarantee(), from.guarantee(), terms.guarantee);
      !status.ok()) {
    return status;
  }
  terms.priority = from.priority();
  terms.tenant = from.tenant();
  if (from.has_max_wait_ms()) terms.max_wait = std::chrono::milliseconds(from.max_wait_ms());
  const bool is_anybodys = from.owner_case() == v1::ClaimTerms::kAnyOwner && from.any_owner();
  if (!is_anybodys) terms.owner.uid = from.has_owner_uid() ? from.owner_uid() : caller;
  if (from.has_owner_gid()) terms.owner.gid = from.owner_gid();
  terms.devices.assign(from.devices().begin(), from.devices().end());
  std::sort(terms.devices.begin(), terms.devices.end());
  terms.devices.erase(std::unique(terms.devices.begin(), terms.devices.end()), terms.devices.end());
  for (const auto& [key, value] : from.labels()) terms.labels[key] = value;
  return terms;
}

absl::StatusOr<ClaimChange> FromProto(const v1::UpdateClaimRequest& request) {
  ClaimChange change;
  if (request.has_limit()) {
    change.limit = FromProto(request.limit());
    if (!change.limit.has_value()) return absl::InvalidArgumentError("limit: neither bytes nor fraction is set");
  }
  if (request.has_guarantee()) {
    change.guarantee = FromProto(request.guarantee());
    if (!change.guarantee.has_value()) {
      return absl::InvalidArgumentError("guarantee: neither bytes nor fraction is set");
    }
  }
  if (request.optional_priority_case() == v1::UpdateClaimRequest::kPriority) change.priority = request.priority();
  if (request.has_max_wait_ms()) change.max_wait = std::chrono::milliseconds(request.max_wait_ms());
  if (request.replace_labels()) {
    change.labels.emplace();
    for (const auto& [key, value] : request.labels()) change.labels->emplace(key, value);
  }
  return change;
}

PolicySubject FromProto(const v1::ExplainPolicyRequest::User& user) {
  PolicySubject subject{.uid = user.uid(), .gids = {user.gids().begin(), user.gids().end()}};
  if (user.has_cgroup()) subject.cgroup = user.cgroup();
  return subject;
}

absl::StatusOr<SessionRef> FromProto(const v1::SessionRef& ref) {
  // Error messages would repeat longer names, and very long names would break the connection.
  constexpr size_t kLongestName = 255;
  if (std::max(ref.name().size(), ref.or_name().size()) > kLongestName) {
    return absl::InvalidArgumentError("session.name: longer than any session's name");
  }
  switch (ref.ref_case()) {
    case v1::SessionRef::kId:
      if (!ref.or_name().empty()) return SessionRef(IdOrName{.id = SessionId{ref.id()}, .name = ref.or_name()});
      return SessionRef(SessionId{ref.id()});
    case v1::SessionRef::kName:
      return SessionRef(ref.name());
    case v1::SessionRef::REF_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError("session: neither id nor name is set");
}

std::optional<Limit> FromProto(const v1::Limit& limit) {
  switch (limit.limit_case()) {
    case v1::Limit::kBytes:
      return Limit(limit.bytes());
    case v1::Limit::kFraction:
      return Limit(limit.fraction());
    case v1::Limit::LIMIT_NOT_SET:
      break;
  }
  return std::nullopt;
}

absl::StatusOr<RequestOptions> RequestOptionsOf(const v1::AllocateRequest& request, uint64_t cancel_key,
                                                Session* session) {
  if (request.scope_size() > ScopeTable::kMaxDepth) {
    return absl::InvalidArgumentError(
        absl::StrCat("scope: ", request.scope_size(), " scopes within one another; at most ", ScopeTable::kMaxDepth));
  }
  absl::InlinedVector<RemoteSession::NamedScope, 8> scopes;
  for (const v1::MemoryScope& scope : request.scope()) {
    scopes.push_back({.name = scope.name(), .file = scope.file(), .line = scope.line()});
  }
  RemoteSession* const remote = session->remote();
  const ScopeId scope = remote == nullptr ? ScopeId{0} : remote->FindScope(scopes);
  return RequestOptions{.may_reclaim = true,
                        .wait = std::chrono::milliseconds(request.wait_ms()),
                        .cancel_key = cancel_key,
                        .scope = scope};
}

RequestOptions RequestOptionsOf(const v1::LeaseSegmentsRequest& request, uint64_t cancel_key) {
  return {.may_reclaim = request.last_resort(),
          .wait = std::chrono::milliseconds(request.wait_ms()),
          .cancel_key = cancel_key};
}

absl::StatusOr<std::vector<BlockId>> BlockIds(const v1::FreeRequest& request) {
  constexpr int kMaxBlocks = 1024;
  if (request.block_ids().empty() || request.block_ids_size() > kMaxBlocks) {
    return absl::InvalidArgumentError(
        absl::StrCat("block_ids: ", request.block_ids_size(), " ids; a request names 1 to ", kMaxBlocks, " blocks"));
  }
  std::vector<BlockId> ids;
  ids.reserve(static_cast<size_t>(request.block_ids_size()));
  for (const uint64_t id : request.block_ids()) ids.push_back(BlockId{id});
  return ids;
}

absl::StatusOr<std::vector<SegmentId>> SegmentIds(const v1::ReturnSegmentsRequest& request) {
  constexpr int kMaxSegments = 4096;
  if (request.segment_ids().empty() || request.segment_ids_size() > kMaxSegments) {
    return absl::InvalidArgumentError(absl::StrCat("segment_ids: ", request.segment_ids_size(),
                                                   " ids; a request names 1 to ", kMaxSegments, " segments"));
  }
  std::vector<SegmentId> ids;
  ids.reserve(static_cast<size_t>(request.segment_ids_size()));
  for (const uint64_t id : request.segment_ids()) ids.push_back(SegmentId{id});
  return ids;
}

absl::StatusOr<RefusedRequest> FromProto(const v1::ExplainRequest& request) {
  absl::StatusOr<Holes> holes = HolesFromProto(request.holes());
  if (!holes.ok()) return holes.status();
  RefusedRequest refused{.requested_bytes = request.requested_bytes(),
                         .allocated_bytes = request.allocated_bytes(),
                         .fit = {.block_bytes = request.block_bytes(),
                                 .segment_bytes = request.segment_bytes(),
                                 .pool_free_bytes = request.pool_free_bytes(),
                                 .pool_largest_bytes = request.pool_largest_bytes(),
                                 .holes = *std::move(holes),
                                 .knows_holes = request.has_holes(),
                                 .max_events = request.max_events(),
                                 .scope = CleanScopeText(request.scope(), kMaxReportedScopeBytes),
                                 .scopes = ScopeUsesFromProto(request.scopes())}};
  switch (request.cause()) {
    case v1::OutOfMemory::CAUSE_LIMIT:
      refused.cause = OomCause::kLimit;
      return refused;
    case v1::OutOfMemory::CAUSE_CAPACITY:
      refused.cause = OomCause::kCapacity;
      return refused;
    case v1::OutOfMemory::CAUSE_FRAGMENTATION:
      refused.cause = OomCause::kFragmentation;
      return refused;
    case v1::OutOfMemory::CAUSE_LARGER_THAN_DEVICE:
      refused.cause = OomCause::kLargerThanDevice;
      return refused;
    default:
      return absl::InvalidArgumentError("cause: none that a refused lease has");
  }
}

}  // namespace vrambroker
