// SPDX-License-Identifier: Apache-2.0
//
// States of a segment, and the function for each transition:
//
//   (driver) --Lease--> LEASED --MarkReturning--> RETURNING --FinishReturning--> IDLE --ReleaseIdleSince, Lease-->
//   (driver)
//                       ^  |  \_____________Return, CloseAccount___________>     |
//                       |  \--CloseAccountOfGone--> QUARANTINED --CheckQuarantine--> (driver)
//                       \________________Lease, same tenant_____________________/
//
// Invariants, beside those of the ledger:
// (1) The ledger charges all leased, returning and quarantined segments, grants, memory being obtained by calls of
//     Lease(), and carried-over memory.
// (2) charged + idle never exceeds capacity when a driver call for a new segment starts.
#include "server/pool/segment_pool.h"

#include <spdlog/spdlog.h>

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"

namespace vrambroker {

SegmentPool::SegmentPool(std::unique_ptr<SegmentOwner> device, uint64_t capacity_bytes,
                         std::atomic<uint64_t>* next_segment, SegmentPoolOptions options)
    : device_(std::make_unique<MeteredDevice>(std::move(device))),
      capacity_bytes_(capacity_bytes),
      options_(std::move(options)),
      next_segment_(*next_segment),
      driver_(device_.get(), options_.free_timeout),
      accounts_(capacity_bytes, options_.churn_window, options_.clock),
      driver_memory_(device_->properties(), capacity_bytes, options_.headroom_bytes, options_.most_free_bytes),
      reclaim_durations_({0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10}) {
  if (const absl::StatusOr<uint64_t> free = device_->FreeBytes(); free.ok()) driver_memory_.Update(*free, 0, 0);
}

SegmentPool::~SegmentPool() {
  std::vector<DeviceSegment> held;
  std::vector<DeviceSegment> unheld;
  {
    MutexLock lock(mu_);
    if (!health_.ok()) return;  // FreeSegment() would fail; the end of this process frees all segments
    held = quarantine_.Segments();
    for (const auto& [id, leased] : leased_.all()) held.push_back(leased.segment);
    unheld = driver_.TakeUnfreed();
    for (const UnleasedSegment& entry : idle_.TakeOldest(idle_.bytes())) unheld.push_back(entry.segment);
  }
  FreeAtExit(unheld);
  device_->LeaveSegments();
  FreeAtExit(held);
}

void SegmentPool::FreeAtExit(const std::vector<DeviceSegment>& segments) {
  for (const DeviceSegment& segment : segments) {
    if (absl::Status status = device_->FreeSegment(segment); !status.ok()) {
      spdlog::error("freeing a segment at exit: {}", status.ToString());
    }
  }
}

// ---- Accounts ----

void SegmentPool::OpenAccount(SessionId session, const AccountTerms& terms) {
  MutexLock lock(mu_);
  accounts_.Open(session, terms);
  Apply(carried_over_.Opened({.session = session, .share = terms.share()}, terms.process()));
}

absl::Status SegmentPool::SetLimit(SessionId session, uint64_t limit_bytes) {
  {
    MutexLock lock(mu_);
    Account* const account = accounts_.Find(session);
    if (account == nullptr) return absl::NotFoundError(absl::StrCat("no session ", Raw(session)));
    if (absl::Status status = accounts_.SetLimit(*account, limit_bytes); !status.ok()) return status;
  }
  CapacityFreed();
  return absl::OkStatus();
}

absl::Status SegmentPool::SetGuarantee(SessionId session, uint64_t guarantee_bytes) {
  {
    MutexLock lock(mu_);
    Account* const account = accounts_.Find(session);
    if (account == nullptr) return absl::NotFoundError(absl::StrCat("no session ", Raw(session)));
    const uint64_t before = account->state.guarantee_bytes;
    if (absl::Status status = accounts_.SetGuarantee(*account, guarantee_bytes); !status.ok()) return status;
    if (guarantee_bytes >= before) return absl::OkStatus();
  }
  CapacityFreed();
  return absl::OkStatus();
}

void SegmentPool::SetClaimLimit(ClaimId claim, uint64_t limit_bytes) {
  {
    MutexLock lock(mu_);
    accounts_.SetClaimLimit(claim, limit_bytes);
  }
  CapacityFreed();
}

absl::Status SegmentPool::BoundClaimGuarantees(ClaimId claim, uint64_t bytes) {
  MutexLock lock(mu_);
  return accounts_.BoundClaimGuarantees(claim, bytes);
}

absl::Status SegmentPool::SetClaimGuarantee(ClaimId claim, uint64_t guarantee_bytes) {
  {
    MutexLock lock(mu_);
    if (absl::Status status = accounts_.SetClaimGuarantee(claim, guarantee_bytes); !status.ok()) return status;
  }
  CapacityFreed();
  return absl::OkStatus();
}

uint64_t SegmentPool::MissingForClaim(ClaimId claim, uint64_t guarantee_bytes) const {
  MutexLock lock(mu_);
  return accounts_.ledger().MissingForGuarantee(claim, guarantee_bytes);
}

void SegmentPool::CloseClaim(ClaimId claim) {
  {
    MutexLock lock(mu_);
    Apply(carried_over_.ClaimClosed(claim));
    accounts_.CloseClaim(claim);
    absl::erase_if(earlier_claims_, [claim](const auto& entry) { return entry.second == claim; });
  }
  CapacityFreed();
}

absl::Status SegmentPool::SetPriority(SessionId session, int priority) {
  MutexLock lock(mu_);
  Account* const account = accounts_.Find(session);
  if (account == nullptr) return absl::NotFoundError(absl::StrCat("no session ", Raw(session)));
  account->state.priority = priority;  // RequestQueue::UpdatePriority() tells waiting requests
  return absl::OkStatus();
}

uint64_t SegmentPool::CloseAccount(SessionId session) {
  return Close(session, Holder::kHasClosedAll).came_back;
}

SegmentPool::Closed SegmentPool::CloseAccountOfGone(SessionId session) {
  return Close(session, Holder::kHasEnded);
}

SegmentPool::Closed SegmentPool::CloseAccountOfHolder(SessionId session) {
  return Close(session, Holder::kGoesOn);
}

SegmentPool::Closed SegmentPool::Close(SessionId session, Holder holder) {
  Closed closed;
  {
    MutexLock lock(mu_);
    Account* const account = accounts_.Find(session);
    if (account == nullptr) return closed;
    const SteadyTime now = options_.clock();
    for (const SegmentId id : leased_.Of(session)) {
      const uint64_t bytes = leased_.at(id).segment.bytes;
      if (holder == Holder::kHasClosedAll) {
        closed.came_back += bytes;
        MakeIdle(id, *account);
        continue;
      }
      const LeasedSegment leased = Forget(id, *account);
      const UnleasedSegment unleased{.segment = leased.segment, .tenant = account->terms.tenant, .since = now};
      if (!leased.exported) {
        closed.came_back += bytes;
        accounts_.Uncharge(*account, bytes);
        AddIdle(unleased);
        continue;
      }
      closed.still_held += bytes;
      quarantine_.Add(id, {.unleased = unleased,
                           .client = account->terms.client,
                           .pid = account->terms.pid,
                           .share = account->terms.share(),
                           .mark = account->terms.mark,
                           .next_check = now + options_.settle_time});
    }
    const uint64_t counted = std::exchange(account->counted_bytes, 0);
    accounts_.Uncharge(*account, counted);
    if (holder == Holder::kGoesOn) {
      closed.still_held += counted + account->state.carried_over_bytes;
      KeepCarriedOver(*account, counted);
    } else {
      // The driver gets the memory back with the process, or the session's next holder declares it.
      closed.came_back += counted;
      Apply(carried_over_.Closed(session));
    }
    // Memory being obtained by calls of Lease() stays charged until the calls find the account gone.
    accounts_.Close(*account);
    leased_.Forget(session);
  }
  CapacityFreed();
  return closed;
}

// ---- Growing ----

absl::Status SegmentPool::CheckGrowth(const Account& account, uint64_t bytes, bool past_hold) const {
  if (sealed_) return absl::AbortedError("the daemon is stopping");
  if (!health_.ok()) return UnusableError();
  return accounts_.CheckGrowth(account, bytes, past_hold);
}

absl::Status SegmentPool::UnusableError() const {
  return absl::Status(
      health_.code(),
      absl::StrCat(
          "nobody gets more of the daemon's device ", properties().ordinal, " (", properties().name, ", ",
          properties().uuid, "), which cannot be used: ", health_.message(),
          "; what is held stays held; nvidia-smi may say more; if it stays so, vrambrokerd has to be restarted "
          "(systemctl restart vrambroker)"));
}

SegmentPool::CapacityChanges SegmentPool::TakeChanges() {
  MutexLock lock(mu_);
  return accounts_.TakeChanges();
}

void SegmentPool::Watch(SessionId session, bool watch) {
  MutexLock lock(mu_);
  if (Account* const account = accounts_.Find(session)) account->is_watched = watch;
}

absl::Status SegmentPool::Grant(SessionId session, uint64_t bytes, bool past_hold) {
  MutexLock lock(mu_);
  Account* const account = accounts_.Find(session);
  if (account == nullptr) return absl::AbortedError("the session has ended");
  if (absl::Status status = CheckGrowth(*account, bytes, past_hold); !status.ok()) return status;
  accounts_.Grant(*account, bytes);
  return absl::OkStatus();
}

void SegmentPool::ReleaseGrant(SessionId session, uint64_t bytes) {
  {
    MutexLock lock(mu_);
    Account* const account = accounts_.Find(session);
    if (account == nullptr) return;
    accounts_.ReleaseGrant(*account, bytes);
  }
  CapacityFreed();
}

void SegmentPool::HoldBack(std::optional<Ledger::Held> held) {
  MutexLock lock(mu_);
  accounts_.HoldBack(held);
}

uint64_t SegmentPool::GrowthOf(SessionId session, uint64_t bytes) const {
  MutexLock lock(mu_);
  const Account* const account = accounts_.Find(session);
  return account == nullptr ? 0 : accounts_.ledger().GrowthOf(account->state, bytes);
}

uint64_t SegmentPool::MostEver(SessionId session) const {
  MutexLock lock(mu_);
  const Account* const account = accounts_.Find(session);
  return account == nullptr ? 0 : accounts_.ledger().MostEver(account->state);
}

bool SegmentPool::IsHeldBack(SessionId session, uint64_t bytes) const {
  MutexLock lock(mu_);
  const Account* const account = accounts_.Find(session);
  return account != nullptr && accounts_.IsHeldBack(*account, bytes);
}

std::vector<SegmentPool::Expected> SegmentPool::ExpectedFor(absl::Span<const SessionId> sessions) const {
  MutexLock lock(mu_);
  return accounts_.ExpectedFor(sessions, quarantine_.settling_bytes());
}

uint64_t SegmentPool::CameBackTotal() const {
  MutexLock lock(mu_);
  return accounts_.ledger().uncharged_total();
}

void SegmentPool::MarkEnding(SessionId session) {
  MutexLock lock(mu_);
  if (Account* const account = accounts_.Find(session)) account->is_ending = true;
}

uint64_t SegmentPool::MissingBytes(SessionId session, uint64_t bytes, bool guarantee) const {
  MutexLock lock(mu_);
  const Account* const account = accounts_.Find(session);
  if (account == nullptr) return 0;
  return guarantee ? accounts_.ledger().MissingForGuarantee(account->state, bytes)
                   : accounts_.ledger().MissingBytes(account->state, bytes);
}

uint64_t SegmentPool::MissingInShare(SessionId session, uint64_t bytes) const {
  MutexLock lock(mu_);
  const Account* const account = accounts_.Find(session);
  return account == nullptr ? 0 : accounts_.ledger().MissingInShare(account->state, bytes);
}

// ---- Giving back ----

LeasedSegment SegmentPool::Forget(SegmentId id, Account& account) {
  const LeasedSegment leased = leased_.Remove(id);
  if (leased.returning) account.state.returning_bytes -= leased.segment.bytes;
  return leased;
}

void SegmentPool::MakeIdle(SegmentId id, Account& account) {
  const LeasedSegment leased = Forget(id, account);
  accounts_.GiveBack(account, leased.segment.bytes);
  AddIdle({.segment = leased.segment, .tenant = account.terms.tenant, .since = options_.clock()});
}

void SegmentPool::AddIdle(const UnleasedSegment& entry) {
  const bool first = idle_.bytes() == 0;
  idle_.Add(entry);
  if (on_decay_changed_ && (first || idle_.bytes() > options_.idle_limit_bytes)) on_decay_changed_();
}

// ---- Returning ----

void SegmentPool::Seal() {
  MutexLock lock(mu_);
  sealed_ = true;
  accounts_.Forbid();
}

absl::Status SegmentPool::Return(SessionId session, absl::Span<const SegmentId> segments) {
  {
    MutexLock lock(mu_);
    Account* const account = accounts_.Find(session);
    if (account == nullptr) return absl::AbortedError("the session has ended");
    absl::flat_hash_set<SegmentId> seen;
    for (const SegmentId id : segments) {
      if (leased_.Find(session, id) == nullptr) {
        return absl::NotFoundError(absl::StrCat("segment_ids: the session holds no segment ", Raw(id)));
      }
      if (!seen.insert(id).second) {
        return absl::InvalidArgumentError(absl::StrCat("segment_ids: ", Raw(id), " is named twice"));
      }
    }
    for (const SegmentId id : segments) MakeIdle(id, *account);
  }
  CapacityFreed();
  return absl::OkStatus();
}

void SegmentPool::ReturnAllBut(SessionId session, const absl::flat_hash_set<SegmentId>& keep) {
  {
    MutexLock lock(mu_);
    Account* const account = accounts_.Find(session);
    if (account == nullptr) return;
    for (const SegmentId id : leased_.Of(session)) {
      if (!keep.contains(id)) MakeIdle(id, *account);
    }
  }
  CapacityFreed();
}

void SegmentPool::MarkReturning(SessionId session, absl::Span<const SegmentId> segments) {
  MutexLock lock(mu_);
  Account* const account = accounts_.Find(session);
  if (account == nullptr) return;
  for (const SegmentId id : segments) {
    LeasedSegment* const leased = leased_.Find(session, id);
    if (leased == nullptr || leased->returning) continue;
    leased->returning = true;
    account->state.returning_bytes += leased->segment.bytes;
  }
}

void SegmentPool::FinishReturning(SessionId session, absl::Span<const SegmentId> segments) {
  {
    MutexLock lock(mu_);
    Account* const account = accounts_.Find(session);
    for (const SegmentId id : segments) {
      const LeasedSegment* const leased = leased_.Find(session, id);
      if (account != nullptr && leased != nullptr && leased->returning) MakeIdle(id, *account);
    }
  }
  CapacityFreed();
}

// ---- Handles ----

absl::StatusOr<WireHandle> SegmentPool::HandleFor(SessionId session, SegmentId segment) {
  MutexLock lock(mu_);
  LeasedSegment* const leased = leased_.Find(session, segment);
  if (leased == nullptr) return absl::NotFoundError(absl::StrCat("the session holds no segment ", Raw(segment)));
  if (const std::optional<CudaIpcHandle>& ipc = leased->segment.cuda_ipc; ipc.has_value()) {
    leased->exported = true;
    return WireHandle(*ipc);
  }
  const absl::StatusOr<FdTicket> ticket = leased_.IssueTicket(segment, *leased);
  if (!ticket.ok()) return ticket.status();
  return WireHandle(*ticket);
}

absl::StatusOr<UniqueFd> SegmentPool::RedeemTicket(const FdTicket& ticket, pid_t pid, uid_t uid) {
  MutexLock lock(mu_);
  LeasedSegment* const leased = leased_.FindTicket(ticket);
  const Account* const account = leased == nullptr ? nullptr : accounts_.Find(leased->holder);
  if (account == nullptr) {
    return absl::NotFoundError("no such ticket: it was used before, or its segment has been given back");
  }
  if (account->terms.pid != pid || account->terms.uid != uid) {
    return absl::PermissionDeniedError("the ticket was issued to another process");
  }
  // Not a driver call: a host device duplicates a descriptor. Keep the lock, so that the segment cannot go meanwhile.
  absl::StatusOr<SegmentHandle> handle = device_->ExportSegment(leased->segment);
  if (!handle.ok()) return handle.status();
  leased->exported = true;
  leased_.VoidTicket(*leased);
  return std::get<UniqueFd>(*std::move(handle));
}

void SegmentPool::CountReclaim(uint64_t asked_bytes, uint64_t reclaimed_bytes, std::chrono::nanoseconds duration) {
  reclaim_durations_.Observe(std::chrono::duration<double>(duration).count());
  MutexLock lock(mu_);
  ++reclaims_.reclaims;
  reclaims_.asked_bytes += asked_bytes;
  reclaims_.reclaimed_bytes += reclaimed_bytes;
}

}  // namespace vrambroker
