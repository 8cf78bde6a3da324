// SPDX-License-Identifier: Apache-2.0
//
// Sizes common to devices and allocators.
#ifndef VRAMBROKER_ALLOCATOR_BASE_SEGMENT_BYTES_H_
#define VRAMBROKER_ALLOCATOR_BASE_SEGMENT_BYTES_H_

#include <cstdint>

#include "allocator/base/bytes.h"

namespace vrambroker {

inline constexpr uint64_t kSegmentGranuleBytes = 2_MiB;          // every segment is a multiple
inline constexpr uint64_t kMaxRequestBytes = uint64_t{1} << 60;  // requests from here on are refused unseen

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_BASE_SEGMENT_BYTES_H_
