// SPDX-License-Identifier: Apache-2.0
//
// vramctl ooms: who got no memory lately, and why.
#include <cstdio>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "allocator/bytes.h"
#include "client/out_of_memory.h"
#include "client/vramctl/commands.h"
#include "client/vramctl/daemon_calls.h"
#include "client/vramctl/output.h"
#include "proto/admin_json.h"

namespace vrambroker::vramctl {
namespace {

using Json = nlohmann::ordered_json;

absl::Time TimeOf(const v1::OutOfMemoryEvent& event) {
  return absl::FromUnixSeconds(event.time().seconds()) + absl::Nanoseconds(event.time().nanos());
}

}  // namespace

absl::Status Ooms(const Context& context) {
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context);
  if (!daemon.ok()) return daemon.status();
  v1::ListOutOfMemoryRequest request;
  request.set_max_events(context.last);
  if (!context.session.empty()) SetRef(context.session, request.mutable_session());
  v1::ListOutOfMemoryResponse response;
  if (absl::Status status = Call(*daemon, &v1::Admin::Stub::ListOutOfMemory, request, &response); !status.ok()) {
    return status;
  }
  if (context.json) {
    Json events = Json::array();
    for (const v1::OutOfMemoryEvent& event : response.events()) {
      events.push_back(ToJson(event));
    }
    Print({{"total_events", response.total_events()},
           {"matching_events", response.matching_events()},
           {"events", std::move(events)}});
    return absl::OkStatus();
  }
  if (response.events().empty()) {
    std::printf("no refused request is on record\n");
    return absl::OkStatus();
  }
  std::vector<std::vector<std::string>> rows = {{"TIME", "CLIENT", ">DEVICE", "CAUSE", ">REQUESTED", ">LIMIT",
                                                 ">RESERVED", ">ALLOCATED", ">IDLE ELSEWHERE", "ADVICE"}};
  for (const v1::OutOfMemoryEvent& event : response.events()) {
    const OutOfMemory oom = client_internal::FromProto(event.out_of_memory());
    rows.push_back({absl::FormatTime("%Y-%m-%d %H:%M:%S", TimeOf(event), absl::LocalTimeZone()), event.client(),
                    absl::StrCat(oom.device), absl::AsciiStrToLower(OutOfMemoryCauseName(oom.cause)),
                    FormatBytes(oom.requested_bytes), FormatBytes(oom.limit_bytes), FormatBytes(oom.reserved_bytes),
                    FormatBytes(oom.allocated_bytes), FormatBytes(oom.idle_elsewhere_bytes), oom.advice});
  }
  std::printf("%s", Table(rows).c_str());
  const auto shown = static_cast<uint64_t>(response.events_size());
  if (shown < response.matching_events()) {
    std::printf("\n%s of %s; --last=0 shows all\n", absl::StrCat(shown).c_str(),
                absl::StrCat(response.matching_events()).c_str());
  }
  return absl::OkStatus();
}

}  // namespace vrambroker::vramctl
