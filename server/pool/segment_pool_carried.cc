// SPDX-License-Identifier: Apache-2.0
//
// SegmentPool: books on memory held by processes from an earlier run of the daemon.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "allocator/device/process_files.h"
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
    // An ending daemon may be the last to have some files open.
    carried_over_.LookSoon();
  }
  if (absl::Status status = LookForCarriedOver(/*is_first=*/true); !status.ok()) return status;
  const PoolStats stats = GetStats();
  if (stats.carried_over_bytes > stats.capacity_bytes) {
    LogLine("carried over: more than the capacity, so nobody gets more memory until the excess is back")
        .Add("device", properties().ordinal)
        .Add("capacity", stats.capacity_bytes)
        .Add("bytes", stats.carried_over_bytes)
        .Add("excess", stats.carried_over_bytes - stats.capacity_bytes)
        .Write(spdlog::level::warn);
  }
  return absl::OkStatus();
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

absl::Status SegmentPool::LookForCarriedOver(bool is_first) {
  absl::StatusOr<LeftSegments> left = device_->FindLeftSegments();
  if (is_first && left.ok() && left->unread_processes > 0 && !warned_of_unread_left_.exchange(true)) {
    spdlog::warn(
        "device={} {} {} cannot be inspected; memory they still hold from an earlier run is not counted, so the device "
        "may be overcommitted; {}",
        properties().ordinal, left->unread_processes, left->unread_processes == 1 ? "process" : "processes",
        HowToLookIntoProcesses());
  }
  {
    MutexLock lock(mu_);
    if (!left.ok() && !absl::IsUnimplemented(left.status())) carried_over_.CannotTell();
    carried_over_.EndLook(options_.clock());
    if (left.ok()) {
      // Cap sizes, so that sums do not overflow.
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
      account->state.came_back_bytes += bytes;
      accounts_.Uncharge(*account, bytes);
    }
  }
  Settle();
}

void SegmentPool::KeepCarriedOver(const Account& account, uint64_t counted_bytes) {
  constexpr uint64_t kCounted = std::numeric_limits<uint64_t>::max();  // an id beyond the ids of clients
  if (counted_bytes > 0) {
    Apply(carried_over_.Declared(HolderOf(account), account.terms.process(), {{.id = kCounted, .bytes = counted_bytes}},
                                 counted_bytes));
  }
  Apply(carried_over_.Closed(account.session, /*goes_on=*/true));
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

// A declaration only the client can vouch for is charged like new memory, and no more than can be true: a declaration
// takes nothing from other sessions.
uint64_t SegmentPool::MostDeclared(const Account& account) const {
  if (properties().tells_holders) return accounts_.ledger().AvailableBytes(account.state);
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
