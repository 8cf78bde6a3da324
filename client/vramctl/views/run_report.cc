// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/views/run_report.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "allocator/base/bytes.h"
#include "client/vramctl/views/output.h"

namespace vrambroker::vramctl {
namespace {

// An older daemon restarted meanwhile counts from 0, without saying so.
uint64_t Since(uint64_t before, uint64_t after) {
  return after >= before ? after - before : after;
}

}  // namespace

v1::Claim ClaimSince(const v1::Claim& before, v1::Claim after) {
  after.set_refusals(Since(before.refusals(), after.refusals()));
  for (int i = 0; i < std::min(before.devices_size(), after.devices_size()); ++i) {
    v1::ClaimDevice& device = *after.mutable_devices(i);
    device.set_waits(Since(before.devices(i).waits(), device.waits()));
    device.set_waited_ms(Since(before.devices(i).waited_ms(), device.waited_ms()));
    device.set_refusals(Since(before.devices(i).refusals(), device.refusals()));
  }
  return after;
}

std::vector<std::string> RunReportLines(const v1::Claim& claim) {
  std::vector<std::string> lines;
  for (const v1::ClaimDevice& device : claim.devices()) {
    if (device.limit_bytes() == 0) continue;  // the claim may not use the device
    std::string line = absl::StrCat("device ", device.device(), ": peak ", FormatBytes(device.peak_bytes()), " of ",
                                    FormatBytes(device.limit_bytes()));
    if (device.waits() > 0) {
      absl::StrAppend(&line, "; ", Counted(device.waits(), "request"), " waited, ",
                      absl::FormatDuration(absl::Milliseconds(device.waited_ms())), " in all");
    }
    lines.push_back(std::move(line));
  }
  lines.push_back(absl::StrCat(Counted(claim.refusals(), "request"), " refused"));
  return lines;
}

nlohmann::ordered_json RunReportJson(const v1::Claim& claim, int exit_code) {
  auto devices = nlohmann::ordered_json::array();
  for (const v1::ClaimDevice& device : claim.devices()) {
    devices.push_back({{"device", device.device()},
                       {"limit_bytes", device.limit_bytes()},
                       {"peak_bytes", device.peak_bytes()},
                       {"waits", device.waits()},
                       {"waited_ms", device.waited_ms()},
                       {"refusals", device.refusals()}});
  }
  return {{"report",
           {{"claim", claim.name()},
            {"exit_code", exit_code},
            {"refusals", claim.refusals()},
            {"devices", std::move(devices)}}}};
}

}  // namespace vrambroker::vramctl
