// SPDX-License-Identifier: Apache-2.0
//
// Refusals: explains, counts, logs and keeps what sessions are refused for want of memory.
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

// A request of a client's own allocator that a refused lease has left without memory.
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

  // All outlive it. `pools` by device. `max_tenants`: see TenantRefusals.
  Refusals(std::function<SteadyTime()> clock, const SessionBounds& session_bounds, std::vector<SegmentPool*> pools,
           const SessionRegistry* sessions, size_t max_tenants = TenantRefusals::kMaxTenants);

  // ---- Refusing ----

  // What a remote session asked for in vain.
  struct RemoteRequest {
    uint64_t bytes = 0;
    Stream stream = 0;
    ScopeId scope = 0;
    OomCause cause = OomCause::kCapacity;  // what kept the session from growing
    WaitRecord outcome;                    // what was done for it
  };
  // Answers with OutOfMemoryError() once the refusal is counted, logged and on record, and what the session has
  // recorded is kept, if it is its turn.
  void Refuse(RemoteSession& session, int device, const RemoteRequest& request, const Done& done);
  // The same for a request of the client's own allocator. Asks the client for what it has recorded. NotFound for an
  // unknown device, FailedPrecondition for a remote session.
  void Explain(const SessionPtr& session, uint64_t device, const RefusedRequest& request, const Done& done);
  // OutOfMemoryError() of a lease whose largest segment has `bytes`. Nothing is counted: the client has Explain() do
  // that when it mattered.
  absl::Status LeaseError(const LeasedSession& session, int device, uint64_t bytes, OomCause cause,
                          const WaitRecord& outcome) const;

  // What a counted session was to be charged in vain.
  struct ChargeRefusal {
    uint64_t bytes = 0;
    OomCause cause = OomCause::kCapacity;
    WaitRecord outcome;
  };
  // Answers with OutOfMemoryError() once the refusal is counted, logged and on record.
  void RefuseCharge(CountedSession& session, int device, const ChargeRefusal& refusal, const Done& done);
  // The same error where nothing is counted: the client tries once more, and lets others be asked.
  absl::Status ChargeError(const CountedSession& session, int device, const ChargeRefusal& refusal) const;

  // ---- On record ----

  // The last ones, on all devices.
  const OomLog& log() const { return log_; }
  // Newest first; of all users, or of the sessions of one.
  Events Last(std::optional<uid_t> uid) const;
  // Of these, those of one session. It may have ended; one name may have been several sessions'. InvalidArgument when a
  // number is one session's id and another one's name.
  absl::StatusOr<Events> LastOf(const SessionRef& ref, std::optional<uid_t> uid = std::nullopt) const;
  // What led to some of them.
  const RefusalRecordings& recordings() const { return recordings_; }

  // ---- Counted ----

  Counts GetCounts(int device) const;
  TenantRefusals::ByTenant GetByTenant() const { return tenants_.Get(); }
  // Has the tenant counted from now on.
  void AddTenant(absl::string_view tenant) { tenants_.Add(tenant); }
  void ForgetTenant(absl::string_view tenant) { tenants_.Forget(tenant); }
  // The same of claims, by name.
  TenantRefusals::ByTenant GetByClaim() const { return claims_.Get(); }
  void AddClaim(absl::string_view claim) { claims_.Add(claim); }
  void ForgetClaim(absl::string_view claim) { claims_.Forget(claim); }
  // Counts `session`, which is closed, for its tenant if it ended soon after a refusal. Returns how long after the
  // last.
  std::optional<std::chrono::milliseconds> CountEndedAfterRefusal(Session& session);

 private:
  // The figures of the session and the device. What the pool knows of them is `look`: of one moment.
  OomReport Report(const Session& session, int device, const PoolLook& look) const;
  // Adds those of the other sessions, for a refusal that people will see. `outcome`: whom of them was asked.
  void AddOthersOf(const Session& session, const PoolLook& look, const WaitRecord& outcome, OomReport* report) const;
  // Keeps what the session has recorded first, if it is its turn.
  void End(const SessionPtr& session, OomReport report, bool is_recording, const Done& done);
  // What the session has recorded is kept: says so in `report`.
  void Keep(Session& session, OomReport* report);
  absl::Status Count(Session& session, const OomReport& report);
  // Of a session that knows no blocks: what it asks for is what it needs.
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
