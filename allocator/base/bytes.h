// SPDX-License-Identifier: Apache-2.0
//
// Sizes in bytes: literals, reading and printing. KiB, MiB, GiB and TiB are powers of two.
#ifndef VRAMBROKER_ALLOCATOR_BASE_BYTES_H_
#define VRAMBROKER_ALLOCATOR_BASE_BYTES_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace vrambroker {

constexpr uint64_t operator""_KiB(unsigned long long n) {
  return n << 10;
}
constexpr uint64_t operator""_MiB(unsigned long long n) {
  return n << 20;
}
constexpr uint64_t operator""_GiB(unsigned long long n) {
  return n << 30;
}

// `bytes` up to the next multiple of `unit`. REQUIRES: the result fits in 64 bits.
constexpr uint64_t RoundUpTo(uint64_t bytes, uint64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// Reads "8G", "8GiB", "512 MiB", "1.5GiB", "24GB" (10^9), "2097152" or "2097152B"; drops parts of a byte.
// amount_parser.h has the grammar. InvalidArgument names the fault and the accepted forms.
absl::StatusOr<uint64_t> ParseBytes(absl::string_view text);

// "512 B", "1.50 KiB", "20.00 MiB": the largest unit in which the value is at least 1, two decimals.
std::string FormatBytes(uint64_t bytes);

// "2.00 GiB", or "2147483649 B (2.00 GiB)" where two decimals lose something: for messages in which one byte decides.
std::string FormatBytesExactly(uint64_t bytes);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_BASE_BYTES_H_
