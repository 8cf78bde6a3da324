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

// Reason why unused memory of another session is unavailable.
enum class IdleWhy {
  kWithinGuarantee,  // would stay reserved for the session if given back
  kInPartUsed,       // lies in segments with used blocks
  kDidNotAnswer,     // the session was asked to trim, and did not answer in time
  kDisconnected,     // the session's stream broke or the session was ended: no client to ask
  kNotAsked,         // the session was not asked to trim
  kKept              // the session was asked to trim, and gave less
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
  uint64_t pool_free_bytes = 0;           // of the session, in the pool and stream serving the request
  uint64_t largest_free_block_bytes = 0;  // within pool_free_bytes
  uint64_t capacity_bytes = 0;
  uint64_t available_bytes = 0;  // uncharged capacity
  std::vector<Holder> largest_holders;
  uint64_t guarantee_bytes = 0;
  uint64_t unknown_bytes = 0;         // of a remote session: carried over, with unknown use
  uint64_t inactive_split_bytes = 0;  // of the session
  uint64_t kept_free_bytes = 0;       // part of available_bytes kept for other sessions' guarantees
  uint64_t device_idle_bytes = 0;     // held by the daemon for reuse, not leased
  uint64_t outside_bytes = 0;         // capacity missing from the driver: see PoolStats
  uint64_t detached_bytes = 0;        // of disconnected or ended sessions with live processes
  uint64_t left_behind_bytes = 0;     // of ended processes: PoolStats::quarantined_bytes
  uint64_t idle_elsewhere_bytes = 0;  // reserved by other sessions, and unused
  std::vector<IdleHolder> idle_holders;
  bool held_back = false;          // free memory is kept for a request that has waited longer
  uint64_t waited_ms = 0;          // the request's wait for memory; 0: did not wait
  std::string claim;               // the session's; empty: no claim, and the session shares its user's limit
  bool is_in_by_socket = false;    // the session entered the claim by its socket, so an operator created the claim
  uint64_t share_limit_bytes = 0;  // on all sessions of the claim, or the user, together; 0 for a user: no limit
  uint64_t share_used_bytes = 0;   // held by, or guaranteed to, the sessions sharing the limit
  bool names_others = false;       // other sessions' memory was looked up: holders, unused, detached, left behind
  Holes holes;                     // of the session
  // Whether the session reported `holes`. Clients of version 0.1 report none; reserved but unallocated bytes then count
  // as holes.
  bool knows_holes = false;
  std::string scope;               // of the request, as named by the session
  std::vector<ScopeUse> scopes;    // LargestScopeUses() of the session's heap
  uint64_t refusal = 0;            // number of the refusal, from 1; 0: not counted
  bool is_recorded = false;        // the preceding events are kept, see RefusalRecordings
  bool is_first_recorded = false;  // the session's first recording
  // Devices named by the session; set when `device` is not among them.
  std::vector<uint32_t> named_devices{};
};

// Bytes still reservable by the session, by each of its bounds; kNone for a missing bound.
struct Rooms {
  static constexpr uint64_t kNone = ~uint64_t{0};
  uint64_t limit = kNone;
  uint64_t share = kNone;   // by the claim's limit, or user_limit
  uint64_t device = kNone;  // available to the session, without bytes kept for guarantees
  uint64_t least() const { return std::min({limit, share, device}); }
};
Rooms RoomsOf(const OomReport& report);
// The session's claim covers only other devices.
bool HasNothingOfDevice(const OomReport& report);
// Returns RoomsOf() as if the session had reserved no more than it has allocated.
Rooms RoomsWithoutHoles(const OomReport& report);

// Smallest of the Rooms.
uint64_t RoomBytes(const OomReport& report);

// Part of the session's guarantee not reserved yet.
uint64_t UnusedGuaranteeBytes(const OomReport& report);

// Detached and left-behind bytes: unavailable to every other session.
uint64_t QuarantinedBytes(const OomReport& report);

// Free bytes of the session that trimming cannot return.
uint64_t HoleBytes(const OomReport& report);

// Whether the claim's limit, or user_limit, stands in the way, not the session's own limit. If both do, decides by the
// limit still exceeded without the session's holes.
bool IsShareLimit(const OomReport& report);
// Returns "user_limit" or "the limit of claim train".
std::string ShareLimitName(const OomReport& report);

// Returns the cause to report to the client; `refusal` is the bound that stopped the session from growing. Pure.
// Fragmentation: the block would fit if the session had no holes, but its segment does not fit with the holes. A higher
// limit, or more of the device, would then be only an alternative remedy. If the block does not fit even without holes,
// the cause is the bound exceeded without holes, although the holes may hit another bound first. Ignores holes when a
// small block would fit and only the segment shared by small blocks does not: holes elsewhere do not matter to the
// block.
OomCause CauseOf(const OomReport& report, OomCause refusal);

// Returns the cause with the deciding figures; every report of a refusal uses this text. At most kMaxExplanation bytes.
std::string Explanation(const OomReport& report);
inline constexpr size_t kMaxExplanation = 1000;

v1::OutOfMemory ToProto(const OomReport& report);

// Returns ResourceExhausted with a human-readable message and a serialized vrambroker.v1.OutOfMemory as payload. The
// status takes at most kMaxRefusalMetadata of metadata. To stay below the bound, the payload drops some of the named
// blocks, segments and idle holders, least significant first.
absl::Status OutOfMemoryError(const OomReport& report);
// A gRPC client accepts 8 KiB of metadata with a call's status. The remaining 1 KiB is for other keys.
inline constexpr size_t kMaxRefusalMetadata = size_t{7} << 10;

// Bytes of metadata taken by a refusal as a call's status. Counts grpc-message, where gRPC expands each byte outside
// printable ASCII to three bytes, and grpc-status-details-bin, a base64 text with a second, unexpanded copy of the
// message.
size_t RefusalMetadataBytes(absl::string_view message, size_t payload_bytes);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_OOM_OUT_OF_MEMORY_H_
