// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/views/claim_terms.h"

#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "allocator/base/amounts.h"
#include "client/vrambroker/client.h"

namespace vrambroker::vramctl {

absl::Status SetLimitOf(const char* flag, const std::string& text, const std::function<v1::Limit*()>& mutable_limit) {
  if (text.empty()) return absl::OkStatus();
  const absl::StatusOr<Limit> limit = ParseLimit(text);
  if (!limit.ok()) return absl::InvalidArgumentError(absl::StrCat(flag, ": ", limit.status().message()));
  if (const uint64_t* bytes = std::get_if<uint64_t>(&*limit)) {
    mutable_limit()->set_bytes(*bytes);
  } else {
    mutable_limit()->set_fraction(std::get<double>(*limit));
  }
  return absl::OkStatus();
}

absl::StatusOr<uint32_t> ParseWait(const char* flag, const std::string& text) {
  const absl::StatusOr<int64_t> wait = ParseMilliseconds(text);
  if (!wait.ok()) return absl::InvalidArgumentError(absl::StrCat(flag, ": ", wait.status().message()));
  if (*wait > absl::ToInt64Milliseconds(absl::Hours(1))) {
    return absl::InvalidArgumentError(absl::StrCat(flag, ": '", text, "' is longer than an hour"));
  }
  return static_cast<uint32_t>(*wait);
}

absl::Status SetDevices(const std::vector<int>& devices, v1::ClaimTerms* terms) {
  for (const int device : devices) {
    if (device < 0) return absl::InvalidArgumentError("--device: must be 0 or more");
    terms->add_devices(static_cast<uint32_t>(device));
  }
  return absl::OkStatus();
}

}  // namespace vrambroker::vramctl
