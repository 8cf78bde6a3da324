// SPDX-License-Identifier: Apache-2.0
//
// The table of the grammar is tests/support/amounts.txt. The Python tests read the table, too.
#include "allocator/base/amounts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "allocator/base/bytes.h"
#include "tests/support/paths.h"

namespace vrambroker {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

struct Row {
  std::string kind;
  std::string text;
  std::string value;  // empty: the parser refuses the text
  std::string error;
};

std::vector<Row> Rows() {
  std::vector<Row> rows;
  std::ifstream file(absl::StrCat(testing_support::paths::kSourceDir, "/tests/support/amounts.txt"));
  for (std::string line; std::getline(file, line);) {
    if (line[0] == '#') continue;
    const size_t begin = line.find('\'');
    const size_t end = line.rfind('\'');
    absl::string_view rest = absl::string_view(line).substr(end + 2);
    const bool is_error = absl::ConsumePrefix(&rest, "! ");
    rows.push_back({.kind = line.substr(0, begin - 1),
                    .text = line.substr(begin + 1, end - begin - 1),
                    .value = is_error ? "" : std::string(rest),
                    .error = is_error ? std::string(rest) : ""});
  }
  return rows;
}

void Expect(const Row& row, const absl::Status& status) {
  if (row.error.empty()) {
    EXPECT_EQ(status, absl::OkStatus());
    return;
  }
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), StartsWith(absl::StrCat("'", row.text, "' is ")));
  EXPECT_THAT(std::string(status.message()), HasSubstr(row.error));
}

uint64_t Whole(const std::string& text) {
  uint64_t value = 0;
  EXPECT_TRUE(absl::SimpleAtoi(text, &value)) << text;
  return value;
}

double Share(const std::string& text) {
  double value = 0;
  EXPECT_TRUE(absl::SimpleAtod(text, &value)) << text;
  return value;
}

TEST(AmountsTest, TheTable) {
  std::map<std::string, int> seen;
  for (const Row& row : Rows()) {
    SCOPED_TRACE(absl::StrCat(row.kind, " '", row.text, "'"));
    ++seen[row.kind];
    if (row.kind == "size") {
      const absl::StatusOr<uint64_t> bytes = ParseBytes(row.text);
      Expect(row, bytes.status());
      if (bytes.ok()) {
        EXPECT_EQ(*bytes, Whole(row.value));
      }
    } else if (row.kind == "share") {
      const absl::StatusOr<double> share = ParseShare(row.text);
      Expect(row, share.status());
      if (share.ok()) {
        EXPECT_EQ(*share, Share(row.value)) << "to the last bit";
      }
    } else if (row.kind == "limit") {
      const absl::StatusOr<std::variant<uint64_t, double>> limit = ParseSizeOrShare(row.text);
      Expect(row, limit.status());
      if (limit.ok() && absl::StrContains(row.value, '.')) {
        EXPECT_EQ(*limit, (std::variant<uint64_t, double>(Share(row.value))));
      } else if (limit.ok()) {
        EXPECT_EQ(*limit, (std::variant<uint64_t, double>(Whole(row.value))));
      }
    } else {
      const absl::StatusOr<absl::Duration> time = ParseTime(row.text);
      Expect(row, time.status());
      if (time.ok()) {
        EXPECT_EQ(*time, absl::Nanoseconds(static_cast<int64_t>(Whole(row.value))));
      }
    }
  }
  for (const char* kind : {"size", "share", "limit", "duration"}) EXPECT_GE(seen[kind], 10) << kind;
}

TEST(AmountsTest, AShortTimeIsNotNone) {
  for (const auto& [text, milliseconds] :
       std::map<std::string, int64_t>{{"0", 0}, {"1ns", 1}, {"1ms", 1}, {"1001us", 2}, {"10min", 600'000}}) {
    EXPECT_EQ(ParseMilliseconds(text).value_or(-1), milliseconds) << text;
  }
  EXPECT_TRUE(absl::IsInvalidArgument(ParseMilliseconds("10").status()));
}

TEST(AmountsTest, AMessageRepeatsWholeCharacters) {
  std::string text;
  for (int i = 0; i < 40; ++i) text += "\u00fc";
  EXPECT_THAT(std::string(ParseBytes(text).status().message()),
              StartsWith(absl::StrCat("'", text.substr(0, 60), "' is")));
  EXPECT_THAT(std::string(ParseBytes("x" + text).status().message()),
              StartsWith(absl::StrCat("'x", text.substr(0, 58), "' is")));
}

TEST(AmountsTest, WhatIsPrintedCanBeRead) {
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{511}, 1_KiB, 1536_MiB, 20_MiB, 80_GiB}) {
    EXPECT_EQ(ParseBytes(FormatBytes(bytes)).value_or(1), bytes);
  }
}

}  // namespace
}  // namespace vrambroker
