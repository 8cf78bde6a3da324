// SPDX-License-Identifier: Apache-2.0
#include <grp.h>
#include <pwd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "allocator/base/bytes.h"
#include "client/vramctl/commands/commands.h"
#include "client/vramctl/daemon/daemon_calls.h"
#include "client/vramctl/options/users.h"
#include "client/vramctl/views/output.h"

namespace vrambroker::vramctl {
namespace {

using Json = nlohmann::ordered_json;
using Explanation = v1::ExplainPolicyResponse;

// Fills in the user, with the groups listed in the system's files; a number need not be a known user.
absl::Status FillUser(const PolicyFlags& flags, v1::ExplainPolicyRequest::User* user) {
  const absl::StatusOr<uint32_t> uid = flags.uid.empty() ? geteuid() : ParseUser("--uid", flags.uid);
  if (!uid.ok()) return uid.status();
  user->set_uid(*uid);
  if (!flags.cgroup.empty()) user->set_cgroup(flags.cgroup);
  if (!flags.gid.empty()) {
    const absl::StatusOr<uint32_t> gid = ParseGroup("--gid", flags.gid);
    if (!gid.ok()) return gid.status();
    user->add_gids(*gid);
  } else if (const passwd* const entry = getpwuid(*uid); entry != nullptr) {
    const std::string name = entry->pw_name;
    const gid_t own = entry->pw_gid;
    int count = 64;
    std::vector<gid_t> groups(static_cast<size_t>(count));
    while (getgrouplist(name.c_str(), own, groups.data(), &count) < 0) {
      count = std::max(count, static_cast<int>(groups.size()) + 1);
      groups.resize(static_cast<size_t>(count));
    }
    for (int i = 0; i < count; ++i) user->add_gids(groups[static_cast<size_t>(i)]);
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::ExplainPolicyRequest> RequestOf(const Context& context) {
  const PolicyFlags& flags = context.policy;
  v1::ExplainPolicyRequest request;
  if (!context.name.empty()) request.set_session_name(context.name);
  const bool describes_user = !flags.uid.empty() || !flags.gid.empty() || !flags.cgroup.empty();
  if (!flags.pid.empty()) {
    int32_t pid = 0;
    if (describes_user) return absl::InvalidArgumentError("--pid goes without --uid, --gid and --cgroup");
    if (!absl::SimpleAtoi(flags.pid, &pid) || pid <= 0) {
      return absl::InvalidArgumentError(absl::StrCat("--pid: '", flags.pid, "' is not the number of a process"));
    }
    request.set_pid(pid);
  } else if (describes_user) {
    if (absl::Status status = FillUser(flags, request.mutable_user()); !status.ok()) return status;
  }
  return request;
}

std::string LimitText(const v1::Limit& limit) {
  return limit.has_bytes() ? FormatBytes(limit.bytes()) : absl::StrCat(Percent(limit.fraction()), " of the capacity");
}

Json LimitJson(const v1::Limit& limit) {
  return limit.has_bytes() ? Json{{"bytes", limit.bytes()}} : Json{{"fraction", limit.fraction()}};
}

std::vector<std::string> RightsOf(const Explanation& terms) {
  std::vector<std::string> rights;
  if (terms.may_open_sessions()) rights.emplace_back("client");
  if (terms.may_observe()) rights.emplace_back("observer");
  if (terms.may_change()) rights.emplace_back("admin");
  return rights;
}

Json ExplanationJson(const Explanation& explanation) {
  Json rules = Json::array();
  for (const Explanation::Rule& rule : explanation.rules()) {
    rules.push_back({{"rule", rule.rule()}, {"place", rule.place()}, {"matches", rule.matches()}, {"why", rule.why()}});
  }
  const v1::ExplainPolicyRequest::User& user = explanation.user();
  return {
      {"uid", user.uid()},
      {"gids", std::vector<uint32_t>(user.gids().begin(), user.gids().end())},
      {"cgroup", user.has_cgroup() ? Json(user.cgroup()) : Json(nullptr)},
      {"name", explanation.has_session_name() ? Json(explanation.session_name()) : Json(nullptr)},
      {"rules", std::move(rules)},
      {"rule", explanation.rule()},
      {"limit", LimitJson(explanation.limit())},
      {"guarantee", LimitJson(explanation.guarantee())},
      {"priority", explanation.priority()},
      {"max_wait_ms", explanation.max_wait_ms()},
      {"user_limit", explanation.has_user_limit() ? LimitJson(explanation.user_limit()) : Json(nullptr)},
      {"user_guarantee", explanation.has_user_guarantee() ? LimitJson(explanation.user_guarantee()) : Json(nullptr)},
      {"claim", explanation.claim()},
      {"claim_limit", explanation.has_claim_limit() ? LimitJson(explanation.claim_limit()) : Json(nullptr)},
      {"claim_guarantee", explanation.has_claim_guarantee() ? LimitJson(explanation.claim_guarantee()) : Json(nullptr)},
      {"max_sessions", explanation.max_sessions()},
      {"tenant", explanation.tenant()},
      {"isolation", explanation.strict() ? "strict" : "shared"},
      {"rights", RightsOf(explanation)},
      {"operator", explanation.is_operator()}};
}

void PrintText(const Explanation& explanation) {
  const v1::ExplainPolicyRequest::User& user = explanation.user();
  std::printf("uid %u, gids %s, cgroup %s, name %s\n\n", user.uid(),
              user.gids().empty() ? "not known" : absl::StrJoin(user.gids(), ",").c_str(),
              user.has_cgroup() ? user.cgroup().c_str() : "not known",
              explanation.has_session_name() ? explanation.session_name().c_str() : "none");
  std::vector<std::vector<std::string>> rows = {{"RULE", "MATCHES", "WHY", "PLACE"}};
  for (const Explanation::Rule& rule : explanation.rules()) {
    rows.push_back({rule.rule(), rule.matches() ? "yes" : "no", rule.why(), rule.place()});
  }
  if (rows.size() > 1) std::printf("%s\n", Table(rows).c_str());
  std::printf("rule       %s\n",
              explanation.rule().empty() ? "none matches: the defaults" : explanation.rule().c_str());
  std::printf("limit      %s\n", LimitText(explanation.limit()).c_str());
  std::printf("guarantee  %s\n", LimitText(explanation.guarantee()).c_str());
  std::printf("priority   %d\n", explanation.priority());
  std::printf("may wait   %s\n", explanation.max_wait_ms() == 0
                                     ? "no"
                                     : absl::FormatDuration(absl::Milliseconds(explanation.max_wait_ms())).c_str());
  if (explanation.has_user_limit()) {
    std::printf("together   %s for all sessions of the user\n", LimitText(explanation.user_limit()).c_str());
  }
  if (explanation.has_user_guarantee()) {
    std::printf("guarantees %s for all sessions of the user\n", LimitText(explanation.user_guarantee()).c_str());
  }
  if (!explanation.claim().empty()) {
    std::printf("claim      %s: %s for all of its sessions together, %s kept free for them\n",
                explanation.claim().c_str(), LimitText(explanation.claim_limit()).c_str(),
                LimitText(explanation.claim_guarantee()).c_str());
  }
  if (explanation.max_sessions() > 0) {
    std::printf("sessions   %u of this rule for the user at most\n", explanation.max_sessions());
  }
  std::printf("tenant     %s (%s)\n", explanation.tenant().c_str(), explanation.strict() ? "strict" : "shared");
  const std::vector<std::string> rights = RightsOf(explanation);
  std::printf("rights     %s%s\n", rights.empty() ? "none" : absl::StrJoin(rights, ", ").c_str(),
              explanation.is_operator() ? " (root and the daemon's user have them in any case)" : "");
}

}  // namespace

absl::Status ExplainPolicy(const Context& context) {
  const absl::StatusOr<v1::ExplainPolicyRequest> request = RequestOf(context);
  if (!request.ok()) return request.status();
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context);
  if (!daemon.ok()) return daemon.status();
  Explanation explanation;
  if (absl::Status status = Call(*daemon, &v1::Admin::Stub::ExplainPolicy, *request, &explanation); !status.ok()) {
    return status;
  }
  if (context.json) {
    Print(ExplanationJson(explanation));
  } else {
    PrintText(explanation);
  }
  return absl::OkStatus();
}

absl::Status Reload(const Context& context) {
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context);
  if (!daemon.ok()) return daemon.status();
  v1::ReloadConfigResponse response;
  if (absl::Status status = Call(*daemon, &v1::Admin::Stub::ReloadConfig, v1::ReloadConfigRequest(), &response);
      !status.ok()) {
    return status;
  }
  if (context.json) {
    Print({{"rules", response.rules()},
           {"needs_restart",
            std::vector<std::string>(response.needs_restart().begin(), response.needs_restart().end())}});
    return absl::OkStatus();
  }
  std::printf("reloaded: %s, for sessions opened from now on; live sessions keep their terms\n",
              Counted(response.rules(), "rule").c_str());
  if (!response.needs_restart().empty()) {
    std::printf("changed in the file, but of effect only after a restart: %s\n",
                absl::StrJoin(response.needs_restart(), ", ").c_str());
  }
  return absl::OkStatus();
}

}  // namespace vrambroker::vramctl
