// SPDX-License-Identifier: Apache-2.0
#include "allocator/base/names.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace vrambroker {
namespace {

TEST(CheckNameTest, CharactersAndLength) {
  EXPECT_TRUE(CheckName("").ok());
  EXPECT_TRUE(CheckName("aZ09._-/:@").ok());
  EXPECT_TRUE(CheckName(std::string(63, 'x')).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(CheckName(std::string(64, 'x'))));
  for (const char* name : {"a b", "a\n", "\xc3\xa4", "*", "a,b"}) EXPECT_FALSE(CheckName(name).ok()) << name;
}

TEST(CleanNameTest, WhatTheDaemonTakesStaysAndTheRestIsReplaced) {
  for (const auto& [name, cleaned] :
       std::vector<std::pair<std::string, std::string>>{{"my job", "my_job"},
                                                        {"\u00fcben", "_ben"},
                                                        {"mod\u00e8le \u6a21\u578b", "mod_le___"},
                                                        {"\xff", "_"},
                                                        {"\xff\xff\x80\x80", "__"},
                                                        {std::string("a\0b", 3), "a_b"},
                                                        {std::string(64, 'x'), std::string(63, 'x')},
                                                        {std::string(10000, '*'), std::string(63, '_')}}) {
    const CleanedName result = CleanName(name);
    EXPECT_EQ(result.name, cleaned);
    EXPECT_TRUE(CheckName(result.name).ok()) << result.name;
    EXPECT_EQ(result.note,
              "the session is called " + cleaned + ": at most 63 letters, digits and . _ - / : @ are allowed");
  }
  for (const std::string& name : {std::string(), std::string("aZ09._-/:@"), std::string(63, 'x')}) {
    EXPECT_EQ(CleanName(name).name, name);
    EXPECT_EQ(CleanName(name).note, "");
  }
}

}  // namespace
}  // namespace vrambroker
