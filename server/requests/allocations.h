// SPDX-License-Identifier: Apache-2.0
//
// Allocations: blocks for remote sessions.
#ifndef VRAMBROKER_SERVER_REQUESTS_ALLOCATIONS_H_
#define VRAMBROKER_SERVER_REQUESTS_ALLOCATIONS_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "allocator/base/ids.h"
#include "server/pool/segment_pool.h"
#include "server/requests/memory_request.h"
#include "server/requests/refusals.h"
#include "server/requests/waiting_requests.h"
#include "server/sessions/remote_session.h"
#include "server/sessions/session.h"

namespace vrambroker {

// Thread-safe. No call blocks.
class Allocations {
 public:
  using Done = std::function<void(absl::StatusOr<Allocation>)>;

  // All arguments outlive the object. `pools` are indexed by device.
  Allocations(std::vector<SegmentPool*> pools, std::function<SteadyTime()> clock, WaitingRequests* waiting,
              Refusals* refusals);

  // OutOfMemoryError() without memory; ResourceExhausted when too many calls of the session wait; InvalidArgument for 0
  // bytes; NotFound for an unknown device; FailedPrecondition for a leasing session.
  void Allocate(const SessionPtr& session, uint64_t device, uint64_t requested, Stream stream, const Done& done,
                const RequestOptions& options = {.may_reclaim = true});
  // Errors as RemoteSession::Free(); FailedPrecondition for a leasing session.
  absl::Status Free(const SessionPtr& session, absl::Span<const BlockId> blocks);

 private:
  class Request;

  const std::vector<SegmentPool*> pools_;
  const std::function<SteadyTime()> clock_;
  WaitingRequests& waiting_;
  Refusals& refusals_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_REQUESTS_ALLOCATIONS_H_
