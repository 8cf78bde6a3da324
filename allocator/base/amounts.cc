// SPDX-License-Identifier: Apache-2.0
#include "allocator/base/amounts.h"

#include "allocator/base/amount_parser.h"

namespace vrambroker {

absl::StatusOr<double> ParseShare(absl::string_view text) {
  double share = 0;
  char why[AMOUNT_WHY_BYTES];
  if (amount_read_share(text.data(), text.size(), &share, why) != 0) return absl::InvalidArgumentError(why);
  return share;
}

absl::StatusOr<std::variant<uint64_t, double>> ParseSizeOrShare(absl::string_view text) {
  amount_limit limit = {};
  char why[AMOUNT_WHY_BYTES];
  if (amount_read_limit(text.data(), text.size(), &limit, why) != 0) return absl::InvalidArgumentError(why);
  if (limit.is_share != 0) return limit.share;
  return limit.bytes;
}

absl::StatusOr<absl::Duration> ParseTime(absl::string_view text) {
  uint64_t nanoseconds = 0;
  char why[AMOUNT_WHY_BYTES];
  if (amount_read_duration(text.data(), text.size(), &nanoseconds, why) != 0) return absl::InvalidArgumentError(why);
  constexpr uint64_t kInSecond = 1'000'000'000;
  return absl::Seconds(static_cast<int64_t>(nanoseconds / kInSecond)) +
         absl::Nanoseconds(static_cast<int64_t>(nanoseconds % kInSecond));
}

absl::StatusOr<int64_t> ParseMilliseconds(absl::string_view text) {
  uint64_t milliseconds = 0;
  char why[AMOUNT_WHY_BYTES];
  if (amount_read_milliseconds(text.data(), text.size(), &milliseconds, why) != 0) {
    return absl::InvalidArgumentError(why);
  }
  return static_cast<int64_t>(milliseconds);
}

}  // namespace vrambroker
