// SPDX-License-Identifier: Apache-2.0
//
// Memory scopes: names given by a program to the parts of its work are shown wherever the program's memory is shown.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "allocator/heap/scopes.h"
#include "allocator/heap/size_class.h"
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

  // Allocates 30 MiB of weights, and every second block of 4 MiB in ten segments of 20 MiB, in scope forward/layer3.
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

  // Returns the page's map with the only client's blocks. The daemon does not wait long for the client's answer.
  nlohmann::json PageMap() {
    nlohmann::json map;
    EXPECT_TRUE(WaitFor([&] {
      const absl::StatusOr<HttpAnswer> answer = daemon_->Get("/api/v1/map?device=0");
      if (!answer.ok()) return false;
      map = nlohmann::json::parse(answer->body);
      return map["sessions"].size() == 1 && map["sessions"][0]["answer"] == "blocks";
    })) << map;
    return map;
  }

  const std::string folder_ = MakeTempDir();
  std::vector<Buffer> buffers_;
};

INSTANTIATE_TEST_SUITE_P(Placements, ScopesTest, ::testing::Values(Placement::kLeased, Placement::kRemote),
                         [](const auto& test) { return test.param == Placement::kLeased ? "Leased" : "Remote"; });

// Tests of whole segments, which only leased clients have.
class LeasedScopesTest : public ScopesTest {};
INSTANTIATE_TEST_SUITE_P(Placements, LeasedScopesTest, ::testing::Values(Placement::kLeased));

TEST_P(ScopesTest, AreReadEverywhere) {
  ASSERT_OK_AND_ASSIGN(Client client, MakeHoles());
  const auto find = [](const VramctlDaemonTest::Json& scopes, const std::string& name) {
    for (const auto& scope : scopes) {
      if (scope["scope"] == name) return scope;
    }
    ADD_FAILURE() << name << " is not in " << scopes;
    return VramctlDaemonTest::Json::object();
  };
  // Checks the map, as text and as JSON.
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
  // Checks the page's map.
  const Json page = PageMap();
  const Json& names = page["sessions"][0]["scopes"];
  in_layer = 0;
  for (const Json& segment : page["segments"]) {
    for (size_t i = 0; i < segment["block_scopes"].size(); ++i) {
      const Json& name = names[segment["block_scopes"][i].get<size_t>()];
      if (name == "forward/layer3") in_layer += segment["blocks"][3 * i].get<uint64_t>();
    }
  }
  EXPECT_EQ(in_layer, 100_MiB);
  const auto by_name = [](Json uses) {
    std::sort(uses.begin(), uses.end(), [](const Json& a, const Json& b) { return a["scope"] < b["scope"]; });
    return uses;
  };
  EXPECT_EQ(by_name(page["sessions"][0].value("scope_uses", Json())), by_name(map["scopes"]));
  EXPECT_FALSE(page["sessions"][0].contains("more_scope_uses"));
  // Checks snapshots for PyTorch's viewer: by the client, and by the daemon.
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
    int events = 0;  // 50 allocations and 25 frees of two steps each
    for (const Json& event : snapshot["device_traces"][0]) events += event.value("frames", Json()) == frames ? 1 : 0;
    EXPECT_EQ(events, 100);
  }
  // Checks a refusal.
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
  EXPECT_EQ(PageMap()["sessions"][0]["scopes"].back(), shown);
}

// A size computed wrongly must be traceable to its place in the program.
TEST_P(ScopesTest, RequestsOfAnySizeNameTheirScope) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("job", Limit(250_MiB)));
  {
    const MemoryScope weights("weights");
    Allocate(client, 30_MiB);
  }
  const MemoryScope forward("forward");
  const MemoryScope attention("attention");
  for (const uint64_t bytes : {uint64_t{300_MiB}, uint64_t{2} << 30, kMaxRequestBytes - 1, kMaxRequestBytes,
                               uint64_t{1} << 63, ~uint64_t{0}}) {
    const absl::Status refused = client.Allocate(bytes).status();
    const std::optional<OutOfMemory> oom = GetOutOfMemory(refused);
    ASSERT_TRUE(oom.has_value()) << bytes << " " << refused;
    EXPECT_EQ(oom->scope, "forward/attention") << bytes;
    ASSERT_EQ(oom->scopes.size(), 1u) << bytes;
    EXPECT_EQ(oom->scopes[0].scope, "weights") << bytes;
    EXPECT_EQ(CtlJson({"ooms"})["events"][0]["out_of_memory"]["scope"], "forward/attention") << bytes;
  }
}

// Programs with their own allocators name scopes in the same way as all programs.
TEST_P(LeasedScopesTest, RefusedSegmentsNameTheirScope) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("program", Limit(100_MiB)));
  {
    const MemoryScope weights("weights");
    Allocate(client, 4_MiB);  // leases 20 MiB
  }
  const MemoryScope forward("forward");
  for (const uint64_t bytes : {uint64_t{90_MiB}, uint64_t{2} << 30, kMaxRequestBytes, ~uint64_t{0}}) {
    const absl::Status refused = client.LeaseSegment(bytes).status();
    const std::optional<OutOfMemory> oom = GetOutOfMemory(refused);
    ASSERT_TRUE(oom.has_value()) << bytes << " " << refused;
    EXPECT_EQ(oom->scope, "forward") << bytes;
    ASSERT_EQ(oom->scopes.size(), 1u) << bytes;
    EXPECT_EQ(oom->scopes[0].scope, "weights") << bytes;
    ASSERT_EQ(oom->pinned_segments.size(), 1u) << bytes;
    EXPECT_EQ(oom->pinned_segments[0].longest_held.at(0).scope, "weights") << bytes;
  }
}

// A refusal travels in the metadata of a call: 8 KiB, and gRPC encodes each byte that is not printable ASCII as three
// bytes. If the metadata were too large, the client would learn nothing about the refusal.
TEST_P(ScopesTest, ARefusalArrivesWholeWhateverScopesAreCalled) {
  std::vector<Client> others;
  for (int i = 0; i < 5; ++i) {
    ASSERT_OK_AND_ASSIGN(Client other, Connect(absl::StrCat(std::string(62, 'o'), i)));
    Allocate(other, 4_MiB);  // leases 20 MiB
    others.push_back(std::move(other));
  }
  int run = 0;
  for (const char* character : {"s", "%", "\"", "\xe5\xb1\xa4", "\xf0\x9f\x92\xa5", "%\"\xc3\xa4"}) {
    const auto name = [&](int i) {
      std::string text;
      while (text.size() < 80) text += character;
      return absl::StrCat(text, i);
    };
    const auto shown = [&](int i) { return EndOfScopePath(name(i), kMaxReportedScopeBytes); };
    ASSERT_OK_AND_ASSIGN(Client client, Connect(absl::StrCat(std::string(61, 'c'), run++), Limit(80_MiB)));
    // Blocks 1, 3 and 5 of each of three segments stay, each block in a different scope.
    std::vector<Buffer> kept;
    std::vector<Buffer> freed;
    for (int i = 0; i < 15; ++i) {
      const MemoryScope scope(name(i % 5 / 2));
      ASSERT_OK_AND_ASSIGN(Buffer block, client.Allocate(4_MiB));
      (i % 5 % 2 == 0 ? kept : freed).push_back(std::move(block));
    }
    for (Buffer& block : freed) ASSERT_OK(block.Reset());
    const MemoryScope scope(name(7));
    const absl::Status refused = client.Allocate(30_MiB).status();
    const std::optional<OutOfMemory> oom = GetOutOfMemory(refused);
    ASSERT_TRUE(oom.has_value()) << refused;
    EXPECT_EQ(oom->cause, OutOfMemory::Cause::kFragmentation);
    EXPECT_EQ(oom->scope, shown(7));
    ASSERT_EQ(oom->scopes.size(), 3u);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(oom->scopes[static_cast<size_t>(i)].scope, shown(i));
    ASSERT_EQ(oom->pinned_segments.size(), 3u);
    for (const OutOfMemory::PinnedSegment& segment : oom->pinned_segments) {
      ASSERT_EQ(segment.longest_held.size(), 3u);
      for (const auto& block : segment.longest_held) EXPECT_TRUE(block.scope.starts_with("...")) << block.scope;
    }
    EXPECT_EQ(oom->largest_holders.size(), 3u);
    EXPECT_EQ(oom->idle_holders.size(), 5u);
    EXPECT_THAT(oom->explanation, HasSubstr(absl::StrCat("the largest scope is ", shown(0))));
    EXPECT_THAT(std::string(refused.message()), HasSubstr(oom->explanation));
    EXPECT_THAT(std::string(refused.message()), HasSubstr(oom->advice));
  }
}

// The page's snapshot is a single answer, not written block by block: a block has its whole scope in a single frame. A
// frame for each nested scope would cost gigabytes in a large heap.
TEST_P(ScopesTest, ASnapshotOfThePageHasOneFrameForABlock) {
  constexpr size_t kBlocks = 300;
  ASSERT_OK_AND_ASSIGN(Client client, Connect("job"));
  std::string path;
  std::vector<std::unique_ptr<MemoryScope>> scopes;
  for (int depth = 0; depth < ScopeTable::kMaxDepth; ++depth) {
    const std::string name = absl::StrCat("a scope at a depth of ", depth);
    scopes.push_back(std::make_unique<MemoryScope>(name));
    absl::StrAppend(&path, path.empty() ? "" : "/", name);
  }
  for (size_t i = 0; i < kBlocks; ++i) Allocate(client, 512);
  while (!scopes.empty()) scopes.pop_back();
  Allocate(client, 512);  // in no scope
  Allocate(client, 4_MiB);
  {
    const MemoryScope scope("flat");
    Allocate(client, 4_MiB);
  }
  path = EndOfScopePath(path, kMaxScopePathBytes);
  ASSERT_TRUE(path.starts_with("..."));
  ASSERT_OK_AND_ASSIGN(const HttpAnswer answer, daemon_->Get("/snapshot.json?session=job"));
  ASSERT_EQ(answer.code, 200) << answer.body;
  std::map<std::string, size_t> blocks;  // used blocks, by the name of their only frame
  const Json snapshot = Json::parse(answer.body);
  for (const Json& segment : snapshot["segments"]) {
    for (const Json& block : segment["blocks"]) {
      const Json& frames = block["frames"];
      if (block["state"] == "inactive") {
        EXPECT_EQ(frames, Json::array());
        continue;
      }
      ASSERT_LE(frames.size(), 1u) << frames;
      if (!frames.empty()) {
        EXPECT_EQ(frames, Json::array({{{"filename", ""}, {"line", 0}, {"name", frames[0]["name"]}}}));
      }
      ++blocks[frames.empty() ? "" : frames[0]["name"].get<std::string>()];
    }
  }
  EXPECT_EQ(blocks, (std::map<std::string, size_t>{{"", 2}, {"flat", 1}, {path, kBlocks}}));
  // A block takes about 150 bytes and its path; 64 frames would take more than 4000.
  EXPECT_LT(answer.body.size(), (kBlocks + 10) * (kMaxScopePathBytes + 300));
}

// Returns true if `child`, created by fork(), waits for a lock that no thread will ever release: its only thread
// sleeps.
bool IsDeadlocked(pid_t child) {
  const auto read = [&](const char* file) {
    std::ifstream in(absl::StrCat("/proc/", child, "/", file));
    std::ostringstream text;
    text << in.rdbuf();
    return text.str();
  };
  // The file holds the number of the current system call, or "running". Empty: the kernel does not tell.
  return read("syscall").starts_with(absl::StrCat(SYS_futex, " ")) &&
         absl::StrContains(read("status"), "\nThreads:\t1\n");
}

// A child of fork() may use scopes, even if another thread was entering a scope during the fork.
TEST_P(ScopesTest, OutliveAFork) {
  std::atomic<bool> stop{false};
  std::thread enters([&] {
    while (!stop) const MemoryScope scope("busy");
  });
  const absl::Cleanup join = [&] {
    stop = true;
    enters.join();
  };
  for (int i = 0; i < 50; ++i) {
    const MemoryScope around("around");
    const pid_t child = fork();
    if (child == 0) {
      const MemoryScope scope("child");
      _exit(0);
    }
    ASSERT_GT(child, 0);
    int status = -1;
    pid_t ended = 0;
    while ((ended = waitpid(child, &status, WNOHANG)) == 0 && !IsDeadlocked(child)) std::this_thread::yield();
    if (ended == 0) {
      kill(child, SIGKILL);
      ASSERT_EQ(waitpid(child, nullptr, 0), child);
      FAIL() << "child " << i << " hangs in MemoryScope: it waits for a lock that a thread of its parent had at fork()";
    }
    ASSERT_EQ(ended, child);
    EXPECT_EQ(status, 0);
  }
}

}  // namespace
}  // namespace vrambroker::testing_support
