// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/views/output.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace vrambroker::vramctl {

std::string Table(const std::vector<std::vector<std::string>>& rows) {
  const std::vector<std::string>& heading = rows.front();
  std::vector<size_t> widths(heading.size(), 0);
  const auto text = [&](size_t row, size_t column) {
    absl::string_view cell = rows[row][column];
    if (row == 0) absl::ConsumePrefix(&cell, ">");
    return std::string(cell);
  };
  for (size_t row = 0; row < rows.size(); ++row) {
    for (size_t column = 0; column < heading.size(); ++column) {
      widths[column] = std::max(widths[column], text(row, column).size());
    }
  }
  std::string out;
  for (size_t row = 0; row < rows.size(); ++row) {
    std::string line;
    for (size_t column = 0; column < heading.size(); ++column) {
      const std::string padding(widths[column] - text(row, column).size(), ' ');
      const bool right = heading[column].front() == '>';
      absl::StrAppend(&line, column == 0 ? "" : "  ", right ? padding : "", text(row, column), right ? "" : padding);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    absl::StrAppend(&out, line, "\n");
  }
  return out;
}

size_t WidthOf(const std::string& table) {
  size_t width = 0;
  for (const absl::string_view line : absl::StrSplit(table, '\n')) width = std::max(width, line.size());
  return width;
}

std::string Counted(uint64_t count, const char* noun) {
  return absl::StrCat(count, " ", noun, count == 1 ? "" : "s");
}

std::string Percent(double ratio) {
  return absl::StrFormat("%.1f%%", ratio * 100);
}

}  // namespace vrambroker::vramctl
