// SPDX-License-Identifier: Apache-2.0
//
// The commands of vramctl with their arguments, options and help.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_ARGUMENTS_H_
#define VRAMBROKER_CLIENT_VRAMCTL_ARGUMENTS_H_

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/vramctl/commands/commands.h"

namespace vrambroker::vramctl {

// nullptr: there is none.
const CLI::App* FindCommand(const CLI::App& app, const std::string& name);

class CommandLine {
 public:
  CommandLine();

  // What to do. InvalidArgument says what is wrong, and which help to read.
  absl::StatusOr<std::function<absl::Status()>> Parse(int argc, char** argv);

  // Filled in by Parse().
  const Context& context() const { return context_; }
  const CLI::App& app() const { return *app_; }

 private:
  CLI::App* Add(const char* group, const char* name, const char* description, std::function<absl::Status()> run);
  CLI::Option* AddSession(CLI::App* command, const char* description);
  std::optional<std::string> GivenSession(const char* command) const;
  void AddCommandsThatShow();
  void AddCommandsThatChange();
  void AddClaimCommands();
  void AddRun();
  void AddTools();
  // Of run: what stands after "--" is not for CLI11. How many words are left.
  int TakeProgram(int argc, char** argv);
  // Of what CLI11 did not know.
  absl::Status Unexpected() const;

  Context context_;
  std::unique_ptr<CLI::App> app_;
  std::function<absl::Status()> run_;
  std::string format_ = "text";
  double timeout_seconds_ = 0;
  std::string session_argument_;
  std::string value_argument_;
  std::vector<std::string> misplaced_program_;
  std::vector<std::string> words_;  // of help
  CLI::AppFormatMode help_mode_ = CLI::AppFormatMode::Normal;
};

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_ARGUMENTS_H_
