// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/completion.h"

#include <cstdio>

#include "absl/strings/match.h"
#include "absl/time/time.h"
#include "allocator/base/command_line.h"
#include "client/vrambroker/client.h"
#include "client/vramctl/arguments.h"
#include "client/vramctl/daemon/daemon_calls.h"
#include "client/vramctl/plan_arguments.h"
#include "client/vramctl/views/top_table.h"

namespace vrambroker::vramctl {
namespace {

constexpr absl::Duration kNamesTimeout = absl::Seconds(1);

// State after the words before the last word.
struct Position {
  const CLI::App* command;
  const CLI::Option* option = nullptr;  // still needs a value
  int values = 0;                       // values of the option so far
  size_t arguments = 0;                 // arguments of the command so far
  const CLI::App* helped = nullptr;     // command whose help was requested, so far
  std::string socket_dir;
};

// Returns the option named by `word`, of the command or global; `word` holds no value.
const CLI::Option* FindOption(const CLI::App& command, const std::string& word) {
  if (!absl::StartsWith(word, "-")) return nullptr;
  for (const CLI::App* app = &command; app != nullptr; app = app->get_parent()) {
    if (const CLI::Option* option = app->get_option_no_throw(word); option != nullptr) return option;
  }
  return nullptr;
}

bool TakesValue(const CLI::Option& option) {
  return option.get_items_expected_max() > 0;
}

Position Follow(const CLI::App& app, const std::vector<std::string>& words) {
  Position at = {.command = &app, .socket_dir = DefaultSocketDir()};
  for (size_t i = 0; i + 1 < words.size(); ++i) {
    const std::string& word = words[i];
    if (at.option != nullptr) {
      if (at.option->check_lname("socket-dir")) at.socket_dir = word;
      if (++at.values >= at.option->get_items_expected_min()) at.option = nullptr;
    } else if (absl::StartsWith(word, "-")) {
      at.option = FindOption(*at.command, word);
      at.values = 0;
      if (at.option != nullptr && !TakesValue(*at.option)) at.option = nullptr;
    } else if (const CLI::App* command = FindCommand(*at.command, word); command != nullptr) {
      at.command = command;
    } else {
      if (at.helped != nullptr) at.helped = FindCommand(*at.helped, word);
      ++at.arguments;
    }
    if (at.command->get_name() == "help" && at.helped == nullptr && at.arguments == 0) at.helped = &app;
  }
  return at;
}

std::vector<std::string> SessionNames(const std::string& socket_dir) {
  std::vector<std::string> names;
  absl::StatusOr<Daemon> daemon = Daemon::Connect({.socket_dir = socket_dir}, kNamesTimeout);
  if (!daemon.ok()) return names;
  v1::ListSessionsResponse response;
  if (!Call(*daemon, &v1::Admin::Stub::ListSessions, v1::ListSessionsRequest(), &response).ok()) return names;
  for (const v1::Session& session : response.sessions()) names.push_back(SessionText(session.name()));
  return names;
}

std::vector<std::string> Values(const CLI::Option& option, const std::string& socket_dir) {
  const std::string type = option.get_type_name();
  std::vector<std::string> values = PlanValues(option);
  if (type == "SESSION") {
    values = SessionNames(socket_dir);
    if (absl::StrContains(option.get_description(), "FILE")) values.emplace_back(":files");
    return values;
  }
  if (type == "FILE" || type == "DIR") return {":files"};
  if (option.check_lname("format")) return {"text", "json"};
  if (option.check_lname("managed")) return {"count", "refuse"};
  if (option.check_lname("sort")) {
    for (int i = 0; i < kColumns; ++i) values.emplace_back(ColumnName(static_cast<Column>(i)));
  }
  return values;
}

std::vector<std::string> OptionNames(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::App* app = &command; app != nullptr; app = app->get_parent()) {
    for (const CLI::Option* option : app->get_options()) {
      if (app != &command && (option == app->get_help_ptr() || option == app->get_version_ptr())) continue;
      for (const std::string& name : option->get_lnames()) names.push_back(absl::StrCat("--", name));
    }
  }
  return names;
}

std::vector<std::string> Candidates(const Position& at, const std::string& word) {
  if (at.option != nullptr) return Values(*at.option, at.socket_dir);
  if (absl::StartsWith(word, "-")) return OptionNames(*at.command);
  if (std::vector<std::string> names = CommandNames(*at.command); !names.empty()) return names;
  if (at.command->get_name() == "help") {
    return at.helped == nullptr ? std::vector<std::string>() : CommandNames(*at.helped);
  }
  size_t arguments = 0;
  for (const CLI::Option* option : at.command->get_options()) {
    if (!option->get_positional()) continue;
    const bool takes_the_rest = option->get_items_expected_max() > 1;
    if (arguments++ == at.arguments || takes_the_rest) return Values(*option, at.socket_dir);
  }
  return {};
}

}  // namespace

void PrintCompletions(const CLI::App& app, const std::vector<std::string>& words) {
  if (words.empty()) return;
  // zsh treats --session=NAME as a single word, so keep the prefix.
  std::string prefix;
  if (absl::StartsWith(words.back(), "--")) prefix = words.back().substr(0, words.back().rfind('=') + 1);
  std::vector<std::string> spelled = SpellOptions(app, words);
  const std::string& word = spelled.back();
  bool any = false;
  for (const std::string& candidate : Candidates(Follow(app, spelled), word)) {
    if (candidate == ":files") {
      if (!any) std::puts(candidate.c_str());  // a shell completes either names or files
    } else if (absl::StartsWith(candidate, word)) {
      std::printf("%s%s\n", prefix.c_str(), candidate.c_str());
      any = true;
    }
  }
}

}  // namespace vrambroker::vramctl
