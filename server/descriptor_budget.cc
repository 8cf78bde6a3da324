// SPDX-License-Identifier: Apache-2.0
#include "server/descriptor_budget.h"

#include <algorithm>

namespace vrambroker {
namespace {

constexpr size_t kOfAConnection = 3;  // gRPC's, the one that the event loop watches, and the caller's pidfd
constexpr size_t kOfAFetcher = 2;

}  // namespace

DescriptorBudget DescriptorBudget::Of(size_t limit, size_t max_connections_per_uid) {
  DescriptorBudget budget{.limit = limit,
                          .connections = std::max<size_t>(limit / 2 / kOfAConnection, 2),
                          .fetchers = std::max<size_t>(limit / 8 / kOfAFetcher, 2)};
  budget.for_root = budget.connections / 16 + 1;
  const size_t others = budget.connections - budget.for_root;
  budget.connections_per_uid = max_connections_per_uid > 0 ? std::min(max_connections_per_uid, others)
                                                           : std::clamp<size_t>(others / 2, 1, kMaxPerUid);
  budget.fetchers_per_uid = std::min(budget.fetchers / 2, kMaxPerUid);
  return budget;
}

}  // namespace vrambroker
