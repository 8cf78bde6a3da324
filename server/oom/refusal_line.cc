// SPDX-License-Identifier: Apache-2.0
#include "server/oom/refusal_line.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "allocator/base/bytes.h"
#include "server/oom/oom_advice.h"

namespace vrambroker {
namespace {

std::string Blocks(uint64_t count) {
  return absl::StrCat(count, count == 1 ? " block" : " blocks");
}

// Uses the wording of `vramctl ooms`.
std::string PinnedText(const PinnedSegment& pinned) {
  std::string text =
      absl::StrCat("segment ", absl::Hex(pinned.address), ": ", FormatBytes(pinned.hole_bytes), " of ",
                   FormatBytes(pinned.bytes), " in holes, the largest ", FormatBytes(pinned.largest_hole_bytes), "; ",
                   Blocks(pinned.pinning_blocks), " in use");
  const char* separator = ", held longest: ";
  for (const PinningBlock& block : pinned.longest_held) {
    absl::StrAppend(&text, separator, FormatBytes(block.bytes), " at ", absl::Hex(block.address), " for ",
                    block.held_seconds, " s", block.scope.empty() ? "" : absl::StrCat(" in ", block.scope));
    separator = ", ";
  }
  return text;
}

std::string ScopeText(const ScopeUse& use) {
  return absl::StrCat(use.scope.empty() ? "(none)" : use.scope, ": ", FormatBytes(use.allocated_bytes), " in ",
                      Blocks(use.blocks), ", ", FormatBytes(use.bytes_at_peak), " at the peak, pins holes of ",
                      FormatBytes(use.pinned_hole_bytes));
}

template <typename Items, typename ToText>
std::string List(const Items& items, const ToText& to_text) {
  return absl::StrJoin(items, " | ", [&](std::string* out, const auto& item) { out->append(to_text(item)); });
}

}  // namespace

LogLine RefusalLine(SessionId session, absl::string_view name, const OomReport& report) {
  LogLine line("refused");
  line.Add("cause", OomCauseName(report.cause))
      .Add("session", Raw(session))
      .Add("name", name)
      .Add("device", report.device)
      .Add("requested", report.requested_bytes)
      .Add("limit", report.limit_bytes)
      .Add("reserved", report.reserved_bytes)
      .Add("allocated", report.allocated_bytes)
      .Add("available", report.available_bytes)
      .Add("largest_free_block", report.largest_free_block_bytes)
      .Add("holes", report.holes.bytes)
      .Add("unused_elsewhere", report.idle_elsewhere_bytes)
      .Add("waited_ms", report.waited_ms)
      .Add("refusal", report.refusal)
      .Add("why", Explanation(report));
  if (!report.holes.most_bytes.empty()) line.Add("pinned", List(report.holes.most_bytes, PinnedText));
  if (!report.scope.empty()) line.Add("scope", report.scope);
  if (!report.scopes.empty()) line.Add("scopes", List(report.scopes, ScopeText));
  return line.Add("advice", Advice(report));
}

}  // namespace vrambroker
