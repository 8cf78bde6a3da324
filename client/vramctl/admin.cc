// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "allocator/bytes.h"
#include "allocator/memory_summary.h"
#include "client/stats_convert.h"
#include "client/vrambroker/client.h"
#include "client/vramctl/commands.h"
#include "client/vramctl/daemon_calls.h"
#include "client/vramctl/output.h"

namespace vrambroker::vramctl {
namespace {

using Json = nlohmann::ordered_json;

const char* StateName(v1::SessionState state) {
  switch (state) {
    case v1::SESSION_STATE_ACTIVE:
      return "active";
    case v1::SESSION_STATE_DISCONNECTED:
      return "disconnected";
    case v1::SESSION_STATE_ENDED:
      return "ended";
    default:
      return "unknown";
  }
}

double Fragmentation(const v1::SessionDevice& device) {
  return FragmentationRatio(device.stats().allocated_bytes().all().current(), device.reserved_bytes());
}

absl::StatusOr<v1::ListSessionsResponse> ListSessions(Daemon& daemon) {
  v1::ListSessionsResponse response;
  absl::Status status = Call(*daemon.admin, &v1::Admin::Stub::ListSessions, v1::ListSessionsRequest(), &response);
  if (!status.ok()) return status;
  return response;
}

absl::StatusOr<v1::SessionDevice> DeviceOf(const v1::Session& session, int device) {
  if (device < 0 || device >= session.devices_size()) {
    return absl::NotFoundError(absl::StrCat("no device ", device, "; there are ", session.devices_size()));
  }
  return session.devices(device);
}

Json ToJson(const v1::Session& session) {
  Json devices = Json::array();
  for (const v1::SessionDevice& device : session.devices()) {
    const v1::MemoryStats& stats = device.stats();
    devices.push_back({{"device", device.device()},
                       {"limit_bytes", device.limit_bytes()},
                       {"reserved_bytes", device.reserved_bytes()},
                       {"returning_bytes", device.returning_bytes()},
                       {"allocated_bytes", stats.allocated_bytes().all().current()},
                       {"allocated_bytes_peak", stats.allocated_bytes().all().peak()},
                       {"requested_bytes", stats.requested_bytes().all().current()},
                       {"fragmentation_ratio", Fragmentation(device)},
                       {"num_ooms", stats.num_ooms()}});
  }
  return {{"id", session.id()},
          {"name", session.name()},
          {"pid", session.pid()},
          {"uid", session.uid()},
          {"state", StateName(session.state())},
          {"started", absl::FormatTime(absl::RFC3339_full, absl::FromUnixSeconds(session.started().seconds()),
                                       absl::UTCTimeZone())},
          {"devices", std::move(devices)}};
}

}  // namespace

absl::Status Status(const Context& context) {
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context);
  if (!daemon.ok()) return daemon.status();
  v1::GetDevicesResponse response;
  if (absl::Status status = Call(*daemon->broker, &v1::Broker::Stub::GetDevices, v1::GetDevicesRequest(), &response);
      !status.ok()) {
    return status;
  }
  const absl::StatusOr<v1::ListSessionsResponse> sessions = ListSessions(*daemon);
  if (!sessions.ok()) return sessions.status();

  Json devices = Json::array();
  std::vector<std::vector<std::string>> rows = {
      {"DEVICE", "KIND", "NAME", ">CAPACITY", ">RESERVED", ">ALLOCATED", ">IDLE", ">FRAGMENTATION"}};
  for (const v1::Device& device : response.devices()) {
    uint64_t allocated = 0;
    for (const v1::Session& session : sessions->sessions()) {
      allocated += session.devices(static_cast<int>(device.ordinal())).stats().allocated_bytes().all().current();
    }
    const char* kind = device.kind() == v1::DEVICE_KIND_CUDA ? "cuda" : "host";
    const double fragmentation = FragmentationRatio(allocated, device.reserved_bytes());
    devices.push_back({{"device", device.ordinal()},
                       {"kind", kind},
                       {"name", device.name()},
                       {"uuid", device.uuid()},
                       {"total_bytes", device.total_bytes()},
                       {"capacity_bytes", device.capacity_bytes()},
                       {"reserved_bytes", device.reserved_bytes()},
                       {"allocated_bytes", allocated},
                       {"idle_bytes", device.idle_bytes()},
                       {"fragmentation_ratio", fragmentation}});
    rows.push_back({absl::StrCat(device.ordinal()), kind, device.name(), FormatBytes(device.capacity_bytes()),
                    FormatBytes(device.reserved_bytes()), FormatBytes(allocated), FormatBytes(device.idle_bytes()),
                    Percent(fragmentation)});
  }
  if (context.json) {
    Print({{"daemon_version", response.daemon_version()},
           {"socket_dir", context.socket_dir},
           {"sessions", sessions->sessions_size()},
           {"devices", std::move(devices)}});
  } else {
    std::printf("vrambrokerd %s at %s, %d session%s\n\n%s", response.daemon_version().c_str(),
                context.socket_dir.c_str(), sessions->sessions_size(), sessions->sessions_size() == 1 ? "" : "s",
                Table(rows).c_str());
  }
  return absl::OkStatus();
}

absl::Status Sessions(const Context& context) {
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context);
  if (!daemon.ok()) return daemon.status();
  const absl::StatusOr<v1::ListSessionsResponse> response = ListSessions(*daemon);
  if (!response.ok()) return response.status();
  if (context.json) {
    Json sessions = Json::array();
    for (const v1::Session& session : response->sessions()) sessions.push_back(ToJson(session));
    Print({{"sessions", std::move(sessions)}});
    return absl::OkStatus();
  }
  std::vector<std::vector<std::string>> rows = {{">ID", "NAME", ">PID", ">UID", "STATE", ">DEVICE", ">LIMIT",
                                                 ">RESERVED", ">ALLOCATED", ">FRAGMENTATION", ">OOMS"}};
  for (const v1::Session& session : response->sessions()) {
    for (const v1::SessionDevice& device : session.devices()) {
      rows.push_back({absl::StrCat(session.id()), session.name(), absl::StrCat(session.pid()),
                      absl::StrCat(session.uid()), StateName(session.state()), absl::StrCat(device.device()),
                      FormatBytes(device.limit_bytes()), FormatBytes(device.reserved_bytes()),
                      FormatBytes(device.stats().allocated_bytes().all().current()), Percent(Fragmentation(device)),
                      absl::StrCat(device.stats().num_ooms())});
    }
  }
  std::printf("%s", rows.size() == 1 ? "no sessions\n" : Table(rows).c_str());
  return absl::OkStatus();
}

absl::Status Stats(const Context& context, const std::optional<std::string>& session) {
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context);
  if (!daemon.ok()) return daemon.status();
  MemoryStats stats;
  bool is_first = true;
  if (session.has_value()) {
    const absl::StatusOr<v1::Session> found = GetSession(*daemon, *session);
    if (!found.ok()) return found.status();
    const absl::StatusOr<v1::SessionDevice> device = DeviceOf(*found, context.device);
    if (!device.ok()) return device.status();
    stats = client_internal::FromProto(device->stats());
  } else {
    const absl::StatusOr<v1::ListSessionsResponse> response = ListSessions(*daemon);
    if (!response.ok()) return response.status();
    for (const v1::Session& each : response->sessions()) {
      const absl::StatusOr<v1::SessionDevice> device = DeviceOf(each, context.device);
      if (!device.ok()) return device.status();
      const MemoryStats of_session = client_internal::FromProto(device->stats());
      if (is_first) {
        stats = of_session;
      } else {
        stats.Add(of_session);
      }
      is_first = false;
    }
  }
  Json json = Json::object();
  for (const auto& [name, value] : FlatMemoryStats(stats)) {
    if (context.json) {
      json[name] = value;
    } else {
      std::printf("%s %lld\n", name.c_str(), static_cast<long long>(value));
    }
  }
  if (context.json) Print(json);
  return absl::OkStatus();
}

absl::Status Summary(const Context& context, const std::string& session) {
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context);
  if (!daemon.ok()) return daemon.status();
  const absl::StatusOr<v1::Session> found = GetSession(*daemon, session);
  if (!found.ok()) return found.status();
  const absl::StatusOr<v1::SessionDevice> device = DeviceOf(*found, context.device);
  if (!device.ok()) return device.status();
  if (context.json) {
    Print(ToJson(*found));
  } else {
    std::printf("%s", MemorySummary(absl::StrCat("session ", found->name(), ", device ", context.device),
                                    client_internal::FromProto(device->stats()))
                          .c_str());
  }
  return absl::OkStatus();
}

absl::Status SetLimit(const Context& context, const std::string& session, const std::string& limit) {
  const absl::StatusOr<Limit> parsed = ParseLimit(limit);
  if (!parsed.ok()) return parsed.status();
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context);
  if (!daemon.ok()) return daemon.status();
  v1::SetLimitRequest request;
  SetRef(session, request.mutable_session());
  if (const double* fraction = std::get_if<double>(&*parsed)) {
    request.mutable_limit()->set_fraction(*fraction);
  } else {
    request.mutable_limit()->set_bytes(std::get<uint64_t>(*parsed));
  }
  v1::SetLimitResponse response;
  if (absl::Status status = Call(*daemon->admin, &v1::Admin::Stub::SetLimit, request, &response); !status.ok()) {
    return status;
  }
  if (context.json) {
    Print(ToJson(response.session()));
    return absl::OkStatus();
  }
  for (const v1::SessionDevice& device : response.session().devices()) {
    std::printf(
        "%s: limit %s on device %u, reserved %s%s\n", response.session().name().c_str(),
        FormatBytes(device.limit_bytes()).c_str(), device.device(), FormatBytes(device.reserved_bytes()).c_str(),
        device.reserved_bytes() > device.limit_bytes() ? " (over the limit: it cannot grow, nothing is taken)" : "");
  }
  return absl::OkStatus();
}

absl::Status Trim(const Context& context, const std::string& session) {
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context);
  if (!daemon.ok()) return daemon.status();
  v1::TrimSessionRequest request;
  SetRef(session, request.mutable_session());
  v1::TrimSessionResponse response;
  if (absl::Status status = Call(*daemon->admin, &v1::Admin::Stub::TrimSession, request, &response); !status.ok()) {
    return status;
  }
  if (context.json) {
    Print({{"released_bytes", response.released_bytes()}});
  } else {
    std::printf("%s: %s came back\n", session.c_str(), FormatBytes(response.released_bytes()).c_str());
  }
  return absl::OkStatus();
}

absl::Status End(const Context& context, const std::string& session) {
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context);
  if (!daemon.ok()) return daemon.status();
  v1::EndSessionRequest request;
  SetRef(session, request.mutable_session());
  v1::EndSessionResponse response;
  if (absl::Status status = Call(*daemon->admin, &v1::Admin::Stub::EndSession, request, &response); !status.ok()) {
    return status;
  }
  if (context.json) {
    Print({{"quarantined_bytes", response.quarantined_bytes()}});
  } else {
    std::printf("%s: ended; %s stay charged until its process closes them or exits\n", session.c_str(),
                FormatBytes(response.quarantined_bytes()).c_str());
  }
  return absl::OkStatus();
}

}  // namespace vrambroker::vramctl
