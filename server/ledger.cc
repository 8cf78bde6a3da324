// SPDX-License-Identifier: Apache-2.0
#include "server/ledger.h"

#include "absl/strings/str_cat.h"
#include "allocator/bytes.h"
#include "server/out_of_memory.h"

namespace vrambroker {

absl::Status Ledger::CheckGrowth(const AccountFigures& account, uint64_t bytes, bool past_hold) const {
  if (bytes > capacity_bytes_) {
    return SegmentRefused(OomCause::kLargerThanDevice, "larger than the device's capacity");
  }
  if (account.reserved_bytes > account.limit_bytes || bytes > account.limit_bytes - account.reserved_bytes) {
    return SegmentRefused(OomCause::kLimit, "the session's limit would be exceeded");
  }
  const uint64_t growth = Growth(account, bytes);
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

uint64_t Ledger::MissingBytes(const AccountFigures& account, uint64_t bytes) const {
  const uint64_t growth = Growth(account, bytes);
  return growth - std::min(growth, free_bytes());
}

uint64_t Ledger::MissingForGuarantee(const AccountFigures& account, uint64_t bytes) const {
  const uint64_t wanted = committed_bytes_ - account.committed_bytes() + std::max(account.reserved_bytes, bytes);
  return wanted - std::min(wanted, capacity_bytes_);
}

uint64_t Ledger::AvailableBytes(const AccountFigures& account) const {
  const uint64_t within_guarantee = account.committed_bytes() - account.reserved_bytes;
  return std::min(account.limit_bytes - std::min(account.limit_bytes, account.reserved_bytes),
                  within_guarantee + free_bytes());
}

void Ledger::Charge(AccountFigures& account, uint64_t bytes) {
  committed_bytes_ += Growth(account, bytes);
  charged_bytes_ += bytes;
  account.reserved_bytes += bytes;
}

void Ledger::Uncharge(AccountFigures& account, uint64_t bytes) {
  const uint64_t before = account.committed_bytes();
  account.reserved_bytes -= bytes;
  charged_bytes_ -= bytes;
  uncharged_total_ += bytes;
  committed_bytes_ -= before - account.committed_bytes();
}

absl::Status Ledger::SetGuarantee(AccountFigures& account, uint64_t bytes) {
  if (bytes > account.limit_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("guarantee: ", FormatBytesExactly(bytes),
                                                   " is above the session's limit of ",
                                                   FormatBytesExactly(account.limit_bytes)));
  }
  const uint64_t others = guaranteed_bytes_ - account.guarantee_bytes;
  if (bytes > capacity_bytes_ - others) {
    return SegmentRefused(
        OomCause::kLargerThanDevice,
        absl::StrCat("guarantee: ", FormatBytesExactly(bytes), " is ",
                     FormatBytesExactly(bytes + others - capacity_bytes_),
                     " more than can be guaranteed: other sessions already have guarantees for ",
                     FormatBytesExactly(others), " of the device's ", FormatBytesExactly(capacity_bytes_)));
  }
  AccountFigures changed = account;
  changed.guarantee_bytes = bytes;
  const uint64_t committed = committed_bytes_ - account.committed_bytes() + changed.committed_bytes();
  if (committed > capacity_bytes_) {
    return SegmentRefused(
        OomCause::kCapacity,
        absl::StrCat("guarantee: ", FormatBytesExactly(bytes), " is ", FormatBytesExactly(committed - capacity_bytes_),
                     " more than is free: other sessions hold it, or it is quarantined. Try again when they have given "
                     "memory back (vramctl trim), or ask for less"));
  }
  committed_bytes_ = committed;
  guaranteed_bytes_ = others + bytes;
  account = changed;
  return absl::OkStatus();
}

absl::Status Ledger::SetLimit(AccountFigures& account, uint64_t bytes) {
  if (bytes < account.guarantee_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("limit: ", FormatBytesExactly(bytes), " is below the session's guarantee of ",
                     FormatBytesExactly(account.guarantee_bytes), "; lower that first (vramctl guarantee)"));
  }
  account.limit_bytes = bytes;
  return absl::OkStatus();
}

void Ledger::Close(const AccountFigures& account, uint64_t still_charged) {
  committed_bytes_ -= account.committed_bytes() - still_charged;
  uncharged_total_ += account.reserved_bytes - still_charged;
  charged_bytes_ -= account.reserved_bytes - still_charged;
  guaranteed_bytes_ -= account.guarantee_bytes;
}

void Ledger::ChargeUnowned(uint64_t bytes) {
  committed_bytes_ += bytes;
  charged_bytes_ += bytes;
}

void Ledger::UnchargeUnowned(uint64_t bytes) {
  committed_bytes_ -= bytes;
  charged_bytes_ -= bytes;
  uncharged_total_ += bytes;
}

}  // namespace vrambroker
