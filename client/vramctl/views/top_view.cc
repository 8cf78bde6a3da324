// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/views/top_view.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "allocator/base/bytes.h"
#include "client/heap/out_of_memory.h"
#include "client/vramctl/views/output.h"
#include "client/vramctl/views/top_claims.h"
#include "client/vramctl/views/top_head.h"
#include "client/vramctl/views/top_help.h"

namespace vrambroker::vramctl {
namespace {

constexpr int kLeastTableLines = 3;
constexpr const char* kFrozen = "  FROZEN";

struct ActionKey {
  char key;
  TopQuestion::Kind kind;
};
constexpr std::array<ActionKey, 4> kActionKeys = {{{'L', TopQuestion::Kind::kLimit},
                                                   {'T', TopQuestion::Kind::kTrim},
                                                   {'E', TopQuestion::Kind::kEnd},
                                                   {'P', TopQuestion::Kind::kPriority}}};

std::string Clock(absl::Time time, absl::TimeZone zone) {
  return absl::FormatTime("%H:%M:%S", time, zone);
}

Line Text(const std::string& text, Style style = Style::kPlain) {
  return {Span{text, style}};
}

}  // namespace

void TopView::SetData(const TopData& data) {
  if (question_.has_value() && data.status.ok()) {
    const v1::Session& asked = question_->session();
    if (FindSession(data.overview.sessions, asked) == nullptr) {
      Say(absl::StrCat("Nothing was done: ", SessionTitle(asked), " has ended."), Style::kAlarm);
      question_.reset();
    }
  }
  if (frozen_) {
    data_.status = data.status;
    data_.failing_since = data.failing_since;
    return;
  }
  // Clear the selection: the next run of the daemon assigns the ids anew.
  if (data.overview.sessions.run_id() != data_.overview.sessions.run_id() && selected_.session != 0) selected_ = {};
  data_ = data;
  if (details_ != nullptr && data.status.ok()) {
    details_->SetData(data.overview.sessions, data.claims, data.read_at);
  }
  Refresh();
}

void TopView::Refresh() {
  const size_t before = SelectedIndex();
  rows_ = RowsOf(data_.overview.sessions, options_.user_name, data_.read_at);
  AddClaims(rows_, data_.claims, options_.user_name, data_.read_at);
  Filter(rows_, filter_);
  Sort(rows_, sort_, reverse_);
  GroupByClaim(rows_, collapsed_);
  const bool is_there =
      std::any_of(rows_.begin(), rows_.end(), [this](const TopRow& row) { return row.key().IsOfSame(selected_); });
  Select(static_cast<int64_t>(is_there ? SelectedIndex() : before));  // else the row now in its place
}

size_t TopView::SelectedIndex() const {
  auto found = std::find_if(rows_.begin(), rows_.end(), [this](const TopRow& row) { return row.key() == selected_; });
  if (found == rows_.end()) {  // the session may have begun to use another device
    found =
        std::find_if(rows_.begin(), rows_.end(), [this](const TopRow& row) { return row.key().IsOfSame(selected_); });
  }
  return found == rows_.end() ? first_ : static_cast<size_t>(found - rows_.begin());
}

void TopView::Select(int64_t index) {
  if (rows_.empty()) return;
  const auto last = static_cast<int64_t>(rows_.size()) - 1;
  selected_ = rows_[static_cast<size_t>(std::clamp<int64_t>(index, 0, last))].key();
}

void TopView::CollapseSelected() {
  const size_t index = SelectedIndex();
  if (index >= rows_.size() || rows_[index].claim.empty()) {
    Say("What is selected is in no claim.", Style::kPlain);
    return;
  }
  const TopRow& row = rows_[index];
  if (collapsed_.erase(row.claim) == 0) collapsed_.insert(row.claim);
  selected_ = {.session = 0, .claim = row.claim, .device = row.device};
}

void TopView::CollapseAll() {
  std::set<std::string> all;
  for (const v1::Claim& claim : data_.claims.claims()) all.insert(Printable(claim.name()));
  const bool expands = std::includes(collapsed_.begin(), collapsed_.end(), all.begin(), all.end());
  collapsed_ = expands ? std::set<std::string>() : std::move(all);
  const size_t index = SelectedIndex();
  if (expands || index >= rows_.size() || rows_[index].claim.empty()) return;
  selected_ = {.session = 0, .claim = rows_[index].claim, .device = rows_[index].device};
}

void TopView::EditFilter(int key) {
  if (key == kKeyEnter) {
    edits_filter_ = false;
  } else if (key == kKeyEscape) {
    edits_filter_ = false;
    filter_.clear();
  } else if (key == kKeyBackspace) {
    if (!filter_.empty()) filter_.pop_back();
  } else if (key < 0x80 && absl::ascii_isprint(static_cast<unsigned char>(key)) && filter_.size() < 63) {
    filter_ += static_cast<char>(key);
  }
  Refresh();
}

void TopView::Say(std::string text, Style style) {
  notice_ = {std::move(text), style};
}

void TopView::Ask(TopQuestion::Kind kind) {
  if (order_.has_value()) {
    Say(absl::StrCat(OrderTitle(*order_), ": waiting for the daemon; the next change has to wait, too"), Style::kPlain);
    return;
  }
  const v1::Session* const session = details_ != nullptr ? details_->session() : SelectedSession();
  if (const std::string claim = details_ != nullptr ? details_->claim() : SelectedClaim();
      session == nullptr && !claim.empty()) {
    Say(absl::StrCat("This is a claim, no session. To change it: vramctl claim set ", claim), Style::kAlarm);
  } else if (session == nullptr) {
    Say("No session is selected.", Style::kAlarm);
  } else if (session->state() == v1::SESSION_STATE_ENDED || (details_ != nullptr && details_->has_ended())) {
    Say(absl::StrCat("Nothing to do: ", SessionTitle(*session), " has ended."), Style::kAlarm);
  } else {
    notice_ = {};
    question_.emplace(kind, *session);
  }
}

bool TopView::AskForKey(int key) {
  for (const ActionKey& action : kActionKeys) {
    if (key != action.key) continue;
    Ask(action.kind);
    return true;
  }
  return false;
}

const v1::Session* TopView::SelectedSession() const {
  const size_t index = SelectedIndex();
  if (index >= rows_.size() || rows_[index].is_claim()) return nullptr;
  const auto& sessions = data_.overview.sessions.sessions();
  const auto found = std::find_if(sessions.begin(), sessions.end(),
                                  [&](const v1::Session& each) { return each.id() == rows_[index].session; });
  return found == sessions.end() ? nullptr : &*found;
}

std::string TopView::SelectedClaim() const {
  const size_t index = SelectedIndex();
  return index < rows_.size() && rows_[index].is_claim() ? rows_[index].claim : "";
}

void TopView::OpenDetails() {
  const TopDetails::Options options = {
      .utf8 = options_.utf8, .user_name = options_.user_name, .time_zone = options_.time_zone};
  if (const v1::Session* const session = SelectedSession(); session != nullptr) {
    details_ = std::make_unique<TopDetails>(*session, options);
  } else if (const std::string name = SelectedClaim(); !name.empty()) {
    const auto& claims = data_.claims.claims();
    const auto claim = std::find_if(claims.begin(), claims.end(),
                                    [&](const v1::Claim& each) { return Printable(each.name()) == name; });
    if (claim != claims.end()) details_ = std::make_unique<TopDetails>(*claim, options);
  }
  if (details_ == nullptr) return Say("Nothing is selected.", Style::kPlain);
  details_->SetData(data_.overview.sessions, data_.claims, data_.read_at);
}

std::optional<DetailsRequest> TopView::WantedDetails() const {
  if (details_ == nullptr) return std::nullopt;
  return details_->request();
}

void TopView::SetDetails(DetailsData data) {
  if (details_ != nullptr && !(frozen_ && details_->has_details())) details_->SetDetails(std::move(data));
}

void TopView::AnswerQuestion(int key) {
  if (!question_.has_value()) return;
  const TopQuestion::Answer answer = question_->HandleKey(key);
  if (answer == TopQuestion::Answer::kNone) return;
  if (answer == TopQuestion::Answer::kYes) {
    order_ = question_->order();
    order_is_new_ = order_.has_value();
    if (order_.has_value()) Say(absl::StrCat(OrderTitle(*order_), ": waiting for the daemon"), Style::kPlain);
  } else {
    Say("Nothing was done.", Style::kPlain);
  }
  question_.reset();
}

std::optional<SessionOrder> TopView::TakeOrder() {
  if (!std::exchange(order_is_new_, false)) return std::nullopt;
  return order_;
}

void TopView::SetResult(const absl::StatusOr<std::vector<std::string>>& lines) {
  if (!order_.has_value()) return;
  if (lines.ok()) {
    Say(absl::StrCat(Printable(order_->session.name()), " (id ", order_->session.id(),
                     "): ", absl::StrJoin(*lines, "; ")),
        Style::kPlain);
  } else {
    Say(absl::StrCat("Failed: ", OrderTitle(*order_), ": ", Printable(lines.status().message())), Style::kAlarm);
  }
  order_.reset();
}

bool TopView::HandleKey(int key) {
  if (question_.has_value() && key != kKeyQuit) {
    AnswerQuestion(key);
    return true;
  }
  if (edits_filter_ && key != kKeyQuit) {
    EditFilter(key);
    return true;
  }
  if (helps_ && key != kKeyQuit) {
    helps_ = help_scroll_.HandleKey(key);
    return true;
  }
  if (details_ != nullptr && key != kKeyQuit) {
    HandleDetailsKey(key);
    return true;
  }
  const auto index = static_cast<int64_t>(SelectedIndex());
  const auto page = static_cast<int64_t>(page_);
  switch (key) {
    case 'q':
    case kKeyQuit:
      return false;
    case 'h':
    case '?':
    case kKeyHelp:
      helps_ = true;
      help_scroll_ = Scroll();
      return true;
    case '/':
      edits_filter_ = true;
      return true;
    case kKeyEscape:
      if (!notice_.text.empty() && !order_.has_value()) {
        notice_ = {};
        return true;
      }
      filter_.clear();
      break;
    case ' ':
      frozen_ = !frozen_;
      return true;
    case 'c':
      CollapseSelected();
      break;
    case 'C':
      CollapseAll();
      break;
    case 'R':
      reverse_ = !reverse_;
      break;
    case '<':
    case '>':
      sort_ = static_cast<Column>((static_cast<int>(sort_) + (key == '>' ? 1 : kColumns - 1)) % kColumns);
      reverse_ = false;
      break;
    case kKeyUp:
    case 'k':
      Select(index - 1);
      return true;
    case kKeyDown:
    case 'j':
      Select(index + 1);
      return true;
    case kKeyPageUp:
      Select(index - page);
      return true;
    case kKeyPageDown:
      Select(index + page);
      return true;
    case kKeyHome:
      Select(0);
      return true;
    case kKeyEnd:
      Select(static_cast<int64_t>(rows_.size()));
      return true;
    case kKeyEnter:
      OpenDetails();
      return true;
    default:
      if (AskForKey(key)) return true;
      for (int i = 0; i < kColumns; ++i) {
        const auto column = static_cast<Column>(i);
        if (key == 0 || key != SortKey(column)) continue;
        sort_ = column;
        reverse_ = false;
      }
  }
  Refresh();
  return true;
}

void TopView::HandleDetailsKey(int key) {
  switch (key) {
    case kKeyEscape:
      if (!notice_.text.empty() && !order_.has_value()) {
        notice_ = {};
        return;
      }
      details_.reset();
      return;
    case kKeyEnter:
    case 'q':
      details_.reset();
      return;
    case 'h':
    case '?':
    case kKeyHelp:
      helps_ = true;
      help_scroll_ = Scroll();
      return;
    case ' ':
      frozen_ = !frozen_;
      return;
    default:
      if (!AskForKey(key)) details_->HandleKey(key);
  }
}

Line TopView::TitleLine(int columns) const {
  const Overview& overview = data_.overview;
  uint64_t waiting = 0;
  for (const v1::Session& session : overview.sessions.sessions()) {
    for (const v1::SessionDevice& device : session.devices()) {
      waiting += static_cast<uint64_t>(device.waiting_size());
    }
  }
  if (NothingRead()) return Text("vrambrokerd", Style::kTitle);
  const auto sessions = static_cast<uint64_t>(overview.sessions.sessions_size());
  const auto claims = static_cast<uint64_t>(data_.claims.claims_size());
  std::vector<RankedSpan> pieces = {
      {{absl::StrCat("vrambrokerd ", Printable(overview.devices.daemon_version())), Style::kTitle}, 7},
      {{absl::StrCat("  ", Clock(data_.read_at, options_.time_zone))}, 6},
      {{absl::StrCat("  ", Counted(sessions, "session"))}, 3}};
  if (claims > 0) pieces.push_back({{absl::StrCat(", ", Counted(claims, "claim"))}, 5});
  pieces.push_back(
      {{absl::StrCat(", ", waiting, waiting == 1 ? " request waits" : " requests wait")}, waiting == 0 ? 8 : 4});
  if (!shows_all_) {
    pieces.push_back(
        {{absl::StrCat("; rows ", first_ + 1, "-", std::min(rows_.size(), first_ + page_), " of ", rows_.size())}, 0});
  }
  pieces.push_back({{absl::StrCat("; sorted by ", ColumnName(sort_), reverse_ ? ", reversed" : "")}, 4});
  if (!filter_.empty()) pieces.push_back({{absl::StrCat("; only *", filter_, "*")}, 2});
  if (frozen_) pieces.push_back({{kFrozen, Style::kAlarm}, 1});
  return LineOf(std::move(pieces), columns);
}

void TopView::AppendStatus(std::vector<Line>& lines, int columns) const {
  if (data_.status.ok()) return;
  const std::string text = absl::StrCat(
      absl::IsDeadlineExceeded(data_.status) ? "no answer since " : "no daemon since ",
      Clock(data_.failing_since, options_.time_zone), "; trying again. ", Printable(data_.status.message()));
  lines.push_back(Text(ShortenAtWord(text, columns, options_.utf8), Style::kAlarm));
}

std::vector<Line> TopView::Head(int most_lines, int columns) const {
  std::vector<Line> lines = {TitleLine(columns)};
  AppendStatus(lines, columns);
  const auto& devices = data_.overview.devices.devices();
  int left = devices.size();
  const auto space = [&] { return most_lines - static_cast<int>(lines.size()); };
  const bool has_figures = 2 * devices.size() <= space();
  for (const v1::Device& device : devices) {
    if (space() <= 0) break;
    if (space() <= 1 && left > 1) {
      lines.push_back(Text(absl::StrCat("and ", left, " more devices"), Style::kDim));
      break;
    }
    --left;
    const PartBytes parts = PartsOf(data_.overview, device);
    lines.push_back(DeviceLine(device, parts, columns, options_.utf8));
    if (!device.fault().empty()) {
      const std::string text = absl::StrCat("  cannot be used: ", Printable(device.fault()));
      lines.push_back(Text(ShortenAtWord(text, columns, options_.utf8), Style::kAlarm));
    }
    if (has_figures) lines.push_back(Figures(parts, columns, options_.utf8));
  }
  return lines;
}

Line TopView::SelectedLine(int columns) const {
  const size_t index = SelectedIndex();
  if (index >= rows_.size()) return Text("");
  const TopRow& row = rows_[index];
  const std::string what =
      absl::StrCat(row.is_claim()      ? " (claim)"
                   : row.claim.empty() ? absl::StrCat(" (id ", row.session, ")")
                                       : absl::StrCat(" (id ", row.session, ", claim ", row.claim, ")"),
                   " on device ", row.device, ": ", Counted(row.ooms, "refusal"),
                   row.waiting_bytes == 0 ? "" : absl::StrCat(", waits for ", row.waits_for));
  const std::string name = ShortenMiddle(row.name, std::max(columns - Cells(what), kLeastName), options_.utf8);
  Line line = {{name, Style::kTitle}, {ShortenAtWord(what, columns - Cells(name), options_.utf8)}};
  for (Span& span : Figures(row.parts, columns - Cells(line), options_.utf8)) line.push_back(std::move(span));
  return line;
}

Line TopView::RefusalLine(int columns) const {
  const v1::ListOutOfMemoryResponse& refusals = data_.refusals;
  if (refusals.events().empty()) return NothingRead() ? Text("") : Text("no request was refused", Style::kDim);
  const v1::OutOfMemoryEvent& event = refusals.events(0);
  const OutOfMemory oom = client_internal::FromProto(event.out_of_memory());
  const std::string text =
      absl::StrCat(Counted(refusals.total_events(), "refusal"), ", last ",
                   Clock(absl::FromUnixSeconds(event.time().seconds()), options_.time_zone), " ",
                   Printable(event.client()), " wanted ", FormatBytes(oom.requested_bytes), " on device ", oom.device,
                   ": ", absl::AsciiStrToLower(OutOfMemoryCauseName(oom.cause)), ". ", Printable(oom.advice));
  return Text(ShortenAtWord(text, columns, options_.utf8));
}

Line TopView::KeysLine(int columns) const {
  if (edits_filter_)
    return Text(absl::StrCat("name contains: ", filter_, "_   (Enter: keep, Esc: all)"), Style::kHeading);
  std::vector<RankedSpan> keys;
  for (const char* key : {"h help", "q quit", "L limit", "T trim", "E end", "Enter details", "P priority",
                          "arrows select", "c claim", "< > sort", "R reverse", "/ filter", "space freeze"}) {
    if (key[0] == 'c' && data_.claims.claims().empty()) continue;
    keys.push_back({{absl::StrCat(keys.empty() ? "" : "  ", key), Style::kHeading}, static_cast<int>(keys.size())});
  }
  return LineOf(std::move(keys), columns);
}

Line TopView::DetailsKeysLine(int columns) const {
  std::vector<RankedSpan> keys = {{{"q Enter Esc back", Style::kHeading}, 0}};
  const auto add = [&](const std::string& text) {
    keys.push_back({{absl::StrCat("  ", text), Style::kHeading}, static_cast<int>(keys.size())});
  };
  if (const std::string place = details_->Place(); !place.empty()) {
    add(place);
    add("arrows scroll");
  }
  if (details_->session() != nullptr && !details_->has_ended()) {
    for (const char* key : {"L limit", "T trim", "E end", "P priority"}) add(key);
  }
  for (const char* key : {"h help", "F10 quit"}) add(key);
  return LineOf(std::move(keys), columns);
}

std::vector<Line> TopView::Notice(int columns) const {
  if (question_.has_value()) return question_->Lines(columns);
  std::vector<Line> lines;
  if (notice_.text.empty()) return lines;
  for (std::string& part : Wrap(notice_.text, columns)) lines.push_back({Span{std::move(part), notice_.style}});
  return lines;
}

std::vector<Line> TopView::Foot(int rows, int columns) const {
  // Show a whole question or answer, if need be instead of the table.
  std::vector<Line> foot = Notice(columns);
  const auto most = static_cast<size_t>(std::max(rows, 1));
  if (foot.size() > most) foot.erase(foot.begin() + static_cast<int>(most) - 1, foot.end() - 1);
  const size_t room = std::max(foot.size(), static_cast<size_t>(std::max(rows - kLeastTableLines, 0)));
  if (!question_.has_value() && foot.size() < room) foot.push_back(KeysLine(columns));
  if (foot.size() < room) foot.insert(foot.begin(), RefusalLine(columns));
  if (foot.size() < room) foot.insert(foot.begin(), SelectedLine(columns));
  return foot;
}

std::vector<Line> TopView::TableLines(int lines, int columns) {
  page_ = static_cast<size_t>(std::max(lines - 1, 1));
  const size_t selected = SelectedIndex();
  first_ = std::min(first_, rows_.size() > page_ ? rows_.size() - page_ : 0);
  if (selected < first_) first_ = selected;
  if (selected >= first_ + page_) first_ = selected + 1 - page_;
  shows_all_ = rows_.size() <= page_;
  const TableLayout layout = LayOut(rows_, columns, data_.overview.devices.devices_size() > 1);
  std::vector<Line> table = {HeadingLine(layout, sort_, columns)};
  if (rows_.empty()) {
    table.push_back(Text(NothingRead()     ? "nothing was read yet"
                         : filter_.empty() ? "no sessions"
                                           : "no session's name contains that",
                         Style::kDim));
  }
  for (size_t i = first_; i < std::min(rows_.size(), first_ + page_); ++i) {
    Line line = RowLine(layout, rows_[i], options_.utf8);
    if (i == selected) line.front().style = Style::kSelected;
    table.push_back(std::move(line));
  }
  return table;
}

std::vector<Line> TopView::HelpScreen(int rows) {
  std::vector<Line> lines = HelpLines(options_.utf8);
  const bool is_whole = static_cast<int>(lines.size()) <= rows;
  lines = help_scroll_.Window(std::move(lines), is_whole ? rows : rows - 1);
  if (!is_whole) {
    lines.push_back(Text(absl::StrCat("h back  arrows scroll  ", help_scroll_.Place()), Style::kHeading));
  }
  return lines;
}

std::vector<Line> TopView::DetailsLines(int rows, int columns) {
  std::vector<Line> lines = {details_->Title(columns - (frozen_ ? Cells(kFrozen) : 0))};
  if (frozen_) lines[0].push_back({kFrozen, Style::kAlarm});
  AppendStatus(lines, columns);
  std::vector<Line> notice = Notice(columns);
  const int foot_lines = static_cast<int>(notice.size()) + (question_.has_value() ? 0 : 1);
  const int body = rows - foot_lines - static_cast<int>(lines.size());
  for (Line& line : details_->Lines(std::max(body, 0), columns)) lines.push_back(std::move(line));
  lines.resize(static_cast<size_t>(std::max(rows - foot_lines, 0)));
  for (Line& line : notice) lines.push_back(std::move(line));
  if (!question_.has_value()) lines.push_back(DetailsKeysLine(columns));
  return lines;
}

std::vector<Line> TopView::Draw(int rows, int columns) {
  std::vector<Line> lines;
  if (helps_) {
    lines = HelpScreen(rows);
  } else if (details_ != nullptr) {
    lines = DetailsLines(rows, columns);
  } else {
    std::vector<Line> foot = Foot(rows, columns);
    const int foot_lines = static_cast<int>(foot.size());
    lines = Head(std::max(rows - foot_lines - kLeastTableLines, 1), columns);
    lines.resize(std::min(lines.size(), static_cast<size_t>(std::max(rows - foot_lines, 0))));
    const int left = rows - foot_lines - static_cast<int>(lines.size());
    if (left > 0) {
      for (Line& line : TableLines(left, columns)) lines.push_back(std::move(line));
    }
    lines.resize(static_cast<size_t>(std::max(rows - foot_lines, 0)));
    if (!lines.empty()) lines[0] = TitleLine(columns);  // the visible rows are known now
    for (Line& line : foot) lines.push_back(std::move(line));
  }
  lines.resize(static_cast<size_t>(std::max(rows, 0)));
  for (Line& line : lines) line = Clip(std::move(line), columns);
  return lines;
}

std::string TopView::Write(int columns) {
  constexpr int kAll = std::numeric_limits<int>::max() / 2;
  std::vector<Line> lines = Head(kAll, columns);
  for (Line& line : TableLines(kAll, columns)) lines.push_back(std::move(line));
  std::string text;
  for (Line& line : lines) {
    std::string one = Render(Clip(std::move(line), columns), /*colour=*/false);
    absl::StripTrailingAsciiWhitespace(&one);
    absl::StrAppend(&text, one, "\n");
  }
  // Keep the refusal whole, since its end gives the advice.
  absl::StrAppend(&text, Render(RefusalLine(kAll), /*colour=*/false), "\n");
  return text;
}

}  // namespace vrambroker::vramctl
