// SPDX-License-Identifier: Apache-2.0
//
// BrokerOptions: a broker's configuration and its hooks into the daemon.
#ifndef VRAMBROKER_SERVER_CORE_BROKER_OPTIONS_H_
#define VRAMBROKER_SERVER_CORE_BROKER_OPTIONS_H_

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "allocator/base/unique_fd.h"
#include "allocator/heap/allocator_options.h"
#include "server/base/steady_time.h"
#include "server/core/claims.h"
#include "server/identity/policy.h"
#include "server/oom/tenant_refusals.h"
#include "server/sessions/session.h"

namespace vrambroker {

struct BrokerOptions {
  std::string run_id;                                 // unique to this run of the daemon
  std::shared_ptr<const Policy> policy;               // terms of each session; null: the default of every field
  AllocatorOptions allocator;                         // for sessions without options of their own
  size_t record_events = 0;                           // recorded events for new sessions; at most kMaxRecordedEvents
  bool is_record_events_set = true;                   // set by the operator: sessions that get less are told
  uint64_t max_recorded_events_per_uid = 10'000'000;  // for remote sessions, recorded in the daemon's memory
  SessionBounds session_bounds;
  size_t max_waiting_per_uid = 4096;                 // requests
  size_t max_tenants = TenantRefusals::kMaxTenants;  // tenants whose refusals are counted by name
  // Time limit for holders of reclaimable memory to give it back on request.
  std::chrono::milliseconds reclaim_timeout{2000};
  // See RequestQueueOptions.
  std::chrono::milliseconds hold_back_time{1000};
  Limit hold_back_limit = 1.0;                                               // of each device
  uint64_t overhead_allowance_bytes = uint64_t{1} << 30;                     // see Reconciliation
  std::chrono::milliseconds fragmentation_window = std::chrono::minutes(1);  // see FragmentationTrend
  std::function<SteadyTime()> clock = [] { return std::chrono::steady_clock::now(); };
  ClaimHooks claims;
  std::string settings_file;  // see SavedSettings; empty: none
  // The name of a user; empty: unknown, or not known yet. Never blocks.
  std::function<std::string(uid_t uid)> user_name = [](uid_t) { return std::string(); };
  // Calls Broker::OnTimer() at `time` or soon after; replaces the previous time. Called from any thread.
  std::function<void(SteadyTime time)> set_timer = [](SteadyTime) {};
  // Calls `gone`, from any thread, when the process of `pidfd` has ended; perhaps more than once. The result is passed
  // to unwatch_process, called once by the broker.
  std::function<absl::StatusOr<int>(const UniqueFd& pidfd, std::function<void()> gone)> watch_process;
  std::function<void(int watch)> unwatch_process;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CORE_BROKER_OPTIONS_H_
