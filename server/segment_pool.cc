// SPDX-License-Identifier: Apache-2.0
//
// States of a segment, and the function that makes each transition:
//
//   (driver) --Lease--> LEASED --MarkReturning--> RETURNING --Return--> IDLE --ReleaseIdleSince, Lease--> (driver)
//                         ^  \_____________________CloseAccount______>  |
//                         \________________Lease, same tenant___________/
//
// Invariants:
// (1) charged_bytes_ is the sum of all leased and returning segments and of what calls of Lease() are just obtaining.
//     It never exceeds capacity.
// (2) An account's reserved bytes are its part of that sum.
// (3) charged + idle never exceeds capacity when a driver call for a new segment starts.
// (4) A ticket is out for a leased segment only, at most one a segment.
#include "server/segment_pool.h"

#include <spdlog/spdlog.h>
#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "allocator/bytes.h"
#include "server/out_of_memory.h"

namespace vrambroker {
namespace {

absl::StatusOr<Ticket> RandomTicket() {
  Ticket ticket;
  if (getrandom(ticket.data(), ticket.size(), 0) != static_cast<ssize_t>(ticket.size())) {
    return absl::ErrnoToStatus(errno, "getrandom failed");
  }
  return ticket;
}

}  // namespace

SegmentPool::SegmentPool(std::unique_ptr<Device> device, uint64_t capacity_bytes, std::atomic<uint64_t>* next_segment)
    : device_(std::move(device)), capacity_bytes_(capacity_bytes), next_segment_(*next_segment) {}

SegmentPool::~SegmentPool() {
  std::vector<DeviceSegment> segments;
  {
    MutexLock lock(mu_);
    for (const auto& [id, leased] : leased_) segments.push_back(leased.segment);
    for (const IdleSegments::Entry& entry : idle_.TakeOldest(idle_.bytes())) segments.push_back(entry.segment);
  }
  for (const DeviceSegment& segment : segments) {
    if (absl::Status status = device_->FreeSegment(segment); !status.ok()) {
      spdlog::error("freeing a segment at exit: {}", status.ToString());
    }
  }
}

void SegmentPool::OpenAccount(SessionId session, pid_t pid, uid_t tenant, uint64_t limit_bytes) {
  MutexLock lock(mu_);
  accounts_[session] = Account{.pid = pid, .tenant = tenant, .figures = {.limit_bytes = limit_bytes}};
}

absl::Status SegmentPool::SetLimit(SessionId session, uint64_t limit_bytes) {
  MutexLock lock(mu_);
  const auto it = accounts_.find(session);
  if (it == accounts_.end()) return absl::NotFoundError(absl::StrCat("no session ", Raw(session)));
  it->second.figures.limit_bytes = limit_bytes;
  return absl::OkStatus();
}

uint64_t SegmentPool::CloseAccount(SessionId session) {
  MutexLock lock(mu_);
  const auto it = accounts_.find(session);
  if (it == accounts_.end()) return 0;
  uint64_t bytes = 0;
  for (const SegmentId id : std::vector<SegmentId>(it->second.segments.begin(), it->second.segments.end())) {
    bytes += leased_.at(id).segment.bytes;
    MakeIdle(id, it->second);
  }
  // What a call of Lease() is just obtaining stays charged until that call finds the account gone.
  accounts_.erase(it);
  return bytes;
}

absl::StatusOr<SegmentId> SegmentPool::Lease(SessionId session, uint64_t bytes) {
  std::vector<IdleSegments::Entry> victims;
  {
    MutexLock lock(mu_);
    const auto it = accounts_.find(session);
    if (it == accounts_.end()) return absl::AbortedError("the session has ended");
    AccountFigures& figures = it->second.figures;
    if (bytes > capacity_bytes_) {
      return SegmentRefused(OomCause::kLargerThanDevice, "larger than the device's capacity");
    }
    if (figures.reserved_bytes > figures.limit_bytes || bytes > figures.limit_bytes - figures.reserved_bytes) {
      return SegmentRefused(OomCause::kLimit, "the session's limit would be exceeded");
    }
    if (bytes > capacity_bytes_ - charged_bytes_) {
      // The place for reclaim: asking sessions that hold idle memory to trim.
      return SegmentRefused(OomCause::kCapacity, "the device's capacity is reserved by sessions");
    }
    figures.reserved_bytes += bytes;
    charged_bytes_ += bytes;
    if (const std::optional<IdleSegments::Entry> idle = idle_.Take(it->second.tenant, bytes)) {
      return AddLease(session, it->second, {.segment = idle->segment, .cuda_ipc = idle->cuda_ipc});
    }
    if (const uint64_t held = charged_bytes_ + idle_.bytes(); held > capacity_bytes_) {
      victims = StartFreeing(idle_.TakeOldest(held - capacity_bytes_));
    }
  }
  FreeToDriver(victims);
  absl::StatusOr<LeasedSegment> fresh = AllocateFromDriver(bytes);

  std::vector<IdleSegments::Entry> unwanted;
  absl::Status status = fresh.status();
  {
    MutexLock lock(mu_);
    if (fresh.ok()) ++segment_allocs_;
    const auto it = accounts_.find(session);
    if (fresh.ok() && it != accounts_.end()) return AddLease(session, it->second, *fresh);
    charged_bytes_ -= bytes;
    if (it != accounts_.end()) it->second.figures.reserved_bytes -= bytes;
    if (fresh.ok()) {
      unwanted = StartFreeing({{.segment = fresh->segment}});
      status = absl::AbortedError("the session has ended");
    }
  }
  FreeToDriver(unwanted);
  return absl::IsResourceExhausted(status) ? SegmentRefused(OomCause::kCapacity, status.message()) : status;
}

SegmentId SegmentPool::AddLease(SessionId session, Account& account, LeasedSegment segment) {
  const SegmentId id{next_segment_.fetch_add(1)};
  segment.holder = session;
  account.segments.insert(id);
  leased_.emplace(id, segment);
  return id;
}

void SegmentPool::MakeIdle(SegmentId id, Account& account) {
  const auto it = leased_.find(id);
  const LeasedSegment& leased = it->second;
  const uint64_t bytes = leased.segment.bytes;
  if (leased.ticket.has_value()) tickets_.erase(*leased.ticket);
  if (leased.returning) account.figures.returning_bytes -= bytes;
  account.figures.reserved_bytes -= bytes;
  charged_bytes_ -= bytes;
  account.segments.erase(id);
  idle_.Add({.segment = leased.segment,
             .cuda_ipc = leased.cuda_ipc,
             .tenant = account.tenant,
             .since = std::chrono::steady_clock::now()});
  leased_.erase(it);
}

void SegmentPool::MarkReturning(SessionId session, absl::Span<const SegmentId> segments) {
  MutexLock lock(mu_);
  for (const SegmentId id : segments) {
    const auto it = leased_.find(id);
    if (it == leased_.end() || it->second.holder != session || it->second.returning) continue;
    it->second.returning = true;
    accounts_.at(session).figures.returning_bytes += it->second.segment.bytes;
  }
}

void SegmentPool::Return(SessionId session, absl::Span<const SegmentId> segments) {
  MutexLock lock(mu_);
  for (const SegmentId id : segments) {
    const auto it = leased_.find(id);
    if (it == leased_.end() || it->second.holder != session || !it->second.returning) continue;
    MakeIdle(id, accounts_.at(session));
  }
}

absl::StatusOr<WireHandle> SegmentPool::HandleFor(SessionId session, SegmentId segment) {
  MutexLock lock(mu_);
  const auto it = leased_.find(segment);
  if (it == leased_.end() || it->second.holder != session) {
    return absl::NotFoundError(absl::StrCat("the session holds no segment ", Raw(segment)));
  }
  LeasedSegment& leased = it->second;
  if (leased.cuda_ipc.has_value()) return WireHandle(*leased.cuda_ipc);
  if (!leased.ticket.has_value()) {
    absl::StatusOr<Ticket> ticket = RandomTicket();
    if (!ticket.ok()) return ticket.status();
    leased.ticket = *ticket;
    tickets_.emplace(*ticket, segment);
  }
  return WireHandle(*leased.ticket);
}

absl::StatusOr<UniqueFd> SegmentPool::RedeemTicket(const Ticket& ticket, pid_t pid, uid_t uid) {
  MutexLock lock(mu_);
  const auto it = tickets_.find(ticket);
  if (it == tickets_.end()) {
    return absl::NotFoundError("no such ticket: it was used before, or its segment has been given back");
  }
  LeasedSegment& leased = leased_.at(it->second);
  const Account& account = accounts_.at(leased.holder);
  if (account.pid != pid || account.tenant != uid) {
    return absl::PermissionDeniedError("the ticket was issued to another process");
  }
  // Not a driver call: a host device duplicates a descriptor. Under the lock, so that the segment cannot go meanwhile.
  absl::StatusOr<SegmentHandle> handle = device_->ExportSegment(leased.segment);
  if (!handle.ok()) return handle.status();
  leased.ticket.reset();
  tickets_.erase(it);
  return std::get<UniqueFd>(*std::move(handle));
}

std::vector<IdleSegments::Entry> SegmentPool::StartFreeing(std::vector<IdleSegments::Entry> entries) {
  for (const IdleSegments::Entry& entry : entries) freeing_bytes_ += entry.segment.bytes;
  return entries;
}

void SegmentPool::FreeToDriver(const std::vector<IdleSegments::Entry>& entries) {
  if (entries.empty()) return;
  uint64_t bytes = 0;
  for (const IdleSegments::Entry& entry : entries) {
    bytes += entry.segment.bytes;
    if (absl::Status status = device_->FreeSegment(entry.segment); !status.ok()) {
      spdlog::error("device={} giving a segment of {} back to the driver failed: {}", properties().ordinal,
                    FormatBytes(entry.segment.bytes), status.ToString());
    }
  }
  MutexLock lock(mu_);
  segment_frees_ += entries.size();
  freeing_bytes_ -= bytes;
  if (freeing_bytes_ == 0) freed_.NotifyAll();
}

absl::StatusOr<SegmentPool::LeasedSegment> SegmentPool::AllocateFromDriver(uint64_t bytes) {
  absl::StatusOr<DeviceSegment> segment = device_->AllocateSegment(bytes);
  if (absl::IsResourceExhausted(segment.status())) {
    // Either other calls are still freeing what the ledger counts as free, or somebody outside of the broker took
    // device memory. Idle segments help in both cases.
    std::vector<IdleSegments::Entry> victims;
    {
      MutexLock lock(mu_);
      const SteadyTime deadline = std::chrono::steady_clock::now() + std::chrono::seconds(1);
      while (freeing_bytes_ > 0 && freed_.WaitUntil(mu_, deadline)) {
      }
      victims = StartFreeing(idle_.TakeOldest(idle_.bytes()));
    }
    FreeToDriver(victims);
    segment = device_->AllocateSegment(bytes);
  }
  if (!segment.ok()) return segment.status();
  LeasedSegment leased{.segment = *segment};
  if (properties().kind == DeviceKind::kCuda) {
    absl::StatusOr<SegmentHandle> handle = device_->ExportSegment(*segment);
    if (!handle.ok()) {
      (void)device_->FreeSegment(*segment);
      return handle.status();
    }
    leased.cuda_ipc = std::get<CudaIpcHandle>(*handle);
  }
  return leased;
}

uint64_t SegmentPool::ReleaseIdleSince(SteadyTime time) {
  std::vector<IdleSegments::Entry> entries;
  {
    MutexLock lock(mu_);
    entries = StartFreeing(idle_.TakeIdleSince(time));
  }
  FreeToDriver(entries);
  uint64_t bytes = 0;
  for (const IdleSegments::Entry& entry : entries) bytes += entry.segment.bytes;
  return bytes;
}

std::optional<AccountFigures> SegmentPool::GetAccount(SessionId session) const {
  MutexLock lock(mu_);
  const auto it = accounts_.find(session);
  if (it == accounts_.end()) return std::nullopt;
  return it->second.figures;
}

uint64_t SegmentPool::AvailableBytes(SessionId session) const {
  MutexLock lock(mu_);
  const auto it = accounts_.find(session);
  if (it == accounts_.end()) return 0;
  const AccountFigures& figures = it->second.figures;
  return std::min(figures.limit_bytes - std::min(figures.limit_bytes, figures.reserved_bytes),
                  capacity_bytes_ - charged_bytes_);
}

PoolFigures SegmentPool::GetFigures() const {
  MutexLock lock(mu_);
  return {.capacity_bytes = capacity_bytes_,
          .charged_bytes = charged_bytes_,
          .idle_bytes = idle_.bytes(),
          .reserved_bytes = charged_bytes_ + idle_.bytes() + freeing_bytes_,
          .segments = leased_.size(),
          .segment_allocs = segment_allocs_,
          .segment_frees = segment_frees_};
}

}  // namespace vrambroker
