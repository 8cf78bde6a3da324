// SPDX-License-Identifier: Apache-2.0
//
// SegmentPool: memory taken from the driver by clients themselves, without a segment of the pool. Charged like a
// segment, because both take capacity: driver_memory_'s figures treat both as taken from the driver.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "allocator/base/segment_bytes.h"
#include "server/base/saturating.h"
#include "server/pool/segment_pool.h"

namespace vrambroker {
namespace {

constexpr uint64_t kDeclared = 1;  // id of a client's declaration in carried_over_

}  // namespace

absl::Status SegmentPool::TryChargeCounted(SessionId session, uint64_t bytes) {
  MutexLock lock(mu_);
  Account* const account = accounts_.Find(session);
  if (account == nullptr) return absl::AbortedError("the session has ended");
  if (absl::Status status = CheckGrowth(*account, bytes); !status.ok()) {
    return IsOutside(status) ? absl::NotFoundError("the driver may have it by now") : status;
  }
  const Ledger& ledger = accounts_.ledger();
  // Clients cannot get memory the driver does not have back yet.
  if (ledger.charged_bytes() + bytes + idle_.bytes() + driver_.counts().freeing_bytes > ledger.capacity_bytes()) {
    return absl::NotFoundError("idle segments are in the way");
  }
  accounts_.Charge(*account, bytes);
  account->counted_bytes += bytes;
  return absl::OkStatus();
}

absl::Status SegmentPool::ChargeCounted(SessionId session, uint64_t bytes, bool granted) {
  bool is_outside = false;
  {
    MutexLock lock(mu_);
    const Account* const account = accounts_.Find(session);
    if (account == nullptr) return absl::AbortedError("the session has ended");
    is_outside = !granted && IsOutside(CheckGrowth(*account, bytes));
  }
  if (is_outside) AskDriver();
  std::vector<UnleasedSegment> victims;
  uint64_t room = 0;
  {
    MutexLock lock(mu_);
    Account* const account = accounts_.Find(session);
    if (account == nullptr) return absl::AbortedError("the session has ended");
    if (!granted || !accounts_.ConsumeGrant(*account, bytes)) {
      if (absl::Status status = CheckGrowth(*account, bytes); !status.ok()) return status;
      accounts_.Charge(*account, bytes);
    }
    account->counted_bytes += bytes;
    victims = TakeInTheWay();
    const Ledger& ledger = accounts_.ledger();
    room = SaturatingSub(ledger.capacity_bytes(), ledger.charged_bytes() + idle_.bytes());
  }
  driver_.Free(victims);
  driver_.AwaitFrees(room);  // frees of other calls
  return absl::OkStatus();
}

absl::Status SegmentPool::UnchargeCounted(SessionId session, uint64_t bytes) {
  {
    MutexLock lock(mu_);
    Account* const account = accounts_.Find(session);
    if (account == nullptr) return absl::AbortedError("the session has ended");
    const uint64_t counted = std::min(bytes, account->counted_bytes);
    const uint64_t declared = bytes - counted;
    if (declared > account->declared_bytes) {
      return absl::InvalidArgumentError(absl::StrCat("bytes: ", bytes, "; the session is charged only ",
                                                     account->counted_bytes + account->declared_bytes,
                                                     " for memory of its own"));
    }
    account->counted_bytes -= counted;
    accounts_.GiveBack(*account, counted);
    if (declared > 0) {
      account->declared_bytes -= declared;
      Apply(carried_over_.Freed(session, {kDeclared}));
      const CarriedSegment left{.id = kDeclared, .bytes = account->declared_bytes};
      if (left.bytes > 0) {
        Apply(carried_over_.Declared(HolderOf(*account), account->terms.process(), {left}, left.bytes));
      }
    }
  }
  CapacityFreed();
  return absl::OkStatus();
}

absl::Status SegmentPool::DeclareCounted(SessionId session, uint64_t bytes) {
  MutexLock lock(mu_);
  Account* const account = accounts_.Find(session);
  if (account == nullptr) return absl::AbortedError("the session has ended");
  if (account->counted_bytes > 0 || account->declared_bytes > 0) {
    return absl::FailedPreconditionError("the session is charged for memory of its own already");
  }
  const uint64_t most = MostDeclared(*account);
  const CarriedSegment held{.id = kDeclared, .bytes = std::min(bytes, most - most % kSegmentGranuleBytes)};
  if (held.bytes == 0) return absl::OkStatus();
  account->declared_bytes = held.bytes;
  Apply(carried_over_.Declared(HolderOf(*account), account->terms.process(), {held}, held.bytes));
  return absl::OkStatus();
}

}  // namespace vrambroker
