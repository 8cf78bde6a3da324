// SPDX-License-Identifier: Apache-2.0
#include "server/pool/segment_refusal.h"

#include "absl/strings/cord.h"

namespace vrambroker {
namespace {

constexpr char kCauseUrl[] = "vrambroker/segment-refusal-cause";

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

}  // namespace vrambroker
