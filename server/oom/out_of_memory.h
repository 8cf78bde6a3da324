// SPDX-License-Identifier: Apache-2.0
//
// Refusals for lack of memory: the cause, the figures, the advice.
#ifndef VRAMBROKER_SERVER_OOM_OUT_OF_MEMORY_H_
#define VRAMBROKER_SERVER_OOM_OUT_OF_MEMORY_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "allocator/heap/fit_report.h"
#include "server/pool/segment_refusal.h"

namespace vrambroker {

namespace v1 {
class OutOfMemory;
}  // namespace v1

// Why unused memory of another session is not to be had.
enum class IdleWhy {
  kWithinGuarantee,  // given back, they would stay kept for it
  kInPartUsed,       // in segments that also hold used blocks
  kDidNotAnswer,     // it was asked to trim, and did not answer in time
  kDisconnected,     // its stream broke or it was ended: there is nobody to ask
  kNotAsked,         // nobody asked it to trim
  kKept              // it was asked to trim, and gave less
};

inline constexpr std::array<IdleWhy, 6> kIdleWhys = {IdleWhy::kWithinGuarantee, IdleWhy::kInPartUsed,
                                                     IdleWhy::kDidNotAnswer,    IdleWhy::kDisconnected,
                                                     IdleWhy::kNotAsked,        IdleWhy::kKept};

// All sizes are bytes.
struct OomReport {
  struct Holder {
    std::string client;
    uint64_t reserved_bytes = 0;
    uint64_t allocated_bytes = 0;
  };
  struct IdleHolder {
    std::string client;
    uint64_t idle_bytes = 0;
    IdleWhy why = IdleWhy::kNotAsked;
  };
  OomCause cause = OomCause::kCapacity;
  int device = 0;
  uint64_t requested_bytes = 0;
  uint64_t block_bytes = 0;  // requested_bytes, rounded
  uint64_t segment_bytes = 0;
  uint64_t limit_bytes = 0;
  uint64_t reserved_bytes = 0;
  uint64_t allocated_bytes = 0;
  uint64_t pool_free_bytes = 0;           // of the session, in the pool and stream that serve this request
  uint64_t largest_free_block_bytes = 0;  // of these
  uint64_t capacity_bytes = 0;
  uint64_t available_bytes = 0;  // capacity that is charged to nobody
  std::vector<Holder> largest_holders;
  uint64_t guarantee_bytes = 0;
  uint64_t unknown_bytes = 0;         // of a remote session: carried over, so that nobody knows what of it is in use
  uint64_t inactive_split_bytes = 0;  // of the session
  uint64_t kept_free_bytes = 0;       // of available_bytes: kept for other sessions' guarantees
  uint64_t device_idle_bytes = 0;     // held by the daemon for reuse, leased to nobody
  uint64_t outside_bytes = 0;         // of the capacity, what the driver does not have: see PoolStats
  uint64_t detached_bytes = 0;        // of sessions that disconnected or were ended: their processes live
  uint64_t left_behind_bytes = 0;     // of ended processes: PoolStats::quarantined_bytes
  uint64_t idle_elsewhere_bytes = 0;  // reserved by other sessions, and used by nobody
  std::vector<IdleHolder> idle_holders;
  bool held_back = false;          // what is free is kept for a request that has waited longer
  uint64_t waited_ms = 0;          // that the request waited for memory; 0: it did not
  std::string claim;               // the session's; empty: it is in none, and shares its user's limit
  bool is_in_by_socket = false;    // of the claim, so that an operator has created it
  uint64_t share_limit_bytes = 0;  // on what the sessions of the claim, or the user, have together; 0 of a user: none
  uint64_t share_used_bytes = 0;   // what they have, or are guaranteed
  bool names_others = false;       // what others hold was looked up: holders, unused, detached, left behind
  Holes holes;                     // of the session
  // Whether `holes` is the session's word. Clients of version 0.1 send none; what is reserved and not allocated counts.
  bool knows_holes = false;
  std::string scope;               // of the request, as the session names it
  std::vector<ScopeUse> scopes;    // LargestScopeUses() of the session's heap
  uint64_t refusal = 0;            // its number, from 1; 0: it is not counted
  bool is_recorded = false;        // what led to it is kept, see RefusalRecordings
  bool is_first_recorded = false;  // of its session
  // Of the session, where `device` is none of them.
  std::vector<uint32_t> named_devices{};
};

// What the session could still reserve, by each of its bounds; kNone where there is no such bound.
struct Rooms {
  static constexpr uint64_t kNone = ~uint64_t{0};
  uint64_t limit = kNone;
  uint64_t share = kNone;   // by the claim's limit, or user_limit
  uint64_t device = kNone;  // what it has and does not keep for others
  uint64_t least() const { return std::min({limit, share, device}); }
};
Rooms RoomsOf(const OomReport& report);
// The session's claim is of other devices.
bool HasNothingOfDevice(const OomReport& report);
// The same for a session that has reserved no more than it has allocated.
Rooms RoomsWithoutHoles(const OomReport& report);

// The least of them.
uint64_t RoomBytes(const OomReport& report);

// What of its guarantee the session does not hold.
uint64_t UnusedGuaranteeBytes(const OomReport& report);

// Detached and left behind: no other session can have it.
uint64_t QuarantinedBytes(const OomReport& report);

// Free bytes of the session that no trim returns.
uint64_t HoleBytes(const OomReport& report);

// Whether the claim's limit, or user_limit, is in the way, not the session's own limit. If both are: the one that still
// would be without the session's holes.
bool IsShareLimit(const OomReport& report);
// "user_limit", "the limit of claim train".
std::string ShareLimitName(const OomReport& report);

// The cause to name to the client, when `refusal` is what kept the session from growing. Pure. Fragmentation:
// without holes the block would fit, with them its segment does not. Then a higher limit, or more of the device, would
// only be one way to serve the request. If it would not fit even then, the cause is the bound that it exceeds, though
// with the holes it may meet another one first. Holes are ignored if a small block would fit and only the segment that
// such blocks share does not: holes elsewhere do not matter to it.
OomCause CauseOf(const OomReport& report, OomCause refusal);

// The cause, with the figures that decide it: what is said of it everywhere. At most kMaxExplanation bytes.
std::string Explanation(const OomReport& report);
inline constexpr size_t kMaxExplanation = 1000;

v1::OutOfMemory ToProto(const OomReport& report);

// ResourceExhausted with a message for people and a serialized vrambroker.v1.OutOfMemory as payload. As a call's status
// it takes at most kMaxRefusalMetadata: where figures are so large, or names so costly, that all of it would take more,
// the payload leaves out some of the blocks, segments and idle holders that it names, those with least first.
absl::Status OutOfMemoryError(const OomReport& report);
// A gRPC client accepts 8 KiB of metadata with a call's status. The remaining 1 KiB is for other keys.
inline constexpr size_t kMaxRefusalMetadata = size_t{7} << 10;

// BYTES of metadata that a refusal takes as a call's status: grpc-message, where gRPC makes three bytes of each that is
// no printable ASCII, and grpc-status-details-bin, which has the message again as it is, and is sent in base64.
size_t RefusalMetadataBytes(absl::string_view message, size_t payload_bytes);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_OOM_OUT_OF_MEMORY_H_
