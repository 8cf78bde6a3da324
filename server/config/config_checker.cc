// SPDX-License-Identifier: Apache-2.0
#include "server/config/config_checker.h"

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "allocator/base/amounts.h"
#include "allocator/base/bytes.h"

namespace vrambroker {

void Checker::Fault(absl::string_view field, absl::string_view what) {
  const std::string place = PlaceOf(field);
  faults_.push_back(absl::StrCat(place, place.empty() ? "" : ": ", field, ": ", OneLine(what)));
}

std::string Checker::PlaceOf(absl::string_view field) const {
  const auto place = places_.find(field);
  return place == places_.end() ? "" : place->second;
}

uint64_t Checker::Size(absl::string_view field, const std::string& text, uint64_t fallback) {
  if (text.empty()) return fallback;
  absl::StatusOr<uint64_t> bytes = ParseBytes(text);
  if (!bytes.ok()) {
    Fault(field, bytes.status().message());
    return fallback;
  }
  return *bytes;
}

absl::Duration Checker::Time(absl::string_view field, const std::string& text, absl::Duration fallback,
                             absl::Duration most) {
  if (text.empty()) return fallback;
  const absl::StatusOr<absl::Duration> duration = ParseTime(text);
  if (!duration.ok()) {
    Fault(field, duration.status().message());
    return fallback;
  }
  if (*duration > most) {
    Fault(field, absl::StrCat("'", text, "' is not a duration from 0 to ", absl::FormatDuration(most)));
    return fallback;
  }
  return *duration;
}

std::optional<Limit> Checker::LimitOf(const std::string& field, const config::v1::SessionLimit* limit) {
  if (limit == nullptr) return std::nullopt;
  switch (limit->limit_case()) {
    case config::v1::SessionLimit::kBytes: {
      const absl::StatusOr<uint64_t> bytes = ParseBytes(limit->bytes());
      if (bytes.ok()) return Limit(*bytes);
      const bool is_share = ParseShare(limit->bytes()).ok();
      Fault(field + ".bytes", absl::StrCat(bytes.status().message(), is_share ? "; a share is a fraction: 0.4" : ""));
      return std::nullopt;
    }
    case config::v1::SessionLimit::kFraction:
      if (limit->fraction() > 0 && limit->fraction() <= 1) return Limit(limit->fraction());
      Fault(field + ".fraction", absl::StrCat(limit->fraction(), " is not above 0 and at most 1"));
      return std::nullopt;
    case config::v1::SessionLimit::LIMIT_NOT_SET:
      break;
  }
  Fault(field, "neither bytes nor fraction is given");
  return std::nullopt;
}

absl::Status Checker::status() const {
  if (faults_.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(faults_.size(), faults_.size() == 1 ? " fault" : " faults",
                                                 " in the configuration:\n  ", absl::StrJoin(faults_, "\n  ")));
}

}  // namespace vrambroker
