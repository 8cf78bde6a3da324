// SPDX-License-Identifier: Apache-2.0
//
// The file of a program: its path, and whether a library can be preloaded.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_RUN_PROGRAM_FILE_H_
#define VRAMBROKER_CLIENT_VRAMCTL_RUN_PROGRAM_FILE_H_

#include <string>

#include "absl/status/statusor.h"

namespace vrambroker::vramctl {

// Finds a program like execvp(): by $PATH if the name has no slash. NotFound; PermissionDenied: the file is not
// executable.
absl::StatusOr<std::string> FindProgram(const std::string& name);

// Explains why the program at `path`, or the interpreter of a script, does not load a preloaded library: "is statically
// linked". Empty: no reason found.
std::string WhyNoPreload(const std::string& path);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_RUN_PROGRAM_FILE_H_
