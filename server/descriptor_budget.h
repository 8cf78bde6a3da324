// SPDX-License-Identifier: Apache-2.0
//
// DescriptorBudget: how users share the daemon's file descriptors. Half of them are for connections, an eighth is for
// the descriptor socket, and the rest for segments, sessions and the daemon itself.
#ifndef VRAMBROKER_SERVER_DESCRIPTOR_BUDGET_H_
#define VRAMBROKER_SERVER_DESCRIPTOR_BUDGET_H_

#include <cstddef>

namespace vrambroker {

struct DescriptorBudget {
  // The most that one user ever needs.
  static constexpr size_t kMaxPerUid = 2048;

  // For `limit` descriptors. `max_connections_per_uid`: 0 for what the limit has room for.
  static DescriptorBudget Of(size_t limit, size_t max_connections_per_uid);

  size_t limit = 0;
  size_t connections = 0;  // in all
  size_t connections_per_uid = 0;
  size_t for_root = 0;  // of `connections`, for root and the daemon's own user
  size_t fetchers = 0;  // connections to the descriptor socket, in all
  size_t fetchers_per_uid = 0;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_DESCRIPTOR_BUDGET_H_
