// SPDX-License-Identifier: Apache-2.0
//
// Broker: the daemon's front door in C++ terms. Who may do what, and what happens then. Knows no gRPC.
#ifndef VRAMBROKER_SERVER_BROKER_H_
#define VRAMBROKER_SERVER_BROKER_H_

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "allocator/allocator_options.h"
#include "allocator/events.h"
#include "allocator/ids.h"
#include "allocator/memory_stats.h"
#include "allocator/mutex.h"
#include "server/out_of_memory.h"
#include "server/segment_pool.h"
#include "server/session.h"
#include "server/worker_pool.h"

namespace vrambroker {

// An upper bound in bytes, or a fraction of a device's capacity.
using Limit = std::variant<uint64_t, double>;

// Bytes that `limit` comes to on a device: floor(fraction * capacity), or the bytes, at most the capacity.
// REQUIRES: a fraction is within [0, 1].
uint64_t LimitBytes(const Limit& limit, uint64_t capacity_bytes);

// Events that a session may keep for snapshots, on each device.
inline constexpr uint64_t kMaxRecordedEvents = 1'000'000;

struct BrokerOptions {
  Limit session_limit = 1.0;   // the most that any session may reserve
  AllocatorOptions allocator;  // of sessions that bring none of their own
  size_t record_events = 0;    // what new sessions keep; at most kMaxRecordedEvents
  size_t max_sessions_per_uid = 1024;
  size_t max_blocks_per_session = 1 << 20;
  // Calls `gone`, from any thread, when the process of `pidfd` has ended; perhaps more than once. The result is for
  // unwatch_process, which the broker calls once.
  std::function<absl::StatusOr<int>(const UniqueFd& pidfd, std::function<void()> gone)> watch_process;
  std::function<void(int watch)> unwatch_process;
};

// What a session asks for when it is opened.
struct SessionWishes {
  std::string name;                           // empty: the command name of the process
  std::optional<Limit> limit;                 // none: what the policy allows
  std::optional<AllocatorOptions> allocator;  // none: the broker's
};

struct SessionDeviceInfo {
  AccountFigures account;
  MemoryStats stats;
};

struct SessionInfo {
  SessionId id{};
  std::string name;
  Caller caller;
  SessionState state = SessionState::kActive;
  std::chrono::system_clock::time_point started;
  std::vector<SessionDeviceInfo> devices;  // by ordinal
};

using SessionPtr = std::shared_ptr<Session>;
using SessionRef = std::variant<SessionId, std::string>;  // by id or by unique name

// Safe to call from any thread. No call blocks; what may take time answers through its callback, which is called
// exactly once, perhaps before the call returns.
class Broker {
 public:
  // `pools` by device ordinal. Pools and workers outlive the broker.
  Broker(BrokerOptions options, std::vector<SegmentPool*> pools, WorkerPool* workers);

  absl::Span<SegmentPool* const> pools() const { return pools_; }

  // ---- Sessions ----

  // Unavailable while draining; ResourceExhausted when the user has too many; InvalidArgument for a bad name or limit.
  // The limit is the smallest of what is wished for, what the policy allows and per_process_memory_fraction. Watches
  // the caller's process: when it ends, the session is closed. A process that cannot be watched gets no session, since
  // nobody would take its memory back.
  absl::StatusOr<SessionPtr> OpenSession(const Caller& caller, const SessionWishes& wishes,
                                         std::shared_ptr<SessionEvents> events);
  // The stream of the session broke: what it holds stays charged until its process ends.
  void Disconnect(const SessionPtr& session);
  // The session's holder can touch nothing any more: all that it held becomes idle.
  void Close(const SessionPtr& session, const std::string& why);

  // NotFound, or PermissionDenied when the session is another process's.
  absl::StatusOr<SessionPtr> FindSession(SessionId id, const Caller& caller) const;
  absl::StatusOr<SessionPtr> FindSession(const SessionRef& ref) const;

  // ---- Memory ----

  using AllocateDone = std::function<void(absl::StatusOr<Allocation>)>;
  // OutOfMemoryError() when there is no memory; ResourceExhausted when too many calls of the session wait;
  // InvalidArgument for 0 bytes; NotFound for an unknown device.
  void Allocate(const SessionPtr& session, uint64_t device, uint64_t requested, Stream stream,
                const AllocateDone& done);
  absl::Status Free(const SessionPtr& session, absl::Span<const BlockId> blocks);
  // Answers with the bytes given back. ResourceExhausted when too many calls of the session wait.
  void EmptyCache(const SessionPtr& session, const std::function<void(absl::StatusOr<uint64_t>)>& done);
  // NotFound for an unknown device.
  absl::Status CheckDevice(uint64_t device) const;

  // ---- Operators ----

  std::vector<SessionInfo> ListSessions() const;
  SessionInfo Describe(const Session& session) const;
  absl::Status SetLimit(const SessionPtr& session, const Limit& limit);
  // Keeps the last `max_events` events of each of the session's heaps for snapshots; 0: none. InvalidArgument above
  // kMaxRecordedEvents.
  absl::Status SetRecording(const SessionPtr& session, uint64_t max_events);
  // Ends the session; returns the bytes that stay charged until the client or its process lets go.
  uint64_t EndSession(const SessionPtr& session, const std::string& reason);

  // Refusals on a device so far.
  uint64_t OomCount(int device, OomCause cause) const;

  // ---- Stopping ----

  // From now on no new session; live ones are told.
  void Drain();
  size_t session_count() const;
  // Wakes everything that waits; later calls fail with Aborted.
  void CloseAll(const std::string& why);

 private:
  void Unwatch(Session& session);
  // Counts, logs and explains a refusal.
  absl::Status Refuse(Session& session, int device, uint64_t requested, Stream stream, OomCause refusal);
  std::vector<SessionPtr> Sessions() const ABSL_LOCKS_EXCLUDED(mu_);
  std::string UniqueName(absl::string_view wanted) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Constant after construction.
  const BrokerOptions options_;
  const std::vector<SegmentPool*> pools_;
  WorkerPool& workers_;

  // Synchronises itself.
  std::vector<std::array<std::atomic<uint64_t>, kOomCauses.size()>> ooms_;  // by device, then cause

  // Held to look up and to record. Never while calling an allocator or the driver, or writing to a client.
  mutable Mutex mu_;
  absl::btree_map<SessionId, SessionPtr> sessions_ ABSL_GUARDED_BY(mu_);
  absl::btree_map<std::string, SessionId, std::less<>> names_ ABSL_GUARDED_BY(mu_);
  absl::btree_map<uid_t, size_t> sessions_of_uid_ ABSL_GUARDED_BY(mu_);
  uint64_t next_session_ ABSL_GUARDED_BY(mu_) = 1;
  bool draining_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_BROKER_H_
