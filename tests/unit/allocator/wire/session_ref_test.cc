// SPDX-License-Identifier: Apache-2.0
#include "allocator/wire/session_ref.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace vrambroker {
namespace {

struct Case {
  std::string text;
  std::optional<uint64_t> id;
  std::string name;     // the name in `name`
  std::string or_name;  // the name in `or_name`
};

TEST(SessionRefTest, TextIsReadAsIdOrName) {
  for (const Case& each : std::vector<Case>{
           {"trainer", std::nullopt, "trainer", ""},
           {"5", 5, "", "5"},
           {"005", 5, "", "005"},
           {"18446744073709551615", ~uint64_t{0}, "", "18446744073709551615"},
           {"18446744073709551616", std::nullopt, "18446744073709551616", ""},  // beyond the largest id
           {"+5", std::nullopt, "+5", ""},
           {" 5", std::nullopt, " 5", ""},
           {"-5", std::nullopt, "-5", ""},
           {"", std::nullopt, "", ""},
           {"id:5", 5, "", ""},
           {"id:", std::nullopt, "id:", ""},
           {"id:x", std::nullopt, "id:x", ""},
           {"ID:5", std::nullopt, "ID:5", ""},
           {"name:5", std::nullopt, "5", ""},
           {"name:", std::nullopt, "", ""},
           {"name:id:5", std::nullopt, "id:5", ""},
           {"name:name:5", std::nullopt, "name:5", ""},
       }) {
    const v1::SessionRef ref = ParseSessionRef(each.text);
    EXPECT_EQ(ref.has_id(), each.id.has_value()) << each.text;
    EXPECT_EQ(ref.has_name(), !each.id.has_value()) << each.text;
    EXPECT_EQ(ref.id(), each.id.value_or(0)) << each.text;
    EXPECT_EQ(ref.name(), each.name) << each.text;
    EXPECT_EQ(ref.or_name(), each.or_name) << each.text;
  }
}

TEST(SessionRefTest, WhatIsWrittenForANameIsReadAsIt) {
  for (const char* name : {"trainer", "5", "005", "id:5", "id:x", "name:5", "name:", "a:b", "18446744073709551616"}) {
    const v1::SessionRef ref = ParseSessionRef(SessionText(name));
    EXPECT_TRUE(ref.has_name()) << name;
    EXPECT_EQ(ref.name(), name);
  }
  EXPECT_EQ(SessionText("trainer"), "trainer");
  EXPECT_EQ(SessionText("5"), "name:5");
}

}  // namespace
}  // namespace vrambroker
