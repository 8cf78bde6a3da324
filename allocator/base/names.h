// SPDX-License-Identifier: Apache-2.0
//
// Names of sessions, tenants and rules: at most 63 letters, digits and . _ - / : @
#ifndef VRAMBROKER_ALLOCATOR_BASE_NAMES_H_
#define VRAMBROKER_ALLOCATOR_BASE_NAMES_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace vrambroker {

bool IsNameCharacter(char c);
// InvalidArgument. An empty name is well.
absl::Status CheckName(absl::string_view name);

struct CleanedName {
  std::string name;
  std::string note;  // for people, where it is not the one that was asked for
};
// A name that CheckName() takes: _ for each other character, cut at the bound.
CleanedName CleanName(absl::string_view name);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_BASE_NAMES_H_
