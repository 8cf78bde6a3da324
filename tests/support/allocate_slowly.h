// SPDX-License-Identifier: Apache-2.0
//
// AllocateSlowly() allocates for a remote session without a broker: the session's cache need not serve the request.
// Where memory is short, the session refuses the request, and waits for no other session.
#ifndef VRAMBROKER_TESTS_SUPPORT_ALLOCATE_SLOWLY_H_
#define VRAMBROKER_TESTS_SUPPORT_ALLOCATE_SLOWLY_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "allocator/heap/block_request.h"
#include "server/sessions/remote_session.h"

namespace vrambroker {

inline absl::StatusOr<Allocation> AllocateSlowly(RemoteSession& session, int device, uint64_t requested,
                                                 Stream stream = 0, ScopeId scope = 0) {
  if (absl::Status status = session.CheckMayAllocate(); !status.ok()) return status;
  BlockRequest request(&session.allocator(device), requested, stream, scope);
  const absl::Status refusal = session.RunUntilRefused(device, request);
  if (!refusal.ok()) request.Deny(refusal);
  return session.FinishAllocation(device, request);
}

}  // namespace vrambroker

#endif  // VRAMBROKER_TESTS_SUPPORT_ALLOCATE_SLOWLY_H_
