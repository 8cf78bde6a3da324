// SPDX-License-Identifier: Apache-2.0
//
// RefusalRecordings: keeps the heap events before the last refusals, for diagnosis after the program has gone.
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

// Heaps with their recorded events, by refusal number. Thread-safe.
class RefusalRecordings {
 public:
  // Bounds on all recordings, and on each user's. 100,000 events and 10,000 blocks are 8 MB.
  static constexpr uint64_t kMaxBytes = uint64_t{256} << 20;
  static constexpr uint64_t kMaxBytesOfUser = kMaxBytes / 2;

  enum class Place { kNone, kFirst, kLater };  // of a recording among its session's kept recordings

  // Keeps a session's first and last recording: a new recording replaces the session's earlier last recording. To make
  // room, drops last recordings before first recordings, oldest first: this user's, then recordings of the user holding
  // most. A session's last recording never displaces its first. kNone: too large for the user's share, beside the
  // session's first.
  Place Add(uint64_t refusal, SessionId session, const UserKey& user, HeapSnapshot recording) ABSL_LOCKS_EXCLUDED(mu_);

  // nullptr: never recorded, or dropped to make room.
  std::shared_ptr<const HeapSnapshot> Find(uint64_t refusal) const ABSL_LOCKS_EXCLUDED(mu_);
  // Refusals with kept recordings of the session, at most two, in order.
  std::vector<uint64_t> Of(SessionId session) const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Kept {
    SessionId session{};
    UserKey user;
    Place place = Place::kFirst;  // kLater: the session's first recording is kept, too
    uint64_t bytes = 0;
    std::shared_ptr<const HeapSnapshot> recording;
  };
  using ByRefusal = std::map<uint64_t, Kept>;

  // Returns the next recording to drop; end(): none left. Never returns `first`.
  ByRefusal::iterator NextToDrop(const UserKey& user, ByRefusal::iterator first) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Bytes of `user`'s recordings that may be dropped for a session whose first recording is `first`.
  uint64_t DroppableBytes(const UserKey& user, ByRefusal::iterator first) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  ByRefusal::iterator Drop(ByRefusal::iterator it) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  mutable Mutex mu_;
  ByRefusal kept_ ABSL_GUARDED_BY(mu_);
  std::map<UserKey, uint64_t> of_user_ ABSL_GUARDED_BY(mu_);  // bytes
  uint64_t bytes_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_OOM_REFUSAL_RECORDINGS_H_
