// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "allocator/replay/pickle.h"

namespace vrambroker {
namespace {

// Length of the UTF-8 sequence at the start of `text`, 0 when there is none.
size_t Utf8Length(absl::string_view text) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<uint8_t>(text[i]) : uint8_t{0}; };
  const auto continues = [&](size_t from, size_t to) {
    for (size_t i = from; i <= to; ++i) {
      if ((byte(i) & 0xc0) != 0x80) return false;
    }
    return true;
  };
  const uint8_t first = byte(0);
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first <= 0xdf) return continues(1, 1) ? 2 : 0;
  if (first >= 0xe0 && first <= 0xef) {
    // Refuses overlong forms, and halves of UTF-16 pairs.
    if ((first == 0xe0 && byte(1) < 0xa0) || (first == 0xed && byte(1) > 0x9f)) return 0;
    return continues(1, 2) ? 3 : 0;
  }
  if (first >= 0xf0 && first <= 0xf4) {
    if ((first == 0xf0 && byte(1) < 0x90) || (first == 0xf4 && byte(1) > 0x8f)) return 0;
    return continues(1, 3) ? 4 : 0;
  }
  return 0;
}

void AddJsonString(absl::string_view text, std::string* out) {
  out->push_back('"');
  while (!text.empty()) {
    const char c = text.front();
    const size_t length = Utf8Length(text);
    if (length == 0) {
      out->append("\xef\xbf\xbd");  // U+FFFD
    } else if (c == '"' || c == '\\') {
      out->push_back('\\');
      out->push_back(c);
    } else if (static_cast<uint8_t>(c) < 0x20) {
      absl::StrAppendFormat(out, "\\u%04x", static_cast<unsigned>(c));
    } else {
      out->append(text.data(), length);
    }
    text.remove_prefix(std::max<size_t>(length, 1));
  }
  out->push_back('"');
}

void AddJsonDouble(double value, std::string* out) {
  if (!std::isfinite(value)) {
    out->append("null");
    return;
  }
  std::array<char, 32> digits;
  const std::to_chars_result end = std::to_chars(digits.data(), digits.data() + digits.size(), value);
  const absl::string_view text(digits.data(), static_cast<size_t>(end.ptr - digits.data()));
  absl::StrAppend(out, text, text.find_first_of(".e") == absl::string_view::npos ? ".0" : "");
}

void AddJson(const PickleValue& value, std::string* out) {
  switch (value.kind()) {
    case PickleValue::Kind::kNone:
      out->append("null");
      return;
    case PickleValue::Kind::kBool:
      out->append(value.AsBool() ? "true" : "false");
      return;
    case PickleValue::Kind::kInt:
      absl::StrAppend(out, value.AsInt());
      return;
    case PickleValue::Kind::kUint:
      absl::StrAppend(out, value.AsUint());
      return;
    case PickleValue::Kind::kDouble:
      AddJsonDouble(value.AsDouble(), out);
      return;
    case PickleValue::Kind::kString:
      AddJsonString(value.AsString(), out);
      return;
    case PickleValue::Kind::kList:
    case PickleValue::Kind::kTuple: {
      const char* separator = "[";
      for (const PickleValue& item : value.AsItems()) {
        out->append(separator);
        AddJson(item, out);
        separator = ",";
      }
      out->append(value.AsItems().empty() ? "[]" : "]");
      return;
    }
    case PickleValue::Kind::kDict: {
      const char* separator = "{";
      for (const auto& [key, content] : value.AsPairs()) {
        out->append(separator);
        if (key.kind() == PickleValue::Kind::kString) {
          AddJsonString(key.AsString(), out);
        } else {
          std::string text;
          AddJson(key, &text);
          AddJsonString(text, out);
        }
        out->push_back(':');
        AddJson(content, out);
        separator = ",";
      }
      out->append(value.AsPairs().empty() ? "{}" : "}");
      return;
    }
  }
}

}  // namespace

std::string WriteJson(const PickleValue& value) {
  std::string out;
  AddJson(value, &out);
  return out;
}

}  // namespace vrambroker
