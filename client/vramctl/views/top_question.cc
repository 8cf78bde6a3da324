// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/views/top_question.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "client/vramctl/views/top_view.h"

namespace vrambroker::vramctl {
namespace {

constexpr size_t kMostFieldCharacters = 63;

void AppendWrapped(std::vector<Line>& lines, const std::string& text, int columns, Style style) {
  for (std::string& part : Wrap(text, columns)) lines.push_back({Span{std::move(part), style}});
}

// Returns "64.00 MiB", or the range from lowest to highest if devices differ.
std::string LimitsOf(const v1::Session& session) {
  uint64_t least = session.devices().empty() ? 0 : session.devices(0).limit_bytes();
  uint64_t most = least;
  for (const v1::SessionDevice& device : session.devices()) {
    least = std::min<uint64_t>(least, device.limit_bytes());
    most = std::max<uint64_t>(most, device.limit_bytes());
  }
  return least == most ? FormatBytes(least) : absl::StrCat(FormatBytes(least), " to ", FormatBytes(most));
}

const char* OnEach(const v1::Session& session) {
  return session.devices_size() > 1 ? " on each device" : "";
}

}  // namespace

TopQuestion::TopQuestion(Kind kind, v1::Session session) : kind_(kind), session_(std::move(session)) {
  if (kind == Kind::kTrim) change_ = TrimChange{};
  if (kind == Kind::kEnd) change_ = EndChange{};
}

TopQuestion::Answer TopQuestion::HandleKey(int key) {
  if (key == kKeyEscape) return Answer::kNo;
  if (!change_.has_value()) {
    EditField(key);
    return Answer::kNone;
  }
  switch (key) {
    case 'y':
    case 'Y':
      return Answer::kYes;
    case 'n':
    case 'N':
    case 'q':
    case kKeyEnter:
      return Answer::kNo;
    default:
      return Answer::kNone;
  }
}

void TopQuestion::EditField(int key) {
  if (key == kKeyEnter) {
    ReadField();
    return;
  }
  if (key == kKeyBackspace) {
    if (!field_.empty()) field_.pop_back();
  } else if (key < 0x80 && absl::ascii_isprint(static_cast<unsigned char>(key)) &&
             field_.size() < kMostFieldCharacters) {
    field_ += static_cast<char>(key);
  } else {
    return;
  }
  error_.clear();
}

void TopQuestion::ReadField() {
  if (kind_ == Kind::kLimit) {
    const absl::StatusOr<Limit> limit = ParseLimit(field_);
    if (limit.ok()) change_ = LimitChange{*limit};
    error_ = std::string(limit.status().message());
  } else {
    const absl::StatusOr<int32_t> priority = ParsePriority(field_);
    if (priority.ok()) change_ = PriorityChange{*priority};
    error_ = std::string(priority.status().message());
  }
}

std::optional<SessionOrder> TopQuestion::order() const {
  if (!change_.has_value()) return std::nullopt;
  return SessionOrder{session_, *change_};
}

std::string TopQuestion::Consequence(const SessionChange& change) const {
  switch (kind_) {
    case Kind::kLimit: {
      std::string text = absl::StrCat("It is ", LimitsOf(session_), " now. Memory in use is never taken away");
      const Limit& limit = std::get<LimitChange>(change).limit;
      const uint64_t* const bytes = std::get_if<uint64_t>(&limit);
      const bool is_over =
          bytes != nullptr && std::any_of(session_.devices().begin(), session_.devices().end(),
                                          [&](const auto& device) { return device.reserved_bytes() > *bytes; });
      return absl::StrCat(text, is_over ? "; the session holds more, and cannot grow before it holds less." : ".");
    }
    case Kind::kTrim: {
      uint64_t reclaimable = 0;
      for (const v1::SessionDevice& device : session_.devices()) reclaimable += device.idle_bytes();
      return absl::StrCat("It gives back what is reclaimable, ", FormatBytes(reclaimable), " now.");
    }
    case Kind::kEnd:
      return "Its memory is charged until the process gives it back.";
    case Kind::kPriority:
      return absl::StrCat("It is ", session_.priority(),
                          " now. Higher is served first, and asked last for reclaimable memory.");
  }
  return "";
}

std::vector<Line> TopQuestion::Lines(int columns) const {
  std::vector<Line> lines;
  if (const std::optional<SessionOrder> confirmed = order(); confirmed.has_value()) {
    const std::string title = absl::StrCat(OrderTitle(*confirmed), kind_ == Kind::kLimit ? OnEach(session_) : "");
    AppendWrapped(lines, absl::StrCat(title, "? ", Consequence(confirmed->change), " y/N"), columns, Style::kTitle);
    return lines;
  }
  const bool is_limit = kind_ == Kind::kLimit;
  AppendWrapped(lines,
                is_limit ? absl::StrCat("The limit of ", SessionTitle(session_), " is ", LimitsOf(session_),
                                        OnEach(session_), ".")
                         : absl::StrCat("The priority of ", SessionTitle(session_), " is ", session_.priority(), "."),
                columns, Style::kTitle);
  if (!error_.empty()) AppendWrapped(lines, error_, columns, Style::kAlarm);
  AppendWrapped(lines,
                absl::StrCat("New ", is_limit ? "limit (8GiB, 0.5)" : "priority (-1000 to 1000)", ": ", field_, "_"),
                columns, Style::kPlain);
  AppendWrapped(lines, "Enter: go on  Esc: cancel", columns, Style::kHeading);
  return lines;
}

}  // namespace vrambroker::vramctl
