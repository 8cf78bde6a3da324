// SPDX-License-Identifier: Apache-2.0
//
// How operators write which session they mean: vramctl's SESSION, and `session=` in the daemon's web addresses.
#ifndef VRAMBROKER_ALLOCATOR_WIRE_SESSION_REF_H_
#define VRAMBROKER_ALLOCATOR_WIRE_SESSION_REF_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "vrambroker/v1/admin.pb.h"

namespace vrambroker {

// "id:5" is an id, "name:" and what follows it a name. "5" is either: the daemon refuses it where it could mean two
// sessions. All else is a name. Thread-safe, as all of these.
v1::SessionRef ParseSessionRef(absl::string_view text);

// The session of this id, whatever sessions are named.
v1::SessionRef SessionRefOf(uint64_t id);

// How to write a session's name so that it is not taken for anything else: "trainer", "name:5".
std::string SessionText(absl::string_view name);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_WIRE_SESSION_REF_H_
