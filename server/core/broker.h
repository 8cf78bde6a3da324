// SPDX-License-Identifier: Apache-2.0
//
// Broker: the daemon's entry point for C++. Opens and ends sessions, and gives access to the serving parts. Independent
// of gRPC.
#ifndef VRAMBROKER_SERVER_CORE_BROKER_H_
#define VRAMBROKER_SERVER_CORE_BROKER_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "allocator/base/ids.h"
#include "allocator/base/mutex.h"
#include "allocator/device/session_mark.h"
#include "allocator/heap/allocator_options.h"
#include "server/base/random_token.h"
#include "server/base/shared_timer.h"
#include "server/base/worker_pool.h"
#include "server/core/broker_options.h"
#include "server/core/broker_view.h"
#include "server/core/claims.h"
#include "server/core/fragmentation_watch.h"
#include "server/core/idle_releases.h"
#include "server/core/operator_view.h"
#include "server/core/quarantine_checks.h"
#include "server/core/reconciliation.h"
#include "server/core/recordings.h"
#include "server/core/session_limits.h"
#include "server/identity/policy.h"
#include "server/identity/saved_settings.h"
#include "server/pool/segment_pool.h"
#include "server/requests/allocations.h"
#include "server/requests/charges.h"
#include "server/requests/check_device.h"
#include "server/requests/leases.h"
#include "server/requests/refusals.h"
#include "server/requests/waiting_requests.h"
#include "server/sessions/session.h"
#include "server/sessions/session_registry.h"

namespace vrambroker {

// Requested options of a new session.
struct OpenOptions {
  std::string name;                           // empty: the command name of the process
  std::optional<Limit> limit;                 // nullopt: the policy's
  std::optional<AllocatorOptions> allocator;  // nullopt: the broker's
  Placement placement = Placement::kRemote;
  std::optional<uint32_t> mark;        // the client's descriptor of the mark: see allocator/device/session_mark.h
  std::optional<RandomToken> earlier;  // token of the continued session, from an earlier daemon
  std::vector<uint32_t> devices{};     // usable devices, see NamedDevices(); empty: all
};

// Thread-safe. No call blocks; slow calls answer through a callback, called exactly once, perhaps before the call
// returns. All parts behave alike.
class Broker {
 public:
  // `pools` are indexed by device ordinal. Pools and workers outlive the broker.
  Broker(BrokerOptions options, std::vector<SegmentPool*> pools, Executor* workers);

  const BrokerOptions& options() const { return options_; }
  const std::string& run_id() const { return options_.run_id; }
  absl::Span<SegmentPool* const> pools() const { return pools_; }
  // NotFound for an unknown device.
  absl::Status CheckDevice(uint64_t device) const { return vrambroker::CheckDevice(device, pools_.size()); }

  // ---- Parts ----

  const SessionRegistry& sessions() const { return sessions_; }
  Allocations& allocations() { return allocations_; }
  Leases& leases() { return leases_; }
  Charges& charges() { return charges_; }
  WaitingRequests& waiting() { return waiting_; }
  Refusals& refusals() { return refusals_; }
  SessionLimits& limits() { return limits_; }
  SavedSettings& settings() { return settings_; }
  Claims& claims() { return claims_; }
  Recordings& recordings() { return recordings_; }
  FragmentationWatch& fragmentation() { return fragmentation_; }
  Reconciliation& reconciliation() { return reconciliation_; }
  IdleReleases& idle_releases() { return idle_releases_; }
  const OperatorView& operator_view() const { return operator_view_; }

  // ---- Sessions ----

  // Unavailable while draining; ResourceExhausted when the user has too many sessions; InvalidArgument for a bad name
  // or limit; PermissionDenied names the policy's rule lacking the right to open sessions. The limit is the smallest of
  // the requested limit, the policy's limit and per_process_memory_fraction. Watches the caller's process, and closes
  // the session when the process ends. An unwatchable process gets no session, since the memory would never be taken
  // back.
  absl::StatusOr<SessionPtr> OpenSession(const Caller& caller, const OpenOptions& options,
                                         std::shared_ptr<SessionEvents> events);
  // The session of a token. NotFound: no session has the token. PermissionDenied: the session belongs to another
  // process.
  absl::StatusOr<SessionPtr> FindToResume(const Caller& caller, const ResumeToken& token) const;
  // Resumes a session after a broken stream, with `events`; takes back segments not in `held`. Errors as
  // FindToResume(). Aborted: an operator ended it. Unavailable: the old stream still exists. Answers after the
  // session's running slow calls.
  using ResumeDone = std::function<void(absl::StatusOr<SessionPtr>)>;
  void ResumeSession(const Caller& caller, const ResumeToken& token, absl::flat_hash_set<SegmentId> held,
                     std::shared_ptr<SessionEvents> events, const ResumeDone& done);
  // Resumes a counted session on a new connection after the old connection broke; charges stay. Unavailable: the old
  // connection still exists, or has running calls. Answers after the session's running slow calls.
  void ResumeCounted(const SessionPtr& session, const ResumeDone& done);
  // Handles a broken stream: the session's memory stays charged until the process ends or resumes the session.
  void Disconnect(const SessionPtr& session);
  // The holder promises to touch no memory of the session again, so the memory becomes idle. `reason`: not
  // kProcessEnded.
  void Close(const SessionPtr& session, const std::string& why, CloseReason reason = CloseReason::kGoodbye);
  // Closes the session of an ended process: the memory is quarantined first.
  void CloseGone(const SessionPtr& session);
  // Ends the session for an operator: the client is told to close all memory. Returns the bytes still charged.
  uint64_t EndSession(const SessionPtr& session, const std::string& reason);

  // Called when the timer expires. Never blocks.
  void OnTimer();

  // ---- Policy ----

  std::shared_ptr<const Policy> policy() const ABSL_LOCKS_EXCLUDED(policy_mu_);
  // Applies to new sessions, and to the rights of every caller. Live sessions keep old terms.
  void SetPolicy(const std::shared_ptr<const Policy>& policy) ABSL_LOCKS_EXCLUDED(policy_mu_);
  // Describes a caller to the policy. Unauthenticated when its process has ended.
  static absl::StatusOr<PolicySubject> SubjectOf(const Caller& caller, const std::optional<std::string>& session_name);
  // Rights of a caller, apart from any session, by the policy or by the claim of the socket used. Errors as SubjectOf()
  // and Claims::TermsOf().
  absl::StatusOr<SessionTerms> TermsOf(const Caller& caller) const;

  // ---- Stopping ----

  // Opens no new sessions from now on. Tells live sessions, with `reason` unless empty.
  void Drain(const std::string& reason = "");
  // Wakes all waiting requests; later calls fail with Aborted.
  void CloseAll(const std::string& why);

 private:
  absl::StatusOr<SessionPtr> TryOpenSession(const Caller& caller, const OpenOptions& options,
                                            std::shared_ptr<SessionEvents> events);
  // FailedPrecondition: memory of a device cannot be shared with the caller's process.
  absl::Status CheckPidNamespace(const Caller& caller) const;
  // Terms of a new session, by the claim if any: call Claims::Leave() later. PermissionDenied without the right to open
  // sessions.
  absl::StatusOr<SessionTerms> TermsOfNew(const Policy& policy, const Caller& caller, const std::string& name,
                                          uint64_t started);
  // Opens the session's accounts with the smallest applicable limit, unless an operator `set` another limit. `started`:
  // start time of the process.
  void OpenAccounts(Session& session, const OpenOptions& options, const AllocatorOptions& allocator, uint64_t started,
                    const SessionSettings& set);
  // 0 when no device needs a mark, or the mark is unknown.
  SessionMark MarkOf(const Caller& caller, const OpenOptions& options);
  void LogOpened(const Session& session, const AllocatorOptions& allocator) const;
  void LogSet(const Session& session, const SessionSettings& set) const;
  // Closes the session when its process ends. After an error the session is closed already.
  absl::Status Watch(const SessionPtr& session);
  void Unwatch(Session& session);
  // Runs after the session's earlier slow calls. Errors as ResumeSession().
  static absl::Status Resume(LeasedSession& session, const absl::flat_hash_set<SegmentId>& held,
                             const std::shared_ptr<SessionEvents>& events);
  void Finish(const SessionPtr& session, const std::string& why, CloseReason reason);
  void LogClosed(const Session& session, const std::string& why, CloseReason reason, const SegmentPool::Closed& held,
                 std::optional<std::chrono::milliseconds> after_refusal) const;
  // Bytes charged to the session on all devices.
  uint64_t ReservedBytes(const Session& session) const;

  const BrokerOptions options_;
  const std::vector<SegmentPool*> pools_;
  Executor* const workers_;
  std::atomic<bool> warned_of_mark_{false};

  // Each part is thread-safe, and may use the parts above it.
  SavedSettings settings_;
  SharedTimer timer_;
  SessionRegistry sessions_;
  WaitingRequests waiting_;
  Refusals refusals_;
  Allocations allocations_;
  Leases leases_;
  Charges charges_;
  SessionLimits limits_;
  Claims claims_;
  Recordings recordings_;
  FragmentationWatch fragmentation_;
  Reconciliation reconciliation_;
  QuarantineChecks quarantine_checks_;
  IdleReleases idle_releases_;
  OperatorView operator_view_;

  mutable Mutex policy_mu_;  // guards only policy_; no other lock is taken under it
  std::shared_ptr<const Policy> policy_ ABSL_GUARDED_BY(policy_mu_);  // never null
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CORE_BROKER_H_
