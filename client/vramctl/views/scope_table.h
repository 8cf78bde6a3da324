// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_VRAMCTL_VIEWS_SCOPE_TABLE_H_
#define VRAMBROKER_CLIENT_VRAMCTL_VIEWS_SCOPE_TABLE_H_

#include <cstddef>
#include <string>
#include <vector>

#include "allocator/heap/scope_use.h"

namespace vrambroker::vramctl {

// Returns a table of the memory held by each scope, as lines. Shows at most `most` scopes; the last line counts the
// omitted scopes. Returns no lines if no scope was named. Without `has_peak`, the memory at the peak is unknown.
std::vector<std::string> ScopeLines(const std::vector<ScopeUse>& uses, size_t most, bool has_peak = true);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_SCOPE_TABLE_H_
