// SPDX-License-Identifier: Apache-2.0
//
// DriverMemory: how much of a device's capacity is taken by something other than the daemon's accounts, from what the
// driver says is free. Arithmetic: makes no call.
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
  // `headroom`: beyond the capacity, what the driver is to have for contexts of clients; 0: the capacity was chosen
  // without looking at what is free. `most_free`: when no client held anything; 0: not known.
  DriverMemory(const DeviceProperties& device, uint64_t capacity, uint64_t headroom, uint64_t most_free = 0)
      : device_(device), capacity_(capacity), headroom_(headroom), most_free_(most_free) {}

  // ---- What the driver says ----

  // The driver has `free` bytes. The pool holds between `at_least` and `at_most` bytes of its memory: some may have
  // changed hands meanwhile.
  void Update(uint64_t free, uint64_t at_least, uint64_t at_most);
  // The same between two updates of the health: what the driver has for segments may be more by now.
  void UpdateMost(uint64_t free, uint64_t at_most);
  // The driver did not have a segment of `bytes` while the pool had `from_driver` from it, whatever it says is free.
  void Refused(uint64_t bytes, std::optional<uint64_t> free, uint64_t from_driver);
  // The contexts of so many clients take these bytes: they are known, and need not be inferred from what is free.
  void SetContexts(uint64_t bytes, uint64_t clients) { contexts_ = Contexts{.bytes = bytes, .clients = clients}; }
  // All that is in use is of others: there are no sessions yet.
  void StartWithOthers();

  uint64_t free() const { return free_; }

  // ---- What nobody's account is charged with ----

  // What the pool knows of those who hold something.
  struct Known {
    uint64_t declared = 0;      // carried over, by clients' word
    uint64_t carried_over = 0;  // in all
    uint64_t clients = 0;       // COUNT of accounts that have ever held something
  };
  struct Unowned {
    uint64_t elsewhere = 0;  // in use since before the daemon started, and nobody has said for what
    uint64_t outside = 0;    // of the capacity, what the driver does not have
    // Carried over, and no part of the capacity: clients' word beyond what is in use.
    uint64_t beyond_capacity = 0;
  };
  // By all that was said above. To be called after each of it.
  const Unowned& Settle(const Known& known);
  const Unowned& unowned() const { return unowned_; }  // as of the last Settle()
  // In use by other processes when this one started, and still: what they carry over is no more.
  uint64_t foreign() const { return foreign_; }

 private:
  uint64_t Elsewhere(uint64_t in_use, uint64_t declared) const;
  uint64_t Outside(const Known& known) const;
  // What the next client's context is to have.
  uint64_t NextContext(const Known& known) const;

  const DeviceProperties& device_;  // of the device, which outlives this object
  const uint64_t capacity_;
  const uint64_t headroom_;
  const uint64_t most_free_;
  uint64_t free_ = 0;   // as of the last update
  uint64_t known_ = 0;  // that and what came from the driver, at the last update
  uint64_t foreign_ = 0;
  // No less than `known_`: what changed hands during the update counts on both sides. None: the driver has not said.
  std::optional<uint64_t> has_;
  struct Contexts {
    uint64_t bytes = 0;
    uint64_t clients = 0;
  };
  std::optional<Contexts> contexts_;  // none: nobody has said
  // What can be handed out at most, by what the driver has refused since then.
  uint64_t refuses_beyond_ = std::numeric_limits<uint64_t>::max();
  Unowned unowned_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_POOL_DRIVER_MEMORY_H_
