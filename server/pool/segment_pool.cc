// SPDX-License-Identifier: Apache-2.0
//
// States of a segment, and the function that makes each transition:
//
//   (driver) --Lease--> LEASED --MarkReturning--> RETURNING --Return--> IDLE --ReleaseIdleSince, Lease--> (driver)
//                       ^  |  \_________TakeBack, CloseAccount_______>   |
//                       |  \--CloseAccountOfGone--> QUARANTINED --CheckQuarantine--> (driver)
//                       \______________Lease, same domain________________/
//
// Invariants, beside those of the ledger:
// (1) The ledger charges all leased, returning and quarantined segments, grants, what calls of Lease() are just
//     obtaining, and what is carried over.
// (2) charged + idle never exceeds capacity when a driver call for a new segment starts.
#include "server/pool/segment_pool.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "allocator/device/session_mark.h"
#include "allocator/heap/size_class.h"
#include "server/base/client_log.h"
#include "server/pool/segment_refusal.h"

namespace vrambroker {

SegmentPool::SegmentPool(std::unique_ptr<Device> device, uint64_t capacity_bytes, std::atomic<uint64_t>* next_segment,
                         SegmentPoolOptions options)
    : device_(std::make_unique<MeteredDevice>(std::move(device))),
      capacity_bytes_(capacity_bytes),
      options_(std::move(options)),
      next_segment_(*next_segment),
      accounts_(capacity_bytes, options_.churn_window, options_.clock),
      reclaim_durations_({0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10}) {
  if (const absl::StatusOr<uint64_t> free = device_->FreeBytes(); free.ok()) {
    driver_known_bytes_ = driver_free_bytes_ = *free;
    driver_has_bytes_ = *free;
  }
}

SegmentPool::~SegmentPool() {
  std::vector<DeviceSegment> segments;
  {
    MutexLock lock(mu_);
    if (!health_.ok()) return;  // it would refuse each of them; the end of this process frees them
    segments = quarantine_.Segments();
    segments.insert(segments.end(), unfreed_.begin(), unfreed_.end());
    for (const auto& [id, leased] : leased_.all()) segments.push_back(leased.segment);
    for (const IdleSegments::Entry& entry : idle_.TakeOldest(idle_.bytes())) segments.push_back(entry.segment);
  }
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
  Apply(carried_over_.Opened(session, terms.process()));
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

absl::Status SegmentPool::SetPriority(SessionId session, int priority) {
  {
    MutexLock lock(mu_);
    Account* const account = accounts_.Find(session);
    if (account == nullptr) return absl::NotFoundError(absl::StrCat("no session ", Raw(session)));
    account->state.priority = priority;
  }
  CapacityFreed();
  return absl::OkStatus();
}

uint64_t SegmentPool::CloseAccount(SessionId session) {
  return Close(session, /*process_gone=*/false);
}

uint64_t SegmentPool::CloseAccountOfGone(SessionId session) {
  return Close(session, /*process_gone=*/true);
}

uint64_t SegmentPool::Close(SessionId session, bool process_gone) {
  uint64_t bytes = 0;
  {
    MutexLock lock(mu_);
    Account* const account = accounts_.Find(session);
    if (account == nullptr) return 0;
    const SteadyTime now = options_.clock();
    for (const SegmentId id : leased_.Of(session)) {
      bytes += leased_.at(id).segment.bytes;
      if (!process_gone) {
        MakeIdle(id, *account);
        continue;
      }
      const LeasedSegment leased = Forget(id, *account);
      const IdleSegments::Entry idle{
          .segment = leased.segment, .cuda_ipc = leased.cuda_ipc, .tenant = account->terms.tenant, .since = now};
      if (!leased.exported) {
        accounts_.Uncharge(*account, leased.segment.bytes);
        AddIdle(idle);
        continue;
      }
      quarantine_.Add(id, {.idle = idle,
                           .client = account->terms.client,
                           .pid = account->terms.pid,
                           .uid = account->terms.uid,
                           .mark = account->terms.mark,
                           .next_check = now + options_.settle_time});
    }
    Apply(carried_over_.Closed(session));
    // What calls of Lease() are just obtaining stays charged until they find the account gone.
    accounts_.Close(*account);
    leased_.Forget(session);
  }
  CapacityFreed();
  return bytes;
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

bool SegmentPool::MayEverGrow(SessionId session, uint64_t bytes) const {
  MutexLock lock(mu_);
  const Account* const account = accounts_.Find(session);
  return account != nullptr && accounts_.ledger().MayEverGrow(account->state, bytes);
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

absl::StatusOr<SegmentId> SegmentPool::Lease(SessionId session, uint64_t bytes, bool granted) {
  const absl::StatusOr<std::vector<SegmentId>> segments = LeaseAll(session, {bytes}, granted);
  if (!segments.ok()) return segments.status();
  return segments->front();
}

absl::StatusOr<std::vector<SegmentId>> SegmentPool::LeaseAll(SessionId session, absl::Span<const uint64_t> sizes,
                                                             bool granted) {
  const uint64_t bytes = std::accumulate(sizes.begin(), sizes.end(), uint64_t{0});
  std::vector<IdleSegments::Entry> victims;
  Gathered gathered;
  uid_t uid = 0;
  std::string tenant;
  bool is_outside = false;
  {
    MutexLock lock(mu_);
    const Account* const account = accounts_.Find(session);
    if (account == nullptr) return absl::AbortedError("the session has ended");
    is_outside = !granted && IsOutside(CheckGrowth(*account, bytes));
  }
  if (is_outside) AskDriver();
  {
    MutexLock lock(mu_);
    Account* const account = accounts_.Find(session);
    if (account == nullptr) return absl::AbortedError("the session has ended");
    uid = account->terms.uid;
    tenant = account->terms.tenant;
    if (!granted || !accounts_.ConsumeGrant(*account, bytes)) {
      if (absl::Status status = CheckGrowth(*account, bytes); !status.ok()) return status;
      accounts_.Charge(*account, bytes);
    }
    gathered = TakeIdle(*account, sizes);
    uint64_t missing = 0;
    for (size_t i = 0; i < sizes.size(); ++i) missing += gathered.idle[i].has_value() ? 0 : sizes[i];
    if (missing == 0) return AddLeases(session, gathered);
    const Ledger& ledger = accounts_.ledger();
    if (const uint64_t held = ledger.charged_bytes() + idle_.bytes(); held > ledger.capacity_bytes()) {
      victims = StartFreeing(idle_.TakeOldest(held - ledger.capacity_bytes()));
    }
    obtaining_bytes_ += missing;
  }
  FreeToDriver(victims);
  absl::Status status = Obtain(tenant, sizes, gathered);
  std::vector<IdleSegments::Entry> unwanted;
  {
    MutexLock lock(mu_);
    if (status.ok() && accounts_.Find(session) != nullptr) return AddLeases(session, gathered);
    if (status.ok()) status = absl::AbortedError("the session has ended");
    unwanted = Undo(session, uid, tenant, bytes, gathered);
  }
  FreeToDriver(unwanted);
  for (size_t i = 0; i < sizes.size() && absl::IsResourceExhausted(status); ++i) {
    if (gathered.idle[i].has_value() || gathered.fresh[i].has_value()) continue;
    DriverRefused(sizes[i]);
    break;
  }
  CapacityFreed();
  return absl::IsResourceExhausted(status) ? SegmentRefused(OomCause::kCapacity, status.message()) : status;
}

absl::Status SegmentPool::Obtain(const std::string& tenant, absl::Span<const uint64_t> sizes, Gathered& gathered) {
  absl::Status status;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (gathered.idle[i].has_value()) continue;
    if (status.ok()) {
      absl::StatusOr<LeasedSegment> fresh = AllocateFromDriver(tenant, sizes[i]);
      status = fresh.status();
      if (fresh.ok()) gathered.fresh[i] = *std::move(fresh);
    }
    MutexLock lock(mu_);
    obtaining_bytes_ -= sizes[i];
    if (gathered.fresh[i].has_value()) ++segment_allocs_;
  }
  return status;
}

std::vector<IdleSegments::Entry> SegmentPool::Undo(SessionId session, uid_t uid, const std::string& tenant,
                                                   uint64_t bytes, const Gathered& gathered) {
  Account* const account = accounts_.Find(session);
  if (account != nullptr) {
    accounts_.Uncharge(*account, bytes);
  } else {
    accounts_.UnchargeUnowned(bytes, uid);
  }
  PutIdleBack(gathered);
  // What the driver gave is for the next attempt, unless there can be none.
  std::vector<IdleSegments::Entry> unwanted;
  for (const std::optional<LeasedSegment>& fresh : gathered.fresh) {
    if (!fresh.has_value()) continue;
    if (account == nullptr) {
      unwanted.push_back({.segment = fresh->segment, .tenant = tenant});
    } else {
      AddIdle({.segment = fresh->segment, .cuda_ipc = fresh->cuda_ipc, .tenant = tenant, .since = options_.clock()});
    }
  }
  return StartFreeing(std::move(unwanted));
}

absl::StatusOr<std::vector<SegmentId>> SegmentPool::LeaseIdle(SessionId session, absl::Span<const uint64_t> sizes) {
  const uint64_t bytes = std::accumulate(sizes.begin(), sizes.end(), uint64_t{0});
  MutexLock lock(mu_);
  Account* const account = accounts_.Find(session);
  if (account == nullptr) return absl::AbortedError("the session has ended");
  if (absl::Status status = CheckGrowth(*account, bytes); !status.ok()) {
    return IsOutside(status) ? absl::NotFoundError("the driver may have it by now") : status;
  }
  const Gathered gathered = TakeIdle(*account, sizes);
  if (!std::all_of(gathered.idle.begin(), gathered.idle.end(), [](const auto& idle) { return idle.has_value(); })) {
    PutIdleBack(gathered);
    return absl::NotFoundError("not all are idle");
  }
  // Charged only with the segments at hand, so that a miss leaves no trace.
  accounts_.Charge(*account, bytes);
  return AddLeases(session, gathered);
}

SegmentPool::Gathered SegmentPool::TakeIdle(const Account& account, absl::Span<const uint64_t> sizes) {
  Gathered gathered{.idle = {}, .fresh = std::vector<std::optional<LeasedSegment>>(sizes.size())};
  gathered.idle.reserve(sizes.size());
  for (const uint64_t bytes : sizes) gathered.idle.push_back(idle_.Take(account.terms.tenant, bytes));
  return gathered;
}

void SegmentPool::PutIdleBack(const Gathered& gathered) {
  for (const std::optional<IdleSegments::Taken>& idle : gathered.idle) {
    if (idle.has_value()) idle_.PutBack(*idle);
  }
  decay_.NotifyOne();  // it may be the oldest
}

std::vector<SegmentId> SegmentPool::AddLeases(SessionId session, const Gathered& gathered) {
  std::vector<SegmentId> ids;
  ids.reserve(gathered.idle.size());
  for (size_t i = 0; i < gathered.idle.size(); ++i) {
    if (const std::optional<IdleSegments::Taken>& idle = gathered.idle[i]; idle.has_value()) {
      ++handovers_;
      handover_bytes_ += idle->entry.segment.bytes;
      ids.push_back(AddLease(session, {.segment = idle->entry.segment, .cuda_ipc = idle->entry.cuda_ipc}));
    } else if (const std::optional<LeasedSegment>& fresh = gathered.fresh[i]; fresh.has_value()) {
      ids.push_back(AddLease(session, *fresh));
    }
  }
  return ids;
}

SegmentId SegmentPool::AddLease(SessionId session, LeasedSegment segment) {
  const SegmentId id{next_segment_.fetch_add(1)};
  segment.holder = session;
  leased_.Add(id, segment);
  return id;
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
  AddIdle({.segment = leased.segment,
           .cuda_ipc = leased.cuda_ipc,
           .tenant = account.terms.tenant,
           .since = options_.clock()});
}

void SegmentPool::AddIdle(const IdleSegments::Entry& entry) {
  const bool first = idle_.bytes() == 0;
  idle_.Add(entry);
  if (first || idle_.bytes() > options_.idle_limit_bytes) decay_.NotifyOne();
}

// ---- Quarantine ----

absl::StatusOr<SegmentHolders> SegmentPool::FindHolders(absl::Span<const Quarantine::Due> due) {
  std::vector<DeviceSegment> segments;
  std::vector<SessionMark> marks;
  segments.reserve(due.size());
  marks.reserve(due.size());
  for (const Quarantine::Due& one : due) {
    segments.push_back(one.segment);
    marks.push_back(one.mark);
  }
  absl::StatusOr<SegmentHolders> found = device_->FindHolders(segments);
  // The driver does not tell. Then those hold a segment who have inherited the descriptors of its client.
  if (absl::IsUnimplemented(found.status())) found = FindMarkHolders(marks);
  return found;
}

void SegmentPool::CheckQuarantine() {
  std::vector<Quarantine::Due> due;
  bool look = false;
  {
    MutexLock lock(mu_);
    const SteadyTime now = options_.clock();
    if (now >= next_walk_) due = quarantine_.StartChecks(now);
    const std::optional<SteadyTime> next = carried_over_.next_look();
    look = next.has_value() && *next <= now;
    if (look) carried_over_.StartLook();
  }
  if (look) {
    if (absl::Status status = LookForCarriedOver(); !status.ok()) {
      spdlog::error("device={} cannot tell who holds segments of an earlier daemon: {}", properties().ordinal,
                    status.ToString());
    }
  }
  if (due.empty()) return;
  std::vector<std::vector<pid_t>> holders(due.size());
  const SteadyTime began = options_.clock();
  const absl::StatusOr<SegmentHolders> found = FindHolders(due);
  if (found.ok()) {
    for (const SegmentHolders::Holder& holder : found->holders) holders[holder.segment].push_back(holder.pid);
    if (found->unread_processes > 0 && !warned_of_unread_.exchange(true)) {
      spdlog::warn(
          "device={} {} {} cannot be inspected, so the daemon cannot tell whether they hold memory of ended processes; "
          "run it as root, or with CAP_SYS_PTRACE on Linux 5.14 or newer",
          properties().ordinal, found->unread_processes, found->unread_processes == 1 ? "process" : "processes");
    }
  } else {
    spdlog::error("device={} cannot tell who holds quarantined segments: {}", properties().ordinal,
                  found.status().ToString());
  }
  uint64_t held_bytes = 0;
  pid_t first_holder = 0;
  std::vector<IdleSegments::Entry> quiet;
  {
    MutexLock lock(mu_);
    const SteadyTime now = options_.clock();
    for (size_t i = 0; i < due.size(); ++i) {
      if (!holders[i].empty()) {
        if (quarantine_.Keep(due[i].id, holders[i], now)) {
          held_bytes += due[i].segment.bytes;
          first_holder = holders[i].front();
        }
      } else if (!found.ok()) {
        quarantine_.Keep(due[i].id, {}, now);
      } else {
        const uid_t uid = quarantine_.entries().at(due[i].id).uid;
        quiet.push_back(quarantine_.Remove(due[i].id));
        accounts_.UnchargeUnowned(quiet.back().segment.bytes, uid);
      }
    }
    // Children that live for long, of many dead processes, must not keep a processor busy.
    if (quiet.empty()) next_walk_ = now + std::min(kBetweenWalks * (now - began), kLongestBetweenWalks);
    quiet = StartFreeing(std::move(quiet));
  }
  FreeToDriver(quiet);
  if (first_holder > 0) {
    LogClientEvent(spdlog::level::warn, LogLine("quarantine held open")
                                            .Add("device", properties().ordinal)
                                            .Add("bytes", held_bytes)
                                            .Add("holder_pid", first_holder));
  }
  CapacityFreed();
}

std::optional<SteadyTime> SegmentPool::NextQuarantineCheck() const {
  MutexLock lock(mu_);
  std::optional<SteadyTime> check = quarantine_.next_check();
  if (check.has_value()) check = std::max(*check, next_walk_);
  const std::optional<SteadyTime> look = carried_over_.next_look();
  return check.has_value() && look.has_value() ? std::min(*check, *look) : check.has_value() ? check : look;
}

bool SegmentPool::IsSettling() const {
  MutexLock lock(mu_);
  return quarantine_.settling_bytes() > 0 || carried_over_.is_settling();
}

bool SegmentPool::IsClosingCarriedOver(SessionId session) const {
  MutexLock lock(mu_);
  return carried_over_.IsClosing(session);
}

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
  if (leased->cuda_ipc.has_value()) {
    leased->exported = true;
    return WireHandle(*leased->cuda_ipc);
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
  // Not a driver call: a host device duplicates a descriptor. Under the lock, so that the segment cannot go meanwhile.
  absl::StatusOr<SegmentHandle> handle = device_->ExportSegment(leased->segment);
  if (!handle.ok()) return handle.status();
  leased->exported = true;
  leased_.VoidTicket(*leased);
  return std::get<UniqueFd>(*std::move(handle));
}

std::vector<IdleSegments::Entry> SegmentPool::StartFreeing(std::vector<IdleSegments::Entry> entries) {
  for (const IdleSegments::Entry& entry : entries) {
    freeing_bytes_ += entry.segment.bytes;
    if (!freed_tenant_.has_value()) freed_tenant_ = entry.tenant;
    freed_several_ = freed_several_ || *freed_tenant_ != entry.tenant;
  }
  return entries;
}

void SegmentPool::FreeToDriver(const std::vector<IdleSegments::Entry>& entries) {
  for (const IdleSegments::Entry& entry : entries) {
    FreeSegment(entry.segment);
    // After each, for those who wait for just this much.
    MutexLock lock(mu_);
    ++segment_frees_;
    freeing_bytes_ -= entry.segment.bytes;
    freed_.NotifyAll();
  }
}

void SegmentPool::FreeSegment(const DeviceSegment& segment) {
  const absl::Status status = device_->FreeSegment(segment);
  if (status.ok()) return;
  spdlog::error("device={} cannot give a segment of {} back to the driver, will try again: {}", properties().ordinal,
                FormatBytes(segment.bytes), status.ToString());
  MutexLock lock(mu_);
  unfreed_.push_back(segment);
  unfreed_bytes_ += segment.bytes;
}

void SegmentPool::RetryFrees() {
  std::vector<DeviceSegment> refused;
  {
    MutexLock lock(mu_);
    refused.swap(unfreed_);
  }
  for (const DeviceSegment& segment : refused) {
    const bool freed = device_->FreeSegment(segment).ok();
    MutexLock lock(mu_);
    if (freed) {
      unfreed_bytes_ -= segment.bytes;
    } else {
      unfreed_.push_back(segment);
    }
  }
}

bool SegmentPool::AwaitFree(uint64_t frees, SteadyTime deadline) {
  MutexLock lock(mu_);
  while (segment_frees_ <= frees) {
    if (freeing_bytes_ == 0 || !freed_.WaitUntil(mu_, deadline)) return false;
  }
  return std::chrono::steady_clock::now() < deadline;
}

// Call it after the driver has given the segment: its earlier owners are in freed_tenant_ by then.
absl::Status SegmentPool::Scrub(const std::string& tenant, const DeviceSegment& segment) {
  if (!properties().keeps_freed_bytes) return absl::OkStatus();
  {
    MutexLock lock(mu_);
    if (!freed_several_ && freed_tenant_.value_or(tenant) == tenant) return absl::OkStatus();
  }
  return device_->Zero(segment, 0, segment.bytes);
}

absl::StatusOr<LeasedSegment> SegmentPool::AllocateFromDriver(const std::string& tenant, uint64_t bytes) {
  const SteadyTime deadline = std::chrono::steady_clock::now() + options_.free_timeout;
  uint64_t frees = GetStats().segment_frees;
  absl::StatusOr<DeviceSegment> segment = device_->AllocateSegment(bytes);
  // Other calls may still be freeing what the ledger counts as free: after each of them there may be room.
  while (absl::IsResourceExhausted(segment.status()) && AwaitFree(frees, deadline)) {
    frees = GetStats().segment_frees;
    segment = device_->AllocateSegment(bytes);
  }
  if (absl::IsResourceExhausted(segment.status())) {
    // Somebody outside of the broker took device memory. Idle segments help.
    std::vector<IdleSegments::Entry> victims;
    {
      MutexLock lock(mu_);
      victims = StartFreeing(idle_.TakeOldest(idle_.bytes()));
    }
    FreeToDriver(victims);
    RetryFrees();
    segment = device_->AllocateSegment(bytes);
  }
  if (!segment.ok()) return segment.status();
  if (absl::Status status = Scrub(tenant, *segment); !status.ok()) {
    FreeSegment(*segment);
    return status;
  }
  LeasedSegment leased{.segment = *segment};
  if (properties().kind == DeviceKind::kCuda) {
    absl::StatusOr<SegmentHandle> handle = device_->ExportSegment(*segment);
    if (!handle.ok()) {
      FreeSegment(*segment);
      return handle.status();
    }
    leased.cuda_ipc = std::get<CudaIpcHandle>(*handle);
  }
  return leased;
}

uint64_t SegmentPool::ReleaseIdleSince(SteadyTime time) {
  // One at a time: while the driver is busy with it, the others can still be leased.
  for (uint64_t bytes = 0;;) {
    std::vector<IdleSegments::Entry> oldest;
    {
      MutexLock lock(mu_);
      const std::optional<SteadyTime> since = idle_.oldest();
      if (!since.has_value() || (*since > time && idle_.bytes() <= options_.idle_limit_bytes)) return bytes;
      oldest = StartFreeing(idle_.TakeOldest(1));
    }
    bytes += oldest[0].segment.bytes;
    FreeToDriver(oldest);
  }
}

bool SegmentPool::AwaitDecay(std::chrono::milliseconds decay) {
  MutexLock lock(mu_);
  while (!stop_decay_) {
    const std::optional<SteadyTime> since = idle_.oldest();
    if (!since.has_value()) {
      decay_.Wait(mu_);
    } else if (idle_.bytes() > options_.idle_limit_bytes || !decay_.WaitUntil(mu_, *since + decay)) {
      break;  // a segment that was taken or leased meanwhile is no harm: ReleaseIdleSince() looks for itself
    }
  }
  return !stop_decay_;
}

void SegmentPool::StopDecay() {
  MutexLock lock(mu_);
  stop_decay_ = true;
  decay_.NotifyOne();
}

absl::Status SegmentPool::UpdateHealth() {
  absl::Status health = device_->Health();
  uint64_t from_driver = 0;
  uint64_t at_most = 0;
  {
    MutexLock lock(mu_);
    from_driver = FromDriverBytes() - freeing_bytes_;
    at_most = AtMostFromDriverBytes();
  }
  const absl::StatusOr<uint64_t> free = health.ok() ? device_->FreeBytes() : health;
  // ResourceExhausted would say to those who want memory that others have it.
  if (!free.ok())
    health = absl::IsResourceExhausted(free.status()) ? absl::InternalError(free.status().message()) : free.status();
  bool changed = false;
  {
    MutexLock lock(mu_);
    changed = health_.ok() != health.ok();
    if (changed) accounts_.Forbid();
    health_ = health;
    const uint64_t unowned = elsewhere_bytes_ + outside_bytes_;
    if (free.ok()) {
      driver_free_bytes_ = *free;
      // What changed hands meanwhile is not to count twice.
      driver_known_bytes_ = *free + std::min(from_driver, FromDriverBytes() - freeing_bytes_);
      DriverHas(*free, at_most);
    }
    SettleElsewhere();
    changed = changed || unowned != elsewhere_bytes_ + outside_bytes_;
  }
  if (changed) CapacityFreed();  // those who wait are refused now, or served
  return health;
}

void SegmentPool::DriverRefused(uint64_t bytes) {
  const absl::StatusOr<uint64_t> free = device_->FreeBytes();
  MutexLock lock(mu_);
  // Whatever it says is free, it did not have so much. The next update of the health may find more.
  const uint64_t most = bytes - std::min(bytes, kSegmentGranuleBytes);
  driver_refuses_beyond_ = FromDriverBytes() + (free.ok() ? std::min(*free, most) : most);
  SettleOutside();
}

bool SegmentPool::IsOutside(const absl::Status& refusal) const {
  return outside_bytes_ > 0 && SegmentRefusalCause(refusal) == OomCause::kCapacity;
}

void SegmentPool::AskDriver() {
  uint64_t at_most = 0;
  {
    MutexLock lock(mu_);
    at_most = AtMostFromDriverBytes();
  }
  const absl::StatusOr<uint64_t> free = device_->FreeBytes();
  if (!free.ok()) return;
  bool has_more = false;
  {
    MutexLock lock(mu_);
    const uint64_t before = outside_bytes_;
    DriverHas(*free, at_most);
    SettleOutside();
    has_more = outside_bytes_ < before;
  }
  if (has_more) CapacityFreed();
}

void SegmentPool::DriverHas(uint64_t free_bytes, uint64_t at_most) {
  driver_has_bytes_ = free_bytes + std::max(at_most, AtMostFromDriverBytes());
  driver_refuses_beyond_ = std::numeric_limits<uint64_t>::max();
}

void SegmentPool::CountReclaim(uint64_t asked_bytes, uint64_t reclaimed_bytes, std::chrono::nanoseconds duration) {
  reclaim_durations_.Observe(std::chrono::duration<double>(duration).count());
  MutexLock lock(mu_);
  ++reclaims_.reclaims;
  reclaims_.asked_bytes += asked_bytes;
  reclaims_.reclaimed_bytes += reclaimed_bytes;
}

}  // namespace vrambroker
