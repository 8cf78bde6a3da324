// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/views/top_table.h"

#include <algorithm>
#include <array>
#include <set>
#include <string>
#include <tuple>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/vramctl/views/output.h"
#include "client/vramctl/views/overview.h"
#include "client/vramctl/views/session_output.h"

namespace vrambroker::vramctl {
namespace {

struct ColumnInfo {
  const char* name;
  const char* heading;
  bool right;
  bool high_first;
  int rank;        // those of the highest rank are left out first
  int most_cells;  // longer cells are cut
};

const ColumnInfo& InfoOf(Column column) {
  static constexpr std::array<ColumnInfo, kColumns> kInfos = {{
      {"name", "NAME", false, false, 0, 24},
      {"tenant", "TENANT", false, false, 12, 16},
      {"pid", "PID", true, false, 6, 10},
      {"user", "USER", false, false, 9, 10},
      {"state", "STATE", false, false, 4, 12},
      {"priority", "PRIO", true, true, 11, 5},
      {"device", "DEV", true, false, 1, 3},
      {"limit", "LIMIT", true, true, 3, 6},
      {"guarantee", "GUARANTEE", true, true, 10, 9},
      {"reserved", "RESERVED", true, true, 1, 8},
      {"allocated", "ALLOCATED", true, true, 2, 9},
      {"reclaimable", "RECLAIMABLE", true, true, 8, 11},
      {"fragmentation", "FRAG", true, true, 5, 6},
      {"waiting", "WAITING", true, true, 7, 14},
  }};
  return kInfos[static_cast<size_t>(column)];
}

std::string WaitingCell(const TopRow& row) {
  if (row.waiting_bytes == 0) return "-";
  return absl::StrFormat("%s %.0fs", ShortBytes(row.waiting_bytes), static_cast<double>(row.waited_ms) / 1000);
}

std::string CellOf(const TopRow& row, Column column) {
  switch (column) {
    case Column::kName:
      return absl::StrCat(row.tree, row.name);
    case Column::kTenant:
      return row.tenant;
    case Column::kPid:
      return row.is_claim() ? "-" : absl::StrCat(row.pid);
    case Column::kUser:
      return row.user;
    case Column::kState:
      return row.state;
    case Column::kPriority:
      return absl::StrCat(row.priority);
    case Column::kDevice:
      return absl::StrCat(row.device);
    case Column::kLimit:
      return ShortBytes(row.limit_bytes);
    case Column::kGuarantee:
      return ShortBytes(row.guarantee_bytes);
    case Column::kReserved:
      return ShortBytes(row.reserved_bytes);
    case Column::kAllocated:
      return ShortBytes(row.allocated_bytes);
    case Column::kReclaimable:
      return ShortBytes(row.reclaimable_bytes);
    case Column::kFragmentation:
      return Percent(row.fragmentation);
    case Column::kWaiting:
      return WaitingCell(row);
  }
  return "";
}

// Whether `a` comes before `b` by the column alone, lowest first.
bool IsLower(const TopRow& a, const TopRow& b, Column column) {
  switch (column) {
    case Column::kName:
      return a.name < b.name;
    case Column::kTenant:
      return a.tenant < b.tenant;
    case Column::kPid:
      return a.pid < b.pid;
    case Column::kUser:
      return a.user < b.user;
    case Column::kState:
      return a.state < b.state;
    case Column::kPriority:
      return a.priority < b.priority;
    case Column::kDevice:
      return a.device < b.device;
    case Column::kLimit:
      return a.limit_bytes < b.limit_bytes;
    case Column::kGuarantee:
      return a.guarantee_bytes < b.guarantee_bytes;
    case Column::kReserved:
      return a.reserved_bytes < b.reserved_bytes;
    case Column::kAllocated:
      return a.allocated_bytes < b.allocated_bytes;
    case Column::kReclaimable:
      return a.reclaimable_bytes < b.reclaimable_bytes;
    case Column::kFragmentation:
      return a.fragmentation < b.fragmentation;
    case Column::kWaiting:
      return a.waited_ms < b.waited_ms;
  }
  return false;
}

bool IsUsed(const v1::SessionDevice& device) {
  return device.reserved_bytes() > 0 || device.guarantee_bytes() > 0 || !device.waiting().empty();
}

TopRow RowOf(const v1::Session& session, const v1::SessionDevice& device, const std::string& user) {
  TopRow row = {.session = session.id(),
                .name = Printable(session.name()),
                .claim = Printable(session.claim()),
                .tenant = Printable(session.tenant()),
                .pid = session.pid(),
                .user = Printable(user),
                .state = StateOn(session, device),
                .priority = session.priority(),
                .device = device.device(),
                .limit_bytes = device.limit_bytes(),
                .guarantee_bytes = device.guarantee_bytes(),
                .reserved_bytes = device.reserved_bytes(),
                .allocated_bytes = device.stats().allocated_bytes().all().current(),
                .reclaimable_bytes = device.idle_bytes(),
                .fragmentation = FragmentedShare(PartsOf(device)),
                .waits_for = Waiting(device),
                .ooms = device.stats().num_ooms(),
                .parts = PartsOf(device)};
  for (const v1::WaitingRequest& request : device.waiting()) {
    row.waiting_bytes += request.bytes();
    row.waited_ms = std::max({row.waited_ms, request.waited_ms(), uint64_t{1}});
  }
  return row;
}

}  // namespace

const char* ColumnName(Column column) {
  return InfoOf(column).name;
}

absl::StatusOr<Column> ParseColumn(absl::string_view name) {
  if (name == "idle") return Column::kReclaimable;  // as the column was called
  std::string names;
  for (int i = 0; i < kColumns; ++i) {
    const auto column = static_cast<Column>(i);
    if (name == ColumnName(column)) return column;
    absl::StrAppend(&names, i == 0 ? "" : ", ", ColumnName(column));
  }
  return absl::InvalidArgumentError(absl::StrCat("--sort: no column '", name, "'; there are: ", names));
}

std::vector<TopRow> RowsOf(const v1::ListSessionsResponse& sessions,
                           const std::function<std::string(uint32_t uid)>& user_name) {
  std::vector<TopRow> rows;
  for (const v1::Session& session : sessions.sessions()) {
    const std::string user = user_name(session.uid());
    const size_t before = rows.size();
    for (const v1::SessionDevice& device : session.devices()) {
      if (IsUsed(device)) rows.push_back(RowOf(session, device, user));
    }
    if (rows.size() == before && !session.devices().empty()) rows.push_back(RowOf(session, session.devices(0), user));
  }
  return rows;
}

void Filter(std::vector<TopRow>& rows, absl::string_view filter) {
  const std::string lower = absl::AsciiStrToLower(filter);
  const auto matches = [&](const TopRow& row) {
    return absl::StrContains(absl::AsciiStrToLower(row.name), lower) ||
           absl::StrContains(absl::AsciiStrToLower(row.claim), lower);
  };
  std::set<std::string> claims;  // of what matches
  for (const TopRow& row : rows) {
    if (matches(row)) claims.insert(row.claim);
  }
  std::erase_if(rows,
                [&](const TopRow& row) { return !matches(row) && !(row.is_claim() && claims.contains(row.claim)); });
}

void Sort(std::vector<TopRow>& rows, Column column, bool reverse) {
  const bool high_first = InfoOf(column).high_first != reverse;
  std::sort(rows.begin(), rows.end(), [&](const TopRow& a, const TopRow& b) {
    if (IsLower(a, b, column)) return !high_first;
    if (IsLower(b, a, column)) return high_first;
    return std::tie(a.name, a.session, a.device) < std::tie(b.name, b.session, b.device);
  });
}

TableLayout LayOut(const std::vector<TopRow>& rows, int width, bool several_devices) {
  std::vector<TableLayout::Shown> columns;
  int used = 0;
  for (int i = 0; i < kColumns; ++i) {
    const auto column = static_cast<Column>(i);
    const ColumnInfo& info = InfoOf(column);
    if (column == Column::kDevice && !several_devices) continue;
    int cells = Cells(info.heading);
    for (const TopRow& row : rows) cells = std::max(cells, Cells(CellOf(row, column)));
    cells = std::min(cells, info.most_cells);
    columns.push_back({column, cells});
    used += cells + 1;
  }
  while (columns.size() > 1 && used + kLeastBar > width) {
    const auto least = std::max_element(columns.begin(), columns.end(), [](const auto& a, const auto& b) {
      return InfoOf(a.column).rank < InfoOf(b.column).rank;
    });
    used -= least->width + 1;
    columns.erase(least);
  }
  const int left = width - used;
  return {.columns = std::move(columns), .bar_width = left < kLeastBar ? 0 : left};
}

Line HeadingLine(const TableLayout& layout, Column sorted_by, int width) {
  Line line;
  int cells = 0;
  for (const TableLayout::Shown& shown : layout.columns) {
    const ColumnInfo& info = InfoOf(shown.column);
    line.push_back(
        {Fit(info.heading, shown.width, info.right), shown.column == sorted_by ? Style::kSelected : Style::kHeading});
    line.push_back({" ", Style::kHeading});
    cells += shown.width + 1;
  }
  line.push_back({Fit(layout.bar_width > 0 ? "OF ITS LIMIT" : "", width - cells), Style::kHeading});
  return line;
}

Line RowLine(const TableLayout& layout, const TopRow& row, bool utf8) {
  Line line;
  std::string text;
  for (const TableLayout::Shown& shown : layout.columns) {
    absl::StrAppend(&text, Fit(CellOf(row, shown.column), shown.width, InfoOf(shown.column).right), " ");
  }
  line.push_back({std::move(text), row.is_claim() ? Style::kTitle : Style::kPlain});
  for (Span& span : Bar(row.parts, layout.bar_width, utf8)) line.push_back(std::move(span));
  return line;
}

}  // namespace vrambroker::vramctl
