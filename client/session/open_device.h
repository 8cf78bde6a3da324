// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_SESSION_OPEN_DEVICE_H_
#define VRAMBROKER_CLIENT_SESSION_OPEN_DEVICE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "allocator/device/device.h"
#include "client/vrambroker/client.h"

namespace vrambroker::client_internal {

// Opens a device of the daemon in this process. FailedPrecondition when the process does not see the device, or the
// library does not know its kind; Unavailable without a usable driver.
absl::StatusOr<std::unique_ptr<SegmentOpener>> OpenDevice(const DeviceInfo& info);

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_SESSION_OPEN_DEVICE_H_
