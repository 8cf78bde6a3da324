// SPDX-License-Identifier: Apache-2.0
//
// Screens of vramctl top and map, without a terminal and without a daemon.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "allocator/base/bytes.h"
#include "client/vramctl/views/bars.h"
#include "client/vramctl/views/map_layout.h"
#include "client/vramctl/views/output.h"
#include "client/vramctl/views/overview.h"
#include "client/vramctl/views/session_change.h"
#include "client/vramctl/views/session_output.h"
#include "client/vramctl/views/sessions_table.h"
#include "client/vramctl/views/status_text.h"
#include "client/vramctl/views/top_question.h"
#include "client/vramctl/views/top_table.h"
#include "client/vramctl/views/top_view.h"

namespace vrambroker::vramctl {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

std::string TextOf(const Line& line) {
  return Render(line, /*colour=*/false);
}

PartBytes Bytes(uint64_t allocated, uint64_t fragmented, uint64_t idle, uint64_t free) {
  PartBytes bytes;
  bytes[Part::kAllocated] = allocated;
  bytes[Part::kFragmented] = fragmented;
  bytes[Part::kReclaimable] = idle;
  bytes[Part::kFree] = free;
  return bytes;
}

// ---- Bars ----

TEST(BarsTest, CellsAreInProportion) {
  EXPECT_EQ(TextOf(Bar(Bytes(50, 25, 0, 25), 8, false)), "####++..");
  EXPECT_EQ(TextOf(Bar(Bytes(50, 25, 0, 25), 8, true)), "████▒▒··");
  EXPECT_EQ(TextOf(Bar(Bytes(1, 1, 1, 0), 10, false)), "####+++---");
  EXPECT_EQ(TextOf(Bar(Bytes(7, 0, 0, 0), 5, false)), "#####");
  EXPECT_EQ(TextOf(Bar(Bytes(0, 0, 0, 0), 5, false)), ".....");
}

TEST(BarsTest, WhatIsThereIsSeen) {
  EXPECT_EQ(TextOf(Bar(Bytes(1, 0, 1, 80_GiB), 10, false)), "#-........");
  EXPECT_EQ(TextOf(Bar(Bytes(80_GiB, 1, 0, 1), 10, false)), "########+.");
  // Too few cells for all parts show the largest parts.
  EXPECT_EQ(TextOf(Bar(Bytes(4, 3, 2, 1), 2, false)), "#+");
}

TEST(BarsTest, EveryWidthIsKept) {
  for (const uint64_t most : {uint64_t{3}, uint64_t{80_GiB}, std::numeric_limits<uint64_t>::max() / 8}) {
    for (int width = -1; width < 130; ++width) {
      EXPECT_EQ(ShareCells(Bytes(most, most / 3, 1, most / 7), width).Sum(), std::max(width, 0));
    }
  }
}

TEST(BarsTest, ControlCharactersDoNotReachTheTerminal) {
  EXPECT_EQ(Printable("train-1/a@b:c_d"), "train-1/a@b:c_d");
  EXPECT_EQ(Printable("a\x1b[2Jb\r\n\x7f"), "a\\x1b[2Jb\\x0d\\x0a\\x7f");
  EXPECT_EQ(Printable("\xc2\x9b"), "\\xc2\\x9b");  // CSI as one character
  EXPECT_EQ(Printable(std::string(1, '\0')), "\\x00");
}

TEST(BarsTest, TextFitsItsCells) {
  EXPECT_EQ(Fit("abc", 5), "abc  ");
  EXPECT_EQ(Fit("abc", 5, true), "  abc");
  EXPECT_EQ(Fit("abcdef", 4), "abc~");
  EXPECT_EQ(Fit("abcdef", 0), "");
  EXPECT_EQ(TextOf(Clip({{"ab"}, {"█▒·"}, {"cd"}}, 4)), "ab█▒");
  EXPECT_EQ(TextOf(Clip({{"ab"}}, 9)), "ab");
  EXPECT_EQ(TextOf(Clip({{"ab"}}, -1)), "");
  EXPECT_EQ(Cells("█▒a"), 3);
}

TEST(BarsTest, TextIsWrapped) {
  EXPECT_THAT(Wrap("one two three", 7), ElementsAre("one two", "three"));
  EXPECT_THAT(Wrap("one two three", 8), ElementsAre("one two", "three"));
  EXPECT_THAT(Wrap("a tenletters b", 4), ElementsAre("a", "tenl", "ette", "rs b"));
  EXPECT_THAT(Wrap("short", 80), ElementsAre("short"));
  EXPECT_THAT(Wrap("", 80), ElementsAre(""));
  EXPECT_THAT(Wrap("ab", 0), ElementsAre("a", "b"));
}

TEST(BarsTest, NoItemIsCutOrLost) {
  const auto packed = [](const std::vector<Line>& items, int width) {
    std::vector<std::string> lines;
    for (const Line& line : Pack(items, width)) lines.push_back(TextOf(line));
    return lines;
  };
  EXPECT_THAT(packed({{{"█"}, {" one"}}, {{"two"}}, {{"three"}}}, 11), ElementsAre("█ one   two", "three"));
  EXPECT_THAT(packed({{{"█"}, {" one"}}, {{"two"}}, {{"three"}}}, 10), ElementsAre("█ one", "two", "three"));
  EXPECT_THAT(packed({{{"longer than that"}}, {{"b"}}}, 4), ElementsAre("longer than that", "b"));
  EXPECT_THAT(packed({}, 4), ElementsAre());
}

TEST(BarsTest, ShortBytesAreShort) {
  EXPECT_EQ(ShortBytes(0), "0");
  EXPECT_EQ(ShortBytes(999), "999B");
  EXPECT_EQ(ShortBytes(1000), "0.98K");
  EXPECT_EQ(ShortBytes(20_MiB), "20.0M");
  EXPECT_EQ(ShortBytes(1_GiB + 512_MiB), "1.50G");
  EXPECT_EQ(ShortBytes(512_GiB), "512G");
  EXPECT_EQ(ShortBytes(std::numeric_limits<uint64_t>::max()), "16.0E");
  for (uint64_t bytes = 1; bytes < uint64_t{1} << 62; bytes += bytes / 37 + 1) {
    EXPECT_LE(ShortBytes(bytes).size(), 6u) << bytes;
  }
}

TEST(BarsTest, ColoursOnlyWhereWanted) {
  const Line line = {{"ab", Style::kAlarm}, {"c"}};
  EXPECT_EQ(Render(line, false), "abc");
  EXPECT_EQ(Render(line, true), "\x1b[1;31mab\x1b[0mc");
}

// ---- Figures ----

v1::SessionDevice Device(uint32_t ordinal, uint64_t reserved, uint64_t allocated, uint64_t idle) {
  v1::SessionDevice device;
  device.set_device(ordinal);
  device.set_limit_bytes(100_MiB);
  device.set_reserved_bytes(reserved);
  device.set_idle_bytes(idle);
  device.mutable_stats()->mutable_allocated_bytes()->mutable_all()->set_current(allocated);
  device.mutable_stats()->mutable_active_bytes()->mutable_all()->set_current(allocated);
  device.mutable_stats()->mutable_inactive_split_bytes()->mutable_all()->set_current(
      reserved - std::min(reserved, allocated + idle));
  return device;
}

v1::Session Session(uint64_t id, const std::string& name, const std::vector<v1::SessionDevice>& devices) {
  v1::Session session;
  session.set_id(id);
  session.set_name(name);
  session.set_pid(static_cast<int32_t>(1000 - id));
  session.set_uid(7);
  session.set_tenant("uid:7");
  session.set_state(v1::SESSION_STATE_ACTIVE);
  for (const v1::SessionDevice& device : devices) *session.add_devices() = device;
  return session;
}

TopData Data(const std::vector<v1::Session>& sessions, int devices = 1) {
  TopData data;
  data.overview.devices.set_daemon_version("1.2.3");
  for (int i = 0; i < devices; ++i) {
    v1::Device* device = data.overview.devices.add_devices();
    device->set_ordinal(static_cast<uint32_t>(i));
    device->set_name("simulated");
    device->set_capacity_bytes(256_MiB);
  }
  for (const v1::Session& session : sessions) *data.overview.sessions.add_sessions() = session;
  data.read_at = absl::FromUnixSeconds(3661);
  return data;
}

TEST(OverviewTest, PartsOfASessionAddUpToItsLimit) {
  v1::SessionDevice device = Device(0, 40_MiB, 20_MiB, 8_MiB);
  device.mutable_stats()->mutable_active_bytes()->mutable_all()->set_current(22_MiB);
  device.mutable_stats()->mutable_inactive_split_bytes()->mutable_all()->set_current(10_MiB);
  const PartBytes parts = PartsOf(device);
  EXPECT_EQ(parts[Part::kAllocated], 20_MiB);
  EXPECT_EQ(parts[Part::kPending], 2_MiB);
  EXPECT_EQ(parts[Part::kReclaimable], 8_MiB);
  EXPECT_EQ(parts[Part::kFragmented], 10_MiB);
  EXPECT_EQ(parts[Part::kFree], 60_MiB);
  EXPECT_EQ(parts.Sum(), 100_MiB);
}

TEST(OverviewTest, FiguresOlderThanTheLedgerMakeNoBarLonger) {
  EXPECT_EQ(PartsOf(Device(0, 10_MiB, 50_MiB, 50_MiB)).Sum(), 100_MiB);
  const PartBytes over = PartsOf(Device(0, 140_MiB, 120_MiB, 0));
  EXPECT_EQ(over[Part::kFree], 0u);
  EXPECT_EQ(over.Sum(), 140_MiB);
}

// A remote session's allocator belongs to the daemon, and does not know the memory carried over from an earlier run.
TEST(OverviewTest, WhatARemoteSessionCarriesOverIsNotFragmented) {
  v1::SessionDevice remote = Device(0, 40_MiB, 20_MiB, 8_MiB);
  remote.set_reserved_bytes(70_MiB);
  remote.set_carried_over_bytes(30_MiB);
  EXPECT_EQ(PartsOf(remote)[Part::kFragmented], 12_MiB);
  EXPECT_EQ(PartsOf(remote).Sum(), 100_MiB);
  EXPECT_EQ(PartsOf(remote)[Part::kUnknown], 30_MiB);
  EXPECT_DOUBLE_EQ(FragmentedShare(PartsOf(remote)), 12.0 / 70) << "the rest is allocated, reclaimable or unknown";
  // A leasing session's counts include all its memory.
  v1::SessionDevice leasing = Device(0, 10_MiB, 10_MiB, 0);
  leasing.set_carried_over_bytes(10_MiB);
  EXPECT_EQ(PartsOf(leasing)[Part::kUnknown], 0u);

  TopData data = Data({Session(1, "remote", {remote}), Session(2, "leasing", {leasing})});
  v1::Device& device = *data.overview.devices.mutable_devices(0);
  device.set_reserved_bytes(80_MiB);
  device.set_carried_over_bytes(40_MiB);
  EXPECT_EQ(PartsOf(data.overview, device)[Part::kFragmented], 12_MiB);
  EXPECT_EQ(PartsOf(data.overview, device)[Part::kUnknown], 30_MiB);
  EXPECT_DOUBLE_EQ(FragmentedShare(PartsOf(data.overview, device)), 12.0 / 80);
  EXPECT_EQ(DevicesJson(data.overview)[0]["unknown_bytes"], 30_MiB);
  EXPECT_DOUBLE_EQ(DevicesJson(data.overview)[0]["fragmentation_ratio"], 1 - 30.0 / 50);
  EXPECT_TRUE(absl::StrContains(StatusText(data.overview),
                                "40.00 MiB carried over from an earlier run of the daemon, "
                                "30.00 MiB of it unknown"))
      << StatusText(data.overview);
}

TEST(StatusTest, IsAtMost100ColumnsWide) {
  TopData data = Data({Session(1, "a", {Device(0, 40_GiB, 30_GiB, 4_GiB)})}, /*devices=*/8);
  for (v1::Device& device : *data.overview.devices.mutable_devices()) {
    device.set_kind(v1::DEVICE_KIND_CUDA);
    device.set_name("NVIDIA RTX PRO 6000 Blackwell Workstation Edition");
    device.set_capacity_bytes(79_GiB);
    device.set_reserved_bytes(50_GiB);
    device.set_idle_bytes(1023_MiB);
    device.set_carried_over_bytes(1023_MiB);
    device.set_free_bytes(28_GiB);
  }
  const std::string exact = StatusText(data.overview);
  EXPECT_LE(WidthOf(exact), 100u) << exact;
  EXPECT_TRUE(
      absl::StrContains(exact, "Device 7: cuda, NVIDIA RTX PRO 6000 Blackwell Workstation Edition, 28.00 GiB free\n"))
      << exact;
  EXPECT_TRUE(absl::StrContains(exact, "  1023.00 MiB  ")) << exact;

  // Sizes of the greatest length are shown in short form.
  v1::Session* const session = data.overview.sessions.mutable_sessions(0);
  *session->mutable_devices(0) = Device(0, 3 * 1023_GiB, 1023_GiB, 1023_GiB);
  v1::ListQuarantineResponse::Holding* holding = data.overview.quarantine.add_holdings();
  holding->set_bytes(1023_GiB);
  v1::Device& first = *data.overview.devices.mutable_devices(0);
  first.set_capacity_bytes(1023_GiB);
  first.set_reserved_bytes(1023_GiB);
  first.set_idle_bytes(1023_GiB);
  const std::string brief = StatusText(data.overview);
  EXPECT_LE(WidthOf(brief), 100u) << brief;
  EXPECT_TRUE(absl::StrContains(brief, "  1.00T  ")) << brief;
}

TEST(StatusTest, SaysWhatIsFreeAndThatNothingIsBelowWhatIsCarriedOver) {
  TopData data = Data({Session(1, "a", {Device(0, 40_MiB, 30_MiB, 4_MiB)})});
  v1::Device& device = *data.overview.devices.mutable_devices(0);
  device.set_capacity_bytes(256_MiB);
  device.set_reserved_bytes(60_MiB);
  device.set_idle_bytes(20_MiB);
  EXPECT_THAT(StatusText(data.overview), HasSubstr(", 216.00 MiB free\n")) << "of an older daemon: with what is cached";
  device.set_free_bytes(200_MiB);
  EXPECT_THAT(StatusText(data.overview), HasSubstr(", 200.00 MiB free\n\n"));
  device.set_kept_free_bytes(16_MiB);
  EXPECT_THAT(StatusText(data.overview), HasSubstr("free\n  16.00 MiB more is kept free for guarantees\n"));
  device.set_carried_over_bytes(256_MiB);
  EXPECT_THAT(StatusText(data.overview), Not(HasSubstr("more than the capacity")));
  device.set_carried_over_bytes(300_MiB);
  EXPECT_THAT(StatusText(data.overview),
              HasSubstr("That is more than the capacity: nobody gets more memory until 44.00 MiB of it is back\n"));
}

TEST(OverviewTest, MemoryOfNobodyIsNeitherReclaimableNorFragmented) {
  v1::Session ended = Session(2, "ended", {Device(0, 30_MiB, 20_MiB, 0)});
  ended.set_state(v1::SESSION_STATE_ENDED);
  TopData data = Data({Session(1, "a", {Device(0, 40_MiB, 30_MiB, 4_MiB)}), ended});
  v1::ListQuarantineResponse::Holding* holding = data.overview.quarantine.add_holdings();
  holding->set_bytes(6_MiB);
  v1::Device& device = *data.overview.devices.mutable_devices(0);
  device.set_reserved_bytes(86_MiB);
  device.set_idle_bytes(10_MiB);
  const PartBytes parts = PartsOf(data.overview, device);
  EXPECT_EQ(parts[Part::kAllocated], 50_MiB) << "its process lives";
  EXPECT_EQ(parts[Part::kFragmented], 16_MiB);
  EXPECT_EQ(parts[Part::kReclaimable], 4_MiB);
  EXPECT_EQ(parts[Part::kCached], 10_MiB);
  EXPECT_EQ(parts[Part::kLeftBehind], 6_MiB);
  EXPECT_EQ(parts[Part::kFree], 170_MiB);
  EXPECT_EQ(HeldBySessions(data.overview, device), 70_MiB);
  EXPECT_DOUBLE_EQ(FragmentedShare(parts), 16.0 / 70) << "4 MiB is reclaimable, and 16 MiB belongs to nobody";

  data.overview.sessions.clear_sessions();
  EXPECT_EQ(FragmentedShare(PartsOf(data.overview, device)), 0);
}

// ---- The table ----

std::string UserName(uint32_t uid) {
  return absl::StrCat("user", uid);
}

std::vector<std::string> Names(const std::vector<TopRow>& rows) {
  std::vector<std::string> names;
  names.reserve(rows.size());
  for (const TopRow& row : rows) names.push_back(absl::StrCat(row.name, row.device));
  return names;
}

std::vector<TopRow> ThreeRows() {
  v1::ListSessionsResponse sessions;
  *sessions.add_sessions() = Session(1, "c", {Device(0, 10_MiB, 10_MiB, 0)});
  *sessions.add_sessions() = Session(2, "a", {Device(0, 30_MiB, 10_MiB, 20_MiB)});
  *sessions.add_sessions() = Session(3, "B", {Device(0, 20_MiB, 5_MiB, 0)});
  return RowsOf(sessions, UserName, absl::FromUnixSeconds(3661));
}

TEST(TopTableTest, ARowForEachDeviceInUse) {
  v1::ListSessionsResponse sessions;
  v1::SessionDevice guaranteed = Device(2, 0, 0, 0);
  guaranteed.set_guarantee_bytes(1_MiB);
  *sessions.add_sessions() = Session(1, "a", {Device(0, 0, 0, 0), Device(1, 2_MiB, 0, 0), guaranteed});
  *sessions.add_sessions() = Session(2, "idle", {Device(0, 0, 0, 0), Device(1, 0, 0, 0)});
  const std::vector<TopRow> rows = RowsOf(sessions, UserName, absl::FromUnixSeconds(3661));
  EXPECT_THAT(Names(rows), ElementsAre("a1", "a2", "idle0"));
  EXPECT_EQ(rows[0].user, "user7");
  EXPECT_EQ(rows[0].state, "active");
}

TEST(TopTableTest, SortsByEveryColumn) {
  std::vector<TopRow> rows = ThreeRows();
  const auto sorted = [&](Column column, bool reverse = false) {
    Sort(rows, column, reverse);
    return Names(rows);
  };
  EXPECT_THAT(sorted(Column::kReserved), ElementsAre("a0", "B0", "c0"));
  EXPECT_THAT(sorted(Column::kReserved, true), ElementsAre("c0", "B0", "a0"));
  EXPECT_THAT(sorted(Column::kName), ElementsAre("B0", "a0", "c0"));
  EXPECT_THAT(sorted(Column::kPid), ElementsAre("B0", "a0", "c0"));
  EXPECT_THAT(sorted(Column::kAllocated), ElementsAre("a0", "c0", "B0"));  // equal rows are in order of their names
  EXPECT_THAT(sorted(Column::kAllocated, true), ElementsAre("B0", "a0", "c0"));
  EXPECT_THAT(sorted(Column::kFragmentation), ElementsAre("B0", "a0", "c0"));  // excludes reclaimable memory
  for (int column = 0; column < kColumns; ++column) {
    EXPECT_EQ(sorted(static_cast<Column>(column)).size(), 3u);
    const absl::StatusOr<Column> parsed = ParseColumn(ColumnName(static_cast<Column>(column)));
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(*parsed, static_cast<Column>(column));
  }
  EXPECT_THAT(std::string(ParseColumn("size").status().message()), HasSubstr("'size'; there are: name, tenant"));
}

TEST(TopTableTest, FiltersByName) {
  std::vector<TopRow> rows = ThreeRows();
  Filter(rows, "");
  EXPECT_EQ(rows.size(), 3u);
  Filter(rows, "b");
  EXPECT_THAT(Names(rows), ElementsAre("B0"));
}

TEST(TopTableTest, LeastImportantColumnsGoFirst) {
  const std::vector<TopRow> rows = ThreeRows();
  const TableLayout wide = LayOut(rows, 200, true);
  EXPECT_EQ(wide.columns.size(), static_cast<size_t>(kColumns));
  EXPECT_EQ(LayOut(rows, 200, false).columns.size(), static_cast<size_t>(kColumns) - 1);
  for (int width = 1; width < 200; ++width) {
    const TableLayout layout = LayOut(rows, width, true);
    ASSERT_FALSE(layout.columns.empty());
    EXPECT_EQ(layout.columns[0].column, Column::kName);
    const int cells = Cells(RowLine(layout, rows[0], true));
    if (layout.bar_width == 0) continue;
    EXPECT_EQ(cells, width);
    EXPECT_GE(layout.bar_width, kLeastBar);
  }
  std::vector<Column> narrow;
  for (const TableLayout::Shown& shown : LayOut(rows, 50, false).columns) narrow.push_back(shown.column);
  EXPECT_THAT(narrow, ElementsAre(Column::kName, Column::kPid, Column::kLimit, Column::kReserved, Column::kAllocated));
}

// ---- The view ----

class TopViewTest : public ::testing::Test {
 protected:
  static std::vector<std::string> Screen(TopView& view, int rows = 24, int columns = 100) {
    std::vector<std::string> lines;
    for (const Line& line : view.Draw(rows, columns)) {
      EXPECT_LE(Cells(line), columns);
      lines.push_back(TextOf(line));
    }
    EXPECT_EQ(lines.size(), static_cast<size_t>(rows));
    return lines;
  }
  static std::string Text(TopView& view, int rows = 24, int columns = 100) {
    std::string text;
    for (const std::string& line : Screen(view, rows, columns)) absl::StrAppend(&text, line, "\n");
    return text;
  }
  // Returns the name at the beginning of the line about the selected session.
  static std::string Selected(TopView& view) {
    const std::string line = Screen(view)[21];
    return line.substr(0, line.find(' '));
  }
  static void Type(TopView& view, const std::string& keys) {
    for (const char key : keys) EXPECT_TRUE(view.HandleKey(key));
  }

  TopView view_{{.user_name = UserName, .time_zone = absl::UTCTimeZone()}};
  const TopData data_ = Data({Session(1, "trainer", {Device(0, 40_MiB, 10_MiB, 20_MiB)}),
                              Session(2, "server", {Device(0, 30_MiB, 30_MiB, 0)}),
                              Session(3, "notebook", {Device(0, 2_MiB, 1_MiB, 0)})});
};

TEST_F(TopViewTest, ShowsDevicesAndSessions) {
  view_.SetData(data_);
  const std::string text = Text(view_);
  EXPECT_THAT(text, HasSubstr("vrambrokerd 1.2.3  01:01:01  3 sessions, 0 requests wait; sorted by reserved"));
  EXPECT_THAT(text, HasSubstr("allocated 41.00 MiB"));
  EXPECT_THAT(text, HasSubstr("reclaimable 20.00 MiB"));
  EXPECT_THAT(text, HasSubstr("unreserved 184.00 MiB"));
  EXPECT_LT(text.find("trainer "), text.find("server "));
  EXPECT_LT(text.find("server "), text.find("notebook "));
  EXPECT_THAT(text, HasSubstr("40.0M"));
  EXPECT_THAT(text, HasSubstr(" 25.0% "));  // 10 of 40 MiB: reclaimable memory is no hole
  EXPECT_THAT(text, HasSubstr("no request was refused"));
  EXPECT_THAT(text, HasSubstr("h help"));
}

TEST_F(TopViewTest, IsWrittenAsText) {
  view_.SetData(data_);
  const std::string text = view_.Write(100);
  EXPECT_THAT(text, HasSubstr(" MiB free of 256.00 MiB, "));
  for (const char* name : {"trainer", "server", "notebook"})
    EXPECT_THAT(text, HasSubstr(absl::StrCat("\n", name, " ")));
  EXPECT_THAT(text, Not(HasSubstr("\x1b")));
  EXPECT_THAT(text, Not(HasSubstr("h help")));
  EXPECT_THAT(text, Not(HasSubstr(" \n"))) << "no more than there is";
  EXPECT_EQ(text.substr(text.size() - 23), "no request was refused\n");

  TopData refused = data_;
  const std::string advice = absl::StrCat(std::string(150, 'a'), ", or ask for less");
  refused.refusals.add_events()->mutable_out_of_memory()->set_advice(advice);
  view_.SetData(refused);
  EXPECT_THAT(view_.Write(100), HasSubstr(absl::StrCat(advice, "\n"))) << "whole";
}

TEST_F(TopViewTest, KeysSortAndSelect) {
  view_.SetData(data_);
  EXPECT_EQ(Selected(view_), "trainer");
  Type(view_, "n");
  EXPECT_THAT(Text(view_), HasSubstr("sorted by name"));
  EXPECT_EQ(Selected(view_), "trainer");  // selection follows the session
  view_.HandleKey(kKeyUp);
  EXPECT_EQ(Selected(view_), "server");
  view_.HandleKey(kKeyHome);
  EXPECT_EQ(Selected(view_), "notebook");
  view_.HandleKey(kKeyUp);
  EXPECT_EQ(Selected(view_), "notebook");
  view_.HandleKey(kKeyPageDown);
  EXPECT_EQ(Selected(view_), "trainer");
  Type(view_, "R");
  EXPECT_THAT(Text(view_), HasSubstr("sorted by name, reversed"));
  view_.HandleKey(kKeyHome);
  EXPECT_EQ(Selected(view_), "trainer");
  Type(view_, ">");
  EXPECT_THAT(Text(view_), HasSubstr("sorted by tenant"));
  Type(view_, "<<");
  EXPECT_THAT(Text(view_), HasSubstr("sorted by command"));
  EXPECT_FALSE(view_.HandleKey('q'));
  EXPECT_FALSE(view_.HandleKey(kKeyQuit));
}

TEST_F(TopViewTest, Filters) {
  view_.SetData(data_);
  Type(view_, "/ERx");
  EXPECT_THAT(Text(view_), HasSubstr("name contains: ERx_"));
  EXPECT_THAT(Text(view_), HasSubstr("no session's name contains that"));
  view_.HandleKey(kKeyBackspace);
  view_.HandleKey(kKeyEnter);
  EXPECT_THAT(Text(view_), HasSubstr("only *ER*"));
  EXPECT_THAT(Text(view_), HasSubstr("\nserver"));
  EXPECT_THAT(Text(view_), Not(HasSubstr("notebook")));
  view_.HandleKey(kKeyEscape);
  EXPECT_THAT(Text(view_), HasSubstr("notebook"));
}

TEST_F(TopViewTest, FrozenPicturesStandStill) {
  view_.SetData(data_);
  Type(view_, " ");
  view_.SetData(Data({}));
  EXPECT_THAT(Text(view_), HasSubstr("FROZEN"));
  EXPECT_THAT(Text(view_), HasSubstr("trainer"));
  Type(view_, " ");
  view_.SetData(Data({}));
  EXPECT_THAT(Text(view_), Not(HasSubstr("FROZEN")));
  EXPECT_THAT(Text(view_), HasSubstr("no sessions"));
}

TEST_F(TopViewTest, SaysThatTheDaemonIsGone) {
  TopData lost = data_;
  lost.status = absl::UnavailableError("nobody\x1b[2J there");
  lost.failing_since = absl::FromUnixSeconds(7200);
  view_.SetData(lost);
  EXPECT_THAT(Text(view_), HasSubstr("no daemon since 02:00:00; trying again. nobody\\x1b[2J there"));
  EXPECT_THAT(Text(view_), HasSubstr("trainer"));  // figures read before
  view_.SetData(data_);
  EXPECT_THAT(Text(view_), Not(HasSubstr("no daemon")));
}

TEST_F(TopViewTest, NamesDoNotCommandTheTerminal) {
  TopData hostile = Data({Session(1, "a\x1b]0;x\x07", {Device(0, 2_MiB, 0, 0)})});
  hostile.overview.sessions.mutable_sessions(0)->set_tenant("t\n\n");
  hostile.overview.devices.mutable_devices(0)->set_name("gpu\x1b[31m");
  hostile.overview.devices.mutable_devices(0)->set_fault("bad\r");
  hostile.overview.devices.set_daemon_version("\x1b");
  v1::OutOfMemoryEvent* event = hostile.refusals.add_events();
  event->set_client("c\x1b");
  event->mutable_out_of_memory()->set_advice("do\bit");
  view_.SetData(hostile);
  for (const std::string& line : Screen(view_, 40, 250)) {
    for (const char c : line) EXPECT_TRUE(c >= ' ' && c != '\x7f') << line;
  }
  EXPECT_THAT(Text(view_, 40, 250), HasSubstr("a\\x1b]0;x\\x07"));
}

TEST_F(TopViewTest, HelpComesAndGoes) {
  view_.SetData(data_);
  Type(view_, "?");
  EXPECT_THAT(Text(view_), HasSubstr("cannot be given back"));
  EXPECT_THAT(Text(view_), Not(HasSubstr("trainer")));
  Type(view_, "q");
  EXPECT_THAT(Text(view_), HasSubstr("trainer"));
  EXPECT_THAT(Text(view_), HasSubstr("sorted by reserved"));
}

TEST_F(TopViewTest, EverySizeIsDrawn) {
  std::vector<v1::Session> sessions;
  for (uint64_t id = 1; id <= 50; ++id) {
    sessions.push_back(Session(id, absl::StrCat("s", id), {Device(0, id * 1_MiB, 0, 0), Device(1, id, 0, 0)}));
  }
  view_.SetData(Data(sessions, 9));
  for (int rows = 1; rows < 60; ++rows) {
    for (const int columns : {1, 2, 20, 79, 80, 300}) Screen(view_, rows, columns);
  }
  // The selected row stays in sight.
  view_.HandleKey(kKeyEnd);
  EXPECT_THAT(Text(view_), HasSubstr("\ns1 "));
  view_.HandleKey(kKeyHome);
  EXPECT_THAT(Text(view_), HasSubstr("\ns50 "));
}

TEST_F(TopViewTest, LastRefusal) {
  TopData data = data_;
  data.refusals.set_total_events(12);
  v1::OutOfMemoryEvent* event = data.refusals.add_events();
  event->set_client("server");
  event->mutable_time()->set_seconds(3600);
  event->mutable_out_of_memory()->set_cause(v1::OutOfMemory::CAUSE_LIMIT);
  event->mutable_out_of_memory()->set_requested_bytes(80_MiB);
  event->mutable_out_of_memory()->set_advice("Free something.");
  view_.SetData(data);
  EXPECT_THAT(Text(view_),
              HasSubstr("12 refusals, last 01:00:00 server wanted 80.00 MiB on device 0: limit. Free something."));
}

// ---- Changes from the view ----

class TopQuestionTest : public TopViewTest {
 protected:
  void SetUp() override { view_.SetData(data_); }
  // Presses Enter, or another key without a character.
  void Press(Key key) { EXPECT_TRUE(view_.HandleKey(key)); }
  // Returns the screen as one line, so that line breaks do not matter.
  std::string Shown(int rows = 24, int columns = 100) {
    std::string text = Text(view_, rows, columns);
    std::replace(text.begin(), text.end(), '\n', ' ');
    return text;
  }
  // Returns the data without session `id`.
  TopData Without(uint64_t id) const {
    std::vector<v1::Session> sessions;
    for (const v1::Session& session : data_.overview.sessions.sessions()) {
      if (session.id() != id) sessions.push_back(session);
    }
    return Data(sessions);
  }
};

TEST_F(TopQuestionTest, EndAsksAndNamesTheSession) {
  Type(view_, "j");
  EXPECT_EQ(Selected(view_), "server");
  Type(view_, "E");
  EXPECT_THAT(Shown(), HasSubstr("End session server (id 2, uid 7)? Its memory is charged until the process gives it "
                                 "back. y/N"));
  EXPECT_FALSE(view_.TakeOrder().has_value());
  Type(view_, "y");
  const std::optional<SessionOrder> order = view_.TakeOrder();
  ASSERT_TRUE(order.has_value());
  EXPECT_EQ(order->session.id(), 2u);
  EXPECT_TRUE(std::holds_alternative<EndChange>(order->change));
  EXPECT_FALSE(view_.TakeOrder().has_value());  // view gives an order once
  EXPECT_THAT(Shown(), HasSubstr("End session server (id 2, uid 7): waiting for the daemon"));
  view_.SetResult(std::vector<std::string>{"ended; 30.00 MiB stays charged"});
  EXPECT_THAT(Shown(), HasSubstr("server (id 2): ended; 30.00 MiB stays charged"));
  view_.SetData(data_);
  EXPECT_THAT(Shown(), HasSubstr("stays charged"));
  Press(kKeyEscape);
  EXPECT_THAT(Shown(), Not(HasSubstr("stays charged")));
}

TEST_F(TopQuestionTest, OnlyYesActs) {
  for (const int key : {int{'n'}, int{'N'}, int{'q'}, int{kKeyEnter}, int{kKeyEscape}}) {
    Type(view_, "T");
    EXPECT_THAT(Shown(), HasSubstr("Trim session trainer (id 1, uid 7)? It gives back what is reclaimable, 20.00 MiB "
                                   "now. y/N"));
    EXPECT_TRUE(view_.HandleKey(key));
    EXPECT_THAT(Shown(), Not(HasSubstr("y/N")));
    EXPECT_THAT(Shown(), HasSubstr("Nothing was done."));
    EXPECT_FALSE(view_.TakeOrder().has_value());
  }
  Type(view_, "T");
  for (const int key : {int{'T'}, int{'E'}, int{' '}, int{'R'}, int{kKeyDown}, int{kKeyOther}}) {
    EXPECT_TRUE(view_.HandleKey(key));
    EXPECT_THAT(Shown(), HasSubstr("Trim session trainer (id 1, uid 7)?"));
  }
  EXPECT_FALSE(view_.TakeOrder().has_value());
  EXPECT_FALSE(view_.HandleKey(kKeyQuit));
}

TEST_F(TopQuestionTest, ALimitIsTypedAndReadAsByTheCommand) {
  Type(view_, "L");
  EXPECT_THAT(Shown(), HasSubstr("The limit of session trainer (id 1, uid 7) is 100.00 MiB."));
  Type(view_, "lots");
  Press(kKeyEnter);
  EXPECT_THAT(Shown(), HasSubstr("'lots' is not a share or a size"));
  for (int i = 0; i < 9; ++i) Press(kKeyBackspace);
  EXPECT_THAT(Shown(), Not(HasSubstr("'lots'")));
  Type(view_, "80");
  Press(kKeyEnter);
  EXPECT_THAT(Shown(), HasSubstr("'80' is ambiguous"));
  Type(view_, "MiB");
  Press(kKeyEnter);
  EXPECT_THAT(Shown(), HasSubstr("Set the limit of session trainer (id 1, uid 7) to 80.00 MiB? It is 100.00 MiB now. "
                                 "Memory in use is never taken away. y/N"));
  Type(view_, "Y");
  const std::optional<SessionOrder> order = view_.TakeOrder();
  ASSERT_TRUE(order.has_value());
  EXPECT_EQ(std::get<uint64_t>(std::get<LimitChange>(order->change).limit), 80_MiB);

  view_.SetResult(absl::PermissionDeniedError("uid 7 may not\x1b[2J"));
  EXPECT_THAT(Shown(), HasSubstr("Failed: Set the limit of session trainer (id 1, uid 7) to 80.00 MiB: uid 7 may "
                                 "not\\x1b[2J"));
  Type(view_, "L0.5");
  Press(kKeyEnter);
  EXPECT_THAT(Shown(), HasSubstr("to 0.5 of the capacity? "));
  Press(kKeyEscape);
  Type(view_, "L4MiB");
  Press(kKeyEnter);
  EXPECT_THAT(Shown(), HasSubstr("the session holds more, and cannot grow before it holds less. y/N"));
}

TEST_F(TopQuestionTest, APriorityIsTyped) {
  Type(view_, "P1x");
  Press(kKeyEnter);
  EXPECT_THAT(Shown(), HasSubstr("priority: '1x' is not a whole number"));
  Press(kKeyBackspace);
  Type(view_, "0");
  Press(kKeyEnter);
  EXPECT_THAT(Shown(), HasSubstr("Set the priority of session trainer (id 1, uid 7) to 10? It is 0 now."));
  Type(view_, "y");
  const std::optional<SessionOrder> order = view_.TakeOrder();
  ASSERT_TRUE(order.has_value());
  EXPECT_EQ(std::get<PriorityChange>(order->change).priority, 10);
}

TEST_F(TopQuestionTest, OneChangeAtATime) {
  Type(view_, "Ty");
  ASSERT_TRUE(view_.TakeOrder().has_value());
  Type(view_, "E");
  EXPECT_THAT(Shown(), HasSubstr("waiting for the daemon; the next change has to wait, too"));
  Type(view_, "y");
  EXPECT_FALSE(view_.TakeOrder().has_value());
  view_.SetResult(absl::UnavailableError("gone"));
  Type(view_, "E");
  EXPECT_THAT(Shown(), HasSubstr("y/N"));
}

TEST_F(TopQuestionTest, ASessionThatEndedMeanwhileIsLeftAlone) {
  Type(view_, "E");
  view_.SetData(Without(3));
  EXPECT_THAT(Shown(), HasSubstr("End session trainer (id 1, uid 7)?"));
  TopData lost = Data({});
  lost.status = absl::UnavailableError("nobody there");
  view_.SetData(lost);  // an unknown session has not ended
  EXPECT_THAT(Shown(), HasSubstr("End session trainer (id 1, uid 7)?"));
  view_.SetData(Without(1));
  EXPECT_THAT(Shown(), HasSubstr("Nothing was done: session trainer (id 1, uid 7) has ended."));
  Type(view_, "y");
  EXPECT_FALSE(view_.TakeOrder().has_value());
}

TEST_F(TopQuestionTest, AnotherSessionWithTheSameIdOrNameIsLeftAlone) {
  const std::vector<std::function<void(v1::Session&)>> others = {
      [](v1::Session& session) { session.set_name("thief"); },
      [](v1::Session& session) { session.set_id(9); },
      [](v1::Session& session) { session.set_pid(4); },
      [](v1::Session& session) { session.set_uid(4); },
      [](v1::Session& session) { session.mutable_started()->set_nanos(1); },
      [](v1::Session& session) { session.set_state(v1::SESSION_STATE_ENDED); }};
  for (const auto& other : others) {
    for (const bool frozen : {false, true}) {
      view_.SetData(data_);
      view_.HandleKey(kKeyHome);
      Type(view_, frozen ? " E" : "E");
      EXPECT_THAT(Shown(), HasSubstr("End session trainer (id 1, uid 7)?"));
      TopData data = data_;
      other(*data.overview.sessions.mutable_sessions(0));
      view_.SetData(data);
      EXPECT_THAT(Shown(), HasSubstr("session trainer (id 1, uid 7) has ended."));
      Type(view_, "y");
      EXPECT_FALSE(view_.TakeOrder().has_value());
      if (frozen) Type(view_, " ");
    }
  }
}

TEST_F(TopQuestionTest, WithoutASessionThereIsNothingToAsk) {
  view_.SetData(Data({}));
  Type(view_, "E");
  EXPECT_THAT(Shown(), HasSubstr("No session is selected."));
  v1::Session ended = Session(4, "ended", {Device(0, 2_MiB, 0, 0)});
  ended.set_state(v1::SESSION_STATE_ENDED);
  view_.SetData(Data({ended}));
  Type(view_, "L");
  EXPECT_THAT(Shown(), HasSubstr("Nothing to do: session ended (id 4, uid 7) has ended."));
}

TEST_F(TopQuestionTest, IsWholeOnSmallTerminals) {
  Type(view_, "E");
  const std::string question =
      "End session trainer (id 1, uid 7)? Its memory is charged until the process gives it back. y/N";
  for (const int columns : {20, 40, 41, 80, 120}) EXPECT_THAT(Shown(5, columns), HasSubstr(question)) << columns;
  for (int rows = 1; rows < 30; ++rows) {
    for (const int columns : {1, 2, 20, 40, 300}) Screen(view_, rows, columns);
  }
  Type(view_, "y");
  view_.SetResult(absl::PermissionDeniedError("uid 1000 may not change sessions: no rule gives it the right ADMIN"));
  EXPECT_THAT(Shown(5, 40), HasSubstr("Failed: End session trainer (id 1, uid 7): uid 1000 may not change sessions: no "
                                      "rule gives it the right ADMIN"));
  Press(kKeyEscape);
  // The selected row and the keys are visible, too.
  EXPECT_THAT(Text(view_, 5, 40), HasSubstr("\ntrainer "));
  EXPECT_THAT(Text(view_, 5, 40), HasSubstr("\nh help  q quit  L limit  T trim  E end\n"));
}

TEST_F(TopQuestionTest, HostileNamesDoNotCommandTheTerminal) {
  view_.SetData(Data({Session(1, "a\x1b]0;x\x07", {Device(0, 2_MiB, 0, 0)})}));
  for (const char* keys : {"E", "nT", "nP", "\x7f"}) {
    Type(view_, keys);
    for (const std::string& line : Screen(view_, 24, 40)) {
      for (const char c : line) EXPECT_TRUE(c >= ' ' && c != '\x7f') << line;
    }
  }
}

TEST_F(TopQuestionTest, TheSelectionStaysWithItsSession) {
  Type(view_, "jk");
  EXPECT_EQ(Selected(view_), "trainer");
  Type(view_, "j");
  EXPECT_EQ(Selected(view_), "server");
  // The session is on another device now.
  TopData moved = data_;
  moved.overview.sessions.mutable_sessions(1)->mutable_devices(0)->set_device(1);
  view_.SetData(moved);
  EXPECT_EQ(Selected(view_), "server");
  // The next session takes the ended session's place.
  view_.SetData(Without(2));
  EXPECT_EQ(Selected(view_), "notebook");
  // The next run of the daemon gives the id to another session.
  TopData next = data_;
  next.overview.sessions.set_run_id("next");
  next.overview.sessions.mutable_sessions(1)->set_id(3);
  next.overview.sessions.mutable_sessions(2)->set_id(2);
  view_.SetData(next);
  EXPECT_EQ(Selected(view_), "trainer");
}

// ---- The map ----

SegmentSnapshot Segment(uint64_t bytes, const std::vector<BlockSnapshot>& blocks) {
  return {.bytes = bytes, .pool = PoolKind::kLarge, .blocks = blocks};
}

std::string CellsOf(const SegmentSnapshot& segment, int cells) {
  std::string text;
  for (const MapCell cell : MapCells(segment, cells)) text += "#+-%_"[static_cast<size_t>(cell)];
  return text;
}

TEST(MapTest, CellsFollowTheBlocks) {
  const SegmentSnapshot segment =
      Segment(16_MiB, {{.offset = 0, .bytes = 4_MiB, .state = BlockState::kAllocated},
                       {.offset = 4_MiB, .bytes = 8_MiB, .state = BlockState::kFree},
                       {.offset = 12_MiB, .bytes = 2_MiB, .state = BlockState::kAllocated},
                       {.offset = 14_MiB, .bytes = 2_MiB, .state = BlockState::kPendingFree}});
  EXPECT_EQ(CellsOf(segment, 8), "##____#%");
  EXPECT_EQ(CellsOf(segment, 4), "#__%");
  EXPECT_EQ(CellsOf(segment, 3), "+_%");
  EXPECT_EQ(CellsOf(segment, 1), "%");
  EXPECT_EQ(CellsOf(segment, 0), "");
  EXPECT_EQ(CellsOf(Segment(2_MiB, {}), 3), "___");
}

TEST(MapTest, SmallHolesAreSeen) {
  std::vector<BlockSnapshot> blocks;
  for (uint64_t i = 0; i < 1024; ++i) {  // every 512th block is free
    blocks.push_back(
        {.offset = i * 1024, .bytes = 1024, .state = i % 512 == 3 ? BlockState::kFree : BlockState::kAllocated});
  }
  EXPECT_EQ(CellsOf(Segment(1_MiB, blocks), 4), "+#+#");
}

TEST(MapTest, TenThousandBlocksAreQuick) {
  std::vector<BlockSnapshot> blocks;
  for (uint64_t i = 0; i < 10'000; ++i) {
    blocks.push_back(
        {.offset = i * 512, .bytes = 512, .state = i % 2 == 0 ? BlockState::kFree : BlockState::kAllocated});
  }
  EXPECT_EQ(CellsOf(Segment(10'000 * 512, blocks), 100), std::string(100, '+'));
}

TEST(MapTest, LengthsShowSizes) {
  EXPECT_EQ(MapCellCount(100, 100, 80), 80);
  EXPECT_EQ(MapCellCount(50, 100, 80), 40);
  EXPECT_EQ(MapCellCount(1, 100, 80), kLeastMapCells);
  EXPECT_EQ(MapCellCount(1, 100, 10), 10);
  EXPECT_EQ(MapCellCount(0, 0, 80), kLeastMapCells);
}

TEST(MapTest, LinesFitTheWidthAndSayWhatBarsCannot) {
  HeapSnapshot heap;
  heap.segments = {Segment(2_MiB, {{.offset = 0, .bytes = 2_MiB, .state = BlockState::kFree}}),
                   Segment(20_MiB, {{.offset = 0, .bytes = 12_MiB, .state = BlockState::kAllocated},
                                    {.offset = 12_MiB, .bytes = 8_MiB, .state = BlockState::kFree}})};
  const std::vector<Line> lines = SegmentLines(heap, 100, Style::kSession0, false);
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_THAT(TextOf(lines[0]), HasSubstr("20.00 MiB large [####"));
  EXPECT_THAT(TextOf(lines[0]), HasSubstr("____] 1 block, a hole of 8.00 MiB"));
  EXPECT_THAT(TextOf(lines[1]), HasSubstr("[________________] 0 blocks, reclaimable"));
  EXPECT_EQ(lines[0][1].style, Style::kSession0);
  for (int width = 1; width < 200; ++width) {
    const std::vector<Line> narrow = SegmentLines(heap, width, Style::kSession0, true);
    for (const Line& line : narrow) EXPECT_LE(Cells(line), std::max(width, 60)) << "the least that map is drawn in";
    EXPECT_THAT(TextOf(narrow[0]), HasSubstr("] 1 block, a hole of 8.00 MiB")) << width;
    EXPECT_THAT(TextOf(narrow[1]), HasSubstr("] 0 blocks, reclaimable")) << width;
  }
}

// ---- The table of sessions ----

v1::ListSessionsResponse TwoSessions() {
  v1::ListSessionsResponse sessions;
  for (const char* name : {"trainer", "server"}) {
    v1::Session& session = *sessions.add_sessions();
    session.set_id(static_cast<uint64_t>(sessions.sessions_size()));
    session.set_name(name);
    session.set_pid(4242);
    session.set_uid(1000);
    session.set_state(v1::SESSION_STATE_ACTIVE);
    session.mutable_started()->set_seconds(1'000'000);
    v1::SessionDevice& device = *session.add_devices();
    device.set_limit_bytes(8_GiB);
    device.set_reserved_bytes(20_MiB);
    device.mutable_stats()->mutable_allocated_bytes()->mutable_all()->set_current(10_MiB);
  }
  return sessions;
}

TEST(SessionsTableTest, LeavesOutWhatSaysNothing) {
  EXPECT_EQ(SessionsTable(TwoSessions(), absl::FromUnixSeconds(1'000'000 + 3 * 3600 + 300), 100),
            "ID  NAME     USER   PID    AGE  LIMIT  RESERVED  ALLOCATED   FRAG\n"
            " 1  trainer  1000  4242  3h05m  8.00G     20.0M      10.0M  50.0%\n"
            " 2  server   1000  4242  3h05m  8.00G     20.0M      10.0M  50.0%\n");
}

v1::ListSessionsResponse TwoKnownSessions() {
  v1::ListSessionsResponse sessions = TwoSessions();
  v1::Session& session = *sessions.mutable_sessions(0);
  session.set_user("ann\x1b");
  session.set_command("python3 train.py");
  session.set_idle_ms(61'000);
  session.set_name("trainer-of-the-large-model-in-room-4");
  return sessions;
}

TEST(SessionsTableTest, SaysWhoseASessionIsAndWhatItRunsWhereThereIsRoom) {
  const absl::Time now = absl::FromUnixSeconds(1'000'000);
  EXPECT_EQ(
      SessionsTable(TwoKnownSessions(), now, 160),
      "ID  NAME                                  USER     COMMAND            PID  AGE  LAST USE  LIMIT  RESERVED  "
      "ALLOCATED   FRAG\n"
      " 1  trainer-of-the-large-model-in-room-4  ann\\x1b  python3 train.py  4242   0s        1m  8.00G     20.0M    "
      "  10.0M  50.0%\n"
      " 2  server                                1000     -                 4242   0s         -  8.00G     20.0M     "
      " 10.0M  50.0%\n");
  EXPECT_EQ(
      SessionsTable(TwoKnownSessions(), now, 110),
      "ID  NAME                     USER     COMMAND            PID  AGE  LAST USE  LIMIT  RESERVED  ALLOCATED   FRAG\n"
      " 1  trainer-of-the-large-m~  ann\\x1b  python3 train.py  4242   0s        1m  8.00G     20.0M      10.0M  "
      "50.0%\n"
      " 2  server                   1000     -                 4242   0s         -  8.00G     20.0M      10.0M  "
      "50.0%\n")
      << "a name is as wide as there is room";
}

TEST(SessionsTableTest, TheCommandGoesFirstThenTheLastUse) {
  const auto heading = [](int width) {
    const std::string table = SessionsTable(TwoKnownSessions(), absl::FromUnixSeconds(1'000'000), width);
    for (const absl::string_view line : absl::StrSplit(table, '\n')) EXPECT_LE(line.size(), static_cast<size_t>(width));
    return table.substr(0, table.find('\n'));
  };
  EXPECT_THAT(heading(100), AllOf(Not(HasSubstr("COMMAND")), HasSubstr(" LAST USE "), HasSubstr(" USER ")));
  EXPECT_THAT(heading(80), AllOf(Not(HasSubstr("LAST USE")), HasSubstr(" USER "), HasSubstr(" PID ")));
}

TEST(SessionsTableTest, FitsAndKeepsWhatMattersMost) {
  v1::ListSessionsResponse sessions = TwoSessions();
  v1::Session& busy = *sessions.mutable_sessions(0);
  busy.set_name(std::string(63, 'n'));
  busy.set_id(1'234'567'890);
  busy.set_user(std::string(32, 'u'));
  busy.set_command("python3 " + std::string(64, 's'));
  busy.set_idle_ms(1'000'000'000);
  busy.set_pid(4194304);
  busy.set_uid(4'000'000'000);
  busy.set_priority(-1000);
  busy.set_state(v1::SESSION_STATE_DISCONNECTED);
  v1::SessionDevice& device = *busy.mutable_devices(0);
  device.set_device(1);
  device.set_guarantee_bytes(2_GiB);
  device.mutable_stats()->set_num_ooms(123456);
  for (int i = 0; i < 3; ++i) {
    v1::WaitingRequest& waiting = *device.add_waiting();
    waiting.set_bytes(6_GiB);
    waiting.set_waited_ms(61'000);
    waiting.set_place(12);
  }
  const std::string table = SessionsTable(sessions, absl::FromUnixSeconds(1'000'000), 100);
  for (const absl::string_view line : absl::StrSplit(table, '\n')) EXPECT_LE(line.size(), 100u) << table;
  for (const char* part :
       {" STATE ", "disconnected", " DEV ", " LIMIT ", " RESERVED ", " ALLOCATED", "6.00G 1m #12 +2"}) {
    EXPECT_THAT(table, HasSubstr(part));
  }
  EXPECT_THAT(table, Not(HasSubstr(" COMMAND ")));
}

TEST(SessionsTableTest, OnlyWhatRunsCanBeOverItsLimit) {
  v1::ListSessionsResponse sessions = TwoSessions();
  v1::Session& session = *sessions.mutable_sessions(0);
  session.mutable_devices(0)->set_limit_bytes(1_MiB);
  EXPECT_STREQ(StateOn(session, session.devices(0)), "over limit");
  session.set_state(v1::SESSION_STATE_ENDED);
  EXPECT_STREQ(StateOn(session, session.devices(0)), "ended");
  EXPECT_THAT(SessionsTable(sessions, absl::FromUnixSeconds(1'000'000), 100),
              AllOf(HasSubstr("  ended  "), Not(HasSubstr("over limit"))));
  session.set_state(v1::SESSION_STATE_DISCONNECTED);
  EXPECT_STREQ(StateOn(session, session.devices(0)), "disconnected");
}

TEST(SessionsTableTest, Ages) {
  EXPECT_EQ(ShortAge(absl::Seconds(-1)), "0s");  // clocks may be set
  EXPECT_EQ(ShortAge(absl::Seconds(59.9)), "59s");
  EXPECT_EQ(ShortAge(absl::Seconds(60)), "1m");
  EXPECT_EQ(ShortAge(absl::Hours(23) + absl::Minutes(59)), "23h59m");
  EXPECT_EQ(ShortAge(absl::Hours(24 * 400)), "400d00h");
}

}  // namespace
}  // namespace vrambroker::vramctl
