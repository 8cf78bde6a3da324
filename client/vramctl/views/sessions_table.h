// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_VRAMCTL_VIEWS_SESSIONS_TABLE_H_
#define VRAMBROKER_CLIENT_VRAMCTL_VIEWS_SESSIONS_TABLE_H_

#include <string>

#include "absl/time/time.h"
#include "vrambroker/v1/admin.pb.h"

namespace vrambroker::vramctl {

inline constexpr int kSessionsColumns = 100;  // default, if the output is not a terminal

// Returns the table of vramctl sessions: a row for each session and device, in lines of at most `width` cells. Omits
// columns in which all rows are empty (no guarantee, nobody waits), then the least important columns without room. Cuts
// names and commands if necessary.
std::string SessionsTable(const v1::ListSessionsResponse& sessions, absl::Time now, int width);

// Formats "45s", "12m", "3h05m", "9d04h".
std::string ShortAge(absl::Duration age);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_SESSIONS_TABLE_H_
