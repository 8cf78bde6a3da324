// SPDX-License-Identifier: Apache-2.0
#include "server/sessions/cancel_keys.h"

#include <gtest/gtest.h>

#include <memory>

namespace vrambroker {
namespace {

TEST(CancelKeysTest, AKeyCancelsItsRequestAlone) {
  CancelKeys keys;
  const auto first = keys.Add(1);
  const auto second = keys.Add(2);
  const auto nameless = keys.Add(0);
  keys.Cancel(0);
  keys.Cancel(3);
  EXPECT_FALSE(*first || *second || *nameless);
  keys.Cancel(1);
  EXPECT_TRUE(*first);
  EXPECT_FALSE(*second || *nameless);
}

TEST(CancelKeysTest, OfRequestsWithOneKeyTheLastIsMeant) {
  CancelKeys keys;
  const auto first = keys.Add(1);
  const auto second = keys.Add(1);
  keys.Cancel(1);
  EXPECT_FALSE(*first);
  EXPECT_TRUE(*second);
}

TEST(CancelKeysTest, WhatHasEndedTakesNoRoom) {
  CancelKeys keys;
  const auto alive = keys.Add(1);
  for (uint64_t key = 2; key < 10'000; ++key) keys.Add(key);
  EXPECT_LT(keys.size(), 1000u);
  keys.Cancel(1);
  EXPECT_TRUE(*alive);
}

}  // namespace
}  // namespace vrambroker
