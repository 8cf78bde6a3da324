// SPDX-License-Identifier: Apache-2.0
//
// Chooses the sessions to ask for memory when a request lacks some.
#ifndef VRAMBROKER_SERVER_QUEUE_RECLAIM_H_
#define VRAMBROKER_SERVER_QUEUE_RECLAIM_H_

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "allocator/base/ids.h"
#include "server/pool/share.h"

namespace vrambroker {

// A session holding memory of the device; can be asked to give memory back.
struct ReclaimCandidate {
  SessionId session{};
  int priority = 0;
  uint64_t reserved_bytes = 0;
  uint64_t guarantee_bytes = 0;
  uint64_t idle_bytes = 0;  // part of reserved_bytes in segments without blocks, per the last figures
  bool is_slow = false;     // has left a question unanswered for a moment: ask other sessions instead, if any
  ShareId share{};
  // Bytes used by the share beyond its guarantee: giving back more frees nothing outside the share.
  uint64_t share_bytes = std::numeric_limits<uint64_t>::max();
};

// Bytes missing for a request.
struct Missing {
  uint64_t bytes = 0;     // on the device: any session may give bytes back
  ShareId share{};        // share of the request's session
  uint64_t in_share = 0;  // under the share's limit: only its own sessions can give bytes back
  // Part of `bytes` obtainable from the share's own sessions: giving back more frees nothing.
  uint64_t from_share = std::numeric_limits<uint64_t>::max();

  bool is_nothing() const { return bytes == 0 && in_share == 0; }
};

struct ReclaimVictim {
  SessionId session{};
  uint64_t bytes = 0;

  friend bool operator==(const ReclaimVictim&, const ReclaimVictim&) = default;
};

// Chooses how much each session gives back, to cover the missing bytes or as much as is available. No session is asked
// for more than its reclaimable bytes, nor below its guarantee or its share's. Sessions of the lowest priority come
// first; within a priority, the session with the most to give. Slow sessions are skipped. Bytes missing in the share
// are asked for first, and count for the device, too. Pure.
std::vector<ReclaimVictim> ChooseVictims(const std::vector<ReclaimCandidate>& candidates, const Missing& missing);

// Fallback when no session has enough by its figures: figures may be a second old. Asks every session above its
// guarantee, slow or not, for all missing bytes: a session may hold more than it was asked for. Pure.
std::vector<ReclaimVictim> EveryVictim(const std::vector<ReclaimCandidate>& candidates, const Missing& missing);

// Last question to a session for a request: the session's figures then, and the outcome.
struct LastAsked {
  uint64_t reserved_bytes = 0;
  uint64_t idle_bytes = 0;
  bool by_figures = false;  // by ChooseVictims(); else by EveryVictim()
  bool is_answered = false;
  bool has_given = false;  // the answer gave something back
  bool is_long_ago = false;
};

// Whether EveryVictim() may include the session, for a request of this priority. A session of higher priority is asked
// only once. Pure.
bool MayAskWithEverybody(const ReclaimCandidate& candidate, int priority, const std::optional<LastAsked>& last);

// Whether ChooseVictims() may include the session again, for a waiting request of this priority. After giving nothing,
// a session is asked again when its figures change, or after a long time. Above the request's priority, a session asked
// by its figures is asked again only after a long time: its memory may have become idle since its first answer. Pure.
bool MayAskAgain(const ReclaimCandidate& candidate, int priority, const std::optional<LastAsked>& last);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_QUEUE_RECLAIM_H_
