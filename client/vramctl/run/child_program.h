// SPDX-License-Identifier: Apache-2.0
//
// Runs a program in place of this process, indistinguishable for the caller: in the same process group, with the same
// standard streams, the signals sent to this process, and the same end.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_RUN_CHILD_PROGRAM_H_
#define VRAMBROKER_CLIENT_VRAMCTL_RUN_CHILD_PROGRAM_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace vrambroker::vramctl {

struct ProgramEnd {
  int exit_code = 0;  // as in shells: 128 plus the signal, if a signal ended the program
  int signal = 0;     // 0: none
};

// Runs the program until its end. FailedPrecondition: the file cannot be executed. Afterwards, this process ignores
// signals, since its end is near.
absl::StatusOr<ProgramEnd> RunChildProgram(const std::string& path, const std::vector<std::string>& arguments,
                                           const std::vector<std::string>& environment);

// Ends this process by the signal. A shell ends a loop after a program ended by SIGINT, but not for an exit code.
// Returns if the kernel does not end the process, as for process 1 of a container.
void EndBySignal(int signal);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_RUN_CHILD_PROGRAM_H_
