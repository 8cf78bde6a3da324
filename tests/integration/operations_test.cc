// SPDX-License-Identifier: Apache-2.0
//
// Interfaces for operators besides vramctl: flags and configuration, systemd, health checks, metrics.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "allocator/base/bytes.h"
#include "tests/support/daemon_test.h"
#include "tests/support/nvidia_driver.h"
#include "tests/support/paths.h"
#include "tests/support/raw_client.h"
#include "tests/support/test_device.h"
#include "tests/support/vramctl_test.h"

namespace vrambroker::testing_support {
namespace {

using Json = nlohmann::json;
using absl::StrContains;

// ---- Flags and configuration ----

RunResult Daemon(Arguments arguments) {
  arguments.insert(arguments.begin(), DaemonProgram());
  return RunProgram(arguments);
}

std::string ConfigFile(const std::string& text) {
  const std::string path = MakeTempDir() + "/c.textproto";
  std::ofstream(path) << text;
  return path;
}

TEST(ConfigTest, CheckConfigAcceptsTheExample) {
  const RunResult example =
      Daemon({absl::StrCat("--config=", paths::kSourceDir, "/deploy/vrambroker.textproto"), "--check_config"});
  EXPECT_EQ(example.exit_code, 0) << example.err;
  EXPECT_EQ(example.out, "the configuration is valid\n");
  EXPECT_EQ(Daemon({"--check_config"}).exit_code, 0);
  EXPECT_EQ(Daemon({"--check_config", "--config=" + ConfigFile("")}).exit_code, 0);
}

TEST(ConfigTest, TheExamplesRulesAreGoodWhenTheCommentSignsAreTaken) {
  std::ifstream example(absl::StrCat(paths::kSourceDir, "/deploy/vrambroker.textproto"));
  std::string text;
  size_t rules = 0;
  for (std::string line; std::getline(example, line);) {
    const bool is_rule = absl::StartsWith(line, "# rules {");
    if (!is_rule && !absl::StartsWith(line, "#   ") && line != "# }") continue;
    rules += is_rule ? 1 : 0;
    // Group 0 exists on every machine; the example's groups may be missing.
    absl::StrAppend(&text,
                    absl::StrReplaceAll(line.substr(2),
                                        {{"gid: \"research\"", "gid: \"0\""}, {"gid: \"operators\"", "gid: \"0\""}}),
                    "\n");
  }
  EXPECT_GE(rules, 3u);
  const RunResult result = Daemon({"--config=" + ConfigFile(text), "--check_config"});
  EXPECT_EQ(result.exit_code, 0) << result.err << text;
}

TEST(ConfigTest, CheckConfigSaysWhereAndWhat) {
  const std::string syntax = ConfigFile("device: \"host\"\ncapacity: }\n");
  const RunResult bad_syntax = Daemon({"--config=" + syntax, "--check_config"});
  EXPECT_EQ(bad_syntax.exit_code, 2);
  EXPECT_TRUE(StrContains(bad_syntax.err, syntax + ":2:11: ")) << bad_syntax.err;

  const std::string unknown = ConfigFile("\n  capasity: \"1GiB\"\n");
  const RunResult unknown_field = Daemon({"--config=" + unknown, "--check_config"});
  EXPECT_EQ(unknown_field.exit_code, 2);
  EXPECT_TRUE(StrContains(unknown_field.err, unknown + ":2:")) << unknown_field.err;
  EXPECT_TRUE(StrContains(unknown_field.err, "capasity")) << unknown_field.err;

  // Reports all faults at once.
  const RunResult values = Daemon({"--check_config", "--config=" + ConfigFile(R"(
      socket_mode: "0999" device: "tpu" capacity: "1KiB" host_devices: 17 idle_decay: "soon" log_level: "loud"
      session_limit { fraction: 1.5 })")});
  EXPECT_EQ(values.exit_code, 2);
  EXPECT_TRUE(StrContains(values.err, "7 faults")) << values.err;
  for (const char* field : {"socket_mode:", "device:", "capacity:", "host_devices:", "idle_decay:", "log_level:",
                            "session_limit.fraction:"}) {
    EXPECT_TRUE(StrContains(values.err, field)) << field << "\n" << values.err;
  }
  const RunResult missing = Daemon({"--check_config", "--config=/no/such/file"});
  EXPECT_EQ(missing.exit_code, 2);
  EXPECT_TRUE(StrContains(missing.err, "/no/such/file")) << missing.err;
}

TEST(ConfigTest, BadFlags) {
  const Arguments socket = {"--socket_dir=" + MakeTempDir(), "--http_address=off", "--device=host"};
  const auto with = [&](const std::string& flag) {
    Arguments arguments = socket;
    arguments.push_back(flag);
    return Daemon(arguments);
  };
  for (const char* flag : {"--capacity=lots", "--capacity=0", "--log_level=loud", "--device=tpu", "surplus"}) {
    const RunResult result = with(flag);
    EXPECT_EQ(result.exit_code, 2) << flag;
    EXPECT_TRUE(StrContains(result.err, "vrambrokerd: ")) << result.err;
  }
  const RunResult unknown = with("--no_such_flag");
  EXPECT_NE(unknown.exit_code, 0);
  EXPECT_TRUE(StrContains(unknown.err, "no_such_flag")) << unknown.err;
  for (const char* address :
       {"--http_address=no.such.host.invalid:1", "--http_address=127.0.0.1", "--http_address=127.0.0.1:99999",
        "--http_address=::1:9477", "--http_address=:9477", "--http_address=[]:9477", "--http_address=[127.0.0.1]:x"}) {
    const RunResult result = with(address);
    EXPECT_NE(result.exit_code, 0) << address;
    EXPECT_TRUE(StrContains(result.err, "http_address")) << result.err;
  }
  const RunResult no_dir = Daemon({"--socket_dir=/no/such/dir", "--device=host", "--http_address=off"});
  EXPECT_EQ(no_dir.exit_code, 1);
  EXPECT_TRUE(StrContains(no_dir.err, "/no/such/dir")) << no_dir.err;
  const std::string deep = MakeTempDir() + "/" + std::string(100, 'd');
  const RunResult too_long = Daemon({"--socket_dir=" + deep, "--device=host", "--http_address=off"});
  EXPECT_EQ(too_long.exit_code, 1);
  EXPECT_TRUE(StrContains(too_long.err, "choose a shorter --socket-dir")) << too_long.err;
  EXPECT_TRUE(StrContains(Daemon({"--version"}).out, "vrambrokerd "));
}

// Root processes that ask NVIDIA's library create /dev/nvidiactl, even without a driver.
TEST(ConfigTest, ADeviceFileAloneIsNoDriver) {
  for (const auto& [folder, is_driver] : std::map<std::string, bool>{
           {"/dev/nvidiactl", false}, {"/proc/driver/nvidia", true}, {"/sys/module/nvidia", true}}) {
    const std::string root = MakeTempDir();
    EXPECT_FALSE(HasNvidiaDriver(root));
    std::filesystem::create_directories(root + folder);
    EXPECT_EQ(HasNvidiaDriver(root), is_driver) << folder;
  }
}

TEST(ConfigTest, CudaWithoutAGpu) {
  if (HasNvidiaDriver()) GTEST_SKIP() << "this machine has NVIDIA's driver";
  const RunResult result = Daemon({"--socket_dir=" + MakeTempDir(), "--device=cuda", "--http_address=off"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_TRUE(StrContains(result.err, "device cuda:")) << result.err;
  EXPECT_TRUE(StrContains(result.err, "--device=host needs no GPU")) << result.err;
}

// ---- systemd and health checks ----

// Datagram socket that collects the daemon's messages to systemd.
class NotifySocket {
 public:
  NotifySocket() : path_(MakeTempDir() + "/notify"), fd_(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path_.c_str(), path_.size());
    EXPECT_EQ(bind(fd_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  }
  const std::string& path() const { return path_; }
  bool WaitForText(const std::string& text) {
    return WaitFor([&] {
      char buffer[4096];
      ssize_t size;
      while ((size = recv(fd_.get(), buffer, sizeof buffer, MSG_DONTWAIT)) > 0) {
        received_.append(buffer, static_cast<size_t>(size)).append("\n");
      }
      return StrContains(received_, text);
    });
  }

 private:
  const std::string path_;
  const UniqueFd fd_;
  std::string received_;
};

class ServiceTest : public DaemonTest {};

TEST_F(ServiceTest, TellsSystemdWhenItIsReadyAliveAndStopping) {
  NotifySocket notify;
  ASSERT_OK(StartDaemon({.environment = {{"NOTIFY_SOCKET", notify.path()}}}));
  EXPECT_TRUE(notify.WaitForText("READY=1\nSTATUS=Serving on " + dir()));
  EXPECT_TRUE(notify.WaitForText("WATCHDOG=1"));
  EXPECT_EQ(daemon_->Stop().value_or(-1), 0);
  EXPECT_TRUE(notify.WaitForText("STOPPING=1"));
}

// Memory is served even if another program took the HTTP port while the daemon was down.
TEST_F(ServiceTest, APortInUseIsSaidAndTriedAgainWhileMemoryIsServed) {
  UniqueFd taken(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  ASSERT_EQ(bind(taken.get(), reinterpret_cast<const sockaddr*>(&address), size), 0);
  ASSERT_EQ(listen(taken.get(), 1), 0);
  ASSERT_EQ(getsockname(taken.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
  const int port = ntohs(address.sin_port);
  const std::string where = absl::StrCat("127.0.0.1:", port);
  NotifySocket systemd;
  ASSERT_OK(StartDaemon({.flags = {"--http_address=" + where}, .environment = {{"NOTIFY_SOCKET", systemd.path()}}}));
  EXPECT_TRUE(systemd.WaitForText("READY=1")) << "other services may start";
  EXPECT_TRUE(systemd.WaitForText("another program has " + where));
  EXPECT_TRUE(StrContains(daemon_->log(), "http port taken http_address=" + where)) << daemon_->log();
  EXPECT_TRUE(StrContains(daemon_->log(), "Address already in use")) << daemon_->log();
  ASSERT_OK_AND_ASSIGN(ClientProcess client, ConnectProcess("client"));
  ASSERT_OK(client.Call("alloc 1000"));
  taken.Reset();
  MetricsPage page("");
  EXPECT_TRUE(WaitFor([&] {
    const absl::StatusOr<HttpAnswer> answer = HttpGet(port, "/metrics");
    if (!answer.ok() || answer->code != 200) return false;
    page = MetricsPage(answer->body);
    return true;
  })) << daemon_->log();
  EXPECT_GE(page.Value("vrambroker_http_listen_failures_total").value_or(0), 1);
}

// Simulates an old kernel, or a sandbox.
TEST_F(ServiceTest, AKilledClientsMemoryComesBackWithoutPidfds) {
  ASSERT_OK(StartDaemon({.http = true, .runner = paths::kWithoutPidfds}));
  EXPECT_TRUE(StrContains(daemon_->log(), "this kernel has no pidfd_open")) << daemon_->log();
  ASSERT_OK_AND_ASSIGN(ClientProcess stays, ConnectProcess("stays"));
  ASSERT_OK(stays.Call("fill 2 1000000 7"));
  {
    ASSERT_OK_AND_ASSIGN(ClientProcess killed, ConnectProcess("killed"));
    ASSERT_OK(killed.Call("fill 3 10000000 7"));
    ASSERT_OK(killed.Call("fork"));  // the child keeps the connections until this process has ended
    killed.process().Signal(SIGKILL);
    EXPECT_TRUE(WaitFor([&] {
      return daemon_->Metrics().Value("vrambroker_rpc_in_flight", {{"method", "Session"}}) == 1;
    })) << daemon_->log();
    EXPECT_TRUE(WaitFor([&] { return StrContains(daemon_->log(), "reason=process_ended"); })) << daemon_->log();
  }
  EXPECT_TRUE(WaitFor([&] { return stays.Call("alloc 220000000").ok(); })) << "only with what the other one had";
  ASSERT_OK(stays.Call("check 7"));
  EXPECT_EQ(daemon_->Stop().value_or(-1), 0) << daemon_->log();
}

// Mounts a folder of a GPU, like on a machine with a GPU, over /proc/driver, in the daemon's own mount namespace.
TEST_F(ServiceTest, AutoDoesNotServeTheHostWhereThereAreGpus) {
  HOST_DEVICE_ONLY();
  const std::string mount = "mount -t tmpfs none /proc/driver && mkdir -p /proc/driver/nvidia/gpus/0000:01:00.0 && ";
  if (RunProgram({"/usr/bin/unshare", "-m", "/bin/sh", "-c", mount + "true"}).exit_code != 0) {
    GTEST_SKIP() << "needs root, and mounts";
  }
  const auto command = [&](const std::string& device) -> Arguments {
    return {"/usr/bin/unshare", "-m", "/bin/sh", "-c",
            absl::StrCat(mount, "exec ", DaemonProgram(), " --socket_dir=", MakeTempDir(),
                         " --http_address=off --capacity=64MiB --device=", device)};
  };
  const RunResult refused = RunProgram(command("auto"));
  EXPECT_EQ(refused.exit_code, 1) << refused.err;
  for (const char* text : {"device auto: this machine has the GPU 0000:01:00.0, but CUDA cannot use it: ",
                           "modprobe nvidia_uvm", "/etc/modules-load.d", "--device=host"}) {
    EXPECT_TRUE(StrContains(refused.err, text)) << refused.err;
  }
  const RunResult cuda = RunProgram(command("cuda"));
  EXPECT_EQ(cuda.exit_code, 1);
  EXPECT_TRUE(StrContains(cuda.err, "modprobe nvidia_uvm")) << cuda.err;
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<ChildProcess> host, ChildProcess::Start(command("host")));
  EXPECT_TRUE(WaitFor([&] { return StrContains(host->ErrorText(), "daemon ready") || !host->Running(); }));
  EXPECT_TRUE(host->Running()) << "who says host gets it; its log:\n" << host->ErrorText();
}

TEST_F(ServiceTest, HealthServiceAndHealthPageFollowTheDaemon) {
  ASSERT_OK(StartDaemon({.config = "drain_timeout: \"10m\"", .http = true}));
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  const auto check = [&](const std::string& service) {
    const std::string request =
        service.empty() ? "" : absl::StrCat("\x0a", std::string(1, static_cast<char>(service.size())), service);
    return CallBytes(raw.channel(), "/grpc.health.v1.Health/Check", request);
  };
  // HealthCheckResponse.status: 1 is SERVING, 2 is NOT_SERVING.
  for (const char* service : {"", "vrambroker.v1.Broker", "vrambroker.v1.Admin"}) {
    EXPECT_EQ(check(service).value_or("no answer"), "\x08\x01") << service;
  }
  EXPECT_STATUS(check("no.such.Service"), absl::StatusCode::kNotFound, "");
  ASSERT_OK_AND_ASSIGN(const HttpAnswer healthy, daemon_->Get("/healthz"));
  EXPECT_EQ(healthy.code, 200);

  ASSERT_OK_AND_ASSIGN(ClientProcess last, ConnectProcess("last"));
  daemon_->process().Signal(SIGTERM);
  EXPECT_TRUE(WaitFor([&] {
    const absl::StatusOr<HttpAnswer> answer = daemon_->Get("/healthz");
    return answer.ok() && answer->code == 503;
  }));
  EXPECT_TRUE(WaitFor([&] { return check("vrambroker.v1.Broker").value_or("") == "\x08\x02"; }));
  ASSERT_OK(last.Call("goodbye"));
  EXPECT_EQ(daemon_->process().Wait().value_or(-1), 0);
}

// Serving many claims again takes a while, because each claim has sockets.
TEST_F(ServiceTest, HealthIsOkOnlyWhenTheSocketsAreThere) {
  HOST_DEVICE_ONLY();
  constexpr int kClaims = 200;
  const std::string dir = MakeTempDir();
  std::string claims;
  for (int i = 0; i < kClaims; ++i) absl::StrAppend(&claims, "claims { name: 'c", i, "' terms { any_owner: true } }\n");
  std::ofstream(dir + "/claims") << claims << "# The end.\n";
  ASSERT_EQ(chmod((dir + "/claims").c_str(), 0600), 0);
  std::ofstream(dir + "/config.textproto") << "claims_file: '" << dir << "/claims'\n";
  ASSERT_OK_AND_ASSIGN(
      const std::unique_ptr<ChildProcess> daemon,
      ChildProcess::Start({DaemonProgram(), "--config=" + dir + "/config.textproto", "--socket_dir=" + dir,
                           "--device=host", "--capacity=64MiB", "--http_address=127.0.0.1:0"}));
  const std::string http = "http://127.0.0.1:";
  ASSERT_TRUE(WaitFor([&] { return StrContains(daemon->ErrorText(), http); })) << daemon->ErrorText();
  const std::string log = daemon->ErrorText();
  const int port = std::atoi(log.c_str() + log.find(http) + http.size());
  int code = 0;
  do {
    const absl::StatusOr<HttpAnswer> health = HttpGet(port, "/healthz");
    ASSERT_TRUE(health.ok()) << health.status() << daemon->ErrorText();
    code = health->code;
    if (code == 503) {
      EXPECT_EQ(health->body, "starting\n");
    } else {
      EXPECT_TRUE(std::filesystem::exists(dir + "/vrambroker.sock"));
    }
  } while (code == 503);
  EXPECT_EQ(code, 200);
  daemon->Signal(SIGTERM);
  EXPECT_EQ(daemon->Wait().value_or(-1), 0) << daemon->ErrorText();
}

TEST_F(ServiceTest, ReflectionListsBothServices) {
  ASSERT_OK(StartDaemon());
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  // ServerReflectionRequest with an empty list_services (field 7).
  ASSERT_OK_AND_ASSIGN(const std::string answer,
                       CallBytes(raw.channel(), "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                                 std::string("\x3a\x00", 2)));
  for (const char* service : {"vrambroker.v1.Broker", "vrambroker.v1.Admin", "grpc.health.v1.Health"}) {
    EXPECT_TRUE(StrContains(answer, service)) << service;
  }
}

// ---- Metrics ----

class MetricsTest : public DaemonTest {
 protected:
  void SetUp() override {
    ASSERT_OK(StartDaemon({.capacity = "256MiB", .config = "idle_decay: \"10m\"", .http = true}));
  }
};

TEST_F(MetricsTest, Pages) {
  ASSERT_OK_AND_ASSIGN(const HttpAnswer metrics, daemon_->Get("/metrics"));
  EXPECT_EQ(metrics.code, 200);
  EXPECT_TRUE(StrContains(metrics.headers, "Content-Type: text/plain; version=0.0.4")) << metrics.headers;
  for (const auto& [path, code] : std::vector<std::pair<std::string, int>>{{"/", 200},
                                                                           {"/healthz", 200},
                                                                           {"/metrics/more", 404},
                                                                           {"/healthz/", 404},
                                                                           {"/favicon.ico", 404},
                                                                           {"/../../etc/passwd", 404}}) {
    ASSERT_OK_AND_ASSIGN(const HttpAnswer answer, daemon_->Get(path));
    EXPECT_EQ(answer.code, code) << path;
  }
}

TEST_F(MetricsTest, PromtoolFindsNothingWrong) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("trainer"));
  ASSERT_OK_AND_ASSIGN(const Buffer buffer, client.Allocate(1000));
  ASSERT_OK_AND_ASSIGN(const HttpAnswer metrics, daemon_->Get("/metrics"));
  const std::string file = MakeTempDir() + "/metrics.txt";
  std::ofstream(file) << metrics.body;
  const RunResult which = RunProgram({"/bin/sh", "-c", "command -v promtool"});
  ASSERT_EQ(which.exit_code, 0) << "promtool is missing; tests/run.sh installs it (Debian package prometheus)";
  const RunResult check = RunProgram({"/bin/sh", "-c", "promtool check metrics < " + file});
  EXPECT_EQ(check.exit_code, 0) << check.out << check.err << metrics.body;
}

TEST_F(MetricsTest, NamesAndValues) {
  placement_ = Placement::kRemote;
  ASSERT_OK_AND_ASSIGN(Client a, Connect("a", Limit(0.25)));
  ASSERT_OK_AND_ASSIGN(Client b, Connect("b"));
  ASSERT_OK_AND_ASSIGN(Buffer x, a.Allocate(1000));    // 1024 bytes of a segment of 2 MiB
  ASSERT_OK_AND_ASSIGN(Buffer y, b.Allocate(3_MiB));   // part of a segment of 20 MiB
  ASSERT_OK_AND_ASSIGN(Buffer z, b.Allocate(18_MiB));  // a separate segment, cached after the reset
  EXPECT_OK(z.Reset());
  EXPECT_FALSE(a.Allocate(65_MiB).ok());   // limit
  EXPECT_FALSE(b.Allocate(257_MiB).ok());  // size above the device's
  EXPECT_FALSE(
      b.Allocate(236_MiB).ok());  // fragmentation: fits beside b's used memory; b's cached segment went back first
  {
    ASSERT_OK_AND_ASSIGN(Client c, Connect("c"));
    EXPECT_FALSE(c.Allocate(236_MiB).ok());  // capacity: other sessions have memory, and c has no holes
  }
  EXPECT_TRUE(WaitFor([&] { return daemon_->Metrics().Sum("vrambroker_sessions") == 2; })) << "its goodbye has arrived";

  const MetricsPage page = daemon_->Metrics();
  const Labels gpu = {{"gpu", "0"}};
  const auto device = [&](const std::string& name) {
    return page.Value("vrambroker_device_" + name, gpu).value_or(-1);
  };
  const auto client = [&](const std::string& who, const std::string& name) {
    return page.Value("vrambroker_client_" + name, {{"client", who}, {"gpu", "0"}}).value_or(-1);
  };
  const double small = 2.0 * (1 << 20);
  const double large = 20.0 * (1 << 20);
  const double idle = 18.0 * (1 << 20);
  EXPECT_EQ(device("capacity_bytes"), 256.0 * (1 << 20));
  EXPECT_EQ(device("allocated_bytes"), 1024 + 3.0 * (1 << 20));
  EXPECT_EQ(device("active_bytes"), 1024 + 3.0 * (1 << 20));
  EXPECT_EQ(device("requested_bytes"), 1000 + 3.0 * (1 << 20));
  EXPECT_EQ(device("inactive_split_bytes"), small - 1024 + 17.0 * (1 << 20));
  EXPECT_EQ(device("reserved_bytes"), small + large + idle);
  EXPECT_EQ(device("cached_free_bytes"), device("reserved_bytes") - device("active_bytes"));
  EXPECT_DOUBLE_EQ(device("fragmentation_ratio"), 1 - device("allocated_bytes") / (small + large))
      << "of what sessions hold";
  EXPECT_EQ(client("a", "limit_bytes"), 64.0 * (1 << 20));
  EXPECT_EQ(client("a", "reserved_bytes"), small);
  EXPECT_EQ(client("a", "allocated_bytes"), 1024);
  EXPECT_EQ(client("a", "active_bytes"), 1024);
  EXPECT_EQ(client("a", "requested_bytes"), 1000);
  EXPECT_EQ(client("a", "inactive_split_bytes"), small - 1024);
  EXPECT_DOUBLE_EQ(client("a", "fragmentation_ratio"), 1 - 1024 / small);
  EXPECT_EQ(client("b", "reserved_bytes"), large);
  // Figures of the clients add up to the device's figures. Reserved bytes also include idle bytes.
  for (const char* name : {"allocated_bytes", "active_bytes", "requested_bytes", "inactive_split_bytes"}) {
    EXPECT_EQ(page.Sum(absl::StrCat("vrambroker_client_", name)), device(name)) << name;
  }
  EXPECT_EQ(page.Sum("vrambroker_client_reserved_bytes") + idle, device("reserved_bytes"));
  for (const auto& [reason, count] : std::vector<std::pair<std::string, double>>{
           {"limit", 1}, {"capacity", 1}, {"larger_than_device", 1}, {"fragmentation", 1}}) {
    EXPECT_EQ(page.Value("vrambroker_device_ooms_total", {{"gpu", "0"}, {"reason", reason}}), count) << reason;
  }
  EXPECT_EQ(page.Value("vrambroker_sessions", {{"state", "active"}}), 2);
  EXPECT_EQ(page.Value("vrambroker_build_info"), 1);
}

TEST_F(MetricsTest, SeriesOfEndedSessionsAreGone) {
  placement_ = Placement::kRemote;
  {
    ASSERT_OK_AND_ASSIGN(Client client, Connect("short"));
    ASSERT_OK_AND_ASSIGN(const Buffer buffer, client.Allocate(1000));
    EXPECT_EQ(daemon_->Metrics().Value("vrambroker_client_allocated_bytes", {{"client", "short"}}), 1024);
  }
  EXPECT_TRUE(WaitFor([&] {
    const MetricsPage page = daemon_->Metrics();
    return page.Sum("vrambroker_sessions") == 0 && page.Value("vrambroker_device_allocated_bytes") == 0;
  }));
  ASSERT_OK_AND_ASSIGN(const HttpAnswer page, daemon_->Get("/metrics"));
  EXPECT_FALSE(StrContains(page.body, "short")) << page.body;
}

TEST_F(MetricsTest, AScrapeIsWholeWhileClientsComeAndGo) {
  ASSERT_OK_AND_ASSIGN(ClientProcess churner, ConnectProcess("churner"));
  ASSERT_OK(churner.Call("churn 4 100000"));
  for (int i = 0; i < 50; ++i) {
    ASSERT_OK_AND_ASSIGN(ClientProcess other, ConnectProcess(absl::StrCat("n", i)));
    const MetricsPage page = daemon_->Metrics();
    const double reserved = page.Value("vrambroker_device_reserved_bytes").value_or(-1);
    EXPECT_GE(reserved, page.Value("vrambroker_device_active_bytes").value_or(1e18));
    EXPECT_EQ(page.Count("vrambroker_client_limit_bytes"), page.Count("vrambroker_client_reserved_bytes"));
    EXPECT_EQ(static_cast<double>(page.Count("vrambroker_client_limit_bytes")), page.Sum("vrambroker_sessions"));
    const double ratio = page.Value("vrambroker_device_fragmentation_ratio").value_or(-1);
    EXPECT_TRUE(ratio >= 0 && ratio <= 1) << ratio;
  }
}

// Checks the metrics after calls of every kind.
TEST_F(MetricsTest, CallsAreCountedByMethodAndCode) {
  for (const Placement placement : {Placement::kRemote, Placement::kLeased}) {
    placement_ = placement;
    ASSERT_OK_AND_ASSIGN(Client client, Connect("caller"));
    ASSERT_OK_AND_ASSIGN(const Buffer buffer, client.Allocate(1000));
    EXPECT_TRUE(WaitFor([&] {  // the session before may not be over yet
      return daemon_->Metrics().Value("vrambroker_rpc_in_flight", {{"method", "Session"}}) == 1;
    }));
    EXPECT_FALSE(client.Allocate(1_GiB).ok());
  }
  EXPECT_EQ(RunProgram({VramctlProgram(), "sessions", "--socket_dir=" + dir()}).exit_code, 0);
  MetricsPage page = daemon_->Metrics();
  const auto calls = [&](const char* method, const char* code) {
    return page.Value("vrambroker_rpc_requests_total", {{"method", method}, {"code", code}}).value_or(0);
  };
  WaitFor([&] {  // the daemon counts a call after the answer
    page = daemon_->Metrics();
    return calls("Session.Explain", "RESOURCE_EXHAUSTED") >= 1 && calls("ListSessions", "OK") >= 1;
  });
  EXPECT_GE(calls("Session.Allocate", "OK") + calls("Allocate", "OK"), 1);
  EXPECT_GE(calls("Session.Allocate", "RESOURCE_EXHAUSTED") + calls("Allocate", "RESOURCE_EXHAUSTED"), 1);
  EXPECT_GE(calls("Session.LeaseSegments", "OK") + calls("LeaseSegments", "OK"), 1);
  EXPECT_GE(calls("Session.Explain", "RESOURCE_EXHAUSTED"), 1);
  EXPECT_EQ(calls("ListSessions", "OK"), 1) << "the interceptor's";
  EXPECT_EQ(page.Value("vrambroker_rpc_duration_seconds_count", {{"method", "ListSessions"}}), 1);
  EXPECT_EQ(page.Value("vrambroker_sessions_opened_total"), 2);
  EXPECT_TRUE(WaitFor([&] {
    return daemon_->Metrics().Value("vrambroker_rpc_in_flight", {{"method", "Session"}}) == 0;
  })) << "streams that are over";
}

TEST_F(DaemonTest, LogsAreJsonLinesOnDemand) {
  ASSERT_OK(StartDaemon({.capacity = "256MiB", .config = "log_format: \"json\""}));
  {
    ASSERT_OK_AND_ASSIGN(Client client, Connect("train/a"));
    EXPECT_FALSE(client.Allocate(1_GiB).ok());
  }
  EXPECT_TRUE(WaitFor([&] { return StrContains(daemon_->log(), "session closed"); })) << daemon_->log();
  std::map<std::string, nlohmann::json> events;
  for (const absl::string_view line : absl::StrSplit(daemon_->log(), '\n', absl::SkipEmpty())) {
    if (line[0] != '{') continue;  // output of sanitizers
    const nlohmann::json parsed = nlohmann::json::parse(std::string(line), nullptr, /*allow_exceptions=*/false);
    ASSERT_TRUE(parsed.is_object()) << line;
    EXPECT_TRUE(parsed.contains("time") && parsed.contains("level")) << line;
    EXPECT_TRUE(parsed.contains("event") || parsed.contains("message")) << line;
    if (parsed.contains("event")) events[parsed["event"].get<std::string>()] = parsed;
  }
  for (const char* event : {"session opened", "refused", "session closed"}) {
    ASSERT_TRUE(events.contains(event)) << event << daemon_->log();
    EXPECT_EQ(events[event]["name"], "train/a");
    EXPECT_EQ(events[event]["session"], 1);
  }
  EXPECT_EQ(events["device ready"]["capacity"], 256_MiB);
  EXPECT_EQ(events["daemon ready"]["socket"], dir() + "/vrambroker.sock");
  EXPECT_EQ(events["refused"]["cause"], "larger_than_device");
  EXPECT_EQ(events["session closed"]["reason"], "goodbye");
  EXPECT_EQ(events["session closed"]["refusals"], 1);
}

// A session reports right after its first segment, and again a second later. The log must include changes in between.
TEST_F(DaemonTest, TheLogHasTheLastFiguresOfASession) {
  ASSERT_OK(StartDaemon({.capacity = "256MiB", .config = "log_format: \"json\"", .http = true}));
  const auto allocated = [&] { return daemon_->Metrics().Value("vrambroker_device_allocated_bytes", {{"gpu", "0"}}); };
  const auto closed = [&](const std::string& name) -> std::optional<nlohmann::json> {
    for (const absl::string_view line : absl::StrSplit(daemon_->log(), '\n', absl::SkipEmpty())) {
      const nlohmann::json event = nlohmann::json::parse(std::string(line), nullptr, /*allow_exceptions=*/false);
      if (event.is_object() && event.value("event", "") == "session closed" && event.value("name", "") == name) {
        return event;
      }
    }
    return std::nullopt;
  };
  const auto expect = [&](const std::string& name, const char* reason) {
    ASSERT_TRUE(WaitFor([&] { return closed(name).has_value(); })) << daemon_->log();
    const nlohmann::json event = *closed(name);
    EXPECT_EQ(event["reason"], reason);
    EXPECT_EQ(event["peak_reserved"], 60_MiB);
    EXPECT_EQ(event["peak_allocated"], 60_MiB);
    EXPECT_EQ(event["allocations"], 2);
  };
  {
    ASSERT_OK_AND_ASSIGN(Client says_goodbye, Connect("says-goodbye"));
    ASSERT_OK_AND_ASSIGN(const Buffer first, says_goodbye.Allocate(20_MiB));
    ASSERT_TRUE(WaitFor([&] { return allocated() == 20_MiB; }));
    ASSERT_OK_AND_ASSIGN(const Buffer second, says_goodbye.Allocate(40_MiB));
  }
  expect("says-goodbye", "goodbye");

  ASSERT_OK_AND_ASSIGN(ClientProcess killed, ConnectProcess("killed"));
  ASSERT_OK(killed.Call(absl::StrCat("alloc ", 20_MiB)));
  ASSERT_TRUE(WaitFor([&] { return allocated() == 20_MiB; }));
  ASSERT_OK(killed.Call(absl::StrCat("alloc ", 40_MiB)));
  EXPECT_FALSE(killed.Call(absl::StrCat("alloc ", 300_MiB)).ok());
  killed.process().Signal(SIGKILL);
  ASSERT_OK(killed.process().Wait());
  expect("killed", "process_ended");
  EXPECT_EQ((*closed("killed"))["refusals"], 1);
  EXPECT_TRUE(closed("killed")->contains("after_refusal_ms"));

  ASSERT_OK_AND_ASSIGN(ClientProcess at_once, ConnectProcess("killed-at-once"));
  ASSERT_OK(at_once.Call(absl::StrCat("alloc ", 20_MiB)));
  at_once.process().Signal(SIGKILL);
  ASSERT_OK(at_once.process().Wait());
  ASSERT_TRUE(WaitFor([&] { return closed("killed-at-once").has_value(); })) << daemon_->log();
  const nlohmann::json event = *closed("killed-at-once");
  EXPECT_EQ(event["came_back"], 0) << "a child may have it";
  EXPECT_EQ(event["quarantined"], 20_MiB);
  EXPECT_EQ(event["peak_reserved"], 20_MiB) << "whatever it had time to report";

  ASSERT_OK_AND_ASSIGN(ClientProcess stays, ConnectProcess("stays"));
  ASSERT_OK(stays.Call(absl::StrCat("alloc ", 20_MiB)));
  // Memory of the killed clients is back.
  ASSERT_TRUE(WaitFor([&] {
    const absl::StatusOr<HttpAnswer> answer = daemon_->Get("/api/v1/state");
    return answer.ok() && nlohmann::json::parse(answer->body)["devices"][0]["reserved_bytes"] == 20_MiB;
  })) << daemon_->log();
  daemon_->process().Signal(SIGTERM);
  // Answers of the port never show the program's held memory as free or cached.
  while (true) {
    const absl::StatusOr<HttpAnswer> answer = daemon_->Get("/api/v1/state");
    if (!answer.ok() || answer->code != 200) break;
    const nlohmann::json state = nlohmann::json::parse(answer->body);
    EXPECT_EQ(state["devices"][0]["reserved_bytes"], 20_MiB) << state;
    EXPECT_EQ(state["devices"][0]["idle_bytes"], 0) << state;
    EXPECT_EQ(state["devices"][0]["free_bytes"], 236_MiB) << state;
    const bool is_listed = !state["sessions"].empty() || state["devices"][0]["left_behind_bytes"] == 20_MiB;
    EXPECT_TRUE(is_listed) << state;
    EXPECT_TRUE(state["state"] == "serving" || state["state"] == "draining" || state["state"] == "stopping") << state;
  }
  EXPECT_EQ(daemon_->process().Wait().value_or(-1), 0);
  ASSERT_TRUE(closed("stays").has_value()) << daemon_->log();
  EXPECT_EQ((*closed("stays"))["reason"], "daemon_stops");
  EXPECT_EQ((*closed("stays"))["came_back"], 0);
  EXPECT_EQ((*closed("stays"))["still_held"], 20_MiB);
}

TEST(ConfigTest, AnUnknownFlagIsWrongUse) {
  EXPECT_EQ(Daemon({"--no_such_flag"}).exit_code, 2);
  EXPECT_EQ(RunProgram({VramctlProgram(), "status", "--no_such_flag"}).exit_code, 2);
  EXPECT_EQ(RunProgram({VramctlProgram(), "status", "--device=first"}).exit_code, 2);
  EXPECT_EQ(RunProgram({VramctlProgram(), "--help"}).exit_code, 0);
}

}  // namespace
}  // namespace vrambroker::testing_support
