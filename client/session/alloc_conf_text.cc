// SPDX-License-Identifier: Apache-2.0
#include "client/session/alloc_conf_text.h"

#include <algorithm>
#include <cstdlib>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace vrambroker::client_internal {
namespace {

constexpr char kField[] = "alloc_conf";  // as the daemon calls it
constexpr char kNewVariable[] = "PYTORCH_ALLOC_CONF";
constexpr char kOldVariable[] = "PYTORCH_CUDA_ALLOC_CONF";

std::string Environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace

absl::Status AllocConfText::NameSource(const absl::Status& status) const {
  absl::string_view what = status.message();
  if (!absl::IsInvalidArgument(status) || !absl::ConsumePrefix(&what, absl::StrCat(kField, ":"))) return status;
  return absl::InvalidArgumentError(absl::StrCat(source, ":", what));
}

absl::StatusOr<AllocConfText> FindAllocConf(const std::optional<std::string>& option) {
  AllocConfText conf{.source = kField};
  if (option.has_value()) {
    conf.text = *option;
  } else {
    const std::string newer = Environment(kNewVariable);
    const std::string older = Environment(kOldVariable);
    conf.text = newer.empty() ? older : newer;
    conf.source = newer.empty() ? kOldVariable : kNewVariable;
    if (!newer.empty() && !older.empty() && newer != older) {
      conf.warnings.push_back(
          absl::StrCat(kOldVariable, " is ignored: ", kNewVariable, " is also set, to a different value."));
    }
  }
  if (!std::all_of(conf.text.begin(), conf.text.end(), [](unsigned char c) { return absl::ascii_isascii(c); })) {
    return absl::InvalidArgumentError(absl::StrCat(conf.source, ": has non-ASCII characters; accepted: KEY:VALUE,..."));
  }
  return conf;
}

}  // namespace vrambroker::client_internal
