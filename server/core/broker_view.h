// SPDX-License-Identifier: Apache-2.0
//
// What operators see of a broker, at one moment: sessions and devices.
#ifndef VRAMBROKER_SERVER_CORE_BROKER_VIEW_H_
#define VRAMBROKER_SERVER_CORE_BROKER_VIEW_H_

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "allocator/device/device.h"
#include "allocator/heap/memory_stats.h"
#include "server/core/growth_queue.h"
#include "server/core/session.h"
#include "server/core/session_registry.h"
#include "server/core/tenant_refusals.h"
#include "server/pool/segment_pool.h"

namespace vrambroker {

struct SessionDeviceInfo {
  AccountFigures account;
  MemoryStats stats;
  struct Waiting {
    uint64_t bytes = 0;
    bool guarantee = false;
    std::chrono::milliseconds waited{0};
    std::chrono::milliseconds left{0};
    size_t place = 1;  // in the queue
  };
  uint64_t idle_bytes = 0;  // in segments that hold no block
  // Carried over by a remote session, whose allocator does not know it: neither allocated nor free.
  uint64_t unknown_bytes = 0;
  std::vector<Waiting> waiting;
  SessionRefusals::Counts ooms{};  // by OomCause
  // As of the last FragmentationWatch::Follow().
  struct Fragmentation {
    double bytes_per_second = 0;               // 0: no trend
    std::optional<double> seconds_to_refusal;  // at this rate; none: no trend
  };
  Fragmentation fragmentation;
};

struct SessionInfo {
  SessionId id{};
  std::string name;
  Caller caller;
  SessionState state = SessionState::kActive;
  std::chrono::system_clock::time_point started;
  SessionTerms terms;                      // of the policy, when it was opened
  bool leases = false;                     // its allocators are in the client
  std::vector<SessionDeviceInfo> devices;  // by ordinal
};

// What a session that is gone has left behind.
struct QuarantinedInfo {
  std::chrono::milliseconds age{0};
  Quarantine::Holding holding;
};

struct DeviceInfo {
  DeviceProperties properties;
  PoolFigures figures;
  std::vector<QuarantinedInfo> quarantine;
  std::vector<CarriedOver::Holding> carried_over;
  absl::Status health;
  FreeSizes idle_sizes;  // of the segments that the daemon caches
  ReclaimFigures reclaims;
  DeviceMeterFigures calls;
  uint64_t driver_free_bytes = 0;  // see PoolView
  GrowthFigures waits;
  std::chrono::milliseconds longest_waiting{0};    // 0: nothing waits
  std::array<uint64_t, kOomCauses.size()> ooms{};  // refusals ever, by OomCause
  uint64_t alloc_retries = 0;                      // of all sessions ever: requests that flushed their cache first

  // ---- Sums over the sessions ----

  MemoryStats stats;               // what they count themselves may be older than the rest
  uint64_t leased_bytes = 0;       // charged to live sessions; also what the driver is still to give
  uint64_t reclaimable_bytes = 0;  // of these, in segments that hold no block
  uint64_t unknown_bytes = 0;      // of these, carried over by remote sessions
  uint64_t quarantined_bytes = 0;  // of disconnected and ended ones, and left behind
  // By sessions that are gone, and carried over by processes without a session.
  uint64_t left_behind_bytes = 0;
};

struct BrokerView {
  std::vector<SessionInfo> sessions;  // by id
  std::vector<DeviceInfo> devices;    // by ordinal
  TenantRefusals::ByTenant refusals;
  SessionCounts counts;
  bool draining = false;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CORE_BROKER_VIEW_H_
