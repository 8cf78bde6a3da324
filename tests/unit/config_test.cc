// SPDX-License-Identifier: Apache-2.0
#include "server/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "allocator/bytes.h"

namespace vrambroker {
namespace {

using ::testing::HasSubstr;

absl::StatusOr<Config> Read(const std::string& text) {
  absl::StatusOr<ConfigText> parsed = ParseConfigText("test.textproto", text);
  if (!parsed.ok()) return parsed.status();
  return CheckConfig(*parsed);
}

TEST(ConfigTest, EmptyFileGivesTheDefaults) {
  const absl::StatusOr<Config> config = Read("");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->socket_dir, "/run/vrambroker");
  EXPECT_EQ(config->socket_mode, 0660u);
  EXPECT_EQ(config->device, DeviceChoice::kAuto);
  EXPECT_EQ(config->capacity_bytes, std::nullopt);
  EXPECT_EQ(config->headroom_bytes, 1_GiB);
  EXPECT_EQ(config->host_devices, 1);
  EXPECT_EQ(config->http_address, "127.0.0.1:9477");
  EXPECT_EQ(config->session_limit, Limit(1.0));
  EXPECT_EQ(config->idle_decay, absl::Seconds(10));
  EXPECT_EQ(config->drain_timeout, absl::Seconds(5));
  EXPECT_EQ(config->max_sessions_per_uid, 1024u);
  EXPECT_EQ(config->max_blocks_per_session, 1048576u);
  EXPECT_EQ(config->log_level, "info");
  EXPECT_EQ(config->alloc_conf.options, AllocatorOptions());
  EXPECT_TRUE(config->alloc_conf.warnings.empty());
  EXPECT_EQ(config->record_events, 0u);
}

TEST(ConfigTest, EveryFieldIsRead) {
  const absl::StatusOr<Config> config = Read(R"(
    # A comment.
    socket_dir: "/tmp/x"
    socket_mode: "0666"
    device: "host"
    capacity: "8GiB"
    headroom: "512MiB"
    host_devices: 16
    http_address: "0.0.0.0:80"
    session_limit { fraction: 0.5 }
    idle_decay: "500ms"
    drain_timeout: "2m"
    max_sessions_per_uid: 7
    max_blocks_per_session: 9
    log_level: "debug"
    alloc_conf: "max_split_size_mb:64,expandable_segments:True"
    record_events: 1000000
  )");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->socket_dir, "/tmp/x");
  EXPECT_EQ(config->socket_mode, 0666u);
  EXPECT_EQ(config->device, DeviceChoice::kHost);
  EXPECT_EQ(config->capacity_bytes, 8_GiB);
  EXPECT_EQ(config->headroom_bytes, 512_MiB);
  EXPECT_EQ(config->host_devices, 16);
  EXPECT_EQ(config->http_address, "0.0.0.0:80");
  EXPECT_EQ(config->session_limit, Limit(0.5));
  EXPECT_EQ(config->idle_decay, absl::Milliseconds(500));
  EXPECT_EQ(config->drain_timeout, absl::Minutes(2));
  EXPECT_EQ(config->max_sessions_per_uid, 7u);
  EXPECT_EQ(config->max_blocks_per_session, 9u);
  EXPECT_EQ(config->log_level, "debug");
  EXPECT_EQ(config->alloc_conf.options, (AllocatorOptions{.max_split_bytes = 64_MiB}));
  EXPECT_EQ(config->alloc_conf.warnings.size(), 1u);
  EXPECT_EQ(config->record_events, 1000000u);
}

TEST(ConfigTest, OtherGoodValues) {
  EXPECT_EQ(Read("http_address: 'off'")->http_address, "");
  EXPECT_EQ(Read("device: 'cuda'")->device, DeviceChoice::kCuda);
  EXPECT_EQ(Read("device: 'auto'")->device, DeviceChoice::kAuto);
  EXPECT_EQ(Read("capacity: '2097152'")->capacity_bytes, 2_MiB);
  EXPECT_EQ(Read("headroom: '0'")->headroom_bytes, 0u);
  EXPECT_EQ(Read("session_limit { bytes: '3GiB' }")->session_limit, Limit(3_GiB));
  EXPECT_EQ(Read("session_limit { fraction: 1 }")->session_limit, Limit(1.0));
  EXPECT_EQ(Read("idle_decay: '0'")->idle_decay, absl::ZeroDuration());
  EXPECT_EQ(Read("drain_timeout: '24h'")->drain_timeout, absl::Hours(24));
  EXPECT_EQ(Read("socket_mode: '600'")->socket_mode, 0600u);
  for (const char* level : {"debug", "info", "warn", "error"}) {
    EXPECT_EQ(Read(std::string("log_level: '") + level + "'")->log_level, level);
  }
}

TEST(ConfigTest, EachBadFieldIsNamed) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"socket_mode: '0888'", "socket_mode: '0888'"},
      {"socket_mode: 'rw'", "socket_mode"},
      {"socket_mode: '1777'", "socket_mode"},
      {"socket_mode: '06600'", "socket_mode"},
      {"socket_mode: '-1'", "socket_mode"},
      {"device: 'gpu'", "device: 'gpu' is not auto, cuda or host"},
      {"device: 'CUDA'", "device"},
      {"capacity: '8GB'", "capacity: '8GB' is not a size"},
      {"capacity: '0'", "capacity: '0' is not within"},
      {"capacity: '2097151'", "capacity"},
      {"capacity: '1048576TiB'", "capacity"},
      {"headroom: 'some'", "headroom"},
      {"host_devices: 17", "host_devices: 17 is above 16"},
      {"http_address: '127.0.0.1'", "http_address"},
      {"http_address: ':9477'", "http_address"},
      {"http_address: '127.0.0.1:65536'", "http_address"},
      {"http_address: '127.0.0.1:x'", "http_address"},
      {"http_address: '256.0.0.1:1'", "http_address"},
      {"session_limit { }", "session_limit: neither"},
      {"session_limit { bytes: 'x' }", "session_limit.bytes"},
      {"session_limit { bytes: '' }", "session_limit.bytes"},
      {"session_limit { fraction: 0 }", "session_limit.fraction: 0 is not"},
      {"session_limit { fraction: 1.5 }", "session_limit.fraction"},
      {"session_limit { fraction: -0.1 }", "session_limit.fraction"},
      {"session_limit { fraction: nan }", "session_limit.fraction"},
      {"idle_decay: '10'", "idle_decay: '10' is not a duration"},
      {"idle_decay: '-1s'", "idle_decay"},
      {"idle_decay: 'inf'", "idle_decay"},
      {"drain_timeout: '25h'", "drain_timeout"},
      {"log_level: 'trace'", "log_level: 'trace' is not"},
      {"log_level: 'INFO'", "log_level"},
      {"alloc_conf: 'max_split_size_mb:19'", "alloc_conf: max_split_size_mb: \"19\" is not a whole number from 20"},
      {"alloc_conf: 'max_split_size:64'", "alloc_conf: unknown key \"max_split_size\""},
      {"record_events: 1000001", "record_events: 1000001 is above 1000000"},
  };
  for (const auto& [text, fault] : cases) {
    SCOPED_TRACE(text);
    const absl::StatusOr<Config> config = Read(text);
    ASSERT_TRUE(absl::IsInvalidArgument(config.status())) << config.status();
    EXPECT_THAT(std::string(config.status().message()),
                HasSubstr("1 fault in the configuration:\n  test.textproto:1:"));
    EXPECT_THAT(std::string(config.status().message()), HasSubstr(": " + fault));
  }
}

TEST(ConfigTest, AllFaultsAreToldAtOnce) {
  const absl::StatusOr<Config> config = Read(R"(
    socket_mode: "9"
    device: "x"
    capacity: "0"
    headroom: "0.3B"
    host_devices: 99
    session_limit { fraction: 2 }
    idle_decay: "soon"
    drain_timeout: "late"
    log_level: "loud"
    alloc_conf: "loud"
    record_events: 4000000000
  )");
  ASSERT_TRUE(absl::IsInvalidArgument(config.status()));
  const std::string message(config.status().message());
  EXPECT_THAT(message, HasSubstr("11 faults"));
  for (const char* field : {"socket_mode", "device", "capacity", "headroom", "host_devices", "session_limit.fraction",
                            "idle_decay", "drain_timeout", "log_level", "alloc_conf", "record_events"}) {
    EXPECT_THAT(message, HasSubstr(std::string(": ") + field + ": "));
  }
}

TEST(ConfigTest, FaultsNameLineAndColumn) {
  const auto message = [](const std::string& text) { return std::string(Read(text).status().message()); };
  EXPECT_THAT(message("\n  device: 'x'"), HasSubstr("\n  test.textproto:2:3: device: 'x'"));
  EXPECT_THAT(message("session_limit {\n    fraction: 7\n}"),
              HasSubstr("test.textproto:2:5: session_limit.fraction: 7"));
  // A field that is in no file, but on the command line.
  ConfigText flags;
  flags.proto.set_device("x");
  EXPECT_THAT(std::string(CheckConfig(flags).status().message()), HasSubstr("\n  device: 'x'"));
}

TEST(ConfigTest, SyntaxErrorsNameLineAndColumn) {
  const absl::StatusOr<Config> config = Read("socket_dir: \"/tmp\"\n  capacty: \"8GiB\"\n");
  ASSERT_TRUE(absl::IsInvalidArgument(config.status()));
  EXPECT_THAT(std::string(config.status().message()), HasSubstr("test.textproto:2:"));
  EXPECT_THAT(std::string(config.status().message()), HasSubstr("capacty"));
  EXPECT_THAT(std::string(Read("\n\nhost_devices: 'many'").status().message()),
              HasSubstr("test.textproto:3:15: Expected integer"));
  EXPECT_THAT(std::string(Read("host_devices: -1").status().message()), HasSubstr("test.textproto:1:15: "));
  EXPECT_THAT(std::string(Read("session_limit { fraction: 0.5").status().message()), HasSubstr("test.textproto:1:"));
}

class ConfigFileTest : public ::testing::Test {
 protected:
  ConfigFileTest() {
    std::string name = ::testing::TempDir() + "/vrambroker_config_XXXXXX";
    EXPECT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  ~ConfigFileTest() override { std::filesystem::remove_all(folder_); }

  std::string Write(const std::string& text) {
    const std::string path = folder_ / "daemon.textproto";
    std::ofstream(path) << text;
    return path;
  }

  std::filesystem::path folder_;
};

TEST_F(ConfigFileTest, IsRead) {
  const absl::StatusOr<ConfigText> text = ReadConfigFile(Write("capacity: '2MiB'\n"));
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_EQ(text->proto.capacity(), "2MiB");
}

TEST_F(ConfigFileTest, MayBeEmpty) {
  EXPECT_TRUE(ReadConfigFile(Write("")).ok());
}

TEST_F(ConfigFileTest, ErrorsNameTheFile) {
  const std::string path = Write("\nx: 1\n");
  EXPECT_THAT(std::string(ReadConfigFile(path).status().message()), HasSubstr(path + ":2:"));
}

TEST_F(ConfigFileTest, MustBeThere) {
  const std::string path = folder_ / "none";
  const absl::Status status = ReadConfigFile(path).status();
  EXPECT_TRUE(absl::IsNotFound(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(path));
}

TEST_F(ConfigFileTest, MustBeAFile) {
  EXPECT_FALSE(ReadConfigFile(folder_).ok()) << "a folder is no empty configuration";
}

}  // namespace
}  // namespace vrambroker
