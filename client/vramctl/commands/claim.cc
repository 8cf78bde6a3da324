// SPDX-License-Identifier: Apache-2.0
//
// vramctl claim create, set, ls, show, cdi, rm.
#include <chrono>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "allocator/wire/admin_json.h"
#include "client/vrambroker/client.h"
#include "client/vramctl/commands/claim_cdi_file.h"
#include "client/vramctl/commands/commands.h"
#include "client/vramctl/commands/output_columns.h"
#include "client/vramctl/commands/snapshot_file.h"
#include "client/vramctl/daemon/daemon_calls.h"
#include "client/vramctl/options/refusal.h"
#include "client/vramctl/options/users.h"
#include "client/vramctl/run/preload_library.h"
#include "client/vramctl/views/claim_cdi.h"
#include "client/vramctl/views/claim_output.h"
#include "client/vramctl/views/claim_terms.h"
#include "client/vramctl/views/output.h"
#include "client/vramctl/views/sessions_table.h"

namespace vrambroker::vramctl {
namespace {

using Json = nlohmann::ordered_json;

absl::Status SetOwner(const std::string& text, v1::ClaimTerms* terms) {
  if (text == "any") {
    terms->set_any_owner(true);
    return absl::OkStatus();
  }
  const std::pair<std::string, std::string> parts = absl::StrSplit(text, absl::MaxSplits(':', 1));
  const bool has_group = absl::StrContains(text, ':');
  if (parts.first.empty() || (has_group && parts.second.empty())) {
    return absl::InvalidArgumentError(
        absl::StrCat("--owner: '", text, "' is not USER, USER:GROUP or any, with names or numbers"));
  }
  if (parts.first == "any") return absl::InvalidArgumentError("--owner: any takes no group");
  const absl::StatusOr<uint32_t> uid = ParseUser("--owner", parts.first);
  if (!uid.ok()) return uid.status();
  terms->set_owner_uid(*uid);
  if (!has_group) return absl::OkStatus();
  const absl::StatusOr<uint32_t> gid = ParseGroup("--owner", parts.second);
  if (!gid.ok()) return gid.status();
  terms->set_owner_gid(*gid);
  return absl::OkStatus();
}

template <typename Labels>
absl::Status SetLabels(const std::vector<std::string>& texts, Labels& labels) {
  for (const std::string& text : texts) {
    const std::pair<std::string, std::string> parts = absl::StrSplit(text, absl::MaxSplits('=', 1));
    if (!absl::StrContains(text, '=') || parts.first.empty()) {
      return absl::InvalidArgumentError(absl::StrCat("--label: '", text, "' is not KEY=VALUE"));
    }
    if (labels.contains(parts.first)) {
      return absl::InvalidArgumentError(absl::StrCat("--label: '", parts.first, "' is given twice"));
    }
    labels[parts.first] = parts.second;
  }
  return absl::OkStatus();
}

// Prints "created: limit 8.00 GiB on device 0, reserved 0 B", and the directory of the sockets.
void PrintClaim(const Context& context, const v1::Claim& claim, const char* what) {
  if (context.json) return Print(ToJson(claim));
  std::printf("%s: %s\n", claim.name().c_str(), what);
  for (const std::string& line : ClaimLines(claim)) std::printf("%s: %s\n", claim.name().c_str(), line.c_str());
}

}  // namespace

absl::Status CreateClaim(const Context& context) {
  const ClaimFlags& flags = context.claim;
  v1::CreateClaimRequest request;
  request.set_name(flags.name);
  v1::ClaimTerms* const terms = request.mutable_terms();
  absl::Status status = SetLimitOf("--limit", flags.limit, [&] { return terms->mutable_limit(); });
  if (status.ok()) status = SetLimitOf("--guarantee", flags.guarantee, [&] { return terms->mutable_guarantee(); });
  if (status.ok() && flags.owner.has_value()) status = SetOwner(*flags.owner, terms);
  if (status.ok()) status = SetLabels(flags.labels, *terms->mutable_labels());
  if (!status.ok()) return status;
  terms->set_priority(flags.priority.value_or(0));
  terms->set_tenant(flags.tenant);
  if (!flags.max_wait.empty()) {
    const absl::StatusOr<uint32_t> wait = ParseWait("--max-wait", flags.max_wait);
    if (!wait.ok()) return wait.status();
    terms->set_max_wait_ms(*wait);
  }
  if (status = SetDevices(flags.devices, terms); !status.ok()) return status;
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context);
  if (!daemon.ok()) return daemon.status();
  v1::CreateClaimResponse response;
  status = Call(*daemon, &v1::Admin::Stub::CreateClaim, request, &response);
  if (!status.ok()) return status;
  PrintClaim(context, response.claim(), "created");
  if (!context.json) {
    std::printf("its clients need VRAMBROKER_SOCKET_DIR=%s\n", response.claim().socket_dir().c_str());
  }
  return absl::OkStatus();
}

absl::Status ChangeClaim(const Context& context) {
  const ClaimFlags& flags = context.claim;
  if (flags.no_labels && !flags.labels.empty()) {
    return absl::InvalidArgumentError("--no-labels: cannot be combined with --label, which replaces all labels");
  }
  v1::UpdateClaimRequest request;
  request.set_name(flags.name);
  absl::Status status = SetLimitOf("--limit", flags.limit, [&] { return request.mutable_limit(); });
  if (status.ok()) status = SetLimitOf("--guarantee", flags.guarantee, [&] { return request.mutable_guarantee(); });
  if (status.ok()) status = SetLabels(flags.labels, *request.mutable_labels());
  if (!status.ok()) return status;
  if (flags.priority.has_value()) request.set_priority(*flags.priority);
  if (!flags.max_wait.empty()) {
    const absl::StatusOr<uint32_t> wait = ParseWait("--max-wait", flags.max_wait);
    if (!wait.ok()) return wait.status();
    request.set_max_wait_ms(*wait);
  }
  request.set_replace_labels(!flags.labels.empty() || flags.no_labels);
  if (flags.limit.empty() && flags.guarantee.empty() && !flags.priority.has_value() && flags.max_wait.empty() &&
      !request.replace_labels()) {
    return absl::InvalidArgumentError(
        "nothing is to be changed: give --limit, --guarantee, --priority, --max-wait, --label or --no-labels");
  }
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context);
  if (!daemon.ok()) return daemon.status();
  v1::UpdateClaimResponse response;
  status = Call(*daemon, &v1::Admin::Stub::UpdateClaim, request, &response);
  if (!status.ok()) return status;
  PrintClaim(context, response.claim(), "changed");
  return absl::OkStatus();
}

absl::Status ShowClaims(const Context& context) {
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context);
  if (!daemon.ok()) return daemon.status();
  const absl::StatusOr<v1::ListClaimsResponse> claims = ReadClaims(*daemon, "");
  if (!claims.ok()) return claims.status();
  if (context.json) {
    Json all = Json::array();
    for (const v1::Claim& claim : claims->claims()) all.push_back(ToJson(claim));
    Print({{"claims", std::move(all)}, {"own_only", claims->own_only()}});
    return absl::OkStatus();
  }
  const char* const none = claims->own_only() ? "you have no claims\n" : "there are no claims\n";
  std::printf("%s", claims->claims().empty() ? none : ClaimsTable(*claims, UserName).c_str());
  return absl::OkStatus();
}

absl::Status ShowClaim(const Context& context) {
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context);
  if (!daemon.ok()) return daemon.status();
  const absl::StatusOr<v1::Claim> read = ReadClaim(*daemon, context.claim.name);
  if (!read.ok()) return read.status();
  const v1::Claim& claim = *read;
  // An owner without the right OBSERVER sees the claim, but not which claim each session belongs to.
  v1::ListSessionsResponse all;
  const absl::Status listed = Call(*daemon, &v1::Admin::Stub::ListSessions, v1::ListSessionsRequest(), &all);
  v1::ListSessionsResponse sessions;
  for (const v1::Session& session : all.sessions()) {
    if (session.claim() == claim.name()) *sessions.add_sessions() = session;
  }
  if (context.json) {
    Json of_claim = Json::array();
    for (const v1::Session& session : sessions.sessions()) of_claim.push_back(ToJson(session));
    Print({{"claim", ToJson(claim)}, {"sessions", listed.ok() ? std::move(of_claim) : Json(nullptr)}});
    return absl::OkStatus();
  }
  std::printf("%s", ClaimText(claim, UserName).c_str());
  if (!sessions.sessions().empty())
    std::printf("\n%s", SessionsTable(sessions, absl::Now(), OutputColumns(kSessionsColumns)).c_str());
  return absl::OkStatus();
}

absl::Status WriteClaimCdi(const Context& context) {
  const std::string& output = context.output;
  if (absl::Status status = output.empty() ? absl::OkStatus() : CheckSnapshotPath(output); !status.ok()) return status;
  const absl::StatusOr<std::string> preload = context.claim.preload ? FindPreloadLibrary() : "";
  if (!preload.ok()) return Refusal(preload.status());
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context);
  if (!daemon.ok()) return daemon.status();
  const absl::StatusOr<v1::Claim> claim = ReadClaim(*daemon, context.claim.name);
  if (!claim.ok()) return claim.status();
  if (absl::Status status = WriteCdiFile(*claim, output, *preload); !status.ok() || output == "-") return status;
  const std::string file = output.empty() ? CdiPath(claim->name()) : output;
  const std::string device = CdiDevice(claim->name());
  if (context.json) {
    Print({{"file", file}, {"device", device}});
  } else {
    std::printf("%s: wrote %s\nits containers need --device %s\n", claim->name().c_str(), file.c_str(), device.c_str());
  }
  return absl::OkStatus();
}

absl::Status RemoveClaim(const Context& context) {
  const ClaimFlags& flags = context.claim;
  v1::DeleteClaimRequest request;
  request.set_name(flags.name);
  request.set_mode(flags.revoke ? v1::DeleteClaimRequest::REVOKE : v1::DeleteClaimRequest::DRAIN);
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context);
  if (!daemon.ok()) return daemon.status();
  v1::DeleteClaimResponse response;
  absl::Status status = Call(*daemon, &v1::Admin::Stub::DeleteClaim, request, &response);
  if (status.ok() || absl::IsNotFound(status)) RemoveCdiFile(flags.name, context.socket_dir);
  if (!status.ok()) return status;
  const absl::Time deadline = absl::Now() + context.timeout;
  while (flags.wait && response.has_claim()) {
    const absl::StatusOr<v1::ListClaimsResponse> left = ReadClaims(*daemon, flags.name);
    if (absl::IsNotFound(left.status())) {
      response.clear_claim();
      break;
    }
    if (!left.ok()) return left.status();
    if (absl::Now() > deadline) {
      return absl::DeadlineExceededError(absl::StrCat(
          "the claim '", flags.name, "' is still there: sessions or processes have its memory (vramctl claim show ",
          flags.name, "); wait longer with --timeout", flags.revoke ? "" : ", or end its sessions with --revoke"));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  if (context.json) {
    Print({{"removed", !response.has_claim()},
           {"claim", response.has_claim() ? ToJson(response.claim()) : Json(nullptr)}});
    return absl::OkStatus();
  }
  if (!response.has_claim()) {
    std::printf("%s: removed\n", flags.name.c_str());
  } else {
    const uint32_t sessions = response.claim().sessions();
    const std::string still = sessions == 0 ? "" : absl::StrCat(", and still has ", Counted(sessions, "session"));
    const std::string what = flags.revoke ? "its sessions were ended" : absl::StrCat("takes no more sessions", still);
    std::printf("%s: %s; removed when the memory is back\n", flags.name.c_str(), what.c_str());
  }
  return absl::OkStatus();
}

}  // namespace vrambroker::vramctl
