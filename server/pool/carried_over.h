// SPDX-License-Identifier: Apache-2.0
//
// CarriedOver: the segments that processes still hold from an earlier run of the daemon. That one took them from the
// driver; this one can neither give them to anybody nor give them back. They are charged all the same, until nobody
// holds them.
#ifndef VRAMBROKER_SERVER_POOL_CARRIED_OVER_H_
#define VRAMBROKER_SERVER_POOL_CARRIED_OVER_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/btree_set.h"
#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "allocator/base/ids.h"
#include "allocator/device/device.h"
#include "server/pool/idle_segments.h"
#include "server/pool/share.h"

namespace vrambroker {

inline constexpr SessionId kNoSession{};

// A segment that a client says it carries over.
struct CarriedSegment {
  uint64_t id = 0;  // the client's own, for saying that it has closed it
  uint64_t bytes = 0;
  uint64_t file_device = 0;  // which file it is; 0: none
  uint64_t file_inode = 0;
};

// A plain container, not thread-safe.
class CarriedOver {
 public:
  // Whose account is to be charged or uncharged.
  struct Change {
    SessionId session{};             // kNoSession: the share alone, or the device
    std::optional<ShareId> share{};  // of the session, or else of who holds it; none: not known
    uint64_t bytes = 0;
    bool is_charged = false;
  };
  using Changes = std::vector<Change>;  // to be made in this order

  // What one process or session holds, for people.
  struct Holding {
    SessionId session{};
    uint64_t bytes = 0;
    uint64_t segments = 0;
    std::vector<ProcessId> holders;  // of segments without a session: who had them open at the last look
  };

  struct Segment {
    uint64_t number = 0;  // to show; two may have the same
    SessionId session{};
    uint64_t bytes = 0;
  };

  // A session that holds some, and the share that they stay charged to when the session is no more.
  struct Holder {
    SessionId session{};  // kNoSession: the share alone is known
    ShareId share;
  };

  // These are all the files that processes hold now. `session_of` knows the session of a process, or its share.
  Changes Found(const std::vector<LeftSegment>& segments,
                absl::FunctionRef<std::optional<Holder>(const ProcessId&)> session_of);
  // A session of this process: what the process holds and no session has yet is its own. Or, without a session: it is
  // charged to the share.
  Changes Opened(const Holder& holder, const ProcessId& process);
  // The claim is no more: what processes hold is charged to whom it was before it was charged to the claim.
  Changes ClaimClosed(ClaimId claim);
  // The session's client, this process, says that it carries these. It tells files that the daemon has seen in that
  // process apart from those of other sessions of it. Anything else is believed, `most_bytes` of it at most.
  Changes Declared(const Holder& holder, const ProcessId& process, absl::Span<const CarriedSegment> segments,
                   uint64_t most_bytes);
  // The session's client begins to say anew all that it carries.
  void BeginDeclaration(SessionId session);
  // It has said all: what it said before and has not since then is freed.
  Changes EndDeclaration(SessionId session);
  // The client says that it has closed these. Files are looked for.
  Changes Freed(SessionId session, absl::Span<const uint64_t> ids);
  // The session is no more. Its files are nobody's until they are found to be gone; `goes_on`: so is the rest, since
  // its process keeps all of it.
  Changes Closed(SessionId session, bool goes_on = false);

  // When files are to be looked for; nullopt when there are none, or somebody looks.
  std::optional<SteadyTime> next_look() const;
  // Somebody looks. Found() tells what was found. One look at a time.
  void StartLook();
  // The look has failed: what is said to be closed is not waited for any more.
  void CannotTell();
  void EndLook(SteadyTime now);
  // Some may be gone by now.
  void LookSoon() { look_soon_ = true; }
  // The session's client says that it has closed some, and no look has confirmed or refuted that yet. A client is not
  // believed again about a segment that a look has found open.
  bool IsClosing(SessionId session) const;
  // Some were said to be gone, and that is still to be seen.
  bool is_settling() const { return seen_ > 0 && (look_soon_ || is_looking_); }

  uint64_t bytes() const { return bytes_; }
  // Of these, what is known only because clients say so.
  uint64_t declared_bytes() const { return declared_bytes_; }
  std::vector<Holding> Holdings() const;
  std::vector<Segment> Segments() const;

 private:
  struct Entry {
    uint64_t bytes = 0;
    SessionId session = kNoSession;
    std::optional<ShareId> share{};
    std::optional<ShareId> share_before{};  // it was a claim's
    std::optional<uint64_t> id{};           // what the session calls it, if it has declared it
    bool is_seen = false;                   // in a process, by the daemon
    bool is_missed = false;                 // not seen when it was last looked for
    uint64_t closed_before = 0;  // the client says that it closed it before this look began; 0: it has not said so
    bool is_doubted = false;     // it said so, and somebody had it open all the same
    std::vector<ProcessId> holders{};  // when it was last looked for
  };
  enum class Kind { kFile, kSaid };
  using Key = std::tuple<Kind, uint64_t, uint64_t>;  // a file's device and inode, or the session and its id
  using Entries = absl::btree_map<Key, Entry>;

  void Charge(const Entry& entry, Changes& changes);
  void Uncharge(const Entry& entry, Changes& changes);
  void MoveTo(SessionId session, const std::optional<ShareId>& share, Entry& entry, Changes& changes);
  void Name(const Key& key, Entry& entry, uint64_t id);
  void Unname(Entry& entry);
  Entries::iterator Remove(Entries::iterator it, Changes& changes);

  Entries entries_;
  absl::btree_map<std::pair<SessionId, uint64_t>, Key> by_id_;  // those that are declared
  // Of these, those that are not declared again, so far, in the declaration that the session has begun.
  absl::btree_set<std::pair<SessionId, uint64_t>> unconfirmed_;
  absl::btree_set<std::pair<SessionId, uint64_t>> closing_;  // those that have a `closed_before`
  size_t seen_ = 0;                                          // entries
  uint64_t bytes_ = 0;
  uint64_t declared_bytes_ = 0;
  uint64_t looks_ = 0;  // begun
  SteadyTime looked_ = SteadyTime::min();
  SteadyTime::duration soon_ = std::chrono::milliseconds(20);
  bool look_soon_ = false;
  bool is_looking_ = false;
  bool was_asked_for_ = false;  // the look under way, or the last one
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_POOL_CARRIED_OVER_H_
