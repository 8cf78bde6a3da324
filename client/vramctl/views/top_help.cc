// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/views/top_help.h"

#include <array>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/vramctl/views/top_table.h"

namespace vrambroker::vramctl {
namespace {

constexpr int kHelpColumns = 80;

void AppendSortKeys(std::vector<Line>& lines) {
  Line line = {{"  sort by   "}};
  for (int i = 0; i < kColumns; ++i) {
    const auto column = static_cast<Column>(i);
    const char key = SortKey(column);
    if (key == '\0') continue;
    const std::string name = absl::StrCat(" ", ColumnName(column));
    if (Cells(line) + 3 + Cells(name) > kHelpColumns) lines.push_back(std::exchange(line, {{"            "}}));
    if (line.size() > 1) line.push_back({"  "});
    line.push_back({std::string(1, key), Style::kTitle});
    line.push_back({name});
  }
  lines.push_back(std::move(line));
}

}  // namespace

std::vector<Line> HelpLines(bool utf8) {
  std::vector<Line> lines = {{{"vramctl top: holders of the memory, and wasted memory", Style::kTitle}}, {}};
  AppendSortKeys(lines);
  for (const char* text : {"  < >       sort by the previous, next column;  R  reverse the order",
                           "  j k       select a row; also arrows, PgUp, PgDn, Home, End",
                           "  Enter     details of the session or the claim; again: back to the table",
                           "  L T E P   set the session's limit, trim, end, set priority: after a question",
                           "  c C       hide the sessions of the claim, of all claims; again: show",
                           "  /         show only names that contain a text; Esc: all names, and no message",
                           "  space     freeze; again: go on", "  q         quit", ""}) {
    lines.push_back({{text}});
  }
  for (const Part part : kAllParts) {
    static constexpr std::array<const char*, kAllParts.size()> kMeanings = {
        "blocks in use by programs",
        "freed blocks that the GPU may still use",
        "free blocks beside used blocks: cannot be given back",
        "wholly free segments: given back on demand",
        "carried over by remote sessions",
        "segments outside sessions, kept for reuse",
        "memory of ended processes: not yet available",
        "memory left below the limit (rows) or the capacity"};
    lines.push_back({{"  "},
                     {Glyph(part, utf8), StyleOf(part)},
                     {absl::StrCat("  ", Fit(PartName(part), 22), kMeanings[static_cast<size_t>(part)])}});
  }
  for (const char* text : {"FRAG is fragmented / held by sessions: the share that no trim gives back.",
                           "A session has a row for each device in use. Any key: back"}) {
    lines.push_back({{text}});
  }
  return lines;
}

}  // namespace vrambroker::vramctl
