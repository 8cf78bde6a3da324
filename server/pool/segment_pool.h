// SPDX-License-Identifier: Apache-2.0
//
// SegmentPool: all segments of one device, and the ledger of who may hold how much.
//
// Every session has an account with the pool: a limit, and what is charged against it. A segment is leased to one
// account, idle (cached by the daemon), or quarantined (its process has ended). This is the one place where limits and
// capacity are enforced.
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

// How the holder of a segment opens it.
using WireHandle = std::variant<CudaIpcHandle, FdTicket>;

struct PoolStats {
  uint64_t capacity_bytes = 0;
  uint64_t charged_bytes = 0;       // all that the ledger charges: to sessions, to users, or to nobody
  uint64_t committed_bytes = 0;     // the same, with unused guarantees: what nobody else can get
  uint64_t guaranteed_bytes = 0;    // sum of the guarantees
  uint64_t quarantined_bytes = 0;   // of sessions that are gone: not yet known to be quiet
  uint64_t carried_over_bytes = 0;  // held from an earlier run of the daemon, by sessions or by nobody's processes
  uint64_t outside_bytes = 0;       // of the capacity, what the driver does not have for it: see DriverMemory
  uint64_t free_bytes = 0;          // of the capacity, committed to nobody: held by nobody, or idle
  uint64_t held_back_bytes = 0;     // of these, kept for a request that has waited: see RequestQueue
  uint64_t idle_bytes = 0;          // held from the driver, leased to nobody; also on its way back to the driver
  uint64_t reserved_bytes = 0;      // held from the driver: leased, quarantined, idle, being freed, or carried over
  uint64_t unfreed_bytes = 0;       // of these, what the driver has refused to take back, so far
  uint64_t segments = 0;            // leased
  uint64_t segment_allocs = 0;      // obtained from the driver, ever
  uint64_t segment_frees = 0;       // given back to the driver, ever
  uint64_t handovers = 0;           // idle segments leased again without a driver call, ever
  uint64_t handover_bytes = 0;

  // Held by nobody, and kept free for guarantees.
  uint64_t kept_free_bytes() const { return committed_bytes - charged_bytes; }
};

// What came of asking sessions for their reclaimable memory, ever.
struct ReclaimStats {
  uint64_t reclaims = 0;  // times that a session was asked
  uint64_t asked_bytes = 0;
  uint64_t reclaimed_bytes = 0;
  prometheus::ClientMetric::Histogram durations;  // seconds until the answer
};

// All figures of a pool, of one moment.
struct PoolView {
  PoolStats stats;
  FreeSizes idle_sizes;  // of the idle segments
  ReclaimStats reclaims;
  DeviceMeterStats calls;
  uint64_t driver_free_bytes = 0;  // of the device, in the driver's words, as of the last UpdateHealth()
  absl::flat_hash_map<SessionId, AccountState> accounts;
  absl::flat_hash_map<ShareId, ShareStats> shares;  // that have something
  std::vector<Quarantine::Holding> quarantine;
  std::vector<CarriedOver::Holding> carried_over;
  absl::Status health;  // as of the last SegmentPool::UpdateHealth()
};

// What explains why a session does not grow: of one moment.
struct PoolLook {
  AccountState account;       // of the session; nothing when it has none
  ShareStats share;           // of its share
  PoolStats stats;            // of the device
  bool is_held_back = false;  // only what is held back keeps it from growing by the smallest segment
  absl::flat_hash_map<SessionId, AccountState> accounts;  // of all sessions, where they were asked for
};

// A segment of a pool, for operators.
struct SegmentView {
  enum class State { kLeased, kReturning, kQuarantined, kIdle };
  uint64_t id = 0;  // a SegmentId; of idle, counted and carried-over ones another number
  uint64_t bytes = 0;
  State state = State::kLeased;
  SessionId holder{};    // kLeased, kReturning
  std::string client{};  // kQuarantined: whose it was
};

struct SegmentPoolOptions {
  static constexpr uint64_t kNoIdleLimit = std::numeric_limits<uint64_t>::max();
  uint64_t idle_limit_bytes = kNoIdleLimit;  // no more survive ReleaseIdleSince()
  // How long the segments of a process that has ended stay quarantined at least.
  std::chrono::milliseconds settle_time{0};
  std::chrono::milliseconds churn_window{1000};  // see Accounts::Expected
  std::chrono::milliseconds free_timeout{5000};  // how long a lease waits for frees that the driver is busy with
  // Beyond the capacity, what the driver is to have for contexts of clients. Unless the capacity was chosen without
  // looking at what is free.
  uint64_t headroom_bytes = 0;
  // The most that the device had free when no client held anything; 0: not known.
  uint64_t most_free_bytes = 0;
  std::function<SteadyTime()> clock = [] { return std::chrono::steady_clock::now(); };
};

// Whom what is carried over is charged to.
inline CarriedOver::Holder HolderOf(const Account& account) {
  return {.session = account.session, .share = account.terms.share()};
}

// Safe to call from any thread. Calls marked (driver) may take milliseconds; they hold no lock meanwhile.
class SegmentPool {
 public:
  // `next_segment` numbers segments over all devices of a daemon; it outlives the pool.
  SegmentPool(std::unique_ptr<Device> device, uint64_t capacity_bytes, std::atomic<uint64_t>* next_segment,
              SegmentPoolOptions options = {});
  // Gives everything back to the driver. REQUIRES: no other call is running.
  ~SegmentPool();

  const DeviceProperties& properties() const { return device_->properties(); }
  uint64_t capacity_bytes() const { return capacity_bytes_; }

  // The callback is called, without a lock, after anything that may let an account grow that could not before. To be
  // set before other threads use the pool.
  void SetOnCapacityFreed(std::function<void()> callback) { on_capacity_freed_ = std::move(callback); }

  // The callback is called, without a lock, when a process is found that can still touch what a session of the claim
  // has left in quarantine. To be set before other threads use the pool.
  void SetOnClaimHolder(std::function<void(pid_t process, ClaimId claim)> callback) {
    on_claim_holder_ = std::move(callback);
  }

  // REQUIRES: `session` has no account here.
  void OpenAccount(SessionId session, const AccountTerms& terms);
  // NotFound when there is no such account; errors of Ledger::SetLimit() and SetGuarantee().
  absl::Status SetLimit(SessionId session, uint64_t limit_bytes);
  absl::Status SetGuarantee(SessionId session, uint64_t guarantee_bytes);
  absl::Status SetPriority(SessionId session, int priority);

  // The claim has this limit from now on, and a share of its own, which outlives its accounts: what they leave in
  // quarantine stays charged to it.
  void SetClaimLimit(ClaimId claim, uint64_t limit_bytes);
  // Errors of Accounts::BoundClaimGuarantees().
  absl::Status BoundClaimGuarantees(ClaimId claim, uint64_t bytes);
  // SegmentRefused() as Ledger::SetGuarantee(claim).
  absl::Status SetClaimGuarantee(ClaimId claim, uint64_t guarantee_bytes);
  // What others would have to give up before the claim may have this guarantee.
  uint64_t MissingForClaim(ClaimId claim, uint64_t guarantee_bytes) const;
  // REQUIRES: the claim has no account here.
  void CloseClaim(ClaimId claim);

  // What becomes of an account's memory when the account is closed.
  struct Closed {
    uint64_t came_back = 0;   // others can get it
    uint64_t still_held = 0;  // nobody else can get it yet, and it stays charged
    uint64_t bytes() const { return came_back + still_held; }
  };
  // The account's segments become idle, the first leased first, and its tickets void. Returns their bytes. REQUIRES:
  // the holder says that it cannot touch them any more.
  uint64_t CloseAccount(SessionId session);
  // The same when the holder's process has ended: those that it could open are quarantined until CheckQuarantine()
  // finds them quiet.
  Closed CloseAccountOfGone(SessionId session);
  // Closes it when the daemon stops and the holder's process goes on, which keeps all that it could open, and what it
  // has of the driver itself.
  Closed CloseAccountOfHolder(SessionId session);

  // (driver) A segment of exactly `bytes`: an idle one of the same tenant, or a new one, for which idle segments are
  // given up when the device is full. SegmentRefused() when the limit or the capacity forbids it, Aborted when the
  // account is closed. `granted`: out of what Grant() charged.
  absl::StatusOr<SegmentId> Lease(SessionId session, uint64_t bytes, bool granted = false);
  // The same for one segment of each of `sizes`, in their order: all of them or none. On failure nothing changes: no
  // hand-over is counted, and idle segments keep their age. A grant is used up either way.
  absl::StatusOr<std::vector<SegmentId>> LeaseAll(SessionId session, absl::Span<const uint64_t> sizes,
                                                  bool granted = false);

  // Charges `bytes` for Lease() to come. Errors as Lease(). `past_hold`: what is held back is for this request.
  absl::Status Grant(SessionId session, uint64_t bytes, bool past_hold = false);
  // Gives up what is left of a grant.
  void ReleaseGrant(SessionId session, uint64_t bytes);
  // Holds free bytes back from accounts of this priority and lower ones, or (none) no more. Not from those that held
  // memory when the hold began and have given nothing back since: the request waits for them, and they may need
  // more to finish.
  void HoldBack(std::optional<Ledger::Held> held);
  // Growth of this session is refused because of that.
  bool IsHeldBack(SessionId session, uint64_t bytes) const;
  using CapacityChanges = Accounts::CapacityChanges;
  CapacityChanges TakeChanges();
  // Has TakeChanges() report this session, until `watch` is false; also when its account is closed.
  void Watch(SessionId session, bool watch);
  // See Ledger.
  uint64_t GrowthOf(SessionId session, uint64_t bytes) const;
  uint64_t MostEver(SessionId session) const;
  uint64_t MissingBytes(SessionId session, uint64_t bytes, bool guarantee) const;
  uint64_t MissingInShare(SessionId session, uint64_t bytes) const;

  using Expected = Accounts::Expected;
  // For each of `sessions`.
  std::vector<Expected> ExpectedFor(absl::Span<const SessionId> sessions) const;
  // All that ever came back, from anybody.
  uint64_t CameBackTotal() const;
  // The session was ended: its client closes all that it holds.
  void MarkEnding(SessionId session);

  // ---- What a client has of the driver itself ----

  // (driver) Charges memory that the client is about to get, for which idle segments are given up when the device is
  // full. `bytes` is a multiple of a granule. Errors as Lease(). `granted`: out of what Grant() charged.
  absl::Status ChargeCounted(SessionId session, uint64_t bytes, bool granted = false);
  // The same without a driver call: NotFound when only that can tell.
  absl::Status TryChargeCounted(SessionId session, uint64_t bytes);
  // The client has given it back. InvalidArgument, and nothing changes, when it has not so much.
  absl::Status UnchargeCounted(SessionId session, uint64_t bytes);
  // The client says that it has these from before this run of the daemon. As much of it is charged as can be true: by
  // saying something nobody takes from others. FailedPrecondition when it has said so before, or was charged already.
  absl::Status DeclareCounted(SessionId session, uint64_t bytes);

  // LeaseAll() without a driver call: NotFound when only that can tell.
  absl::StatusOr<std::vector<SegmentId>> LeaseIdle(SessionId session, absl::Span<const uint64_t> sizes);

  // (driver) Looks at the quarantined segments whose time has come. Those that no process is seen to hold go back to
  // the driver: nobody gets them as they are, because a descriptor on its way through a socket is in no table. Looks
  // for what is carried over, when that is due.
  void CheckQuarantine();
  // When the next one is due; nullopt when none waits.
  std::optional<SteadyTime> NextQuarantineCheck() const;
  // Memory may be free soon: it has not been looked at yet.
  bool IsSettling() const;
  // Some of what is charged to the session may soon be free: see CarriedOver::IsClosing().
  bool IsClosingCarriedOver(SessionId session) const;

  // (driver) Finds what processes hold of an earlier run of the daemon, and charges it. To be called before there are
  // sessions. OK where the device does not tell: then the driver's own figure of what is free stands for it.
  // `claims`: processes that were in one: what they hold is charged to it, before they have a session.
  absl::Status FindCarriedOver(absl::btree_map<ProcessId, ClaimId> claims = {});
  // The same for a claim that there was not, then.
  void ChargeCarriedOver(ClaimId claim, absl::Span<const ProcessId> processes);
  // The session's client says that it holds these. `begins`: they are the first of all that it holds; `ends`: the last.
  // What it has said before and not in between is freed. InvalidArgument: not sizes of segments.
  absl::Status DeclareCarriedOver(SessionId session, absl::Span<const CarriedSegment> segments, bool begins = false,
                                  bool ends = false);
  // The session's client has closed these.
  void FreeCarriedOver(SessionId session, absl::Span<const uint64_t> ids);

  // Makes leased segments idle whose holder says that it has closed them: all of them, or none. InvalidArgument:
  // named twice. NotFound: not leased to the session.
  absl::Status Return(SessionId session, absl::Span<const SegmentId> segments);
  // Makes all segments of the session idle but these.
  void ReturnAllBut(SessionId session, const absl::flat_hash_set<SegmentId>& keep);

  // From now on nothing is leased any more: Aborted.
  void Seal();

  // Marks leased segments as asked back; they stay charged. Unknown ids are ignored.
  void MarkReturning(SessionId session, absl::Span<const SegmentId> segments);
  // Makes segments that are marked returning idle. Others are ignored: a client cannot return what it still uses.
  void FinishReturning(SessionId session, absl::Span<const SegmentId> segments);

  // How the session opens a segment that it holds. NotFound otherwise.
  absl::StatusOr<WireHandle> HandleFor(SessionId session, SegmentId segment);
  // The descriptor that `ticket` stands for, once, for the process and user of the session that it was issued to.
  // NotFound: no such ticket, or used. PermissionDenied: of another process.
  absl::StatusOr<UniqueFd> RedeemTicket(const FdTicket& ticket, pid_t pid, uid_t uid);

  // (driver) Gives idle segments back to the driver, the oldest first: those that have been idle since `time` or
  // longer, and what is beyond the idle limit. Returns the bytes that the driver has taken.
  uint64_t ReleaseIdleSince(SteadyTime time);
  struct Released {
    uint64_t bytes = 0;          // that the driver has taken
    uint64_t refused_bytes = 0;  // that it refuses to take, so far
  };
  // (driver) Gives what is idle now back to the driver, and what it refused before. An error when the device cannot be
  // used.
  absl::StatusOr<Released> ReleaseIdle();
  // When ReleaseIdleSince() of `decay` ago has something to do; nullopt: nothing is idle.
  std::optional<SteadyTime> NextDecay(std::chrono::milliseconds decay) const;
  // The callback is called when that may be earlier than before, with the pool's lock held. nullptr: no longer.
  void SetOnDecayChanged(std::function<void()> callback);

  // nullopt when there is no such account.
  std::optional<AccountState> GetAccount(SessionId session) const;
  // What the account's own limit and its share's leave of it, whatever others hold.
  struct AccountRoom {
    AccountState account;
    uint64_t free_bytes = 0;
  };
  std::optional<AccountRoom> GetRoom(SessionId session) const;
  ShareStats GetShare(const ShareId& share) const;
  // What Lease() could still hand to the session; 0 when there is no such account.
  uint64_t AvailableBytes(SessionId session) const;
  PoolStats GetStats() const;
  PoolView GetView() const;
  PoolLook LookFor(SessionId session, bool with_accounts) const;
  // Every segment, by state, then by id. Takes as long as there are many: for people, not for every scrape.
  std::vector<SegmentView> GetSegments() const;

  // (driver) Frees again what the driver has refused to take back.
  void RetryFrees();

  // A session that was asked for `asked_bytes` has given `reclaimed_bytes` back, or will not.
  void CountReclaim(uint64_t asked_bytes, uint64_t reclaimed_bytes, std::chrono::nanoseconds duration);

  // (driver) Whether the device can still be used: Device::Health(), and how much of it is free, which it has to be
  // able to tell. What health() and GetView() say from then on.
  absl::Status UpdateHealth();
  // OK before the first update.
  absl::Status health() const;

  // (driver) Device::FindProcesses().
  absl::StatusOr<std::vector<GpuProcess>> FindProcesses() { return device_->FindProcesses(); }
  // (driver) Device::ReadSensors().
  GpuSensors ReadSensors() { return device_->ReadSensors(); }
  // What this process may have of the driver for segments, with what is on its way here, without its context.
  uint64_t GetOwnBytes() const;
  // What the contexts of so many clients take, as FindProcesses() has shown: the next client's is to have as much.
  void SetContexts(uint64_t bytes, uint64_t clients);

 private:
  // (driver) Of the destructor.
  void FreeAtExit(const std::vector<DeviceSegment>& segments);
  // (driver) The oldest idle segments, one at a time, while `is_due`. Returns the bytes that the driver has taken.
  uint64_t ReleaseOldest(const std::function<bool(SteadyTime oldest, uint64_t idle_bytes)>& is_due)
      ABSL_LOCKS_EXCLUDED(mu_);
  // (driver) Who can still touch these segments.
  absl::StatusOr<SegmentHolders> FindHolders(absl::Span<const Quarantine::Due> due) ABSL_LOCKS_EXCLUDED(mu_);
  // (driver) REQUIRES: CarriedOver::StartLook() was called.
  absl::Status LookForCarriedOver(bool is_first = false) ABSL_LOCKS_EXCLUDED(mu_);
  void Apply(const CarriedOver::Changes& changes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The account is about to be closed, and its process keeps what it carries over, and `counted_bytes` of the driver.
  void KeepCarriedOver(const Account& account, uint64_t counted_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Charges what DriverMemory says that no account has.
  void Settle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  uint64_t UnownedBytes() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // (driver) The driver did not have a segment of `bytes`, though the ledger did.
  void DriverRefused(uint64_t bytes) ABSL_LOCKS_EXCLUDED(mu_);
  // The refusal may not hold if the driver has more by now.
  bool IsOutside(const absl::Status& refusal) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // (driver) What does the driver have?
  void AskDriver() ABSL_LOCKS_EXCLUDED(mu_);
  // Why nobody gets more of a device that cannot be used.
  absl::Status UnusableError() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // What the pool has from the driver.
  struct FromDriver {
    uint64_t bytes = 0;
    uint64_t at_least = 0;  // without what is on its way back
    uint64_t at_most = 0;   // with what is on its way here
  };
  FromDriver FromDriverNow() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return FromDriverBy(driver_.counts()); }
  FromDriver FromDriverBy(const DriverSegments::Counts& driver) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  FromDriver GetFromDriver() const ABSL_LOCKS_EXCLUDED(mu_);
  PoolStats Stats() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  AccountState StateOf(const Account& account) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Aborted when the daemon stops; Ledger::CheckGrowth().
  absl::Status CheckGrowth(const Account& account, uint64_t bytes, bool past_hold = false) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The segments of a lease that is under way, by size. Neither idle nor leased, and charged.
  struct Gathered {
    std::vector<std::optional<IdleSegments::Taken>> idle;
    std::vector<std::optional<LeasedSegment>> fresh;
  };
  // Idle segments of the same tenant, as far as there are.
  Gathered TakeIdle(const Account& account, absl::Span<const uint64_t> sizes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void PutIdleBack(const Gathered& gathered) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // How much of what only a client says that it carries over is believed.
  uint64_t MostDeclared(const Account& account) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Idle segments that have to go before the driver has what is charged.
  std::vector<UnleasedSegment> TakeInTheWay() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Leases them to the session. REQUIRES: there is one of each size.
  std::vector<SegmentId> AddLeases(SessionId session, const Gathered& gathered) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // (driver) The segments of `sizes` that are not idle, for a session of `tenant`.
  absl::Status Obtain(const std::string& tenant, absl::Span<const uint64_t> sizes, Gathered& gathered)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Gives up a lease of so many `bytes`. Returns what the driver is to have back.
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
  // Counts `entries`, which are in none of the books here any more, as being freed; DriverSegments::Free() is to get
  // them.
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
  // After a search that brought nothing back, the next one waits this many times as long as it took.
  static constexpr int kBetweenWalks = 10;
  static constexpr SteadyTime::duration kLongestBetweenWalks = std::chrono::seconds(5);
  SteadyTime next_walk_ ABSL_GUARDED_BY(mu_) = SteadyTime::min();  // to look for who holds what is quarantined
  CarriedOver carried_over_ ABSL_GUARDED_BY(mu_);
  absl::btree_map<ProcessId, ClaimId> earlier_claims_ ABSL_GUARDED_BY(mu_);  // of processes, in the run before this one
  DriverMemory driver_memory_ ABSL_GUARDED_BY(mu_);
  absl::Status health_ ABSL_GUARDED_BY(mu_);
  bool sealed_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t handovers_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t handover_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  ReclaimStats reclaims_ ABSL_GUARDED_BY(mu_);  // but for the durations
  std::function<void()> on_decay_changed_ ABSL_GUARDED_BY(mu_);
  prometheus::Histogram reclaim_durations_;  // synchronises itself
  std::atomic<bool> warned_of_unread_{false};
  std::atomic<bool> warned_of_unread_left_{false};
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_POOL_SEGMENT_POOL_H_
