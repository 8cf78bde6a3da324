// SPDX-License-Identifier: Apache-2.0
//
// What the command lines of vrambrokerd and vramctl have in common; CLI11 parses them.
#ifndef VRAMBROKER_ALLOCATOR_BASE_COMMAND_LINE_H_
#define VRAMBROKER_ALLOCATOR_BASE_COMMAND_LINE_H_

#include <CLI/CLI.hpp>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace vrambroker {

// An empty command line with -h, --help and --version. Help is wrapped at 80 columns, in a form that help2man reads.
std::unique_ptr<CLI::App> MakeCommandLine(const std::string& program, const std::string& description);

// Parses the arguments of main(). Option names may be written with _ in place of -, as the fields of the configuration
// are. Throws CLI::ParseError, also for --help and --version.
void ParseCommandLine(CLI::App& app, int argc, char** argv);

// The words of a command line with options as CLI11 knows them: --socket_dir=DIR is --socket-dir DIR.
std::vector<std::string> SpellOptions(const CLI::App& app, const std::vector<std::string>& words);

// ParseCommandLine() for a program without commands. Prints what --help and --version ask for, and errors. What main()
// then returns, 2 for an error; nullopt: it goes on.
std::optional<int> ParseOrPrint(CLI::App& app, int argc, char** argv);

// What is wrong, in our words.
std::string TextOf(const CLI::ParseError& error);

// Of the commands right below `app`.
std::vector<std::string> CommandNames(const CLI::App& app);

// "unknown option --capcity; did you mean --capacity?": of the options of `app` and its commands. `see` follows where
// no option is like it.
std::string UnknownOption(const CLI::App& app, const std::string& option, const std::string& see);

// "PROGRAM 0.1.0 (revision)".
std::string VersionText(const std::string& program);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_BASE_COMMAND_LINE_H_
