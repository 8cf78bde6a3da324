// SPDX-License-Identifier: Apache-2.0
//
// Claims for container runtimes: files of the Container Device Interface (CDI,
// github.com/cncf-tags/container-device-interface), by which `--device vrambroker.dev/claim=NAME` gives a container the
// claim.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_VIEWS_CLAIM_CDI_H_
#define VRAMBROKER_CLIENT_VRAMCTL_VIEWS_CLAIM_CDI_H_

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "vrambroker/v1/admin.pb.h"

namespace vrambroker::vramctl {

// "vrambroker.dev/claim=team-a", as runtimes know it.
std::string CdiDevice(absl::string_view claim);

// Where runtimes look for it, until the next reboot, as sockets are.
std::string CdiPath(absl::string_view claim);

// What is in that file: the claim's directory is at /run/vrambroker of the container, where clients look. Nothing can
// be written there: the room of /run is the machine's. FailedPrecondition: the claim has no sockets, or is being
// removed. InvalidArgument: CDI does not allow its name.
// `preload`: the library that has the memory of programs counted that know nothing of the daemon; empty: none. The
// container gets it, and an environment that loads it into every program.
absl::StatusOr<nlohmann::ordered_json> ClaimCdi(const v1::Claim& claim, const std::string& preload = "");

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_CLAIM_CDI_H_
