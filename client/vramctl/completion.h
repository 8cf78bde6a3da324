// SPDX-License-Identifier: Apache-2.0
//
// Completions for completion.bash and completion.zsh.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_COMPLETION_H_
#define VRAMBROKER_CLIENT_VRAMCTL_COMPLETION_H_

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace vrambroker::vramctl {

// The hidden command: vramctl __complete WORD...
inline constexpr char kCompletionCommand[] = "__complete";

// Prints the candidates for the last of `words`, each on a line; earlier words are the context. Names of sessions come
// from the daemon, if it answers at once. ":files" stands for names of files.
void PrintCompletions(const CLI::App& app, const std::vector<std::string>& words);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_COMPLETION_H_
