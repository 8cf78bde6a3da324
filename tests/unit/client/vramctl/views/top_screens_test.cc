// SPDX-License-Identifier: Apache-2.0
//
// Small and large screens of vramctl top: the head, the columns of the table, details, and help.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "allocator/base/bytes.h"
#include "client/vramctl/views/bars.h"
#include "client/vramctl/views/top_details.h"
#include "client/vramctl/views/top_head.h"
#include "client/vramctl/views/top_help.h"
#include "client/vramctl/views/top_table.h"
#include "client/vramctl/views/top_view.h"

namespace vrambroker::vramctl {
namespace {

using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr absl::Time kReadAt = absl::FromUnixSeconds(360000);

std::string Plain(const Line& line) {
  return Render(line, /*colour=*/false);
}

std::string NameOf(uint32_t uid) {
  return absl::StrCat("user", uid);
}

v1::SessionDevice Held(uint32_t ordinal, uint64_t reserved, uint64_t allocated, uint64_t reclaimable) {
  v1::SessionDevice device;
  device.set_device(ordinal);
  device.set_limit_bytes(40_GiB);
  device.set_reserved_bytes(reserved);
  device.set_idle_bytes(reclaimable);
  v1::MemoryStats& stats = *device.mutable_stats();
  stats.mutable_allocated_bytes()->mutable_all()->set_current(allocated);
  stats.mutable_allocated_bytes()->mutable_all()->set_peak(allocated + 1_GiB);
  stats.mutable_active_bytes()->mutable_all()->set_current(allocated);
  stats.mutable_inactive_split_bytes()->mutable_all()->set_current(reserved - allocated - reclaimable);
  stats.set_largest_free_block_bytes(12_MiB);
  return device;
}

// Adds a session. Session ids count from 1.
v1::Session& AddTo(TopData& data, const std::string& name, const std::vector<v1::SessionDevice>& devices) {
  v1::Session& session = *data.overview.sessions.add_sessions();
  session.set_id(static_cast<uint64_t>(data.overview.sessions.sessions_size()));
  session.set_name(name);
  session.set_pid(100000 + data.overview.sessions.sessions_size());
  session.set_uid(1000);
  session.set_user("ann");
  session.set_command("python3 train.py");
  session.set_idle_ms(12000);
  session.set_tenant("uid:1000");
  session.set_rule("default");
  session.set_placement("remote");
  session.set_state(v1::SESSION_STATE_ACTIVE);
  session.mutable_started()->set_seconds(absl::ToUnixSeconds(kReadAt - absl::Minutes(185)));
  for (const v1::SessionDevice& device : devices) *session.add_devices() = device;
  return session;
}

// An H100 with all its sensors.
TopData OneGpu() {
  TopData data;
  data.overview.devices.set_daemon_version("1.2.3");
  v1::Device& device = *data.overview.devices.add_devices();
  device.set_name("NVIDIA H100 80GB HBM3");
  device.set_capacity_bytes(80_GiB);
  device.set_reserved_bytes(50_GiB);
  device.set_free_bytes(30_GiB);
  device.mutable_use_percent()->set_value(100);
  device.mutable_temperature_celsius()->set_value(54.4);
  device.mutable_power_watts()->set_value(309.6);
  data.read_at = kReadAt;
  return data;
}

TopData WithSessions(int count) {
  TopData data = OneGpu();
  for (int i = 1; i <= count; ++i) {
    const auto size = static_cast<uint64_t>(count - i + 1);
    AddTo(data, absl::StrCat("session-", i), {Held(0, size * 100_MiB, size * 60_MiB, size * 20_MiB)});
  }
  return data;
}

class TopScreensTest : public ::testing::Test {
 protected:
  std::vector<std::string> Screen(int rows, int columns) {
    std::vector<std::string> lines;
    for (const Line& line : view_.Draw(rows, columns)) {
      EXPECT_LE(Cells(line), columns);
      lines.push_back(Plain(line));
    }
    EXPECT_EQ(lines.size(), static_cast<size_t>(rows));
    return lines;
  }
  std::string Text(int rows, int columns) { return absl::StrJoin(Screen(rows, columns), "\n"); }
  std::string Heading(int rows, int columns) {
    for (const std::string& line : Screen(rows, columns)) {
      if (absl::StartsWith(line, "NAME")) return line;
    }
    return "";
  }
  void Press(std::initializer_list<int> keys) {
    for (const int key : keys) EXPECT_TRUE(view_.HandleKey(key));
  }

  TopView view_{{.utf8 = true, .user_name = NameOf, .time_zone = absl::UTCTimeZone()}};
};

// ---- Fitting texts ----

TEST(TopTextTest, NamesLoseTheirMiddle) {
  EXPECT_EQ(ShortenMiddle("worker-17", 9, false), "worker-17");
  EXPECT_EQ(ShortenMiddle("training-job-worker-17", 12, false), "traini~er-17");
  EXPECT_EQ(ShortenMiddle("training-job-worker-17", 12, true), "traini…er-17");
  for (int width = 0; width < 30; ++width) {
    EXPECT_EQ(Cells(ShortenMiddle("training-job-worker-17", width, true)), std::min(width, 22));
  }
}

TEST(TopTextTest, SentencesEndAfterAWord) {
  EXPECT_EQ(ShortenAtWord("NVIDIA H100 80GB", 16, true), "NVIDIA H100 80GB");
  EXPECT_EQ(ShortenAtWord("NVIDIA H100 80GB", 15, true), "NVIDIA H100…");
  EXPECT_EQ(ShortenAtWord("NVIDIA H100 80GB", 12, false), "NVIDIA H100~");
  EXPECT_EQ(ShortenAtWord("NVIDIA H100 80GB", 11, true), "NVIDIA…");
  EXPECT_EQ(ShortenAtWord("NVIDIA", 4, true), "NVI…");
  EXPECT_EQ(ShortenAtWord("NVIDIA", 0, true), "");
}

TEST(TopTextTest, FragmentationIsWhatNoTrimGivesBack) {
  PartBytes parts;
  EXPECT_EQ(FragmentedShare(parts), 0);
  parts[Part::kFree] = parts[Part::kCached] = parts[Part::kLeftBehind] = 1_GiB;
  EXPECT_EQ(FragmentedShare(parts), 0);
  parts[Part::kReclaimable] = 50_MiB;
  EXPECT_EQ(FragmentedShare(parts), 0);
  parts[Part::kAllocated] = 30_MiB;
  parts[Part::kPending] = 10_MiB;
  parts[Part::kFragmented] = 10_MiB;
  EXPECT_DOUBLE_EQ(FragmentedShare(parts), 0.1);
  parts[Part::kUnknown] = 100_MiB;
  EXPECT_DOUBLE_EQ(FragmentedShare(parts), 0.05) << "sessions hold what is unknown, too";
}

// ---- The head ----

TEST(TopHeadTest, ADeviceSaysWhatMattersMostFirst) {
  const TopData data = OneGpu();
  PartBytes parts;
  parts[Part::kAllocated] = 45_GiB;
  parts[Part::kFragmented] = 5_GiB;
  parts[Part::kFree] = 30_GiB;
  const auto line = [&](int width) { return Plain(DeviceLine(data.overview.devices.devices(0), parts, width, true)); };
  EXPECT_THAT(line(200), EndsWith("  30.00 GiB free of 80.00 GiB, 50.00 GiB reserved, FRAG 10.0%  100 %  54 C  310 W  "
                                  "NVIDIA H100 80GB HBM3"));
  EXPECT_THAT(line(120), EndsWith("  30.0G free of 80.0G, 50.0G reserved, FRAG 10.0%  100% 54C 310W  NVIDIA H100 80GB "
                                  "HBM3"));
  EXPECT_THAT(line(100), EndsWith("  100% 54C 310W  NVIDIA H100…"));
  EXPECT_THAT(line(80), EndsWith("  30.0G free of 80.0G, 50.0G reserved, FRAG 10.0%  100% 54C 310W"));
  EXPECT_THAT(line(70), EndsWith("  30.0G free of 80.0G, 50.0G reserved, FRAG 10.0%"));
  EXPECT_THAT(line(50), EndsWith("  30.0G free of 80.0G, 50.0G reserved"));
  EXPECT_THAT(line(20), StartsWith("device 0 █"));
  for (int width = 9; width < 250; ++width) {
    EXPECT_EQ(Cells(line(width)), width);
  }
}

TEST(TopHeadTest, WhatNoSensorSaysIsNotThere) {
  TopData data = OneGpu();
  v1::Device& device = *data.overview.devices.mutable_devices(0);
  device.clear_use_percent();
  device.clear_power_watts();
  EXPECT_THAT(Plain(DeviceLine(device, {}, 200, true)), HasSubstr("FRAG 0.0%  54 C  NVIDIA"));
  device.clear_temperature_celsius();
  EXPECT_THAT(Plain(DeviceLine(device, {}, 200, true)), HasSubstr("FRAG 0.0%  NVIDIA"));
}

TEST(TopHeadTest, FiguresAreNeverCut) {
  PartBytes parts;
  parts[Part::kAllocated] = 41_GiB;
  parts[Part::kFragmented] = 5_GiB;
  parts[Part::kReclaimable] = 4_GiB;
  parts[Part::kFree] = 30_GiB;
  EXPECT_EQ(Plain(Figures(parts, 120, false)),
            "  # allocated 41.00 GiB   + fragmented 5.00 GiB   - reclaimable 4.00 GiB   . unreserved 30.00 GiB");
  EXPECT_EQ(Plain(Figures(parts, 80, false)),
            "  # allocated 41.0G  + fragmented 5.00G  - reclaimable 4.00G  . unreserved 30.0G");
  EXPECT_EQ(Plain(Figures(parts, 70, false)), "  # allocated 41.0G  + fragmented 5.00G  - reclaimable 4.00G");
  EXPECT_EQ(Plain(Figures(parts, 20, false)), "  # allocated 41.0G");
  for (const int width : {10, 0, -5}) EXPECT_EQ(Plain(Figures(parts, width, false)), "");
}

// ---- The table ----

TEST_F(TopScreensTest, LongNamesGiveWayToPidsAndUsers) {
  TopData data = WithSessions(4);
  AddTo(data, std::string(31, 'x') + std::string(32, 'y'), {Held(0, 3_GiB, 1_GiB, 1_GiB)});
  view_.SetData(data);
  const std::string heading = Heading(24, 80);
  for (const char* column : {" PID ", " USER ", " LIMIT ", " RESERVED ", " ALLOCATED ", " FRAG "}) {
    EXPECT_THAT(heading, HasSubstr(column));
  }
  EXPECT_THAT(Text(24, 80), HasSubstr("\nxxxxx"));
  EXPECT_THAT(Text(24, 80), HasSubstr("…yyyyy"));
  EXPECT_THAT(Text(50, 200), HasSubstr("\n" + std::string(31, 'x') + std::string(32, 'y') + " ")) << "whole";
}

TEST_F(TopScreensTest, ColumnsThatSayNothingGoFirst) {
  TopData data = WithSessions(5);
  view_.SetData(data);
  for (const char* column : {"AGE", "LAST USE", "COMMAND", "USER", "RECLAIMABLE"}) {
    EXPECT_THAT(Heading(40, 120), HasSubstr(column));
    EXPECT_THAT(Heading(50, 200), HasSubstr(column));
  }
  EXPECT_THAT(Heading(40, 120), Not(HasSubstr("GUARANTEE")));
  EXPECT_THAT(Heading(50, 200), HasSubstr("GUARANTEE"));
  EXPECT_THAT(Text(40, 120), HasSubstr(" 3h05m      12s python3 train.py "));
  EXPECT_THAT(Heading(24, 80), Not(HasSubstr("STATE")));
  data.overview.sessions.mutable_sessions(0)->mutable_devices(0)->set_limit_bytes(1);
  view_.SetData(data);
  EXPECT_THAT(Heading(24, 80), HasSubstr("STATE"));
  EXPECT_THAT(Text(24, 80), HasSubstr(" over limit "));
}

TEST_F(TopScreensTest, UsersAreThoseOfTheDaemon) {
  TopData data = WithSessions(2);
  data.overview.sessions.mutable_sessions(1)->clear_user();
  data.overview.sessions.mutable_sessions(1)->clear_optional_idle();
  view_.SetData(data);
  EXPECT_THAT(Text(24, 120), HasSubstr(" ann "));
  EXPECT_THAT(Text(24, 120), HasSubstr(" user1000 "));
  const std::vector<TopRow> rows = RowsOf(data.overview.sessions, NameOf, kReadAt);
  EXPECT_EQ(rows[0].last_use, absl::Seconds(12));
  EXPECT_EQ(rows[0].age, absl::Minutes(185));
  EXPECT_EQ(rows[1].last_use, std::nullopt);
}

TEST_F(TopScreensTest, KeysSortByTheNewColumns) {
  TopData data = WithSessions(3);
  data.overview.sessions.mutable_sessions(1)->set_idle_ms(99000);
  data.overview.sessions.mutable_sessions(2)->mutable_started()->set_seconds(1);
  data.overview.sessions.mutable_sessions(1)->set_command("a");
  view_.SetData(data);
  const auto first = [&](int key) {
    Press({key});
    const std::vector<std::string> lines = Screen(24, 120);
    const auto heading = std::find_if(lines.begin(), lines.end(),
                                      [](const std::string& line) { return absl::StartsWith(line, "NAME"); });
    return heading == lines.end() ? "" : (heading + 1)->substr(0, (heading + 1)->find(' '));
  };
  EXPECT_EQ(first('d'), "session-2");
  EXPECT_EQ(first('g'), "session-3");
  EXPECT_EQ(first('r'), "session-1");
  EXPECT_EQ(first('m'), "session-2");
  EXPECT_EQ(*ParseColumn("last_use"), Column::kLastUse);
  EXPECT_EQ(*ParseColumn("idle"), Column::kReclaimable) << "as that column was called once";
}

TEST_F(TopScreensTest, SaysWhichRowsAreSeen) {
  view_.SetData(WithSessions(60));
  for (const auto& [rows, columns] :
       std::vector<std::pair<int, int>>{{24, 80}, {40, 120}, {50, 200}, {10, 40}, {5, 20}}) {
    EXPECT_THAT(Screen(rows, columns)[0], HasSubstr("rows 1-")) << columns;
    EXPECT_THAT(Screen(rows, columns)[0], HasSubstr(" of 60")) << columns;
  }
  Press({kKeyEnd});
  EXPECT_THAT(Screen(24, 80)[0], HasSubstr("-60 of 60"));
  EXPECT_THAT(Screen(80, 80)[0], Not(HasSubstr("rows")));
  EXPECT_THAT(view_.Write(80), Not(HasSubstr("rows 1-")));
}

// ---- Help ----

TEST_F(TopScreensTest, HelpIsWholeOn80x24) {
  const std::vector<Line> lines = HelpLines(true);
  EXPECT_LE(lines.size(), 24u);
  for (const Line& line : lines) EXPECT_LE(Cells(line), 80) << Plain(line);
  view_.SetData(WithSessions(1));
  Press({'h'});
  EXPECT_THAT(Text(24, 80), HasSubstr("Enter     details"));
  EXPECT_THAT(Text(24, 80), HasSubstr("FRAG is fragmented / held by sessions: the share that no trim gives back."));
  EXPECT_THAT(Text(24, 80), HasSubstr("Any key: back"));
  Press({kKeyDown});
  EXPECT_THAT(Text(24, 80), HasSubstr("session-1"));
}

TEST_F(TopScreensTest, HelpScrollsOnSmallerScreens) {
  view_.SetData(WithSessions(1));
  Press({'h'});
  EXPECT_THAT(Text(10, 80), HasSubstr("lines 1-9 of "));
  EXPECT_THAT(Text(10, 80), Not(HasSubstr("Any key: back")));
  Press({kKeyPageDown, kKeyPageDown, kKeyDown});
  EXPECT_THAT(Text(10, 80), HasSubstr("Any key: back"));
  EXPECT_THAT(Text(10, 80), Not(HasSubstr("sort by")));
  Press({'x'});
  EXPECT_THAT(Text(10, 80), HasSubstr("session-1"));
}

// ---- Details ----

SegmentSnapshot WithAHole(uint64_t bytes) {
  return {.bytes = bytes,
          .pool = PoolKind::kLarge,
          .blocks = {{.offset = 0, .bytes = 5_MiB, .state = BlockState::kAllocated},
                     {.offset = 5_MiB, .bytes = bytes - 5_MiB, .state = BlockState::kFree}}};
}

v1::OutOfMemoryEvent Refused(const std::string& claim = "") {
  v1::OutOfMemoryEvent event;
  event.set_client("other");
  event.mutable_time()->set_seconds(3600);
  v1::OutOfMemory& oom = *event.mutable_out_of_memory();
  oom.set_cause(v1::OutOfMemory::CAUSE_LIMIT);
  oom.set_requested_bytes(80_MiB);
  oom.set_explanation("The limit leaves 1.00 MiB.");
  oom.set_advice("Raise it.");
  oom.set_claim(claim);
  return event;
}

class TopDetailsTest : public TopScreensTest {
 protected:
  TopDetailsTest() {
    v1::Session& session = AddTo(data_, "trainer", {Held(0, 3_GiB, 1_GiB, 1_GiB)});
    session.set_claim("team-a");
    session.mutable_devices(0)->set_guarantee_bytes(2_GiB);
    AddTo(data_, "other", {Held(0, 2_GiB, 1_GiB, 0)});
    v1::Claim& claim = *data_.claims.add_claims();
    claim.set_name("team-a");
    claim.set_state(v1::CLAIM_STATE_ACTIVE);
    v1::ClaimDevice& device = *claim.add_devices();
    device.set_limit_bytes(10_GiB);
    device.set_reserved_bytes(3_GiB);
    device.set_guarantee_bytes(4_GiB);
    view_.SetData(data_);
    Text(24, 80);
  }
  // Answers the wanted details, like the daemon.
  void Answer(absl::StatusOr<HeapSnapshot> heap, std::vector<v1::OutOfMemoryEvent> refusals = {}) {
    const std::optional<DetailsRequest> request = view_.WantedDetails();
    ASSERT_TRUE(request.has_value());
    view_.SetDetails(
        {.request = *request, .maps = {{.device = 0, .heap = std::move(heap)}}, .refusals = std::move(refusals)});
  }
  HeapSnapshot Heap(size_t segments) const {
    HeapSnapshot heap;
    for (size_t i = 1; i <= segments; ++i) heap.segments.push_back(WithAHole(i * 10_MiB));
    return heap;
  }
  void OpenTrainer() { Press({kKeyHome, kKeyDown, kKeyEnter}); }

  TopData data_ = OneGpu();
};

TEST_F(TopDetailsTest, SayAllOfASession) {
  EXPECT_FALSE(view_.WantedDetails().has_value());
  OpenTrainer();
  EXPECT_EQ(view_.WantedDetails()->session, 1u);
  EXPECT_THAT(view_.WantedDetails()->devices, ElementsAre(0));
  EXPECT_THAT(Text(40, 120), HasSubstr("its segments are being read"));
  Answer(Heap(2), {Refused()});
  const std::string text = Text(40, 120);
  for (const char* fact : {"trainer (id 1)",
                           "name trainer",
                           "pid 100001",
                           "user ann (uid 1000)",
                           "state active",
                           "priority 0",
                           "tenant uid:1000",
                           "rule default",
                           "placement remote",
                           "command python3 train.py",
                           "started 1970-01-05 00:55:00",
                           "age 3h05m",
                           "last use 12s ago",
                           "claim team-a",
                           "limit 10.00 GiB on device 0, guarantee 4.00 GiB, reserved 3.00 GiB",
                           "limit 40.00 GiB",
                           "guarantee 2.00 GiB",
                           "reserved 3.00 GiB",
                           "allocated 1.00 GiB",
                           "fragmented 1.00 GiB",
                           "reclaimable 1.00 GiB",
                           "unknown 0 B",
                           "peak allocated 2.00 GiB",
                           "largest free block 12.00 MiB",
                           "FRAG 33.3%",
                           "waits for -",
                           "20.00 MiB large [",
                           "1 block, a hole of 15.00 MiB",
                           "1970-01-01 01:00:00 wanted 80.00 MiB on device 0: limit",
                           "why: The limit leaves 1.00 MiB.",
                           "do:  Raise it.",
                           "q Enter Esc back"}) {
    EXPECT_THAT(text, HasSubstr(fact));
  }
  for (const int key : {int{kKeyEnter}, int{'q'}, int{kKeyEscape}}) {
    Press({key});
    EXPECT_THAT(Text(24, 80), HasSubstr("sorted by reserved")) << key;
    EXPECT_FALSE(view_.WantedDetails().has_value());
    Press({kKeyEnter});
  }
  EXPECT_FALSE(view_.HandleKey(kKeyQuit));
}

TEST_F(TopDetailsTest, ScrollAndFitEverySize) {
  OpenTrainer();
  Answer(Heap(60), {Refused()});
  EXPECT_THAT(Text(24, 80), HasSubstr("  lines 1-22 of "));
  EXPECT_THAT(Text(24, 80), HasSubstr("arrows scroll"));
  EXPECT_THAT(Text(24, 80), Not(HasSubstr("Raise it.")));
  Press({kKeyEnd});
  EXPECT_THAT(Text(24, 80), HasSubstr("Raise it."));
  EXPECT_THAT(Text(24, 80), Not(HasSubstr("name trainer")));
  Press({kKeyUp, kKeyPageUp, kKeyHome});
  EXPECT_THAT(Text(24, 80), HasSubstr("name trainer"));
  for (int rows = 1; rows < 60; ++rows) {
    for (const int columns : {1, 2, 5, 20, 79, 80, 300}) Screen(rows, columns);
  }
  // A short line cuts no figure.
  for (const int columns : {40, 50, 60}) {
    EXPECT_THAT(Text(200, columns), HasSubstr("1 block, a hole of 595.00 MiB")) << columns;
  }
}

TEST_F(TopDetailsTest, FollowTheSessionAndKeepTheLastFigures) {
  OpenTrainer();
  Answer(Heap(2));
  data_.overview.sessions.mutable_sessions(0)->mutable_devices(0)->set_reserved_bytes(7_GiB);
  view_.SetData(data_);
  EXPECT_THAT(Text(40, 120), HasSubstr("reserved 7.00 GiB"));
  Answer(absl::NotFoundError("session 1 has ended"));  // answer comes before the list without the session
  EXPECT_THAT(Text(40, 120), HasSubstr("20.00 MiB large ["));
  data_.overview.sessions.mutable_sessions()->DeleteSubrange(0, 1);
  view_.SetData(data_);
  EXPECT_THAT(Text(40, 120), HasSubstr("trainer (id 1) has ended: its last figures"));
  Answer(absl::NotFoundError("no such session"));
  EXPECT_THAT(Text(40, 120), HasSubstr("reserved 7.00 GiB"));
  EXPECT_THAT(Text(40, 120), HasSubstr("20.00 MiB large ["));
  Press({'E'});
  EXPECT_THAT(Text(40, 120), HasSubstr("Nothing to do: session trainer (id 1, uid 1000) has ended."));
}

TEST_F(TopDetailsTest, ErrorsStandWhereTheSegmentsWould) {
  OpenTrainer();
  view_.SetDetails({.request = *view_.WantedDetails(),
                    .maps = {{.device = 0, .heap = absl::PermissionDeniedError("uid 5 may not\x1b[2J")}},
                    .refusals = absl::UnavailableError("gone")});
  EXPECT_THAT(Text(40, 120), HasSubstr("its segments are missing here: uid 5 may not\\x1b[2J"));
  EXPECT_THAT(Text(40, 120), HasSubstr("they are missing here: gone"));
  EXPECT_THAT(Text(40, 120), HasSubstr("reserved 3.00 GiB"));
}

TEST_F(TopDetailsTest, AnswersForAnotherSessionAreIgnored) {
  data_.overview.sessions.set_run_id("first");
  view_.SetData(data_);
  OpenTrainer();
  for (const DetailsRequest& other : {DetailsRequest{.session = 2, .claim = "", .run_id = "first", .devices = {0}},
                                      DetailsRequest{.session = 1, .claim = "", .run_id = "next", .devices = {0}}}) {
    view_.SetDetails(
        {.request = other, .maps = {{.device = 0, .heap = Heap(2)}}, .refusals = std::vector<v1::OutOfMemoryEvent>()});
    EXPECT_THAT(Text(40, 120), HasSubstr("its segments are being read"));
  }
  // The daemon's next run has a session with the same id, too.
  data_.overview.sessions.set_run_id("next");
  data_.overview.sessions.mutable_sessions(0)->set_pid(7);
  view_.SetData(data_);
  EXPECT_EQ(view_.WantedDetails()->run_id, "first");
  view_.HandleKey(kKeyEscape);
  Press({kKeyHome, kKeyEnter});
  EXPECT_EQ(view_.WantedDetails()->claim, "team-a");
  EXPECT_EQ(view_.WantedDetails()->run_id, "next");
}

TEST_F(TopDetailsTest, ChangesAreAskedFromThere) {
  OpenTrainer();
  Press({'T'});
  EXPECT_THAT(Text(24, 100), HasSubstr("Trim session trainer (id 1, uid 1000)?"));
  EXPECT_THAT(Text(24, 100), HasSubstr("name trainer"));
  Press({'y'});
  const std::optional<SessionOrder> order = view_.TakeOrder();
  ASSERT_TRUE(order.has_value());
  EXPECT_EQ(order->session.id(), 1u);
  view_.SetResult(std::vector<std::string>{"1.00 GiB came back"});
  EXPECT_THAT(Text(24, 100), HasSubstr("trainer (id 1): 1.00 GiB came back"));
  Press({kKeyEscape});  // first Escape closes the message
  EXPECT_THAT(Text(24, 100), HasSubstr("name trainer"));
  Press({kKeyEscape});
  EXPECT_THAT(Text(24, 100), HasSubstr("sorted by"));
}

TEST_F(TopDetailsTest, AClaimHasDetails) {
  Press({kKeyHome, kKeyEnter});
  EXPECT_EQ(view_.WantedDetails()->claim, "team-a");
  Answer(Heap(1), {Refused("team-a")});
  const std::string text = Text(40, 120);
  EXPECT_THAT(text, HasSubstr("team-a (claim)"));
  EXPECT_THAT(text, HasSubstr("limit 10.00 GiB on device 0, guarantee 4.00 GiB, reserved 3.00 GiB"));
  EXPECT_THAT(text, HasSubstr("trainer (id 1)   pid 100001   command python3 train.py   active, 3.00 GiB on device 0"));
  EXPECT_THAT(text, Not(HasSubstr("other (id 2)")));
  EXPECT_THAT(text, HasSubstr("other wanted 80.00 MiB on device 0: limit"));
  Press({'L'});
  EXPECT_THAT(Text(40, 120), HasSubstr("vramctl claim set team-a"));
}

TEST_F(TopDetailsTest, NothingSelectedOpensNothing) {
  TopData none = OneGpu();
  view_.SetData(none);
  Press({kKeyEnter});
  EXPECT_THAT(Text(24, 80), HasSubstr("Nothing is selected."));
}

}  // namespace
}  // namespace vrambroker::vramctl
