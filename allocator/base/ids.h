// SPDX-License-Identifier: Apache-2.0
//
// Identifiers that do not mix: Free(session, block) the wrong way round does not compile.
// 0 is never a valid id. Ids are never reused while the daemon lives.
#ifndef VRAMBROKER_ALLOCATOR_BASE_IDS_H_
#define VRAMBROKER_ALLOCATOR_BASE_IDS_H_

#include <cstdint>

namespace vrambroker {

enum class SegmentId : uint64_t {};
enum class BlockId : uint64_t {};
enum class SessionId : uint64_t {};
enum class ClaimId : uint64_t {};

// The plain number, for messages and logs.
template <typename Id>
constexpr uint64_t Raw(Id id) {
  return static_cast<uint64_t>(id);
}

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_BASE_IDS_H_
