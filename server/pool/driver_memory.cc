// SPDX-License-Identifier: Apache-2.0
#include "server/pool/driver_memory.h"

#include <algorithm>

#include "allocator/base/segment_bytes.h"
#include "server/base/saturating.h"

namespace vrambroker {

void DriverMemory::Update(uint64_t free, uint64_t at_least, uint64_t at_most) {
  free_ = free;
  known_ = free + at_least;
  UpdateMost(free, at_most);
}

void DriverMemory::UpdateMost(uint64_t free, uint64_t at_most) {
  has_ = free + at_most;
  refuses_beyond_ = std::numeric_limits<uint64_t>::max();
}

void DriverMemory::Refused(uint64_t bytes, std::optional<uint64_t> free, uint64_t from_driver) {
  // Expect less than the refused bytes; the next update may find more.
  const uint64_t most = SaturatingSub(bytes, kSegmentGranuleBytes);
  refuses_beyond_ = from_driver + std::min(free.value_or(most), most);
}

void DriverMemory::StartWithOthers() {
  foreign_ = SaturatingSub(device_.total_bytes, known_);
}

const DriverMemory::Unowned& DriverMemory::Settle(const Known& known) {
  foreign_ = std::min(foreign_, SaturatingSub(device_.total_bytes, known_));
  const uint64_t in_use = SaturatingSub(foreign_, SaturatingSub(device_.total_bytes, capacity_ + headroom_));
  unowned_.elsewhere = Elsewhere(in_use, known.declared);
  // Declared bytes beyond `in_use` take nothing from accounts: the claim is false, or refers to memory outside a
  // capacity chosen by free memory. For a capacity chosen otherwise, declared bytes are part of it as far as use of the
  // device has grown since clients held nothing.
  const uint64_t since = most_free_ == 0 ? 0 : SaturatingSub(foreign_, SaturatingSub(device_.total_bytes, most_free_));
  if (device_.has_other_programs) {
    unowned_.beyond_capacity = SaturatingSub(known.declared, std::max(in_use, since));
  }
  unowned_.outside = Outside(known);
  return unowned_;
}

// Memory in use elsewhere consists of carried-over memory and contexts; the headroom is meant for the contexts. While
// contexts alone cannot explain all undeclared bytes, none is given to anybody, so free memory stays above the
// headroom. Once contexts can explain all, the bytes are within the headroom.
uint64_t DriverMemory::Elsewhere(uint64_t in_use, uint64_t declared) const {
  const uint64_t undeclared = SaturatingSub(in_use, declared);
  return undeclared > headroom_ ? undeclared : 0;
}

// The capacity was chosen once. Since then, contexts of clients and maybe programs outside the broker have left the
// driver less for segments. Only the driver's current memory, less the need of the next client's context, can be handed
// out. Otherwise the ledger would grant bytes the driver refuses, and no session would be asked for memory or wait for
// it.
uint64_t DriverMemory::Outside(const Known& known) const {
  if (!device_.has_other_programs || !has_.has_value()) return 0;
  const uint64_t has = std::min(SaturatingSub(*has_, NextContext(known)), refuses_beyond_);
  // Carried-over memory is charged, too, and is not part of the driver's memory.
  return SaturatingSub(capacity_ + unowned_.beyond_capacity, has + known.carried_over + unowned_.elsewhere);
}

// The headroom, until contexts have used it up; then the average context on the device. Returns 0 when the capacity was
// chosen without looking at free memory.
uint64_t DriverMemory::NextContext(const Known& known) const {
  if (headroom_ == 0) return 0;
  const uint64_t total = device_.total_bytes;
  const uint64_t at_start = SaturatingSub(total, capacity_ + headroom_);  // in use, beside carried-over memory
  const uint64_t in_use = SaturatingSub(total, has_.value_or(total));
  const uint64_t contexts = SaturatingSub(in_use, at_start + known.carried_over + unowned_.elsewhere);
  // Memory of foreign programs is no client's context: where contexts are known, only they count for the average.
  const Contexts of_clients = contexts_.value_or(Contexts{.bytes = contexts, .clients = known.clients});
  const uint64_t average = std::min(headroom_, of_clients.bytes / std::max<uint64_t>(1, of_clients.clients));
  return std::max(SaturatingSub(headroom_, contexts), average);
}

}  // namespace vrambroker
