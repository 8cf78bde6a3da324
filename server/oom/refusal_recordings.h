// SPDX-License-Identifier: Apache-2.0
//
// RefusalRecordings: what led to the last refusals, for who asks why when the program has gone.
#ifndef VRAMBROKER_SERVER_OOM_REFUSAL_RECORDINGS_H_
#define VRAMBROKER_SERVER_OOM_REFUSAL_RECORDINGS_H_

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "allocator/base/ids.h"
#include "allocator/base/mutex.h"
#include "allocator/heap/heap_snapshot.h"
#include "server/base/user_key.h"

namespace vrambroker {

// Heaps with their recorded events, by the number of the refusal. Thread-safe.
class RefusalRecordings {
 public:
  // Of all recordings, and of one user's. 100,000 events and 10,000 blocks are 8 MB.
  static constexpr uint64_t kMaxBytes = uint64_t{256} << 20;
  static constexpr uint64_t kMaxBytesOfUser = kMaxBytes / 2;

  enum class Place { kNone, kFirst, kLater };  // of a recording among those that are kept of its session

  // Keeps a session's first and last recording: this one replaces an earlier last one. To make room it drops last ones
  // before first ones, and the oldest of them first: this user's, then those of the user who has most. No session's
  // first makes room for its last. kNone: it is too large for the user's share, beside the session's first.
  Place Add(uint64_t refusal, SessionId session, const UserKey& user, HeapSnapshot recording) ABSL_LOCKS_EXCLUDED(mu_);

  // nullptr: there was none, or it has made room.
  std::shared_ptr<const HeapSnapshot> Find(uint64_t refusal) const ABSL_LOCKS_EXCLUDED(mu_);
  // The refusals whose recordings are kept for the session, at most two, the first one first.
  std::vector<uint64_t> Of(SessionId session) const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Kept {
    SessionId session{};
    UserKey user;
    Place place = Place::kFirst;  // kLater: the session's first one is kept, too
    uint64_t bytes = 0;
    std::shared_ptr<const HeapSnapshot> recording;
  };
  using ByRefusal = std::map<uint64_t, Kept>;

  // Who makes room next; the end: nobody is left. `first`: is to stay.
  ByRefusal::iterator NextToDrop(const UserKey& user, ByRefusal::iterator first) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Of `user`, what may make room for a session whose first recording is `first`.
  uint64_t DroppableBytes(const UserKey& user, ByRefusal::iterator first) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  ByRefusal::iterator Drop(ByRefusal::iterator it) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  mutable Mutex mu_;
  ByRefusal kept_ ABSL_GUARDED_BY(mu_);
  std::map<UserKey, uint64_t> of_user_ ABSL_GUARDED_BY(mu_);  // bytes
  uint64_t bytes_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_OOM_REFUSAL_RECORDINGS_H_
