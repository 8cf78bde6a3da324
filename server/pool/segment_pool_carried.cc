// SPDX-License-Identifier: Apache-2.0
//
// What processes hold from an earlier run of the daemon, in the pool's books.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "server/base/log_line.h"
#include "server/base/saturating.h"
#include "server/pool/segment_pool.h"

namespace vrambroker {
namespace {

constexpr uint64_t kMostCarried = uint64_t{1} << 44;  // in one segment; more than any device has

}  // namespace

absl::Status SegmentPool::FindCarriedOver(absl::btree_map<ProcessId, ClaimId> claims) {
  {
    MutexLock lock(mu_);
    earlier_claims_ = std::move(claims);
    carried_over_.StartLook();
    // A daemon that is just ending may still have files open that nobody else has.
    carried_over_.LookSoon();
  }
  return LookForCarriedOver();
}

void SegmentPool::ChargeCarriedOver(ClaimId claim, absl::Span<const ProcessId> processes) {
  {
    MutexLock lock(mu_);
    for (const ProcessId& process : processes) {
      earlier_claims_[process] = claim;
      Apply(carried_over_.Opened({.session = kNoSession, .share = claim}, process));
    }
  }
  CapacityFreed();
}

absl::Status SegmentPool::LookForCarriedOver() {
  absl::StatusOr<LeftSegments> left = device_->FindLeftSegments();
  if (left.ok() && left->unread_processes > 0 && !warned_of_unread_left_.exchange(true)) {
    LogLine(
        "some processes cannot be inspected: memory that they hold of an earlier run of the daemon is not counted, so "
        "the device may be given beyond its capacity; run the daemon as root, or with CAP_SYS_PTRACE on Linux 5.14 or "
        "newer")
        .Add("device", properties().ordinal)
        .Add("processes", left->unread_processes)
        .Write(spdlog::level::warn);
  }
  {
    MutexLock lock(mu_);
    if (!left.ok() && !absl::IsUnimplemented(left.status())) carried_over_.CannotTell();
    carried_over_.EndLook(options_.clock());
    if (left.ok()) {
      // No sum of them is beyond what can be counted.
      for (LeftSegment& segment : left->segments) segment.bytes = std::min(segment.bytes, kMostCarried);
      Apply(carried_over_.Found(left->segments, [this](const ProcessId& process) ABSL_NO_THREAD_SAFETY_ANALYSIS {
        const auto& all = accounts_.all();
        const auto it = std::find_if(all.begin(), all.end(),
                                     [&](const auto& entry) { return entry.second.terms.process() == process; });
        if (it != all.end()) return std::optional(HolderOf(it->second));
        const auto earlier = earlier_claims_.find(process);
        return earlier == earlier_claims_.end()
                   ? std::nullopt
                   : std::optional(CarriedOver::Holder{.session = kNoSession, .share = earlier->second});
      }));
    } else if (!absl::IsUnimplemented(left.status())) {
      return left.status();
    } else if (accounts_.all().empty()) {
      driver_memory_.StartWithOthers();
      Settle();
    }
  }
  CapacityFreed();
  return absl::OkStatus();
}

void SegmentPool::Apply(const CarriedOver::Changes& changes) {
  for (const auto& [session, share, bytes, is_charged] : changes) {
    Account* const account = accounts_.Find(session);
    if (account == nullptr) {
      is_charged ? accounts_.ChargeUnowned(bytes, share) : accounts_.UnchargeUnowned(bytes, share);
    } else if (is_charged) {
      account->state.carried_over_bytes += bytes;
      accounts_.Charge(*account, bytes);
    } else {
      account->state.carried_over_bytes -= bytes;
      accounts_.Uncharge(*account, bytes);
    }
  }
  Settle();
}

absl::Status SegmentPool::DeclareCarriedOver(SessionId session, absl::Span<const CarriedSegment> segments, bool begins,
                                             bool ends) {
  for (const CarriedSegment& segment : segments) {
    if (absl::Status status = CheckSegmentBytes(segment.bytes); !status.ok()) return status;
  }
  {
    MutexLock lock(mu_);
    const Account* const account = accounts_.Find(session);
    if (account == nullptr) return absl::AbortedError("the session has ended");
    if (begins) carried_over_.BeginDeclaration(session);
    Apply(carried_over_.Declared(HolderOf(*account), account->terms.process(), segments, MostDeclared(*account)));
    if (ends) Apply(carried_over_.EndDeclaration(session));
  }
  CapacityFreed();
  return absl::OkStatus();
}

// What only the client says is charged like what it could get, and no more than can be true: nobody can take from
// others by saying something.
uint64_t SegmentPool::MostDeclared(const Account& account) const {
  if (properties().kind != DeviceKind::kCuda) return accounts_.ledger().AvailableBytes(account.state);
  return std::min(accounts_.ledger().LimitRoom(account.state),
                  SaturatingSub(driver_memory_.foreign(), carried_over_.declared_bytes()));
}

void SegmentPool::FreeCarriedOver(SessionId session, absl::Span<const uint64_t> ids) {
  {
    MutexLock lock(mu_);
    Apply(carried_over_.Freed(session, ids));
  }
  CapacityFreed();
}

bool SegmentPool::IsClosingCarriedOver(SessionId session) const {
  MutexLock lock(mu_);
  return carried_over_.IsClosing(session);
}

}  // namespace vrambroker
