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
#include "allocator/heap/memory_stats.h"
#include "allocator/wire/admin_json.h"
#include "client/heap/out_of_memory.h"
#include "client/vramctl/views/output.h"
#include "client/vramctl/views/top_claims.h"

namespace vrambroker::vramctl {
namespace {

constexpr int kLeastTableLines = 3;

struct SortKey {
  char key;
  Column column;
};
constexpr std::array<SortKey, 11> kSortKeys = {{{'n', Column::kName},
                                                {'t', Column::kTenant},
                                                {'p', Column::kPid},
                                                {'u', Column::kUser},
                                                {'s', Column::kState},
                                                {'l', Column::kLimit},
                                                {'r', Column::kReserved},
                                                {'a', Column::kAllocated},
                                                {'i', Column::kReclaimable},
                                                {'f', Column::kFragmentation},
                                                {'w', Column::kWaiting}}};

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

void Append(Line& line, Line more) {
  for (Span& span : more) line.push_back(std::move(span));
}

// "█ allocated 10.00 MiB", for the parts that are there.
Line Figures(const PartBytes& parts, bool utf8) {
  Line line;
  for (const Part part : kAllParts) {
    if (parts[part] == 0 && part != Part::kAllocated && part != Part::kFree) continue;
    line.push_back({line.empty() ? "  " : "   "});
    line.push_back({Glyph(part, utf8), StyleOf(part)});
    line.push_back({absl::StrCat(" ", PartName(part), " ", FormatBytes(parts[part]))});
  }
  return line;
}

Line Text(const std::string& text, Style style = Style::kPlain) {
  return {Span{text, style}};
}

std::vector<Line> HelpLines(bool utf8) {
  std::vector<Line> lines = {Text("vramctl top: who holds the memory, and how much of it is wasted", Style::kTitle),
                             Text("")};
  Line sorts = {{"  sort by   "}};
  for (const SortKey& sort : kSortKeys) {
    sorts.push_back({std::string(1, sort.key), Style::kTitle});
    sorts.push_back({absl::StrCat(" ", ColumnName(sort.column), "  ")});
    if (Cells(sorts) < 60) continue;
    lines.push_back(std::exchange(sorts, {{"            "}}));
  }
  lines.push_back(std::move(sorts));
  for (const char* text :
       {"  < >       the column before, after", "  R         reverse the order",
        "  j k       select a session; so do arrows, PgUp, PgDn, Home, End", "  L T       set its limit, trim it",
        "  E P       end it, set its priority", "            after a question; Esc: clear",
        "  c C       hide the sessions of the claim, of all claims; again: show them",
        "  /         only names with a text; Esc: all", "  space     freeze; again: go on", "  q         quit", ""}) {
    lines.push_back(Text(text));
  }
  for (const Part part : kAllParts) {
    static constexpr std::array<const char*, kAllParts.size()> kMeanings = {
        "blocks that applications have",
        "freed by its owner, still in use on the GPU",
        "holes beside used blocks: cannot be given back",
        "segments without a block: given back on demand",
        "of remote sessions, from before the daemon was started",
        "kept by the daemon for reuse: of no session",
        "of who is gone: charged to no session, not yet usable",
        "not reserved of the limit (rows), of the capacity (devices)"};
    lines.push_back({{"  "},
                     {Glyph(part, utf8), StyleOf(part)},
                     {absl::StrCat("  ", Fit(PartName(part), 22), kMeanings[static_cast<size_t>(part)])}});
  }
  for (const char* text :
       {"", "FRAG is fragmented / held: what no trim gives back. A session has a row for each device in use.",
        "Any key: back"}) {
    lines.push_back(Text(text));
  }
  return lines;
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
  data_ = data;
  Refresh();
}

void TopView::Refresh() {
  const size_t before = SelectedIndex();
  rows_ = RowsOf(data_.overview.sessions, options_.user_name);
  AddClaims(rows_, data_.claims, options_.user_name);
  Filter(rows_, filter_);
  Sort(rows_, sort_, reverse_);
  GroupByClaim(rows_, collapsed_);
  const bool is_there =
      std::any_of(rows_.begin(), rows_.end(), [this](const TopRow& row) { return row.key().IsOfSame(selected_); });
  Select(static_cast<int64_t>(is_there ? SelectedIndex() : before));  // else who took its place
}

size_t TopView::SelectedIndex() const {
  auto found = std::find_if(rows_.begin(), rows_.end(), [this](const TopRow& row) { return row.key() == selected_; });
  if (found == rows_.end()) {  // it may have begun to use another device
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
  const size_t index = SelectedIndex();
  if (index < rows_.size() && rows_[index].is_claim()) {
    Say(absl::StrCat("A claim is selected, no session. To change it: vramctl claim set ", rows_[index].claim),
        Style::kAlarm);
    return;
  }
  const auto& sessions = data_.overview.sessions.sessions();
  const auto session = std::find_if(sessions.begin(), sessions.end(), [&](const v1::Session& each) {
    return index < rows_.size() && each.id() == rows_[index].session;
  });
  if (session == sessions.end()) {
    Say("No session is selected.", Style::kAlarm);
  } else if (session->state() == v1::SESSION_STATE_ENDED) {
    Say(absl::StrCat("Nothing to do: ", SessionTitle(*session), " has ended."), Style::kAlarm);
  } else {
    notice_ = {};
    question_.emplace(kind, *session);
  }
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
    helps_ = false;
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
    default:
      for (const ActionKey& action : kActionKeys) {
        if (key != action.key) continue;
        Ask(action.kind);
        return true;
      }
      for (const SortKey& sort : kSortKeys) {
        if (key != sort.key) continue;
        sort_ = sort.column;
        reverse_ = false;
      }
  }
  Refresh();
  return true;
}

Line TopView::TitleLine() const {
  const Overview& overview = data_.overview;
  uint64_t waiting = 0;
  for (const v1::Session& session : overview.sessions.sessions()) {
    for (const v1::SessionDevice& device : session.devices()) {
      waiting += static_cast<uint64_t>(device.waiting_size());
    }
  }
  if (NothingRead()) return Text("vrambrokerd", Style::kTitle);
  const int sessions = overview.sessions.sessions_size();
  const auto claims = static_cast<uint64_t>(data_.claims.claims_size());
  Line line = {{absl::StrCat("vrambrokerd ", Printable(overview.devices.daemon_version())), Style::kTitle},
               {absl::StrCat("  ", Clock(data_.read_at, options_.time_zone), "  ", sessions,
                             sessions == 1 ? " session" : " sessions", ", ",
                             claims == 0 ? "" : absl::StrCat(Counted(claims, "claim"), ", "), waiting,
                             waiting == 1 ? " request waits" : " requests wait", "; sorted by ", ColumnName(sort_),
                             reverse_ ? ", reversed" : "")}};
  if (!filter_.empty()) line.push_back({absl::StrCat("; only *", filter_, "*")});
  if (frozen_) line.push_back({"  FROZEN", Style::kAlarm});
  return line;
}

std::vector<Line> TopView::Head(int most_lines, int columns) const {
  std::vector<Line> lines = {TitleLine()};
  if (!data_.status.ok()) {
    lines.push_back(Text(absl::StrCat(absl::IsDeadlineExceeded(data_.status) ? "no answer since " : "no daemon since ",
                                      Clock(data_.failing_since, options_.time_zone), "; trying again. ",
                                      Printable(data_.status.message())),
                         Style::kAlarm));
  }
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
    Line line = {{absl::StrCat("device ", device.ordinal(), " "), Style::kTitle}};
    const std::string label =
        absl::StrCat("  ", FormatBytes(FreeBytes(device)), " free of ", FormatBytes(device.capacity_bytes()), ", ",
                     FormatBytes(device.reserved_bytes()), " reserved, FRAG ", Percent(FragmentedShare(parts)),
                     "  ", Printable(device.name()));
    Append(line,
           Bar(parts, std::max(kLeastBar, columns - Cells(line) - std::min(Cells(label), columns / 2)), options_.utf8));
    line.push_back({label});
    lines.push_back(std::move(line));
    if (!device.fault().empty()) {
      lines.push_back(Text(absl::StrCat("  cannot be used: ", Printable(device.fault())), Style::kAlarm));
    }
    if (has_figures) lines.push_back(Figures(parts, options_.utf8));
  }
  return lines;
}

Line TopView::SelectedLine() const {
  const size_t index = SelectedIndex();
  if (index >= rows_.size()) return Text("");
  const TopRow& row = rows_[index];
  std::string what = row.is_claim()      ? " (claim)"
                     : row.claim.empty() ? absl::StrCat(" (id ", row.session, ")")
                                         : absl::StrCat(" (id ", row.session, ", claim ", row.claim, ")");
  Line line = {{row.name, Style::kTitle},
               {absl::StrCat(what, " on device ", row.device, ": ", row.ooms, row.ooms == 1 ? " refusal" : " refusals",
                             row.waiting_bytes == 0 ? "" : absl::StrCat(", waits for ", row.waits_for))}};
  Append(line, Figures(row.parts, options_.utf8));
  return line;
}

Line TopView::RefusalLine() const {
  const v1::ListOutOfMemoryResponse& refusals = data_.refusals;
  if (refusals.events().empty()) return NothingRead() ? Text("") : Text("no request was refused", Style::kDim);
  const v1::OutOfMemoryEvent& event = refusals.events(0);
  const OutOfMemory oom = client_internal::FromProto(event.out_of_memory());
  return Text(absl::StrCat(refusals.total_events(), refusals.total_events() == 1 ? " refusal" : " refusals", ", last ",
                           Clock(absl::FromUnixSeconds(event.time().seconds()), options_.time_zone), " ",
                           Printable(event.client()), " wanted ", FormatBytes(oom.requested_bytes), " on device ",
                           oom.device, ": ", absl::AsciiStrToLower(OutOfMemoryCauseName(oom.cause)), ". ",
                           Printable(oom.advice)));
}

Line TopView::KeysLine(int columns) const {
  if (edits_filter_)
    return Text(absl::StrCat("name contains: ", filter_, "_   (Enter: keep, Esc: all)"), Style::kHeading);
  std::string keys;
  for (const char* key : {"h help", "q quit", "L limit", "T trim", "E end", "P priority", "arrows select", "c claim",
                          "< > sort", "R reverse", "/ filter", "space freeze"}) {
    if (key[0] == 'c' && data_.claims.claims().empty()) continue;
    const std::string more = absl::StrCat(keys.empty() ? "" : "  ", key);
    if (Cells(keys) + Cells(more) > columns) break;
    keys += more;
  }
  return Text(keys, Style::kHeading);
}

std::vector<Line> TopView::Notice(int columns) const {
  if (question_.has_value()) return question_->Lines(columns);
  std::vector<Line> lines;
  if (notice_.text.empty()) return lines;
  for (std::string& part : Wrap(notice_.text, columns)) lines.push_back({Span{std::move(part), notice_.style}});
  return lines;
}

std::vector<Line> TopView::Foot(int rows, int columns) const {
  // All of a question or an answer is to be seen, if need be instead of the table.
  std::vector<Line> foot = Notice(columns);
  const auto most = static_cast<size_t>(std::max(rows, 1));
  if (foot.size() > most) foot.erase(foot.begin() + static_cast<int>(most) - 1, foot.end() - 1);
  const size_t room = std::max(foot.size(), static_cast<size_t>(std::max(rows - kLeastTableLines, 0)));
  if (!question_.has_value() && foot.size() < room) foot.push_back(KeysLine(columns));
  if (foot.size() < room) foot.insert(foot.begin(), RefusalLine());
  if (foot.size() < room) foot.insert(foot.begin(), SelectedLine());
  return foot;
}

std::vector<Line> TopView::TableLines(int lines, int columns) {
  page_ = static_cast<size_t>(std::max(lines - 1, 1));
  const size_t selected = SelectedIndex();
  first_ = std::min(first_, rows_.size() > page_ ? rows_.size() - page_ : 0);
  if (selected < first_) first_ = selected;
  if (selected >= first_ + page_) first_ = selected + 1 - page_;
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

std::vector<Line> TopView::Draw(int rows, int columns) {
  std::vector<Line> lines;
  if (helps_) {
    lines = HelpLines(options_.utf8);
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
  lines.push_back(RefusalLine());
  std::string text;
  for (Line& line : lines) {
    std::string one = Render(Clip(std::move(line), columns), /*colour=*/false);
    absl::StripTrailingAsciiWhitespace(&one);
    absl::StrAppend(&text, one, "\n");
  }
  return text;
}

}  // namespace vrambroker::vramctl
