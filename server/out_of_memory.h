// SPDX-License-Identifier: Apache-2.0
//
// Refusals for lack of memory: the cause, the figures, the advice.
#ifndef VRAMBROKER_SERVER_OUT_OF_MEMORY_H_
#define VRAMBROKER_SERVER_OUT_OF_MEMORY_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "allocator/caching_allocator.h"

namespace vrambroker {

enum class OomCause { kLimit, kCapacity, kFragmentation, kLargerThanDevice };

inline constexpr std::array<OomCause, 4> kOomCauses = {OomCause::kLimit, OomCause::kCapacity, OomCause::kFragmentation,
                                                       OomCause::kLargerThanDevice};

// "limit", "capacity", "fragmentation", "larger_than_device": the `reason` of metrics and logs.
const char* OomCauseName(OomCause cause);

// All sizes are bytes.
struct OomReport {
  struct Holder {
    std::string client;
    uint64_t reserved_bytes = 0;
    uint64_t allocated_bytes = 0;
  };
  OomCause cause = OomCause::kCapacity;
  int device = 0;
  uint64_t requested_bytes = 0;
  uint64_t segment_bytes = 0;
  uint64_t limit_bytes = 0;
  uint64_t reserved_bytes = 0;
  uint64_t allocated_bytes = 0;
  uint64_t largest_free_block_bytes = 0;
  uint64_t capacity_bytes = 0;
  uint64_t available_bytes = 0;  // capacity that no session has reserved
  std::vector<Holder> largest_holders;
};

// What the SegmentPool answers when it cannot lease a segment: ResourceExhausted that carries its cause.
absl::Status SegmentRefused(OomCause cause, absl::string_view message);
// The cause that SegmentRefused() stored; nullopt for any other status.
std::optional<OomCause> SegmentRefusalCause(const absl::Status& status);

// The cause to name to the client. Pure. A session that has the bytes free, in the right pool, but in no block large
// enough, is told so, whatever kept it from growing.
OomCause FinalCause(OomCause refusal, const FitReport& fit);

// ResourceExhausted with a message for people and a serialized vrambroker.v1.OutOfMemory as payload.
absl::Status OutOfMemoryError(const OomReport& report);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_OUT_OF_MEMORY_H_
