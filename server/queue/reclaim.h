// SPDX-License-Identifier: Apache-2.0
//
// Who is asked to give memory back when somebody else needs it.
#ifndef VRAMBROKER_SERVER_QUEUE_RECLAIM_H_
#define VRAMBROKER_SERVER_QUEUE_RECLAIM_H_

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "allocator/base/ids.h"
#include "server/pool/share.h"

namespace vrambroker {

// A session that holds memory of the device and can be asked.
struct ReclaimCandidate {
  SessionId session{};
  int priority = 0;
  uint64_t reserved_bytes = 0;
  uint64_t guarantee_bytes = 0;
  uint64_t idle_bytes = 0;  // of these, in segments that hold no block, by its last figures
  bool is_slow = false;     // it has been asked, and has not answered for a moment: others are asked instead, if any
  ShareId share{};
  // What its share uses and is not guaranteed: no more of it comes free for others, whatever its sessions give back.
  uint64_t share_bytes = std::numeric_limits<uint64_t>::max();
};

// What a request lacks.
struct Missing {
  uint64_t bytes = 0;     // of the device: anybody may give them back
  ShareId share{};        // of the request's session
  uint64_t in_share = 0;  // of the share's limit: what its own sessions have to give back
  // Of `bytes`, what its own sessions may give back: no more of theirs comes free.
  uint64_t from_share = std::numeric_limits<uint64_t>::max();

  bool is_nothing() const { return bytes == 0 && in_share == 0; }
};

struct ReclaimVictim {
  SessionId session{};
  uint64_t bytes = 0;

  friend bool operator==(const ReclaimVictim&, const ReclaimVictim&) = default;
};

// Who is to give how much back, so that it comes to what is missing, or as much as there is. Nobody is asked for more
// than is reclaimable, or below its guarantee, or its share's. Sessions of the lowest priority come first, among them
// the one with the most to give. Nobody waits for slow ones. What is missing in the share is asked for first: it counts
// for the device, too. Pure.
std::vector<ReclaimVictim> ChooseVictims(const std::vector<ReclaimCandidate>& candidates, const Missing& missing);

// The same when the figures say that nobody has enough: they may be a second old. Everybody above its guarantee is
// asked for all that is wanted, slow ones too: they may have more than they were asked for. Pure.
std::vector<ReclaimVictim> EveryVictim(const std::vector<ReclaimCandidate>& candidates, const Missing& missing);

// How a session was last asked for a request, what its figures said then, and what came of it.
struct LastAsked {
  uint64_t reserved_bytes = 0;
  uint64_t idle_bytes = 0;
  bool by_figures = false;  // as ChooseVictims() says; else with everybody
  bool is_answered = false;
  bool has_given = false;  // anything, by its answer
  bool is_long_ago = false;
};

// With everybody, for a request of this priority. One question is enough for a session of higher priority. Pure.
bool MayAskWithEverybody(const ReclaimCandidate& candidate, int priority, const std::optional<LastAsked>& last);

// By its figures, for a request of this priority that goes on waiting. A session that has given nothing the last time
// is asked when its figures change, or after a long time. One that is more important than the request is asked after a
// long time only: its memory may have become idle since its first answer. Pure.
bool MayAskAgain(const ReclaimCandidate& candidate, int priority, const std::optional<LastAsked>& last);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_QUEUE_RECLAIM_H_
