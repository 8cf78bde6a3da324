// SPDX-License-Identifier: Apache-2.0
#include "server/oom/out_of_memory.h"

#include <algorithm>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "allocator/base/bytes.h"
#include "allocator/heap/size_class.h"
#include "allocator/wire/heap_convert.h"
#include "server/base/saturating.h"
#include "server/oom/oom_advice.h"
#include "vrambroker/v1/types.pb.h"

namespace vrambroker {
namespace {

constexpr char kReportUrl[] = "type.googleapis.com/vrambroker.v1.OutOfMemory";

v1::OutOfMemory::Cause ToProto(OomCause cause) {
  switch (cause) {
    case OomCause::kLimit:
      return v1::OutOfMemory::CAUSE_LIMIT;
    case OomCause::kCapacity:
      return v1::OutOfMemory::CAUSE_CAPACITY;
    case OomCause::kFragmentation:
      return v1::OutOfMemory::CAUSE_FRAGMENTATION;
    case OomCause::kLargerThanDevice:
      return v1::OutOfMemory::CAUSE_LARGER_THAN_DEVICE;
  }
  return v1::OutOfMemory::CAUSE_UNSPECIFIED;
}

v1::OutOfMemory::IdleHolder::Why ToProto(IdleWhy why) {
  switch (why) {
    case IdleWhy::kWithinGuarantee:
      return v1::OutOfMemory::IdleHolder::WHY_WITHIN_GUARANTEE;
    case IdleWhy::kInPartUsed:
      return v1::OutOfMemory::IdleHolder::WHY_IN_PART_USED;
    case IdleWhy::kDidNotAnswer:
      return v1::OutOfMemory::IdleHolder::WHY_DID_NOT_ANSWER;
    case IdleWhy::kDisconnected:
      return v1::OutOfMemory::IdleHolder::WHY_DISCONNECTED;
    case IdleWhy::kNotAsked:
      return v1::OutOfMemory::IdleHolder::WHY_NOT_ASKED;
    case IdleWhy::kKept:
      return v1::OutOfMemory::IdleHolder::WHY_KEPT;
  }
  return v1::OutOfMemory::IdleHolder::WHY_UNSPECIFIED;
}

std::string Time(uint64_t seconds) {
  if (seconds < 120) return absl::StrCat(seconds, " s");
  if (seconds < uint64_t{120} * 60) return absl::StrCat(seconds / 60, " min");
  if (seconds < uint64_t{48} * 3600) return absl::StrCat(seconds / 3600, " h");
  return absl::StrCat(seconds / 86400, " days");
}

std::string Counted(uint64_t count, absl::string_view what) {
  return absl::StrCat(count, " ", what, count == 1 ? "" : "s");
}

std::string InScope(absl::string_view scope) {
  return scope.empty() ? "" : absl::StrCat(" in scope ", scope);
}

std::string ExplainPinned(const PinnedSegment& pinned) {
  std::string text =
      absl::StrCat("; the segment with most of them has ", FormatBytes(pinned.hole_bytes), " of ",
                   FormatBytes(pinned.bytes), " in holes, and is pinned by ", Counted(pinned.pinning_blocks, "block"));
  if (pinned.longest_held.empty()) return text;
  const PinningBlock& block = pinned.longest_held.front();
  absl::StrAppend(&text, pinned.pinning_blocks == 1 ? " of " : ", one of ", FormatBytes(block.bytes), " held for ",
                  Time(block.held_seconds), InScope(block.scope));
  return text;
}

std::string ExplainHoles(const OomReport& report) {
  const Holes& holes = report.holes;
  // Only the application knows where its holes are.
  if (holes.count == 0) return absl::StrCat(FormatBytes(HoleBytes(report)), " is unused beside memory in use");
  std::string text = absl::StrCat(FormatBytes(holes.bytes), " is fragmented: ", Counted(holes.count, "hole"),
                                  " between used blocks, in ", Counted(holes.segments, "segment"));
  if (report.pool_free_bytes == 0) {
    absl::StrAppend(&text, ", all of another stream or size than this request");
  } else {
    if (report.pool_free_bytes < holes.bytes) {
      absl::StrAppend(&text, ", ", FormatBytes(report.pool_free_bytes), " of it for this stream and size");
    }
    absl::StrAppend(&text, ", and the largest free block is ", FormatBytesExactly(report.largest_free_block_bytes));
  }
  if (!holes.most_bytes.empty()) absl::StrAppend(&text, ExplainPinned(holes.most_bytes.front()));
  return text;
}

// Names the program's largest scope, if it has named scopes.
std::string ExplainScopes(const OomReport& report) {
  const auto largest = LargestNamedScope(report.scopes);
  if (largest == report.scopes.end() || largest->allocated_bytes == 0) return "";
  return absl::StrCat("; the largest scope is ", largest->scope, ", with ", FormatBytes(largest->allocated_bytes),
                      " in ", Counted(largest->blocks, "block"));
}

std::string NeedsSegment(const OomReport& report) {
  return absl::StrCat("it needs a segment of ", FormatBytesExactly(report.segment_bytes));
}

// Describes the bound on the session's reservation.
std::string Bound(const OomReport& report) {
  const Rooms rooms = RoomsOf(report);
  if (rooms.limit == rooms.least()) return absl::StrCat("the limit of ", FormatBytesExactly(report.limit_bytes));
  const std::string most = FormatBytes(report.reserved_bytes + rooms.least());
  if (rooms.share == rooms.least()) {
    return absl::StrCat("the ", most, " that ", ShareLimitName(report), ", ",
                        FormatBytesExactly(report.share_limit_bytes), ", leaves this session");
  }
  return absl::StrCat("the ", most, " that the device's capacity of ", FormatBytesExactly(report.capacity_bytes),
                      " leaves this session");
}

std::string ExplainFragmentation(const OomReport& report) {
  return absl::StrCat("what is allocated and ", FormatBytes(report.block_bytes), " more would fit within ",
                      Bound(report), ", but ", NeedsSegment(report), ", and only ", FormatBytes(RoomBytes(report)),
                      " can still be reserved; ", ExplainHoles(report));
}

std::string ExplainLimit(const OomReport& report) {
  if (!report.named_devices.empty()) {
    return absl::StrCat("the session has named other devices: ", absl::StrJoin(report.named_devices, ", "));
  }
  if (HasNothingOfDevice(report)) return absl::StrCat("claim ", report.claim, " has nothing of this device");
  if (IsShareLimit(report)) {
    const std::string used = FormatBytesExactly(report.share_used_bytes);
    const std::string limit = FormatBytesExactly(report.share_limit_bytes);
    if (report.share_used_bytes == 0) {
      return absl::StrCat(NeedsSegment(report), ", but ",
                          report.claim.empty() ? "user_limit allows this user's sessions "
                                               : absl::StrCat("the sessions of claim ", report.claim, " may have "),
                          limit, " together");
    }
    return absl::StrCat(NeedsSegment(report), ", but ",
                        report.claim.empty() ? absl::StrCat("this user's sessions already have ", used, " of the ",
                                                            limit, " that user_limit allows them together")
                                             : absl::StrCat("the sessions of claim ", report.claim, " already have ",
                                                            used, " of its limit of ", limit));
  }
  const uint64_t room = RoomsOf(report).limit;
  return absl::StrCat(NeedsSegment(report),
                      room < report.segment_bytes ? ", but only " : ", which did not fit; by now ",
                      FormatBytesExactly(room), " of the limit is left");
}

}  // namespace

namespace {

std::string ExplainCause(const OomReport& report) {
  switch (report.cause) {
    case OomCause::kLimit:
      return ExplainLimit(report);
    case OomCause::kCapacity:
      return absl::StrCat(NeedsSegment(report), ", but only ",
                          FormatBytesExactly(SaturatingSub(report.available_bytes, report.kept_free_bytes)),
                          " of the device's ", FormatBytesExactly(report.capacity_bytes), " is left",
                          report.kept_free_bytes == 0
                              ? ""
                              : absl::StrCat(", and ", FormatBytesExactly(report.kept_free_bytes),
                                             " more is kept for other sessions' guarantees"));
    case OomCause::kFragmentation:
      return ExplainFragmentation(report);
    case OomCause::kLargerThanDevice:
      return absl::StrCat("the device's capacity is ", FormatBytesExactly(report.capacity_bytes));
  }
  return "";
}

}  // namespace

std::string Explanation(const OomReport& report) {
  std::string text = ExplainCause(report);
  if (report.cause != OomCause::kLargerThanDevice) absl::StrAppend(&text, ExplainScopes(report));
  return text;
}

bool HasNothingOfDevice(const OomReport& report) {
  return !report.claim.empty() && report.share_limit_bytes == 0;
}

Rooms RoomsOf(const OomReport& report) {
  Rooms rooms{.limit = SaturatingSub(report.limit_bytes, report.reserved_bytes),
              .device = SaturatingSub(report.available_bytes, report.kept_free_bytes)};
  if (report.share_limit_bytes == 0 && report.claim.empty()) return rooms;
  // A share's use includes the session's whole guarantee, reserved or not.
  rooms.share = SaturatingSub(report.share_limit_bytes, report.share_used_bytes) + UnusedGuaranteeBytes(report);
  return rooms;
}

uint64_t RoomBytes(const OomReport& report) {
  return RoomsOf(report).least();
}

uint64_t UnusedGuaranteeBytes(const OomReport& report) {
  return SaturatingSub(report.guarantee_bytes, report.reserved_bytes);
}

uint64_t QuarantinedBytes(const OomReport& report) {
  return report.detached_bytes + report.left_behind_bytes;
}

uint64_t HoleBytes(const OomReport& report) {
  const uint64_t free = SaturatingSub(report.reserved_bytes, report.allocated_bytes);
  return report.knows_holes ? std::min(report.holes.bytes, free) : free;
}

Rooms RoomsWithoutHoles(const OomReport& report) {
  const Rooms rooms = RoomsOf(report);
  const auto without = [&](uint64_t room) {
    return room == Rooms::kNone ? room : SaturatingSub(report.reserved_bytes + room, report.allocated_bytes);
  };
  // A session above its lowered limit must come below the limit first.
  return {.limit = SaturatingSub(report.limit_bytes, report.allocated_bytes),
          .share = without(rooms.share),
          .device = without(rooms.device)};
}

namespace {

// Whether, without holes, the cause would be the bound on the block instead of the bound on its segment.
bool HolesDecide(const OomReport& report) {
  const uint64_t room = RoomBytes(report);
  if (HoleBytes(report) == 0 || room >= report.segment_bytes) return false;
  // A segment of this size can never fit the limit.
  if (report.segment_bytes > report.limit_bytes) return false;
  // The block has room: only the larger segment shared by blocks of its size lacks room.
  return room < RoundUpTo(report.block_bytes, kSegmentGranuleBytes) || report.pool_free_bytes >= report.block_bytes;
}

}  // namespace

std::string ShareLimitName(const OomReport& report) {
  return report.claim.empty() ? "user_limit" : absl::StrCat("the limit of claim ", report.claim);
}

bool IsShareLimit(const OomReport& report) {
  const Rooms rooms = RoomsOf(report);
  if (rooms.share >= report.segment_bytes) return false;
  if (rooms.limit >= report.segment_bytes) return true;
  if (!HolesDecide(report)) return false;
  const Rooms without = RoomsWithoutHoles(report);
  return without.limit >= report.block_bytes && without.share < report.block_bytes;
}

OomCause CauseOf(const OomReport& report, OomCause refusal) {
  if (refusal == OomCause::kLargerThanDevice) return refusal;
  if (HolesDecide(report)) {
    const Rooms rooms = RoomsWithoutHoles(report);
    if (std::min(rooms.limit, rooms.share) < report.block_bytes) return OomCause::kLimit;
    return rooms.device < report.block_bytes ? OomCause::kCapacity : OomCause::kFragmentation;
  }
  // Reports a share's limit as kLimit, although room may come while the request waits.
  return refusal == OomCause::kCapacity && IsShareLimit(report) ? OomCause::kLimit : refusal;
}

v1::OutOfMemory ToProto(const OomReport& report) {
  v1::OutOfMemory proto;
  proto.set_cause(ToProto(report.cause));
  proto.set_device(static_cast<uint32_t>(report.device));
  proto.set_requested_bytes(report.requested_bytes);
  proto.set_segment_bytes(report.segment_bytes);
  proto.set_limit_bytes(report.limit_bytes);
  proto.set_reserved_bytes(report.reserved_bytes);
  proto.set_allocated_bytes(report.allocated_bytes);
  proto.set_idle_bytes(OwnIdleBytes(report));
  proto.set_largest_free_block_bytes(report.largest_free_block_bytes);
  proto.set_device_capacity_bytes(report.capacity_bytes);
  proto.set_device_available_bytes(report.available_bytes);
  for (const OomReport::Holder& holder : report.largest_holders) {
    v1::OutOfMemory::Holder* to = proto.add_largest_holders();
    to->set_client(holder.client);
    to->set_reserved_bytes(holder.reserved_bytes);
    to->set_allocated_bytes(holder.allocated_bytes);
  }
  proto.set_advice(Advice(report));
  proto.set_guarantee_bytes(report.guarantee_bytes);
  proto.set_inactive_split_bytes(report.knows_holes ? HoleBytes(report) : report.inactive_split_bytes);
  proto.set_device_kept_free_bytes(report.kept_free_bytes);
  proto.set_device_idle_bytes(report.device_idle_bytes);
  proto.set_device_quarantined_bytes(QuarantinedBytes(report));
  proto.set_idle_elsewhere_bytes(report.idle_elsewhere_bytes);
  for (const OomReport::IdleHolder& holder : report.idle_holders) {
    v1::OutOfMemory::IdleHolder* to = proto.add_idle_holders();
    to->set_client(holder.client);
    to->set_idle_bytes(holder.idle_bytes);
    to->set_why(ToProto(holder.why));
  }
  proto.set_waited_ms(report.waited_ms);
  if (report.claim.empty()) {
    proto.set_user_limit_bytes(report.share_limit_bytes);
    proto.set_user_reserved_bytes(report.share_used_bytes);
  } else {
    proto.set_claim(report.claim);
    proto.set_claim_limit_bytes(report.share_limit_bytes);
    proto.set_claim_reserved_bytes(report.share_used_bytes);
  }
  proto.set_block_bytes(report.block_bytes);
  proto.set_room_bytes(RoomBytes(report));
  *proto.mutable_holes() = HolesToProto(report.holes);
  proto.mutable_holes()->set_hole_bytes(HoleBytes(report));
  proto.set_explanation(Explanation(report));
  proto.set_refusal(report.refusal);
  proto.set_scope(report.scope);
  ScopeUsesToProto(report.scopes, proto.mutable_scopes());
  return proto;
}

size_t RefusalMetadataBytes(absl::string_view message, size_t payload_bytes) {
  constexpr size_t kEntry = 32;               // HTTP/2 counts 32 bytes of overhead with each key
  constexpr size_t kFraming = size_t{4} * 8;  // tags and lengths in v1.StatusDetails, and the code
  const auto escaped =
      std::count_if(message.begin(), message.end(), [](char c) { return c < ' ' || c > '~' || c == '%'; });
  const size_t details = message.size() + absl::string_view(kReportUrl).size() + payload_bytes + kFraming;
  return message.size() + 2 * static_cast<size_t>(escaped) + (details + 2) / 3 * 4 + 2 * kEntry +
         absl::string_view(
             "grpc-message"
             "grpc-status-details-bin")
             .size();
}

namespace {

// Drops the least significant named item of the report. False: the rest has to stay.
bool LeaveOneOut(v1::OutOfMemory* proto) {
  auto* const segments = proto->mutable_holes()->mutable_most_bytes();
  for (auto segment = segments->rbegin(); segment != segments->rend(); ++segment) {
    if (segment->longest_held_size() <= 1) continue;
    segment->mutable_longest_held()->RemoveLast();
    return true;
  }
  if (segments->size() > 1) {
    segments->RemoveLast();
    return true;
  }
  if (proto->idle_holders().empty()) return false;
  proto->mutable_idle_holders()->RemoveLast();
  return true;
}

}  // namespace

absl::Status OutOfMemoryError(const OomReport& report) {
  v1::OutOfMemory proto = ToProto(report);
  std::string message =
      absl::StrCat("out of memory (", OomCauseName(report.cause), ") on device ", report.device, ": ",
                   FormatBytesExactly(report.requested_bytes), " requested; ", proto.explanation(), "; limit ",
                   FormatBytesExactly(report.limit_bytes), ", reserved ", FormatBytesExactly(report.reserved_bytes),
                   ", allocated ", FormatBytesExactly(report.allocated_bytes));
  if (report.idle_elsewhere_bytes > 0) {
    absl::StrAppend(&message, ", unused in other sessions ", FormatBytesExactly(report.idle_elsewhere_bytes));
  }
  if (report.waited_ms > 0) absl::StrAppend(&message, "; waited ", report.waited_ms, " ms");
  absl::StrAppend(&message, ". ", proto.advice());
  while (RefusalMetadataBytes(message, proto.ByteSizeLong()) > kMaxRefusalMetadata && LeaveOneOut(&proto)) continue;
  absl::Status status = absl::ResourceExhaustedError(message);
  status.SetPayload(kReportUrl, absl::Cord(proto.SerializeAsString()));
  return status;
}

}  // namespace vrambroker
