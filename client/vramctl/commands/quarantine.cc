// SPDX-License-Identifier: Apache-2.0
//
// vramctl quarantine.
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "allocator/base/bytes.h"
#include "client/vramctl/commands/commands.h"
#include "client/vramctl/daemon/daemon_calls.h"
#include "client/vramctl/views/output.h"

namespace vrambroker::vramctl {
namespace {

using Json = nlohmann::ordered_json;

std::string ReasonOf(const v1::ListQuarantineResponse::Holding& holding) {
  const std::string holders = absl::StrJoin(holding.holders(), ", ");
  if (holding.carried_over()) {
    return holders.empty() ? "in use by others when the daemon started"
                           : absl::StrCat("process ", holders, " holds it from an earlier run of the daemon");
  }
  return holders.empty() ? "its process has ended; waiting until it is known to be quiet"
                         : absl::StrCat("process ", holders, " still has it open");
}

}  // namespace

absl::Status ShowQuarantine(const Context& context) {
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context);
  if (!daemon.ok()) return daemon.status();
  v1::ListQuarantineResponse response;
  if (absl::Status status = Call(*daemon, &v1::Admin::Stub::ListQuarantine, v1::ListQuarantineRequest(), &response);
      !status.ok()) {
    return status;
  }
  Json holdings = Json::array();
  std::vector<std::vector<std::string>> rows = {{"CLIENT", ">PID", ">DEVICE", ">BYTES", ">SEGMENTS", ">AGE", "REASON"}};
  for (const v1::ListQuarantineResponse::Holding& holding : response.holdings()) {
    holdings.push_back({{"client", holding.client()},
                        {"pid", holding.pid()},
                        {"device", holding.device()},
                        {"bytes", holding.bytes()},
                        {"segments", holding.segments()},
                        {"age_ms", holding.age_ms()},
                        {"holders", std::vector<int32_t>(holding.holders().begin(), holding.holders().end())},
                        {"carried_over", holding.carried_over()}});
    rows.push_back(
        {holding.carried_over() ? "-" : holding.client(), holding.carried_over() ? "-" : absl::StrCat(holding.pid()),
         absl::StrCat(holding.device()), FormatBytes(holding.bytes()), absl::StrCat(holding.segments()),
         holding.carried_over() ? "-"
                                : absl::FormatDuration(absl::Milliseconds(static_cast<int64_t>(holding.age_ms()))),
         ReasonOf(holding)});
  }
  if (context.json) {
    Print({{"quarantine", std::move(holdings)}});
  } else {
    std::printf("%s", rows.size() == 1
                          ? "nothing is left behind; what ended or disconnected sessions hold is in vramctl sessions\n"
                          : Table(rows).c_str());
  }
  return absl::OkStatus();
}

}  // namespace vrambroker::vramctl
