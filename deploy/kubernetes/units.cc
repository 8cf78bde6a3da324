// SPDX-License-Identifier: Apache-2.0
#include "deploy/kubernetes/units.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "allocator/base/bytes.h"
#include "allocator/base/utf8.h"

namespace vrambroker::kubernetes {
namespace {

constexpr absl::string_view kBeforeNumber = "::";

struct Unit {
  std::string device;
  uint32_t number = 0;
};

std::optional<Unit> ParseUnitId(absl::string_view id) {
  const size_t place = id.rfind(kBeforeNumber);
  if (place == absl::string_view::npos || place == 0) return std::nullopt;
  Unit unit = {.device = std::string(id.substr(0, place))};
  const absl::string_view number = id.substr(place + kBeforeNumber.size());
  // Each unit has a single id: "01" and "+1" are not ids.
  if (!absl::SimpleAtoi(number, &unit.number) || absl::StrCat(unit.number) != number) return std::nullopt;
  return unit;
}

// A DNS label: small letters, digits and -, a letter or digit at both ends.
bool IsDnsLabel(absl::string_view label) {
  if (label.empty() || label.size() > 63 || label.front() == '-' || label.back() == '-') return false;
  return absl::c_all_of(label, [](char c) { return absl::ascii_islower(c) || absl::ascii_isdigit(c) || c == '-'; });
}

}  // namespace

std::string UnitId(absl::string_view device, uint32_t number) {
  return absl::StrCat(device, kBeforeNumber, number);
}

absl::StatusOr<DeviceUnits> ParseUnitIds(const std::vector<std::string>& ids) {
  DeviceUnits units;
  for (const std::string& id : ids) {
    std::optional<Unit> unit = ParseUnitId(id);
    if (!unit.has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat("\"", CleanText(id, kMostIdShown), "\" is no unit of memory: they are named DEVICE::NUMBER"));
    }
    if (units.device.empty())
      units.device = std::move(unit->device);
    else if (units.device != unit->device) {
      return absl::FailedPreconditionError(
          absl::StrCat("the ", ids.size(), " units are of several devices (", CleanText(units.device, kMostIdShown),
                       ", ", CleanText(unit->device, kMostIdShown),
                       "), and a container's memory is on one: no device has as many free. Ask for fewer, or start "
                       "vrambroker-device-plugin with --resource-per-device, so that the scheduler knows"));
    }
    units.numbers.insert(unit->number);
  }
  if (units.numbers.empty()) return absl::InvalidArgumentError("no unit of memory is asked for");
  return units;
}

std::vector<std::string> ChooseUnits(const std::vector<std::string>& available,
                                     const std::vector<std::string>& required, size_t count) {
  std::map<std::string, std::set<uint32_t>> free;
  for (const std::string& id : available) {
    if (std::optional<Unit> unit = ParseUnitId(id)) free[unit->device].insert(unit->number);
  }
  std::set<uint32_t> chosen;
  auto device = free.end();
  if (required.empty()) {
    for (auto it = free.begin(); it != free.end(); ++it) {
      if (it->second.size() < count) continue;
      if (device == free.end() || it->second.size() < device->second.size()) device = it;
    }
  } else if (const absl::StatusOr<DeviceUnits> units = ParseUnitIds(required); units.ok()) {
    device = free.find(units->device);
    chosen = units->numbers;
  }
  if (device == free.end()) return {};
  for (const uint32_t number : device->second) {
    if (chosen.size() >= count) break;
    chosen.insert(number);
  }
  if (chosen.size() != count) return {};
  std::vector<std::string> ids;
  ids.reserve(count);
  for (const uint32_t number : chosen) ids.push_back(UnitId(device->first, number));
  return ids;
}

std::string FormatUnits(const std::set<uint32_t>& numbers, size_t most_bytes) {
  std::string text;
  for (auto it = numbers.begin(); it != numbers.end();) {
    const uint32_t first = *it;
    uint32_t last = first;
    for (++it; it != numbers.end() && *it == last + 1; ++it) last = *it;
    std::string range = absl::StrCat(text.empty() ? "" : ",", first);
    if (last != first) absl::StrAppend(&range, "-", last);
    if (text.size() + range.size() > most_bytes) break;
    text += range;
  }
  return text;
}

std::set<uint32_t> ParseUnits(absl::string_view text) {
  std::set<uint32_t> numbers;
  for (const absl::string_view range : absl::StrSplit(text, ',', absl::SkipEmpty())) {
    const std::pair<absl::string_view, absl::string_view> ends = absl::StrSplit(range, absl::MaxSplits('-', 1));
    uint32_t first = 0;
    if (!absl::SimpleAtoi(ends.first, &first)) continue;
    uint32_t last = first;
    if (!ends.second.empty() && !absl::SimpleAtoi(ends.second, &last)) continue;
    for (uint64_t number = first; number <= std::min<uint64_t>(last, first + kMostUnits); ++number) {
      numbers.insert(static_cast<uint32_t>(number));
    }
  }
  return numbers;
}

absl::Status CheckUnitBytes(uint64_t unit_bytes) {
  if (unit_bytes >= 1_MiB && unit_bytes % 1_MiB == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(FormatBytesExactly(unit_bytes), " is no whole number of MiB; write it as 256MiB or 1GiB"));
}

std::string ResourceName(uint64_t unit_bytes) {
  const bool is_gib = unit_bytes % 1_GiB == 0;
  return absl::StrCat("vrambroker.dev/memory-", unit_bytes / (is_gib ? 1_GiB : 1_MiB), is_gib ? "gi" : "mi");
}

absl::Status CheckResourceName(absl::string_view name) {
  const std::pair<absl::string_view, absl::string_view> parts = absl::StrSplit(name, absl::MaxSplits('/', 1));
  const auto& [domain, word] = parts;
  const bool is_domain = domain.size() <= 253 && absl::c_all_of(absl::StrSplit(domain, '.'), IsDnsLabel);
  const bool is_word =
      !word.empty() && word.size() <= 63 && absl::ascii_isalnum(word.front()) && absl::ascii_isalnum(word.back()) &&
      absl::c_all_of(word, [](char c) { return absl::ascii_isalnum(c) || c == '-' || c == '_' || c == '.'; });
  if (!is_domain || !is_word) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", name,
                     "\" is no name of a resource of Kubernetes, which are written as vrambroker.dev/memory-256mi: a "
                     "domain in small letters, a slash, and at most 63 letters, digits and - _ ."));
  }
  if (domain == "kubernetes.io" || absl::EndsWith(domain, ".kubernetes.io")) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", name, "\": Kubernetes keeps the domain kubernetes.io for itself"));
  }
  return absl::OkStatus();
}

}  // namespace vrambroker::kubernetes
