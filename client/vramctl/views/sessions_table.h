// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_VRAMCTL_VIEWS_SESSIONS_TABLE_H_
#define VRAMBROKER_CLIENT_VRAMCTL_VIEWS_SESSIONS_TABLE_H_

#include <string>

#include "absl/time/time.h"
#include "vrambroker/v1/admin.pb.h"

namespace vrambroker::vramctl {

inline constexpr int kSessionsColumns = 100;  // where the output is no terminal

// The table of vramctl sessions: a row for each session and device, in lines of at most `width` cells. Columns in which
// every row says the same nothing (no guarantee, nobody waits) are left out, then the least important ones that do not
// fit. Names and commands are cut where there is no room for them.
std::string SessionsTable(const v1::ListSessionsResponse& sessions, absl::Time now, int width);

// "45s", "12m", "3h05m", "9d04h".
std::string ShortAge(absl::Duration age);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_SESSIONS_TABLE_H_
