// SPDX-License-Identifier: Apache-2.0
//
// JSON for operators: the keys are those of `vramctl --format=json`.
#ifndef VRAMBROKER_ALLOCATOR_WIRE_ADMIN_JSON_H_
#define VRAMBROKER_ALLOCATOR_WIRE_ADMIN_JSON_H_

#include <google/protobuf/timestamp.pb.h>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/time/time.h"
#include "vrambroker/v1/admin.pb.h"
#include "vrambroker/v1/types.pb.h"

namespace vrambroker {

// Prints on one line, or with `indent` spaces for each level. Never throws for a text: bytes other than UTF-8 are
// replaced. Names, paths and any text from outside must be written with JsonText(), not with dump().
std::string JsonText(const nlohmann::ordered_json& json, int indent = -1);

// Convert messages; texts are put in unchanged: see JsonText().
nlohmann::ordered_json ToJson(const v1::Session& session);
nlohmann::ordered_json ToJson(const v1::Claim& claim);
nlohmann::ordered_json ToJson(const v1::OutOfMemoryEvent& event);
nlohmann::ordered_json ToJson(const v1::OutOfMemory& oom);  // of OutOfMemoryJson()
// Sums over all sessions.
struct DeviceSums {
  uint64_t allocated_bytes = 0;
  uint64_t leased_bytes = 0;       // held by sessions
  uint64_t reclaimable_bytes = 0;  // part of leased_bytes, in wholly free segments
  uint64_t inactive_split_bytes = 0;
  uint64_t quarantined_bytes = 0;  // left behind, or of sessions that disconnected or were ended
  uint64_t left_behind_bytes = 0;  // part of quarantined_bytes, of no session
  uint64_t unknown_bytes = 0;      // part of leased_bytes: see UnknownBytes()
};
nlohmann::ordered_json ToJson(const v1::Device& device, const DeviceSums& sums);

// Bytes available to clients now. From an older daemon, without such a report: all bytes not held, and the daemon's
// cache.
uint64_t FreeBytes(const v1::Device& device);

// Bytes carried over by the session and unknown to the allocator in the daemon: neither allocated nor free. 0 for a
// leasing session: the client counts everything held.
uint64_t UnknownBytes(const v1::SessionDevice& device);

absl::Time TimeOf(const google::protobuf::Timestamp& timestamp);
// "active", "disconnected" or "ended".
const char* StateName(v1::SessionState state);
// "active", "draining" or "revoked".
const char* StateName(v1::ClaimState state);
const char* ProcessKindName(v1::DeviceProcess::Kind kind);  // "daemon", "client", "uncounted"

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_WIRE_ADMIN_JSON_H_
