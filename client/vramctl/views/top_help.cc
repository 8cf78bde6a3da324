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
  std::vector<Line> lines = {{{"vramctl top: who holds the memory, and how much of it is wasted", Style::kTitle}}, {}};
  AppendSortKeys(lines);
  for (const char* text : {"  < >       the column before, after;  R  reverse the order",
                           "  j k       select a row; so do arrows, PgUp, PgDn, Home, End",
                           "  Enter     details of the session or the claim; again: back to the table",
                           "  L T E P   set its limit, trim it, end it, set its priority: after a question",
                           "  c C       hide the sessions of the claim, of all claims; again: show them",
                           "  /         only names with a text; Esc: all names, and no message",
                           "  space     freeze; again: go on", "  q         quit", ""}) {
    lines.push_back({{text}});
  }
  for (const Part part : kAllParts) {
    static constexpr std::array<const char*, kAllParts.size()> kMeanings = {
        "blocks that applications have",
        "freed by its owner, still in use on the GPU",
        "holes beside used blocks: cannot be given back",
        "segments without a block: given back on demand",
        "of remote sessions, from before the daemon started",
        "kept by the daemon for reuse: of no session",
        "of who is gone: charged to no session, not yet usable",
        "not reserved of the limit (rows) or the capacity"};
    lines.push_back({{"  "},
                     {Glyph(part, utf8), StyleOf(part)},
                     {absl::StrCat("  ", Fit(PartName(part), 22), kMeanings[static_cast<size_t>(part)])}});
  }
  for (const char* text : {"FRAG is fragmented / reserved of what sessions hold: what no trim can give back.",
                           "A session has a row for each device in use. Any key: back"}) {
    lines.push_back({{text}});
  }
  return lines;
}

}  // namespace vrambroker::vramctl
