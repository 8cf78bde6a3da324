// SPDX-License-Identifier: Apache-2.0
//
// Changes of a session by an operator, as values: commands send changes at once, top after a question.
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

// A change of the very session shown to the operator.
struct SessionOrder {
  v1::Session session;
  SessionChange change;
};

// Finds the current state of the session; null: ended. A restarted daemon may reuse an id, and a name is free again
// after its session has ended: all identifying fields must be unchanged.
const v1::Session* FindSession(const v1::ListSessionsResponse& all, const v1::Session& session);

// Parses "-5". InvalidArgument: not a whole number; the daemon checks the bounds.
absl::StatusOr<int32_t> ParsePriority(absl::string_view text);

// Returns "session trainer (id 5, uid 1000)", printable.
std::string SessionTitle(const v1::Session& session);

// Returns "End session trainer (id 5, uid 1000)", printable.
std::string OrderTitle(const SessionOrder& order);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_SESSION_CHANGE_H_
