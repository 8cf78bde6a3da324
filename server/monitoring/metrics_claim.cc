// SPDX-License-Identifier: Apache-2.0
//
// Metrics of claims: labels claim and gpu. The first `max_claims` by name have series of their own. Further claims are
// summed up as claim="_other", so that a user creating claims by the thousand cannot flood the monitoring.
#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "allocator/base/utf8.h"
#include "server/monitoring/metrics.h"

namespace vrambroker {
namespace {

using enum prometheus::MetricType;

constexpr char kOtherClaims[] = "_other";  // an invalid name for a claim

struct ClaimRow {
  std::string claim;
  size_t gpu = 0;
  ClaimDeviceView held;

  MetricLabels labels() const { return MakeLabels({{"claim", claim}, {"gpu", absl::StrCat(gpu)}}); }
};

struct ClaimFigure {
  const char* name;
  const char* help;
  uint64_t (*value)(const ClaimDeviceView& held);
};

constexpr ClaimFigure kClaimFigures[] = {
    {"limit_bytes", "What the claim's sessions may have together.",
     [](const ClaimDeviceView& held) { return held.limit_bytes; }},
    {"guarantee_bytes", "Memory kept free for the claim's sessions, whether they hold it or not.",
     [](const ClaimDeviceView& held) { return held.guarantee_bytes; }},
    {"reserved_bytes", "Memory charged to the claim: reserved by its sessions, and left behind by ended ones.",
     [](const ClaimDeviceView& held) { return held.reserved_bytes; }},
    {"peak_bytes", "The most that was charged to the claim at a time, since the daemon started.",
     [](const ClaimDeviceView& held) { return held.peak_bytes; }},
    {"left_behind_bytes", "Of the reserved bytes, those of ended sessions, in quarantine.",
     [](const ClaimDeviceView& held) { return held.left_behind_bytes; }},
    {"allocated_bytes", "Memory in blocks handed out to the claim's sessions.",
     [](const ClaimDeviceView& held) { return held.allocated_bytes; }},
    {"idle_bytes", "Reclaimable: memory of the claim's segments that hold no block.",
     [](const ClaimDeviceView& held) { return held.idle_bytes; }},
    {"waiting_requests", "Requests of the claim's sessions that wait for memory.",
     [](const ClaimDeviceView& held) { return uint64_t{held.waiting}; }},
};

void AddUp(const ClaimDeviceView& from, ClaimDeviceView& to) {
  to.limit_bytes += from.limit_bytes;
  to.guarantee_bytes += from.guarantee_bytes;
  to.reserved_bytes += from.reserved_bytes;
  to.peak_bytes += from.peak_bytes;
  to.left_behind_bytes += from.left_behind_bytes;
  to.allocated_bytes += from.allocated_bytes;
  to.idle_bytes += from.idle_bytes;
  to.waiting += from.waiting;
}

}  // namespace

void WriteClaimMetrics(const BrokerView& view, size_t max_claims, MetricFamilies& out) {
  const size_t shown = std::min(view.claims.size(), max_claims);
  std::vector<ClaimRow> rows;
  for (size_t i = 0; i < shown; ++i) {
    for (size_t gpu = 0; gpu < view.claims[i].devices.size(); ++gpu) {
      rows.push_back({.claim = view.claims[i].claim.name, .gpu = gpu, .held = view.claims[i].devices[gpu]});
    }
  }
  uint64_t other_sessions = 0;
  if (shown < view.claims.size()) {
    for (size_t gpu = 0; gpu < view.devices.size(); ++gpu) {
      ClaimRow& other = rows.emplace_back(ClaimRow{.claim = kOtherClaims, .gpu = gpu});
      for (size_t i = shown; i < view.claims.size(); ++i) AddUp(view.claims[i].devices[gpu], other.held);
    }
    for (size_t i = shown; i < view.claims.size(); ++i) other_sessions += view.claims[i].claim.sessions;
  }
  out.Single("vrambroker_claims", "Claims that there are.", Gauge, uint64_t{view.claims.size()});
  out.Family("vrambroker_claim_info", "Identity of a claim, with its labels as label_KEY; the value is always 1.",
             Gauge);
  for (size_t i = 0; i < shown; ++i) {
    const Claim& claim = view.claims[i].claim;
    MetricLabels labels =
        MakeLabels({{"claim", claim.name},
                    {"owner", claim.terms.owner.uid.has_value() ? absl::StrCat(*claim.terms.owner.uid) : "any"},
                    {"state", ClaimStateName(claim.state)}});
    for (const auto& [key, value] : claim.terms.labels) {
      labels.push_back({.name = absl::StrCat("label_", key), .value = ToUtf8(value)});
    }
    out.Sample(std::move(labels), uint64_t{1});
  }
  out.Family("vrambroker_claim_sessions", "Open sessions of the claim.", Gauge);
  for (size_t i = 0; i < shown; ++i) {
    out.Sample(MakeLabels({{"claim", view.claims[i].claim.name}}), uint64_t{view.claims[i].claim.sessions});
  }
  if (shown < view.claims.size()) out.Sample(MakeLabels({{"claim", kOtherClaims}}), other_sessions);
  for (const ClaimFigure& figure : kClaimFigures) {
    out.Family(absl::StrCat("vrambroker_claim_", figure.name), figure.help, Gauge);
    for (const ClaimRow& row : rows) out.Sample(row.labels(), figure.value(row.held));
  }
  out.Family("vrambroker_claim_ooms_total", "Refused requests for memory of the claim's sessions, by cause.", Counter);
  for (const ClaimRow& row : rows) {
    if (row.claim == kOtherClaims) continue;  // claims go, and a counter may not fall
    for (const OomCause cause : kOomCauses) {
      out.Sample(row.labels(), "reason", OomCauseName(cause), row.held.ooms[static_cast<size_t>(cause)]);
    }
  }
  out.Family("vrambroker_claim_waits_total",
             "Requests of the claim's sessions that had to wait for memory, and are over.", Counter);
  for (const ClaimRow& row : rows) {
    if (row.claim != kOtherClaims) out.Sample(row.labels(), row.held.waits.waits);
  }
  out.Family("vrambroker_claim_waited_seconds_total", "What these requests have waited, in all.", Counter);
  for (const ClaimRow& row : rows) {
    if (row.claim != kOtherClaims) {
      out.Sample(row.labels(), std::chrono::duration<double>(row.held.waits.waited).count());
    }
  }
}

}  // namespace vrambroker
