// SPDX-License-Identifier: Apache-2.0
#include "server/config/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "allocator/base/bytes.h"
#include "server/config/config_rules.h"
#include "tests/support/paths.h"

namespace vrambroker {
namespace {

using ::testing::HasSubstr;

absl::StatusOr<Config> Read(const std::string& text) {
  return CheckConfig(ParseConfigText("test.textproto", text));
}

// Reads deploy/vrambroker.textproto, which is also the man page.
TEST(ConfigTest, TheExampleShowsEveryFieldWithItsDefault) {
  const absl::StatusOr<ConfigText> example =
      ReadConfigFile(absl::StrCat(testing_support::paths::kSourceDir, "/deploy/vrambroker.textproto"));
  ASSERT_TRUE(example.ok()) << example.status();
  const absl::StatusOr<Config> config = CheckConfig(*example);
  ASSERT_TRUE(config.ok()) << config.status();
  const absl::StatusOr<Config> defaults = Read("");
  ASSERT_TRUE(defaults.ok()) << defaults.status();
  // The example sets these two fields for the service: a service for GPUs must not serve the host's memory when the GPU
  // driver is not ready, and the service's claims must outlive a reboot.
  EXPECT_THAT(FieldsThatNeedARestart(*defaults, *config), ::testing::ElementsAre("claims_file", "device"));
  EXPECT_EQ(config->device, DeviceChoice::kCuda);
  EXPECT_EQ(config->session_limit, defaults->session_limit);
  EXPECT_EQ(config->max_sessions_per_uid, defaults->max_sessions_per_uid);
  EXPECT_EQ(config->max_claims_per_uid, defaults->max_claims_per_uid);
  EXPECT_TRUE(config->rules.empty());

  std::ifstream file(absl::StrCat(testing_support::paths::kSourceDir, "/deploy/vrambroker.textproto"));
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const google::protobuf::Descriptor* const fields = config::v1::DaemonConfig::descriptor();
  for (int i = 0; i < fields->field_count(); ++i) {
    const std::string& name = fields->field(i)->name();
    EXPECT_TRUE(absl::StrContains(text, absl::StrCat("\n", name)) ||
                absl::StrContains(text, absl::StrCat("\n# ", name)))
        << name;
  }
  for (const absl::string_view line : absl::StrSplit(text, '\n')) EXPECT_LE(line.size(), 80u) << line;
}

TEST(ConfigTest, EmptyFileGivesTheDefaults) {
  const absl::StatusOr<Config> config = Read("");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->socket_dir, "/run/vrambroker");
  EXPECT_EQ(config->socket_mode, 0660u);
  EXPECT_EQ(config->device, DeviceChoice::kAuto);
  EXPECT_EQ(config->capacity, std::nullopt);
  EXPECT_EQ(config->headroom_bytes, 1_GiB);
  EXPECT_EQ(config->overhead_allowance_bytes, 1_GiB);
  EXPECT_EQ(config->host_devices, 1);
  EXPECT_EQ(config->host_driver_latency, absl::ZeroDuration());
  EXPECT_EQ(config->http_address, "127.0.0.1:9477");
  EXPECT_EQ(config->session_limit, Limit(1.0));
  EXPECT_EQ(config->idle_decay, absl::Seconds(10));
  EXPECT_EQ(config->idle_limit_bytes, SegmentPoolOptions::kNoIdleLimit);
  EXPECT_EQ(config->drain_timeout, absl::Seconds(5));
  EXPECT_EQ(config->max_sessions_per_uid, 1024u);
  EXPECT_EQ(config->max_claims_per_uid, 64u);
  EXPECT_EQ(config->session_bounds.max_blocks, 1048576u);
  EXPECT_EQ(config->session_bounds.max_segments, 65536u);
  EXPECT_EQ(config->max_calls_per_second_per_uid, 100000u);
  EXPECT_EQ(config->max_questions_per_uid, 16u);
  EXPECT_EQ(config->max_snapshots_per_uid, 4u);
  EXPECT_EQ(config->max_snapshots, 8u);
  EXPECT_EQ(config->max_waiting_per_uid, 4096u);
  EXPECT_EQ(config->max_connections_per_uid, 0u);
  EXPECT_EQ(config->max_recorded_events_per_uid, 10'000'000u);
  EXPECT_EQ(config->log_level, "info");
  EXPECT_EQ(config->log_format, "text");
  EXPECT_EQ(config->max_metrics_clients, 1000u);
  EXPECT_EQ(config->max_metrics_clients_per_uid, 250u);
  EXPECT_EQ(config->fragmentation_window, absl::Minutes(1));
  EXPECT_EQ(config->alloc_conf.options, AllocatorOptions());
  EXPECT_TRUE(config->alloc_conf.warnings.empty());
  EXPECT_EQ(config->record_events, 100'000u);
  EXPECT_FALSE(config->is_record_events_set);
}

TEST(ConfigTest, TheSocketDirectoryIsTheSameForAll) {
  const absl::StatusOr<Config> config = Read("socket_dir: \"sockets\"");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->socket_dir, std::filesystem::current_path() / "sockets");

  const std::filesystem::path here = std::filesystem::current_path();
  std::string gone = ::testing::TempDir() + "/vrambroker_config_XXXXXX";
  ASSERT_NE(mkdtemp(gone.data()), nullptr);
  std::filesystem::current_path(gone);
  std::filesystem::remove(gone);
  const absl::Status status = Read("socket_dir: \"sockets\"").status();
  std::filesystem::current_path(here);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("'sockets' is relative, and the current directory is not known"));
}

TEST(ConfigTest, EveryFieldIsRead) {
  const absl::StatusOr<Config> config = Read(R"(
    # A comment.
    socket_dir: "/tmp/x"
    socket_mode: "0666"
    claims_file: "/tmp/y"
    device: "host"
    capacity: "8GiB"
    headroom: "512MiB"
    overhead_allowance: "768MiB"
    host_devices: 16
    host_driver_latency: "2ms"
    http_address: "0.0.0.0:80"
    session_limit { fraction: 0.5 }
    idle_decay: "500ms"
    idle_limit: "3GiB"
    drain_timeout: "2m"
    max_sessions_per_uid: 7
    max_claims_per_uid: 8
    max_blocks_per_session: 9
    max_segments_per_session: 10
    max_calls_per_second_per_uid: 11
    max_questions_per_uid: 12
    max_snapshots_per_uid: 13
    max_snapshots: 14
    max_waiting_per_uid: 15
    max_wait: "10m"
    hold_back_time: "0s"
    hold_back_limit { bytes: "1GiB" }
    max_connections_per_uid: 16
    max_recorded_events_per_uid: 17
    log_level: "debug"
    log_format: "json"
    metrics { max_clients: 7 max_clients_per_uid: 5 fragmentation_window: "2m" }
    alloc_conf: "max_split_size_mb:64,expandable_segments:True"
    record_events: 1000000
  )");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->socket_dir, "/tmp/x");
  EXPECT_EQ(config->socket_mode, 0666u);
  EXPECT_EQ(config->claims_file, "/tmp/y");
  EXPECT_EQ(config->device, DeviceChoice::kHost);
  EXPECT_EQ(config->capacity, Limit(8_GiB));
  EXPECT_EQ(config->headroom_bytes, 512_MiB);
  EXPECT_EQ(config->overhead_allowance_bytes, 768_MiB);
  EXPECT_EQ(config->host_devices, 16);
  EXPECT_EQ(config->host_driver_latency, absl::Milliseconds(2));
  EXPECT_EQ(config->http_address, "0.0.0.0:80");
  EXPECT_EQ(config->session_limit, Limit(0.5));
  EXPECT_EQ(config->idle_decay, absl::Milliseconds(500));
  EXPECT_EQ(config->idle_limit_bytes, 3_GiB);
  EXPECT_EQ(config->drain_timeout, absl::Minutes(2));
  EXPECT_EQ(config->max_sessions_per_uid, 7u);
  EXPECT_EQ(config->max_claims_per_uid, 8u);
  EXPECT_EQ(config->session_bounds.max_blocks, 9u);
  EXPECT_EQ(config->session_bounds.max_segments, 10u);
  EXPECT_EQ(config->max_calls_per_second_per_uid, 11u);
  EXPECT_EQ(config->max_questions_per_uid, 12u);
  EXPECT_EQ(config->max_snapshots_per_uid, 13u);
  EXPECT_EQ(config->max_snapshots, 14u);
  EXPECT_EQ(config->max_waiting_per_uid, 15u);
  EXPECT_EQ(config->max_wait, absl::Minutes(10));
  EXPECT_EQ(config->hold_back_time, absl::ZeroDuration());
  EXPECT_EQ(config->hold_back_limit, Limit(1_GiB));
  EXPECT_EQ(config->max_connections_per_uid, 16u);
  EXPECT_EQ(config->max_recorded_events_per_uid, 17u);
  EXPECT_EQ(config->log_level, "debug");
  EXPECT_EQ(config->log_format, "json");
  EXPECT_EQ(config->max_metrics_clients, 7u);
  EXPECT_EQ(config->max_metrics_clients_per_uid, 5u);
  EXPECT_EQ(config->fragmentation_window, absl::Minutes(2));
  EXPECT_EQ(config->alloc_conf.options, (AllocatorOptions{.max_split_bytes = 64_MiB}));
  EXPECT_EQ(config->alloc_conf.warnings.size(), 1u);
  EXPECT_EQ(config->record_events, 1000000u);
}

TEST(ConfigTest, OtherGoodValues) {
  EXPECT_EQ(Read("http_address: 'off'")->http_address, "");
  EXPECT_EQ(Read("device: 'cuda'")->device, DeviceChoice::kCuda);
  EXPECT_EQ(Read("device: 'auto'")->device, DeviceChoice::kAuto);
  EXPECT_TRUE(Read("")->exits_when_devices_are_lost);
  EXPECT_TRUE(Read("device_lost: 'exit'")->exits_when_devices_are_lost);
  EXPECT_FALSE(Read("device_lost: 'stay'")->exits_when_devices_are_lost);
  EXPECT_EQ(Read("capacity: '2097152'")->capacity, Limit(2_MiB));
  EXPECT_EQ(Read("capacity: '8G'")->capacity, Limit(8_GiB));
  for (const char* half : {"50%", "0.5"}) {
    EXPECT_EQ(Read(absl::StrCat("capacity: '", half, "'"))->capacity, Limit(0.5)) << half;
  }
  EXPECT_EQ(Read("idle_decay: '1m30s'")->idle_decay, absl::Seconds(90));
  EXPECT_EQ(Read("headroom: '0'")->headroom_bytes, 0u);
  EXPECT_EQ(Read("session_limit { bytes: '3GiB' }")->session_limit, Limit(3_GiB));
  EXPECT_EQ(Read("session_limit { fraction: 1 }")->session_limit, Limit(1.0));
  EXPECT_EQ(Read("idle_decay: '0'")->idle_decay, absl::ZeroDuration());
  EXPECT_EQ(Read("idle_limit: '0'")->idle_limit_bytes, 0u);
  EXPECT_EQ(Read("drain_timeout: '24h'")->drain_timeout, absl::Hours(24));
  EXPECT_EQ(Read("socket_mode: '600'")->socket_mode, 0600u);
  for (const char* level : {"debug", "info", "warn", "error"}) {
    EXPECT_EQ(Read(std::string("log_level: '") + level + "'")->log_level, level);
  }
}

TEST(ConfigTest, AFaultIsOneLineWhateverTheValue) {
  const absl::Status status = Read("device: 'a\\nb\\r\\000c'").status();
  EXPECT_THAT(std::string(status.message()), HasSubstr("test.textproto:1:1: device: 'a?b??c' is not auto"));
}

TEST(ConfigTest, EachBadFieldIsNamed) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"claims_file: 'claims'", "claims_file: 'claims' is not an absolute path"},
      {"socket_mode: '0888'", "socket_mode: '0888'"},
      {"socket_mode: 'rw'", "socket_mode"},
      {"socket_mode: '1777'", "socket_mode"},
      {"socket_mode: '06600'", "socket_mode"},
      {"socket_mode: '-1'", "socket_mode"},
      {"device: 'gpu'", "device: 'gpu' is not auto, cuda or host"},
      {"device: 'CUDA'", "device"},
      {"capacity: '8PB'", "capacity: '8PB' is not a share or a size: its unit is unknown"},
      {"capacity: '0.0'", "capacity: '0.0' is nothing of a device"},
      {"capacity: '101%'", "capacity: '101%' is not a share or a size: a share is at most 1.0, or 100%"},
      {"capacity: '50'", "capacity: '50' is ambiguous: write 50B for bytes, 50GiB, 50%,"},
      {"capacity: '0'", "capacity: '0' is not between"},
      {"capacity: '2097151'", "capacity"},
      {"capacity: '1048576TiB'", "capacity"},
      {"headroom: 'some'", "headroom"},
      {"overhead_allowance: 'some'", "overhead_allowance"},
      {"host_devices: 17", "host_devices: 17 is above 16"},
      {"host_driver_latency: '2'", "host_driver_latency: '2' is not a duration"},
      {"http_address: '127.0.0.1'", "http_address"},
      {"http_address: ':9477'", "http_address"},
      {"http_address: '127.0.0.1:65536'", "http_address"},
      {"http_address: '127.0.0.1:x'", "http_address"},
      {"http_address: '256.0.0.1:1'", "http_address"},
      {"session_limit { }", "session_limit: neither"},
      {"session_limit { bytes: 'x' }", "session_limit.bytes"},
      {"session_limit { bytes: '40%' }",
       "session_limit.bytes: '40%' is not a size: it is a share, and a size is needed; write 512MiB, 8GiB (or 8G), "
       "24GB (10^9) or plain bytes; a share is a fraction: 0.4"},
      {"session_limit { bytes: '' }", "session_limit.bytes"},
      {"session_limit { fraction: 0 }", "session_limit.fraction: 0 is not"},
      {"session_limit { fraction: 1.5 }", "session_limit.fraction"},
      {"session_limit { fraction: -0.1 }", "session_limit.fraction"},
      {"session_limit { fraction: nan }", "session_limit.fraction"},
      {"idle_decay: '10'", "idle_decay: '10' is not a duration: its unit is missing; write 10s"},
      {"idle_decay: '-1s'", "idle_decay"},
      {"idle_decay: 'inf'", "idle_decay"},
      {"client_timeout: '0s'", "client_timeout: 0 is not between 10ms and 20s"},
      {"client_timeout: '21s'", "client_timeout: 21s is not between 10ms and 20s"},
      {"idle_limit: '1PB'", "idle_limit: '1PB' is not a size"},
      {"drain_timeout: '25h'", "drain_timeout"},
      {"max_wait: '61m'", "max_wait: '61m' is not a duration from 0 to 1h"},
      {"hold_back_time: '11m'", "hold_back_time: '11m' is not a duration from 0 to 10m"},
      {"hold_back_limit { fraction: 2 }", "hold_back_limit.fraction: 2 is not"},
      {"rules { max_wait: '2h' }", "rules[0].max_wait: '2h' is not"},
      {"rules { max_wait: '' }", "rules[0].max_wait: is empty"},
      {"log_level: 'trace'", "log_level: 'trace' is not"},
      {"device_lost: 'EXIT'", "device_lost: 'EXIT' is not exit or stay"},
      {"log_level: 'INFO'", "log_level"},
      {"log_format: 'JSON'", "log_format: 'JSON' is not text or json"},
      {"metrics { max_clients: 100001 }", "metrics.max_clients: 100001 is above 100000"},
      {"metrics { max_clients_per_uid: 1001 }", "metrics.max_clients_per_uid: 1001 is above max_clients, 1000"},
      {"metrics { fragmentation_window: '999ms' }", "metrics.fragmentation_window: 999ms is below 1s"},
      {"metrics { fragmentation_window: '61m' }", "metrics.fragmentation_window: '61m' is not a duration from 0 to 1h"},
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
    headroom: "0.3"
    host_devices: 99
    host_driver_latency: "slow"
    session_limit { fraction: 2 }
    idle_decay: "soon"
    idle_limit: "little"
    drain_timeout: "late"
    log_level: "loud"
    alloc_conf: "loud"
    record_events: 4000000000
  )");
  ASSERT_TRUE(absl::IsInvalidArgument(config.status()));
  const std::string message(config.status().message());
  EXPECT_THAT(message, HasSubstr("13 faults"));
  for (const char* field : {"socket_mode", "device", "capacity", "headroom", "host_devices", "host_driver_latency",
                            "session_limit.fraction", "idle_decay", "idle_limit", "drain_timeout", "log_level",
                            "alloc_conf", "record_events"}) {
    EXPECT_THAT(message, HasSubstr(std::string(": ") + field + ": "));
  }
}

TEST(ConfigTest, FaultsNameLineAndColumn) {
  const auto message = [](const std::string& text) { return std::string(Read(text).status().message()); };
  EXPECT_THAT(message("\n  device: 'x'"), HasSubstr("\n  test.textproto:2:3: device: 'x'"));
  EXPECT_THAT(message("session_limit {\n    fraction: 7\n}"),
              HasSubstr("test.textproto:2:5: session_limit.fraction: 7"));
  // The command line sets a field that is in no file.
  ConfigText flags;
  flags.proto.set_device("x");
  EXPECT_THAT(std::string(CheckConfig(flags).status().message()), HasSubstr("\n  device: 'x'"));
}

TEST(ConfigTest, SyntaxErrorsNameLineAndColumn) {
  const auto message = [](const std::string& text) { return std::string(Read(text).status().message()); };
  EXPECT_EQ(message("socket_dir: '/tmp'\n  capcity: '8GiB'\n"),
            "1 fault in the configuration:\n  test.textproto:2:3: unknown field 'capcity'; did you mean 'capacity'?");
  EXPECT_THAT(message("\n\nhost_devices: 'many'"),
              HasSubstr("\n  test.textproto:3:15: host_devices: a whole number is needed, not 'many'"));
  EXPECT_THAT(message("capacity: 8"),
              HasSubstr("\n  test.textproto:1:11: capacity: a text in quotes is needed, not 8"));
  EXPECT_THAT(message("device: 'host'\ndevice: 'cuda'"),
              HasSubstr("\n  test.textproto:2:7: device: it may be given only once"));
  EXPECT_THAT(message("rules {\n  rights: OBSERVR\n}"),
              HasSubstr("\n  test.textproto:2:11: rights: unknown value OBSERVR"));
  EXPECT_THAT(message("host_devices: -1"), HasSubstr("test.textproto:1:15: "));
  EXPECT_THAT(message("capacity: 'x'\nsession_limit { fraction: 0.5"), HasSubstr("; what follows was not checked"));
}

TEST(ConfigTest, FaultsOfTheTextHideNoOthers) {
  const std::string message(Read(R"(
capcity: "8GiB"
idle_decay: 10
something_else { of: [1, 2] nested { x: "y" } }
rules {
  uid: 7
  limit { byts: "8GiB" }
  priorty: 3
  tenant: "a b"
}
headroom: "some"
log_level: loud
device: "gpu"
)")
                                .status()
                                .message());
  EXPECT_THAT(message, ::testing::StartsWith("11 faults in the configuration:\n"));
  for (const char* fault :
       {":2:1: unknown field 'capcity'; did you mean 'capacity'?\n",
        ":3:13: idle_decay: a text in quotes is needed, not 10\n", ":4:1: unknown field 'something_else'\n",
        ":6:8: uid: a text in quotes is needed, not 7\n", ":7:11: unknown field 'byts'; did you mean 'bytes'?\n",
        ":7:3: rules[0].limit: neither bytes nor fraction is given\n",
        ":8:3: unknown field 'priorty'; did you mean 'priority'?\n", ":9:3: rules[0].tenant: ",
        ":11:1: headroom: 'some' is not a size", ":12:12: log_level: a text in quotes is needed, not loud\n",
        ":13:1: device: 'gpu' is not auto, cuda or host"}) {
    EXPECT_THAT(message, HasSubstr(std::string("  test.textproto") + fault));
  }
}

// ---- Rules ----

TEST(ConfigRulesTest, EveryFieldIsRead) {
  const absl::StatusOr<Config> config = Read(R"(
    session_limit { fraction: 0.25 }
    rules {
      name: "training"
      uid: "0"
      gid: "4294967294"
      cgroup: "/system.slice/*"
      session_name: "train-?"
      limit { fraction: 0.5 }
      guarantee { bytes: "2GiB" }
      priority: -1000
      tenant: "team:a"
      isolation: STRICT
      rights: [CLIENT]
    }
    rules { uid: "root" gid: "root" rights: OBSERVER rights: ADMIN claim: "ops" }
    rules { rights: NONE }
    rules { rights: [OBSERVER, CLIENT] guarantee { fraction: 0.25 } priority: 1000 }
    rules { session_name: "*" claim_per: USER claim_limit { fraction: 0.25 } claim_guarantee { bytes: "1GiB" } }
  )");
  ASSERT_TRUE(config.ok()) << config.status();
  ASSERT_EQ(config->rules.size(), 5u);
  const PolicyRule& full = config->rules[0];
  EXPECT_EQ(full.label, "training");
  EXPECT_EQ(full.place, "test.textproto:3:5");
  EXPECT_EQ(full.uid, 0u);
  EXPECT_EQ(full.gid, 4294967294u);
  EXPECT_EQ(full.cgroup, "/system.slice/*");
  EXPECT_EQ(full.session_name, "train-?");
  EXPECT_EQ(full.limit, Limit(0.5));
  EXPECT_EQ(full.guarantee, Limit(2_GiB));
  EXPECT_EQ(full.priority, -1000);
  EXPECT_EQ(full.tenant, "team:a");
  EXPECT_TRUE(full.strict);
  EXPECT_EQ(full.rights, (Rights{.client = true, .observer = false, .admin = false}));

  const PolicyRule& root = config->rules[1];
  EXPECT_EQ(root.label, "rules[1]");
  EXPECT_EQ(root.uid, 0u);
  EXPECT_EQ(root.gid, 0u);
  EXPECT_EQ(root.cgroup, std::nullopt);
  EXPECT_EQ(root.session_name, std::nullopt);
  EXPECT_EQ(root.limit, std::nullopt);
  EXPECT_EQ(root.guarantee, Limit(uint64_t{0}));
  EXPECT_EQ(root.priority, 0);
  EXPECT_EQ(root.tenant, "");
  EXPECT_FALSE(root.strict);
  EXPECT_EQ(root.rights, kEveryRight);
  EXPECT_EQ(root.claim, "ops");
  EXPECT_FALSE(root.claim_per_user);
  EXPECT_EQ(root.claim_limit, Limit(1.0));
  EXPECT_FALSE(full.has_claim());
  EXPECT_TRUE(config->rules[4].claim_per_user);
  EXPECT_EQ(config->rules[4].claim_limit, Limit(0.25));
  EXPECT_EQ(config->rules[4].claim_guarantee, Limit(1_GiB));
  EXPECT_EQ(config->rules[2].rights, (Rights{.client = false, .observer = false, .admin = false}));
  EXPECT_EQ(config->rules[3].rights, (Rights{.client = true, .observer = true, .admin = false}));
  EXPECT_EQ(config->rules[4].rights, Rights());
}

TEST(ConfigRulesTest, EachBadFieldIsNamed) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"name: 'a b'", "name: only letters"},
      {"name: '" + std::string(64, 'x') + "'", "name: 64 characters"},
      {"uid: ''", "uid: is empty"},
      {"uid: 'no such user'", "uid: there is no user 'no such user' on this machine"},
      {"uid: '-1'", "uid: there is no user '-1'"},
      {"uid: '4294967295'", "uid: '4294967295' is not between"},
      {"uid: '99999999999'", "uid: '99999999999' is not between"},
      {"gid: ''", "gid: is empty"},
      {"gid: 'no such group'", "gid: there is no group 'no such group' on this machine"},
      {"gid: '4294967295'", "gid: '4294967295' is not between"},
      {"cgroup: ''", "cgroup: is empty"},
      {"cgroup: '" + std::string(4096, 'x') + "'", "cgroup: 4096 characters"},
      {"session_name: ''", "session_name: is empty"},
      {"limit { }", "limit: neither bytes nor fraction"},
      {"limit { fraction: 1.5 }", "limit.fraction: 1.5 is not above 0"},
      {"limit { bytes: '1PB' } guarantee { bytes: '2GiB' }", "limit.bytes: '1PB' is not a size"},
      {"guarantee { fraction: nan }", "guarantee.fraction: nan is not"},
      {"guarantee { bytes: 'x' }", "guarantee.bytes: 'x' is not a size"},
      {"limit { bytes: '1GiB' } guarantee { bytes: '2GiB' }", "guarantee: 2.00 GiB is above the limit"},
      {"limit { fraction: 0.5 } guarantee { fraction: 0.6 }", "guarantee: 0.6 is above the limit of 0.5"},
      {"guarantee { fraction: 0.9 }", "guarantee: 0.9 is above the limit of 0.8"},
      {"limit { fraction: 0.5 } guarantee { bytes: '5GiB' }", "guarantee: 5.00 GiB is above the capacity"},
      {"priority: 1001", "priority: 1001 is not between -1000 and 1000"},
      {"priority: -1001", "priority: -1001 is not between"},
      {"tenant: ''", "tenant: is empty"},
      {"tenant: 'a b'", "tenant: only letters"},
      {"rights: [CLIENT, NONE]", "rights[0]: NONE cannot be combined with other rights"},
      {"rights: [NONE, ADMIN]", "rights[0]: NONE cannot be combined with other rights"},
      {"claim: 'a/b'", "claim: only letters"},
      {"claim: '.a'", "claim: the first character"},
      {"claim: 'a' claim_per: USER", "claim_per: cannot be combined with claim"},
      {"claim_limit { fraction: 0.5 }", "claim_limit: needs claim or claim_per"},
      {"claim_guarantee { fraction: 0.5 }", "claim_guarantee: needs claim or claim_per"},
      {"claim: 'a' user_limit { fraction: 0.5 }", "user_limit: has no effect in a claim; use claim_limit"},
      {"claim_per: USER user_guarantee { fraction: 0.5 }",
       "user_guarantee: has no effect in a claim; use claim_guarantee"},
      {"claim: 'a' claim_limit { fraction: 0.2 } claim_guarantee { fraction: 0.3 }", "claim_guarantee: 0.3 is above"},
      {"session_name: 'boss' rights: ADMIN", "session_name: a client chooses its own name"},
  };
  for (const auto& [text, fault] : cases) {
    SCOPED_TRACE(text);
    const absl::StatusOr<Config> config =
        Read("capacity: '4GiB' session_limit { fraction: 0.8 } rules { }\nrules { " + text + " }");
    ASSERT_TRUE(absl::IsInvalidArgument(config.status())) << config.status();
    const std::string message(config.status().message());
    EXPECT_THAT(message, HasSubstr("1 fault in the configuration:\n  test.textproto:2:"));
    EXPECT_THAT(message, HasSubstr(": rules[1]." + fault));
  }
}

TEST(ConfigRulesTest, FaultsNameLineAndColumn) {
  const absl::StatusOr<Config> config = Read(R"(
rules { uid: "0" }
rules {
  priority: 5
  guarantee {
    fraction: 7
  }
}
rules {
  rights: [CLIENT,
           NONE]
  uid: ""
}
)");
  const std::string message(config.status().message());
  EXPECT_THAT(message, HasSubstr("3 faults"));
  EXPECT_THAT(message, HasSubstr("test.textproto:6:5: rules[1].guarantee.fraction: 7"));
  EXPECT_THAT(message, HasSubstr("test.textproto:10:"));
  EXPECT_THAT(message, HasSubstr("test.textproto:12:3: rules[2].uid: is empty"));
  EXPECT_THAT(std::string(Read("rules { }\nrules { rights: BOSS }").status().message()),
              HasSubstr("test.textproto:2:17: "));
}

TEST(ConfigRulesTest, RulesWithOneClaimAgreeOnIt) {
  EXPECT_TRUE(
      Read("rules { claim: 'a' claim_limit { fraction: 0.5 } } rules { claim: 'a' claim_limit { fraction: 0.5 } }"
           "rules { claim: 'b' }")
          .ok());
  const absl::Status status =
      Read("rules { name: 'x' claim: 'a' claim_limit { fraction: 0.5 } } rules { claim: 'a' }").status();
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("rules[1].claim: rule x gives the same claim another claim_limit"));
}

TEST(ConfigRulesTest, NamesAreUnique) {
  const absl::Status status = Read("rules { name: 'a' }\nrules { name: 'b' }\nrules { name: 'a' }").status();
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("test.textproto:3:9: rules[2].name: 'a' is already the name of rules[0]"));
  EXPECT_TRUE(Read("rules { } rules { }").ok());
}

TEST(ConfigRulesTest, ThereAreNotTooMany) {
  std::string text;
  for (int i = 0; i < kMaxRules; ++i) text += "rules { uid: '5' }\n";
  EXPECT_TRUE(Read(text).ok());
  EXPECT_THAT(std::string(Read(text + "rules { }").status().message()),
              HasSubstr("test.textproto:1001:1: rules[1000]: 1001 rules; at most 1000"));
}

TEST(ConfigRulesTest, ThePolicyIsWhatTheConfigurationSays) {
  const absl::StatusOr<Config> config = Read(
      "session_limit { fraction: 0.25 } max_sessions_per_uid: 3 max_wait: '30s' "
      "rules { uid: '12345' priority: 4 max_wait: '0s' }");
  ASSERT_TRUE(config.ok()) << config.status();
  const std::shared_ptr<const Policy> policy = MakePolicy(*config);
  EXPECT_EQ(policy->max_sessions_per_uid(), 3u);
  EXPECT_EQ(policy->TermsFor({.uid = 12345}).priority, 4);
  EXPECT_EQ(policy->TermsFor({.uid = 12346}).limit, Limit(0.25));
  EXPECT_EQ(policy->TermsFor({.uid = 12346}).max_wait, std::chrono::seconds(30));
  EXPECT_EQ(policy->TermsFor({.uid = 12345}).max_wait, std::chrono::seconds(0));
  EXPECT_EQ(policy->TermsFor({.uid = geteuid()}).rights, kEveryRight);
}

// ---- Reloading ----

// Each field is reported when the field changes, or needs no restart. A new field needs a decision in this test.
TEST(ConfigReloadTest, EveryFieldNeedsARestartOrNot) {
  const std::map<std::string, std::string> values = {
      {"socket_dir", "'/x'"},
      {"claims_file", "'/x/claims'"},
      {"socket_mode", "'0600'"},
      {"device", "'cuda'"},
      {"device_lost", "'stay'"},
      {"capacity", "'2GiB'"},
      {"headroom", "'2GiB'"},
      {"overhead_allowance", "'2GiB'"},
      {"host_devices", "2"},
      {"http_address", "'off'"},
      {"idle_decay", "'1s'"},
      {"drain_timeout", "'1s'"},
      {"max_blocks_per_session", "5"},
      {"log_level", "'debug'"},
      {"log_format", "'json'"},
      {"metrics", "{ max_clients: 5 }"},
      {"alloc_conf", "'max_split_size_mb:64'"},
      {"record_events", "5"},
      {"idle_limit", "'1GiB'"},
      {"host_driver_latency", "'1ms'"},
      {"max_segments_per_session", "5"},
      {"max_calls_per_second_per_uid", "5"},
      {"max_questions_per_uid", "5"},
      {"max_snapshots_per_uid", "5"},
      {"max_snapshots", "5"},
      {"max_waiting_per_uid", "5"},
      {"max_connections_per_uid", "5"},
      {"max_recorded_events_per_uid", "5"},
      {"reclaim_timeout", "'1s'"},
      {"settle_time", "'1s'"},
      {"client_timeout", "'1s'"},
      {"hold_back_time", "'2s'"},
      {"hold_back_limit", "{ fraction: 0.5 }"},
  };
  const std::map<std::string, std::string> live = {{"session_limit", "{ fraction: 0.5 }"},
                                                   {"max_sessions_per_uid", "5"},
                                                   {"max_claims_per_uid", "5"},
                                                   {"rules", "{ uid: '1' }"},
                                                   {"max_wait", "'1m'"},
                                                   {"user_limit", "{ fraction: 0.5 }"},
                                                   {"user_guarantee", "{ fraction: 0.5 }"}};
  const absl::StatusOr<Config> running = Read("");
  ASSERT_TRUE(running.ok());
  const google::protobuf::Descriptor& fields = *config::v1::DaemonConfig::descriptor();
  for (int i = 0; i < fields.field_count(); ++i) {
    const std::string field = fields.field(i)->name();
    SCOPED_TRACE(field);
    const bool is_live = live.count(field) != 0;
    ASSERT_TRUE(is_live || values.count(field) != 0);
    const absl::StatusOr<Config> wanted = Read(field + ": " + (is_live ? live : values).at(field));
    ASSERT_TRUE(wanted.ok()) << wanted.status();
    EXPECT_EQ(FieldsThatNeedARestart(*running, *wanted),
              is_live ? std::vector<std::string>() : std::vector<std::string>{field});
  }
  // A value in another spelling is no change.
  EXPECT_TRUE(FieldsThatNeedARestart(*running, *Read("device: 'auto' headroom: '1024MiB' host_devices: 1")).empty());
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
  const absl::StatusOr<ConfigText> text = ReadConfigFile(path);
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_THAT(text->faults, ::testing::ElementsAre(path + ":2:1: unknown field 'x'"));
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
