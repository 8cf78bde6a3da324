// SPDX-License-Identifier: Apache-2.0
#include "server/convert.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "google/protobuf/util/time_util.h"

namespace vrambroker {
namespace {

void Fill(const Stat& from, v1::Stat* to) {
  to->set_current(from.current);
  to->set_peak(from.peak);
  to->set_allocated(from.allocated);
  to->set_freed(from.freed);
}

void Fill(const PoolStat& from, v1::PoolStat* to) {
  Fill(from.all, to->mutable_all());
  Fill(from.pool[static_cast<int>(PoolKind::kSmall)], to->mutable_small_pool());
  Fill(from.pool[static_cast<int>(PoolKind::kLarge)], to->mutable_large_pool());
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

}  // namespace

v1::StatusDetails ToProto(const absl::Status& status) {
  v1::StatusDetails details;
  details.set_code(static_cast<int>(status.code()));
  details.set_message(std::string(status.message()));
  status.ForEachPayload([&](absl::string_view type_url, const absl::Cord& value) {
    v1::StatusDetails::Any* detail = details.add_details();
    detail->set_type_url(std::string(type_url));
    detail->set_value(std::string(value));
  });
  return details;
}

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const v1::StatusDetails details = ToProto(status);
  // The codes of absl::Status and gRPC are the same numbers.
  return {static_cast<grpc::StatusCode>(details.code()), details.message(),
          details.details().empty() ? std::string() : details.SerializeAsString()};
}

grpc::ServerUnaryReactor* Reply(grpc::CallbackServerContext* context, const absl::Status& status) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(ToGrpc(status));
  return reactor;
}

v1::MemoryStats ToProto(const MemoryStats& stats) {
  v1::MemoryStats proto;
  Fill(stats.allocation, proto.mutable_allocation());
  Fill(stats.segment, proto.mutable_segment());
  Fill(stats.active, proto.mutable_active());
  Fill(stats.inactive_split, proto.mutable_inactive_split());
  Fill(stats.allocated_bytes, proto.mutable_allocated_bytes());
  Fill(stats.reserved_bytes, proto.mutable_reserved_bytes());
  Fill(stats.active_bytes, proto.mutable_active_bytes());
  Fill(stats.inactive_split_bytes, proto.mutable_inactive_split_bytes());
  Fill(stats.requested_bytes, proto.mutable_requested_bytes());
  Fill(stats.oversize_allocations, proto.mutable_oversize_allocations());
  Fill(stats.oversize_segments, proto.mutable_oversize_segments());
  proto.set_num_alloc_retries(stats.num_alloc_retries);
  proto.set_num_ooms(stats.num_ooms);
  proto.set_num_oom_rejections(stats.num_oom_rejections);
  proto.set_num_sync_all_streams(stats.num_sync_all_streams);
  proto.set_num_device_alloc(stats.num_device_alloc);
  proto.set_num_device_free(stats.num_device_free);
  if (stats.max_split_bytes != AllocatorOptions::kNoLimit) proto.set_max_split_bytes(stats.max_split_bytes);
  return proto;
}

v1::Device ToProto(const SegmentPool& pool) {
  const DeviceProperties& properties = pool.properties();
  const PoolFigures figures = pool.GetFigures();
  v1::Device device;
  device.set_ordinal(static_cast<uint32_t>(properties.ordinal));
  device.set_uuid(properties.uuid);
  device.set_name(properties.name);
  device.set_kind(properties.kind == DeviceKind::kCuda ? v1::DEVICE_KIND_CUDA : v1::DEVICE_KIND_HOST);
  device.set_total_bytes(properties.total_bytes);
  device.set_capacity_bytes(figures.capacity_bytes);
  device.set_reserved_bytes(figures.reserved_bytes);
  device.set_idle_bytes(figures.idle_bytes);
  return device;
}

v1::Session ToProto(const SessionInfo& info) {
  v1::Session session;
  session.set_id(Raw(info.id));
  session.set_name(info.name);
  session.set_pid(info.caller.pid);
  session.set_uid(info.caller.uid);
  session.set_gid(info.caller.gid);
  session.set_state(ToProto(info.state));
  *session.mutable_started() = google::protobuf::util::TimeUtil::MicrosecondsToTimestamp(
      std::chrono::duration_cast<std::chrono::microseconds>(info.started.time_since_epoch()).count());
  for (size_t ordinal = 0; ordinal < info.devices.size(); ++ordinal) {
    const SessionDeviceInfo& from = info.devices[ordinal];
    v1::SessionDevice* device = session.add_devices();
    device->set_device(static_cast<uint32_t>(ordinal));
    device->set_limit_bytes(from.account.limit_bytes);
    device->set_reserved_bytes(from.account.reserved_bytes);
    device->set_returning_bytes(from.account.returning_bytes);
    *device->mutable_stats() = ToProto(from.stats);
  }
  return session;
}

v1::AllocateResponse ToProto(const Allocation& allocation) {
  v1::AllocateResponse response;
  response.set_block_id(Raw(allocation.block));
  response.set_segment_id(Raw(allocation.segment));
  response.set_segment_bytes(allocation.segment_bytes);
  response.set_offset_bytes(allocation.offset);
  response.set_block_bytes(allocation.block_bytes);
  if (const auto* ipc = std::get_if<CudaIpcHandle>(&allocation.handle)) {
    response.mutable_handle()->set_cuda_ipc(ipc->data(), ipc->size());
  } else {
    const Ticket& ticket = std::get<Ticket>(allocation.handle);
    response.mutable_handle()->set_descriptor_ticket(ticket.data(), ticket.size());
  }
  return response;
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

}  // namespace vrambroker
