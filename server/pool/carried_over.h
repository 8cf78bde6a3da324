// SPDX-License-Identifier: Apache-2.0
//
// CarriedOver: segments still held by processes from an earlier run of the daemon. The earlier run took them from the
// driver; the current run can neither hand them on nor free them. Charges stay until no process holds the segments.
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

// A segment carried over, as declared by a client.
struct CarriedSegment {
  uint64_t id = 0;  // chosen by the client, for reporting the segment closed
  uint64_t bytes = 0;
  uint64_t file_device = 0;  // identity of the file; 0: none
  uint64_t file_inode = 0;
};

// A plain container, not thread-safe.
class CarriedOver {
 public:
  // A charge or uncharge to make.
  struct Change {
    SessionId session{};             // kNoSession: the share alone, or the device
    std::optional<ShareId> share{};  // of the session, or else of the holder; none: not known
    uint64_t bytes = 0;
    bool is_charged = false;
  };
  using Changes = std::vector<Change>;  // to be made in order

  // Holdings of a process or session, for people.
  struct Holding {
    SessionId session{};
    uint64_t bytes = 0;
    uint64_t segments = 0;
    std::vector<ProcessId> holders;  // without a session: openers at the last look
  };

  struct Segment {
    uint64_t number = 0;  // for display; not unique
    SessionId session{};
    uint64_t bytes = 0;
  };

  // A session holding carried-over segments, and the share to charge after the session's end.
  struct Holder {
    SessionId session{};  // kNoSession: only the share is known
    ShareId share;
  };

  // Takes in `segments`, all files held by processes now. `session_of` maps a process to its session, or its share.
  Changes Found(const std::vector<LeftSegment>& segments,
                absl::FunctionRef<std::optional<Holder>(const ProcessId&)> session_of);
  // Gives segments of the process without a session to the holder's session. Without a session, charges the segments to
  // the holder's share.
  Changes Opened(const Holder& holder, const ProcessId& process);
  // Charges segments of a closed claim to the share charged before the claim.
  Changes ClaimClosed(ClaimId claim);
  // Takes in segments declared by the session's client, `process`. Declaring assigns files seen by the daemon in the
  // process to the session, among several sessions of the process. Unseen segments are believed, up to `most_bytes`.
  Changes Declared(const Holder& holder, const ProcessId& process, absl::Span<const CarriedSegment> segments,
                   uint64_t most_bytes);
  // Begins a full declaration by the session's client.
  void BeginDeclaration(SessionId session);
  // Ends the declaration: segments declared earlier but not since BeginDeclaration() are freed.
  Changes EndDeclaration(SessionId session);
  // Takes in the client's report that it has closed the segments. For files, schedules a look.
  Changes Freed(SessionId session, absl::Span<const uint64_t> ids);
  // Handles the end of the session. Its files belong to no session until a look finds them gone; with `goes_on`, so do
  // its remaining segments, since the process keeps everything.
  Changes Closed(SessionId session, bool goes_on = false);

  // Time of the next look for files; nullopt when there are no files or a look is under way.
  std::optional<SteadyTime> next_look() const;
  // Starts a look; Found() takes the result. Looks never overlap.
  void StartLook();
  // Call when the look has failed: ends the waiting for segments reported as closed.
  void CannotTell();
  void EndLook(SteadyTime now);
  // Call when some segments may be gone by now.
  void LookSoon() { look_soon_ = true; }
  // Whether a segment was reported as closed by the session's client, with no look confirming or refuting the report
  // yet. Reports about a segment once found open are no longer believed.
  bool IsClosing(SessionId session) const;
  // Whether segments may be gone, and a look is due soon or under way.
  bool is_settling() const { return seen_ > 0 && (look_soon_ || is_looking_); }

  uint64_t bytes() const { return bytes_; }
  // Part of bytes() known only from clients' declarations.
  uint64_t declared_bytes() const { return declared_bytes_; }
  std::vector<Holding> Holdings() const;
  std::vector<Segment> Segments() const;

 private:
  struct Entry {
    uint64_t bytes = 0;
    SessionId session = kNoSession;
    std::optional<ShareId> share{};
    std::optional<ShareId> share_before{};  // charged again once the claim in `share` is closed
    std::optional<uint64_t> id{};           // chosen by the session; none: not declared
    bool is_seen = false;                   // in a process, by the daemon
    bool is_missed = false;                 // not seen in the last look
    uint64_t closed_before = 0;  // number of the first look after the client reported the file closed; 0: no report
    bool is_doubted = false;     // reported closed, but found open
    std::vector<ProcessId> holders{};  // in the last look
  };
  enum class Kind { kFile, kSaid };
  using Key = std::tuple<Kind, uint64_t, uint64_t>;  // device and inode of a file, or session and id
  using Entries = absl::btree_map<Key, Entry>;

  void Charge(const Entry& entry, Changes& changes);
  void Uncharge(const Entry& entry, Changes& changes);
  void MoveTo(SessionId session, const std::optional<ShareId>& share, Entry& entry, Changes& changes);
  void Name(const Key& key, Entry& entry, uint64_t id);
  void Unname(Entry& entry);
  Entries::iterator Remove(Entries::iterator it, Changes& changes);

  Entries entries_;
  absl::btree_map<std::pair<SessionId, uint64_t>, Key> by_id_;  // declared entries
  // Subset of by_id_ not yet declared again in the session's current declaration.
  absl::btree_set<std::pair<SessionId, uint64_t>> unconfirmed_;
  absl::btree_set<std::pair<SessionId, uint64_t>> closing_;  // entries with a `closed_before`
  size_t seen_ = 0;                                          // number of seen entries
  uint64_t bytes_ = 0;
  uint64_t declared_bytes_ = 0;
  uint64_t looks_ = 0;  // number of looks begun
  SteadyTime looked_ = SteadyTime::min();
  SteadyTime::duration soon_ = std::chrono::milliseconds(20);
  bool look_soon_ = false;
  bool is_looking_ = false;
  bool was_asked_for_ = false;  // for the current or last look
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_POOL_CARRIED_OVER_H_
