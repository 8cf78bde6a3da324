// SPDX-License-Identifier: Apache-2.0
//
// DriverSegments: a pool's segments on their way from the driver and back to it.
#ifndef VRAMBROKER_SERVER_POOL_DRIVER_SEGMENTS_H_
#define VRAMBROKER_SERVER_POOL_DRIVER_SEGMENTS_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "allocator/base/mutex.h"
#include "allocator/device/device.h"
#include "server/base/steady_time.h"
#include "server/pool/idle_segments.h"

namespace vrambroker {

// Thread-safe. Calls marked (driver) may take milliseconds. They hold no lock meanwhile, and the caller holds none.
class DriverSegments {
 public:
  struct Obtained {
    DeviceSegment segment;
    std::optional<CudaIpcHandle> cuda_ipc;
  };

  // `device` outlives it. An Obtain() waits for frees that the driver is busy with until `free_timeout` has passed.
  DriverSegments(Device* device, std::chrono::milliseconds free_timeout)
      : device_(*device), free_timeout_(free_timeout) {}

  // Obtain() is to get so many bytes.
  void StartObtaining(uint64_t bytes) ABSL_LOCKS_EXCLUDED(mu_);
  // (driver) Gets a segment of `bytes` for `tenant`. If the driver has none, it first gets back what `take_idle`
  // returns, then it is asked once more. Afterwards the bytes no longer count as being obtained. ResourceExhausted, or
  // another error of the driver's. REQUIRES: StartObtaining() has counted the bytes, and the caller has made room for
  // them; `take_idle` has its segments counted by StartFreeing().
  absl::StatusOr<Obtained> Obtain(const std::string& tenant, uint64_t bytes,
                                  const std::function<std::vector<UnleasedSegment>()>& take_idle)
      ABSL_LOCKS_EXCLUDED(mu_);
  // So many bytes that StartObtaining() was told of are not obtained.
  void GiveUp(uint64_t bytes) ABSL_LOCKS_EXCLUDED(mu_);

  // Counts the segments as being freed. Free() is to get them.
  void StartFreeing(const std::vector<UnleasedSegment>& entries) ABSL_LOCKS_EXCLUDED(mu_);
  // (driver) Returns the bytes that the driver has taken. What it refuses is kept for RetryFrees().
  uint64_t Free(const std::vector<UnleasedSegment>& entries) ABSL_LOCKS_EXCLUDED(mu_);
  // (driver) Waits until no more than `bytes` are on their way back, for at most as long as an Obtain() does.
  void AwaitFrees(uint64_t bytes) ABSL_LOCKS_EXCLUDED(mu_);
  // (driver) Frees again what the driver has refused to take back. Returns the bytes that it has taken now.
  uint64_t RetryFrees() ABSL_LOCKS_EXCLUDED(mu_);
  // What it still refuses, which is the caller's from now on.
  std::vector<DeviceSegment> TakeUnfreed() ABSL_LOCKS_EXCLUDED(mu_);

  struct Counts {
    uint64_t obtaining_bytes = 0;  // not yet got
    uint64_t freeing_bytes = 0;    // on their way back
    uint64_t unfreed_bytes = 0;    // refused by the driver, so far
    uint64_t obtained = 0;         // COUNT of segments, ever
    uint64_t freed = 0;            // COUNT of segments, ever
  };
  Counts counts() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  absl::StatusOr<Obtained> ObtainFromDriver(const std::string& tenant, uint64_t bytes,
                                            const std::function<std::vector<UnleasedSegment>()>& take_idle)
      ABSL_LOCKS_EXCLUDED(mu_);
  // (driver) Whether the driver has taken it.
  bool FreeOne(const DeviceSegment& segment) ABSL_LOCKS_EXCLUDED(mu_);
  // (driver) Overwrites a new segment where it may hold bytes of another tenant.
  absl::Status Scrub(const std::string& tenant, const DeviceSegment& segment) ABSL_LOCKS_EXCLUDED(mu_);
  // Waits until more than `freed` segments have ever been given back. False when none is on its way, or `deadline` has
  // passed.
  bool AwaitFree(uint64_t freed, SteadyTime deadline) ABSL_LOCKS_EXCLUDED(mu_);

  Device& device_;
  const std::chrono::milliseconds free_timeout_;

  mutable Mutex mu_;
  CondVar freed_;  // counts_.freed has grown
  Counts counts_ ABSL_GUARDED_BY(mu_);
  std::vector<DeviceSegment> unfreed_ ABSL_GUARDED_BY(mu_);
  // Whose segments the driver has, or is about to have, back: of one tenant, or of several.
  std::optional<std::string> freed_tenant_ ABSL_GUARDED_BY(mu_);
  bool freed_several_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_POOL_DRIVER_SEGMENTS_H_
