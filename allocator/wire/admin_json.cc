// SPDX-License-Identifier: Apache-2.0
#include "allocator/wire/admin_json.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "allocator/heap/memory_stats.h"
#include "allocator/wire/device_kind.h"
#include "allocator/wire/out_of_memory_json.h"

namespace vrambroker {
namespace {

using Json = nlohmann::ordered_json;

Json ReadingJson(bool is_known, const v1::Reading& reading) {
  return is_known ? Json(reading.value()) : Json(nullptr);
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

const char* StateName(v1::ClaimState state) {
  switch (state) {
    case v1::CLAIM_STATE_ACTIVE:
      return "active";
    case v1::CLAIM_STATE_DRAINING:
      return "draining";
    case v1::CLAIM_STATE_REVOKED:
      return "revoked";
    default:
      return "unknown";
  }
}

const char* ProcessKindName(v1::DeviceProcess::Kind kind) {
  switch (kind) {
    case v1::DeviceProcess::DAEMON:
      return "daemon";
    case v1::DeviceProcess::CLIENT:
      return "client";
    case v1::DeviceProcess::UNCOUNTED:
      return "uncounted";
    default:
      return "unknown";
  }
}

Json ToJson(const v1::OutOfMemory& oom) {
  return Json::parse(OutOfMemoryJson(oom));
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

uint64_t FreeBytes(const v1::Device& device) {
  if (device.has_free_bytes()) return device.free_bytes();
  const uint64_t held = device.reserved_bytes() - std::min(device.reserved_bytes(), device.idle_bytes());
  return device.capacity_bytes() - std::min(device.capacity_bytes(), held);
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
                       {"used_bytes", device.used_bytes()},
                       {"overhead_bytes", device.overhead_bytes()},
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
          {"user", session.user()},
          {"command", session.command()},
          {"rule", session.rule()},
          {"tenant", session.tenant()},
          {"placement", session.placement()},
          {"claim", session.claim()},
          {"priority", session.priority()},
          {"state", StateName(session.state())},
          {"started", absl::FormatTime(absl::RFC3339_full, absl::FromUnixSeconds(session.started().seconds()),
                                       absl::UTCTimeZone())},
          {"idle_ms", session.optional_idle_case() == v1::Session::kIdleMs ? Json(session.idle_ms()) : Json(nullptr)},
          {"devices", std::move(devices)}};
}

Json ToJson(const v1::Claim& claim) {
  const v1::ClaimTerms& terms = claim.terms();
  Json devices = Json::array();
  for (const v1::ClaimDevice& device : claim.devices()) {
    devices.push_back({{"device", device.device()},
                       {"limit_bytes", device.limit_bytes()},
                       {"guarantee_bytes", device.guarantee_bytes()},
                       {"reserved_bytes", device.reserved_bytes()},
                       {"left_behind_bytes", device.left_behind_bytes()},
                       {"allocated_bytes", device.allocated_bytes()},
                       {"idle_bytes", device.idle_bytes()},
                       {"waiting", device.waiting()},
                       {"peak_bytes", device.peak_bytes()},
                       {"waits", device.waits()},
                       {"waited_ms", device.waited_ms()},
                       {"refusals", device.refusals()}});
  }
  Json labels = Json::object();
  for (const auto& [key, value] : std::map<std::string, std::string>(terms.labels().begin(), terms.labels().end())) {
    labels[key] = value;
  }
  const bool is_anybodys = terms.owner_case() == v1::ClaimTerms::kAnyOwner && terms.any_owner();
  return {{"name", claim.name()},
          {"state", StateName(claim.state())},
          {"owner_uid", is_anybodys || !claim.rule().empty() ? Json(nullptr) : Json(terms.owner_uid())},
          {"owner_gid", terms.has_owner_gid() ? Json(terms.owner_gid()) : Json(nullptr)},
          {"priority", terms.priority()},
          {"tenant", terms.tenant()},
          {"max_wait_ms", terms.has_max_wait_ms() ? Json(terms.max_wait_ms()) : Json(nullptr)},
          {"labels", std::move(labels)},
          {"created", absl::FormatTime(absl::RFC3339_full, TimeOf(claim.created()), absl::UTCTimeZone())},
          {"socket_dir", claim.socket_dir()},
          {"rule", claim.rule()},
          {"own", claim.own()},
          {"maker_pid", claim.maker_pid() != 0 ? Json(claim.maker_pid()) : Json(nullptr)},
          {"sessions", claim.sessions()},
          {"refusals", claim.refusals()},
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
  Json processes = Json::array();
  for (const v1::DeviceProcess& process : device.processes()) {
    processes.push_back({{"pid", process.pid()},
                         {"uid", process.uid()},
                         {"name", process.name()},
                         {"kind", ProcessKindName(process.kind())},
                         {"used_bytes", process.used_bytes()},
                         {"charged_bytes", process.charged_bytes()},
                         {"overhead_bytes", process.overhead_bytes()},
                         {"drift_bytes", process.drift_bytes()}});
  }
  return {{"device", device.ordinal()},
          {"kind", KindName(device.kind())},
          {"name", device.name()},
          {"uuid", device.uuid()},
          {"total_bytes", device.total_bytes()},
          {"capacity_bytes", device.capacity_bytes()},
          {"free_bytes", FreeBytes(device)},
          {"kept_free_bytes", device.kept_free_bytes()},
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
          {"use_percent", ReadingJson(device.has_use_percent(), device.use_percent())},
          {"temperature_celsius", ReadingJson(device.has_temperature_celsius(), device.temperature_celsius())},
          {"power_watts", ReadingJson(device.has_power_watts(), device.power_watts())},
          {"processes", std::move(processes)},
          {"processes_fault", device.processes_fault()},
          {"fault", device.fault()}};
}

}  // namespace vrambroker
