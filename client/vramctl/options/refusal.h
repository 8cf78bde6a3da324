// SPDX-License-Identifier: Apache-2.0
//
// Marks a proper request as refused: wrong use has a different exit status.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_OPTIONS_REFUSAL_H_
#define VRAMBROKER_CLIENT_VRAMCTL_OPTIONS_REFUSAL_H_

#include "absl/status/status.h"
#include "absl/strings/cord.h"

namespace vrambroker::vramctl {

inline absl::Status Refusal(absl::Status status) {
  if (!status.ok()) status.SetPayload("vramctl.refusal", absl::Cord());
  return status;
}

inline bool IsRefusal(const absl::Status& status) {
  return status.GetPayload("vramctl.refusal").has_value();
}

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_OPTIONS_REFUSAL_H_
