// SPDX-License-Identifier: Apache-2.0
//
// What completion.bash and completion.zsh ask for.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_COMPLETION_H_
#define VRAMBROKER_CLIENT_VRAMCTL_COMPLETION_H_

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace vrambroker::vramctl {

// The hidden command: vramctl __complete WORD...
inline constexpr char kCompletionCommand[] = "__complete";

// Prints what the last of `words` may become, one a line; the others stand before it. Names of sessions come from the
// daemon, when it answers at once. ":files" stands for names of files.
void PrintCompletions(const CLI::App& app, const std::vector<std::string>& words);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_COMPLETION_H_
