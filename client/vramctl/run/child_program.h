// SPDX-License-Identifier: Apache-2.0
//
// Another program in this one's place, as far as its caller can tell: with the same standard streams, in the same
// process group, with the signals that this process gets, and with the same end.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_RUN_CHILD_PROGRAM_H_
#define VRAMBROKER_CLIENT_VRAMCTL_RUN_CHILD_PROGRAM_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace vrambroker::vramctl {

struct ProgramEnd {
  int exit_code = 0;  // as shells have it: 128 and the signal, if one has ended it
  int signal = 0;     // 0: none
};

// Runs it until it ends. FailedPrecondition: it cannot be executed. Afterwards signals that would end this process are
// ignored: it ends soon.
absl::StatusOr<ProgramEnd> RunChildProgram(const std::string& path, const std::vector<std::string>& arguments,
                                           const std::vector<std::string>& environment);

// Ends this process by the signal. A shell whose program ends by SIGINT ends its loop, and does not for an exit code.
// Returns where the kernel ends no process by it, as that with number 1 of a container.
void EndBySignal(int signal);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_RUN_CHILD_PROGRAM_H_
