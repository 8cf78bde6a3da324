// SPDX-License-Identifier: Apache-2.0
//
// vramctl limit, guarantee, priority, quarantine: how memory is shared.
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "allocator/bytes.h"
#include "client/vrambroker/client.h"
#include "client/vramctl/commands.h"
#include "client/vramctl/daemon_calls.h"
#include "client/vramctl/output.h"
#include "client/vramctl/session_output.h"
#include "proto/admin_json.h"

namespace vrambroker::vramctl {
namespace {

using Json = nlohmann::ordered_json;

void SetProto(const Limit& limit, v1::Limit* to) {
  if (const double* fraction = std::get_if<double>(&limit)) {
    to->set_fraction(*fraction);
  } else {
    to->set_bytes(std::get<uint64_t>(limit));
  }
}

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

absl::Status SetLimit(const Context& context, const std::string& session, const std::string& limit) {
  const absl::StatusOr<Limit> parsed = ParseLimit(limit);
  if (!parsed.ok()) return parsed.status();
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context);
  if (!daemon.ok()) return daemon.status();
  v1::SetLimitRequest request;
  SetRef(session, request.mutable_session());
  SetProto(*parsed, request.mutable_limit());
  v1::SetLimitResponse response;
  if (absl::Status status = Call(*daemon, &v1::Admin::Stub::SetLimit, request, &response); !status.ok()) {
    return status;
  }
  if (context.json) {
    Print(ToJson(response.session()));
    return absl::OkStatus();
  }
  for (const v1::SessionDevice& device : response.session().devices()) {
    std::printf("%s: limit %s on device %u, reserved %s%s\n", response.session().name().c_str(),
                FormatBytes(device.limit_bytes()).c_str(), device.device(),
                FormatBytes(device.reserved_bytes()).c_str(),
                device.reserved_bytes() > device.limit_bytes()
                    ? " (over the limit: it is asked for what is idle, and cannot grow)"
                    : "");
  }
  return absl::OkStatus();
}

absl::Status SetGuarantee(const Context& context, const std::string& session, const std::string& guarantee) {
  const absl::StatusOr<Limit> parsed = ParseLimit(guarantee);
  if (!parsed.ok()) return parsed.status();
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context);
  if (!daemon.ok()) return daemon.status();
  v1::SetGuaranteeRequest request;
  SetRef(session, request.mutable_session());
  SetProto(*parsed, request.mutable_guarantee());
  v1::SetGuaranteeResponse response;
  if (absl::Status status = Call(*daemon, &v1::Admin::Stub::SetGuarantee, request, &response); !status.ok()) {
    return status;
  }
  if (context.json) {
    Print(ToJson(response.session()));
    return absl::OkStatus();
  }
  for (const v1::SessionDevice& device : response.session().devices()) {
    std::printf("%s: %s are kept free for it on device %u, reserved %s\n", response.session().name().c_str(),
                FormatBytes(device.guarantee_bytes()).c_str(), device.device(),
                FormatBytes(device.reserved_bytes()).c_str());
  }
  return absl::OkStatus();
}

absl::Status SetPriority(const Context& context, const std::string& session, const std::string& priority) {
  v1::SetPriorityRequest request;
  int32_t parsed = 0;
  if (!absl::SimpleAtoi(priority, &parsed)) {
    return absl::InvalidArgumentError(
        absl::StrCat("priority: '", priority, "' is not a whole number; -1000 to 1000, higher is more important"));
  }
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context);
  if (!daemon.ok()) return daemon.status();
  SetRef(session, request.mutable_session());
  request.set_priority(parsed);
  v1::SetPriorityResponse response;
  if (absl::Status status = Call(*daemon, &v1::Admin::Stub::SetPriority, request, &response); !status.ok()) {
    return status;
  }
  if (context.json) {
    Print(ToJson(response.session()));
  } else {
    std::printf("%s: priority %d\n", response.session().name().c_str(), response.session().priority());
  }
  return absl::OkStatus();
}

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
    std::printf("%s", rows.size() == 1 ? "nothing is quarantined\n" : Table(rows).c_str());
  }
  return absl::OkStatus();
}

}  // namespace vrambroker::vramctl
