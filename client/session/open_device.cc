// SPDX-License-Identifier: Apache-2.0
#include "client/session/open_device.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "allocator/device/cuda_device.h"
#include "allocator/device/host_device.h"

namespace vrambroker::client_internal {
namespace {

// Matches by UUID: ordinals in this process may differ from the daemon's.
absl::StatusOr<std::unique_ptr<SegmentOpener>> OpenCuda(const DeviceInfo& info) {
  absl::StatusOr<std::vector<std::unique_ptr<Device>>> visible = MakeCudaDevices();
  if (!visible.ok()) return visible.status();
  for (std::unique_ptr<Device>& device : *visible) {
    if (device->properties().uuid == info.uuid) return std::move(device);
  }
  return absl::FailedPreconditionError(absl::StrCat("device ", info.ordinal, " (", info.uuid,
                                                    ") is not visible to this process; see CUDA_VISIBLE_DEVICES"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<SegmentOpener>> OpenDevice(const DeviceInfo& info) {
  if (info.kind == "host") return MakeHostDevice(info.ordinal, 0);
  if (info.kind == "cuda") return OpenCuda(info);
  return absl::FailedPreconditionError(absl::StrCat("device ", info.ordinal, " (", info.uuid,
                                                    ") is of a kind that this client library does not know (",
                                                    info.kind, "): update the library"));
}

}  // namespace vrambroker::client_internal
