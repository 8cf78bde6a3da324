// SPDX-License-Identifier: Apache-2.0
//
// How operators name a session: vramctl's SESSION, and `session=` in the daemon's web addresses.
#ifndef VRAMBROKER_ALLOCATOR_WIRE_SESSION_REF_H_
#define VRAMBROKER_ALLOCATOR_WIRE_SESSION_REF_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "vrambroker/v1/admin.pb.h"

namespace vrambroker {

// Reads "id:5" as an id, "name:" and the rest as a name. "5" is either: the daemon refuses "5" if two sessions match.
// Everything else is a name. Thread-safe, like all functions here.
v1::SessionRef ParseSessionRef(absl::string_view text);

// Refers to the session with the id, regardless of names.
v1::SessionRef SessionRefOf(uint64_t id);

// Writes a session's name in an unambiguous form: "trainer", "name:5".
std::string SessionText(absl::string_view name);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_WIRE_SESSION_REF_H_
