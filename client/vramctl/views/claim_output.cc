// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/views/claim_output.h"

#include <algorithm>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "allocator/base/bytes.h"
#include "allocator/wire/admin_json.h"
#include "client/vramctl/views/bars.h"
#include "client/vramctl/views/output.h"

namespace vrambroker::vramctl {
namespace {

bool MayUse(const v1::ClaimDevice& device) {
  return device.limit_bytes() > 0 || device.reserved_bytes() > 0;
}

}  // namespace

std::string OwnerText(const v1::Claim& claim, const UserNames& user_name) {
  if (!claim.rule().empty()) return "-";  // a rule's claim has no sockets
  const v1::ClaimTerms& terms = claim.terms();
  if (terms.owner_case() == v1::ClaimTerms::kAnyOwner && terms.any_owner()) return "any";
  return absl::StrCat(Printable(user_name(terms.owner_uid())),
                      terms.has_owner_gid() ? absl::StrCat(":", terms.owner_gid()) : "");
}

uint64_t RefusalsOn(const v1::Claim& claim, const v1::ClaimDevice& device) {
  const auto has_refusals = [](const v1::ClaimDevice& each) { return each.refusals() > 0; };
  return absl::c_any_of(claim.devices(), has_refusals) ? device.refusals() : claim.refusals();
}

std::string ClaimsTable(const v1::ListClaimsResponse& claims, const UserNames& user_name) {
  std::vector<std::vector<std::string>> rows = {{"CLAIM", "STATE", "OWNER", ">SESSIONS", ">DEVICE", ">LIMIT",
                                                 ">GUARANTEE", ">RESERVED", ">ALLOCATED", ">WAITING", ">REFUSED"}};
  for (const v1::Claim& claim : claims.claims()) {
    for (const v1::ClaimDevice& device : claim.devices()) {
      if (!MayUse(device)) continue;
      rows.push_back({Printable(claim.name()), StateName(claim.state()), OwnerText(claim, user_name),
                      absl::StrCat(claim.sessions()), absl::StrCat(device.device()), FormatBytes(device.limit_bytes()),
                      FormatBytes(device.guarantee_bytes()), FormatBytes(device.reserved_bytes()),
                      FormatBytes(device.allocated_bytes()), absl::StrCat(device.waiting()),
                      absl::StrCat(RefusalsOn(claim, device))});
    }
  }
  return Table(rows);
}

std::string ClaimText(const v1::Claim& claim, const UserNames& user_name) {
  const v1::ClaimTerms& terms = claim.terms();
  std::string text;
  const auto add = [&](const char* what, const std::string& value) {
    absl::StrAppend(&text, what, std::string(12 - std::string(what).size(), ' '), value, "\n");
  };
  add("claim", Printable(claim.name()));
  add("state", StateName(claim.state()));
  add("owner", OwnerText(claim, user_name));
  add("created", absl::FormatTime(absl::FromUnixSeconds(claim.created().seconds()), absl::LocalTimeZone()));
  for (const std::string& line : ClaimLines(claim)) add("device", line);
  add("priority", absl::StrCat(terms.priority()));
  if (claim.rule().empty()) {  // for a rule's claim, each session has the terms of its rule
    add("max wait", !terms.has_max_wait_ms()   ? "the daemon's (max_wait)"
                    : terms.max_wait_ms() == 0 ? "not at all"
                                               : absl::FormatDuration(absl::Milliseconds(terms.max_wait_ms())));
    add("tenant", terms.tenant().empty() ? absl::StrCat("claim:", Printable(claim.name())) : Printable(terms.tenant()));
  }
  for (const auto& [key, value] :
       std::vector<std::pair<std::string, std::string>>(terms.labels().begin(), terms.labels().end())) {
    add("label", absl::StrCat(key, "=", Printable(value)));
  }
  add("sessions", absl::StrCat(claim.sessions()));
  for (const v1::ClaimDevice& device : claim.devices()) {
    if (!MayUse(device)) continue;
    std::string peak = absl::StrCat(FormatBytes(device.peak_bytes()), " on device ", device.device());
    if (device.waits() > 0) {
      absl::StrAppend(&peak, "; ", Counted(device.waits(), "request"), " waited, ",
                      absl::FormatDuration(absl::Milliseconds(device.waited_ms())), " in all");
    }
    add("peak", peak);
  }
  add("refused", Counted(claim.refusals(), "request"));
  if (claim.rule().empty()) {
    if (claim.maker_pid() != 0) add("goes with", absl::StrCat("process ", claim.maker_pid()));
    add("sockets", Printable(claim.socket_dir()));
  } else {
    add("made by", absl::StrCat("rule ", Printable(claim.rule()), ", for as long as it has sessions"));
  }
  return text;
}

std::vector<std::string> ClaimLines(const v1::Claim& claim) {
  std::vector<std::string> lines;
  for (const v1::ClaimDevice& device : claim.devices()) {
    if (!MayUse(device)) continue;
    std::vector<std::string> notes;
    if (device.guarantee_bytes() > 0)
      notes.push_back(absl::StrCat("guarantee ", FormatBytes(device.guarantee_bytes())));
    notes.push_back(absl::StrCat("reserved ", FormatBytes(device.reserved_bytes())));
    if (device.left_behind_bytes() > 0) {
      notes.push_back(absl::StrCat(FormatBytes(device.left_behind_bytes()), " of it left behind"));
    }
    if (device.waiting() > 0) notes.push_back(absl::StrCat(Counted(device.waiting(), "request"), " waiting"));
    lines.push_back(absl::StrCat(
        "limit ", FormatBytes(device.limit_bytes()), " on device ", device.device(), ", ", absl::StrJoin(notes, ", "),
        device.reserved_bytes() > device.limit_bytes()
            ? " (over the limit: its sessions are asked for what is reclaimable, and cannot grow)"
            : ""));
  }
  return lines;
}

}  // namespace vrambroker::vramctl
