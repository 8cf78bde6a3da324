// SPDX-License-Identifier: Apache-2.0
//
// Share: the part of a device used by several accounts together: a claim's, or a user's outside of claims.
#ifndef VRAMBROKER_SERVER_POOL_SHARE_H_
#define VRAMBROKER_SERVER_POOL_SHARE_H_

#include <sys/types.h>

#include <algorithm>
#include <cstdint>
#include <variant>

#include "allocator/base/ids.h"

namespace vrambroker {

using ShareId = std::variant<uid_t, ClaimId>;

// Sums over a share.
struct ShareStats {
  uint64_t used_bytes = 0;       // committed to its accounts, or charged to the share alone
  uint64_t promised_bytes = 0;   // sum of its accounts' guarantees
  uint64_t guarantee_bytes = 0;  // of a claim: kept free for all of its accounts together
  uint64_t charged_bytes = 0;    // of the used ones: to its accounts, or to the share alone
  bool is_claim = false;         // an open claim, empty or not
  uint64_t peak_bytes = 0;       // of an open claim: the highest charged_bytes so far

  // Bytes of the device's capacity taken by the share, held or not.
  uint64_t committed_bytes() const { return std::max(used_bytes, guarantee_bytes); }
  uint64_t guaranteed_bytes() const { return std::max(promised_bytes, guarantee_bytes); }
  // Part of the share's guarantee used by none of its accounts.
  uint64_t unused_guarantee_bytes() const { return committed_bytes() - used_bytes; }
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_POOL_SHARE_H_
