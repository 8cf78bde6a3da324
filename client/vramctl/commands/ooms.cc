// SPDX-License-Identifier: Apache-2.0
//
// vramctl ooms: shows who was refused memory lately, and why.
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "allocator/base/bytes.h"
#include "allocator/heap/scope_use.h"
#include "allocator/wire/admin_json.h"
#include "client/heap/out_of_memory.h"
#include "client/vramctl/commands/commands.h"
#include "client/vramctl/daemon/daemon_calls.h"
#include "client/vramctl/views/bars.h"
#include "client/vramctl/views/output.h"
#include "client/vramctl/views/scope_table.h"

namespace vrambroker::vramctl {
namespace {

using Json = nlohmann::ordered_json;

std::string PinnedText(const OutOfMemory::PinnedSegment& pinned) {
  std::string text =
      absl::StrCat("segment ", absl::Hex(pinned.address), ": ", FormatBytes(pinned.hole_bytes), " of ",
                   FormatBytes(pinned.segment_bytes), " in holes, the largest ", FormatBytes(pinned.largest_hole_bytes),
                   "; ", Counted(pinned.pinning_blocks, "block"), " in use");
  const char* separator = ", held longest: ";
  for (const OutOfMemory::PinningBlock& block : pinned.longest_held) {
    absl::StrAppend(&text, separator, FormatBytes(block.block_bytes), " at ", absl::Hex(block.address), " for ",
                    block.held_seconds, " s", block.scope.empty() ? "" : absl::StrCat(" in ", Printable(block.scope)));
    separator = ", ";
  }
  return text;
}

// Prints the details below the event's row.
void PrintReport(const v1::OutOfMemoryEvent& event) {
  const OutOfMemory oom = client_internal::FromProto(event.out_of_memory());
  if (!oom.explanation.empty()) std::printf("  why: %s\n", oom.explanation.c_str());
  if (oom.cause == OutOfMemory::Cause::kFragmentation) {
    for (const OutOfMemory::PinnedSegment& pinned : oom.pinned_segments) {
      std::printf("       %s\n", PinnedText(pinned).c_str());
    }
  }
  std::vector<ScopeUse> uses;
  uses.reserve(oom.scopes.size());
  for (const OutOfMemory::ScopeUse& use : oom.scopes) {
    uses.push_back({.scope = use.scope,
                    .allocated_bytes = use.allocated_bytes,
                    .bytes_at_peak = use.bytes_at_peak,
                    .blocks = use.blocks,
                    .pinned_hole_bytes = use.pinned_hole_bytes});
  }
  if (!oom.scope.empty()) std::printf("  in:  scope %s\n", Printable(oom.scope).c_str());
  for (const std::string& line : ScopeLines(uses, uses.size())) std::printf("       %s\n", line.c_str());
  std::printf("  do:  %s\n", oom.advice.c_str());
  // The advice on fragmentation already suggests --diagnose.
  if (event.recorded() && oom.cause != OutOfMemory::Cause::kFragmentation) {
    std::printf("  try: vramctl ooms --diagnose %s\n", absl::StrCat(event.out_of_memory().refusal()).c_str());
  }
}

}  // namespace

absl::Status Ooms(const Context& context) {
  if (context.diagnose.has_value()) return DiagnoseRefusal(context, *context.diagnose);
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context);
  if (!daemon.ok()) return daemon.status();
  v1::ListOutOfMemoryRequest request;
  request.set_max_events(context.last);
  if (!context.session.empty()) *request.mutable_session() = ParseSessionRef(context.session);
  v1::ListOutOfMemoryResponse response;
  if (absl::Status status = Call(*daemon, &v1::Admin::Stub::ListOutOfMemory, request, &response); !status.ok()) {
    return status;
  }
  if (context.json) {
    Json events = Json::array();
    for (const v1::OutOfMemoryEvent& event : response.events()) {
      events.push_back(ToJson(event));
    }
    Print({{"run_id", response.run_id()},
           {"total_events", response.total_events()},
           {"matching_events", response.matching_events()},
           {"events", std::move(events)}});
    return absl::OkStatus();
  }
  if (response.events().empty()) {
    std::printf("no refused request%s is on record\n", response.own_only() ? " of your own sessions" : "");
    return absl::OkStatus();
  }
  std::vector<std::vector<std::string>> rows = {{"ID", "TIME", "CLIENT", ">DEVICE", "CAUSE", ">REQUESTED", ">LIMIT",
                                                 ">RESERVED", ">ALLOCATED", ">UNUSED ELSEWHERE"}};
  const bool has_claims = std::any_of(response.events().begin(), response.events().end(),
                                      [](const auto& event) { return !event.out_of_memory().claim().empty(); });
  if (has_claims) rows[0].emplace_back("CLAIM");
  for (const v1::OutOfMemoryEvent& event : response.events()) {
    const OutOfMemory oom = client_internal::FromProto(event.out_of_memory());
    rows.push_back({absl::StrCat(event.out_of_memory().refusal()),
                    absl::FormatTime("%Y-%m-%d %H:%M:%S", TimeOf(event.time()), absl::LocalTimeZone()), event.client(),
                    absl::StrCat(oom.device), absl::AsciiStrToLower(OutOfMemoryCauseName(oom.cause)),
                    FormatBytes(oom.requested_bytes), FormatBytes(oom.limit_bytes), FormatBytes(oom.reserved_bytes),
                    FormatBytes(oom.allocated_bytes), FormatBytes(oom.idle_elsewhere_bytes)});
    const std::string& claim = event.out_of_memory().claim();
    if (has_claims) rows.back().push_back(claim.empty() ? "-" : Printable(claim));
  }
  const std::string table = Table(rows);
  const std::vector<std::string> lines = absl::StrSplit(table, '\n');
  std::printf("%s\n", lines.front().c_str());
  for (int i = 0; i < response.events_size(); ++i) {
    std::printf("%s\n", lines[static_cast<size_t>(i) + 1].c_str());
    PrintReport(response.events(i));
  }
  const auto shown = static_cast<uint64_t>(response.events_size());
  if (shown < response.matching_events()) {
    std::printf("\n%s of %s%s; --last=0 shows all\n", absl::StrCat(shown).c_str(),
                absl::StrCat(response.matching_events()).c_str(), response.own_only() ? " of your own sessions" : "");
  }
  return absl::OkStatus();
}

}  // namespace vrambroker::vramctl
