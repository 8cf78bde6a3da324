// SPDX-License-Identifier: Apache-2.0
#include "client/session/environment.h"

#include <cstdlib>
#include <optional>
#include <string>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "allocator/base/amounts.h"

namespace vrambroker::client_internal {
namespace {

// Empty counts as unset.
std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

absl::Status Wrong(const char* name, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(name, ": ", why));
}

absl::Status ReadLimit(const char* name, std::optional<Limit>* limit) {
  const std::string text = Variable(name);
  if (limit->has_value() || text.empty()) return absl::OkStatus();
  const absl::StatusOr<Limit> read = ParseLimit(text);
  if (!read.ok()) return Wrong(name, read.status().message());
  *limit = *read;
  return absl::OkStatus();
}

absl::Status ReadWait(absl::Duration* wait) {
  constexpr char kName[] = "VRAMBROKER_WAIT";
  const std::string text = Variable(kName);
  if (*wait != absl::ZeroDuration() || text.empty()) return absl::OkStatus();
  const absl::StatusOr<absl::Duration> read = ParseTime(text);
  if (!read.ok()) return Wrong(kName, read.status().message());
  if (*read > absl::Hours(1)) return Wrong(kName, absl::StrCat("'", text, "' is longer than an hour"));
  *wait = *read;
  return absl::OkStatus();
}

// Checks only the syntax: the daemon knows the existing devices.
absl::Status ReadDevices(std::vector<std::string>* devices) {
  const std::string text = Variable(kDevicesVariable);
  const bool are_given = !devices->empty();
  if (!are_given && !text.empty()) *devices = absl::StrSplit(text, ',');
  for (std::string& device : *devices) {
    absl::StripAsciiWhitespace(&device);
    if (!device.empty() && absl::c_all_of(device, [](unsigned char c) { return absl::ascii_isalnum(c) || c == '-'; })) {
      continue;
    }
    return Wrong(
        are_given ? "devices" : kDevicesVariable,
        absl::StrCat("'", absl::CHexEscape(device), "' is neither a device's ordinal, as 0, nor its UUID, as GPU-..."));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ClientOptions> WithEnvironment(ClientOptions options) {
  if (options.name.empty()) options.name = Variable("VRAMBROKER_NAME");
  absl::Status status = ReadLimit("VRAMBROKER_LIMIT", &options.limit);
  if (status.ok()) status = ReadLimit("VRAMBROKER_GUARANTEE", &options.guarantee);
  if (status.ok()) status = ReadWait(&options.wait);
  if (status.ok()) status = ReadDevices(&options.devices);
  if (!status.ok()) return status;
  return options;
}

}  // namespace vrambroker::client_internal
