// SPDX-License-Identifier: Apache-2.0
//
// What operators read, as JSON: the keys are those of `vramctl --format=json`.
#ifndef VRAMBROKER_PROTO_ADMIN_JSON_H_
#define VRAMBROKER_PROTO_ADMIN_JSON_H_

#include <nlohmann/json.hpp>

#include "vrambroker/v1/admin.pb.h"
#include "vrambroker/v1/types.pb.h"

namespace vrambroker {

// Texts are written as they are: dump() with error_handler_t::replace, since names need not be UTF-8.
nlohmann::ordered_json ToJson(const v1::Session& session);
nlohmann::ordered_json ToJson(const v1::OutOfMemoryEvent& event);
nlohmann::ordered_json ToJson(const v1::OutOfMemory& oom);
// Over all sessions.
struct DeviceSums {
  uint64_t allocated_bytes = 0;
  uint64_t inactive_split_bytes = 0;
  uint64_t quarantined_bytes = 0;  // of disconnected and ended ones too
};
nlohmann::ordered_json ToJson(const v1::Device& device, const DeviceSums& sums);

// "active", "disconnected" or "ended".
const char* StateName(v1::SessionState state);
// "cuda" or "host".
const char* KindName(v1::DeviceKind kind);

}  // namespace vrambroker

#endif  // VRAMBROKER_PROTO_ADMIN_JSON_H_
