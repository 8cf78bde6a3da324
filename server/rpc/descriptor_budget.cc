// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/descriptor_budget.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/base/fair_share.h"

namespace vrambroker {
namespace {

constexpr size_t kOfAConnection = 4;            // the client's, two between here and gRPC, and the caller's pidfd
constexpr size_t kOfADescriptorConnection = 2;  // the connection, and the caller's pidfd
constexpr size_t kOfAClaim = 4;                 // the claim's sockets, and its maker's pidfd

}  // namespace

DescriptorBudget DescriptorBudget::Of(size_t limit, size_t max_connections_per_uid) {
  DescriptorBudget budget{.limit = limit,
                          .connections = std::max<size_t>(limit / 2 / kOfAConnection, 2),
                          .max_per_uid = max_connections_per_uid > 0 ? max_connections_per_uid : kMaxPerUid,
                          .descriptor_connections = std::max<size_t>(limit / 8 / kOfADescriptorConnection, 2),
                          .counted_connections = std::max<size_t>(limit / 16, 2),
                          .own_claims = std::max<size_t>(limit / 16 / kOfAClaim, 2)};
  budget.for_root = budget.connections / 16 + 1;
  while (budget.connections_per_uid < budget.connections &&
         budget.Admit(budget.connections_per_uid, budget.connections_per_uid, /*privileged=*/false).ok()) {
    ++budget.connections_per_uid;
  }
  budget.descriptor_connections_per_uid = std::min(budget.descriptor_connections / 2, kMaxPerUid);
  return budget;
}

absl::Status DescriptorBudget::Admit(size_t open_of_user, size_t open_of_all, bool privileged) const {
  if (open_of_user >= max_per_uid) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the user has ", open_of_user, " open, the most that max_connections_per_uid allows"));
  }
  return AdmitTo(connections, for_root, open_of_user, open_of_all, privileged);
}

absl::Status DescriptorBudget::AdmitCounted(size_t open_of_user, size_t open_of_all, bool privileged) const {
  return AdmitTo(counted_connections, counted_connections / 16 + 1, open_of_user, open_of_all, privileged);
}

absl::Status DescriptorBudget::AdmitTo(size_t places, size_t kept, size_t open_of_user, size_t open_of_all,
                                       bool privileged) const {
  if (!privileged) places -= kept;
  const size_t free = places - std::min(places, open_of_all);
  if (free == 0) {
    return absl::ResourceExhaustedError(absl::StrCat("all users have ", open_of_all, " open, the most that ", limit,
                                                     " file descriptors allow; raise LimitNOFILE"));
  }
  if (MayTakeAnother(open_of_user, open_of_all, places) || (privileged && open_of_user < kept)) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("the user has ", open_of_user, " open, and ", free,
                   " are free: a user may have half as many as are "
                   "free, so that others get some; to allow more, raise LimitNOFILE, which is ",
                   limit));
}

}  // namespace vrambroker
