// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "allocator/heap/memory_summary.h"
#include "allocator/wire/admin_json.h"
#include "allocator/wire/heap_convert.h"
#include "client/vrambroker/client.h"
#include "client/vramctl/commands/commands.h"
#include "client/vramctl/commands/output_columns.h"
#include "client/vramctl/daemon/daemon_calls.h"
#include "client/vramctl/views/output.h"
#include "client/vramctl/views/overview.h"
#include "client/vramctl/views/session_output.h"
#include "client/vramctl/views/sessions_table.h"
#include "client/vramctl/views/status_text.h"

namespace vrambroker::vramctl {
namespace {

using Json = nlohmann::ordered_json;

absl::StatusOr<v1::ListSessionsResponse> ListSessions(Daemon& daemon) {
  v1::ListSessionsResponse response;
  absl::Status status = Call(daemon, &v1::Admin::Stub::ListSessions, v1::ListSessionsRequest(), &response);
  if (!status.ok()) return status;
  return response;
}

absl::StatusOr<v1::SessionDevice> DeviceOf(const v1::Session& session, int device) {
  if (device < 0 || device >= session.devices_size()) {
    return absl::NotFoundError(absl::StrCat("no device ", device, "; the daemon has ",
                                            Counted(static_cast<uint64_t>(session.devices_size()), "device")));
  }
  return session.devices(device);
}

// Returns the named session, as its client counts now; or all sessions, as last reported.
absl::StatusOr<v1::ListSessionsResponse> SessionsFor(const Context& context, const std::optional<std::string>& named) {
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context);
  if (!daemon.ok()) return daemon.status();
  if (!named.has_value()) return ListSessions(*daemon);
  absl::StatusOr<v1::Session> found = GetSession(*daemon, ParseSessionRef(*named));
  if (!found.ok()) return found.status();
  v1::ListSessionsResponse one;
  *one.add_sessions() = *std::move(found);
  return one;
}

absl::StatusOr<MemoryStats> SumOn(const v1::ListSessionsResponse& sessions, int device) {
  std::optional<MemoryStats> sum;
  for (const v1::Session& session : sessions.sessions()) {
    const absl::StatusOr<v1::SessionDevice> held = DeviceOf(session, device);
    if (!held.ok()) return held.status();
    const MemoryStats of_session = StatsFromProto(held->stats());
    if (sum.has_value()) {
      sum->Add(of_session);
    } else {
      sum = of_session;
    }
  }
  return sum.value_or(MemoryStats());
}

Json SessionsJson(const v1::ListSessionsResponse& all) {
  Json sessions = Json::array();
  for (const v1::Session& session : all.sessions()) sessions.push_back(ToJson(session));
  return {{"run_id", all.run_id()}, {"sessions", std::move(sessions)}};
}

}  // namespace

absl::Status Status(const Context& context) {
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context);
  if (!daemon.ok()) return daemon.status();
  const absl::StatusOr<Overview> overview = ReadOverview(*daemon);
  if (!overview.ok()) return overview.status();
  const v1::GetDevicesResponse& devices = overview->devices;
  const int sessions = overview->sessions.sessions_size();
  if (context.json) {
    Print({{"daemon_version", devices.daemon_version()},
           {"run_id", devices.run_id()},
           {"socket_dir", context.socket_dir},
           {"sessions", sessions},
           {"devices", DevicesJson(*overview)}});
    return absl::OkStatus();
  }
  std::printf("vrambrokerd %s at %s, %s\n\n%s", devices.daemon_version().c_str(), context.socket_dir.c_str(),
              Counted(static_cast<uint64_t>(sessions), "session").c_str(), StatusText(*overview).c_str());
  return absl::OkStatus();
}

absl::Status Sessions(const Context& context) {
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context);
  if (!daemon.ok()) return daemon.status();
  const absl::StatusOr<v1::ListSessionsResponse> response = ListSessions(*daemon);
  if (!response.ok()) return response.status();
  if (context.json) {
    Print(SessionsJson(*response));
    return absl::OkStatus();
  }
  std::printf("%s", SessionsTable(*response, absl::Now(), OutputColumns(kSessionsColumns)).c_str());
  return absl::OkStatus();
}

absl::Status Stats(const Context& context, const std::optional<std::string>& session) {
  const absl::StatusOr<v1::ListSessionsResponse> sessions = SessionsFor(context, session);
  if (!sessions.ok()) return sessions.status();
  const absl::StatusOr<MemoryStats> stats = SumOn(*sessions, context.device);
  if (!stats.ok()) return stats.status();
  Json json = Json::object();
  for (const auto& [name, value] : FlatMemoryStats(*stats)) {
    if (context.json) {
      json[name] = value;
    } else {
      std::printf("%s %lld\n", name.c_str(), static_cast<long long>(value));
    }
  }
  if (context.json) Print(json);
  return absl::OkStatus();
}

absl::Status Summary(const Context& context, const std::optional<std::string>& session) {
  const absl::StatusOr<v1::ListSessionsResponse> sessions = SessionsFor(context, session);
  if (!sessions.ok()) return sessions.status();
  const absl::StatusOr<MemoryStats> stats = SumOn(*sessions, context.device);
  if (!stats.ok()) return stats.status();
  if (!context.json) {
    const std::string name = session.has_value() ? sessions->sessions(0).name() : "";
    std::printf("%s", MemorySummary(name, context.device, *stats, context.abbreviated).c_str());
  } else if (session.has_value()) {
    Print(ToJson(sessions->sessions(0)));
  } else {
    Print(SessionsJson(*sessions));
  }
  return absl::OkStatus();
}

}  // namespace vrambroker::vramctl
