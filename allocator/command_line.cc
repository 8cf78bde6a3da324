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

void AppendOptions(const CLI::App& app, const std::string& title, bool is_parent, std::string* out) {
  const std::vector<const CLI::Option*> options = app.get_options([&](const CLI::Option* option) {
    const bool is_own = !is_parent || (option != app.get_help_ptr() && option != app.get_version_ptr());
    return option->nonpositional() && !option->get_group().empty() && is_own;
  });
  if (options.empty()) return;
  absl::StrAppend(out, "\n", title, ":\n");
  for (const CLI::Option* option : options) AppendEntry(LabelOf(*option), option->get_description(), out);
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

class HelpFormatter : public CLI::FormatterBase {
 public:
  std::string make_help(const CLI::App* app, std::string /*name*/, CLI::AppFormatMode /*mode*/) const override {
    const auto shown = [](const CLI::App* command) { return !command->get_group().empty(); };
    const std::vector<const CLI::App*> commands = app->get_subcommands(shown);
    const std::vector<const CLI::Option*> arguments =
        app->get_options([](const CLI::Option* option) { return option->get_positional(); });

    std::string out = absl::StrCat("Usage: ", FullName(*app), commands.empty() ? "" : " COMMAND [ARGUMENTS]");
    for (const CLI::Option* argument : arguments) {
      absl::StrAppend(
          &out, " ",
          argument->get_required() ? argument->get_type_name() : absl::StrCat("[", argument->get_type_name(), "]"));
    }
    absl::StrAppend(&out, " [OPTIONS]\n\n");
    AppendWrapped(app->get_description(), 0, 0, &out);
    if (!arguments.empty()) absl::StrAppend(&out, "\nArguments:\n");
    for (const CLI::Option* argument : arguments) {
      AppendEntry(argument->get_type_name(), argument->get_description(), &out);
    }
    std::string group;
    for (const CLI::App* command : commands) {
      if (command->get_group() != group) absl::StrAppend(&out, "\n", group = command->get_group(), ":\n");
      AppendEntry(command->get_name(), command->get_description(), &out);
    }
    AppendOptions(*app, "Options", /*is_parent=*/false, &out);
    for (const CLI::App* parent = app->get_parent(); parent != nullptr; parent = parent->get_parent()) {
      if (parent->get_parent() == nullptr) AppendOptions(*parent, "Options of every command", /*is_parent=*/true, &out);
    }
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
