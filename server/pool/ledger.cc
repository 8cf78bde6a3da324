// SPDX-License-Identifier: Apache-2.0
#include "server/pool/ledger.h"

#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "server/pool/segment_refusal.h"

namespace vrambroker {
namespace {

uint64_t SaturatingAdd(uint64_t a, uint64_t b) {
  return a > AccountState::kNoBound - b ? AccountState::kNoBound : a + b;
}

bool IsClaim(const ShareId& share) {
  return std::holds_alternative<ClaimId>(share);
}

}  // namespace

// ---- Growing ----

absl::Status Ledger::CheckGrowth(const AccountState& account, uint64_t bytes, bool past_hold) const {
  if (bytes > capacity_bytes_) {
    return SegmentRefused(OomCause::kLargerThanDevice, "larger than the device's capacity");
  }
  if (account.reserved_bytes > account.limit_bytes || bytes > account.limit_bytes - account.reserved_bytes) {
    return SegmentRefused(OomCause::kLimit, "the session's limit would be exceeded");
  }
  if (MissingInShare(account, bytes) > 0) {
    // Sessions of the share may give memory back, or quarantined memory of ended sessions may settle, so waiting can
    // help.
    return SegmentRefused(OomCause::kCapacity, IsClaim(account.share)
                                                   ? "the claim's limit would be exceeded by its sessions together"
                                                   : "user_limit would be exceeded by the user's sessions together");
  }
  const uint64_t growth = GrowthOf(account, bytes);
  const uint64_t free = free_bytes();
  if (growth > free) {
    return SegmentRefused(OomCause::kCapacity, "the device's capacity is reserved by sessions, or guaranteed to them");
  }
  if (growth > 0 && !past_hold && held_back_.has_value() && account.priority <= held_back_->priority &&
      growth > free - held_back_bytes()) {
    return SegmentRefused(OomCause::kCapacity, "free memory is kept for a moment for a request that has waited longer");
  }
  return absl::OkStatus();
}

uint64_t Ledger::GrowthOf(const AccountState& account, uint64_t bytes) const {
  const ShareStats share = GetShare(account.share);
  return SaturatingSub(share.used_bytes + UseOf(account, bytes), share.committed_bytes());
}

uint64_t Ledger::MostEver(const AccountState& account) const {
  const ShareStats share = GetShare(account.share);
  const uint64_t of_others = share.promised_bytes - account.guarantee_bytes;  // in the share
  // Memory of the account itself comes back only from its client, and the client is asking for more.
  const uint64_t in_share = SaturatingSub(account.share_limit_bytes, account.reserved_bytes);
  const uint64_t by_share =
      std::max(std::min(account.unused_guarantee_bytes(), in_share), SaturatingSub(in_share, of_others));
  const uint64_t outside = guaranteed_bytes_ - share.guaranteed_bytes();
  return std::min(by_share, SaturatingSub(capacity_bytes_, outside + of_others + account.reserved_bytes));
}

uint64_t Ledger::MissingBytes(const AccountState& account, uint64_t bytes) const {
  return SaturatingSub(GrowthOf(account, bytes), free_bytes());
}

uint64_t Ledger::MissingInShare(const AccountState& account, uint64_t bytes) const {
  return std::max(SaturatingSub(UseOf(account, bytes), ShareRoom(account)), SaturatingSub(bytes, ChargeRoom(account)));
}

uint64_t Ledger::MissingForGuarantee(const AccountState& account, uint64_t bytes) const {
  ShareStats share = GetShare(account.share);
  const uint64_t others = committed_bytes_ - share.committed_bytes();
  share.used_bytes += std::max(account.reserved_bytes, bytes) - account.committed_bytes();
  return SaturatingSub(others + share.committed_bytes(), capacity_bytes_);
}

uint64_t Ledger::MissingForGuarantee(ClaimId claim, uint64_t bytes) const {
  const ShareStats share = GetShare(claim);
  return SaturatingSub(committed_bytes_ - share.committed_bytes() + std::max(share.used_bytes, bytes), capacity_bytes_);
}

uint64_t Ledger::AvailableBytes(const AccountState& account) const {
  const uint64_t free = free_bytes() + GetShare(account.share).unused_guarantee_bytes();
  return std::min({SaturatingSub(account.limit_bytes, account.reserved_bytes), RoomInShare(account),
                   account.unused_guarantee_bytes() + free});
}

uint64_t Ledger::LimitRoom(const AccountState& account) const {
  return std::min(SaturatingSub(account.limit_bytes, account.reserved_bytes), RoomInShare(account));
}

// ---- Charging ----

void Ledger::Charge(AccountState& account, uint64_t bytes) {
  const uint64_t use = UseOf(account, bytes);
  Change(account.share, [&](ShareStats& share) {
    share.used_bytes += use;
    share.charged_bytes += bytes;
  });
  charged_bytes_ += bytes;
  account.reserved_bytes += bytes;
}

void Ledger::Uncharge(AccountState& account, uint64_t bytes) {
  const uint64_t before = account.committed_bytes();
  account.reserved_bytes -= bytes;
  charged_bytes_ -= bytes;
  uncharged_total_ += bytes;
  const uint64_t freed = before - account.committed_bytes();
  Change(account.share, [&](ShareStats& share) {
    share.used_bytes -= freed;
    share.charged_bytes -= bytes;
  });
}

void Ledger::Close(const AccountState& account, uint64_t still_charged) {
  uncharged_total_ += account.reserved_bytes - still_charged;
  charged_bytes_ -= account.reserved_bytes - still_charged;
  Change(account.share, [&](ShareStats& share) {
    share.used_bytes -= account.committed_bytes() - still_charged;
    share.charged_bytes -= account.reserved_bytes - still_charged;
    share.promised_bytes -= account.guarantee_bytes;
  });
}

void Ledger::ChargeUnowned(uint64_t bytes, const std::optional<ShareId>& share) {
  charged_bytes_ += bytes;
  if (share.has_value()) {
    return Change(*share, [bytes](ShareStats& of) {
      of.used_bytes += bytes;
      of.charged_bytes += bytes;
    });
  }
  committed_bytes_ += bytes;
}

void Ledger::UnchargeUnowned(uint64_t bytes, const std::optional<ShareId>& share) {
  charged_bytes_ -= bytes;
  uncharged_total_ += bytes;
  if (share.has_value()) {
    return Change(*share, [bytes](ShareStats& of) {
      of.used_bytes -= bytes;
      of.charged_bytes -= bytes;
    });
  }
  committed_bytes_ -= bytes;
}

// ---- Guarantees and limits ----

absl::Status Ledger::SetGuarantee(AccountState& account, uint64_t bytes) {
  if (bytes > account.limit_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("guarantee: it would be above the session's limit of ", FormatBytesExactly(account.limit_bytes)));
  }
  const ShareStats before = GetShare(account.share);
  ShareStats after = before;
  after.promised_bytes += bytes - account.guarantee_bytes;
  after.used_bytes += std::max(account.reserved_bytes, bytes) - account.committed_bytes();
  if (bytes > account.guarantee_bytes) {  // lowering is always possible, however much is charged
    if (after.guaranteed_bytes() > before.guaranteed_bytes()) {
      if (absl::Status status = CheckPromise(bytes, before, after); !status.ok()) return status;
    }
    const bool is_claim = IsClaim(account.share);
    if (const uint64_t others = before.promised_bytes - account.guarantee_bytes;
        bytes > SaturatingSub(account.share_guarantee_bytes, others)) {
      return SegmentRefused(OomCause::kLimit,
                            absl::StrCat("guarantee: ", FormatBytesExactly(bytes), " is more than ",
                                         is_claim ? "the claim's limit leaves: its other sessions"
                                                  : "user_guarantee leaves: the user's other sessions",
                                         " have guarantees for ", FormatBytesExactly(others), " of ",
                                         FormatBytesExactly(account.share_guarantee_bytes)));
    }
    if (SaturatingSub(after.used_bytes, before.used_bytes) > ShareRoom(account)) {
      return SegmentRefused(OomCause::kLimit, absl::StrCat("guarantee: ", FormatBytesExactly(bytes), " would take the ",
                                                           is_claim ? "claim's sessions beyond its limit, "
                                                                    : "user's sessions beyond user_limit, ",
                                                           FormatBytesExactly(account.share_limit_bytes)));
    }
    if (absl::Status status = CheckFree(bytes, before, after); !status.ok()) return status;
  }
  Change(account.share, [&after](ShareStats& share) { share = after; });
  account.guarantee_bytes = bytes;
  return absl::OkStatus();
}

absl::Status Ledger::SetGuarantee(ClaimId claim, uint64_t bytes) {
  const ShareStats before = GetShare(claim);
  ShareStats after = before;
  after.guarantee_bytes = bytes;
  if (after.guaranteed_bytes() > before.guaranteed_bytes()) {
    if (absl::Status status = CheckPromise(bytes, before, after); !status.ok()) return status;
  }
  if (bytes > before.guarantee_bytes) {
    if (absl::Status status = CheckFree(bytes, before, after); !status.ok()) return status;
  }
  Change(claim, [&after](ShareStats& share) { share = after; });
  return absl::OkStatus();
}

absl::Status Ledger::CheckPromise(uint64_t bytes, const ShareStats& before, const ShareStats& after) const {
  const uint64_t others = guaranteed_bytes_ - before.guaranteed_bytes() + (after.guaranteed_bytes() - bytes);
  if (bytes <= SaturatingSub(capacity_bytes_, others)) return absl::OkStatus();
  return SegmentRefused(
      OomCause::kLargerThanDevice,
      absl::StrCat("guarantee: ", FormatBytesExactly(bytes), " is ",
                   FormatBytesExactly(bytes + others - capacity_bytes_),
                   " more than can be guaranteed: other sessions and claims already have guarantees for ",
                   FormatBytesExactly(others), " of the device's ", FormatBytesExactly(capacity_bytes_)));
}

absl::Status Ledger::CheckFree(uint64_t bytes, const ShareStats& before, const ShareStats& after) const {
  const uint64_t committed = committed_bytes_ - before.committed_bytes() + after.committed_bytes();
  if (committed <= capacity_bytes_) return absl::OkStatus();
  return SegmentRefused(
      OomCause::kCapacity,
      absl::StrCat("guarantee: ", FormatBytesExactly(bytes), " is ", FormatBytesExactly(committed - capacity_bytes_),
                   " more than is free: other sessions hold it, or it is quarantined. Try again when they have given "
                   "memory back (vramctl trim), or ask for less"));
}

absl::Status Ledger::SetLimit(AccountState& account, uint64_t bytes) {
  if (bytes < account.guarantee_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("limit: ", FormatBytesExactly(bytes), " is below the session's guarantee of ",
                     FormatBytesExactly(account.guarantee_bytes), "; lower that first (vramctl guarantee)"));
  }
  account.limit_bytes = bytes;
  return absl::OkStatus();
}

// ---- Shares ----

void Ledger::OpenClaim(ClaimId claim) {
  Change(claim, [](ShareStats& share) { share.is_claim = true; });
}

void Ledger::CloseClaim(ClaimId claim) {
  Change(claim, [](ShareStats& share) {
    share.is_claim = false;
    share.peak_bytes = 0;
  });
}

ShareStats Ledger::GetShare(const ShareId& share) const {
  const auto it = shares_.find(share);
  return it == shares_.end() ? ShareStats() : it->second;
}

uint64_t Ledger::ShareRoom(const AccountState& account) const {
  if (account.share_limit_bytes == AccountState::kNoBound) return AccountState::kNoBound;
  return SaturatingSub(account.share_limit_bytes, GetShare(account.share).used_bytes);
}

uint64_t Ledger::ChargeRoom(const AccountState& account) const {
  if (account.share_limit_bytes == AccountState::kNoBound) return AccountState::kNoBound;
  return SaturatingSub(account.share_limit_bytes, GetShare(account.share).charged_bytes);
}

uint64_t Ledger::RoomInShare(const AccountState& account) const {
  return std::min(SaturatingAdd(ShareRoom(account), account.unused_guarantee_bytes()), ChargeRoom(account));
}

void Ledger::Change(const ShareId& share, absl::FunctionRef<void(ShareStats&)> change) {
  const auto it = shares_.try_emplace(share).first;
  ShareStats& stats = it->second;
  const ShareStats before = stats;
  change(stats);
  committed_bytes_ += stats.committed_bytes() - before.committed_bytes();
  guaranteed_bytes_ += stats.guaranteed_bytes() - before.guaranteed_bytes();
  if (stats.is_claim) stats.peak_bytes = std::max(stats.peak_bytes, stats.charged_bytes);
  if (stats.committed_bytes() == 0 && stats.guaranteed_bytes() == 0 && !stats.is_claim) shares_.erase(it);
}

}  // namespace vrambroker
