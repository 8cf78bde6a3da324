// SPDX-License-Identifier: Apache-2.0
//
// Another program in this one's place, as far as its caller can tell: with the same standard streams, in the same
// process group, and with the signals that this process gets.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_RUN_CHILD_PROGRAM_H_
#define VRAMBROKER_CLIENT_VRAMCTL_RUN_CHILD_PROGRAM_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace vrambroker::vramctl {

// Runs it until it ends. Its exit code, or 128 and the signal that ended it. FailedPrecondition: it cannot be executed.
// Afterwards signals that would end this process are ignored: it ends soon.
absl::StatusOr<int> RunChildProgram(const std::string& path, const std::vector<std::string>& arguments,
                                    const std::vector<std::string>& environment);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_RUN_CHILD_PROGRAM_H_
