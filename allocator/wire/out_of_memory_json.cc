// SPDX-License-Identifier: Apache-2.0
#include "allocator/wire/out_of_memory_json.h"

#include <utility>

#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "allocator/replay/pickle.h"

namespace vrambroker {
namespace {

// Clients have no library for JSON: PickleValue serves, as for snapshots.
using Value = PickleValue;

class Object {
 public:
  Object& Add(absl::string_view key, Value value) {
    pairs_.emplace_back(Value::String(key), std::move(value));
    return *this;
  }
  Object& Add(absl::string_view key, uint64_t value) { return Add(key, Value::Uint(value)); }
  Object& Add(absl::string_view key, const std::string& value) { return Add(key, Value::String(value)); }
  Value Take() { return Value::Dict(std::move(pairs_)); }

 private:
  Value::Pairs pairs_;
};

// Converts each item by `to_value`.
template <typename Items, typename ToValue>
Value List(const Items& items, const ToValue& to_value) {
  Value::Items values;
  for (const auto& item : items) values.push_back(to_value(item));
  return Value::List(std::move(values));
}

// A name of an enum without its prefix: "CAUSE_LIMIT" as "LIMIT".
std::string Short(const std::string& name, absl::string_view prefix) {
  return std::string(absl::StripPrefix(name, prefix));
}

Value ToValue(const v1::OutOfMemory::Holder& holder) {
  return Object()
      .Add("client", holder.client())
      .Add("reserved_bytes", holder.reserved_bytes())
      .Add("allocated_bytes", holder.allocated_bytes())
      .Take();
}

Value ToValue(const v1::OutOfMemory::IdleHolder& holder) {
  return Object()
      .Add("client", holder.client())
      .Add("idle_bytes", holder.idle_bytes())
      .Add("why", Short(v1::OutOfMemory::IdleHolder::Why_Name(holder.why()), "WHY_"))
      .Take();
}

Value ToValue(const v1::OutOfMemory::Holes::PinningBlock& block) {
  return Object()
      .Add("address", block.address())
      .Add("block_bytes", block.block_bytes())
      .Add("held_seconds", block.held_seconds())
      .Add("scope", block.scope())
      .Take();
}

Value ToValue(const v1::OutOfMemory::Holes::PinnedSegment& pinned) {
  return Object()
      .Add("address", pinned.address())
      .Add("segment_bytes", pinned.segment_bytes())
      .Add("hole_bytes", pinned.hole_bytes())
      .Add("largest_hole_bytes", pinned.largest_hole_bytes())
      .Add("pinning_blocks", pinned.pinning_blocks())
      .Add("longest_held", List(pinned.longest_held(), [](const auto& block) { return ToValue(block); }))
      .Take();
}

Value ToValue(const v1::OutOfMemory::ScopeUse& use) {
  return Object()
      .Add("scope", use.scope())
      .Add("allocated_bytes", use.allocated_bytes())
      .Add("bytes_at_peak", use.bytes_at_peak())
      .Add("blocks", use.blocks())
      .Add("pinned_hole_bytes", use.pinned_hole_bytes())
      .Take();
}

}  // namespace

std::string OutOfMemoryJson(const v1::OutOfMemory& oom) {
  const auto list = [](const auto& items) { return List(items, [](const auto& item) { return ToValue(item); }); };
  return WriteJson(Object()
                       .Add("cause", Short(v1::OutOfMemory::Cause_Name(oom.cause()), "CAUSE_"))
                       .Add("device", oom.device())
                       .Add("requested_bytes", oom.requested_bytes())
                       .Add("block_bytes", oom.block_bytes())
                       .Add("segment_bytes", oom.segment_bytes())
                       .Add("room_bytes", oom.room_bytes())
                       .Add("limit_bytes", oom.limit_bytes())
                       .Add("guarantee_bytes", oom.guarantee_bytes())
                       .Add("reserved_bytes", oom.reserved_bytes())
                       .Add("allocated_bytes", oom.allocated_bytes())
                       .Add("idle_bytes", oom.idle_bytes())
                       .Add("inactive_split_bytes", oom.inactive_split_bytes())
                       .Add("largest_free_block_bytes", oom.largest_free_block_bytes())
                       .Add("hole_bytes", oom.holes().hole_bytes())
                       .Add("holes", oom.holes().holes())
                       .Add("hole_segments", oom.holes().segments())
                       .Add("pinned_segments", list(oom.holes().most_bytes()))
                       .Add("device_capacity_bytes", oom.device_capacity_bytes())
                       .Add("device_available_bytes", oom.device_available_bytes())
                       .Add("device_kept_free_bytes", oom.device_kept_free_bytes())
                       .Add("device_idle_bytes", oom.device_idle_bytes())
                       .Add("device_quarantined_bytes", oom.device_quarantined_bytes())
                       .Add("largest_holders", list(oom.largest_holders()))
                       .Add("idle_elsewhere_bytes", oom.idle_elsewhere_bytes())
                       .Add("idle_holders", list(oom.idle_holders()))
                       .Add("waited_ms", oom.waited_ms())
                       .Add("user_limit_bytes", oom.user_limit_bytes())
                       .Add("user_reserved_bytes", oom.user_reserved_bytes())
                       .Add("claim", oom.claim())
                       .Add("claim_limit_bytes", oom.claim_limit_bytes())
                       .Add("claim_reserved_bytes", oom.claim_reserved_bytes())
                       .Add("scope", oom.scope())
                       .Add("scopes", list(oom.scopes()))
                       .Add("refusal", oom.refusal())
                       .Add("explanation", oom.explanation())
                       .Add("advice", oom.advice())
                       .Take());
}

}  // namespace vrambroker
