// SPDX-License-Identifier: Apache-2.0
//
// A program fragments its memory a little in each step, and its metrics show the growth.
#include <gtest/gtest.h>
#include <unistd.h>

#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "tests/support/daemon_test.h"
#include "tests/support/util.h"

namespace vrambroker::testing_support {
namespace {

class FragmentationTest : public DaemonTest {
 protected:
  static constexpr uint64_t kLimit = 512_MiB;

  // Waits until the daemon has looked at its sessions again.
  void AwaitLook() {
    const auto last = [&] {
      const absl::StatusOr<HttpAnswer> answer = daemon_->Get("/api/v1/timeline");
      const nlohmann::json timeline = nlohmann::json::parse(answer.ok() ? answer->body : "", nullptr, false);
      const bool any = timeline.is_object() && !timeline["time_ms"].empty();
      return any ? timeline["time_ms"].back().get<int64_t>() : int64_t{0};
    };
    const int64_t before = last();
    EXPECT_TRUE(WaitFor([&] { return last() > before; }));
  }
  std::optional<double> Metric(const MetricsPage& page, const std::string& name, const std::string& client) {
    return page.Value("vrambroker_client_" + name, {{"client", client}, {"gpu", "0"}, {"tenant", tenant_}});
  }
  // Returns the bytes that the client cannot give back.
  double Held(const MetricsPage& page) {
    return Metric(page, "reserved_bytes", "train").value_or(0) - Metric(page, "idle_bytes", "train").value_or(0);
  }

  const std::string tenant_ = absl::StrCat("uid:", getuid());
};

TEST_F(FragmentationTest, GrowthIsSeenWhileItLasts) {
  ASSERT_OK(StartDaemon({.capacity = "1GiB", .config = "metrics { fragmentation_window: '1s' }", .http = true}));
  ASSERT_OK_AND_ASSIGN(Client steady, Connect("steady"));
  ASSERT_OK_AND_ASSIGN(const Buffer unused, steady.Allocate(20_MiB));
  ASSERT_OK_AND_ASSIGN(Client train, Connect("train", Limit(kLimit)));
  // Fills 120 segments of 2 MiB.
  constexpr size_t kBlocksInSegment = 8;
  std::vector<std::optional<Buffer>> blocks;
  for (size_t i = 0; i < 120 * kBlocksInSegment; ++i) {
    ASSERT_OK_AND_ASSIGN(Buffer block, train.Allocate(256_KiB));
    blocks.emplace_back(std::move(block));
  }
  AwaitLook();
  const auto is_known = [&] { return Held(daemon_->Metrics()) >= 240.0 * (1 << 20); };
  ASSERT_TRUE(WaitFor(is_known)) << "its client reports";
  const double held_before = Held(daemon_->Metrics());

  // A step frees every second block of four segments, and allocates the same amount in two new segments.
  std::vector<Buffer> large;
  MetricsPage page = daemon_->Metrics();
  EXPECT_EQ(Metric(page, "fragmentation_growth_bytes_per_second", "train"), 0);
  EXPECT_EQ(Metric(page, "refusal_expected_seconds", "train"), std::nullopt);
  for (size_t next = 0; next < blocks.size() && !Metric(page, "refusal_expected_seconds", "train").has_value();) {
    for (const size_t end = next + 4 * kBlocksInSegment; next < end; next += 2) blocks[next].reset();
    for (int i = 0; i < 4; ++i) {
      ASSERT_OK_AND_ASSIGN(Buffer block, train.Allocate(1_MiB));
      large.push_back(std::move(block));
    }
    AwaitLook();
    page = daemon_->Metrics();
  }
  const std::optional<double> growth = Metric(page, "fragmentation_growth_bytes_per_second", "train");
  const std::optional<double> left = Metric(page, "refusal_expected_seconds", "train");
  ASSERT_TRUE(growth.has_value() && left.has_value());
  std::cout << "after " << large.size() / 4 << " steps: " << *growth / (1 << 20) << " MiB a second, refused in "
            << *left << " s\n";
  EXPECT_GE(large.size() / 4, 3u) << "too few steps to call it a trend";
  EXPECT_GT(*growth, 0);
  EXPECT_LE(*growth, Held(page) - held_before) << "a second: windows are as long at least";
  // A refusal comes when growth has filled the room. The room was smaller before the last look than at the beginning.
  EXPECT_LE(*growth * *left, (kLimit - held_before) * 1.001);
  EXPECT_GE(*growth * *left, (kLimit - Held(page)) * 0.999);
  EXPECT_EQ(Metric(page, "fragmentation_growth_bytes_per_second", "steady"), 0);
  EXPECT_EQ(Metric(page, "refusal_expected_seconds", "steady"), std::nullopt);

  const auto is_over = [&] {
    page = daemon_->Metrics();
    return Metric(page, "fragmentation_growth_bytes_per_second", "train") == 0.0;
  };
  EXPECT_TRUE(WaitFor(is_over)) << "growth that has ended is no trend";
  EXPECT_EQ(Metric(page, "refusal_expected_seconds", "train"), std::nullopt);
}

}  // namespace
}  // namespace vrambroker::testing_support
