// SPDX-License-Identifier: Apache-2.0
//
// Charges: accounting for sessions whose clients allocate directly from the driver.
#ifndef VRAMBROKER_SERVER_REQUESTS_CHARGES_H_
#define VRAMBROKER_SERVER_REQUESTS_CHARGES_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/pool/segment_pool.h"
#include "server/requests/memory_request.h"
#include "server/requests/refusals.h"
#include "server/requests/waiting_requests.h"
#include "server/sessions/counted_session.h"
#include "server/sessions/session.h"

namespace vrambroker {

// Thread-safe. No call blocks. FailedPrecondition for uncounted sessions, except in GetRoom(). NotFound for an unknown
// device, InvalidArgument unless `bytes` is a multiple of 2 MiB.
class Charges {
 public:
  using Done = std::function<void(absl::Status)>;

  // All arguments outlive the object. `pools` are indexed by device.
  Charges(std::vector<SegmentPool*> pools, std::function<SteadyTime()> clock, WaitingRequests* waiting,
          Refusals* refusals);

  // Charges `bytes` more. OutOfMemoryError() without memory: counted and logged if `options` asked other sessions for
  // memory, else the client may retry with may_reclaim. ResourceExhausted also when too many calls of the session wait.
  void Charge(const SessionPtr& session, uint64_t device, uint64_t bytes, const Done& done,
              const RequestOptions& options = {});
  // Errors as CountedSession::Uncharge().
  absl::Status Uncharge(const SessionPtr& session, uint64_t device, uint64_t bytes);
  // Declares memory (or 0 bytes) held by the client since before this run of the daemon. `resumes` and errors as
  // CountedSession::Declare().
  absl::Status Declare(const SessionPtr& session, uint64_t device, uint64_t bytes, uint64_t resumes);

  // Figures for programs to choose their sizes by: independent of other sessions' use. All in bytes. Aborted for an
  // ended session.
  struct Room {
    uint64_t limit = 0;
    uint64_t free = 0;  // of the session's limit and of the share's
    uint64_t charged = 0;
  };
  absl::StatusOr<Room> GetRoom(const SessionPtr& session, uint64_t device) const;

 private:
  class Request;

  absl::StatusOr<CountedSession*> Check(const SessionPtr& session, uint64_t device) const;

  const std::vector<SegmentPool*> pools_;
  const std::function<SteadyTime()> clock_;
  WaitingRequests& waiting_;
  Refusals& refusals_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_REQUESTS_CHARGES_H_
