// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/views/top_head.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "allocator/base/bytes.h"
#include "allocator/wire/admin_json.h"
#include "client/vramctl/views/output.h"
#include "client/vramctl/views/top_table.h"

namespace vrambroker::vramctl {
namespace {

constexpr int kLeastDeviceBar = 4;   // next to all figures, if there is little room
constexpr int kLeastDeviceName = 8;  // a shorter name says nothing

Line FiguresOf(const PartBytes& parts, const std::vector<Part>& shown, bool short_sizes, bool utf8) {
  Line line;
  for (const Part part : shown) {
    line.push_back({line.empty() || short_sizes ? "  " : "   "});
    line.push_back({Glyph(part, utf8), StyleOf(part)});
    line.push_back(
        {absl::StrCat(" ", PartName(part), " ", short_sizes ? ShortBytes(parts[part]) : FormatBytes(parts[part]))});
  }
  return line;
}

// Returns "62 %  54 C  310 W", or "62% 54C 310W"; omits unknown values.
std::string Sensors(const v1::Device& device, bool short_form) {
  std::vector<std::string> texts;
  const auto add = [&](bool is_known, const v1::Reading& reading, const char* unit) {
    if (is_known) texts.push_back(absl::StrCat(std::lround(reading.value()), short_form ? "" : " ", unit));
  };
  add(device.has_use_percent(), device.use_percent(), "%");
  add(device.has_temperature_celsius(), device.temperature_celsius(), "C");
  add(device.has_power_watts(), device.power_watts(), "W");
  return absl::StrJoin(texts, short_form ? " " : "  ");
}

// Returns the figures next to the bar, the most important first.
std::vector<std::string> DeviceFigures(const v1::Device& device, const PartBytes& parts, bool short_form) {
  const auto size = [&](uint64_t bytes) { return short_form ? ShortBytes(bytes) : FormatBytes(bytes); };
  std::vector<std::string> figures = {
      absl::StrCat("  ", size(FreeBytes(device)), " free of ", size(device.capacity_bytes())),
      absl::StrCat(", ", size(device.reserved_bytes()), " reserved"),
      absl::StrCat(", FRAG ", Percent(FragmentedShare(parts)))};
  if (const std::string sensors = Sensors(device, short_form); !sensors.empty()) {
    figures.push_back(absl::StrCat("  ", sensors));
  }
  return figures;
}

}  // namespace

Line LineOf(std::vector<RankedSpan> pieces, int width) {
  const auto cells = [&] {
    int sum = 0;
    for (const RankedSpan& piece : pieces) sum += Cells(piece.span.text);
    return sum;
  };
  while (pieces.size() > 1 && cells() > width) {
    pieces.erase(std::max_element(pieces.begin(), pieces.end(),
                                  [](const RankedSpan& a, const RankedSpan& b) { return a.rank < b.rank; }));
    std::string& first = pieces.front().span.text;
    first.erase(0, first.find_first_not_of(",; "));
  }
  Line line;
  line.reserve(pieces.size());
  for (RankedSpan& piece : pieces) line.push_back(std::move(piece.span));
  return line;
}

Line Figures(const PartBytes& parts, int width, bool utf8) {
  std::vector<Part> shown;
  for (const Part part : kAllParts) {
    if (parts[part] > 0 || part == Part::kAllocated || part == Part::kFree) shown.push_back(part);
  }
  Line line = FiguresOf(parts, shown, /*short_sizes=*/false, utf8);
  if (Cells(line) <= width) return line;
  for (; !shown.empty(); shown.pop_back()) {
    line = FiguresOf(parts, shown, /*short_sizes=*/true, utf8);
    if (Cells(line) <= width) return line;
  }
  return {};
}

Line DeviceLine(const v1::Device& device, const PartBytes& parts, int width, bool utf8) {
  Line line = {{absl::StrCat("device ", device.ordinal(), " "), Style::kTitle}};
  const int room = width - Cells(line);
  const std::string name = Printable(device.name());
  std::string label = absl::StrJoin(DeviceFigures(device, parts, /*short_form=*/false), "");
  if (Cells(label) + 2 + Cells(name) + kLeastBar > room) {
    label.clear();
    for (const std::string& figure : DeviceFigures(device, parts, /*short_form=*/true)) {
      if (Cells(label) + Cells(figure) + kLeastDeviceBar > room) break;
      label += figure;
    }
  }
  const int left = room - kLeastBar - Cells(label) - 2;
  if (!name.empty() && left >= std::min(Cells(name), kLeastDeviceName)) {
    absl::StrAppend(&label, "  ", ShortenAtWord(name, left, utf8));
  }
  for (Span& span : Bar(parts, room - Cells(label), utf8)) line.push_back(std::move(span));
  line.push_back({label});
  return line;
}

}  // namespace vrambroker::vramctl
