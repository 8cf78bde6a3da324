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
  // The next update may find more.
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
  // What clients say beyond that takes nothing from others: it is outside of a capacity that was chosen by what was
  // free, or it is not true. Of a capacity that was chosen otherwise it is a part as far as others have come to use the
  // device since clients held nothing.
  const uint64_t since = most_free_ == 0 ? 0 : SaturatingSub(foreign_, SaturatingSub(device_.total_bytes, most_free_));
  if (device_.kind == DeviceKind::kCuda) {
    unowned_.beyond_capacity = SaturatingSub(known.declared, std::max(in_use, since));
  }
  unowned_.outside = Outside(known);
  return unowned_;
}

// In use elsewhere are, beside what is carried over, contexts: what the capacity leaves of the device is for these. As
// long as they cannot be all that nobody has declared, none of it is given to anybody: what is free stays above the
// headroom. Once they can, they are within the headroom.
uint64_t DriverMemory::Elsewhere(uint64_t in_use, uint64_t declared) const {
  const uint64_t undeclared = SaturatingSub(in_use, declared);
  return undeclared > headroom_ ? undeclared : 0;
}

// The capacity was chosen once. Since then contexts of clients have come, and maybe other programs, and the driver has
// less for segments: what it has now, less what the next client's context needs, is all that can be handed out. Without
// this, the ledger would grant what the driver refuses, and nobody would be asked for memory or wait for it.
uint64_t DriverMemory::Outside(const Known& known) const {
  if (device_.kind != DeviceKind::kCuda || !has_.has_value()) return 0;
  const uint64_t has = std::min(SaturatingSub(*has_, NextContext(known)), refuses_beyond_);
  // What is carried over is charged, too, and none of what the driver has.
  return SaturatingSub(capacity_ + unowned_.beyond_capacity, has + known.carried_over + unowned_.elsewhere);
}

// The headroom, as long as contexts have not used it up; then as much as the contexts of this device take on average.
// Nothing when the capacity was chosen without looking at what is free.
uint64_t DriverMemory::NextContext(const Known& known) const {
  if (headroom_ == 0) return 0;
  const uint64_t total = device_.total_bytes;
  const uint64_t at_start = SaturatingSub(total, capacity_ + headroom_);  // in use, beside what is carried over
  const uint64_t in_use = SaturatingSub(total, has_.value_or(total));
  const uint64_t contexts = SaturatingSub(in_use, at_start + known.carried_over + unowned_.elsewhere);
  // What other programs use is no context of a client: where that is known, it does not count for the average.
  const Contexts of_clients = contexts_.value_or(Contexts{.bytes = contexts, .clients = known.clients});
  const uint64_t average = std::min(headroom_, of_clients.bytes / std::max<uint64_t>(1, of_clients.clients));
  return std::max(SaturatingSub(headroom_, contexts), average);
}

}  // namespace vrambroker
