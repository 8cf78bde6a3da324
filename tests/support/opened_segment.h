// SPDX-License-Identifier: Apache-2.0
//
// Opens a segment by hand, for tests that use the protocol directly.
#ifndef VRAMBROKER_TESTS_SUPPORT_OPENED_SEGMENT_H_
#define VRAMBROKER_TESTS_SUPPORT_OPENED_SEGMENT_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "allocator/device/device.h"
#include "proto/vrambroker/v1/types.pb.h"

namespace vrambroker::testing_support {

// The destructor closes the segment. The class is move-only.
class OpenedSegment {
 public:
  // `uuid` names the daemon's device; `dir` is the daemon's directory.
  static absl::StatusOr<OpenedSegment> Open(const std::string& dir, const std::string& uuid,
                                            const v1::SegmentHandle& handle, uint64_t bytes);
  OpenedSegment(OpenedSegment&& other) noexcept = default;
  OpenedSegment& operator=(OpenedSegment&& other) = delete;
  ~OpenedSegment();

  // Fill() and Holds() use the patterns of util.h, over the whole segment.
  void Fill(uint64_t seed);
  bool Holds(uint64_t seed) const;

 private:
  OpenedSegment(std::unique_ptr<Device> device, void* memory, uint64_t bytes)
      : device_(std::move(device)), memory_(memory), bytes_(bytes) {}

  std::unique_ptr<Device> device_;
  void* memory_;
  uint64_t bytes_;
};

}  // namespace vrambroker::testing_support

#endif  // VRAMBROKER_TESTS_SUPPORT_OPENED_SEGMENT_H_
