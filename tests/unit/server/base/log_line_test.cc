// SPDX-License-Identifier: Apache-2.0
#include "server/base/log_line.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "server/base/client_log.h"

namespace vrambroker {
namespace {

using nlohmann::json;
using ::testing::EndsWith;
using ::testing::HasSubstr;

constexpr char kHostile[] = "a\"b\\c\nd\te=f\x01 \xC3\xBC \xFF{}";

// Collects the log.
class LogLineTest : public ::testing::Test {
 protected:
  LogLineTest() {
    spdlog::set_default_logger(
        std::make_shared<spdlog::logger>("test", std::make_shared<spdlog::sinks::ostream_sink_mt>(out_)));
  }
  ~LogLineTest() override {
    SetLogFormat(LogFormat::kText, /*times=*/true);
    spdlog::set_default_logger(before_);
  }

  std::vector<std::string> Lines() const { return absl::StrSplit(out_.str(), '\n', absl::SkipEmpty()); }

  const std::shared_ptr<spdlog::logger> before_ = spdlog::default_logger();
  std::ostringstream out_;
};

TEST_F(LogLineTest, TextIsKeyValue) {
  SetLogFormat(LogFormat::kText, /*times=*/false);
  LogLine("session closed")
      .Add("session", uint64_t{3})
      .Add("name", "train/a@b:1")
      .Add("change", -4)
      .Add("granted", true)
      .Add("why", "two words")
      .Add("none", "")
      .Write(spdlog::level::info);
  EXPECT_EQ(out_.str(),
            "info session closed session=3 name=train/a@b:1 change=-4 granted=true why=\"two words\" none=\"\"\n");
}

TEST_F(LogLineTest, TextOfHostileValuesStaysOnItsLine) {
  SetLogFormat(LogFormat::kText, /*times=*/false);
  LogLine("x").Add("name", kHostile).Add("last", 1).Write(spdlog::level::warn);
  ASSERT_EQ(Lines().size(), 1u);
  EXPECT_THAT(Lines()[0], HasSubstr(R"(name="a\"b\\c\nd\te=f\u0001 )"));
  EXPECT_THAT(Lines()[0], EndsWith(" last=1"));
}

TEST_F(LogLineTest, JsonHasTheSameKeys) {
  SetLogFormat(LogFormat::kJson, /*times=*/true);
  LogLine("refused").Add("session", uint64_t{1} << 63).Add("name", kHostile).Add("ok", false).Write(spdlog::level::err);
  ASSERT_EQ(Lines().size(), 1u);
  const json line = json::parse(Lines()[0]);
  EXPECT_EQ(line["event"], "refused");
  EXPECT_EQ(line["level"], "error");
  EXPECT_EQ(line["session"], uint64_t{1} << 63);
  EXPECT_EQ(line["name"], "a\"b\\c\nd\te=f\x01 \xC3\xBC \xEF\xBF\xBD{}") << "what is no UTF-8 is replaced";
  EXPECT_EQ(line["ok"], false);
  EXPECT_THAT(line["time"].get<std::string>(), ::testing::MatchesRegex("....-..-..T..:..:..[.]......Z"));
}

TEST_F(LogLineTest, PlainLinesAreJsonToo) {
  SetLogFormat(LogFormat::kJson, /*times=*/true);
  spdlog::info("{}", kHostile);
  spdlog::warn("");
  LogLine("x").Write(spdlog::level::info);
  ASSERT_EQ(Lines().size(), 3u);
  EXPECT_THAT(json::parse(Lines()[0])["message"].get<std::string>(), HasSubstr("a\"b\\c\nd"));
  EXPECT_EQ(json::parse(Lines()[1])["message"], "");
  EXPECT_EQ(json::parse(Lines()[2])["event"], "x");
}

TEST_F(LogLineTest, NobodyWritesALineThatLooksReady) {
  SetLogFormat(LogFormat::kJson, /*times=*/true);
  // The log line puts the daemon's words before a client's text: the text cannot pass for keys.
  LogClientEvent(spdlog::level::warn, "protobuf: {}", "\x01\"event\":\"forged\"");
  // Earlier tests may leave a line about left-out events before the last line.
  EXPECT_FALSE(json::parse(Lines().back()).contains("event"));
}

TEST_F(LogLineTest, ClientsAreKnownByIdAndName) {
  SetLogFormat(LogFormat::kText, /*times=*/false);
  LogClientEvent(spdlog::level::info, SessionLine("session opened", SessionId{7}, "train").Add("pid", 12));
  EXPECT_EQ(out_.str(), "info session opened session=7 name=train pid=12\n");
}

TEST(LineLimitTest, CountsWhatItLeavesOut) {
  const std::chrono::steady_clock::time_point start{std::chrono::hours(1)};
  LineLimit limit(/*lines_per_second=*/1, /*burst=*/2);
  EXPECT_EQ(limit.Take(start), 0u);
  EXPECT_EQ(limit.Take(start), 0u);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(limit.Take(start), std::nullopt);
  EXPECT_EQ(limit.Take(start + std::chrono::seconds(1)), 5u);
  EXPECT_EQ(limit.Take(start + std::chrono::seconds(2)), 0u) << "said once";
}

TEST_F(LogLineTest, AFloodOfClientEventsIsCut) {
  SetLogFormat(LogFormat::kText, /*times=*/false);
  for (int i = 0; i < 3000; ++i) LogClientEvent(spdlog::level::info, LogLine("flood").Add("i", i));
  EXPECT_LT(Lines().size(), 2500u) << "a thousand at once, and a hundred a second";
  EXPECT_GT(Lines().size(), 0u);
}

}  // namespace
}  // namespace vrambroker
