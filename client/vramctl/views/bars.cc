// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/views/bars.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace vrambroker::vramctl {
namespace {

bool ContinuesCharacter(char c) {
  return (static_cast<unsigned char>(c) & 0xC0U) == 0x80U;
}

// Returns the parameters of the escape sequence; top_screen.cc has the same colours.
const char* EscapeOf(Style style) {
  static constexpr std::array<const char*, kStyles> kEscapes = {"",   "1",  "2",  "7",  "7",  "1;31", "32",
                                                                "35", "33", "36", "37", "34", "31",   "2",
                                                                "32", "34", "35", "36", "33", "31"};
  return kEscapes[static_cast<size_t>(style)];
}

const char* Ellipsis(bool utf8) {
  return utf8 ? "…" : "~";
}

}  // namespace

const char* PartName(Part part) {
  switch (part) {
    case Part::kAllocated:
      return "allocated";
    case Part::kPending:
      return "waiting for a stream";
    case Part::kFragmented:
      return "fragmented";
    case Part::kReclaimable:
      return "reclaimable";
    case Part::kUnknown:
      return "unknown";
    case Part::kCached:
      return "cached";
    case Part::kLeftBehind:
      return "left behind";
    case Part::kFree:
      return "unreserved";
  }
  return "";
}

double FragmentedShare(const PartBytes& parts) {
  uint64_t held = 0;
  for (const Part part : {Part::kAllocated, Part::kPending, Part::kFragmented, Part::kReclaimable, Part::kUnknown}) {
    held += parts[part];
  }
  return held == 0 ? 0 : static_cast<double>(parts[Part::kFragmented]) / static_cast<double>(held);
}

PartCells ShareCells(const PartBytes& bytes, int width) {
  PartCells cells;
  const auto sum = static_cast<double>(bytes.Sum());
  width = std::max(width, 0);
  if (sum == 0) {
    cells[Part::kFree] = width;
    return cells;
  }
  Parts<double> wanted;
  for (const Part part : kAllParts) {
    wanted[part] = static_cast<double>(bytes[part]) / sum * width;
    cells[part] = std::max(static_cast<int>(wanted[part]), bytes[part] > 0 ? 1 : 0);
  }
  while (cells.Sum() < width) {
    ++cells[*std::max_element(kAllParts.begin(), kAllParts.end(),
                              [&](Part a, Part b) { return wanted[a] - cells[a] < wanted[b] - cells[b]; })];
  }
  while (cells.Sum() > width) {  // the longest gives; among single cells, the part with the fewest bytes
    --cells[*std::max_element(kAllParts.begin(), kAllParts.end(), [&](Part a, Part b) {
      return cells[a] != cells[b] ? cells[a] < cells[b] : bytes[a] > bytes[b];
    })];
  }
  return cells;
}

Style StyleOf(Part part) {
  return static_cast<Style>(static_cast<size_t>(Style::kAllocated) + static_cast<size_t>(part));
}

Style StyleOfSession(size_t index) {
  return static_cast<Style>(static_cast<size_t>(Style::kSession0) + index % kSessionStyles);
}

const char* Glyph(Part part, bool utf8) {
  static constexpr std::array<const char*, kAllParts.size()> kUtf8 = {"█", "▚", "▒", "░", "?", "▤", "╳", "·"};
  static constexpr std::array<const char*, kAllParts.size()> kAscii = {"#", "%", "+", "-", "?", "=", "x", "."};
  return (utf8 ? kUtf8 : kAscii)[static_cast<size_t>(part)];
}

Line Bar(const PartBytes& bytes, int width, bool utf8) {
  Line line;
  const PartCells cells = ShareCells(bytes, width);
  for (const Part part : kAllParts) {
    if (cells[part] == 0) continue;
    Span span{.text = "", .style = StyleOf(part)};
    for (int i = 0; i < cells[part]; ++i) span.text += Glyph(part, utf8);
    line.push_back(std::move(span));
  }
  return line;
}

int Cells(absl::string_view text) {
  return static_cast<int>(std::count_if(text.begin(), text.end(), [](char c) { return !ContinuesCharacter(c); }));
}

int Cells(const Line& line) {
  int cells = 0;
  for (const Span& span : line) cells += Cells(span.text);
  return cells;
}

Line Clip(Line line, int width) {
  int left = std::max(width, 0);
  for (Span& span : line) {
    size_t end = 0;
    while (end < span.text.size() && (left > 0 || ContinuesCharacter(span.text[end]))) {
      if (!ContinuesCharacter(span.text[end])) --left;
      ++end;
      while (end < span.text.size() && ContinuesCharacter(span.text[end])) ++end;
    }
    span.text.resize(end);
  }
  return line;
}

std::vector<Line> Pack(const std::vector<Line>& items, int width) {
  constexpr absl::string_view kGap = "   ";
  std::vector<Line> lines;
  for (const Line& item : items) {
    if (lines.empty() || Cells(lines.back()) + Cells(kGap) + Cells(item) > width) {
      lines.push_back(item);
      continue;
    }
    lines.back().push_back({std::string(kGap)});
    lines.back().insert(lines.back().end(), item.begin(), item.end());
  }
  return lines;
}

std::string Printable(absl::string_view text) {
  std::string out;
  for (const char c : text) {
    if (absl::ascii_isprint(static_cast<unsigned char>(c))) {
      out += c;
    } else {
      absl::StrAppendFormat(&out, "\\x%02x", static_cast<unsigned char>(c));
    }
  }
  return out;
}

std::string Fit(absl::string_view text, int width, bool right) {
  const auto wanted = static_cast<size_t>(std::max(width, 0));
  const auto cells = static_cast<size_t>(Cells(text));
  if (cells > wanted) {
    return wanted == 0 ? "" : absl::StrCat(text.substr(0, wanted - 1), "~");
  }
  const std::string padding(wanted - cells, ' ');
  return right ? absl::StrCat(padding, text) : absl::StrCat(text, padding);
}

std::string ShortenMiddle(absl::string_view text, int width, bool utf8) {
  const auto most = static_cast<size_t>(std::max(width, 0));
  if (text.size() <= most) return std::string(text);
  if (most == 0) return "";
  const size_t end = (most - 1) / 2;
  return absl::StrCat(text.substr(0, most - 1 - end), Ellipsis(utf8), text.substr(text.size() - end));
}

std::string ShortenAtWord(absl::string_view text, int width, bool utf8) {
  const auto most = static_cast<size_t>(std::max(width, 0));
  if (text.size() <= most) return std::string(text);
  if (most == 0) return "";
  const size_t space = text.rfind(' ', most - 1);
  const bool cuts_word = space == absl::string_view::npos || space == 0;
  return absl::StrCat(text.substr(0, cuts_word ? most - 1 : space), Ellipsis(utf8));
}

std::vector<std::string> Wrap(absl::string_view text, int width) {
  const auto most = static_cast<size_t>(std::max(width, 1));
  std::vector<std::string> lines;
  while (text.size() > most) {
    const size_t space = text.rfind(' ', most);
    const bool cuts_word = space == absl::string_view::npos || space == 0;
    lines.emplace_back(text.substr(0, cuts_word ? most : space));
    text.remove_prefix(cuts_word ? most : space + 1);
  }
  lines.emplace_back(text);
  return lines;
}

std::string ShortBytes(uint64_t bytes) {
  if (bytes == 0) return "0";
  if (bytes < 1000) return absl::StrCat(bytes, "B");
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  constexpr absl::string_view kUnits = "BKMGTPE";
  while (value >= 1000 && unit + 1 < kUnits.size()) {  // switch units at 1000, so that at most three digits are shown
    value /= 1024;
    ++unit;
  }
  return absl::StrFormat("%.*f%c", value < 9.995 ? 2 : value < 99.95 ? 1 : 0, value, kUnits[unit]);
}

std::string Render(const Line& line, bool colour) {
  std::string out;
  for (const Span& span : line) {
    const absl::string_view escape = colour ? EscapeOf(span.style) : "";
    if (escape.empty()) {
      out += span.text;
    } else {
      absl::StrAppend(&out, "\x1b[", escape, "m", span.text, "\x1b[0m");
    }
  }
  return out;
}

}  // namespace vrambroker::vramctl
