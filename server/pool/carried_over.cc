// SPDX-License-Identifier: Apache-2.0
#include "server/pool/carried_over.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace vrambroker {
namespace {

// A look at all processes takes milliseconds. Clients report closed segments; the period serves all remaining cases.
constexpr std::chrono::milliseconds kPeriod(5000);
constexpr std::chrono::milliseconds kSoon(20);

bool Holds(const std::vector<ProcessId>& holders, const ProcessId& process) {
  return std::any_of(holders.begin(), holders.end(), [&](const ProcessId& holder) {
    // The start time of a process may be unknown, for want of descriptors.
    return holder == process || (holder.pid == process.pid && (holder.started == 0 || process.started == 0));
  });
}

}  // namespace

void CarriedOver::Charge(const Entry& entry, Changes& changes) {
  bytes_ += entry.bytes;
  if (!entry.is_seen) declared_bytes_ += entry.bytes;
  changes.push_back({.session = entry.session, .share = entry.share, .bytes = entry.bytes, .is_charged = true});
}

void CarriedOver::Uncharge(const Entry& entry, Changes& changes) {
  bytes_ -= entry.bytes;
  if (!entry.is_seen) declared_bytes_ -= entry.bytes;
  changes.push_back({.session = entry.session, .share = entry.share, .bytes = entry.bytes});
}

void CarriedOver::MoveTo(SessionId session, const std::optional<ShareId>& share, Entry& entry, Changes& changes) {
  Uncharge(entry, changes);
  Unname(entry);
  entry.is_doubted = false;
  entry.session = session;
  entry.share = share;
  Charge(entry, changes);
}

void CarriedOver::Name(const Key& key, Entry& entry, uint64_t id) {
  entry.id = id;
  by_id_[{entry.session, id}] = key;
}

void CarriedOver::Unname(Entry& entry) {
  if (!entry.id.has_value()) return;
  by_id_.erase({entry.session, *entry.id});
  unconfirmed_.erase({entry.session, *entry.id});
  closing_.erase({entry.session, *entry.id});
  entry.id.reset();
  entry.closed_before = 0;
}

CarriedOver::Entries::iterator CarriedOver::Remove(Entries::iterator it, Changes& changes) {
  Uncharge(it->second, changes);
  Unname(it->second);
  if (it->second.is_seen) --seen_;
  return entries_.erase(it);
}

CarriedOver::Changes CarriedOver::Found(const std::vector<LeftSegment>& segments,
                                        absl::FunctionRef<std::optional<Holder>(const ProcessId&)> session_of) {
  Changes changes;
  for (auto& [key, entry] : entries_) entry.is_missed = entry.is_seen;
  for (const LeftSegment& segment : segments) {
    const auto [it, is_new] = entries_.try_emplace(Key(Kind::kFile, segment.file_device, segment.file_inode));
    Entry& entry = it->second;
    entry.is_missed = false;
    entry.holders = segment.holders;
    if (entry.id.has_value() && entry.closed_before > 0 && entry.closed_before <= looks_) {
      closing_.erase({entry.session, *entry.id});
      entry.closed_before = 0;
      entry.is_doubted = true;
    }
    if (entry.is_seen) continue;
    // The file replaces earlier declarations by a client.
    if (!is_new) {
      Uncharge(entry, changes);
      Unname(entry);
    }
    ++seen_;
    entry = {.bytes = segment.bytes,
             .share = segment.holder_uid,
             .share_before = segment.holder_uid,
             .is_seen = true,
             .holders = segment.holders};
    for (auto holder = segment.holders.begin(); holder != segment.holders.end() && entry.session == kNoSession;
         ++holder) {
      const std::optional<Holder> of = session_of(*holder);
      if (!of.has_value()) continue;
      entry.session = of->session;
      entry.share = of->share;
    }
    Charge(entry, changes);
  }
  bool any_gone = false;
  for (auto it = entries_.begin(); it != entries_.end();) {
    // Remove on the second miss: during a look, a file may pass from a process not yet looked at to one already done.
    if (it->second.is_missed && it->second.holders.empty()) {
      it = Remove(it, changes);
      any_gone = true;
      continue;
    }
    if (it->second.is_missed) {
      it->second.holders.clear();
      look_soon_ = any_gone = true;
    }
    ++it;
  }
  // A client repeatedly reporting open segments as closed must not keep the daemon looking. Unrequested looks do not
  // count against clients.
  soon_ = any_gone || !was_asked_for_ ? kSoon : std::min<SteadyTime::duration>(2 * soon_, kPeriod);
  return changes;
}

void CarriedOver::CannotTell() {
  for (const auto& name : closing_) entries_.at(by_id_.at(name)).closed_before = 0;
  closing_.clear();
}

CarriedOver::Changes CarriedOver::Opened(const Holder& holder, const ProcessId& process) {
  Changes changes;
  for (auto& [key, entry] : entries_) {
    if (entry.session != kNoSession || !Holds(entry.holders, process)) continue;
    if (holder.session == kNoSession) entry.share_before = entry.share;
    MoveTo(holder.session, holder.share, entry, changes);
  }
  return changes;
}

CarriedOver::Changes CarriedOver::ClaimClosed(ClaimId claim) {
  Changes changes;
  for (auto& [key, entry] : entries_) {
    if (entry.share == ShareId(claim)) MoveTo(kNoSession, entry.share_before, entry, changes);
  }
  return changes;
}

CarriedOver::Changes CarriedOver::Declared(const Holder& holder, const ProcessId& process,
                                           absl::Span<const CarriedSegment> segments, uint64_t most_bytes) {
  const auto& [session, share] = holder;
  Changes changes;
  for (const CarriedSegment& segment : segments) {
    unconfirmed_.erase({session, segment.id});
    if (by_id_.contains({session, segment.id})) continue;
    const bool is_file = segment.file_device != 0 && segment.file_inode != 0;
    const Key key = is_file ? Key(Kind::kFile, segment.file_device, segment.file_inode)
                            : Key(Kind::kSaid, Raw(session), segment.id);
    if (const auto it = entries_.find(key); it != entries_.end()) {
      // Sessions of a process tell their segments apart; no session takes over a segment of another process.
      Entry& entry = it->second;
      if (entry.id.has_value() || !Holds(entry.holders, process)) continue;
      if (entry.session != session) MoveTo(session, share, entry, changes);
      Name(key, entry, segment.id);
      continue;
    }
    if (segment.bytes > most_bytes) continue;
    most_bytes -= segment.bytes;
    Entry& entry = entries_[key] = {.bytes = segment.bytes, .session = session, .share = share};
    Charge(entry, changes);
    Name(key, entry, segment.id);
  }
  return changes;
}

void CarriedOver::BeginDeclaration(SessionId session) {
  for (auto it = by_id_.lower_bound({session, 0}); it != by_id_.end() && it->first.first == session; ++it) {
    unconfirmed_.insert(it->first);
  }
}

CarriedOver::Changes CarriedOver::EndDeclaration(SessionId session) {
  std::vector<uint64_t> ids;
  const auto begin = unconfirmed_.lower_bound({session, 0});
  auto end = begin;
  for (; end != unconfirmed_.end() && end->first == session; ++end) ids.push_back(end->second);
  unconfirmed_.erase(begin, end);
  return Freed(session, ids);
}

CarriedOver::Changes CarriedOver::Freed(SessionId session, absl::Span<const uint64_t> ids) {
  Changes changes;
  for (const uint64_t id : ids) {
    const auto named = by_id_.find({session, id});
    if (named == by_id_.end()) continue;
    const auto it = entries_.find(named->second);
    if (it->second.is_seen) {
      // Only the first report counts: a client repeating it could make its requests wait for ever.
      if (it->second.is_doubted || it->second.closed_before > 0) continue;
      look_soon_ = true;
      it->second.closed_before = looks_ + 1;
      closing_.insert({session, id});
    } else {
      Remove(it, changes);
    }
  }
  return changes;
}

bool CarriedOver::IsClosing(SessionId session) const {
  const auto it = closing_.lower_bound({session, 0});
  return it != closing_.end() && it->first == session;
}

CarriedOver::Changes CarriedOver::Closed(SessionId session, bool goes_on) {
  Changes changes;
  for (auto it = entries_.begin(); it != entries_.end();) {
    if (it->second.session != session) {
      ++it;
    } else if (it->second.is_seen || goes_on) {
      MoveTo(kNoSession, it->second.share, it->second, changes);
      look_soon_ = true;
      ++it;
    } else {
      it = Remove(it, changes);
    }
  }
  return changes;
}

std::optional<SteadyTime> CarriedOver::next_look() const {
  if (seen_ == 0 || is_looking_) return std::nullopt;
  return looked_ + (look_soon_ ? soon_ : kPeriod);
}

void CarriedOver::StartLook() {
  is_looking_ = true;
  ++looks_;
  was_asked_for_ = look_soon_;
  look_soon_ = false;  // later reports are for the next look
}

void CarriedOver::EndLook(SteadyTime now) {
  is_looking_ = false;
  looked_ = now;
}

std::vector<CarriedOver::Holding> CarriedOver::Holdings() const {
  absl::btree_map<std::pair<SessionId, std::vector<ProcessId>>, Holding> by_holder;
  for (const auto& [key, entry] : entries_) {
    const std::vector<ProcessId> holders = entry.session == kNoSession ? entry.holders : std::vector<ProcessId>();
    Holding& holding = by_holder[{entry.session, holders}];
    holding.session = entry.session;
    holding.bytes += entry.bytes;
    ++holding.segments;
    holding.holders = holders;
  }
  std::vector<Holding> holdings;
  holdings.reserve(by_holder.size());
  for (auto& [holder, holding] : by_holder) holdings.push_back(std::move(holding));
  return holdings;
}

std::vector<CarriedOver::Segment> CarriedOver::Segments() const {
  std::vector<Segment> segments;
  segments.reserve(entries_.size());
  for (const auto& [key, entry] : entries_) {
    segments.push_back({.number = std::get<2>(key), .session = entry.session, .bytes = entry.bytes});
  }
  return segments;
}

}  // namespace vrambroker
