// SPDX-License-Identifier: Apache-2.0
//
// SegmentPool: looks at quarantined segments, and frees segments no process can touch any more.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/container/btree_set.h"
#include "allocator/device/process_files.h"
#include "allocator/device/session_mark.h"
#include "server/base/client_log.h"
#include "server/pool/segment_pool.h"

namespace vrambroker {

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
  // The driver cannot tell. Take processes with descriptors inherited from the client as holders.
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
          "{}",
          properties().ordinal, found->unread_processes, found->unread_processes == 1 ? "process" : "processes",
          HowToLookIntoProcesses());
    }
  } else {
    spdlog::error("device={} cannot tell who holds quarantined segments: {}", properties().ordinal,
                  found.status().ToString());
  }
  uint64_t held_bytes = 0;
  pid_t first_holder = 0;
  std::vector<UnleasedSegment> quiet;
  absl::btree_set<std::pair<pid_t, ClaimId>> of_claims;
  {
    MutexLock lock(mu_);
    const SteadyTime now = options_.clock();
    for (size_t i = 0; i < due.size(); ++i) {
      if (!holders[i].empty()) {
        if (quarantine_.Keep(due[i].id, holders[i], now)) {
          held_bytes += due[i].segment.bytes;
          first_holder = holders[i].front();
          const ShareId share = quarantine_.entries().at(due[i].id).share;
          if (const ClaimId* const claim = std::get_if<ClaimId>(&share)) {
            for (const pid_t holder : holders[i]) of_claims.emplace(holder, *claim);
          }
        }
      } else if (!found.ok()) {
        quarantine_.Keep(due[i].id, {}, now);
      } else {
        const ShareId share = quarantine_.entries().at(due[i].id).share;
        quiet.push_back(quarantine_.Remove(due[i].id));
        accounts_.UnchargeUnowned(quiet.back().segment.bytes, share);
      }
    }
    // Long-lived children of many dead processes must not keep a processor busy.
    if (quiet.empty()) next_walk_ = now + std::min(kBetweenWalks * (now - began), kLongestBetweenWalks);
    quiet = StartFreeing(std::move(quiet));
  }
  driver_.Free(quiet);
  for (const auto& [process, claim] : of_claims) on_claim_holder_(process, claim);
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
  return Earlier(check, carried_over_.next_look());
}

bool SegmentPool::IsSettling() const {
  MutexLock lock(mu_);
  return quarantine_.settling_bytes() > 0 || carried_over_.is_settling();
}

}  // namespace vrambroker
