// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_VRAMCTL_VIEWS_SCOPE_TABLE_H_
#define VRAMBROKER_CLIENT_VRAMCTL_VIEWS_SCOPE_TABLE_H_

#include <cstddef>
#include <string>
#include <vector>

#include "allocator/heap/scope_use.h"

namespace vrambroker::vramctl {

// A table of what each scope holds, as lines. It shows at most `most` scopes; its last line then counts the others.
// None where no scope was named. Without `has_peak` it is not known what each held at the peak.
std::vector<std::string> ScopeLines(const std::vector<ScopeUse>& uses, size_t most, bool has_peak = true);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_SCOPE_TABLE_H_
