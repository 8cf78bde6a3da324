// SPDX-License-Identifier: Apache-2.0
#include "allocator/base/bytes.h"

#include <array>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"

namespace vrambroker {
namespace {

constexpr std::array<std::pair<const char*, int>, 5> kUnits = {
    {{"TiB", 40}, {"GiB", 30}, {"MiB", 20}, {"KiB", 10}, {"B", 0}}};

absl::Status BadSize(absl::string_view text, absl::string_view why) {
  return absl::InvalidArgumentError(
      absl::StrCat("'", text, "' is not a size: ", why, "; write it as 512MiB, 8GiB or plain bytes"));
}

bool IsDigits(absl::string_view text) {
  for (const char c : text) {
    if (!absl::ascii_isdigit(c)) return false;
  }
  return !text.empty();
}

}  // namespace

absl::StatusOr<uint64_t> ParseBytes(absl::string_view text) {
  absl::string_view number = absl::StripAsciiWhitespace(text);
  if (number.empty()) return BadSize(text, "it is empty");
  int shift = 0;
  for (const auto& [name, unit_shift] : kUnits) {
    if (absl::EndsWithIgnoreCase(number, name)) {
      shift = unit_shift;
      number = absl::StripAsciiWhitespace(number.substr(0, number.size() - absl::string_view(name).size()));
      break;
    }
  }
  const size_t dot = number.find('.');
  const absl::string_view whole_text = number.substr(0, dot);
  if (!IsDigits(whole_text)) return BadSize(text, "expected digits, then B, KiB, MiB, GiB or TiB");
  uint64_t whole = 0;
  if (!absl::SimpleAtoi(whole_text, &whole) || (shift > 0 && (whole >> (64 - shift)) != 0)) {
    return BadSize(text, "it does not fit in 64 bits");
  }
  uint64_t bytes = whole << shift;
  if (dot != absl::string_view::npos) {
    const absl::string_view decimals = number.substr(dot + 1);
    if (!IsDigits(decimals)) return BadSize(text, "expected digits after the point");
    // In integers: a double would round parts of a byte away.
    const absl::string_view digits = decimals.substr(0, decimals.find_last_not_of('0') + 1);
    constexpr size_t kMaxDigits = 18;  // 10^18 is above 2^40, times 2^40 it still fits in 128 bits
    if (digits.size() > kMaxDigits) return BadSize(text, "it has too many decimals");
    unsigned __int128 part = 0;
    unsigned __int128 whole_part = 1;
    for (const char digit : digits) {
      part = part * 10 + static_cast<unsigned>(digit - '0');
      whole_part *= 10;
    }
    part <<= shift;
    if (part % whole_part != 0) return BadSize(text, "it is not a whole number of bytes");
    const auto extra = static_cast<uint64_t>(part / whole_part);
    if (bytes + extra < bytes) return BadSize(text, "it does not fit in 64 bits");
    bytes += extra;
  }
  return bytes;
}

std::string FormatBytes(uint64_t bytes) {
  for (const auto& [name, shift] : kUnits) {
    if (shift > 0 && bytes >= (uint64_t{1} << shift)) {
      return absl::StrFormat("%.2f %s", static_cast<double>(bytes) / static_cast<double>(uint64_t{1} << shift), name);
    }
  }
  return absl::StrCat(bytes, " B");
}

std::string FormatBytesExactly(uint64_t bytes) {
  return bytes < 1_KiB ? FormatBytes(bytes) : absl::StrCat(bytes, " B (", FormatBytes(bytes), ")");
}

}  // namespace vrambroker
