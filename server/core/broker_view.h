// SPDX-License-Identifier: Apache-2.0
//
// What operators see of a broker, at one moment: sessions and devices.
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

// What a session that is gone has left behind.
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
  std::chrono::milliseconds longest_waiting{0};    // 0: nothing waits
  std::array<uint64_t, kOomCauses.size()> ooms{};  // refusals ever, by OomCause
  uint64_t alloc_retries = 0;                      // of all sessions ever: requests that flushed their cache first
  GpuSensors sensors;
  // That use it; never null.
  std::shared_ptr<const DeviceProcesses> processes = std::make_shared<const DeviceProcesses>();

  // ---- Sums over the sessions ----

  MemoryStats stats;               // what they count themselves may be older than the rest
  uint64_t leased_bytes = 0;       // charged to live sessions; also what the driver is still to give
  uint64_t reclaimable_bytes = 0;  // of these, in segments that hold no block
  uint64_t unknown_bytes = 0;      // of these, carried over by remote sessions
  uint64_t quarantined_bytes = 0;  // of disconnected and ended ones, and left behind
  // By sessions that are gone, and carried over by processes without a session.
  uint64_t left_behind_bytes = 0;
};

struct ClaimDeviceView {
  uint64_t limit_bytes = 0;
  uint64_t guarantee_bytes = 0;
  uint64_t reserved_bytes = 0;     // charged: to its sessions, and what ended ones have left
  uint64_t left_behind_bytes = 0;  // of these
  uint64_t allocated_bytes = 0;
  uint64_t idle_bytes = 0;                         // in segments that hold no block
  uint64_t peak_bytes = 0;                         // the most that was charged at a time
  size_t waiting = 0;                              // requests
  ClaimWaits waits;                                // that are over
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
