// SPDX-License-Identifier: Apache-2.0
#include "allocator/device/device.h"

#include "absl/strings/str_cat.h"
#include "allocator/base/segment_bytes.h"

namespace vrambroker {

absl::StatusOr<LeftSegments> SegmentOwner::FindLeftSegments() {
  return absl::UnimplementedError("this device does not tell what earlier owners have left");
}

absl::StatusOr<std::vector<GpuProcess>> SegmentOwner::FindProcesses() {
  return absl::UnimplementedError(
      absl::StrCat("a ", properties().kind, " device does not tell which processes use it"));
}

absl::StatusOr<SegmentHolders> SegmentOwner::FindHolders(absl::Span<const DeviceSegment> /*segments*/) {
  return absl::UnimplementedError(absl::StrCat("a ", properties().kind, " device cannot tell who holds its segments"));
}

absl::Status CheckSegmentBytes(uint64_t bytes) {
  if (bytes == 0 || bytes % kSegmentGranuleBytes != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("segment size ", bytes, " is not a positive multiple of ", kSegmentGranuleBytes, " bytes"));
  }
  return absl::OkStatus();
}

absl::Status CheckRange(const DeviceSegment& segment, uint64_t offset, uint64_t bytes) {
  if (offset > segment.bytes || bytes > segment.bytes - offset) {
    return absl::OutOfRangeError(
        absl::StrCat("bytes [", offset, ", +", bytes, ") are outside of a segment of ", segment.bytes, " bytes"));
  }
  return absl::OkStatus();
}

}  // namespace vrambroker
