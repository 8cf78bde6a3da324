// SPDX-License-Identifier: Apache-2.0
#include "server/config/config_text.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/text_format.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <fstream>
#include <optional>
#include <sstream>
#include <tuple>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "allocator/base/nearest_word.h"

namespace vrambroker {
namespace {

// Bound for a file full of faults.
constexpr size_t kMostFaults = 100;

using Lines = std::vector<std::string>;

struct Fault {
  int line = 0;
  int column = 0;
  std::string text;

  bool operator<(const Fault& other) const { return std::tie(line, column) < std::tie(other.line, other.column); }
};

// Finds the last `word` in `line` that begins at `column` or before.
int ColumnOf(absl::string_view word, const std::string& line, int column) {
  const size_t found = line.rfind(std::string(word), static_cast<size_t>(std::max(column, 0)));
  return found == std::string::npos ? column : static_cast<int>(found);
}

// "; did you mean 'capacity'?"
std::string SuggestedField(absl::string_view message, absl::string_view field) {
  const google::protobuf::Descriptor* const type =
      google::protobuf::DescriptorPool::generated_pool()->FindMessageTypeByName(std::string(message));
  std::vector<std::string> known;
  for (int i = 0; type != nullptr && i < type->field_count(); ++i) {
    known.push_back(absl::StrCat("'", type->field(i)->name(), "'"));
  }
  return DidYouMean(absl::StrCat("'", field, "'"), known);
}

// The text after `before` in protobuf's message, up to the next quote.
std::optional<std::string> QuotedAfter(absl::string_view before, absl::string_view message) {
  const size_t at = message.find(before);
  if (at == absl::string_view::npos) return std::nullopt;
  const absl::string_view rest = message.substr(at + before.size());
  return std::string(rest.substr(0, rest.find('"')));
}

constexpr char kUnknownValue[] = "Unknown enumeration value of \"";

// Rewords protobuf's messages about its types for users.
std::string InOurWords(absl::string_view message) {
  absl::string_view got = message;
  if (absl::ConsumePrefix(&got, "Expected string, got: ")) {
    return absl::StrCat("a text in quotes is needed, not ", got);
  }
  if (absl::ConsumePrefix(&got, "Expected integer, got: ")) {
    return absl::StrCat("a whole number is needed, not ", got);
  }
  if (const auto value = QuotedAfter(kUnknownValue, message); value.has_value()) {
    return absl::StrCat("unknown value ", *value);
  }
  if (QuotedAfter("Non-repeated field \"", message).has_value()) return "it may be given only once";
  return std::string(message);
}

// Collects faults. Unknown fields are warnings to protobuf, and parsing goes on behind them.
class FaultList : public google::protobuf::io::ErrorCollector {
 public:
  FaultList(absl::string_view name, const Lines& lines) : name_(name), lines_(lines) {}

  void AddError(int line, google::protobuf::io::ColumnNumber column, const std::string& message) override {
    // Protobuf reports the place of the next word.
    if (const auto value = QuotedAfter(kUnknownValue, message); value.has_value()) {
      while (line > 0 && Line(line).find(*value) == std::string::npos) column = static_cast<int>(Line(--line).size());
      column = ColumnOf(*value, Line(line), column);
    }
    error_line_ = line;
    const absl::string_view text = absl::StripLeadingAsciiWhitespace(Line(line));
    const auto end = std::find_if(text.begin(), text.end(), [](char c) { return !absl::ascii_isalnum(c) && c != '_'; });
    const absl::string_view field = text.substr(0, static_cast<size_t>(end - text.begin()));
    Add(line, column, absl::StrCat(field, field.empty() ? "" : ": ", InOurWords(message)));
  }
  void AddWarning(int line, google::protobuf::io::ColumnNumber column, const std::string& message) override {
    // Example: Message type "vrambroker.config.v1.DaemonConfig" has no field named "capcity".
    const std::vector<absl::string_view> parts = absl::StrSplit(message, '"');
    if (parts.size() != 5) return Add(line, column, message);
    Add(line, ColumnOf(parts[3], Line(line), column),
        absl::StrCat("unknown field '", parts[3], "'", SuggestedField(parts[1], parts[3])));
  }

  const std::vector<Fault>& faults() const { return faults_; }
  // Line at which parsing ended.
  std::optional<int> error_line() const { return error_line_; }

 private:
  const std::string& Line(int line) const {
    static const std::string kNone;
    return line >= 0 && static_cast<size_t>(line) < lines_.size() ? lines_[static_cast<size_t>(line)] : kNone;
  }
  void Add(int line, int column, absl::string_view what) {
    faults_.push_back({line, column, absl::StrCat(name_, ":", line + 1, ":", column + 1, ": ", OneLine(what))});
  }

  const std::string name_;
  const Lines& lines_;
  std::vector<Fault> faults_;
  std::optional<int> error_line_;
};

void NotePlaces(absl::string_view name, const google::protobuf::Descriptor& message,
                const google::protobuf::TextFormat::ParseInfoTree& tree, const std::string& prefix,
                ConfigText::Places& places) {
  for (int i = 0; i < message.field_count(); ++i) {
    const google::protobuf::FieldDescriptor* field = message.field(i);
    const std::string field_name = absl::StrCat(prefix, field->name());
    const auto note = [&](const std::string& path, int index) {
      const auto location = tree.GetLocation(field, index);
      if (location.line < 0) return false;
      places[path] = absl::StrCat(name, ":", location.line + 1, ":", location.column + 1);
      if (field->message_type() == nullptr) return true;
      if (const auto* nested = tree.GetTreeForNested(field, index); nested != nullptr) {
        NotePlaces(name, *field->message_type(), *nested, path + ".", places);
      }
      return true;
    };
    if (!field->is_repeated()) {
      note(field_name, -1);
      continue;
    }
    for (int index = 0; note(absl::StrCat(field_name, "[", index, "]"), index); ++index) {
    }
  }
}

// True for a line that can be left out: one field with its value.
bool IsOneField(const std::string& line) {
  return line.find_first_of("{}[]<>;") == std::string::npos && line.find(':') != std::string::npos;
}

}  // namespace

std::string OneLine(absl::string_view text) {
  std::string line(text);
  std::replace_if(
      line.begin(), line.end(), [](unsigned char c) { return absl::ascii_iscntrl(c); }, '?');
  return line;
}

ConfigText ParseConfigText(absl::string_view name, const std::string& text) {
  Lines lines = absl::StrSplit(text, '\n');
  std::vector<Fault> left_out;  // faults of lines left out of the next try
  while (true) {
    ConfigText config;
    FaultList faults(name, lines);
    google::protobuf::TextFormat::ParseInfoTree tree;
    google::protobuf::TextFormat::Parser parser;
    parser.AllowUnknownField(true);
    parser.RecordErrorsTo(&faults);
    parser.WriteLocationsTo(&tree);
    const bool is_read = parser.ParseFromString(absl::StrJoin(lines, "\n"), &config.proto) || faults.faults().empty();
    const std::optional<int> line = faults.error_line();
    if (!is_read && line.has_value() && static_cast<size_t>(*line) < lines.size() &&
        IsOneField(lines[static_cast<size_t>(*line)]) && left_out.size() < kMostFaults) {
      left_out.push_back(faults.faults().back());
      lines[static_cast<size_t>(*line)].clear();
      continue;
    }
    left_out.insert(left_out.end(), faults.faults().begin(), faults.faults().end());
    if (!is_read) left_out.back().text += "; what follows was not checked";
    std::sort(left_out.begin(), left_out.end());
    for (Fault& fault : left_out) config.faults.push_back(std::move(fault.text));
    if (is_read) {
      NotePlaces(name, *config.proto.GetDescriptor(), tree, "", config.places);
    } else {
      config.proto.Clear();  // half of the file would have faults that the whole file does not have
    }
    return config;
  }
}

absl::StatusOr<ConfigText> ReadConfigFile(const std::string& path) {
  errno = 0;
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  if (errno != 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot read the configuration file ", path));
  return ParseConfigText(path, text.str());
}

}  // namespace vrambroker
