// SPDX-License-Identifier: Apache-2.0
//
// Text from outside (arguments, paths, names) may be any bytes. JSON, protobuf and Prometheus take UTF-8 only.
#ifndef VRAMBROKER_ALLOCATOR_BASE_UTF8_H_
#define VRAMBROKER_ALLOCATOR_BASE_UTF8_H_

#include <cstddef>
#include <string>

#include "absl/strings/string_view.h"

namespace vrambroker {

// Thread-safe.
bool IsUtf8(absl::string_view text);

// Returns `text` with U+FFFD in place of each byte outside of a character.
std::string ToUtf8(absl::string_view text);

// Replaces each control character by `_`, to make text safe for a terminal or a log. Cuts after a whole character, at
// `most_bytes`.
std::string CleanText(absl::string_view text, size_t most_bytes);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_BASE_UTF8_H_
