// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/views/session_change.h"

#include <algorithm>
#include <tuple>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "client/vramctl/views/bars.h"

namespace vrambroker::vramctl {
namespace {

std::string LimitText(const Limit& limit) {
  if (const double* fraction = std::get_if<double>(&limit)) return absl::StrCat(*fraction, " of the capacity");
  return FormatBytes(std::get<uint64_t>(limit));
}

}  // namespace

const v1::Session* FindSession(const v1::ListSessionsResponse& all, const v1::Session& session) {
  const auto identity = [](const v1::Session& of) {
    return std::make_tuple(of.id(), of.name(), of.pid(), of.uid(), of.started().seconds(), of.started().nanos());
  };
  const auto found = std::find_if(all.sessions().begin(), all.sessions().end(), [&](const v1::Session& each) {
    return identity(each) == identity(session) && each.state() != v1::SESSION_STATE_ENDED;
  });
  return found == all.sessions().end() ? nullptr : &*found;
}

absl::StatusOr<int32_t> ParsePriority(absl::string_view text) {
  int32_t priority = 0;
  if (absl::SimpleAtoi(text, &priority)) return priority;
  return absl::InvalidArgumentError(
      absl::StrCat("priority: '", text, "' is not a whole number; -1000 to 1000, higher is more important"));
}

std::string SessionTitle(const v1::Session& session) {
  return absl::StrCat("session ", Printable(session.name()), " (id ", session.id(), ", uid ", session.uid(), ")");
}

std::string OrderTitle(const SessionOrder& order) {
  const std::string session = SessionTitle(order.session);
  struct Title {
    const std::string& session;
    std::string operator()(const LimitChange& change) const {
      return absl::StrCat("Set the limit of ", session, " to ", LimitText(change.limit));
    }
    std::string operator()(const GuaranteeChange& change) const {
      return absl::StrCat("Set the guarantee of ", session, " to ", LimitText(change.guarantee));
    }
    std::string operator()(const PriorityChange& change) const {
      return absl::StrCat("Set the priority of ", session, " to ", change.priority);
    }
    std::string operator()(const TrimChange& /*change*/) const { return absl::StrCat("Trim ", session); }
    std::string operator()(const EndChange& /*change*/) const { return absl::StrCat("End ", session); }
  };
  return std::visit(Title{session}, order.change);
}

}  // namespace vrambroker::vramctl
