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
// InvalidArgument for a bad name. An empty name is fine.
absl::Status CheckName(absl::string_view name);

struct CleanedName {
  std::string name;
  std::string note;  // for people, if the name differs from the name asked for
};
// Returns a name accepted by CheckName(): _ in place of each character not allowed, cut at the bound.
CleanedName CleanName(absl::string_view name);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_BASE_NAMES_H_
