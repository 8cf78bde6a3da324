// SPDX-License-Identifier: Apache-2.0
//
// What operators read, as JSON: the keys are those of `vramctl --format=json`.
#ifndef VRAMBROKER_ALLOCATOR_WIRE_ADMIN_JSON_H_
#define VRAMBROKER_ALLOCATOR_WIRE_ADMIN_JSON_H_

#include <google/protobuf/timestamp.pb.h>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/time/time.h"
#include "vrambroker/v1/admin.pb.h"
#include "vrambroker/v1/types.pb.h"

namespace vrambroker {

// On one line, or with `indent` spaces for each level. Never throws for a text: bytes that are not UTF-8 are replaced.
// Whatever holds names, paths or other text from outside is written with this, not with dump().
std::string JsonText(const nlohmann::ordered_json& json, int indent = -1);

// Texts are put in as they are: see JsonText().
nlohmann::ordered_json ToJson(const v1::Session& session);
nlohmann::ordered_json ToJson(const v1::Claim& claim);
nlohmann::ordered_json ToJson(const v1::OutOfMemoryEvent& event);
nlohmann::ordered_json ToJson(const v1::OutOfMemory& oom);  // of OutOfMemoryJson()
// Over all sessions.
struct DeviceSums {
  uint64_t allocated_bytes = 0;
  uint64_t leased_bytes = 0;       // what they hold
  uint64_t reclaimable_bytes = 0;  // of these, in wholly free segments
  uint64_t inactive_split_bytes = 0;
  uint64_t quarantined_bytes = 0;  // left behind, or of sessions that disconnected or were ended
  uint64_t left_behind_bytes = 0;  // of these, of no session
  uint64_t unknown_bytes = 0;      // of what they hold: see UnknownBytes()
};
nlohmann::ordered_json ToJson(const v1::Device& device, const DeviceSums& sums);

// What can be given to somebody now. An older daemon does not say: then what is not held, and what it caches.
uint64_t FreeBytes(const v1::Device& device);

// What the session carries over and its allocator, which is the daemon's, does not know: neither allocated nor free. 0
// for one that leases, whose client counts all that it holds.
uint64_t UnknownBytes(const v1::SessionDevice& device);

absl::Time TimeOf(const google::protobuf::Timestamp& timestamp);
// "active", "disconnected" or "ended".
const char* StateName(v1::SessionState state);
// "active", "draining" or "revoked".
const char* StateName(v1::ClaimState state);
// "cuda" or "host".
const char* KindName(v1::DeviceKind kind);
const char* ProcessKindName(v1::DeviceProcess::Kind kind);  // "daemon", "client", "uncounted"

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_WIRE_ADMIN_JSON_H_
