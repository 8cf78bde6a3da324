// SPDX-License-Identifier: Apache-2.0
//
// Which devices the daemon serves, and how much of each.
#ifndef VRAMBROKER_SERVER_DEVICES_H_
#define VRAMBROKER_SERVER_DEVICES_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "allocator/device/device.h"
#include "server/config/config.h"
#include "server/identity/saved_state.h"

namespace vrambroker {

// A device, and how much of it the daemon may own.
struct ChosenDevice {
  std::unique_ptr<Device> device;
  uint64_t capacity_bytes = 0;
  uint64_t headroom_bytes = 0;  // beyond it, if it is what was free: see SegmentPoolOptions
  uint64_t most_free_bytes = 0;
};

// The devices that the configuration asks for. Logs which were chosen and why. `state` is what the last run has left;
// what this one is to leave goes into it.
absl::StatusOr<std::vector<ChosenDevice>> ChooseDevices(const Config& config, SavedState* state);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_DEVICES_H_
