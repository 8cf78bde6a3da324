// SPDX-License-Identifier: Apache-2.0
//
// Ledger: the arithmetic of who may hold how much of one device. The only place where limits, guarantees and capacity
// are compared.
#ifndef VRAMBROKER_SERVER_POOL_LEDGER_H_
#define VRAMBROKER_SERVER_POOL_LEDGER_H_

#include <sys/types.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "server/base/saturating.h"

namespace vrambroker {

struct AccountState {
  uint64_t limit_bytes = 0;
  uint64_t guarantee_bytes = 0;     // kept free for the session at all times
  uint64_t reserved_bytes = 0;      // charged: leased, being obtained, granted to a request that waited, or returning
  uint64_t carried_over_bytes = 0;  // of these, from an earlier run of the daemon: see CarriedOver
  uint64_t returning_bytes = 0;     // of these, asked back from the client and not yet closed by it
  size_t segments = 0;              // leased or returning; filled in by SegmentPool
  int priority = 0;                 // higher ones are served first and asked for memory last

  // Of all accounts of its user together, with what is left of those that are closed.
  static constexpr uint64_t kNoBound = std::numeric_limits<uint64_t>::max();
  uid_t uid = 0;
  uint64_t user_limit_bytes = kNoBound;      // on their committed bytes
  uint64_t user_guarantee_bytes = kNoBound;  // on their guarantees

  // What the account takes of the device's capacity, whether it holds it or not.
  uint64_t committed_bytes() const { return std::max(reserved_bytes, guarantee_bytes); }
  // What of its guarantee it does not hold.
  uint64_t unused_guarantee_bytes() const { return committed_bytes() - reserved_bytes; }
};

// What the accounts of a user come to.
struct UserStats {
  uint64_t committed_bytes = 0;  // also what is charged to the user, and to none of its accounts any more
  uint64_t guaranteed_bytes = 0;
};

// Invariants:
// (1) committed_bytes() is the sum of the accounts' committed bytes and of the bytes that are charged to no account. It
//     exceeds the capacity only when processes held more at the start, or when others took device memory that was
//     guaranteed (DriverMemory). Otherwise growth within a guarantee is always possible. No guarantee is given beyond
//     the capacity.
// (2) charged_bytes() is the sum of the accounts' reserved bytes and of those that are charged to no account.
// Not thread-safe.
class Ledger {
 public:
  explicit Ledger(uint64_t capacity_bytes) : given_capacity_bytes_(capacity_bytes), capacity_bytes_(capacity_bytes) {}

  uint64_t capacity_bytes() const { return capacity_bytes_; }
  uint64_t charged_bytes() const { return charged_bytes_; }
  uint64_t committed_bytes() const { return committed_bytes_; }
  uint64_t guaranteed_bytes() const { return guaranteed_bytes_; }

  // SegmentRefused() unless the account may grow by `bytes`. `past_hold`: what is held back does not concern it.
  absl::Status CheckGrowth(const AccountState& account, uint64_t bytes, bool past_hold = false) const;
  // So much of what is charged lies outside of the capacity: see DriverMemory.
  void ExtendCapacity(uint64_t bytes) { capacity_bytes_ = given_capacity_bytes_ + bytes; }

  // What the account's own limit, and its user's, still allow.
  uint64_t LimitRoom(const AccountState& account) const;
  // Nothing for a user without accounts.
  UserStats GetUser(uid_t uid) const;
  // What growth by `bytes` takes that others could have; 0 within the guarantee.
  uint64_t GrowthOf(const AccountState& account, uint64_t bytes) const { return Growth(account, bytes); }
  // False when the guarantees of others will never let the account grow by `bytes`.
  bool MayEverGrow(const AccountState& account, uint64_t bytes) const {
    if (Growth(account, bytes) > account.user_limit_bytes) return false;
    const uint64_t others = guaranteed_bytes_ - account.guarantee_bytes;
    return bytes <= capacity_bytes_ - others && account.reserved_bytes <= capacity_bytes_ - others - bytes;
  }
  // Bytes that others would have to give up before the account may grow by `bytes`, its limit aside.
  uint64_t MissingBytes(const AccountState& account, uint64_t bytes) const;
  // The same for a guarantee of `bytes`.
  uint64_t MissingForGuarantee(const AccountState& account, uint64_t bytes) const;
  // What the account could still grow by.
  uint64_t AvailableBytes(const AccountState& account) const;

  // REQUIRES: CheckGrowth() says yes; or the account has the bytes already, whatever its limit and the capacity say.
  void Charge(AccountState& account, uint64_t bytes);
  void Uncharge(AccountState& account, uint64_t bytes);

  // InvalidArgument above the account's limit. SegmentRefused(kLargerThanDevice) when it could be kept only if others'
  // guarantees were lowered, SegmentRefused(kCapacity) when others would have to give up what they hold. Both say how
  // much is missing.
  absl::Status SetGuarantee(AccountState& account, uint64_t bytes);
  // InvalidArgument below the account's guarantee. A limit below what is reserved takes nothing away.
  absl::Status SetLimit(AccountState& account, uint64_t bytes);

  // The account is no more; `still_charged` bytes of it are charged to its user alone from now on.
  void Close(const AccountState& account, uint64_t still_charged);
  // Of no account: of a user, or of nobody.
  void UnchargeUnowned(uint64_t bytes, std::optional<uid_t> uid = std::nullopt);
  void ChargeUnowned(uint64_t bytes, std::optional<uid_t> uid = std::nullopt);

  // While set, accounts of this priority and lower ones leave so many free bytes alone, unless within their guarantees:
  // see RequestQueue.
  struct Held {
    int priority = 0;
    uint64_t bytes = 0;
  };
  void HoldBack(std::optional<Held> held) { held_back_ = held; }
  // Committed to nobody.
  uint64_t free_bytes() const { return SaturatingSub(capacity_bytes_, committed_bytes_); }
  // Free bytes that are held back now.
  uint64_t held_back_bytes() const { return held_back_.has_value() ? std::min(held_back_->bytes, free_bytes()) : 0; }

  // All that was ever uncharged.
  uint64_t uncharged_total() const { return uncharged_total_; }

 private:
  // What the account's user may still take.
  uint64_t UserRoom(const AccountState& account) const;
  void AddToUser(uid_t uid, uint64_t committed_bytes, uint64_t guaranteed_bytes);
  void TakeFromUser(uid_t uid, uint64_t committed_bytes, uint64_t guaranteed_bytes);
  // What growth by `bytes` adds to committed_bytes().
  static uint64_t Growth(const AccountState& account, uint64_t bytes) {
    return std::max(account.reserved_bytes + bytes, account.guarantee_bytes) - account.committed_bytes();
  }

  const uint64_t given_capacity_bytes_;
  uint64_t capacity_bytes_;
  uint64_t charged_bytes_ = 0;
  uint64_t committed_bytes_ = 0;
  uint64_t guaranteed_bytes_ = 0;
  uint64_t uncharged_total_ = 0;
  std::optional<Held> held_back_;
  absl::flat_hash_map<uid_t, UserStats> users_;  // who have something
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_POOL_LEDGER_H_
