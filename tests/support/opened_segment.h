// SPDX-License-Identifier: Apache-2.0
//
// A segment opened by hand, for tests that speak the protocol themselves.
#ifndef VRAMBROKER_TESTS_SUPPORT_OPENED_SEGMENT_H_
#define VRAMBROKER_TESTS_SUPPORT_OPENED_SEGMENT_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "allocator/device/device.h"
#include "proto/vrambroker/v1/types.pb.h"

namespace vrambroker::testing_support {

// Closed with this object. Move-only.
class OpenedSegment {
 public:
  // `uuid` of the daemon's device; `dir` is the daemon's.
  static absl::StatusOr<OpenedSegment> Open(const std::string& dir, const std::string& uuid,
                                            const v1::SegmentHandle& handle, uint64_t bytes);
  OpenedSegment(OpenedSegment&& other) noexcept = default;
  OpenedSegment& operator=(OpenedSegment&& other) = delete;
  ~OpenedSegment();

  // The patterns of util.h, over all of it.
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
