// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/views/session_output.h"

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "allocator/base/bytes.h"
#include "allocator/wire/admin_json.h"

namespace vrambroker::vramctl {

const char* StateOn(const v1::Session& session, const v1::SessionDevice& device) {
  // A detached session keeps its memory, and its limit no longer matters.
  const bool is_active = session.state() == v1::SESSION_STATE_ACTIVE;
  return is_active && IsOverLimit(device) ? "over limit" : StateName(session.state());
}

bool IsOverLimit(const v1::SessionDevice& device) {
  return device.reserved_bytes() > device.limit_bytes();
}

std::string AskedFor(const Limit& asked, uint64_t granted_bytes, uint64_t capacity_bytes) {
  const double* const fraction = std::get_if<double>(&asked);
  const uint64_t bytes = fraction == nullptr ? std::get<uint64_t>(asked)
                                             : static_cast<uint64_t>(*fraction * static_cast<double>(capacity_bytes));
  if (granted_bytes >= bytes || capacity_bytes == 0) return "";
  return absl::StrCat(
      " (asked for ", FormatBytes(bytes), "; ",
      granted_bytes >= capacity_bytes
          ? absl::StrCat("the device's capacity is ", FormatBytes(capacity_bytes))
          : std::string(
                "the session's choice of devices, its claim, the daemon's policy or an operator allows no more"),
      ")");
}

std::string Waiting(const v1::SessionDevice& device) {
  if (device.waiting().empty()) return "-";
  const v1::WaitingRequest& first = device.waiting(0);
  const absl::Duration waited = absl::Milliseconds(static_cast<int64_t>(first.waited_ms()));
  return absl::StrCat(FormatBytes(first.bytes()), first.guarantee() ? " as guarantee" : "", " for ",
                      absl::FormatDuration(waited), " (place ", first.place(), ")",
                      device.waiting_size() > 1 ? absl::StrCat(" and ", device.waiting_size() - 1, " more") : "");
}

}  // namespace vrambroker::vramctl
