// SPDX-License-Identifier: Apache-2.0
//
// A status carrying an exit code, for vramctl run: the exit code of its program.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_OPTIONS_EXIT_CODE_H_
#define VRAMBROKER_CLIENT_VRAMCTL_OPTIONS_EXIT_CODE_H_

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace vrambroker::vramctl {

inline constexpr char kExitCodePayload[] = "vramctl.exit_code";

// vramctl prints nothing for a status without a message.
inline absl::Status WithExitCode(absl::Status status, int code) {
  status.SetPayload(kExitCodePayload, absl::Cord(absl::StrCat(code)));
  return status;
}

inline std::optional<int> ExitCodeOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kExitCodePayload);
  int code = 0;
  if (!payload.has_value() || !absl::SimpleAtoi(std::string(*payload), &code)) return std::nullopt;
  return code;
}

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_OPTIONS_EXIT_CODE_H_
