// SPDX-License-Identifier: Apache-2.0
#include "client/heap/out_of_memory.h"

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "allocator/base/bytes.h"
#include "allocator/wire/out_of_memory_json.h"
#include "client/heap/out_of_memory_json.h"

namespace vrambroker {
namespace client_internal {
namespace {

constexpr absl::string_view kOutOfMemoryUrl = "type.googleapis.com/vrambroker.v1.OutOfMemory";

using IdleWhy = OutOfMemory::IdleHolder::Why;

IdleWhy FromProto(v1::OutOfMemory::IdleHolder::Why why) {
  switch (why) {
    case v1::OutOfMemory::IdleHolder::WHY_WITHIN_GUARANTEE:
      return IdleWhy::kWithinGuarantee;
    case v1::OutOfMemory::IdleHolder::WHY_IN_PART_USED:
      return IdleWhy::kInPartUsed;
    case v1::OutOfMemory::IdleHolder::WHY_DID_NOT_ANSWER:
      return IdleWhy::kDidNotAnswer;
    case v1::OutOfMemory::IdleHolder::WHY_DISCONNECTED:
      return IdleWhy::kDisconnected;
    case v1::OutOfMemory::IdleHolder::WHY_NOT_ASKED:
      return IdleWhy::kNotAsked;
    case v1::OutOfMemory::IdleHolder::WHY_KEPT:
      return IdleWhy::kKept;
    default:
      return IdleWhy::kUnknown;
  }
}

std::optional<v1::OutOfMemory> DetailOf(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(kOutOfMemoryUrl);
  v1::OutOfMemory proto;
  if (!payload.has_value() || !proto.ParseFromString(std::string(*payload))) return std::nullopt;
  return proto;
}

}  // namespace

OutOfMemory FromProto(const v1::OutOfMemory& proto) {
  OutOfMemory oom;
  switch (proto.cause()) {
    case v1::OutOfMemory::CAUSE_LIMIT:
      oom.cause = OutOfMemory::Cause::kLimit;
      break;
    case v1::OutOfMemory::CAUSE_CAPACITY:
      oom.cause = OutOfMemory::Cause::kCapacity;
      break;
    case v1::OutOfMemory::CAUSE_FRAGMENTATION:
      oom.cause = OutOfMemory::Cause::kFragmentation;
      break;
    case v1::OutOfMemory::CAUSE_LARGER_THAN_DEVICE:
      oom.cause = OutOfMemory::Cause::kLargerThanDevice;
      break;
    default:
      break;
  }
  oom.device = static_cast<int>(proto.device());
  oom.requested_bytes = proto.requested_bytes();
  oom.segment_bytes = proto.segment_bytes();
  oom.limit_bytes = proto.limit_bytes();
  oom.reserved_bytes = proto.reserved_bytes();
  oom.allocated_bytes = proto.allocated_bytes();
  oom.idle_bytes = proto.idle_bytes();
  oom.largest_free_block_bytes = proto.largest_free_block_bytes();
  oom.device_capacity_bytes = proto.device_capacity_bytes();
  oom.device_available_bytes = proto.device_available_bytes();
  for (const v1::OutOfMemory::Holder& holder : proto.largest_holders()) {
    oom.largest_holders.push_back({.client = holder.client(),
                                   .reserved_bytes = holder.reserved_bytes(),
                                   .allocated_bytes = holder.allocated_bytes()});
  }
  oom.advice = proto.advice();
  oom.guarantee_bytes = proto.guarantee_bytes();
  oom.inactive_split_bytes = proto.inactive_split_bytes();
  oom.device_kept_free_bytes = proto.device_kept_free_bytes();
  oom.device_idle_bytes = proto.device_idle_bytes();
  oom.device_quarantined_bytes = proto.device_quarantined_bytes();
  oom.idle_elsewhere_bytes = proto.idle_elsewhere_bytes();
  for (const v1::OutOfMemory::IdleHolder& holder : proto.idle_holders()) {
    oom.idle_holders.push_back(
        {.client = holder.client(), .idle_bytes = holder.idle_bytes(), .why = FromProto(holder.why())});
  }
  oom.waited_ms = proto.waited_ms();
  oom.explanation = proto.explanation();
  oom.block_bytes = proto.block_bytes();
  oom.room_bytes = proto.room_bytes();
  oom.hole_bytes = proto.holes().hole_bytes();
  oom.holes = proto.holes().holes();
  oom.hole_segments = proto.holes().segments();
  for (const v1::OutOfMemory::Holes::PinnedSegment& from : proto.holes().most_bytes()) {
    OutOfMemory::PinnedSegment& to = oom.pinned_segments.emplace_back();
    to.address = from.address();
    to.segment_bytes = from.segment_bytes();
    to.hole_bytes = from.hole_bytes();
    to.largest_hole_bytes = from.largest_hole_bytes();
    to.pinning_blocks = from.pinning_blocks();
    for (const v1::OutOfMemory::Holes::PinningBlock& block : from.longest_held()) {
      to.longest_held.push_back({.address = block.address(),
                                 .block_bytes = block.block_bytes(),
                                 .held_seconds = block.held_seconds(),
                                 .scope = block.scope()});
    }
  }
  oom.refusal = proto.refusal();
  oom.scope = proto.scope();
  for (const v1::OutOfMemory::ScopeUse& use : proto.scopes()) {
    oom.scopes.push_back({.scope = use.scope(),
                          .allocated_bytes = use.allocated_bytes(),
                          .bytes_at_peak = use.bytes_at_peak(),
                          .blocks = use.blocks(),
                          .pinned_hole_bytes = use.pinned_hole_bytes()});
  }
  return oom;
}

absl::Status OutOfMemoryError(const v1::OutOfMemory& oom) {
  absl::Status status = absl::ResourceExhaustedError(absl::StrCat(
      "out of memory (", absl::AsciiStrToLower(OutOfMemoryCauseName(FromProto(oom).cause)), ") on device ",
      oom.device(), ": ", FormatBytesExactly(oom.requested_bytes()), " requested; ", oom.explanation(), "; limit ",
      FormatBytesExactly(oom.limit_bytes()), ", reserved ", FormatBytesExactly(oom.reserved_bytes()), ", allocated ",
      FormatBytesExactly(oom.allocated_bytes()), ". ", oom.advice()));
  status.SetPayload(kOutOfMemoryUrl, absl::Cord(oom.SerializeAsString()));
  return status;
}

std::string OutOfMemoryJsonOf(const absl::Status& status) {
  const std::optional<v1::OutOfMemory> detail = DetailOf(status);
  return detail.has_value() ? OutOfMemoryJson(*detail) : "";
}

}  // namespace client_internal

const char* OutOfMemoryCauseName(OutOfMemory::Cause cause) {
  switch (cause) {
    case OutOfMemory::Cause::kUnknown:
      break;
    case OutOfMemory::Cause::kLimit:
      return "LIMIT";
    case OutOfMemory::Cause::kCapacity:
      return "CAPACITY";
    case OutOfMemory::Cause::kFragmentation:
      return "FRAGMENTATION";
    case OutOfMemory::Cause::kLargerThanDevice:
      return "LARGER_THAN_DEVICE";
  }
  return "UNKNOWN";
}

const char* IdleWhyName(OutOfMemory::IdleHolder::Why why) {
  switch (why) {
    case OutOfMemory::IdleHolder::Why::kUnknown:
      break;
    case OutOfMemory::IdleHolder::Why::kWithinGuarantee:
      return "WITHIN_GUARANTEE";
    case OutOfMemory::IdleHolder::Why::kInPartUsed:
      return "IN_PART_USED";
    case OutOfMemory::IdleHolder::Why::kDidNotAnswer:
      return "DID_NOT_ANSWER";
    case OutOfMemory::IdleHolder::Why::kDisconnected:
      return "DISCONNECTED";
    case OutOfMemory::IdleHolder::Why::kNotAsked:
      return "NOT_ASKED";
    case OutOfMemory::IdleHolder::Why::kKept:
      return "KEPT";
  }
  return "UNKNOWN";
}

std::optional<OutOfMemory> GetOutOfMemory(const absl::Status& status) {
  const std::optional<v1::OutOfMemory> detail = client_internal::DetailOf(status);
  if (!detail.has_value()) return std::nullopt;
  return client_internal::FromProto(*detail);
}

}  // namespace vrambroker
