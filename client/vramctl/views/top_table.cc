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
#include "client/vramctl/views/output.h"
#include "client/vramctl/views/overview.h"
#include "client/vramctl/views/session_output.h"
#include "client/vramctl/views/sessions_table.h"

namespace vrambroker::vramctl {
namespace {

struct ColumnInfo {
  const char* name;
  const char* heading;
  char key;  // key to sort by the column; '\0': none
  bool right;
  bool high_first;
  int rank;             // columns of the highest rank are dropped first
  int most_cells;       // longer cells are cut
  const char* nothing;  // columns with this cell in all rows are dropped first; nullptr: no cell is empty
};

// Columns up to this rank are shown regardless of the length of names.
constexpr int kLastFirmRank = 7;
constexpr int kRankOfNothing = 100;  // added to the rank
// Cells of a name worth more than the columns of higher ranks.
constexpr int kGoodName = 24;
constexpr int kLeastCommand = 20;
constexpr int kAnyLength = 1000;

const ColumnInfo& InfoOf(Column column) {
  static constexpr std::array<ColumnInfo, kColumns> kInfos = {{
      {"name", "NAME", 'n', false, false, 0, kAnyLength, nullptr},
      {"tenant", "TENANT", 't', false, false, 15, 16, nullptr},
      {"pid", "PID", 'p', true, false, 4, 10, nullptr},
      {"user", "USER", 'u', false, false, 5, 12, nullptr},
      {"state", "STATE", 's', false, false, 6, 12, "active"},
      {"priority", "PRIO", '\0', true, true, 14, 5, "0"},
      {"device", "DEV", '\0', true, false, 1, 3, nullptr},
      {"limit", "LIMIT", 'l', true, true, 3, 6, nullptr},
      {"guarantee", "GUARANTEE", '\0', true, true, 13, 9, "0"},
      {"reserved", "RESERVED", 'r', true, true, 1, 8, nullptr},
      {"allocated", "ALLOCATED", 'a', true, true, 2, 9, nullptr},
      {"reclaimable", "RECLAIMABLE", 'i', true, true, 9, 11, nullptr},
      {"fragmentation", "FRAG", 'f', true, true, 7, 6, nullptr},
      {"waiting", "WAITING", 'w', true, true, 8, 14, "-"},
      {"age", "AGE", 'g', true, true, 12, 7, "-"},
      {"last_use", "LAST USE", 'd', true, true, 10, 8, "-"},
      {"command", "COMMAND", 'm', false, false, 11, 40, "-"},
  }};
  return kInfos[static_cast<size_t>(column)];
}

std::string WaitingCell(const TopRow& row) {
  if (row.waiting_bytes == 0) return "-";
  return absl::StrCat(ShortBytes(row.waiting_bytes), " ",
                      ShortAge(absl::Milliseconds(static_cast<int64_t>(row.waited_ms))));
}

std::string AgeCell(const std::optional<absl::Duration>& age) {
  return age.has_value() ? ShortAge(*age) : "-";
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
    case Column::kAge:
      return AgeCell(row.age);
    case Column::kLastUse:
      return AgeCell(row.last_use);
    case Column::kCommand:
      return row.command.empty() ? "-" : row.command;
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
    case Column::kAge:
      return a.age < b.age;
    case Column::kLastUse:
      return a.last_use < b.last_use;
    case Column::kCommand:
      return a.command < b.command;
  }
  return false;
}

TopRow RowOf(const v1::Session& session, const v1::SessionDevice& device, const std::string& user, absl::Time now) {
  TopRow row = {.session = session.id(),
                .name = Printable(session.name()),
                .claim = Printable(session.claim()),
                .tenant = Printable(session.tenant()),
                .pid = session.pid(),
                .user = Printable(user),
                .command = Printable(session.command()),
                .state = StateOn(session, device),
                .priority = session.priority(),
                .device = device.device(),
                .limit_bytes = device.limit_bytes(),
                .guarantee_bytes = device.guarantee_bytes(),
                .reserved_bytes = device.reserved_bytes(),
                .allocated_bytes = device.stats().allocated_bytes().all().current(),
                .reclaimable_bytes = device.idle_bytes(),
                .age = AgeOf(session.started(), now),
                .waits_for = Waiting(device),
                .ooms = device.stats().num_ooms(),
                .parts = PartsOf(device)};
  row.fragmentation = FragmentedShare(row.parts);
  if (session.has_idle_ms()) row.last_use = absl::Milliseconds(static_cast<int64_t>(session.idle_ms()));
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

char SortKey(Column column) {
  return InfoOf(column).key;
}

absl::StatusOr<Column> ParseColumn(absl::string_view name) {
  if (name == "idle") return Column::kReclaimable;  // old name of the column
  std::string names;
  for (int i = 0; i < kColumns; ++i) {
    const auto column = static_cast<Column>(i);
    if (name == ColumnName(column)) return column;
    absl::StrAppend(&names, i == 0 ? "" : ", ", ColumnName(column));
  }
  return absl::InvalidArgumentError(absl::StrCat("--sort: no column '", name, "'; there are: ", names));
}

bool IsUsed(const v1::SessionDevice& device) {
  return device.reserved_bytes() > 0 || device.guarantee_bytes() > 0 || !device.waiting().empty();
}

std::optional<absl::Duration> AgeOf(const google::protobuf::Timestamp& started, absl::Time now) {
  if (started.seconds() == 0) return std::nullopt;
  return now - absl::FromUnixSeconds(started.seconds());
}

std::vector<TopRow> RowsOf(const v1::ListSessionsResponse& sessions,
                           const std::function<std::string(uint32_t uid)>& user_name, absl::Time now) {
  std::vector<TopRow> rows;
  for (const v1::Session& session : sessions.sessions()) {
    const std::string user = session.user().empty() ? user_name(session.uid()) : session.user();
    const size_t before = rows.size();
    for (const v1::SessionDevice& device : session.devices()) {
      if (IsUsed(device)) rows.push_back(RowOf(session, device, user, now));
    }
    if (rows.size() == before && !session.devices().empty()) {
      rows.push_back(RowOf(session, session.devices(0), user, now));
    }
  }
  return rows;
}

void Filter(std::vector<TopRow>& rows, absl::string_view filter) {
  const std::string lower = absl::AsciiStrToLower(filter);
  const auto matches = [&](const TopRow& row) {
    return absl::StrContains(absl::AsciiStrToLower(row.name), lower) ||
           absl::StrContains(absl::AsciiStrToLower(row.claim), lower);
  };
  std::set<std::string> claims;  // claims of matching rows
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
  struct Candidate {
    Column column;
    int wanted;  // cells
    int rank;
  };
  std::vector<Candidate> columns;
  for (int i = 0; i < kColumns; ++i) {
    const auto column = static_cast<Column>(i);
    const ColumnInfo& info = InfoOf(column);
    if (column == Column::kDevice && !several_devices) continue;
    int cells = Cells(info.heading);
    bool says_nothing = info.nothing != nullptr;
    for (const TopRow& row : rows) {
      const std::string cell = CellOf(row, column);
      cells = std::max(cells, Cells(cell));
      says_nothing = says_nothing && cell == info.nothing;
    }
    columns.push_back({column, std::min(cells, info.most_cells), info.rank + (says_nothing ? kRankOfNothing : 0)});
  }
  struct Least {
    int name;
    int command;
  };
  const auto least_cells = [](const Candidate& each, const Least& least) {
    if (each.column == Column::kName) return std::min(each.wanted, least.name);
    return each.column == Column::kCommand ? std::min(each.wanted, least.command) : each.wanted;
  };
  std::vector<Candidate> by_rank = columns;
  std::stable_sort(by_rank.begin(), by_rank.end(),
                   [](const Candidate& a, const Candidate& b) { return a.rank < b.rank; });
  std::vector<Candidate> shown;
  for (const Candidate& each : by_rank) {
    // Show empty columns only after all the rest has been shown, uncut.
    const bool says_nothing = each.rank >= kRankOfNothing;
    const size_t before = static_cast<size_t>(&each - by_rank.data());
    if (says_nothing && shown.size() < before) break;
    const Least least = says_nothing                ? Least{kAnyLength, kAnyLength}
                        : each.rank > kLastFirmRank ? Least{kGoodName, kLeastCommand}
                                                    : Least{kLeastName, kLeastCommand};
    int used = kLeastBar + least_cells(each, least) + 1;
    for (const Candidate& other : shown) used += least_cells(other, least) + 1;
    if (shown.empty() || used <= width) shown.push_back(each);
  }
  std::sort(shown.begin(), shown.end(), [](const Candidate& a, const Candidate& b) { return a.column < b.column; });
  TableLayout layout;
  const Least least = {kLeastName, kLeastCommand};
  int left = width - kLeastBar;
  for (const Candidate& each : shown) left -= least_cells(each, least) + 1;
  for (const Candidate& each : shown) {  // names come before commands
    const int cells = least_cells(each, least);
    const int more = std::clamp(each.wanted - cells, 0, std::max(left, 0));
    left -= more;
    layout.columns.push_back({each.column, cells + more});
  }
  layout.bar_width = left < 0 ? 0 : kLeastBar + left;
  return layout;
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
    std::string cell = CellOf(row, shown.column);
    if (shown.column == Column::kName) {
      cell = absl::StrCat(row.tree, ShortenMiddle(row.name, shown.width - Cells(row.tree), utf8));
    } else if (!InfoOf(shown.column).right) {
      cell = ShortenAtWord(cell, shown.width, utf8);
    }
    absl::StrAppend(&text, Fit(cell, shown.width, InfoOf(shown.column).right), " ");
  }
  line.push_back({std::move(text), row.is_claim() ? Style::kTitle : Style::kPlain});
  for (Span& span : Bar(row.parts, layout.bar_width, utf8)) line.push_back(std::move(span));
  return line;
}

}  // namespace vrambroker::vramctl
