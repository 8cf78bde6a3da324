// SPDX-License-Identifier: Apache-2.0
//
// Common parts of the command lines of vrambrokerd and vramctl; CLI11 parses them.
#ifndef VRAMBROKER_ALLOCATOR_BASE_COMMAND_LINE_H_
#define VRAMBROKER_ALLOCATOR_BASE_COMMAND_LINE_H_

#include <CLI/CLI.hpp>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace vrambroker {

// An empty command line with -h, --help and --version. Help is wrapped at 80 columns, in a form readable by help2man.
std::unique_ptr<CLI::App> MakeCommandLine(const std::string& program, const std::string& description);

// Parses the arguments of main(). Option names may be written with _ in place of -, like the fields of the
// configuration. Throws CLI::ParseError, also for --help and --version.
void ParseCommandLine(CLI::App& app, int argc, char** argv);

// Returns the words of a command line with options as CLI11 knows them: --socket_dir=DIR is --socket-dir DIR.
std::vector<std::string> SpellOptions(const CLI::App& app, const std::vector<std::string>& words);

// ParseCommandLine() for a program without commands. Prints the text for --help and --version, and errors. Returns the
// exit code for main(), 2 for an error; nullopt: the program goes on.
std::optional<int> ParseOrPrint(CLI::App& app, int argc, char** argv);

// Describes the error in our words.
std::string TextOf(const CLI::ParseError& error);

// Names the commands right below `app`.
std::vector<std::string> CommandNames(const CLI::App& app);

// "unknown option --capcity; did you mean --capacity?": suggests an option of `app` or its commands. `see` follows when
// no option is similar.
std::string UnknownOption(const CLI::App& app, const std::string& option, const std::string& see);

// "PROGRAM 0.1.0 (revision)".
std::string VersionText(const std::string& program);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_BASE_COMMAND_LINE_H_
