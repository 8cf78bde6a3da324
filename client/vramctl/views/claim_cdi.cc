// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/views/claim_cdi.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace vrambroker::vramctl {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kKind[] = "vrambroker.dev/claim";
// Use the oldest sufficient version, known to the most runtimes. Names beginning with a digit came later.
constexpr char kVersion[] = "0.3.0";
constexpr char kVersionOfDigits[] = "0.5.0";
constexpr char kInContainer[] = "/run/vrambroker";  // default directory for clients to look for the daemon
constexpr char kPreloadInContainer[] = "/run/libvrambroker-preload.so";

bool IsCdiName(absl::string_view name) {
  return absl::ascii_isalnum(static_cast<unsigned char>(name.front())) &&
         absl::ascii_isalnum(static_cast<unsigned char>(name.back())) &&
         name.find('@') == absl::string_view::npos;  // CDI allows the remaining characters of claim names
}

}  // namespace

std::string CdiDevice(absl::string_view claim) {
  return absl::StrCat(kKind, "=", claim);
}

std::string CdiPath(absl::string_view claim) {
  return absl::StrCat("/run/cdi/vrambroker-", claim, ".json");
}

absl::StatusOr<Json> ClaimCdi(const v1::Claim& claim, const std::string& preload) {
  if (claim.socket_dir().empty()) {
    return absl::FailedPreconditionError(
        absl::StrFormat("the claim '%s' has no sockets that a container could be given: the policy's rule %s puts "
                        "sessions into it",
                        claim.name(), claim.rule()));
  }
  if (claim.state() != v1::CLAIM_STATE_ACTIVE) {
    return absl::FailedPreconditionError(
        absl::StrFormat("the claim '%s' is being removed: no container can use it", claim.name()));
  }
  if (claim.name().empty() || !IsCdiName(claim.name())) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "name: container runtimes do not allow '%s': it may have no @, and begins and ends with a letter "
        "or digit; create a claim with another name",
        claim.name()));
  }
  const bool has_digit = absl::ascii_isdigit(static_cast<unsigned char>(claim.name().front()));
  Json variables = {absl::StrCat("VRAMBROKER_SOCKET_DIR=", kInContainer)};
  Json mounts = {{{"hostPath", claim.socket_dir()},
                  {"containerPath", kInContainer},
                  {"options", {"ro", "nosuid", "nodev", "noexec", "bind"}}}};
  if (!preload.empty()) {
    variables.push_back(absl::StrCat("LD_PRELOAD=", kPreloadInContainer));
    mounts.push_back({{"hostPath", preload},
                      {"containerPath", kPreloadInContainer},
                      {"options", {"ro", "nosuid", "nodev", "bind"}}});
  }
  return Json{
      {"cdiVersion", has_digit ? kVersionOfDigits : kVersion},
      {"kind", kKind},
      {"devices",
       {{{"name", claim.name()}, {"containerEdits", {{"env", std::move(variables)}, {"mounts", std::move(mounts)}}}}}}};
}

}  // namespace vrambroker::vramctl
