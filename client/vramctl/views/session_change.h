// SPDX-License-Identifier: Apache-2.0
//
// What an operator may change of a session, as values: the commands send them at once, top after a question.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_VIEWS_SESSION_CHANGE_H_
#define VRAMBROKER_CLIENT_VRAMCTL_VIEWS_SESSION_CHANGE_H_

#include <cstdint>
#include <string>
#include <variant>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/vrambroker/client.h"
#include "vrambroker/v1/admin.pb.h"

namespace vrambroker::vramctl {

struct LimitChange {
  Limit limit;
};
struct GuaranteeChange {
  Limit guarantee;
};
struct PriorityChange {
  int32_t priority;
};
struct TrimChange {};
struct EndChange {};
using SessionChange = std::variant<LimitChange, GuaranteeChange, PriorityChange, TrimChange, EndChange>;

// A change of the very session that was shown to the operator.
struct SessionOrder {
  v1::Session session;
  SessionChange change;
};

// That session as it is now; null: it has ended. Another daemon may use an id again, and a name goes to the next
// session when its owner has ended: so all that tells sessions apart must be as it was.
const v1::Session* FindSession(const v1::ListSessionsResponse& all, const v1::Session& session);

// Reads "-5". InvalidArgument: anything but a whole number; the daemon knows the bounds.
absl::StatusOr<int32_t> ParsePriority(absl::string_view text);

// "session trainer (id 5, uid 1000)", printable.
std::string SessionTitle(const v1::Session& session);

// "End session trainer (id 5, uid 1000)", printable.
std::string OrderTitle(const SessionOrder& order);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_SESSION_CHANGE_H_
