// SPDX-License-Identifier: Apache-2.0
//
// Accounts: what each session may hold of one device, what is charged to it, and what it gives back and takes again.
// Arithmetic on top of the ledger: no driver, no segments, no lock.
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

// Whose an account is, and what it may do.
struct AccountTerms {
  std::string client;  // for people
  pid_t pid = 0;
  uint64_t started = 0;  // the process: see ProcessId
  uid_t uid = 0;
  std::optional<ClaimId> claim{};  // whose limit it shares; none: its user's
  std::string tenant;  // within it, segments are handed on as they are; a session that is STRICT has one of its own
  uint64_t limit_bytes = 0;
  int priority = 0;
  // Of what accounts of this user have that are in no claim: see AccountState.
  uint64_t user_limit_bytes = AccountState::kNoBound;
  uint64_t user_guarantee_bytes = AccountState::kNoBound;
  SessionMark mark = 0;  // of its client

  ProcessId process() const { return {.pid = pid, .started = started}; }
  ShareId share() const { return claim.has_value() ? ShareId(*claim) : ShareId(uid); }
};

struct Account {
  SessionId session{};
  AccountTerms terms;
  AccountState state;            // but for the number of segments
  uint64_t granted_bytes = 0;    // of the reserved ones
  uint64_t counted_bytes = 0;    // of the reserved ones, of the client's own: see SegmentPool::ChargeCounted()
  uint64_t declared_bytes = 0;   // of those that are carried over, the same
  SteadyTime holds_since;        // any memory
  SteadyTime gave_back;          // something, the last time that a churn_window began
  uint64_t gave_back_bytes = 0;  // since then, in that window
  bool is_waited_for = false;    // what is held back does not concern it: see Accounts::HoldBack()
  bool is_ending = false;        // its client closes all that it holds
  bool is_watched = false;
  bool is_changed = false;  // and TakeChanges() is to name it

  uint64_t returning_bytes() const { return is_ending ? state.reserved_bytes : state.returning_bytes; }
};

// Not thread-safe. References to accounts hold until the next Open() or Close().
class Accounts {
 public:
  // `churn_window`: see Expected.
  Accounts(uint64_t capacity_bytes, std::chrono::milliseconds churn_window, std::function<SteadyTime()> clock);

  const Ledger& ledger() const { return ledger_; }

  // ---- Opening and closing ----

  // REQUIRES: `session` has no account; its claim, if it has one, has a limit here.
  void Open(SessionId session, const AccountTerms& terms);
  // What it was granted is charged no more. The rest of what it has reserved stays charged to its share alone.
  void Close(Account& account);
  // nullptr when there is no such account.
  Account* Find(SessionId session);
  const Account* Find(SessionId session) const;
  const absl::flat_hash_map<SessionId, Account>& all() const { return accounts_; }

  // ---- What an account may have ----

  // Errors of Ledger::SetLimit() and SetGuarantee().
  absl::Status SetLimit(Account& account, uint64_t bytes);
  absl::Status SetGuarantee(Account& account, uint64_t bytes);

  // Bounds what all accounts of a claim have together, and what their guarantees come to. Less than they have takes
  // nothing away. Less than they are guaranteed: see Ledger.
  void SetClaimLimit(ClaimId claim, uint64_t bytes);
  // Bounds what the guarantees of the claim's accounts come to, until the next SetClaimLimit(). InvalidArgument below
  // what they come to. REQUIRES: the claim has a limit here.
  absl::Status BoundClaimGuarantees(ClaimId claim, uint64_t bytes);
  // Errors of Ledger::SetGuarantee(claim).
  absl::Status SetClaimGuarantee(ClaimId claim, uint64_t bytes);
  // REQUIRES: the claim has no account.
  void CloseClaim(ClaimId claim);

  // ---- What is charged ----

  // Ledger::CheckGrowth(). `past_hold`: what is held back does not concern it.
  absl::Status CheckGrowth(const Account& account, uint64_t bytes, bool past_hold = false) const {
    return ledger_.CheckGrowth(account.state, bytes, past_hold || account.is_waited_for);
  }
  // REQUIRES: CheckGrowth() says yes; or the account has the bytes already, whatever its limit and the capacity say.
  void Charge(Account& account, uint64_t bytes);
  // Its holder has given a segment back.
  void GiveBack(Account& account, uint64_t bytes);
  // Anything else is charged no more.
  void Uncharge(Account& account, uint64_t bytes);
  // Of no account: of a share, or of nobody.
  void ChargeUnowned(uint64_t bytes, const std::optional<ShareId>& share = std::nullopt) {
    ledger_.ChargeUnowned(bytes, share);
  }
  void UnchargeUnowned(uint64_t bytes, const std::optional<ShareId>& share = std::nullopt) {
    ledger_.UnchargeUnowned(bytes, share);
  }
  // See Ledger::ExtendCapacity(). What shrinks it may forbid requests for good.
  void ExtendCapacity(uint64_t bytes);

  // Charges `bytes` for a lease to come, until that consumes them or they are released. REQUIRES: CheckGrowth() says
  // yes.
  void Grant(Account& account, uint64_t bytes);
  void ReleaseGrant(Account& account, uint64_t bytes);
  // A lease takes over what was granted. False: so much is not granted.
  bool ConsumeGrant(Account& account, uint64_t bytes);
  uint64_t granted_bytes() const { return granted_bytes_; }  // in all

  // ---- Who waits for whom ----

  // See SegmentPool::HoldBack().
  void HoldBack(std::optional<Ledger::Held> held);
  // Growth of the account is refused only because of that.
  bool IsHeldBack(const Account& account, uint64_t bytes) const;

  // What growth depends on, beside the accounts.
  struct CapacityChanges {
    uint64_t free_bytes = 0;  // committed to nobody
    uint64_t held_back_bytes = 0;
    uint64_t guaranteed_bytes = 0;
    uint64_t capacity_bytes = 0;     // as the ledger has it
    bool is_overcommitted = false;   // more is committed than the capacity: no guarantee is given
    uint64_t forbidden = 0;          // changes with all that may forbid requests for good, whosever they are
    std::vector<SessionId> changed;  // watched accounts that may grow by more or by less than at the last call
  };
  CapacityChanges TakeChanges();
  // Something may forbid requests for good, whosever they are.
  void Forbid() { ++forbidden_; }

  // What can be expected to come back soon from others than the session.
  struct Expected {
    uint64_t returning_bytes = 0;  // being closed by its holders, or settling in quarantine
    // What sessions hold that began to hold memory within churn_window, and as much of others as they gave back within
    // it: they may do so again.
    uint64_t churning_bytes = 0;
  };
  // For each of `sessions`. `settling_bytes`: in quarantine.
  std::vector<Expected> ExpectedFor(absl::Span<const SessionId> sessions, uint64_t settling_bytes) const;

 private:
  // Bounds on what the accounts of a claim have, and are guaranteed, together.
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
  uint64_t granted_bytes_ = 0;      // sum of the accounts'
  std::vector<SessionId> changed_;  // for TakeChanges()
  uint64_t forbidden_ = 0;          // the same
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_POOL_ACCOUNTS_H_
