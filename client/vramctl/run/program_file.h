// SPDX-License-Identifier: Apache-2.0
//
// The file of a program: where it is, and whether a library can be put into it.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_RUN_PROGRAM_FILE_H_
#define VRAMBROKER_CLIENT_VRAMCTL_RUN_PROGRAM_FILE_H_

#include <string>

#include "absl/status/statusor.h"

namespace vrambroker::vramctl {

// As execvp() finds it: by $PATH if the name has no slash. NotFound; PermissionDenied: it may not be executed.
absl::StatusOr<std::string> FindProgram(const std::string& name);

// Why a preloaded library is not loaded into the program at `path`, or into the interpreter of a script: "is statically
// linked". Empty: nothing speaks against it.
std::string WhyNoPreload(const std::string& path);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_RUN_PROGRAM_FILE_H_
