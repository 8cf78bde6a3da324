// SPDX-License-Identifier: Apache-2.0
//
// vramctl map: segments and blocks, drawn.
#include <langinfo.h>
#include <unistd.h>

#include <algorithm>
#include <clocale>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "allocator/base/bytes.h"
#include "allocator/heap/scope_use.h"
#include "client/vramctl/commands/commands.h"
#include "client/vramctl/commands/heap_file.h"
#include "client/vramctl/commands/output_columns.h"
#include "client/vramctl/daemon/daemon_calls.h"
#include "client/vramctl/views/heap_sums.h"
#include "client/vramctl/views/map_layout.h"
#include "client/vramctl/views/output.h"
#include "client/vramctl/views/scope_table.h"
#include "client/vramctl/views/session_output.h"

namespace vrambroker::vramctl {
namespace {

using Json = nlohmann::ordered_json;

// A session on one device.
struct Mapped {
  v1::Session session;
  v1::SessionDevice device;
  absl::StatusOr<HeapSnapshot> heap;
};

struct Paper {
  int width;
  bool utf8;
  bool colour;

  // Never clips lines: figures matter more than the layout.
  void Print(const Line& line) const { std::printf("%s\n", Render(line, colour).c_str()); }
  void Print(const std::vector<Line>& items) const {
    for (const Line& line : Pack(items, width)) Print(line);
  }
};

Paper PaperOf() {
  std::setlocale(LC_CTYPE, "");
  const char* const no_colour = std::getenv("NO_COLOR");
  const char* const terminal = std::getenv("TERM");
  return {.width = OutputColumns(80),
          .utf8 = std::strcmp(nl_langinfo(CODESET), "UTF-8") == 0,
          .colour = isatty(STDOUT_FILENO) != 0 && (no_colour == nullptr || *no_colour == '\0') && terminal != nullptr &&
                    std::strcmp(terminal, "dumb") != 0};
}

const char* StateOf(BlockState state) {
  switch (state) {
    case BlockState::kFree:
      return "free";
    case BlockState::kAllocated:
      return "allocated";
    case BlockState::kPendingFree:
      return "pending_free";
  }
  return "";
}

Json ScopesJson(const HeapSnapshot& heap) {
  Json scopes = Json::array();
  for (const ScopeUse& use : ScopeUses(heap)) {
    scopes.push_back({{"scope", use.scope},
                      {"allocated_bytes", use.allocated_bytes},
                      {"bytes_at_peak", use.bytes_at_peak},
                      {"blocks", use.blocks},
                      {"pinned_hole_bytes", use.pinned_hole_bytes}});
  }
  return scopes;
}

Json SegmentsJson(const HeapSnapshot& heap) {
  Json segments = Json::array();
  for (const SegmentSnapshot& segment : heap.segments) {
    Json blocks = Json::array();
    for (const BlockSnapshot& block : segment.blocks) {
      blocks.push_back({{"offset_bytes", block.offset},
                        {"block_bytes", block.bytes},
                        {"requested_bytes", block.requested_bytes},
                        {"state", StateOf(block.state)}});
      if (block.scope != 0) {
        blocks.back()["scope"] = ScopePath(heap.scopes, block.scope);
      }
    }
    segments.push_back({{"id", static_cast<uint64_t>(segment.id)},
                        {"segment_bytes", segment.bytes},
                        {"small_pool", segment.pool == PoolKind::kSmall},
                        {"address", segment.address},
                        {"stream", segment.stream},
                        {"blocks", std::move(blocks)}});
  }
  return segments;
}

Json MappedJson(const Mapped& mapped) {
  Json json = {{"id", mapped.session.id()},
               {"name", mapped.session.name()},
               {"device", mapped.device.device()},
               {"reserved_bytes", mapped.device.reserved_bytes()}};
  if (mapped.heap.ok()) {
    json["segments"] = SegmentsJson(*mapped.heap);
    json["scopes"] = ScopesJson(*mapped.heap);
  } else {
    json["error"] = {{"code", absl::StatusCodeToString(mapped.heap.status().code())},
                     {"message", std::string(mapped.heap.status().message())}};
  }
  return json;
}

void PrintHeap(const Paper& paper, const HeapSnapshot& heap, Style style, bool has_peak) {
  for (const Line& line : SegmentLines(heap, paper.width, style, paper.utf8)) paper.Print(line);
  constexpr size_t kMostScopes = 20;
  for (const std::string& line : ScopeLines(ScopeUses(heap), kMostScopes, has_peak)) {
    paper.Print(Line{{absl::StrCat("  ", line)}});
  }
}

void Print(const Paper& paper, const Mapped& mapped, Style style) {
  const uint64_t limit = mapped.device.limit_bytes();
  Line title = {{Printable(mapped.session.name()), style},
                {absl::StrCat(" (id ", mapped.session.id(), ", ", StateOn(mapped.session, mapped.device), "): ",
                              FormatBytes(mapped.device.reserved_bytes()), " of its limit of ", FormatBytes(limit))}};
  if (!mapped.heap.ok()) {
    paper.Print(title);
    std::printf("  is missing here: %s\n", Printable(mapped.heap.status().message()).c_str());
    return;
  }
  const size_t segments = mapped.heap->segments.size();
  title.push_back({absl::StrCat(", ", Counted(segments, "segment"))});
  paper.Print(title);
  PrintHeap(paper, *mapped.heap, style, /*has_peak=*/true);
}

void Print(const Paper& paper, const Overview& overview, const v1::Device& device) {
  const PartBytes parts = PartsOf(overview, device);
  paper.Print(Line{{absl::StrCat("device ", device.ordinal(), ", ", Printable(device.name())), Style::kTitle},
                   {absl::StrCat(": ", FormatBytes(device.reserved_bytes()), " of ",
                                 FormatBytes(device.capacity_bytes()), " reserved")}});
  paper.Print(Bar(parts, paper.width, paper.utf8));
  std::vector<Line> figures;
  for (const Part part : kAllParts) {
    if (parts[part] == 0) continue;
    figures.push_back(
        {{Glyph(part, paper.utf8), StyleOf(part)}, {absl::StrCat(" ", PartName(part), " ", FormatBytes(parts[part]))}});
  }
  paper.Print(figures);
  if (parts[Part::kCached] + parts[Part::kLeftBehind] > 0) {
    constexpr char kMeaning[] =
        "cached: by the daemon, for reuse; left behind: of processes that are gone. No session has it.";
    for (const std::string& line : Wrap(kMeaning, paper.width - 2)) {
      paper.Print(Line{{absl::StrCat("  ", line), Style::kDim}});
    }
  }
}

absl::Status MapFile(const Context& context, const std::string& path) {
  const absl::StatusOr<std::vector<HeapSnapshot>> heaps = ReadHeapFile(path);
  if (!heaps.ok()) return heaps.status();
  if (absl::Status status = CheckHeapDevice(context, *heaps); !status.ok()) return status;
  Json maps = Json::array();
  const Paper paper = PaperOf();
  size_t drawn = 0;
  for (size_t device = 0; device < heaps->size(); ++device) {
    const HeapSnapshot& heap = (*heaps)[device];
    if (heap.segments.empty() ||
        (context.only_device.has_value() && *context.only_device != static_cast<int>(device))) {
      continue;
    }
    if (context.json) {
      maps.push_back({{"id", nullptr},
                      {"name", path},
                      {"device", device},
                      {"reserved_bytes", SumsOf(absl::MakeConstSpan(&heap, 1)).reserved_bytes},
                      {"segments", SegmentsJson(heap)},
                      {"scopes", ScopesJson(heap)}});
      continue;
    }
    if (drawn++ > 0) std::printf("\n");
    paper.Print(Line{{Printable(path), Style::kTitle},
                     {absl::StrCat(", device ", device, ": ", SumsText(SumsOf(absl::MakeConstSpan(&heap, 1))))}});
    PrintHeap(paper, heap, StyleOfSession(device), /*has_peak=*/false);
  }
  if (context.json) {
    vramctl::Print({{"devices", Json::array()}, {"maps", std::move(maps)}});
  } else if (drawn == 0) {
    std::printf("%s: holds nothing\n", Printable(path).c_str());
  } else {
    std::printf("\n");
    paper.Print(MapLegend(paper.utf8));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Map(const Context& context, const std::optional<std::string>& session) {
  if (session.has_value() && IsHeapFile(*session)) return MapFile(context, *session);
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context);
  if (!daemon.ok()) return daemon.status();
  absl::StatusOr<Overview> overview = ReadOverview(*daemon);
  if (!overview.ok()) return overview.status();
  const auto& devices = overview->devices.devices();
  if (context.only_device.has_value() && (*context.only_device < 0 || *context.only_device >= devices.size())) {
    return absl::NotFoundError(absl::StrCat("no device ", *context.only_device, "; the daemon has ",
                                            Counted(static_cast<uint64_t>(devices.size()), "device")));
  }
  std::vector<v1::Session> sessions(overview->sessions.sessions().begin(), overview->sessions.sessions().end());
  if (session.has_value()) {
    absl::StatusOr<v1::Session> found = GetSession(*daemon, ParseSessionRef(*session));
    if (!found.ok()) return found.status();
    sessions = {*std::move(found)};
  }
  // Read sequentially: the daemon limits concurrent snapshots per user.
  std::vector<Mapped> all;
  for (const v1::Session& each : sessions) {
    for (const v1::SessionDevice& device : each.devices()) {
      if (context.only_device.has_value() && static_cast<int>(device.device()) != *context.only_device) continue;
      if (device.reserved_bytes() == 0) continue;
      all.push_back({.session = each, .device = device, .heap = ReadSnapshot(*daemon, each.id(), device.device())});
      if (session.has_value() && !all.back().heap.ok()) return all.back().heap.status();
    }
  }

  if (context.json) {
    Json maps = Json::array();
    for (const Mapped& mapped : all) maps.push_back(MappedJson(mapped));
    vramctl::Print({{"devices", DevicesJson(*overview)}, {"maps", std::move(maps)}});
    return absl::OkStatus();
  }
  const Paper paper = PaperOf();
  for (const v1::Device& device : devices) {
    if (context.only_device.has_value() && static_cast<int>(device.ordinal()) != *context.only_device) continue;
    if (device.ordinal() > 0 && !context.only_device.has_value()) std::printf("\n");
    Print(paper, *overview, device);
    bool holds_any = false;
    size_t index = 0;
    for (const Mapped& mapped : all) {
      ++index;
      if (mapped.device.device() != device.ordinal()) continue;
      std::printf("\n");
      Print(paper, mapped, StyleOfSession(index - 1));
      holds_any = true;
    }
    if (!holds_any)
      std::printf("%s\n", session.has_value() ? "the session holds nothing here" : "no session holds anything here");
  }
  if (!all.empty()) {
    std::printf("\n");
    paper.Print(MapLegend(paper.utf8));
  }
  return absl::OkStatus();
}

}  // namespace vrambroker::vramctl
