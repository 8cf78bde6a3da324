// SPDX-License-Identifier: Apache-2.0
//
// Where `vramctl claim cdi` writes: files that container runtimes read.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_COMMANDS_CLAIM_CDI_FILE_H_
#define VRAMBROKER_CLIENT_VRAMCTL_COMMANDS_CLAIM_CDI_FILE_H_

#include <string>

#include "absl/status/status.h"
#include "client/vramctl/views/claim_cdi.h"

namespace vrambroker::vramctl {

// `output`: a file, "-" for standard output, or empty for where runtimes look (CdiPath()). Refuses what runtimes could
// not use, and to replace the file of another claim. Changes this process's umask.
// `preload` is for ClaimCdi().
absl::Status WriteCdiFile(const v1::Claim& claim, const std::string& output, const std::string& preload);

// Removes the file of this claim in the runtimes' directory: a container with its device would not start any more.
// One of another daemon's claim of that name stays. Errors are said on stderr. `socket_dir`: the daemon's.
void RemoveCdiFile(const std::string& claim, const std::string& socket_dir);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_COMMANDS_CLAIM_CDI_FILE_H_
