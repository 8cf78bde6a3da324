// SPDX-License-Identifier: Apache-2.0
//
// The argument SESSION where a session's name looks like another session's id.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "tests/support/client_process.h"
#include "tests/support/raw_client.h"
#include "tests/support/vramctl_test.h"

namespace vrambroker::testing_support {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class SessionArgumentTest : public VramctlDaemonTest {
 protected:
  void SetUp() override {
    ASSERT_OK(StartDaemon(
        {.capacity = "256MiB", .config = "socket_mode: '0666' rules { uid: '65532' rights: CLIENT }", .http = true}));
    ASSERT_OK_AND_ASSIGN(Client first, Connect("trainer", Limit(20_MiB)));
    id_ = absl::StrCat(first.session_id());
    first_.emplace(std::move(first));
  }
  // Opens a session whose name is the first session's id.
  void OpenNamesake() {
    ASSERT_OK_AND_ASSIGN(Client namesake, Connect(id_, Limit(20_MiB)));
    namesake_.emplace(std::move(namesake));
  }
  auto NamesBoth() const {
    return AllOf(HasSubstr(absl::StrCat(id_, " is the id of the session named 'trainer'")),
                 HasSubstr(absl::StrCat("the name of the session with id ", namesake_->session_id())),
                 HasSubstr(absl::StrCat("id:", id_, " or name:", id_)));
  }
  static void Refuse(Client& client) { EXPECT_TRUE(absl::IsResourceExhausted(client.Allocate(100_MiB).status())); }
  // Returns the ids of the sessions that `vramctl ooms --session=SESSION` lists.
  std::vector<uint64_t> Refused(const std::string& session) {
    std::vector<uint64_t> ids;
    const Json ooms = CtlJson({"ooms", "--session=" + session});
    for (const Json& event : ooms["events"]) ids.push_back(event["session_id"]);
    return ids;
  }

  std::string id_;
  std::optional<Client> first_;
  std::optional<Client> namesake_;
};

TEST_F(SessionArgumentTest, ANumberThatCouldBeTwoSessionsIsRefusedByEveryCommand) {
  OpenNamesake();
  for (const Arguments& arguments : std::vector<Arguments>{{"limit", id_, "1MiB"},
                                                           {"guarantee", id_, "1MiB"},
                                                           {"priority", id_, "1"},
                                                           {"trim", id_},
                                                           {"end", id_},
                                                           {"record", id_, "10"},
                                                           {"summary", id_},
                                                           {"stats", id_},
                                                           {"map", id_},
                                                           {"snapshot", id_, "-o", "-"},
                                                           {"trace", id_, "-o", "-", "--seconds=0.1"},
                                                           {"diagnose", id_}}) {
    const RunResult result = Ctl(arguments);
    EXPECT_EQ(result.exit_code, 1) << arguments[0];
    EXPECT_THAT(result.err, NamesBoth()) << arguments[0];
  }
  const Json sessions = CtlJson({"sessions"})["sessions"];
  ASSERT_EQ(sessions.size(), 2u);
  for (const Json& session : sessions) {
    EXPECT_EQ(session["state"], "active");
    EXPECT_EQ(session["priority"], 0);
    EXPECT_EQ(session["devices"][0]["limit_bytes"], 20_MiB);
    EXPECT_EQ(session["devices"][0]["guarantee_bytes"], 0);
  }
}

TEST_F(SessionArgumentTest, ItsKindSaysWhichIsMeant) {
  OpenNamesake();
  EXPECT_EQ(CtlJson({"limit", "id:" + id_, "30MiB"})["name"], "trainer");
  EXPECT_EQ(CtlJson({"limit", "name:" + id_, "40MiB"})["name"], id_);
  EXPECT_EQ(CtlJson({"limit", "name:trainer", "30MiB"})["name"], "trainer");
  EXPECT_EQ(Ctl({"end", "name:" + id_}).exit_code, 0);
  EXPECT_TRUE(WaitFor([&] { return !namesake_->status().ok(); }));
  EXPECT_OK(first_->status());

  for (const auto& [session, text] :
       std::vector<std::pair<std::string, std::string>>{{"id:987", "no session 987"},
                                                        {"name:987", "no session is named '987'"},
                                                        {"987", "no session has the id 987, and none is named '987'"},
                                                        {"id:x", "no session is named 'id:x'"}}) {
    const RunResult result = Ctl({"trim", session});
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_THAT(result.err, HasSubstr(text));
  }
}

TEST_F(SessionArgumentTest, ANumberThatCanBeButOneSessionIsThat) {
  ASSERT_OK_AND_ASSIGN(Client numbered, Connect("987"));
  ASSERT_OK_AND_ASSIGN(Client prefixed, Connect("id:" + id_));
  EXPECT_EQ(CtlJson({"limit", id_, "30MiB"})["name"], "trainer");
  EXPECT_EQ(CtlJson({"limit", "987", "30MiB"})["name"], "987");
  EXPECT_EQ(CtlJson({"limit", absl::StrCat(numbered.session_id()), "30MiB"})["name"], "987");
  // Completion offers arguments that name a single session.
  const std::string names = RunProgram({VramctlProgram(), "__complete", "--socket-dir", dir(), "trim", ""}).out;
  EXPECT_EQ(names, absl::StrCat("trainer\nname:987\nname:id:", id_, "\n"));
  EXPECT_EQ(CtlJson({"limit", "name:id:" + id_, "30MiB"})["id"], prefixed.session_id());
}

TEST_F(SessionArgumentTest, RefusalsOfSessionsThatHaveEndedCountAsWell) {
  const uint64_t first = first_->session_id();
  Refuse(*first_);
  EXPECT_EQ(Refused(id_), std::vector{first});
  OpenNamesake();
  const uint64_t namesake = namesake_->session_id();
  EXPECT_THAT(Ctl({"ooms", "--session", id_}).err, NamesBoth()) << "it has not been refused, but lives";
  Refuse(*namesake_);
  for (const bool lives : {true, false}) {
    if (!lives) {
      first_.reset();
      ASSERT_TRUE(WaitFor([&] { return CtlJson({"sessions"})["sessions"].size() == 1; }));
    }
    const RunResult both = Ctl({"ooms", "--session", id_});
    EXPECT_EQ(both.exit_code, 1);
    EXPECT_THAT(both.err, NamesBoth());
    EXPECT_EQ(Refused("id:" + id_), std::vector{first});
    EXPECT_EQ(Refused("name:" + id_), std::vector{namesake}) << (lives ? "it lives" : "it has ended");
  }
}

TEST_F(SessionArgumentTest, AddressesOfTheWebAreReadInTheSameWay) {
  OpenNamesake();
  Refuse(*first_);
  Refuse(*namesake_);
  for (const char* page : {"/api/v1/ooms", "/snapshot.json"}) {
    const auto ask = [&](const std::string& session) {
      return daemon_->Get(absl::StrCat(page, "?session=", session)).value_or(HttpAnswer());
    };
    EXPECT_EQ(ask(id_).code, 400);
    EXPECT_THAT(ask(id_).body, NamesBoth());
    EXPECT_EQ(ask("id:" + id_).code, 200) << page;
    EXPECT_EQ(ask("name:" + id_).code, 200) << page;
  }
  const Json events = Json::parse(daemon_->Get("/api/v1/ooms?session=name:" + id_)->body)["events"];
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0]["session_id"], namesake_->session_id());
}

TEST_F(SessionArgumentTest, WhoMayNotLookIsNotToldWhatOthersAreNamed) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  OpenNamesake();
  ASSERT_OK_AND_ASSIGN(ClientProcess stranger, ClientProcess::Start(dir()));
  ASSERT_OK(stranger.Call("setuid 65532"));
  const absl::Status refused = stranger.Call("snapshot_of_number " + id_).status();
  EXPECT_STATUS(refused, absl::StatusCode::kInvalidArgument, "id:NUMBER or name:NUMBER");
  EXPECT_THAT(std::string(refused.message()), ::testing::Not(HasSubstr("trainer")));
}

}  // namespace
}  // namespace vrambroker::testing_support
