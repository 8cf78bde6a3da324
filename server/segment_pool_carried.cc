// SPDX-License-Identifier: Apache-2.0
//
// What processes hold from an earlier run of the daemon, in the pool's books.
#include <algorithm>

#include "server/segment_pool.h"

namespace vrambroker {
namespace {

constexpr uint64_t kMostCarried = uint64_t{1} << 44;  // in one segment; more than any device has

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
  {
    MutexLock lock(mu_);
    carried_over_.EndLook(options_.clock());
    if (left.ok()) {
      // No sum of them is beyond what can be counted.
      for (LeftSegment& segment : left->segments) segment.bytes = std::min(segment.bytes, kMostCarried);
      Apply(carried_over_.Found(left->segments, [this](pid_t pid) ABSL_NO_THREAD_SAFETY_ANALYSIS {
        const auto it = std::find_if(accounts_.begin(), accounts_.end(),
                                     [pid](const auto& account) { return account.second.terms.pid == pid; });
        return it == accounts_.end() ? kNoSession : it->first;
      }));
    } else if (!absl::IsUnimplemented(left.status())) {
      return left.status();
    } else if (accounts_.empty()) {
      elsewhere_most_bytes_ = capacity_bytes_ - std::min(capacity_bytes_, driver_free_bytes_);
      SettleElsewhere();
    }
  }
  RoomMade();
  return absl::OkStatus();
}

void SegmentPool::Apply(const CarriedOver::Changes& changes) {
  for (const auto& [session, uid, bytes, is_charged] : changes) {
    const auto it = accounts_.find(session);
    if (it == accounts_.end()) {
      is_charged ? ledger_.ChargeUnowned(bytes, uid) : ledger_.UnchargeUnowned(bytes, uid);
    } else if (is_charged) {
      it->second.figures.carried_over_bytes += bytes;
      Charge(it->second, bytes);
    } else {
      it->second.figures.carried_over_bytes -= bytes;
      ledger_.Uncharge(it->second.figures, bytes);
    }
  }
  SettleElsewhere();
}

void SegmentPool::SettleElsewhere() {
  const uint64_t declared = carried_over_.declared_bytes();
  elsewhere_most_bytes_ =
      std::min(elsewhere_most_bytes_, capacity_bytes_ - std::min(capacity_bytes_, driver_known_bytes_));
  const uint64_t elsewhere = elsewhere_most_bytes_ - std::min(elsewhere_most_bytes_, declared);
  if (elsewhere > elsewhere_bytes_) {
    ledger_.ChargeUnowned(elsewhere - elsewhere_bytes_);
  } else {
    ledger_.UnchargeUnowned(elsewhere_bytes_ - elsewhere);
  }
  elsewhere_bytes_ = elsewhere;
  // What clients hold beyond that lies outside of a capacity that was chosen by what was free.
  if (properties().kind == DeviceKind::kCuda) {
    ledger_.ExtendCapacity(declared - std::min(declared, elsewhere_most_bytes_));
  }
}

absl::Status SegmentPool::DeclareCarriedOver(SessionId session, absl::Span<const CarriedSegment> segments) {
  for (const CarriedSegment& segment : segments) {
    if (absl::Status status = CheckSegmentBytes(segment.bytes); !status.ok()) return status;
  }
  {
    MutexLock lock(mu_);
    const auto it = accounts_.find(session);
    if (it == accounts_.end()) return absl::AbortedError("the session has ended");
    // What only it says is charged like what it could lease: nobody can take from others by saying something.
    const uint64_t most =
        properties().kind == DeviceKind::kCuda
            ? std::min(ledger_.LimitRoom(it->second.figures),
                       properties().total_bytes - std::min(properties().total_bytes, carried_over_.declared_bytes()))
            : ledger_.AvailableBytes(it->second.figures);
    Apply(carried_over_.Declared(session, it->second.terms.pid, segments, most));
  }
  RoomMade();
  return absl::OkStatus();
}

void SegmentPool::FreeCarriedOver(SessionId session, absl::Span<const uint64_t> ids) {
  {
    MutexLock lock(mu_);
    Apply(carried_over_.Freed(session, ids));
  }
  RoomMade();
}

}  // namespace vrambroker
