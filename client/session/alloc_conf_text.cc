// SPDX-License-Identifier: Apache-2.0
#include "client/session/alloc_conf_text.h"

#include <algorithm>
#include <cstdlib>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace vrambroker::client_internal {
namespace {

constexpr char kField[] = "alloc_conf";  // the daemon's field name
constexpr const char* kVariables[] = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"};

// The first variable set counts, even when empty. Warns when a later variable has different text.
void TakeFromEnvironment(AllocConfText* conf) {
  bool is_found = false;
  for (const char* name : kVariables) {
    const char* const value = std::getenv(name);
    if (value == nullptr) continue;
    if (!is_found) {
      is_found = true;
      conf->text = value;
      conf->source = name;
    } else if (*value != '\0' && conf->text != value) {
      conf->warnings.push_back(absl::StrCat(name, " is ignored: ", conf->source,
                                            " comes first, as in PyTorch 2.14, and is ",
                                            conf->text.empty() ? "set but empty." : "set to a different value."));
    }
  }
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
    TakeFromEnvironment(&conf);
  }
  if (!std::all_of(conf.text.begin(), conf.text.end(), [](unsigned char c) { return absl::ascii_isascii(c); })) {
    return absl::InvalidArgumentError(absl::StrCat(conf.source, ": has non-ASCII characters; accepted: KEY:VALUE,..."));
  }
  return conf;
}

}  // namespace vrambroker::client_internal
