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

// What came of a change.
struct ChangeResult {
  std::string name;                // of the session, where the daemon said it
  std::vector<std::string> lines;  // for people: "limit 64.00 MiB on device 0, reserved 40.00 MiB"
  std::string warning;             // for people; empty: none
  nlohmann::ordered_json json;     // for scripts
};

// Has the daemon do it.
absl::StatusOr<ChangeResult> ChangeSession(Daemon& daemon, const v1::SessionRef& session, const SessionChange& change);

// The same for an operator who saw the session some time ago. NotFound: it has ended, and nothing was done.
absl::StatusOr<ChangeResult> CarryOut(Daemon& daemon, const SessionOrder& order);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_DAEMON_CHANGE_SESSION_H_
