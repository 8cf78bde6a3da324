// SPDX-License-Identifier: Apache-2.0
#include "server/out_of_memory.h"

#include <algorithm>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "allocator/bytes.h"
#include "vrambroker/v1/types.pb.h"

namespace vrambroker {
namespace {

constexpr char kCauseUrl[] = "vrambroker/segment-refusal-cause";
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

std::string Advice(const OomReport& report) {
  switch (report.cause) {
    case OomCause::kLimit:
      return "Free memory of this session, or ask the operator to raise its limit (vramctl limit).";
    case OomCause::kCapacity:
      return "Wait for other sessions to free memory, or have them trimmed (vramctl sessions, vramctl trim).";
    case OomCause::kFragmentation:
      return "Free neighbouring blocks or allocate the largest buffers first: the free memory of this "
             "session is in "
             "pieces that are too small.";
    case OomCause::kLargerThanDevice:
      return "Ask for less: the device's capacity could never hold this request.";
  }
  return "";
}

std::string Explain(const OomReport& report) {
  switch (report.cause) {
    case OomCause::kLimit:
      return absl::StrCat("it needs a segment of ", FormatBytesExactly(report.segment_bytes),
                          ", which would exceed the limit");
    case OomCause::kCapacity:
      return absl::StrCat("it needs a segment of ", FormatBytesExactly(report.segment_bytes), ", and ",
                          FormatBytesExactly(report.available_bytes), " of the device's ",
                          FormatBytesExactly(report.capacity_bytes), " are left");
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

OomCause FinalCause(OomCause refusal, const FitReport& fit) {
  return refusal != OomCause::kLargerThanDevice && fit.pool_free_bytes >= fit.block_bytes ? OomCause::kFragmentation
                                                                                          : refusal;
}

absl::Status OutOfMemoryError(const OomReport& report) {
  v1::OutOfMemory proto;
  proto.set_cause(ToProto(report.cause));
  proto.set_device(static_cast<uint32_t>(report.device));
  proto.set_requested_bytes(report.requested_bytes);
  proto.set_segment_bytes(report.segment_bytes);
  proto.set_limit_bytes(report.limit_bytes);
  proto.set_reserved_bytes(report.reserved_bytes);
  proto.set_allocated_bytes(report.allocated_bytes);
  proto.set_idle_bytes(report.reserved_bytes - std::min(report.allocated_bytes, report.reserved_bytes));
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
  absl::Status status = absl::ResourceExhaustedError(
      absl::StrCat("out of memory (", OomCauseName(report.cause), ") on device ", report.device, ": ",
                   FormatBytesExactly(report.requested_bytes), " requested; ", Explain(report), "; limit ",
                   FormatBytesExactly(report.limit_bytes), ", reserved ", FormatBytesExactly(report.reserved_bytes),
                   ", allocated ", FormatBytesExactly(report.allocated_bytes), ". ", proto.advice()));
  status.SetPayload(kReportUrl, absl::Cord(proto.SerializeAsString()));
  return status;
}

}  // namespace vrambroker
