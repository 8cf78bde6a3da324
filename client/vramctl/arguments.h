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

// Returns nullptr if `app` has no such command.
const CLI::App* FindCommand(const CLI::App& app, const std::string& name);

class CommandLine {
 public:
  CommandLine();

  // Returns the action to run. InvalidArgument describes the error and names the help to read.
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
  void AddClaimCommands(CLI::App* claim);
  void AddRun();
  void AddTools();
  // For run: keeps the words after "--" from CLI11. Returns the number of words left.
  int TakeProgram(int argc, char** argv);
  // Reports arguments unknown to CLI11.
  absl::Status Unexpected() const;

  Context context_;
  std::unique_ptr<CLI::App> app_;
  std::function<absl::Status()> run_;
  std::string format_ = "text";
  double timeout_seconds_ = 0;
  std::string session_argument_;
  std::string value_argument_;
  std::vector<std::string> misplaced_program_;
  std::vector<std::string> words_;  // arguments of help
  CLI::AppFormatMode help_mode_ = CLI::AppFormatMode::Normal;
};

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_ARGUMENTS_H_
