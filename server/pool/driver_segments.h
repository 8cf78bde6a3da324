// SPDX-License-Identifier: Apache-2.0
//
// DriverSegments: a pool's segments on their way from and to the driver.
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

// Thread-safe. Calls marked (driver) may take milliseconds; during such a call neither side holds a lock.
class DriverSegments {
 public:
  // `device` outlives the object. Obtain() waits up to `free_timeout` for frees in progress at the driver.
  DriverSegments(SegmentOwner* device, std::chrono::milliseconds free_timeout)
      : device_(*device), free_timeout_(free_timeout) {}

  // Counts `bytes` as being obtained, ahead of Obtain().
  void StartObtaining(uint64_t bytes) ABSL_LOCKS_EXCLUDED(mu_);
  // (driver) Gets a segment of `bytes` for `tenant`. If the driver has none, frees the result of `take_idle` and asks
  // the driver once more. Afterwards the bytes no longer count as being obtained. ResourceExhausted, or another error
  // of the driver's. REQUIRES: StartObtaining() has counted the bytes, the caller has made room for them, and
  // `take_idle` passes its segments to StartFreeing().
  absl::StatusOr<DeviceSegment> Obtain(const std::string& tenant, uint64_t bytes,
                                       const std::function<std::vector<UnleasedSegment>()>& take_idle)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Uncounts `bytes` of StartObtaining() that will not be obtained.
  void GiveUp(uint64_t bytes) ABSL_LOCKS_EXCLUDED(mu_);

  // Counts the segments as being freed, ahead of Free().
  void StartFreeing(const std::vector<UnleasedSegment>& entries) ABSL_LOCKS_EXCLUDED(mu_);
  // (driver) Returns the bytes taken by the driver. Refused segments are kept for RetryFrees().
  uint64_t Free(const std::vector<UnleasedSegment>& entries) ABSL_LOCKS_EXCLUDED(mu_);
  // (driver) Waits until at most `bytes` are on their way back, no longer than Obtain() waits.
  void AwaitFrees(uint64_t bytes) ABSL_LOCKS_EXCLUDED(mu_);
  // (driver) Frees refused segments again. Returns the bytes taken by the driver now.
  uint64_t RetryFrees() ABSL_LOCKS_EXCLUDED(mu_);
  // Hands segments still refused by the driver over to the caller.
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
  absl::StatusOr<DeviceSegment> ObtainFromDriver(const std::string& tenant, uint64_t bytes,
                                                 const std::function<std::vector<UnleasedSegment>()>& take_idle)
      ABSL_LOCKS_EXCLUDED(mu_);
  // (driver) Returns whether the driver has taken the segment.
  bool FreeOne(const DeviceSegment& segment) ABSL_LOCKS_EXCLUDED(mu_);
  // (driver) Overwrites a new segment if it may hold bytes of another tenant.
  absl::Status Scrub(const std::string& tenant, const DeviceSegment& segment) ABSL_LOCKS_EXCLUDED(mu_);
  // Waits until more than `freed` segments have ever been given back. False when no free is in progress, or `deadline`
  // has passed.
  bool AwaitFree(uint64_t freed, SteadyTime deadline) ABSL_LOCKS_EXCLUDED(mu_);

  SegmentOwner& device_;
  const std::chrono::milliseconds free_timeout_;

  mutable Mutex mu_;
  CondVar freed_;  // counts_.freed has grown
  Counts counts_ ABSL_GUARDED_BY(mu_);
  std::vector<DeviceSegment> unfreed_ ABSL_GUARDED_BY(mu_);
  // Tenants of segments freed, or about to be: one tenant, or several.
  std::optional<std::string> freed_tenant_ ABSL_GUARDED_BY(mu_);
  bool freed_several_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_POOL_DRIVER_SEGMENTS_H_
