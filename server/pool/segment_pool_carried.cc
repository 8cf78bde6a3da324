// SPDX-License-Identifier: Apache-2.0
//
// What processes hold from an earlier run of the daemon, in the pool's books.
#include <spdlog/spdlog.h>

#include <algorithm>

#include "server/base/log_line.h"
#include "server/pool/segment_pool.h"

namespace vrambroker {
namespace {

constexpr uint64_t kMostCarried = uint64_t{1} << 44;  // in one segment; more than any device has

// What is left of `whole` without `part`, or 0.
uint64_t Rest(uint64_t whole, uint64_t part) {
  return whole - std::min(whole, part);
}

}  // namespace

absl::Status SegmentPool::FindCarriedOver() {
  {
    MutexLock lock(mu_);
    carried_over_.StartLook();
    // A daemon that is just ending may still have files open that nobody else has.
    carried_over_.LookSoon();
  }
  return LookForCarriedOver();
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
        return it == all.end() ? kNoSession : it->first;
      }));
    } else if (!absl::IsUnimplemented(left.status())) {
      return left.status();
    } else if (accounts_.all().empty()) {
      foreign_bytes_ = Rest(properties().total_bytes, driver_known_bytes_);
      SettleElsewhere();
    }
  }
  CapacityFreed();
  return absl::OkStatus();
}

void SegmentPool::Apply(const CarriedOver::Changes& changes) {
  for (const auto& [session, uid, bytes, is_charged] : changes) {
    Account* const account = accounts_.Find(session);
    if (account == nullptr) {
      is_charged ? accounts_.ChargeUnowned(bytes, uid) : accounts_.UnchargeUnowned(bytes, uid);
    } else if (is_charged) {
      account->state.carried_over_bytes += bytes;
      accounts_.Charge(*account, bytes);
    } else {
      account->state.carried_over_bytes -= bytes;
      accounts_.Uncharge(*account, bytes);
    }
  }
  SettleElsewhere();
}

// In use elsewhere are, beside what is carried over, contexts: what the capacity leaves of the device is for these. As
// long as they cannot be all that nobody has declared, none of it is given to anybody: what is free stays above the
// headroom. Once they can, they are within the headroom.
void SegmentPool::SettleElsewhere() {
  foreign_bytes_ = std::min(foreign_bytes_, Rest(properties().total_bytes, driver_known_bytes_));
  const uint64_t counted_on = capacity_bytes_ + options_.headroom_bytes;
  const uint64_t in_use = Rest(foreign_bytes_, Rest(properties().total_bytes, counted_on));
  const uint64_t declared = carried_over_.declared_bytes();
  const uint64_t undeclared = Rest(in_use, declared);
  const uint64_t elsewhere = undeclared > options_.headroom_bytes ? undeclared : 0;
  if (elsewhere > elsewhere_bytes_) {
    accounts_.ChargeUnowned(elsewhere - elsewhere_bytes_);
  } else {
    accounts_.UnchargeUnowned(elsewhere_bytes_ - elsewhere);
  }
  elsewhere_bytes_ = elsewhere;
  // What clients say beyond that takes nothing from others: it is outside of a capacity that was chosen by what was
  // free, or it is not true.
  if (properties().kind == DeviceKind::kCuda) accounts_.ExtendCapacity(Rest(declared, in_use));
  SettleOutside();
}

// The capacity was chosen once. Since then contexts of clients have come, and maybe other programs, and the driver has
// less for segments: what it has now, less what the next client's context needs, is all that can be handed out. Without
// this, the ledger would grant what the driver refuses, and nobody would be asked for memory or wait for it.
void SegmentPool::SettleOutside() {
  if (properties().kind != DeviceKind::kCuda || !driver_has_bytes_.has_value()) return;
  const uint64_t has = std::min(Rest(*driver_has_bytes_, NextContextBytes()), driver_refuses_beyond_);
  // What is carried over is charged, too, and none of what the driver has.
  const uint64_t outside = Rest(accounts_.ledger().capacity_bytes(), has + carried_over_.bytes() + elsewhere_bytes_);
  if (outside > outside_bytes_) {
    accounts_.ChargeUnowned(outside - outside_bytes_);
  } else {
    accounts_.UnchargeUnowned(outside_bytes_ - outside);
  }
  outside_bytes_ = outside;
}

// The headroom, as long as contexts have not used it up; then as much as the contexts of this device take on average.
// Nothing when the capacity was chosen without looking at what is free.
uint64_t SegmentPool::NextContextBytes() const {
  const uint64_t headroom = options_.headroom_bytes;
  if (headroom == 0) return 0;
  const uint64_t total = properties().total_bytes;
  const uint64_t at_start = Rest(total, capacity_bytes_ + headroom);  // in use, beside what is carried over
  const uint64_t in_use = Rest(total, driver_has_bytes_.value_or(total));
  const uint64_t contexts = Rest(in_use, at_start + carried_over_.bytes() + elsewhere_bytes_);
  const auto clients =
      static_cast<uint64_t>(std::count_if(accounts_.all().begin(), accounts_.all().end(),
                                          [](const auto& entry) { return entry.second.holds_since != SteadyTime(); }));
  const uint64_t average = std::min(headroom, contexts / std::max<uint64_t>(1, clients));
  return std::max(Rest(headroom, contexts), average);
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
    // What only it says is charged like what it could lease, and no more than can be true: nobody can take from others
    // by saying something.
    const uint64_t most = properties().kind == DeviceKind::kCuda
                              ? std::min(accounts_.ledger().LimitRoom(account->state),
                                         Rest(foreign_bytes_, carried_over_.declared_bytes()))
                              : accounts_.ledger().AvailableBytes(account->state);
    if (begins) carried_over_.BeginDeclaration(session);
    Apply(carried_over_.Declared(session, account->terms.process(), segments, most));
    if (ends) Apply(carried_over_.EndDeclaration(session));
  }
  CapacityFreed();
  return absl::OkStatus();
}

void SegmentPool::FreeCarriedOver(SessionId session, absl::Span<const uint64_t> ids) {
  {
    MutexLock lock(mu_);
    Apply(carried_over_.Freed(session, ids));
  }
  CapacityFreed();
}

}  // namespace vrambroker
