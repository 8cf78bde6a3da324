// SPDX-License-Identifier: Apache-2.0
#include "allocator/command_line.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "allocator/version.h"

namespace vrambroker {
namespace {

constexpr size_t kWidth = 80;
constexpr size_t kLabelWidth = 24;

// Appends `text` in lines that end before kWidth. The cursor is in column `at`; further lines start in column `indent`.
void AppendWrapped(const std::string& text, size_t at, size_t indent, std::string* out) {
  bool first = true;
  for (const absl::string_view word : absl::StrSplit(text, ' ')) {
    if (!first && at + 1 + word.size() > kWidth) {
      absl::StrAppend(out, "\n", std::string(indent, ' '));
      at = indent;
    } else if (!first) {
      absl::StrAppend(out, " ");
      ++at;
    }
    absl::StrAppend(out, word);
    at += word.size();
    first = false;
  }
  absl::StrAppend(out, "\n");
}

void AppendEntry(const std::string& label, const std::string& text, std::string* out) {
  absl::StrAppend(out, "  ", label);
  size_t at = 2 + label.size();
  if (at + 2 > kLabelWidth) {
    absl::StrAppend(out, "\n");
    at = 0;
  }
  absl::StrAppend(out, std::string(kLabelWidth - at, ' '));
  AppendWrapped(text, kLabelWidth, kLabelWidth, out);
}

std::string LabelOf(const CLI::Option& option) {
  std::vector<std::string> names;
  for (const std::string& name : option.get_snames()) names.push_back(absl::StrCat("-", name));
  for (const std::string& name : option.get_lnames()) names.push_back(absl::StrCat("--", name));
  if (option.get_items_expected_max() == 0) return absl::StrJoin(names, ", ");
  const std::string type = option.get_type_name();  // with the validators after a colon
  return absl::StrCat(absl::StrJoin(names, ", "), " ", type.substr(0, type.find(':')));
}

std::string FullName(const CLI::App& app) {
  return app.get_parent() == nullptr ? app.get_name() : FullName(*app.get_parent()) + " " + app.get_name();
}

enum class Which { kAll, kWithoutHelp };

void AppendOptions(const CLI::App& app, Which which, std::string* out) {
  for (const CLI::Option* option : app.get_options()) {
    const bool is_help = option == app.get_help_ptr() || option == app.get_version_ptr();
    if (option->nonpositional() && (which == Which::kAll || !is_help)) {
      AppendEntry(LabelOf(*option), option->get_description(), out);
    }
  }
}

std::vector<const CLI::Option*> Arguments(const CLI::App& app) {
  return app.get_options([](const CLI::Option* option) { return option->get_positional(); });
}

bool HasOption(const CLI::App& app, const std::string& name) {
  if (app.get_option_no_throw(name) != nullptr) return true;
  const std::vector<const CLI::App*> commands = app.get_subcommands([](const CLI::App*) { return true; });
  return std::any_of(commands.begin(), commands.end(),
                     [&](const CLI::App* command) { return HasOption(*command, name); });
}

// CLI11 takes the next word as the value of an option, whatever it is.
void CheckValues(const CLI::App& app) {
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& value : option->results()) {
      if (option->nonpositional() && absl::StartsWith(value, "--")) {
        throw CLI::ArgumentMismatch(absl::StrCat(option->get_name(), " needs a value before ", value));
      }
    }
  }
  for (const CLI::App* command : app.get_subcommands()) CheckValues(*command);
}

std::string UsageOf(const CLI::App& app) {
  const bool has_commands = !app.get_subcommands([](const CLI::App*) { return true; }).empty();
  std::string usage = absl::StrCat(FullName(app), has_commands ? " COMMAND [ARGUMENTS]" : "");
  for (const CLI::Option* argument : Arguments(app)) {
    const std::string name = argument->get_type_name();
    absl::StrAppend(&usage, " ", argument->get_required() ? name : absl::StrCat("[", name, "]"));
  }
  return absl::StrCat(usage, " [OPTIONS]");
}

void AppendArguments(const CLI::App& app, std::string* out) {
  for (const CLI::Option* argument : Arguments(app)) {
    AppendEntry(argument->get_type_name(), argument->get_description(), out);
  }
}

// A section for each command below `app`: its arguments and its own options.
void AppendCommands(const CLI::App& app, std::string* out) {
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    absl::StrAppend(out, "\nCommand ", command->get_name(), ":\n  $ ", UsageOf(*command), "\n\n");
    AppendWrapped(command->get_description(), 0, 0, out);
    absl::StrAppend(out, "\n");
    AppendArguments(*command, out);
    AppendOptions(*command, Which::kWithoutHelp, out);
    AppendCommands(*command, out);
  }
}

class HelpFormatter : public CLI::FormatterBase {
 public:
  std::string make_help(const CLI::App* app, std::string /*name*/, CLI::AppFormatMode mode) const override {
    std::string out = absl::StrCat("Usage: ", UsageOf(*app), "\n\n");
    AppendWrapped(app->get_description(), 0, 0, &out);
    if (!Arguments(*app).empty()) absl::StrAppend(&out, "\nArguments:\n");
    AppendArguments(*app, &out);
    std::string group;
    for (const CLI::App* command : app->get_subcommands([](const CLI::App*) { return true; })) {
      if (command->get_group() != group) absl::StrAppend(&out, "\n", group = command->get_group(), ":\n");
      AppendEntry(command->get_name(), command->get_description(), &out);
    }
    absl::StrAppend(&out, "\nOptions:\n");
    AppendOptions(*app, Which::kAll, &out);
    const CLI::App* root = app;
    while (root->get_parent() != nullptr) root = root->get_parent();
    if (root != app) {
      absl::StrAppend(&out, "\nOptions of every command:\n");
      AppendOptions(*root, Which::kWithoutHelp, &out);
    }
    if (mode == CLI::AppFormatMode::All) AppendCommands(*app, &out);
    if (!app->get_footer().empty()) absl::StrAppend(&out, "\n", app->get_footer(), "\n");
    return out;
  }
};

}  // namespace

std::unique_ptr<CLI::App> MakeCommandLine(const std::string& program, const std::string& description) {
  auto app = std::make_unique<CLI::App>(description, program);
  app->formatter(std::make_shared<HelpFormatter>());
  app->set_help_flag("-h,--help", "Print this help and exit.");
  app->set_version_flag("--version", VersionText(program), "Print the version and exit.");
  return app;
}

void ParseCommandLine(CLI::App& app, int argc, char** argv) {
  std::vector<std::string> arguments(argv + 1, argv + argc);
  for (std::string& argument : arguments) {
    if (argument == "--") break;
    if (absl::StartsWith(argument, "--")) {
      const size_t end = std::min(argument.find('='), argument.size());
      const std::string dashed = absl::StrReplaceAll(argument.substr(0, end), {{"_", "-"}});
      if (HasOption(app, dashed)) argument = absl::StrCat(dashed, argument.substr(end));
    }
  }
  std::reverse(arguments.begin(), arguments.end());  // as CLI11 wants them
  app.parse(std::move(arguments));
  CheckValues(app);
}

std::string VersionText(const std::string& program) {
  return absl::StrCat(program, " ", kVersion, " (", kRevision, ")");
}

}  // namespace vrambroker
