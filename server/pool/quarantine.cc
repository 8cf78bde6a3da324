// SPDX-License-Identifier: Apache-2.0
#include "server/pool/quarantine.h"

#include <algorithm>
#include <utility>

namespace vrambroker {
namespace {

constexpr std::chrono::milliseconds kFirstPeriod(100);
constexpr std::chrono::milliseconds kLongestPeriod(5000);

}  // namespace

void Quarantine::Add(SegmentId id, Entry entry) {
  bytes_ += entry.unleased.segment.bytes;
  settling_bytes_ += entry.unleased.segment.bytes;
  checks_.emplace(entry.next_check, id);
  entries_.emplace(id, std::move(entry));
}

std::optional<SteadyTime> Quarantine::next_check() const {
  return checks_.empty() ? std::nullopt : std::optional(checks_.begin()->first);
}

std::vector<Quarantine::Due> Quarantine::StartChecks(SteadyTime now) {
  std::vector<Due> due;
  while (!checks_.empty() && checks_.begin()->first <= now) {
    const SegmentId id = checks_.begin()->second;
    checks_.erase(checks_.begin());
    Entry& entry = entries_.at(id);
    entry.checking = true;
    due.push_back({.id = id, .segment = entry.unleased.segment, .mark = entry.mark});
  }
  return due;
}

UnleasedSegment Quarantine::Remove(SegmentId id) {
  const auto it = entries_.find(id);
  UnleasedSegment unleased = std::move(it->second.unleased);
  bytes_ -= unleased.segment.bytes;
  if (it->second.checks == 0) settling_bytes_ -= unleased.segment.bytes;
  if (!it->second.checking) checks_.erase({it->second.next_check, id});
  entries_.erase(it);
  return unleased;
}

bool Quarantine::Keep(SegmentId id, std::vector<pid_t> holders, SteadyTime now) {
  Entry& entry = entries_.at(id);
  const bool changed = entry.holders != holders;
  entry.holders = std::move(holders);
  if (!entry.checking) checks_.erase({entry.next_check, id});
  entry.next_check = now + std::min(kLongestPeriod, kFirstPeriod * (1 << std::min(entry.checks, 10)));
  checks_.emplace(entry.next_check, id);
  if (entry.checks++ == 0) settling_bytes_ -= entry.unleased.segment.bytes;
  entry.checking = false;
  return changed;
}

std::vector<Quarantine::Holding> Quarantine::Holdings() const {
  std::vector<Holding> holdings;
  for (const auto& [id, entry] : entries_) {
    auto it = std::find_if(holdings.begin(), holdings.end(), [&entry = entry](const Holding& h) {
      return h.client == entry.client && h.pid == entry.pid;
    });
    if (it == holdings.end()) {
      holdings.push_back({.client = entry.client, .pid = entry.pid, .since = entry.unleased.since});
      it = std::prev(holdings.end());
    }
    it->bytes += entry.unleased.segment.bytes;
    ++it->segments;
    it->since = std::min(it->since, entry.unleased.since);
    for (const pid_t holder : entry.holders) {
      if (std::find(it->holders.begin(), it->holders.end(), holder) == it->holders.end()) it->holders.push_back(holder);
    }
  }
  return holdings;
}

std::vector<DeviceSegment> Quarantine::Segments() const {
  std::vector<DeviceSegment> segments;
  segments.reserve(entries_.size());
  for (const auto& [id, entry] : entries_) segments.push_back(entry.unleased.segment);
  return segments;
}

}  // namespace vrambroker
