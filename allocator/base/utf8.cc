// SPDX-License-Identifier: Apache-2.0
#include "allocator/base/utf8.h"

#include "absl/strings/str_cat.h"

namespace vrambroker {
namespace {

// Length of the UTF-8 character at the beginning of `text`, in bytes; 0 when there is none.
size_t Utf8Length(absl::string_view text) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U; };
  const auto follows = [&](size_t i) { return (byte(i) & 0xC0) == 0x80; };
  const unsigned int first = byte(0);
  if (first < 0x80) return 1;
  if (first >= 0xC2 && first <= 0xDF && follows(1)) return 2;
  if ((first & 0xF0) == 0xE0 && follows(1) && follows(2)) {
    const bool overlong = first == 0xE0 && byte(1) < 0xA0;
    const bool surrogate = first == 0xED && byte(1) > 0x9F;
    return overlong || surrogate ? 0 : 3;
  }
  if (first >= 0xF0 && first <= 0xF4 && follows(1) && follows(2) && follows(3)) {
    const bool overlong = first == 0xF0 && byte(1) < 0x90;
    const bool too_large = first == 0xF4 && byte(1) > 0x8F;
    return overlong || too_large ? 0 : 4;
  }
  return 0;
}

}  // namespace

bool IsUtf8(absl::string_view text) {
  while (!text.empty()) {
    const size_t length = Utf8Length(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

std::string ToUtf8(absl::string_view rest) {
  std::string text;
  text.reserve(rest.size());
  while (!rest.empty()) {
    const size_t length = Utf8Length(rest);
    absl::StrAppend(&text, length == 0 ? "\xEF\xBF\xBD" : rest.substr(0, length));  // U+FFFD
    rest.remove_prefix(length == 0 ? 1 : length);
  }
  return text;
}

std::string CleanText(absl::string_view rest, size_t most_bytes) {
  std::string text;
  while (!rest.empty()) {
    const size_t length = Utf8Length(rest);
    const absl::string_view character = rest.substr(0, length == 0 ? 1 : length);
    const unsigned char first = static_cast<unsigned char>(character[0]);
    const bool is_late_control = length == 2 && first == 0xC2 && static_cast<unsigned char>(character[1]) < 0xA0;
    const bool is_control = first < 0x20 || first == 0x7F || is_late_control;  // U+0080 to U+009F
    const absl::string_view shown = length == 0 ? "\xEF\xBF\xBD" : is_control ? "_" : character;
    if (text.size() + shown.size() > most_bytes) break;
    absl::StrAppend(&text, shown);
    rest.remove_prefix(character.size());
  }
  return text;
}

}  // namespace vrambroker
