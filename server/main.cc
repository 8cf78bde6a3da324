// SPDX-License-Identifier: Apache-2.0
//
// vrambrokerd: flags and configuration file in, daemon out. Exit codes: 0 stopped as asked, 1 could not serve,
// 2 bad flags or configuration.
#include <signal.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/config.h"
#include "server/daemon.h"
#include "server/log_line.h"
#include "server/version.h"

ABSL_FLAG(std::string, config, "", "Configuration file: vrambroker.config.v1.DaemonConfig in protobuf text format.");
ABSL_FLAG(bool, check_config, false, "Check the configuration file and the flags, say what is wrong, and exit.");
ABSL_FLAG(std::string, socket_dir, "", "Directory of the sockets. Default: /run/vrambroker.");
ABSL_FLAG(std::string, device, "", "auto (default: cuda when a usable GPU is present, else host), cuda or host.");
ABSL_FLAG(std::string, capacity, "",
          "Memory of each device that the daemon may own, as 512MiB, 8GiB or plain bytes. Default: host: "
          "half of the "
          "machine's memory; cuda: what is free at the start, less the headroom.");
ABSL_FLAG(
    std::string, http_address, "",
    "IPv4 address and port of the metrics and the web page; port 0: any free one; off: none. Default: 127.0.0.1:9477.");
ABSL_FLAG(
    std::string, alloc_conf, "",
    "Settings of the sessions' allocators in PyTorch's syntax, as max_split_size_mb:128; a client with settings of "
    "its own replaces them. Default: none.");
ABSL_FLAG(
    std::string, idle_limit, "",
    "The most memory of each device that is kept for reuse while nobody holds it, as 2GiB or plain bytes. Default: "
    "no bound.");
ABSL_FLAG(
    std::string, host_driver_latency, "",
    "For benchmarks only: host devices take this much longer to allocate and free a segment, as 2ms. Default: 0.");
ABSL_FLAG(std::string, log_format, "", "text (default) or json, one object a line.");
ABSL_FLAG(std::string, log_level, "", "debug, info (default), warn or error.");

namespace {

// The flags never change, so that this reads the configuration again while the daemon runs, too.
absl::StatusOr<vrambroker::Config> LoadConfig() {
  vrambroker::ConfigText text;
  if (const std::string path = absl::GetFlag(FLAGS_config); !path.empty()) {
    absl::StatusOr<vrambroker::ConfigText> file = vrambroker::ReadConfigFile(path);
    if (!file.ok()) return file.status();
    text = *std::move(file);
  }
  // A flag that is given overrides the file.
  const auto override_with = [&text](const absl::Flag<std::string>& flag, const char* name, std::string* field) {
    if (std::string value = absl::GetFlag(flag); !value.empty()) {
      *field = std::move(value);
      text.places[name] = absl::StrCat("--", name);
    }
  };
  override_with(FLAGS_socket_dir, "socket_dir", text.proto.mutable_socket_dir());
  override_with(FLAGS_device, "device", text.proto.mutable_device());
  override_with(FLAGS_capacity, "capacity", text.proto.mutable_capacity());
  override_with(FLAGS_http_address, "http_address", text.proto.mutable_http_address());
  override_with(FLAGS_alloc_conf, "alloc_conf", text.proto.mutable_alloc_conf());
  override_with(FLAGS_idle_limit, "idle_limit", text.proto.mutable_idle_limit());
  override_with(FLAGS_host_driver_latency, "host_driver_latency", text.proto.mutable_host_driver_latency());
  override_with(FLAGS_log_format, "log_format", text.proto.mutable_log_format());
  override_with(FLAGS_log_level, "log_level", text.proto.mutable_log_level());
  return vrambroker::CheckConfig(text);
}

// absl ends the process by itself on a bad flag and on --help, with code 1 in both cases. Here they are 2 and 0.
int exit_code_of_parsing = -1;  // -1: flags are not being parsed

void ExitFromParsing() {
  if (exit_code_of_parsing < 0) return;
  std::fflush(nullptr);
  _exit(exit_code_of_parsing);
}

std::vector<char*> ParseFlags(int argc, char** argv) {
  const bool asks = std::any_of(argv, argv + argc, [](const char* argument) {
    return absl::StartsWith(argument, "--help") || absl::StartsWith(argument, "--version");
  });
  std::atexit(ExitFromParsing);
  exit_code_of_parsing = asks ? 0 : 2;
  std::vector<char*> rest = absl::ParseCommandLine(argc, argv);
  exit_code_of_parsing = -1;
  return rest;
}

}  // namespace

int main(int argc, char** argv) {
  // Before any thread exists: every thread inherits the mask, and the event loop reads the signals.
  sigset_t mask;
  sigemptyset(&mask);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP}) sigaddset(&mask, signal);
  pthread_sigmask(SIG_BLOCK, &mask, nullptr);
  ::signal(SIGPIPE, SIG_IGN);

  absl::FlagsUsageConfig usage;
  usage.version_string = [] {
    return absl::StrCat("vrambrokerd ", vrambroker::kVersion, " (", vrambroker::kRevision, ")\n");
  };
  usage.contains_help_flags = [](absl::string_view file) { return absl::EndsWith(file, "server/main.cc"); };
  absl::SetFlagsUsageConfig(usage);
  absl::SetProgramUsageMessage(
      "owns a GPU's memory and shares it between processes.\n\n"
      "  vrambrokerd --socket_dir=/tmp/vrambroker --capacity=4GiB\n"
      "  vrambrokerd --config=/etc/vrambroker/vrambroker.textproto --check_config");
  const std::vector<char*> rest = ParseFlags(argc, argv);
  if (rest.size() > 1) {
    std::fprintf(stderr, "vrambrokerd: unexpected argument '%s'; see vrambrokerd --help\n", rest[1]);
    return 2;
  }

  const absl::StatusOr<vrambroker::Config> config = LoadConfig();
  if (!config.ok()) {
    std::fprintf(stderr, "vrambrokerd: %s\n", std::string(config.status().message()).c_str());
    return 2;
  }
  if (absl::GetFlag(FLAGS_check_config)) {
    for (const std::string& warning : config->alloc_conf.warnings) {
      std::fprintf(stderr, "vrambrokerd: alloc_conf: %s\n", warning.c_str());
    }
    std::printf("the configuration is valid\n");
    return 0;
  }

  spdlog::set_default_logger(spdlog::stderr_color_mt("vrambrokerd"));
  // Under systemd the journal adds time and level itself.
  vrambroker::SetLogFormat(config->log_format == "json" ? vrambroker::LogFormat::kJson : vrambroker::LogFormat::kText,
                           /*times=*/std::getenv("JOURNAL_STREAM") == nullptr);
  spdlog::set_level(spdlog::level::from_str(config->log_level));

  for (const std::string& warning : config->alloc_conf.warnings) spdlog::warn("alloc_conf: {}", warning);
  const auto reload = [] {
    return absl::GetFlag(FLAGS_config).empty()
               ? absl::FailedPreconditionError(
                     "the daemon was started without --config: there is no file to read again")
               : LoadConfig();
  };
  if (absl::Status status = vrambroker::RunDaemon(*config, reload); !status.ok()) {
    spdlog::error("{}", std::string(status.message()));
    return 1;
  }
  return 0;
}
