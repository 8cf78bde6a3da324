// SPDX-License-Identifier: Apache-2.0
#include "server/oom/refusal_recordings.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace vrambroker {
namespace {

uint64_t SizeOf(const HeapSnapshot& heap) {
  uint64_t bytes = sizeof heap + heap.history.capacity() * sizeof(HistoryEvent);
  for (const SegmentSnapshot& segment : heap.segments) {
    bytes += sizeof segment + segment.blocks.capacity() * sizeof(BlockSnapshot);
  }
  for (const Scope& scope : heap.scopes) bytes += sizeof scope + scope.name.capacity() + scope.file.capacity();
  bytes += heap.scope_bytes_at_peak.capacity() * sizeof(uint64_t);
  return bytes;
}

}  // namespace

RefusalRecordings::Place RefusalRecordings::Add(uint64_t refusal, SessionId session, const UserKey& user,
                                                HeapSnapshot recording) {
  recording.history.shrink_to_fit();
  const uint64_t bytes = SizeOf(recording);
  auto kept = std::make_shared<const HeapSnapshot>(std::move(recording));
  std::vector<std::shared_ptr<const HeapSnapshot>> dropped;  // destroyed after the lock is released
  MutexLock lock(mu_);
  const auto drop = [&](ByRefusal::iterator it) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    dropped.push_back(it->second.recording);
    return Drop(it);
  };
  const auto first = std::find_if(kept_.begin(), kept_.end(), [&](const auto& entry) {
    return entry.second.session == session && entry.second.place == Place::kFirst;
  });
  // The check guarantees that the loops below end before reaching `first`.
  if (bytes + (first == kept_.end() ? 0 : first->second.bytes) > kMaxBytesOfUser) {
    dropped.push_back(std::move(kept));
    return Place::kNone;
  }
  // Drops the session's own last recording first, since its bytes may suffice.
  for (auto it = kept_.begin(); it != kept_.end();) {
    it = it->second.session == session && it != first ? drop(it) : std::next(it);
  }
  while (of_user_[user] + bytes > kMaxBytesOfUser) drop(NextToDrop(user, first));
  while (bytes_ + bytes > kMaxBytes) {
    const auto most = std::max_element(of_user_.begin(), of_user_.end(),
                                       [&](const auto& a, const auto& b) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
                                         return DroppableBytes(a.first, first) < DroppableBytes(b.first, first);
                                       });
    drop(NextToDrop(most->first, first));
  }
  of_user_[user] += bytes;
  bytes_ += bytes;
  const Place place = first == kept_.end() ? Place::kFirst : Place::kLater;
  kept_.emplace(refusal,
                Kept{.session = session, .user = user, .place = place, .bytes = bytes, .recording = std::move(kept)});
  return place;
}

uint64_t RefusalRecordings::DroppableBytes(const UserKey& user, ByRefusal::iterator first) {
  return of_user_[user] - (first != kept_.end() && first->second.user == user ? first->second.bytes : 0);
}

RefusalRecordings::ByRefusal::iterator RefusalRecordings::NextToDrop(const UserKey& user, ByRefusal::iterator first) {
  auto oldest = kept_.end();
  for (auto it = kept_.begin(); it != kept_.end(); ++it) {
    if (it->second.user != user || it == first) continue;
    if (it->second.place == Place::kLater) return it;
    if (oldest == kept_.end()) oldest = it;
  }
  return oldest;
}

RefusalRecordings::ByRefusal::iterator RefusalRecordings::Drop(ByRefusal::iterator it) {
  const auto user = of_user_.find(it->second.user);
  user->second -= it->second.bytes;
  if (user->second == 0) of_user_.erase(user);
  bytes_ -= it->second.bytes;
  return kept_.erase(it);
}

std::shared_ptr<const HeapSnapshot> RefusalRecordings::Find(uint64_t refusal) const {
  MutexLock lock(mu_);
  const auto it = kept_.find(refusal);
  return it == kept_.end() ? nullptr : it->second.recording;
}

std::vector<uint64_t> RefusalRecordings::Of(SessionId session) const {
  MutexLock lock(mu_);
  std::vector<uint64_t> refusals;
  for (const auto& [refusal, kept] : kept_) {
    if (kept.session == session) refusals.push_back(refusal);
  }
  return refusals;
}

}  // namespace vrambroker
