// SPDX-License-Identifier: Apache-2.0
//
// vramctl limit, guarantee, priority, trim, end, release.
#include <cstdio>

#include "allocator/base/bytes.h"
#include "allocator/wire/session_ref.h"
#include "client/vramctl/commands/commands.h"
#include "client/vramctl/daemon/change_session.h"
#include "client/vramctl/views/output.h"

namespace vrambroker::vramctl {
namespace {

// Runs a command: makes the change and prints the result.
absl::Status Run(const Context& context, const std::string& session, const SessionChange& change) {
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context);
  if (!daemon.ok()) return daemon.status();
  const absl::StatusOr<ChangeResult> result = ChangeSession(*daemon, ParseSessionRef(session), change);
  if (!result.ok()) return result.status();
  if (!result->warning.empty()) std::fprintf(stderr, "vramctl: %s\n", result->warning.c_str());
  if (context.json) {
    Print(result->json);
    return absl::OkStatus();
  }
  const std::string& name = result->name.empty() ? session : result->name;
  for (const std::string& line : result->lines) std::printf("%s: %s\n", name.c_str(), line.c_str());
  return absl::OkStatus();
}

}  // namespace

absl::Status SetLimit(const Context& context, const std::string& session, const std::string& limit) {
  const absl::StatusOr<Limit> parsed = ParseLimit(limit);
  if (!parsed.ok()) return parsed.status();
  return Run(context, session, LimitChange{*parsed});
}

absl::Status SetGuarantee(const Context& context, const std::string& session, const std::string& guarantee) {
  const absl::StatusOr<Limit> parsed = ParseLimit(guarantee);
  if (!parsed.ok()) return parsed.status();
  return Run(context, session, GuaranteeChange{*parsed});
}

absl::Status SetPriority(const Context& context, const std::string& session, const std::string& priority) {
  const absl::StatusOr<int32_t> parsed = ParsePriority(priority);
  if (!parsed.ok()) return parsed.status();
  return Run(context, session, PriorityChange{*parsed});
}

absl::Status Trim(const Context& context, const std::string& session) {
  return Run(context, session, TrimChange{});
}

absl::Status End(const Context& context, const std::string& session) {
  return Run(context, session, EndChange{});
}

absl::Status ReleaseIdle(const Context& context) {
  v1::ReleaseIdleRequest request;
  if (context.only_device.has_value()) {
    if (*context.only_device < 0) return absl::InvalidArgumentError("--device: must be 0 or more");
    request.set_device(static_cast<uint32_t>(*context.only_device));
  }
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context);
  if (!daemon.ok()) return daemon.status();
  v1::ReleaseIdleResponse response;
  if (absl::Status status = Call(*daemon, &v1::Admin::Stub::ReleaseIdle, request, &response); !status.ok()) {
    return status;
  }
  if (context.json) {
    Print({{"released_bytes", response.released_bytes()}, {"refused_bytes", response.refused_bytes()}});
    return absl::OkStatus();
  }
  std::printf("%s went back to the driver\n", FormatBytes(response.released_bytes()).c_str());
  if (response.refused_bytes() > 0) {
    std::printf("it refuses to take %s; the daemon tries again, and its log says why\n",
                FormatBytes(response.refused_bytes()).c_str());
  }
  return absl::OkStatus();
}

}  // namespace vrambroker::vramctl
