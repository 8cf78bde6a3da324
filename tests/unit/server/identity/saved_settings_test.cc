// SPDX-License-Identifier: Apache-2.0
#include "server/identity/saved_settings.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "absl/strings/str_cat.h"
#include "allocator/device/process_files.h"
#include "tests/support/status_macros.h"
#include "tests/support/util.h"

namespace vrambroker {
namespace {

constexpr SessionId kFirst{1};
constexpr SessionId kSecond{2};
constexpr RandomToken kToken = {'t', 'o', 'k', 'e', 'n'};
constexpr RandomToken kNextToken = {'n', 'e', 'x', 't', '\n'};

class SavedSettingsTest : public ::testing::Test {
 protected:
  static ProcessId Alive(pid_t pid) { return {.pid = pid, .started = StartOf(pid)}; }
  SavedSession Leased(const RandomToken& token = kToken, const std::optional<RandomToken>& earlier = {}) const {
    return {.process = self_, .kind = "leased", .name = "trainer", .token = token, .earlier = earlier};
  }
  SavedSession Counted() const { return {.process = self_, .kind = "counted", .name = "trainer", .token = {}}; }
  // Writes the file that a killed daemon leaves behind.
  void Leave(const SavedSession& session, const SessionSettings& set) const {
    SavedSettings settings(path_);
    settings.Opened(kFirst, session);
    settings.Change(kFirst, [&](SessionSettings& of) { of = set; });
    EXPECT_OK(settings.status());
  }
  SessionSettings Next(SavedSession session, const std::optional<RandomToken>& earlier) const {
    session.earlier = earlier;
    return SavedSettings(path_).Opened(kSecond, session);
  }
  std::string Text() const {
    std::ifstream file(path_);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void Write(const std::string& text, mode_t mode = 0600) const {
    std::ofstream(path_) << text;
    ASSERT_EQ(chmod(path_.c_str(), mode), 0);
  }

  const std::string path_ = testing_support::MakeTempDir() + "/vrambroker.sessions";
  const ProcessId self_ = Alive(getpid());
  const SessionSettings all_ = {
      .limit = 1.0 / 3, .guarantee = uint64_t{64} << 20, .priority = -7, .recorded_events = 1000, .is_ended = true};
};

TEST_F(SavedSettingsTest, TheNextDaemonGivesItToTheSameSession) {
  Leave(Leased(), all_);
  EXPECT_EQ(Next(Leased(kNextToken), kToken), all_);
  // The file has the session's new token now.
  EXPECT_EQ(Next(Leased(), kNextToken), all_);
}

TEST_F(SavedSettingsTest, OthersDoNotGetIt) {
  Leave(Leased(), all_);
  const SessionSettings none;
  EXPECT_EQ(Next(Leased(kNextToken), kNextToken), none);  // another session of this name
  EXPECT_EQ(Next(Counted(), std::nullopt), none);
  SavedSession other = Leased();
  other.name = "trainer-2";
  EXPECT_EQ(Next(other, kToken), none);
  other = Leased();
  other.process = Alive(getppid());
  EXPECT_EQ(Next(other, kToken), none);
  other.process = {.pid = self_.pid, .started = self_.started + 1};  // a later process with the same number
  EXPECT_EQ(Next(other, kToken), none);
  EXPECT_EQ(Next(Leased(), kToken), all_);
}

TEST_F(SavedSettingsTest, ASessionThatCouldNotBeResumedGoesOnInAnother) {
  SavedSettings settings(path_);
  settings.Opened(kFirst, Leased());
  settings.Change(kFirst, [&](SessionSettings& set) { set = all_; });
  EXPECT_EQ(settings.Opened(kSecond, Leased(kNextToken, kToken)), all_);
  EXPECT_EQ(settings.Opened(SessionId{3}, Leased({})), SessionSettings());
  settings.Ended(kFirst);
  EXPECT_EQ(Next(Leased(), kNextToken), all_);
}

// A client of an earlier version, like a counted session, names no earlier token.
TEST_F(SavedSettingsTest, WhoDoesNotSayIsKnownByProcessAndName) {
  Leave(Leased(), all_);
  EXPECT_EQ(Next(Leased(kNextToken), std::nullopt), all_);
}

TEST_F(SavedSettingsTest, WhatWasOfAProcessThatHasEndedIsForgotten) {
  const ProcessId ended = {.pid = self_.pid, .started = self_.started + 1};
  Leave({.process = ended, .kind = "leased", .name = "trainer", .token = kToken}, all_);
  SavedSettings next(path_);
  EXPECT_EQ(Text(), "");
}

TEST_F(SavedSettingsTest, ASessionThatHasEndedLeavesNothing) {
  SavedSettings settings(path_);
  settings.Opened(kFirst, Leased());
  settings.Change(kFirst, [&](SessionSettings& set) { set = all_; });
  settings.Ended(kFirst);
  settings.Change(kFirst, [&](SessionSettings& set) { set = all_; });  // an operator's late change
  EXPECT_EQ(Text(), "");
  EXPECT_EQ(Next(Leased(), kToken), SessionSettings());
}

// A session leaves without an end when its guarantee has no room yet, or when the daemon stops.
TEST_F(SavedSettingsTest, ASessionMayComeBack) {
  Leave(Leased(), all_);
  SavedSettings next(path_);
  EXPECT_EQ(next.Opened(kFirst, Leased({}, kToken)), all_);
  next.Left(kFirst);
  EXPECT_EQ(next.Opened(kSecond, Leased(kNextToken, kToken)), all_) << "its client has not heard of the first one";
  // The second session is still open.
  EXPECT_EQ(next.Opened(SessionId{3}, Leased({'3'}, kToken)), all_);
  EXPECT_EQ(next.Opened(SessionId{4}, Leased({'4'}, RandomToken{'o', 't', 'h', 'e', 'r'})), SessionSettings());
  next.Left(SessionId{3});
  EXPECT_EQ(Next(Leased({'5'}, kToken), kToken), all_) << "the next daemon knows, too";
}

TEST_F(SavedSettingsTest, AProcessThatAnOperatorHasEndedIsKnown) {
  Leave(Counted(), {.is_ended = true});
  const SavedSettings next(path_);
  EXPECT_TRUE(next.HasEnded(self_.pid, "counted"));
  EXPECT_FALSE(next.HasEnded(self_.pid, "leased"));
  EXPECT_FALSE(next.HasEnded(getppid(), "counted"));
}

TEST_F(SavedSettingsTest, DamagedLinesAreLeftOut) {
  Leave(Leased(), all_);
  const std::string whole = Text();
  const std::string begin = absl::StrCat(self_.pid, " ", self_.started);
  for (const std::string rest :
       {" leased trainer - 2 - - - -", " leased trainer - -1B - - - -", " leased trainer - nan - - - -",
        " leased trainer - - - 1001 - -", " leased trainer - - - - - maybe", " leased trainer 00 0.5 - - - -",
        " leased tra\x01iner - 0.5 - - - -", " leased trainer", "", " leased trainer - 0.5 - - - - more"}) {
    Write(absl::StrCat(begin, rest, "\n", whole));
    EXPECT_EQ(Next(Leased(), kToken), all_) << rest;
    Write(absl::StrCat(begin, rest, "\n"));
    EXPECT_EQ(Next(Leased(), kToken), SessionSettings()) << rest;
  }
}

TEST_F(SavedSettingsTest, WhatOthersMayWriteIsNotBelieved) {
  Leave(Leased(), all_);
  ASSERT_EQ(chmod(path_.c_str(), 0666), 0);
  EXPECT_EQ(Next(Leased(), kToken), SessionSettings());
}

// A directory in the file's place makes writing fail, as a full disk would.
TEST_F(SavedSettingsTest, WhatCannotBeWrittenIsSaidUntilItCan) {
  std::filesystem::create_directories(path_ + "/sub");
  SavedSettings settings(path_);
  settings.Opened(kFirst, Leased());
  settings.Change(kFirst, [](SessionSettings& set) { set.priority = 5; });
  EXPECT_FALSE(settings.status().ok());
  EXPECT_EQ(settings.Get(kFirst).priority, 5);
  std::filesystem::remove_all(path_);
  settings.Change(kFirst, [](SessionSettings& set) { set.priority = 5; });
  EXPECT_OK(settings.status());
  EXPECT_EQ(Next(Leased(), kToken).priority, 5);
}

}  // namespace
}  // namespace vrambroker
