// SPDX-License-Identifier: Apache-2.0
//
// Snapshots of a broker for operators: sessions and devices.
#ifndef VRAMBROKER_SERVER_CORE_BROKER_VIEW_H_
#define VRAMBROKER_SERVER_CORE_BROKER_VIEW_H_

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "allocator/device/device.h"
#include "allocator/heap/memory_stats.h"
#include "server/core/claims.h"
#include "server/core/reconciliation.h"
#include "server/oom/tenant_refusals.h"
#include "server/pool/segment_pool.h"
#include "server/queue/request_queue.h"
#include "server/requests/waiting_requests.h"
#include "server/sessions/session_registry.h"
#include "server/sessions/session_view.h"

namespace vrambroker {

// Memory left behind by a closed session.
struct QuarantinedView {
  std::chrono::milliseconds age{0};
  Quarantine::Holding holding;
};

struct DeviceView {
  DeviceProperties properties;
  PoolStats pool;
  std::vector<QuarantinedView> quarantine;
  std::vector<CarriedOver::Holding> carried_over;
  absl::Status health;
  FreeSizes idle_sizes;  // of the segments that the daemon caches
  ReclaimStats reclaims;
  DeviceMeterStats calls;
  uint64_t driver_free_bytes = 0;  // see PoolView
  WaitStats waits;
  std::chrono::milliseconds longest_waiting{0};    // 0: no request waits
  std::array<uint64_t, kOomCauses.size()> ooms{};  // refusals ever, by OomCause
  uint64_t alloc_retries = 0;                      // by all sessions ever: requests that flushed their cache first
  GpuSensors sensors;
  // Processes that use the device; never null.
  std::shared_ptr<const DeviceProcesses> processes = std::make_shared<const DeviceProcesses>();

  // ---- Sums over the sessions ----

  MemoryStats stats;               // the sessions' own counts may be older than the rest
  uint64_t leased_bytes = 0;       // charged to live sessions; includes memory still to be given by the driver
  uint64_t reclaimable_bytes = 0;  // part of leased_bytes: segments without a block
  uint64_t unknown_bytes = 0;      // part of leased_bytes: carried over by remote sessions
  uint64_t quarantined_bytes = 0;  // held by disconnected and ended sessions, and left behind
  // Held by closed sessions, or carried over by processes without a session.
  uint64_t left_behind_bytes = 0;
};

struct ClaimDeviceView {
  uint64_t limit_bytes = 0;
  uint64_t guarantee_bytes = 0;
  uint64_t reserved_bytes = 0;     // charged to the claim's sessions, or left by ended sessions
  uint64_t left_behind_bytes = 0;  // part of reserved_bytes
  uint64_t allocated_bytes = 0;
  uint64_t idle_bytes = 0;                         // in segments without a block
  uint64_t peak_bytes = 0;                         // highest charge so far
  size_t waiting = 0;                              // requests
  ClaimWaits waits;                                // finished waits
  std::array<uint64_t, kOomCauses.size()> ooms{};  // by OomCause
};

struct ClaimView {
  Claim claim;
  std::vector<ClaimDeviceView> devices;  // by ordinal
};

struct BrokerView {
  std::vector<SessionView> sessions;  // by id
  std::vector<DeviceView> devices;    // by ordinal
  std::vector<ClaimView> claims;      // by name
  TenantRefusals::ByTenant refusals;
  SessionCounts counts;
  bool is_serving = true;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CORE_BROKER_VIEW_H_
