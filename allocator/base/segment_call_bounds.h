// SPDX-License-Identifier: Apache-2.0
//
// Bounds of a v1::SegmentCall and its answer, for both ends of the descriptor socket.
#ifndef VRAMBROKER_ALLOCATOR_BASE_SEGMENT_CALL_BOUNDS_H_
#define VRAMBROKER_ALLOCATOR_BASE_SEGMENT_CALL_BOUNDS_H_

#include <cstddef>

namespace vrambroker {

inline constexpr size_t kMaxSegmentCallBytes = 1024;
inline constexpr int kMaxSegmentCallIds = 64;            // of returned segments
inline constexpr size_t kMaxSegmentCallDescriptors = 8;  // in the answer

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_BASE_SEGMENT_CALL_BOUNDS_H_
