// SPDX-License-Identifier: Apache-2.0
#include "proto/admin_json.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "allocator/memory_stats.h"

namespace vrambroker {
namespace {

using Json = nlohmann::ordered_json;

// A name of an enum without its prefix: "CAUSE_LIMIT" as "LIMIT".
std::string Short(const std::string& name, const std::string& prefix) {
  return std::string(absl::StripPrefix(name, prefix));
}

}  // namespace

std::string JsonText(const Json& json, int indent) {
  return json.dump(indent, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

absl::Time TimeOf(const google::protobuf::Timestamp& timestamp) {
  return absl::FromUnixSeconds(timestamp.seconds()) + absl::Nanoseconds(timestamp.nanos());
}

const char* StateName(v1::SessionState state) {
  switch (state) {
    case v1::SESSION_STATE_ACTIVE:
      return "active";
    case v1::SESSION_STATE_DISCONNECTED:
      return "disconnected";
    case v1::SESSION_STATE_ENDED:
      return "ended";
    default:
      return "unknown";
  }
}

const char* KindName(v1::DeviceKind kind) {
  return kind == v1::DEVICE_KIND_CUDA ? "cuda" : "host";
}

namespace {

Json ToJson(const v1::OutOfMemory::Holes::PinnedSegment& pinned) {
  Json longest_held = Json::array();
  for (const v1::OutOfMemory::Holes::PinningBlock& block : pinned.longest_held()) {
    longest_held.push_back({{"address", block.address()},
                            {"block_bytes", block.block_bytes()},
                            {"held_seconds", block.held_seconds()},
                            {"scope", block.scope()}});
  }
  return {{"address", pinned.address()},
          {"segment_bytes", pinned.segment_bytes()},
          {"hole_bytes", pinned.hole_bytes()},
          {"largest_hole_bytes", pinned.largest_hole_bytes()},
          {"pinning_blocks", pinned.pinning_blocks()},
          {"longest_held", std::move(longest_held)}};
}

}  // namespace

Json ToJson(const v1::OutOfMemory& oom) {
  Json pinned_segments = Json::array();
  for (const auto& pinned : oom.holes().most_bytes()) pinned_segments.push_back(ToJson(pinned));
  Json largest_holders = Json::array();
  for (const v1::OutOfMemory::Holder& holder : oom.largest_holders()) {
    largest_holders.push_back({{"client", holder.client()},
                               {"reserved_bytes", holder.reserved_bytes()},
                               {"allocated_bytes", holder.allocated_bytes()}});
  }
  Json idle_holders = Json::array();
  for (const v1::OutOfMemory::IdleHolder& holder : oom.idle_holders()) {
    idle_holders.push_back({{"client", holder.client()},
                            {"idle_bytes", holder.idle_bytes()},
                            {"why", Short(v1::OutOfMemory::IdleHolder::Why_Name(holder.why()), "WHY_")}});
  }
  Json scopes = Json::array();
  for (const v1::OutOfMemory::ScopeUse& use : oom.scopes()) {
    scopes.push_back({{"scope", use.scope()},
                      {"allocated_bytes", use.allocated_bytes()},
                      {"bytes_at_peak", use.bytes_at_peak()},
                      {"blocks", use.blocks()},
                      {"pinned_hole_bytes", use.pinned_hole_bytes()}});
  }
  return {{"cause", Short(v1::OutOfMemory::Cause_Name(oom.cause()), "CAUSE_")},
          {"device", oom.device()},
          {"requested_bytes", oom.requested_bytes()},
          {"block_bytes", oom.block_bytes()},
          {"segment_bytes", oom.segment_bytes()},
          {"room_bytes", oom.room_bytes()},
          {"limit_bytes", oom.limit_bytes()},
          {"guarantee_bytes", oom.guarantee_bytes()},
          {"reserved_bytes", oom.reserved_bytes()},
          {"allocated_bytes", oom.allocated_bytes()},
          {"idle_bytes", oom.idle_bytes()},
          {"inactive_split_bytes", oom.inactive_split_bytes()},
          {"largest_free_block_bytes", oom.largest_free_block_bytes()},
          {"hole_bytes", oom.holes().hole_bytes()},
          {"holes", oom.holes().holes()},
          {"hole_segments", oom.holes().segments()},
          {"pinned_segments", std::move(pinned_segments)},
          {"device_capacity_bytes", oom.device_capacity_bytes()},
          {"device_available_bytes", oom.device_available_bytes()},
          {"device_kept_free_bytes", oom.device_kept_free_bytes()},
          {"device_idle_bytes", oom.device_idle_bytes()},
          {"device_quarantined_bytes", oom.device_quarantined_bytes()},
          {"largest_holders", std::move(largest_holders)},
          {"idle_elsewhere_bytes", oom.idle_elsewhere_bytes()},
          {"idle_holders", std::move(idle_holders)},
          {"waited_ms", oom.waited_ms()},
          {"user_limit_bytes", oom.user_limit_bytes()},
          {"user_reserved_bytes", oom.user_reserved_bytes()},
          {"scope", oom.scope()},
          {"scopes", std::move(scopes)},
          {"explanation", oom.explanation()},
          {"advice", oom.advice()}};
}

uint64_t UnknownBytes(const v1::SessionDevice& device) {
  const v1::MemoryStats& stats = device.stats();
  uint64_t left = device.reserved_bytes();
  for (const uint64_t known :
       {stats.active_bytes().all().current(), stats.inactive_split_bytes().all().current(), device.idle_bytes()}) {
    left -= std::min(left, known);
  }
  return std::min(left, device.carried_over_bytes());
}

Json ToJson(const v1::Session& session) {
  Json devices = Json::array();
  for (const v1::SessionDevice& device : session.devices()) {
    const v1::MemoryStats& stats = device.stats();
    const uint64_t allocated = stats.allocated_bytes().all().current();
    const uint64_t unknown = UnknownBytes(device);
    Json waiting = Json::array();
    for (const v1::WaitingRequest& request : device.waiting()) {
      waiting.push_back({{"bytes", request.bytes()},
                         {"for", request.guarantee() ? "guarantee" : "segments"},
                         {"waited_ms", request.waited_ms()},
                         {"left_ms", request.left_ms()},
                         {"place", request.place()}});
    }
    devices.push_back({{"device", device.device()},
                       {"limit_bytes", device.limit_bytes()},
                       {"guarantee_bytes", device.guarantee_bytes()},
                       {"reserved_bytes", device.reserved_bytes()},
                       {"over_limit", device.reserved_bytes() > device.limit_bytes()},
                       {"idle_bytes", device.idle_bytes()},
                       {"returning_bytes", device.returning_bytes()},
                       {"carried_over_bytes", device.carried_over_bytes()},
                       {"unknown_bytes", unknown},
                       {"allocated_bytes", allocated},
                       {"allocated_bytes_peak", stats.allocated_bytes().all().peak()},
                       {"requested_bytes", stats.requested_bytes().all().current()},
                       {"inactive_split_bytes", stats.inactive_split_bytes().all().current()},
                       {"fragmentation_ratio", FragmentationRatio(allocated, device.reserved_bytes() - unknown)},
                       {"num_ooms", stats.num_ooms()},
                       {"waiting", std::move(waiting)}});
  }
  return {{"id", session.id()},
          {"name", session.name()},
          {"pid", session.pid()},
          {"uid", session.uid()},
          {"rule", session.rule()},
          {"tenant", session.tenant()},
          {"priority", session.priority()},
          {"state", StateName(session.state())},
          {"started", absl::FormatTime(absl::RFC3339_full, absl::FromUnixSeconds(session.started().seconds()),
                                       absl::UTCTimeZone())},
          {"devices", std::move(devices)}};
}

Json ToJson(const v1::OutOfMemoryEvent& event) {
  return {{"refusal", event.out_of_memory().refusal()},
          {"time", absl::FormatTime(absl::RFC3339_full, TimeOf(event.time()), absl::UTCTimeZone())},
          {"session_id", event.session_id()},
          {"client", event.client()},
          {"uid", event.uid()},
          {"recorded", event.recorded()},
          {"out_of_memory", ToJson(event.out_of_memory())}};
}

Json ToJson(const v1::Device& device, const DeviceSums& sums) {
  const uint64_t known = sums.leased_bytes - std::min(sums.leased_bytes, sums.unknown_bytes);
  return {{"device", device.ordinal()},
          {"kind", KindName(device.kind())},
          {"name", device.name()},
          {"uuid", device.uuid()},
          {"total_bytes", device.total_bytes()},
          {"capacity_bytes", device.capacity_bytes()},
          {"reserved_bytes", device.reserved_bytes()},
          {"leased_bytes", sums.leased_bytes},
          {"allocated_bytes", sums.allocated_bytes},
          {"reclaimable_bytes", sums.reclaimable_bytes},
          {"idle_bytes", device.idle_bytes()},
          {"inactive_split_bytes", sums.inactive_split_bytes},
          {"quarantined_bytes", sums.quarantined_bytes},
          {"left_behind_bytes", sums.left_behind_bytes},
          {"carried_over_bytes", device.carried_over_bytes()},
          {"unknown_bytes", sums.unknown_bytes},
          {"fragmentation_ratio", FragmentationRatio(sums.allocated_bytes, known)},
          {"fault", device.fault()}};
}

}  // namespace vrambroker
