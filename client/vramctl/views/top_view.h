// SPDX-License-Identifier: Apache-2.0
//
// What vramctl top shows, as lines: its state, what keys do to it, and the picture. Pure: no terminal, no daemon.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_VIEWS_TOP_VIEW_H_
#define VRAMBROKER_CLIENT_VRAMCTL_VIEWS_TOP_VIEW_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/vramctl/views/bars.h"
#include "client/vramctl/views/overview.h"
#include "client/vramctl/views/session_change.h"
#include "client/vramctl/views/top_details.h"
#include "client/vramctl/views/top_question.h"
#include "client/vramctl/views/top_scroll.h"
#include "client/vramctl/views/top_table.h"

namespace vrambroker::vramctl {

// What the daemon said last.
struct TopData {
  Overview overview;
  v1::ListClaimsResponse claims;
  v1::ListOutOfMemoryResponse refusals;  // the last one
  absl::Time read_at;
  absl::Status status;       // of the last attempt; the rest is what was read before
  absl::Time failing_since;  // while `status` is not OK
};

// A key: what it writes, or one of these.
enum Key : int {
  kKeyUp = 0x110000,  // beyond all characters
  kKeyDown,
  kKeyPageUp,
  kKeyPageDown,
  kKeyHome,
  kKeyEnd,
  kKeyEnter,
  kKeyEscape,
  kKeyBackspace,
  kKeyHelp,
  kKeyQuit,
  kKeyOther,
};

class TopView {
 public:
  struct Options {
    Column sort = Column::kReserved;
    bool utf8 = false;
    std::function<std::string(uint32_t uid)> user_name;
    absl::TimeZone time_zone = absl::LocalTimeZone();
  };
  explicit TopView(Options options) : options_(std::move(options)) {}

  // Ignored while frozen, but for its status: a picture that stands still says so when the daemon goes. A question
  // about a session that has ended ends, too.
  void SetData(const TopData& data);

  // False: quit.
  bool HandleKey(int key);

  // What the user has confirmed, once; nullopt: nothing. No other question comes up before SetResult() said what came
  // of it.
  std::optional<SessionOrder> TakeOrder();
  void SetResult(const absl::StatusOr<std::vector<std::string>>& lines);

  // What the open details have to be asked of the daemon; nullopt: none are open.
  std::optional<DetailsRequest> WantedDetails() const;
  void SetDetails(DetailsData data);

  // Exactly `rows` lines of at most `columns` cells.
  std::vector<Line> Draw(int rows, int columns);
  // All devices and sessions as plain text, without what is for people at a keyboard.
  std::string Write(int columns);

 private:
  bool NothingRead() const { return data_.read_at == absl::Time(); }  // the daemon has never answered
  std::vector<Line> Head(int most_lines, int columns) const;
  Line TitleLine(int columns) const;
  void AppendStatus(std::vector<Line>& lines, int columns) const;  // where the daemon does not answer
  Line SelectedLine(int columns) const;
  Line RefusalLine(int columns) const;
  Line KeysLine(int columns) const;
  Line DetailsKeysLine(int columns) const;
  std::vector<Line> Notice(int columns) const;  // the question, or else what came of the last one; may be empty
  std::vector<Line> Foot(int rows, int columns) const;
  void Ask(TopQuestion::Kind kind);
  bool AskForKey(int key);  // false: it is the key of no change
  void OpenDetails();       // of what is selected
  void HandleDetailsKey(int key);
  void AnswerQuestion(int key);
  void Say(std::string text, Style style);
  std::vector<Line> TableLines(int lines, int columns);
  std::vector<Line> DetailsLines(int rows, int columns);
  std::vector<Line> HelpScreen(int rows);
  void CollapseSelected();  // its claim, or expands it
  void CollapseAll();       // claims, or expands them where all are
  void Refresh();           // rows_ from data_, as sort and filter want them
  size_t SelectedIndex() const;
  const v1::Session* SelectedSession() const;  // null: none, or a claim
  std::string SelectedClaim() const;           // empty: none, or a session
  void Select(int64_t index);
  void EditFilter(int key);

  const Options options_;
  TopData data_;
  std::vector<TopRow> rows_;
  Column sort_ = options_.sort;
  bool reverse_ = false;
  std::string filter_;
  bool edits_filter_ = false;
  bool frozen_ = false;
  bool helps_ = false;
  Scroll help_scroll_;
  std::unique_ptr<TopDetails> details_;  // open
  std::set<std::string> collapsed_;      // claims whose sessions are not shown
  TopRow::Key selected_;                 // it stays selected wherever it goes
  std::optional<TopQuestion> question_;  // open
  std::optional<SessionOrder> order_;    // confirmed; until its result is there
  bool order_is_new_ = false;            // TakeOrder() has not had it
  Span notice_;                          // stays until Escape or the next question; empty: none
  size_t first_ = 0;                     // row at the top of the table
  size_t page_ = 1;                      // rows that fit
  bool shows_all_ = true;                // no row is out of sight
};

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_TOP_VIEW_H_
