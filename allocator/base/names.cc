// SPDX-License-Identifier: Apache-2.0
#include "allocator/base/names.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "allocator/base/clean_name.h"

namespace vrambroker {
namespace {

constexpr size_t kMaxNameLength = NAME_BYTES - 1;

}  // namespace

bool IsNameCharacter(char c) {
  return name_allows(c) != 0;
}

absl::Status CheckName(absl::string_view name) {
  if (name.size() > kMaxNameLength) {
    return absl::InvalidArgumentError(
        absl::StrCat(name.size(), " characters; at most ", kMaxNameLength, " are allowed"));
  }
  if (!std::all_of(name.begin(), name.end(), IsNameCharacter)) {
    return absl::InvalidArgumentError("only letters, digits and . _ - / : @ are allowed");
  }
  return absl::OkStatus();
}

CleanedName CleanName(absl::string_view name) {
  char cleaned[NAME_BYTES];
  char note[NAME_NOTE_BYTES];
  const bool is_other = name_clean(name.data(), name.size(), cleaned, note) != 0;
  return {.name = cleaned, .note = is_other ? note : ""};
}

}  // namespace vrambroker
