// SPDX-License-Identifier: Apache-2.0
#include "server/sessions/session_view.h"

#include <algorithm>

#include "allocator/heap/size_class.h"
#include "server/base/saturating.h"

namespace vrambroker {
namespace {

// Cuts the client's figures of free blocks to plausible values for a heap of `reserved` bytes.
void ClampFree(uint64_t reserved, FreeSizes& free) {
  uint64_t left = reserved;
  for (size_t i = 0; i < FreeSizes::kClasses; ++i) {
    free.bytes[i] = std::min(free.bytes[i], left);
    left -= free.bytes[i];
    free.blocks[i] = std::min(free.blocks[i], free.bytes[i] / FreeSizes::ClassBytes(i));
  }
  free.largest_bytes = std::min(free.largest_bytes, reserved - left);
}

}  // namespace

uint64_t IdleBytes(const Session& session, const AccountState& account, const MemoryStats& stats) {
  if (session.placement() == Placement::kCounted) return 0;  // the cache is known to the program alone
  // The allocator of a remote session does not know carried-over memory.
  const uint64_t unknown = session.leases() ? 0 : account.carried_over_bytes;
  const uint64_t in_use = stats.active_bytes.all.current + stats.inactive_split_bytes.all.current + unknown;
  return SaturatingSub(account.reserved_bytes, in_use);
}

SessionView ViewOf(const Session& session, absl::Span<const AccountState> accounts, SteadyTime now) {
  SessionView info{.id = session.id(),
                   .name = session.name(),
                   .caller = session.caller(),
                   .user = {},
                   .command = session.command(),
                   .state = session.state(),
                   .started = session.started(),
                   .terms = session.terms(),
                   .placement = session.placement(),
                   .idle = std::chrono::duration_cast<std::chrono::milliseconds>(
                       std::max(now - session.last_use(), SteadyTime::duration(0))),
                   .devices = {}};
  info.devices.reserve(accounts.size());
  for (size_t device = 0; device < accounts.size(); ++device) {
    info.devices.push_back(DeviceViewOf(session, static_cast<int>(device), accounts[device]));
  }
  return info;
}

SessionDeviceView DeviceViewOf(const Session& session, int device, const AccountState& account) {
  SessionDeviceView held;
  held.account = account;
  held.stats = session.GetMemoryStats(device);
  MemoryStats& stats = held.stats;
  if (session.leases()) {  // the client's counters may be late or false
    const uint64_t reserved = account.reserved_bytes;
    for (PoolStat* bytes : {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes, &stats.reserved_bytes,
                            &stats.inactive_split_bytes}) {
      bytes->all.current = std::min(bytes->all.current, reserved);
    }
    stats.allocation.all.current = std::min(stats.allocation.all.current, reserved / kMinBlockBytes);
    ClampFree(reserved, stats.free);
  }
  held.idle_bytes = IdleBytes(session, held.account, stats);
  const uint64_t known = stats.active_bytes.all.current + stats.inactive_split_bytes.all.current + held.idle_bytes;
  held.unknown_bytes = std::min(account.carried_over_bytes, SaturatingSub(account.reserved_bytes, known));
  held.ooms = session.refusals().GetCounts(device);
  return held;
}

}  // namespace vrambroker
