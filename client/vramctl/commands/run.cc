// SPDX-License-Identifier: Apache-2.0
//
// vramctl run: runs a program unaware of the daemon, with a claim for its processes and the preload library to count
// their memory.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "allocator/base/names.h"
#include "allocator/wire/admin_json.h"
#include "client/vramctl/commands/commands.h"
#include "client/vramctl/daemon/daemon_calls.h"
#include "client/vramctl/options/exit_code.h"
#include "client/vramctl/run/child_program.h"
#include "client/vramctl/run/preload_library.h"
#include "client/vramctl/run/program_file.h"
#include "client/vramctl/views/claim_terms.h"
#include "client/vramctl/views/run_report.h"

namespace vrambroker::vramctl {
namespace {

// Exit codes as in env, nohup and timeout.
constexpr int kFailed = 125;
constexpr int kNotExecutable = 126;
constexpr int kNotFound = 127;

// Timeout for removing the claim at the end. If no answer comes, the daemon removes the claim by itself.
constexpr absl::Duration kEndTimeout = absl::Seconds(5);

// The program's environment.
class Variables {
 public:
  Variables() {
    for (char** variable = environ; *variable != nullptr; ++variable) all_.emplace_back(*variable);
  }

  void Remove(const std::string& name) {
    std::erase_if(all_, [&](const std::string& variable) { return absl::StartsWith(variable, name + "="); });
  }
  void Set(const std::string& name, const std::string& value) {
    Remove(name);
    all_.push_back(absl::StrCat(name, "=", value));
  }

  const std::vector<std::string>& all() const { return all_; }

 private:
  std::vector<std::string> all_;
};

absl::Status CheckFlags(const RunFlags& flags) {
  const auto wrong = [](const char* flag, absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat(flag, ": ", why));
  };
  if (flags.program.empty()) {
    return absl::InvalidArgumentError("no program given: vramctl run [OPTIONS] -- PROGRAM [ARGUMENTS]");
  }
  if (flags.per_process && !flags.claim.empty()) return wrong("--per-process", "cannot be combined with --claim");
  if (!flags.claim.empty() && !flags.guarantee.empty()) {
    return wrong("--guarantee", "cannot be combined with --claim, which has its own (vramctl claim set)");
  }
  if (!flags.claim.empty() && !flags.devices.empty()) {
    return wrong("--device", "cannot be combined with --claim, which has its own");
  }
  if (flags.per_process && flags.report) return wrong("--report", "needs a claim: not with --per-process");
  if (flags.per_process && !flags.guarantee.empty()) {
    return wrong("--guarantee", "needs a claim: not with --per-process");
  }
  v1::ClaimTerms terms;
  absl::Status status = SetLimitOf("--limit", flags.limit, [&] { return terms.mutable_limit(); });
  if (status.ok()) status = SetLimitOf("--guarantee", flags.guarantee, [&] { return terms.mutable_guarantee(); });
  if (status.ok()) status = SetDevices(flags.devices, &terms);
  if (status.ok() && !flags.wait.empty()) status = ParseWait("--wait", flags.wait).status();
  return status;
}

// Creates an ephemeral claim, removed when this process ends.
absl::StatusOr<v1::Claim> MakeClaim(Daemon& daemon, const RunFlags& flags) {
  v1::CreateClaimRequest request;
  request.set_ephemeral(true);
  v1::ClaimTerms* const terms = request.mutable_terms();
  absl::Status status = SetLimitOf("--limit", flags.limit, [&] { return terms->mutable_limit(); });
  if (status.ok()) status = SetLimitOf("--guarantee", flags.guarantee, [&] { return terms->mutable_guarantee(); });
  if (status.ok()) status = SetDevices(flags.devices, terms);
  if (!status.ok()) return status;
  v1::CreateClaimResponse response;
  status = Call(daemon, &v1::Admin::Stub::CreateClaim, request, &response);
  if (absl::IsPermissionDenied(status)) {
    return absl::PermissionDeniedError(absl::StrCat(
        status.message(), "; --per-process makes no claim, and bounds each process of the program by itself"));
  }
  if (!status.ok()) return status;
  return std::move(*response.mutable_claim());
}

absl::StatusOr<v1::Claim> JoinClaim(Daemon& daemon, const std::string& name) {
  absl::StatusOr<v1::Claim> claim = ReadClaim(daemon, name);
  if (!claim.ok() || !claim->socket_dir().empty()) return claim;
  return absl::FailedPreconditionError(absl::StrCat("--claim: '", name, "' has no sockets: the policy's rule ",
                                                    claim->rule(),
                                                    " puts sessions into it; --per-process does without"));
}

// Returns an absolute path, since programs may change their directory.
std::string SocketDirOf(const Context& context) {
  std::error_code error;
  const std::filesystem::path absolute = std::filesystem::absolute(context.socket_dir, error);
  return error ? context.socket_dir : absolute.string();
}

// Returns the directory where this process, and so the program, reaches the claim's sockets: in a container, the path
// of the daemon's directory may differ.
absl::StatusOr<std::string> SocketDirOfClaim(const Context& context, const v1::Claim& claim) {
  for (const std::string& dir : {absl::StrCat(SocketDirOf(context), "/claims/", claim.name()), claim.socket_dir()}) {
    if (access(absl::StrCat(dir, "/vram-count.sock").c_str(), W_OK) == 0) return dir;
    if (errno == EACCES) {
      return absl::PermissionDeniedError(absl::StrCat("the claim '", claim.name(),
                                                      "' is not for this user, who cannot reach ", dir,
                                                      ": see vramctl claim create --owner"));
    }
  }
  return claim.socket_dir();
}

// Formats the limit for the library, as VRAMBROKER_LIMIT: a fraction has a point, and bytes have a unit.
std::string LimitVariable(const std::string& text) {
  v1::Limit limit;
  if (!SetLimitOf("--limit", text, [&] { return &limit; }).ok()) return text;
  if (limit.has_bytes()) return absl::StrCat(limit.bytes(), "B");
  std::string fraction = absl::StrFormat("%.15f", limit.fraction());
  fraction.erase(std::max(fraction.find_last_not_of('0') + 1, fraction.find('.') + 2));
  return fraction;
}

bool IsGpu(const v1::Device& device) {
  return device.kind() == v1::DEVICE_KIND_CUDA;
}

// Returns the UUIDs of the GPUs in the terms, since a program would otherwise use the first GPU of the machine. Empty
// if the terms have every device, or no GPU.
std::string VisibleDevices(const v1::GetDevicesResponse& all, const v1::ClaimTerms& terms) {
  const std::set<uint32_t> named(terms.devices().begin(), terms.devices().end());
  if (named.empty() || named.size() == static_cast<size_t>(all.devices_size())) return "";
  std::vector<std::string> uuids;
  for (const uint32_t ordinal : named) {
    for (const v1::Device& device : all.devices()) {
      if (device.ordinal() == ordinal && IsGpu(device)) uuids.push_back(device.uuid());
    }
  }
  return absl::StrJoin(uuids, ",");
}

// Environment of the program's processes.
struct Surroundings {
  bool has_daemon = false;
  std::string run_id;  // id of the daemon's run
  v1::Claim claim;     // no name: no claim
  std::string socket_dir;
  std::string visible_devices;
};

absl::StatusOr<Surroundings> SurroundingsFor(const Context& context) {
  const RunFlags& flags = context.run;
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context);
  if (!daemon.ok()) {
    if (!absl::IsUnavailable(daemon.status())) return daemon.status();
    if (flags.if_available) {
      std::fprintf(stderr, "vramctl: %s; the program runs without it, and nothing bounds or counts its memory\n",
                   std::string(daemon.status().message()).c_str());
      return Surroundings{.socket_dir = SocketDirOf(context)};
    }
    return absl::UnavailableError(
        absl::StrCat(daemon.status().message(), "; --if-available runs the program without it"));
  }
  v1::GetDevicesResponse all;
  absl::Status status = Call(*daemon, &v1::Broker::Stub::GetDevices, v1::GetDevicesRequest(), &all);
  if (!status.ok()) return status;
  if (std::none_of(all.devices().begin(), all.devices().end(), IsGpu)) {
    std::fprintf(
        stderr,
        "vramctl: the daemon serves no GPU: of what the program allocates, only what it asks the daemon for is "
        "counted\n");
  }
  if (flags.per_process) {
    v1::ClaimTerms terms;
    status = SetDevices(flags.devices, &terms);
    if (!status.ok()) return status;
    return Surroundings{
        .has_daemon = true, .socket_dir = SocketDirOf(context), .visible_devices = VisibleDevices(all, terms)};
  }
  absl::StatusOr<v1::Claim> claim = flags.claim.empty() ? MakeClaim(*daemon, flags) : JoinClaim(*daemon, flags.claim);
  if (absl::IsUnavailable(claim.status())) {  // the message is gRPC's own
    return absl::UnavailableError(
        absl::StrCat("the daemon has given no claim (", claim.status().message(), "); try again"));
  }
  if (!claim.ok()) return claim.status();
  std::string visible = VisibleDevices(all, claim->terms());
  absl::StatusOr<std::string> socket_dir = SocketDirOfClaim(context, *claim);
  if (!socket_dir.ok()) return socket_dir.status();
  return Surroundings{.has_daemon = true,
                      .run_id = all.run_id(),
                      .claim = *std::move(claim),
                      .socket_dir = *std::move(socket_dir),
                      .visible_devices = std::move(visible)};
}

void Report(const Context& context, const v1::Claim& claim, int exit_code) {
  if (context.json) {
    std::fprintf(stderr, "%s\n", JsonText(RunReportJson(claim, exit_code)).c_str());
    return;
  }
  for (const std::string& line : RunReportLines(claim)) std::fprintf(stderr, "vramctl: %s\n", line.c_str());
}

// Returns the current claim with its counts since `before`, read before the program ran. A daemon started meanwhile
// counts from 0.
absl::StatusOr<v1::Claim> ClaimAfter(Daemon& daemon, const Surroundings& before) {
  v1::GetDevicesResponse now;
  absl::Status status = Call(daemon, &v1::Broker::Stub::GetDevices, v1::GetDevicesRequest(), &now);
  if (!status.ok()) return status;
  absl::StatusOr<v1::Claim> after = ReadClaim(daemon, before.claim.name());
  if (!after.ok() || now.run_id() != before.run_id) return after;
  return ClaimSince(before.claim, *std::move(after));
}

// Removes a claim made for the program. The daemon keeps the claim until background processes end.
void EndClaim(const Context& context, const Surroundings& before, int exit_code) {
  const bool is_made = context.run.claim.empty();
  if (!is_made && !context.run.report) return;
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context, std::min(context.timeout, kEndTimeout));
  if (context.run.report) {
    const absl::StatusOr<v1::Claim> claim =
        daemon.ok() ? ClaimAfter(*daemon, before) : absl::StatusOr<v1::Claim>(daemon.status());
    if (claim.ok()) {
      Report(context, *claim, exit_code);
    } else {
      std::fprintf(stderr, "vramctl: no report: %s\n", std::string(claim.status().message()).c_str());
    }
  }
  if (!is_made || !daemon.ok()) return;  // the daemon removes the claim when this process has ended
  v1::DeleteClaimRequest request;
  request.set_name(before.claim.name());
  v1::DeleteClaimResponse response;
  (void)Call(*daemon, &v1::Admin::Stub::DeleteClaim, request, &response);
}

absl::Status RunProgram(const Context& context) {
  const RunFlags& flags = context.run;
  const absl::StatusOr<std::string> path = FindProgram(flags.program.front());
  if (!path.ok()) return WithExitCode(path.status(), absl::IsNotFound(path.status()) ? kNotFound : kNotExecutable);
  const absl::StatusOr<std::string> library = FindPreloadLibrary();
  if (!library.ok()) return library.status();
  if (const std::string why = WhyNoPreload(*path); !why.empty()) {
    std::fprintf(stderr, "vramctl: %s %s: the library cannot be loaded into it, so its memory is not counted\n",
                 path->c_str(), why.c_str());
  }
  const absl::StatusOr<Surroundings> surroundings = SurroundingsFor(context);
  if (!surroundings.ok()) return surroundings.status();
  const v1::Claim& claim = surroundings->claim;
  const bool is_made = !claim.name().empty() && flags.claim.empty();

  Variables variables;
  variables.Set("VRAMBROKER_SOCKET_DIR", surroundings->socket_dir);
  if (!flags.limit.empty() && is_made) {
    variables.Remove("VRAMBROKER_LIMIT");  // the claim has the limit
  } else if (!flags.limit.empty()) {
    variables.Set("VRAMBROKER_LIMIT", LimitVariable(flags.limit));
  }
  if (!flags.devices.empty() && is_made) {
    variables.Remove("VRAMBROKER_DEVICES");  // the claim has the devices
  } else if (!flags.devices.empty()) {
    variables.Set("VRAMBROKER_DEVICES", absl::StrJoin(flags.devices, ","));
  }
  if (const char* const guarantee = std::getenv("VRAMBROKER_GUARANTEE");
      !claim.name().empty() && guarantee != nullptr) {
    // Sessions of a claim have no guarantee of their own.
    if (*guarantee != '\0' && flags.guarantee.empty()) {
      std::fprintf(stderr, "vramctl: VRAMBROKER_GUARANTEE does not count in a claim, which may have one (%s)\n",
                   is_made ? "--guarantee" : "vramctl claim set --guarantee");
    }
    variables.Remove("VRAMBROKER_GUARANTEE");
  }
  if (!flags.wait.empty()) {
    variables.Set("VRAMBROKER_WAIT", absl::StrCat(ParseWait("--wait", flags.wait).value(), "ms"));
  }
  if (!flags.name.empty()) {
    const CleanedName name = CleanName(flags.name);
    if (!name.note.empty()) std::fprintf(stderr, "vramctl: %s\n", name.note.c_str());
    variables.Set("VRAMBROKER_NAME", name.name);
  }
  if (!flags.managed.empty()) variables.Set("VRAMBROKER_MANAGED", flags.managed);
  // With a daemon, the limits are enforced: a program in a claim waits while the daemon restarts.
  if (flags.if_available && !surroundings->has_daemon) variables.Set("VRAMBROKER_IF_AVAILABLE", "1");
  if (!surroundings->visible_devices.empty() && std::getenv("CUDA_VISIBLE_DEVICES") == nullptr) {
    variables.Set("CUDA_VISIBLE_DEVICES", surroundings->visible_devices);
  }
  const char* const preloaded = std::getenv("LD_PRELOAD");
  variables.Set("LD_PRELOAD", LdPreloadWith(*library, preloaded == nullptr ? "" : preloaded));

  const absl::StatusOr<ProgramEnd> end = RunChildProgram(*path, flags.program, variables.all());
  if (!claim.name().empty()) {
    EndClaim(context, *surroundings, end.ok() ? end->exit_code : kNotExecutable);
  } else if (flags.report) {
    std::fprintf(stderr, "vramctl: no report: the program ran without the daemon\n");
  }
  if (absl::IsFailedPrecondition(end.status())) return WithExitCode(end.status(), kNotExecutable);
  if (!end.ok()) return end.status();
  if (end->signal != 0) EndBySignal(end->signal);
  return end->exit_code == 0 ? absl::OkStatus() : WithExitCode(absl::CancelledError(), end->exit_code);
}

}  // namespace

absl::Status Run(const Context& context) {
  if (absl::Status status = CheckFlags(context.run); !status.ok()) return status;
  absl::Status status = RunProgram(context);
  if (status.ok() || ExitCodeOf(status).has_value()) return status;
  return WithExitCode(std::move(status), kFailed);
}

}  // namespace vrambroker::vramctl
