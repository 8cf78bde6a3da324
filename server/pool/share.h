// SPDX-License-Identifier: Apache-2.0
//
// Share: what several accounts have of a device together: those of a claim, or those of a user that are in no claim.
#ifndef VRAMBROKER_SERVER_POOL_SHARE_H_
#define VRAMBROKER_SERVER_POOL_SHARE_H_

#include <sys/types.h>

#include <algorithm>
#include <cstdint>
#include <variant>

#include "allocator/base/ids.h"

namespace vrambroker {

using ShareId = std::variant<uid_t, ClaimId>;

// What the accounts of a share come to.
struct ShareStats {
  uint64_t used_bytes = 0;       // committed to its accounts, or charged to the share and to none of them any more
  uint64_t promised_bytes = 0;   // sum of its accounts' guarantees
  uint64_t guarantee_bytes = 0;  // of a claim: kept free for all of its accounts together
  uint64_t charged_bytes = 0;    // of the used ones: to its accounts, or to the share alone
  bool is_claim = false;         // that is open, whether it has something or not
  uint64_t peak_bytes = 0;       // of such a one: the most that was charged at a time

  // What the share takes of the device's capacity, whether it holds it or not.
  uint64_t committed_bytes() const { return std::max(used_bytes, guarantee_bytes); }
  uint64_t guaranteed_bytes() const { return std::max(promised_bytes, guarantee_bytes); }
  // What of its guarantee none of its accounts has.
  uint64_t unused_guarantee_bytes() const { return committed_bytes() - used_bytes; }
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_POOL_SHARE_H_
