// SPDX-License-Identifier: Apache-2.0
//
// SegmentPool: all segments of one device, and the ledger of holdings and limits.
//
// Every session has an account with the pool: a limit, and charges against it. A segment is leased to one account, idle
// (cached by the daemon), or quarantined (after the end of its process). Limits and capacity are enforced only here.
#ifndef VRAMBROKER_SERVER_POOL_SEGMENT_POOL_H_
#define VRAMBROKER_SERVER_POOL_SEGMENT_POOL_H_

#include <prometheus/histogram.h>
#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "allocator/base/ids.h"
#include "allocator/base/mutex.h"
#include "allocator/device/device.h"
#include "server/pool/accounts.h"
#include "server/pool/carried_over.h"
#include "server/pool/driver_memory.h"
#include "server/pool/driver_segments.h"
#include "server/pool/idle_segments.h"
#include "server/pool/leased_segments.h"
#include "server/pool/ledger.h"
#include "server/pool/metered_device.h"
#include "server/pool/quarantine.h"

namespace vrambroker {

// Means for a holder to open a segment.
using WireHandle = std::variant<CudaIpcHandle, FdTicket>;

struct PoolStats {
  uint64_t capacity_bytes = 0;
  uint64_t charged_bytes = 0;       // all charges of the ledger: to sessions, to users, or to nobody
  uint64_t committed_bytes = 0;     // charged bytes plus unused guarantees: unavailable to anybody else
  uint64_t guaranteed_bytes = 0;    // sum of the guarantees
  uint64_t quarantined_bytes = 0;   // of ended sessions: not yet known to be quiet
  uint64_t carried_over_bytes = 0;  // held from an earlier run of the daemon, by sessions or by processes without one
  uint64_t outside_bytes = 0;       // part of the capacity missing at the driver: see DriverMemory
  uint64_t free_bytes = 0;          // part of the capacity committed to nobody: not held, or idle
  uint64_t held_back_bytes = 0;     // part of free_bytes kept for a request that has waited: see RequestQueue
  uint64_t idle_bytes = 0;          // held from the driver, leased to nobody; also on its way back to the driver
  uint64_t reserved_bytes = 0;      // held from the driver: leased, quarantined, idle, being freed, or carried over
  uint64_t unfreed_bytes = 0;       // part of reserved_bytes refused by the driver, so far
  uint64_t segments = 0;            // leased
  uint64_t segment_allocs = 0;      // obtained from the driver, ever
  uint64_t segment_frees = 0;       // given back to the driver, ever
  uint64_t handovers = 0;           // idle segments leased again without a driver call, ever
  uint64_t handover_bytes = 0;

  // Bytes held by nobody and kept free for guarantees.
  uint64_t kept_free_bytes() const { return committed_bytes - charged_bytes; }
};

// Outcome of all questions to sessions for reclaimable memory.
struct ReclaimStats {
  uint64_t reclaims = 0;  // questions to sessions
  uint64_t asked_bytes = 0;
  uint64_t reclaimed_bytes = 0;
  prometheus::ClientMetric::Histogram durations;  // seconds until the answer
};

// Snapshot of all figures of a pool.
struct PoolView {
  PoolStats stats;
  FreeSizes idle_sizes;  // sizes of the idle segments
  ReclaimStats reclaims;
  DeviceMeterStats calls;
  uint64_t driver_free_bytes = 0;  // of the device, by the driver's word, as of the last UpdateHealth()
  absl::flat_hash_map<SessionId, AccountState> accounts;
  absl::flat_hash_map<ShareId, ShareStats> shares;  // non-empty shares, and open claims
  std::vector<Quarantine::Holding> quarantine;
  std::vector<CarriedOver::Holding> carried_over;
  absl::Status health;  // as of the last SegmentPool::UpdateHealth()
};

// Snapshot explaining why a session does not grow.
struct PoolLook {
  AccountState account;       // of the session; default if there is none
  ShareStats share;           // of the session's share
  PoolStats stats;            // of the device
  bool is_held_back = false;  // only held-back memory keeps the session from growing by the smallest segment
  absl::flat_hash_map<SessionId, AccountState> accounts;  // of all sessions, if asked for
};

// A segment of a pool, for operators.
struct SegmentView {
  enum class State { kLeased, kReturning, kQuarantined, kIdle };
  uint64_t id = 0;  // a SegmentId; another number for idle, counted and carried-over segments
  uint64_t bytes = 0;
  State state = State::kLeased;
  SessionId holder{};    // kLeased, kReturning
  std::string client{};  // kQuarantined: the last holder
};

struct SegmentPoolOptions {
  static constexpr uint64_t kNoIdleLimit = std::numeric_limits<uint64_t>::max();
  uint64_t idle_limit_bytes = kNoIdleLimit;  // most bytes left by ReleaseIdleSince()
  // Shortest quarantine for segments of an ended process.
  std::chrono::milliseconds settle_time{0};
  std::chrono::milliseconds churn_window{1000};  // see Accounts::Expected
  std::chrono::milliseconds free_timeout{5000};  // longest wait of a lease for frees in progress at the driver
  // Memory beyond the capacity, for contexts of clients. 0 when the capacity was chosen without looking at free memory.
  uint64_t headroom_bytes = 0;
  // Most free memory of the device while no client held anything; 0: not known.
  uint64_t most_free_bytes = 0;
  std::function<SteadyTime()> clock = [] { return std::chrono::steady_clock::now(); };
};

// Holder to charge for carried-over memory.
inline CarriedOver::Holder HolderOf(const Account& account) {
  return {.session = account.session, .share = account.terms.share()};
}

// Thread-safe. Calls marked (driver) may take milliseconds, and hold no lock meanwhile.
class SegmentPool {
 public:
  // `next_segment` numbers segments over all devices of a daemon and outlives the pool.
  SegmentPool(std::unique_ptr<SegmentOwner> device, uint64_t capacity_bytes, std::atomic<uint64_t>* next_segment,
              SegmentPoolOptions options = {});
  // Gives everything back to the driver. REQUIRES: no other call is running.
  ~SegmentPool();

  const DeviceProperties& properties() const { return device_->properties(); }
  uint64_t capacity_bytes() const { return capacity_bytes_; }

  // Sets a callback for events after which an account may be able to grow more than before. Called without a lock. To
  // be set before other threads use the pool.
  void SetOnCapacityFreed(std::function<void()> callback) { on_capacity_freed_ = std::move(callback); }

  // Sets a callback for a process found able to touch quarantined memory of a claim's session. Called without a lock.
  // To be set before other threads use the pool.
  void SetOnClaimHolder(std::function<void(pid_t process, ClaimId claim)> callback) {
    on_claim_holder_ = std::move(callback);
  }

  // REQUIRES: `session` has no account here.
  void OpenAccount(SessionId session, const AccountTerms& terms);
  // NotFound when there is no account; errors of Ledger::SetLimit() and SetGuarantee().
  absl::Status SetLimit(SessionId session, uint64_t limit_bytes);
  absl::Status SetGuarantee(SessionId session, uint64_t guarantee_bytes);
  absl::Status SetPriority(SessionId session, int priority);

  // Sets the claim's limit, and opens a share for the claim. The share outlives the claim's accounts: memory left in
  // quarantine stays charged to it.
  void SetClaimLimit(ClaimId claim, uint64_t limit_bytes);
  // Errors of Accounts::BoundClaimGuarantees().
  absl::Status BoundClaimGuarantees(ClaimId claim, uint64_t bytes);
  // SegmentRefused() as Ledger::SetGuarantee(claim).
  absl::Status SetClaimGuarantee(ClaimId claim, uint64_t guarantee_bytes);
  // Bytes other sessions would have to give up before the claim may have this guarantee.
  uint64_t MissingForClaim(ClaimId claim, uint64_t guarantee_bytes) const;
  // REQUIRES: the claim has no account here.
  void CloseClaim(ClaimId claim);

  // Memory of an account as left by closing it.
  struct Closed {
    uint64_t came_back = 0;   // available to other sessions
    uint64_t still_held = 0;  // still charged, and unavailable to anybody else
    uint64_t bytes() const { return came_back + still_held; }
  };
  // Makes the account's segments idle, the first leased first, and voids its tickets. Returns the segments' bytes.
  // REQUIRES: the holder says it cannot touch the segments any more.
  uint64_t CloseAccount(SessionId session);
  // Closes the account after the end of the holder's process: segments it could open are quarantined until
  // CheckQuarantine() finds them quiet.
  Closed CloseAccountOfGone(SessionId session);
  // Closes the account when the daemon stops and the holder's process goes on. The process keeps all segments it could
  // open, and memory of its own from the driver.
  Closed CloseAccountOfHolder(SessionId session);

  // (driver) Leases a segment of exactly `bytes`: an idle segment of the tenant, or a new segment, for which idle
  // segments are given up when the device is full. SegmentRefused() when the limit or the capacity forbids the lease,
  // Aborted when the account is closed. `granted`: use bytes charged by Grant().
  absl::StatusOr<SegmentId> Lease(SessionId session, uint64_t bytes, bool granted = false);
  // (driver) Leases a segment of each of `sizes`, in order: all or none. On failure nothing changes: no hand-over is
  // counted, and idle segments keep their age. A grant is used up either way.
  absl::StatusOr<std::vector<SegmentId>> LeaseAll(SessionId session, absl::Span<const uint64_t> sizes,
                                                  bool granted = false);

  // Charges `bytes` for Lease() to come. Errors as Lease(). `past_hold`: held-back memory is for this request.
  absl::Status Grant(SessionId session, uint64_t bytes, bool past_hold = false);
  // Gives up the rest of a grant.
  void ReleaseGrant(SessionId session, uint64_t bytes);
  // Reserves free bytes against accounts of this or lower priority; nullopt ends the reservation. Accounts holding
  // memory when the hold began, and giving nothing back since, are exempt: the request waits for such accounts, and
  // each may need more to finish.
  void HoldBack(std::optional<Ledger::Held> held);
  // Whether only held-back memory keeps the session from growing.
  bool IsHeldBack(SessionId session, uint64_t bytes) const;
  using CapacityChanges = Accounts::CapacityChanges;
  CapacityChanges TakeChanges();
  // Makes TakeChanges() report the session, until `watch` is false; also when its account is closed.
  void Watch(SessionId session, bool watch);
  // See Ledger.
  uint64_t GrowthOf(SessionId session, uint64_t bytes) const;
  uint64_t MostEver(SessionId session) const;
  uint64_t MissingBytes(SessionId session, uint64_t bytes, bool guarantee) const;
  uint64_t MissingInShare(SessionId session, uint64_t bytes) const;

  using Expected = Accounts::Expected;
  // Returns an entry for each of `sessions`.
  std::vector<Expected> ExpectedFor(absl::Span<const SessionId> sessions) const;
  // Total of all bytes ever come back, from anybody.
  uint64_t CameBackTotal() const;
  // Call when the session was ended: its client closes everything.
  void MarkEnding(SessionId session);

  // ---- Memory taken from the driver by clients themselves ----

  // (driver) Charges memory the client is about to get, for which idle segments are given up when the device is full.
  // `bytes` is a multiple of a granule. Errors as Lease(). `granted`: use bytes charged by Grant().
  absl::Status ChargeCounted(SessionId session, uint64_t bytes, bool granted = false);
  // ChargeCounted() without a driver call: NotFound when only a driver call can tell.
  absl::Status TryChargeCounted(SessionId session, uint64_t bytes);
  // Uncharges memory given back by the client. InvalidArgument, without effect, when the client has less.
  absl::Status UnchargeCounted(SessionId session, uint64_t bytes);
  // Charges memory declared by the client as held from before this run of the daemon, as much as can be true: a
  // declaration takes nothing from other sessions. FailedPrecondition after an earlier declaration or charge.
  absl::Status DeclareCounted(SessionId session, uint64_t bytes);

  // LeaseAll() without a driver call: NotFound when only a driver call can tell.
  absl::StatusOr<std::vector<SegmentId>> LeaseIdle(SessionId session, absl::Span<const uint64_t> sizes);

  // (driver) Looks at due quarantined segments. Segments seen in no process go back to the driver, never directly to a
  // session, because a descriptor on its way through a socket is in no table. Looks for carried-over memory when due.
  void CheckQuarantine();
  // Time of the next check; nullopt when none is due.
  std::optional<SteadyTime> NextQuarantineCheck() const;
  // Whether memory not looked at yet may be free soon.
  bool IsSettling() const;
  // Whether memory charged to the session may be free soon: see CarriedOver::IsClosing().
  bool IsClosingCarriedOver(SessionId session) const;

  // (driver) Finds and charges memory held by processes from an earlier run of the daemon. To be called before there
  // are sessions. OK where the device cannot tell: then the driver's own figure of free memory replaces the look.
  // `claims`: processes once in a claim; their memory is charged to the claim before they have a session.
  absl::Status FindCarriedOver(absl::btree_map<ProcessId, ClaimId> claims = {});
  // Charges carried-over memory of `processes` to a claim opened after FindCarriedOver().
  void ChargeCarriedOver(ClaimId claim, absl::Span<const ProcessId> processes);
  // Takes in segments declared by the session's client. `begins`: the first of all it holds; `ends`: the last. Segments
  // declared earlier but not in between are freed. InvalidArgument: not sizes of segments.
  absl::Status DeclareCarriedOver(SessionId session, absl::Span<const CarriedSegment> segments, bool begins = false,
                                  bool ends = false);
  // Takes in the client's report that the segments are closed.
  void FreeCarriedOver(SessionId session, absl::Span<const uint64_t> ids);

  // Makes leased segments idle after the holder's report that they are closed: all of them, or none. InvalidArgument:
  // named twice. NotFound: not leased to the session.
  absl::Status Return(SessionId session, absl::Span<const SegmentId> segments);
  // Makes all segments of the session idle except `keep`.
  void ReturnAllBut(SessionId session, const absl::flat_hash_set<SegmentId>& keep);

  // Ends leasing for good: Aborted.
  void Seal();

  // Marks leased segments as asked back, and still charged. Unknown ids are ignored.
  void MarkReturning(SessionId session, absl::Span<const SegmentId> segments);
  // Makes segments marked as returning idle. Ignores unmarked segments: a client cannot return a segment still in use.
  void FinishReturning(SessionId session, absl::Span<const SegmentId> segments);

  // Returns the means to open a segment held by the session. NotFound otherwise.
  absl::StatusOr<WireHandle> HandleFor(SessionId session, SegmentId segment);
  // Returns the descriptor for `ticket`, once, to the process and user of the ticket's session. NotFound: no such
  // ticket, or used. PermissionDenied: of another process.
  absl::StatusOr<UniqueFd> RedeemTicket(const FdTicket& ticket, pid_t pid, uid_t uid);

  // (driver) Gives idle segments back to the driver, the oldest first: segments idle since `time` or longer, and
  // segments beyond the idle limit. Returns the bytes taken by the driver.
  uint64_t ReleaseIdleSince(SteadyTime time);
  struct Released {
    uint64_t bytes = 0;          // taken by the driver
    uint64_t refused_bytes = 0;  // refused by the driver, so far
  };
  // (driver) Gives segments idle now, and segments refused before, back to the driver. An error when the device cannot
  // be used.
  absl::StatusOr<Released> ReleaseIdle();
  // Time when ReleaseIdleSince() of `decay` ago has something to do; nullopt: nothing is idle.
  std::optional<SteadyTime> NextDecay(std::chrono::milliseconds decay) const;
  // Sets a callback for NextDecay() becoming earlier. Called with the pool's lock held. nullptr: none.
  void SetOnDecayChanged(std::function<void()> callback);

  // Returns nullopt when there is no account.
  std::optional<AccountState> GetAccount(SessionId session) const;
  // Room under the limits of the account and its share, whatever other sessions hold.
  struct AccountRoom {
    AccountState account;
    uint64_t free_bytes = 0;
  };
  std::optional<AccountRoom> GetRoom(SessionId session) const;
  ShareStats GetShare(const ShareId& share) const;
  // Bytes Lease() could still hand to the session; 0 when there is no account.
  uint64_t AvailableBytes(SessionId session) const;
  PoolStats GetStats() const;
  PoolView GetView() const;
  PoolLook LookFor(SessionId session, bool with_accounts) const;
  // Returns every segment, by state, then by id. Slow with many segments: for people, not for every scrape.
  std::vector<SegmentView> GetSegments() const;

  // (driver) Frees refused segments again.
  void RetryFrees();

  // Counts a finished question to a session: `asked_bytes` wanted, `reclaimed_bytes` given back.
  void CountReclaim(uint64_t asked_bytes, uint64_t reclaimed_bytes, std::chrono::nanoseconds duration);

  // (driver) Checks whether the device can still be used: Device::Health(), and its free memory, which has to be
  // readable. Sets the result of health() and GetView().
  absl::Status UpdateHealth();
  // OK before the first update.
  absl::Status health() const;

  // (driver) Device::FindProcesses().
  absl::StatusOr<std::vector<GpuProcess>> FindProcesses() { return device_->FindProcesses(); }
  // (driver) Device::ReadSensors().
  GpuSensors ReadSensors() { return device_->ReadSensors(); }
  // Bytes this process may have from the driver for segments, with memory on its way here, without its context.
  uint64_t GetOwnBytes() const;
  // Sets the size of the contexts of `clients` clients, as seen by FindProcesses(): the next client is to have as much.
  void SetContexts(uint64_t bytes, uint64_t clients);

 private:
  // (driver) For the destructor.
  void FreeAtExit(const std::vector<DeviceSegment>& segments);
  // (driver) Frees the oldest idle segments, one at a time, while `is_due`. Returns the bytes taken by the driver.
  uint64_t ReleaseOldest(const std::function<bool(SteadyTime oldest, uint64_t idle_bytes)>& is_due)
      ABSL_LOCKS_EXCLUDED(mu_);
  // (driver) Finds the processes able to touch the segments.
  absl::StatusOr<SegmentHolders> FindHolders(absl::Span<const Quarantine::Due> due) ABSL_LOCKS_EXCLUDED(mu_);
  // (driver) REQUIRES: CarriedOver::StartLook() was called.
  absl::Status LookForCarriedOver(bool is_first = false) ABSL_LOCKS_EXCLUDED(mu_);
  void Apply(const CarriedOver::Changes& changes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Call before closing an account whose process keeps its carried-over memory, and `counted_bytes` from the driver.
  void KeepCarriedOver(const Account& account, uint64_t counted_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Charges memory of no account, as found by DriverMemory.
  void Settle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  uint64_t UnownedBytes() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // (driver) Records a segment of `bytes` refused by the driver, though granted by the ledger.
  void DriverRefused(uint64_t bytes) ABSL_LOCKS_EXCLUDED(mu_);
  // Whether the refusal is void if the driver has more by now.
  bool IsOutside(const absl::Status& refusal) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // (driver) Reads the driver's free memory into driver_memory_.
  void AskDriver() ABSL_LOCKS_EXCLUDED(mu_);
  // Error for growth on an unusable device.
  absl::Status UnusableError() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Bytes the pool has from the driver.
  struct FromDriver {
    uint64_t bytes = 0;
    uint64_t at_least = 0;  // without bytes on their way back
    uint64_t at_most = 0;   // with bytes on their way here
  };
  FromDriver FromDriverNow() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return FromDriverBy(driver_.counts()); }
  FromDriver FromDriverBy(const DriverSegments::Counts& driver) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  FromDriver GetFromDriver() const ABSL_LOCKS_EXCLUDED(mu_);
  PoolStats Stats() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  AccountState StateOf(const Account& account) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Aborted when the daemon stops; UnusableError(); Ledger::CheckGrowth().
  absl::Status CheckGrowth(const Account& account, uint64_t bytes, bool past_hold = false) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Segments of a lease under way, by size. Neither idle nor leased, and charged.
  struct Gathered {
    std::vector<std::optional<IdleSegments::Taken>> idle;
    std::vector<std::optional<DeviceSegment>> fresh;
  };
  // Takes idle segments of the tenant, as far as available.
  Gathered TakeIdle(const Account& account, absl::Span<const uint64_t> sizes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void PutIdleBack(const Gathered& gathered) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Most bytes to believe of a declaration only the client can vouch for.
  uint64_t MostDeclared(const Account& account) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Takes idle segments the driver must have back before it has all charged bytes.
  std::vector<UnleasedSegment> TakeInTheWay() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Leases the segments to the session. REQUIRES: there is one of each size.
  std::vector<SegmentId> AddLeases(SessionId session, const Gathered& gathered) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // (driver) Obtains the segments of `sizes` missing in `gathered`, for a session of `tenant`.
  absl::Status Obtain(const std::string& tenant, absl::Span<const uint64_t> sizes, Gathered& gathered)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Gives up a lease of `bytes`. Returns segments for the driver.
  std::vector<UnleasedSegment> Undo(SessionId session, const ShareId& share, const std::string& tenant, uint64_t bytes,
                                    const Gathered& gathered) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  SegmentId AddLease(SessionId session, LeasedSegment segment) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void MakeIdle(SegmentId id, Account& account) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void AddIdle(const UnleasedSegment& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Takes a segment out of the account's books, not out of the ledger's.
  LeasedSegment Forget(SegmentId id, Account& account) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  enum class Holder { kHasClosedAll, kHasEnded, kGoesOn };
  Closed Close(SessionId session, Holder holder) ABSL_LOCKS_EXCLUDED(mu_);
  void CapacityFreed() const {
    if (on_capacity_freed_) on_capacity_freed_();
  }
  // Counts `entries`, already out of all books here, as being freed, ahead of DriverSegments::Free().
  std::vector<UnleasedSegment> StartFreeing(std::vector<UnleasedSegment> entries) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Constant after construction.
  const std::unique_ptr<MeteredDevice> device_;
  const uint64_t capacity_bytes_;
  const SegmentPoolOptions options_;
  std::function<void()> on_capacity_freed_;
  std::function<void(pid_t process, ClaimId claim)> on_claim_holder_ = [](pid_t, ClaimId) {};
  std::atomic<uint64_t>& next_segment_;
  DriverSegments driver_;  // synchronises itself

  // Never held during a driver call.
  mutable Mutex mu_ ABSL_ACQUIRED_AFTER(lock_level::kPool) ABSL_ACQUIRED_BEFORE(lock_level::kDevice){lock_level::kPool};
  Accounts accounts_ ABSL_GUARDED_BY(mu_);
  LeasedSegments leased_ ABSL_GUARDED_BY(mu_);
  IdleSegments idle_ ABSL_GUARDED_BY(mu_);
  Quarantine quarantine_ ABSL_GUARDED_BY(mu_);
  // After a fruitless search, the next search waits kBetweenWalks times as long as it took.
  static constexpr int kBetweenWalks = 10;
  static constexpr SteadyTime::duration kLongestBetweenWalks = std::chrono::seconds(5);
  SteadyTime next_walk_ ABSL_GUARDED_BY(mu_) = SteadyTime::min();  // for holders of quarantined memory
  CarriedOver carried_over_ ABSL_GUARDED_BY(mu_);
  absl::btree_map<ProcessId, ClaimId> earlier_claims_ ABSL_GUARDED_BY(mu_);  // of processes, in the run before
  DriverMemory driver_memory_ ABSL_GUARDED_BY(mu_);
  absl::Status health_ ABSL_GUARDED_BY(mu_);
  bool sealed_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t handovers_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t handover_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  ReclaimStats reclaims_ ABSL_GUARDED_BY(mu_);  // without durations
  std::function<void()> on_decay_changed_ ABSL_GUARDED_BY(mu_);
  prometheus::Histogram reclaim_durations_;  // synchronises itself
  std::atomic<bool> warned_of_unread_{false};
  std::atomic<bool> warned_of_unread_left_{false};
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_POOL_SEGMENT_POOL_H_
