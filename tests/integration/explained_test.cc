// SPDX-License-Identifier: Apache-2.0
//
// A refusal for want of memory has one report, and the report says the same in every place.
#include <gtest/gtest.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "allocator/base/bytes.h"
#include "tests/support/vramctl_test.h"

namespace vrambroker::testing_support {
namespace {

using absl::StrContains;

struct Placed {
  const char* name;
  Placement placement;
};

class ExplainedTest : public VramctlDaemonTest, public ::testing::WithParamInterface<Placed> {
 protected:
  void SetUp() override {
    placement_ = GetParam().placement;
    ASSERT_OK(StartDaemon({.capacity = "1GiB",
                           .config = "rules { session_name: 'bounded' user_limit { bytes: '600MiB' } } "
                                     "rules { session_name: 'guaranteed' guarantee { bytes: '300MiB' } }",
                           .http = true}));
  }

  // Allocates 100 blocks of 4 MiB and frees every second block. 200 MiB stays allocated, and 400 MiB reserved.
  absl::StatusOr<Client> MakeHoles(std::optional<Limit> limit = Limit(420_MiB)) {
    absl::StatusOr<Client> client = Connect("trainer", limit);
    if (!client.ok()) return client;
    for (int i = 0; i < 100; ++i) {
      absl::StatusOr<Buffer> block = client->Allocate(4_MiB);
      if (!block.ok()) return block.status();
      (i % 2 == 0 ? odd_ : kept_).push_back(*std::move(block));
    }
    for (Buffer& block : odd_) {
      if (absl::Status status = block.Reset(); !status.ok()) return status;
    }
    return client;
  }

  std::vector<Buffer> odd_;
  std::vector<Buffer> kept_;
};

TEST_P(ExplainedTest, HolesAreToldFromALimit) {
  ASSERT_OK_AND_ASSIGN(Client client, MakeHoles());
  struct Case {
    uint64_t bytes;
    OutOfMemory::Cause cause;
  };
  for (const Case& param : {Case{199_MiB, OutOfMemory::Cause::kFragmentation},
                            {200_MiB, OutOfMemory::Cause::kFragmentation},
                            {201_MiB, OutOfMemory::Cause::kFragmentation},
                            {220_MiB, OutOfMemory::Cause::kFragmentation},
                            {220_MiB + 1, OutOfMemory::Cause::kLimit},
                            {2_GiB, OutOfMemory::Cause::kLargerThanDevice}}) {
    const std::optional<OutOfMemory> oom = GetOutOfMemory(client.Allocate(param.bytes).status());
    ASSERT_TRUE(oom.has_value());
    EXPECT_STREQ(OutOfMemoryCauseName(oom->cause), OutOfMemoryCauseName(param.cause)) << param.bytes;
    EXPECT_EQ(oom->reserved_bytes, 400_MiB);
    EXPECT_EQ(oom->allocated_bytes, 200_MiB);
    EXPECT_EQ(oom->room_bytes, 20_MiB);
    if (param.cause == OutOfMemory::Cause::kLargerThanDevice) continue;
    EXPECT_EQ(oom->hole_bytes, 200_MiB);
    EXPECT_EQ(oom->hole_segments, 20u);
    EXPECT_EQ(oom->holes, 50u);
    ASSERT_EQ(oom->pinned_segments.size(), 3u);
    const OutOfMemory::PinnedSegment& most = oom->pinned_segments[0];
    EXPECT_EQ(most.segment_bytes, 20_MiB);
    EXPECT_EQ(most.hole_bytes, 12_MiB);
    EXPECT_EQ(most.largest_hole_bytes, 4_MiB);
    EXPECT_EQ(most.pinning_blocks, 2u);
    EXPECT_EQ(most.longest_held.size(), 2u);
  }
}

// The session reserves 400 MiB, so a request seems to meet the device's limit of 1 GiB first. But 200 MiB and 824 MiB
// would fit within the limit: the guarantee of 300 MiB for another session stands in the way.
TEST_P(ExplainedTest, WithoutALimitAGuaranteeIsToBlame) {
  ASSERT_OK_AND_ASSIGN(const Client other, Connect("guaranteed"));
  ASSERT_OK_AND_ASSIGN(Client client, MakeHoles(std::nullopt));
  struct Case {
    uint64_t bytes;
    OutOfMemory::Cause cause;
    const char* advice;
  };
  for (const Case& param : {Case{524_MiB, OutOfMemory::Cause::kFragmentation, "lower other sessions' guarantees"},
                            {525_MiB, OutOfMemory::Cause::kCapacity, "lower other sessions' guarantees"},
                            {624_MiB, OutOfMemory::Cause::kCapacity, "lower other sessions' guarantees"},
                            {626_MiB, OutOfMemory::Cause::kCapacity, "lower other sessions' guarantees"},
                            {800_MiB, OutOfMemory::Cause::kCapacity, "lower other sessions' guarantees"},
                            {824_MiB, OutOfMemory::Cause::kCapacity, "lower other sessions' guarantees"},
                            {825_MiB, OutOfMemory::Cause::kLimit, "a higher limit alone would not help"}}) {
    const std::optional<OutOfMemory> oom = GetOutOfMemory(client.Allocate(param.bytes).status());
    ASSERT_TRUE(oom.has_value());
    EXPECT_STREQ(OutOfMemoryCauseName(oom->cause), OutOfMemoryCauseName(param.cause)) << param.bytes;
    EXPECT_TRUE(StrContains(oom->advice, param.advice)) << param.bytes << ": " << oom->advice;
    if (param.cause != OutOfMemory::Cause::kCapacity) continue;
    EXPECT_TRUE(StrContains(oom->explanation, "and 300.00 MiB more is kept for other sessions' guarantees"))
        << oom->explanation;
  }
}

TEST_P(ExplainedTest, AHigherLimitIsNoAdviceWhereTheDeviceIsFull) {
  ASSERT_OK_AND_ASSIGN(Client other, Connect("holder"));
  ASSERT_OK_AND_ASSIGN(const Buffer held, other.Allocate(900_MiB));
  ASSERT_OK_AND_ASSIGN(Client client, Connect("trainer", Limit(100_MiB)));
  ASSERT_OK_AND_ASSIGN(const Buffer own, client.Allocate(40_MiB));
  const std::optional<OutOfMemory> oom = GetOutOfMemory(client.Allocate(1000_MiB).status());
  ASSERT_TRUE(oom.has_value());
  EXPECT_EQ(oom->cause, OutOfMemory::Cause::kLimit);
  EXPECT_EQ(oom->advice,
            "Ask for less, since the limit could never hold this request: a higher limit alone would not help, since "
            "the device has only 84.00 MiB to spare.");
}

TEST_P(ExplainedTest, OtherSessionsOfAUserAreToEndWhereThereAreAny) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("bounded"));
  ASSERT_OK_AND_ASSIGN(const Buffer own, client.Allocate(400_MiB));
  const auto refused = [&](uint64_t bytes) {
    const std::optional<OutOfMemory> oom = GetOutOfMemory(client.Allocate(bytes).status());
    EXPECT_TRUE(oom.has_value() && oom->cause == OutOfMemory::Cause::kLimit);
    return oom.has_value() ? oom->advice : "";
  };
  EXPECT_EQ(refused(401_MiB),
            "Free some of this session's memory, or have user_limit raised in the daemon's configuration.");
  ASSERT_OK_AND_ASSIGN(Client other, Connect("other"));
  ASSERT_OK_AND_ASSIGN(const Buffer held, other.Allocate(100_MiB));
  EXPECT_EQ(refused(200_MiB),
            "End or trim other sessions of this user (vramctl sessions), or have user_limit raised in the daemon's "
            "configuration.");
}

TEST_P(ExplainedTest, OneReportIsReadEverywhere) {
  ASSERT_OK_AND_ASSIGN(Client client, MakeHoles());
  const absl::Status refused = client.Allocate(201_MiB).status();
  const std::optional<OutOfMemory> oom = GetOutOfMemory(refused);
  ASSERT_TRUE(oom.has_value()) << refused;
  for (const char* words :
       {"what is allocated and 201.00 MiB more would fit within the limit of 420.00 MiB",
        "only 20.00 MiB can still be reserved; 200.00 MiB is fragmented: 50 holes between used blocks, in 20 segments",
        "has 12.00 MiB of 20.00 MiB in holes, and is pinned by 2 blocks, one of 4.00 MiB held for "}) {
    EXPECT_TRUE(StrContains(oom->explanation, words)) << words << "\nin " << oom->explanation;
  }
  EXPECT_TRUE(StrContains(oom->advice, "raise the session's limit to 602MiB (vramctl limit)")) << oom->advice;
  // The error's message has the report.
  EXPECT_TRUE(StrContains(refused.message(), oom->explanation)) << refused;
  EXPECT_TRUE(StrContains(refused.message(), oom->advice)) << refused;
  // The log has the report.
  EXPECT_TRUE(WaitFor([&] { return StrContains(daemon_->log(), oom->explanation); })) << daemon_->log();
  EXPECT_TRUE(StrContains(daemon_->log(), absl::StrCat(" advice=\"", oom->advice, "\""))) << daemon_->log();
  // vramctl shows the report, as a table and as JSON, and so does the page's API.
  const RunResult text = Ctl({"ooms"});
  EXPECT_TRUE(StrContains(text.out, absl::StrCat("  why: ", oom->explanation, "\n"))) << text.out;
  EXPECT_TRUE(StrContains(text.out, absl::StrCat("  do:  ", oom->advice, "\n"))) << text.out;
  EXPECT_TRUE(StrContains(
      text.out, "12.00 MiB of 20.00 MiB in holes, the largest 4.00 MiB; 2 blocks in use, held longest: 4.00 MiB"))
      << text.out;
  size_t pinned = 0;
  for (const absl::string_view line : absl::StrSplit(text.out, '\n')) {
    const absl::string_view words = absl::StripAsciiWhitespace(line);
    if (!absl::StartsWith(words, "segment ")) continue;
    ++pinned;
    EXPECT_TRUE(StrContains(daemon_->log(), words)) << words << "\nnot in " << daemon_->log();
  }
  EXPECT_EQ(pinned, 3u) << text.out;
  const Json json = CtlJson({"ooms"})["events"][0]["out_of_memory"];
  EXPECT_EQ(json["explanation"], oom->explanation);
  EXPECT_EQ(json["advice"], oom->advice);
  EXPECT_EQ(json["holes"], 50);
  EXPECT_EQ(json["pinned_segments"].size(), 3u);
  ASSERT_OK_AND_ASSIGN(const HttpAnswer page, daemon_->Get("/api/v1/ooms"));
  EXPECT_EQ(Json::parse(page.body)["events"][0]["out_of_memory"], json);
}

// Follows each part of the advice to the letter.
TEST_P(ExplainedTest, WhatTheAdviceNamesHelps) {
  ASSERT_OK_AND_ASSIGN(Client client, MakeHoles());
  const std::optional<OutOfMemory> oom = GetOutOfMemory(client.Allocate(201_MiB).status());
  ASSERT_TRUE(oom.has_value());
  {
    EXPECT_EQ(Ctl({"limit", "trainer", "602MiB"}).exit_code, 0);
    ASSERT_OK_AND_ASSIGN(const Buffer buffer, client.Allocate(201_MiB));
  }
  EXPECT_EQ(Ctl({"limit", "trainer", "420MiB"}).exit_code, 0);
  // The daemon asks idle memory above the limit back.
  ASSERT_TRUE(WaitFor([&] { return CtlJson({"sessions"})["sessions"][0]["devices"][0]["reserved_bytes"] == 400_MiB; }));
  EXPECT_FALSE(client.Allocate(201_MiB).ok());
  // Frees the blocks of ten segments: 200 MiB comes back.
  for (int i = 0; i < 25; ++i) ASSERT_OK(kept_[static_cast<size_t>(i)].Reset());
  ASSERT_OK(client.Allocate(201_MiB).status());
}

INSTANTIATE_TEST_SUITE_P(Placements, ExplainedTest,
                         ::testing::Values(Placed{"leased", Placement::kLeased}, Placed{"remote", Placement::kRemote}),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace vrambroker::testing_support
