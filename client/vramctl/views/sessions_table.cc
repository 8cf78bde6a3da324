// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/views/sessions_table.h"

#include <algorithm>
#include <array>
#include <functional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/vramctl/views/bars.h"
#include "client/vramctl/views/output.h"
#include "client/vramctl/views/overview.h"
#include "client/vramctl/views/session_output.h"

namespace vrambroker::vramctl {
namespace {

constexpr size_t kSessionsWidth = 100;
constexpr int kMostNameCells = 20;

struct SessionRow {
  const v1::Session& session;
  const v1::SessionDevice& device;
  absl::Duration age;
};

struct SessionColumn {
  const char* heading;  // as for Table()
  int rank;             // the highest goes first when the table is too wide; 0: never
  const char* nothing;  // the column is left out when all rows have this; nullptr: never
  std::string (*cell)(const SessionRow& row);
};

std::string NameCell(const SessionRow& row) {
  const std::string name = Printable(row.session.name());
  return Cells(name) > kMostNameCells ? Fit(name, kMostNameCells) : name;
}

std::string WaitsForCell(const SessionRow& row) {
  if (row.device.waiting().empty()) return "-";
  const v1::WaitingRequest& first = row.device.waiting(0);
  return absl::StrCat(first.guarantee() ? "guarantee " : "", ShortBytes(first.bytes()), " ",
                      ShortAge(absl::Milliseconds(static_cast<int64_t>(first.waited_ms()))), " #", first.place(),
                      row.device.waiting_size() > 1 ? absl::StrCat(" +", row.device.waiting_size() - 1) : "");
}

std::string ClaimCell(const SessionRow& row) {
  if (row.session.claim().empty()) return "-";
  const std::string claim = Printable(row.session.claim());
  return Cells(claim) > kMostNameCells ? Fit(claim, kMostNameCells) : claim;
}

const std::array<SessionColumn, 17>& AllColumns() {
  static constexpr std::array<SessionColumn, 17> kAll = {{
      {">ID", 0, nullptr, [](const SessionRow& row) { return absl::StrCat(row.session.id()); }},
      {"NAME", 0, nullptr, NameCell},
      {"CLAIM", 2, "-", ClaimCell},
      {">PID", 3, nullptr, [](const SessionRow& row) { return absl::StrCat(row.session.pid()); }},
      {">UID", 8, nullptr, [](const SessionRow& row) { return absl::StrCat(row.session.uid()); }},
      {">AGE", 2, nullptr, [](const SessionRow& row) { return ShortAge(row.age); }},
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

}  // namespace

std::string ShortAge(absl::Duration age) {
  const int64_t seconds = std::max<int64_t>(0, absl::ToInt64Seconds(age));
  if (seconds < 60) return absl::StrCat(seconds, "s");
  if (seconds < 3600) return absl::StrCat(seconds / 60, "m");
  if (seconds < 86400) return absl::StrFormat("%dh%02dm", seconds / 3600, seconds / 60 % 60);
  return absl::StrFormat("%dd%02dh", seconds / 86400, seconds / 3600 % 24);
}

std::string SessionsTable(const v1::ListSessionsResponse& sessions, absl::Time now) {
  std::vector<SessionRow> rows;
  for (const v1::Session& session : sessions.sessions()) {
    const absl::Time started = absl::FromUnixSeconds(session.started().seconds());
    for (const v1::SessionDevice& device : session.devices()) rows.push_back({session, device, now - started});
  }
  if (rows.empty()) return "no sessions\n";
  std::vector<const SessionColumn*> shown;
  for (const SessionColumn& column : AllColumns()) {
    const auto says_nothing = [&](const SessionRow& row) {
      return column.nothing != nullptr && column.cell(row) == column.nothing;
    };
    if (!std::all_of(rows.begin(), rows.end(), says_nothing)) shown.push_back(&column);
  }
  while (true) {
    std::vector<std::vector<std::string>> cells(1);  // the heading first
    for (const SessionColumn* column : shown) cells[0].emplace_back(column->heading);
    for (const SessionRow& row : rows) {
      cells.emplace_back();
      for (const SessionColumn* column : shown) cells.back().push_back(column->cell(row));
    }
    std::string table = Table(cells);
    const auto least = std::max_element(
        shown.begin(), shown.end(), [](const SessionColumn* a, const SessionColumn* b) { return a->rank < b->rank; });
    if (WidthOf(table) <= kSessionsWidth || (*least)->rank == 0) return table;
    shown.erase(least);
  }
}

}  // namespace vrambroker::vramctl
