// SPDX-License-Identifier: Apache-2.0
#include "server/pool/accounts.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"

namespace vrambroker {

Accounts::Accounts(uint64_t capacity_bytes, std::chrono::milliseconds churn_window, std::function<SteadyTime()> clock)
    : churn_window_(churn_window), clock_(std::move(clock)), ledger_(capacity_bytes) {}

// ---- Opening and closing ----

void Accounts::Open(SessionId session, const AccountTerms& terms) {
  const ClaimBounds bounds = terms.claim.has_value() ? claim_bounds_.at(*terms.claim)
                                                     : ClaimBounds{.limit_bytes = terms.user_limit_bytes,
                                                                   .guarantee_bytes = terms.user_guarantee_bytes};
  accounts_[session] = Account{.session = session,
                               .terms = terms,
                               .state = {.limit_bytes = terms.limit_bytes,
                                         .priority = terms.priority,
                                         .share = terms.share(),
                                         .share_limit_bytes = bounds.limit_bytes,
                                         .share_guarantee_bytes = bounds.guarantee_bytes}};
}

void Accounts::Close(Account& account) {
  ReleaseGrant(account, account.granted_bytes);
  ledger_.Close(account.state, account.state.reserved_bytes);
  Changed(account);
  accounts_.erase(account.session);
}

Account* Accounts::Find(SessionId session) {
  const auto it = accounts_.find(session);
  return it == accounts_.end() ? nullptr : &it->second;
}

const Account* Accounts::Find(SessionId session) const {
  const auto it = accounts_.find(session);
  return it == accounts_.end() ? nullptr : &it->second;
}

// ---- Limits and guarantees ----

absl::Status Accounts::SetLimit(Account& account, uint64_t bytes) {
  if (absl::Status status = ledger_.SetLimit(account.state, bytes); !status.ok()) return status;
  Changed(account);
  return absl::OkStatus();
}

absl::Status Accounts::SetGuarantee(Account& account, uint64_t bytes) {
  const uint64_t before = account.state.guarantee_bytes;
  if (absl::Status status = ledger_.SetGuarantee(account.state, bytes); !status.ok()) return status;
  Changed(account);
  if (bytes > before) Forbid();
  return absl::OkStatus();
}

void Accounts::SetClaimLimit(ClaimId claim, uint64_t bytes) {
  ledger_.OpenClaim(claim);
  SetClaimBounds(claim, {.limit_bytes = bytes, .guarantee_bytes = bytes});
}

absl::Status Accounts::BoundClaimGuarantees(ClaimId claim, uint64_t bytes) {
  if (const uint64_t promised = ledger_.GetShare(claim).promised_bytes; bytes < promised) {
    return absl::InvalidArgumentError(
        absl::StrCat("limit: ", FormatBytesExactly(bytes), " is below the guarantees of the claim's sessions, ",
                     FormatBytesExactly(promised), "; lower these first (vramctl guarantee)"));
  }
  SetClaimBounds(claim, {.limit_bytes = claim_bounds_.at(claim).limit_bytes, .guarantee_bytes = bytes});
  return absl::OkStatus();
}

void Accounts::SetClaimBounds(ClaimId claim, const ClaimBounds& bounds) {
  claim_bounds_[claim] = bounds;
  for (auto& [session, account] : accounts_) {
    if (account.state.share != ShareId(claim)) continue;
    account.state.share_limit_bytes = bounds.limit_bytes;
    account.state.share_guarantee_bytes = bounds.guarantee_bytes;
    Changed(account);
  }
}

absl::Status Accounts::SetClaimGuarantee(ClaimId claim, uint64_t bytes) {
  const uint64_t before = ledger_.GetShare(claim).guarantee_bytes;
  if (absl::Status status = ledger_.SetGuarantee(claim, bytes); !status.ok()) return status;
  if (bytes > before) Forbid();
  return absl::OkStatus();
}

void Accounts::CloseClaim(ClaimId claim) {
  (void)ledger_.SetGuarantee(claim, 0);  // lowering is always possible
  claim_bounds_.erase(claim);
  ledger_.CloseClaim(claim);
}

// ---- Charging ----

void Accounts::Charge(Account& account, uint64_t bytes) {
  if (account.state.reserved_bytes == 0) account.holds_since = clock_();
  ledger_.Charge(account.state, bytes);
  Changed(account);
}

void Accounts::GiveBack(Account& account, uint64_t bytes) {
  Uncharge(account, bytes);
  account.state.came_back_bytes += bytes;
  account.is_waited_for = false;
  const SteadyTime now = clock_();
  if (now - account.gave_back > churn_window_) {
    account.gave_back = now;
    account.gave_back_bytes = 0;
  }
  account.gave_back_bytes += bytes;
}

void Accounts::Uncharge(Account& account, uint64_t bytes) {
  ledger_.Uncharge(account.state, bytes);
  Changed(account);
}

void Accounts::ExtendCapacity(uint64_t bytes) {
  const uint64_t before = ledger_.capacity_bytes();
  ledger_.ExtendCapacity(bytes);
  if (ledger_.capacity_bytes() < before) Forbid();
}

void Accounts::Grant(Account& account, uint64_t bytes) {
  Charge(account, bytes);
  account.granted_bytes += bytes;
  granted_bytes_ += bytes;
}

void Accounts::ReleaseGrant(Account& account, uint64_t bytes) {
  Uncharge(account, bytes);
  account.granted_bytes -= bytes;
  granted_bytes_ -= bytes;
}

bool Accounts::ConsumeGrant(Account& account, uint64_t bytes) {
  if (bytes > account.granted_bytes) return false;
  account.granted_bytes -= bytes;
  granted_bytes_ -= bytes;
  return true;
}

// ---- Waiting for other sessions' memory ----

void Accounts::HoldBack(std::optional<Ledger::Held> held) {
  ledger_.HoldBack(held);
  for (auto& [session, account] : accounts_) {
    account.is_waited_for = held.has_value() && account.state.reserved_bytes > 0;
  }
}

bool Accounts::IsHeldBack(const Account& account, uint64_t bytes) const {
  return !CheckGrowth(account, bytes).ok() && CheckGrowth(account, bytes, /*past_hold=*/true).ok();
}

void Accounts::Changed(Account& account) {
  if (!account.is_watched || std::exchange(account.is_changed, true)) return;
  changed_.push_back(account.session);
}

Accounts::CapacityChanges Accounts::TakeChanges() {
  for (const SessionId session : changed_) {
    if (Account* const account = Find(session)) account->is_changed = false;
  }
  return {.free_bytes = ledger_.free_bytes(),
          .held_back_bytes = ledger_.held_back_bytes(),
          .guaranteed_bytes = ledger_.guaranteed_bytes(),
          .capacity_bytes = ledger_.capacity_bytes(),
          .is_overcommitted = ledger_.committed_bytes() > ledger_.capacity_bytes(),
          .forbidden = forbidden_,
          .changed = std::exchange(changed_, {})};
}

uint64_t Accounts::ChurningBytes(const Account& account, SteadyTime now) const {
  const uint64_t reserved = account.state.reserved_bytes;
  if (now - account.holds_since < churn_window_) return reserved;
  return now - account.gave_back <= 2 * churn_window_ ? std::min(reserved, account.gave_back_bytes) : 0;
}

std::vector<Accounts::Expected> Accounts::ExpectedFor(absl::Span<const SessionId> sessions,
                                                      uint64_t settling_bytes) const {
  const SteadyTime now = clock_();
  Expected all{.returning_bytes = settling_bytes};
  for (const auto& [id, account] : accounts_) {
    all.returning_bytes += account.returning_bytes();
    all.churning_bytes += ChurningBytes(account, now);
  }
  std::vector<Expected> expected(sessions.size(), all);
  for (size_t i = 0; i < sessions.size(); ++i) {
    const Account* const own = Find(sessions[i]);
    if (own == nullptr) continue;
    expected[i].returning_bytes -= own->returning_bytes();
    expected[i].churning_bytes -= ChurningBytes(*own, now);
  }
  return expected;
}

}  // namespace vrambroker
