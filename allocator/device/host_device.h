// SPDX-License-Identifier: Apache-2.0
//
// The `host` device: segments are sealed memory files (memfd) of ordinary memory, shared by passing descriptors.
// The whole product runs on it where there is no GPU. Pages are taken from the machine when they are first written.
#ifndef VRAMBROKER_ALLOCATOR_DEVICE_HOST_DEVICE_H_
#define VRAMBROKER_ALLOCATOR_DEVICE_HOST_DEVICE_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "allocator/device/device.h"
#include "allocator/device/segment_record.h"

namespace vrambroker {

// Half of this machine's (or this cgroup's) memory, in whole 2 MiB.
uint64_t DefaultHostBytes();

// The memory of this machine, or of its container when that is less.
uint64_t HostMemoryBytes();

// `total_bytes` is all that AllocateSegment may hand out together. A process that only opens handles passes 0.
// With `driver_latency`, allocating, freeing and zeroing take that much longer, as calls of a GPU's driver do.
// `owner` (letters and digits) is who owns the segments, also after a restart: FindLeftSegments() finds those of
// earlier devices of the same owner and ordinal. Without one it finds nothing. `record` is what those devices wrote,
// for a process that may not see who created a file (FindLeftFiles).
std::unique_ptr<Device> MakeHostDevice(int ordinal, uint64_t total_bytes,
                                       std::chrono::nanoseconds driver_latency = std::chrono::nanoseconds(0),
                                       const std::string& owner = "", std::unique_ptr<SegmentRecord> record = nullptr);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_DEVICE_HOST_DEVICE_H_
