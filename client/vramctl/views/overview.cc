// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/views/overview.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "allocator/wire/admin_json.h"

namespace vrambroker::vramctl {
namespace {

// Sums a figure over all sessions.
template <typename Figure>
uint64_t SumOn(const Overview& overview, const v1::Device& device, const Figure& figure) {
  uint64_t sum = 0;
  for (const v1::Session& session : overview.sessions.sessions()) {
    for (const v1::SessionDevice& held : session.devices()) {
      if (held.device() == device.ordinal()) sum += figure(held);
    }
  }
  return sum;
}

// Sums the memory of disconnected and ended sessions with live processes.
uint64_t DetachedBytes(const Overview& overview, const v1::Device& device) {
  uint64_t sum = 0;
  for (const v1::Session& session : overview.sessions.sessions()) {
    if (session.state() == v1::SESSION_STATE_ACTIVE) continue;
    for (const v1::SessionDevice& held : session.devices()) {
      if (held.device() == device.ordinal()) sum += held.reserved_bytes();
    }
  }
  return sum;
}

uint64_t Less(uint64_t bytes, uint64_t taken) {
  return bytes - std::min(bytes, taken);
}

// Splits a session's memory into parts, without free memory. The statistics may be a second older than
// `reserved_bytes`: amounts beyond `reserved_bytes` are ignored, so that bars are never too long.
PartBytes Held(const v1::SessionDevice& device) {
  const v1::MemoryStats& stats = device.stats();
  uint64_t left = device.reserved_bytes();
  const auto take = [&left](uint64_t bytes) {
    const uint64_t taken = std::min(bytes, left);
    left -= taken;
    return taken;
  };
  const uint64_t allocated = stats.allocated_bytes().all().current();
  PartBytes parts;
  parts[Part::kAllocated] = take(allocated);
  parts[Part::kPending] = take(Less(stats.active_bytes().all().current(), allocated));
  parts[Part::kFragmented] = take(stats.inactive_split_bytes().all().current());
  parts[Part::kReclaimable] = take(device.idle_bytes());
  parts[Part::kUnknown] = take(device.carried_over_bytes());
  parts[Part::kFragmented] += left;
  return parts;
}

}  // namespace

uint64_t AllocatedBytes(const Overview& overview, const v1::Device& device) {
  return SumOn(overview, device,
               [](const v1::SessionDevice& held) { return held.stats().allocated_bytes().all().current(); });
}

uint64_t HeldBySessions(const Overview& overview, const v1::Device& device) {
  return SumOn(overview, device, [](const v1::SessionDevice& held) { return held.reserved_bytes(); });
}

PartBytes PartsOf(const v1::SessionDevice& device) {
  PartBytes parts = Held(device);
  parts[Part::kFree] = Less(device.limit_bytes(), device.reserved_bytes());
  return parts;
}

PartBytes PartsOf(const Overview& overview, const v1::Device& device) {
  PartBytes parts;
  for (const v1::Session& session : overview.sessions.sessions()) {
    for (const v1::SessionDevice& held : session.devices()) {
      if (held.device() == device.ordinal()) parts.Add(Held(held));
    }
  }
  for (const v1::ListQuarantineResponse::Holding& holding : overview.quarantine.holdings()) {
    if (holding.device() == device.ordinal()) parts[Part::kLeftBehind] += holding.bytes();
  }
  parts[Part::kCached] = device.idle_bytes();
  parts[Part::kFree] = Less(device.capacity_bytes(), parts.Sum());
  return parts;
}

nlohmann::ordered_json DevicesJson(const Overview& overview) {
  nlohmann::ordered_json devices = nlohmann::ordered_json::array();
  for (const v1::Device& device : overview.devices.devices()) {
    const uint64_t left_behind = PartsOf(overview, device)[Part::kLeftBehind];
    devices.push_back(ToJson(
        device,
        {.allocated_bytes = AllocatedBytes(overview, device),
         .leased_bytes = HeldBySessions(overview, device),
         .reclaimable_bytes = SumOn(overview, device, [](const v1::SessionDevice& held) { return held.idle_bytes(); }),
         .inactive_split_bytes =
             SumOn(overview, device,
                   [](const v1::SessionDevice& held) { return held.stats().inactive_split_bytes().all().current(); }),
         .quarantined_bytes = left_behind + DetachedBytes(overview, device),
         .left_behind_bytes = left_behind,
         .unknown_bytes = SumOn(overview, device, UnknownBytes)}));
  }
  return devices;
}

}  // namespace vrambroker::vramctl
