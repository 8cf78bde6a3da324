// SPDX-License-Identifier: Apache-2.0
#include "server/queue/reclaim.h"

#include <algorithm>
#include <tuple>

#include "absl/container/flat_hash_map.h"
#include "server/base/saturating.h"

namespace vrambroker {
namespace {

uint64_t AboveGuarantee(const ReclaimCandidate& candidate) {
  return SaturatingSub(candidate.reserved_bytes, candidate.guarantee_bytes);
}

}  // namespace

std::vector<ReclaimVictim> ChooseVictims(const std::vector<ReclaimCandidate>& candidates, const Missing& missing) {
  struct Offer {
    const ReclaimCandidate* of;
    uint64_t bytes;
    uint64_t wanted = 0;
  };
  std::vector<Offer> offers;
  offers.reserve(candidates.size());
  absl::flat_hash_map<ShareId, uint64_t> left;  // bytes each share may still free for the device
  for (const ReclaimCandidate& candidate : candidates) {
    const uint64_t bytes = std::min(candidate.idle_bytes, AboveGuarantee(candidate));
    if (bytes > 0 && !candidate.is_slow) offers.push_back({.of = &candidate, .bytes = bytes});
    left.emplace(candidate.share, candidate.share == missing.share ? missing.from_share : candidate.share_bytes);
  }
  std::sort(offers.begin(), offers.end(), [](const Offer& a, const Offer& b) {
    return std::tuple(a.of->priority, b.bytes, a.of->session) < std::tuple(b.of->priority, a.bytes, b.of->session);
  });
  uint64_t in_share = missing.in_share;
  for (Offer& offer : offers) {
    if (offer.of->share != missing.share) continue;
    offer.wanted = std::min(offer.bytes, in_share);
    in_share -= offer.wanted;
  }
  uint64_t others = SaturatingSub(missing.bytes, missing.in_share - in_share);
  for (Offer& offer : offers) {
    uint64_t& of_share = left[offer.of->share];
    const uint64_t more = std::min({offer.bytes - offer.wanted, others, of_share});
    of_share -= more;
    offer.wanted += more;
    others -= more;
  }
  std::vector<ReclaimVictim> victims;
  for (const Offer& offer : offers) {
    if (offer.wanted > 0) victims.push_back({.session = offer.of->session, .bytes = offer.wanted});
  }
  return victims;
}

std::vector<ReclaimVictim> EveryVictim(const std::vector<ReclaimCandidate>& candidates, const Missing& missing) {
  std::vector<ReclaimVictim> victims;
  for (const ReclaimCandidate& candidate : candidates) {
    const uint64_t wanted = candidate.share == missing.share
                                ? std::max(std::min(missing.bytes, missing.from_share), missing.in_share)
                                : std::min(missing.bytes, candidate.share_bytes);
    const uint64_t bytes = std::min(wanted, AboveGuarantee(candidate));
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
