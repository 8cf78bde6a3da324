// SPDX-License-Identifier: Apache-2.0
//
// Ledger: the arithmetic of limits, guarantees and capacity of one device, compared only here.
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
  uint64_t carried_over_bytes = 0;  // part of reserved_bytes, from an earlier run of the daemon: see CarriedOver
  uint64_t returning_bytes = 0;     // part of reserved_bytes, asked back from the client and not yet closed by it
  uint64_t came_back_bytes = 0;     // given back by the holder, ever
  size_t segments = 0;              // leased or returning; filled in by SegmentPool
  // Part of reserved_bytes obtained from the driver by the client itself; filled in by SegmentPool.
  uint64_t counted_bytes = 0;
  int priority = 0;  // sessions of higher priority are served first and asked for memory last

  // Bounds on all accounts of the share together, including remains of closed accounts.
  static constexpr uint64_t kNoBound = std::numeric_limits<uint64_t>::max();
  ShareId share;
  uint64_t share_limit_bytes = kNoBound;      // on committed bytes
  uint64_t share_guarantee_bytes = kNoBound;  // on the sum of guarantees

  // The most the account may have, as told to its client. `limit_bytes` stays when the claim's limit changes.
  uint64_t effective_limit_bytes() const {
    return std::holds_alternative<ClaimId>(share) ? std::min(limit_bytes, share_limit_bytes) : limit_bytes;
  }
  // Bytes of the device's capacity taken by the account, held or not.
  uint64_t committed_bytes() const { return std::max(reserved_bytes, guarantee_bytes); }
  // Part of the guarantee not held.
  uint64_t unused_guarantee_bytes() const { return committed_bytes() - reserved_bytes; }
};

// Invariants:
// (1) A share uses the committed bytes of its accounts, plus bytes charged to the share alone.
// (2) committed_bytes() is the sum of the shares' committed bytes and of the bytes charged to no share. The sum exceeds
//     the capacity only when processes held more at the start, or when programs outside the broker took guaranteed
//     device memory (DriverMemory). Otherwise the device always has enough for growth within guarantees. No guarantee
//     is given beyond the capacity.
// (3) charged_bytes() is the sum of the accounts' reserved bytes and of the bytes charged to no account. A share's
//     charged bytes are the sum over its accounts, plus bytes charged to the share alone.
// (4) Growth never takes the charged bytes of a share beyond its limit, not even growth within a guarantee: under a
//     limit lowered below the guarantees of the accounts, memory goes first come, first served.
// Not thread-safe.
class Ledger {
 public:
  explicit Ledger(uint64_t capacity_bytes) : given_capacity_bytes_(capacity_bytes), capacity_bytes_(capacity_bytes) {}

  uint64_t capacity_bytes() const { return capacity_bytes_; }
  uint64_t charged_bytes() const { return charged_bytes_; }
  uint64_t committed_bytes() const { return committed_bytes_; }
  uint64_t guaranteed_bytes() const { return guaranteed_bytes_; }

  // SegmentRefused() unless the account may grow by `bytes`. `past_hold`: ignore held-back memory.
  absl::Status CheckGrowth(const AccountState& account, uint64_t bytes, bool past_hold = false) const;
  // Sets how many of the charged bytes lie outside of the capacity: see DriverMemory.
  void ExtendCapacity(uint64_t bytes) { capacity_bytes_ = given_capacity_bytes_ + bytes; }

  // Bytes still allowed by the limits of the account and its share.
  uint64_t LimitRoom(const AccountState& account) const;
  // Opens or closes the claim's share. The peak is kept while it is open.
  void OpenClaim(ClaimId claim);
  void CloseClaim(ClaimId claim);

  // Returns zeros for an empty share.
  ShareStats GetShare(const ShareId& share) const;
  // Non-empty shares, and open claims.
  const absl::flat_hash_map<ShareId, ShareStats>& shares() const { return shares_; }
  // Bytes, available to other shares, taken by growth of `bytes`; 0 within the guarantees.
  uint64_t GrowthOf(const AccountState& account, uint64_t bytes) const;
  // Most bytes the account may ever grow by, under the share's limit and the other guarantees: once all other accounts
  // have given back as much as they can.
  uint64_t MostEver(const AccountState& account) const;
  // Bytes other accounts would have to give up before the account may grow by `bytes`, limits aside.
  uint64_t MissingBytes(const AccountState& account, uint64_t bytes) const;
  // Bytes other accounts would have to give up for a guarantee of `bytes`.
  uint64_t MissingForGuarantee(const AccountState& account, uint64_t bytes) const;
  // Bytes other accounts of the share would have to give up before the share's limit lets the account grow by `bytes`;
  // 0: none.
  uint64_t MissingInShare(const AccountState& account, uint64_t bytes) const;
  // Bytes the account could still grow by.
  uint64_t AvailableBytes(const AccountState& account) const;

  // REQUIRES: CheckGrowth() says yes; or the account has the bytes already, whatever its limit and the capacity say.
  void Charge(AccountState& account, uint64_t bytes);
  void Uncharge(AccountState& account, uint64_t bytes);

  // InvalidArgument above the account's limit. SegmentRefused(kLargerThanDevice) when only lowering other guarantees
  // would help, SegmentRefused(kCapacity) when other sessions would have to give memory up. Both errors say how much is
  // missing.
  absl::Status SetGuarantee(AccountState& account, uint64_t bytes);
  // InvalidArgument below the account's guarantee. A limit below reserved_bytes takes nothing away.
  absl::Status SetLimit(AccountState& account, uint64_t bytes);

  // Sets the guarantee of a claim, for all its accounts together. SegmentRefused() as for an account.
  absl::Status SetGuarantee(ClaimId claim, uint64_t bytes);
  uint64_t MissingForGuarantee(ClaimId claim, uint64_t bytes) const;

  // Closes the account; `still_charged` of its bytes stay charged to the share alone.
  void Close(const AccountState& account, uint64_t still_charged);
  // Charges and uncharges memory of a share alone, or of nobody.
  void UnchargeUnowned(uint64_t bytes, const std::optional<ShareId>& share = std::nullopt);
  void ChargeUnowned(uint64_t bytes, const std::optional<ShareId>& share = std::nullopt);

  // While set, accounts of equal or lower priority leave so many free bytes alone, unless within their guarantees: see
  // RequestQueue.
  struct Held {
    int priority = 0;
    uint64_t bytes = 0;
  };
  void HoldBack(std::optional<Held> held) { held_back_ = held; }
  // Bytes committed to nobody.
  uint64_t free_bytes() const { return SaturatingSub(capacity_bytes_, committed_bytes_); }
  // Free bytes held back now.
  uint64_t held_back_bytes() const { return held_back_.has_value() ? std::min(held_back_->bytes, free_bytes()) : 0; }

  // Total of all bytes ever uncharged.
  uint64_t uncharged_total() const { return uncharged_total_; }

 private:
  // Bytes the account's share may still use.
  uint64_t ShareRoom(const AccountState& account) const;
  // Bytes still chargeable to the share: no fewer than ShareRoom(), since used bytes include room for guarantees.
  uint64_t ChargeRoom(const AccountState& account) const;
  // Bytes the share's limit still allows the account.
  uint64_t RoomInShare(const AccountState& account) const;
  // Bytes added to the share's used bytes by growth of `bytes`.
  static uint64_t UseOf(const AccountState& account, uint64_t bytes) {
    return std::max(account.reserved_bytes + bytes, account.guarantee_bytes) - account.committed_bytes();
  }
  // Applies `change` to the share, and updates the ledger's sums.
  void Change(const ShareId& share, absl::FunctionRef<void(ShareStats&)> change);
  // Whether other guarantees leave room for a guarantee of `bytes`, changing the share from `before` to `after`.
  absl::Status CheckPromise(uint64_t bytes, const ShareStats& before, const ShareStats& after) const;
  // Whether enough bytes are free for the change.
  absl::Status CheckFree(uint64_t bytes, const ShareStats& before, const ShareStats& after) const;

  const uint64_t given_capacity_bytes_;
  uint64_t capacity_bytes_;
  uint64_t charged_bytes_ = 0;
  uint64_t committed_bytes_ = 0;
  uint64_t guaranteed_bytes_ = 0;
  uint64_t uncharged_total_ = 0;
  std::optional<Held> held_back_;
  absl::flat_hash_map<ShareId, ShareStats> shares_;  // non-empty shares, and open claims
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_POOL_LEDGER_H_
