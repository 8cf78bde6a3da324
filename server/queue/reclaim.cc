// SPDX-License-Identifier: Apache-2.0
#include "server/queue/reclaim.h"

#include <algorithm>
#include <tuple>

#include "server/base/saturating.h"

namespace vrambroker {
namespace {

uint64_t AboveGuarantee(const ReclaimCandidate& candidate) {
  return SaturatingSub(candidate.reserved_bytes, candidate.guarantee_bytes);
}

}  // namespace

std::vector<ReclaimVictim> ChooseVictims(const std::vector<ReclaimCandidate>& candidates, uint64_t wanted_bytes) {
  struct Offer {
    int priority;
    uint64_t bytes;
    SessionId session;
  };
  std::vector<Offer> offers;
  offers.reserve(candidates.size());
  for (const ReclaimCandidate& candidate : candidates) {
    const uint64_t bytes = std::min(candidate.idle_bytes, AboveGuarantee(candidate));
    if (bytes > 0 && !candidate.is_slow) offers.push_back({candidate.priority, bytes, candidate.session});
  }
  std::sort(offers.begin(), offers.end(), [](const Offer& a, const Offer& b) {
    return std::tuple(a.priority, b.bytes, a.session) < std::tuple(b.priority, a.bytes, b.session);
  });
  std::vector<ReclaimVictim> victims;
  for (const Offer& offer : offers) {
    if (wanted_bytes == 0) break;
    const uint64_t bytes = std::min(offer.bytes, wanted_bytes);
    victims.push_back({.session = offer.session, .bytes = bytes});
    wanted_bytes -= bytes;
  }
  return victims;
}

std::vector<ReclaimVictim> EveryVictim(const std::vector<ReclaimCandidate>& candidates, uint64_t wanted_bytes) {
  std::vector<ReclaimVictim> victims;
  for (const ReclaimCandidate& candidate : candidates) {
    const uint64_t bytes = std::min(wanted_bytes, AboveGuarantee(candidate));
    if (bytes > 0) victims.push_back({.session = candidate.session, .bytes = bytes});
  }
  return victims;
}

bool MayAskWithEverybody(const ReclaimCandidate& candidate, int priority, const std::optional<LastAsked>& last) {
  return !last.has_value() || candidate.priority <= priority;
}

bool MayAskAgain(const ReclaimCandidate& candidate, int priority, const std::optional<LastAsked>& last) {
  if (!last.has_value()) return true;
  if (!last->is_answered) return false;
  if (candidate.priority > priority) return !last->by_figures || last->is_long_ago;
  return last->has_given || last->is_long_ago || candidate.reserved_bytes != last->reserved_bytes ||
         candidate.idle_bytes != last->idle_bytes;
}

}  // namespace vrambroker
