// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/arguments.h"

#include <algorithm>
#include <cstdio>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "allocator/base/amounts.h"
#include "allocator/base/command_line.h"
#include "allocator/base/nearest_word.h"
#include "allocator/base/utf8.h"
#include "client/vrambroker/client.h"
#include "client/vramctl/plan_arguments.h"
#include "client/vramctl/views/top_table.h"

namespace vrambroker::vramctl {
namespace {

constexpr char kShow[] = "Look";
constexpr char kChange[] = "Change";
constexpr char kTools[] = "Try out and analyze";
constexpr char kHelp[] = "Help";

// Completion offers session names for arguments of this type.
constexpr char kSession[] = "SESSION";
constexpr char kNameOrId[] = "Name or id. Write id:ID or name:NAME for a number that could be a name or an id.";

constexpr char kFooter[] =
    "SESSION is a session's name or id. A number that is the id of one session and the\n"
    "name of another session is refused: id:5 is always the id, name:5 always the name.\n"
    "\n"
    "The socket directory also comes from $VRAMBROKER_SOCKET_DIR. `vramctl help COMMAND`\n"
    "explains a command.\n"
    "\n"
    "8G and 8GiB are 2^30 bytes each, as in Slurm and Docker; 8GB is 10^9.\n"
    "\n"
    "Exit status:\n"
    "  0                     Done.\n"
    "  1                     Refused or failed.\n"
    "  2                     Wrong use.";

// Accepts numbers in the range; rejects NaN.
std::function<std::string(const std::string&)> Between(double least, double most) {
  return [least, most](const std::string& text) {
    double value = 0;
    const bool good = absl::SimpleAtod(text, &value) && value >= least && value <= most;
    return good ? std::string() : absl::StrFormat("%s is not a number from %.9g to %.0f", text, least, most);
  };
}

// Converts a duration with a unit to seconds, the unit of plain numbers.
std::string InSeconds(const std::string& text) {
  const absl::StatusOr<absl::Duration> time = ParseTime(text);
  return time.ok() ? absl::StrFormat("%.9g", absl::ToDoubleSeconds(*time)) : text;
}

// Rejects text unfit for gRPC: not UTF-8, or longer than kMostCharacters.
absl::Status CheckText(const CLI::App& app) {
  constexpr size_t kMostCharacters = 8192;
  for (const CLI::Option* option : app.get_options()) {
    const std::string type = option->get_type_name();
    if (type == "FILE" || type == "DIR") continue;
    const std::string name = option->get_positional() ? type : option->get_name();
    for (const std::string& value : option->results()) {
      if (!IsUtf8(value)) return absl::InvalidArgumentError(absl::StrCat(name, ": the text is not UTF-8"));
      // Scripts may pass "$LIMIT" without having set it.
      if (value.empty() && (type == "LIMIT" || type == "GUARANTEE" || type == "DURATION")) {
        return absl::InvalidArgumentError(absl::StrCat(name, ": it is empty"));
      }
      if (value.size() > kMostCharacters) {
        return absl::InvalidArgumentError(
            absl::StrCat(name, ": ", value.size(), " characters; at most ", kMostCharacters, " are allowed"));
      }
    }
  }
  return absl::OkStatus();
}

void AddDevice(CLI::App* command, std::optional<int>* device, const char* description) {
  command->add_option("--device", *device, description)->type_name("N");
}

std::string ColumnNames() {
  std::string names;
  for (int i = 0; i < kColumns; ++i) absl::StrAppend(&names, i == 0 ? "" : ", ", ColumnName(static_cast<Column>(i)));
  return names;
}

void AddReplayOptions(CLI::App* command, Context* context) {
  ReplayFlags& flags = context->replay;
  command->add_option("--conf", flags.conf, "File with lines alloc_conf=, device_bytes= and fraction=.")
      ->type_name("FILE");
  command
      ->add_option(
          "--alloc-conf", flags.alloc_conf,
          "Allocator settings in PyTorch's syntax, as max_split_size_mb:128. Default: the recording's settings.")
      ->type_name("SETTINGS");
  command
      ->add_option("--device-bytes", flags.device_bytes, "Size of the simulated device, as 24GiB. Default: unlimited.")
      ->type_name("BYTES");
  command->add_option("--fraction", flags.fraction, "Memory fraction, 0 to 1.")->type_name("F");
  AddDevice(command, &context->only_device, "Device whose events are read from a PyTorch snapshot. Default: 0.");
}

CLI::Option* AddTarget(CLI::App* command, Context* context) {
  return command
      ->add_option(
          "--for", context->target,
          "Program that will use the settings: vrambroker, or a release of PyTorch, as torch-2.6, which may lack some "
          "settings. Default: the PyTorch that wrote the snapshot, else vrambroker.")
      ->type_name("TARGET");
}

// Returns the command parsed by `app`, with its parents: "policy explain".
std::string ParsedCommand(const CLI::App& app) {
  std::string name;
  for (const CLI::App* command = &app; !command->get_subcommands().empty();) {
    command = command->get_subcommands().back();
    absl::StrAppend(&name, name.empty() ? "" : " ", command->get_name());
  }
  return name;
}

// Returns the innermost parsed command, where a further command could have stood.
const CLI::App& ParsedApp(const CLI::App& app) {
  const CLI::App* command = &app;
  while (!command->get_subcommands().empty()) command = command->get_subcommands().back();
  return *command;
}

// Points to the help: "; see vramctl hold --help".
std::string SeeHelp(const std::string& command) {
  return absl::StrCat("; see vramctl ", command, command.empty() ? "" : " ", "--help");
}

std::vector<const CLI::App*> AllCommands(const CLI::App& app) {
  std::vector<const CLI::App*> all;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    all.push_back(command);
    for (const CLI::App* nested : AllCommands(*command)) all.push_back(nested);
  }
  return all;
}

}  // namespace

const CLI::App* FindCommand(const CLI::App& app, const std::string& name) {
  const std::vector<const CLI::App*> found =
      app.get_subcommands([&](const CLI::App* command) { return command->get_name() == name; });
  return found.empty() ? nullptr : found.front();
}

CommandLine::CommandLine()
    : app_(MakeCommandLine("vramctl", "Shows how the processes on a GPU share its memory, and changes their shares.")) {
  app_->fallthrough();
  app_->allow_extras();  // Unexpected() has better messages
  app_->require_subcommand(0, 1);
  app_->option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app_->add_option("--socket-dir", context_.socket_dir, "Directory of the daemon's sockets. Default: /run/vrambroker.")
      ->type_name("DIR");
  app_->add_option("--format", format_, "text, or json for scripts.")
      ->type_name("FORMAT")
      ->check(CLI::IsMember({"text", "json"}));
  app_->add_option("--timeout", timeout_seconds_, "Time to wait for the daemon, as 90 or 1m30s. Default: 30.")
      ->type_name("SECONDS")
      ->transform(InSeconds)
      ->check(Between(0.01, 86400));
  app_->footer(kFooter);
  AddCommandsThatShow();
  AddCommandsThatChange();
  CLI::App* const claim = app_->add_subcommand(
      "claim", "Create, change, show and remove claims: shares of the devices for several processes together.");
  claim->group(kChange);
  AddClaimCommands(claim);
  AddRun();
  AddTools();
}

CLI::App* CommandLine::Add(const char* group, const char* name, const char* description,
                           std::function<absl::Status()> run) {
  CLI::App* const command = app_->add_subcommand(name, description);
  command->group(group);
  command->footer("");
  command->callback([this, run = std::move(run)] { run_ = run; });
  return command;
}

CLI::Option* CommandLine::AddSession(CLI::App* command, const char* description) {
  return command->add_option("SESSION", session_argument_, description)->type_name(kSession);
}

std::optional<std::string> CommandLine::GivenSession(const char* command) const {
  if (app_->get_subcommand(command)->get_option("SESSION")->count() == 0) return std::nullopt;
  return session_argument_;
}

void CommandLine::AddCommandsThatShow() {
  // Uses the terms of deploy/GLOSSARY.md.
  constexpr char kWords[] =
      "Words:\n"
      "  fragmented   free blocks beside used blocks of a session: cannot be given back\n"
      "  reclaimable  wholly free segments of a session: given back on demand\n"
      "  unknown      carried over by remote sessions: the allocated part is not known\n"
      "  cached       segments outside sessions, kept by the daemon for reuse\n"
      "  left behind  memory of ended processes: not available to anybody yet\n"
      "  free         memory that can be given out now, including cached memory\n"
      "  unreserved   capacity that is not reserved\n"
      "  FRAG         fragmented / held by sessions: the share that no trim gives back";
  Add(kShow, "status", "Show how each device's capacity is used.", [this] { return Status(context_); })->footer(kWords);
  Add(kShow, "sessions", "List the sessions, with users, commands, memory, limits and ages.",
      [this] { return Sessions(context_); })
      ->footer(
          "Columns:\n"
          "  COMMAND   the program and its script; other arguments may hold secrets\n"
          "  LAST USE  time since the session last allocated or freed memory, if known\n"
          "  FRAG      fragmented / held by the session: the share that no trim gives back\n"
          "The table leaves out columns that do not fit into the line.");

  CLI::App* const top = Add(kShow, "top",
                            "Show devices and sessions live, with bars; change a session. Press h for the keys, Enter "
                            "for a session's details, "
                            "q to quit. With -b, write devices and sessions once as text, with the same columns.",
                            [this] { return Top(context_); });
  top->footer(kWords);
  top->add_option("--interval", context_.interval, "Seconds between two updates, 0.1 to 3600. Default: 1.")
      ->type_name("SECONDS")
      ->transform(InSeconds);
  CLI::Option* const batch = top->add_flag("-b,--batch", context_.batch,
                                           "Write text without using the terminal, then exit: for pipes and files.")
                                 ->disable_flag_override();
  top->add_option("-n,--count", context_.batches, "Number of times to write with -b, once per interval. Default: 1.")
      ->type_name("N")
      ->check(Between(1, 4294967295))
      ->needs(batch);
  top->add_option("--sort", context_.sort, absl::StrCat("Column to sort by: ", ColumnNames(), ". Default: reserved."))
      ->type_name("COLUMN");

  CLI::App* const watch =
      Add(kShow, "watch", "Write devices and sessions as a line of JSON at each interval, for scripts.",
          [this] { return Watch(context_); });
  watch->add_option("--interval", context_.interval, "Seconds between two lines, 0.1 to 3600. Default: 1.")
      ->type_name("SECONDS")
      ->transform(InSeconds);
  watch->add_option("--count", context_.count, "Stop after N lines. Default: write until interrupted.")
      ->type_name("N")
      ->check(Between(0, 4294967295));

  CLI::App* const map = Add(kShow, "map", "Draw segments with their blocks and holes, the largest segments first.",
                            [this] { return Map(context_, GivenSession("map")); });
  map->footer(kWords);
  AddSession(map,
             "Draw only this session, by name or id, or a snapshot's FILE, without a daemon. Default: all sessions.");
  AddDevice(map, &context_.only_device, "Draw only this device. Default: all devices.");

  CLI::App* const ooms =
      Add(kShow, "ooms", "List the last refused requests, with sessions, causes, figures and remedies.",
          [this] { return Ooms(context_); });
  CLI::Option* const last =
      ooms->add_option("--last", context_.last,
                       "Number of requests to show; 0 shows all requests kept by the daemon. Default: 20.")
          ->type_name("N")
          ->check(Between(0, 4294967295));
  CLI::Option* const of_session =
      ooms->add_option("--session", context_.session,
                       "Show only requests of this session, by name or id. Default: all sessions.")
          ->type_name(kSession);
  CLI::Option* const which = ooms->add_option("--diagnose", context_.diagnose,
                                              "Find settings with which the refused request ID would have succeeded.")
                                 ->type_name("ID")
                                 ->check(Between(1, 9'007'199'254'740'992))
                                 ->excludes(last)
                                 ->excludes(of_session);
  AddTarget(ooms, &context_)->needs(which);

  CLI::App* const stats = Add(kShow, "stats", "Print every memory statistic, by the names of torch.cuda.memory_stats.",
                              [this] { return Stats(context_, GivenSession("stats")); });
  AddSession(stats, "Statistics of this session, by name or id. Default: the sum of all sessions.");
  AddDevice(stats, &context_.only_device, "Statistics of this device. Default: 0.");

  CLI::App* const summary = Add(kShow, "summary", "Print statistics as the table of torch.cuda.memory_summary.",
                                [this] { return Summary(context_, GivenSession("summary")); });
  AddSession(summary, "Statistics of this session, by name or id. Default: the sum of all sessions.");
  AddDevice(summary, &context_.only_device, "Statistics of this device. Default: 0.");
  summary->add_flag("--abbreviated", context_.abbreviated, "Leave out the rows of the large and the small pool.")
      ->disable_flag_override();

  Add(kShow, "quarantine", "List memory left behind by ended processes, or carried over without a session, and why.",
      [this] { return ShowQuarantine(context_); });

  CLI::App* const policy =
      app_->add_subcommand("policy", "Explain the policy: `policy explain` shows which rule applies.");
  policy->group(kShow);
  policy->footer("");
  policy->require_subcommand(0, 1);
  CLI::App* const explain = policy->add_subcommand(
      "explain",
      "Show the policy's rule for a process or user, the rule's grants, and the reasons. Default: this process.");
  explain->footer("");
  explain->callback([this] { run_ = [this] { return ExplainPolicy(context_); }; });
  explain->add_option("--pid", context_.policy.pid, "Explain for this process.")->type_name("PID");
  explain->add_option("--uid", context_.policy.uid, "Explain for this user, by name or number. Default: this user.")
      ->type_name("USER");
  explain
      ->add_option("--gid", context_.policy.gid,
                   "The user's only group, by name or number. Default: the user's groups.")
      ->type_name("GROUP");
  explain->add_option("--cgroup", context_.policy.cgroup, "The user's control group, as /system.slice/x.service.")
      ->type_name("PATH");
  explain->add_option("--name", context_.name, "A session name. Default: the command name of --pid, else none.")
      ->type_name("NAME");
}

void CommandLine::AddCommandsThatChange() {
  CLI::App* const limit = Add(kChange, "limit", "Change a session's limit.",
                              [this] { return SetLimit(context_, session_argument_, value_argument_); });
  AddSession(limit, kNameOrId)->required();
  limit
      ->add_option("LIMIT", value_argument_,
                   "0.5 or 50% of the capacity, or 512MiB. The daemon never takes away memory in use.")
      ->type_name("LIMIT")
      ->required();

  CLI::App* const guarantee = Add(kChange, "guarantee", "Change how much memory the daemon keeps free for a session.",
                                  [this] { return SetGuarantee(context_, session_argument_, value_argument_); });
  AddSession(guarantee, kNameOrId)->required();
  guarantee->add_option("GUARANTEE", value_argument_, "0.25 (a quarter of the capacity) or 8GiB; 0 keeps nothing free.")
      ->type_name("GUARANTEE")
      ->required();

  CLI::App* const priority =
      Add(kChange, "priority",
          "Change a session's priority: sessions of higher priority are served first, and asked for memory last.",
          [this] { return SetPriority(context_, session_argument_, value_argument_); });
  AddSession(priority, kNameOrId)->required();
  priority->add_option("PRIORITY", value_argument_, "-1000 to 1000; higher is more important.")
      ->type_name("PRIORITY")
      ->required();

  CLI::App* const trim = Add(kChange, "trim", "Take back the segments that a session holds and does not use.",
                             [this] { return Trim(context_, session_argument_); });
  AddSession(trim, kNameOrId)->required();

  CLI::App* const end = Add(
      kChange, "end", "End a session. The memory comes back when the session's process releases the memory or exits.",
      [this] { return End(context_, session_argument_); });
  AddSession(end, kNameOrId)->required();

  CLI::App* const release =
      Add(kChange, "release", "Give the daemon's cached memory back to the driver now, for other programs.",
          [this] { return ReleaseIdle(context_); });
  AddDevice(release, &context_.only_device, "Release memory of this device only. Default: all devices.");

  Add(kChange, "reload",
      "Make the daemon read its configuration file again. The daemon rejects a file with errors as a whole, and "
      "names changed fields that need a restart.",
      [this] { return Reload(context_); });

  CLI::App* const record = Add(kChange, "record", "Have a session record its last events, for snapshots.",
                               [this] { return Record(context_, session_argument_, value_argument_); });
  AddSession(record, kNameOrId)->required();
  record
      ->add_option("EVENTS", value_argument_,
                   "Number of events to keep on each device, up to 1000000; 0 stops recording.")
      ->type_name("EVENTS")
      ->required();
}

void CommandLine::AddRun() {
  CLI::App* const run =
      Add(kChange, "run", "Run a program that does not know the daemon, within a share of the GPU.", [this] {
        if (misplaced_program_.empty()) return Run(context_);
        return absl::InvalidArgumentError(absl::StrCat(
            "'", misplaced_program_[0], "' stands before --: vramctl run [OPTIONS] -- PROGRAM [ARGUMENTS]"));
      });
  RunFlags& flags = context_.run;
  // Declared for the help only: Parse() takes PROGRAM and its arguments.
  run->add_option("PROGRAM", misplaced_program_, "Program to run, with its arguments, after --.")
      ->type_name("-- PROGRAM [ARGUMENTS]");
  run->add_option("--limit", flags.limit,
                  "Most memory of the program's processes together on each device: 0.4 or 40% of the capacity, or "
                  "8GiB. Default: the policy's limit for you; with the right ADMIN, the whole capacity.")
      ->type_name("LIMIT");
  run->add_option(
         "--guarantee", flags.guarantee,
         "Memory of each device to keep free for the program: 0.25 or 25% of the capacity, or 8GiB. For operators.")
      ->type_name("GUARANTEE");
  run->add_option(
         "--device", flags.devices,
         "Device that the program may use, and sees (CUDA_VISIBLE_DEVICES, unless already set). Repeat the option for "
         "several devices. Default: all devices.")
      ->type_name("N")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  run->add_option("--wait", flags.wait,
                  "Longest wait of a request until other sessions give memory back, such as 10m. Default: requests do "
                  "not wait.")
      ->type_name("DURATION");
  run->add_option("--claim", flags.claim,
                  "Run the program in this existing claim; the claim is kept afterwards. --limit then binds each "
                  "process. Default: a new claim, which ends with the program.")
      ->type_name("NAME");
  run->add_flag(
         "--per-process", flags.per_process,
         "Make no claim: --limit and --device apply to each process separately. For users without the right to make "
         "claims.")
      ->disable_flag_override();
  run->add_option("--name", flags.name, "Name of the program's sessions. Default: the command name of each process.")
      ->type_name("NAME");
  run->add_option(
         "--managed", flags.managed,
         "count: managed memory (cudaMallocManaged) counts like other memory; refuse: managed memory is refused. "
         "Default: count.")
      ->type_name("POLICY")
      ->check(CLI::IsMember({"count", "refuse"}));
  run->add_flag("--report", flags.report,
                "At the end, write to standard error: the peak of the memory, and counts of waits and refusals.")
      ->disable_flag_override();
  run->add_flag("--if-available", flags.if_available,
                "Run the program even without a daemon; then no limit bounds its memory.")
      ->disable_flag_override();
  run->footer(
      "A preloaded library counts the program's allocations. The library is a seat\n"
      "belt, not a fence: see UNMODIFIED.md.\n"
      "\n"
      "Exit status:\n"
      "  The program's own status; a signal that ends the program ends vramctl, too.\n"
      "  2                     Wrong use.\n"
      "  125                   Refused or failed; the program was not run.\n"
      "  126                   The program cannot be executed.\n"
      "  127                   The program was not found.\n"
      "\n"
      "Examples:\n  $ vramctl run --limit 0.4 --wait 10m -- python serve.py --port 8000");
}

void CommandLine::AddTools() {
  CLI::App* const hold = Add(kTools, "hold", "Allocate memory, write a pattern to it, and hold it until interrupted.",
                             [this] { return Hold(context_, value_argument_); });
  hold->add_option("BYTES", value_argument_, "Amount of memory, as 512MiB.")->type_name("BYTES")->required();
  hold->add_option("--name", context_.name, "Name of the session. Default: $VRAMBROKER_NAME, else vramctl.")
      ->type_name("NAME");
  hold->add_option("--limit", context_.limit,
                   "Limit to ask for: 0.5 or 50% of the capacity, or 512MiB. Default: $VRAMBROKER_LIMIT.")
      ->type_name("LIMIT");
  AddDevice(hold, &context_.only_device, "Device to allocate on. Default: 0.");
  hold->add_option(
          "--alloc-conf", context_.replay.alloc_conf,
          "Allocator settings in PyTorch's syntax, as max_split_size_mb:128. Default: $PYTORCH_CUDA_ALLOC_CONF, else "
          "$PYTORCH_HIP_ALLOC_CONF, else $PYTORCH_ALLOC_CONF.")
      ->type_name("SETTINGS");
  hold->footer("Examples:\n  $ vramctl hold 1GiB --limit 0.5 --name trainer");

  CLI::App* const snapshot =
      Add(kTools, "snapshot", "Write a session's segments, blocks and last events, for pytorch.org/memory_viz.",
          [this] { return Snapshot(context_, session_argument_); });
  AddSession(snapshot, kNameOrId);
  snapshot
      ->add_option("-o,--output", context_.output,
                   "File to write: a pickle, or JSON if the name ends in .json; - prints JSON.")
      ->type_name("FILE");
  snapshot
      ->add_option("--diff", context_.diff, "Show the growth from one snapshot to another snapshot, without a daemon.")
      ->type_name("FILE")
      ->expected(2);

  CLI::App* const trace =
      Add(kTools, "trace", "Record a session for a while, and write the session's events, for `replay`.",
          [this] { return RunTrace(context_, session_argument_); });
  AddSession(trace, kNameOrId)->required();
  trace
      ->add_option(
          "-o,--output", context_.output,
          "File to write: a pickle, or JSON if the name ends in .json; - prints JSON. `replay` reads only the pickle.")
      ->type_name("FILE")
      ->required();
  CLI::Option* const seconds =
      trace
          ->add_option("--seconds", context_.trace.seconds,
                       "Duration of the recording, 0.1 to 86400. Default: 10. Ctrl-C ends the recording early.")
          ->type_name("SECONDS")
          ->transform(InSeconds)
          ->check(Between(0.1, 86400));
  trace
      ->add_flag("--until-oom", context_.trace.until_oom,
                 "Record until the daemon refuses a request of the session, without a time limit.")
      ->disable_flag_override()
      ->excludes(seconds);
  trace->footer("Examples:\n  $ vramctl trace trainer -o trainer.pickle --until-oom\n  $ vramctl tune trainer.pickle");

  CLI::App* const replay = Add(kTools, "replay", "Run the events of a trace or PyTorch snapshot through the allocator.",
                               [this] { return RunReplay(context_, value_argument_); });
  replay
      ->add_option("FILE", value_argument_,
                   "A trace, or a pickled snapshot of vramctl or PyTorch; - is standard input.")
      ->type_name("FILE")
      ->required();
  AddReplayOptions(replay, &context_);
  CLI::Option* const per_op =
      replay->add_flag("--per-op", context_.replay.per_op, "Print one row of figures after each operation.")
          ->disable_flag_override();
  replay->add_option("-o,--output", context_.output, "Write the final state to FILE, as `snapshot` does.")
      ->type_name("FILE")
      ->excludes(per_op);
  replay->footer(
      "Examples:\n  $ vramctl replay trainer.pickle --alloc-conf max_split_size_mb:128 --device-bytes 24GiB");

  CLI::App* const tune =
      Add(kTools, "tune",
          "Try many allocator settings on a trace, to find settings that reserve less or fit a smaller device.",
          [this] { return RunTune(context_, value_argument_); });
  tune->add_option("FILE", value_argument_,
                   "A trace, or a pickled snapshot of vramctl or PyTorch; - is standard input.")
      ->type_name("FILE")
      ->required();
  AddReplayOptions(tune, &context_);
  AddTarget(tune, &context_);

  CLI::App* const diagnose =
      Add(kTools, "diagnose", "Find settings with which a session's last refused request would have succeeded.",
          [this] { return DiagnoseSession(context_, session_argument_); });
  AddSession(diagnose,
             "Name or id, or id:ID or name:NAME; the session may have ended. Without a refused request, shows settings "
             "that would have needed less memory. Or a snapshot's FILE, without a daemon.")
      ->required();
  AddTarget(diagnose, &context_);
  AddDevice(diagnose, &context_.only_device,
            "Use refusals, or else the recording, of this device. Default: refusals on any device, the recording of "
            "device 0.");
  diagnose->footer("Examples:\n  $ vramctl diagnose trainer --for torch-2.6");

  AddPlan(*app_, kTools, context_, [this](std::function<absl::Status()> run) { run_ = std::move(run); });

  CLI::App* const help = Add(kHelp, "help", "Explain a command.", [this] {
    const CLI::App* command = app_.get();
    for (const std::string& name : words_) {
      const CLI::App* const next = FindCommand(*command, name);
      if (next == nullptr)
        return absl::InvalidArgumentError(
            absl::StrCat("no command '", name, "'", DidYouMean(name, CommandNames(*command), "; see vramctl --help")));
      command = next;
    }
    // command->help() would print the help of the given command instead.
    std::fputs(command->get_formatter()->make_help(command, "", help_mode_).c_str(), stdout);
    return absl::OkStatus();
  });
  help->add_option("COMMAND", words_, "Name of the command. Default: show all commands.")->type_name("COMMAND");
  help->add_flag_callback(
          "--all", [this] { help_mode_ = CLI::AppFormatMode::All; }, "Explain every command.")
      ->disable_flag_override();
  Add(kHelp, "version", "Print the version.", [] {
    std::puts(VersionText("vramctl").c_str());
    return absl::OkStatus();
  });
}

absl::Status CommandLine::Unexpected() const {
  std::vector<std::string> extras = app_->remaining(/*recurse=*/true);
  extras.erase(std::remove(extras.begin(), extras.end(), "--"), extras.end());
  const std::string command = ParsedCommand(*app_);
  const std::string see = SeeHelp(command);
  if (extras.empty()) return absl::OkStatus();
  const std::string& extra = extras.front();
  if (!absl::StartsWith(extra, "-")) {
    return absl::InvalidArgumentError(run_ ? absl::StrCat("unexpected argument '", extra, "'", see)
                                           : absl::StrCat(command, command.empty() ? "" : ": ", "no command '", extra,
                                                          "'", DidYouMean(extra, CommandNames(ParsedApp(*app_)), see)));
  }
  const std::string option = extra.substr(0, extra.find('='));
  std::vector<std::string> takers;
  bool comes_too_early = command.empty();
  for (const CLI::App* other : AllCommands(*app_)) {
    if (other->get_option_no_throw(option) == nullptr) continue;
    const bool is_nested = other->get_parent() != app_.get();
    takers.push_back(absl::StrCat(is_nested ? other->get_parent()->get_name() + " " : "", other->get_name()));
    comes_too_early = comes_too_early || other->parsed();
  }
  if (takers.empty()) return absl::InvalidArgumentError(UnknownOption(*app_, option, see));
  if (comes_too_early) return absl::InvalidArgumentError(absl::StrCat(option, " must follow its command", see));
  return absl::InvalidArgumentError(absl::StrCat(command, " takes no ", option, " (", absl::StrJoin(takers, ", "), " ",
                                                 takers.size() == 1 ? "does)" : "do)", see));
}

int CommandLine::TakeProgram(int argc, char** argv) {
  int i = 1;
  // Options of every command may precede "run".
  for (; i < argc && absl::StartsWith(argv[i], "-"); ++i) {
    const std::string name = absl::StrReplaceAll(argv[i], {{"_", "-"}});
    const CLI::Option* const option = app_->get_option_no_throw(name);
    if (option != nullptr && option->get_items_expected_max() > 0) ++i;
  }
  if (i >= argc || std::string(argv[i]) != "run") return argc;
  const auto end = std::find(argv + i, argv + argc, std::string("--"));
  if (end != argv + argc) context_.run.program.assign(end + 1, argv + argc);
  return static_cast<int>(end - argv);
}

absl::StatusOr<std::function<absl::Status()>> CommandLine::Parse(int argc, char** argv) {
  argc = TakeProgram(argc, argv);
  // Detect --format=json first: errors in the remaining arguments are reported in the chosen format.
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    context_.json = context_.json || argument == "--format=json" ||
                    (argument == "--format" && i + 1 < argc && std::string(argv[i + 1]) == "json");
  }
  try {
    ParseCommandLine(*app_, argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::fputs(app_->help().c_str(), stdout);
    return [] { return absl::OkStatus(); };
  } catch (const CLI::CallForVersion&) {
    std::puts(VersionText("vramctl").c_str());
    return [] { return absl::OkStatus(); };
  } catch (const CLI::ParseError& error) {
    // An unknown argument may explain why a required argument is missing.
    if (absl::Status unexpected = Unexpected(); !unexpected.ok() && error.get_name() == "RequiredError")
      return unexpected;
    return absl::InvalidArgumentError(absl::StrCat(TextOf(error), SeeHelp(ParsedCommand(*app_))));
  }
  if (absl::Status unexpected = Unexpected(); !unexpected.ok()) return unexpected;
  absl::Status text = CheckText(*app_);
  for (const CLI::App* command : AllCommands(*app_)) text.Update(CheckText(*command));
  if (!text.ok()) return text;
  if (!run_) {
    const std::string command = ParsedCommand(*app_);
    return absl::InvalidArgumentError(
        absl::StrCat(command, command.empty() ? "" : ": ", "no command given", SeeHelp(command)));
  }
  if (context_.socket_dir.empty()) context_.socket_dir = DefaultSocketDir();
  context_.json = format_ == "json";
  context_.device = context_.only_device.value_or(0);
  if (timeout_seconds_ > 0) context_.timeout = absl::Seconds(timeout_seconds_);
  return run_;
}

}  // namespace vrambroker::vramctl
