// SPDX-License-Identifier: Apache-2.0
//
// Chooses the devices to serve, and the capacity of each.
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

// A device, and the most bytes that the daemon may own.
struct ChosenDevice {
  std::unique_ptr<SegmentOwner> device;
  uint64_t capacity_bytes = 0;
  uint64_t headroom_bytes = 0;  // beyond the capacity, if the capacity was the free memory: see SegmentPoolOptions
  uint64_t most_free_bytes = 0;
};

// Returns the configured devices. Logs the choice and the reasons. `state`: the last run's state; updated with the
// state of this run.
absl::StatusOr<std::vector<ChosenDevice>> ChooseDevices(const Config& config, SavedState* state);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_DEVICES_H_
