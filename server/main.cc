// SPDX-License-Identifier: Apache-2.0
//
// vrambrokerd: flags and configuration file in, daemon out. Exit codes: 0 stopped as asked, 1 could not serve,
// 2 bad flags or configuration, 3 no device could be used any more.
#include <signal.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>
#include <sys/resource.h>

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "allocator/base/command_line.h"
#include "allocator/base/room_to_start.h"
#include "server/base/log_line.h"
#include "server/config/config.h"
#include "server/daemon.h"

namespace {

// An option overriding a field of the configuration. Empty: not given.
struct Override {
  const char* option;
  const char* field;
  const char* value_name;
  const char* help;
  std::string* (vrambroker::config::v1::DaemonConfig::*mutable_field)();
  std::string value;
};

struct Options {
  std::string config;
  bool check_config = false;
  std::vector<Override> overrides;
  std::optional<uint32_t> record_events;  // overrides the field record_events
};

using Proto = vrambroker::config::v1::DaemonConfig;

std::vector<Override> Overrides() {
  return {
      {"--socket-dir", "socket_dir", "DIR", "Directory of the sockets. Default: /run/vrambroker.",
       &Proto::mutable_socket_dir, ""},
      {"--claims-file", "claims_file", "FILE",
       "File that keeps the claims for the next start. Default: vrambroker.claims in the socket directory.",
       &Proto::mutable_claims_file, ""},
      {"--device", "device", "KIND",
       "cuda, host or auto: cuda if a usable GPU is present, host if there is no GPU. Default: auto.",
       &Proto::mutable_device, ""},
      {"--capacity", "capacity", "SIZE",
       "Memory of each device that the daemon may own, as 8GiB or 50% (on host, 50% of the machine's memory). "
       "Default on cuda: the memory free at the start or held by clients of the run before, less the headroom. Default "
       "on host: half of the machine's memory.",
       &Proto::mutable_capacity, ""},
      {"--http-address", "http_address", "ADDRESS:PORT",
       "Address for metrics and the web page, as localhost:9477 or [::1]:9477. Port 0 takes any free port; off opens "
       "no port. Default: 127.0.0.1:9477.",
       &Proto::mutable_http_address, ""},
      {"--alloc-conf", "alloc_conf", "SETTINGS",
       "Settings of the sessions' allocators in PyTorch's syntax, as max_split_size_mb:128. A client's own settings "
       "replace these settings. Default: none.",
       &Proto::mutable_alloc_conf, ""},
      {"--idle-decay", "idle_decay", "DURATION",
       "Time to keep memory outside sessions for reuse, as 500ms or 1m. Default: 10s.", &Proto::mutable_idle_decay, ""},
      {"--idle-limit", "idle_limit", "BYTES",
       "Memory of each device to keep outside sessions for reuse, as 2GiB. Default: no limit.",
       &Proto::mutable_idle_limit, ""},
      {"--host-driver-latency", "host_driver_latency", "DURATION",
       "Time added on host devices to allocating, freeing and zeroing a segment, as 2ms. For benchmarks. Default: 0.",
       &Proto::mutable_host_driver_latency, ""},
      {"--log-format", "log_format", "FORMAT", "text, or json for one object per line. Default: text.",
       &Proto::mutable_log_format, ""},
      {"--log-level", "log_level", "LEVEL", "debug, info, warn or error. Default: info.", &Proto::mutable_log_level,
       ""},
  };
}

std::unique_ptr<CLI::App> MakeApp(Options& options) {
  std::unique_ptr<CLI::App> app =
      vrambroker::MakeCommandLine("vrambrokerd", "Owns a GPU's memory and shares it between processes.");
  app->option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app->add_option("--config", options.config,
                  "Configuration file, in protobuf text format. Options below override its fields.")
      ->type_name("FILE");
  app->add_flag("--check-config", options.check_config,
                "Check the configuration file and the options, report the errors, and exit.")
      ->disable_flag_override();
  options.overrides = Overrides();
  for (Override& each : options.overrides) {
    app->add_option(each.option, each.value, each.help)->type_name(each.value_name);
  }
  app->add_option("--record-events", options.record_events,
                  "Number of last events kept by a session on each device, to explain refusals; 0: no events. "
                  "Default: 100000.")
      ->type_name("N");
  app->footer(
      "Examples:\n"
      "  $ vrambrokerd --socket-dir /tmp/vrambroker --capacity 4GiB\n"
      "  $ vrambrokerd --config vrambroker.textproto --check-config\n"
      "\n"
      "Exit status:\n"
      "  0                     Stopped on request.\n"
      "  1                     Could not serve.\n"
      "  2                     Bad options or configuration.\n"
      "  3                     No usable device is left: start the daemon again.");
  return app;
}

// The options never change, so LoadConfig() can also read the configuration again while the daemon runs.
absl::StatusOr<vrambroker::Config> LoadConfig(const Options& options) {
  vrambroker::ConfigText text;
  if (!options.config.empty()) {
    absl::StatusOr<vrambroker::ConfigText> file = vrambroker::ReadConfigFile(options.config);
    if (!file.ok()) return file.status();
    text = *std::move(file);
  }
  for (const Override& each : options.overrides) {
    if (each.value.empty()) continue;
    *(text.proto.*each.mutable_field)() = each.value;
    text.places[each.field] = each.option;
  }
  if (options.record_events.has_value()) {
    text.proto.set_record_events(*options.record_events);
    text.places["record_events"] = "--record-events";
  }
  return vrambroker::CheckConfig(text);
}

// Threads of the daemon: the event loop, the first workers, a thread for each device, and the HTTP port's threads.
constexpr int kOwnThreads = 12;

absl::Status Serve(const vrambroker::Config& config, const vrambroker::ConfigReader& reload) {
  // Every segment of host memory, every connection and every watched process is a descriptor.
  rlimit files = {};
  if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
  }
  if (absl::Status status = vrambroker::CheckRoomForGrpc(kOwnThreads); !status.ok()) return status;
  try {
    return vrambroker::RunDaemon(config, reload);
  } catch (const std::system_error&) {
    return vrambroker::NoThreadError();
  }
}

}  // namespace

int main(int argc, char** argv) {
  // Before any thread exists: every thread inherits the mask, and the event loop reads the signals.
  sigset_t mask;
  sigemptyset(&mask);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP}) sigaddset(&mask, signal);
  pthread_sigmask(SIG_BLOCK, &mask, nullptr);
  ::signal(SIGPIPE, SIG_IGN);
  ::signal(SIGXFSZ, SIG_IGN);  // a write beyond the file size limit then returns an error

  Options options;
  const std::unique_ptr<CLI::App> app = MakeApp(options);
  if (const std::optional<int> code = vrambroker::ParseOrPrint(*app, argc, argv)) return *code;

  const absl::StatusOr<vrambroker::Config> config = LoadConfig(options);
  if (!config.ok()) {
    std::fprintf(stderr, "vrambrokerd: %s\n", std::string(config.status().message()).c_str());
    return 2;
  }
  if (options.check_config) {
    for (const std::string& warning : config->warnings) std::fprintf(stderr, "vrambrokerd: %s\n", warning.c_str());
    std::printf("the configuration is valid\n");
    return 0;
  }

  spdlog::set_default_logger(spdlog::stderr_color_mt("vrambrokerd"));
  // Under systemd the journal adds time and level.
  vrambroker::SetLogFormat(config->log_format == "json" ? vrambroker::LogFormat::kJson : vrambroker::LogFormat::kText,
                           /*times=*/std::getenv("JOURNAL_STREAM") == nullptr);
  spdlog::set_level(spdlog::level::from_str(config->log_level));

  for (const std::string& warning : config->warnings) spdlog::warn("{}", warning);
  vrambroker::ConfigReader reload;
  if (!options.config.empty()) reload = [&options] { return LoadConfig(options); };
  if (absl::Status status = Serve(*config, reload); !status.ok()) {
    spdlog::error("{}", std::string(status.message()));
    return absl::IsDataLoss(status) ? 3 : 1;
  }
  return 0;
}
