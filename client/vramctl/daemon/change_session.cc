// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/daemon/change_session.h"

#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "allocator/wire/admin_json.h"
#include "client/vramctl/views/session_output.h"

namespace vrambroker::vramctl {
namespace {

void SetProto(const Limit& limit, v1::Limit* to) {
  if (const double* fraction = std::get_if<double>(&limit)) {
    to->set_fraction(*fraction);
  } else {
    to->set_bytes(std::get<uint64_t>(limit));
  }
}

uint64_t CapacityOf(const v1::GetDevicesResponse& devices, uint32_t ordinal) {
  for (const v1::Device& device : devices.devices()) {
    if (device.ordinal() == ordinal) return device.capacity_bytes();
  }
  return 0;
}

// Calls the daemon, with a function for each kind of change. Devices() returns figures to compare the answer with.
struct Change {
  Daemon& daemon;
  const v1::SessionRef& session;

  template <typename Request>
  Request RequestFor() const {
    Request request;
    *request.mutable_session() = session;
    return request;
  }

  // Empty if the daemon does not answer: the change has been made anyway.
  v1::GetDevicesResponse Devices() const {
    v1::GetDevicesResponse devices;
    (void)Call(daemon, &v1::Broker::Stub::GetDevices, v1::GetDevicesRequest(), &devices);
    return devices;
  }

  absl::StatusOr<ChangeResult> operator()(const LimitChange& change) const {
    auto request = RequestFor<v1::SetLimitRequest>();
    SetProto(change.limit, request.mutable_limit());
    v1::SetLimitResponse response;
    absl::Status status = Call(daemon, &v1::Admin::Stub::SetLimit, request, &response);
    if (!status.ok()) return status;
    const v1::GetDevicesResponse devices = Devices();
    ChangeResult result = {.name = response.session().name(),
                           .lines = {},
                           .warning = response.warning(),
                           .json = ToJson(response.session())};
    for (const v1::SessionDevice& device : response.session().devices()) {
      result.lines.push_back(absl::StrCat(
          "limit ", FormatBytes(device.limit_bytes()), " on device ", device.device(),
          AskedFor(change.limit, device.limit_bytes(), CapacityOf(devices, device.device())), ", reserved ",
          FormatBytes(device.reserved_bytes()),
          IsOverLimit(device) ? " (over the limit: it is asked for what is reclaimable, and cannot grow)" : ""));
    }
    return result;
  }

  absl::StatusOr<ChangeResult> operator()(const GuaranteeChange& change) const {
    auto request = RequestFor<v1::SetGuaranteeRequest>();
    SetProto(change.guarantee, request.mutable_guarantee());
    v1::SetGuaranteeResponse response;
    absl::Status status = Call(daemon, &v1::Admin::Stub::SetGuarantee, request, &response);
    if (!status.ok()) return status;
    const v1::GetDevicesResponse devices = Devices();
    ChangeResult result = {.name = response.session().name(),
                           .lines = {},
                           .warning = response.warning(),
                           .json = ToJson(response.session())};
    for (const v1::SessionDevice& device : response.session().devices()) {
      result.lines.push_back(
          absl::StrCat("guarantee ", FormatBytes(device.guarantee_bytes()), " on device ", device.device(),
                       AskedFor(change.guarantee, device.guarantee_bytes(), CapacityOf(devices, device.device())), ", ",
                       FormatBytes(device.reserved_bytes()), " reserved"));
    }
    return result;
  }

  absl::StatusOr<ChangeResult> operator()(const PriorityChange& change) const {
    auto request = RequestFor<v1::SetPriorityRequest>();
    request.set_priority(change.priority);
    v1::SetPriorityResponse response;
    absl::Status status = Call(daemon, &v1::Admin::Stub::SetPriority, request, &response);
    if (!status.ok()) return status;
    return ChangeResult{.name = response.session().name(),
                        .lines = {absl::StrCat("priority ", response.session().priority())},
                        .warning = response.warning(),
                        .json = ToJson(response.session())};
  }

  absl::StatusOr<ChangeResult> operator()(const TrimChange& /*change*/) const {
    v1::TrimSessionResponse response;
    absl::Status status = Call(daemon, &v1::Admin::Stub::TrimSession, RequestFor<v1::TrimSessionRequest>(), &response);
    if (!status.ok()) return status;
    return ChangeResult{.name = {},
                        .lines = {absl::StrCat(FormatBytes(response.released_bytes()), " came back")},
                        .warning = {},
                        .json = {{"released_bytes", response.released_bytes()}}};
  }

  absl::StatusOr<ChangeResult> operator()(const EndChange& /*change*/) const {
    v1::EndSessionResponse response;
    absl::Status status = Call(daemon, &v1::Admin::Stub::EndSession, RequestFor<v1::EndSessionRequest>(), &response);
    if (!status.ok()) return status;
    return ChangeResult{.name = {},
                        .lines = {absl::StrCat("ended; ", FormatBytes(response.quarantined_bytes()),
                                               " stays charged until its process closes it or exits")},
                        .warning = {},
                        .json = {{"quarantined_bytes", response.quarantined_bytes()}}};
  }
};

}  // namespace

absl::StatusOr<ChangeResult> ChangeSession(Daemon& daemon, const v1::SessionRef& session, const SessionChange& change) {
  return std::visit(Change{daemon, session}, change);
}

absl::StatusOr<ChangeResult> CarryOut(Daemon& daemon, const SessionOrder& order) {
  // Use ListSessions, not GetSession: GetSession asks the client, and an unresponsive client would delay its own end.
  v1::ListSessionsResponse all;
  absl::Status status = Call(daemon, &v1::Admin::Stub::ListSessions, v1::ListSessionsRequest(), &all);
  if (!status.ok()) return status;
  const v1::Session* const now = FindSession(all, order.session);
  if (now == nullptr) return absl::NotFoundError("the session has ended; nothing was done");
  // A connection belongs to one run of the daemon, and ids are unique within the run: the id still names the session in
  // the next call.
  return ChangeSession(daemon, SessionRefOf(now->id()), order.change);
}

}  // namespace vrambroker::vramctl
