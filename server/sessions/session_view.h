// SPDX-License-Identifier: Apache-2.0
//
// SessionView: snapshot of a session for operators, from its accounts with the pools and its allocators' counters. A
// leasing client reports counters, perhaps late or false: its figures are cut to plausible values.
#ifndef VRAMBROKER_SERVER_SESSIONS_SESSION_VIEW_H_
#define VRAMBROKER_SERVER_SESSIONS_SESSION_VIEW_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "allocator/heap/memory_stats.h"
#include "server/pool/ledger.h"
#include "server/sessions/session.h"

namespace vrambroker {

struct SessionDeviceView {
  AccountState account;
  MemoryStats stats;
  struct Waiting {
    uint64_t bytes = 0;
    bool guarantee = false;
    std::chrono::milliseconds waited{0};
    std::chrono::milliseconds left{0};
    size_t place = 1;  // in the queue
  };
  uint64_t idle_bytes = 0;  // in segments without a block
  // Carried over by a remote session, and unknown to its allocator: neither allocated nor free.
  uint64_t unknown_bytes = 0;
  // Used by the process, with its context; set for the first session of a process. 0: unknown. See Reconciliation.
  uint64_t used_bytes = 0;
  uint64_t overhead_bytes = 0;  // part of used_bytes: beyond the charge for the process's own memory
  std::vector<Waiting> waiting;
  SessionRefusals::Counts ooms{};  // by OomCause
  // As of the last FragmentationWatch::Follow().
  struct Fragmentation {
    double bytes_per_second = 0;               // 0: no trend
    std::optional<double> seconds_to_refusal;  // at the current rate; nullopt: no trend
  };
  Fragmentation fragmentation;
};

struct SessionView {
  SessionId id{};
  std::string name;
  Caller caller;
  std::string user;     // name of the caller's uid; empty: unknown
  std::string command;  // see CommandOf()
  SessionState state = SessionState::kActive;
  std::chrono::system_clock::time_point started;
  SessionTerms terms;  // from the policy, at opening
  Placement placement = Placement::kRemote;
  std::chrono::milliseconds idle{0};       // since Session::last_use()
  std::vector<SessionDeviceView> devices;  // by ordinal
};

// Bytes in segments without a block.
uint64_t IdleBytes(const Session& session, const AccountState& account, const MemoryStats& stats);

SessionDeviceView DeviceViewOf(const Session& session, int device, const AccountState& account);
// `accounts`: the session's, by device. Leaves `user` empty.
SessionView ViewOf(const Session& session, absl::Span<const AccountState> accounts, SteadyTime now);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_SESSIONS_SESSION_VIEW_H_
