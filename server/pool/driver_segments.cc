// SPDX-License-Identifier: Apache-2.0
#include "server/pool/driver_segments.h"

#include <spdlog/spdlog.h>

#include <utility>
#include <variant>

#include "allocator/base/bytes.h"

namespace vrambroker {

// ---- From the driver ----

void DriverSegments::StartObtaining(uint64_t bytes) {
  MutexLock lock(mu_);
  counts_.obtaining_bytes += bytes;
}

void DriverSegments::GiveUp(uint64_t bytes) {
  MutexLock lock(mu_);
  counts_.obtaining_bytes -= bytes;
}

absl::StatusOr<DeviceSegment> DriverSegments::Obtain(const std::string& tenant, uint64_t bytes,
                                                     const std::function<std::vector<UnleasedSegment>()>& take_idle) {
  absl::StatusOr<DeviceSegment> obtained = ObtainFromDriver(tenant, bytes, take_idle);
  MutexLock lock(mu_);
  counts_.obtaining_bytes -= bytes;
  if (obtained.ok()) ++counts_.obtained;
  return obtained;
}

absl::StatusOr<DeviceSegment> DriverSegments::ObtainFromDriver(
    const std::string& tenant, uint64_t bytes, const std::function<std::vector<UnleasedSegment>()>& take_idle) {
  const SteadyTime deadline = std::chrono::steady_clock::now() + free_timeout_;
  uint64_t freed = counts().freed;
  absl::StatusOr<DeviceSegment> segment = device_.AllocateSegment(bytes);
  // Concurrent calls may still be freeing bytes the ledger counts as free: retry after each free.
  while (absl::IsResourceExhausted(segment.status()) && AwaitFree(freed, deadline)) {
    freed = counts().freed;
    segment = device_.AllocateSegment(bytes);
  }
  if (absl::IsResourceExhausted(segment.status())) {
    // A program outside the broker took device memory. Idle segments help.
    (void)Free(take_idle());
    (void)RetryFrees();
    segment = device_.AllocateSegment(bytes);
  }
  if (!segment.ok()) return segment.status();
  if (absl::Status status = Scrub(tenant, *segment); !status.ok()) {
    FreeOne(*segment);
    return status;
  }
  if (device_.properties().handles == HandleKind::kCudaIpc) {
    const absl::StatusOr<SegmentHandle> handle = device_.ExportSegment(*segment);
    if (!handle.ok()) {
      FreeOne(*segment);
      return handle.status();
    }
    segment->cuda_ipc = std::get<CudaIpcHandle>(*handle);
  }
  return segment;
}

// Call after the driver has given the segment: by then, freed_tenant_ includes its earlier owners.
absl::Status DriverSegments::Scrub(const std::string& tenant, const DeviceSegment& segment) {
  if (!device_.properties().keeps_freed_bytes) return absl::OkStatus();
  {
    MutexLock lock(mu_);
    if (!freed_several_ && freed_tenant_.value_or(tenant) == tenant) return absl::OkStatus();
  }
  return device_.Zero(segment, 0, segment.bytes);
}

// ---- Back to the driver ----

void DriverSegments::StartFreeing(const std::vector<UnleasedSegment>& entries) {
  MutexLock lock(mu_);
  for (const UnleasedSegment& entry : entries) {
    counts_.freeing_bytes += entry.segment.bytes;
    if (!freed_tenant_.has_value()) freed_tenant_ = entry.tenant;
    freed_several_ = freed_several_ || *freed_tenant_ != entry.tenant;
  }
}

uint64_t DriverSegments::Free(const std::vector<UnleasedSegment>& entries) {
  uint64_t taken = 0;
  for (const UnleasedSegment& entry : entries) {
    if (FreeOne(entry.segment)) taken += entry.segment.bytes;
    // Notify after each segment: a waiter may need no more.
    MutexLock lock(mu_);
    ++counts_.freed;
    counts_.freeing_bytes -= entry.segment.bytes;
    freed_.NotifyAll();
  }
  return taken;
}

bool DriverSegments::FreeOne(const DeviceSegment& segment) {
  const absl::Status status = device_.FreeSegment(segment);
  if (status.ok()) return true;
  spdlog::error("device={} cannot give a segment of {} back to the driver, will try again: {}",
                device_.properties().ordinal, FormatBytes(segment.bytes), status.ToString());
  MutexLock lock(mu_);
  unfreed_.push_back(segment);
  counts_.unfreed_bytes += segment.bytes;
  return false;
}

uint64_t DriverSegments::RetryFrees() {
  std::vector<DeviceSegment> refused;
  {
    MutexLock lock(mu_);
    refused.swap(unfreed_);
  }
  uint64_t taken = 0;
  for (const DeviceSegment& segment : refused) {
    const bool freed = device_.FreeSegment(segment).ok();
    MutexLock lock(mu_);
    if (freed) {
      taken += segment.bytes;
      counts_.unfreed_bytes -= segment.bytes;
    } else {
      unfreed_.push_back(segment);
    }
  }
  return taken;
}

void DriverSegments::AwaitFrees(uint64_t bytes) {
  const SteadyTime deadline = std::chrono::steady_clock::now() + free_timeout_;
  MutexLock lock(mu_);
  while (counts_.freeing_bytes > bytes && freed_.WaitUntil(mu_, deadline)) {
  }
}

bool DriverSegments::AwaitFree(uint64_t freed, SteadyTime deadline) {
  MutexLock lock(mu_);
  while (counts_.freed <= freed) {
    if (counts_.freeing_bytes == 0 || !freed_.WaitUntil(mu_, deadline)) return false;
  }
  return std::chrono::steady_clock::now() < deadline;
}

std::vector<DeviceSegment> DriverSegments::TakeUnfreed() {
  MutexLock lock(mu_);
  counts_.unfreed_bytes = 0;
  return std::exchange(unfreed_, {});
}

DriverSegments::Counts DriverSegments::counts() const {
  MutexLock lock(mu_);
  return counts_;
}

}  // namespace vrambroker
