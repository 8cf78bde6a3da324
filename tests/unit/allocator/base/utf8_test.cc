// SPDX-License-Identifier: Apache-2.0
#include "allocator/base/utf8.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace vrambroker {
namespace {

TEST(Utf8Test, CharactersOfEveryLength) {
  for (const std::string text : {"", "plain", "\x7f", "\xC2\x80", "\xDF\xBF", "\xE0\xA0\x80", "\xED\x9F\xBF",
                                 "\xEF\xBF\xBF", "\xF0\x90\x80\x80", "\xF4\x8F\xBF\xBF", "a\xC3\xBC\xE2\x82\xAC z"}) {
    EXPECT_TRUE(IsUtf8(text)) << text;
    EXPECT_EQ(ToUtf8(text), text);
  }
  EXPECT_TRUE(IsUtf8(std::string(1, '\0')));
}

TEST(Utf8Test, WhatIsNoCharacterIsReplaced) {
  const std::string bad = "\xEF\xBF\xBD";
  struct Case {
    std::string text;
    int replaced;  // bytes
  };
  const std::vector<Case> cases = {
      {"\xff", 1},
      {"\x80", 1},              // a continuation byte without a first byte
      {"\xC3", 1},              // a cut character
      {"\xE2\x82", 2},          // a cut character
      {"\xC0\x80", 2},          // an overlong form
      {"\xE0\x9F\xBF", 3},      // an overlong form
      {"\xF0\x8F\xBF\xBF", 4},  // an overlong form
      {"\xED\xA0\x80", 3},      // half of a UTF-16 pair
      {"\xF4\x90\x80\x80", 4},  // beyond the last character
      {"\xF5\x80\x80\x80", 4},
  };
  for (const Case& each : cases) {
    std::string expected;
    for (int i = 0; i < each.replaced; ++i) expected += bad;
    EXPECT_FALSE(IsUtf8(each.text)) << expected.size();
    EXPECT_FALSE(IsUtf8("a" + each.text + "z"));
    EXPECT_EQ(ToUtf8(each.text), expected);
    EXPECT_EQ(ToUtf8("a" + each.text + "z"), "a" + expected + "z");
    EXPECT_TRUE(IsUtf8(expected));
  }
}

TEST(Utf8Test, CleanTextIsForTerminalsAndBounded) {
  EXPECT_EQ(CleanText("a b\x1b[1m\n\x7f", 100), "a b_[1m__");
  EXPECT_EQ(CleanText("\xC2\x9B"
                      "1m \xC2\xA9",
                      100),
            "_1m \xC2\xA9")
      << "a control character of two bytes";
  EXPECT_EQ(CleanText("a\xFFz", 100), "a\xEF\xBF\xBDz");
  EXPECT_EQ(CleanText("abc", 2), "ab");
  EXPECT_EQ(CleanText("ab\xC3\xA9", 3), "ab") << "no half of a character";
  EXPECT_EQ(CleanText("", 3), "");
}

}  // namespace
}  // namespace vrambroker
