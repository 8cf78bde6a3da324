// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/views/scope_table.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "allocator/base/bytes.h"
#include "client/vramctl/views/bars.h"
#include "client/vramctl/views/output.h"

namespace vrambroker::vramctl {

std::vector<std::string> ScopeLines(const std::vector<ScopeUse>& uses, size_t most, bool has_peak) {
  if (uses.empty()) return {};
  std::vector<std::vector<std::string>> rows = {{">NOW", ">AT PEAK", ">BLOCKS", ">PINS HOLES", "SCOPE"}};
  for (const ScopeUse& use : uses) {
    if (rows.size() > most) break;
    rows.push_back({FormatBytes(use.allocated_bytes), FormatBytes(use.bytes_at_peak), absl::StrCat(use.blocks),
                    FormatBytes(use.pinned_hole_bytes), use.scope.empty() ? "(none)" : Printable(use.scope)});
  }
  if (!has_peak) {
    for (std::vector<std::string>& row : rows) row.erase(row.begin() + 1);
  }
  const std::string table = Table(rows);
  std::vector<std::string> lines = absl::StrSplit(absl::StripSuffix(table, "\n"), '\n');
  if (uses.size() > most) lines.push_back(absl::StrCat("and ", Counted(uses.size() - most, "scope"), " more"));
  return lines;
}

}  // namespace vrambroker::vramctl
