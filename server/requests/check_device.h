// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_SERVER_REQUESTS_CHECK_DEVICE_H_
#define VRAMBROKER_SERVER_REQUESTS_CHECK_DEVICE_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace vrambroker {

// NotFound unless `device` is below `devices`, the daemon's number of devices.
inline absl::Status CheckDevice(uint64_t device, size_t devices) {
  if (device < devices) return absl::OkStatus();
  return absl::NotFoundError(
      absl::StrCat("device: no device ", device, "; the daemon has ", devices, devices == 1 ? " device" : " devices"));
}

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_REQUESTS_CHECK_DEVICE_H_
