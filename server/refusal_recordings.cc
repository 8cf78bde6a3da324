// SPDX-License-Identifier: Apache-2.0
#include "server/refusal_recordings.h"

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

bool RefusalRecordings::Add(uint64_t refusal, SessionId session, uid_t uid, HeapSnapshot recording) {
  recording.history.shrink_to_fit();
  const uint64_t bytes = SizeOf(recording);
  if (bytes > kMaxBytesOfUser) return false;
  Kept added{.session = session,
             .uid = uid,
             .bytes = bytes,
             .recording = std::make_shared<const HeapSnapshot>(std::move(recording))};
  std::vector<std::shared_ptr<const HeapSnapshot>> dropped;  // destroyed after the lock is released
  MutexLock lock(mu_);
  const auto drop = [&](ByRefusal::iterator it) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    dropped.push_back(it->second.recording);
    return Drop(it);
  };
  // Its own first, since that may be enough.
  for (auto it = kept_.begin(); it != kept_.end();) it = it->second.session == session ? drop(it) : std::next(it);
  for (auto it = kept_.begin(); it != kept_.end() && of_user_[uid] + bytes > kMaxBytesOfUser;) {
    it = it->second.uid == uid ? drop(it) : std::next(it);
  }
  while (!kept_.empty() && bytes_ + bytes > kMaxBytes) {
    const auto most = std::max_element(of_user_.begin(), of_user_.end(),
                                       [](const auto& a, const auto& b) { return a.second < b.second; });
    drop(std::find_if(kept_.begin(), kept_.end(),
                      [user = most->first](const auto& entry) { return entry.second.uid == user; }));
  }
  of_user_[uid] += bytes;
  bytes_ += bytes;
  kept_.emplace(refusal, std::move(added));
  return true;
}

RefusalRecordings::ByRefusal::iterator RefusalRecordings::Drop(ByRefusal::iterator it) {
  const auto user = of_user_.find(it->second.uid);
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

uint64_t RefusalRecordings::LastOf(SessionId session) const {
  MutexLock lock(mu_);
  const auto it =
      std::find_if(kept_.begin(), kept_.end(), [&](const auto& entry) { return entry.second.session == session; });
  return it == kept_.end() ? 0 : it->first;
}

}  // namespace vrambroker
