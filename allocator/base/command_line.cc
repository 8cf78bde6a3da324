// SPDX-License-Identifier: Apache-2.0
#include "allocator/base/command_line.h"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "allocator/base/nearest_word.h"
#include "allocator/base/version.h"

namespace vrambroker {
namespace {

constexpr size_t kWidth = 80;
constexpr size_t kLabelWidth = 24;

// Appends `text` in lines ending before kWidth. The cursor is in column `at`; further lines start in column `indent`.
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
  const std::string type = option.get_type_name();  // with accepted values: "FORMAT:{text,json}"
  return absl::StrCat(absl::StrJoin(names, ", "), " ", type.substr(0, type.find(":{")));
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

// Finds an option of the app, or of one of its commands; nullptr: there is none.
const CLI::Option* FindOption(const CLI::App& app, const std::string& name) {
  if (const CLI::Option* option = app.get_option_no_throw(name); option != nullptr) return option;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (const CLI::Option* option = FindOption(*command, name); option != nullptr) return option;
  }
  return nullptr;
}

bool TakesValue(const CLI::Option* option) {
  return option != nullptr && option->get_items_expected_max() > 0;
}

// Refuses an option's name as the value of an option: CLI11 takes the next word, anything at all.
void CheckValues(const CLI::App& app, const std::vector<std::string>& words) {
  for (size_t i = 0; i + 1 < words.size() && words[i] != "--"; ++i) {
    const std::string name = SpellOptions(app, {words[i]}).front();
    if (!absl::StartsWith(name, "-") || !TakesValue(FindOption(app, name)) || absl::StrContains(words[i], '='))
      continue;
    ++i;
    if (!absl::StartsWith(words[i], "--")) continue;
    throw CLI::ArgumentMismatch(absl::StrCat(name, " needs a value before ", words[i]));
  }
}

std::string UsageOf(const CLI::App& app) {
  const bool has_commands = !app.get_subcommands([](const CLI::App*) { return true; }).empty();
  std::string usage = absl::StrCat(FullName(app), has_commands ? " COMMAND [ARGUMENTS]" : "");
  std::string last;  // argument behind the options
  for (const CLI::Option* argument : Arguments(app)) {
    const std::string name = argument->get_type_name();
    if (absl::StartsWith(name, "-- ")) {
      last = absl::StrCat(" ", name);
    } else {
      absl::StrAppend(&usage, " ", argument->get_required() ? name : absl::StrCat("[", name, "]"));
    }
  }
  return absl::StrCat(usage, " [OPTIONS]", last);
}

void AppendArguments(const CLI::App& app, std::string* out) {
  for (const CLI::Option* argument : Arguments(app)) {
    AppendEntry(argument->get_type_name(), argument->get_description(), out);
  }
}

// Appends a section for each command below `app`: its arguments and its own options.
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
  const std::vector<std::string> words(argv + 1, argv + argc);
  CheckValues(app, words);
  std::vector<std::string> spelled = SpellOptions(app, words);
  std::reverse(spelled.begin(), spelled.end());  // CLI11 wants the reverse order
  app.parse(std::move(spelled));
}

std::vector<std::string> SpellOptions(const CLI::App& app, const std::vector<std::string>& words) {
  std::vector<std::string> spelled;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (word == "--") {
      spelled.insert(spelled.end(), words.begin() + static_cast<std::ptrdiff_t>(i), words.end());
      break;
    }
    const size_t end = std::min(word.find('='), word.size());
    std::string name = word.substr(0, end);
    if (absl::StartsWith(name, "--")) name = absl::StrReplaceAll(name, {{"_", "-"}});
    const CLI::Option* const option = absl::StartsWith(name, "-") ? FindOption(app, name) : nullptr;
    if (option == nullptr) {
      spelled.push_back(word);
    } else if (end < word.size() && TakesValue(option)) {
      spelled.push_back(name);
      spelled.push_back(word.substr(end + 1));
    } else {
      spelled.push_back(absl::StrCat(name, word.substr(end)));
    }
  }
  return spelled;
}

std::string TextOf(const CLI::ParseError& error) {
  std::string text = error.what();
  if (error.get_name() == "ArgumentMismatch" && absl::StrContains(text, " required ")) {
    return absl::StrCat(text.substr(0, text.find(':')), " needs a value");
  }
  if (!absl::StartsWith(text, "Could not convert: ")) return text;
  return absl::StrCat(absl::StrReplaceAll(text, {{"Could not convert: ", ""}, {" = ", ": '"}}),
                      "' is not a number in its range");
}

std::vector<std::string> CommandNames(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(command->get_name());
  }
  return names;
}

std::string UnknownOption(const CLI::App& app, const std::string& option, const std::string& see) {
  std::vector<std::string> known;
  const std::function<void(const CLI::App&)> collect = [&](const CLI::App& of) {
    for (const CLI::Option* each : of.get_options()) {
      for (const std::string& name : each->get_lnames()) known.push_back(absl::StrCat("--", name));
    }
    const std::vector<CLI::App*> given = of.get_subcommands();
    for (const CLI::App* command : of.get_subcommands([&](const CLI::App* each) {
           return given.empty() || std::find(given.begin(), given.end(), each) != given.end();
         })) {
      collect(*command);
    }
  };
  collect(app);
  return absl::StrCat("unknown option ", option, DidYouMean(absl::StrReplaceAll(option, {{"_", "-"}}), known, see));
}

std::optional<int> ParseOrPrint(CLI::App& app, int argc, char** argv) {
  const std::string program = app.get_name();
  const std::string see = absl::StrCat("; see ", program, " --help");
  const auto refuse = [&](const std::string& what) {
    std::fprintf(stderr, "%s: %s\n", program.c_str(), what.c_str());
    return 2;
  };
  try {
    app.allow_extras();  // CLI11 would name an unknown option's value before the option
    ParseCommandLine(app, argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::fputs(app.help().c_str(), stdout);
    return 0;
  } catch (const CLI::CallForVersion&) {
    std::puts(VersionText(program).c_str());
    return 0;
  } catch (const CLI::ParseError& error) {
    return refuse(TextOf(error) + see);
  }
  const std::vector<std::string> extras = app.remaining();
  for (const std::string& extra : extras) {
    if (absl::StartsWith(extra, "-")) return refuse(UnknownOption(app, extra.substr(0, extra.find('=')), see));
  }
  if (!extras.empty()) return refuse(absl::StrCat("unexpected argument '", extras.front(), "'", see));
  return std::nullopt;
}

std::string VersionText(const std::string& program) {
  return absl::StrCat(program, " ", kVersion, " (", kRevision, ")");
}

}  // namespace vrambroker
