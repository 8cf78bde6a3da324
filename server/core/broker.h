// SPDX-License-Identifier: Apache-2.0
//
// Broker: the daemon's front door in C++ terms. Opens and ends sessions, and leads to the parts that serve them. Knows
// no gRPC.
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

// What a session asks for when it is opened.
struct OpenOptions {
  std::string name;                           // empty: the command name of the process
  std::optional<Limit> limit;                 // none: what the policy allows
  std::optional<AllocatorOptions> allocator;  // none: the broker's
  Placement placement = Placement::kRemote;
  std::optional<uint32_t> mark;        // the client's descriptor of it: see allocator/device/session_mark.h
  std::optional<RandomToken> earlier;  // of the session that it goes on from, which an earlier daemon had
  std::vector<uint32_t> devices{};     // those that it is to have memory of, see NamedDevices(); empty: all
};

// Safe to call from any thread. No call blocks; what may take time answers through its callback, which is called
// exactly once, perhaps before the call returns. The same holds for its parts.
class Broker {
 public:
  // `pools` by device ordinal. Pools and workers outlive the broker.
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

  // Unavailable while draining; ResourceExhausted when the user has too many; InvalidArgument for a bad name or limit;
  // PermissionDenied names the rule of the policy that gives no right to open sessions.
  // The limit is the smallest of what is wished for, what the policy allows and per_process_memory_fraction. Watches
  // the caller's process: when it ends, the session is closed. A process that cannot be watched gets no session, since
  // nobody would take its memory back.
  absl::StatusOr<SessionPtr> OpenSession(const Caller& caller, const OpenOptions& options,
                                         std::shared_ptr<SessionEvents> events);
  // The session of a token. NotFound: there is none. PermissionDenied: it is another process's.
  absl::StatusOr<SessionPtr> FindToResume(const Caller& caller, const ResumeToken& token) const;
  // A session whose stream broke goes on with `events`; segments that are not among `held` are taken back. Errors as
  // FindToResume(). Aborted: an operator ended it. Unavailable: its old stream is still there. Answers later; the
  // session's slow calls that were under way end first.
  using ResumeDone = std::function<void(absl::StatusOr<SessionPtr>)>;
  void ResumeSession(const Caller& caller, const ResumeToken& token, absl::flat_hash_set<SegmentId> held,
                     std::shared_ptr<SessionEvents> events, const ResumeDone& done);
  // A counted session whose connection broke goes on with another one; what it is charged stays. Unavailable: its
  // connection is still there, or calls of it are. Answers later, when its slow calls that were under way have ended.
  void ResumeCounted(const SessionPtr& session, const ResumeDone& done);
  // The stream of the session broke: what it holds stays charged until its process ends, or resumes it.
  void Disconnect(const SessionPtr& session);
  // The session's holder says that it touches nothing any more: all that it held becomes idle. `reason`: not
  // kProcessEnded.
  void Close(const SessionPtr& session, const std::string& why, CloseReason reason = CloseReason::kGoodbye);
  // Its process has ended: what it held is quarantined first.
  void CloseGone(const SessionPtr& session);
  // An operator ends the session: its client is told to close what it holds. Returns the bytes that are still charged.
  uint64_t EndSession(const SessionPtr& session, const std::string& reason);

  // The timer that was set has run out. Never blocks.
  void OnTimer();

  // ---- Policy ----

  std::shared_ptr<const Policy> policy() const ABSL_LOCKS_EXCLUDED(policy_mu_);
  // For sessions that are opened from now on, and for the rights of every caller. Live sessions keep their terms.
  void SetPolicy(const std::shared_ptr<const Policy>& policy) ABSL_LOCKS_EXCLUDED(policy_mu_);
  // What the policy knows of a caller. Unauthenticated when its process has ended meanwhile.
  static absl::StatusOr<PolicySubject> SubjectOf(const Caller& caller, const std::optional<std::string>& session_name);
  // What a caller may do, apart from any session: by the policy, or by the claim whose socket it has connected to.
  // Errors as SubjectOf() and Claims::TermsOf().
  absl::StatusOr<SessionTerms> TermsOf(const Caller& caller) const;

  // ---- Stopping ----

  // From now on no new session; live ones are told, with the `reason` if there is one.
  void Drain(const std::string& reason = "");
  // Wakes everything that waits; later calls fail with Aborted.
  void CloseAll(const std::string& why);

 private:
  absl::StatusOr<SessionPtr> TryOpenSession(const Caller& caller, const OpenOptions& options,
                                            std::shared_ptr<SessionEvents> events);
  // FailedPrecondition: memory of a device could not be shared with the caller's process.
  absl::Status CheckPidNamespace(const Caller& caller) const;
  // The terms of a session that is to be opened: PermissionDenied without the right to have one.
  // By its claim, if it has one: Claims::Leave() is to follow.
  absl::StatusOr<SessionTerms> TermsOfNew(const Policy& policy, const Caller& caller, const std::string& name,
                                          uint64_t started);
  // Its accounts, with the smallest limit that applies, unless an operator has `set` another one. `started`: when its
  // process was.
  void OpenAccounts(Session& session, const OpenOptions& options, const AllocatorOptions& allocator, uint64_t started,
                    const SessionSettings& set);
  // 0 when no device needs it, or it cannot be told.
  SessionMark MarkOf(const Caller& caller, const OpenOptions& options);
  void LogOpened(const Session& session, const AllocatorOptions& allocator) const;
  void LogSet(const Session& session, const SessionSettings& set) const;
  // The session is closed when its process ends. An error: it is closed already.
  absl::Status Watch(const SessionPtr& session);
  void Unwatch(Session& session);
  // After the slow calls that were under way. Errors as ResumeSession().
  static absl::Status Resume(LeasedSession& session, const absl::flat_hash_set<SegmentId>& held,
                             const std::shared_ptr<SessionEvents>& events);
  void Finish(const SessionPtr& session, const std::string& why, CloseReason reason);
  void LogClosed(const Session& session, const std::string& why, CloseReason reason, const SegmentPool::Closed& held,
                 std::optional<std::chrono::milliseconds> after_refusal) const;
  // Charged to the session, on all devices.
  uint64_t ReservedBytes(const Session& session) const;

  const BrokerOptions options_;
  const std::vector<SegmentPool*> pools_;
  Executor* const workers_;
  std::atomic<bool> warned_of_mark_{false};

  // Each is thread-safe, and may use those before it.
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

  mutable Mutex policy_mu_;  // held for nothing but this; no other lock is taken
  std::shared_ptr<const Policy> policy_ ABSL_GUARDED_BY(policy_mu_);  // never null
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CORE_BROKER_H_
