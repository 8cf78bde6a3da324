// SPDX-License-Identifier: Apache-2.0
#include "server/out_of_memory.h"

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "allocator/bytes.h"
#include "server/oom_advice.h"
#include "vrambroker/v1/types.pb.h"

namespace vrambroker {
namespace {

constexpr char kCauseUrl[] = "vrambroker/segment-refusal-cause";
constexpr char kLaterUrl[] = "vrambroker/may-grow-later";
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

std::string Explain(const OomReport& report) {
  switch (report.cause) {
    case OomCause::kLimit:
      if (IsUserLimit(report)) {
        return absl::StrCat("it needs a segment of ", FormatBytesExactly(report.segment_bytes),
                            ", and the user's sessions "
                            "together have ",
                            FormatBytesExactly(report.user_committed_bytes), " of user_limit, ",
                            FormatBytesExactly(report.user_limit_bytes));
      }
      return absl::StrCat("it needs a segment of ", FormatBytesExactly(report.segment_bytes),
                          ", which would exceed the limit");
    case OomCause::kCapacity:
      return absl::StrCat("it needs a segment of ", FormatBytesExactly(report.segment_bytes), ", and ",
                          FormatBytesExactly(report.available_bytes), " of the device's ",
                          FormatBytesExactly(report.capacity_bytes), " are left",
                          report.kept_free_bytes == 0
                              ? ""
                              : absl::StrCat(", with ", FormatBytesExactly(report.kept_free_bytes),
                                             " kept for other sessions' guarantees"));
    case OomCause::kFragmentation:
      return absl::StrCat("enough bytes are free, but the largest free block is ",
                          FormatBytesExactly(report.largest_free_block_bytes));
    case OomCause::kLargerThanDevice:
      return absl::StrCat("the device's capacity is ", FormatBytesExactly(report.capacity_bytes));
  }
  return "";
}

}  // namespace

const char* OomCauseName(OomCause cause) {
  switch (cause) {
    case OomCause::kLimit:
      return "limit";
    case OomCause::kCapacity:
      return "capacity";
    case OomCause::kFragmentation:
      return "fragmentation";
    case OomCause::kLargerThanDevice:
      return "larger_than_device";
  }
  return "unknown";
}

absl::Status SegmentRefused(OomCause cause, absl::string_view message) {
  absl::Status status = absl::ResourceExhaustedError(message);
  status.SetPayload(kCauseUrl, absl::Cord(OomCauseName(cause)));
  return status;
}

std::optional<OomCause> SegmentRefusalCause(const absl::Status& status) {
  const absl::optional<absl::Cord> name = status.GetPayload(kCauseUrl);
  if (!name.has_value()) return std::nullopt;
  for (const OomCause cause : kOomCauses) {
    if (*name == OomCauseName(cause)) return cause;
  }
  return std::nullopt;
}

absl::Status MayGrowLater() {
  absl::Status status = absl::UnavailableError("others may give memory back");
  status.SetPayload(kLaterUrl, absl::Cord());
  return status;
}

bool IsMayGrowLater(const absl::Status& status) {
  return status.GetPayload(kLaterUrl).has_value();
}

OomCause FinalCause(OomCause refusal, const FitReport& fit) {
  return refusal != OomCause::kLargerThanDevice && fit.pool_free_bytes >= fit.block_bytes ? OomCause::kFragmentation
                                                                                          : refusal;
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
  proto.set_inactive_split_bytes(report.inactive_split_bytes);
  proto.set_device_kept_free_bytes(report.kept_free_bytes);
  proto.set_device_idle_bytes(report.device_idle_bytes);
  proto.set_device_quarantined_bytes(report.quarantined_bytes);
  proto.set_idle_elsewhere_bytes(report.idle_elsewhere_bytes);
  for (const OomReport::IdleHolder& holder : report.idle_holders) {
    v1::OutOfMemory::IdleHolder* to = proto.add_idle_holders();
    to->set_client(holder.client);
    to->set_idle_bytes(holder.idle_bytes);
    to->set_why(ToProto(holder.why));
  }
  proto.set_waited_ms(report.waited_ms);
  proto.set_user_limit_bytes(report.user_limit_bytes);
  proto.set_user_reserved_bytes(report.user_committed_bytes);
  return proto;
}

absl::Status OutOfMemoryError(const OomReport& report) {
  const v1::OutOfMemory proto = ToProto(report);
  std::string message =
      absl::StrCat("out of memory (", OomCauseName(report.cause), ") on device ", report.device, ": ",
                   FormatBytesExactly(report.requested_bytes), " requested; ", Explain(report), "; limit ",
                   FormatBytesExactly(report.limit_bytes), ", reserved ", FormatBytesExactly(report.reserved_bytes),
                   ", allocated ", FormatBytesExactly(report.allocated_bytes));
  if (report.idle_elsewhere_bytes > 0) {
    absl::StrAppend(&message, ", idle in other sessions ", FormatBytesExactly(report.idle_elsewhere_bytes));
  }
  if (report.waited_ms > 0) absl::StrAppend(&message, "; waited ", report.waited_ms, " ms");
  absl::StrAppend(&message, ". ", proto.advice());
  absl::Status status = absl::ResourceExhaustedError(message);
  status.SetPayload(kReportUrl, absl::Cord(proto.SerializeAsString()));
  return status;
}

}  // namespace vrambroker
