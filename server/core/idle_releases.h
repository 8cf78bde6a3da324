// SPDX-License-Identifier: Apache-2.0
//
// IdleReleases: gives idle memory, held by no session, back to the driver at an operator's request.
#ifndef VRAMBROKER_SERVER_CORE_IDLE_RELEASES_H_
#define VRAMBROKER_SERVER_CORE_IDLE_RELEASES_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "allocator/base/mutex.h"
#include "server/base/worker_pool.h"
#include "server/pool/segment_pool.h"

namespace vrambroker {

// Thread-safe. No call blocks: workers make the driver's calls, at most one per device at a time.
class IdleReleases {
 public:
  using Done = std::function<void(const absl::StatusOr<SegmentPool::Released>&)>;

  // `pools` are indexed by device. All arguments outlive the object and its tasks.
  IdleReleases(std::vector<SegmentPool*> pools, Executor* workers);

  // Releases idle memory of `device`, or of all devices. Calls `done` once, from any thread, when the driver holds all
  // memory idle at the call. `done` gets the sums, or the error of an unusable device after all devices are done.
  // NotFound for an unknown device.
  void Release(std::optional<uint64_t> device, Done done) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  class Call;
  struct Device {
    bool is_busy = false;  // a worker's task is queued or running
    std::vector<std::shared_ptr<Call>> waiting;
  };

  // (driver) Runs until no call waits for the device.
  void Run(size_t device) ABSL_LOCKS_EXCLUDED(mu_);

  const std::vector<SegmentPool*> pools_;
  Executor& workers_;

  Mutex mu_;
  std::vector<Device> devices_ ABSL_GUARDED_BY(mu_);
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CORE_IDLE_RELEASES_H_
