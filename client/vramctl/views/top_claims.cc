// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/views/top_claims.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "allocator/wire/admin_json.h"
#include "client/vramctl/views/bars.h"
#include "client/vramctl/views/output.h"

namespace vrambroker::vramctl {
namespace {

using ClaimOnDevice = std::pair<std::string, uint32_t>;

TopRow RowOf(const v1::Claim& claim, const v1::ClaimDevice& device, const std::string& owner, absl::Time now) {
  TopRow row = {.name = Printable(claim.name()),
                .claim = Printable(claim.name()),
                .tenant = Printable(claim.terms().tenant()),
                .user = owner,
                .state = StateName(claim.state()),
                .priority = claim.terms().priority(),
                .device = device.device(),
                .limit_bytes = device.limit_bytes(),
                .guarantee_bytes = device.guarantee_bytes(),
                .reserved_bytes = device.reserved_bytes(),
                .allocated_bytes = device.allocated_bytes(),
                .reclaimable_bytes = device.idle_bytes(),
                .age = AgeOf(claim.created(), now),
                .waits_for = Counted(device.waiting(), "request"),
                .ooms = RefusalsOn(claim, device)};
  if (claim.state() == v1::CLAIM_STATE_ACTIVE && device.reserved_bytes() > device.limit_bytes())
    row.state = "over limit";
  row.parts[Part::kLeftBehind] = device.left_behind_bytes();
  return row;
}

}  // namespace

void AddClaims(std::vector<TopRow>& rows, const v1::ListClaimsResponse& claims, const UserNames& user_name,
               absl::Time now) {
  std::multimap<ClaimOnDevice, const TopRow*> sessions;
  for (const TopRow& row : rows) {
    if (!row.claim.empty()) sessions.emplace(ClaimOnDevice(row.claim, row.device), &row);
  }
  std::vector<TopRow> added;
  for (const v1::Claim& claim : claims.claims()) {
    const std::string owner = OwnerText(claim, user_name);
    for (const v1::ClaimDevice& device : claim.devices()) {
      const auto [begin, end] = sessions.equal_range(ClaimOnDevice(Printable(claim.name()), device.device()));
      if (begin == end && device.reserved_bytes() == 0 && device.guarantee_bytes() == 0) continue;
      TopRow row = RowOf(claim, device, owner, now);
      for (auto it = begin; it != end; ++it) {
        row.parts.Add(it->second->parts);
        row.waiting_bytes += it->second->waiting_bytes;
        row.waited_ms = std::max(row.waited_ms, it->second->waited_ms);
      }
      row.fragmentation = FragmentedShare(row.parts);
      row.parts[Part::kFree] = device.limit_bytes() - std::min(device.limit_bytes(), device.reserved_bytes());
      added.push_back(std::move(row));
    }
  }
  std::move(added.begin(), added.end(), std::back_inserter(rows));
}

void GroupByClaim(std::vector<TopRow>& rows, const std::set<std::string>& collapsed) {
  std::map<ClaimOnDevice, std::vector<TopRow>> sessions;  // sessions of claims with a row
  for (const TopRow& row : rows) {
    if (row.is_claim()) sessions[{row.claim, row.device}];
  }
  std::vector<TopRow> first_level;
  for (TopRow& row : rows) {
    const auto claim = row.is_claim() ? sessions.end() : sessions.find({row.claim, row.device});
    if (claim == sessions.end()) {
      first_level.push_back(std::move(row));
    } else {
      row.tree = "  ";
      claim->second.push_back(std::move(row));
    }
  }
  rows.clear();
  for (TopRow& row : first_level) {
    if (!row.is_claim()) {
      rows.push_back(std::move(row));
      continue;
    }
    std::vector<TopRow>& below = sessions[{row.claim, row.device}];
    const bool shows_all = !collapsed.contains(row.claim);
    row.tree = shows_all ? "- " : "+ ";
    rows.push_back(std::move(row));
    if (shows_all) std::move(below.begin(), below.end(), std::back_inserter(rows));
  }
}

}  // namespace vrambroker::vramctl
