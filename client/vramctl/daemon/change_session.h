// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_VRAMCTL_DAEMON_CHANGE_SESSION_H_
#define VRAMBROKER_CLIENT_VRAMCTL_DAEMON_CHANGE_SESSION_H_

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/vramctl/daemon/daemon_calls.h"
#include "client/vramctl/views/session_change.h"
#include "vrambroker/v1/admin.pb.h"

namespace vrambroker::vramctl {

// Result of a change.
struct ChangeResult {
  std::string name;                // of the session, if the daemon sent a name
  std::vector<std::string> lines;  // for people: "limit 64.00 MiB on device 0, reserved 40.00 MiB"
  std::string warning;             // for people; empty: none
  nlohmann::ordered_json json;     // for scripts
};

// Makes the daemon change the session.
absl::StatusOr<ChangeResult> ChangeSession(Daemon& daemon, const v1::SessionRef& session, const SessionChange& change);

// Changes the very session seen by the operator some time ago. NotFound: the session has ended, and nothing was done.
absl::StatusOr<ChangeResult> CarryOut(Daemon& daemon, const SessionOrder& order);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_DAEMON_CHANGE_SESSION_H_
