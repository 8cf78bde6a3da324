// SPDX-License-Identifier: Apache-2.0
//
// What a program calls the parts of its work is read wherever its memory is shown.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "allocator/bytes.h"
#include "allocator/scopes.h"
#include "tests/support/vramctl_test.h"

namespace vrambroker::testing_support {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class ScopesTest : public VramctlDaemonTest, public ::testing::WithParamInterface<Placement> {
 protected:
  void SetUp() override {
    placement_ = GetParam();
    ASSERT_OK(StartDaemon({.capacity = "1GiB", .http = true}));
  }

  void Allocate(Client& client, uint64_t bytes) {
    absl::StatusOr<Buffer> buffer = client.Allocate(bytes);
    ASSERT_OK(buffer.status());
    buffers_.push_back(*std::move(buffer));
  }

  // 30 MiB of weights, and in each of ten segments of 20 MiB every second block of 4 MiB in forward/layer3.
  absl::StatusOr<Client> MakeHoles() {
    absl::StatusOr<Client> client = Connect("trainer", Limit(250_MiB));
    if (!client.ok()) return client;
    {
      const MemoryScope scope("weights");
      Allocate(*client, 30_MiB);
    }
    std::vector<Buffer> freed;
    const MemoryScope forward("forward");
    for (int i = 0; i < 50; ++i) {
      const MemoryScope layer("layer3");
      absl::StatusOr<Buffer> block = client->Allocate(4_MiB);
      if (!block.ok()) return block.status();
      (i % 2 == 0 ? buffers_ : freed).push_back(*std::move(block));
    }
    for (Buffer& buffer : freed) {
      if (absl::Status status = buffer.Reset(); !status.ok()) return status;
    }
    return client;
  }

  const std::string folder_ = MakeTempDir();
  std::vector<Buffer> buffers_;
};

INSTANTIATE_TEST_SUITE_P(Placements, ScopesTest, ::testing::Values(Placement::kLeased, Placement::kRemote),
                         [](const auto& test) { return test.param == Placement::kLeased ? "Leased" : "Remote"; });

TEST_P(ScopesTest, AreReadEverywhere) {
  ASSERT_OK_AND_ASSIGN(Client client, MakeHoles());
  const auto find = [](const VramctlDaemonTest::Json& scopes, const std::string& name) {
    for (const auto& scope : scopes) {
      if (scope["scope"] == name) return scope;
    }
    ADD_FAILURE() << name << " is not in " << scopes;
    return VramctlDaemonTest::Json::object();
  };
  // The map, as text and as JSON.
  EXPECT_THAT(Ctl({"map", "trainer"}).out, HasSubstr("100.00 MiB  200.00 MiB      25  100.00 MiB  forward/layer3"));
  const Json map = CtlJson({"map", "trainer"})["maps"][0];
  const Json layer = find(map["scopes"], "forward/layer3");
  EXPECT_EQ(layer["allocated_bytes"], 100_MiB);
  EXPECT_EQ(layer["bytes_at_peak"], 200_MiB);
  EXPECT_EQ(layer["blocks"], 25);
  EXPECT_EQ(layer["pinned_hole_bytes"], 100_MiB);
  EXPECT_EQ(find(map["scopes"], "weights")["pinned_hole_bytes"], 0);
  uint64_t in_layer = 0;
  for (const Json& segment : map["segments"]) {
    for (const Json& block : segment["blocks"]) {
      if (block.value("scope", "") == "forward/layer3") in_layer += block["block_bytes"].get<uint64_t>();
    }
  }
  EXPECT_EQ(in_layer, 100_MiB);
  // The page's map.
  ASSERT_OK_AND_ASSIGN(const HttpAnswer answer, daemon_->Get("/api/v1/map?device=0"));
  const Json page = Json::parse(answer.body);
  const Json& names = page["sessions"][0]["scopes"];
  in_layer = 0;
  for (const Json& segment : page["segments"]) {
    for (size_t i = 0; i < segment["block_scopes"].size(); ++i) {
      const Json& name = names[segment["block_scopes"][i].get<size_t>()];
      if (name == "forward/layer3") in_layer += segment["blocks"][3 * i].get<uint64_t>();
    }
  }
  EXPECT_EQ(in_layer, 100_MiB);
  // A snapshot for PyTorch's viewer: of the client itself, and of the daemon.
  ASSERT_OK_AND_ASSIGN(const std::string own, client.SnapshotJson());
  const std::string file = folder_ + "/trainer.json";
  ASSERT_EQ(Ctl({"snapshot", "trainer", "-o", file}).exit_code, 0);
  std::ifstream written(file);
  for (const Json& snapshot : {Json::parse(own), Json::parse(written)}) {
    const Json frames =
        Json::parse(R"([{"filename":"","line":0,"name":"layer3"},{"filename":"","line":0,"name":"forward"}])");
    int blocks = 0;
    for (const Json& segment : snapshot["segments"]) {
      for (const Json& block : segment["blocks"]) blocks += block["frames"] == frames ? 1 : 0;
    }
    EXPECT_EQ(blocks, 25);
    int events = 0;  // 50 were allocated, 25 freed, in two steps each
    for (const Json& event : snapshot["device_traces"][0]) events += event.value("frames", Json()) == frames ? 1 : 0;
    EXPECT_EQ(events, 100);
  }
  // A refusal.
  const MemoryScope backward("backward");
  const absl::Status refused = client.Allocate(100_MiB).status();
  const std::optional<OutOfMemory> oom = GetOutOfMemory(refused);
  ASSERT_TRUE(oom.has_value()) << refused;
  EXPECT_EQ(oom->scope, "backward");
  ASSERT_EQ(oom->scopes.size(), 2u);
  EXPECT_EQ(oom->scopes[0].scope, "forward/layer3");
  EXPECT_EQ(oom->scopes[0].allocated_bytes, 100_MiB);
  EXPECT_EQ(oom->scopes[0].bytes_at_peak, 200_MiB);
  EXPECT_EQ(oom->scopes[0].pinned_hole_bytes, 100_MiB);
  EXPECT_EQ(oom->pinned_segments.at(0).longest_held.at(0).scope, "forward/layer3");
  EXPECT_THAT(oom->explanation, HasSubstr(" in scope forward/layer3; the largest scope is forward/layer3, with 100.00 "
                                          "MiB in 25 blocks"));
  EXPECT_THAT(std::string(refused.message()), HasSubstr(oom->explanation));
  const std::string ooms = Ctl({"ooms"}).out;
  EXPECT_THAT(ooms, HasSubstr("  in:  scope backward\n"));
  EXPECT_THAT(ooms, HasSubstr("100.00 MiB  200.00 MiB      25  100.00 MiB  forward/layer3\n"));
  const Json json = CtlJson({"ooms"})["events"][0]["out_of_memory"];
  EXPECT_EQ(json["scope"], "backward");
  EXPECT_EQ(json["scopes"][0]["scope"], "forward/layer3");
  EXPECT_EQ(json["pinned_segments"][0]["longest_held"][0]["scope"], "forward/layer3");
}

TEST_P(ScopesTest, AreOfTheirThreadAndEndWithTheirObject) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("job"));
  {
    const MemoryScope outer("outer");
    std::thread([&] { Allocate(client, 2_MiB); }).join();
    {
      const MemoryScope inner("inner");
      Allocate(client, 4_MiB);
    }
    Allocate(client, 6_MiB);
  }
  Allocate(client, 8_MiB);
  std::map<std::string, uint64_t> bytes;
  const Json map = CtlJson({"map", "job"});
  for (const Json& scope : map["maps"][0]["scopes"]) {
    bytes[scope["scope"]] = scope["allocated_bytes"];
  }
  EXPECT_EQ(bytes, (std::map<std::string, uint64_t>{{"", 10_MiB}, {"outer", 6_MiB}, {"outer/inner", 4_MiB}}));
}

TEST_P(ScopesTest, NamesOfAnyBytesAreShownAsText) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("job"));
  const MemoryScope scope("\x1b[2J<b>\xff\n" + std::string(500, 'x'));
  Allocate(client, 2_MiB);
  const std::string shown = "[2J<b>\xef\xbf\xbd" + std::string(ScopeTable::kMaxNameBytes - 9, 'x');
  EXPECT_EQ(CtlJson({"map", "job"})["maps"][0]["scopes"][0]["scope"], shown);
  EXPECT_THAT(Ctl({"map", "job"}).out, Not(HasSubstr("\x1b[2J")));
  ASSERT_OK_AND_ASSIGN(const HttpAnswer page, daemon_->Get("/api/v1/map?device=0"));
  EXPECT_EQ(Json::parse(page.body)["sessions"][0]["scopes"].back(), shown);
}

// A child of fork() may go on using scopes, although another thread was entering one at that moment.
TEST_P(ScopesTest, OutliveAFork) {
  std::atomic<bool> stop{false};
  std::thread enters([&] {
    while (!stop) const MemoryScope scope("busy");
  });
  for (int i = 0; i < 50; ++i) {
    const MemoryScope around("around");
    const pid_t child = fork();
    if (child == 0) {
      const MemoryScope scope("child");
      _exit(0);
    }
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  stop = true;
  enters.join();
}

}  // namespace
}  // namespace vrambroker::testing_support
