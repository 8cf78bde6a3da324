// SPDX-License-Identifier: Apache-2.0
#include "allocator/base/names.h"

#include <gtest/gtest.h>

#include <string>

namespace vrambroker {
namespace {

TEST(CheckNameTest, CharactersAndLength) {
  EXPECT_TRUE(CheckName("").ok());
  EXPECT_TRUE(CheckName("aZ09._-/:@").ok());
  EXPECT_TRUE(CheckName(std::string(63, 'x')).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(CheckName(std::string(64, 'x'))));
  for (const char* name : {"a b", "a\n", "\xc3\xa4", "*", "a,b"}) EXPECT_FALSE(CheckName(name).ok()) << name;
}

}  // namespace
}  // namespace vrambroker
