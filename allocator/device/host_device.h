// SPDX-License-Identifier: Apache-2.0
//
// The `host` device: segments are sealed memory files (memfd) of ordinary memory, shared by passing descriptors.
// Without a GPU the whole product runs on host devices. Pages are taken from the machine when first written.
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

// Returns half of the machine's (or the cgroup's) memory, in whole 2 MiB.
uint64_t DefaultHostBytes();

// Returns the memory of the machine, or of its container if less.
uint64_t HostMemoryBytes();

// Makes a host device. `total_bytes`: sum of all segments handed out by AllocateSegment() at a time; 0 for a process
// that only opens handles. `driver_latency`: extra time for allocating, freeing and zeroing, like calls of a GPU's
// driver. `owner` (letters and digits): owner of the segments, also after a restart. FindLeftSegments() finds segments
// of earlier devices with equal owner and ordinal; none without an owner. `record`: written by earlier devices, for a
// process that may not see the creator of a file (FindLeftFiles).
std::unique_ptr<Device> MakeHostDevice(int ordinal, uint64_t total_bytes,
                                       std::chrono::nanoseconds driver_latency = std::chrono::nanoseconds(0),
                                       const std::string& owner = "", std::unique_ptr<SegmentRecord> record = nullptr);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_DEVICE_HOST_DEVICE_H_
