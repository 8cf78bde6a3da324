// SPDX-License-Identifier: Apache-2.0
#include "allocator/base/bytes.h"

#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "allocator/base/amount_parser.h"

namespace vrambroker {
namespace {

constexpr std::array<std::pair<const char*, int>, 4> kUnits = {{{"TiB", 40}, {"GiB", 30}, {"MiB", 20}, {"KiB", 10}}};

}  // namespace

absl::StatusOr<uint64_t> ParseBytes(absl::string_view text) {
  uint64_t bytes = 0;
  char why[AMOUNT_WHY_BYTES];
  if (amount_read_size(text.data(), text.size(), &bytes, why) != 0) return absl::InvalidArgumentError(why);
  return bytes;
}

std::string FormatBytes(uint64_t bytes) {
  for (const auto& [name, shift] : kUnits) {
    if (bytes >= (uint64_t{1} << shift)) {
      return absl::StrFormat("%.2f %s", static_cast<double>(bytes) / static_cast<double>(uint64_t{1} << shift), name);
    }
  }
  return absl::StrCat(bytes, " B");
}

std::string FormatBytesExactly(uint64_t bytes) {
  for (const auto& [name, shift] : kUnits) {
    const uint64_t unit = uint64_t{1} << shift;
    if (bytes < unit) continue;
    const bool has_two_decimals = bytes % unit * 100 % unit == 0;
    return has_two_decimals ? FormatBytes(bytes) : absl::StrCat(bytes, " B (", FormatBytes(bytes), ")");
  }
  return FormatBytes(bytes);
}

}  // namespace vrambroker
