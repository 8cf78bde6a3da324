// SPDX-License-Identifier: Apache-2.0
//
// Claims in vramctl top, without a terminal and without a daemon.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "allocator/base/bytes.h"
#include "allocator/wire/admin_json.h"
#include "client/vramctl/views/claim_output.h"
#include "client/vramctl/views/top_claims.h"
#include "client/vramctl/views/top_view.h"

namespace vrambroker::vramctl {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr absl::Time kNow = absl::FromUnixSeconds(3661);

std::string NameOfUser(uint32_t uid) {
  return absl::StrCat("user", uid);
}

void AddSession(v1::ListSessionsResponse& sessions, const std::string& name, const std::string& claim,
                const std::vector<uint64_t>& reserved_by_device) {
  v1::Session& session = *sessions.add_sessions();
  session.set_id(static_cast<uint64_t>(sessions.sessions_size()));
  session.set_name(name);
  session.set_claim(claim);
  session.set_state(v1::SESSION_STATE_ACTIVE);
  for (const uint64_t bytes : reserved_by_device) {
    v1::SessionDevice& device = *session.add_devices();
    device.set_device(static_cast<uint32_t>(session.devices_size() - 1));
    device.set_limit_bytes(100_MiB);
    device.set_reserved_bytes(bytes);
    device.mutable_stats()->mutable_allocated_bytes()->mutable_all()->set_current(bytes);
  }
}

v1::ClaimDevice& AddClaim(v1::ListClaimsResponse& claims, const std::string& name, uint64_t reserved,
                          uint64_t left_behind = 0) {
  v1::Claim& claim = *claims.add_claims();
  claim.set_name(name);
  claim.set_state(v1::CLAIM_STATE_ACTIVE);
  claim.mutable_terms()->set_owner_uid(7);
  claim.set_refusals(4);
  v1::ClaimDevice& device = *claim.add_devices();
  device.set_limit_bytes(80_MiB);
  device.set_reserved_bytes(reserved);
  device.set_left_behind_bytes(left_behind);
  device.set_allocated_bytes(reserved - left_behind);
  device.set_refusals(3);
  return device;
}

std::vector<std::string> NamesOf(const std::vector<TopRow>& rows) {
  std::vector<std::string> names;
  names.reserve(rows.size());
  for (const TopRow& row : rows) names.push_back(absl::StrCat(row.tree, row.name, "@", row.device));
  return names;
}

// Two claims with sessions, a claim without sessions, and a session without a claim.
class TopClaimsTest : public ::testing::Test {
 protected:
  TopClaimsTest() {
    AddSession(sessions_, "alone", "", {30_MiB});
    AddSession(sessions_, "small", "team-a", {5_MiB});
    AddSession(sessions_, "large", "team-a", {35_MiB});
    AddSession(sessions_, "other", "team-b", {20_MiB});
    AddClaim(claims_, "empty", 0);
    AddClaim(claims_, "team-a", 50_MiB, /*left_behind=*/10_MiB);
    AddClaim(claims_, "team-b", 20_MiB);
  }
  std::vector<TopRow> Rows() const {
    std::vector<TopRow> rows = RowsOf(sessions_, NameOfUser, kNow);
    AddClaims(rows, claims_, NameOfUser, kNow);
    return rows;
  }
  std::vector<std::string> Grouped(const std::set<std::string>& collapsed, Column column = Column::kReserved,
                                   bool reverse = false) const {
    std::vector<TopRow> rows = Rows();
    Sort(rows, column, reverse);
    GroupByClaim(rows, collapsed);
    return NamesOf(rows);
  }

  v1::ListSessionsResponse sessions_;
  v1::ListClaimsResponse claims_;
};

TEST_F(TopClaimsTest, AClaimComesBeforeItsSessions) {
  EXPECT_THAT(Grouped({}), ElementsAre("- team-a@0", "  large@0", "  small@0", "alone@0", "- team-b@0", "  other@0"));
  EXPECT_THAT(Grouped({}, Column::kReserved, /*reverse=*/true),
              ElementsAre("- team-b@0", "  other@0", "alone@0", "- team-a@0", "  small@0", "  large@0"));
}

TEST_F(TopClaimsTest, ACollapsedClaimIsOneRow) {
  EXPECT_THAT(Grouped({"team-a", "gone"}), ElementsAre("+ team-a@0", "alone@0", "- team-b@0", "  other@0"));
}

TEST_F(TopClaimsTest, TheRowSaysWhatTheClaimHas) {
  const std::vector<TopRow> rows = Rows();
  const TopRow& row = rows.at(4);
  ASSERT_EQ(row.claim, "team-a");
  EXPECT_TRUE(row.is_claim());
  EXPECT_EQ(row.user, "user7");
  EXPECT_EQ(row.reserved_bytes, 50_MiB);
  EXPECT_EQ(row.parts[Part::kAllocated], 40_MiB);
  EXPECT_EQ(row.parts[Part::kLeftBehind], 10_MiB);
  EXPECT_EQ(row.parts[Part::kFree], 30_MiB);  // rest of the claim's limit, not of its sessions' limits
  EXPECT_EQ(row.fragmentation, 0.0);
  EXPECT_EQ(row.ooms, 3u);
  EXPECT_THAT(ClaimsTable(claims_, NameOfUser), HasSubstr(" 3\n"));
  EXPECT_EQ(ToJson(claims_.claims(1))["devices"][0]["refusals"], 3);
  claims_.mutable_claims(1)->mutable_devices(0)->clear_refusals();
  EXPECT_EQ(Rows().at(4).ooms, 4u) << "of a daemon that does not count them by device";
}

TEST_F(TopClaimsTest, WhatWaitsInItsSessionsWaitsInTheClaim) {
  for (const int session : {1, 2}) {
    v1::WaitingRequest& request = *sessions_.mutable_sessions(session)->mutable_devices(0)->add_waiting();
    request.set_bytes(4_MiB);
    request.set_waited_ms(static_cast<uint64_t>(session) * 1000);
  }
  const TopRow row = Rows().at(4);
  EXPECT_EQ(row.waiting_bytes, 8_MiB);
  EXPECT_EQ(row.waited_ms, 2000u);
}

TEST_F(TopClaimsTest, AClaimWithoutSessionsIsThereIfItHoldsOrIsPromisedSomething) {
  sessions_.clear_sessions();
  claims_.mutable_claims(0)->mutable_devices(0)->set_guarantee_bytes(1_MiB);  // "empty"
  claims_.mutable_claims(2)->mutable_devices(0)->set_reserved_bytes(0);       // "team-b"
  EXPECT_THAT(Grouped({}), ElementsAre("- team-a@0", "- empty@0"));
}

TEST_F(TopClaimsTest, EachDeviceHasItsOwnGroup) {
  AddSession(sessions_, "both", "team-b", {1_MiB, 60_MiB});
  *claims_.mutable_claims(2)->add_devices() = claims_.claims(2).devices(0);
  v1::ClaimDevice& second = *claims_.mutable_claims(2)->mutable_devices(1);
  second.set_device(1);
  second.set_reserved_bytes(60_MiB);
  EXPECT_THAT(Grouped({"team-a"}),
              ElementsAre("- team-b@1", "  both@1", "+ team-a@0", "alone@0", "- team-b@0", "  other@0", "  both@0"));
}

TEST_F(TopClaimsTest, SessionsOfClaimsThatTheCallerMayNotSeeStandAlone) {
  claims_.clear_claims();
  EXPECT_THAT(Grouped({"team-a"}), ElementsAre("large@0", "alone@0", "other@0", "small@0"));
}

TEST_F(TopClaimsTest, AFilterFindsClaimsAndTheirSessions) {
  const auto found = [&](const std::string& filter) {
    std::vector<TopRow> rows = Rows();
    Filter(rows, filter);
    Sort(rows, Column::kReserved, false);
    GroupByClaim(rows, {});
    return NamesOf(rows);
  };
  EXPECT_THAT(found("TEAM-B"), ElementsAre("- team-b@0", "  other@0"));
  EXPECT_THAT(found("sma"), ElementsAre("- team-a@0", "  small@0"));
  EXPECT_THAT(found("alone"), ElementsAre("alone@0"));
  EXPECT_THAT(found("nobody"), IsEmpty());
}

// ---- The view ----

class TopClaimsViewTest : public TopClaimsTest {
 protected:
  TopClaimsViewTest() { view_.SetData(Data()); }
  TopData Data() const {
    TopData data;
    v1::Device* device = data.overview.devices.add_devices();
    device->set_capacity_bytes(256_MiB);
    data.overview.sessions = sessions_;
    data.claims = claims_;
    data.read_at = kNow;
    return data;
  }
  std::string Text(int columns = 120) {
    std::string text;
    for (const Line& line : view_.Draw(24, columns)) absl::StrAppend(&text, Render(line, /*colour=*/false), "\n");
    return text;
  }
  void Type(const std::string& keys) {
    for (const char key : keys) EXPECT_TRUE(view_.HandleKey(key));
  }

  TopView view_{{.user_name = NameOfUser, .time_zone = absl::UTCTimeZone()}};
};

TEST_F(TopClaimsViewTest, ShowsThem) {
  const std::string text = Text();
  EXPECT_THAT(text, HasSubstr("4 sessions, 3 claims, 0 requests wait"));
  EXPECT_THAT(text, HasSubstr("\n- team-a "));
  EXPECT_THAT(text, HasSubstr("\n  large "));
  EXPECT_THAT(text, HasSubstr("\nteam-a (claim) on device 0: 3 refusals"));  // claim is the first row
  EXPECT_THAT(text, HasSubstr("c claim"));
  view_.HandleKey(kKeyDown);
  EXPECT_THAT(Text(), HasSubstr("\nlarge (id 3, claim team-a) on device 0"));
}

TEST_F(TopClaimsViewTest, OneCollapsesAndExpands) {
  view_.HandleKey(kKeyDown);
  Type("c");  // selected row is a session of the claim
  EXPECT_THAT(Text(), HasSubstr("\n+ team-a "));
  EXPECT_THAT(Text(), Not(HasSubstr("  large ")));
  EXPECT_THAT(Text(), HasSubstr("  other "));
  EXPECT_THAT(Text(), HasSubstr("\nteam-a (claim)"));
  view_.SetData(Data());  // claim stays collapsed
  EXPECT_THAT(Text(), Not(HasSubstr("  large ")));
  Type("c");
  EXPECT_THAT(Text(), HasSubstr("\n  large "));
}

TEST_F(TopClaimsViewTest, AllCollapseAndExpand) {
  view_.HandleKey(kKeyEnd);
  EXPECT_THAT(Text(), HasSubstr("\nother (id 4, claim team-b)"));
  Type("C");
  EXPECT_THAT(Text(), Not(HasSubstr("  other ")));
  EXPECT_THAT(Text(), HasSubstr("\nalone "));
  EXPECT_THAT(Text(), HasSubstr("\nteam-b (claim)"));
  Type("c");  // expands the claim again
  EXPECT_THAT(Text(), HasSubstr("  other "));
  Type("C");  // collapses all claims, because not all claims are collapsed yet
  EXPECT_THAT(Text(), Not(HasSubstr("  other ")));
  Type("C");
  EXPECT_THAT(Text(), HasSubstr("  other "));
  EXPECT_THAT(Text(), HasSubstr("  large "));
}

TEST_F(TopClaimsViewTest, WhatIsForSessionsSaysSo) {
  Type("L");
  EXPECT_THAT(Text(), HasSubstr("vramctl claim set team-a"));
  Type("E");
  EXPECT_FALSE(view_.TakeOrder().has_value());
  view_.HandleKey(kKeyEscape);
  view_.HandleKey(kKeyEnd);
  Type("nc");
  view_.HandleKey(kKeyHome);  // "alone"
  Type("c");
  EXPECT_THAT(Text(), HasSubstr("What is selected is in no claim."));
}

TEST_F(TopClaimsViewTest, WithoutClaimsNothingSpeaksOfThem) {
  claims_.clear_claims();
  sessions_.clear_sessions();
  AddSession(sessions_, "alone", "", {30_MiB});
  view_.SetData(Data());
  EXPECT_THAT(Text(), Not(HasSubstr("claim")));
}

}  // namespace
}  // namespace vrambroker::vramctl
