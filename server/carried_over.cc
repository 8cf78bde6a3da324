// SPDX-License-Identifier: Apache-2.0
#include "server/carried_over.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace vrambroker {
namespace {

// A look at all processes takes milliseconds. Clients say when they have closed something; this is for all others.
constexpr std::chrono::milliseconds kPeriod(5000);
constexpr std::chrono::milliseconds kSoon(20);

}  // namespace

// The entry has been nobody's or another session's.
void CarriedOver::Charge(SessionId session, Entry& entry, Changes& changes) {
  changes.push_back({.session = entry.session, .bytes = entry.bytes});
  changes.push_back({.session = session, .bytes = entry.bytes, .is_charged = true});
  entry.session = session;
}

CarriedOver::Entries::iterator CarriedOver::Remove(Entries::iterator it, Changes& changes) {
  changes.push_back({.session = it->second.session, .bytes = it->second.bytes});
  bytes_ -= it->second.bytes;
  return entries_.erase(it);
}

CarriedOver::Changes CarriedOver::Found(const std::vector<LeftSegment>& segments,
                                        absl::FunctionRef<SessionId(pid_t)> session_of) {
  Changes changes;
  look_soon_ = false;
  for (auto& [key, entry] : entries_) entry.is_missed = entry.is_seen;
  for (const LeftSegment& segment : segments) {
    const auto [it, is_new] = entries_.try_emplace(Key(segment.file_device, segment.file_inode, 0));
    Entry& entry = it->second;
    entry.is_seen = true;
    entry.is_missed = false;
    entry.holders = segment.holders;
    if (!is_new) continue;
    entry.bytes = segment.bytes;
    bytes_ += entry.bytes;
    for (auto holder = segment.holders.begin(); holder != segment.holders.end() && entry.session == kNoSession;
         ++holder) {
      entry.session = session_of(*holder);
    }
    changes.push_back({.session = entry.session, .bytes = entry.bytes, .is_charged = true});
  }
  for (auto it = entries_.begin(); it != entries_.end();) {
    // Twice: while it was looked for, it may have passed from a process that had not been looked at to one that had.
    if (it->second.is_missed && it->second.holders.empty()) {
      it = Remove(it, changes);
      continue;
    }
    if (it->second.is_missed) {
      it->second.holders.clear();
      look_soon_ = true;
    }
    ++it;
  }
  return changes;
}

CarriedOver::Changes CarriedOver::Opened(SessionId session, pid_t pid) {
  Changes changes;
  for (auto& [key, entry] : entries_) {
    const bool holds = std::find(entry.holders.begin(), entry.holders.end(), pid) != entry.holders.end();
    if (holds && entry.session == kNoSession) Charge(session, entry, changes);
  }
  return changes;
}

CarriedOver::Changes CarriedOver::Declared(SessionId session, pid_t pid, absl::Span<const CarriedSegment> segments,
                                           uint64_t most_bytes) {
  Changes changes;
  for (const CarriedSegment& segment : segments) {
    const bool is_file = segment.file_inode != 0;
    const Key key = is_file ? Key(segment.file_device, segment.file_inode, 0) : Key(0, Raw(session), segment.id);
    if (const auto it = entries_.find(key); it != entries_.end()) {
      // Several sessions of one process tell each other's apart; nobody takes over what another process holds.
      Entry& entry = it->second;
      const bool holds = std::find(entry.holders.begin(), entry.holders.end(), pid) != entry.holders.end();
      if (!holds || entry.id.has_value()) continue;
      entry.id = segment.id;
      if (entry.session != session) Charge(session, entry, changes);
      continue;
    }
    if (segment.bytes > most_bytes) continue;
    most_bytes -= segment.bytes;
    entries_[key] = {.bytes = segment.bytes, .session = session, .id = segment.id};
    bytes_ += segment.bytes;
    changes.push_back({.session = session, .bytes = segment.bytes, .is_charged = true});
  }
  return changes;
}

CarriedOver::Changes CarriedOver::Freed(SessionId session, absl::Span<const uint64_t> ids) {
  Changes changes;
  for (auto it = entries_.begin(); it != entries_.end();) {
    Entry& entry = it->second;
    const bool is_meant =
        entry.session == session && entry.id.has_value() && std::find(ids.begin(), ids.end(), *entry.id) != ids.end();
    if (is_meant && !entry.is_seen) {
      it = Remove(it, changes);
      continue;
    }
    look_soon_ = look_soon_ || is_meant;
    ++it;
  }
  return changes;
}

CarriedOver::Changes CarriedOver::Closed(SessionId session) {
  Changes changes;
  for (auto it = entries_.begin(); it != entries_.end();) {
    if (it->second.session != session) {
      ++it;
    } else if (it->second.is_seen) {
      Charge(kNoSession, it->second, changes);
      it->second.id.reset();
      look_soon_ = true;
      ++it;
    } else {
      it = Remove(it, changes);
    }
  }
  return changes;
}

std::optional<SteadyTime> CarriedOver::next_look() const {
  const bool any =
      std::any_of(entries_.begin(), entries_.end(), [](const auto& entry) { return entry.second.is_seen; });
  if (!any) return std::nullopt;
  return looked_ + (look_soon_ ? kSoon : kPeriod);
}

uint64_t CarriedOver::declared_bytes() const {
  uint64_t bytes = 0;
  for (const auto& [key, entry] : entries_) bytes += entry.is_seen ? 0 : entry.bytes;
  return bytes;
}

std::vector<CarriedOver::Holding> CarriedOver::Holdings() const {
  std::vector<Holding> holdings;
  for (const auto& [key, entry] : entries_) {
    auto it = std::find_if(holdings.begin(), holdings.end(), [&entry = entry](const Holding& holding) {
      return holding.session == entry.session && (entry.session != kNoSession || holding.holders == entry.holders);
    });
    if (it == holdings.end()) {
      it = holdings.insert(holdings.end(), Holding{.session = entry.session, .holders = entry.holders});
    }
    it->bytes += entry.bytes;
    ++it->segments;
  }
  return holdings;
}

std::vector<CarriedOver::Segment> CarriedOver::Segments() const {
  std::vector<Segment> segments;
  segments.reserve(entries_.size());
  for (const auto& [key, entry] : entries_) {
    const auto& [device, inode, id] = key;
    segments.push_back({.number = device != 0 ? inode : id, .session = entry.session, .bytes = entry.bytes});
  }
  return segments;
}

}  // namespace vrambroker
