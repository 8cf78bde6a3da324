// SPDX-License-Identifier: Apache-2.0
//
// Ledger: the arithmetic of who may hold how much of one device. The only place where limits, guarantees and capacity
// are compared.
#ifndef VRAMBROKER_SERVER_POOL_LEDGER_H_
#define VRAMBROKER_SERVER_POOL_LEDGER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "server/base/saturating.h"
#include "server/pool/share.h"

namespace vrambroker {

struct AccountState {
  uint64_t limit_bytes = 0;
  uint64_t guarantee_bytes = 0;     // kept free for the session at all times
  uint64_t reserved_bytes = 0;      // charged: leased, being obtained, granted to a request that waited, or returning
  uint64_t carried_over_bytes = 0;  // of these, from an earlier run of the daemon: see CarriedOver
  uint64_t returning_bytes = 0;     // of these, asked back from the client and not yet closed by it
  uint64_t came_back_bytes = 0;     // from its holder, ever
  size_t segments = 0;              // leased or returning; filled in by SegmentPool
  // Of those that are reserved, memory that the client has of the driver itself; filled in by SegmentPool.
  uint64_t counted_bytes = 0;
  int priority = 0;  // higher ones are served first and asked for memory last

  // Of all accounts of its share together, with what is left of those that are closed.
  static constexpr uint64_t kNoBound = std::numeric_limits<uint64_t>::max();
  ShareId share;
  uint64_t share_limit_bytes = kNoBound;      // on what they have committed
  uint64_t share_guarantee_bytes = kNoBound;  // on the sum of their guarantees

  // What it may have at most: as it is told to its client. `limit_bytes` stays when its claim's changes.
  uint64_t effective_limit_bytes() const {
    return std::holds_alternative<ClaimId>(share) ? std::min(limit_bytes, share_limit_bytes) : limit_bytes;
  }
  // What the account takes of the device's capacity, whether it holds it or not.
  uint64_t committed_bytes() const { return std::max(reserved_bytes, guarantee_bytes); }
  // What of its guarantee it does not hold.
  uint64_t unused_guarantee_bytes() const { return committed_bytes() - reserved_bytes; }
};

// Invariants:
// (1) A share uses what its accounts have committed, and what is charged to it and to none of them.
// (2) committed_bytes() is the sum of the shares' committed bytes and of the bytes that are charged to no share. It
//     exceeds the capacity only when processes held more at the start, or when others took device memory that was
//     guaranteed (DriverMemory). Otherwise the device always has what growth within a guarantee takes. No guarantee is
//     given beyond the capacity.
// (3) charged_bytes() is the sum of the accounts' reserved bytes and of those that are charged to no account. A share's
//     charged bytes are the same sum for its accounts, and for what is charged to it alone.
// (4) Growth never takes what is charged to a share beyond its limit, not even growth within a guarantee: a limit that
//     was lowered below the guarantees of its accounts leaves them only what it allows, first come, first served.
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

  // What the account's own limit, and its share's, still allow.
  uint64_t LimitRoom(const AccountState& account) const;
  // The share is there from now on, and its peak is kept; or no more.
  void OpenClaim(ClaimId claim);
  void CloseClaim(ClaimId claim);

  // Nothing for a share that has nothing.
  ShareStats GetShare(const ShareId& share) const;
  // Those that have something, and open claims.
  const absl::flat_hash_map<ShareId, ShareStats>& shares() const { return shares_; }
  // What growth by `bytes` takes that other shares could have; 0 within the guarantees.
  uint64_t GrowthOf(const AccountState& account, uint64_t bytes) const;
  // The most that the share's limit, and the guarantees of others, may ever let the account grow by: when all others
  // have given back what they can.
  uint64_t MostEver(const AccountState& account) const;
  // Bytes that others would have to give up before the account may grow by `bytes`, limits aside.
  uint64_t MissingBytes(const AccountState& account, uint64_t bytes) const;
  // The same for a guarantee of `bytes`.
  uint64_t MissingForGuarantee(const AccountState& account, uint64_t bytes) const;
  // Bytes that others of its share would have to give up before the share's limit lets the account grow by `bytes`; 0:
  // it does.
  uint64_t MissingInShare(const AccountState& account, uint64_t bytes) const;
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

  // Of a claim, for all of its accounts together. SegmentRefused() as for an account's.
  absl::Status SetGuarantee(ClaimId claim, uint64_t bytes);
  uint64_t MissingForGuarantee(ClaimId claim, uint64_t bytes) const;

  // The account is no more; `still_charged` bytes of it are charged to its share alone from now on.
  void Close(const AccountState& account, uint64_t still_charged);
  // Of no account: of a share, or of nobody.
  void UnchargeUnowned(uint64_t bytes, const std::optional<ShareId>& share = std::nullopt);
  void ChargeUnowned(uint64_t bytes, const std::optional<ShareId>& share = std::nullopt);

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
  // What the account's share may still use.
  uint64_t ShareRoom(const AccountState& account) const;
  // Bytes that may still be charged to it: no less, since what it uses has room for the guarantees of its accounts.
  uint64_t ChargeRoom(const AccountState& account) const;
  // Bytes that the share's limit still allows the account.
  uint64_t RoomInShare(const AccountState& account) const;
  // What growth by `bytes` adds to what its share uses.
  static uint64_t UseOf(const AccountState& account, uint64_t bytes) {
    return std::max(account.reserved_bytes + bytes, account.guarantee_bytes) - account.committed_bytes();
  }
  // What the share adds to the ledger's sums follows what `change` makes of it.
  void Change(const ShareId& share, absl::FunctionRef<void(ShareStats&)> change);
  // Whether the other guarantees leave room for one of `bytes`, which makes its share what `after` says.
  absl::Status CheckPromise(uint64_t bytes, const ShareStats& before, const ShareStats& after) const;
  // Whether so much is free.
  absl::Status CheckFree(uint64_t bytes, const ShareStats& before, const ShareStats& after) const;

  const uint64_t given_capacity_bytes_;
  uint64_t capacity_bytes_;
  uint64_t charged_bytes_ = 0;
  uint64_t committed_bytes_ = 0;
  uint64_t guaranteed_bytes_ = 0;
  uint64_t uncharged_total_ = 0;
  std::optional<Held> held_back_;
  absl::flat_hash_map<ShareId, ShareStats> shares_;  // that have something, and open claims
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_POOL_LEDGER_H_
