// SPDX-License-Identifier: Apache-2.0
//
// Accounts: limits, charges, and give-and-take of each session on one device. Arithmetic on top of the ledger: no
// driver, no segments, no lock.
#ifndef VRAMBROKER_SERVER_POOL_ACCOUNTS_H_
#define VRAMBROKER_SERVER_POOL_ACCOUNTS_H_

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "allocator/base/ids.h"
#include "allocator/device/device.h"
#include "allocator/device/session_mark.h"
#include "server/base/steady_time.h"
#include "server/pool/ledger.h"

namespace vrambroker {

// Owner of an account, and terms of its use.
struct AccountTerms {
  std::string client;  // for people
  pid_t pid = 0;
  uint64_t started = 0;  // start time of the process: see ProcessId
  uid_t uid = 0;
  std::optional<ClaimId> claim{};  // claim with the shared limit; none: the user's limit is shared
  std::string tenant;  // segments are handed on unscrubbed within a tenant; a STRICT session has a tenant of its own
  uint64_t limit_bytes = 0;
  int priority = 0;
  // Bounds for all accounts of the user outside of claims: see AccountState.
  uint64_t user_limit_bytes = AccountState::kNoBound;
  uint64_t user_guarantee_bytes = AccountState::kNoBound;
  SessionMark mark = 0;  // mark of the client

  ProcessId process() const { return {.pid = pid, .started = started}; }
  ShareId share() const { return claim.has_value() ? ShareId(*claim) : ShareId(uid); }
};

struct Account {
  SessionId session{};
  AccountTerms terms;
  AccountState state;            // except for the number of segments
  uint64_t granted_bytes = 0;    // part of reserved_bytes
  uint64_t counted_bytes = 0;    // part of reserved_bytes, the client's own memory: see SegmentPool::ChargeCounted()
  uint64_t declared_bytes = 0;   // part of carried_over_bytes, the client's own memory
  SteadyTime holds_since;        // start of holding any memory
  SteadyTime gave_back;          // start of the last churn_window with memory given back
  uint64_t gave_back_bytes = 0;  // in the window from gave_back on
  bool is_waited_for = false;    // exempt from held-back memory: see Accounts::HoldBack()
  bool is_ending = false;        // the client closes all it holds
  bool is_watched = false;
  bool is_changed = false;  // TakeChanges() is to name the account

  uint64_t returning_bytes() const { return is_ending ? state.reserved_bytes : state.returning_bytes; }
};

// Not thread-safe. References to accounts hold until the next Open() or Close().
class Accounts {
 public:
  // `churn_window`: see Expected.
  Accounts(uint64_t capacity_bytes, std::chrono::milliseconds churn_window, std::function<SteadyTime()> clock);

  const Ledger& ledger() const { return ledger_; }

  // ---- Opening and closing ----

  // REQUIRES: `session` has no account; its claim, if any, has a limit here.
  void Open(SessionId session, const AccountTerms& terms);
  // Ends the charge for granted bytes. The other reserved bytes stay charged to the share alone.
  void Close(Account& account);
  // Returns nullptr when there is no account.
  Account* Find(SessionId session);
  const Account* Find(SessionId session) const;
  const absl::flat_hash_map<SessionId, Account>& all() const { return accounts_; }

  // ---- Limits and guarantees ----

  // Errors of Ledger::SetLimit() and SetGuarantee().
  absl::Status SetLimit(Account& account, uint64_t bytes);
  absl::Status SetGuarantee(Account& account, uint64_t bytes);

  // Bounds the memory of all accounts of a claim together, and the sum of their guarantees. A limit below current use
  // takes nothing away. For a limit below the guarantees see Ledger.
  void SetClaimLimit(ClaimId claim, uint64_t bytes);
  // Bounds the sum of the guarantees in the claim, until the next SetClaimLimit(). InvalidArgument below the current
  // sum. REQUIRES: the claim has a limit here.
  absl::Status BoundClaimGuarantees(ClaimId claim, uint64_t bytes);
  // Errors of Ledger::SetGuarantee(claim).
  absl::Status SetClaimGuarantee(ClaimId claim, uint64_t bytes);
  // REQUIRES: the claim has no account.
  void CloseClaim(ClaimId claim);

  // ---- Charging ----

  // Ledger::CheckGrowth(). `past_hold`: ignore held-back memory.
  absl::Status CheckGrowth(const Account& account, uint64_t bytes, bool past_hold = false) const {
    return ledger_.CheckGrowth(account.state, bytes, past_hold || account.is_waited_for);
  }
  // REQUIRES: CheckGrowth() says yes; or the account has the bytes already, whatever its limit and the capacity say.
  void Charge(Account& account, uint64_t bytes);
  // Uncharges a segment given back by the account's holder.
  void GiveBack(Account& account, uint64_t bytes);
  // Uncharges anything else.
  void Uncharge(Account& account, uint64_t bytes);
  // Charges a share without an account, or nobody.
  void ChargeUnowned(uint64_t bytes, const std::optional<ShareId>& share = std::nullopt) {
    ledger_.ChargeUnowned(bytes, share);
  }
  void UnchargeUnowned(uint64_t bytes, const std::optional<ShareId>& share = std::nullopt) {
    ledger_.UnchargeUnowned(bytes, share);
  }
  // See Ledger::ExtendCapacity(). Shrinking may forbid requests for good.
  void ExtendCapacity(uint64_t bytes);

  // Charges `bytes` for a lease to come, until the lease consumes the grant or the grant is released. REQUIRES:
  // CheckGrowth() says yes.
  void Grant(Account& account, uint64_t bytes);
  void ReleaseGrant(Account& account, uint64_t bytes);
  // Lets a lease take over granted bytes. Returns false if fewer bytes are granted.
  bool ConsumeGrant(Account& account, uint64_t bytes);
  uint64_t granted_bytes() const { return granted_bytes_; }  // over all accounts

  // ---- Waiting for other sessions' memory ----

  // See SegmentPool::HoldBack().
  void HoldBack(std::optional<Ledger::Held> held);
  // Whether only held-back memory keeps the account from growing.
  bool IsHeldBack(const Account& account, uint64_t bytes) const;

  // State on which growth depends, beside the accounts.
  struct CapacityChanges {
    uint64_t free_bytes = 0;  // committed to nobody
    uint64_t held_back_bytes = 0;
    uint64_t guaranteed_bytes = 0;
    uint64_t capacity_bytes = 0;     // of the ledger
    bool is_overcommitted = false;   // more is committed than the capacity: no guarantee can be given
    uint64_t forbidden = 0;          // changes with every event that may forbid requests for good, for any session
    std::vector<SessionId> changed;  // watched accounts able to grow by more or less than at the last call
  };
  CapacityChanges TakeChanges();
  // Call when requests may be forbidden for good, for any session.
  void Forbid() { ++forbidden_; }

  // Bytes expected back soon from all sessions but one.
  struct Expected {
    uint64_t returning_bytes = 0;  // being closed by holders, or settling in quarantine
    // Holdings of sessions new to holding memory within churn_window, plus holdings of older sessions up to the bytes
    // given back within it: both may soon come back.
    uint64_t churning_bytes = 0;
  };
  // Returns an entry for each of `sessions`. `settling_bytes`: in quarantine.
  std::vector<Expected> ExpectedFor(absl::Span<const SessionId> sessions, uint64_t settling_bytes) const;

 private:
  // Bounds on the memory, and on the guarantees, of a claim's accounts together.
  struct ClaimBounds {
    uint64_t limit_bytes = 0;
    uint64_t guarantee_bytes = 0;
  };
  void SetClaimBounds(ClaimId claim, const ClaimBounds& bounds);
  uint64_t ChurningBytes(const Account& account, SteadyTime now) const;
  void Changed(Account& account);

  const std::chrono::milliseconds churn_window_;
  const std::function<SteadyTime()> clock_;

  Ledger ledger_;
  absl::flat_hash_map<SessionId, Account> accounts_;
  absl::flat_hash_map<ClaimId, ClaimBounds> claim_bounds_;
  uint64_t granted_bytes_ = 0;      // sum over accounts
  std::vector<SessionId> changed_;  // for TakeChanges()
  uint64_t forbidden_ = 0;          // for TakeChanges()
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_POOL_ACCOUNTS_H_
