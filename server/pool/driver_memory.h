// SPDX-License-Identifier: Apache-2.0
//
// DriverMemory: infers from the driver's free memory how much of a device's capacity is taken by anything but the
// daemon's accounts. Arithmetic: makes no call.
#ifndef VRAMBROKER_SERVER_POOL_DRIVER_MEMORY_H_
#define VRAMBROKER_SERVER_POOL_DRIVER_MEMORY_H_

#include <cstdint>
#include <limits>
#include <optional>

#include "allocator/device/device.h"

namespace vrambroker {

// A plain class, not thread-safe. All figures are bytes.
class DriverMemory {
 public:
  // `headroom`: memory beyond the capacity, for contexts of clients; 0: the capacity was chosen without looking at free
  // memory. `most_free`: free bytes when no client held anything; 0: not known.
  DriverMemory(const DeviceProperties& device, uint64_t capacity, uint64_t headroom, uint64_t most_free = 0)
      : device_(device), capacity_(capacity), headroom_(headroom), most_free_(most_free) {}

  // ---- Figures from the driver ----

  // Records `free` bytes at the driver. The pool holds between `at_least` and `at_most` bytes of the driver's memory:
  // some may have changed hands meanwhile.
  void Update(uint64_t free, uint64_t at_least, uint64_t at_most);
  // Records free bytes between two health updates: the driver may have more for segments by now.
  void UpdateMost(uint64_t free, uint64_t at_most);
  // Records a refused segment of `bytes` while the pool had `from_driver` from the driver, whatever the driver says is
  // free.
  void Refused(uint64_t bytes, std::optional<uint64_t> free, uint64_t from_driver);
  // Sets the known size of the contexts of `clients` clients: no need to infer the size from free memory.
  void SetContexts(uint64_t bytes, uint64_t clients) { contexts_ = Contexts{.bytes = bytes, .clients = clients}; }
  // Counts all memory in use as foreign: there are no sessions yet.
  void StartWithOthers();

  uint64_t free() const { return free_; }

  // ---- Memory charged to no account ----

  // Figures the pool has about holders of memory.
  struct Known {
    uint64_t declared = 0;      // carried over, by clients' word
    uint64_t carried_over = 0;  // in all
    uint64_t clients = 0;       // COUNT of accounts that have ever held something
  };
  struct Unowned {
    uint64_t elsewhere = 0;  // in use since before the daemon started, for undeclared purposes
    uint64_t outside = 0;    // part of the capacity missing at the driver
    // Carried over outside the capacity: clients' word beyond the memory in use.
    uint64_t beyond_capacity = 0;
  };
  // Computes the result from all figures above. To be called after each change of a figure.
  const Unowned& Settle(const Known& known);
  const Unowned& unowned() const { return unowned_; }  // as of the last Settle()
  // In use by foreign processes since before the daemon started; bounds their carried-over memory.
  uint64_t foreign() const { return foreign_; }

 private:
  uint64_t Elsewhere(uint64_t in_use, uint64_t declared) const;
  uint64_t Outside(const Known& known) const;
  // Memory to leave for the next client's context.
  uint64_t NextContext(const Known& known) const;

  const DeviceProperties& device_;  // owned by the device, which outlives this object
  const uint64_t capacity_;
  const uint64_t headroom_;
  const uint64_t most_free_;
  uint64_t free_ = 0;   // as of the last update
  uint64_t known_ = 0;  // free_ plus bytes from the driver, at the last update
  uint64_t foreign_ = 0;
  // At least `known_`: memory changing hands during the update counts on both sides. None: no figure from the driver
  // yet.
  std::optional<uint64_t> has_;
  struct Contexts {
    uint64_t bytes = 0;
    uint64_t clients = 0;
  };
  std::optional<Contexts> contexts_;  // none: not set
  // Most bytes to hand out, by the driver's refusals since the last update.
  uint64_t refuses_beyond_ = std::numeric_limits<uint64_t>::max();
  Unowned unowned_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_POOL_DRIVER_MEMORY_H_
