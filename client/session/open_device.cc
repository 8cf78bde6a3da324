// SPDX-License-Identifier: Apache-2.0
#include "client/session/open_device.h"

#include <array>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "allocator/device/cuda_device.h"
#include "allocator/device/host_device.h"

namespace vrambroker::client_internal {
namespace {

using Opened = absl::StatusOr<std::unique_ptr<SegmentOpener>>;

Opened OpenHost(const DeviceInfo& info) {
  return MakeHostDevice(info.ordinal, 0);
}

// Matches by UUID: ordinals in this process may differ from the daemon's.
Opened OpenCuda(const DeviceInfo& info) {
  absl::StatusOr<std::vector<std::unique_ptr<Device>>> visible = MakeCudaDevices();
  if (!visible.ok()) return visible.status();
  for (std::unique_ptr<Device>& device : *visible) {
    if (device->properties().uuid == info.uuid) return std::move(device);
  }
  return absl::FailedPreconditionError(absl::StrCat("device ", info.ordinal, " (", info.uuid,
                                                    ") is not visible to this process; see CUDA_VISIBLE_DEVICES"));
}

struct Kind {
  const char* name;
  Opened (*open)(const DeviceInfo& info);
};
constexpr std::array<Kind, 2> kKinds = {{{"host", OpenHost}, {"cuda", OpenCuda}}};

}  // namespace

Opened OpenDevice(const DeviceInfo& info) {
  for (const Kind& kind : kKinds) {
    if (info.kind == kind.name) return kind.open(info);
  }
  return absl::FailedPreconditionError(absl::StrCat("device ", info.ordinal, " (", info.uuid,
                                                    ") is of a kind that this client library does not know (",
                                                    info.kind, "): update the library"));
}

}  // namespace vrambroker::client_internal
