// SPDX-License-Identifier: Apache-2.0
//
// Leases: segments for leasing sessions, and segments still held by clients from an earlier run of the daemon.
#ifndef VRAMBROKER_SERVER_REQUESTS_LEASES_H_
#define VRAMBROKER_SERVER_REQUESTS_LEASES_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "allocator/base/ids.h"
#include "allocator/base/mutex.h"
#include "server/base/shared_timer.h"
#include "server/pool/segment_pool.h"
#include "server/requests/memory_request.h"
#include "server/requests/refusals.h"
#include "server/requests/waiting_requests.h"
#include "server/sessions/leased_session.h"
#include "server/sessions/session.h"

namespace vrambroker {

// Thread-safe. No call blocks.
class Leases {
 public:
  using Done = std::function<void(absl::StatusOr<std::vector<Lease>>)>;

  // All arguments outlive the object. `pools` are indexed by device.
  Leases(std::vector<SegmentPool*> pools, std::function<SteadyTime()> clock, WaitingRequests* waiting,
         Refusals* refusals, SharedTimer* timer);

  // Leases a segment for each of `sizes`, or none. OutOfMemoryError() names the cause, and is counted only when the
  // client reports through Refusals::Explain() that it mattered. ResourceExhausted when too many calls of the session
  // wait; InvalidArgument for sizes impossible for a segment; NotFound for an unknown device; FailedPrecondition for a
  // remote session.
  void LeaseSegments(const SessionPtr& session, uint64_t device, const std::vector<uint64_t>& sizes, const Done& done,
                     const RequestOptions& options = {});
  // Errors as LeasedSession::ReturnSegments(); NotFound for an unknown device, FailedPrecondition for a remote session.
  absl::Status ReturnSegments(const SessionPtr& session, uint64_t device, absl::Span<const SegmentId> segments);

  // Declares segments held by the session's client from an earlier run of the daemon, by device. A partial list unless
  // both `begins` and `ends` are set: see CarriedOver. NotFound for an unknown device, InvalidArgument for sizes
  // impossible for a segment; FailedPrecondition for a remote session.
  using CarriedByDevice = absl::btree_map<uint64_t, std::vector<CarriedSegment>>;
  absl::Status DeclareCarriedOver(const SessionPtr& session, const CarriedByDevice& segments, bool begins, bool ends);
  // The client has closed these segments, on any devices.
  void FreeCarriedOver(const SessionPtr& session, absl::Span<const uint64_t> ids);

  // The client reports that its device cannot open the daemon's memory. Logs the report; once per user, logs that CUDA
  // may not let another user's processes open the daemon's memory.
  void CannotOpen(const Session& session, int device, absl::string_view error) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  class Request;

  const std::vector<SegmentPool*> pools_;
  const std::function<SteadyTime()> clock_;
  WaitingRequests& waiting_;
  Refusals& refusals_;
  SharedTimer& timer_;

  Mutex mu_;  // guards only cannot_open_; no other lock is taken under it
  absl::flat_hash_set<uid_t> cannot_open_ ABSL_GUARDED_BY(mu_);  // logged users
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_REQUESTS_LEASES_H_
