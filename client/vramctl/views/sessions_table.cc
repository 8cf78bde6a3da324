// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/views/sessions_table.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/vramctl/views/bars.h"
#include "client/vramctl/views/output.h"
#include "client/vramctl/views/overview.h"
#include "client/vramctl/views/session_output.h"

namespace vrambroker::vramctl {
namespace {

constexpr size_t kLeastTextCells = 20;

struct SessionRow {
  const v1::Session& session;
  const v1::SessionDevice& device;
  absl::Duration age;
};

struct SessionColumn {
  const char* heading;  // as for Table()
  int rank;             // the highest rank goes first if the table is too wide; 0: never
  const char* nothing;  // the column is omitted if all rows have this cell; nullptr: never
  std::string (*cell)(const SessionRow& row);
  bool is_text = false;  // may be cut to kLeastTextCells
};

std::string UserCell(const SessionRow& row) {
  return row.session.user().empty() ? absl::StrCat(row.session.uid()) : Printable(row.session.user());
}

std::string CommandCell(const SessionRow& row) {
  return row.session.command().empty() ? "-" : Printable(row.session.command());
}

std::string LastUseCell(const SessionRow& row) {
  if (row.session.optional_idle_case() != v1::Session::kIdleMs) return "-";
  return ShortAge(absl::Milliseconds(static_cast<int64_t>(row.session.idle_ms())));
}

std::string WaitsForCell(const SessionRow& row) {
  if (row.device.waiting().empty()) return "-";
  const v1::WaitingRequest& first = row.device.waiting(0);
  return absl::StrCat(first.guarantee() ? "guarantee " : "", ShortBytes(first.bytes()), " ",
                      ShortAge(absl::Milliseconds(static_cast<int64_t>(first.waited_ms()))), " #", first.place(),
                      row.device.waiting_size() > 1 ? absl::StrCat(" +", row.device.waiting_size() - 1) : "");
}

const std::array<SessionColumn, 19>& AllColumns() {
  static constexpr std::array<SessionColumn, 19> kAll = {{
      {">ID", 0, nullptr, [](const SessionRow& row) { return absl::StrCat(row.session.id()); }},
      {"NAME", 0, nullptr, [](const SessionRow& row) { return Printable(row.session.name()); }, true},
      {"USER", 3, nullptr, UserCell, true},
      {"COMMAND", 9, "-", CommandCell, true},
      {"CLAIM", 2, "-",
       [](const SessionRow& row) { return row.session.claim().empty() ? "-" : Printable(row.session.claim()); }, true},
      {">PID", 3, nullptr, [](const SessionRow& row) { return absl::StrCat(row.session.pid()); }},
      {">AGE", 2, nullptr, [](const SessionRow& row) { return ShortAge(row.age); }},
      {">LAST USE", 8, "-", LastUseCell},
      {"STATE", 0, "active", [](const SessionRow& row) { return std::string(StateOn(row.session, row.device)); }},
      {">PRIO", 7, "0", [](const SessionRow& row) { return absl::StrCat(row.session.priority()); }},
      {">DEV", 0, "0", [](const SessionRow& row) { return absl::StrCat(row.device.device()); }},
      {">LIMIT", 0, nullptr, [](const SessionRow& row) { return ShortBytes(row.device.limit_bytes()); }},
      {">GUARANTEE", 5, "0", [](const SessionRow& row) { return ShortBytes(row.device.guarantee_bytes()); }},
      {">RESERVED", 0, nullptr, [](const SessionRow& row) { return ShortBytes(row.device.reserved_bytes()); }},
      {">CARRIED", 4, "0", [](const SessionRow& row) { return ShortBytes(row.device.carried_over_bytes()); }},
      {">ALLOCATED", 0, nullptr,
       [](const SessionRow& row) { return ShortBytes(row.device.stats().allocated_bytes().all().current()); }},
      {">FRAG", 6, nullptr, [](const SessionRow& row) { return Percent(FragmentedShare(PartsOf(row.device))); }},
      {">OOMS", 4, "0", [](const SessionRow& row) { return absl::StrCat(row.device.stats().num_ooms()); }},
      {"WAITS FOR", 1, "-", WaitsForCell},
  }};
  return kAll;
}

struct TableColumn {
  const SessionColumn* column;
  std::vector<std::string> cells;  // the heading first
  size_t width = 0;                // width of the longest cell
};

TableColumn MakeColumn(const SessionColumn& column, const std::vector<SessionRow>& rows) {
  TableColumn made{.column = &column, .cells = {column.heading}};
  made.width = std::strlen(column.heading) - (column.heading[0] == '>' ? 1 : 0);
  for (const SessionRow& row : rows) {
    made.cells.push_back(column.cell(row));
    made.width = std::max(made.width, made.cells.back().size());
  }
  return made;
}

// Returns the width of a line with texts cut to `text_cells`.
size_t LineCells(const std::vector<TableColumn>& columns, size_t text_cells) {
  size_t width = 2 * (columns.size() - 1);
  for (const TableColumn& column : columns) {
    width += column.column->is_text ? std::min(column.width, text_cells) : column.width;
  }
  return width;
}

}  // namespace

std::string ShortAge(absl::Duration age) {
  const int64_t seconds = std::max<int64_t>(0, absl::ToInt64Seconds(age));
  if (seconds < 60) return absl::StrCat(seconds, "s");
  if (seconds < 3600) return absl::StrCat(seconds / 60, "m");
  if (seconds < 86400) return absl::StrFormat("%dh%02dm", seconds / 3600, seconds / 60 % 60);
  return absl::StrFormat("%dd%02dh", seconds / 86400, seconds / 3600 % 24);
}

std::string SessionsTable(const v1::ListSessionsResponse& sessions, absl::Time now, int width) {
  std::vector<SessionRow> rows;
  for (const v1::Session& session : sessions.sessions()) {
    const absl::Time started = absl::FromUnixSeconds(session.started().seconds());
    for (const v1::SessionDevice& device : session.devices()) rows.push_back({session, device, now - started});
  }
  if (rows.empty()) return "no sessions\n";
  std::vector<TableColumn> shown;
  for (const SessionColumn& column : AllColumns()) {
    TableColumn made = MakeColumn(column, rows);
    const auto says_nothing = [&](const std::string& cell) {
      return column.nothing != nullptr && cell == column.nothing;
    };
    if (!std::all_of(made.cells.begin() + 1, made.cells.end(), says_nothing)) shown.push_back(std::move(made));
  }
  const auto most = static_cast<size_t>(width);
  while (LineCells(shown, kLeastTextCells) > most) {
    const auto least = std::max_element(shown.begin(), shown.end(), [](const TableColumn& a, const TableColumn& b) {
      return a.column->rank < b.column->rank;
    });
    if (least->column->rank == 0) break;
    shown.erase(least);
  }
  size_t text_cells = kLeastTextCells;
  for (const TableColumn& column : shown) {
    if (column.column->is_text) text_cells = std::max(text_cells, column.width);
  }
  while (text_cells > kLeastTextCells && LineCells(shown, text_cells) > most) --text_cells;
  std::vector<std::vector<std::string>> table(rows.size() + 1);
  for (const TableColumn& column : shown) {
    for (size_t row = 0; row < table.size(); ++row) {
      const std::string& cell = column.cells[row];
      const bool is_cut = column.column->is_text && cell.size() > text_cells;
      table[row].push_back(is_cut ? Fit(cell, static_cast<int>(text_cells)) : cell);
    }
  }
  return Table(table);
}

}  // namespace vrambroker::vramctl
