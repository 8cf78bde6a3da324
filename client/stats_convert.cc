// SPDX-License-Identifier: Apache-2.0
#include "client/stats_convert.h"

namespace vrambroker::client_internal {
namespace {

Stat FromProto(const v1::Stat& proto) {
  return {.current = proto.current(), .peak = proto.peak(), .allocated = proto.allocated(), .freed = proto.freed()};
}

PoolStat FromProto(const v1::PoolStat& proto) {
  return {.all = FromProto(proto.all()), .pool = {FromProto(proto.small_pool()), FromProto(proto.large_pool())}};
}

}  // namespace

MemoryStats FromProto(const v1::MemoryStats& proto) {
  MemoryStats stats;
  stats.allocation = FromProto(proto.allocation());
  stats.segment = FromProto(proto.segment());
  stats.active = FromProto(proto.active());
  stats.inactive_split = FromProto(proto.inactive_split());
  stats.allocated_bytes = FromProto(proto.allocated_bytes());
  stats.reserved_bytes = FromProto(proto.reserved_bytes());
  stats.active_bytes = FromProto(proto.active_bytes());
  stats.inactive_split_bytes = FromProto(proto.inactive_split_bytes());
  stats.requested_bytes = FromProto(proto.requested_bytes());
  stats.oversize_allocations = FromProto(proto.oversize_allocations());
  stats.oversize_segments = FromProto(proto.oversize_segments());
  stats.num_alloc_retries = proto.num_alloc_retries();
  stats.num_ooms = proto.num_ooms();
  stats.num_oom_rejections = proto.num_oom_rejections();
  stats.num_sync_all_streams = proto.num_sync_all_streams();
  stats.num_device_alloc = proto.num_device_alloc();
  stats.num_device_free = proto.num_device_free();
  if (proto.has_max_split_bytes()) stats.max_split_bytes = proto.max_split_bytes();
  return stats;
}

}  // namespace vrambroker::client_internal
