// SPDX-License-Identifier: Apache-2.0
//
// vramctl: looks at a running vrambrokerd and changes what it may. Exit codes: 0 done, 1 refused or failed, 2 wrong
// use.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <new>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "client/vrambroker/client.h"
#include "client/vramctl/commands.h"
#include "proto/admin_json.h"

ABSL_FLAG(std::string, socket_dir, "",
          "Directory of the daemon's sockets. Default: $VRAMBROKER_SOCKET_DIR, or /run/vrambroker.");
ABSL_FLAG(std::string, format, "text", "text, or json for scripts.");
ABSL_FLAG(
    std::string, name, "",
    "hold: what to call the session; default: vramctl. policy explain: a session's name; default: the command name "
    "of --pid, else none.");
ABSL_FLAG(std::string, limit, "", "hold: limit to ask for, as 0.5 (fraction of capacity) or 512MiB.");
ABSL_FLAG(absl::optional<int32_t>, device, absl::nullopt,
          "hold, stats, summary, replay, tune: ordinal of the device; default: 0. map: only this one; default: all.");
ABSL_FLAG(double, interval, 1, "top, watch: seconds between two looks at the daemon, 0.1 to 3600.");
ABSL_FLAG(uint64_t, count, 0, "watch: how many lines to write; 0: until it is interrupted.");
ABSL_FLAG(std::string, sort, "reserved",
          "top: the column to sort by: name, tenant, pid, user, state, priority, device, limit, guarantee, reserved, "
          "allocated, idle, fragmentation or waiting.");
ABSL_FLAG(std::string, conf, "", "replay, tune: file with lines alloc_conf=, device_bytes= and fraction=.");
ABSL_FLAG(
    std::string, alloc_conf, "",
    "hold, replay, tune: settings in PyTorch's syntax, as max_split_size_mb:128,garbage_collection_threshold:0.8. "
    "Default for hold: $PYTORCH_ALLOC_CONF, else $PYTORCH_CUDA_ALLOC_CONF.");
ABSL_FLAG(std::string, output, "",
          "snapshot, replay: file to write PyTorch's snapshot to, replaced when it exists; -o FILE for short.");
ABSL_FLAG(std::string, device_bytes, "", "replay, tune: size of the simulated device, as 24GiB. Default: unlimited.");
ABSL_FLAG(std::string, fraction, "", "replay, tune: memory fraction, 0 to 1.");
ABSL_FLAG(uint32_t, last, 20, "ooms: how many to show; 0: all that the daemon keeps.");
ABSL_FLAG(std::string, session, "", "ooms: only those of this session, by name or id. Default: of all.");
ABSL_FLAG(std::string, pid, "", "policy explain: a process.");
ABSL_FLAG(std::string, uid, "",
          "policy explain: a user, by name or number. Default, with --gid or --cgroup: this one.");
ABSL_FLAG(std::string, gid, "",
          "policy explain: the user's only group, by name or number. Default: those that the user has.");
ABSL_FLAG(std::string, cgroup, "", "policy explain: the user's control group, as /system.slice/x.service.");
ABSL_FLAG(bool, per_op, false, "replay: one row of figures after each operation, in the format of tests/golden.");

namespace {

using vrambroker::vramctl::Context;
using Arguments = std::vector<std::string>;

struct Command {
  const char* arguments;  // as the usage shows them
  size_t least, most;     // how many
  const char* help;
  std::function<absl::Status(const Context&, const Arguments&)> run;
};

const std::map<std::string, Command>& Commands() {
  namespace ctl = vrambroker::vramctl;
  static const auto* const commands = new std::map<std::string, Command>{
      {"status",
       {"", 0, 0, "the devices: capacity, reserved, allocated, idle, fragmentation",
        [](const Context& c, const Arguments&) { return ctl::Status(c); }}},
      {"sessions",
       {"", 0, 0, "the sessions: who holds how much of which limit",
        [](const Context& c, const Arguments&) { return ctl::Sessions(c); }}},
      {"top",
       {"[--interval SECONDS] [--sort COLUMN]", 0, 0,
        "a live view for terminals: devices and sessions with bars; h shows its keys",
        [](const Context& c, const Arguments&) { return ctl::Top(c); }}},
      {"watch",
       {"[--interval SECONDS] [--count N]", 0, 0, "devices and sessions as a line of JSON at each interval",
        [](const Context& c, const Arguments&) { return ctl::Watch(c); }}},
      {"map",
       {"[SESSION] [--device D]", 0, 1, "draw the segments of a session, or of all, with their blocks and holes",
        [](const Context& c, const Arguments& a) {
          return ctl::Map(c, a.empty() ? std::nullopt : std::optional<std::string>(a[0]));
        }}},
      {"ooms",
       {"[--last N] [--session SESSION]", 0, 0,
        "the last requests that got no memory: whose, why, the figures, what to do",
        [](const Context& c, const Arguments&) { return ctl::Ooms(c); }}},
      {"stats",
       {"[SESSION]", 0, 1, "every figure of a session, or of all together, by torch.cuda.memory_stats' names",
        [](const Context& c, const Arguments& a) {
          return ctl::Stats(c, a.empty() ? std::nullopt : std::optional<std::string>(a[0]));
        }}},
      {"summary",
       {"SESSION", 1, 1, "the table of torch.cuda.memory_summary for a session",
        [](const Context& c, const Arguments& a) { return ctl::Summary(c, a[0]); }}},
      {"limit",
       {"SESSION FRACTION|BYTES", 2, 2, "change the limit of a session: 0.5 of the capacity, or 512MiB",
        [](const Context& c, const Arguments& a) { return ctl::SetLimit(c, a[0], a[1]); }}},
      {"guarantee",
       {"SESSION FRACTION|BYTES", 2, 2, "change what is kept free for a session at all times; 0: nothing",
        [](const Context& c, const Arguments& a) { return ctl::SetGuarantee(c, a[0], a[1]); }}},
      {"priority",
       {"SESSION NUMBER", 2, 2,
        "change whose requests are served first, and who is asked for idle memory last: -1000 to 1000",
        [](const Context& c, const Arguments& a) { return ctl::SetPriority(c, a[0], a[1]); }}},
      {"quarantine",
       {"", 0, 0, "what ended processes have left and nobody can have yet: whose, how much, why",
        [](const Context& c, const Arguments&) { return ctl::ShowQuarantine(c); }}},
      {"trim",
       {"SESSION", 1, 1, "take a session's wholly free segments back",
        [](const Context& c, const Arguments& a) { return ctl::Trim(c, a[0]); }}},
      {"end",
       {"SESSION", 1, 1, "end a session; its memory comes back when its process lets go",
        [](const Context& c, const Arguments& a) { return ctl::End(c, a[0]); }}},
      {"policy",
       {"explain [--pid P | --uid U --gid G --cgroup C] [--name N]", 1, 1,
        "which rule of the policy this process, or somebody else, gets, what it gives, and why",
        [](const Context& c, const Arguments& a) { return ctl::PolicyCommand(c, a[0]); }}},
      {"reload",
       {"", 0, 0, "have the daemon read its configuration file again: all of it is applied, or nothing",
        [](const Context& c, const Arguments&) { return ctl::Reload(c); }}},
      {"record",
       {"SESSION EVENTS", 2, 2, "have a session keep its last events, up to 1000000, for snapshots; 0: none",
        [](const Context& c, const Arguments& a) { return ctl::Record(c, a[0], a[1]); }}},
      {"snapshot",
       {"SESSION -o FILE", 1, 1,
        "write what a session holds, and its last events, for pytorch.org/memory_viz (JSON when FILE ends in .json or "
        "is -)",
        [](const Context& c, const Arguments& a) { return ctl::Snapshot(c, a[0]); }}},
      {"hold",
       {"BYTES [--name N] [--limit F] [--device D] [--alloc-conf SETTINGS]", 1, 1,
        "allocate, write a pattern, and hold until interrupted",
        [](const Context& c, const Arguments& a) { return ctl::Hold(c, a[0]); }}},
      {"replay",
       {"TRACE [--conf FILE] [--alloc-conf SETTINGS] [--device-bytes N] [--fraction F] [--per-op | -o FILE]", 1, 1,
        "run a trace, or a PyTorch memory snapshot's events, through the allocator; needs no daemon",
        [](const Context& c, const Arguments& a) { return ctl::RunReplay(c, a[0]); }}},
      {"tune",
       {"TRACE [--conf FILE] [--alloc-conf SETTINGS] [--device-bytes N] [--fraction F]", 1, 1,
        "try many settings on a trace: which reserve less, which fit a smaller device; needs no daemon",
        [](const Context& c, const Arguments& a) { return ctl::RunTune(c, a[0]); }}},
  };
  return *commands;
}

std::string Usage() {
  std::string text = "looks at vrambrokerd and changes what it may.\n\n  vramctl COMMAND [ARGUMENTS] [FLAGS]\n\n";
  for (const auto& [name, command] : Commands()) {
    absl::StrAppend(&text, "  ", name, " ", command.arguments, "\n      ", command.help, "\n");
  }
  absl::StrAppend(&text,
                  "\nSESSION is a session's name, or its id. The exit code is 0 when done, 1 when refused or failed, "
                  "2 when called wrongly.");
  return text;
}

int WrongUse(const std::string& what) {
  std::fprintf(stderr, "vramctl: %s; see vramctl --help\n", what.c_str());
  return 2;
}

// What a refusal carries beyond its message, for scripts.
void PrintError(const absl::Status& status, bool json) {
  if (!json) {
    std::fprintf(stderr, "vramctl: %s: %s\n", absl::StatusCodeToString(status.code()).c_str(),
                 std::string(status.message()).c_str());
    return;
  }
  nlohmann::ordered_json error = {{"code", absl::StatusCodeToString(status.code())},
                                  {"message", std::string(status.message())}};
  const absl::optional<absl::Cord> detail = status.GetPayload("type.googleapis.com/vrambroker.v1.OutOfMemory");
  vrambroker::v1::OutOfMemory oom;
  if (detail.has_value() && oom.ParseFromString(std::string(*detail))) error["out_of_memory"] = vrambroker::ToJson(oom);
  std::fprintf(stderr, "%s\n",
               nlohmann::ordered_json({{"error", error}})
                   .dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace)
                   .c_str());
}

// absl ends the process by itself on a bad flag and on --help, with code 1 in both cases. Here they are 2 and 0.
int exit_code_of_parsing = -1;  // -1: flags are not being parsed

void ExitFromParsing() {
  if (exit_code_of_parsing < 0) return;
  std::fflush(nullptr);
  _exit(exit_code_of_parsing);
}

// The arguments as absl knows them: --per-op is --per_op, and -o FILE is --output=FILE.
std::vector<std::string> Spelled(int argc, char** argv) {
  std::vector<std::string> arguments(argv, argv + argc);
  for (size_t i = 1; i < arguments.size() && arguments[i] != "--"; ++i) {
    std::string& argument = arguments[i];
    if (argument == "-o" && i + 1 < arguments.size() && !absl::StartsWith(arguments[i + 1], "--")) {
      argument = absl::StrCat("--output=", arguments[i + 1]);
      arguments.erase(arguments.begin() + static_cast<std::ptrdiff_t>(i) + 1);
    } else if (absl::StartsWith(argument, "--")) {
      const size_t end = std::min(argument.find('='), argument.size());
      std::replace(argument.begin() + 2, argument.begin() + static_cast<std::ptrdiff_t>(end), '-', '_');
    }
  }
  return arguments;
}

// The result points into `arguments`.
std::vector<char*> ParseFlags(std::vector<std::string>& arguments) {
  std::vector<char*> argv;
  argv.reserve(arguments.size() + 1);
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  const bool asks = std::any_of(arguments.begin(), arguments.end(), [](const std::string& argument) {
    return absl::StartsWith(argument, "--help") || absl::StartsWith(argument, "--version");
  });
  std::atexit(ExitFromParsing);
  exit_code_of_parsing = asks ? 0 : 2;
  std::vector<char*> rest = absl::ParseCommandLine(static_cast<int>(arguments.size()), argv.data());
  exit_code_of_parsing = -1;
  return rest;
}

}  // namespace

int main(int argc, char** argv) {
  absl::FlagsUsageConfig usage;
  usage.contains_help_flags = [](absl::string_view file) { return absl::EndsWith(file, "vramctl/main.cc"); };
  usage.contains_helpshort_flags = usage.contains_help_flags;
  absl::SetFlagsUsageConfig(usage);
  absl::SetProgramUsageMessage(Usage());
  std::vector<std::string> spelled = Spelled(argc, argv);
  const std::vector<char*> rest = ParseFlags(spelled);
  if (rest.size() < 2) return WrongUse("no command given");
  const auto it = Commands().find(rest[1]);
  if (it == Commands().end()) return WrongUse(absl::StrCat("no command '", rest[1], "'"));
  const Arguments arguments(rest.begin() + 2, rest.end());
  const Command& command = it->second;
  if (arguments.size() < command.least || arguments.size() > command.most) {
    return WrongUse(absl::StrCat("usage: vramctl ", it->first, " ", command.arguments));
  }
  const std::string format = absl::GetFlag(FLAGS_format);
  if (format != "text" && format != "json") {
    return WrongUse(absl::StrCat("--format is text or json, not '", format, "'"));
  }

  Context context;
  context.socket_dir = absl::GetFlag(FLAGS_socket_dir);
  if (context.socket_dir.empty()) context.socket_dir = vrambroker::DefaultSocketDir();
  context.json = format == "json";
  context.name = absl::GetFlag(FLAGS_name);
  context.limit = absl::GetFlag(FLAGS_limit);
  if (const absl::optional<int32_t> device = absl::GetFlag(FLAGS_device); device.has_value()) {
    context.only_device = *device;
  }
  context.device = context.only_device.value_or(0);
  context.interval = absl::GetFlag(FLAGS_interval);
  context.count = absl::GetFlag(FLAGS_count);
  context.sort = absl::GetFlag(FLAGS_sort);
  context.output = absl::GetFlag(FLAGS_output);
  context.last = absl::GetFlag(FLAGS_last);
  context.session = absl::GetFlag(FLAGS_session);
  context.replay = {.conf = absl::GetFlag(FLAGS_conf),
                    .alloc_conf = absl::GetFlag(FLAGS_alloc_conf),
                    .device_bytes = absl::GetFlag(FLAGS_device_bytes),
                    .fraction = absl::GetFlag(FLAGS_fraction),
                    .per_op = absl::GetFlag(FLAGS_per_op)};
  context.policy = {.pid = absl::GetFlag(FLAGS_pid),
                    .uid = absl::GetFlag(FLAGS_uid),
                    .gid = absl::GetFlag(FLAGS_gid),
                    .cgroup = absl::GetFlag(FLAGS_cgroup)};
  absl::Status status;
  try {
    status = command.run(context, arguments);
  } catch (const std::bad_alloc&) {  // a trace may unpack to more than there is
    status = absl::ResourceExhaustedError("this machine has not enough memory for that");
  }
  if (status.ok() && (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)) {
    status = absl::DataLossError(absl::StrCat("the output was not written: ", std::strerror(errno)));
  }
  if (status.ok()) return 0;
  PrintError(status, context.json);
  return absl::IsInvalidArgument(status) ? 2 : 1;
}
