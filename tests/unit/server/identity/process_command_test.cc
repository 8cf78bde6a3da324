// SPDX-License-Identifier: Apache-2.0
#include "server/identity/process_command.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/support/util.h"

namespace vrambroker {
namespace {

using testing_support::WaitFor;

std::atomic<bool> may_read{false};

std::string Slowly(pid_t pid) {
  while (!may_read) std::this_thread::yield();
  return absl::StrCat("slow ", pid);
}

std::string AtOnce(pid_t pid) {
  return absl::StrCat("quick ", pid);
}

TEST(ProcessCommandTest, NobodyWaitsForAProcessThatHoldsUpItsReader) {
  may_read = false;
  const std::shared_ptr<const ProcessCommand> slow = ProcessCommand::Of(1, Slowly);
  const std::shared_ptr<const ProcessCommand> quick = ProcessCommand::Of(2, AtOnce);
  EXPECT_TRUE(WaitFor([&] { return quick->text() == "quick 2"; })) << "another thread reads it";
  EXPECT_EQ(slow->text(), "");
  may_read = true;
  EXPECT_TRUE(WaitFor([&] { return slow->text() == "slow 1"; }));
}

TEST(ProcessCommandTest, OnceAllReadersAreHeldUpOthersAreRead) {
  may_read = false;
  std::vector<std::shared_ptr<const ProcessCommand>> slow;
  for (size_t i = 0; i < ProcessCommand::kMostReaders; ++i) slow.push_back(ProcessCommand::Of(1, Slowly));
  std::vector<std::shared_ptr<const ProcessCommand>> more;
  for (size_t i = 0; i < ProcessCommand::kMostWaiting + 10; ++i) more.push_back(ProcessCommand::Of(2, AtOnce));
  EXPECT_EQ(more.front()->text(), "") << "nobody reads it now";
  may_read = true;
  EXPECT_TRUE(WaitFor([&] { return more.front()->text() == "quick 2"; }));
  EXPECT_EQ(more.back()->text(), "") << "it found no place";
  for (const auto& command : slow) EXPECT_TRUE(WaitFor([&] { return command->text() == "slow 1"; }));
}

}  // namespace
}  // namespace vrambroker
