// SPDX-License-Identifier: Apache-2.0
#include "allocator/wire/session_ref.h"

#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace vrambroker {
namespace {

// nullopt: not only digits, or too large for an id.
std::optional<uint64_t> ParseId(absl::string_view text) {
  uint64_t id = 0;
  const bool is_id = text.find_first_not_of("0123456789") == absl::string_view::npos && absl::SimpleAtoi(text, &id);
  return is_id ? std::optional(id) : std::nullopt;
}

}  // namespace

v1::SessionRef ParseSessionRef(absl::string_view text) {
  v1::SessionRef ref;
  absl::string_view rest = text;
  if (absl::ConsumePrefix(&rest, "name:")) {
    ref.set_name(std::string(rest));
    return ref;
  }
  if (absl::ConsumePrefix(&rest, "id:")) {
    // Names may begin with the prefix, as "id:abc".
    if (const std::optional<uint64_t> id = ParseId(rest); id.has_value()) return SessionRefOf(*id);
  }
  const std::optional<uint64_t> id = ParseId(text);
  if (!id.has_value()) {
    ref.set_name(std::string(text));
    return ref;
  }
  ref.set_id(*id);
  ref.set_or_name(std::string(text));
  return ref;
}

v1::SessionRef SessionRefOf(uint64_t id) {
  v1::SessionRef ref;
  ref.set_id(id);
  return ref;
}

std::string SessionText(absl::string_view name) {
  const v1::SessionRef ref = ParseSessionRef(name);
  const bool is_name = ref.has_name() && ref.name() == name;
  return is_name ? std::string(name) : absl::StrCat("name:", name);
}

}  // namespace vrambroker
