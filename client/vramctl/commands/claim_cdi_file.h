// SPDX-License-Identifier: Apache-2.0
//
// Where `vramctl claim cdi` writes: files read by container runtimes.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_COMMANDS_CLAIM_CDI_FILE_H_
#define VRAMBROKER_CLIENT_VRAMCTL_COMMANDS_CLAIM_CDI_FILE_H_

#include <string>

#include "absl/status/status.h"
#include "client/vramctl/views/claim_cdi.h"

namespace vrambroker::vramctl {

// `output`: a file, "-" for standard output, or empty for CdiPath(), where runtimes look. Refuses claims unusable by
// runtimes, and refuses to replace the file of another claim. Changes the umask of the process.
// `preload` is for ClaimCdi().
absl::Status WriteCdiFile(const v1::Claim& claim, const std::string& output, const std::string& preload);

// Removes the claim's file from the runtimes' directory, since a container with its device could no longer start. Keeps
// the file if its claim belongs to another daemon. Errors go to stderr. `socket_dir`: the daemon's.
void RemoveCdiFile(const std::string& claim, const std::string& socket_dir);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_COMMANDS_CLAIM_CDI_FILE_H_
