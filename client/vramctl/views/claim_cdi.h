// SPDX-License-Identifier: Apache-2.0
//
// Claims for container runtimes: files of the Container Device Interface (CDI,
// github.com/cncf-tags/container-device-interface). `--device vrambroker.dev/claim=NAME` gives a container the claim.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_VIEWS_CLAIM_CDI_H_
#define VRAMBROKER_CLIENT_VRAMCTL_VIEWS_CLAIM_CDI_H_

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "vrambroker/v1/admin.pb.h"

namespace vrambroker::vramctl {

// Returns the CDI name: "vrambroker.dev/claim=team-a".
std::string CdiDevice(absl::string_view claim);

// Returns the path where runtimes look for the CDI file. Like the sockets, the file lasts until the next reboot.
std::string CdiPath(absl::string_view claim);

// Returns the content of the CDI file: mounts the claim's directory at /run/vrambroker of the container, where clients
// look. The mount is read-only, since /run takes the machine's memory. FailedPrecondition: the claim has no sockets, or
// is being removed. InvalidArgument: CDI does not allow the claim's name.
// `preload`: the library counting the memory of programs unaware of the daemon; empty: none. The container gets the
// library, and an environment to load it into every program.
absl::StatusOr<nlohmann::ordered_json> ClaimCdi(const v1::Claim& claim, const std::string& preload = "");

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_CLAIM_CDI_H_
