// SPDX-License-Identifier: Apache-2.0
//
// Parts of the client library without need for a daemon.
#include "client/vrambroker/client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "allocator/wire/heap_convert.h"
#include "client/session/alloc_conf_text.h"
#include "client/session/environment.h"
#include "vrambroker/v1/types.pb.h"

namespace vrambroker {
namespace {

using ::testing::HasSubstr;

TEST(ParseLimitTest, ReadsSharesAndSizes) {
  EXPECT_EQ(ParseLimit("40%").value_or(0.0), Limit(0.4));
  EXPECT_EQ(ParseLimit("1.0").value_or(0.0), Limit(1.0));
  EXPECT_EQ(ParseLimit("8G").value_or(0.0), Limit(8_GiB));
  EXPECT_EQ(ParseLimit("80").status(),
            absl::InvalidArgumentError("'80' is ambiguous: write 80B for bytes, 80GiB, 80%, or a fraction such as 0.5 "
                                       "(1.0 is the whole capacity)"));
}

// Sets environment variables for a test, and restores the earlier values.
class Variables {
 public:
  explicit Variables(const std::vector<std::pair<const char*, const char*>>& variables) {
    for (const auto& [name, value] : variables) {
      const char* old = std::getenv(name);
      saved_.emplace_back(name, old == nullptr ? std::nullopt : std::optional<std::string>(old));
      setenv(name, value, 1);
    }
  }
  ~Variables() {
    for (const auto& [name, value] : saved_) value.has_value() ? setenv(name, value->c_str(), 1) : unsetenv(name);
  }

 private:
  std::vector<std::pair<const char*, std::optional<std::string>>> saved_;
};

TEST(EnvironmentTest, SaysWhatTheProgramLeavesOpen) {
  const Variables variables({{"VRAMBROKER_LIMIT", "40%"},
                             {"VRAMBROKER_GUARANTEE", "1G"},
                             {"VRAMBROKER_NAME", "from outside"},
                             {"VRAMBROKER_DEVICES", "1, GPU-1b2c"},
                             {"VRAMBROKER_WAIT", "10min"}});
  const absl::StatusOr<ClientOptions> open = client_internal::WithEnvironment({});
  ASSERT_TRUE(open.ok()) << open.status();
  EXPECT_EQ(open->limit, Limit(0.4));
  EXPECT_EQ(open->guarantee, Limit(1_GiB));
  EXPECT_EQ(open->name, "from outside");
  EXPECT_EQ(open->wait, absl::Minutes(10));
  EXPECT_THAT(open->devices, ::testing::ElementsAre("1", "GPU-1b2c"));
  const absl::StatusOr<ClientOptions> own = client_internal::WithEnvironment(
      {.name = "own", .limit = Limit(2_GiB), .guarantee = Limit(0.1), .devices = {"0"}, .wait = absl::Seconds(1)});
  ASSERT_TRUE(own.ok()) << own.status();
  EXPECT_EQ(own->limit, Limit(2_GiB));
  EXPECT_EQ(own->guarantee, Limit(0.1));
  EXPECT_EQ(own->name, "own");
  EXPECT_EQ(own->wait, absl::Seconds(1));
  EXPECT_THAT(own->devices, ::testing::ElementsAre("0"));
}

TEST(EnvironmentTest, EmptyIsNotSet) {
  const Variables variables({{"VRAMBROKER_LIMIT", ""},
                             {"VRAMBROKER_GUARANTEE", ""},
                             {"VRAMBROKER_NAME", ""},
                             {"VRAMBROKER_WAIT", ""},
                             {"VRAMBROKER_DEVICES", ""}});
  const absl::StatusOr<ClientOptions> options = client_internal::WithEnvironment({});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->limit, std::nullopt);
  EXPECT_EQ(options->guarantee, std::nullopt);
  EXPECT_EQ(options->wait, absl::ZeroDuration());
  EXPECT_THAT(options->devices, ::testing::IsEmpty());
}

TEST(EnvironmentTest, AWrongValueNamesItsVariable) {
  for (const auto& [name, value, why] : std::vector<std::tuple<const char*, const char*, const char*>>{
           {"VRAMBROKER_LIMIT", "80", "'80' is ambiguous: write 80B for bytes, 80GiB, 80%"},
           {"VRAMBROKER_GUARANTEE", "half", "'half' is not a share or a size"},
           {"VRAMBROKER_DEVICES", "0,,1", "'' is neither a device's ordinal"},
           {"VRAMBROKER_DEVICES", "0 1", "'0 1' is neither a device's ordinal"},
           {"VRAMBROKER_WAIT", "30", "its unit is missing; write 30s"},
           {"VRAMBROKER_WAIT", "2h", "'2h' is longer than an hour"}}) {
    const Variables variables(std::vector<std::pair<const char*, const char*>>{{name, value}});
    const absl::Status status = Client::Connect({.socket_dir = "/nonexistent"}).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), ::testing::StartsWith(std::string(name) + ": "));
    EXPECT_THAT(std::string(status.message()), HasSubstr(why));
  }
}

TEST(ConnectTest, DevicesThatNoneIsCalledAreRefused) {
  for (const std::string device : {"", "a\nb", "\xff"}) {
    const absl::Status status = Client::Connect({.socket_dir = "/nonexistent", .devices = {"0", device}}).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), ::testing::StartsWith("devices: '"));
  }
}

TEST(ConnectTest, ANameThatIsNotAllowedIsChangedAndSaid) {
  for (const auto& [name, cleaned] : std::vector<std::pair<const char*, const char*>>{
           {"my job", "my_job"}, {"\xff", "_"}, {"trainer\xC3", "trainer_"}}) {
    std::vector<std::string> log;
    const absl::Status status =
        Client::Connect(
            {.socket_dir = "/nonexistent", .name = name, .log = [&](const auto& line) { log.push_back(line); }})
            .status();
    EXPECT_TRUE(absl::IsUnavailable(status)) << "only the daemon is missing: " << status;
    EXPECT_THAT(log, ::testing::ElementsAre(HasSubstr(absl::StrCat("the session is called ", cleaned, ": "))));
  }
}

absl::Status WithPayload(const v1::OutOfMemory& proto) {
  absl::Status status = absl::ResourceExhaustedError("out of memory");
  status.SetPayload("type.googleapis.com/vrambroker.v1.OutOfMemory", absl::Cord(proto.SerializeAsString()));
  return status;
}

TEST(GetOutOfMemoryTest, ReadsEveryField) {
  v1::OutOfMemory proto;
  proto.set_cause(v1::OutOfMemory::CAUSE_FRAGMENTATION);
  proto.set_device(1);
  proto.set_requested_bytes(2);
  proto.set_segment_bytes(3);
  proto.set_limit_bytes(4);
  proto.set_reserved_bytes(5);
  proto.set_allocated_bytes(6);
  proto.set_idle_bytes(7);
  proto.set_largest_free_block_bytes(8);
  proto.set_device_capacity_bytes(9);
  proto.set_device_available_bytes(10);
  v1::OutOfMemory::Holder* holder = proto.add_largest_holders();
  holder->set_client("trainer");
  holder->set_reserved_bytes(11);
  holder->set_allocated_bytes(12);
  proto.add_largest_holders()->set_client("notebook");
  proto.set_advice("Free something.");
  proto.set_guarantee_bytes(13);
  proto.set_inactive_split_bytes(14);
  proto.set_device_kept_free_bytes(15);
  proto.set_device_idle_bytes(16);
  proto.set_device_quarantined_bytes(17);
  proto.set_idle_elsewhere_bytes(18);
  v1::OutOfMemory::IdleHolder* idle = proto.add_idle_holders();
  idle->set_client("server");
  idle->set_idle_bytes(19);
  idle->set_why(v1::OutOfMemory::IdleHolder::WHY_DID_NOT_ANSWER);
  proto.set_waited_ms(20);
  proto.set_block_bytes(21);
  proto.set_room_bytes(22);
  proto.set_explanation("It does not fit.");
  proto.mutable_holes()->set_hole_bytes(23);
  proto.mutable_holes()->set_holes(24);
  proto.mutable_holes()->set_segments(25);
  v1::OutOfMemory::Holes::PinnedSegment* pinned = proto.mutable_holes()->add_most_bytes();
  pinned->set_address(26);
  pinned->set_segment_bytes(27);
  pinned->set_hole_bytes(28);
  pinned->set_largest_hole_bytes(29);
  pinned->set_pinning_blocks(30);
  v1::OutOfMemory::Holes::PinningBlock* held = pinned->add_longest_held();
  held->set_address(31);
  held->set_block_bytes(32);
  held->set_held_seconds(33);
  const std::optional<OutOfMemory> oom = GetOutOfMemory(WithPayload(proto));
  ASSERT_TRUE(oom.has_value());
  EXPECT_EQ(oom->cause, OutOfMemory::Cause::kFragmentation);
  EXPECT_EQ(oom->device, 1);
  EXPECT_EQ(oom->requested_bytes, 2u);
  EXPECT_EQ(oom->segment_bytes, 3u);
  EXPECT_EQ(oom->limit_bytes, 4u);
  EXPECT_EQ(oom->reserved_bytes, 5u);
  EXPECT_EQ(oom->allocated_bytes, 6u);
  EXPECT_EQ(oom->idle_bytes, 7u);
  EXPECT_EQ(oom->largest_free_block_bytes, 8u);
  EXPECT_EQ(oom->device_capacity_bytes, 9u);
  EXPECT_EQ(oom->device_available_bytes, 10u);
  ASSERT_EQ(oom->largest_holders.size(), 2u);
  EXPECT_EQ(oom->largest_holders[0].client, "trainer");
  EXPECT_EQ(oom->largest_holders[0].reserved_bytes, 11u);
  EXPECT_EQ(oom->largest_holders[0].allocated_bytes, 12u);
  EXPECT_EQ(oom->largest_holders[1].client, "notebook");
  EXPECT_EQ(oom->advice, "Free something.");
  EXPECT_EQ(oom->guarantee_bytes, 13u);
  EXPECT_EQ(oom->inactive_split_bytes, 14u);
  EXPECT_EQ(oom->device_kept_free_bytes, 15u);
  EXPECT_EQ(oom->device_idle_bytes, 16u);
  EXPECT_EQ(oom->device_quarantined_bytes, 17u);
  EXPECT_EQ(oom->idle_elsewhere_bytes, 18u);
  ASSERT_EQ(oom->idle_holders.size(), 1u);
  EXPECT_EQ(oom->idle_holders[0].client, "server");
  EXPECT_EQ(oom->idle_holders[0].idle_bytes, 19u);
  EXPECT_EQ(oom->idle_holders[0].why, OutOfMemory::IdleHolder::Why::kDidNotAnswer);
  EXPECT_EQ(oom->waited_ms, 20u);
  EXPECT_EQ(oom->block_bytes, 21u);
  EXPECT_EQ(oom->room_bytes, 22u);
  EXPECT_EQ(oom->explanation, "It does not fit.");
  EXPECT_EQ(oom->hole_bytes, 23u);
  EXPECT_EQ(oom->holes, 24u);
  EXPECT_EQ(oom->hole_segments, 25u);
  ASSERT_EQ(oom->pinned_segments.size(), 1u);
  const OutOfMemory::PinnedSegment& segment = oom->pinned_segments[0];
  EXPECT_EQ(segment.address, 26u);
  EXPECT_EQ(segment.segment_bytes, 27u);
  EXPECT_EQ(segment.hole_bytes, 28u);
  EXPECT_EQ(segment.largest_hole_bytes, 29u);
  EXPECT_EQ(segment.pinning_blocks, 30u);
  ASSERT_EQ(segment.longest_held.size(), 1u);
  EXPECT_EQ(segment.longest_held[0].address, 31u);
  EXPECT_EQ(segment.longest_held[0].block_bytes, 32u);
  EXPECT_EQ(segment.longest_held[0].held_seconds, 33u);
}

TEST(GetOutOfMemoryTest, ReasonsHaveTheProtocolsNames) {
  using IdleHolder = v1::OutOfMemory::IdleHolder;
  for (int i = 1; i <= IdleHolder::Why_MAX; ++i) {
    const auto why = static_cast<IdleHolder::Why>(i);
    v1::OutOfMemory proto;
    proto.add_idle_holders()->set_why(why);
    EXPECT_EQ(std::string("WHY_") + IdleWhyName(GetOutOfMemory(WithPayload(proto))->idle_holders[0].why),
              IdleHolder::Why_Name(why));
  }
  v1::OutOfMemory newer;
  newer.add_idle_holders()->set_why(static_cast<IdleHolder::Why>(99));
  EXPECT_STREQ(IdleWhyName(GetOutOfMemory(WithPayload(newer))->idle_holders[0].why), "UNKNOWN");
}

TEST(GetOutOfMemoryTest, CausesHaveTheProtocolsNames) {
  for (const v1::OutOfMemory::Cause cause :
       {v1::OutOfMemory::CAUSE_LIMIT, v1::OutOfMemory::CAUSE_CAPACITY, v1::OutOfMemory::CAUSE_FRAGMENTATION,
        v1::OutOfMemory::CAUSE_LARGER_THAN_DEVICE}) {
    v1::OutOfMemory proto;
    proto.set_cause(cause);
    EXPECT_EQ(std::string("CAUSE_") + OutOfMemoryCauseName(GetOutOfMemory(WithPayload(proto))->cause),
              v1::OutOfMemory::Cause_Name(cause));
  }
  v1::OutOfMemory newer;
  newer.set_cause(static_cast<v1::OutOfMemory::Cause>(99));
  EXPECT_STREQ(OutOfMemoryCauseName(GetOutOfMemory(WithPayload(newer))->cause), "UNKNOWN");
}

TEST(GetOutOfMemoryTest, OtherStatusesHaveNone) {
  EXPECT_EQ(GetOutOfMemory(absl::OkStatus()).has_value(), false);
  EXPECT_EQ(GetOutOfMemory(absl::ResourceExhaustedError("too many sessions")).has_value(), false);
  absl::Status broken = absl::ResourceExhaustedError("x");
  broken.SetPayload("type.googleapis.com/vrambroker.v1.OutOfMemory", absl::Cord("\xff\xff\xff"));
  EXPECT_EQ(GetOutOfMemory(broken).has_value(), false);
}

TEST(DefaultSocketDirTest, FollowsTheEnvironment) {
  const char* old = std::getenv("VRAMBROKER_SOCKET_DIR");
  const std::string saved = old == nullptr ? "" : old;
  setenv("VRAMBROKER_SOCKET_DIR", "/tmp/elsewhere", 1);
  EXPECT_EQ(DefaultSocketDir(), "/tmp/elsewhere");
  EXPECT_EQ(ClientOptions().socket_dir, "/tmp/elsewhere");
  setenv("VRAMBROKER_SOCKET_DIR", "", 1);
  EXPECT_EQ(DefaultSocketDir(), "/run/vrambroker");
  unsetenv("VRAMBROKER_SOCKET_DIR");
  EXPECT_EQ(DefaultSocketDir(), "/run/vrambroker");
  if (old != nullptr) setenv("VRAMBROKER_SOCKET_DIR", saved.c_str(), 1);
}

// Sets PyTorch's variables for a test, and restores the earlier values. nullptr unsets a variable.
class AllocConfVariables {
 public:
  AllocConfVariables(const char* cuda, const char* hip, const char* unified) {
    for (const auto& [name, value] : {std::pair(kNames[0], cuda), {kNames[1], hip}, {kNames[2], unified}}) {
      const char* old = std::getenv(name);
      saved_.push_back(old == nullptr ? std::nullopt : std::optional<std::string>(old));
      value == nullptr ? unsetenv(name) : setenv(name, value, 1);
    }
  }
  ~AllocConfVariables() {
    for (size_t i = 0; i < saved_.size(); ++i) {
      saved_[i].has_value() ? setenv(kNames[i], saved_[i]->c_str(), 1) : unsetenv(kNames[i]);
    }
  }

 private:
  static constexpr const char* kNames[] = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"};
  std::vector<std::optional<std::string>> saved_;
};

// PyTorch 2.14.1 has the same order (c10/core/AllocatorConfig.cpp, AcceleratorAllocatorConfig::instance()).
TEST(FindAllocConfTest, TheOptionThenTheFirstVariableThatIsSet) {
  constexpr char kCuda[] = "PYTORCH_CUDA_ALLOC_CONF", kHip[] = "PYTORCH_HIP_ALLOC_CONF",
                 kUnified[] = "PYTORCH_ALLOC_CONF";
  struct Case {
    std::optional<std::string> option;
    const char* cuda;
    const char* hip;
    const char* unified;
    std::string text;
    std::string source;
    std::vector<std::string> ignored;
  };
  for (const Case& c : std::vector<Case>{
           {std::nullopt, nullptr, nullptr, nullptr, "", "alloc_conf", {}},
           {std::nullopt, "a:1", nullptr, nullptr, "a:1", kCuda, {}},
           {std::nullopt, nullptr, "b:2", nullptr, "b:2", kHip, {}},
           {std::nullopt, nullptr, nullptr, "c:3", "c:3", kUnified, {}},
           {std::nullopt, "a:1", "b:2", "c:3", "a:1", kCuda, {kHip, kUnified}},
           {std::nullopt, "a:1", nullptr, "c:3", "a:1", kCuda, {kUnified}},
           {std::nullopt, nullptr, "b:2", "c:3", "b:2", kHip, {kUnified}},
           {std::nullopt, "a:1", "a:1", "a:1", "a:1", kCuda, {}},
           {std::nullopt, "a:1", "", "", "a:1", kCuda, {}},
           {std::nullopt, "", "", "", "", kCuda, {}},
           {std::nullopt, "", nullptr, "c:3", "", kCuda, {kUnified}},
           {std::nullopt, nullptr, "", "c:3", "", kHip, {kUnified}},
           {"d:4", "a:1", "b:2", "c:3", "d:4", "alloc_conf", {}},
           {"", "a:1", "b:2", "c:3", "", "alloc_conf", {}},
       }) {
    const AllocConfVariables variables(c.cuda, c.hip, c.unified);
    const auto found = client_internal::FindAllocConf(c.option);
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(found->text, c.text);
    EXPECT_EQ(found->source, c.source);
    ASSERT_EQ(found->warnings.size(), c.ignored.size());
    for (size_t i = 0; i < c.ignored.size(); ++i) {
      EXPECT_THAT(found->warnings[i], HasSubstr(absl::StrCat(c.ignored[i], " is ignored: ", c.source, " comes first")));
    }
  }
}

TEST(FindAllocConfTest, WhatAMessageCannotCarryIsRefused) {
  const AllocConfVariables variables(nullptr, nullptr, "max_split_size_mb:\xff");
  const absl::Status status = client_internal::FindAllocConf(std::nullopt).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("PYTORCH_ALLOC_CONF: "));
}

TEST(AllocConfTextTest, NamesTheSourceOfWhatTheDaemonRefuses) {
  const client_internal::AllocConfText conf{.text = "", .source = "PYTORCH_ALLOC_CONF", .warnings = {}};
  EXPECT_EQ(conf.NameSource(absl::InvalidArgumentError("alloc_conf: unknown key \"x\"")),
            absl::InvalidArgumentError("PYTORCH_ALLOC_CONF: unknown key \"x\""));
  for (const absl::Status& other : {absl::OkStatus(), absl::InvalidArgumentError("name: alloc_conf: too long"),
                                    absl::UnavailableError("alloc_conf: no daemon")}) {
    EXPECT_EQ(conf.NameSource(other), other);
  }
}

TEST(StatsFromProtoTest, NoMaxSplitSizeMeansNoLimit) {
  v1::MemoryStats proto;
  EXPECT_EQ(StatsFromProto(proto).max_split_bytes, std::numeric_limits<uint64_t>::max());
  proto.set_max_split_bytes(0);
  EXPECT_EQ(StatsFromProto(proto).max_split_bytes, 0u);
  proto.set_max_split_bytes(64_MiB);
  proto.set_num_oom_rejections(2);
  proto.set_num_sync_all_streams(3);
  proto.mutable_oversize_allocations()->set_peak(4);
  proto.mutable_oversize_segments()->set_freed(5);
  const MemoryStats stats = StatsFromProto(proto);
  EXPECT_EQ(stats.max_split_bytes, 64_MiB);
  EXPECT_EQ(stats.num_oom_rejections, 2u);
  EXPECT_EQ(stats.num_sync_all_streams, 3u);
  EXPECT_EQ(stats.oversize_allocations.peak, 4u);
  EXPECT_EQ(stats.oversize_segments.freed, 5u);
}

TEST(BufferTest, EmptyBufferHoldsNothing) {
  Buffer buffer;
  EXPECT_EQ(buffer.data(), nullptr);
  EXPECT_EQ(buffer.size(), 0u);
  EXPECT_EQ(buffer.Reset(), absl::OkStatus());
  EXPECT_EQ(buffer.Write(0, nullptr, 0), absl::OkStatus());
  char byte = 0;
  EXPECT_TRUE(absl::IsOutOfRange(buffer.Write(0, &byte, 1)));
  EXPECT_TRUE(absl::IsOutOfRange(buffer.Read(0, &byte, 1)));
  EXPECT_TRUE(absl::IsOutOfRange(buffer.Read(1, &byte, 0)));
  Buffer other = std::move(buffer);
  EXPECT_EQ(other.data(), nullptr);
  other = Buffer();
  EXPECT_EQ(other.size(), 0u);
}

TEST(ClientTest, SaysWhereItLookedForTheDaemon) {
  const std::string nowhere = ::testing::TempDir() + "/vrambroker-no-daemon-here";
  const absl::Status status =
      Client::Connect({.socket_dir = nowhere, .connect_timeout = absl::Milliseconds(200)}).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(nowhere));
  EXPECT_THAT(std::string(status.message()), HasSubstr("set VRAMBROKER_SOCKET_DIR (or socket_dir in the options)"));
  EXPECT_THAT(std::string(status.message()), ::testing::Not(HasSubstr("--socket-dir")));
}

}  // namespace
}  // namespace vrambroker
