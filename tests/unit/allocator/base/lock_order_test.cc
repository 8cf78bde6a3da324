// SPDX-License-Identifier: Apache-2.0
#include "allocator/base/lock_order.h"

#include <gtest/gtest.h>

#include "allocator/base/mutex.h"

namespace vrambroker {
namespace {

class LockOrderTest : public testing::Test {
 protected:
  // The functions have no annotations, because clang would find the deliberate faults of the test.
  static void Lock(Mutex& mu) ABSL_NO_THREAD_SAFETY_ANALYSIS { mu.Lock(); }
  static void Unlock(Mutex& mu) ABSL_NO_THREAD_SAFETY_ANALYSIS { mu.Unlock(); }

  Mutex session_{lock_level::kSession};
  Mutex pool_{lock_level::kPool};
  Mutex leaf_;
};

TEST_F(LockOrderTest, DeeperLocksNest) {
  Lock(session_);
  Lock(pool_);
  Lock(leaf_);
  Unlock(session_);  // any order of unlocking is allowed
  Unlock(leaf_);
  Lock(leaf_);
  Unlock(leaf_);
  Unlock(pool_);
  Lock(session_);
  Unlock(session_);
}

#ifdef VRAMBROKER_CHECKS_LOCK_ORDER

using LockOrderDeathTest = LockOrderTest;

TEST_F(LockOrderDeathTest, AnOuterLockIsNotTaken) {
  Lock(pool_);
  EXPECT_DEATH(Lock(session_), "level 'session' is taken while one of level 'pool' is held");
  Unlock(pool_);
}

TEST_F(LockOrderDeathTest, NorIsASecondOneOfALevel) {
  Mutex other;
  Lock(leaf_);
  EXPECT_DEATH(Lock(other), "level 'leaf' is taken while one of level 'leaf' is held");
  Unlock(leaf_);
}

TEST_F(LockOrderDeathTest, NorOneThatIsOuterToAnyThatIsHeld) {
  Lock(pool_);
  Lock(leaf_);
  Unlock(leaf_);
  EXPECT_DEATH(Lock(session_), "level 'session' is taken while one of level 'pool' is held");
  Unlock(pool_);
}

TEST_F(LockOrderDeathTest, OnlyTheHolderReleases) {
  EXPECT_DEATH(Unlock(leaf_), "does not hold it");
}

#endif  // VRAMBROKER_CHECKS_LOCK_ORDER

}  // namespace
}  // namespace vrambroker
