// SPDX-License-Identifier: Apache-2.0
//
// Refusals: explains, counts, logs and stores refusals of memory to sessions.
#ifndef VRAMBROKER_SERVER_REQUESTS_REFUSALS_H_
#define VRAMBROKER_SERVER_REQUESTS_REFUSALS_H_

#include <sys/types.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "allocator/base/ids.h"
#include "allocator/heap/fit_report.h"
#include "server/base/steady_time.h"
#include "server/base/user_slots.h"
#include "server/oom/oom_log.h"
#include "server/oom/out_of_memory.h"
#include "server/oom/refusal_recordings.h"
#include "server/oom/tenant_refusals.h"
#include "server/pool/segment_pool.h"
#include "server/queue/request_queue.h"
#include "server/sessions/counted_session.h"
#include "server/sessions/leased_session.h"
#include "server/sessions/remote_session.h"
#include "server/sessions/session_registry.h"

namespace vrambroker {

// A request of a client's own allocator left without memory by a refused lease.
struct RefusedRequest {
  OomCause cause = OomCause::kCapacity;
  uint64_t requested_bytes = 0;
  uint64_t allocated_bytes = 0;  // by the session
  FitReport fit;
};

// Thread-safe. No call blocks.
class Refusals {
 public:
  using Done = std::function<void(absl::Status)>;
  using Counts = SessionRefusals::Counts;
  using Events = std::vector<std::shared_ptr<const OomEvent>>;

  // All arguments outlive the object. `pools` are indexed by device. `max_tenants`: see TenantRefusals.
  Refusals(std::function<SteadyTime()> clock, const SessionBounds& session_bounds, std::vector<SegmentPool*> pools,
           const SessionRegistry* sessions, size_t max_tenants = TenantRefusals::kMaxTenants);

  // ---- Refusing ----

  // A refused request of a remote session.
  struct RemoteRequest {
    uint64_t bytes = 0;
    Stream stream = 0;
    ScopeId scope = 0;
    OomCause cause = OomCause::kCapacity;  // why the session could not grow
    WaitRecord outcome;                    // steps taken for the request
  };
  // Answers with OutOfMemoryError() once the refusal is counted, logged and stored. Before, stores the session's
  // recording, if a recording is due.
  void Refuse(RemoteSession& session, int device, const RemoteRequest& request, const Done& done);
  // As Refuse(), for a request of the client's own allocator. Asks the client for its recording. NotFound for an
  // unknown device, FailedPrecondition for a remote session.
  void Explain(const SessionPtr& session, uint64_t device, const RefusedRequest& request, const Done& done);
  // OutOfMemoryError() for a lease with `bytes` in the largest segment. Counts nothing: the client calls Explain() when
  // the refusal mattered.
  absl::Status LeaseError(const LeasedSession& session, int device, uint64_t bytes, OomCause cause,
                          const WaitRecord& outcome) const;

  // A refused charge of a counted session.
  struct ChargeRefusal {
    uint64_t bytes = 0;
    OomCause cause = OomCause::kCapacity;
    WaitRecord outcome;
  };
  // Answers with OutOfMemoryError() once the refusal is counted, logged and stored.
  void RefuseCharge(CountedSession& session, int device, const ChargeRefusal& refusal, const Done& done);
  // As RefuseCharge() without counting: the client retries, with may_reclaim.
  absl::Status ChargeError(const CountedSession& session, int device, const ChargeRefusal& refusal) const;

  // ---- Stored refusals ----

  // The last refusals on all devices.
  const OomLog& log() const { return log_; }
  // Newest first; for all users, or for the sessions of a single user.
  Events Last(std::optional<uid_t> uid) const;
  // As Last(), for a single session, perhaps ended. A name may have been used by several sessions. InvalidArgument when
  // a number is a session's id and a different session's name.
  absl::StatusOr<Events> LastOf(const SessionRef& ref, std::optional<uid_t> uid = std::nullopt) const;
  // Recordings kept for some refusals.
  const RefusalRecordings& recordings() const { return recordings_; }

  // ---- Counters ----

  Counts GetCounts(int device) const;
  TenantRefusals::ByTenant GetByTenant() const { return tenants_.Get(); }
  // Counts refusals of the tenant from now on.
  void AddTenant(absl::string_view tenant) { tenants_.Add(tenant); }
  void ForgetTenant(absl::string_view tenant) { tenants_.Forget(tenant); }
  // Likewise for claims, by name.
  TenantRefusals::ByTenant GetByClaim() const { return claims_.Get(); }
  void AddClaim(absl::string_view claim) { claims_.Add(claim); }
  void ForgetClaim(absl::string_view claim) { claims_.Forget(claim); }
  // Counts the closed `session` for its tenant if it ended soon after a refusal. Returns the time since the last
  // refusal.
  std::optional<std::chrono::milliseconds> CountEndedAfterRefusal(Session& session);

 private:
  // Figures of the session and the device, using the pool's consistent `look`.
  OomReport Report(const Session& session, int device, const PoolLook& look) const;
  // Adds figures of all sessions, for a refusal shown to people. `outcome`: which sessions were asked.
  void AddOthersOf(const Session& session, const PoolLook& look, const WaitRecord& outcome, OomReport* report) const;
  // First stores the session's recording, if a recording is due.
  void End(const SessionPtr& session, OomReport report, bool is_recording, const Done& done);
  // Stores the session's recording, and notes the recording in `report`.
  void Keep(Session& session, OomReport* report);
  absl::Status Count(Session& session, const OomReport& report);
  // Report for a session without known blocks: the requested bytes are the needed bytes.
  OomReport ReportOfWhole(const Session& session, int device, const PoolLook& look, uint64_t bytes, OomCause cause,
                          const WaitRecord& outcome) const;

  const std::function<SteadyTime()> clock_;
  const SessionBounds session_bounds_;
  const std::vector<SegmentPool*> pools_;
  const SessionRegistry& sessions_;

  std::vector<std::array<std::atomic<uint64_t>, kOomCauses.size()>> counts_;  // by device, then cause
  std::atomic<uint64_t> last_number_{0};
  OomLog log_;
  TenantRefusals tenants_;
  TenantRefusals claims_;
  UserSlots recording_slots_;
  RefusalRecordings recordings_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_REQUESTS_REFUSALS_H_
