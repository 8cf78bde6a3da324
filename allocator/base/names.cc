// SPDX-License-Identifier: Apache-2.0
#include "allocator/base/names.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace vrambroker {
namespace {

constexpr size_t kMaxNameLength = 63;

}  // namespace

bool IsNameCharacter(char c) {
  return absl::ascii_isalnum(static_cast<unsigned char>(c)) || absl::StrContains("._-/:@", absl::string_view(&c, 1));
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

}  // namespace vrambroker
