// SPDX-License-Identifier: Apache-2.0
#include "server/pool/ledger.h"

#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "server/pool/segment_refusal.h"

namespace vrambroker {

absl::Status Ledger::CheckGrowth(const AccountState& account, uint64_t bytes, bool past_hold) const {
  if (bytes > capacity_bytes_) {
    return SegmentRefused(OomCause::kLargerThanDevice, "larger than the device's capacity");
  }
  if (account.reserved_bytes > account.limit_bytes || bytes > account.limit_bytes - account.reserved_bytes) {
    return SegmentRefused(OomCause::kLimit, "the session's limit would be exceeded");
  }
  const uint64_t growth = Growth(account, bytes);
  if (growth > UserRoom(account)) {
    // Others of the user may give something back, or what ended ones have left may settle: it may wait for that.
    return SegmentRefused(OomCause::kCapacity, "user_limit would be exceeded by the user's sessions together");
  }
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

uint64_t Ledger::MissingBytes(const AccountState& account, uint64_t bytes) const {
  return SaturatingSub(Growth(account, bytes), free_bytes());
}

uint64_t Ledger::MissingForGuarantee(const AccountState& account, uint64_t bytes) const {
  const uint64_t wanted = committed_bytes_ - account.committed_bytes() + std::max(account.reserved_bytes, bytes);
  return SaturatingSub(wanted, capacity_bytes_);
}

uint64_t Ledger::AvailableBytes(const AccountState& account) const {
  const uint64_t within_guarantee = account.unused_guarantee_bytes();
  return std::min(SaturatingSub(account.limit_bytes, account.reserved_bytes),
                  within_guarantee + std::min(free_bytes(), UserRoom(account)));
}

uint64_t Ledger::LimitRoom(const AccountState& account) const {
  const uint64_t within_guarantee = account.unused_guarantee_bytes();
  const uint64_t user_room = UserRoom(account);
  return std::min(SaturatingSub(account.limit_bytes, account.reserved_bytes),
                  user_room > AccountState::kNoBound - within_guarantee ? user_room : within_guarantee + user_room);
}

void Ledger::Charge(AccountState& account, uint64_t bytes) {
  const uint64_t growth = Growth(account, bytes);
  committed_bytes_ += growth;
  AddToUser(account.uid, growth, 0);
  charged_bytes_ += bytes;
  account.reserved_bytes += bytes;
}

void Ledger::Uncharge(AccountState& account, uint64_t bytes) {
  const uint64_t before = account.committed_bytes();
  account.reserved_bytes -= bytes;
  charged_bytes_ -= bytes;
  uncharged_total_ += bytes;
  committed_bytes_ -= before - account.committed_bytes();
  TakeFromUser(account.uid, before - account.committed_bytes(), 0);
}

absl::Status Ledger::SetGuarantee(AccountState& account, uint64_t bytes) {
  if (bytes > account.limit_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("guarantee: ", FormatBytesExactly(bytes),
                                                   " is above the session's limit of ",
                                                   FormatBytesExactly(account.limit_bytes)));
  }
  const uint64_t others = guaranteed_bytes_ - account.guarantee_bytes;
  const bool is_raised = bytes > account.guarantee_bytes;  // less is always possible, however much is charged
  if (is_raised && bytes > SaturatingSub(capacity_bytes_, others)) {
    return SegmentRefused(
        OomCause::kLargerThanDevice,
        absl::StrCat("guarantee: ", FormatBytesExactly(bytes), " is ",
                     FormatBytesExactly(bytes + others - capacity_bytes_),
                     " more than can be guaranteed: other sessions already have guarantees for ",
                     FormatBytesExactly(others), " of the device's ", FormatBytesExactly(capacity_bytes_)));
  }
  const UserStats user = GetUser(account.uid);
  if (const uint64_t of_others = user.guaranteed_bytes - account.guarantee_bytes;
      is_raised && bytes > SaturatingSub(account.user_guarantee_bytes, of_others)) {
    return SegmentRefused(
        OomCause::kLimit,
        absl::StrCat("guarantee: ", FormatBytesExactly(bytes),
                     " is more than user_guarantee leaves: the user's other sessions have guarantees for ",
                     FormatBytesExactly(of_others), " of ", FormatBytesExactly(account.user_guarantee_bytes)));
  }
  AccountState changed = account;
  changed.guarantee_bytes = bytes;
  if (const uint64_t more = SaturatingSub(changed.committed_bytes(), account.committed_bytes());
      more > UserRoom(account)) {
    return SegmentRefused(OomCause::kLimit, absl::StrCat("guarantee: ", FormatBytesExactly(bytes),
                                                         " would take the user's sessions beyond user_limit, ",
                                                         FormatBytesExactly(account.user_limit_bytes)));
  }
  const uint64_t committed = committed_bytes_ - account.committed_bytes() + changed.committed_bytes();
  if (is_raised && committed > capacity_bytes_) {
    return SegmentRefused(
        OomCause::kCapacity,
        absl::StrCat("guarantee: ", FormatBytesExactly(bytes), " is ", FormatBytesExactly(committed - capacity_bytes_),
                     " more than is free: other sessions hold it, or it is quarantined. Try again when they have given "
                     "memory back (vramctl trim), or ask for less"));
  }
  committed_bytes_ = committed;
  guaranteed_bytes_ = others + bytes;
  TakeFromUser(account.uid, account.committed_bytes(), account.guarantee_bytes);
  AddToUser(account.uid, changed.committed_bytes(), bytes);
  account = changed;
  return absl::OkStatus();
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

void Ledger::Close(const AccountState& account, uint64_t still_charged) {
  committed_bytes_ -= account.committed_bytes() - still_charged;
  uncharged_total_ += account.reserved_bytes - still_charged;
  charged_bytes_ -= account.reserved_bytes - still_charged;
  guaranteed_bytes_ -= account.guarantee_bytes;
  TakeFromUser(account.uid, account.committed_bytes() - still_charged, account.guarantee_bytes);
}

UserStats Ledger::GetUser(uid_t uid) const {
  const auto it = users_.find(uid);
  return it == users_.end() ? UserStats() : it->second;
}

uint64_t Ledger::UserRoom(const AccountState& account) const {
  if (account.user_limit_bytes == AccountState::kNoBound) return AccountState::kNoBound;
  return SaturatingSub(account.user_limit_bytes, GetUser(account.uid).committed_bytes);
}

void Ledger::AddToUser(uid_t uid, uint64_t committed_bytes, uint64_t guaranteed_bytes) {
  if (committed_bytes == 0 && guaranteed_bytes == 0) return;
  UserStats& user = users_[uid];
  user.committed_bytes += committed_bytes;
  user.guaranteed_bytes += guaranteed_bytes;
}

void Ledger::TakeFromUser(uid_t uid, uint64_t committed_bytes, uint64_t guaranteed_bytes) {
  if (committed_bytes == 0 && guaranteed_bytes == 0) return;
  UserStats& user = users_[uid];
  user.committed_bytes -= committed_bytes;
  user.guaranteed_bytes -= guaranteed_bytes;
  if (user.committed_bytes == 0 && user.guaranteed_bytes == 0) users_.erase(uid);
}

void Ledger::ChargeUnowned(uint64_t bytes, std::optional<uid_t> uid) {
  committed_bytes_ += bytes;
  charged_bytes_ += bytes;
  if (uid.has_value()) AddToUser(*uid, bytes, 0);
}

void Ledger::UnchargeUnowned(uint64_t bytes, std::optional<uid_t> uid) {
  if (uid.has_value()) TakeFromUser(*uid, bytes, 0);
  committed_bytes_ -= bytes;
  charged_bytes_ -= bytes;
  uncharged_total_ += bytes;
}

}  // namespace vrambroker
