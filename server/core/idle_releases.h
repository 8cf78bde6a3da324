// SPDX-License-Identifier: Apache-2.0
//
// IdleReleases: gives the memory that no session holds back to the driver when an operator asks for it.
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

// Thread-safe. No call blocks: workers make the driver's calls, at most one for each device.
class IdleReleases {
 public:
  using Done = std::function<void(const absl::StatusOr<SegmentPool::Released>&)>;

  // `pools` by device. All outlive it, and its tasks.
  IdleReleases(std::vector<SegmentPool*> pools, Executor* workers);

  // Of `device`, or of all. `done` is called once, from any thread, when the driver has what was idle then: with the
  // sums, or with the error of a device that cannot be used, after the others are done. NotFound for an unknown device.
  void Release(std::optional<uint64_t> device, Done done) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  class Call;
  struct Device {
    bool is_busy = false;  // a worker is at it, or is to be
    std::vector<std::shared_ptr<Call>> waiting;
  };

  // (driver) Until nobody waits for the device.
  void Run(size_t device) ABSL_LOCKS_EXCLUDED(mu_);

  const std::vector<SegmentPool*> pools_;
  Executor& workers_;

  Mutex mu_;
  std::vector<Device> devices_ ABSL_GUARDED_BY(mu_);
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CORE_IDLE_RELEASES_H_
